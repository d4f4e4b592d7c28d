"""The form of a case, and the few words that all of them share: structs with shardings,
and constraints.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec as P


AnyMesh = Mesh | AbstractMesh
# A jitted function and the structs that it is called with.
Made = tuple[Any, tuple[Any, ...]]


@dataclasses.dataclass(frozen=True)
class Case:
    """A program under one plan: `make(mesh)` gives the jitted function and its
    arguments' structs.

    `cpu` and `v5e` are the mesh shapes, in order, on at most 8 CPU devices and on the
    16 chips of v5e:4x4.
    """

    name: str
    make: Callable[[AnyMesh], Made]
    cpu: Mapping[str, int]
    v5e: Mapping[str, int]


def case(
    name: str, *, cpu: Mapping[str, int], v5e: Mapping[str, int] | None = None
) -> Callable[[Callable[[AnyMesh], Made]], Case]:
    """Makes the decorated function the `make` of a case."""
    return lambda make: Case(name, make, cpu, v5e or cpu)


def on(mesh: AnyMesh) -> Callable[..., jax.ShapeDtypeStruct]:
    """`at(shape, *spec, dtype=...)`: a struct on `mesh`."""

    def at(shape: tuple[int, ...], *spec, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, P(*spec))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    return at


def constrain(mesh: AnyMesh, x: Any, *spec: Any) -> Any:
    """A sharding constraint."""
    sharding = NamedSharding(mesh, P(*spec))
    return jax.lax.with_sharding_constraint(x, sharding)


def fully_sharded(mesh: AnyMesh, tree: Any, axes: Any, least: int = 1024) -> Any:
    """The tree's structs, each cut over `axes` in its largest dimension that they
    divide, small leaves whole.
    """
    names = axes
    if isinstance(axes, str):
        names = (axes,)
    axis_sizes = [mesh.shape[name] for name in names]
    count = math.prod(axis_sizes)

    def place(leaf) -> jax.ShapeDtypeStruct:
        spec: list[Any] = [None] * len(leaf.shape)
        fitting = [dim for dim, size in enumerate(leaf.shape) if size % count == 0]
        if fitting and math.prod(leaf.shape) >= least:
            largest_dim = max(fitting, key=leaf.shape.__getitem__)
            spec[largest_dim] = axes
        sharding = NamedSharding(mesh, P(*spec))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(place, tree)


def optimizer_state(
    mesh: AnyMesh, optimizer: optax.GradientTransformation, params: Any
) -> Any:
    """The structs of the optimizer's state: as the parameter where there is one of its
    shape, else whole.
    """
    whole = NamedSharding(mesh, P())

    def like(leaf, param) -> jax.ShapeDtypeStruct:
        sharding = whole
        if leaf.shape == param.shape:
            sharding = param.sharding
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    def alone(leaf) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole)

    state = jax.eval_shape(optimizer.init, params)
    return optax.tree.map_params(
        optimizer, like, state, params, transform_non_params=alone
    )


def shardings(tree: Any) -> Any:
    """The shardings of the structs, as `out_shardings` takes them."""
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


def other_mesh(mesh: AnyMesh, sizes: Mapping[str, int]) -> AnyMesh:
    """The same devices under other axes."""
    names = tuple(sizes)
    shape = tuple(sizes.values())
    automatic = (AxisType.Auto,) * len(sizes)
    if isinstance(mesh, AbstractMesh):
        return AbstractMesh(shape, names, axis_types=automatic)
    devices = mesh.devices.reshape(shape)
    return Mesh(devices, names, axis_types=automatic)

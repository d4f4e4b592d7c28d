"""Random arguments for a step, and arguments of the smallest sizes that are sharded in
the same way.
"""

import functools as ft
import itertools as it
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding
from jax.typing import ArrayLike
from jaxtyping import PyTree

from .._ground.errors import MeshError
from .._ground.spec import shard_counts
from ..topology import MeshSpec


# The errors of a step that does not accept arrays of other sizes.
_REFUSED = (TypeError, ValueError, AssertionError, IndexError, ZeroDivisionError)


def made(args: object, *, mild: bool) -> PyTree:
    """The arguments of a step with each `jax.ShapeDtypeStruct` replaced by a random
    array on JAX's devices.

    With `mild`, floats are positive and integers are 0 or 1. Some steps fail with other
    numbers: the second moments of an optimizer are not negative, and a token is in the
    vocabulary.
    """
    leaves, structure = jax.tree.flatten(args)
    shaped = [
        leaf for leaf in leaves if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)
    ]
    tables = [
        leaf.shape[0]
        for leaf in shaped
        if leaf.ndim == 2 and jnp.issubdtype(leaf.dtype, np.floating)
    ]
    high = 2 if mild else max(tables, default=2)

    def array(seed: int, leaf: object) -> Any:
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        return jax.device_put(
            _random(leaf, seed, high, mild), _on_devices(leaf.sharding)
        )

    return structure.unflatten(it.starmap(array, enumerate(leaves)))


def _random(leaf: jax.ShapeDtypeStruct, seed: int, high: int, mild: bool) -> ArrayLike:
    shape = leaf.shape
    dtype = leaf.dtype
    generator = np.random.default_rng(seed)
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(seed), math.prod(shape)).reshape(shape)
    if dtype == np.uint32 and shape[-1:] == (2,):
        return generator.integers(0, 2**32, shape, np.uint32)  # a raw PRNG key
    if np.dtype(dtype).kind == "b":
        return generator.random(shape) < 0.5
    if jnp.issubdtype(dtype, np.integer):
        return (generator.integers(0, high, shape) if shape else np.ones(shape)).astype(
            dtype
        )
    numbers = generator.standard_normal(shape) / math.sqrt(max(shape[-2:-1], default=1))
    return np.asarray(np.abs(numbers) if mild else numbers).astype(dtype)


def _on_devices(sharding: object) -> Any:
    """`sharding` itself; for a sharding on an AbstractMesh, the same sharding on a mesh
    of JAX's devices.
    """
    if not isinstance(sharding, NamedSharding) or not isinstance(
        sharding.mesh, AbstractMesh
    ):
        return sharding
    mesh = MeshSpec.of(sharding.mesh)
    devices = jax.devices()
    if mesh.size > len(devices):
        raise MeshError(
            f"the plan is for {mesh.size} devices, and {len(devices)} are here; emulate"
            " them before JAX starts, `jax.config.update('jax_num_cpu_devices',"
            f" {mesh.size})`, or check a plan on a smaller mesh."
        )
    return NamedSharding(mesh.build(devices[: mesh.size]), sharding.spec)


def shrunk(step: Callable[..., object], args: Sequence[PyTree]) -> Sequence[PyTree]:
    """The arguments of `step` with smaller dimensions, as `jax.ShapeDtypeStruct`s with
    the same shardings.

    Dimensions of equal size get one new size. A size is reduced by itself or together
    with its multiples. If the step cannot be traced with the new size, each dimension
    of that size is reduced separately. This helps if a sequence is as long as a model
    is wide. A size that the step fixes, such as the number of heads, does not change.
    """
    needs: dict[Key, int] = {}
    for number, arg in enumerate(args):
        for leaf in jax.tree.leaves(arg):
            is_array = isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)
            shape, sharding = (leaf.shape, leaf.sharding) if is_array else ((), None)
            is_cut = isinstance(sharding, NamedSharding)
            counts = (
                shard_counts(sharding.spec, len(shape), sharding.mesh.shape)
                if is_cut
                else [1] * len(shape)
            )
            for dim, (size, count) in enumerate(zip(shape, counts, strict=True)):
                for key in (size,), (size, number, dim):
                    needs[key] = math.lcm(needs.get(key, 1), count)
    chosen: dict[Key, int] = {}
    for key in sorted(needs, key=lambda key: (len(key), -key[0])):
        if (key[0],) not in chosen:
            chosen |= _smaller(step, args, needs, chosen, key)
    return _resized(args, chosen)


# `(size,)` stands for all dimensions of this size, `(size, argument, dimension)` for
# one dimension.
Key = tuple[int, ...]
_FACTORS = (1, 2, 3, 5, 7, *(2**power for power in range(2, 16)))


def _smaller(
    step: Any,
    args: PyTree,
    needs: Mapping[Key, int],
    chosen: Mapping[Key, int],
    key: Key,
) -> dict[Key, int]:
    """A smaller size for the dimensions that `key` selects, with which `step` can still
    be traced; empty if there is none.

    The result also has new sizes for multiples of the old size, if `step` can be traced
    only when these are reduced too. Unequal sizes get unequal new sizes. `needs` has by
    key a divisor of each new size, so that the shardings still divide the dimensions.
    `chosen` has the sizes that were reduced before.
    """

    def is_taken(chosen: Mapping[Key, int]) -> bool:
        try:
            jax.eval_shape(step, *_resized(args, chosen))
        except _REFUSED:
            return False
        return True

    size = key[0]
    for small in (
        2 * factor * needs[key] for factor in _FACTORS if 2 * factor * needs[key] < size
    ):
        kin = {
            one: small * (one[0] // size)
            for one in needs
            if len(one) == 1 and one[0] % size == 0
        }
        for more in [
            {key: small},
            {one: new for one, new in kin.items() if one not in chosen},
        ]:
            if not {*chosen.values()} & {*more.values()} and is_taken(
                {**chosen, **more}
            ):
                return more
    return {}


def _resized(args: Sequence[PyTree], chosen: Mapping[Key, int]) -> list[PyTree]:
    def struct(number: int, leaf: object) -> Any:
        if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            return leaf
        sizes = enumerate(leaf.shape)
        shape = tuple(
            chosen.get((size,), chosen.get((size, number, dim), size))
            for dim, size in sizes
        )
        sharding = leaf.sharding if isinstance(leaf.sharding, NamedSharding) else None
        return (
            leaf
            if shape == leaf.shape
            else jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)
        )

    return [
        jax.tree.map(ft.partial(struct, number), arg) for number, arg in enumerate(args)
    ]

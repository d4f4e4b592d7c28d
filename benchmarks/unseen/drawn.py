"""Training steps whose shardings are drawn: the models of `_zoo`, in two sizes, under
shardings that nobody chose. A seed gives the mesh and the spec of each array.
"""

import random
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

from .._zoo import Model, models, small_models
from ._case import AnyMesh, Case, Made


_MESHES: tuple[Mapping[str, int], ...] = (
    {"a": 16},
    {"a": 4, "b": 4},
    {"a": 2, "b": 8},
    {"a": 8, "b": 2},
    {"a": 2, "b": 2, "c": 4},
)
# The seeds of the steps of which ranges are made, and of those that check them.
_SEEDS = range(2)
_LATER_SEEDS = range(2, 4)
# The part of a parameter's mesh axes that shard it.
_SHARE = 0.6
# A step's arguments: parameters and two moments, then the data.
_STATES = 3


def _spec(draw: random.Random, shape: tuple[int, ...], mesh: Mapping[str, int]) -> P:
    """A spec that shards an array evenly."""
    axes: list[tuple[str, ...]] = [() for _ in shape]
    sizes = list(shape)
    for axis, count in mesh.items():
        dims = [dim for dim, size in enumerate(sizes) if size % count == 0]
        if dims and draw.random() < _SHARE:
            dim = draw.choice(dims)
            axes[dim] = (*axes[dim], axis)
            sizes[dim] //= count
    return P(*axes)


def _of_batch(shape: tuple[int, ...], mesh: Mapping[str, int]) -> P:
    """The spec of data whose examples lie over the first mesh axis, and over the others
    as far as they divide them.
    """
    axes: tuple[str, ...] = ()
    remaining = shape[0]
    for axis, count in mesh.items():
        if remaining % count == 0:
            axes = (*axes, axis)
            remaining //= count
    return P(axes)


def _made(
    model: Callable[[], Model], seed: str, sizes: Mapping[str, int], mesh: AnyMesh
) -> Made:
    """The jitted step, and its arguments on `mesh`."""
    step, *args = model()
    draw = random.Random(f"{seed} specs")
    # Data lies over all axes, or over the first one.
    of_data = sizes if draw.random() < 0.5 else dict(list(sizes.items())[:1])
    specs = jax.tree.map(lambda leaf: _spec(draw, leaf.shape, sizes), args[0])

    def on_mesh(leaf, spec: P) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    states = [jax.tree.map(on_mesh, tree, specs) for tree in args[:_STATES]]
    data = [
        jax.tree.map(lambda leaf: on_mesh(leaf, _of_batch(leaf.shape, of_data)), tree)
        for tree in args[_STATES:]
    ]
    out = tuple(jax.tree.map(lambda leaf: leaf.sharding, tree) for tree in states)
    donated = tuple(range(_STATES)) if draw.random() < 0.5 else ()
    jitted = jax.jit(step, out_shardings=out, donate_argnums=donated)
    return jitted, (*states, *data)


def _case(name: str, model: Callable[[], Model], seed: str) -> Case:
    sizes = random.Random(seed).choice(_MESHES)
    return Case(
        name=name,
        make=lambda mesh: _made(model, seed, sizes, mesh),
        cpu=sizes,
        v5e=sizes,
    )


def _cases(
    kind: str, models_by_name: Mapping[str, Callable[[], Model]], seeds: range
) -> tuple[Case, ...]:
    cases = []
    for name, model in models_by_name.items():
        for seed in seeds:
            title = f"{kind} {name} {seed}"
            cases.append(_case(title, model, title))
    return tuple(cases)


CASES = (
    *_cases("small", small_models(), _SEEDS),
    *_cases("bfloat16", models(jnp.bfloat16), _SEEDS),
)
LATER = _cases("small", small_models(), _LATER_SEEDS)

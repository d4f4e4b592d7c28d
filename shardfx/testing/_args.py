"""Small real arguments for a step: random ones for structs, and sizes as small as the plan still cuts them alike."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding

from .._ground.errors import MeshError
from .._ground.spec import shard_counts
from ..topology._mesh import MeshSpec


# What a step raises that does not take arrays of other sizes.
_REFUSED = (TypeError, ValueError, AssertionError, IndexError, ZeroDivisionError)


def has_structs(args: Any) -> bool:
    """Whether there are arguments to make."""
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(args))


def made(args: Any, *, mild: bool) -> Any:
    """The arguments with random arrays in the place of structs, on the devices that are there.

    **Arguments:**

    - `args`: in any trees.
    - `mild`: floats above zero, and whole numbers below 2, for steps that make no numbers of others: an optimizer's
        second moments are not negative, and a token is in the vocabulary.
    """
    leaves = jax.tree.leaves(args)
    tables = [leaf.shape[0] for leaf in leaves if _is_float(leaf) and np.ndim(leaf) == 2]
    high = 2 if mild else max(tables, default=2)

    def array(at: int, leaf: Any) -> Any:
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        return jax.device_put(_random(leaf, jax.random.key(at), high, mild), _on_devices(leaf.sharding))

    filled = [array(at, leaf) for at, leaf in enumerate(leaves)]
    return jax.tree.unflatten(jax.tree.structure(args), filled)


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct) and jnp.issubdtype(leaf.dtype, np.floating)


def _random(leaf: jax.ShapeDtypeStruct, key: Any, high: int, mild: bool) -> Any:
    shape, dtype = leaf.shape, leaf.dtype
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return jax.random.split(key, math.prod(shape)).reshape(shape)
    if dtype == np.uint32 and shape[-1:] == (2,):
        return jax.random.bits(key, shape, dtype)  # a key of the old form
    if np.dtype(dtype).kind == "b":
        return jax.random.bernoulli(key, 0.5, shape)
    if jnp.issubdtype(dtype, np.integer):
        return jax.random.randint(key, shape, 0, high).astype(dtype) if shape else jnp.ones(shape, dtype)
    numbers = jax.random.normal(key, shape) / math.sqrt(max(shape[-2:-1], default=1))
    return (jnp.abs(numbers) if mild else numbers).astype(dtype)


def _on_devices(sharding: Any) -> Any:
    """A sharding on devices that are there."""
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, AbstractMesh):
        return sharding
    mesh, devices = MeshSpec.of(sharding.mesh), jax.devices()
    if mesh.size > len(devices):
        raise MeshError(
            f"the plan is for {mesh.size} devices, and {len(devices)} are here; emulate them before JAX starts, "
            f"`jax.config.update('jax_num_cpu_devices', {mesh.size})`, or check a plan on a smaller mesh."
        )
    return NamedSharding(mesh.build(devices[: mesh.size]), sharding.spec)


def shrunk(step: Callable[..., Any], args: Sequence[Any]) -> Sequence[Any]:
    """The arguments in sizes as small as their shardings still cut them alike, where the step takes such sizes.

    Dimensions of one size stay of one size. One after the other is made small, or with its multiples, and stays as it
    is where the step cannot be traced so: what a step knows by heart, as the size of a head, is whole.
    """
    needs: dict[int, int] = {}
    for leaf in jax.tree.leaves(args):
        is_array = isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)
        shape, sharding = (leaf.shape, leaf.sharding) if is_array else ((), None)
        is_cut = isinstance(sharding, NamedSharding)
        counts = shard_counts(sharding.spec, len(shape), sharding.mesh.shape) if is_cut else [1] * len(shape)
        for size, count in zip(shape, counts, strict=True):
            needs[size] = math.lcm(needs.get(size, 1), count)
    chosen: dict[int, int] = {}
    for size in sorted(needs, reverse=True):
        for factor in (1, 2, 3):  # so that sizes that differ go on to differ
            small = 2 * factor * needs[size]
            kin = {one: small * (one // size) for one in needs if one % size == 0 and one not in chosen}
            trials = [{size: small}, kin]
            found = next((one for one in trials if size > small and _is_taken(step, args, chosen, one)), None)
            if found is not None:
                chosen |= found
                break
    return _resized(args, chosen)


def _is_taken(step: Any, args: Any, chosen: Mapping[int, int], more: Mapping[int, int]) -> bool:
    if {*chosen.values()} & {*more.values()} - {*more}:
        return False
    try:
        jax.eval_shape(step, *_resized(args, {**chosen, **more}))
    except _REFUSED:
        return False
    return True


def _resized(args: Any, sizes: Mapping[int, int]) -> Any:
    def struct(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            return leaf
        shape = tuple(sizes.get(size, size) for size in leaf.shape)
        sharding = leaf.sharding if isinstance(leaf.sharding, NamedSharding) else None
        return leaf if shape == leaf.shape else jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(struct, args)

"""Random arguments for a step, and arguments of the smallest sizes that are sharded in
the same way.
"""

import functools as ft
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding
from jax.typing import ArrayLike
from jaxtyping import PyTree

from .._ground.errors import LeafTypeError, MeshError
from .._ground.keys import is_key
from .._ground.spec import shard_counts
from .._step import without_compiler_options
from ..topology import MeshSpec


# The errors of a step that does not accept arrays of other sizes.
_REFUSED = (TypeError, ValueError, AssertionError, IndexError, ZeroDivisionError)
# The kinds of PRNG keys that JAX has.
_KINDS_OF_KEYS = ("threefry2x32", "rbg", "unsafe_rbg")


def with_arrays(args: object, *, mild: bool) -> PyTree:
    """The arguments of a step with each `jax.ShapeDtypeStruct` replaced by a random
    array on JAX's devices.

    With `mild`, floats are positive and integers are 0 or 1. Some steps fail with other
    numbers: the second moments of an optimizer are not negative, and a token is in the
    vocabulary.
    """
    leaves, structure = jax.tree.flatten(args)
    # Integers may be indices into a table, as tokens are.
    table_lengths = []
    for leaf in leaves:
        if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            if leaf.ndim == 2 and jnp.issubdtype(leaf.dtype, np.floating):
                table_lengths.append(leaf.shape[0])
    integer_bound = 2 if mild else max(table_lengths, default=2)

    new_leaves = []
    for seed, leaf in enumerate(leaves):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            sharding = _on_devices(leaf.sharding)
            leaf = jax.device_put(_random(leaf, seed, integer_bound, mild), sharding)
        new_leaves.append(leaf)
    return structure.unflatten(new_leaves)


def _random(
    leaf: jax.ShapeDtypeStruct,
    seed: int,
    integer_bound: int,
    mild: bool,
) -> ArrayLike:
    """Random numbers of a struct's shape and dtype, which `seed` decides. Integers are
    below `integer_bound`. With `mild`, floats are positive.
    """
    shape = leaf.shape
    dtype = leaf.dtype
    generator = np.random.default_rng(seed)
    if is_key(dtype):
        return jax.random.split(_key(dtype, seed), math.prod(shape)).reshape(shape)
    if dtype == np.uint32 and shape[-1:] == (2,):
        return generator.integers(0, 2**32, shape, np.uint32)  # a raw PRNG key
    if np.dtype(dtype).kind == "b":
        return generator.random(shape) < 0.5
    if jnp.issubdtype(dtype, np.integer):
        if not shape:
            # Such as a count of steps, by which a step may divide.
            return np.ones(shape, dtype)
        return generator.integers(0, integer_bound, shape).astype(dtype)
    # The numbers of a matrix are so small that its products are about 1.
    numbers = generator.standard_normal(shape) / math.sqrt(max(shape[-2:-1], default=1))
    if mild:
        numbers = np.abs(numbers)
    return np.asarray(numbers).astype(dtype)


def _key(dtype: Any, seed: int) -> jax.Array:
    """A PRNG key of this dtype, which says JAX's kind of keys."""
    for kind in _KINDS_OF_KEYS:
        key = jax.random.key(seed, impl=kind)
        if key.dtype == dtype:
            return key
    raise LeafTypeError(
        f"a struct of {dtype} has no values, and JAX has no such kind of keys; pass keys:"
        " `jax.random.split(key, count)`."
    )


def _on_devices(sharding: object) -> Any:
    """`sharding` itself; for a sharding on an AbstractMesh, the same sharding on a mesh
    of JAX's devices.
    """
    if not isinstance(sharding, NamedSharding):
        return sharding
    if not isinstance(sharding.mesh, AbstractMesh):
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
    step = without_compiler_options(step)
    # The number that must divide a new size, by `(size,)` for all dimensions of a size,
    # and by `(size, argument, dimension)` for one of them.
    divisor_by_key: dict[Key, int] = {}
    for argument_number, arg in enumerate(args):
        for leaf in jax.tree.leaves(arg):
            if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
                continue
            counts = [1] * leaf.ndim
            sharding = leaf.sharding
            if isinstance(sharding, NamedSharding):
                counts = shard_counts(sharding.spec, leaf.ndim, sharding.mesh.shape)
            # Smaller sizes must still be multiples of the numbers of shards.
            for dim, (size, count) in enumerate(zip(leaf.shape, counts, strict=True)):
                for key in (size,), (size, argument_number, dim):
                    divisor_by_key[key] = math.lcm(divisor_by_key.get(key, 1), count)

    # The keys of all dimensions of a size come first, the largest size before others,
    # and then the keys of single dimensions.
    new_sizes: dict[Key, int] = {}
    for key in sorted(divisor_by_key, key=lambda key: (len(key), -key[0])):
        size = key[0]
        if (size,) not in new_sizes:
            new_sizes |= _smaller(
                step=step,
                args=args,
                divisor_by_key=divisor_by_key,
                reduced=new_sizes,
                key=key,
            )
    return _resized(args, new_sizes)


# `(size,)` stands for all dimensions of this size, `(size, argument, dimension)` for
# one dimension.
Key = tuple[int, ...]
_FACTORS = (1, 2, 3, 5, 7, *(2**power for power in range(2, 16)))


def _smaller(
    step: Any,
    args: PyTree,
    divisor_by_key: Mapping[Key, int],
    reduced: Mapping[Key, int],
    key: Key,
) -> dict[Key, int]:
    """A smaller size for the dimensions that `key` selects, with which `step` can still
    be traced; empty if there is none.

    The result also has new sizes for multiples of the old size, if `step` can be traced
    only when these are reduced too. Unequal sizes get unequal new sizes.
    `divisor_by_key` has by key a divisor of each new size, so that the shardings still
    divide the dimensions. `reduced` has the sizes that were reduced before.
    """
    size = key[0]
    # For each multiple of the size that is not reduced yet, its quotient.
    quotients = {}
    for multiple in divisor_by_key:
        if len(multiple) == 1 and multiple[0] % size == 0 and multiple not in reduced:
            quotients[multiple] = multiple[0] // size
    # Small sizes are tried first. Each is a multiple of the divisor.
    for factor in _FACTORS:
        new_size = 2 * factor * divisor_by_key[key]
        if new_size >= size:
            continue
        with_multiples = {
            multiple: new_size * quotient for multiple, quotient in quotients.items()
        }
        for new_sizes in ({key: new_size}, with_multiples):
            # A new size is not one that was given before.
            if not set(reduced.values()).isdisjoint(new_sizes.values()):
                continue
            resized = _resized(args, {**reduced, **new_sizes})
            if _are_apart(args, resized) and _is_accepted(step, resized):
                return new_sizes
    return {}


def _are_apart(args: Sequence[PyTree], resized: Sequence[PyTree]) -> bool:
    """Whether dimensions of `args` with unequal sizes have unequal sizes in `resized`,
    the same arguments with new sizes.
    """
    old_size_by_new: dict[int, int] = {}
    pairs = zip(jax.tree.leaves(args), jax.tree.leaves(resized), strict=True)
    for old, new in pairs:
        if not isinstance(old, jax.Array | jax.ShapeDtypeStruct):
            continue
        for old_size, new_size in zip(old.shape, new.shape, strict=True):
            if old_size_by_new.setdefault(new_size, old_size) != old_size:
                return False
    return True


def _is_accepted(step: Any, args: Sequence[PyTree]) -> bool:
    """Whether `step` can be traced for these arguments."""
    try:
        jax.eval_shape(step, *args)
    except _REFUSED:
        return False
    return True


def _resized(args: Sequence[PyTree], new_sizes: Mapping[Key, int]) -> list[PyTree]:
    """The arguments with `jax.ShapeDtypeStruct`s of new sizes in place of arrays.
    `new_sizes` has a size for all dimensions of an old size, or for one dimension of an
    argument.
    """

    def struct(number: int, leaf: object) -> Any:
        """The struct of an array with its new sizes; any other leaf unchanged."""
        if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            return leaf
        sizes = []
        for dim, size in enumerate(leaf.shape):
            new_size = new_sizes.get((size, number, dim), size)
            sizes.append(new_sizes.get((size,), new_size))
        shape = tuple(sizes)
        if shape == leaf.shape:
            return leaf
        sharding = leaf.sharding if isinstance(leaf.sharding, NamedSharding) else None
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)

    resized = []
    for number, arg in enumerate(args):
        resized.append(jax.tree.map(ft.partial(struct, number), arg))
    return resized

"""Live arrays between shardings over the same devices: one compiled program for all of one kind."""

import functools as ft
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from ..._errors import LeafTypeError, SpecError
from ..._spec import bits
from .choose import NO_MESH, choose, same_order, steps_program, untyped, xla_program
from .program import flat_program
from .redistribute import layout


def move_group(
    xs: Sequence[Any], dst: NamedSharding, *, src: NamedSharding | None = None, donate: bool = False
) -> list[Any]:
    """`move` for several arrays of one shape, dtype and source, each by the same compiled program.

    **Arguments:**

    - `xs`: arrays, all live or all traced, of the same shape and dtype and in the same sharding.
    - `dst`, `src`, `donate`: as for `move`.

    **Returns:**

    The arrays in `dst`, in order.
    """
    if not xs:
        return []
    first = xs[0]
    require_movable(first.dtype)
    run = live_program(first.shape, first.dtype, _source_of(first), dst, donate)
    return [run(x) for x in xs]


def require_movable(dtype: Any) -> None:
    if jnp.issubdtype(dtype, jnp.integer) and bits(dtype) < 4:
        raise LeafTypeError(
            f"arrays of dtype {dtype} cannot be moved: JAX's own jitted reshard corrupts memory with it; "
            "move `x.astype(jnp.int4)` and convert it back."
        )


def _source_of(x: Any) -> NamedSharding:
    if isinstance(x, jax.Array) and isinstance(x.sharding, NamedSharding):
        return x.sharding
    where = x.sharding if isinstance(x, jax.Array) else f"host memory as {type(x).__name__}"
    raise SpecError(
        f"an array of shape {x.shape} lies in {where}, which names no mesh axes; place it first with "
        "`jax.device_put(x, NamedSharding(mesh, spec))`."
    )


def _same(x: Any) -> Any:
    return x


@ft.lru_cache(maxsize=1024)
def live_program(
    shape: tuple[int, ...], dtype: Any, src: NamedSharding, dst: NamedSharding, donate: bool = False
) -> Callable[[jax.Array], jax.Array]:
    """A function that moves live arrays of one shape, dtype and sharding; compiled when it is first called.

    **Arguments:**

    - `shape`, `dtype`, `src`: of the arrays.
    - `dst`: where they shall lie.
    - `donate`: whether the function gives up the buffers of its argument.

    **Returns:**

    A function of one array, cached.
    """
    here, there = untyped(src), untyped(dst)
    choice = choose(shape, dtype, here, there)
    # XLA takes over a buffer only for a result of the same size.
    reuse = donate and here.shard_shape(shape) == there.shard_shape(shape)
    if math.prod(shape) == 0:
        # XLA labels such a result with pieces of the wrong shape.
        step = ft.partial(_empty, shape=shape, dst=dst)
    elif choice.how == "none":
        step = _same
    elif not same_order(here, there):
        like = layout(here.mesh, here.spec, len(shape))
        step = jax.jit(ft.partial(flat_program, src=here, steps=choice.plan.steps, like=like), in_shardings=here)
    else:
        fn = xla_program(dtype, here, there) if choice.how == "xla" else steps_program(shape, dtype, here, there)
        step = jax.jit(fn, in_shardings=here, out_shardings=there, donate_argnums=(0,) if reuse else ())

    def run(x: jax.Array) -> jax.Array:
        given = x
        if x.sharding.memory_kind != here.memory_kind:
            x = jax.device_put(x, NamedSharding(src.mesh, src.spec))
        # Whatever mesh the caller has set, this program is about its own two; and it is one under `disable_jit` too.
        with jax.sharding.use_abstract_mesh(NO_MESH), jax.disable_jit(False):
            y = step(x)
        y = _labelled(y, shape, NamedSharding(dst.mesh, dst.spec))
        if dst.memory_kind != y.sharding.memory_kind:
            y = jax.device_put(y, dst)
        if donate and choice.how != "none" and not given.is_deleted():
            given.delete()
        return y

    return run


def _empty(x: jax.Array, *, shape: tuple[int, ...], dst: NamedSharding) -> jax.Array:
    pieces = [shard.data.reshape(dst.shard_shape(shape)) for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(shape, NamedSharding(dst.mesh, dst.spec), pieces, dtype=x.dtype)


def _labelled(y: jax.Array, shape: tuple[int, ...], dst: NamedSharding) -> jax.Array:
    """`y` under the sharding `dst`, which its pieces already have: only the label changes, and that is checked."""
    if y.sharding == dst and y.shape == shape:
        return y
    pieces = [shard.data for shard in y.addressable_shards]
    # A process that owns no device of the target has no piece that would tell the dtype.
    return jax.make_array_from_single_device_arrays(shape, dst, pieces, dtype=y.dtype)

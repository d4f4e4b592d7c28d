"""Live arrays between shardings over the same devices: the planned steps as one compiled program."""

import functools as ft
from collections.abc import Callable

import jax
from jax.sharding import NamedSharding

from .ends import NO_MESH, labelled, layouts, same_order, untyped
from .program import flat_program, program
from .redistribute import Redistribution


def live_program(
    shape: tuple[int, ...], plan: Redistribution, src: NamedSharding, dst: NamedSharding, *, donate: bool
) -> Callable[[jax.Array], jax.Array]:
    """A function that moves live arrays of one shape and sharding; compiled when it is first called.

    **Arguments:**

    - `shape`: of the arrays.
    - `plan`: the steps from `src` to `dst`, one or more.
    - `src`, `dst`: where the arrays lie and where they shall lie, on the same devices in any order.
    - `donate`: whether the function gives up the buffers of its argument.

    **Returns:**

    A function of one array.
    """
    here, there = untyped(src), untyped(dst)
    planned = {"src": here, "steps": plan.steps, "like": layouts(len(shape), here, there)[0]}
    if same_order(here, there):
        # XLA takes over a buffer only for a result of the same size.
        reuse = (0,) if donate and here.shard_shape(shape) == there.shard_shape(shape) else ()
        fn = ft.partial(program, dst=there, **planned)
        step = jax.jit(fn, in_shardings=here, out_shardings=there, donate_argnums=reuse)
    else:
        step = jax.jit(ft.partial(flat_program, **planned), in_shardings=here)

    def run(x: jax.Array) -> jax.Array:
        given = x
        if x.sharding.memory_kind != here.memory_kind:
            x = jax.device_put(x, NamedSharding(src.mesh, src.spec))
        # Whatever mesh the caller has set, this program is about its own two; and it is one under `disable_jit` too.
        with jax.sharding.use_abstract_mesh(NO_MESH), jax.disable_jit(False):
            y = step(x)
        y = labelled(y, NamedSharding(dst.mesh, dst.spec), shape)
        if dst.memory_kind != y.sharding.memory_kind:
            y = jax.device_put(y, dst)
        if donate and not given.is_deleted():
            given.delete()
        return y

    return run

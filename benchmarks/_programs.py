"""Programs of moves to be compiled and looked at, and how much they send."""

import functools as ft
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding

from shardfx import MeshSpec
from shardfx._ground.spec import bits
from shardfx._reshard.shardings import NO_MESH, layouts, untyped
from shardfx._reshard.steps.programs import program
from shardfx._reshard.steps.redistribution import Redistribution, redistribute
from shardfx.cost import traffic


def planned(
    shape: tuple[int, ...], dtype: Any, src: NamedSharding, dst: NamedSharding
) -> Redistribution:
    """The planner's steps from one sharding to another."""
    return redistribute(
        shape, bits(dtype), *layouts(len(shape), untyped(src), untyped(dst))
    )


def steps_program(
    shape: tuple[int, ...], dtype: Any, src: NamedSharding, dst: NamedSharding
) -> Callable[[Any], Any]:
    """The planned steps as a function to be traced; the meshes list the same devices in
    the same order.
    """
    return program_of(planned(shape, dtype, src, dst), len(shape), src, dst)


def program_of(
    plan: Redistribution, rank: int, src: NamedSharding, dst: NamedSharding
) -> Callable[[Any], Any]:
    """The steps of a plan as a function to be traced, of arrays of `rank` dimensions."""
    src = untyped(src)
    dst = untyped(dst)
    like, _ = layouts(rank, src, dst)
    return ft.partial(
        program,
        src=src,
        dst=dst,
        steps=plan.steps,
        like=like,
    )


def lowered(
    fn: Callable[[Any], Any],
    shape: tuple[int, ...],
    dtype: Any,
    src: NamedSharding,
    dst: NamedSharding,
) -> Any:
    """`fn` lowered for one array that comes in `src` and leaves in `dst`, ready to be
    compiled and looked at.
    """
    struct = jax.ShapeDtypeStruct(shape, dtype, sharding=untyped(src))
    with jax.sharding.use_abstract_mesh(NO_MESH), jax.disable_jit(False):
        return jax.jit(fn, in_shardings=untyped(src), out_shardings=untyped(dst)).lower(
            struct
        )


def wire_bytes(hlo: str, devices: int, slices: int = 1) -> int:
    """Bytes that enter a device over all collectives of a compiled program, the mean
    over devices.

    **Arguments:**

    - `hlo`: the text of an optimized, partitioned module, as by `compiled.as_text()`.
    - `devices`: how many devices run it.
    - `slices`: in how many slices they are, one after another: of several, only bytes
      from another slice count.
    """
    axes = {"slices": slices, "devices": devices // slices}
    mesh = MeshSpec(axes, dcn={"slices": slices})
    sent = traffic(hlo, mesh)
    return sent.dcn_bytes if slices > 1 else sent.wire_bytes

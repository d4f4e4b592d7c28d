"""Changes to a step that would save memory, each with the memory after it."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from .._ground.errors import ProgramError
from .._ground.spec import entries_of, entry_axes
from .._ground.tree import flatten
from .._plan import Request, shard_over
from .._rules import Fsdp
from .._step import Dims, Frame, argument_names, step_of
from ._counted import StepOnChip, saving_constraints


# Changes that save a smaller fraction of the peak are left out.
_WORTH = 0.01
_WIDE = ("f32", "f64")


@dataclasses.dataclass(frozen=True)
class Change:
    """A single change to a step, and the memory that it would save.

    **Arguments:**

    - `what`: the change in words.
    - `saves_bytes`: the bytes by which the change lowers the peak memory of one device.
    - `peak_bytes`: the peak memory of one device after the change.
    - `fits`: whether the step fits the chip after the change.
    - `how`: the change as code.
    - `host_bytes`: the bytes of one device's arrays that the change moves to host
      memory.
    - `sources`: the lines of your program whose arrays get sharding constraints; empty
      for other changes.
    """

    __module__ = "shardfx.cost"

    what: str
    saves_bytes: int
    peak_bytes: int
    fits: bool
    how: str
    host_bytes: int = 0
    sources: tuple[Frame, ...] = ()


class _Trial(NamedTuple):
    """A change to a step: `what` is the change in words, and `how` is its code.
    `peak_bytes` is the estimated peak memory of one device after it. `host_bytes` are
    moved to host memory, and arrays of the lines `sources` get sharding constraints.
    """

    what: str
    peak_bytes: int
    how: str
    host_bytes: int = 0
    sources: tuple[Frame, ...] = ()


def changes_of(known: StepOnChip, peak_bytes: int) -> tuple[Change, ...]:
    """The changes to a step that save memory, the largest saving first. `peak_bytes` is
    the peak memory of the unchanged step, estimated or counted by a compiler.
    """
    found: list[Change] = []
    for one in _changed(known):
        saves = known.memory.peak_bytes - one.peak_bytes
        fits = peak_bytes - saves <= known.chip.usable_hbm_bytes_per_device
        if saves > _WORTH * peak_bytes:
            found.append(
                Change(
                    one.what,
                    saves,
                    peak_bytes - saves,
                    fits,
                    one.how,
                    one.host_bytes,
                    one.sources,
                )
            )
    return tuple(sorted(found, key=lambda one: -one.saves_bytes))


def _changed(known: StepOnChip) -> Iterator[_Trial]:
    dims = [one.dims for one in known.step.arguments]
    used = [
        axis
        for at in known.in_group("batch")
        for axes in dims[at] or ()
        for axis in axes
    ]
    axes = tuple(
        axis for axis in dict.fromkeys(used) if known.step.mesh.axis_size(axis) > 1
    )
    over = ", ".join(f'"{axis}"' for axis in axes)
    over = over if len(axes) == 1 else f"({over})"
    state, ours = known.in_group("optimizer"), known.in_group("parameters")
    cuts = (
        ("ZeRO-1: the optimizer's state", state, "optimizer.init"),
        (
            "ZeRO-3: parameters and the optimizer's state",
            (*ours, *state) if ours else (),
            "lambda tree: tree",
        ),
    )
    for name, chosen, init in cuts if axes else ():
        if (arguments := _sharded_over(known, chosen, axes)) != dims:
            what = f"{name} cut over {' and '.join(axes)} too"
            with contextlib.suppress(
                ProgramError
            ):  # XLA may fail to partition the step for these shardings
                yield _Trial(
                    what,
                    known.under(arguments).peak_bytes,
                    f"follow({init}, params_plan, over={over})",
                )
    yield from _moment_changes(known)
    returned = [at for at, one in enumerate(known.purposes) if one.result is not None]
    if not all(known.step.arguments[at].donated for at in returned):
        donated = [
            one.donated or at in returned for at, one in enumerate(known.step.arguments)
        ]
        names = dict.fromkeys(
            known.step.arguments[at].path.partition("/")[0] for at in returned
        )
        quoted = ", ".join(f'"{name}"' for name in names)
        how = f"filter_jit(step, donate={quoted if len(names) == 1 else f'({quoted})'})"
        saved = _foreseen_saving(known, donated=donated)
        after = known.memory.peak_bytes - saved
        yield _Trial("donate what the step returns anew", after, how)
    if axes and (found := saving_constraints(known)) is not None:
        what = f"constrain the activations along {' and '.join(axes)}, as the batch"
        how = "; ".join(
            f"{one.change} for the {one.where}" for one in found.constraints
        )
        lines = tuple(dict.fromkeys(one.line for one in found.constraints if one.line))
        yield _Trial(what, found.peak_bytes, how, 0, lines)
    after = known.memory.peak_bytes - _foreseen_saving(known, remat=True)
    yield _Trial(
        "recompute each layer in the backward pass",
        after,
        "jax.lax.scan(jax.checkpoint(layer), x, layers)",
    )
    batch = batch_of(known)
    if (
        batch is not None
        and batch > 1
        and batch % 2 == 0
        and (half := with_batch(known, batch // 2)) is not None
    ):
        how = f"a batch of {batch // 2}, or a scan over 2 microbatches"
        yield _Trial("half the batch", half.memory.peak_bytes, how)


def _foreseen_saving(known: StepOnChip, **changed: Any) -> int:
    """The bytes that a change saves, by live ranges. `changed` has keyword arguments of
    `StepOnChip.memory_of`.
    """
    after = known.memory_of(known.module, **changed)
    return known.foreseen.peak_bytes - after.peak_bytes


def _sharded_over(
    known: StepOnChip, chosen: Sequence[int], axes: tuple[str, ...]
) -> list[Dims | None]:
    """The sharding of each array of the arguments, after the arrays with the numbers
    `chosen` are also sharded over the mesh axes `axes`, along their largest dimension;
    `None` where the compiler chooses it.
    """
    found = [one.dims for one in known.step.arguments]
    for at in chosen:
        shape = known.step.arguments[at].shape
        spec = jax.P(*(found[at] or ((),) * len(shape)))
        asked = Request(None, spec, None, None, (), ())
        wide = (
            shard_over(asked, shape, np.float32, known.step.mesh, Fsdp(axes)).spec
            if shape
            else spec
        )
        dims = [entry_axes(entry) for entry in entries_of(wide)]
        found[at] = (*dims, *((),) * (len(shape) - len(dims)))
    return found


def _moment_changes(known: StepOnChip) -> Iterator[_Trial]:
    """Yields two changes: the optimizer's state in bfloat16, and in host memory."""
    memory, found = known.memory, known.purposes
    moments = [
        at
        for at in known.in_group("optimizer")
        if found[at].argument.shape and not found[at].argument.on_host
    ]

    def sizes(at: int) -> int:
        result = found[at].result
        own = memory.arguments[at]
        return own if result is None else own + known.foreseen.results[result]

    wide = [at for at in moments if found[at].dtype in _WIDE]
    if wide:
        less = sum(
            sizes(at) - sizes(at) * 2 // (8 if found[at].dtype == "f64" else 4)
            for at in wide
        )
        how = (
            "optax.scale_by_adam(mu_dtype=jnp.bfloat16), and cast the others in the"
            " step"
        )
        yield _Trial("moments in bfloat16", memory.peak_bytes - less, how)
    if moments:
        # The update of the largest array needs it in the device's memory.
        less = sum(map(sizes, moments)) - max(memory.arguments[at] for at in moments)
        how = (
            'follow(optimizer.init, params_plan, memory_kinds=[(".*", "pinned_host")]);'
            " in the step jax.device_put(state, jax.memory.Space.Device), and .Host for"
            " what it returns"
        )
        here = sum(memory.arguments[at] for at in moments)
        yield _Trial("moments in host memory", memory.peak_bytes - less, how, here)


def batch_of(known: StepOnChip) -> int | None:
    """The number of examples in the batch: the size of its arrays' first dimension.
    `None` if this size differs between the arrays, or if there are none.
    """
    sizes = {known.step.arguments[at].shape[0] for at in known.in_group("batch")}
    return sizes.pop() if len(sizes) == 1 else None


def with_batch(known: StepOnChip, batch: int) -> StepOnChip | None:
    """The step traced with the batch size `batch`; `None` if its function is not known,
    or raises an error for it.
    """
    if known.function is None:
        return None
    ours = {known.step.arguments[at].path for at in known.in_group("batch")}
    args: list[object] = []
    for arg, name in zip(
        known.step.args,
        argument_names(known.function, len(known.step.args)),
        strict=True,
    ):
        flat = flatten(arg)
        leaves = [
            (
                jax.ShapeDtypeStruct(
                    (batch, *leaf.shape[1:]), leaf.dtype, sharding=leaf.sharding
                )
                if "/".join(filter(None, (name, path))) in ours
                else leaf
            )
            for leaf, path in zip(flat.leaves, flat.paths, strict=True)
        ]
        args.append(jax.tree.unflatten(flat.treedef, leaves))
    try:
        other = StepOnChip(
            step_of(known.function, args, known.step.given_mesh),
            known.chip,
            known.function,
        )
        return other if other.memory else None
    except (TypeError, ValueError, ProgramError):
        return None

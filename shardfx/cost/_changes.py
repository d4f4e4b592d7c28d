"""Changes to a step that would save memory, each with the memory after it."""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import NamedTuple

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
_WORTH_SHARE = 0.01
# The bytes of an element of the dtypes that are wider than bfloat16.
_BYTES_OF_WIDE_DTYPE = {"f32": 4, "f64": 8}


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


def changes_of(chip_step: StepOnChip, peak_bytes: int) -> tuple[Change, ...]:
    """The changes to a step that save memory, the largest saving first. `peak_bytes` is
    the peak memory of the unchanged step, estimated or counted by a compiler.
    """
    usable_bytes = chip_step.chip.usable_hbm_bytes_per_device
    changes: list[Change] = []
    for trial in _trials(chip_step):
        saved = chip_step.memory.peak_bytes - trial.peak_bytes
        if saved <= _WORTH_SHARE * peak_bytes:
            continue
        change = Change(
            what=trial.what,
            saves_bytes=saved,
            peak_bytes=peak_bytes - saved,
            fits=peak_bytes - saved <= usable_bytes,
            how=trial.how,
            host_bytes=trial.host_bytes,
            sources=trial.sources,
        )
        changes.append(change)
    return tuple(sorted(changes, key=lambda change: -change.saves_bytes))


def _trials(chip_step: StepOnChip) -> Iterator[_Trial]:
    """Yields every change that can be made to the step, whatever it saves."""
    axes = _batch_axes(chip_step)
    if axes:
        yield from _sharded_states(chip_step, axes)
    yield from _moment_changes(chip_step)
    yield from _donation(chip_step)
    if axes:
        yield from _constrained_activations(chip_step, axes)
    peak_bytes = chip_step.memory.peak_bytes - _saved_by_recomputing(chip_step)
    yield _Trial(
        what="recompute each layer in the backward pass",
        peak_bytes=peak_bytes,
        how="jax.lax.scan(jax.checkpoint(layer), x, layers)",
    )
    yield from _half_batch(chip_step)


def _batch_axes(chip_step: StepOnChip) -> tuple[str, ...]:
    """The mesh axes of more than one device that shard the batch."""
    axes: dict[str, None] = {}
    for number in chip_step.in_group("batch"):
        for dim_axes in chip_step.step.arguments[number].dims or ():
            axes.update(dict.fromkeys(dim_axes))
    return tuple(axis for axis in axes if chip_step.step.mesh.axis_size(axis) > 1)


def _quoted(names: Iterable[str]) -> str:
    """One name as the code of a string, several as that of a tuple."""
    quoted = [f'"{name}"' for name in names]
    if len(quoted) == 1:
        return quoted[0]
    return f"({', '.join(quoted)})"


def _sharded_states(chip_step: StepOnChip, axes: tuple[str, ...]) -> Iterator[_Trial]:
    """Yields ZeRO-1 and ZeRO-3: the optimizer's state, and the parameters too, sharded
    over the axes of the batch. `axes` are these mesh axes.
    """
    parameters = chip_step.in_group("parameters")
    state = chip_step.in_group("optimizer")
    yield from _sharded_state(
        chip_step=chip_step,
        title="ZeRO-1: the optimizer's state",
        numbers=state,
        axes=axes,
        init="optimizer.init",
    )
    if parameters:
        yield from _sharded_state(
            chip_step=chip_step,
            title="ZeRO-3: parameters and the optimizer's state",
            numbers=(*parameters, *state),
            axes=axes,
            init="lambda tree: tree",
        )


def _sharded_state(
    chip_step: StepOnChip,
    title: str,
    numbers: Sequence[int],
    axes: tuple[str, ...],
    init: str,
) -> Iterator[_Trial]:
    """Yields the step with the arguments of these numbers sharded over `axes` too;
    nothing if they are already. `title` begins the change's name, and `init` the first
    argument of `follow` in its code. The numbers are those of the arguments' arrays.
    """
    dims_of_arguments = _sharded_over(chip_step, numbers, axes)
    if dims_of_arguments == [argument.dims for argument in chip_step.step.arguments]:
        return
    # XLA may fail to partition the step for these shardings.
    with contextlib.suppress(ProgramError):
        yield _Trial(
            what=f"{title} cut over {' and '.join(axes)} too",
            peak_bytes=chip_step.under(dims_of_arguments).peak_bytes,
            how=f"follow({init}, params_plan, over={_quoted(axes)})",
        )


def _donation(chip_step: StepOnChip) -> Iterator[_Trial]:
    """Yields the step that donates each argument whose new value it returns: the result
    of number `purpose.result`.
    """
    donated: list[bool] = []
    names: dict[str, None] = {}
    is_all_donated = True
    rows = zip(chip_step.step.arguments, chip_step.purposes, strict=True)
    for argument, purpose in rows:
        is_renewed = purpose.result is not None
        donated.append(argument.donated or is_renewed)
        if is_renewed:
            name, _, _ = argument.path.partition("/")
            names[name] = None
            is_all_donated &= argument.donated
    if is_all_donated:
        return
    how = f"filter_jit(step, donate={_quoted(names)})"
    with contextlib.suppress(ProgramError):
        peak_bytes = chip_step.donating(donated).peak_bytes
        yield _Trial(
            what="donate what the step returns anew", peak_bytes=peak_bytes, how=how
        )


def _constrained_activations(
    chip_step: StepOnChip,
    axes: tuple[str, ...],
) -> Iterator[_Trial]:
    """Yields the step with sharding constraints on its activations. `axes` are the mesh
    axes of the batch.
    """
    saving = saving_constraints(chip_step)
    if saving is None:
        return
    lines: dict[Frame, None] = {}
    texts = []
    for constraint in saving.constraints:
        texts.append(f"{constraint.change} for the {constraint.where}")
        if constraint.line:
            lines[constraint.line] = None
    yield _Trial(
        what=f"constrain the activations along {' and '.join(axes)}, as the batch",
        peak_bytes=saving.peak_bytes,
        how="; ".join(texts),
        sources=tuple(lines),
    )


def _half_batch(chip_step: StepOnChip) -> Iterator[_Trial]:
    """Yields the step with half its batch, if the batch can be halved."""
    batch = batch_of(chip_step)
    if batch is None or batch <= 1 or batch % 2:
        return
    half = with_batch(chip_step, batch // 2)
    if half is not None:
        yield _Trial(
            what="half the batch",
            peak_bytes=half.memory.peak_bytes,
            how=f"a batch of {batch // 2}, or a scan over 2 microbatches",
        )


def _saved_by_recomputing(chip_step: StepOnChip) -> int:
    """The bytes that recomputing each layer in the backward pass saves, by live ranges."""
    memory = chip_step.memory_of(chip_step.module, remat=True)
    return chip_step.foreseen.peak_bytes - memory.peak_bytes


def _sharded_over(
    chip_step: StepOnChip,
    numbers: Sequence[int],
    axes: tuple[str, ...],
) -> list[Dims | None]:
    """The sharding of each array of the arguments, after the arrays with these numbers
    are also sharded over the mesh axes `axes`, along their largest dimension; `None`
    where the compiler chooses it.
    """
    arguments = chip_step.step.arguments
    all_dims = [argument.dims for argument in arguments]
    for number in numbers:
        shape = arguments[number].shape
        unsharded = ((),) * len(shape)
        spec = jax.P(*(all_dims[number] or unsharded))
        if shape:
            request = Request(spec=spec)
            mesh = chip_step.step.mesh
            # The dtype would decide which arrays are too small: none is here.
            spec = shard_over(
                request=request,
                shape=shape,
                dtype=np.float32,
                mesh=mesh,
                over=Fsdp(axes),
            ).spec
        dims = [entry_axes(entry) for entry in entries_of(spec)]
        all_dims[number] = (*dims, *unsharded[len(dims) :])
    return all_dims


def _moment_changes(chip_step: StepOnChip) -> Iterator[_Trial]:
    """Yields two changes: the optimizer's state in bfloat16, and in host memory. The
    `moments` are the numbers of the state's arrays among the arguments' arrays.
    """
    memory = chip_step.memory
    purposes = chip_step.purposes
    moments = []
    for number in chip_step.in_group("optimizer"):
        argument = purposes[number].argument
        if argument.shape and not argument.on_host:
            moments.append(number)
    if not moments:
        return

    def bytes_with_result(number: int) -> int:
        """The bytes of an array of the state, and of its new value."""
        nbytes = memory.arguments[number]
        result = purposes[number].result
        if result is not None:
            nbytes += chip_step.foreseen.results[result]
        return nbytes

    saved_as_bfloat16 = 0
    for number in moments:
        width = _BYTES_OF_WIDE_DTYPE.get(purposes[number].dtype)
        if width is not None:
            nbytes = bytes_with_result(number)
            saved_as_bfloat16 += nbytes - nbytes * 2 // width
    if saved_as_bfloat16:
        yield _Trial(
            what="moments in bfloat16",
            peak_bytes=memory.peak_bytes - saved_as_bfloat16,
            how="optax.scale_by_adam(mu_dtype=jnp.bfloat16), and cast the others in the"
            " step",
        )

    sizes = [memory.arguments[number] for number in moments]
    # The update of the largest array needs it in the device's memory.
    saved_on_host = sum(map(bytes_with_result, moments)) - max(sizes)
    yield _Trial(
        what="moments in host memory",
        peak_bytes=memory.peak_bytes - saved_on_host,
        how='follow(optimizer.init, params_plan, memory_kinds=[(".*", "pinned_host")]);'
        " in the step jax.device_put(state, jax.memory.Space.Device), and .Host for"
        " what it returns",
        host_bytes=sum(sizes),
    )


def batch_of(chip_step: StepOnChip) -> int | None:
    """The number of examples in the batch: the size of its arrays' first dimension.
    `None` if this size differs between the arrays, or if there are none.
    """
    arguments = chip_step.step.arguments
    sizes = {arguments[number].shape[0] for number in chip_step.in_group("batch")}
    if len(sizes) != 1:
        return None
    return sizes.pop()


def with_batch(chip_step: StepOnChip, batch: int) -> StepOnChip | None:
    """The step traced with the batch size `batch`; `None` if its function is not known,
    or raises an error for it.
    """
    function = chip_step.function
    if function is None:
        return None
    traced = chip_step.step
    paths = {traced.arguments[number].path for number in chip_step.in_group("batch")}
    names = argument_names(function, len(traced.args))
    args = []
    for arg, name in zip(traced.args, names, strict=True):
        args.append(_resized(arg, name, paths, batch))
    try:
        resized = StepOnChip(
            step=step_of(function, args, traced.given_mesh),
            chip=chip_step.chip,
            function=function,
        )
        # Asking for its memory partitions the step.
        if resized.memory:
            return resized
        return None
    except (TypeError, ValueError, ProgramError):
        return None


def _resized(
    arg: object,
    argument_name: str,
    batch_paths: Set[str],
    batch: int,
) -> object:
    """The structs of one argument, those at `batch_paths` with `batch` rows. The paths
    begin with the argument's name, `argument_name`.
    """
    flat = flatten(arg)
    leaves = []
    for leaf, path in zip(flat.leaves, flat.paths, strict=True):
        if "/".join(filter(None, (argument_name, path))) in batch_paths:
            shape = (batch, *leaf.shape[1:])
            leaf = jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=leaf.sharding)
        leaves.append(leaf)
    return jax.tree.unflatten(flat.treedef, leaves)

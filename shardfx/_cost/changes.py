"""Single changes that would save memory, each with what it saves and the code for it, and the largest batch."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from .. import chips
from .._arrays.entries import Donate, donated as _donated
from .._ground.spec import array_bytes, shard_counts
from .arguments import Arguments, Leaf
from .constrained import along_the_batch
from .frames import Frame
from .graph import Pin
from .memory.kinds import ELEMENTWISE
from .memory.layouts import dims_of, padded
from .memory.liveness import Changed
from .memory.program import Block, Op, Program
from .memory.usage import Usage, traced, usage_of
from .nested import scan_parts


# How often a batch that the line says is tried.
_TRIES = 16
# What saves less of the peak than this is not told.
_WORTH = 0.01


@dataclasses.dataclass(frozen=True)
class Change:
    """A single change, and what it would do.

    **Arguments:**

    - `what`: in words.
    - `saves_bytes`: on one device, at the worst moment.
    - `peak_bytes`: what is then needed.
    - `fits`: whether that fits.
    - `how`: the change as code.
    - `host_bytes`: what a device's share of host memory then holds more.
    - `sources`: the lines of your program that it is about, where it is about lines.
    """

    what: str
    saves_bytes: int
    peak_bytes: int
    fits: bool
    how: str
    host_bytes: int = 0
    sources: tuple[Frame, ...] = ()


@dataclasses.dataclass(frozen=True)
class Traced:
    """A step as it was traced, so that it can be measured under other plans without tracing it again."""

    given: Arguments
    step: Callable[..., Any]
    program: Program
    donated: tuple[bool, ...]
    chip: chips.Chip

    def usage(
        self,
        given: Arguments | None = None,
        *,
        donated: Sequence[bool] | None = None,
        changed: Changed | None = None,
        pins: Mapping[int, Pin] = MappingProxyType({}),
    ) -> Usage:
        """What it needs, under these plans or others."""
        given = self.given if given is None else given
        return usage_of(
            self.program,
            [leaf.struct.sharding for leaf in given.leaves],
            given.sizes,
            donated=self.donated if donated is None else donated,
            tile=self.chip.tile,
            changed=changed,
            pins=pins,
            on_host=[leaf.on_host for leaf in given.leaves],
            tpu=_is_tpu(self.chip),
        )

    def again(self, given: Arguments) -> "Traced":
        """The same step for arguments of other shapes."""
        program = traced(given.call(self.step), given.trees, tpu=_is_tpu(self.chip))
        return dataclasses.replace(self, given=given, program=program)


def traced_step(given: Arguments, step: Callable[..., Any], chip: chips.Chip, donate: Donate) -> Traced:
    """The step, traced for its arguments."""
    program = traced(given.call(step), given.trees, tpu=_is_tpu(chip))
    spare = _donated(donate, inspect.signature(step))
    names = [name for name in inspect.signature(step).parameters]

    def reusable(leaf: Leaf) -> bool:
        if given.by == "tree":
            name = leaf.path.partition("/")[0]
            return (names.index(name) if name in names else None) in spare
        position = names.index(given.names[leaf.argument]) if given.by == "name" else leaf.argument
        return position in spare

    already = program.donated or (False,) * len(given.leaves)
    return Traced(
        given, step, program, tuple(a or reusable(leaf) for a, leaf in zip(already, given.leaves, strict=True)), chip
    )


def _is_tpu(chip: chips.Chip) -> bool:
    """Whether the TPU's compiler compiles for it."""
    return chip.torus_dims > 0


def held_bytes(leaf: Leaf, given: Arguments, chip: chips.Chip, dtype: Any = None) -> int:
    """What an argument takes on one device, with what the chip's tiles pad."""
    struct = leaf.struct
    spec = struct.sharding.spec if struct.sharding is not None else jax.P()
    counts = shard_counts(spec, len(struct.shape), given.sizes)
    shard = tuple(-(-size // count) for size, count in zip(struct.shape, counts, strict=True))
    return array_bytes(padded(shard, chip.tile), struct.dtype if dtype is None else dtype)


def changes_of(given: Arguments, known: Traced | None, chip: chips.Chip, peak_bytes: int) -> tuple[Change, ...]:
    """The changes that save something, the most saving first.

    **Arguments:**

    - `given`: what the step takes.
    - `known`: the step; without it only what concerns arguments is found.
    - `peak_bytes`: what it needs as it is.
    """
    before = sum(held_bytes(leaf, given, chip) for leaf in given.leaves) if known is None else known.usage().bytes

    def made(what: str, after: int, how: str, host_bytes: int = 0, sources: tuple[Frame, ...] = ()) -> Change:
        peak = peak_bytes - (before - after)
        fits = peak <= chip.usable_hbm_bytes_per_device
        return Change(what, before - after, peak, fits, how, host_bytes, sources)

    def total(other: Arguments) -> int:
        if known is not None:
            return known.usage(other).bytes
        return sum(held_bytes(leaf, other, chip) for leaf in other.leaves)

    found: list[Change] = []
    axes = _data_axes(given)
    over = ", ".join(f'"{axis}"' for axis in axes)
    over = over if len(axes) == 1 else f"({over})"
    if axes and given.of_group("optimizer"):
        found.append(
            made(
                f"ZeRO-1: the optimizer's state cut over {' and '.join(axes)} too",
                total(given.over("optimizer", axes)),
                f"follow(optimizer.init, params_plan, over={over})",
            )
        )
    if axes and given.of_group("parameters"):
        cut = given.over("parameters", axes).over("optimizer", axes)
        found.append(
            made(
                f"ZeRO-3: parameters and the optimizer's state cut over {' and '.join(axes)} too",
                total(cut),
                f"follow(lambda tree: tree, params_plan, over={over})",
            )
        )
    found += _of_moments(given, known, chip, made, before)
    if known is not None:
        found += _of_the_step(known, made)
    worth = [one for one in found if one.saves_bytes > _WORTH * peak_bytes]
    return tuple(sorted(worth, key=lambda one: -one.saves_bytes))


Made = Callable[..., Change]


def _of_moments(given: Arguments, known: Traced | None, chip: chips.Chip, made: Made, before: int) -> list[Change]:
    """Moments in bfloat16, or in host memory. Steps decide what they return, so this is counted, not traced."""
    moments = [leaf for leaf in given.of_group("optimizer") if leaf.struct.shape and not leaf.on_host]
    wide = [leaf for leaf in moments if leaf.struct.dtype == jnp.float32]
    # Where nothing is donated the step returns new moments beside the old ones.
    stays = known is None
    donated = {} if known is None else dict(zip((id(leaf.struct) for leaf in given.leaves), known.donated, strict=True))

    def saved(leaf: Leaf, after: int) -> int:
        twice = not stays and not donated[id(leaf.struct)]
        return (held_bytes(leaf, given, chip) - after) * (2 if twice else 1)

    found = []
    if wide:
        less = sum(saved(leaf, held_bytes(leaf, given, chip, jnp.bfloat16)) for leaf in wide)
        how = "lambda moment: moment.astype(jnp.bfloat16), on the state that the step returns"
        found.append(made("moments in bfloat16", before - less, how))
    if moments:
        here = sum(held_bytes(leaf, given, chip) for leaf in moments)
        less = sum(saved(leaf, 0) for leaf in moments)
        # One array at a time is on the device while it is updated.
        less -= max(held_bytes(leaf, given, chip) for leaf in moments)
        how = (
            'follow(optimizer.init, params_plan, memory_kinds=[(".*", "pinned_host")]); in the step '
            "jax.device_put(state, jax.memory.Space.Device), and .Host for what it returns"
        )
        found.append(made("moments in host memory", before - less, how, here))
    return found


def _of_the_step(known: Traced, made: Made) -> list[Change]:
    found = []
    states = [
        i for i, leaf in enumerate(known.given.leaves) if leaf.group.startswith(("parameters", "optimizer", "KV"))
    ]
    if not all(known.donated[i] for i in states):
        donated = [given or i in states for i, given in enumerate(known.donated)]
        names = sorted({known.given.leaves[i].path.partition("/")[0] for i in states if known.donated[i] is False})
        told = ", ".join(f'"{name}"' for name in names)
        how = f"filter_jit(step, donate={told if len(names) == 1 else f'({told})'})"
        found.append(made("donate what the step returns anew", known.usage(donated=donated).bytes, how))
    if (more := along_the_batch(known.program, known.given, known.usage())) is not None:
        what = f"constrain the activations along {' and '.join(_data_axes(known.given))}, as the batch"
        found.append(made(what, known.usage(pins=more.pins).bytes, more.how, sources=more.sources))
    if (changed := _recomputed(known.program, known.usage())) is not None:
        how = "jax.lax.scan(jax.checkpoint(layer), x, layers)"
        found.append(made("recompute each layer in the backward pass", known.usage(changed=changed).bytes, how))
    batch = batch_of(known.given)
    if batch is not None and batch > 1 and batch % 2 == 0 and (half := _with_batch(known, batch // 2)) is not None:
        how = f"a batch of {batch // 2}, or a scan over 2 microbatches"
        found.append(made("half the batch", half.usage().bytes, how))
    return found


def _data_axes(given: Arguments) -> tuple[str, ...]:
    """The axes that cut the batch."""
    cut = [axis for leaf in given.of_group("batch") for axes in _dims(leaf, given) for axis in axes]
    return tuple(axis for axis in dict.fromkeys(cut) if given.sizes[axis] > 1)


def _dims(leaf: Leaf, given: Arguments) -> tuple[tuple[str, ...], ...]:
    sharding = leaf.struct.sharding
    return dims_of(sharding.spec if sharding is not None else jax.P(), len(leaf.struct.shape), given.sizes)


def _recomputed(program: Program, usage: Usage) -> Changed | None:
    """What remat of each layer would change: stacks that a loop forward leaves to a loop backward."""
    made: dict[int, tuple[Op, int]] = {}
    users: dict[int, list[Op]] = {}
    for op in program.block.ops:
        made.update({out: (op, at) for at, out in enumerate(op.outs)})
        for number in op.ins:
            if number is not None:
                users.setdefault(number, []).append(op)
    stacks: set[int] = set()
    kept = 0
    inside: dict[int, int] = {}
    for op in program.block.ops:
        if op.name != "scan" or not op.params["reverse"]:
            continue
        start = sum(scan_parts(op.params))
        layers: dict[int, Op] = {}
        carried: list[int] = []
        for number in op.ins[start:]:
            source, at = made.get(number, (None, 0)) if number is not None else (None, 0)
            if source is None or number is None or source.name != "scan" or at < scan_parts(source.params)[1]:
                continue
            if not all(user is op for user in users[number]):
                continue
            stacks.add(number)
            if id(source) not in layers:
                layers[id(source)] = source
                carried += source.outs[: scan_parts(source.params)[1]]
            # What is carried is kept for each layer, and nothing of it is computed again.
            same = next((one for one in carried if program.values[one].shape == program.values[number].shape[1:]), None)
            if same is not None:
                carried.remove(same)
                kept += usage.layouts.bytes_of(number)
                continue
            if _is_of_others(source.blocks[0], at):
                continue
            body: Block = op.blocks[0]
            inside[id(body)] = inside.get(id(body), 0) + usage.layouts.bytes_of(number) // op.params["length"]
        for one in carried:
            kept += op.params["length"] * usage.layouts.bytes_of(one)
    if sum(map(usage.layouts.bytes_of, stacks)) <= 1.1 * kept:
        return None  # it is done already, or there is nothing to win
    return Changed(frozenset(stacks), kept, inside)


def _is_of_others(body: Block, at: int) -> bool:
    """Whether what a loop stacks follows by elements from something else that it stacks: then it needs no memory where
    it is computed again, for a fusion swallows it."""
    made = {out: op for op in body.ops for out in op.outs}
    others = {out for where, out in enumerate(body.outs) if where != at}
    waiting = [body.outs[at]]
    while waiting:
        op = made.get(number) if (number := waiting.pop()) is not None else None
        if op is None or op.name not in ELEMENTWISE:
            continue
        if not others.isdisjoint(op.ins):
            return True
        waiting += op.ins
    return False


def batch_of(given: Arguments) -> int | None:
    """How many examples a step takes; `None` where its batch cannot be told."""
    sizes = {leaf.struct.shape[0] for leaf in given.of_group("batch") if leaf.struct.shape}
    return sizes.pop() if len(sizes) == 1 else None


def largest_batch(known: Traced, chip: chips.Chip, peak_bytes: int) -> tuple[int | None, int | None]:
    """How many examples there are, and how many would fit, in steps that the mesh divides.

    What a step needs grows with its batch along lines: flat while all lies where results will, then steeper. The line
    between what fits and what does not says where to look, the middle every other time; the step is traced there.
    """
    batch = batch_of(known.given)
    if not batch:
        return None, None
    usable = chip.usable_hbm_bytes_per_device
    now = known.usage().bytes
    offset = peak_bytes - now
    unit = max(
        shard_counts(leaf.struct.sharding.spec, 1, known.given.sizes)[0] if leaf.struct.sharding else 1
        for leaf in known.given.of_group("batch")
    )
    unit = unit if batch % unit == 0 else 1
    needs = {batch: now + offset}
    for tried in range(_TRIES):
        fits = max((count for count, need in needs.items() if need <= usable), default=0)
        over = min((count for count, need in needs.items() if need > usable), default=None)
        if over is not None and over - fits <= unit:
            break
        guess = _next_batch(needs, usable, fits, over, unit, halves=tried % 2 == 1)
        other = _with_batch(known, guess)
        if other is None:
            return batch, fits if fits and len(needs) > 1 else None
        needs[guess] = other.usage().bytes + offset
    if all(need <= usable for need in needs.values()):
        return batch, None  # however large it is: nothing that the step keeps grows with it
    return batch, max((count for count, need in needs.items() if need <= usable), default=0)


def _next_batch(needs: dict[int, int], usable: int, fits: int, over: int | None, unit: int, *, halves: bool) -> int:
    """Where to look next: between what fits and what does not, or twice as far."""
    if over is None:
        before = max((count for count in needs if count < fits), default=None)
        slope = 0.0 if before is None else (needs[fits] - needs[before]) / (fits - before)
        further = int((usable - needs[fits]) / slope) if slope > 0 else 0
        return max(2 * fits, fits + further // unit * unit + unit)
    if fits == 0:
        return max(unit, over // 2 // unit * unit)
    share = 0.5 if halves else (usable - needs[fits]) / (needs[over] - needs[fits])
    return min(max(fits + int((over - fits) * share) // unit * unit, fits + unit), over - unit)


def _with_batch(known: Traced, batch: int) -> Traced | None:
    """The step for another number of examples; `None` for one that is written for this number alone."""
    ours = {id(leaf.struct) for leaf in known.given.of_group("batch")}

    def resized(one: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        if id(one) not in ours or not one.shape:
            return one
        return jax.ShapeDtypeStruct((batch, *one.shape[1:]), one.dtype, sharding=one.sharding)

    try:
        return known.again(known.given.with_structs(resized))
    except (TypeError, ValueError):
        return None

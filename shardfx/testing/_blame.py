"""The first equation whose result is wrong under a plan, and suspicious operations in
`shard_map`s that JAX does not check.
"""

import difflib
import itertools as it
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np

from .._ground.spec import DType, entries_of, entry_axes
from .._step import opened, place_text
from ._tape import CARRY, Record, ShardMapBody, Tape


# How the values of devices along one mesh axis form the whole array: as shards of this
# dimension; by this reduction, whose collective has not run yet; or "same" if all
# devices have the whole.
Role = int | Literal["same", "sum", "mean", "max"]
MERGED = {"sum": np.sum, "mean": np.mean, "max": np.max}
_COLLECTIVES = frozenset(
    """psum psum2 psum_invariant pmax pmin ppermute all_gather all_gather_invariant all_gather_reduced all_to_all
    psum_scatter reduce_scatter ragged_all_to_all pbroadcast unreduced_psum unreduced_reduce_scatter""".split()
)
# These take slices or concatenate: their result on a device may have no counterpart on
# one device.
_PIECES = _COLLECTIVES & {"ppermute", "all_gather", "all_to_all"} | frozenset(
    """slice dynamic_slice gather squeeze reshape broadcast_in_dim transpose rev concatenate pad convert_element_type
    copy dynamic_update_slice split""".split()
)


class Compared(NamedTuple):
    """The comparison of an equation's result under the plan with the result on one
    device.

    **Arguments:**

    - `is_same`: whether the devices' values, put together by `roles`, give the result
      on one device.
    - `roles`: the role of each mesh axis of the `shard_map`s around the equation.
    - `by_turn`: `is_same` for each iteration of the outermost loop.
    - `difference`, `at`: the largest difference, and its index in the array.
    - `scale`: the largest absolute value of the result on one device.
    """

    is_same: bool
    roles: Mapping[str, Role] = {}
    by_turn: tuple[bool, ...] = ()
    difference: float = math.inf
    at: tuple[int, ...] = ()
    scale: float = 0.0


class Fault(NamedTuple):
    """The first equation whose result is wrong under the plan, and earlier equations
    that say most about the cause.

    `number` and `sources` are the indices of their records in `Tape.records`. `turn` is
    the first iteration of the loop that ends with a wrong carry; `None` if there is
    none.
    """

    number: int
    sources: tuple[int, ...]
    turn: int | None


def differences(found: object, wanted: object) -> np.ndarray:
    """The absolute differences between two arrays, by element. NaN equals only NaN, and
    an infinity only itself.
    """
    found = np.asarray(found)
    wanted = np.asarray(wanted)
    kind = np.result_type(found.dtype, np.float64)
    found = found.astype(kind)
    wanted = wanted.astype(kind)
    with np.errstate(invalid="ignore"):
        apart = np.abs(found - wanted)
    same = (found == wanted) | (np.isnan(found) & np.isnan(wanted))
    return np.where(same, 0.0, np.where(np.isnan(apart), np.inf, apart))


def allowed(exact: np.ndarray, others: Sequence[object], dtype: DType) -> float:
    """The largest difference that rounding explains: eight times the effect of rounding
    on the reference, and a few units in the last place.

    `exact` is the reference in float64, and `others` are the same result computed with
    rounding. `dtype` is that of the result under the plan. For integers, the largest
    difference is infinite if rounding changed them, and else 0.
    """
    changed = max(
        [float(differences(one, exact).max(initial=0.0)) for one in others], default=0.0
    )
    if not jnp.issubdtype(dtype, np.inexact):
        # Rounding made two numbers equal, and one was chosen.
        return math.inf if changed else 0.0
    finite = np.abs(exact[np.isfinite(exact)])
    return 8 * changed + 4 * float(jnp.finfo(dtype).eps) * float(
        finite.max(initial=0.0)
    )


def compared(
    record: Record, value: object, whole_record: Record, whole: Any, most: float
) -> Compared:
    """The comparison of an equation's result `value` under the plan with its result
    `whole` on one device.

    Inside a `shard_map` it is unknown whether the devices' values are shards of the
    whole, summands of it, or copies. Each possibility is tried, and the best match is
    returned. `most` is the largest difference that rounding explains. `record` and
    `whole_record` are the records of the two results.
    """
    axes, parts = _by_device(record, np.asarray(value))
    one, whole = _by_device(whole_record, np.asarray(whole))
    whole = whole.reshape(whole.shape[len(one) :])
    turns = sum(isinstance(kind, int) for kind in record.leading)
    best = Compared(False)
    rank = (-1, -math.inf)
    for roles, made in _assembled(axes, parts, whole.shape):
        apart = differences(made, np.broadcast_to(whole, made.shape))
        extra = made.ndim - whole.ndim
        own = (
            np.moveaxis(apart, extra, 0).reshape(whole.shape[0], -1)
            if turns
            else apart.reshape(1, -1)
        )
        by_turn = tuple((own.max(-1, initial=0.0) <= most).tolist())
        largest = float(apart.max(initial=0.0))
        last = by_turn.index(False) if False in by_turn else len(by_turn)
        if (last, -largest) > rank:
            at = (
                np.unravel_index(int(apart.argmax()), apart.shape)[extra:]
                if apart.size
                else ()
            )
            names: dict[str, Role] = {
                name: role
                for (name, size), role in zip(axes, roles, strict=True)
                if size > 1
            }
            scale = 1.0 if whole.dtype == bool else float(np.abs(whole).max(initial=0))
            best = Compared(
                all(by_turn),
                names,
                by_turn if turns else (),
                largest,
                tuple(map(int, at)),
                scale,
            )
            rank = (last, -largest)
        if best.is_same:
            break
    return best


def _by_device(
    record: Record, value: np.ndarray
) -> tuple[list[tuple[str, int]], np.ndarray]:
    """The mesh axes of the `shard_map`s around an equation with their sizes, and its
    result `value` with the dimensions in another order.

    A leading dimension for each mesh axis comes first. Then come the dimensions of loop
    iterations, in the order of time, also for loops that run backwards, and then those
    of the result itself.
    """
    device = [at for at, one in enumerate(record.leading) if not isinstance(one, int)]
    value = np.asarray(
        np.flip(value, tuple(at for at, one in enumerate(record.leading) if one == -1))
    )
    value = np.moveaxis(value, device, range(len(device)))
    axes = [axis for one in record.leading if not isinstance(one, int) for axis in one]
    return axes, np.reshape(
        value, (*[size for _, size in axes], *value.shape[len(device) :])
    )


def _assembled(
    axes: Sequence[tuple[str, int]], parts: np.ndarray, shape: tuple[int, ...]
) -> Iterator[tuple[tuple[Role, ...], np.ndarray]]:
    """Yields every array of `shape` that the devices' values may form, each with the
    role of every mesh axis.

    `parts` are the devices' values, with a leading dimension for each of `axes`. If an
    axis has the role "same" or is reduced, the yielded array still has the leading
    dimension of this axis.
    """
    local = parts.shape[len(axes) :]
    if len(local) != len(shape) or any(
        size == 0 or whole % size for size, whole in zip(local, shape, strict=True)
    ):
        return
    ratios = [whole // size for size, whole in zip(local, shape, strict=True)]
    merged = (
        MERGED
        if jnp.issubdtype(parts.dtype, np.inexact)
        else []
        if parts.dtype == bool
        else ["sum"]
    )
    choices: list[list[Any]] = [
        (
            [
                "same",
                *[
                    dim
                    for dim, ratio in enumerate(ratios)
                    if ratio > 1 and ratio % size == 0
                ],
                *merged,
            ]
            if size > 1
            else ["same"]
        )
        for _, size in axes
    ]
    for roles in sorted(
        it.product(*choices), key=lambda roles: sum(role in MERGED for role in roles)
    ):
        cuts = [
            [at for at, role in enumerate(roles) if role == dim]
            for dim in range(len(shape))
        ]
        if [math.prod(axes[at][1] for at in own) for own in cuts] != ratios:
            continue
        made = parts
        for at, role in enumerate(roles):
            made = (
                MERGED[role](made, axis=at, keepdims=True) if role in MERGED else made
            )
        beside = [at for at, role in enumerate(roles) if not isinstance(role, int)]
        order = [
            *beside,
            *it.chain.from_iterable(
                [*own, len(axes) + dim] for dim, own in enumerate(cuts)
            ),
        ]
        yield (
            roles,
            made.transpose(order).reshape((*[made.shape[at] for at in beside], *shape)),
        )


def aligned(ours: Sequence[Record], theirs: Sequence[Record]) -> dict[int, int]:
    """Matches the equations of two evaluations of a step: a dict from numbers in `ours`
    to numbers in `theirs`.

    Equations match if they have the same primitive and source line, in the same order.
    Others are left out.
    """
    keys = [
        [(one.primitive, one.frames[:1]) for one in records]
        for records in (ours, theirs)
    ]
    if keys[0] == keys[1]:
        return {at: at for at in range(len(ours))}
    blocks = difflib.SequenceMatcher(None, *keys, autojunk=False).get_matching_blocks()
    return {one.a + at: one.b + at for one in blocks for at in range(one.size)}


class Blame:
    """The search for the first equation whose result is wrong under the plan.

    **Arguments:**

    - `records`: the equations of the step under the plan. The number of an equation is
      its index here.
    - `found`: by number, the comparison of the result with the result on one device. An
      equation without an entry
        counts as wrong.
    """

    def __init__(self, records: Sequence[Record], found: Mapping[int, Compared]):
        self.records = records
        self.found = found
        # For each loop, the first iteration that ends with a wrong carry.
        self.turns: dict[int | None, int] = {}
        for number, record in enumerate(records):
            by_turn = found[number].by_turn if number in found else ()
            if (
                record.primitive == CARRY
                and by_turn[:1] == (True,)
                and False in by_turn
            ):
                first = by_turn.index(False) - 1
                self.turns[record.loop] = min(self.turns.get(record.loop, first), first)

    def is_same(self, number: int) -> bool:
        """Whether the result of the equation `number` equals the result on one device.

        In a loop whose carry becomes wrong, only the first iteration that ends with a
        wrong carry is compared.
        """
        one = self.found.get(number)
        turn = self.turns.get(self.records[number].loop)
        if one is None or turn is None or not one.by_turn:
            return one is not None and one.is_same
        return one.by_turn[turn] or self.records[number].primitive == CARRY

    def is_loose(self, number: int, reader: Record | None) -> bool:
        """Whether the result of the equation `number` leaves its `shard_map` before the
        collective that reduces it.

        Such a result equals the result on one device only as a sum, mean or maximum
        over devices. `reader` is the equation with this operand; `None` for a result of
        the step.
        """
        inside = {
            name
            for own in (reader.leading if reader else ())
            if not isinstance(own, int)
            for name, _ in own
        }
        roles = self.found[number].roles if number in self.found else {}
        return any(
            role in MERGED and name not in inside for name, role in roles.items()
        )

    def is_right(self, number: int, reader: Record | None = None) -> bool:
        return number < 0 or (
            self.is_same(number) and not self.is_loose(number, reader)
        )

    def fault(self, wrong: Sequence[int]) -> Fault | None:
        """The first equation with a wrong result and right operands; `None` if all
        results are right.

        The search goes from the equations `wrong`, which make the step's wrong results,
        to the equations that made their wrong operands, and so on. If all equations
        found in this way have wrong operands, the first of them is returned.
        """
        region: set[int] = set()
        waiting: list[tuple[int, Record | None]] = [
            (number, None) for number in wrong if number >= 0
        ]
        leaving: list[int] = []
        while waiting:
            number, reader = waiting.pop()
            if self.is_same(number):
                leaving += [number] if self.is_loose(number, reader) else []
            elif number not in region:
                region.add(number)
                waiting += [
                    (one, self.records[number])
                    for one in self.records[number].reads
                    if one >= 0
                ]
        if leaving and min(leaving) < min(region, default=math.inf):
            return self.named(min(leaving), set())
        apart = self.without_counterpart(region)
        starts = (
            number
            for number in sorted(region - apart)
            if all(
                one in apart or self.is_right(one, self.records[number])
                for one in self.records[number].reads
            )
        )
        first = next(starts, min(region, default=None))
        return None if first is None else self.named(first, region)

    def without_counterpart(self, region: set[int]) -> set[int]:
        """The equations that may be right although no array on one device equals their
        result.

        `region` has the numbers of all equations whose result differs from that on one
        device. Those returned are inside a `shard_map`, and their operands are right or
        made by such equations. They compute integers, such as device indices, or move
        elements, as slices do.
        """
        found: set[int] = set()
        for number in sorted(region):
            record = self.records[number]
            if all(isinstance(one, int) for one in record.leading):
                continue
            is_index = not jnp.issubdtype(record.dtype, np.inexact)
            if (is_index or record.primitive in _PIECES) and all(
                one in found or self.is_right(one, record) for one in record.reads
            ):
                found.add(number)
        return found

    def named(self, first: int, region: set[int]) -> Fault:
        """The `Fault` of the equation `first`, with the earlier equations that say most
        about the cause.

        `region` has the numbers of equations with wrong results. Of those on which
        `first` depends, the Fault has the last collective, and the first and the last
        equation whose result has integers, such as indices. It also has the last
        operand of `first` that still needs a sum, mean or maximum over devices. If
        there are none of these, it has the last equation in `region` on which `first`
        depends.
        """
        seen: set[int] = set()
        waiting = [first]
        while waiting:
            left = {
                one for one in self.records[waiting.pop()].reads if one in region
            } - seen
            seen |= left
            waiting += left
        behind = sorted(seen - {first})
        reads = self.records[first].reads
        waits = [
            one
            for one in reads
            if one in self.found and {*self.found[one].roles.values()} & {*MERGED}
        ]
        sent = [one for one in behind if self.records[one].primitive in _COLLECTIVES]
        index = [
            one
            for one in behind
            if not jnp.issubdtype(self.records[one].dtype, np.inexact)
        ]
        names = [*sent[-1:], *waits[-1:], *index[-1:], *index[:1]] or behind[-1:]
        return Fault(
            first, tuple(dict.fromkeys(names)), self.turns.get(self.records[first].loop)
        )


_SUMS = ("psum", "psum2", "psum_invariant")
_ALIKE = (*_SUMS, "pmax", "pmin", "pmean", "all_gather", "all_gather_invariant")
_APART = ("ppermute", "all_to_all", "psum_scatter", "reduce_scatter", "axis_index")
# Mesh axes.
Axes = frozenset[str]
# By the number of an equation, the mesh axes along which the devices may have different
# results.
Varying = Mapping[int, Axes]


def suspects(tape: Tape) -> tuple[str, ...]:
    """A text for each suspicious operation in a step's `shard_map`s with
    `check_vma=False`.

    An example is a `psum` over an axis along which all devices have the same value.
    """
    found: dict[str, None] = {}
    for body in tape.bodies:
        if not body.equation.params["check_vma"]:
            for one, what in _said(tape, body):
                found[
                    f"`{one.primitive}` at {place_text(next(iter(one.frames), None))}:"
                    f" {what}"
                ] = None
    return tuple(found)


def _said(tape: Tape, body: ShardMapBody) -> Iterator[tuple[Record, str]]:
    """Yields each suspicious equation of a `shard_map`, with a text that says why."""
    params = body.equation.params
    records = [tape.records[at] for at in body.numbers]
    axes = [axis for axis, size in params["mesh"].shape.items() if size > 1]
    cuts: dict[int, Axes] = {}
    lengths: dict[int, str] = {}
    for var, number, spec in zip(
        opened(params["jaxpr"])[0].invars, body.reads, params["in_specs"], strict=True
    ):
        cuts[number] = cuts.get(number, Axes()) | _cut(spec)
        parts = zip(var.aval.shape, entries_of(spec), strict=False)
        lengths |= {size: axis for size, entry in parts for axis in entry_axes(entry)}
    differs = _differing(tape, body, cuts)
    offset = Axes().union(
        *(one.axes for one in records if one.primitive == "axis_index")
    )
    for one in records:
        if one.primitive in _ALIKE:
            for axis in [
                axis for axis in axes if axis in one.axes - _taken(one, differs)
            ]:
                yield (
                    one,
                    (
                        f"is over {axis}, along which all devices have the same: is it"
                        " doubled?"
                    ),
                )
        if (
            one.primitive in _SUMS
            and jnp.issubdtype(one.dtype, np.floating)
            and jnp.finfo(one.dtype).bits < 32
        ):
            yield one, f"adds up in {one.dtype}: its error grows with the devices"
        axis = lengths.get(one.counted)
        if axis in axes and axis not in offset:
            yield (
                one,
                (
                    f"counts from 0 on every device along {axis}, and no axis_index"
                    " offsets it"
                ),
            )
    for number, spec in zip(body.results, params["out_specs"], strict=True):
        left = [
            axis for axis in axes if axis in differs.get(number, Axes()) - _cut(spec)
        ]
        if left and number >= 0:
            what = (
                f"may differ along {', '.join(left)}, and `out_specs` say that it"
                " does not"
            )
            yield tape.records[number], f"{what}: is a psum missing?"


def _differing(tape: Tape, body: ShardMapBody, cuts: Varying) -> Varying:
    """For each operand and each equation in the `shard_map` `body`, the mesh axes along
    which the devices may have different values. `cuts` has them for the operands alone.
    The keys of both dicts are numbers, as in `tape.records`.
    """
    differs = dict(cuts)
    # An iteration of a loop takes the results of the iteration before it.
    for _ in range(len(body.equation.params["mesh"].shape) + 1):
        for at in body.numbers:
            one = tape.records[at]
            taken = _taken(one, differs) | differs.get(tape.carried.get(at, at), Axes())
            is_alike = one.primitive in _ALIKE
            is_apart = one.primitive in _APART
            differs[at] = (
                _taken(one, differs) - one.axes
                if is_alike
                else taken | one.axes
                if is_apart
                else taken
            )
    return differs


def _taken(record: Record, differs: Varying) -> Axes:
    return Axes().union(*(differs.get(one, Axes()) for one in record.reads))


def _cut(spec: Any) -> Axes:
    return Axes(axis for entry in entries_of(spec) for axis in entry_axes(entry))

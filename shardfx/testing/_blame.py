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

from .._ground.spec import DType
from ._records import CARRY, Record


# How the values of devices along one mesh axis form the whole array: as shards of this
# dimension; by this reduction, whose collective has not run yet; or "same" if all
# devices have the whole.
Role = int | Literal["same", "sum", "mean", "max"]
REDUCTIONS = {"sum": np.sum, "mean": np.mean, "max": np.max}
_COLLECTIVES = frozenset(
    """
    psum psum2 psum_invariant pmax pmin ppermute all_gather all_gather_invariant
    all_gather_reduced all_to_all psum_scatter reduce_scatter ragged_all_to_all
    pbroadcast unreduced_psum unreduced_reduce_scatter
    """.split()
)
# These take slices or concatenate: their result on a device may have no counterpart on
# one device.
_PIECES = _COLLECTIVES & {"ppermute", "all_gather", "all_to_all"} | frozenset(
    """
    slice dynamic_slice gather squeeze reshape broadcast_in_dim transpose rev
    concatenate pad convert_element_type copy dynamic_update_slice split
    """.split()
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


def differences(values: object, reference: object) -> np.ndarray:
    """The absolute differences between two arrays of equal shapes, by element. NaN
    equals only NaN, and an infinity only itself.
    """
    values = _widened(values)
    reference = _widened(reference)
    with np.errstate(invalid="ignore"):
        distances = np.abs(values - reference)
    is_same = (values == reference) | (np.isnan(values) & np.isnan(reference))
    distances = np.where(np.isnan(distances), np.inf, distances)
    return np.where(is_same, 0.0, distances)


def _widened(values: object) -> np.ndarray:
    """An array in float64, or in complex128 if it is complex."""
    array = np.asarray(values)
    return array.astype(np.result_type(array.dtype, np.float64))


def allowed(
    exact: np.ndarray,
    rounded_results: Sequence[object],
    dtype: DType,
) -> float:
    """The largest difference that rounding explains: eight times the effect of rounding
    on the reference, and a few units in the last place.

    `exact` is the reference in float64, and `rounded_results` are the same result
    computed with rounding. `dtype` is that of the result under the plan. For integers,
    the largest difference is infinite if rounding changed them, and else 0.
    """
    rounding = 0.0
    for result in rounded_results:
        largest = differences(result, exact).max(initial=0.0)
        rounding = max(rounding, float(largest))
    if not jnp.issubdtype(dtype, np.inexact):
        # Rounding made two numbers equal, and one was chosen.
        if rounding:
            return math.inf
        return 0.0
    finite = np.abs(exact[np.isfinite(exact)])
    last_place = float(jnp.finfo(dtype).eps) * float(finite.max(initial=0.0))
    return 8 * rounding + 4 * last_place


def compared(
    record: Record,
    value: object,
    whole_record: Record,
    whole: Any,
    allowed_difference: float,
) -> Compared:
    """The comparison of an equation's result `value` under the plan with its result
    `whole` on one device.

    Inside a `shard_map` it is unknown whether the devices' values are shards of the
    whole, summands of it, or copies: the role of each mesh axis. Each possibility is
    tried, and the best match is returned. `allowed_difference` is the largest
    difference that rounding explains. `record` and `whole_record` are the records of
    the two results. The result of an equation in a loop has those of all its
    iterations, in a leading dimension.
    """
    axes, shards = _device_dims_first(record, np.asarray(value))
    whole_axes, whole = _device_dims_first(whole_record, np.asarray(whole))
    whole = whole.reshape(whole.shape[len(whole_axes) :])
    best = Compared(False)
    best_rank = (-1, -math.inf)
    for roles, assembled in _assembled(axes, shards, whole.shape):
        distances = differences(assembled, np.broadcast_to(whole, assembled.shape))
        # The number of leading dimensions of mesh axes along which each device has the
        # whole.
        copy_dim_count = assembled.ndim - whole.ndim
        largest_difference = float(distances.max(initial=0.0))
        # A turn is an iteration of the outermost loop around the equation.
        is_same_by_turn = [largest_difference <= allowed_difference]
        if record.is_in_loop:
            turns_first = np.moveaxis(distances, copy_dim_count, 0)
            distances_by_turn = turns_first.reshape(whole.shape[0], -1)
            largest_by_turn = distances_by_turn.max(-1, initial=0.0)
            is_same_by_turn = (largest_by_turn <= allowed_difference).tolist()
        right_turns = len(is_same_by_turn)
        if False in is_same_by_turn:
            right_turns = is_same_by_turn.index(False)
        # The roles with the most right iterations before a wrong one match best.
        rank = (right_turns, -largest_difference)
        if rank > best_rank:
            best_rank = rank
            best = Compared(
                is_same=all(is_same_by_turn),
                roles=_roles_by_axis(axes, roles),
                by_turn=tuple(is_same_by_turn) if record.is_in_loop else (),
                difference=largest_difference,
                at=index_of_largest(distances)[copy_dim_count:],
                scale=_scale_of(whole),
            )
        if best.is_same:
            break
    return best


def index_of_largest(array: np.ndarray) -> tuple[int, ...]:
    """The index of the largest element of an array; empty for an empty array."""
    if not array.size:
        return ()
    index = np.unravel_index(int(array.argmax()), array.shape)
    return tuple(map(int, index))


def _scale_of(array: np.ndarray) -> float:
    """The largest absolute value of an array; 1.0 for an array of bools."""
    if array.dtype == bool:
        return 1.0
    return float(np.abs(array).max(initial=0))


def _roles_by_axis(
    axes: Sequence[tuple[str, int]],
    roles: Sequence[Role],
) -> dict[str, Role]:
    """The role of each of `axes`, a mesh axis with its size, without those of size 1.
    `roles` has one for each of `axes`.
    """
    roles_by_axis: dict[str, Role] = {}
    for (name, size), role in zip(axes, roles, strict=True):
        if size > 1:
            roles_by_axis[name] = role
    return roles_by_axis


def _device_dims_first(
    record: Record,
    value: np.ndarray,
) -> tuple[list[tuple[str, int]], np.ndarray]:
    """The mesh axes of the `shard_map`s around an equation with their sizes, and its
    result `value` with the dimensions in another order.

    A leading dimension for each mesh axis comes first. Then come the dimensions of loop
    iterations, in the order of time, also for loops that run backwards, and then those
    of the result itself.
    """
    axes = record.manual_axes
    device_dims = []
    backward_dims = []
    for dim, entry in enumerate(record.leading):
        # The entry of a loop is 1 or -1, and that of a `shard_map` has its mesh axes.
        if not isinstance(entry, int):
            device_dims.append(dim)
        elif entry == -1:
            backward_dims.append(dim)
    value = np.asarray(np.flip(value, tuple(backward_dims)))
    value = np.moveaxis(value, device_dims, range(len(device_dims)))
    sizes = [size for _, size in axes]
    return axes, np.reshape(value, (*sizes, *value.shape[len(device_dims) :]))


def _assembled(
    axes: Sequence[tuple[str, int]],
    shards: np.ndarray,
    shape: tuple[int, ...],
) -> Iterator[tuple[tuple[Role, ...], np.ndarray]]:
    """Yields every array of `shape` that the devices' values may form, each with the
    role of every mesh axis: the dimension that the axis shards, "same" if its devices
    have copies, or the reduction that its devices' values still need.

    `axes` are mesh axes with their sizes. `shards` are the devices' values, with a
    leading dimension for each of `axes`. If an axis has the role "same" or is reduced,
    the yielded array still has the leading dimension of this axis.
    """
    shard_shape = shards.shape[len(axes) :]
    if len(shard_shape) != len(shape):
        return
    shard_counts = []
    for shard_size, size in zip(shard_shape, shape, strict=True):
        if shard_size == 0 or size % shard_size:
            return
        shard_counts.append(size // shard_size)

    choices = [_possible_roles(size, shard_counts, shards.dtype) for _, size in axes]
    # Reductions last.
    for roles in sorted(it.product(*choices), key=_number_of_reductions):
        # For each dimension of the array, the mesh axes that shard it, and their
        # product.
        axes_by_dim: list[list[int]] = [[] for _ in shape]
        unsharding_axes = []
        products = [1] * len(shape)
        for axis_number, (role, (_, size)) in enumerate(zip(roles, axes, strict=True)):
            if isinstance(role, int):
                axes_by_dim[role].append(axis_number)
                products[role] *= size
            else:
                unsharding_axes.append(axis_number)
        if products != shard_counts:
            continue

        array = shards
        for axis_number, role in enumerate(roles):
            if role in REDUCTIONS:
                array = REDUCTIONS[role](array, axis=axis_number, keepdims=True)
        dim_order = list(unsharding_axes)
        for dim, axis_numbers in enumerate(axes_by_dim):
            dim_order += [*axis_numbers, len(axes) + dim]
        leading_sizes = [array.shape[axis_number] for axis_number in unsharding_axes]
        yield roles, array.transpose(dim_order).reshape((*leading_sizes, *shape))


def _possible_roles(size: int, shard_counts: Sequence[int], dtype: Any) -> list[Any]:
    """The roles that a mesh axis of `size` may have for an array with `shard_counts`
    shards along each dimension: "same", the number of a dimension that it may shard,
    and the names of reductions.
    """
    roles: list[Any] = ["same"]
    if size == 1:
        return roles
    for dim, count in enumerate(shard_counts):
        if count > 1 and count % size == 0:
            roles.append(dim)
    if jnp.issubdtype(dtype, np.inexact):
        roles += REDUCTIONS.keys()
    elif dtype.kind != "b":
        roles.append("sum")
    return roles


def _number_of_reductions(roles: Sequence[Role]) -> int:
    return sum(role in REDUCTIONS for role in roles)


def matched_equations(
    ours: Sequence[Record],
    theirs: Sequence[Record],
) -> dict[int, int]:
    """Matches the equations of two evaluations of a step: a dict from numbers in `ours`
    to numbers in `theirs`.

    Equations match if they have the same primitive and source line, in the same order.
    Others are left out.
    """
    our_keys = [(record.primitive, record.frames[:1]) for record in ours]
    their_keys = [(record.primitive, record.frames[:1]) for record in theirs]
    if our_keys == their_keys:
        return {number: number for number in range(len(ours))}
    matcher = difflib.SequenceMatcher(None, our_keys, their_keys, autojunk=False)
    numbers = {}
    for block in matcher.get_matching_blocks():
        for offset in range(block.size):
            numbers[block.a + offset] = block.b + offset
    return numbers


class Blame:
    """The search for the first equation whose result is wrong under the plan.

    **Arguments:**

    - `records`: the equations of the step under the plan. The number of an equation is
      its index here.
    - `comparisons`: by number, the comparison of the result with the result on one
      device. An equation without an entry counts as wrong.
    """

    def __init__(self, records: Sequence[Record], comparisons: Mapping[int, Compared]):
        """`comparisons` has the comparison of a record's result by the record's number,
        its position in `records`.
        """
        self.records = records
        self.comparisons = comparisons
        # For each loop, the first iteration that ends with a wrong carry.
        self.wrong_turn_by_loop: dict[int | None, int] = {}
        for number, comparison in comparisons.items():
            record = records[number]
            by_turn = comparison.by_turn
            # A carry that is wrong in the first iteration was made outside of the loop.
            if record.primitive != CARRY or False not in by_turn or not by_turn[0]:
                continue
            # A carry that is wrong in one iteration was made in the one before.
            turn = by_turn.index(False) - 1
            self.wrong_turn_by_loop[record.loop] = min(
                self.wrong_turn_by_loop.get(record.loop, turn), turn
            )

    def has_same_values(self, number: int) -> bool:
        """Whether the result of the equation `number` equals the result on one device.

        In a loop whose carry becomes wrong, only the first iteration that ends with a
        wrong carry is compared.
        """
        comparison = self.comparisons.get(number)
        if comparison is None:
            return False
        turn = self.wrong_turn_by_loop.get(self.records[number].loop)
        if turn is None or not comparison.by_turn:
            return comparison.is_same
        # The carry with which this iteration starts was made before it.
        return comparison.by_turn[turn] or self.records[number].primitive == CARRY

    def leaves_unreduced(self, number: int, reader: Record | None) -> bool:
        """Whether the result of the equation `number` leaves its `shard_map` before the
        collective that reduces it.

        Such a result equals the result on one device only as a sum, mean or maximum
        over devices. `reader` is the equation with this operand; `None` for a result of
        the step.
        """
        axes_around_reader: set[str] = set()
        if reader is not None:
            axes_around_reader = {name for name, _ in reader.manual_axes}
        return not axes_around_reader.issuperset(self.unreduced_axes(number))

    def unreduced_axes(self, number: int) -> list[str]:
        """The mesh axes over which the result of the equation `number` is not reduced
        yet.
        """
        if number not in self.comparisons:
            return []
        roles = self.comparisons[number].roles
        return [axis for axis, role in roles.items() if role in REDUCTIONS]

    def is_right(self, number: int, reader: Record | None = None) -> bool:
        """Whether the result of the equation `number`, as `reader` takes it, is right.
        A negative number is that of an argument or a constant, which is right.
        """
        if number < 0:
            return True
        return self.has_same_values(number) and not self.leaves_unreduced(
            number, reader
        )

    def has_right_operands(self, number: int, excused: set[int]) -> bool:
        """Whether the operands of the equation `number` are right or among `excused`."""
        record = self.records[number]
        for operand in record.reads:
            if operand not in excused and not self.is_right(operand, record):
                return False
        return True

    def fault(self, wrong_results: Sequence[int]) -> Fault | None:
        """The first equation with a wrong result and right operands; `None` if all
        results are right.

        The search goes from the equations `wrong_results`, which make the step's wrong
        results, to the equations that made their wrong operands, and so on. If all
        equations found in this way have wrong operands, the first of them is returned.
        """
        region, leaving_unreduced = self.wrong_region(wrong_results)
        # One that leaves unreduced before all wrong equations makes them wrong.
        if leaving_unreduced and min(leaving_unreduced) < min(region, default=math.inf):
            return self.fault_of(min(leaving_unreduced), set())
        excused = self.excused_within(region)
        for number in sorted(region - excused):
            if self.has_right_operands(number, excused):
                return self.fault_of(number, region)
        if region:
            return self.fault_of(min(region), region)
        return None

    def wrong_region(self, wrong: Sequence[int]) -> tuple[set[int], list[int]]:
        """The equations with wrong results from which the results `wrong` follow; and
        those with right results that leave their `shard_map` before they are reduced.
        """
        region: set[int] = set()
        leaving_unreduced: list[int] = []
        # Equations, each with one that reads its result.
        waiting: list[tuple[int, Record | None]] = [(number, None) for number in wrong]
        while waiting:
            number, reader = waiting.pop()
            if number < 0:
                continue
            if not self.has_same_values(number):
                if number not in region:
                    region.add(number)
                    record = self.records[number]
                    waiting += [(operand, record) for operand in record.reads]
            elif self.leaves_unreduced(number, reader):
                leaving_unreduced.append(number)
        return region, leaving_unreduced

    def excused_within(self, region: set[int]) -> set[int]:
        """The equations that may be right although no array on one device equals their
        result.

        `region` has the numbers of all equations whose result differs from that on one
        device. Those returned are inside a `shard_map`, and their operands are right or
        made by such equations. They compute integers, such as device indices, or move
        elements, as slices do.
        """
        excused: set[int] = set()
        for number in sorted(region):
            record = self.records[number]
            if not record.manual_axes:
                continue
            is_index = not jnp.issubdtype(record.dtype, np.inexact)
            if not is_index and record.primitive not in _PIECES:
                continue
            if self.has_right_operands(number, excused):
                excused.add(number)
        return excused

    def fault_of(self, number: int, region: set[int]) -> Fault:
        """The `Fault` of the equation `number`, with the earlier equations that say
        most about the cause.

        `region` has the numbers of equations with wrong results. Of those on which the
        equation depends, the Fault has the last collective, and the first and the last
        equation whose result has integers, such as indices. It also has the last
        operand of the equation that still needs a sum, mean or maximum over devices. If
        there are none of these, it has the last equation in `region` on which the
        equation depends.
        """
        causes = self.causes_within(number, region)
        collectives = []
        indices = []
        for cause in causes:
            record = self.records[cause]
            if record.primitive in _COLLECTIVES:
                collectives.append(cause)
            if not jnp.issubdtype(record.dtype, np.inexact):
                indices.append(cause)
        record = self.records[number]
        unreduced = [
            operand for operand in record.reads if self.unreduced_axes(operand)
        ]
        sources = [*collectives[-1:], *unreduced[-1:], *indices[-1:], *indices[:1]]
        if not sources:
            sources = causes[-1:]
        return Fault(
            number=number,
            sources=tuple(dict.fromkeys(sources)),
            turn=self.wrong_turn_by_loop.get(record.loop),
        )

    def causes_within(self, number: int, region: set[int]) -> list[int]:
        """The equations in `region` on which the equation `number` depends, in order."""
        seen: set[int] = set()
        waiting = [number]
        while waiting:
            operands = self.records[waiting.pop()].reads
            new = region.intersection(operands) - seen
            seen |= new
            waiting += new
        return sorted(seen - {number})

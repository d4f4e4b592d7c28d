"""The cost terms of a step: its work, bytes and traffic, summed where the same axis
assignments divide them. `_core.py` explains them, and estimates candidates by them.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from .._ground.opcodes import SUMS
from .._step import Program
from ..chips._chip import rounds_of
from ._layouts import AssignedLayout, Layouts


# A value that is used this many operations after the one that makes it is stored in
# between.
_STORED_FOR = 40
# The results of these operations reuse the memory of an operand.
_IN_PLACE = ("carry", "dynamic_update_slice")
# The cost terms of a step, as the arrays that `cost_terms` describes.
CostTerms = dict[str, np.ndarray]


class _Amount(NamedTuple):
    """An amount of a cost term: for each axis assignment whether it divides the amount,
    the column of the sum to which it is added, and the amount.
    """

    mask: np.ndarray
    column: int
    amount: float


class _Sums(NamedTuple):
    """Sums of amounts that the same assignments divide: an array (masks, assignments)
    of the distinct masks, and an array (masks, columns) of the sums.
    """

    masks: np.ndarray
    totals: np.ndarray


def cost_terms(layouts: Layouts, assigned: list[AssignedLayout]) -> CostTerms:
    """The cost terms of a step as arrays. `assigned` has the step's shardings and
    collectives under each axis assignment.

    All amounts are those of the unsharded step. The shape of each array is in
    parentheses; "axes" in it are the logical axes that any assignment shards.

    - `divides` (terms, assignments): whether the assignment divides the term.
    - `shared` (terms, 3): the term's floating-point operations; bytes of arguments and
      results; bytes of arguments and temporaries.
    - `divides_sent` (assignments, sent terms, assignments): whether the last assignment
      divides a term of the bytes that the collectives of the first assignment send.
    - `sent` (assignments, sent terms, 2): the bytes of this term that a device
      receives, before the factor (1 - 1 / size): in collectives that computation waits
      for, and in collectives that overlap with computation.
    - `calls` (assignments): the number of collectives of the assignment. An all-reduce
      counts twice, and reductions of gradients that XLA combines count once.
    - `limits` (axes, assignments): whether the assignment shards the logical axis.
    - `sizes`, `least` (axes): the size of the logical axis, and the smallest allowed
      number of its shards.
    """
    assignment_count = len(assigned)
    is_sharded = _is_sharded(assigned)
    amounts = _shared_amounts(layouts, assigned, is_sharded)
    shared = _summed(amounts, assignment_count, columns=3)
    sent = []
    for amounts in _sent_amounts(layouts, assigned, is_sharded):
        sent.append(_summed(amounts, assignment_count, columns=2))
    has_data = _has_data(layouts)
    calls = []
    for layout in assigned:
        calls.append(_call_count(layout, has_data))

    axes = sharded_axes(assigned)
    limits = np.zeros((len(axes), assignment_count), bool)
    for row, axis in enumerate(axes):
        limits[row] = [axis in layout.used for layout in assigned]
    sizes = [layouts.classes.axes[axis].size for axis in axes]
    return {
        "divides": shared.masks,
        "shared": shared.totals,
        "divides_sent": _stacked([sums.masks for sums in sent]),
        "sent": _stacked([sums.totals for sums in sent]),
        "calls": np.array(calls, float),
        "limits": limits,
        "sizes": np.array(sizes, dtype=np.int64),
        "least": np.ones(len(axes), np.int64),
    }


def _call_count(layout: AssignedLayout, has_data: Sequence[bool]) -> float:
    """The number of collectives of a layout, which shards over one mesh axis, that run
    one after another. `has_data` says for each value whether computation waits for its
    collectives. An event is a collective of a value.
    """
    total = 0.0
    # XLA combines the reductions of gradients, which do not wait for each other.
    combined: set[object] = set()
    for event in layout.events:
        is_combined = event.kind in SUMS and not has_data[event.value]
        key = (event.kind, event.times)
        if is_combined and key in combined:
            continue
        if is_combined:
            combined.add(key)
        total += event.times * rounds_of(event.kind)
    return total


def _is_sharded(assigned: Sequence[AssignedLayout]) -> np.ndarray:
    """For each value, and each axis assignment, whether the assignment shards it."""
    positions = np.array([layout.positions for layout in assigned])
    return positions.T >= 0


def _shared_amounts(
    layouts: Layouts,
    assigned: list[AssignedLayout],
    is_sharded: np.ndarray,
) -> list[_Amount]:
    """The work of each operation (column 0), the bytes of arguments and results (1),
    and the bytes of arguments and temporaries (2). `is_sharded[value]` says, for each
    assignment, whether it shards the value.
    """
    program = layouts.program
    is_divided_by_layout = [layout.divided for layout in assigned]
    is_divided = np.array(is_divided_by_layout).T
    amounts = []
    for mask, operation in zip(is_divided, program.operations, strict=True):
        flops = operation.flops * operation.times
        amount = _Amount(
            mask=mask,
            column=0,
            amount=flops,
        )
        amounts.append(amount)

    moved = [*program.arguments, *program.results]
    stored = [*program.arguments, *_temporaries(program)]
    for column, values in ((1, moved), (2, stored)):
        for value in values:
            nbytes = program.values[value].bytes
            amount = _Amount(
                mask=is_sharded[value],
                column=column,
                amount=nbytes,
            )
            amounts.append(amount)
    return amounts


def _sent_amounts(
    layouts: Layouts,
    assigned: list[AssignedLayout],
    is_sharded: np.ndarray,
) -> Iterator[list[_Amount]]:
    """Yields for each assignment the bytes of its collectives: in column 0 those that
    computation waits for, in column 1 the others. `is_sharded[value]` says, for each
    assignment, whether it shards the value, and the mask of an amount which assignments
    divide it.
    """
    has_data = _has_data(layouts)
    # The assignments that send a value for an operation.
    senders: dict[tuple[int, int], list[int]] = {}
    for number, layout in enumerate(assigned):
        for event in layout.events:
            moment = (event.value, event.operation)
            senders.setdefault(moment, []).append(number)

    for number, layout in enumerate(assigned):
        amounts = []
        for event in layout.events:
            mask = is_sharded[event.value].copy()
            # If several axes gather or sum an array, the first one moves only shards of
            # the later ones.
            for sender in senders[event.value, event.operation]:
                mask[sender] = sender > number
            # An all-to-all moves one shard; the other collectives move whole shards of
            # the other assignments.
            mask[number] = event.kind == "all-to-all"
            rounds = event.times * rounds_of(event.kind)
            value_bytes = layouts.program.values[event.value].bytes
            nbytes = value_bytes * rounds
            column = 0 if has_data[event.value] else 1
            amount = _Amount(
                mask=mask,
                column=column,
                amount=nbytes,
            )
            amounts.append(amount)
        yield amounts


def _has_data(layouts: Layouts) -> list[bool]:
    """For each value, whether it has a dimension that no parameter has. Computation
    waits for the collectives of such a value.
    """
    parameter_roots = layouts.classes.model_roots
    has_data = []
    # A value without dimensions has none.
    for dims in layouts.roots:
        roots = itertools.chain.from_iterable(dims)
        has_data.append(not parameter_roots.issuperset(roots))
    return has_data


def _summed(amounts: Sequence[_Amount], assignment_count: int, columns: int) -> _Sums:
    """Sums the amounts that the same of `assignment_count` axis assignments divide, in
    each of `columns` columns. An amount is a mask of the assignments that divide it,
    its column, and the number.
    """
    sums: dict[bytes, np.ndarray] = {}
    for mask, column, amount in amounts:
        sums.setdefault(mask.tobytes(), np.zeros(columns))[column] += amount
    masks = np.frombuffer(b"".join(sums), bool)
    totals = np.array(list(sums.values()))
    return _Sums(
        masks=masks.reshape(-1, assignment_count),
        totals=totals.reshape(-1, columns),
    )


def _temporaries(program: Program) -> list[int]:
    """The numbers of the values, without arguments, that are live where the unsharded
    step takes the most memory. A value lives from the operation that makes it to the
    last one that reads it.
    """
    operations = program.operations
    births: dict[int, int] = {}
    deaths = dict.fromkeys(program.results, len(operations))
    for number, operation in enumerate(operations):
        for value in operation.outs:
            births.setdefault(value, number)
        for value in (*operation.outs, *operation.ins):
            last_death = deaths.get(value, 0)
            deaths[value] = max(number, last_death)

    def is_stored(value: int) -> bool:
        """Whether a value takes memory of its own."""
        birth = births[value]
        maker = operations[birth]
        if maker.name in _IN_PLACE or program.values[value].free:
            return False
        if maker.flops or maker.name == "return":
            return True
        # The other operations are fused into their users.
        return deaths[value] - birth >= _STORED_FOR

    stored = list(filter(is_stored, births))
    # The bytes that each operation adds to those of the one before.
    changes = np.zeros(len(operations) + 2)
    for value in stored:
        nbytes = program.values[value].bytes
        changes[births[value]] += nbytes
        changes[deaths[value] + 1] -= nbytes
    live_bytes = np.cumsum(changes)
    peak = int(np.argmax(live_bytes))
    return [value for value in stored if births[value] <= peak <= deaths[value]]


def _stacked(arrays: list[np.ndarray]) -> np.ndarray:
    """Stacks matrices of different heights along a new first dimension. Rows of zeros
    make the heights equal.
    """
    height = max(map(len, arrays))
    padded_arrays = []
    for array in arrays:
        missing_rows = height - len(array)
        padding = ((0, missing_rows), (0, 0))
        padded_arrays.append(np.pad(array, padding))
    return np.stack(padded_arrays)


def sharded_axes(layouts: list[AssignedLayout]) -> list[int]:
    """The numbers of the logical axes that at least one axis assignment shards."""
    axes: set[int] = set()
    for layout in layouts:
        axes |= layout.used
    return sorted(axes)

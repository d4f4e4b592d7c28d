"""The cost terms of a step: its work, bytes and traffic, summed where the same axis
assignments divide them. `_core.py` explains them, and estimates candidates by them.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from .._step import Program
from ._layouts import AssignedLayout, Layouts


# A value that is used this many operations after the one that makes it is stored in
# between.
_LONG = 40
# The results of these operations reuse the memory of an operand.
_IN_PLACE = ("carry", "dynamic_update_slice")
# The cost terms of a step, as the arrays that `cost_terms` describes.
CostTerms = dict[str, np.ndarray]


class _Amount(NamedTuple):
    """An amount of a cost term: for each axis assignment whether it divides the amount,
    the column of the sum to which it is added, and the amount.
    """

    is_divided: np.ndarray
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
    - `calls` (assignments): the number of collectives of the assignment.
    - `limits` (axes, assignments): whether the assignment shards the logical axis.
    - `sizes`, `least` (axes): the size of the logical axis, and the smallest allowed
      number of its shards.
    """
    count = len(assigned)
    # For each value, whether each assignment shards it.
    is_cut = np.array(
        [[position >= 0 for position in layout.positions] for layout in assigned]
    ).T
    shared = _added(_shared_amounts(layouts, assigned, is_cut), count, 3)
    sent = [
        _added(amounts, count, 2)
        for amounts in _sent_amounts(layouts, assigned, is_cut)
    ]
    calls = [sum(event.times for event in layout.events) for layout in assigned]
    used = cut_by(assigned)
    limits = [[number in layout.used for layout in assigned] for number in used]
    sizes = [layouts.classes.axes[number].size for number in used]
    return {
        "divides": shared.masks,
        "shared": shared.totals,
        "divides_sent": _stacked([sums.masks for sums in sent]),
        "sent": _stacked([sums.totals for sums in sent]),
        "calls": np.array(calls, float),
        "limits": np.array(limits).reshape(-1, count),
        "sizes": np.array(sizes, dtype=np.int64),
        "least": np.ones(len(used), np.int64),
    }


def _shared_amounts(
    layouts: Layouts, assigned: list[AssignedLayout], is_cut: np.ndarray
) -> list[_Amount]:
    """The work of each operation (column 0), the bytes of arguments and results (1),
    and the bytes of arguments and temporaries (2).
    """
    program = layouts.program
    is_divided = np.array([layout.divided for layout in assigned]).T
    amounts = []
    for number, operation in enumerate(program.operations):
        flops = operation.flops * operation.times
        amounts.append(_Amount(is_divided[number], 0, flops))
    moved = [*program.arguments, *program.results]
    stored = [*program.arguments, *_temporaries(program)]
    for column, values in ((1, moved), (2, stored)):
        for value in values:
            nbytes = program.values[value].bytes
            amounts.append(_Amount(is_cut[value], column, nbytes))
    return amounts


def _sent_amounts(
    layouts: Layouts, assigned: list[AssignedLayout], is_cut: np.ndarray
) -> Iterator[list[_Amount]]:
    """Yields for each assignment the bytes of its collectives: in column 0 those that
    computation waits for, in column 1 the others.
    """
    # A value has data if it has a dimension that no parameter has. Computation waits
    # for its collectives.
    parameter_roots = layouts.classes.own
    has_data = [
        any(root not in parameter_roots for dim in dims for root in dim)
        for dims in layouts.roots
    ]
    # The assignments that send a value for an operation.
    senders: dict[tuple[int, int], list[int]] = {}
    for number, layout in enumerate(assigned):
        for event in layout.events:
            senders.setdefault((event.value, event.operation), []).append(number)
    for number, layout in enumerate(assigned):
        amounts = []
        for event in layout.events:
            mask = is_cut[event.value].copy()
            # If several axes gather or sum an array, the first one moves only shards of
            # the later ones.
            for other in senders[event.value, event.operation]:
                mask[other] = other > number
            # An all-to-all moves one shard; the other collectives move whole shards of
            # the other assignments.
            mask[number] = event.kind == "all-to-all"
            rounds = 2 if event.kind == "all-reduce" else 1
            nbytes = layouts.program.values[event.value].bytes * event.times * rounds
            column = 0 if has_data[event.value] else 1
            amounts.append(_Amount(mask, column, nbytes))
        yield amounts


def _added(amounts: Sequence[_Amount], count: int, columns: int) -> _Sums:
    """Sums the amounts that the same of `count` axis assignments divide."""
    sums: dict[bytes, np.ndarray] = {}
    for mask, column, amount in amounts:
        sums.setdefault(mask.tobytes(), np.zeros(columns))[column] += amount
    return _Sums(
        masks=np.frombuffer(b"".join(sums), bool).reshape(-1, count),
        totals=np.array([*sums.values()]).reshape(-1, columns),
    )


def _temporaries(program: Program) -> list[int]:
    """The numbers of the values, without arguments, that are live where the unsharded
    step takes the most memory.
    """
    operations = program.operations
    born: dict[int, int] = {}
    dies = dict.fromkeys(program.results, len(operations))
    for number, operation in enumerate(operations):
        for value in operation.outs:
            born.setdefault(value, number)
        for value in (*operation.outs, *operation.ins):
            dies[value] = max(number, dies.get(value, 0))

    def is_stored(value: int) -> bool:
        maker = operations[born[value]]
        if maker.name in _IN_PLACE or program.values[value].free:
            return False
        # The other operations are fused into their users.
        lifetime = dies[value] - born[value]
        return bool(maker.flops) or maker.name == "return" or lifetime >= _LONG

    stored = [value for value in born if is_stored(value)]
    changes = np.zeros(len(operations) + 2)
    for value in stored:
        changes[born[value]] += program.values[value].bytes
        changes[dies[value] + 1] -= program.values[value].bytes
    peak = int(np.argmax(np.cumsum(changes)))
    return [value for value in stored if born[value] <= peak <= dies[value]]


def _stacked(arrays: list[np.ndarray]) -> np.ndarray:
    """Stacks matrices of different heights along a new first dimension. Rows of zeros
    make the heights equal.
    """
    most = max(len(array) for array in arrays)
    return np.stack(
        [np.pad(array, ((0, most - len(array)), (0, 0))) for array in arrays]
    )


def cut_by(layouts: list[AssignedLayout]) -> list[int]:
    """The numbers of the logical axes that at least one axis assignment shards."""
    return sorted(frozenset().union(*(layout.used for layout in layouts)))


def padded(terms: CostTerms) -> CostTerms:
    """The arrays of `cost_terms`, padded with terms, assignments and logical axes that
    change no estimate.

    With this padding most searches of a process have arrays of equal shapes, and share
    one compiled program. Counts become float32, since only their leading digits matter.
    """
    added_terms = -len(terms["shared"]) % 32
    added_events = -terms["sent"].shape[1] % 16
    # The last assignment shards nothing. It fills up sets with fewer than four
    # assignments.
    added_assignments = 1 + (-1 - len(terms["calls"])) % 80
    added_axes = -len(terms["sizes"]) % 16
    widths = {
        "divides": (added_terms, added_assignments),
        "shared": (added_terms, 0),
        "divides_sent": (added_assignments, added_events, added_assignments),
        "sent": (added_assignments, added_events, 0),
        "calls": (added_assignments,),
        "limits": (added_axes, added_assignments),
        "sizes": (added_axes,),
        "least": (added_axes,),
    }
    # A size that int32 cannot hold becomes a smaller one that the same numbers of
    # devices divide.
    sizes = []
    for size in terms["sizes"].tolist():
        if size >= 2**31:
            size = 11 * math.gcd(size, 2**16 * 3**3 * 5 * 7)
        sizes.append(size)
    kinds = {"f": np.float32, "b": np.bool_, "i": np.int32}
    arrays = {}
    for name, array in {**terms, "sizes": np.array(sizes)}.items():
        padding = [(0, width) for width in widths[name]]
        padded_array = np.pad(array, padding)
        arrays[name] = padded_array.astype(kinds[padded_array.dtype.kind])
    return arrays

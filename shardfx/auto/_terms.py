"""The cost of a step as arrays: the assignments that divide each quantity, and the bytes that each assignment sends.

A row stands for all quantities that the same assignments divide. A candidate gives each assignment a number of devices,
and a row is divided by the product of the numbers of its assignments.
"""

import math

import numpy as np

from .._step import Operation, Program
from ._layouts import AssignedLayout, Layouts


# A value that is still used this many operations after it was made was stored in the meantime.
_LONG = 40
# Results of these have the sharding of their operands.
_IN_PLACE = ("carry", "dynamic_update_slice")


Terms = dict[str, np.ndarray]


class _Rows:
    """Quantities, grouped by the assignments that divide them."""

    def __init__(self, assignments: int, columns: int):
        self.assignments, self.columns = assignments, columns
        self.found: dict[bytes, np.ndarray] = {}

    def add(self, mask: np.ndarray, column: int, amount: float) -> None:
        key = mask.tobytes()
        if key not in self.found:
            self.found[key] = np.zeros(self.columns)
        self.found[key][column] += amount

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        masks = np.array(
            [np.frombuffer(key, dtype=bool) for key in self.found] or np.zeros((0, self.assignments), bool)
        )
        return masks.reshape(-1, self.assignments), np.array(list(self.found.values())).reshape(-1, self.columns)


def terms_of(layouts: Layouts, made: list[AssignedLayout]) -> Terms:
    """The terms of a step under some assignments, as arrays. All numbers are of the whole step on one device.

    - `divides` (rows, assignments): whether each assignment divides each row.
    - `shared` (rows, 3): floating-point operations, bytes of arguments and results, bytes of arguments and temporaries.
    - `divides_sent` (assignments, few, assignments): whether each assignment divides a row of the bytes that one
        assignment sends.
    - `sent` (assignments, few, 2): the bytes that a device receives, still to be multiplied by (1 - 1 / size): those
        that computation waits for, then those that it can hide.
    - `calls` (assignments): the number of collectives of each assignment.
    - `limits` (classes, assignments), `sizes`, `least` (classes): whether each assignment shards each class of
        `cut_by`, the size of that class, and the least number of shards that it must have.
    """
    program, count = layouts.program, len(made)
    cut = np.array([[position >= 0 for position in layout.cuts] for layout in made]).T
    shared = np.array([layout.shared for layout in made]).T
    rows, sent = _Rows(count, 3), [_Rows(count, 2) for _ in made]
    for number, operation in enumerate(program.operations):
        rows.add(shared[number], 0, operation.flops * operation.times)
    for value in (*program.arguments, *program.results):
        rows.add(cut[value], 1, program.values[value].bytes)
    for value in (*program.arguments, *_temporaries(program)):
        rows.add(cut[value], 2, program.values[value].bytes)
    data = _has_data(layouts)
    moving: dict[tuple[int, int], list[int]] = {}
    for number, layout in enumerate(made):
        for event in layout.events:
            moving.setdefault((event.value, event.operation), []).append(number)
    for number, layout in enumerate(made):
        for event in layout.events:
            mask = cut[event.value].copy()
            # If several axes gather or sum an array, the first moves only the share that the later ones leave.
            for other in moving.get((event.value, event.operation), ()):
                mask[other] = other > number
            # An exchange moves one shard; the others move everything that the remaining assignments leave.
            mask[number] = event.kind == "all-to-all"
            amount = program.values[event.value].bytes * event.times * (2 if event.kind == "all-reduce" else 1)
            sent[number].add(mask, int(not data[event.value]), amount)
    masks, columns = rows.arrays()
    used = cut_by(made)
    limits = np.array([[number in layout.used for layout in made] for number in used]).reshape(len(used), count)
    return {
        "divides": masks,
        "shared": columns,
        "divides_sent": _stacked([rows.arrays()[0] for rows in sent]),
        "sent": _stacked([rows.arrays()[1] for rows in sent]),
        "calls": np.array([sum(event.times for event in layout.events) for layout in made], float),
        "limits": limits,
        "sizes": np.array([layouts.classes.groups[number].size for number in used], dtype=np.int64),
        "least": np.ones(len(used), np.int64),
    }


def _has_data(layouts: Layouts) -> list[bool]:
    """For each value, whether it has a dimension that no parameter has. Computation waits for collectives of such
    values.
    """
    own = layouts.classes.own
    return [any(leaf not in own for dim in dims for leaf in dim) for dims in layouts.parts]


def _temporaries(program: Program) -> list[int]:
    """The temporaries in memory at the worst moment of the unsharded step."""
    maker: dict[int, Operation] = {}
    born, dies = dict[int, int](), dict.fromkeys(program.results, len(program.operations))
    for number, operation in enumerate(program.operations):
        for value in operation.outs:
            maker.setdefault(value, operation)
            born.setdefault(value, number)
        for value in (*operation.outs, *operation.ins):
            dies[value] = max(number, dies.get(value, 0))
    kept = [
        value
        for value, made in maker.items()
        if made.name not in _IN_PLACE
        and not program.values[value].free
        # The other operations are fused into their users.
        and (made.flops or made.name == "return" or dies[value] - born[value] >= _LONG)
    ]
    totals = np.zeros(len(program.operations) + 2)
    for value in kept:
        totals[born[value]] += program.values[value].bytes
        totals[dies[value] + 1] -= program.values[value].bytes
    most = int(np.argmax(np.cumsum(totals)))
    return [value for value in kept if born[value] <= most <= dies[value]]


def _stacked(arrays: list[np.ndarray]) -> np.ndarray:
    """Arrays of different lengths as one array, padded with zeros."""
    most = max(len(array) for array in arrays)
    return np.stack([np.pad(array, ((0, most - len(array)), (0, 0))) for array in arrays])


def cut_by(made: list[AssignedLayout]) -> list[int]:
    """The numbers of the classes that some assignment shards."""
    return sorted(frozenset().union(*(layout.used for layout in made)))


def _small(size: int) -> int:
    """A size that int32 holds and that the same numbers of devices divide."""
    return size if size < 2**31 else 11 * math.gcd(size, 2**16 * 3**3 * 5 * 7)


def padded(terms: Terms) -> Terms:
    """The arrays that the core takes, filled up with assignments, rows and classes that do nothing.

    With this padding most searches of a process share one compiled program. Counts become float32, since only their
    leading digits matter.
    """
    rows, few = -len(terms["shared"]) % 32, -terms["sent"].shape[1] % 16
    # There is one assignment more than needed: sets with fewer assignments name it.
    more, classes = 1 + (-1 - len(terms["calls"])) % 80, -len(terms["sizes"]) % 16
    widths = {
        "divides": (rows, more),
        "shared": (rows, 0),
        "divides_sent": (more, few, more),
        "sent": (more, few, 0),
        "calls": (more,),
        "limits": (classes, more),
        "sizes": (classes,),
        "least": (classes,),
    }
    kinds = {np.dtype(float): np.float32, np.dtype(bool): np.bool_, np.dtype(np.int64): np.int32}
    small = {**terms, "sizes": np.array([*map(_small, terms["sizes"].tolist())], np.int64)}
    return {
        name: np.pad(small[name], [(0, n) for n in wide]).astype(kinds[small[name].dtype])
        for name, wide in widths.items()
    }

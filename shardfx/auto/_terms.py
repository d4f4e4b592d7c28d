"""The cost of a step as arrays: the assignments that divide each quantity, and the bytes that each assignment sends.

A row stands for all quantities that the same assignments divide. A candidate gives each assignment a number of devices,
and a row is divided by the product of the numbers of its assignments.
"""

import math
from collections.abc import Sequence

import numpy as np

from .._step import Program
from ._layouts import AssignedLayout, Layouts


# A value that is still used this many operations after it was made was stored in the meantime.
_LONG = 40
# Results of these have the sharding of their operands.
_IN_PLACE = ("carry", "dynamic_update_slice")


Terms = dict[str, np.ndarray]


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
    values = program.values
    cut = np.array([[position >= 0 for position in layout.cuts] for layout in made]).T
    shared = np.array([layout.shared for layout in made]).T
    stored = [*program.arguments, *program.results], [*program.arguments, *_temporaries(program)]
    rows = [(shared[number], 0, made.flops * made.times) for number, made in enumerate(program.operations)]
    rows += [(cut[value], column, values[value].bytes) for column, own in enumerate(stored, 1) for value in own]
    # A value has data if it has a dimension that no parameter has. Computation waits for collectives of such values.
    own = layouts.classes.own
    has_data = [any(leaf not in own for dim in dims for leaf in dim) for dims in layouts.parts]
    moving: dict[tuple[int, int], list[int]] = {}
    for number, layout in enumerate(made):
        for event in layout.events:
            moving.setdefault((event.value, event.operation), []).append(number)
    sent: list[tuple[np.ndarray, np.ndarray]] = []
    for number, layout in enumerate(made):
        events: list[tuple[np.ndarray, int, float]] = []
        for event in layout.events:
            mask = cut[event.value].copy()
            # If several axes gather or sum an array, the first moves only the share that the later ones leave.
            for other in moving[event.value, event.operation]:
                mask[other] = other > number
            # An exchange moves one shard; the others move everything that the remaining assignments leave.
            mask[number] = event.kind == "all-to-all"
            amount = values[event.value].bytes * event.times * (2 if event.kind == "all-reduce" else 1)
            events.append((mask, int(not has_data[event.value]), amount))
        sent.append(_added(events, count, 2))
    masks, columns = _added(rows, count, 3)
    used = cut_by(made)
    return {
        "divides": masks,
        "shared": columns,
        "divides_sent": _stacked([masks for masks, _ in sent]),
        "sent": _stacked([amounts for _, amounts in sent]),
        "calls": np.array([sum(event.times for event in layout.events) for layout in made], float),
        "limits": np.array([[number in layout.used for layout in made] for number in used]).reshape(-1, count),
        "sizes": np.array([layouts.classes.groups[number].size for number in used], dtype=np.int64),
        "least": np.ones(len(used), np.int64),
    }


def _added(rows: Sequence[tuple[np.ndarray, int, float]], count: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """The different masks of `count` assignments, and for each mask the sums of its amounts by column."""
    found: dict[bytes, np.ndarray] = {}
    for mask, column, amount in rows:
        found.setdefault(mask.tobytes(), np.zeros(columns))[column] += amount
    masks = np.frombuffer(b"".join(found), bool).reshape(-1, count)
    return masks, np.array([*found.values()]).reshape(-1, columns)


def _temporaries(program: Program) -> list[int]:
    """The temporaries in memory at the worst moment of the unsharded step."""
    operations = program.operations
    born: dict[int, int] = {}
    dies = dict.fromkeys(program.results, len(operations))
    for number, operation in enumerate(operations):
        born |= {value: number for value in operation.outs if value not in born}
        dies |= {value: max(number, dies.get(value, 0)) for value in (*operation.outs, *operation.ins)}
    kept = [
        value
        for value, number in born.items()
        if (made := operations[number]).name not in _IN_PLACE
        and not program.values[value].free
        # The other operations are fused into their users.
        and (made.flops or made.name == "return" or dies[value] - number >= _LONG)
    ]
    totals = np.zeros(len(operations) + 2)
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
    # int32 does not hold some sizes: they become smaller ones that the same numbers of devices divide.
    sizes = [size if size < 2**31 else 11 * math.gcd(size, 2**16 * 3**3 * 5 * 7) for size in terms["sizes"].tolist()]
    kinds = {"f": np.float32, "b": np.bool_, "i": np.int32}
    arrays = {
        name: np.pad(array, [(0, n) for n in widths[name]])
        for name, array in {**terms, "sizes": np.array(sizes)}.items()
    }
    return {name: array.astype(kinds[array.dtype.kind]) for name, array in arrays.items()}

"""The cost of a step as arrays: which assignments divide which bytes and operations, and what each assignment sends.

A row stands for all quantities that the same assignments divide. A candidate gives each assignment a number of devices;
a row is divided by the product of the numbers of its assignments.
"""

import dataclasses
import math

import numpy as np
from jaxtyping import Bool, Float, Int

from .._step import Operation, Program
from ._layouts import Layout, Layouts


# A value that is used this many operations after it was made, or later, was put aside in memory.
_LONG = 40
# Results of these lie where what they are made of lay.
_IN_PLACE = ("carry", "dynamic_update_slice")


@dataclasses.dataclass(frozen=True)
class Terms:
    """Coefficients of rows, for some assignments. All are global: of the whole step on one device.

    - `divides`: which assignments divide a row.
    - `shared`: floating-point operations, bytes of arguments and results, and bytes of arguments and temporaries.
    - `divides_sent`: which assignments divide a row of what one assignment sends.
    - `sent`: for each assignment the bytes that a device receives, still to be multiplied by (1 - 1 / size): first
        those that computation waits for, then those that it can hide.
    - `calls`: how many collectives each assignment has.
    - `classes`, `sizes`: the classes of dimensions that any assignment cuts, by number, and their sizes.
    - `limits`: which assignments cut each class.
    - `least`: into how many pieces each class must be cut at least.
    - `after`: for each assignment the classes that must be cut wholly, since it cuts what stands behind them.
    """

    divides: Bool[np.ndarray, "rows assignments"]
    shared: Float[np.ndarray, "rows 3"]
    divides_sent: Bool[np.ndarray, "assignments few assignments"]
    sent: Float[np.ndarray, "assignments few two"]
    calls: Float[np.ndarray, " assignments"]
    limits: Bool[np.ndarray, "classes assignments"]
    sizes: Int[np.ndarray, " classes"]
    after: Bool[np.ndarray, "assignments classes"]
    classes: tuple[int, ...]
    least: Int[np.ndarray, " classes"]


class _Rows:
    """Quantities by the assignments that divide them."""

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


def terms_of(layouts: Layouts, made: list[Layout]) -> Terms:
    """The terms of a step under these assignments."""
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
            # Of an array that several axes gather, or sum, the first moves its part of what the later ones leave.
            for other in moving.get((event.value, event.operation), ()):
                mask[other] = other > number
            # An exchange moves one shard, the others the whole of what the other assignments leave.
            mask[number] = event.kind == "all-to-all"
            amount = program.values[event.value].bytes * event.times * (2 if event.kind == "all-reduce" else 1)
            sent[number].add(mask, int(not data[event.value]), amount)
    masks, columns = rows.arrays()
    used = _used(layouts, made)
    sizes = [layouts.classes.groups[number].size for number in used]
    limits = np.array([[number in layout.used for layout in made] for number in used]).reshape(len(used), count)
    return Terms(
        divides=masks,
        shared=columns,
        divides_sent=_stacked([rows.arrays()[0] for rows in sent]),
        sent=_stacked([rows.arrays()[1] for rows in sent]),
        calls=np.array([sum(event.times for event in layout.events) for layout in made]),
        limits=limits,
        sizes=np.array(sizes, dtype=np.int64),
        after=_after(layouts, made, used),
        classes=tuple(used),
        least=np.ones(len(used), np.int32),
    )


def _has_data(layouts: Layouts) -> list[bool]:
    """Which values have a dimension that no parameter has: the compiler waits for what becomes of them."""
    own = layouts.classes.own
    return [any(leaf not in own for dim in dims for leaf in dim) for dims in layouts.parts]


def _temporaries(program: Program) -> list[int]:
    """What lives at the moment when temporaries are largest, as long as nothing is cut."""
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
        # Others are fused into those that use them.
        and (made.flops or made.name == "return" or dies[value] - born[value] >= _LONG)
    ]
    totals = np.zeros(len(program.operations) + 2)
    for value in kept:
        totals[born[value]] += program.values[value].bytes
        totals[dies[value] + 1] -= program.values[value].bytes
    most = int(np.argmax(np.cumsum(totals)))
    return [value for value in kept if born[value] <= most <= dies[value]]


def _stacked(arrays: list[np.ndarray]) -> np.ndarray:
    """Arrays of different lengths as one, with zeros at their ends."""
    most = max(len(array) for array in arrays)
    return np.stack([np.pad(array, ((0, most - len(array)), (0, 0))) for array in arrays])


def _used(layouts: Layouts, made: list[Layout]) -> list[int]:
    """The classes that some assignment cuts, and those that stand before them in one dimension."""
    before = {
        number
        for layout in made
        for parts, position in zip(layouts.flat, layout.cuts, strict=True)
        if position >= 0
        for number, _ in parts[position - parts[position][1] : position]
    }
    return sorted(before.union(*(layout.used for layout in made)))


def _after(layouts: Layouts, made: list[Layout], used: list[int]) -> np.ndarray:
    """For each assignment the classes that stand before one that it cuts, in one dimension: they must be cut wholly."""
    found = np.zeros((len(made), len(used)), bool)
    for number, layout in enumerate(made):
        for parts, position in zip(layouts.flat, layout.cuts, strict=True):
            at = parts[position][1] if position >= 0 else 0
            for before, _ in parts[position - at : position] if at else ():
                found[number, used.index(before)] = True
    return found


def _small(size: int) -> int:
    """A size with the same divisors among numbers of devices, and no number of devices itself, that int32 holds."""
    return size if size < 2**31 else 11 * math.gcd(size, 2**16 * 3**3 * 5 * 7)


def padded(terms: Terms) -> dict[str, np.ndarray]:
    """The arrays that the core takes, filled up with assignments, rows and classes that do nothing.

    So most searches of a process share one compiled program. Counts become float32: their leading digits decide.
    """
    rows, few = -len(terms.shared) % 32, -terms.sent.shape[1] % 16
    # At least one assignment more: sets that have fewer assignments than there can be name it.
    assignments, classes = 1 + (-1 - terms.divides.shape[1]) % 80, -len(terms.sizes) % 16
    return {
        "divides": np.pad(terms.divides, ((0, rows), (0, assignments))),
        "shared": np.pad(terms.shared, ((0, rows), (0, 0))).astype(np.float32),
        "divides_sent": np.pad(terms.divides_sent, ((0, assignments), (0, few), (0, assignments))),
        "sent": np.pad(terms.sent, ((0, assignments), (0, few), (0, 0))).astype(np.float32),
        "calls": np.pad(terms.calls, (0, assignments)).astype(np.float32),
        "limits": np.pad(terms.limits, ((0, classes), (0, assignments))),
        "sizes": np.pad(np.array([*map(_small, terms.sizes.tolist())], np.int32), (0, classes), constant_values=1),
        "least": np.pad(terms.least, (0, classes), constant_values=1).astype(np.int32),
        "after": np.pad(terms.after, ((0, assignments), (0, classes))),
    }

"""The seconds and memory of all meshes of up to four axes at once, as one compiled function of arrays.

**What is priced.** An assignment says which dimensions of the step one mesh axis shards, and which collectives
follow (`_layouts.py`). A step has up to 79 assignments. A candidate is a set of at most four of them,
and a share: a size for each, whose product is the number of devices. For 256 devices there are 35 shares of four axes.
With 42 assignments, which have 112,000 sets of four, that makes 4 million candidates, as many as are priced
(`assignment_count`). The core prices all of them, so it must not look at the step's operations again.

**Rows.** Take the floating-point operations of one product. If the assignments `a` and `b` of the set {a, b, c, d}
shard the product, one device does `flops / (size_a * size_b)` of it. All products that the same assignments shard are
divided by the same number, so they are added up beforehand (`terms_of`). Such a sum is a row: it holds operations,
bytes of arguments and results, bytes in memory, and `divides`, one bool for each assignment. A large step has some
hundred rows.

**Kinds.** Within a set of four assignments a row is of one of 2**4 kinds: its `divides` for these four, read as a
binary number. Only the kind says by what a row is divided. So for each set the rows of each kind are summed:

    sums[set, kind, quantity] = sum over rows of (row is of the kind) * quantity[row]           `_kinds`, an einsum

and for each share every kind has one divisor, the product of the sizes of its assignments:

    power[share, kind] = 1 / product of size[assignment] for those of the kind                  `has`, exp2(-log2)
    total[set, share, quantity] = sum over kinds of power[share, kind] * sums[set, kind, quantity]

The second line is a product of matrices: a block of sets by 16 kinds, times 16 kinds by all shares. A candidate and
quantity cost 16 multiplications, however large the step is.

**An example.** A row of 100 operations that assignment 0 divides, and one of 60 that assignments 0 and 1 divide. In the
set {0, 1} the first is of kind 0b01, the second of kind 0b11. With the share (4, 2) the divisors of the kinds 0b00,
0b01, 0b10 and 0b11 are 1, 4, 2 and 8. So a device does 100 / 4 + 60 / 8 = 32.5 operations.

**Seconds.** Computation takes the longer of operations at the chip's speed and bytes at its memory's. What an
assignment sends are rows of their own, with the assignments that divide them. A device receives `(1 - 1 / size)` of
what is left of a row, over the links that an axis of this size has (`_seconds_per_byte`, by the network of
`chips/_chip.py`). Collectives of data are exposed: computation waits for them. Collectives of parameters and gradients
overlap with the part `overlap` of the computation, and the computation waits for the rest. Each call takes some
microseconds more.

**What is allowed.** The sizes of all assignments that shard one dimension must divide it, and some limits of the user
must hold: sums over kinds again (`costs`). A candidate that is not allowed, or takes more memory than a device
has, has infinite seconds; the best share of each set is kept, and the best sets of all.

**What it leaves out.** Each assignment is priced as if the step were constrained to it, with its own collectives. The
memory traffic of single operations is not counted. The core only prunes: XLA partitions the candidates that survive,
and the partitioned programs decide.
"""

import dataclasses
import functools as ft
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from .._step import Program
from ..chips import Chip
from ..chips._chip import extents_of, shared
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
            # If several axes gather or sum an array, the first moves only the shards that the later ones leave.
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
    """Sums amounts by mask and column: the distinct masks over `count` assignments, and a row of sums for each."""
    found: dict[bytes, np.ndarray] = {}
    for mask, column, amount in rows:
        found.setdefault(mask.tobytes(), np.zeros(columns))[column] += amount
    masks = np.frombuffer(b"".join(found), bool).reshape(-1, count)
    return masks, np.array([*found.values()]).reshape(-1, columns)


def _temporaries(program: Program) -> list[int]:
    """The numbers of the temporary values that are in memory at the worst moment of the unsharded step."""
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
    """The numbers of the classes that at least one assignment shards."""
    return sorted(frozenset().union(*(layout.used for layout in made)))


def padded(terms: Terms) -> Terms:
    """The terms padded with assignments, rows and classes that change no price.

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


# JAX's module or NumPy's: the same code is compiled for many candidates, and runs uncompiled for few.
_Array = Array | np.ndarray
Numbers = Mapping[str, Any]
AXES = 4
# The number of candidates at once: their arrays should fit in the cache.
_BLOCK, _SETS = 2**16, 2048
# The largest number of candidates that are priced.
_ALL = 2**22


@dataclasses.dataclass(frozen=True)
class CostModel:
    """The assumptions of the estimate that no data sheet of a chip states.

    - `compute`: the part of the peak that products reach.
    - `memory`: the part of the memory's bandwidth that is reached.
    - `network`: the part of the links' bandwidth that collectives reach.
    - `overlap`: the part of the computation with which collectives of parameters and gradients can overlap.
    - `call_seconds`: the fixed seconds of each collective, in addition to the seconds of its bytes.
    """

    compute: float = 0.55
    memory: float = 0.8
    network: float = 0.8
    overlap: float = 0.5
    call_seconds: float = 2e-6


def shares(devices: int, axes: int) -> Int[np.ndarray, "shares axes"]:
    """All ways to write the number of devices as an ordered product of `axes` sizes above 1."""
    divisors = [size for size in range(2, devices + 1) if devices % size == 0]
    firsts = [(first, math.prod(first)) for first in itertools.product(divisors, repeat=axes - 1)]
    found = [(*first, devices // size) for first, size in firsts if size < devices and devices % size == 0]
    return np.array(found, np.int32).reshape(-1, axes)


@ft.partial(jax.jit, static_argnames="keep")
def best_of_block(
    arrays: Numbers,
    machine: Numbers,
    sets: Int[Array, "block axes"],
    sizes: Int[Array, "shares axes"],
    slices: Int[Array, "shares axes"],
    real: Int[Array, ""],
    *,
    keep: int,
) -> tuple[Int[Array, " keep"], Int[Array, " keep"], Float[Array, "keep 2"]]:
    """For the best of the first `real` sets, the index of the set, of its best axis sizes, and the cost. Sets that do
    not fit in memory are left out.
    """
    seconds, memory = costs(arrays, machine, sets, sizes, slices)
    is_real = (jnp.arange(len(sets)) < real)[:, None]
    seconds = jnp.where(is_real & (memory <= machine["limit"]), seconds, jnp.inf)
    share = jnp.argmin(seconds, axis=1)[:, None]
    best = jnp.concatenate([jnp.take_along_axis(part, share, axis=1) for part in (seconds, memory)], -1)
    _, at = jax.lax.top_k(-best[:, 0], min(keep, len(sets)))
    return at, share[at, 0], best[at]


def costs(
    arrays: Numbers,
    machine: Numbers,
    sets: Int[_Array, "block axes"],
    sizes: Int[_Array, "shares axes"],
    slices: Int[_Array, "shares axes"],
) -> tuple[Float[_Array, "block shares"], Float[_Array, "block shares"]]:
    """The seconds and the bytes of memory of a step, for each pair of a set of assignments and sizes of mesh axes.
    Pairs that are not allowed take infinite seconds.

    With NumPy arrays nothing is compiled, which is faster for few pairs.
    """
    xp: Any = jnp if isinstance(sets, jax.Array) else np
    axes = sets.shape[-1]
    # For each kind, the assignments of a set that divide its rows.
    has = (np.arange(2**axes)[:, None] // 2 ** np.arange(axes)) % 2 == 1
    # A row has one of 2**axes kinds, by the assignments of the set that divide it. For each set, rows are summed by
    # kind.
    rows = _kinds(xp.moveaxis(arrays["divides"][:, sets], 0, 1), axes)
    shared = xp.einsum("brk,rq->bkq", rows, arrays["shared"])
    # The rows of one assignment, by their kind.
    bits = xp.take_along_axis(arrays["divides_sent"][sets], sets[:, None, None, :], axis=3)
    sent = xp.einsum("bjrk,bjrt->bkjt", _kinds(bits, axes), arrays["sent"][sets])
    power = xp.exp2(-(xp.log2(sizes.astype(np.float32)) @ has.T.astype(np.float32)))
    flops, moved, memory = xp.einsum("sk,bkq->qbs", power, shared)
    compute = xp.maximum(flops / machine["flops"], moved / machine["hbm"])
    per_byte = _seconds_per_byte(xp, machine, sizes, slices)
    exposed, hidden = (xp.einsum("sk,bkjt->tjbs", power, sent) * per_byte[:, None]).sum(1)
    called = machine["call_seconds"] * (arrays["calls"][sets] @ (sizes > 1).T.astype(np.float32))
    seconds = compute + exposed + called + xp.maximum(0.0, hidden - machine["overlap"] * compute)
    # All dimensions must divide into these shards, and none into fewer than the limits ask for.
    cuts = xp.prod(xp.where(has, sizes[:, None, :], 1), axis=-1)
    broken = (arrays["sizes"][:, None, None] % cuts != 0) | (cuts < arrays["least"][:, None, None])
    limits = _kinds(xp.moveaxis(arrays["limits"][:, sets], 0, 1), axes)
    is_allowed = xp.einsum("bck,csk->bs", limits, broken.astype(np.float32)) == 0
    return xp.where(is_allowed, seconds, np.inf), memory


def _kinds(divides: Bool[_Array, "*any axes"], axes: int) -> Float[_Array, "*any kinds"]:
    """A one-hot array with the kind of each row. The kind says which of a set's assignments divide the row."""
    codes = (divides.astype(np.int32) * 2 ** np.arange(axes, dtype=np.int32)).sum(-1)
    return (codes[..., None] == np.arange(2**axes)).astype(np.float32)


def _seconds_per_byte(
    xp: Any, machine: Numbers, sizes: Int[_Array, "shares axes"], slices: Int[_Array, "shares axes"]
) -> Float[_Array, "axes shares"]:
    """Seconds per byte of a collective on each axis: in a ring of n devices, (n - 1) / n of each byte is sent.

    On a torus an axis has links in proportion to the logarithm of its size. With islands of switched chips, as many
    devices of each axis as possible are in one island. Bytes between slices go through the hosts' network.
    """
    inner, whole = (sizes // slices).T.astype(np.float32), sizes.T.astype(np.float32)
    total = xp.prod(inner, axis=0)
    share = machine["dims"] * xp.log2(inner) / xp.maximum(xp.log2(total), 1.0)
    bandwidth = xp.where(machine["dims"] > 0, machine["link"] * xp.maximum(share, 0.5), machine["link"])
    near = xp.minimum(machine["island"], inner)
    return (1 - 1 / near) / bandwidth + (1 - near / whole) / near / machine["dcn"]


def machine_of(chip: Chip, devices: int, model: CostModel, limit_bytes: float, extents: Sequence[int] = ()) -> Numbers:
    """The chip's rates, under the cost model's assumptions, as numbers for the core. `extents` are the extents of a
    slice that the user named.
    """
    link, dims, island = shared(chip, extents or extents_of(chip, devices))
    numbers = {
        "flops": float(chip.flops("bfloat16")) / chip.devices_per_chip * model.compute,
        "hbm": float(chip.hbm_bytes_per_second) / chip.devices_per_chip * model.memory,
        "link": link * model.network,
        "dims": dims,
        "island": island,
        "dcn": max(float(chip.dcn_bytes_per_second), 1.0) / chip.devices_per_chip * model.network,
        "overlap": model.overlap,
        "call_seconds": model.call_seconds,
        "limit": limit_bytes,
    }
    return {name: np.float32(number) for name, number in numbers.items()}


@dataclasses.dataclass(frozen=True)
class Found:
    """One priced candidate: the numbers of its assignments, the size of each mesh axis, and how many slices each axis
    spans.
    """

    assignments: tuple[int, ...]
    sizes: tuple[int, ...]
    slices: tuple[int, ...]
    seconds: float
    memory_bytes: float


def find(terms: Terms, machine: Numbers, devices: int, slices: int = 1, *, keep: int = 256) -> list[Found]:
    """The best sets of assignments, the fastest first, each with its best sizes of mesh axes.

    All sets of up to four assignments are priced. If these have more than `_ALL` candidates, the last assignments are
    left out; the usual assignments come first.
    """
    by_count = [shares_of(devices, number, slices) for number in range(1, AXES + 1)]
    assignments = assignment_count(terms, by_count)
    room = -(-max(len(sizes) for sizes, _ in by_count) // 8) * 8 or 8
    arrays, block, nothing = padded(terms), min(_SETS, max(1, _BLOCK // room)), len(terms["calls"])
    found: list[Found] = []
    for number, given in enumerate(by_count, start=1):
        sets = itertools.combinations(range(assignments), number) if len(given[0]) else iter(())
        # Unused axes and shares are padded, so that one program serves all searches.
        wide = [np.pad(one, ((0, 0), (0, AXES - number)), constant_values=1) for one in given]
        sizes, between = (np.concatenate([one, np.repeat(one[:1], room - len(one), axis=0)]) for one in wide)
        while rows := [*itertools.islice(sets, block)]:
            made = np.full((block, AXES), nothing, np.int32)
            made[: len(rows), :number] = rows
            priced = best_of_block(arrays, machine, made, sizes, between, np.int32(len(rows)), keep=keep)
            least = found[-1].seconds if len(found) == keep else math.inf
            for at, share, cost in zip(*(np.asarray(one).tolist() for one in priced), strict=True):
                if cost[0] < least:
                    parts = made[at], sizes[share], between[share]
                    own: list[Any] = [tuple(part[:number].tolist()) for part in parts]
                    found.append(Found(*own, *cost))
            found = sorted(found, key=lambda one: one.seconds)[:keep]
    return found


def assignment_count(terms: Terms, by_count: Sequence[tuple[np.ndarray, np.ndarray]]) -> int:
    """How many assignments, from the first, are combined with each other."""
    count = len(terms["calls"])
    while sum(math.comb(count, number) * len(sizes) for number, (sizes, _) in enumerate(by_count, start=1)) > _ALL:
        count -= 1
    return count


def shares_of(
    devices: int, axes: int, slices: int
) -> tuple[Int[np.ndarray, "shares axes"], Int[np.ndarray, "shares axes"]]:
    """All sizes of mesh axes for this number of devices, and how many slices each axis spans. One axis spans all
    slices.
    """
    sizes = shares(devices, axes)
    if slices == 1:
        return sizes, np.ones_like(sizes)
    rows, spanning = np.nonzero(sizes % slices == 0)
    return sizes[rows], np.where(np.arange(axes) == spanning[:, None], slices, 1).astype(np.int32)

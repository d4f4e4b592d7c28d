"""The estimated seconds and memory of all meshes of up to four axes, as one compiled
function of arrays.

**Candidates.** An axis assignment is the logical axes that one mesh axis shards, in
order of preference (`_layouts.py`). A candidate is a set of at most four assignments,
with a mesh axis size for each, whose product is the number of devices. With 256
devices, 42 assignments have 4 million candidates, the largest number that is estimated.
So the estimate of a candidate must not look at the operations of the step again.

**Cost terms.** If the assignments `a` and `b` of the set {a, b, c, d} shard a matrix
product, one device does `flops / (size_a * size_b)` of it. All work, bytes or traffic
that the same assignments divide is added up beforehand, to one cost term. A term has
`divides`, one bool for each assignment. A large step has some hundred terms.

**Masks.** The mask of a term within a set of four assignments is its `divides` for
these four, read as a binary number below 2**4. Only the mask determines the divisor of
the term, so for each set the terms with equal masks are summed:

    sums[set, mask, quantity] = sum over terms of (term has the mask) * quantity[term]
    `_masks`, an einsum power[sizes, mask] = 1 / product of size[assignment] for those
    in the mask                  `has`, exp2(-log2) total[set, sizes, quantity] = sum
    over masks of power[sizes, mask] * sums[set, mask, quantity]

The last line is a product of matrices: a candidate and quantity cost 16
multiplications, however large the step is.

**An example.** Assignment 0 divides a term of 100 operations; assignments 0 and 1
divide a term of 60. In the set {0, 1} the first has the mask 0b01, the second 0b11.
With the sizes (4, 2) the divisors of the masks 0b00, 0b01, 0b10 and 0b11 are 1, 4, 2
and 8. So a device does 100 / 4 + 60 / 8 = 32.5 operations.

**Omissions.** Each assignment is estimated as if the step were constrained to it, with
its own collectives. The memory traffic of single operations is not counted. The
estimate only prunes: XLA partitions the candidates that survive.
"""

import dataclasses
import functools as ft
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from .._step import Program
from ..chips import Chip
from ..chips._chip import average_network, extents_of
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
      results; bytes of arguments and
        temporaries.
    - `divides_sent` (assignments, sent terms, assignments): whether the last assignment
      divides a term of the bytes
        that the collectives of the first assignment send.
    - `sent` (assignments, sent terms, 2): the bytes of this term that a device
      receives, before the factor
        (1 - 1 / size): in collectives that computation waits for, and in collectives
        that overlap with computation.
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


class MeshSizes(NamedTuple):
    """Tuples of mesh axis sizes, and the slices that each axis spans, as two arrays."""

    sizes: Int[np.ndarray, "sizes axes"]
    slices: Int[np.ndarray, "sizes axes"]


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


# JAX's module or NumPy's: the same code is compiled for many candidates, and runs
# uncompiled for few.
_Array = Array | np.ndarray
# The arrays of `cost_terms` or the rates of `rates_of`, by name.
Numbers = Mapping[str, Any]
AXES = 4
# The number of candidates, and of sets, in one call: their arrays should fit in the
# cache.
_BLOCK = 2**16
_SETS = 2048
_ALL = 2**22


@dataclasses.dataclass(frozen=True)
class CostModel:
    """The assumptions of a time estimate that no data sheet of a chip states.

    - `compute`: the fraction of the chip's peak operations per second that matrix
      products reach.
    - `memory`: the fraction of the memory's bandwidth that operations reach.
    - `network`: the fraction of the links' bandwidth that collectives reach.
    - `overlap`: the fraction of the computation with which collectives of parameters
      and gradients can overlap.
    - `call_seconds`: the fixed seconds of each collective, in addition to the seconds
      of its bytes.
    """

    compute: float = 0.55
    memory: float = 0.8
    network: float = 0.8
    overlap: float = 0.5
    call_seconds: float = 2e-6


def axis_sizes(devices: int, axes: int) -> Int[np.ndarray, "sizes axes"]:
    """All tuples of `axes` mesh axis sizes above 1 whose product is the number of
    devices.
    """
    divisors = [size for size in range(2, devices + 1) if devices % size == 0]
    firsts = [
        (first, math.prod(first))
        for first in itertools.product(divisors, repeat=axes - 1)
    ]
    tuples = [
        (*first, devices // size)
        for first, size in firsts
        if size < devices and devices % size == 0
    ]
    return np.array(tuples, np.int32).reshape(-1, axes)


@ft.partial(jax.jit, static_argnames="keep")
def best_of_block(
    arrays: Numbers,
    machine: Numbers,
    sets: Int[Array, "block axes"],
    sizes: Int[Array, "sizes axes"],
    slices: Int[Array, "sizes axes"],
    real: Int[Array, ""],
    *,
    keep: int,
) -> tuple[Int[Array, " keep"], Int[Array, " keep"], Float[Array, "keep 2"]]:
    """The fastest candidates of a block of sets of axis assignments, at most one per
    set.

    `arrays` come from `padded`, `machine` from `rates_of`. Each row of `sets` has the
    numbers of its assignments. The rows of `sizes` and `slices` are the possible tuples
    of mesh axis sizes, and the slices that each axis spans. The sets after the first
    `real` are padding.

    The result has, for each of `keep` candidates, the index of its set, the index of
    its sizes, and its seconds and bytes per device. A candidate that does not fit in
    memory has infinite seconds.
    """
    seconds, memory = costs(arrays, machine, sets, sizes, slices)
    is_real = (jnp.arange(len(sets)) < real)[:, None]
    seconds = jnp.where(is_real & (memory <= machine["limit"]), seconds, jnp.inf)
    fastest = jnp.argmin(seconds, axis=1)[:, None]
    best = jnp.concatenate(
        [jnp.take_along_axis(part, fastest, axis=1) for part in (seconds, memory)], -1
    )
    _, best_sets = jax.lax.top_k(-best[:, 0], min(keep, len(sets)))
    return best_sets, fastest[best_sets, 0], best[best_sets]


def costs(
    arrays: Numbers,
    machine: Numbers,
    sets: Int[_Array, "block axes"],
    sizes: Int[_Array, "sizes axes"],
    slices: Int[_Array, "sizes axes"],
) -> tuple[Float[_Array, "block sizes"], Float[_Array, "block sizes"]]:
    """The estimated seconds and bytes per device, for each set of axis assignments with
    each tuple of mesh axis sizes.

    `arrays` come from `cost_terms`, `machine` from `rates_of`. Each row of `sets` has
    the numbers of the assignments in a set. Each row of `sizes` and `slices` has the
    sizes of the mesh axes, and the slices that they span.

    Computation takes the longer of two times: its operations at the chip's rate, and
    its bytes at the memory's bandwidth. It waits for collectives of activations, and
    overlaps in part with those of parameters and gradients. Sizes that do not divide a
    dimension, or break a limit of the user, have infinite seconds. With NumPy arrays
    nothing is compiled, which is faster for few candidates.
    """
    xp: Any = jnp if isinstance(sets, jax.Array) else np
    axes = sets.shape[-1]
    # For each mask, whether it has each assignment of a set.
    has = (np.arange(2**axes)[:, None] // 2 ** np.arange(axes)) % 2 == 1
    # For each set, the sums of the terms with equal masks.
    masks = _masks(xp.moveaxis(arrays["divides"][:, sets], 0, 1), axes)
    shared = xp.einsum("brk,rq->bkq", masks, arrays["shared"])
    # The same for the terms of what each assignment sends.
    bits = xp.take_along_axis(
        arrays["divides_sent"][sets], sets[:, None, None, :], axis=3
    )
    sent = xp.einsum("bjrk,bjrt->bkjt", _masks(bits, axes), arrays["sent"][sets])
    power = xp.exp2(-(xp.log2(sizes.astype(np.float32)) @ has.T.astype(np.float32)))
    flops, moved, memory = xp.einsum("sk,bkq->qbs", power, shared)
    compute = xp.maximum(flops / machine["flops"], moved / machine["hbm"])
    per_byte = _seconds_per_byte(xp, machine, sizes, slices)
    exposed, hidden = (xp.einsum("sk,bkjt->tjbs", power, sent) * per_byte[:, None]).sum(
        1
    )
    called = machine["call_seconds"] * (
        arrays["calls"][sets] @ (sizes > 1).T.astype(np.float32)
    )
    seconds = (
        compute
        + exposed
        + called
        + xp.maximum(0.0, hidden - machine["overlap"] * compute)
    )
    # The number of shards must divide each dimension, and be no less than the limits
    # ask for.
    cuts = xp.prod(xp.where(has, sizes[:, None, :], 1), axis=-1)
    broken = (arrays["sizes"][:, None, None] % cuts != 0) | (
        cuts < arrays["least"][:, None, None]
    )
    limits = _masks(xp.moveaxis(arrays["limits"][:, sets], 0, 1), axes)
    is_allowed = xp.einsum("bck,csk->bs", limits, broken.astype(np.float32)) == 0
    return xp.where(is_allowed, seconds, np.inf), memory


def _masks(
    divides: Bool[_Array, "*any axes"], axes: int
) -> Float[_Array, "*any masks"]:
    """The mask of each term as a one-hot vector of length `2**axes`: bit `i` is 1 if
    assignment `i` divides the term.

    For `axes = 2`: a term that only assignment 1 divides has the mask 0b10 and the
    vector [0, 0, 1, 0]. The last dimension of `divides` has one bool for each
    assignment of a set.
    """
    codes = (divides.astype(np.int32) * 2 ** np.arange(axes, dtype=np.int32)).sum(-1)
    return (codes[..., None] == np.arange(2**axes)).astype(np.float32)


def _seconds_per_byte(
    xp: Any,
    machine: Numbers,
    sizes: Int[_Array, "sizes axes"],
    slices: Int[_Array, "sizes axes"],
) -> Float[_Array, "axes sizes"]:
    """The seconds per byte of a collective over each mesh axis. In a ring of n devices,
    (n - 1) / n of a byte is sent.

    On a torus, an axis has links in proportion to the logarithm of its size. Switched
    chips, such as GPUs, form islands of chips with fast links; as many devices of each
    axis as possible are in one island. Bytes between slices pass through the hosts'
    network. `xp` is NumPy or `jax.numpy`, and `machine` comes from `rates_of`. Each row
    of `sizes` and `slices` has the sizes of the mesh axes, and the slices that they
    span.
    """
    inner = (sizes // slices).T.astype(np.float32)
    whole = sizes.T.astype(np.float32)
    total = xp.prod(inner, axis=0)
    share = machine["dims"] * xp.log2(inner) / xp.maximum(xp.log2(total), 1.0)
    bandwidth = xp.where(
        machine["dims"] > 0, machine["link"] * xp.maximum(share, 0.5), machine["link"]
    )
    near = xp.minimum(machine["island"], inner)
    return (1 - 1 / near) / bandwidth + (1 - near / whole) / near / machine["dcn"]


def rates_of(
    chip: Chip,
    devices: int,
    model: CostModel,
    limit_bytes: float,
    extents: Sequence[int] = (),
) -> Numbers:
    """The rates of one device under the assumptions `model`, as numbers for `costs`. A
    step may take `limit_bytes` of memory. `extents` are the chips along each dimension
    of a slice; empty for the usual slice of `devices` devices.
    """
    link, dims, island = average_network(chip, extents or extents_of(chip, devices))
    numbers = {
        "flops": float(chip.flops("bfloat16")) / chip.devices_per_chip * model.compute,
        "hbm": float(chip.hbm_bytes_per_second) / chip.devices_per_chip * model.memory,
        "link": link * model.network,
        "dims": dims,
        "island": island,
        "dcn": (
            max(float(chip.dcn_bytes_per_second), 1.0)
            / chip.devices_per_chip
            * model.network
        ),
        "overlap": model.overlap,
        "call_seconds": model.call_seconds,
        "limit": limit_bytes,
    }
    return {name: np.float32(number) for name, number in numbers.items()}


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The estimated seconds and memory of a candidate. Per mesh axis, `assignments` has
    the number of its axis assignment, `sizes` its size, `slices` the slices it spans.
    """

    assignments: tuple[int, ...]
    sizes: tuple[int, ...]
    slices: tuple[int, ...]
    seconds: float
    memory_bytes: float


def find(
    terms: CostTerms,
    machine: Numbers,
    devices: int,
    slices: int = 1,
    *,
    keep: int = 256,
) -> list[Estimate]:
    """The `keep` fastest sets of up to four axis assignments, each with its fastest
    mesh axis sizes, the fastest first.

    `terms` come from `cost_terms`, `machine` from `rates_of`. All sets are estimated
    with all sizes for `devices` devices. If these are more than 2**22 candidates, the
    last assignments are left out.
    """
    by_count = [sizes_and_slices(devices, axes, slices) for axes in range(1, AXES + 1)]
    assignments = assignment_count(terms, by_count)
    # Axes and sizes are padded, so that one program serves all searches.
    row_count = -(-max(len(mesh.sizes) for mesh in by_count) // 8) * 8 or 8
    block_size = min(_SETS, max(1, _BLOCK // row_count))
    no_assignment = len(terms["calls"])
    arrays = padded(terms)
    best: list[Estimate] = []
    for axes, mesh in enumerate(by_count, start=1):
        if not len(mesh.sizes):
            continue
        sizes = _padded_rows(mesh.sizes, row_count)
        spans = _padded_rows(mesh.slices, row_count)
        sets = itertools.combinations(range(assignments), axes)
        while block := list(itertools.islice(sets, block_size)):
            numbers = np.full((block_size, AXES), no_assignment, np.int32)
            numbers[: len(block), :axes] = block
            set_numbers, size_numbers, costs_of_sets = best_of_block(
                arrays, machine, numbers, sizes, spans, np.int32(len(block)), keep=keep
            )
            limit = best[-1].seconds if len(best) == keep else math.inf
            for set_number, size_number, cost in zip(
                np.asarray(set_numbers).tolist(),
                np.asarray(size_numbers).tolist(),
                np.asarray(costs_of_sets).tolist(),
                strict=True,
            ):
                seconds, memory_bytes = cost
                if seconds < limit:
                    estimate = Estimate(
                        assignments=tuple(numbers[set_number][:axes].tolist()),
                        sizes=tuple(sizes[size_number][:axes].tolist()),
                        slices=tuple(spans[size_number][:axes].tolist()),
                        seconds=seconds,
                        memory_bytes=memory_bytes,
                    )
                    best.append(estimate)
            best = sorted(best, key=lambda estimate: estimate.seconds)[:keep]
    return best


def _padded_rows(
    rows: Int[np.ndarray, "tuples mesh_axes"], count: int
) -> Int[np.ndarray, "rows axes"]:
    """The rows with ones for further axes, and `count` of them: the first one again."""
    missing_axes = AXES - rows.shape[1]
    wide = np.pad(rows, ((0, 0), (0, missing_axes)), constant_values=1)
    return np.concatenate([wide, np.repeat(wide[:1], count - len(wide), axis=0)])


def assignment_count(terms: CostTerms, by_count: Sequence[MeshSizes]) -> int:
    """The largest number of axis assignments, at most that of `terms`, whose sets have
    at most 2**22 candidates. `by_count` has the sizes for one mesh axis, for two, and
    so on.
    """

    def candidates(count: int) -> int:
        return sum(
            math.comb(count, axes) * len(mesh.sizes)
            for axes, mesh in enumerate(by_count, start=1)
        )

    count = len(terms["calls"])
    while candidates(count) > _ALL:
        count -= 1
    return count


def sizes_and_slices(devices: int, axes: int, slices: int) -> MeshSizes:
    """All tuples of `axes` mesh axis sizes whose product is the number of devices, and
    the slices that each axis spans. One axis spans all slices. Each other axis spans
    one slice.
    """
    sizes = axis_sizes(devices, axes)
    if slices == 1:
        return MeshSizes(sizes, np.ones_like(sizes))
    rows, spanning = np.nonzero(sizes % slices == 0)
    is_spanning = np.arange(axes) == spanning[:, None]
    spans = np.where(is_spanning, slices, 1).astype(np.int32)
    return MeshSizes(sizes[rows], spans)

"""The estimated seconds and memory of all meshes of up to four axes, as a function of
NumPy arrays.

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

    sums[set, mask, quantity]   = sum over terms of
                                  (term has the mask) * quantity[term]
    power[sizes, mask]          = 1 / product of size[assignment] for those in the mask
    total[set, sizes, quantity] = sum over masks of
                                  power[sizes, mask] * sums[set, mask, quantity]

`_sums` adds up the terms. `total` is a product of matrices: a candidate and quantity
cost 16 multiplications, however large the step is. Nothing is compiled: a compiler would
take longer than this estimate of all candidates.

**An example.** Assignment 0 divides a term of 100 operations; assignments 0 and 1
divide a term of 60. In the set {0, 1} the first has the mask 0b01, the second 0b11.
With the sizes (4, 2) the divisors of the masks 0b00, 0b01, 0b10 and 0b11 are 1, 4, 2
and 8. So a device does 100 / 4 + 60 / 8 = 32.5 operations.

**Omissions.** Each assignment is estimated as if the step were constrained to it, with
its own collectives. The memory traffic of single operations is not counted. The
estimate only prunes: XLA partitions the candidates that survive.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from ..chips import Chip
from ..chips._chip import average_network, extents_of
from ._cost_terms import CostTerms
from ._mesh_sizes import MeshSizes, sizes_and_slices


# The rates of `rates_of`, by name.
Numbers = Mapping[str, Any]
# The largest number of mesh axes.
AXES = 4
# The number of sets, and of candidates, that are estimated at once: their arrays should
# fit in the cache.
_SETS_AT_ONCE = 2048
_CANDIDATES_AT_ONCE = 2**14
# The largest number of candidates that are estimated.
_MOST_CANDIDATES = 2**22


@dataclasses.dataclass(frozen=True)
class CostModel:
    """The assumptions of a time estimate that no data sheet of a chip states.

    - `compute`: the fraction of the chip's peak operations per second that matrix
      products reach.
    - `memory`: the fraction of the memory's bandwidth that operations reach.
    - `network`: the fraction of the links' bandwidth that collectives reach.
    - `overlap`: the fraction of the computation with which collectives of parameters
      and gradients can overlap.
    """

    compute: float = 0.55
    memory: float = 0.8
    network: float = 0.8
    overlap: float = 0.5


def costs(
    terms: CostTerms,
    machine: Numbers,
    sets: Int[np.ndarray, "sets axes"],
    sizes: Int[np.ndarray, "sizes axes"],
    slices: Int[np.ndarray, "sizes axes"],
) -> tuple[Float[np.ndarray, "sets sizes"], Float[np.ndarray, "sets sizes"]]:
    """The estimated seconds and bytes per device, for each set of axis assignments with
    each tuple of mesh axis sizes.

    `terms` come from `cost_terms`, `machine` from `rates_of`. Each row of `sets` has the
    numbers of the assignments in a set. Each row of `sizes` and `slices` has the sizes
    of the mesh axes, and the slices that they span.

    Computation takes the longer of two times: its operations at the chip's rate, and
    its bytes at the memory's bandwidth. It waits for collectives of activations, and
    overlaps in part with those of parameters and gradients. Sizes that do not divide a
    dimension, or break a limit of the user, have infinite seconds.

    A term is an amount of work or bytes that some of the assignments divide. Its mask
    says which ones of a set, as bits: 0b10 for the second one alone. Terms of equal
    masks are divided by the same number of shards, so they are added up first.
    """
    axes = sets.shape[1]
    # For each mask, whether it has each assignment of a set.
    has = (np.arange(2**axes)[:, None] // 2 ** np.arange(axes)) % 2 == 1
    # For each mask and each tuple of sizes, the number by which a term is divided.
    shard_counts = np.prod(np.where(has[:, None], sizes, 1), axis=-1)
    shares = 1 / shard_counts

    # Work and memory. `T[sets]` has, for each set and each of its assignments, whether
    # it divides each term.
    masks = _masks(terms["divides"].T[sets])
    operation_counts, moved_bytes, memory_bytes = (
        _sums(masks, amounts, 2**axes) @ shares for amounts in terms["shared"].T
    )
    compute_seconds = np.maximum(
        operation_counts / machine["flops"], moved_bytes / machine["hbm"]
    )

    exposed_seconds = np.zeros_like(compute_seconds)
    hidden_seconds = np.zeros_like(compute_seconds)
    seconds_per_byte = byte_seconds(machine, sizes, slices)
    # Collectives. `senders` has, for each set, the assignment of one mesh axis.
    for axis, senders in enumerate(sets.T):
        # Which assignments of the set divide what this one sends.
        divides = np.take_along_axis(
            terms["divides_sent"][senders], sets[:, None, :], axis=2
        )
        masks = _masks(divides.transpose(0, 2, 1))
        exposed_bytes, hidden_bytes = (
            _sums(masks, amounts, 2**axes) @ shares
            for amounts in np.moveaxis(terms["sent"][senders], 2, 0)
        )
        exposed_seconds += exposed_bytes * seconds_per_byte[axis]
        hidden_seconds += hidden_bytes * seconds_per_byte[axis]

    hop_count = terms["calls"][sets] @ hop_counts(machine, sizes, slices)
    latency_seconds = machine["hop_seconds"] * hop_count
    covered_seconds = machine["overlap"] * compute_seconds
    seconds = (
        compute_seconds
        + exposed_seconds
        + latency_seconds
        + np.maximum(0.0, hidden_seconds - covered_seconds)
    )
    is_allowed = _is_allowed(terms, sets, shard_counts)
    return np.where(is_allowed, seconds, np.inf), memory_bytes


def _is_allowed(
    terms: CostTerms,
    sets: Int[np.ndarray, "sets axes"],
    shard_counts: Int[np.ndarray, "masks sizes"],
) -> Bool[np.ndarray, "sets sizes"]:
    """For each set and each tuple of sizes, whether the number of shards of each
    logical axis divides its size, and is no less than the limits ask for.
    `shard_counts` are those of a logical axis with each mask: the bits of the
    assignments that shard it. Of `terms`, "sizes" and "least" have the size and the
    least shards of each logical axis, and "limits" says which assignments shard it.
    """
    is_uneven = terms["sizes"][:, None, None] % shard_counts != 0
    is_too_small = shard_counts < terms["least"][:, None, None]
    is_broken = is_uneven | is_too_small
    # For each set, the mask of each logical axis.
    masks = _masks(terms["limits"].T[sets])
    logical_axes = np.arange(len(is_broken))
    return ~is_broken[logical_axes, masks].any(axis=1)


def _masks(
    divides: Bool[np.ndarray, "sets axes terms"],
) -> Int[np.ndarray, "sets terms"]:
    """The mask of each term within each set: bit `i` is 1 if the assignment `i` of the
    set divides the term. A term that only assignment 1 divides has the mask 0b10.
    """
    masks = np.zeros(divides[:, 0].shape, np.intp)
    for axis in range(divides.shape[1]):
        masks += divides[:, axis].astype(np.intp) << axis
    return masks


def _sums(
    masks: Int[np.ndarray, "sets terms"],
    amounts: Float[np.ndarray, "*sets terms"],
    count: int,
) -> Float[np.ndarray, "sets masks"]:
    """For each set and each of `count` masks, the sum of the amounts of the terms with
    this mask. The amounts may be the same for all sets.
    """
    # Each set has numbers of its own for its masks.
    first_numbers = count * np.arange(len(masks))[:, None]
    numbers = first_numbers + masks
    weights = np.broadcast_to(amounts, masks.shape)
    sums = np.bincount(numbers.ravel(), weights.ravel(), count * len(masks))
    return sums.reshape(-1, count)


def byte_seconds(
    machine: Numbers,
    sizes: Int[np.ndarray, "sizes axes"],
    slices: Int[np.ndarray, "sizes axes"],
) -> Float[np.ndarray, "axes sizes"]:
    """The seconds per byte of a collective over each mesh axis. In a ring of n devices,
    (n - 1) / n of a byte is sent.

    On a torus, an axis has links in proportion to the logarithm of its size. Switched
    chips, such as GPUs, form islands of chips with fast links; as many devices of each
    axis as possible are in one island. Bytes between slices pass through the hosts'
    network. `machine` comes from `rates_of`: "link" and "dcn" are bytes per second,
    "dims" the dimensions of the torus (0 for switched chips), and "island" a number of
    devices. Each row of `sizes` and `slices` has the sizes of the mesh axes, and the
    slices that they span.
    """
    devices = sizes.T.astype(np.float32)
    devices_in_slice = (sizes // slices).T.astype(np.float32)
    bandwidth = machine["link"]
    if machine["dims"] > 0:
        torus_dims = machine["dims"] * _shares_of_slice(sizes, slices)
        bandwidth = machine["link"] * np.maximum(torus_dims, 0.5)
    devices_in_island = np.minimum(machine["island"], devices_in_slice)
    fast_seconds = (1 - 1 / devices_in_island) / bandwidth
    outside_share = (1 - devices_in_island / devices) / devices_in_island
    slow_seconds = outside_share / machine["dcn"]
    return fast_seconds + slow_seconds


def hop_counts(
    machine: Numbers,
    sizes: Int[np.ndarray, "sizes axes"],
    slices: Int[np.ndarray, "sizes axes"],
) -> Float[np.ndarray, "axes sizes"]:
    """The hops of a collective over each mesh axis, as `shardfx.cost.seconds` counts
    them; 0 for an axis of one device. On a torus they are the axis's share of the hops
    over the whole slice. The arguments are those of `byte_seconds`.
    """
    hops = machine["hops"] * _shares_of_slice(sizes, slices)
    is_cut = (sizes > 1).T
    return np.where(is_cut, np.maximum(hops, 1.0), 0.0)


def _shares_of_slice(
    sizes: Int[np.ndarray, "sizes axes"],
    slices: Int[np.ndarray, "sizes axes"],
) -> Float[np.ndarray, "axes sizes"]:
    """The share of a slice's dimensions that each mesh axis spans: in proportion to the
    logarithm of its size.
    """
    devices_in_slice = (sizes // slices).T.astype(np.float32)
    slice_size = np.prod(devices_in_slice, axis=0)
    log2_slice_size = np.maximum(np.log2(slice_size), 1.0)
    return np.log2(devices_in_slice) / log2_slice_size


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

    - "flops", "hbm": operations per second, and bytes of memory per second.
    - "link", "dcn": bytes per second to neighbours, and through the hosts' network.
    - "dims": the dimensions of a slice's torus, 0 for switched chips.
    - "island": the number of devices that fast links connect.
    - "hops", "hop_seconds": the hops across a whole slice, and the seconds of one.
    - "overlap", "limit": the share of `CostModel.overlap`, and `limit_bytes`.
    """
    network = average_network(chip, extents or extents_of(chip, devices))
    parts = chip.devices_per_chip
    flops = float(chip.flops("bfloat16"))
    hbm = float(chip.hbm_bytes_per_second)
    dcn = float(chip.dcn_bytes_per_second)
    numbers = {
        "flops": flops / parts * model.compute,
        "hbm": hbm / parts * model.memory,
        "link": network.bytes_per_second * model.network,
        "dims": network.dims,
        "hops": network.hops,
        "hop_seconds": float(chip.hop_seconds),
        "island": network.island_devices,
        "dcn": dcn / parts * model.network,
        "overlap": model.overlap,
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
    sizes_by_axes = [
        sizes_and_slices(devices, axes, slices) for axes in range(1, AXES + 1)
    ]
    assignments = assignment_count(terms, sizes_by_axes)
    best: list[Estimate] = []
    for axes, mesh in enumerate(sizes_by_axes, start=1):
        # Eight devices have no mesh of four axes.
        if not len(mesh.sizes):
            continue
        set_count = max(1, _CANDIDATES_AT_ONCE // len(mesh.sizes))
        set_count = min(set_count, _SETS_AT_ONCE)
        combinations = itertools.combinations(range(assignments), axes)
        while block := list(itertools.islice(combinations, set_count)):
            sets = np.array(block)
            best += _best_of(
                terms=terms, machine=machine, sets=sets, mesh=mesh, keep=keep
            )
            best = sorted(best, key=lambda estimate: estimate.seconds)[:keep]
    return best


def _best_of(
    terms: CostTerms,
    machine: Numbers,
    sets: Int[np.ndarray, "sets axes"],
    mesh: MeshSizes,
    keep: int,
) -> list[Estimate]:
    """The `keep` fastest of the sets, each with its fastest mesh axis sizes, among the
    candidates that fit in memory. A set is numbers of axis assignments. `terms` and
    `machine` are those of `costs`; `mesh` has the tuples of sizes to try, and the
    slices that each axis spans.
    """
    seconds, memory = costs(
        terms=terms, machine=machine, sets=sets, sizes=mesh.sizes, slices=mesh.slices
    )
    seconds = np.where(memory <= machine["limit"], seconds, np.inf)
    fastest = seconds.argmin(axis=1)
    set_seconds = seconds[np.arange(len(sets)), fastest]
    best = []
    for number in np.argsort(set_seconds, kind="stable")[:keep].tolist():
        if not math.isfinite(set_seconds[number]):
            break
        row = fastest[number]
        estimate = Estimate(
            assignments=tuple(sets[number].tolist()),
            sizes=tuple(mesh.sizes[row].tolist()),
            slices=tuple(mesh.slices[row].tolist()),
            seconds=set_seconds[number].item(),
            memory_bytes=memory[number, row].item(),
        )
        best.append(estimate)
    return best


def assignment_count(terms: CostTerms, sizes_by_axes: Sequence[MeshSizes]) -> int:
    """The largest number of axis assignments, at most that of `terms`, whose sets have
    at most 2**22 candidates. `sizes_by_axes` has the sizes for one mesh axis, for two,
    and so on. `terms` has an entry of "calls" for each assignment, those of usual ones first.
    """

    def candidate_count(count: int) -> int:
        """The number of candidates of the sets of `count` assignments."""
        total = 0
        for axes, mesh in enumerate(sizes_by_axes, start=1):
            total += math.comb(count, axes) * len(mesh.sizes)
        return total

    count = len(terms["calls"])
    while candidate_count(count) > _MOST_CANDIDATES:
        count -= 1
    return count

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

    sums[set, mask, quantity]   = sum over terms of
                                  (term has the mask) * quantity[term]
    power[sizes, mask]          = 1 / product of size[assignment] for those in the mask
    total[set, sizes, quantity] = sum over masks of
                                  power[sizes, mask] * sums[set, mask, quantity]

`_masks` says which terms have a mask. `total` is a product of matrices: a candidate and
quantity cost 16 multiplications, however large the step is.

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
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ..chips import Chip
from ..chips._chip import average_network, extents_of
from ._cost_terms import CostTerms, padded
from ._mesh_sizes import MeshSizes, sizes_and_slices


# An array of JAX or of NumPy: the same code is compiled for many candidates, and runs
# uncompiled for few. In such code, `xp` is `jax.numpy` or NumPy.
_Array = Array | np.ndarray
# The arrays of `cost_terms` or the rates of `rates_of`, by name.
Numbers = Mapping[str, Any]
# The largest number of mesh axes.
AXES = 4
# The number of candidates, and of sets, in one call: their arrays should fit in the
# cache.
_CANDIDATES_PER_CALL = 2**16
_SETS_PER_CALL = 2048
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


@ft.partial(jax.jit, static_argnames="keep")
def best_of_block(
    arrays: Numbers,
    machine: Numbers,
    sets: Int[Array, "block axes"],
    sizes: Int[Array, "sizes axes"],
    slices: Int[Array, "sizes axes"],
    set_count: Int[Array, ""],
    *,
    keep: int,
) -> tuple[Int[Array, " keep"], Int[Array, " keep"], Float[Array, "keep 2"]]:
    """The fastest candidates of a block of sets of axis assignments, at most one per
    set.

    `arrays` come from `padded`, `machine` from `rates_of`. Each row of `sets` has the
    numbers of its assignments. The rows of `sizes` and `slices` are the possible tuples
    of mesh axis sizes, and the slices that each axis spans. The sets after the first
    `set_count` are padding.

    The result has, for each of `keep` candidates, the index of its set, the index of
    its sizes, and its seconds and bytes per device. A candidate that does not fit in
    memory has infinite seconds.
    """
    seconds, memory = costs(arrays, machine, sets, sizes, slices)
    is_real = (jnp.arange(len(sets)) < set_count)[:, None]
    is_possible = is_real & (memory <= machine["limit"])
    seconds = jnp.where(is_possible, seconds, jnp.inf)
    # For each set, its fastest sizes.
    fastest = jnp.argmin(seconds, axis=1)[:, None]
    best_seconds = jnp.take_along_axis(seconds, fastest, axis=1)
    best_memory = jnp.take_along_axis(memory, fastest, axis=1)
    best = jnp.concatenate([best_seconds, best_memory], -1)
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
    # The letters of the sums below: b for sets, s for sizes, r for terms, k for masks, q
    # for quantities, j for the assignment of a set that sends, and t for the two kinds
    # of collectives, those that computation waits for and those beside it.
    #
    # For each mask, whether it has each assignment of a set.
    bits = 2 ** np.arange(axes)
    has = (np.arange(2**axes)[:, None] // bits) % 2 == 1

    # For each set, the sums of the terms with equal masks.
    divides = xp.moveaxis(arrays["divides"][:, sets], 0, 1)
    sums = xp.einsum("brk,rq->bkq", _masks(divides, axes), arrays["shared"])
    # The same for the terms of what each assignment sends.
    divides_sent = xp.take_along_axis(
        arrays["divides_sent"][sets], sets[:, None, None, :], axis=3
    )
    sent_masks = _masks(divides_sent, axes)
    sent = xp.einsum("bjrk,bjrt->bkjt", sent_masks, arrays["sent"][sets])

    log2_sizes = xp.log2(sizes.astype(np.float32))
    power = xp.exp2(-(log2_sizes @ has.T.astype(np.float32)))
    operation_counts, moved_bytes, memory_bytes = xp.einsum("sk,bkq->qbs", power, sums)
    compute_seconds = xp.maximum(
        operation_counts / machine["flops"], moved_bytes / machine["hbm"]
    )
    seconds_per_byte = byte_seconds(xp, machine, sizes, slices)
    sent_bytes = xp.einsum("sk,bkjt->tjbs", power, sent)
    exposed_seconds, hidden_seconds = (sent_bytes * seconds_per_byte[:, None]).sum(1)
    hop_count = arrays["calls"][sets] @ hop_counts(xp, machine, sizes, slices)
    latency_seconds = machine["hop_seconds"] * hop_count
    covered_seconds = machine["overlap"] * compute_seconds
    seconds = (
        compute_seconds
        + exposed_seconds
        + latency_seconds
        + xp.maximum(0.0, hidden_seconds - covered_seconds)
    )
    is_allowed = _is_allowed(xp, arrays, sets, sizes, has)
    return xp.where(is_allowed, seconds, np.inf), memory_bytes


def _is_allowed(
    xp: Any,
    arrays: Numbers,
    sets: Int[_Array, "block axes"],
    sizes: Int[_Array, "sizes axes"],
    has: Bool[np.ndarray, "masks axes"],
) -> Bool[_Array, "block sizes"]:
    """For each set and each tuple of sizes, whether the number of shards of each logical
    axis divides its size, and is no less than the limits ask for. `has` says for each
    mask which assignments it has.
    """
    # For each tuple of sizes and each mask, the shards of a logical axis with this mask.
    shard_counts = xp.prod(xp.where(has, sizes[:, None, :], 1), axis=-1)
    is_uneven = arrays["sizes"][:, None, None] % shard_counts != 0
    is_too_small = shard_counts < arrays["least"][:, None, None]
    is_broken = (is_uneven | is_too_small).astype(np.float32)
    divides = xp.moveaxis(arrays["limits"][:, sets], 0, 1)
    limits = _masks(divides, sets.shape[-1])
    return xp.einsum("bck,csk->bs", limits, is_broken) == 0


def _masks(
    divides: Bool[_Array, "*any axes"],
    axes: int,
) -> Float[_Array, "*any masks"]:
    """The mask of each term as a one-hot vector of length `2**axes`: bit `i` is 1 if
    assignment `i` divides the term.

    For `axes = 2`: a term that only assignment 1 divides has the mask 0b10 and the
    vector [0, 0, 1, 0]. The last dimension of `divides` has one bool for each
    assignment of a set.
    """
    bits = 2 ** np.arange(axes, dtype=np.int32)
    codes = (divides.astype(np.int32) * bits).sum(-1)
    is_mask = codes[..., None] == np.arange(2**axes)
    return is_mask.astype(np.float32)


def byte_seconds(
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
    devices = sizes.T.astype(np.float32)
    devices_in_slice = (sizes // slices).T.astype(np.float32)
    torus_dims = machine["dims"] * _shares_of_slice(xp, sizes, slices)
    torus_bandwidth = machine["link"] * xp.maximum(torus_dims, 0.5)
    bandwidth = xp.where(machine["dims"] > 0, torus_bandwidth, machine["link"])
    devices_in_island = xp.minimum(machine["island"], devices_in_slice)
    fast_seconds = (1 - 1 / devices_in_island) / bandwidth
    outside_share = (1 - devices_in_island / devices) / devices_in_island
    slow_seconds = outside_share / machine["dcn"]
    return fast_seconds + slow_seconds


def hop_counts(
    xp: Any,
    machine: Numbers,
    sizes: Int[_Array, "sizes axes"],
    slices: Int[_Array, "sizes axes"],
) -> Float[_Array, "axes sizes"]:
    """The hops of a collective over each mesh axis, as `shardfx.cost.seconds` counts
    them; 0 for an axis of one device. On a torus they are the axis's share of the hops
    over the whole slice. The arguments are those of `byte_seconds`.
    """
    hops = machine["hops"] * _shares_of_slice(xp, sizes, slices)
    is_cut = (sizes > 1).T
    return xp.where(is_cut, xp.maximum(hops, 1.0), 0.0)


def _shares_of_slice(
    xp: Any,
    sizes: Int[_Array, "sizes axes"],
    slices: Int[_Array, "sizes axes"],
) -> Float[_Array, "axes sizes"]:
    """The share of a slice's dimensions that each mesh axis spans: in proportion to the
    logarithm of its size.
    """
    devices_in_slice = (sizes // slices).T.astype(np.float32)
    slice_size = xp.prod(devices_in_slice, axis=0)
    log2_slice_size = xp.maximum(xp.log2(slice_size), 1.0)
    return xp.log2(devices_in_slice) / log2_slice_size


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
    dcn = max(float(chip.dcn_bytes_per_second), 1.0)
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
    # Axes and sizes are padded, so that one program serves all searches: sets by an
    # assignment that shards nothing, the first one behind those of `terms`.
    most_rows = max(len(mesh.sizes) for mesh in sizes_by_axes)
    row_count = max(8, math.ceil(most_rows / 8) * 8)
    block_size = min(_SETS_PER_CALL, max(1, _CANDIDATES_PER_CALL // row_count))
    no_assignment = len(terms["calls"])
    arrays = padded(terms)
    best: list[Estimate] = []
    for axes, mesh in enumerate(sizes_by_axes, start=1):
        # Eight devices have no mesh of four axes.
        if not len(mesh.sizes):
            continue
        sizes = _padded_rows(mesh.sizes, row_count)
        slice_rows = _padded_rows(mesh.slices, row_count)
        sets = itertools.combinations(range(assignments), axes)
        while block := list(itertools.islice(sets, block_size)):
            padded_sets = np.full((block_size, AXES), no_assignment, np.int32)
            padded_sets[: len(block), :axes] = block
            set_numbers, size_numbers, costs_of_sets = best_of_block(
                arrays,
                machine,
                padded_sets,
                sizes,
                slice_rows,
                np.int32(len(block)),
                keep=keep,
            )
            slowest_kept = math.inf
            if len(best) == keep:
                slowest_kept = best[-1].seconds
            rows = zip(
                np.asarray(set_numbers).tolist(),
                np.asarray(size_numbers).tolist(),
                np.asarray(costs_of_sets).tolist(),
                strict=True,
            )
            for set_number, size_number, (seconds, memory_bytes) in rows:
                if seconds >= slowest_kept:
                    continue
                estimate = Estimate(
                    assignments=tuple(padded_sets[set_number][:axes].tolist()),
                    sizes=tuple(sizes[size_number][:axes].tolist()),
                    slices=tuple(slice_rows[size_number][:axes].tolist()),
                    seconds=seconds,
                    memory_bytes=memory_bytes,
                )
                best.append(estimate)
            best = sorted(best, key=lambda estimate: estimate.seconds)[:keep]
    return best


def _padded_rows(
    rows: Int[np.ndarray, "tuples mesh_axes"],
    count: int,
) -> Int[np.ndarray, "rows axes"]:
    """The rows with ones for further axes, and `count` of them: the first one again."""
    missing_axes = AXES - rows.shape[1]
    wide = np.pad(rows, ((0, 0), (0, missing_axes)), constant_values=1)
    missing_rows = np.repeat(wide[:1], count - len(wide), axis=0)
    return np.concatenate([wide, missing_rows])


def assignment_count(terms: CostTerms, sizes_by_axes: Sequence[MeshSizes]) -> int:
    """The largest number of axis assignments, at most that of `terms`, whose sets have
    at most 2**22 candidates. `sizes_by_axes` has the sizes for one mesh axis, for two,
    and so on.
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

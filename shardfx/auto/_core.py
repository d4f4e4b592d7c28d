"""The seconds and memory of every mesh of up to four axes at once, as one compiled function of arrays.

**What is priced.** A role says which dimensions of the step one mesh axis shards, and what collectives that takes
(`roles.py`, `layouts.py`). A step has up to 79 roles. A candidate is a set of at most four of them, and a share: a size
for each, whose product is the number of devices. For 64 devices there are 1.5 million sets of four, with 10 shares
each. The core prices all of them, so it must not look at the step's operations again.

**Rows.** Take the floating-point operations of one product. If the roles `a` and `b` of the set {a, b, c, d} shard the
product, one device does `flops / (size_a * size_b)` of it. All products that the same roles shard are divided by the
same number, so they are added up beforehand (`terms.py`). Such a sum is a row: it holds operations, bytes of memory
traffic, bytes of arguments and of temporaries, and `divides`, one bool for each role. A large step has some hundred
rows.

**Kinds.** Within a set of four roles a row is of one of 2**4 kinds: its `divides` for these four, read as a binary
number. Only the kind says by what a row is divided. So for each set the rows of each kind are summed:

    sums[set, kind, quantity] = sum over rows of (row is of the kind) * quantity[row]           `_kinds`, an einsum

and for each share every kind has one divisor, the product of the sizes of its roles:

    power[share, kind] = 1 / product of size[role] for the roles of the kind                    `_members`, exp2(-log2)
    total[set, share, quantity] = sum over kinds of power[share, kind] * sums[set, kind, quantity]

The second line is a product of matrices: a block of sets by 16 kinds, times 16 kinds by all shares. It costs 16
multiplications a candidate and quantity, whatever the size of the step.

**An example.** A row of 100 operations that role 0 divides, and one of 60 that roles 0 and 1 divide. In the set {0, 1}
the first is of kind 0b01, the second of kind 0b11. With the share (4, 2) the divisors of the kinds 0b00, 0b01, 0b10 and
0b11 are 1, 4, 2 and 8. So a device does 100 / 4 + 60 / 8 = 32.5 operations.

**Seconds.** Computation takes the longer of operations at the chip's speed and bytes at its memory's. What a role sends
are rows of their own, with the roles that divide them. A device receives `(1 - 1 / size)` of what is left of a row,
over the links that an axis of this size has (`_seconds_per_byte`, by the network of `chips/_links.py`). Collectives of
data are exposed: computation waits for them. Those of parameters and gradients are hidden behind `overlap` of the
computation, and the rest is waited for.

**What is allowed.** The sizes of all roles that shard one dimension must divide it, and some limits of the user must
hold. A part of a dimension behind another one, as queries of a head behind the heads, may be sharded only where the
first is sharded wholly. Both are sums over kinds again (`_is_allowed`). What is not allowed, or takes more memory than
there is, has infinite seconds; the best share of each set is kept, and the best sets of all.

**What it leaves out.** All roles lay the step out as if it were constrained so, and each pays for its own collectives.
The core only prunes: what survives it is looked at more closely.
"""

import collections
import dataclasses
import functools as ft
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ..chips import Chip
from ..chips._links import extents_of, shared
from ._terms import Terms, padded


# Of JAX, or of NumPy: the same code is compiled for many candidates, and run as it is for few.
_Array = Array | np.ndarray
Numbers = Mapping[str, Any]
AXES = 4
# How many candidates at once: their arrays should stay in the cache.
_BLOCK, _SETS = 2**16, 2048
# How many candidates with one number of axes are all looked at; where there are more, some roles are left out.
_ALL = 2**25
# Then the neighbours of so many of the best are looked at, so often.
_BEST, _ROUNDS = 32, 2


@dataclasses.dataclass(frozen=True)
class CostModel:
    """What the estimate assumes beside a chip's data sheet.

    - `compute`: the part of the peak that products reach.
    - `memory`: the part of the memory's bandwidth that is reached.
    - `network`: the part of the links' bandwidth that collectives reach.
    - `overlap`: the part of the computation behind which collectives of parameters and gradients can be hidden.
    - `call_seconds`: what a collective takes beside its bytes.
    """

    compute: float = 0.55
    memory: float = 0.8
    network: float = 0.8
    overlap: float = 0.5
    call_seconds: float = 2e-6


def shares(devices: int, axes: int) -> Int[np.ndarray, "shares axes"]:
    """All ways to write a number as a product of exactly `axes` factors above 1, in order."""
    if axes == 0:
        return np.ones((int(devices == 1), 0), np.int32)
    if axes == 1:
        return np.array([[devices]] if devices > 1 else np.zeros((0, 1)), np.int32).reshape(-1, 1)
    found = [
        (first, *rest)
        for first in range(2, devices // 2 + 1)
        if devices % first == 0
        for rest in shares(devices // first, axes - 1).tolist()
    ]
    return np.array(found or np.zeros((0, axes)), np.int32).reshape(-1, axes)


@ft.partial(jax.jit, static_argnames=("keep", "islands"))
def best_of_block(
    arrays: Numbers,
    machine: Numbers,
    sets: Int[Array, "block axes"],
    sizes: Int[Array, "shares axes"],
    slices: Int[Array, "shares axes"],
    real: Int[Array, ""],
    *,
    keep: int,
    islands: bool,
) -> tuple[Int[Array, " keep"], Int[Array, " keep"], Float[Array, "keep 6"]]:
    """Of the first `real` sets with their best shares: which set, which share, and the parts of the cost, in order."""
    *parts, _ = costs(arrays, machine, sets, sizes, slices, islands=islands)
    share = jnp.argmin(parts[0], axis=1)
    best = jnp.stack([jnp.take_along_axis(part, share[:, None], axis=1)[:, 0] for part in parts], -1)
    score = jnp.where(jnp.arange(len(sets)) < real, best[:, 0], jnp.inf)
    _, at = jax.lax.top_k(-score, min(keep, len(sets)))
    return at, share[at], best[at]


def costs(
    arrays: Numbers,
    machine: Numbers,
    sets: Int[_Array, "block axes"],
    sizes: Int[_Array, "shares axes"],
    slices: Int[_Array, "shares axes"],
    *,
    islands: bool,
) -> tuple[Float[_Array, "*any block shares"], ...]:
    """For each pair: score, seconds, seconds of computation, of exposed and of hidden sending, bytes of memory.

    The last of what is returned is the seconds that each axis sends. With arrays of NumPy nothing is compiled, which
    is quicker for few pairs.
    """
    xp = _library(sets)
    axes = sets.shape[-1]
    # A row is of one of 2**axes kinds: by which roles of the set divide it. Sums of each kind, for each set.
    rows = _kinds(xp.moveaxis(arrays["divides"][:, sets], 0, 1), axes)
    shared = xp.einsum("brk,rq->bkq", rows, arrays["shared"])
    # The rows of one role, by what all roles of the set do to them.
    bits = xp.take_along_axis(arrays["divides_sent"][sets], sets[:, None, None, :], axis=3)
    sent = xp.einsum("bjrk,bjrt->bkjt", _kinds(bits, axes), arrays["sent"][sets])
    has = _members(axes, xp)
    power = xp.exp2(-(xp.log2(sizes.astype(np.float32)) @ has.T.astype(np.float32)))
    totals = xp.einsum("sk,bkq->qbs", power, shared)
    bytes_sent = xp.einsum("sk,bkjt->tjbs", power, sent)
    compute = xp.maximum(totals[0] / machine["flops"], totals[1] / machine["hbm"])
    memory = totals[2] + xp.max(totals[3:], axis=0)
    per_byte = _seconds_per_byte(machine, bytes_sent.sum(0) if islands else None, sizes, slices)
    each = (arrays["calls"][sets] * machine["call_seconds"]).T[:, :, None] * (sizes > 1).T.astype(np.float32)[:, None]
    exposed = (bytes_sent[0] * per_byte).sum(0) + each.sum(0)
    hidden = (bytes_sent[1] * per_byte).sum(0)
    total = compute + exposed + xp.maximum(0.0, hidden - machine["overlap"] * compute)
    fits = (memory <= machine["limit"]) & _is_allowed(arrays, sets, sizes)
    by_axis = bytes_sent.sum(0) * per_byte + each
    return xp.where(fits, total, np.inf), total, compute, exposed, hidden, memory, by_axis


def _library(array: Any) -> Any:
    """The functions of arrays of this kind."""
    return jnp if isinstance(array, jax.Array) else np


def _members(axes: int, xp: Any) -> Bool[_Array, "kinds axes"]:
    """Which roles of a set each kind has."""
    return (xp.arange(2**axes)[:, None] // 2 ** xp.arange(axes)) % 2 == 1


def _kinds(divides: Bool[_Array, "*any axes"], axes: int) -> Float[_Array, "*any kinds"]:
    """One-hot: which of the kinds each row is of."""
    xp = _library(divides)
    codes = xp.where(divides, 2 ** xp.arange(axes), 0).sum(-1)
    return (codes[..., None] == xp.arange(2**axes)).astype(np.float32)


def _seconds_per_byte(
    machine: Numbers,
    sent: Float[_Array, "axes block shares"] | None,
    sizes: Int[_Array, "shares axes"],
    slices: Int[_Array, "shares axes"],
) -> Float[_Array, "_ _ _"]:
    """How long each byte of a collective takes on each axis: in a ring of n devices, (n - 1) / n of it is sent.

    In a torus an axis has links in proportion to the logarithm of its size. Where a switch joins islands (`sent` is
    given), the axes that send most are put inside them. What goes between slices takes the hosts' network.
    """
    xp = _library(sizes)
    inner = (sizes // slices).astype(np.float32).T[:, None, :]
    whole = sizes.astype(np.float32).T[:, None, :]
    total = xp.prod(inner, axis=0)
    share = machine["dims"] * xp.log2(inner) / xp.maximum(xp.log2(total), 1.0)
    bandwidth = xp.where(machine["dims"] > 0, machine["link"] * xp.maximum(share, 0.5), machine["link"])
    near = inner
    if sent is not None:
        # Of two axes the one that sends more stands further inside; of equal ones the later.
        order = xp.arange(len(sent))
        later = (order[None, :] > order[:, None])[:, :, None, None]
        more = (sent[None] > sent[:, None]) | ((sent[None] == sent[:, None]) & later)
        within = xp.prod(xp.where(more, inner[None], 1.0), axis=1)
        near = xp.clip(machine["island"] / within, 1.0, inner)
    return (1 - 1 / near) / bandwidth + (1 - near / whole) / near / machine["dcn"]


def _is_allowed(
    arrays: Numbers, sets: Int[_Array, "block axes"], sizes: Int[_Array, "shares axes"]
) -> Bool[_Array, "block shares"]:
    """Whether all dimensions divide, and the parts before a cut one are cut wholly."""
    xp = _library(sets)
    axes = sets.shape[-1]
    cuts = xp.prod(xp.where(_members(axes, xp), sizes[:, None, :], 1), axis=-1)
    sides = arrays["sizes"][:, None, None]
    broken = (sides % cuts != 0) | (cuts < arrays["least"][:, None, None])
    kinds = _kinds(xp.moveaxis(arrays["limits"][:, sets], 0, 1), axes)
    needed = xp.any(arrays["after"][sets], axis=1)[..., None]
    wrong = xp.einsum("bck,csk->bs", kinds, broken.astype(np.float32))
    unfinished = xp.einsum("bck,csk->bs", xp.where(needed, kinds, 0.0), (cuts < sides).astype(np.float32))
    return (wrong + unfinished == 0) & _has_named(arrays, sets, sizes)


def _has_named(
    arrays: Numbers, sets: Int[_Array, "block axes"], sizes: Int[_Array, "shares axes"]
) -> Bool[_Array, "block shares"]:
    """Whether each mesh axis that must exist is there, with its size."""
    found = _library(sets).ones((len(sets), len(sizes)), bool)
    for number in range(len(arrays["named"])):
        wanted = arrays["named_sizes"][number]
        suits = (sizes > 1) & ((wanted == 0) | (sizes == wanted))
        found &= (arrays["named"][number][sets][:, None, :] & suits[None]).any(-1)
    return found


def machine_of(
    chip: Chip, devices: int, model: CostModel, dtype: str, limit_bytes: float, extents: Sequence[int] = ()
) -> Numbers:
    """A chip and the assumptions as numbers that the core takes; `extents` are those of one slice, if it was named."""
    link, dims, island = shared(chip, extents or extents_of(chip, devices))
    numbers = {
        "flops": float(chip.flops(dtype)) / chip.devices_per_chip * model.compute,
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
    """One candidate: the roles by number, how many devices each has, and how many of them are slices."""

    roles: tuple[int, ...]
    sizes: tuple[int, ...]
    slices: tuple[int, ...]
    seconds: float
    compute_seconds: float
    exposed_seconds: float
    hidden_seconds: float
    memory_bytes: float


def find(
    terms: Terms,
    machine: Numbers,
    devices: int,
    slices: int = 1,
    *,
    axes: int = AXES,
    keep: int = 256,
    only: tuple[int, ...] | None = None,
    most: int = _ALL,
) -> tuple[list[Found], int]:
    """The best share of each of the best sets of roles, in order, and how many candidates were looked at.

    Sets of one role come first, then of two, and so on. Where there would be more than `most` candidates with so many
    axes, only the roles are combined that the best smaller sets have, and as many others as there is room for; then
    the others are tried in the best sets, one at a time.
    """
    roles = tuple(range(terms.divides.shape[1])) if only is None else only
    by_count = [shares_of(devices, number, slices) for number in range(axes + 1)]
    look = _Look(terms, machine, axes, keep, most=max(len(sizes) for sizes, _ in by_count))
    count = 0
    for number, (sizes, between) in enumerate(by_count):
        if not len(sizes):
            continue
        worth = _worth(roles, look.found, number, most // len(sizes))
        count += look.at(itertools.combinations(worth, number), sizes, between)
        if worth != roles:
            # Some roles were left out: each may still take the place of one in the best sets.
            for _ in range(_ROUNDS):
                count += look.at(_near(look.found, roles, number), sizes, between)
    return look.found, count


class _Look:
    """A look at many sets of roles, block by block; `found` are the best candidates so far."""

    def __init__(self, terms: Terms, machine: Numbers, axes: int, keep: int, *, most: int):
        self.arrays, self.machine, self.axes, self.keep = padded(terms), machine, axes, keep
        # Fewer axes than there can be are filled up with a role that does nothing, so that one program serves all.
        self.nothing = terms.divides.shape[1]
        self.room = max(8, most)
        self.room += -self.room % 8
        self.islands = bool(np.isfinite(machine["island"]))
        self.found: list[Found] = []

    def at(self, sets: Iterator[tuple[int, ...]], sizes: np.ndarray, between: np.ndarray) -> int:
        """Keeps the best of these sets with these shares; returns how many candidates they are.

        `between` says how many slices each axis of a share spans.
        """
        number, looked = sizes.shape[1], 0
        shares = tuple(_filled(each, self.axes, self.room) for each in (sizes, between))
        begun: collections.deque[tuple[np.ndarray, tuple[Array, ...]]] = collections.deque()
        for block, real in _blocks(sets, number, self.axes, min(_SETS, max(1, _BLOCK // self.room)), self.nothing):
            priced = best_of_block(
                self.arrays, self.machine, block, *shares, np.int32(real), keep=self.keep, islands=self.islands
            )
            begun.append((block[:real], priced))
            looked += real
            # The next block is made while this one is priced.
            if len(begun) > 1:
                self.read(number, shares, *begun.popleft())
        while begun:
            self.read(number, shares, *begun.popleft())
        return looked * len(sizes)

    def read(self, number: int, shares: tuple[np.ndarray, ...], sets: np.ndarray, priced: tuple[Array, ...]) -> None:
        """Takes over what is better in one block than the worst that is kept."""
        at, share, parts = map(np.asarray, priced)
        worst = self.found[-1].seconds if len(self.found) == self.keep else math.inf
        few = parts[:, 0] < worst
        if few.any():
            better = _read(at[few], share[few], parts[few], sets, shares, number)
            ranked = sorted([*self.found, *better], key=lambda made: made.seconds)
            self.found = [*dict.fromkeys(ranked)][: self.keep]


def _near(found: list[Found], roles: tuple[int, ...], number: int) -> Iterator[tuple[int, ...]]:
    """Sets that differ in one role from the best of so many roles, without these."""
    best = [one.roles for one in found if len(one.roles) == number][:_BEST]
    seen = set(best)
    for known in best:
        for at, role in itertools.product(range(number), roles):
            made = tuple(sorted((*known[:at], role, *known[at + 1 :])))
            if role not in known and made not in seen:
                seen.add(made)
                yield made


def _worth(roles: tuple[int, ...], found: list[Found], number: int, most: int) -> tuple[int, ...]:
    """As many roles as can be combined in at most so many sets: those of the best smaller sets first."""
    count = len(roles)
    while count > number and math.comb(count, number) > most:
        count -= 1
    if count == len(roles):
        return roles
    # The usual roles come first in `roles`, so they fill what the best sets leave.
    ranked = dict.fromkeys([*(role for one in found for role in one.roles), *roles])
    return tuple(sorted([*ranked][:count]))


def _filled(sizes: Int[np.ndarray, "some few"], axes: int, most: int) -> Int[np.ndarray, "most axes"]:
    """With further axes of size 1, and the first row again until there are as many as ever."""
    wide = np.pad(sizes, ((0, 0), (0, axes - sizes.shape[1])), constant_values=1)
    return np.concatenate([wide, np.repeat(wide[:1], most - len(wide), axis=0)])


def shares_of(
    devices: int, axes: int, slices: int
) -> tuple[Int[np.ndarray, "shares axes"], Int[np.ndarray, "shares axes"]]:
    """All ways to share out the devices, and how many slices each axis spans."""
    return _with_slices(shares(devices, axes), slices)


def _with_slices(sizes: Int[np.ndarray, "shares axes"], slices: int) -> tuple[np.ndarray, np.ndarray]:
    """Each share as often as it has axes that can span all slices."""
    if slices == 1:
        return sizes, np.ones_like(sizes)
    pairs = [
        (row, np.where(np.arange(len(row)) == axis, slices, 1))
        for row in sizes
        for axis in range(len(row))
        if row[axis] % slices == 0
    ]
    width = sizes.shape[1]
    rows, spans = [row for row, _ in pairs], [between for _, between in pairs]
    return np.array(rows, np.int32).reshape(len(rows), width), np.array(spans, np.int32).reshape(len(rows), width)


def _blocks(
    sets: Iterator[tuple[int, ...]], number: int, axes: int, block: int, nothing: int
) -> Iterator[tuple[Int[np.ndarray, "block axes"], int]]:
    """The sets in blocks of one shape, and how many of a block are real."""
    while rows := list(itertools.islice(sets, block)):
        made = np.full((block, axes), nothing, np.int32)
        made[: len(rows), :number] = np.array(rows, np.int32).reshape(len(rows), number)
        yield made, len(rows)


def _read(
    at: np.ndarray, share: np.ndarray, parts: np.ndarray, sets: np.ndarray, shares: tuple[np.ndarray, ...], number: int
) -> list[Found]:
    """The candidates of a block with a finite score, of `number` roles each."""
    sizes, between = shares
    return [
        Found(
            tuple(map(int, sets[row][:number])),
            tuple(map(int, sizes[place][:number])),
            tuple(map(int, between[place][:number])),
            *(float(value) for value in part[1:]),
        )
        for row, place, part in zip(at, share, parts, strict=True)
        if row < len(sets) and np.isfinite(part[0])
    ]

"""Finds how the dimensions of an array correspond to those of the planned array that
it belongs to: of a state to its parameter, of an adapter or a scale to its base.

Position comes first: the first dimensions of one are the first of the other, or the
last are the last. Sizes only say which positions are possible. Where several are, all
are returned, and the caller says so.
"""

import functools as ft
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from .._ground.text import together


Shape = tuple[int, ...]
# Whether a dimension of the planned array, of the first size, can correspond to one of
# the second size.
Fits = Callable[[int, int], bool]
# For each dimension of an array, the corresponding dimension of the planned array that
# it follows; `None` for none.
Dims = tuple[int | None, ...]


class Reading(NamedTuple):
    """One way in which the dimensions of an array may correspond to those of its base.

    **Arguments:**

    - `dims`: the corresponding dimension of the base, for each dimension.
    - `rank`: the dimension that is the rank of an adapter; `None` if there is none.
    """

    dims: Dims
    rank: int | None = None

    @property
    def base_dims(self) -> tuple[int, ...]:
        """The dimensions of the base that correspond to one of the array."""
        return tuple(dim for dim in self.dims if dim is not None)


def correspondences(planned: Shape, shape: Shape) -> list[Dims]:
    """The ways in which the dimensions of `shape` correspond to those of an array of
    the shape `planned`, such as a parameter of which `shape` is a state.

    `shape` may lack dimensions of `planned`: for `planned` (8, 4), (4,) gives (1,). It
    may also have more leading dimensions, such as a history: (3, 8, 4) gives (None, 0,
    1). Shapes that do not match give no way.
    """
    if len(shape) > len(planned):
        extra = len(shape) - len(planned)
        is_history = bool(planned) and shape[extra:] == planned
        if is_history:
            return [(*[None] * extra, *range(len(planned)))]
        return []
    choices = itertools.combinations(range(len(planned)), len(shape))
    return [dims for dims in choices if _all_fit(planned, dims, shape)]


@ft.lru_cache(maxsize=4096)
def adapter_readings(
    base: Shape,
    shape: Shape,
    partners: tuple[Shape, ...],
) -> tuple[Reading, ...]:
    """The ways to read the dimensions of an adapter with the shape `shape`; empty if
    nothing corresponds. A `Reading` has for each dimension of the adapter the dimension
    of the base, and which dimension is the rank.

    One dimension is the rank. The dimensions before it are the first of the base, and
    those after it are its last; either may be missing. `partners` are the shapes of the
    other adapters of this base. The other half of the pair has the same rank, and the
    dimensions that this one lacks; first dimensions that both have are those of a
    stack. If some readings have such a partner, only these are returned.
    """
    with_rank = _with_rank(base, shape)
    paired: list[Reading] = []
    for reading in with_rank:
        if any(_is_half_of(base, reading, shape, partner) for partner in partners):
            paired.append(reading)
    if paired:
        return tuple(paired)

    without_rank = _at_the_ends(base, shape, _equal)
    if not without_rank:
        without_rank = _at_the_ends(base, shape, _equal_or_one)
    if without_rank and _has_pair(base, partners):
        # Such as the magnitudes of DoRA, which have no rank.
        return without_rank
    low_rank: list[Reading] = []
    for reading in with_rank:
        if _is_low_rank(base, shape, reading):
            low_rank.append(reading)
    at_the_ends = (*(low_rank or with_rank), *without_rank)
    return (
        at_the_ends
        or _anywhere(base, shape, _equal_or_one)
        or _ranked_anywhere(base, shape)
        or _by_index(base, shape)
    )


@ft.lru_cache(maxsize=4096)
def scale_readings(base: Shape, shape: Shape) -> tuple[Reading, ...]:
    """The ways to read the dimensions of a scale, each of whose elements belongs to a
    block of the base's elements. A `Reading` has for each dimension of the scale the
    dimension of the base.

    With all dimensions of the base, each corresponds to the one at its place. A scale
    with fewer has the first or the last dimensions of the base. Dimensions of equal
    sizes come before blocks, and neighbours at an end before others.
    """
    if len(shape) == len(base):
        return (Reading(tuple(range(len(base)))),)
    if len(shape) > len(base):
        return _with_extra(base, shape)
    for fits in (_equal, _equal_or_one, _in_blocks):
        readings = _at_the_ends(base, shape, fits) or _anywhere(base, shape, fits)
        if readings:
            return _with_most_equal(base, shape, readings)
    return ()


def _equal(whole: int, size: int) -> bool:
    """Whether the sizes of two dimensions, of the base and of another array, are equal."""
    return size == whole


def _equal_or_one(whole: int, size: int) -> bool:
    """Whether a dimension is one of size `whole`, or was reduced to size 1."""
    return size in (1, whole)


def _in_blocks(whole: int, size: int) -> bool:
    """Whether `size` elements may each be for a block of a dimension of size `whole`."""
    return size == 1 or (size > 0 and whole % size == 0)


def _all_fit(
    base: Shape,
    dims: Sequence[int],
    shape: Shape,
    fits: Fits = _equal,
) -> bool:
    """Whether each size in `shape` fits the size of its dimension of the base.

    `dims` has for each dimension of `shape` the dimension of the base. `fits` compares
    the size of the base's dimension with the other one.
    """
    return all([fits(base[dim], size) for dim, size in zip(dims, shape, strict=True)])


def _at_the_ends(base: Shape, shape: Shape, fits: Fits) -> tuple[Reading, ...]:
    """The readings under which the dimensions of `shape` are the first and the last of
    the base, in any number of each. `fits` compares a size of the base and one of
    `shape`.
    """
    # The number of dimensions of the base that correspond to none of `shape`.
    skipped = len(base) - len(shape)
    if skipped < 0:
        return ()
    readings: list[Reading] = []
    for first_count in range(len(shape) + 1):
        dims = (*range(first_count), *range(first_count + skipped, len(base)))
        if _all_fit(base, dims, shape, fits):
            readings.append(Reading(dims))
    return tuple(dict.fromkeys(readings))


def _anywhere(base: Shape, shape: Shape, fits: Fits) -> tuple[Reading, ...]:
    """The readings under which the dimensions of `shape` are any of the base, in their
    order. `fits` compares a size of the base and one of `shape`.
    """
    readings = []
    for dims in itertools.combinations(range(len(base)), len(shape)):
        if _all_fit(base, dims, shape, fits):
            readings.append(Reading(dims))
    return tuple(readings)


def _with_rank(base: Shape, shape: Shape) -> tuple[Reading, ...]:
    """The readings of an adapter under which one dimension is the rank, and those
    around it are the first and the last of the base; empty if there is none.

    An adapter may have more leading dimensions than its base, such as one for many
    adapters in one array; these correspond to none. Readings with fewer of these come
    first, then those in which all sizes are equal, and only the first sort that exists
    is returned.
    """
    for extra, fits in itertools.product(
        range(len(shape) - 1), (_equal, _equal_or_one)
    ):
        readings: list[Reading] = []
        for reading in _ranked_at_ends(base, shape[extra:], fits):
            assert reading.rank is not None
            dims = (*[None] * extra, *reading.dims)
            readings.append(Reading(dims=dims, rank=extra + reading.rank))
        if readings:
            return tuple(readings)
    return ()


def _ranked_at_ends(base: Shape, shape: Shape, fits: Fits) -> Iterator[Reading]:
    """Yields the readings under which one dimension of `shape` is the rank, those
    before it are the first of the base, and those after it are its last. `fits`
    compares a size of the base and one of `shape`.
    """
    for rank in range(len(shape)):
        others = (*shape[:rank], *shape[rank + 1 :])
        skipped = len(base) - len(others)
        if skipped < 1:
            continue
        front = range(rank)
        back = range(rank + skipped, len(base))
        if _all_fit(base, (*front, *back), others, fits):
            yield Reading(dims=(*front, None, *back), rank=rank)


def _ranked_anywhere(base: Shape, shape: Shape) -> tuple[Reading, ...]:
    """The readings of an adapter under which one dimension is the rank, and the others
    are any of the base, in their order, as for a base of experts that share the
    adapter.
    """
    readings = []
    for rank in range(len(shape)):
        others = (*shape[:rank], *shape[rank + 1 :])
        if not others:
            continue
        for reading in _anywhere(base, others, _equal):
            dims = (*reading.dims[:rank], None, *reading.dims[rank:])
            readings.append(Reading(dims=dims, rank=rank))
    return tuple(readings)


def _by_index(base: Shape, shape: Shape) -> tuple[Reading, ...]:
    """The reading under which each dimension is the one of the base with the same
    index, counted from the front or else from the back, if their sizes are equal. A
    dimension with neither corresponds to none; empty if all are such.
    """
    dims: list[int | None] = []
    for index, size in enumerate(shape):
        from_back = index - len(shape) + len(base)
        base_dim = None
        for candidate in (index, from_back):
            is_free = 0 <= candidate < len(base) and candidate not in dims
            if is_free and base[candidate] == size:
                base_dim = candidate
                break
        dims.append(base_dim)
    reading = Reading(tuple(dims))
    if not reading.base_dims:
        return ()
    return (reading,)


def _has_pair(base: Shape, adapters: Sequence[Shape]) -> bool:
    """Whether two of the shapes `adapters` are the halves of a product that has the
    shape of the base, by some reading of the first.
    """
    for adapter, partner in itertools.combinations(adapters, 2):
        for reading in _with_rank(base, adapter):
            if _is_half_of(base, reading, adapter, partner):
                return True
    return False


def _is_half_of(base: Shape, reading: Reading, shape: Shape, partner: Shape) -> bool:
    """Whether an adapter of the shape `shape`, read by `reading`, and its `partner`,
    the shape of another adapter, are the halves of a product that has the shape of the
    base: they share the rank, and of the base's dimensions only the first ones, those
    of a stack.
    """
    # The base's dimensions that each of the two halves has.
    adapter_dims = set(reading.base_dims)
    for partner_reading in _with_rank(base, partner):
        if reading.rank is None or partner_reading.rank is None:
            continue
        partner_dims = set(partner_reading.base_dims)
        shared_dims = adapter_dims & partner_dims
        have_one_rank = shape[reading.rank] == partner[partner_reading.rank]
        have_all_dims = adapter_dims | partner_dims == set(range(len(base)))
        share_first_dims = shared_dims == set(range(len(shared_dims)))
        if have_one_rank and have_all_dims and share_first_dims:
            return True
    return False


def _is_low_rank(base: Shape, shape: Shape, reading: Reading) -> bool:
    """Whether the rank is at most that of a matrix with the dimensions of the base that
    the adapter has for rows, and the others for columns. A reading without a rank
    counts as rank 1.
    """
    rows = math.prod([base[dim] for dim in reading.base_dims])
    columns = math.prod(base) // max(rows, 1)
    rank = 1 if reading.rank is None else shape[reading.rank]
    return rank <= min(rows, columns)


def _with_extra(base: Shape, shape: Shape) -> tuple[Reading, ...]:
    """The readings of a scale with more dimensions than its base. The further
    dimensions come before or after those of the base, and correspond to none.
    """
    extra = len(shape) - len(base)
    base_dims = tuple(range(len(base)))
    no_dims = (None,) * extra
    readings: list[Reading] = []
    if _all_fit(base, base_dims, shape[extra:], _in_blocks):
        readings.append(Reading((*no_dims, *base_dims)))
    if _all_fit(base, base_dims, shape[: len(base)], _in_blocks):
        readings.append(Reading((*base_dims, *no_dims)))
    return _with_most_equal(base, shape, readings)


def _with_most_equal(
    base: Shape,
    shape: Shape,
    readings: Sequence[Reading],
) -> tuple[Reading, ...]:
    """Those of `readings` under which most dimensions have the size of the base's."""

    def count_of_equal_dims(reading: Reading) -> int:
        count = 0
        for dim, size in zip(reading.dims, shape, strict=True):
            if dim is not None and base[dim] == size != 1:
                count += 1
        return count

    readings_by_count = together(readings, count_of_equal_dims)
    if not readings_by_count:
        return ()
    return tuple(readings_by_count[max(readings_by_count)])

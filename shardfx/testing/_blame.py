"""Which equation of a step is the first that its plan makes wrong."""

import difflib
import itertools as it
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ._tape import Record


# How the values of the devices along one mesh axis make up the whole: a dimension that they cut, or one of these.
Role = int | str
_SAME, _SUM = "same", "sum"


class Compared(NamedTuple):
    """What an equation made under the plan beside what it makes on one device.

    **Arguments:**

    - `is_same`: whether the devices' values make up that of one device.
    - `roles`: how, along each mesh axis of the shard_maps around it.
    - `difference`: the largest, and `at` where it is.
    - `scale`: the largest number of the reference.
    """

    is_same: bool
    roles: Mapping[str, Role]
    difference: float
    at: tuple[int, ...]
    scale: float


class Fault(NamedTuple):
    """The first equation that a plan makes wrong: its number, and that of the one whose value it takes for another."""

    number: int
    source: int
    compared: Compared


def differences(found: Any, wanted: Any) -> np.ndarray:
    """How far numbers are apart; those that are no numbers, or infinite, are equal to their like alone."""
    found, wanted = (np.asarray(one).astype(np.result_type(np.asarray(one).dtype, np.float64)) for one in (found, wanted))
    with np.errstate(invalid="ignore"):
        apart = np.abs(found - wanted)
    same = (found == wanted) | (np.isnan(found) & np.isnan(wanted))
    return np.where(same, 0.0, np.where(np.isnan(apart), np.inf, apart))


def allowed(exact: Any, others: Sequence[Any], dtype: Any) -> float:
    """The largest difference that rounding explains: eight times what it changed in the reference."""
    changed = max([float(differences(one, exact).max(initial=0.0)) for one in others], default=0.0)
    if not jnp.issubdtype(dtype, np.inexact):
        return math.inf if changed else 0.0  # a choice between numbers that rounding makes equal
    finite = np.abs(exact[np.isfinite(exact)]) if np.size(exact) else np.zeros(1)
    return 8 * changed + 4 * float(jnp.finfo(dtype).eps) * float(finite.max(initial=0.0))


def compared(record: Record, value: Any, whole_record: Record, whole: Any, most: float) -> Compared:
    """A value of the devices beside that of one device."""
    axes, parts = _by_device(record, np.asarray(value))
    whole = _by_device(whole_record, np.asarray(whole))[1]
    whole = whole.reshape(whole.shape[len([a for one in whole_record.leading if one for a in one]) :])
    best = Compared(False, {}, math.inf, (), float(np.abs(whole).max(initial=0)) if whole.dtype != bool else 1.0)
    for roles, made in _assembled(axes, parts, whole.shape):
        apart = differences(made, np.broadcast_to(whole, made.shape))
        largest = float(apart.max(initial=0.0))
        if largest < best.difference or not best.roles:
            at = np.unravel_index(int(apart.argmax()), apart.shape)[made.ndim - whole.ndim :] if apart.size else ()
            names = {name: role for (name, size), role in zip(axes, roles, strict=True) if size > 1}
            best = best._replace(is_same=largest <= most, roles=names, difference=largest, at=tuple(map(int, at)))
        if best.is_same:
            break
    return best


def _by_device(record: Record, value: np.ndarray) -> tuple[list[tuple[str, int]], np.ndarray]:
    """A record's value with a leading dimension for each mesh axis, before those for the turns of loops."""
    device = [at for at, one in enumerate(record.leading) if one is not None]
    value = np.moveaxis(value, device, range(len(device)))
    axes = [axis for one in record.leading if one is not None for axis in one]
    return axes, value.reshape((*[size for _, size in axes], *value.shape[len(device) :]))


def _assembled(
    axes: list[tuple[str, int]], parts: np.ndarray, shape: tuple[int, ...]
) -> Iterator[tuple[tuple[Role, ...], np.ndarray]]:
    """Every array of a shape that the devices' values can be parts of, with the role of each mesh axis."""
    local = parts.shape[len(axes) :]
    if len(local) != len(shape) or any(size == 0 or whole % size for size, whole in zip(local, shape, strict=True)):
        return
    ratios = [whole // size for size, whole in zip(local, shape, strict=True)]
    choices = [[_SAME, *[dim for dim, ratio in enumerate(ratios) if ratio % size == 0 and ratio > 1], _SUM] for _, size in axes]
    choices = [one if size > 1 else [_SAME] for one, (_, size) in zip(choices, axes, strict=True)]
    for roles in sorted(it.product(*choices), key=lambda roles: roles.count(_SUM)):
        cuts = [[at for at, role in enumerate(roles) if role == dim] for dim in range(len(shape))]
        if [math.prod(axes[at][1] for at in own) for own in cuts] != ratios:
            continue
        sums = tuple(at for at, role in enumerate(roles) if role == _SUM)
        whole = parts.sum(sums, keepdims=True) if sums else parts
        same = [at for at, role in enumerate(roles) if role in (_SAME, _SUM)]
        order = [*same]
        for dim, own in enumerate(cuts):
            order += [*own, len(axes) + dim]
        arranged = whole.transpose(order)
        # Every device of those that should hold the same is compared.
        yield roles, arranged.reshape((*[whole.shape[at] for at in same], *shape))


def aligned(ours: Sequence[Record], theirs: Sequence[Record]) -> dict[int, int]:
    """For the records of one tape those of another that are the same equations."""
    keys = [[(one.primitive, one.frame) for one in records] for records in (ours, theirs)]
    if keys[0] == keys[1]:
        return {at: at for at in range(len(ours))}
    blocks = difflib.SequenceMatcher(None, *keys, autojunk=False).get_matching_blocks()
    return {one.a + at: one.b + at for one in blocks for at in range(one.size)}


def fault_of(records: Sequence[Record], found: Mapping[int, Compared], wrong: Sequence[int]) -> Fault | None:
    """The first equation that is wrong although what it takes is right, of those that wrong results come from.

    **Arguments:**

    - `records`: of the step under the plan.
    - `found`: what they made beside the reference, where there is one.
    - `wrong`: the records that are wrong results.
    """

    def is_right(number: int, reader: Record | None) -> bool:
        """Whether a value is what its reader takes it for: a sum that is not summed is none outside its shard_map."""
        if number < 0:
            return True
        one = found.get(number)
        return one is not None and one.is_same and not _loose(records[number], one, reader)

    region: set[int] = set()
    boundary = [number for number in wrong if number >= 0 and number in found and found[number].is_same]
    waiting = [number for number in wrong if number >= 0 and number not in boundary]
    while waiting:
        number = waiting.pop()
        if number not in region:
            region.add(number)
            reads = records[number].reads
            boundary += [one for one in reads if one in found and found[one].is_same and not is_right(one, records[number])]
            waiting += [one for one in reads if one >= 0 and not is_right(one, records[number]) and one not in boundary]
    # What is computed of no array, as positions are, is right or wrong only where it meets one.
    indices: set[int] = set()
    for number in sorted(region):
        is_number = not jnp.issubdtype(records[number].dtype, np.inexact)
        if is_number and all(one in indices or one < 0 for one in records[number].reads):
            indices.add(number)
    starts = [
        number
        for number in sorted(region - indices)
        if all(one in indices or is_right(one, records[number]) for one in records[number].reads) and number in found
    ]
    if boundary:
        first = min(boundary)
        if not starts or first < starts[0]:
            return Fault(first, first, found[first])
    if not starts:
        return Fault(min(region), min(region), found[min(region)]) if region & {*found} and min(region) in found else None
    first = starts[0]
    reads = records[first].reads
    summed = [one for one in reads if one in found and _SUM in found[one].roles.values()]
    sources = [one for one in reads if one in indices] or summed
    return Fault(first, max(sources, default=first), found[first])


def _loose(record: Record, one: Compared, reader: Record | None) -> bool:
    """Whether a sum that each device has a part of leaves the shard_map."""
    around = {name for own in (reader.leading if reader else ()) if own is not None for name, _ in own}
    return any(role == _SUM and name not in around for name, role in one.roles.items())

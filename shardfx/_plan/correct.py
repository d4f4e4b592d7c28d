import functools as ft
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from .._errors import SpecError
from .._mesh import MeshSpec
from .._reason import Code, Decision, Reason, reason
from .._spec import UNCONSTRAINED, array_bytes, canonical_entry, entries_of, entry_axes, trimmed


def correct(
    spec: Any,
    shape: Sequence[int],
    mesh: MeshSpec | Mesh | AbstractMesh,
    *,
    units: Sequence[int] | None = None,
    min_bytes: int = 0,
    dtype: Any = None,
    strict: bool = False,
) -> Decision:
    """Makes a PartitionSpec valid for an array on a mesh, keeping as much of it as can be kept.

    Dimension by dimension: axes that the mesh lacks, and axes that an earlier dimension kept, are dropped; axes
    of size 1 stay; of the rest, the subset with the largest product that divides the dimension is kept (among
    equals the one whose positions come first). Idempotent.

    **Arguments:**

    - `spec`: the PartitionSpec that is asked for. Fewer entries than dimensions leave the rest replicated; more are
        an error unless the extra ones are `None`.
    - `shape`: the shape of the array.
    - `mesh`: any mesh; only its axis names, sizes and types are read.
    - `units`: one int per dimension: a dimension of `n * unit` elements is only cut between units.
    - `min_bytes`: arrays of fewer bytes are replicated. Needs `dtype`.
    - `dtype`: the dtype of the array.
    - `strict`: raise where something would have been dropped.

    **Returns:**

    A [`shardfx.Decision`][]: a spec that JAX accepts for this shape on this mesh, and a reason for each thing
    that was dropped. UNCONSTRAINED dimensions stay if the mesh has an Auto axis (such a spec is for
    [`shardfx.constrain`][] alone).

    **Raises:**

    `SpecError` if the spec does not fit the rank, and under `strict` if anything would be dropped.

    !!! Example

        ```python
        from jax.sharding import PartitionSpec as P
        from shardfx import MeshSpec, correct

        mesh = MeshSpec({"data": 2, "tensor": 4})
        decision = correct(P(("data", "tensor"), "pipe"), (4, 16), mesh)
        assert decision.spec == P("tensor")
        # dim 0: size 4 is not divisible by `data` (2) x `tensor` (4); ...
        print(decision.reasons[0])
        ```
    """
    if not isinstance(spec, PartitionSpec):
        raise SpecError(f"expected a PartitionSpec, not {spec!r}; write `PartitionSpec({spec!r})`, or use `resolve`.")
    if min_bytes and dtype is None:
        raise SpecError("`min_bytes` needs the array's dtype: pass `dtype=`.")
    shape = tuple(int(size) for size in shape)
    units = tuple(units) if units is not None else None
    nbytes = array_bytes(shape, dtype) if min_bytes else 0
    decision = _cached(spec, shape, MeshSpec.of(mesh), units, nbytes, min_bytes)
    if strict and decision.reasons:
        raise SpecError(
            f"{spec} for shape {shape} on mesh {MeshSpec.of(mesh)}: {'; '.join(map(str, decision.reasons))}"
        )
    return decision


@ft.lru_cache(maxsize=4096)
def _cached(
    spec: PartitionSpec,
    shape: tuple[int, ...],
    mesh: MeshSpec,
    units: tuple[int, ...] | None,
    nbytes: int,
    min_bytes: int,
) -> Decision:
    return corrected(spec, shape, mesh.shape, AxisType.Auto in mesh.axis_types, units, nbytes, min_bytes)


def corrected(
    spec: PartitionSpec,
    shape: tuple[int, ...],
    sizes: Mapping[str, int],
    has_auto: bool,
    units: tuple[int, ...] | None,
    nbytes: int,
    min_bytes: int,
) -> Decision:
    """[`shardfx.correct`][] for a mesh of plain axis sizes, that may have an Auto axis, and checked arguments."""
    entries = _fitted(spec, shape)
    units = _fitted_units(units, shape)
    asked = tuple(dict.fromkeys(axis for entry in entries for axis in entry_axes(entry)))
    if nbytes < min_bytes and asked:
        return Decision(PartitionSpec(), (reason(Code.small, None, asked, size=nbytes, limit=min_bytes),))
    used: dict[str, int] = dict.fromkeys((*spec.unreduced, *spec.reduced), -1)
    kept, reasons = [], []
    for dim, (entry, size, unit) in enumerate(zip(entries, shape, units, strict=True)):
        if entry is None:
            kept.append(None)
            continue
        if entry is UNCONSTRAINED:
            entry, found = _unconstrained(has_auto, dim)
        elif entry in sizes and entry not in used and size % (unit * sizes[entry]) == 0:
            found = ()  # by far the most frequent case: one axis, free, that divides
        else:
            entry, found = _entry(entry_axes(entry), dim, size, unit, sizes, used)
        used.update(dict.fromkeys(entry_axes(entry), dim))
        kept.append(entry)
        reasons += found
    like, found = _reductions(spec, sizes)
    return Decision(trimmed(kept, like), (*reasons, *found))


def _fitted(spec: PartitionSpec, shape: tuple[int, ...]) -> tuple[Any, ...]:
    entries = entries_of(spec)
    if any(entry is not None for entry in entries[len(shape) :]):
        raise SpecError(
            f"{spec} has {len(entries)} entries, but shape {shape} has {len(shape)} dimensions; "
            f"write `{trimmed(entries[: len(shape)])}` if the first {len(shape)} are meant."
        )
    return (*entries[: len(shape)], *[None] * (len(shape) - len(entries)))


def _fitted_units(units: tuple[int, ...] | None, shape: tuple[int, ...]) -> tuple[int, ...]:
    if units is None:
        return (1,) * len(shape)
    if len(units) != len(shape) or not all(unit >= 1 for unit in units):
        raise SpecError(
            f"`units` must hold one positive int for each dimension of shape {shape}, not {units}; use 1 where any "
            "cut will do."
        )
    return units


def padded_units(units: tuple[int, ...] | None, rank: int) -> tuple[int, ...] | None:
    """`units` with an entry for each of `rank` dimensions: 1 beyond their end."""
    if units is None:
        return None
    if any(unit > 1 for unit in units[rank:]):
        raise SpecError(f"the units {units} are for rank {len(units)}, and the array has rank {rank}.")
    return (*units[:rank], *[1] * (rank - len(units)))


def _unconstrained(has_auto: bool, dim: int) -> tuple[Any, list[Reason]]:
    if has_auto:
        return UNCONSTRAINED, []
    return None, [reason(Code.absent, dim, (), what="Auto axis that the compiler could choose for UNCONSTRAINED")]


def _entry(
    axes: tuple[str, ...], dim: int, size: int, unit: int, sizes: Mapping[str, int], used: Mapping[str, int]
) -> tuple[Any, list[Reason]]:
    absent = tuple(axis for axis in axes if axis not in sizes)
    present = [axis for axis in axes if axis in sizes]
    free = tuple(dict.fromkeys(axis for axis in present if axis not in used))
    taken = list(present)
    for axis in free:
        taken.remove(axis)
    reasons = [reason(Code.absent, dim, absent, what=f"axis {_names(absent)}")] if absent else []
    if taken:
        reasons.append(reason(Code.duplicate, dim, tuple(taken), what=_names(tuple(dict.fromkeys(taken)))))
    kept = _divisors(free, size, unit, sizes)
    if kept != free:
        reasons.append(_indivisible(free, kept, dim, size, unit, sizes))
    return canonical_entry(kept), reasons


def _divisors(axes: tuple[str, ...], size: int, unit: int, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The axes of size 1, and of the others the subset with the largest product that cuts `size` between units."""
    whole = 1 if size % unit else size // unit
    # Sizes above 1 make every proper prefix a smaller product, so the first of two equal products stays first
    # however both are continued: one candidate per product is enough.
    best: dict[int, tuple[int, ...]] = {1: ()}
    for position, axis in enumerate(axes):
        if sizes[axis] == 1:
            continue
        for product, positions in list(best.items()):
            larger = product * sizes[axis]
            candidate = (*positions, position)
            if whole % larger == 0 and candidate < best.get(larger, (len(axes),)):
                best[larger] = candidate
    chosen = best[max(best)]
    return tuple(axis for position, axis in enumerate(axes) if sizes[axis] == 1 or position in chosen)


def _indivisible(
    axes: tuple[str, ...], kept: tuple[str, ...], dim: int | None, size: int, unit: int, sizes: Mapping[str, int]
) -> Reason:
    dropped = tuple(axis for axis in axes if axis not in kept)
    what = " x ".join(f"`{axis}` ({sizes[axis]})" for axis in axes if sizes[axis] > 1)
    if unit > 1 and size % unit:
        return Reason(
            Code.unit,
            dim,
            dropped,
            f"size {size} is no whole number of units of {unit}, so nothing may cut it; correct the unit to one that "
            f"divides {size}",
        )
    if unit > 1 and _divisors(axes, size, 1, sizes) != kept:
        return reason(Code.unit, dim, dropped, size=size, count=size // unit, unit=unit, what=what)
    product, count = math.prod(sizes[axis] for axis in axes) * unit, size // unit
    padded, text = -(-size // product) * product, f"{size} ({count} units of {unit})" if unit > 1 else size
    return reason(Code.indivisible, dim, dropped, size=text, what=what, padded=padded, whole=count)


def _reductions(spec: PartitionSpec, sizes: Mapping[str, int]) -> tuple[PartitionSpec, list[Reason]]:
    if not (spec.unreduced or spec.reduced):
        return spec, []
    absent = tuple(sorted(axis for axis in (*spec.unreduced, *spec.reduced) if axis not in sizes))
    like = PartitionSpec(
        unreduced=frozenset(axis for axis in spec.unreduced if axis in sizes),
        reduced=frozenset(axis for axis in spec.reduced if axis in sizes),
    )
    return like, [reason(Code.absent, None, absent, what=f"axis {_names(absent)}")] if absent else []


def spread(
    spec: PartitionSpec,
    shape: tuple[int, ...],
    sizes: Mapping[str, int],
    axes: tuple[str, ...],
    units: tuple[int, ...] | None,
    nbytes: int,
    min_bytes: int,
) -> Decision:
    """Adds `axes` to the dimension that nothing shards yet and that they cut furthest; the largest of several.

    `spec` has been through [`shardfx.correct`][] already; axes that it uses, and axes that the mesh lacks, are
    left out with a reason.
    """
    if nbytes < min_bytes:
        return Decision(spec, (reason(Code.small, None, axes, size=nbytes, limit=min_bytes),))
    entries, units = _fitted(spec, shape), _fitted_units(units, shape)
    used = {axis: dim for dim, entry in enumerate(entries) for axis in entry_axes(entry)}
    absent = tuple(axis for axis in axes if axis not in sizes)
    taken = tuple(axis for axis in axes if axis in used)
    free = tuple(axis for axis in axes if axis in sizes and axis not in used)
    reasons = [reason(Code.absent, None, absent, what=f"axis {_names(absent)}")] if absent else []
    if taken:
        reasons.append(reason(Code.duplicate, None, taken, what=_names(taken)))
    if not free:
        return Decision(spec, tuple(reasons))
    choices = [
        (math.prod(sizes[axis] for axis in kept), size, -dim, kept)
        for dim, (entry, size, unit) in enumerate(zip(entries, shape, units, strict=True))
        if entry is None and (kept := _divisors(free, size, unit, sizes))
    ]
    count, size, dim, kept = max(choices, default=(1, max(shape, default=1), 0, ()))
    if len(kept) < len(free):
        unit = units[-dim] if kept else units[shape.index(size)] if shape else 1
        reasons.append(_indivisible(free, kept, -dim if kept else None, size, unit, sizes))
    if not kept:
        return Decision(spec, tuple(reasons))
    changed = (
        (*entries[:-dim], canonical_entry(kept), *entries[-dim + 1 :]) if dim else (canonical_entry(kept), *entries[1:])
    )
    return Decision(trimmed(changed, spec), tuple(reasons))


def _names(axes: tuple[str, ...]) -> str:
    return ", ".join(f"`{axis}`" for axis in axes)

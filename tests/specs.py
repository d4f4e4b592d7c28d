"""PartitionSpecs read and compared by JAX alone, for tests of what decides them."""

from typing import Any

from jax.sharding import PartitionSpec as P


U = P.UNCONSTRAINED


def entries_of(spec: P) -> tuple[Any, ...]:
    # With unreduced axes a spec is no iterable; before JAX had them it had no partitions.
    if hasattr(spec, "partitions"):
        return tuple(spec.partitions)
    return tuple(spec)


def entries_at(spec: P, rank: int) -> tuple[Any, ...]:
    """The entries of an array's dimensions, `None` where the spec ends before."""
    entries = entries_of(spec)
    missing = rank - len(entries)
    return (*entries, *[None] * missing)


def entry_axes(entry: Any) -> tuple[str, ...]:
    """The mesh axes of one entry."""
    if entry is None or entry is U:
        return ()
    if isinstance(entry, str):
        return (entry,)
    return tuple(entry)


def with_entries(spec: P, entries: list[Any]) -> P:
    """A spec of these entries, each in its shortest form, with the reductions of
    another.
    """
    shortest = []
    for entry in entries:
        axes = entry_axes(entry)
        if entry is not U and len(axes) < 2:
            entry = axes[0] if axes else None
        shortest.append(entry)
    while shortest and shortest[-1] is None:
        shortest.pop()
    if spec.unreduced or spec.reduced:
        return P(*shortest, unreduced=spec.unreduced, reduced=spec.reduced)
    return P(*shortest)


def canonical(spec: P) -> P:
    """The spec without trailing `None`s and tuples of one axis."""
    return with_entries(spec, list(entries_of(spec)))


def constrained(spec: P) -> P:
    """The spec with `None` where it leaves the choice to the compiler."""
    entries = list(entries_of(spec))
    for dim, entry in enumerate(entries):
        if entry is U:
            entries[dim] = None
    return with_entries(spec, entries)

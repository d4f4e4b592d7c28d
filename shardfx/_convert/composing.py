"""Two strided copies, one after the other, as one copy without the array between."""

from collections.abc import Iterator, Sequence

from .dimensions import split
from .pieces import (
    NOWHERE,
    Factor,
    Piece,
    along,
    dense,
    hull,
    moved,
    shifted,
    swapped,
    within,
)


def composed(outer: Piece, inner: Piece) -> Iterator[Piece]:
    """Yields pieces that make the copies of `inner` and then `outer` in one step.

    `inner` writes an intermediate array, and `outer` reads it. The result does not need
    this array. A piece is a strided copy: its factors are nested loops, each with a
    dimension and a step in elements on either side.
    """
    # Each part fills a box of the intermediate array without gaps.
    for filled in dense(inner):
        # The parts of the outer piece that read this box. With source and target
        # exchanged, their target is the intermediate array, here from the box's start.
        to_start = [-position for position in filled.target]
        box = hull(filled)
        readers = [shifted(part, to_start) for part in within(swapped(outer), box)]
        if not readers:
            continue
        # Each dimension of the box is split into one per factor of `filled` along it.
        # The factor for each dimension of the readers' targets after that:
        loops: list[Factor | None] = []
        for dim in range(len(filled.target)):
            # The longest step first.
            factors = along(filled, dim)
            for factor in factors[:-1]:
                readers = _split_all(readers, len(loops), factor.target_step)
                loops.append(factor)
            loops.append(factors[-1] if factors else None)
        for reader in readers:
            yield _through(reader, loops, filled)


def _split_all(pieces: Sequence[Piece], dim: int, inner: int) -> list[Piece]:
    """The pieces for a target with dimension `dim` split into two, the second of size
    `inner`.
    """
    parts: list[Piece] = []
    for piece in pieces:
        parts += split(piece, dim, inner)
    return parts


def _through(reader: Piece, loops: Sequence[Factor | None], filled: Piece) -> Piece:
    """The piece that `composed` makes of a part of its outer piece and a part of its
    inner piece.

    **Arguments:**

    - `reader`: a part of the outer piece with source and target exchanged. Its target
      is the part of the intermediate array that `filled` writes, with each dimension
      split into one dimension per factor of `filled`.
    - `loops`: for each dimension of this target, the factor of `filled`; `None` for one
      of size 1 without a factor.
    - `filled`: a part of the inner piece that fills a box of the intermediate array.
    """
    # Where the composed piece begins in the source of the inner piece.
    source = filled.source
    for position, loop in zip(reader.target, loops, strict=True):
        if loop is not None:
            source = moved(source, loop.source_dim, position * loop.source_step)

    factors = []
    for factor in reader.factors:
        # The loop of `filled` along which this factor moves; `None` for a factor that
        # repeats elements of the intermediate array.
        loop = None if factor.target_dim == NOWHERE else loops[factor.target_dim]
        source_dim = NOWHERE
        source_step = 0
        if loop is not None:
            source_dim = loop.source_dim
            source_step = factor.target_step * loop.source_step
        composed_factor = Factor(
            size=factor.size,
            source_dim=source_dim,
            source_step=source_step,
            target_dim=factor.source_dim,
            target_step=factor.source_step,
        )
        factors.append(composed_factor)
    casts = (*filled.value.casts, *reader.value.casts)
    return Piece(
        value=filled.value._replace(casts=casts),
        source=source,
        target=reader.source,
        factors=tuple(factors),
    )

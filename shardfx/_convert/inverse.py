"""Steps of a map put together and turned around: pieces of two steps become one step,
and pieces of a step become those of its inverse.
"""

import collections
import itertools as it
import math
from collections.abc import Iterator, Mapping, Sequence

from .._ground.boxes import Box
from .._ground.errors import MapError
from .columns import AlikeParts, AlikePieces, MadeTable, read_paths
from .composing import composed
from .pieces import (
    NOWHERE,
    Arithmetic,
    Factor,
    Made,
    Operation,
    Piece,
    Value,
    dense,
    hull,
    once,
    simplified,
    swapped,
    within,
)
from .problems import Problem, TreeLeaves, raise_problems


def through(
    second: Mapping[str, Made],
    first: Mapping[str, Made],
) -> Mapping[str, Made]:
    """Composes two steps of a map: replaces intermediate leaves by the leaves of the
    source that they are made of.

    The first step makes the intermediate leaves `first`, and the second step makes
    `second` of them.
    """
    leaves = {}
    for path, leaf in second.items():
        pieces: list[Piece] = []
        for piece in leaf.pieces:
            if piece.value.path is None:
                pieces.append(piece)
                continue
            if piece.value.scale is not None:
                raise MapError(
                    f"`{path}` is scaled after another map; scale in the first map."
                )
            for inner in first[piece.value.path].pieces:
                pieces += map(simplified, composed(piece, inner))
        leaves[path] = Made(shape=leaf.shape, dtype=leaf.dtype, pieces=tuple(pieces))
    return leaves


def backward(forward: Mapping[str, Made], source: TreeLeaves) -> Mapping[str, Made]:
    """The inverse of the map that makes `forward` of `source`: the leaves of `source`,
    made of those of `forward`.

    Raises `MapError` if the map has no inverse.
    """
    parts = list(_parts_of_stacks(forward, source))
    if not parts:
        return _backward_one_by_one(forward, source)
    stacks = {group.first.value.path for group in parts}
    others = {}
    for path, leaf in forward.items():
        if path not in stacks:
            others[path] = leaf
    in_stacks: set[str] = set()
    for group in parts:
        in_stacks.update(group.paths)
    other_sources = {path: source[path] for path in source if path not in in_stacks}
    leaves = _backward_one_by_one(others, other_sources)
    return MadeTable(order=list(source), parts=parts, others=leaves)


def _parts_of_stacks(
    forward: Mapping[str, Made],
    source: TreeLeaves,
) -> Iterator[AlikeParts]:
    """Yields the leaves of `source` of which a stack is made, if nothing else is made
    of them, and if they are alike: the parts of that stack. `forward` has the leaves
    that the map makes, by path.
    """
    # How many pieces read a leaf of the source.
    read_counts: collections.Counter[str] = collections.Counter()
    for leaf in forward.values():
        read_counts.update(read_paths(leaf.pieces))
    for path, leaf in forward.items():
        pieces = leaf.pieces
        # A piece that does not begin at the start of its source is not the whole leaf.
        if not isinstance(pieces, AlikePieces) or pieces.sources.any():
            continue
        first = pieces.first
        has_repeats = any(factor.source_dim == NOWHERE for factor in first.factors)
        if has_repeats or max(map(read_counts.__getitem__, pieces.paths)) > 1:
            continue
        # Thousands of leaves share a few objects.
        structs = {id(source[name]): source[name] for name in pieces.paths}
        kinds = set()
        for struct in structs.values():
            kinds.add((tuple(struct.shape), struct.dtype))
        if len(kinds) > 1:
            continue
        ((shape, dtype),) = kinds
        if first.elements != math.prod(shape):
            continue
        casts: tuple[Operation, ...] = ()
        if first.value.casts:
            casts = _inverse_operations(first.value.casts, dtype)
        inverse = Piece(
            value=Value(path=path, number=first.value.number, casts=casts),
            source=first.target,
            target=first.source,
            factors=simplified(swapped(first)).factors,
        )
        yield AlikeParts(
            paths=pieces.paths,
            shape=shape,
            dtype=dtype,
            first=inverse,
            sources=pieces.targets,
        )


def _backward_one_by_one(
    forward: Mapping[str, Made],
    source: TreeLeaves,
) -> dict[str, Made]:
    """The leaves of `source` by path, made of those of `forward`, the leaves that the
    map makes of `source`; leaf by leaf.
    """
    pieces_by_path: dict[str, list[Piece]] = {path: [] for path in source}
    problems: list[Problem] = []
    for path, leaf in forward.items():
        _turn_around(
            path=path,
            leaf=leaf,
            source=source,
            pieces_by_path=pieces_by_path,
            problems=problems,
        )

    leaves = {}
    for path, pieces in pieces_by_path.items():
        leaf = source[path]
        shape = tuple(leaf.shape)
        distinct, is_whole = disjoint(pieces, shape)
        if not is_whole:
            text = "the map keeps only a part of it, so it has no inverse"
            problems.append((path, text))
        leaves[path] = Made(
            shape=shape,
            dtype=leaf.dtype,
            pieces=tuple(map(simplified, distinct)),
        )
    if problems:
        raise_problems(problems)
    return leaves


def _turn_around(
    path: str,
    leaf: Made,
    source: TreeLeaves,
    pieces_by_path: Mapping[str, list[Piece]],
    problems: list[Problem],
) -> None:
    """Appends to `pieces_by_path` the pieces that read the leaf `path` of a map's
    target and write the leaves of `source` that it is made of. What has no inverse is
    appended to `problems`, pairs of a path and a text.
    """
    # Pieces that follow each other often have the same factors: those of the last
    # piece, and its inverse.
    last_factors: tuple[Factor, ...] | None = None
    factors: tuple[Factor, ...] = ()
    for piece in leaf.pieces:
        value = piece.value
        if value.path is None:
            continue
        if value.scale is not None:
            text = (
                "the map scales it, and an inverse would have to find the scales; write"
                " a map in the other direction, to weights without scales"
            )
            problems.append((value.path, text))
            break
        casts: tuple[Operation, ...] = ()
        if value.casts:
            casts = _inverse_operations(value.casts, source[value.path].dtype)
        if piece.factors is not last_factors:
            last_factors = piece.factors
            # `once` leaves only the first of repeated values.
            factors = simplified(swapped(once(piece))).factors
        inverse = Piece(
            value=Value(path=path, number=value.number, casts=casts),
            source=piece.target,
            target=piece.source,
            factors=factors,
        )
        pieces_by_path[value.path].append(inverse)


def _inverse_operations(
    casts: Sequence[Operation],
    dtype: object,
) -> tuple[Operation, ...]:
    """The operations that undo `casts`; the last one results in `dtype`, the dtype
    before `casts`.

    For float32 elements, (bfloat16,) is undone by (float32,). An arithmetic operation
    is undone in the dtype that its result has.
    """
    # The dtype before each operation, and after the last one.
    dtypes = [dtype]
    for operation in casts:
        is_arithmetic = isinstance(operation, Arithmetic)
        dtypes.append(dtypes[-1] if is_arithmetic else operation)

    inverse_operations: list[Operation] = []
    dtype_now = dtypes.pop()
    pairs_of_casts = zip(reversed(casts), reversed(dtypes), strict=True)
    for operation, dtype_before in pairs_of_casts:
        if not isinstance(operation, Arithmetic):
            continue
        if dtype_now != dtype_before:
            inverse_operations.append(dtype_before)
        dtype_now = dtype_before
        inverse_operations.append(operation.back)
    is_cast_alone = bool(casts) and not inverse_operations
    if dtype_now != dtype or is_cast_alone:
        inverse_operations.append(dtype)
    return tuple(inverse_operations)


def disjoint(
    pieces: Sequence[Piece],
    shape: tuple[int, ...],
) -> tuple[list[Piece], bool]:
    """The pieces of one target of shape `shape` without their overlaps, and whether
    they cover the whole target.

    Pieces that overlap write equal elements there, so only the first one keeps them.
    """
    size = math.prod(shape)
    if len(pieces) == 1 and pieces[0].elements == size:
        return list(pieces), True
    # Each part fills a box of the target without gaps.
    parts_by_piece = [list(dense(piece)) for piece in pieces]
    all_boxes = [hull(part) for part in it.chain.from_iterable(parts_by_piece)]
    dims = _grid_dims(all_boxes)

    # Only boxes with equal intervals along these dimensions can overlap: the boxes that
    # are written so far, by these intervals.
    written: dict[object, list[Box]] = {}
    distinct: list[Piece] = []
    for piece, parts in zip(pieces, parts_by_piece, strict=True):
        new_parts: list[Piece] = []
        for part in parts:
            box = hull(part)
            grid_intervals = tuple(box[dim] for dim in dims)
            boxes = written.setdefault(grid_intervals, [])
            outside = _outside_all(part, boxes)
            boxes += map(hull, outside)
            new_parts += outside
        is_all_new = sum(part.elements for part in new_parts) == piece.elements
        distinct += [piece] if is_all_new else new_parts
    return distinct, sum(piece.elements for piece in distinct) == size


def _grid_dims(boxes: Sequence[Box]) -> list[int]:
    """The dimensions along which any two of the boxes have equal or disjoint intervals.

    For the boxes ((0, 2), (0, 4)) and ((2, 4), (3, 6)): dimension 0.
    """
    dims = []
    columns = zip(*boxes, strict=True)
    for dim, column in enumerate(columns):
        intervals = sorted(set(column))
        neighbours = it.pairwise(intervals)
        if all(stop <= start for (_, stop), (start, _) in neighbours):
            dims.append(dim)
    return dims


def _outside_all(piece: Piece, boxes: Sequence[Box]) -> list[Piece]:
    """The parts of a piece outside of all `boxes` of the target. The piece itself must
    fill a box without gaps.
    """
    parts = [piece]
    for box in boxes:
        outside: list[Piece] = []
        for part in parts:
            outside += _outside(part, box)
        parts = outside
    return parts


def _outside(piece: Piece, box: Box) -> Iterator[Piece]:
    """Yields the parts of a piece outside of `box` of the target. The piece itself must
    fill a box without gaps.
    """
    filled = hull(piece)
    pairs = list(zip(filled, box, strict=True))
    if any(stop <= low or high <= start for (start, stop), (low, high) in pairs):
        yield piece
        return
    # The intervals of the part that is not yielded so far.
    limits = list(filled)
    for dim, ((start, stop), (low, high)) in enumerate(pairs):
        before = (start, max(start, low))
        after = (min(stop, high), stop)
        for interval in (before, after):
            if interval[0] < interval[1]:
                part_box = (*limits[:dim], interval, *limits[dim + 1 :])
                yield from within(piece, part_box)
        limits[dim] = (max(start, low), min(stop, high))

"""The pieces of a map for given leaves of both trees, checked before anything is read
or moved.

A map has one or more steps, each with its rules. `source` and `target` are the leaves
of both trees, by path. If the target is `None`, its leaves are inferred from the
source. A `Made` is a leaf that a map makes: its shape, its dtype, and the pieces
(strided copies) that fill it.
"""

import itertools as it
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from .._ground.boxes import Box
from .._ground.errors import MapError
from .._ground.text import between_numbers, joined, plural, printable
from .._ground.tree import flatten
from .evaluate import LeavesMade, cast, dim_of, evaluated, leaf_made, on_shapes
from .expression import From, NamedSizes, Rules, counted_leaf, leaves_of
from .patterns import Binding, Pattern, near, pattern, sum_of
from .pieces import (
    Arithmetic,
    Factor,
    Made,
    Operation,
    Piece,
    Struct,
    Value,
    all_simplified,
    composed,
    dense,
    hull,
    once,
    simplified,
    swapped,
    within,
)


TreeLeaf = Struct | Made
# The leaves of a tree, each with its shape and dtype, by path.
TreeLeaves = Mapping[str, TreeLeaf]
# A path, and a text about a problem with the leaf or the rule that it names.
Problem = tuple[str, str]
_SHOWN = 20


def bound_steps(
    steps: Sequence[Rules],
    source: Mapping[str, Struct],
    target: Mapping[str, Struct] | None = None,
    spare: Collection[str] = (),
) -> Mapping[str, Made]:
    """The leaves that a map makes, in the target's order. Raises `MapError` with all
    problems of the map. The leaves `spare` of the source need not be used.
    """
    made: Mapping[str, Made] | None = None
    known: TreeLeaves = source
    for step, there in zip(steps, _targets(steps, target), strict=True):
        new = _step(step, known, there, spare if made is None else ())
        made = new if made is None else _through(new, made)
        known = new
    assert made is not None
    return made


def _targets(
    steps: Sequence[Rules], target: Mapping[str, Struct] | None
) -> Sequence[Mapping[str, Struct] | None]:
    """The leaves that each step of a map makes; `None` where they are unknown. The last
    step makes `target`.

    Each step but the last makes the source of the next step. This source is known if
    the next step is inverted and its target is known, since the rules of an inverted
    step make its source from its target.
    """
    found = [target]
    for after in reversed(steps[1:]):
        there = found[-1]
        made = (
            _forward(after, there, None)
            if after.inverted and there is not None
            else None
        )
        found.append(made if made is None else structs_of(made, made.values()))
    return found[::-1]


def _step(
    step: Rules,
    source: TreeLeaves,
    target: TreeLeaves | None,
    spare: Collection[str],
) -> Mapping[str, Made]:
    if not step.inverted:
        return _forward(step, source, target, spare)
    if target is None:
        raise MapError(
            "an inverted map does not say what its target is, as a concatenation does"
            " not say how long its parts are; give the structs of the target,"
            " `like=...`, or write a map in this direction."
        )
    forward = _forward(step, target, source)
    return _backward(forward, target)


def _forward(
    step: Rules,
    source: TreeLeaves,
    target: TreeLeaves | None,
    spare: Collection[str] = (),
) -> Mapping[str, Made]:
    left_out = [pattern(text) for text in (*step.drop, *step.rest)]
    problems: list[Problem] = list(_odd_sizes(step.source_sizes, source, left_out))
    found: dict[str, Made] = {}
    used: dict[str, None] = dict.fromkeys(spare)
    failed: list[Pattern] = []
    leaf = LeavesMade(source, used)
    for path, rule, binding in places(step, source, target, problems):
        try:
            made = evaluated(rule, binding, source, leaf, on_shapes)
        except MapError as error:
            problems.append(
                (path, f"{str(error).removesuffix('.')}. It is made by {rule}")
            )
            failed += [pattern(leaf) for leaf in leaves_of(rule)]
            continue
        made = Made(made.shape, made.dtype, tuple(all_simplified(made.pieces)))
        wanted = None if target is None else target[path]
        if wanted is not None:
            made = _fitting(path, rule, made, wanted, step.casts, problems)
        found[path] = made
    problems += _odd_sizes(step.target_sizes, found, [])
    # Leaves that only a failed rule uses are not reported as unused.
    problems += _unused(step, source, used, tuple(dict.fromkeys(failed)))
    if problems:
        _raise(problems)
    return found if target is None else {path: found[path] for path in target}


def _odd_sizes(
    named: Sequence[NamedSizes], leaves: TreeLeaves, left_out: Sequence[Pattern]
) -> Iterator[Problem]:
    """Yields a problem for each leaf whose shape is not that of its layout, unless its
    path matches one of `left_out`.
    """
    for path, leaf in leaves.items() if named else ():
        if any(text.matched(path) is not None for text in left_out):
            continue
        for one in named:
            binding = pattern(one.path).matched(path)
            if binding is None:
                continue
            text = _odd_count(one, binding) or _odd_shape(one, tuple(leaf.shape))
            if text:
                yield path, text


def _odd_count(one: NamedSizes, binding: Binding) -> str:
    for name, count in one.counts:
        value = binding.get(name)
        if isinstance(value, int) and value >= count:
            return (
                f"its layout has {count} `{name}`, so the last is {count - 1}; if the"
                f" tree has more, say so: `layout.with_sizes({name}={value + 1})`"
            )
    return ""


def _odd_shape(one: NamedSizes, shape: tuple[int, ...]) -> str:
    wanted = tuple(
        own if size is None else size
        for size, own in zip(one.sizes, shape, strict=False)
    )
    if len(shape) == len(one.sizes) and wanted == shape:
        return ""
    axes = ", ".join(one.axes)
    hint = ""
    if len(shape) == len(one.sizes):
        for axis, size, own in zip(one.axes, one.sizes, shape, strict=True):
            if size is not None and size != own and " " not in axis:
                hint = f"; if that is meant, say so: `layout.with_sizes({axis}={own})`"
                break
    return (
        f"it has shape {shape}, and by the sizes of its layout ({axes}) it would be"
        f" {one.sizes}{hint}"
    )


def _fitting(
    path: str,
    rule: From,
    made: Made,
    wanted: TreeLeaf,
    casts: bool,
    problems: list[Problem],
) -> Made:
    shape = tuple(wanted.shape)
    if made.shape != shape:
        hint = ""
        if made.shape[::-1] == shape:
            hint = f"; torch keeps weights as [out, in]: {rule}.T"
        elif sorted(made.shape) == sorted(shape):
            hint = f"; the same sizes in another order: {rule}.transpose(...)"
        problems.append(
            (path, f"{rule} has shape {made.shape}, and the target {shape}{hint}")
        )
    elif wanted.dtype is not None and made.dtype != wanted.dtype and not casts:
        text = (
            f"{rule} is {made.dtype}, and the target {wanted.dtype}; write"
            f" {rule}.cast('{wanted.dtype}'), or "
        )
        problems.append((path, f"{text}`TreeMap(..., casts=True)` for all"))
    elif wanted.dtype is not None and made.dtype != wanted.dtype:
        try:
            return cast(made, wanted.dtype)
        except MapError as error:
            problems.append((path, str(error).removesuffix(".")))
    return made


def places(
    step: Rules,
    source: TreeLeaves,
    target: TreeLeaves | None,
    problems: list[Problem],
) -> Iterable[tuple[str, From, Binding]]:
    """The path of each leaf of the target, the expression that makes it, and the values
    of its placeholders.

    Leaves that no rule or several rules make, and rules that make no leaf, are appended
    to `problems`.
    """
    if target is None:
        return _inferred(step, source, problems)
    rules = [(pattern(text), rule) for text, rule in step.made]
    unused = {text: None for text, _ in step.made}
    found = []
    for path in target:
        hits = [
            (one, rule, binding)
            for one, rule in rules
            if (binding := one.matched(path)) is not None
        ]
        for one, _, _ in hits:
            unused.pop(one.text, None)
        if len(hits) == 1:
            found.append((path, hits[0][1], hits[0][2]))
        elif hits:
            problems.append(
                (
                    path,
                    (
                        f"two rules make it, `{hits[0][0].text}` and"
                        f" `{hits[1][0].text}`; keep one of them"
                    ),
                )
            )
        else:
            problems.append(
                (path, f"no rule makes it{near(path, dict(step.made), 'the rule for')}")
            )
    for text in unused:
        problems.append(
            (text, f"this rule makes no leaf of the target{near(text, target)}")
        )
    return found


def _inferred(
    step: Rules, source: TreeLeaves, problems: list[Problem]
) -> Iterator[tuple[str, From, Binding]]:
    seen: dict[str, str] = {}
    for text, rule in step.made:
        try:
            bindings = list(_bindings(text, rule, source))
        except MapError as error:
            problems.append((text, str(error).removesuffix(".")))
            continue
        if not bindings:
            first = next(iter(leaves_of(rule)), "")
            problems.append(
                (text, f"{rule} finds nothing in the source{near(first, source)}")
            )
        for binding in bindings:
            path = pattern(text).filled(binding)
            assert path is not None
            if path in seen:
                problems.append(
                    (
                        path,
                        (
                            f"two rules make it, `{seen[path]}` and `{text}`; keep one"
                            " of them"
                        ),
                    )
                )
                continue
            seen[path] = text
            yield path, rule, binding


def _bindings(text: str, rule: From, source: TreeLeaves) -> Iterator[dict[str, Any]]:
    """Yields the values of the placeholders in a target's path `text`, one dict for
    each leaf that `rule` can make.

    For the target `w/{i}` made of `layers/{i}`, it yields {"i": 0} and {"i": 1} if the
    source has the leaves `layers/0` and `layers/1`.
    """
    names = pattern(text).names
    found: list[dict[str, Any]] = [{}]
    for leaf in leaves_of(rule):
        if not set(pattern(leaf).names) & {*names}:
            continue
        hits = [
            hit for path in source if (hit := pattern(leaf).matched(path)) is not None
        ]
        kept = [
            tuple((name, hit[name]) for name in names if name in hit) for hit in hits
        ]
        rows = [dict(row) for row in dict.fromkeys(kept)]
        found = [
            {**one, **row}
            for one in found
            for row in rows
            if all(one.get(n, v) == v for n, v in row.items())
        ]
    unique = {tuple((name, one.get(name)) for name in names): one for one in found}
    for one in unique.values():
        yield from _counted(
            [name for name in names if name not in one], one, text, rule, source
        )


def _counted(
    names: Sequence[str],
    binding: dict[str, Any],
    text: str,
    rule: From,
    source: TreeLeaves,
) -> Iterator[dict[str, Any]]:
    """Yields `binding` extended by values of the placeholders `names`, which occur only
    in `at` operations.

    The operation `at("i")` selects entry i of a dimension, so there is one result for
    each entry. `text` is the path of the target, and `rule` the expression that makes
    it. For `w/{i}` made by `From("w").at("i")`, where `w` has shape (2, 8): i = 0 and i
    = 1.
    """
    if not names:
        yield binding
        return
    found = {name: _at_of(rule, name) for name in names}
    # The innermost `at` comes first: its operand has no other such placeholder, so the
    # operand's shape is known.
    inner = [
        name
        for name, at in found.items()
        if at is not None and not any(_at_of(at.of[0], n) for n in names)
    ]
    name = inner[0] if inner else names[0]
    place = found[name]
    if place is None:
        raise MapError(
            f"nothing in {rule} gives `{{{name}}}` a value; give the target, `like=...`"
        )
    made = evaluated(
        place.of[0],
        binding,
        source,
        lambda path: leaf_made(path, source[path]),
        on_shapes,
    )
    size = made.shape[dim_of(place.args[1], len(made.shape), "at")]
    one = sum_of(str(place.args[0]))
    for number in range(size):
        solved = one.solved(number)
        if solved is not None:
            yield from _counted(
                [n for n in names if n != name],
                {**binding, name: solved[1]},
                text,
                rule,
                source,
            )


def _at_of(rule: From, name: str) -> From | None:
    if (
        rule.op == "at"
        and isinstance(rule.args[0], str)
        and name in [n for _, n in sum_of(rule.args[0]).terms]
    ):
        return rule
    return next(
        (found for part in rule.of if (found := _at_of(part, name)) is not None), None
    )


def _unused(
    step: Rules, source: TreeLeaves, used: Mapping[str, None], failed: Sequence[Pattern]
) -> Iterator[Problem]:
    for text in step.drop:
        # The target of an inverted map need not have the dropped leaves.
        if not step.inverted and not any(
            pattern(text).matched(path) is not None for path in source
        ):
            yield (
                text,
                f"`drop` names it, and the source has no such leaf{near(text, source)}",
            )
    yield from _behind_gaps(step, source, used)
    drops = [*[pattern(text) for text in (*step.drop, *step.rest)], *failed]
    groups: dict[object, list[str]] = {}
    for path in source:
        if path not in used and not any(
            drop.matched(path) is not None for drop in drops
        ):
            groups.setdefault(between_numbers(path), []).append(path)
    for paths in groups.values():
        text = joined(paths) if len(paths) > 1 else paths[0]
        yield (
            f"source `{text}`",
            f'nothing is made of it; say so if that is meant: `drop=["{paths[0]}"]`',
        )


def _behind_gaps(
    step: Rules, source: TreeLeaves, used: Mapping[str, None]
) -> Iterator[Problem]:
    """Yields a problem for each `stack` operation that leaves out leaves of the source.

    A `stack` without a count ends at the first number without a leaf. With leaves 0, 1
    and 3, it leaves out leaf 3. `used` has the paths of the leaves that the rules use.
    """
    unused = [path for path in source if path not in used]
    for over, text in dict.fromkeys(
        one for _, rule in step.made for one in _endless(rule)
    ):
        for path in unused:
            binding = pattern(text).matched(path)
            if (
                binding is not None
                and pattern(text).filled({**binding, over: 0}) in used
            ):
                more = f"`.stack({over!r}, count=...)`"
                yield (
                    path,
                    (
                        f"`.stack({over!r})` ends before it, at a number without a"
                        f" leaf; give a count: {more}"
                    ),
                )
                break


def _endless(rule: From) -> Iterator[tuple[str, str]]:
    """Yields each placeholder that a `stack` operation without a count iterates over,
    and the first path that has it.

    For `From("layers/{i}/w").stack("i")`: ("i", "layers/{i}/w").
    """
    if rule.op == "stack" and len(rule.args) == 2:
        text = counted_leaf(rule)
        if text is not None:
            yield rule.args[0], text
    for part in rule.of:
        yield from _endless(part)


def _raise(problems: Sequence[Problem]) -> None:
    lines: dict[tuple[Any, str], list[str]] = {}
    for path, text in problems:
        # Equal problems of several layers are one line. Their texts differ in numbers
        # only.
        lines.setdefault(
            (between_numbers(path), "".join(between_numbers(text))), []
        ).append(path)
    first = {path: text for path, text in reversed(problems)}
    shown = [
        f"{printable(joined(paths) if len(paths) > 1 else paths[0])}:"
        f" {first[paths[0]]}."
        for paths in lines.values()
    ]
    more = f"\n  and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    raise MapError(
        f"the map does not fit, in {plural(len(problems), 'place')}; nothing was read"
        " or moved:\n  " + "\n  ".join(shown[:_SHOWN]) + more
    )


def _through(
    made: Mapping[str, Made], between: Mapping[str, Made]
) -> Mapping[str, Made]:
    """Composes two steps of a map: replaces intermediate leaves by the leaves of the
    source that they are made of.

    The first step makes the intermediate leaves `between`, and the second step makes
    `made` of them.
    """
    found = {}
    for path, one in made.items():
        pieces: list[Piece] = []
        for piece in one.pieces:
            if piece.value.path is None:
                pieces.append(piece)
                continue
            if piece.value.scale is not None:
                raise MapError(
                    f"`{path}` is scaled after another map; scale in the first map."
                )
            for inner in between[piece.value.path].pieces:
                pieces += map(simplified, composed(piece, inner))
        found[path] = Made(one.shape, one.dtype, tuple(pieces))
    return found


def _backward(forward: Mapping[str, Made], source: TreeLeaves) -> Mapping[str, Made]:
    """The inverse of the map that makes `forward` of `source`: the leaves of `source`,
    made of those of `forward`.

    Raises `MapError` if the map has no inverse.
    """
    back: dict[str, list[Piece]] = {path: [] for path in source}
    problems: list[Problem] = []
    for path, made in forward.items():
        # Pieces that follow each other often have the same factors.
        last: tuple[Factor, ...] | None = None
        factors: tuple[Factor, ...] = ()
        for piece in made.pieces:
            value = piece.value
            if value.path is None:
                continue
            if value.scale is not None:
                what = "the map scales it, and an inverse would have to find the scales"
                problems.append(
                    (
                        value.path,
                        (
                            f"{what}; write a map in the other direction, to weights"
                            " without scales"
                        ),
                    )
                )
                break
            casts = _back(value.casts, source[value.path].dtype) if value.casts else ()
            if piece.factors is not last:
                last = piece.factors
                factors = simplified(swapped(once(piece))).factors
            back_value = Value(path, value.number, None, casts)
            back_piece = Piece(back_value, piece.target, piece.source, factors)
            back[value.path].append(back_piece)
    found = {}
    counts: dict[object, bool] = {}
    for path, pieces in back.items():
        leaf = source[path]
        shape = tuple(leaf.shape)
        kind = (id(pieces[0].factors), shape) if len(pieces) == 1 else None
        if kind is not None and counts.get(kind):
            found[path] = Made(shape, leaf.dtype, tuple(pieces))
            continue
        kept, whole = disjoint(pieces, shape)
        if not whole:
            problems.append(
                (path, "the map keeps only a part of it, so it has no inverse")
            )
        if kind is not None:
            counts[kind] = whole
        found[path] = Made(shape, leaf.dtype, tuple(map(simplified, kept)))
    if problems:
        _raise(problems)
    return found


def _back(casts: Sequence[Operation], dtype: object) -> tuple[Operation, ...]:
    """The operations that undo `casts`; the last one results in `dtype`, the dtype
    before `casts`.

    For float32 elements, (bfloat16,) is undone by (float32,). An arithmetic operation
    is undone in the dtype that its result has.
    """
    kinds, found = [dtype], []
    for to in casts:
        kinds.append(kinds[-1] if isinstance(to, Arithmetic) else to)
    own = kinds[-1]
    for to, kind in zip(reversed(casts), reversed(kinds[:-1]), strict=True):
        if isinstance(to, Arithmetic):
            found += [to.back] if own == kind else [kind, to.back]
            own = kind
    return tuple(found) if own == dtype and (found or not casts) else (*found, dtype)


def disjoint(
    pieces: Sequence[Piece], shape: tuple[int, ...]
) -> tuple[list[Piece], bool]:
    """The pieces of one target of shape `shape` without their overlaps, and whether
    they cover the whole target.

    Pieces that overlap write equal elements there, so only the first one keeps them.
    """
    if len(pieces) == 1 and pieces[0].elements == math.prod(shape):
        return list(pieces), True
    parts = [(piece, list(dense(piece))) for piece in pieces]
    sides = _grid_dims([hull(part) for _, own in parts for part in own])
    # Only boxes with equal intervals along these dimensions can overlap.
    taken: dict[object, list[Box]] = {}
    kept: list[Piece] = []
    for piece, own in parts:
        fresh: list[Piece] = []
        for part in own:
            boxes = taken.setdefault(tuple(hull(part)[dim] for dim in sides), [])
            left = [part]
            for box in boxes:
                left = [rest for one in left for rest in _outside(one, box)]
            boxes += [hull(rest) for rest in left]
            fresh += left
        kept += (
            [piece] if sum(part.elements for part in fresh) == piece.elements else fresh
        )
    return kept, sum(piece.elements for piece in kept) == math.prod(shape)


def _grid_dims(boxes: Sequence[Box]) -> list[int]:
    """The dimensions along which any two of the boxes have equal or disjoint intervals.

    For the boxes ((0, 2), (0, 4)) and ((2, 4), (3, 6)): dimension 0.
    """
    found = []
    for dim, column in enumerate(zip(*boxes, strict=True)):
        ends = sorted(set(column))
        if all(one[1] <= two[0] for one, two in it.pairwise(ends)):
            found.append(dim)
    return found


def _outside(piece: Piece, box: Box) -> Iterator[Piece]:
    """Yields the parts of a piece outside of `box` of the target. The piece itself must
    fill a box without gaps.
    """
    mine = hull(piece)
    if any(
        stop <= low or high <= start
        for (start, stop), (low, high) in zip(mine, box, strict=True)
    ):
        yield piece
        return
    limits = list(mine)
    for dim, ((start, stop), (low, high)) in enumerate(zip(mine, box, strict=True)):
        for part in ((start, max(start, low)), (min(stop, high), stop)):
            if part[0] < part[1]:
                yield from within(piece, (*limits[:dim], part, *limits[dim + 1 :]))
        limits[dim] = (max(start, low), min(stop, high))


def structs_of(paths: Iterable[str], leaves: Iterable[Any]) -> dict[str, Struct]:
    """The shape and dtype of each leaf, by path."""
    return {
        path: Struct(tuple(leaf.shape), leaf.dtype)
        for path, leaf in zip(paths, leaves, strict=True)
    }


def tree_structs(tree: object) -> dict[str, Struct]:
    """The shape and dtype of each array of a tree, by path. A plan stands for the tree
    that it was made for.
    """
    flat = flatten(tree)
    rows = zip(flat.paths, flat.leaves, flat.is_array, strict=True)
    arrays = [(path, leaf) for path, leaf, is_array in rows if is_array]
    return structs_of([path for path, _ in arrays], [leaf for _, leaf in arrays])

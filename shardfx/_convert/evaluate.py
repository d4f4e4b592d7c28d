"""Evaluates expressions of a map: to pieces, from the shapes of leaves, or to arrays,
from arrays.

A target array is a `Made`: its shape, its dtype, and the pieces (strided copies) that
fill it.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from .._ground.errors import MapError
from .columns import AlikePieces, in_columns
from .expression import From, counted_leaf
from .patterns import Binding, near_hint, pattern, sum_of
from .pieces import Made, Piece, Struct
from .shape_operations import dim_of, leaf_made, on_shapes


def evaluated(
    expression: From,
    binding: Binding,
    leaves: Mapping[str, object],
    value_of_leaf: Callable[[str], Any],
    apply_operation: Callable[..., Any],
) -> Any:
    """Evaluates an expression with the values `binding` of its placeholders.

    `leaves` are the leaves of the source by path, and `value_of_leaf` returns the value
    of a leaf, given its path. `apply_operation` returns the value of an operation,
    given its name, the values of its operands and its other arguments. If the values
    are arrays, `apply_operation` is `on_arrays`; if they are target arrays with pieces,
    it is `on_shapes`.
    """
    if expression.op == "leaf":
        return value_of_leaf(resolved(expression.path, binding, leaves))
    if expression.op == "stack":
        placeholder, dim = expression.args[:2]
        numbers = count_of(expression, binding, leaves)
        if isinstance(value_of_leaf, LeavesMade):
            stack = _stack_of_alike(expression, binding, numbers, value_of_leaf)
            if stack is not None:
                return stack
        parts = []
        for number in numbers:
            numbered = {**binding, placeholder: number}
            part = evaluated(
                expression=expression.of[0],
                binding=numbered,
                leaves=leaves,
                value_of_leaf=value_of_leaf,
                apply_operation=apply_operation,
            )
            parts.append(part)
        return apply_operation("stacked", parts, dim)

    operands = [
        evaluated(
            expression=operand,
            binding=binding,
            leaves=leaves,
            value_of_leaf=value_of_leaf,
            apply_operation=apply_operation,
        )
        for operand in expression.of
    ]
    if expression.op == "at":
        index, dim = expression.args
        return apply_operation("at", operands, _index(index, binding), dim)
    return apply_operation(expression.op, operands, *expression.args)


@dataclasses.dataclass(frozen=True)
class LeavesMade:
    """The leaves of the source as target arrays, for `evaluated`.

    **Arguments:**

    - `leaves`: the leaves by path, each with its shape and dtype.
    - `used`: the paths of the leaves that were asked for.
    """

    leaves: Mapping[str, Struct | Made]
    used: dict[str, None]

    def __call__(self, path: str) -> Made:
        self.used[path] = None
        return leaf_made(path, self.leaves[path])


def _stack_of_alike(
    stack: From,
    binding: Binding,
    numbers: range,
    leaves_made: LeavesMade,
) -> Made | None:
    """The target array that a `stack` expression makes of parts that differ in nothing
    but the paths of their leaves; `None` if they may differ in more.

    Only the first part is evaluated. The others get its pieces, with their own paths
    and their own positions along the new dimension. `numbers` are the values of the
    stack's placeholder, one for each part. `leaves_made` has the leaves of the source,
    and the paths of those that are used, to which it adds those of the parts.
    """
    placeholder, dim = stack.args[:2]
    part = stack.of[0]
    if len(numbers) < 2 or _selects_by(part, placeholder):
        return None
    # The paths of the leaves of the first part, then those of the second, and so on;
    # `width` for each part.
    paths = paths_in_stack(stack, binding, numbers, leaves_made.leaves)
    # A stack of constants has no paths.
    if not paths or len(paths) % len(numbers):
        return None
    width = len(paths) // len(numbers)
    if not _are_alike(paths, width, leaves_made.leaves):
        return None

    first_binding = {**binding, placeholder: numbers[0]}
    first = evaluated(
        expression=part,
        binding=first_binding,
        leaves=leaves_made.leaves,
        value_of_leaf=leaves_made,
        apply_operation=on_shapes,
    )
    stack_of_first = on_shapes("stacked", [first], dim)
    dim = dim_of(dim, len(stack_of_first.shape), "stack")
    leaves_made.used.update(dict.fromkeys(paths))
    shape = (
        *stack_of_first.shape[:dim],
        len(numbers),
        *stack_of_first.shape[dim + 1 :],
    )
    return Made(
        shape=shape,
        dtype=stack_of_first.dtype,
        pieces=_stacked_pieces(stack_of_first.pieces, paths, width, dim),
    )


def _are_alike(
    paths: Sequence[str],
    width: int,
    leaves: Mapping[str, Struct | Made],
) -> bool:
    """Whether the leaves of each part of a stack have the shapes and dtypes of those of
    the first part. `paths` are the paths of all parts, `width` for each.
    """
    # Two leaves with one path in the first part must have one path in all parts, since
    # the pieces of the first part tell its leaves apart by their paths. The number of a
    # leaf counts in its part; `paths[number::width]` are its paths in all parts.
    number_by_path: dict[str, int] = {}
    for number, path in enumerate(paths[:width]):
        first_number = number_by_path.setdefault(path, number)
        is_repeated = first_number != number
        if is_repeated and paths[first_number::width] != paths[number::width]:
            return False
    structs = [leaves[path] for path in paths]
    for number, first in enumerate(structs[:width]):
        # Thousands of leaves share a few objects.
        different = {id(struct): struct for struct in structs[number::width]}
        for struct in different.values():
            if struct.shape != first.shape or struct.dtype != first.dtype:
                return False
    return True


def _selects_by(expression: From, placeholder: str) -> bool:
    """Whether an `at` operation of an expression selects by `placeholder`."""
    if expression.op == "at":
        index = expression.args[0]
        if isinstance(index, str) and placeholder in sum_of(index).names:
            return True
    return any(_selects_by(operand, placeholder) for operand in expression.of)


def leaf_paths(
    expression: From,
    binding: Binding,
    leaves: Mapping[str, object],
) -> list[str] | None:
    """The paths of the leaves of an expression, in the order in which `evaluated` asks
    for them; `None` if a path has no value or no leaf.
    """
    if expression.op == "leaf":
        path = pattern(expression.path).filled(binding)
        return None if path is None or path not in leaves else [path]
    if expression.op == "stack":
        try:
            numbers = count_of(expression, binding, leaves)
        except MapError:
            return None
        return paths_in_stack(expression, binding, numbers, leaves)
    paths: list[str] = []
    for operand in expression.of:
        operand_paths = leaf_paths(operand, binding, leaves)
        if operand_paths is None:
            return None
        paths += operand_paths
    return paths


def paths_in_stack(
    stack: From,
    binding: Binding,
    numbers: range,
    leaves: Mapping[str, object],
) -> list[str] | None:
    """The paths of the leaves of a `stack` expression for these numbers of its
    placeholder, part after part; `None` if a path has no value or no leaf.
    """
    placeholder = stack.args[0]
    part = stack.of[0]
    while len(part.of) == 1 and part.op != "stack":
        part = part.of[0]
    if part.op == "leaf":
        # ["layers/", "/w"] for the path `layers/{i}/w` and the placeholder `i`.
        texts = pattern(part.path).around(binding, placeholder)
        if texts is not None:
            paths = [str(number).join(texts) for number in numbers]
            return paths if all(map(leaves.__contains__, paths)) else None
    paths = []
    for number in numbers:
        numbered = {**binding, placeholder: number}
        paths_of_part = leaf_paths(part, numbered, leaves)
        if paths_of_part is None:
            return None
        paths += paths_of_part
    return paths


def _stacked_pieces(
    pieces: Sequence[Piece],
    paths: Sequence[str],
    width: int,
    dim: int,
) -> Sequence[Piece]:
    """The pieces of a stack along dimension `dim`, from those of its first part.

    `paths` are the paths of the leaves of all parts, `width` for each.
    """
    part_count = len(paths) // width
    # The number of a leaf in its part, by its path in the first part.
    number_by_path = {path: number for number, path in enumerate(paths[:width])}
    grouped = in_columns(pieces)
    if len(grouped.alike) == 1 and not grouped.others:
        (first_part,) = grouped.alike
        sources = np.tile(first_part.sources, (part_count, 1))
        targets = np.tile(first_part.targets, (part_count, 1))
        numbers_of_parts = np.arange(part_count)
        targets[:, dim] = np.repeat(numbers_of_parts, len(first_part))
        # The leaf that each piece of a part reads.
        leaf_numbers = [number_by_path[path] for path in first_part.paths]
        if leaf_numbers != list(range(width)):
            ordered_paths: list[str] = []
            for start in range(0, len(paths), width):
                ordered_paths += [paths[start + number] for number in leaf_numbers]
            paths = ordered_paths
        return AlikePieces(
            first=first_part.first,
            paths=paths,
            sources=sources,
            targets=targets,
        )
    stacked: list[Piece] = []
    for position in range(part_count):
        start = position * width
        paths_of_part = {path: paths[start + n] for path, n in number_by_path.items()}
        stacked += _like_first(pieces, paths_of_part, dim, position)
    return tuple(stacked)


def _like_first(
    pieces: Sequence[Piece],
    paths: Mapping[str, str],
    dim: int,
    position: int,
) -> Iterator[Piece]:
    """Yields the pieces of a part of a stack from those of its first part.

    `paths` has the path of each leaf by that of the first part. The part is at
    `position` along dimension `dim`.
    """
    for piece in pieces:
        value = piece.value
        if value.path is not None:
            value = value._replace(path=paths[value.path])
        if value.scale is not None:
            scale_path = paths[value.scale.path]
            scale = value.scale._replace(path=scale_path)
            value = value._replace(scale=scale)
        target = (*piece.target[:dim], position, *piece.target[dim + 1 :])
        yield Piece(
            value=value, source=piece.source, target=target, factors=piece.factors
        )


def resolved(text: str, binding: Binding, leaves: Mapping[str, object]) -> str:
    """The path of a leaf, from a path with placeholders: `layers/3/w` for
    `layers/{i}/w` and i = 3.

    Raises `MapError` if the path is not in `leaves`.
    """
    path = pattern(text).filled(binding)
    if path is None:
        missing = []
        for name in pattern(text).names:
            if name not in binding:
                missing.append(name)
        if missing:
            hint = f"`{{{missing[0]}}}` has no value"
        else:
            hint = "a sum in it has a name that is no number"
        raise MapError(
            f"`{text}` names no leaf: {hint}; write it into the target's path too, or"
            " use `.stack(...)`."
        )
    if path not in leaves:
        raise MapError(f"the source has no `{path}`{near_hint(path, leaves)}")
    return path


def count_of(stack: From, binding: Binding, leaves: Mapping[str, object]) -> range:
    """The numbers 0, 1, 2, ... that a `stack` expression iterates over, as many as its
    `count`.

    Without a count, they end before the first number for which the source has no leaf.
    `binding` has the values of the other placeholders, and `leaves` the leaves of the
    source by path.
    """
    placeholder = stack.args[0]
    if len(stack.args) > 2:
        return range(stack.args[2])
    operand = stack.of[0]
    counted = counted_leaf(stack)
    if counted is None:
        raise MapError(
            f"`.stack({placeholder!r})` iterates over nothing: no path in {operand} has"
            f" `{{{placeholder}}}`; write it into one, or give a count:"
            f" `.stack({placeholder!r}, count=...)`."
        )

    # The first part of inner stacks stands for all of theirs.
    inner_numbers = dict.fromkeys(_inner_stacks(operand), 0)
    others = {**inner_numbers, **binding}
    path_pattern = pattern(counted)
    # ["layers/", "/w"] for `layers/{i}/w`; `None` where a sum needs a number first.
    texts = path_pattern.around(others, placeholder)
    count = 0
    while True:
        if texts is None:
            path = path_pattern.filled({**others, placeholder: count})
        else:
            path = str(count).join(texts)
        if path is None or path not in leaves:
            break
        count += 1
    if not count:
        missing = path or counted
        raise MapError(
            f"`.stack({placeholder!r})` finds nothing: the source has no"
            f" `{missing}`{near_hint(missing, leaves)}"
        )
    return range(count)


def _inner_stacks(expression: From) -> list[str]:
    """The names of the placeholders that `stack` operations inside an expression
    iterate over.
    """
    names = [expression.args[0]] if expression.op == "stack" else []
    for operand in expression.of:
        names += _inner_stacks(operand)
    return names


def _index(index: int | str, binding: Binding) -> int:
    """The index of an `at` operation as a number: itself, or the value of its sum of
    placeholders. Raises `MapError` for a value that is a text.
    """
    value = index if isinstance(index, int) else sum_of(index).value(binding)
    if not isinstance(value, int):
        raise MapError(
            f"`.at({index!r})` needs a number, and the value of `{index}` is {value!r};"
            " number the target's path."
        )
    return value

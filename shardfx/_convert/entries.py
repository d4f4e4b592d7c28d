"""Target arrays that one rule makes of the entries of a stack, such as its experts.
They differ in nothing but the position in the stack.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .columns import all_simplified
from .evaluate import LeavesMade, evaluated
from .expression import From
from .patterns import Binding, pattern, sum_of
from .pieces import Made, Piece, Struct
from .shape_operations import on_shapes


class Selection(NamedTuple):
    """One `at` operation that selects an entry of a leaf by placeholders.

    - `number`: the number of the entry, a sum of placeholders.
    - `dim`, `size`: the dimension of the leaf, and its size.
    """

    number: str
    dim: int
    size: int


class _Template(NamedTuple):
    """The target array that a rule makes for one binding of its placeholders.

    - `made`: the target array.
    - `numbers`: the number of each selection, by the path of the leaf.
    """

    made: Made
    numbers: Mapping[str, tuple[int, ...]]


class EntryRule:
    """A rule whose target arrays differ only in the entries that they take of leaves.

    Only the first is evaluated. The others have its pieces, moved along the dimensions
    of the leaves: an evaluation takes ten times as long, and a map makes thousands.

    **Arguments:**

    - `rule`: the expression.
    - `leaves_made`: the leaves of the source.
    """

    def __init__(self, rule: From, leaves_made: LeavesMade):
        self._rule = rule
        self._leaves_made = leaves_made
        self._selections = selections_of(rule, leaves_made.leaves)
        self._template: _Template | None = None

    def made(self, binding: Binding) -> Made:
        """The target array for the values `binding` of the rule's placeholders, with
        simplified pieces. Raises `MapError` if the rule does not fit the leaves.

        The first array that the rule makes is kept as a template, if the others differ
        from it only in the entries that they select of leaves.
        """
        # For each leaf, the numbers of its selected entries.
        numbers = self._selected_numbers(binding)
        if numbers is not None and self._template is not None:
            assert self._selections is not None
            return _with_numbers(self._template, numbers, self._selections)

        evaluated_leaf = evaluated(
            expression=self._rule,
            binding=binding,
            leaves=self._leaves_made.leaves,
            value_of_leaf=self._leaves_made,
            apply_operation=on_shapes,
        )
        pieces = all_simplified(evaluated_leaf.pieces)
        evaluated_leaf = Made(
            shape=evaluated_leaf.shape,
            dtype=evaluated_leaf.dtype,
            pieces=pieces,
        )
        if numbers is not None:
            self._template = _Template(made=evaluated_leaf, numbers=numbers)
        return evaluated_leaf

    def _selected_numbers(
        self,
        binding: Binding,
    ) -> Mapping[str, tuple[int, ...]] | None:
        """The number of the entry that each selection (`at` operation) takes with these
        values of the placeholders, by the leaf's path.

        `None` if the rule has to be evaluated anew: its target arrays differ in more
        than the selected entries, or a number is out of its dimension's range.
        """
        if self._selections is None:
            return None
        numbers_by_path = {}
        for path, selections in self._selections.items():
            numbers = []
            for selection in selections:
                number = sum_of(selection.number).value(binding)
                if type(number) is not int or not 0 <= number < selection.size:
                    return None
                numbers.append(number)
            numbers_by_path[path] = tuple(numbers)
        return numbers_by_path


def selections_of(
    rule: From,
    leaves: Mapping[str, Struct | Made],
) -> dict[str, tuple[Selection, ...]] | None:
    """The selections by placeholders of each leaf of a rule; `None` if target arrays of
    the rule may differ in more than these.

    They do if the path of a leaf has a placeholder, if the rule selects from something
    else than a leaf, and if it takes different entries of one leaf. `leaves` has the
    leaves of the source by path.
    """
    selections: dict[str, tuple[Selection, ...]] = {}
    waiting = [rule]
    while waiting:
        expression = waiting.pop()
        if expression.op in ("stack", "scale"):
            return None
        if expression.op not in ("at", "leaf"):
            waiting += expression.of
            continue
        # The `at` operations, and behind them the expression that they select from.
        operations = _at_operations(expression)
        if operations[-1].op != "leaf":
            if any(isinstance(operation.args[0], str) for operation in operations[:-1]):
                return None
            waiting.append(operations[-1])
            continue
        path = operations[-1].path
        if pattern(path).names or path not in leaves:
            return None
        chosen = _selections_in_leaf(operations[:-1], tuple(leaves[path].shape))
        if chosen is None or selections.get(path, chosen) != chosen:
            return None
        selections[path] = chosen
    return selections


def _at_operations(expression: From) -> list[From]:
    """The `at` operations with which an expression ends, the last one first, and the
    expression to which they are applied.
    """
    operations = [expression]
    while operations[-1].op == "at":
        operations += operations[-1].of
    return operations


def _selections_in_leaf(
    operations: Sequence[From],
    shape: tuple[int, ...],
) -> tuple[Selection, ...] | None:
    """The selections by placeholders that `at` operations make of a leaf of shape
    `shape`; `None` if a dimension does not exist. The last operation comes first.
    """
    # The dimensions of the leaf that the operations so far have left.
    dims = [*range(len(shape))]
    selections = []
    for operation in reversed(operations):
        index, dim = operation.args
        if not -len(dims) <= dim < len(dims):
            return None
        leaf_dim = dims.pop(dim)
        if isinstance(index, str):
            selection = Selection(
                number=index,
                dim=leaf_dim,
                size=shape[leaf_dim],
            )
            selections.append(selection)
    return tuple(selections)


def _with_numbers(
    template: _Template,
    numbers: Mapping[str, tuple[int, ...]],
    selections: Mapping[str, tuple[Selection, ...]],
) -> Made:
    """The target array of `template` for other numbers of the selections: its pieces,
    each moved in its source array along the dimensions of the selections.

    `numbers` has for each leaf's path the number of the entry that each selection
    takes, and `selections` the selections themselves.
    """
    pieces = []
    for value, source, target, factors in template.made.pieces:
        if value.path is not None:
            position = [*source]
            path = value.path
            triples = zip(
                selections[path], numbers[path], template.numbers[path], strict=True
            )
            for selection, number, first_number in triples:
                position[selection.dim] += number - first_number
            source = tuple(position)
        pieces.append(Piece(value, source, target, factors))
    return Made(
        shape=template.made.shape,
        dtype=template.made.dtype,
        pieces=tuple(pieces),
    )

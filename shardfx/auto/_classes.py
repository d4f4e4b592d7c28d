"""The classes of dimensions in a step's arguments: dimensions that operations tie to each other are sharded alike."""

import dataclasses
import math
from collections.abc import Iterator, Sequence

from .._ground.text import between_numbers
from .._rules import Atomic
from .._step import Operation
from ._asked import TracedStep
from ._program import Tied


_COPIES = 4


@dataclasses.dataclass(frozen=True, slots=True)
class ClassPlace:
    """One dimension of an argument that belongs to a class, or one sub-dimension of a fused dimension."""

    argument: int
    dim: int
    # The index of a part within its dimension, the slowest first, and the number of parts.
    at: int
    of: int


@dataclasses.dataclass(slots=True, eq=False)
class ClassGroup:
    """Classes of dimensions that get one name: a single class, or the classes at one position of repeated layers."""

    roots: list[int]
    size: int
    places: list[ClassPlace]
    name: str = ""


class Classes:
    """The groups of classes of a step, and the groups of each dimension of its arguments. `_name_axes.py` names the
    groups.
    """

    def __init__(self, traced: TracedStep):
        self.traced, self.tied, self.program = traced, traced.tied, traced.tied.program
        self.marked = self.tied.marked
        # The words of a random key are no dimensions of its array.
        arrays = zip(self.program.arguments, traced.arrays, strict=True)
        self.dims = [self.tied.leaves[value][: array.rank] for value, array in arrays]
        self.groups: list[ClassGroup] = []
        self.of_root: dict[int, int] = {}
        placed = list(self._placed())
        for place, leaf in placed:
            if leaf not in self.of_root:
                self.of_root[leaf] = len(self.groups)
                self.groups.append(ClassGroup([leaf], self.tied.sizes[leaf], []))
            self.of(leaf).places.append(place)
        # Classes at the same position of layers that differ only in their number have one name.
        keys: dict[object, int] = {}
        alike = [between_numbers(array.path) for array in traced.arrays]
        for place, leaf in placed:
            key = (alike[place.argument], place.dim, place.at, place.of, self.tied.sizes[leaf])
            self.tie(self.of_root[keys.setdefault(key, leaf)], self.of_root[leaf])
        self.main, self.model = _model_arguments(traced)

    def of(self, leaf: int) -> ClassGroup:
        """The group that a class belongs to."""
        return self.groups[self.of_root[leaf]]

    def flat(self, argument: int) -> list[ClassGroup]:
        """The group of each sub-dimension of an argument, in order."""
        return [self.of(leaf) for leaves in self.dims[argument] for leaf in leaves]

    def kept(self, leaves: Sequence[int]) -> int:
        """How many of a dimension's sub-dimensions, from the major-most, may be sharded. The rest is an indivisible
        unit.

        The fastest part of a fused dimension is the width of one head, unless products run over it in batches: then it
        counts heads itself.
        """
        count = len(leaves)
        # If slices separate queries, keys and values, one of them is a unit.
        taken = next((at + 1 for at, leaf in enumerate(leaves[:-1]) if leaf in self.marked["sliced"]), count)
        return min(taken, count - (count > 1 and leaves[-1] not in self.marked["batched"]))

    def names_of(self, argument: int) -> tuple[object, ...]:
        """The names of an argument's dimensions. A name that occurs twice is left out the second time."""
        used, found = set[str](), list[object]()
        for leaves in self.dims[argument]:
            count = self.kept(leaves)
            names = [name for name in dict.fromkeys(self.of(leaf).name for leaf in leaves[:count]) if name not in used]
            used.update(names)
            unit = math.prod(self.tied.sizes[leaf] for leaf in leaves[count:])
            entries = [*names[:-1], *(Atomic(name, unit) if unit > 1 else name for name in names[-1:])]
            found.append(tuple(entries) if len(entries) > 1 else next(iter(entries), None))
        return tuple(found)

    def _placed(self) -> Iterator[tuple[ClassPlace, int]]:
        """Yields each sub-dimension of all arguments as a position and a class."""
        for argument, dims in enumerate(self.dims):
            for dim, leaves in enumerate(dims):
                for at, leaf in enumerate(leaves):
                    yield ClassPlace(argument, dim, at, len(leaves)), leaf

    def tie(self, first: int, second: int) -> bool:
        """Merges two groups if they have one size and no array in common; returns whether they are one group
        afterwards.
        """
        if first == second:
            return True
        a, b = self.groups[first], self.groups[second]
        if a.size != b.size or {p.argument for p in a.places} & {p.argument for p in b.places}:
            return False
        a.roots += b.roots
        a.places += b.places
        for root in b.roots:
            self.of_root[root] = first
        b.roots, b.places = [], []
        return True

    def tie_names(self) -> None:
        """Merges groups that were given one name, or numbers them if some array has several of them."""
        known: dict[str, list[int]] = {}
        for number, group in enumerate(self.groups):
            if group.roots:
                known.setdefault(group.name, []).append(number)
        for name, numbers in known.items():
            kept: list[int] = []
            for number in numbers:
                if not any(self.tie(other, number) for other in kept):
                    kept.append(number)
                    self.groups[number].name = name if len(kept) == 1 else f"{name}_{len(kept)}"

    @property
    def own(self) -> set[int]:
        """The classes that dimensions of the model's arrays belong to."""
        return {root for group in self.groups if self.in_model(group) for root in group.roots}

    def in_model(self, group: ClassGroup) -> list[ClassPlace]:
        """The dimensions of a group that are in arguments of the model."""
        return [place for place in group.places if place.argument in self.model]

    def live(self) -> list[ClassGroup]:
        """The groups that were not merged into another one."""
        return [group for group in self.groups if group.roots]


def _model_arguments(traced: TracedStep) -> tuple[int, set[int]]:
    """The number of the argument that is the model, and the parameters of the program that belong to it or its
    optimizer.

    The first argument with many arrays is the model. Another argument belongs to it if, for most of its arrays, all
    dimensions are the model's: moments have the dimensions of the parameters, and a frozen base those of its adapters;
    a batch has a dimension of its own.
    """
    counts = [sum(flat.is_array) for flat in traced.flats]
    # An optimizer may hold several arrays for each array of the model.
    model = next((which for which, count in enumerate(counts) if _COPIES * count >= max(counts)), 0)
    owned: set[int] = set()
    of: dict[int, list[set[int]]] = {}
    for value, array in zip(traced.tied.program.arguments, traced.arrays, strict=True):
        dims = traced.tied.leaves_of(value)
        of.setdefault(array.which, []).append(dims)
        if array.which == model:
            owned |= dims
    members = {which for which, each in of.items() if 2 * sum(dims <= owned for dims in each) > len(each)}
    return model, {argument for argument, array in enumerate(traced.arrays) if array.which in members}


# The distance, in operations, at which the other operand of a sum is searched.
_FAR = 400


def residual(tied: Tied, own: set[int]) -> set[int]:
    """The classes of activations to which products of the same activation are added, as in a residual stream.

    `own` are the classes of the model's arrays: a sum of only these is an update.
    """
    operations = tied.program.operations
    maker = {out: made for made in operations for out in made.outs}
    spread = {out for made in operations if made.name == "broadcast_in_dim" for out in made.outs}
    found: set[int] = set()
    for made in operations:
        if made.name != "add" or not spread.isdisjoint(made.ins):
            continue
        leaves = tied.leaves_of(made.outs[0])
        if leaves <= found or leaves <= own:
            continue
        first, second = made.ins
        if _is_made_of(second, first, maker) or _is_made_of(first, second, maker):
            found |= leaves
    return found


def _is_made_of(value: int, source: int, maker: dict[int, Operation]) -> bool:
    """Whether a value is computed from another through a product, within a limited number of operations."""
    left, seen = [(value, False)], {(value, False)}
    while left and len(seen) < _FAR:
        one, by_product = left.pop(0)
        made = maker.get(one)
        if made is None:
            continue
        by_product |= made.flops > 0
        if by_product and source in made.ins:
            return True
        new = [(before, by_product) for before in made.ins if (before, by_product) not in seen]
        left += new
        seen.update(new)
    return False

"""The classes of dimensions that a step's arguments have, each with a name."""

import dataclasses
import math
import re
from collections.abc import Iterable, Sequence

from .._ground.text import between_numbers
from .._rules.strategies import Atomic
from .trace import Traced


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """A part of a dimension of an argument."""

    argument: int
    dim: int
    # Which part of the dimension, slowest first, and of how many.
    at: int
    of: int


@dataclasses.dataclass(slots=True)
class Group:
    """Classes that get one name: one, or those that stand at the same place in repeated layers."""

    roots: list[int]
    size: int
    places: list[Place]
    name: str = ""


class Classes:
    """Groups of classes by name, and which of them each dimension of each argument consists of."""

    def __init__(self, traced: Traced):
        self.traced = traced
        self.program = traced.program
        parts = self.program.parts
        self.dims = [
            [parts.leaves(part) for part in self.program.values[value].parts] for value in self.program.arguments
        ]
        self.groups: list[Group] = []
        self.of_root: dict[int, int] = {}
        self._gather()
        self._tie_layers()
        self.marked = {
            kind: {leaf for part in found for leaf in parts.leaves(part)} for kind, found in self.program.marks.items()
        }
        self.main, self.model = _model_arguments(traced)
        _Namer(self).name_all()
        self._tie_names()

    def kept(self, leaves: Sequence[int]) -> int:
        """How many of a dimension's parts, from the slowest, may be cut; the rest is a unit.

        The fastest part of a fused dimension is one head's, unless products run over it in batches: then it counts
        heads itself.
        """
        count = len(leaves)
        return count - (count > 1 and leaves[-1] not in self.marked["batched"])

    def entry(self, leaves: Sequence[int], used: set[str]) -> tuple[object, set[str]]:
        """What a dimension of these parts is called, as an entry of an array's names."""
        count = self.kept(leaves)
        unit = math.prod(self.program.parts.sizes[leaf] for leaf in leaves[count:])
        names = list(dict.fromkeys(self.groups[self.of_root[leaf]].name for leaf in leaves[:count]))
        names = [name for name in names if name not in used]
        if not names:
            return None, used
        entries: list[object] = [*names]
        if unit > 1:
            entries[-1] = Atomic(names[-1], unit)
        return (entries[0] if len(entries) == 1 else tuple(entries)), used | set(names)

    def names_of(self, argument: int) -> tuple[object, ...]:
        """The names of an argument's dimensions; one that a name repeats in is whole."""
        used: set[str] = set()
        found = []
        for leaves in self.dims[argument]:
            entry, used = self.entry(leaves, used)
            found.append(entry)
        return tuple(found)

    def _gather(self) -> None:
        for argument, dims in enumerate(self.dims):
            for dim, leaves in enumerate(dims):
                for at, leaf in enumerate(leaves):
                    if leaf not in self.of_root:
                        self.of_root[leaf] = len(self.groups)
                        self.groups.append(Group([leaf], self.program.parts.sizes[leaf], []))
                    self.groups[self.of_root[leaf]].places.append(Place(argument, dim, at, len(leaves)))

    def _tie_layers(self) -> None:
        """Gives one name to what stands at the same place of layers that differ in their number alone."""
        keys: dict[object, int] = {}
        for argument, dims in enumerate(self.dims):
            alike = between_numbers(self.traced.path(argument))
            for dim, leaves in enumerate(dims):
                for at, leaf in enumerate(leaves):
                    key = (alike, dim, at, len(leaves), self.program.parts.sizes[leaf])
                    other = keys.setdefault(key, leaf)
                    self.tie(self.of_root[other], self.of_root[leaf])

    def tie(self, first: int, second: int) -> bool:
        """Makes two groups one, unless an array has both."""
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

    def _tie_names(self) -> None:
        """Groups that were given one name become one, or get numbers."""
        known: dict[str, list[int]] = {}
        for number, group in enumerate(self.groups):
            if group.roots:
                known.setdefault(group.name, []).append(number)
        for name, numbers in known.items():
            kept: list[int] = []
            for number in numbers:
                if not any(self.tie(other, number) for other in kept):
                    kept.append(number)
            for count, number in enumerate(kept):
                self.groups[number].name = name if count == 0 else f"{name}_{count + 1}"

    def live(self) -> list[Group]:
        """The groups, without those that went into others."""
        return [group for group in self.groups if group.roots]


def _model_arguments(traced: Traced) -> tuple[int, set[int]]:
    """Which argument is the model, and the program's arguments that belong to it or its optimizer, and are no data.

    The first argument with many arrays is the model. Another belongs to it if all dimensions do of most of its arrays:
    moments have the parameters' dimensions, and a frozen base those of its adapters; a batch has one of its own.
    """
    counts = [0] * len(traced.flats)
    for which, _ in traced.places:
        counts[which] += 1
    # An optimizer may hold several arrays for each of the model's.
    model = next((which for which, count in enumerate(counts) if _COPIES * count >= max(counts)), 0)
    leaves = traced.program.parts.leaves
    owned: set[int] = set()
    of: dict[int, list[set[int]]] = {}
    for argument, (which, _) in enumerate(traced.places):
        value = traced.program.values[traced.program.arguments[argument]]
        dims = {leaf for part in value.parts for leaf in leaves(part)}
        of.setdefault(which, []).append(dims)
        if which == model:
            owned |= dims
    members = {which for which, each in of.items() if 2 * sum(dims <= owned for dims in each) > len(each)}
    return model, {argument for argument, (which, _) in enumerate(traced.places) if which in members}


_VOCAB = re.compile(r"vocab|emb|wte|lm_head|logits|unembed|tok|shared", re.IGNORECASE)
_POSITIONS = re.compile(r"pos|wpe", re.IGNORECASE)
_CELLS = re.compile(r"lstm|gru|rnn|(?<![a-z])cell|weight_hh", re.IGNORECASE)
_GATES = (3, 4)
_MLP = re.compile(r"mlp|ffn|ff|feed|gate|up_|down|\bw[io]\b|hidden|swiglu", re.IGNORECASE)
_EXPERTS = re.compile(r"moe|expert|router", re.IGNORECASE)
_ROUTERS = re.compile(r"gate|rout|switch", re.IGNORECASE)
_DULL = frozenset("weight kernel w params bias scale value".split())
_SMALL_VOCAB = 1000
_COPIES = 4
_DATA = {2: ("sequence",), 3: ("sequence", "features"), 4: ("height", "width", "channels")}


class _Namer:
    """Names each group by what the step does with it, then by the paths of its arrays."""

    def __init__(self, classes: Classes):
        self.classes = classes
        self.traced = classes.traced
        self.left = {number for number, group in enumerate(classes.groups) if group.roots}

    def name_all(self) -> None:
        self.declared()
        self.key_words()
        self.layers()
        self.data()
        self.heads()
        self.looked_up()
        self.gates()
        self.width()
        self.routers()
        self.by_path()

    def groups(self) -> list[tuple[int, Group]]:
        return [(number, self.classes.groups[number]) for number in sorted(self.left)]

    def give(self, number: int, name: str) -> None:
        self.classes.groups[number].name = name
        self.left.discard(number)

    def is_marked(self, group: Group, kind: str) -> bool:
        return any(root in self.classes.marked[kind] for root in group.roots)

    def in_model(self, group: Group) -> list[Place]:
        return [place for place in group.places if place.argument in self.classes.model]

    def paths(self, places: Iterable[Place]) -> list[str]:
        return list(dict.fromkeys(self.traced.path(place.argument) for place in places))

    def rank(self, place: Place) -> int:
        return len(self.classes.dims[place.argument])

    def declared(self) -> None:
        """Names that the model's fields declare come first."""
        for number, group in self.groups():
            for place in group.places:
                which, leaf = self.traced.places[place.argument]
                names = self.traced.flats[which].names[leaf]
                if names is None or ... in names or len(names) != self.rank(place) or place.at != 0:
                    continue
                name = names[place.dim]
                name = name.target if isinstance(name, Atomic) else name
                if isinstance(name, str) and place.of == 1:
                    self.give(number, name)
                    break

    def key_words(self) -> None:
        """The numbers of a raw key are no batch, and no axis cuts them."""
        for number, group in self.groups():
            if self.is_marked(group, "words"):
                self.give(number, "key_words")

    def layers(self) -> None:
        for number, group in self.groups():
            if self.is_marked(group, "scanned") and self.in_model(group):
                self.give(number, "layers")

    def data(self) -> None:
        """The first dimension of the data is the batch, the second of tokens or of rows of features a sequence."""
        for number, group in self.groups():
            places = [place for place in group.places if place.argument not in self.classes.model]
            positions = all(map(_POSITIONS.search, self.paths(self.in_model(group))))
            if not places or not positions:
                continue
            rank, dim = max((self.rank(place), -place.dim) for place in places)
            if all(place.dim == 0 and place.at == 0 for place in group.places):
                self.give(number, "batch")
            elif rank in _DATA and dim:
                self.give(number, _DATA[rank][-dim - 1])

    def looked_up(self) -> None:
        vocabs: set[int] = set()
        others: list[tuple[int, Group]] = []
        for number, group in self.groups():
            paths = self.paths(self.in_model(group))
            if not self.is_marked(group, "looked_up") or not paths:
                continue
            if any(map(_POSITIONS.search, paths)):
                self.give(number, "positions")
            elif group.size >= _SMALL_VOCAB or any(map(_VOCAB.search, paths)):
                vocabs.add(group.size)
                self.give(number, "vocab")
            else:
                others.append((number, group))
        for number, group in others:
            # Logits of as many classes as there are tokens are of tokens.
            self.give(number, "vocab" if group.size in vocabs else "classes")

    def heads(self) -> None:
        """Parts that products run over in batches: heads where a unit follows them, or the batch of the data is a batch
        of the same product; experts, whose weights no batch has, where neither is so.
        """
        found = [(n, g) for n, g in self.groups() if self.is_marked(g, "batched") and self.in_model(g)]
        groups = self.classes.of_root
        kept = [leaves[: self.classes.kept(leaves)] for dims in self.classes.dims for leaves in dims]
        kept = [leaves for leaves in kept if len(leaves) > 1 and groups[leaves[0]] in {number for number, _ in found}]
        behind = {groups[leaf] for leaves in kept for leaf in leaves[1:]}
        shared = {groups[leaves[0]] for leaves in kept}
        found = [(n, g) for n, g in self.groups() if n in behind or (n, g) in found]
        named, together = set[int](), self.with_data()
        for number, group in found:
            paths = self.paths(self.in_model(group))
            attends = any("att" in path.lower() for path in paths) or any(place.of > 1 for place in group.places)
            attends |= number in together
            if number in behind:
                self.give(number, "query_groups")
            elif number in shared:
                self.give(number, "kv_heads")
            elif any(map(_EXPERTS.search, paths)) or not attends:
                self.give(number, "experts")
                continue
            else:
                self.give(number, "heads")
            named.add(number)
        self.within_heads(named)

    def with_data(self) -> set[int]:
        """The groups that products run over in batches together with the batch of the data."""
        program, found = self.traced.program, set[int]()
        for made in program.operations:
            if len(made.labels.batched) < 2:
                continue
            parts = zip(program.values[made.ins[0]].parts, made.labels.ins[0], strict=True)
            leaves = [
                leaf for part, label in parts if label in made.labels.batched for leaf in program.parts.leaves(part)
            ]
            numbers = {self.classes.of_root[leaf] for leaf in leaves if leaf in self.classes.of_root}
            if any(self.classes.groups[number].name == "batch" for number in numbers):
                found |= numbers
        return found

    def within_heads(self, heads: set[int]) -> None:
        """What follows heads, in their dimension or in the next one, is a head's own."""
        groups = self.classes.of_root
        for dims in self.classes.dims:
            flat = [groups[leaf] for leaves in dims for leaf in leaves]
            for before, after in zip(flat, flat[1:], strict=False):
                if before in heads and after in self.left and self.is_marked(self.classes.groups[after], "contracted"):
                    self.give(after, "head_dim")

    def gates(self) -> None:
        """A recurrent cell makes three or four gates at once, each as wide as its state."""
        groups, of_root = self.classes.groups, self.classes.of_root
        program, sizes = self.traced.program, set[int]()
        split = [value for made in program.operations if made.primitive == "split" for value in made.ins]
        parts = {leaf for value in split for part in program.values[value].parts for leaf in program.parts.leaves(part)}
        for argument in sorted(self.classes.model) if parts else ():
            flat = [of_root[leaf] for leaves in self.classes.dims[argument] for leaf in leaves]
            if len(flat) != 2 or not _CELLS.search(self.traced.path(argument)):
                continue
            for wide, state in (flat, flat[::-1]):
                many = groups[wide].size in [count * groups[state].size for count in _GATES]
                if many and not parts.isdisjoint(groups[wide].roots):
                    sizes.add(groups[wide].size)
                    if state in self.left:
                        self.give(state, "hidden")
        for number, group in self.groups():
            if group.size in sizes and all(map(_CELLS.search, self.paths(self.in_model(group)))):
                self.give(number, "gates")

    def width(self) -> None:
        """What residual sums have, and most arrays of the model, is its width; beside a vocabulary it always is."""
        residual = self.residual()
        counts = {
            number: len({place.argument for place in self.in_model(group)})
            for number, group in self.groups()
            if not residual.isdisjoint(group.roots) and self.is_marked(group, "contracted")
        }
        beside = self.beside_vocabulary()
        if len(beside) == 1:
            self.give(beside.pop(), "embed")
            return
        most = max(counts.values(), default=0)
        winners = [number for number, count in counts.items() if count == most]
        if most >= 2 and len(winners) == 1:
            self.give(winners[0], "embed")

    def beside_vocabulary(self) -> set[int]:
        """The unnamed dimensions of tables in which tokens are looked up."""
        groups, found = self.classes.of_root, set()
        for dims in self.classes.dims:
            flat = [groups[leaf] for leaves in dims for leaf in leaves]
            if len(flat) == 2 and any(self.classes.groups[number].name == "vocab" for number in flat):
                found |= self.left.intersection(flat)
        return found

    def routers(self) -> None:
        """What scores as many things as there are experts scores them, though choosing the best ties nothing."""
        sizes = {group.size for group in self.classes.live() if group.name == "experts"}
        for number, group in self.groups():
            places = self.in_model(group)
            if group.size in sizes and places and all(self.rank(place) <= 2 and place.of == 1 for place in places):
                if any(map(_ROUTERS.search, self.paths(places))):
                    self.give(number, "experts")

    def residual(self) -> set[int]:
        """The classes in sums of two activations of which neither was spread from something smaller."""
        program = self.traced.program
        spread = {out for made in program.operations if made.primitive == "broadcast_in_dim" for out in made.outs}
        own = {root for group in self.classes.groups if self.in_model(group) for root in group.roots}
        found: set[int] = set()
        for made in program.operations:
            shapes = {program.values[value].shape for value in made.ins}
            if made.primitive != "add" or len(shapes) > 1 or not spread.isdisjoint(made.ins):
                continue
            value = program.values[made.outs[0]]
            leaves = [leaf for part in value.parts for leaf in program.parts.leaves(part)]
            if any(leaf not in own for leaf in leaves):
                found.update(leaves)
        return found

    def by_path(self) -> None:
        for number, group in self.groups():
            places = self.in_model(group) or group.places
            places = [place for place in places if self.rank(place) > 1] or places
            paths = self.paths(places)
            if all(map(_POSITIONS.search, paths)):
                name = "positions"
            elif any(map(_MLP.search, paths)) or self.between_widths(group):
                name = "mlp"
            elif any(map(_VOCAB.search, paths)):
                name = "vocab"
            else:
                name = _short(paths[0], self.traced.words) + f"_{places[0].dim}"
            self.give(number, name)

    def between_widths(self, group: Group) -> bool:
        """Whether matrices lead from the model's width into this dimension, and others out of it."""
        dims: set[int] = set()
        for place in self.in_model(group):
            if self.rank(place) < 2 or place.of > 1:
                continue
            others = self.classes.dims[place.argument]
            if not any(self.classes.groups[self.classes.of_root[leaf]].name == "embed" for d in others for leaf in d):
                return False
            dims.add(place.dim)
        return len(dims) > 1 and self.is_marked(group, "contracted")


def _short(path: str, words: tuple[str, ...]) -> str:
    """The part of a path that says most, as an identifier."""
    parts = [part for part in path.split("/") if part not in _DULL and part not in words] or path.split("/")
    name = re.sub(r"\W+", "_", "_".join(parts[-2:] if parts[-1].isdecimal() else parts[-1:])).strip("_")
    return name if name and not name[0].isdigit() else f"a{name}"

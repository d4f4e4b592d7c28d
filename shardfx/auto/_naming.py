"""Names for the classes of a step's dimensions: by what the step does with them, then by the paths of its arrays."""

import re
from collections.abc import Iterable

import numpy as np

from .._rules.strategies import Atomic
from ._classes import Classes, Group, Place
from ._program import batched
from ._residual import residual
from ._trace import Traced


def named_classes(traced: Traced) -> Classes:
    """The classes of a step's dimensions, each with a name."""
    classes = Classes(traced)
    _Namer(classes).name_all()
    classes.tie_names()
    return classes


_VOCAB = re.compile(r"vocab|emb|wte|lm_head|logits|unembed|tok|shared", re.IGNORECASE)
_POSITIONS = re.compile(r"pos|wpe", re.IGNORECASE)
_CELLS = re.compile(r"lstm|gru|rnn|(?<![a-z])cell|weight_hh", re.IGNORECASE)
_GATES = (3, 4)
_MLP = re.compile(r"mlp|ffn|ff|feed|gate|up_|down|\bw[io]\b|hidden|swiglu", re.IGNORECASE)
_EXPERTS = re.compile(r"moe|expert|router", re.IGNORECASE)
_ROUTERS = re.compile(r"gate|rout|switch", re.IGNORECASE)
_DULL = frozenset("weight kernel w params bias scale value".split())
_SMALL_VOCAB = 1000
_KEY_WORDS = (2, 4)
_IMAGE = ("height", "width", "channels")
_SPATIAL = {1: ("sequence",), 2: ("height", "width"), 3: ("depth", "height", "width")}


class _Namer:
    """Names each group by what the step does with it, then by the paths of its arrays."""

    def __init__(self, classes: Classes):
        self.classes = classes
        self.traced, self.tied = classes.traced, classes.tied
        self.left = {number for number, group in enumerate(classes.groups) if group.roots}

    def name_all(self) -> None:
        self.declared()
        self.key_words()
        self.layers()
        self.data()
        self.heads()
        self.routers()
        self.looked_up()
        self.windows()
        self.gates()
        self.width()
        self.by_path()

    def groups(self) -> list[tuple[int, Group]]:
        return [(number, self.classes.groups[number]) for number in sorted(self.left)]

    def give(self, number: int, name: str) -> None:
        self.classes.groups[number].name = name
        self.left.discard(number)

    def is_marked(self, group: Group, kind: str) -> bool:
        return any(root in self.classes.marked[kind] for root in group.roots)

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
        """The two or four numbers of a raw key are no batch, and no axis cuts them."""
        for number, group in self.groups():
            places = group.places
            last = all(place.dim == self.rank(place) - 1 for place in places)
            if last and group.size in _KEY_WORDS and all(map(self.is_raw, places)):
                self.give(number, "key_words")

    def is_raw(self, place: Place) -> bool:
        value = self.tied.program.values[self.tied.program.arguments[place.argument]]
        return value.dtype == np.dtype("uint32") and place.argument not in self.classes.model

    def layers(self) -> None:
        for number, group in self.groups():
            if self.is_marked(group, "scanned") and self.classes.in_model(group):
                self.give(number, "layers")

    def data(self) -> None:
        """The first dimension of the data is the batch; others are those of images, or the second a sequence.

        The layers that a loop walks through do not count, as those of a cache of keys and values.
        """
        images = self.images()
        for number, group in self.groups():
            places = [place for place in group.places if place.argument not in self.classes.model]
            positions = all(map(_POSITIONS.search, self.paths(self.classes.in_model(group))))
            if not places or not (positions or images.get(number) == "channels"):
                continue
            first = max(places, key=lambda place: (len(self.data_dims(place)), -place.dim))
            dims = self.data_dims(first)
            at = dims.index(first.dim)
            if all(self.data_dims(place)[:1] == [place.dim] and place.at == 0 for place in places):
                self.give(number, "batch")
            elif number in images:
                self.give(number, images[number])
            elif self.is_marked(group, "batched") and self.classes.in_model(group):
                continue
            elif len(dims) == 4 and at and not self.has_heads(first.argument):
                self.give(number, _IMAGE[at - 1])
            elif (
                at and (at < len(dims) - 1 or len(dims) == 2) and not any(image in images for image in self.near(first))
            ):
                self.give(number, "sequence")
            elif at and len(dims) == 3:
                self.give(number, "features")

    def data_dims(self, place: Place) -> list[int]:
        """The dimensions of an argument that no loop walks through."""
        groups, of_root = self.classes.groups, self.classes.of_root
        named = [{groups[of_root[leaf]].name for leaf in leaves} for leaves in self.classes.dims[place.argument]]
        return [dim for dim, names in enumerate(named) if "layers" not in names]

    def near(self, place: Place) -> list[int]:
        """The groups of the argument that a place is in."""
        return [self.classes.of_root[leaf] for leaves in self.classes.dims[place.argument] for leaf in leaves]

    def has_heads(self, argument: int) -> bool:
        """Whether products run in batches over a dimension that the model has, too."""
        leaves = {leaf for leaves in self.classes.dims[argument] for leaf in leaves}
        return not self.classes.marked["batched"].isdisjoint(leaves & self.classes.own)

    def images(self) -> dict[int, str]:
        """What convolutions call dimensions of the data: their own numbers say it, whichever comes first."""
        of_root, parts = self.classes.of_root, self.tied.parts
        found = {of_root[leaf]: "channels" for leaf in self.classes.marked["channels"] if leaf in of_root}
        for part, (at, count) in self.tied.spatial.items():
            for leaf in parts.leaves(part)[:1]:
                if leaf in of_root and count in _SPATIAL:
                    found[of_root[leaf]] = _SPATIAL[count][at]
        return found

    def windows(self) -> None:
        """What convolutions slide along is a window, and no axis should cut it."""
        for number, group in self.groups():
            if self.is_marked(group, "windows") and all(place.argument in self.classes.model for place in group.places):
                self.give(number, "window")

    def looked_up(self) -> None:
        """Rows that the tokens of sequences look up are a vocabulary; what one label of an example says are classes."""
        vocabs: set[int] = set()
        others: list[tuple[int, Group]] = []
        for number, group in self.groups():
            paths = self.paths(self.classes.in_model(group))
            if not self.is_marked(group, "looked_up") or not paths:
                continue
            if any(map(_POSITIONS.search, paths)):
                self.give(number, "positions")
            elif self.is_vocabulary(number, group, paths):
                vocabs.add(group.size)
                self.give(number, "vocab")
            else:
                others.append((number, group))
        for number, group in others:
            # Logits of as many classes as there are tokens are of tokens.
            self.give(number, "vocab" if group.size in vocabs else "classes")

    def is_vocabulary(self, number: int, group: Group, paths: list[str]) -> bool:
        if any(map(_VOCAB.search, paths)):
            return True
        return group.size >= _SMALL_VOCAB and (self.is_marked(group, "tokens") or self.is_tied_to_logits(number, group))

    def is_tied_to_logits(self, number: int, group: Group) -> bool:
        """Whether the table that is looked up makes logits, too."""
        tables = {place.argument for place in self.classes.in_model(group)}
        return self.is_marked(group, "multiplied") and len(tables) == 1

    def heads(self) -> None:
        """Parts that products run over in batches: heads where a unit follows them, or where both operands are data;
        experts where an operand is made of weights alone.
        """
        found = [(n, g) for n, g in self.groups() if self.is_marked(g, "batched") and self.classes.in_model(g)]
        groups = self.classes.of_root
        kept = [leaves[: self.classes.kept(leaves)] for dims in self.classes.dims for leaves in dims]
        kept = [leaves for leaves in kept if len(leaves) > 1 and groups[leaves[0]] in {number for number, _ in found}]
        behind = {groups[leaf] for leaves in kept for leaf in leaves[1:]}
        shared = {groups[leaves[0]] for leaves in kept}
        found = [(n, g) for n, g in self.groups() if n in behind or (n, g) in found]
        named, of_weights = set[int](), self.batches_of_weights()
        for number, group in found:
            paths = self.paths(self.classes.in_model(group))
            attends = any("att" in path.lower() for path in paths) or any(place.of > 1 for place in group.places)
            attends |= number not in of_weights
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

    def batches_of_weights(self) -> set[int]:
        """The groups over which products run in batches with an operand that has dimensions of the model alone."""
        of_root, tied, own, found = self.classes.of_root, self.tied, self.classes.own, set[int]()
        for made in tied.program.operations:
            over = batched(made)
            for value, dims in zip(made.ins, made.factors.ins, strict=True) if over else ():
                parts = tied.dims[value]
                leaves = {leaf for part in parts for leaf in tied.parts.leaves(part)}
                if len(leaves) > 1 and leaves <= own:
                    wide = [part for part, dim in zip(parts, dims, strict=True) if dim[0] in over]
                    found |= {of_root[leaf] for part in wide for leaf in tied.parts.leaves(part) if leaf in of_root}
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
        sizes, parts = set[int](), self.classes.marked["sliced"]
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
            if group.size in sizes and all(map(_CELLS.search, self.paths(self.classes.in_model(group)))):
                self.give(number, "gates")

    def width(self) -> None:
        """What residual sums have, and most arrays of the model, is its width; beside a vocabulary it always is.

        A model of several towers has several widths, each with residual sums of its own.
        """
        sums = residual(self.tied, self.classes.own)
        counts = {
            number: len({place.argument for place in self.classes.in_model(group)})
            for number, group in self.groups()
            if not sums.isdisjoint(group.roots) and self.is_marked(group, "contracted")
        }
        beside = self.beside_vocabulary()
        for number in {**counts, **dict.fromkeys(sorted(beside), 2)} if len(beside) < 2 else counts:
            if number in beside or counts.get(number, 0) >= 2:
                self.give(number, "embed")

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
            places = self.classes.in_model(group)
            if group.size in sizes and places and all(self.rank(place) <= 3 and place.of == 1 for place in places):
                chosen = self.is_marked(group, "chosen") or self.is_marked(group, "looked_up")
                if chosen or any(map(_ROUTERS.search, self.paths(places))):
                    self.give(number, "experts")

    def by_path(self) -> None:
        for number, group in self.groups():
            places = self.classes.in_model(group) or group.places
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
        for place in self.classes.in_model(group):
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

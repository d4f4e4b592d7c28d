"""Logical names for the arguments of any step, derived from its operations: classes of dimensions, and a
name for each.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence

import jax
import numpy as np
from jaxtyping import PyTree

from .._ground.text import between_numbers, first_lines, html_text, joined, table
from .._rules import Atomic
from .._step import lines_of, own_line
from ._asked import TracedStep, trace
from ._classes import Classes, ClassGroup, ClassPlace, residual
from ._program import batched


def named_classes(traced: TracedStep) -> Classes:
    """The classes of a step's dimensions, each with a name."""
    classes = Classes(traced)
    _Namer(classes).name_all()
    classes.tie_names()
    return classes


_VOCAB = re.compile(r"vocab|emb|wte|lm_head|logits|unembed|tok|shared", re.IGNORECASE)
_POSITIONS = re.compile(r"pos|wpe", re.IGNORECASE)
_MLP = re.compile(r"mlp|ffn|ff|feed|gate|up_|down|\bw[io]\b|hidden|swiglu", re.IGNORECASE)
_EXPERTS = re.compile(r"moe|expert|router", re.IGNORECASE)
_ROUTERS = re.compile(r"gate|rout|switch", re.IGNORECASE)
_DULL = frozenset("weight kernel w params bias scale value".split())
_SMALL_VOCAB = 1000
_KEY_WORDS = (2, 4)
_SPATIAL = {1: ("sequence",), 2: ("height", "width"), 3: ("depth", "height", "width")}


class _Namer:
    """Names each group by the operations on it, then by the paths of its arrays."""

    def __init__(self, classes: Classes):
        self.classes = classes
        self.traced, self.tied = classes.traced, classes.tied

    def name_all(self) -> None:
        self.declared()
        self.key_words()
        for group in self.unnamed("scanned"):
            group.name = "layers" if self.classes.in_model(group) else ""
        self.data()
        self.heads()
        self.routers()
        self.looked_up()
        # Convolutions slide along a window, and no axis should shard it.
        for group in self.unnamed("windows"):
            group.name = "window" if len(self.classes.in_model(group)) == len(group.places) else ""
        self.width()
        self.by_path()

    def unnamed(self, mark: str | None = None) -> list[ClassGroup]:
        """The groups without a name; with `mark`, only the groups that operations marked with it."""
        found = [group for group in self.classes.live() if not group.name]
        return [group for group in found if mark is None or self.is_marked(group, mark)]

    def is_marked(self, group: ClassGroup, mark: str) -> bool:
        return not self.classes.marked[mark].isdisjoint(group.roots)

    def paths(self, places: Iterable[ClassPlace]) -> list[str]:
        return list(dict.fromkeys(self.traced.arrays[place.argument].path for place in places))

    def rank(self, place: ClassPlace) -> int:
        return len(self.classes.dims[place.argument])

    def declared(self) -> None:
        """Gives groups the names that the model's fields declare. It runs before all other naming."""
        for group in self.unnamed():
            for place in group.places:
                names = self.traced.arrays[place.argument].names
                if names is None or ... in names or len(names) != self.rank(place) or place.of > 1:
                    continue
                name = names[place.dim]
                name = name.target if isinstance(name, Atomic) else name
                group.name = group.name or (name if isinstance(name, str) else "")

    def key_words(self) -> None:
        """Names the dimension of the words in raw PRNG keys. It is no batch and is never sharded."""
        values, arguments = self.tied.program.values, self.tied.program.arguments
        for group in self.unnamed():
            if group.size in _KEY_WORDS and all(
                place.dim == self.rank(place) - 1
                and place.argument not in self.classes.model
                and values[arguments[place.argument]].dtype == np.uint32
                for place in group.places
            ):
                group.name = "key_words"

    def data(self) -> None:
        """Names the dimensions of the data: the first is the batch; the others are an image's, or the second is a
        sequence.

        The layers over which a loop runs do not count, such as those of a cache of keys and values.
        """
        images = self.images()
        for group in self.unnamed():
            own = self.classes.in_model(group)
            places = [place for place in group.places if place.argument not in self.classes.model]
            positions = all(map(_POSITIONS.search, self.paths(own)))
            if not places or not (positions or images.get(group) == "channels"):
                continue
            first = max(places, key=lambda place: (len(self.data_dims(place)), -place.dim))
            dims = self.data_dims(first)
            at = dims.index(first.dim)
            if all(self.data_dims(place)[:1] == [place.dim] and place.at == 0 for place in places):
                group.name = "batch"
            elif group in images:
                group.name = images[group]
            elif not at or (own and self.is_marked(group, "batched")):
                continue
            elif (at < len(dims) - 1 or len(dims) == 2) and images.keys().isdisjoint(self.classes.flat(first.argument)):
                group.name = "sequence"
            elif len(dims) == 3:
                group.name = "features"

    def data_dims(self, place: ClassPlace) -> list[int]:
        """The dimensions of an argument, without those that a loop iterates over."""
        named = [{self.classes.of(leaf).name for leaf in leaves} for leaves in self.classes.dims[place.argument]]
        return [dim for dim, names in enumerate(named) if "layers" not in names]

    def images(self) -> dict[ClassGroup, str]:
        """The names of channels and spatial dimensions of images, from the dimension numbers of convolutions."""
        classes = self.classes
        found = {classes.of(leaf): "channels" for leaf in classes.marked["channels"] if leaf in classes.of_root}
        for leaf, (at, count) in self.tied.spatial.items():
            if leaf in classes.of_root and count in _SPATIAL:
                found[classes.of(leaf)] = _SPATIAL[count][at]
        return found

    def looked_up(self) -> None:
        """Names dimensions that are looked up: a vocabulary if the tokens of a sequence index it, classes if a label
        does.
        """
        found, vocabs = list[ClassGroup](), set[int]()
        for group in self.unnamed("looked_up"):
            paths = self.paths(self.classes.in_model(group))
            are_positions = any(map(_POSITIONS.search, paths))
            is_named = any(map(_VOCAB.search, paths)) and not are_positions
            if is_named or (paths and group.size >= _SMALL_VOCAB and self.is_marked(group, "tokens")):
                vocabs.add(group.size)
            group.name = "positions" if are_positions else ""
            found += [group] if paths and not are_positions else []
        for group in found:
            # Logits with as many classes as there are tokens are over tokens.
            group.name = "vocab" if group.size in vocabs else "classes"

    def heads(self) -> None:
        """Names the batch dimensions of products: heads, or experts if one operand is made of weights only."""
        classes, of = self.classes, self.classes.of
        found = [group for group in self.unnamed("batched") if classes.in_model(group)]
        kept = [leaves[: classes.kept(leaves)] for dims in classes.dims for leaves in dims]
        kept = [[*map(of, leaves)] for leaves in kept if len(leaves) > 1 and of(leaves[0]) in found]
        shared, behind = {groups[0] for groups in kept}, {group for groups in kept for group in groups[1:]}
        of_weights, named = self.batches_of_weights(), set[ClassGroup]()
        for group in [*found, *(group for group in self.unnamed() if group in behind and group not in found)]:
            paths = self.paths(classes.in_model(group))
            attends = any("att" in path.lower() for path in paths) or any(place.of > 1 for place in group.places)
            if group in behind:
                group.name = "query_groups"
            elif group in shared:
                group.name = "kv_heads"
            elif any(map(_EXPERTS.search, paths)) or not (attends or group not in of_weights):
                group.name = "experts"
                continue
            else:
                group.name = "heads"
            named.add(group)
        # The dimension, or part of it, that follows heads belongs to one head.
        for argument in range(len(classes.dims)):
            flat = classes.flat(argument)
            for before, after in zip(flat, flat[1:], strict=False):
                if before in named and not after.name and self.is_marked(after, "contracted"):
                    after.name = "head_dim"

    def batches_of_weights(self) -> set[ClassGroup]:
        """The groups that are batch dimensions of products in which one operand has dimensions of the model only."""
        tied, own, found = self.tied, self.classes.own, set[ClassGroup]()
        for made in tied.program.operations:
            over = batched(made)
            for value, dims in zip(made.ins, made.factors.ins, strict=True) if over else ():
                leaves = tied.leaves_of(value)
                if len(leaves) > 1 and leaves <= own:
                    wide = (part for part, dim in zip(tied.leaves[value], dims, strict=True) if dim[0] in over)
                    found.update(self.classes.of(leaf) for part in wide for leaf in part)
        return found

    def routers(self) -> None:
        """Names a dimension of router scores `experts` if its size is the number of experts. No operation
        ties the two.
        """
        sizes = {group.size for group in self.classes.live() if group.name == "experts"}
        for group in self.unnamed():
            places = self.classes.in_model(group)
            if group.size in sizes and places and all(self.rank(place) <= 3 and place.of == 1 for place in places):
                chosen = self.is_marked(group, "chosen") or self.is_marked(group, "looked_up")
                if chosen or any(map(_ROUTERS.search, self.paths(places))):
                    group.name = "experts"

    def width(self) -> None:
        """Names the model's width `embed`: the class of residual sums that more than one array of the model has.

        A model with several towers has several widths, each with its own residual sums.
        """
        sums = residual(self.tied, self.classes.own)
        found = [
            group
            for group in self.unnamed("contracted")
            if not sums.isdisjoint(group.roots) and len({place.argument for place in self.classes.in_model(group)}) > 1
        ]
        flats = map(self.classes.flat, range(len(self.classes.dims)))
        tables = [flat for flat in flats if len(flat) == 2 and "vocab" in [group.name for group in flat]]
        beside = {group for flat in tables for group in flat if not group.name}
        for group in [*found, *(beside if len(beside) == 1 else ())]:
            group.name = "embed"

    def by_path(self) -> None:
        for group in self.unnamed():
            places = self.classes.in_model(group) or group.places
            places = [place for place in places if self.rank(place) > 1] or places
            paths = self.paths(places)
            if all(map(_POSITIONS.search, paths)):
                group.name = "positions"
            elif any(map(_MLP.search, paths)) or self.is_between_widths(group):
                group.name = "mlp"
            elif any(map(_VOCAB.search, paths)):
                group.name = "vocab"
            else:
                group.name = _short(paths[0], self.traced.words) + f"_{places[0].dim}"

    def is_between_widths(self, group: ClassGroup) -> bool:
        """Whether the model has matrices from its width to this dimension, and others from this dimension back to its
        width.
        """
        places = [place for place in self.classes.in_model(group) or group.places if place.of == 1]
        wide = {p.dim for p in places if "embed" in [other.name for other in self.classes.flat(p.argument)]}
        return len(wide) > 1 and self.is_marked(group, "contracted")


def _short(path: str, words: tuple[str, ...]) -> str:
    """The most telling part of a path, as an identifier."""
    parts = [part for part in path.split("/") if part not in _DULL and part not in words] or path.split("/")
    name = re.sub(r"\W+", "_", "_".join(parts[-2:] if parts[-1].isdecimal() else parts[-1:])).strip("_")
    return name if name and not name[0].isdigit() else f"a{name}"


@dataclasses.dataclass(frozen=True, slots=True)
class NamedAxis:
    """A logical axis: its name and size, the dimensions that have it, and the operations that tied these dimensions.

    `places` are paths such as `model/layers/mlp/gate[2]`; arrays that differ only in numbers share one. `joins` are
    pairs of a primitive and the source line of the operation.
    """

    __module__ = "shardfx.auto"

    name: str
    size: int
    places: tuple[str, ...]
    joins: tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True)
class NamedAxes:
    """The logical axes that [`shardfx.auto.name_axes`][] found.

    `names` has one tree of names for each argument of the step, for `plan(args[i], ..., names=found.names[i])`. `notes`
    names the operations that were not understood. `str(...)` is a table with the origin of each axis.
    """

    __module__ = "shardfx.auto"

    names: tuple[PyTree, ...]
    axes: tuple[NamedAxis, ...]
    notes: tuple[str, ...]

    def __getitem__(self, name: str) -> NamedAxis:
        for axis in self.axes:
            if axis.name == name:
                return axis
        known = ", ".join(axis.name for axis in self.axes)
        raise KeyError(f"no axis is called {name!r}; there are {known}.")

    def __str__(self) -> str:
        rows = [("axis", "size", "where", "tied by")]
        rows += [
            (axis.name, str(axis.size), _some(axis.places), _some([f"{what} {where}" for what, where in axis.joins]))
            for axis in self.axes
        ]
        return "\n".join([*table(rows, right={"size"}), *(f"note: {note}" for note in self.notes)])

    __repr__ = first_lines
    _repr_html_ = html_text


def name_axes(step: Callable[..., object], *args: PyTree) -> NamedAxes:
    """Finds the logical axes of a step's arguments: dimensions that must be sharded alike get one name.

    The step is traced. Dimensions that an operation ties (contracts, adds, scans over, looks up) are one class. Where a
    reshape splits a fused dimension, its parts are separate classes: this finds heads, and the width of a head becomes
    the unit that no shard splits. Rules and names are not needed beforehand; names that fields declare are used for
    their classes.

    An unknown operation ties nothing, and `notes` reports it.

    **Arguments:**

    - `step`: the function that is jitted: a forward pass or a whole training step.
    - `args`: its arguments: arrays or `jax.ShapeDtypeStruct`s, in any trees. Nothing is run.

    **Returns:**

    A [`shardfx.auto.NamedAxes`][]. Names such as "batch", "embed", "mlp" or "heads" are given if a dimension's
    operations or path show them; otherwise the names are made from paths.

    **Raises:**

    `LeafTypeError` for a `step` that is no function; the errors of tracing the step.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import shardfx
        from shardfx import AxisRules, MeshSpec

        def loss(params, x):
            return jnp.mean((jax.nn.relu(x @ params["up"]) @ params["down"]) ** 2)

        struct = jax.ShapeDtypeStruct
        params = {"up": struct((64, 256), "float32"), "down": struct((256, 64), "float32")}
        found = shardfx.auto.name_axes(loss, params, struct((32, 64), "float32"))
        print(found)
        assert found["mlp"].size == 256 and found["batch"].size == 32
        rules = AxisRules([(axis.name, None) for axis in found.axes])
        rules = rules.prepend([("mlp", "tensor")])
        made = shardfx.plan(params, MeshSpec({"tensor": 8}), names=found.names[0], axes=rules)
        assert made["up"].spec == jax.P(None, "tensor") and made["down"].spec == jax.P("tensor")
        ```
    """
    classes = named_classes(trace(step, *args))
    axes = tuple(_axis(group, classes) for group in classes.live() if group.name)
    return NamedAxes(names_trees(classes), axes, notes_of(classes))


def notes_of(classes: Classes) -> tuple[str, ...]:
    """The operations of the step that were not understood, in words."""
    notes = classes.tied.program.notes
    return tuple(words if count == 1 else f"{words} ({count} times)" for words, count in notes.items())


def names_trees(classes: Classes) -> tuple[PyTree, ...]:
    """For each argument of the step, a tree of its structure with names at the arrays."""
    found = iter(map(classes.names_of, range(len(classes.dims))))
    return tuple(
        jax.tree.unflatten(flat.treedef, [next(found) if shaped else None for shaped in flat.is_array])
        for flat in classes.traced.flats
    )


def _axis(group: ClassGroup, classes: Classes) -> NamedAxis:
    arrays, tied, roots = classes.traced.arrays, classes.tied, set(group.roots)
    alike: dict[tuple[object, str], list[str]] = {}
    # The moments of an optimizer have the axes of the parameters; they are listed only if nothing else is.
    own = [place for place in group.places if arrays[place.argument].which == classes.main]
    data = [place for place in group.places if place.argument not in classes.model]
    for place in own + data or group.places:
        path = arrays[place.argument].path
        part = f".{place.at}" if place.of > 1 else ""
        alike.setdefault((between_numbers(path), f"[{place.dim}{part}]"), []).append(path)
    places = tuple(joined(sorted(paths)) + dim for (_, dim), paths in alike.items())
    # The operations in which two operands with the axis meet, products and lookups first.
    joins: dict[tuple[str, str], None] = {}
    for made in sorted(tied.program.operations, key=lambda made: not made.factors.reduction):
        having = sum(not roots.isdisjoint(tied.leaves_of(value)) for value in {*made.ins})
        if having > 1 and made.name not in ("carry", "return", "use"):
            frame = own_line(lines_of(made.location))
            joins[made.name, "-" if frame is None else frame.place] = None
    return NamedAxis(group.name, group.size, places, tuple(joins))


def _some(texts: Sequence[str], most: int = 4) -> str:
    return ", ".join(texts[:most]) + (f", and {len(texts) - most} more" if len(texts) > most else "")

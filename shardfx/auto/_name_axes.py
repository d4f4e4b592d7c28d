"""Logical names for the dimensions of any step's arguments, derived from the step's
operations and the arrays' paths.

Dimensions that must be sharded alike are a logical axis, and get one name.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence

import jax
import numpy as np
from jaxtyping import PyTree

from .._ground.text import between_numbers, first_lines, html_text, joined, table
from .._rules import Atomic
from .._step import explicit_mesh, lines_of, own_line, without_mesh
from ._asked import TracedStep, trace, without_shardings
from ._classes import ArgumentDim, Classes, LogicalAxis, residual
from ._program import batched
from ._raw_keys import raw_keys


def named_classes(traced: TracedStep) -> Classes:
    """The logical axes of a step's arguments, each with a name."""
    classes = Classes(traced)
    _Namer(classes).name_all()
    classes.tie_names()
    return classes


_VOCAB = re.compile(r"vocab|emb|wte|lm_head|logits|unembed|tok|shared", re.IGNORECASE)
_POSITIONS = re.compile(r"pos|wpe", re.IGNORECASE)
_MLP = re.compile(
    r"mlp|ffn|ff|feed|gate|up_|down|\bw[io]\b|hidden|swiglu", re.IGNORECASE
)
_EXPERTS = re.compile(r"moe|expert|router", re.IGNORECASE)
_ROUTERS = re.compile(r"gate|rout|switch", re.IGNORECASE)
_DULL = frozenset("weight kernel w params bias scale value".split())
_SMALL_VOCAB = 1000
_KEY_WORDS = (2, 4)
_KEY_NAMES = re.compile(r"(^|[/._])(prng|rng|key)s?$", re.IGNORECASE)
_SPATIAL = {1: ("sequence",), 2: ("height", "width"), 3: ("depth", "height", "width")}


class _Namer:
    """Names each logical axis by the operations on it, then by the paths of its arrays."""

    def __init__(self, classes: Classes):
        self.classes = classes
        self.traced, self.tied = classes.traced, classes.tied

    def name_all(self) -> None:
        self.declared()
        self.key_words()
        for axis in self.unnamed("scanned"):
            if self.classes.in_model(axis):
                axis.name = "layers"
            else:
                axis.name = ""
        self.data()
        self.heads()
        self.routers()
        self.looked_up()
        # Convolutions slide along a window, and no axis should shard it.
        for axis in self.unnamed("windows"):
            if len(self.classes.in_model(axis)) == len(axis.places):
                axis.name = "window"
            else:
                axis.name = ""
        self.width()
        self.by_path()

    def unnamed(self, mark: str | None = None) -> list[LogicalAxis]:
        """The logical axes without a name. With `mark`, a key of `Tied.marked`, only
        those with a class of this mark: for "scanned", the axes that loops iterate
        over.
        """
        axes = [axis for axis in self.classes.live() if not axis.name]
        return [axis for axis in axes if mark is None or self.is_marked(axis, mark)]

    def is_marked(self, axis: LogicalAxis, mark: str) -> bool:
        return not self.classes.marked[mark].isdisjoint(axis.roots)

    def paths(self, places: Iterable[ArgumentDim]) -> list[str]:
        return list(
            dict.fromkeys(self.traced.arrays[place.argument].path for place in places)
        )

    def rank(self, place: ArgumentDim) -> int:
        return len(self.classes.dims[place.argument])

    def declared(self) -> None:
        """Names logical axes by the names that fields of Equinox modules declare for
        the dimensions of their arrays.
        """
        for axis in self.unnamed():
            for place in axis.places:
                names = self.traced.arrays[place.argument].names
                if (
                    names is None
                    or ... in names
                    or len(names) != self.rank(place)
                    or place.of > 1
                ):
                    continue
                name = names[place.dim]
                name = name.target if isinstance(name, Atomic) else name
                axis.name = axis.name or (name if isinstance(name, str) else "")

    def key_words(self) -> None:
        """Names the last dimension of raw PRNG keys `key_words`. No mesh axis shards
        it.
        """
        keys = raw_keys(self.traced.step.traced.jaxpr.jaxpr)
        for axis in self.unnamed():
            if axis.size in _KEY_WORDS and all(
                place.dim == self.rank(place) - 1
                and place.argument not in self.classes.model
                and self.is_raw_key(place, keys)
                for place in axis.places
            ):
                axis.name = "key_words"

    def is_raw_key(self, place: ArgumentDim, keys: frozenset[int]) -> bool:
        """Whether an array is the words of PRNG keys: the step makes `keys` of it, or it
        has words of this dtype and the name of a key.
        """
        number = self.tied.program.arguments[place.argument]
        if self.tied.program.values[number].dtype != np.uint32:
            return False
        (path,) = self.paths([place])
        return place.argument in keys or bool(_KEY_NAMES.search(path))

    def data(self) -> None:
        """Names the dimensions of the data: `batch` first, then the dimensions of
        images, or a sequence and features. A dimension that a loop iterates over does
        not count, such as the layers of a key-value cache.
        """
        images = self.images()
        for axis in self.unnamed():
            is_of_model = self.classes.in_model(axis)
            places = [
                place
                for place in axis.places
                if place.argument not in self.classes.model
            ]
            positions = all(map(_POSITIONS.search, self.paths(is_of_model)))
            if not places or not (positions or images.get(axis) == "channels"):
                continue
            first = max(
                places, key=lambda place: (len(self.data_dims(place)), -place.dim)
            )
            dims = self.data_dims(first)
            position = dims.index(first.dim)
            if all(
                self.data_dims(place)[:1] == [place.dim] and place.index == 0
                for place in places
            ):
                axis.name = "batch"
            elif axis in images:
                axis.name = images[axis]
            elif not position:
                continue
            elif (
                is_of_model
                and self.is_marked(axis, "batched")
                and not self.are_tokens(places)
            ):
                continue  # the heads of a cache, which a table of positions has too
            elif (
                position < len(dims) - 1 or len(dims) == 2
            ) and images.keys().isdisjoint(self.classes.flat(first.argument)):
                axis.name = "sequence"
            elif len(dims) == 3:
                axis.name = "features"

    def are_tokens(self, places: Iterable[ArgumentDim]) -> bool:
        """Whether all arrays with these dimensions hold integers."""
        values = self.tied.program.values
        arguments = self.tied.program.arguments
        dtypes = {values[arguments[place.argument]].dtype for place in places}
        return all(np.issubdtype(dtype, np.integer) for dtype in dtypes)

    def data_dims(self, place: ArgumentDim) -> list[int]:
        """The numbers of all dimensions of the array to which `place` belongs, without
        those named "layers".
        """
        named = [
            {self.classes.of(root).name for root in roots}
            for roots in self.classes.dims[place.argument]
        ]
        return [dim for dim, names in enumerate(named) if "layers" not in names]

    def images(self) -> dict[LogicalAxis, str]:
        """The names of the dimensions along which convolutions run: "channels", and
        "height" or other spatial ones.
        """
        classes = self.classes
        names = {
            classes.of(root): "channels"
            for root in classes.marked["channels"]
            if root in classes.of_root
        }
        for root, (position, count) in self.tied.spatial.items():
            if root in classes.of_root and count in _SPATIAL:
                names[classes.of(root)] = _SPATIAL[count][position]
        return names

    def looked_up(self) -> None:
        """Names the dimensions of tables from which entries are looked up. The name is
        `vocab` if tokens index them, `classes` if labels do, and `positions` for
        position embeddings.
        """
        vocabularies, vocabs = list[LogicalAxis](), set[int]()
        for axis in self.unnamed("looked_up"):
            paths = self.paths(self.classes.in_model(axis))
            are_positions = any(map(_POSITIONS.search, paths))
            is_named = any(map(_VOCAB.search, paths)) and not are_positions
            if is_named or (
                paths and axis.size >= _SMALL_VOCAB and self.is_marked(axis, "tokens")
            ):
                vocabs.add(axis.size)
            axis.name = "positions" if are_positions else ""
            vocabularies += [axis] if paths and not are_positions else []
        for axis in vocabularies:
            # Logits with the size of a vocabulary are over its tokens.
            axis.name = "vocab" if axis.size in vocabs else "classes"

    def heads(self) -> None:
        """Names the batch dimensions of matrix products, and `head_dim`, the dimension
        after heads.

        A batch dimension is `experts` if its arrays' paths say so, or if one operand is
        a weight and nothing shows attention. Otherwise it is `heads`, or `kv_heads` and
        `query_groups` if query heads share keys.
        """
        classes, of = self.classes, self.classes.of
        weight_axes = [
            axis for axis in self.unnamed("batched") if classes.in_model(axis)
        ]
        kept_roots = [
            roots[: classes.kept(roots)] for dims in classes.dims for roots in dims
        ]
        kept_roots = [
            [*map(of, roots)]
            for roots in kept_roots
            if len(roots) > 1 and of(roots[0]) in weight_axes
        ]
        shared, behind = (
            {axes[0] for axes in kept_roots},
            {axis for axes in kept_roots for axis in axes[1:]},
        )
        of_weights, named = self.batches_of_weights(), set[LogicalAxis]()
        for axis in [
            *weight_axes,
            *(
                axis
                for axis in self.unnamed()
                if axis in behind and axis not in weight_axes
            ),
        ]:
            paths = self.paths(classes.in_model(axis))
            attends = any("att" in path.lower() for path in paths) or any(
                place.of > 1 for place in axis.places
            )
            if axis in behind:
                axis.name = "query_groups"
            elif axis in shared:
                axis.name = "kv_heads"
            elif any(map(_EXPERTS.search, paths)) or not (
                attends or axis not in of_weights
            ):
                axis.name = "experts"
                continue
            else:
                axis.name = "heads"
            named.add(axis)
        # The sub-dimension that follows heads is the width of one head.
        for argument in range(len(classes.dims)):
            flat = classes.flat(argument)
            for before, after in zip(flat, flat[1:], strict=False):
                if (
                    before in named
                    and not after.name
                    and self.is_marked(after, "contracted")
                ):
                    after.name = "head_dim"

    def batches_of_weights(self) -> set[LogicalAxis]:
        """The logical axes of the batch dimensions of weights. A weight is an operand
        of a matrix product whose dimensions are all equivalent to dimensions of the
        model.
        """
        tied, parameter_roots, axes = self.tied, self.classes.own, set[LogicalAxis]()
        for operation in tied.program.operations:
            over = batched(operation)
            for value, dims in (
                zip(operation.ins, operation.factors.ins, strict=True) if over else ()
            ):
                roots = tied.roots_of(value)
                if len(roots) > 1 and roots <= parameter_roots:
                    wide = (
                        part
                        for part, dim in zip(tied.roots[value], dims, strict=True)
                        if dim[0] in over
                    )
                    axes.update(self.classes.of(root) for part in wide for root in part)
        return axes

    def routers(self) -> None:
        """Names the dimension of router scores `experts` if its size is the number of
        experts. The size decides, since no operation shows that the two dimensions
        correspond.
        """
        sizes = {axis.size for axis in self.classes.live() if axis.name == "experts"}
        for axis in self.unnamed():
            places = self.classes.in_model(axis)
            if (
                axis.size in sizes
                and places
                and all(self.rank(place) <= 3 and place.of == 1 for place in places)
            ):
                paths = self.paths(places)
                is_table = self.is_marked(axis, "tokens") or any(
                    _VOCAB.search(path) or _POSITIONS.search(path) for path in paths
                )
                is_chosen = self.is_marked(axis, "chosen")
                if self.is_marked(axis, "looked_up") and not is_table:
                    is_chosen = True
                if is_chosen or any(map(_ROUTERS.search, paths)):
                    axis.name = "experts"

    def width(self) -> None:
        """Names a dimension of a residual stream `embed` if matrix products contract it
        and several arrays of the model have it. A model with several towers has several
        such streams. If tables have a `vocab` dimension, and their other dimensions are
        one logical axis, this is named `embed` too.
        """
        sums = residual(self.tied, self.classes.own)
        axes = [
            axis
            for axis in self.unnamed("contracted")
            if not sums.isdisjoint(axis.roots)
            and len({place.argument for place in self.classes.in_model(axis)}) > 1
        ]
        flats = map(self.classes.flat, range(len(self.classes.dims)))
        tables = [
            flat
            for flat in flats
            if len(flat) == 2 and "vocab" in [axis.name for axis in flat]
        ]
        beside = {axis for flat in tables for axis in flat if not axis.name}
        for axis in [*axes, *(beside if len(beside) == 1 else ())]:
            axis.name = "embed"

    def by_path(self) -> None:
        for axis in self.unnamed():
            places = self.classes.in_model(axis) or axis.places
            places = [place for place in places if self.rank(place) > 1] or places
            paths = self.paths(places)
            if all(map(_POSITIONS.search, paths)):
                axis.name = "positions"
            elif any(map(_MLP.search, paths)) or self.is_between_widths(axis):
                axis.name = "mlp"
            elif any(map(_VOCAB.search, paths)):
                axis.name = "vocab"
            else:
                axis.name = _short(paths[0], self.traced.words) + f"_{places[0].dim}"

    def is_between_widths(self, axis: LogicalAxis) -> bool:
        """Whether a logical axis, such as `mlp`, is the inner dimension of a block:
        matrix products contract it, and it is at several positions in arrays that have
        `embed`.
        """
        places = [
            place
            for place in self.classes.in_model(axis) or axis.places
            if place.of == 1
        ]
        wide = {
            p.dim
            for p in places
            if "embed" in [other.name for other in self.classes.flat(p.argument)]
        }
        return len(wide) > 1 and self.is_marked(axis, "contracted")


def _short(path: str, words: tuple[str, ...]) -> str:
    """An identifier made of the last part of a path. Parts that are common, such as
    `weight`, or in `words`, the names of the step's arguments, are skipped.
    """
    parts = [
        part for part in path.split("/") if part not in _DULL and part not in words
    ] or path.split("/")
    name = re.sub(
        r"\W+", "_", "_".join(parts[-2:] if parts[-1].isdecimal() else parts[-1:])
    ).strip("_")
    if name and not name[0].isdigit():
        return name
    return f"a{name}"


@dataclasses.dataclass(frozen=True, slots=True)
class NamedAxis:
    """A logical axis: dimensions of a step's arguments that must be sharded alike.

    - `name`, `size`: the logical name and the size of the dimensions.
    - `places`: the dimensions, as `model/layers/mlp/gate[2]`. Arrays whose paths differ
      only in numbers have one entry.
    - `joins`: the operations that tie these dimensions together, as pairs of a
      primitive and a source line.
    """

    __module__ = "shardfx.auto"

    name: str
    size: int
    places: tuple[str, ...]
    joins: tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True)
class NamedAxes:
    """The logical axes of a step, as [`shardfx.auto.name_axes`][] returns them.
    `str(...)` is a table of them.

    - `names`: one tree of names for each argument of the step, for
      `plan(args[i], ..., names=found.names[i])`.
    - `axes`: the logical axes.
    - `notes`: one text for each kind of operation that is not understood, so that it
      relates no dimensions.
    """

    __module__ = "shardfx.auto"

    names: tuple[PyTree, ...]
    axes: tuple[NamedAxis, ...]
    notes: tuple[str, ...]

    def __getitem__(self, name: str) -> NamedAxis:
        for axis in self.axes:
            if axis.name == name:
                return axis
        axis_names = ", ".join(axis.name for axis in self.axes)
        raise KeyError(f"no axis is called {name!r}; there are {axis_names}.")

    def __str__(self) -> str:
        rows = [("axis", "size", "where", "tied by")]
        rows += [
            (
                axis.name,
                str(axis.size),
                _some(axis.places),
                _some([f"{what} {where}" for what, where in axis.joins]),
            )
            for axis in self.axes
        ]
        return "\n".join(
            [*table(rows, right={"size"}), *(f"note: {note}" for note in self.notes)]
        )

    __repr__ = first_lines
    _repr_html_ = html_text


def name_axes(step: Callable[..., object], *args: PyTree) -> NamedAxes:
    """Finds the logical axes of a step's arguments: dimensions that must be sharded
    alike get one name.

    The step is traced, not run. Two dimensions get one name if an operation pairs them,
    as an addition, a contraction or a loop does. If a reshape splits a dimension into
    heads and head widths, its name is that of the heads, and the head width is the unit
    that no shard splits. A name that a field of a module declares holds for its logical
    axis.

    An operation that is not understood relates no dimensions, and `notes` reports it.

    **Arguments:**

    - `step`: the function that is jitted: a forward pass or a whole training step.
    - `args`: its arguments: arrays or `jax.ShapeDtypeStruct`s, in any trees.

    **Returns:**

    A [`shardfx.auto.NamedAxes`][]. Names such as "batch", "embed", "mlp" or "heads" are
    given if a dimension's operations or path show them; otherwise the names are made
    from paths.

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
    explicit = explicit_mesh(args)
    if explicit is not None:
        searched = without_shardings(step, args, explicit)
        with without_mesh():
            return name_axes(searched.step, *searched.args)

    classes = named_classes(trace(step, *args))
    axes = tuple(_named_axis(axis, classes) for axis in classes.live() if axis.name)
    return NamedAxes(names_trees(classes), axes, notes_of(classes))


def notes_of(classes: Classes) -> tuple[str, ...]:
    """A text for each kind of operation of the step that the search does not
    understand.
    """
    notes = classes.tied.program.notes
    texts = []
    for words, count in notes.items():
        texts.append(words if count == 1 else f"{words} ({count} times)")
    return tuple(texts)


def names_trees(classes: Classes) -> tuple[PyTree, ...]:
    """For each argument of the step, the tree with each array replaced by the names of
    its dimensions.
    """
    names_of_arrays = iter(map(classes.names_of, range(len(classes.dims))))
    trees = []
    for flat in classes.traced.flats:
        leaves = []
        for is_array in flat.is_array:
            leaves.append(next(names_of_arrays) if is_array else None)
        trees.append(jax.tree.unflatten(flat.treedef, leaves))
    return tuple(trees)


def _named_axis(axis: LogicalAxis, classes: Classes) -> NamedAxis:
    arrays, tied, roots = classes.traced.arrays, classes.tied, set(axis.roots)
    alike: dict[tuple[object, str], list[str]] = {}
    # The moments of an optimizer have the axes of the parameters; they are listed only
    # if nothing else is.
    main_places = [
        place for place in axis.places if arrays[place.argument].which == classes.main
    ]
    data = [place for place in axis.places if place.argument not in classes.model]
    for place in main_places + data or axis.places:
        path = arrays[place.argument].path
        part = f".{place.index}" if place.of > 1 else ""
        alike.setdefault((between_numbers(path), f"[{place.dim}{part}]"), []).append(
            path
        )
    places = tuple(joined(sorted(paths)) + dim for (_, dim), paths in alike.items())
    # The operations in which two operands with the axis meet, products and lookups
    # first.
    joins: dict[tuple[str, str], None] = {}
    for operation in sorted(
        tied.program.operations, key=lambda operation: not operation.factors.reduction
    ):
        having = sum(
            not roots.isdisjoint(tied.roots_of(value)) for value in {*operation.ins}
        )
        if having > 1 and operation.name not in ("carry", "return", "use"):
            frame = own_line(lines_of(operation.location))
            joins[operation.name, "-" if frame is None else frame.place] = None
    return NamedAxis(axis.name, axis.size, places, tuple(joins))


def _some(texts: Sequence[str], most: int = 4) -> str:
    return ", ".join(texts[:most]) + (
        f", and {len(texts) - most} more" if len(texts) > most else ""
    )

"""Names for the logical axes of a step, from the operations on them and from the paths
of their arrays.
"""

import itertools as it
import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from .._rules import Atomic
from ._asked import TracedStep
from ._classes import ArgumentDim, Classes, LogicalAxis, residual
from ._program import batched
from ._raw_keys import raw_keys


def named_classes(traced: TracedStep) -> Classes:
    """The logical axes of a step's arguments, each with a name."""
    classes = Classes(traced)
    _Namer(classes).name_all()
    classes.merge_equal_names()
    return classes


# Words in the paths of arrays.
_VOCAB = re.compile(r"vocab|emb|wte|lm_head|logits|unembed|tok|shared", re.IGNORECASE)
_POSITIONS = re.compile(r"pos|wpe", re.IGNORECASE)
_MLP = re.compile(
    r"mlp|ffn|ff|feed|gate|up_|down|\bw[io]\b|hidden|swiglu", re.IGNORECASE
)
_EXPERTS = re.compile(r"moe|expert|router", re.IGNORECASE)
_ROUTERS = re.compile(r"gate|rout|switch", re.IGNORECASE)
# Parts of paths that say nothing of an array.
_DULL = frozenset("weight kernel w params bias scale value".split())
# A table with fewer entries that are looked up may be one of classes or of types.
_SMALL_VOCAB = 1000
# The numbers of words of a raw key: threefry's and rbg's.
_KEY_WORDS = (2, 4)
_KEY_NAMES = re.compile(r"(^|[/._])(prng|rng|key)s?$", re.IGNORECASE)
# The names of the dimensions along which convolutions slide, by their number.
_SPATIAL = {1: ("sequence",), 2: ("height", "width"), 3: ("depth", "height", "width")}


class _Namer:
    """Names each logical axis by the operations on it, then by the paths of its arrays.
    The methods that `name_all` calls name axes that have no name yet.
    """

    def __init__(self, classes: Classes):
        """`tied_program` is the step's program, with the equivalence classes of its
        dimensions.
        """
        self.classes = classes
        self.traced = classes.traced
        self.tied_program = classes.tied

    def name_all(self) -> None:
        """Names all logical axes. The first method that names one decides."""
        self.declared()
        self.key_words()
        self.scanned()
        self.data()
        self.heads()
        self.routers()
        self.looked_up()
        self.windows()
        self.width()
        self.by_path()

    def scanned(self) -> None:
        """Names the dimensions over which loops iterate "layers", if the model has them."""
        for axis in self.unnamed("scanned"):
            if self.classes.in_model(axis):
                axis.name = "layers"

    def windows(self) -> None:
        """Names the windows of convolutions. Convolutions slide along a window, and no
        axis should shard it.
        """
        for axis in self.unnamed("windows"):
            if len(self.classes.in_model(axis)) == len(axis.places):
                axis.name = "window"

    def unnamed(self, mark: str | None = None) -> list[LogicalAxis]:
        """The logical axes without a name. With `mark`, a key of `Tied.marked`, only
        those with a class of this mark: for "scanned", the axes that loops iterate
        over.
        """
        axes = []
        for axis in self.classes.unmerged_axes():
            if not axis.name:
                axes.append(axis)
        if mark is None:
            return axes
        return [axis for axis in axes if self.is_marked(axis, mark)]

    def is_marked(self, axis: LogicalAxis, mark: str) -> bool:
        """Whether an axis has a class of the mark `mark`, a key of `Tied.marked`."""
        return not self.classes.marked[mark].isdisjoint(axis.roots)

    def paths(self, places: Iterable[ArgumentDim]) -> list[str]:
        """The paths of the arrays with these dimensions, each once."""
        arrays = self.traced.arrays
        paths = [arrays[place.array].path for place in places]
        return list(dict.fromkeys(paths))

    def rank(self, place: ArgumentDim) -> int:
        """The number of dimensions of the array to which a dimension belongs."""
        return len(self.classes.dims[place.array])

    def declared(self) -> None:
        """Names logical axes by the names that fields of Equinox modules declare for
        the dimensions of their arrays.
        """
        for axis in self.unnamed():
            for place in axis.places:
                axis.name = axis.name or self.declared_name(place)

    def declared_name(self, place: ArgumentDim) -> str:
        """The name that a field declares for a dimension; empty without one, and where
        names and dimensions do not correspond one to one. A place is a dimension `dim`
        of an array, or one of its `count` sub-dimensions.
        """
        names = self.traced.arrays[place.array].names
        if names is None or ... in names or place.count > 1:
            return ""
        if len(names) != self.rank(place):
            return ""
        name = names[place.dim]
        if isinstance(name, Atomic):
            name = name.target
        if isinstance(name, str):
            return name
        return ""

    def key_words(self) -> None:
        """Names the last dimension of raw PRNG keys `key_words`. No mesh axis shards
        it. `keys` below are the arguments that the step makes keys of.
        """
        keys = raw_keys(self.traced.step.traced.jaxpr.jaxpr)
        for axis in self.unnamed():
            if axis.size not in _KEY_WORDS:
                continue
            if all(self.are_key_words(place, keys) for place in axis.places):
                axis.name = "key_words"

    def are_key_words(self, place: ArgumentDim, keys: frozenset[int]) -> bool:
        """Whether a dimension is the words of PRNG keys: the last one of an array that is
        no part of the model.
        """
        is_last = place.dim == self.rank(place) - 1
        if not is_last or place.array in self.classes.model_arrays:
            return False
        return self.is_raw_key(place, keys)

    def is_raw_key(self, place: ArgumentDim, keys: frozenset[int]) -> bool:
        """Whether an array is the words of PRNG keys: the step makes `keys` of it, or it
        has words of this dtype and the name of a key.
        """
        value = self.tied_program.program.arguments[place.array]
        if self.tied_program.program.values[value].dtype != np.uint32:
            return False
        (path,) = self.paths([place])
        return place.array in keys or bool(_KEY_NAMES.search(path))

    def data(self) -> None:
        """Names the dimensions of the data: `batch` first, then the dimensions of
        images, or a sequence and features. A dimension that a loop iterates over does
        not count, such as the layers of a key-value cache.
        """
        images = self.images()
        for axis in self.unnamed():
            places_in_model = self.classes.in_model(axis)
            data_places = [
                place
                for place in axis.places
                if place.array not in self.classes.model_arrays
            ]
            # Of a model's arrays, data shares dimensions only with tables of positions,
            # or with kernels: the channels. An axis of no array of the model is one of
            # the data, too: `all` of nothing.
            are_positions = all(map(_POSITIONS.search, self.paths(places_in_model)))
            is_of_data = are_positions or images.get(axis) == "channels"
            if not data_places or not is_of_data:
                continue
            if all(map(self.is_first, data_places)):
                axis.name = "batch"
            elif axis in images:
                axis.name = images[axis]
            else:
                axis.name = self.data_name(axis, data_places, images)

    def data_name(
        self,
        axis: LogicalAxis,
        places: Sequence[ArgumentDim],
        images: Mapping[LogicalAxis, str],
    ) -> str:
        """The name "sequence" or "features" for an axis of the data with the dimensions
        `places`; empty if it is neither. The array with the most dimensions decides, by
        the position of the axis among them. `images` are the axes of images.
        """
        most_dims = max(
            places, key=lambda place: (len(self.dims_without_layers(place)), -place.dim)
        )
        dims = self.dims_without_layers(most_dims)
        # A part of a dimension of the data may be scanned as layers are.
        if most_dims.dim not in dims:
            return ""
        position = dims.index(most_dims.dim)
        if position == 0:  # a batch in this array alone
            return ""
        is_batched = self.classes.in_model(axis) and self.is_marked(axis, "batched")
        if is_batched and not self.are_tokens(places):
            return ""  # the heads of a cache, which a table of positions has too
        # The second dimension of two, or one between the first and the last.
        is_inner = position < len(dims) - 1 or len(dims) == 2
        axes = self.classes.axes_of_array(most_dims.array)
        if is_inner and images.keys().isdisjoint(axes):
            return "sequence"
        if len(dims) == 3:
            return "features"
        return ""

    def is_first(self, place: ArgumentDim) -> bool:
        """Whether a dimension is the first one of the data in its array."""
        return self.dims_without_layers(place)[:1] == [place.dim] and place.index == 0

    def are_tokens(self, places: Iterable[ArgumentDim]) -> bool:
        """Whether all arrays with these dimensions hold integers."""
        values = self.tied_program.program.values
        arguments = self.tied_program.program.arguments
        dtypes = {values[arguments[place.array]].dtype for place in places}
        return all(np.issubdtype(dtype, np.integer) for dtype in dtypes)

    def dims_without_layers(self, place: ArgumentDim) -> list[int]:
        """The numbers of all dimensions of the array to which `place` belongs, without
        those of which a sub-dimension is named "layers".
        """
        dims = []
        for dim, roots in enumerate(self.classes.dims[place.array]):
            names = {self.classes.axis_of(root).name for root in roots}
            if "layers" not in names:
                dims.append(dim)
        return dims

    def images(self) -> dict[LogicalAxis, str]:
        """The names of the dimensions along which convolutions run: "channels", and
        "height" or other spatial ones. `tied_program.spatial` has, for each class of a
        spatial dimension, its position among the spatial dimensions and their number.
        """
        classes = self.classes
        names: dict[LogicalAxis, str] = {}
        for root in classes.marked["channels"]:
            if root in classes.of_root:
                names[classes.axis_of(root)] = "channels"
        for root, (position, count) in self.tied_program.spatial.items():
            if root in classes.of_root and count in _SPATIAL:
                names[classes.axis_of(root)] = _SPATIAL[count][position]
        return names

    def looked_up(self) -> None:
        """Names the dimensions of tables from which entries are looked up. The name is
        `vocab` if tokens index them, `classes` if labels do, and `positions` for
        position embeddings.
        """
        tables: list[LogicalAxis] = []
        # The sizes of the tables whose paths or tokens say that they are vocabularies.
        vocabulary_sizes: set[int] = set()
        for axis in self.unnamed("looked_up"):
            paths = self.paths(self.classes.in_model(axis))
            are_positions = any(map(_POSITIONS.search, paths))
            is_named = any(map(_VOCAB.search, paths)) and not are_positions
            is_large = axis.size >= _SMALL_VOCAB and self.is_marked(axis, "tokens")
            if is_named or (paths and is_large):
                vocabulary_sizes.add(axis.size)
            if are_positions:
                axis.name = "positions"
            elif paths:
                tables.append(axis)
        for axis in tables:
            # Logits with the size of a vocabulary are over its tokens.
            axis.name = "vocab" if axis.size in vocabulary_sizes else "classes"

    def heads(self) -> None:
        """Names the batch dimensions of matrix products, and `head_dim`, the dimension
        after heads.

        A batch dimension is `experts` if its arrays' paths say so, or if one operand is
        a weight and nothing shows attention. Otherwise it is `heads`, or `kv_heads` and
        `query_groups` if query heads share keys.
        """
        classes = self.classes
        weight_axes = [
            axis for axis in self.unnamed("batched") if classes.in_model(axis)
        ]
        # Query heads that share keys are a dimension that reshapes split into kv heads,
        # query groups and head widths: the axes of the first, and those behind it.
        split_axes: set[LogicalAxis] = set()
        axes_behind_split: set[LogicalAxis] = set()
        for roots in it.chain.from_iterable(classes.dims):
            kept_roots = roots[: classes.shardable_count(roots)]
            axes = [classes.axis_of(root) for root in kept_roots]
            if len(axes) > 1 and axes[0] in weight_axes:
                split_axes.add(axes[0])
                axes_behind_split.update(axes[1:])

        axes_of_weights = self.batches_of_weights()
        head_axes: set[LogicalAxis] = set()
        # Query groups are batches of no product, or of one without weights.
        for axis in self.unnamed():
            if axis in axes_behind_split and axis not in weight_axes:
                weight_axes.append(axis)
        for axis in weight_axes:
            if axis in axes_behind_split:
                axis.name = "query_groups"
            elif axis in split_axes:
                axis.name = "kv_heads"
            elif self.are_experts(axis, axes_of_weights):
                axis.name = "experts"
                continue
            else:
                axis.name = "heads"
            head_axes.add(axis)
        self.head_widths(head_axes)

    def are_experts(self, axis: LogicalAxis, of_weights: set[LogicalAxis]) -> bool:
        """Whether the batch dimension of a matrix product is that of experts.
        `of_weights` are the batch dimensions of products with weights.
        """
        paths = self.paths(self.classes.in_model(axis))
        if any(map(_EXPERTS.search, paths)):
            return True
        attends = any("att" in path.lower() for path in paths)
        is_split = any(place.count > 1 for place in axis.places)
        return axis in of_weights and not attends and not is_split

    def head_widths(self, head_axes: set[LogicalAxis]) -> None:
        """Names the sub-dimension that follows heads, which is the width of one head.
        `head_axes` are the logical axes of heads.
        """
        for array in range(len(self.classes.dims)):
            axes = self.classes.axes_of_array(array)
            for before, after in it.pairwise(axes):
                if before not in head_axes or after.name:
                    continue
                if self.is_marked(after, "contracted"):
                    after.name = "head_dim"

    def batches_of_weights(self) -> set[LogicalAxis]:
        """The logical axes of the batch dimensions of weights. A weight is an operand
        of a matrix product whose dimensions are all equivalent to dimensions of the
        model. `dims` below has the factors of each dimension in the operation's
        sharding rule.
        """
        tied = self.tied_program
        parameter_roots = self.classes.model_roots
        axes: set[LogicalAxis] = set()
        for operation in tied.program.operations:
            batches = batched(operation)
            if not batches:
                continue
            sides = zip(operation.ins, operation.factors.ins, strict=True)
            for value, dims in sides:
                roots = tied.roots_of(value)
                if len(roots) < 2 or not roots <= parameter_roots:
                    continue
                for roots_of_dim, dim in zip(tied.roots[value], dims, strict=True):
                    if dim[0] in batches:
                        axes.update(map(self.classes.axis_of, roots_of_dim))
        return axes

    def routers(self) -> None:
        """Names the dimension of router scores `experts` if its size is the number of
        experts. The size decides, since no operation shows that the two dimensions
        correspond.
        """
        sizes = {
            axis.size for axis in self.classes.unmerged_axes() if axis.name == "experts"
        }
        for axis in self.unnamed():
            places = self.classes.in_model(axis)
            if not places or axis.size not in sizes:
                continue
            if all(self.rank(place) <= 3 and place.count == 1 for place in places):
                if self.is_router(axis, self.paths(places)):
                    axis.name = "experts"

    def is_router(self, axis: LogicalAxis, paths: Sequence[str]) -> bool:
        """Whether the step chooses along an axis of arrays with these paths, or the
        paths say so. An axis is marked "chosen" if a top-k chooses along it, "looked_up"
        if it is that of a table, and "tokens" if tokens index the table.
        """
        if self.is_marked(axis, "chosen") or any(map(_ROUTERS.search, paths)):
            return True
        is_of_tokens = self.is_marked(axis, "tokens")
        is_named = any(map(_VOCAB.search, paths)) or any(map(_POSITIONS.search, paths))
        is_table = is_of_tokens or is_named
        return self.is_marked(axis, "looked_up") and not is_table

    def width(self) -> None:
        """Names a dimension of a residual stream `embed` if matrix products contract it
        and several arrays of the model have it. A model with several towers has several
        such streams. If tables have a `vocab` dimension, and their other dimensions are
        one logical axis, this is named `embed` too.
        """
        residual_roots = residual(self.tied_program, self.classes.model_roots)
        axes = []
        for axis in self.unnamed("contracted"):
            arrays = {place.array for place in self.classes.in_model(axis)}
            if len(arrays) > 1 and not residual_roots.isdisjoint(axis.roots):
                axes.append(axis)
        beside_vocab: set[LogicalAxis] = set()
        for array in range(len(self.classes.dims)):
            axes_of_array = self.classes.axes_of_array(array)
            names = [axis.name for axis in axes_of_array]
            if len(names) == 2 and "vocab" in names:
                beside_vocab.update(axis for axis in axes_of_array if not axis.name)
        if len(beside_vocab) == 1:
            axes += beside_vocab
        for axis in axes:
            axis.name = "embed"

    def by_path(self) -> None:
        """Names all other axes by the paths of their arrays: those of the model with
        several dimensions, if the axis has any.
        """
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
                short_path = _short(paths[0], self.traced.words)
                axis.name = f"{short_path}_{places[0].dim}"

    def is_between_widths(self, axis: LogicalAxis) -> bool:
        """Whether a logical axis, such as `mlp`, is the inner dimension of a block:
        matrix products contract it, and it is at several positions in arrays that have
        `embed`.
        """
        dims_beside_embed: set[int] = set()
        for place in self.classes.in_model(axis) or axis.places:
            names = [other.name for other in self.classes.axes_of_array(place.array)]
            if place.count == 1 and "embed" in names:
                dims_beside_embed.add(place.dim)
        return len(dims_beside_embed) > 1 and self.is_marked(axis, "contracted")


def _short(path: str, words: tuple[str, ...]) -> str:
    """An identifier made of the last part of a path, or of the last two if the last is a
    number. Parts that are common, such as `weight`, or in `words`, the names of the
    step's arguments, are skipped.
    """
    all_parts = path.split("/")
    parts = [part for part in all_parts if part not in _DULL and part not in words]
    if not parts:
        parts = all_parts
    count = 2 if parts[-1].isdecimal() else 1
    last_parts = "_".join(parts[-count:])
    name = re.sub(r"\W+", "_", last_parts).strip("_")
    if name and not name[0].isdigit():
        return name
    return f"a{name}"

"""`TreeLayout`: the path of each kind of weight in a tree, and the names and order of
its axes.
"""

import dataclasses
from collections.abc import Iterable, Mapping

from ..._convert import NamedSizes, TreeMap, with_sizes
from ..._ground.errors import MapError
from ..._ground.text import quoted
from ..._rules import near
from ._between import between
from ._entries import Entry, Fused, Scaled, Weight, weights_of
from ._reading import Sizes


@dataclasses.dataclass(frozen=True, init=False)
class TreeLayout:
    """The layout of a weight tree: the path of each kind of weight, and the names of
    its axes in order.

    From two layouts of one model follows the map between them, `one.to(other)`. The
    names of the axes determine which arrays the map transposes, splits into heads,
    stacks, fuses, repeats or pads. A layout has no shardings.

    **Arguments:**

    - `weights`: a mapping from the path of an array to its kind and axes:
      `"query: layers embed (heads dim)"`.
        - Axes in parentheses form one dimension, major to minor.
        - If each entry of an axis is an array of its own, the axis is in braces in the
          path and not in the text: `model.layers.{layers}.self_attn.q_proj.weight`. The
          braces may add a number: `{layers+3}`.
        - With `layers[:3]` or `layers[3:]` an array has some entries of an axis, with
          `layers[0::2]` or `layers[1::2]` every other entry. With `layers[3]` it has
          one entry, and `layers` is no dimension of it.
        - Along an axis that only the target's layout has, entries are repeated. Of an
          axis that only the source's layout has, the first entry is read.
        - See also [`shardfx.presets.maps.Fused`][] and
          [`shardfx.presets.maps.Scaled`][].
    - `sizes`: a mapping from an axis to its size. A map needs the sizes of all axes in
      parentheses except the first, of repeated axes, and of axes whose size differs
      between two layouts, such as a padded vocabulary.
    - `rest`: the paths of further leaves that a tree of this layout may have and that
      no map uses.
    - `known`: the sizes of further axes that arrays must have. `sizes` wins, so that
      `with_sizes` changes them too.
    - `apart`: the sub-axes of axes that this layout splits, such as
      `{"dim": "two half"}`. A map then treats `dim` of the other layout as `two half`,
      so that this layout may have `two` and `half` in another order.

    !!! Example

        ```python
        from shardfx.presets.maps import TreeLayout

        query = {"model.layers.{layers}.q.weight": "query: (heads dim) embed"}
        theirs = TreeLayout(query, sizes={"dim": 64})
        mine = TreeLayout({"blocks/q": "query: layers embed heads dim"})
        print(theirs.to(mine))
        ```
    """

    __module__ = "shardfx.presets.maps"

    weights: tuple[tuple[str, Entry], ...]
    sizes: tuple[tuple[str, int], ...]
    rest: tuple[str, ...]
    apart: tuple[tuple[str, str], ...]
    known: tuple[tuple[str, int], ...]

    def __init__(
        self,
        weights: Mapping[str, Entry],
        *,
        sizes: Mapping[str, int] | None = None,
        rest: Iterable[str] = (),
        apart: Mapping[str, str] | None = None,
        known: Mapping[str, int] | None = None,
    ):
        """Sets the fields, whose meaning the class documents, from mappings and
        iterables.
        """
        fields = {
            "weights": dict(weights).items(),
            "sizes": dict(sizes or {}).items(),
            "apart": dict(apart or {}).items(),
            "known": dict(known or {}).items(),
            "rest": rest,
        }
        # The class is frozen. Its fields are tuples, so that it can be hashed.
        for name, value in fields.items():
            object.__setattr__(self, name, tuple(value))
        # Raises for an entry that cannot be read.
        for path, entry in self.weights:
            weights_of(path, entry)

    @property
    def _arrays(self) -> list[Weight]:
        """The arrays of the layout, one for each kind of weight in them."""
        arrays: list[Weight] = []
        for path, entry in self.weights:
            arrays += weights_of(path, entry)
        return arrays

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of weights in the layout, such as "query", each once."""
        return tuple(dict.fromkeys(array.kind for array in self._arrays))

    @property
    def _axes(self) -> list[str]:
        """The names of all axes of which the layout may have the size, each once."""
        axes = [name for name, _ in (*self.sizes, *self.known)]
        for array in self._arrays:
            axes += (*array.axes, *array.in_path)
            if array.range is not None:
                axes.append(array.range.axis)
            if array.kind.startswith("expert_"):
                axes.append("expert_hidden")
        for _, parts in self.apart:
            axes += parts.split()
        return list(dict.fromkeys(axes))

    def with_paths(self, paths: Mapping[str, str]) -> "TreeLayout":
        """Returns the layout with some paths replaced: `{"layers/query": "blocks/wq"}`.
        Other paths do not change.
        """
        entries = dict(self.weights)
        for path in paths:
            if path not in entries:
                raise MapError(
                    f"the layout has no {quoted(path)}; it has {', '.join(entries)}."
                )
        moved = {paths.get(path, path): entry for path, entry in self.weights}
        return dataclasses.replace(self, weights=moved)

    def without(self, *kinds: str) -> "TreeLayout":
        """Returns the layout without some kinds of weights, such as "pooler". A tree
        may still have them, and maps then ignore them.
        """
        unknown = [kind for kind in kinds if kind not in self.kinds]
        if unknown:
            raise MapError(
                f"the layout has no kind {quoted(unknown[0])}; it has"
                f" {', '.join(self.kinds)}."
            )
        weights: dict[str, Entry] = {}
        rest = list(self.rest)
        for path, entry in self.weights:
            kinds_of_array = {weight.kind for weight in weights_of(path, entry)}
            remaining = kinds_of_array - {*kinds}
            if not remaining:
                rest.append(path)
                continue
            if len(remaining) < len(weights_of(path, entry)):
                raise MapError(
                    f"{quoted(path)} has other kinds beside; leave out all of them, or"
                    " none."
                )
            weights[path] = entry
        return dataclasses.replace(self, weights=weights, rest=rest)

    def with_sizes(self, **sizes: int) -> "TreeLayout":
        """Returns the layout with other sizes: `with_sizes(vocab=50304)` for a tree
        with a padded vocabulary. Raises `MapError` for an axis that the layout lacks.
        """
        axes = self._axes
        for axis in sizes:
            if axis not in axes:
                raise MapError(
                    f"the layout has no axis {quoted(axis)}{near(axis, axes)}; it has"
                    f" {', '.join(axes)}."
                )
        return dataclasses.replace(self, sizes={**dict(self.sizes), **sizes})

    def to(
        self,
        other: "TreeLayout",
        *,
        drop: Iterable[str] = (),
        casts: bool = False,
    ) -> TreeMap:
        """Returns the map that makes a tree of the other layout from a tree of this
        layout.

        **Arguments:**

        - `other`: the layout of the target.
        - `drop`: kinds of weights of this layout, such as "query", that the target
          lacks.
        - `casts`: whether leaves are cast to the dtypes of the target, as for a
          [`shardfx.TreeMap`][].

        **Returns:**

        A TreeMap with a rule for each array of the target.

        **Raises:**

        `MapError` for kinds that only one layout has, and for a needed size that is
        unknown.
        """
        if not isinstance(other, TreeLayout):
            raise MapError(
                f"`to` takes the layout of the target, not {type(other).__name__}; write"
                " `maps.hugging_face(config).to(maps.stacked(config))`."
            )
        source_arrays = self._arrays
        dropped = (drop,) if isinstance(drop, str) else tuple(drop)
        # The sub-axes of axes that one of the layouts splits.
        apart = {}
        for axis, parts in (*self.apart, *other.apart):
            apart[axis] = tuple(parts.split())
        sizes = Sizes(source=dict(self.sizes), target=dict(other.sizes), apart=apart)
        rules = between(source_arrays, other.weights, sizes, dropped)
        unused: dict[str, None] = {}
        for array in source_arrays:
            if array.kind in dropped and array.kind not in other.kinds:
                unused[array.path] = None
        tree_map = TreeMap(rules, drop=unused, rest=self.rest, casts=casts)
        return with_sizes(tree_map, named_sizes(self), named_sizes(other))

    def __str__(self) -> str:
        width = max((len(path) for path, _ in self.weights), default=0)
        sizes = "".join(f", {name}={size}" for name, size in self.sizes)
        lines = [f"{len(self.weights)} arrays{sizes}"]
        lines += [f"  {path:<{width}}  {entry}" for path, entry in self.weights]
        lines += [f"  {path:<{width}}  (not used)" for path in self.rest]
        return "\n".join(lines)


def named_sizes(layout: TreeLayout) -> list[NamedSizes]:
    """The path, shape and axes of each array of a layout, as far as its sizes say the
    shape; a dimension of unknown size has `None`.
    """
    sizes = {**dict(layout.known), **dict(layout.sizes)}
    arrays = []
    for path, entry in layout.weights:
        if isinstance(entry, Scaled):
            # Blocks of numbers and their scales have sizes of their own.
            continue
        # The weights that are concatenated in the array, such as query, key and value.
        weights = weights_of(path, entry)
        shapes = [_dim_sizes(weight, sizes) for weight in weights]
        shape = [*shapes[0]]
        if isinstance(entry, Fused):
            shape[entry.dim] = _sum_of_known(
                shape_of_part[entry.dim] for shape_of_part in shapes
            )
        first = weights[0]
        # How many arrays there are along each axis in the path.
        counts = []
        if first.range is None:
            counts = [(name, sizes[name]) for name in first.in_path if name in sizes]
        axes = []
        for group in first.dims:
            axes.append(" ".join(_sized_as(axis, first, sizes) for axis in group))
        named = NamedSizes(
            path=path,
            sizes=tuple(shape),
            axes=tuple(axes),
            counts=tuple(counts),
        )
        arrays.append(named)
    return arrays


def _sum_of_known(sizes: Iterable[int | None]) -> int | None:
    """The sum of sizes; `None` if one of them is not known."""
    total = 0
    for size in sizes:
        if size is None:
            return None
        total += size
    return total


def _dim_sizes(weight: Weight, sizes: Mapping[str, int]) -> list[int | None]:
    """The size of each dimension of the array `weight`; `None` where the size of one of
    its axes is unknown. `sizes` has the sizes of the layout's axes.
    """
    dim_sizes: list[int | None] = []
    for group in weight.dims:
        size: int | None = 1
        for axis in group:
            axis_size = sizes.get(_sized_as(axis, weight, sizes))
            if weight.range is not None and weight.range.axis == axis:
                axis_size = weight.range.entries(axis_size)
            size = None if size is None or axis_size is None else size * axis_size
        dim_sizes.append(size)
    return dim_sizes


def _sized_as(axis: str, weight: Weight, sizes: Mapping[str, int]) -> str:
    """The axis whose size is that of `axis` in the array `weight`: the hidden units of
    experts are others than those of dense layers.
    """
    is_expert = axis == "hidden" and weight.kind.startswith("expert_")
    if is_expert and "expert_hidden" in sizes:
        return "expert_hidden"
    return axis

"""The layout of a tree's weights as a value: the path of each kind of weight, and the order of its axes."""

import dataclasses
from collections.abc import Iterable, Mapping

from ..._convert import TreeMap
from ..._ground.errors import MapError
from ..._ground.text import quoted
from ._between import Sizes, between
from ._places import Entry, places_of


@dataclasses.dataclass(frozen=True, init=False)
class TreeLayout:
    """The layout of a tree's weights: one line per kind of weight, with its axes by name.

    Two layouts of one model make the map between them, `one.to(other)`: what is turned, split into heads, stacked,
    fused, repeated or padded follows from the names of the axes. Nothing is said about shardings.

    **Arguments:**

    - `weights`: a dict from the path of an array to its kind and axes: `"query: layers embed (heads dim)"`. Axes in
        parentheses are fused in one dimension, the outermost first. An axis with a separate array for each entry is in
        braces in the path, as in `model.layers.{layers}.self_attn.q_proj.weight`, and not in the text. There it may be
        computed with: `{layers+3}`. With `layers[:3]` and `layers[3:]` two arrays have a range each, with
        `layers[0::2]` and `layers[1::2]` every other entry; an array with `layers[3]` has one entry, and not the axis.
        An axis that only one of two layouts has is a repetition. See also [`shardfx.presets.maps.Fused`][] and
        [`shardfx.presets.maps.Scaled`][].
    - `sizes`: the sizes of axes that must be known: of all in parentheses but the first, of repetitions, and where two
        layouts differ, as in a vocabulary that one of them pads.
    - `rest`: paths of leaves that a tree of this layout may have too, and that no map uses.
    - `apart`: axes that this layout takes apart, `{"dim": "two half"}`. Where the other layout has `dim` it then has
        `two half`, so that here they may be in another order.

    !!! Example

        ```python
        from shardfx.presets.maps import TreeLayout

        theirs = TreeLayout(
            {
                "model.embed.weight": "embedding: vocab embed",
                "model.layers.{layers}.q.weight": "query: (heads dim) embed",
            },
            sizes={"dim": 64},
        )
        mine = TreeLayout(
            {"embed": "embedding: vocab embed", "blocks/q": "query: layers embed heads dim"}
        )
        print(theirs.to(mine))
        ```
    """

    weights: tuple[tuple[str, Entry], ...]
    sizes: tuple[tuple[str, int], ...]
    rest: tuple[str, ...]
    apart: tuple[tuple[str, str], ...]

    def __init__(
        self,
        weights: Mapping[str, Entry],
        *,
        sizes: Mapping[str, int] | None = None,
        rest: Iterable[str] = (),
        apart: Mapping[str, str] | None = None,
    ):
        rows = (("weights", weights), ("sizes", sizes or {}), ("apart", apart or {}))
        for name, value in (*[(name, given.items()) for name, given in rows], ("rest", rest)):
            object.__setattr__(self, name, tuple(value))
        for path, entry in self.weights:
            places_of(path, entry)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of weights, each once."""
        return tuple(dict.fromkeys(place.kind for path, entry in self.weights for place in places_of(path, entry)))

    def with_paths(self, paths: Mapping[str, str]) -> "TreeLayout":
        """The same layout with other paths: `{"layers/query": "blocks/wq"}`. Paths that are not named stay."""
        known = dict(self.weights)
        for path in paths:
            if path not in known:
                raise MapError(f"the layout has no {quoted(path)}; it has {', '.join(known)}.")
        moved = {paths.get(path, path): entry for path, entry in self.weights}
        return TreeLayout(moved, sizes=dict(self.sizes), rest=self.rest, apart=dict(self.apart))

    def without(self, *kinds: str) -> "TreeLayout":
        """The layout without some kinds of weights. A tree may still have them, and no map uses them."""
        unknown = [kind for kind in kinds if kind not in self.kinds]
        if unknown:
            raise MapError(f"the layout has no kind {quoted(unknown[0])}; it has {', '.join(self.kinds)}.")
        left = {path: {place.kind for place in places_of(path, entry)} - {*kinds} for path, entry in self.weights}
        kept = {path: entry for path, entry in self.weights if left[path]}
        mixed = [path for path, entry in kept.items() if len(left[path]) < len(places_of(path, entry))]
        if mixed:
            raise MapError(f"{quoted(mixed[0])} has other kinds beside; leave out all of them, or none.")
        rest = (*self.rest, *[path for path, _ in self.weights if path not in kept])
        return TreeLayout(kept, sizes=dict(self.sizes), rest=rest, apart=dict(self.apart))

    def with_sizes(self, **sizes: int) -> "TreeLayout":
        """The same layout with other sizes: `with_sizes(vocab=50304)` for a tree whose vocabulary is padded to that."""
        known = {**dict(self.sizes), **sizes}
        return TreeLayout(dict(self.weights), sizes=known, rest=self.rest, apart=dict(self.apart))

    def to(self, other: "TreeLayout", *, drop: Iterable[str] = (), casts: bool = False) -> TreeMap:
        """The map from trees of this layout to trees of another layout.

        **Arguments:**

        - `other`: the layout of the target.
        - `drop`: kinds of weights that the target does not have.
        - `casts`: as of a [`shardfx.TreeMap`][].

        **Returns:**

        A TreeMap with a line for each array of the target, to be used, printed, or changed.

        **Raises:**

        `MapError` for kinds that only one of them has, and for axes of which no size is known.
        """
        places = [place for path, entry in self.weights for place in places_of(path, entry)]
        dropped = (drop,) if isinstance(drop, str) else tuple(drop)
        apart = {axis: tuple(parts.split()) for axis, parts in (*self.apart, *other.apart)}
        sizes = Sizes(dict(self.sizes), dict(other.sizes), apart)
        rules = between(places, other.weights, sizes, dropped)
        unused = [place.path for place in places if place.kind in dropped and place.kind not in other.kinds]
        return TreeMap(rules, drop=dict.fromkeys(unused), rest=self.rest, casts=casts)

    def __str__(self) -> str:
        wide = max((len(path) for path, _ in self.weights), default=0)
        sizes = "".join(f", {name}={size}" for name, size in self.sizes)
        rows = [f"  {path:<{wide}}  {entry}" for path, entry in self.weights]
        return "\n".join(
            [f"{len(self.weights)} arrays{sizes}", *rows, *[f"  {path:<{wide}}  (not used)" for path in self.rest]]
        )

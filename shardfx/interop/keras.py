"""Keras's `LayoutMap` as PathRules. Keras is not needed, since any mapping from regexes
to axes works.
"""

import dataclasses
import re
from collections.abc import Mapping

from jax.sharding import PartitionSpec

from .._ground.errors import RuleError
from .._rules import PathRules, optional, replicate
from ._mappings import check_mapping


# A mesh axis or `None` per dimension.
Axes = tuple[str | None, ...]


@dataclasses.dataclass(frozen=True)
class KerasLayout:
    """The target of a path rule: the mesh axes that a LayoutMap has for a key. A path
    may match only one key of the map.

    **Arguments:**

    - `key`: the regex in the map, which matches whole paths.
    - `axes`: for each dimension a mesh axis, or `None`.
    - `others`: the other keys of the map. A path that also matches one of them is an
      error.
    """

    key: str
    axes: Axes
    others: tuple[str, ...] = ()

    def __call__(self, path: str, leaf: object) -> PartitionSpec:
        """Returns the spec of the array at `path`. Raises `RuleError` if the path also
        matches another key of the map.
        """
        if path != self.key:
            also = [other for other in self.others if re.fullmatch(other, path)]
            if also:
                raise RuleError(
                    f"the path {path!r} matches {[self.key, *also]}, and in a LayoutMap"
                    " it may match one key only; make them more specific."
                )
        return PartitionSpec(*self.axes)


def rules_of(layout_map: Mapping[str, object]) -> PathRules:
    """PathRules that give each variable the layout of `LayoutMap[variable.path]`.

    The layout is that of the key that equals the path, or else of the only key that
    matches the whole path (`re.fullmatch`). As in Keras, a path that two keys match is
    an error, and a path without a match is replicated.

    **Arguments:**

    - `layout_map`: a `keras.distribution.LayoutMap`, or a mapping from regexes to
      tuples of mesh axes and `None`.

    **Returns:**

    [`shardfx.PathRules`][] with an optional rule for each key, and a last rule that
    replicates all other arrays.

    **Raises:**

    `RuleError` for axes that are not a tuple of names and `None`. Planning with the
    rules raises it for a path that two keys match.

    !!! Example

        ```python
        import jax.numpy as jnp
        from jax.sharding import PartitionSpec as P
        from shardfx import MeshSpec, plan
        from shardfx.interop import keras

        rules = keras.rules_of({".*dense.*kernel": (None, "model")})
        tree = {"dense_1": {"kernel": jnp.ones((8, 8)), "bias": jnp.ones(8)}}
        made = plan(tree, MeshSpec({"model": 4}), paths=rules)
        assert made["dense_1/kernel"].spec == P(None, "model")
        assert made["dense_1/bias"].spec == P()
        ```
    """
    check_mapping("layout_map", layout_map, 'rules_of({".*kernel": (None, "model")})')
    axes = {key: _axes(key, layout) for key, layout in layout_map.items()}
    exact = []
    matched = []
    for key, value in axes.items():
        layout_of_path = KerasLayout(key, value)
        exact.append((rf"\A{re.escape(key)}\Z", optional(layout_of_path)))
        layout_of_matches = KerasLayout(
            key=key,
            axes=value,
            others=tuple(other for other in axes if other != key),
        )
        matched.append((rf"\A{_grouped(key)}\Z", optional(layout_of_matches)))
    return PathRules([*exact, *matched, (".*", replicate)])


def _grouped(key: str) -> str:
    """A regex `key` as a group of a larger regex. Flags at the start of the key, such
    as `(?i)`, apply only to the group.
    """
    flags = re.match(r"\(\?([aiLmsux]+)\)", key)
    if flags is None:
        return f"(?:{key})"
    text = key[flags.end() :]
    if "x" in flags[1]:
        # A comment ends with its line.
        text += "\n"
    return f"(?{flags[1]}:{text})"


def _axes(key: str, layout: object) -> Axes:
    """The mesh axes in the layout of a key of a LayoutMap, as a tuple. Raises
    `RuleError` for anything else.
    """
    axes = getattr(layout, "axes", layout)
    if not isinstance(axes, tuple | list) or not all(
        axis is None or isinstance(axis, str) for axis in axes
    ):
        raise RuleError(
            f"the layout of {key!r} is {layout!r:.80}; it must be a tuple of mesh axes"
            " and `None`."
        )
    return tuple(axes)

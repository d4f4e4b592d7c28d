"""`TreeMap`, an immutable map from the leaves of one tree to the leaves of another."""

import dataclasses
import functools as ft
import hashlib
import itertools as it
import json
from collections.abc import Iterable, Mapping
from typing import Any

from jaxtyping import PyTree

from .._ground.errors import MapError
from .._ground.misuse import called
from .._ground.text import first_lines, html_text
from .apply import apply_steps
from .expression import From, NamedSizes, Rules, from_data, leaves_of, to_data
from .patterns import pattern
from .pieces import Made, Struct
from .routes import NO_NUMBERS, NumberCopies, bound_with


_VERSION = 1


@dataclasses.dataclass(frozen=True, init=False)
class TreeMap:
    """A map that makes each leaf of one tree, the target, from leaves of another tree,
    the source.

    `load`, `save` and `reshard` take it. A map has one rule per kind of weight. A
    placeholder such as `{i}` in a target's path matches a part of the path, and has the
    same value in the paths of the source. A map does not contain shardings. Maps can be
    hashed, compared, printed as they were written, and stored as JSON.

    **Arguments:**

    - `rules`: a dict from a path of the target, such as `layers/{i}/mlp/up`, to the
      expression that makes the leaf: a [`shardfx.From`][], or the path of a leaf that
      is copied unchanged. `{name}` matches text without `/` and `.`; `{name*}` matches
      any text.
    - `drop`: paths of leaves of the source that are not used, with placeholders. A leaf
      of the source that is neither used nor dropped is an error, and so is a dropped
      path that the source lacks.
    - `rest`: paths of leaves that are not used, and that the source need not have.
    - `casts`: whether leaves are cast to the dtypes of the target. Otherwise a
      different dtype is an error.

    !!! Example

        ```python
        import numpy as np
        from shardfx import From, TreeMap

        hf = TreeMap(
            {
                "embed": "model.embed_tokens.weight",
                "layers/up": From("model.layers.{i}.mlp.up_proj.weight").T.stack("i"),
            }
        )
        files = {"model.embed_tokens.weight": np.ones((8, 4), np.float32)}
        for i in range(3):
            files[f"model.layers.{i}.mlp.up_proj.weight"] = np.full((6, 4), i, np.float32)
        tree = hf.apply(files)
        assert tree["layers/up"].shape == (3, 4, 6)
        again = hf.inverse().apply(tree, like=files)
        assert all((again[path] == files[path]).all() for path in files)
        ```
    """

    __module__ = "shardfx"

    steps: tuple[Rules, ...]

    @called("TreeMap({'w': 'model.w'})")
    def __init__(
        self,
        rules: Mapping[str, "From | str"],
        *,
        drop: Iterable[str] = (),
        rest: Iterable[str] = (),
        casts: bool = False,
    ):
        if not isinstance(rules, Mapping):
            raise MapError(
                f"`TreeMap` takes a mapping of targets to sources, not {rules!r:.80};"
                ' write `TreeMap({"w": "model.w"})`.'
            )
        expressions = []
        for path, rule in rules.items():
            expression = From(rule) if isinstance(rule, str) else rule
            if not isinstance(path, str) or not isinstance(expression, From):
                raise MapError(
                    "a rule maps the path of a target to a `From` or to a path, not"
                    f" {path!r:.80} to {rule!r:.80}."
                )
            # Raises for a path that is no pattern.
            for text in (path, *leaves_of(expression)):
                pattern(text)
            expressions.append((path, expression))
        # The source must have what is dropped, and may have `rest`.
        step = Rules(
            rules=tuple(expressions),
            drop=_patterns(drop),
            rest=_patterns(rest),
            casts=bool(casts),
        )
        object.__setattr__(self, "steps", (step,))

    @ft.cached_property
    def digest(self) -> str:
        """A checksum of the map. Equal maps have equal checksums on every process."""
        return hashlib.sha256(
            self.to_json().encode("utf-8", "surrogatepass")
        ).hexdigest()

    @ft.cached_property
    def _hash(self) -> int:
        return hash(self.steps)

    def __hash__(self) -> int:
        # A map of many rules is looked up in each step of a training run. The fields
        # of 1,000 rules are hashed in 0.3 ms; to write them as JSON takes 20 ms.
        return self._hash

    def __getstate__(self) -> dict[str, Any]:
        # The hash of text differs between processes.
        return {"steps": self.steps}

    @property
    def rules(self) -> dict[str, From]:
        """The rules as they were written: a new dict from a path of the target to its
        expression.

        `TreeMap({**map.rules, "head": From("embed").T}, drop=map.drop)` is the map with
        one rule replaced. Raises `MapError` for an inverse map, and for one that `then`
        made.
        """
        return dict(self._one_step().rules)

    @property
    def drop(self) -> tuple[str, ...]:
        """The paths of leaves of the source that the map leaves out on purpose. The
        source must have them.

        Raises `MapError` for an inverse map, and for one that `then` made.
        """
        return self._one_step().drop

    @property
    def rest(self) -> tuple[str, ...]:
        """The paths of leaves that the map does not use. The source need not have them.

        Raises `MapError` for an inverse map, and for one that `then` made.
        """
        return self._one_step().rest

    def _one_step(self) -> Rules:
        """The rules of a map of one step as they were written. Raises `MapError` for an
        inverse map, and for one of several steps.
        """
        first, *others = self.steps
        if others:
            what = f"is {len(self.steps)} maps, one after the other"
        elif first.inverted:
            what = "is inverted"
        else:
            return first
        raise MapError(
            f"this map {what}, and has no rules of its own; take those of the maps"
            " that it is made of."
        )

    def inverse(self) -> "TreeMap":
        """The inverse map, from this map's target to its source.

        The inverse map keeps the first of repeated values, removes padding, and casts
        back to the dtypes of the source. A leaf has no inverse if this map slices it
        without keeping the rest, or scales it. Applying the inverse map then raises
        `MapError`.
        """
        steps = []
        for step in reversed(self.steps):
            turned = dataclasses.replace(step, inverted=not step.inverted)
            steps.append(turned)
        return map_of_steps(steps)

    def then(self, other: "TreeMap") -> "TreeMap":
        """This map followed by another one, as one map without intermediate arrays."""
        if not isinstance(other, TreeMap):
            raise MapError(f"`then` takes a TreeMap, not {other!r:.80}.")
        return map_of_steps([*self.steps, *other.steps])

    def apply(self, tree: object, like: object = None) -> PyTree:
        """Makes the target from the whole arrays of the source, in JAX if any is a JAX
        array or traced, else in NumPy.

        `load`, `save` and `reshard` give bitwise the same arrays. Use
        [`shardfx.reshard`][] for large sharded trees.

        **Arguments:**

        - `tree`: the source.
        - `like`: a tree with the structure, shapes and dtypes of the target. Without
          it, the target's paths and shapes are inferred from the source.

        **Returns:**

        A tree with the structure of `like`; without `like`, a dict from paths to
        arrays.

        **Raises:**

        `MapError` with all leaves that the map does not fit.
        """
        return apply_steps(self.steps, tree, like)

    def to_json(self) -> str:
        """The map as a JSON text, for `TreeMap.from_json`."""
        steps = [_step_data(step) for step in self.steps]
        return json.dumps({"version": _VERSION, "steps": steps}, indent=1)

    @staticmethod
    def from_json(text: str) -> "TreeMap":
        """The map from the JSON text of `to_json`.

        **Raises:**

        `MapError` for any other text.
        """
        try:
            data = json.loads(text)
            version = data["version"]
            if version != _VERSION or isinstance(version, bool):
                raise MapError(
                    f"a TreeMap of version {version!r:.20}; this reads version"
                    f" {_VERSION}."
                )
            steps = [_step_of(step) for step in data["steps"]]
        except MapError:
            raise
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise MapError(
                f"this is no TreeMap's JSON ({type(error).__name__}: {error}); write it"
                " with `TreeMap.to_json`."
            ) from error
        if not steps:
            raise MapError(
                "a TreeMap without a step; write maps with `TreeMap.to_json`."
            )
        return map_of_steps(steps)

    def __str__(self) -> str:
        return "\n".join(it.chain.from_iterable(map(_lines, self.steps)))

    __repr__ = first_lines
    _repr_html_ = html_text


def check_map(value: object) -> None:
    """Raises `MapError` unless the argument `map` of a function is a TreeMap or `None`."""
    if value is not None and not isinstance(value, TreeMap):
        raise MapError(
            f"`map` is a TreeMap, not {type(value).__name__}; write"
            ' `map=TreeMap({"w": "model.w"})`.'
        )


def _patterns(texts: str | Iterable[str]) -> tuple[str, ...]:
    """One path pattern or several as a tuple. Raises `MapError` for anything else."""
    if not isinstance(texts, Iterable):
        raise MapError(
            f"`drop` and `rest` take paths, not {texts!r:.80}; write `drop=[path]`."
        )
    patterns = (texts,) if isinstance(texts, str) else tuple(texts)
    for text in patterns:
        if not isinstance(text, str):
            raise MapError(f"`drop` and `rest` take paths, and {text!r:.80} is none.")
        pattern(text)
    return patterns


def _step_data(step: Rules) -> dict[str, Any]:
    """A step of a map, for the map's JSON."""
    return {
        "rules": [[path, to_data(expression)] for path, expression in step.rules],
        "drop": list(step.drop),
        "rest": list(step.rest),
        "casts": step.casts,
        "inverted": step.inverted,
        **_sizes_data(step),
    }


_TYPE_BY_FIELD = {
    "rules": list,
    "drop": list,
    "rest": list,
    "casts": bool,
    "inverted": bool,
}
_OPTIONS = ("drop", "rest", "casts")


def _step_of(data: Any) -> Rules:
    """A step of a map, from its part of the map's JSON. The arguments of `TreeMap` that
    have a default may be missing: `drop`, `rest` and `casts`.
    """
    if not isinstance(data, dict):
        raise TypeError(f"a step is {data!r:.80}")
    for name, field_type in _TYPE_BY_FIELD.items():
        if name not in data and name in _OPTIONS:
            continue
        if not isinstance(data[name], field_type):
            raise TypeError(f"`{name}` is {data[name]!r:.80}")
    rules = {}
    for path, expression in data["rules"]:
        rules[path] = from_data(expression)
    if len(rules) != len(data["rules"]):
        raise ValueError("two rules make the same leaf")
    options = {name: data[name] for name in _OPTIONS if name in data}
    sizes = {}
    for name in _SIZES:
        sizes[name] = _named_sizes_from_json(data.get(name, []))
    (step,) = TreeMap(rules, **options).steps
    return dataclasses.replace(step, inverted=data["inverted"], **sizes)


_SIZES = ("source_sizes", "target_sizes")


def _sizes_data(step: Rules) -> dict[str, Any]:
    """The shapes that a step demands, for JSON. They are left out if there are none."""
    pairs = {"source_sizes": step.source_sizes, "target_sizes": step.target_sizes}
    return {name: list(map(list, rows)) for name, rows in pairs.items() if rows}


def _named_sizes_from_json(rows: Any) -> tuple[NamedSizes, ...]:
    """The sizes that `_sizes_data` wrote: rows of a path, its sizes, its axes, and
    pairs of a placeholder and its count.
    """
    every_size = []
    for path, sizes, axes, counts in rows:
        pattern(path)
        named = NamedSizes(
            path=path,
            sizes=tuple(sizes),
            axes=tuple(axes),
            counts=tuple((str(name), int(count)) for name, count in counts),
        )
        numbers = [size for size in named.sizes if size is not None]
        if not all(type(size) is int and size >= 0 for size in numbers):
            raise ValueError(f"the sizes of `{path}` are {named.sizes}")
        if not all(isinstance(axis, str) for axis in named.axes):
            raise ValueError(f"the axes of `{path}` are {named.axes}")
        if len(named.sizes) != len(named.axes):
            raise ValueError(
                f"`{path}` has {len(named.sizes)} sizes and {len(named.axes)} axes"
            )
        every_size.append(named)
    return tuple(every_size)


def with_sizes(
    map: TreeMap,
    source: Iterable[NamedSizes],
    target: Iterable[NamedSizes],
) -> TreeMap:
    """A map of one step that also demands these shapes of both trees."""
    (step,) = map.steps
    sizes = {"source_sizes": tuple(source), "target_sizes": tuple(target)}
    return map_of_steps([dataclasses.replace(step, **sizes)])


def bound(
    map: TreeMap,
    source: Mapping[str, Struct],
    target: Mapping[str, Struct] | None = None,
    numbers: NumberCopies = NO_NUMBERS,
) -> Mapping[str, Made]:
    """The leaves that a map makes, from the shapes and dtypes of both trees by path, in
    the target's order.

    Without a target, its leaves are inferred from the source. Rules may also name the
    Python numbers of the source, `numbers`, which are not in the result. Raises
    `MapError` with all leaves that have no rule or several rules, with all leaves of
    the wrong shape, and for an array that would be made of a number.
    """
    check_map(map)
    return bound_with(numbers, map.steps, source, target)


def map_of_steps(steps: Iterable[Rules]) -> TreeMap:
    """The map that applies `steps` one after the other, the first to the map's source."""
    tree_map = object.__new__(TreeMap)
    object.__setattr__(tree_map, "steps", tuple(steps))
    return tree_map


def without_rest(map: TreeMap) -> TreeMap:
    """The map that leaves out each leaf of the source that `map` does not use."""
    first, *others = map.steps
    open_ended = dataclasses.replace(first, rest=(*first.rest, "{rest*}"))
    return map_of_steps([open_ended, *others])


def _lines(step: Rules) -> Iterable[str]:
    """Yields the lines of a step as `print` shows them: the number of rules, one line
    for each rule, and one for each pattern of `drop` and `rest`.
    """
    arrow = "->" if step.inverted else "<-"
    direction = ", backwards" if step.inverted else ""
    widths = (len(path) for path, _ in step.rules)
    width = max(widths, default=0)
    yield f"{len(step.rules)} rules{direction}"
    for path, expression in step.rules:
        yield f"  {path:<{width}} {arrow} {expression}"
    for path in step.drop:
        yield f"  {'(dropped)':<{width}} {arrow} {path}"
    for path in step.rest:
        yield f"  {'(rest)':<{width}} {arrow} {path}"

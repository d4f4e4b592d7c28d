"""Logical names for the dimensions of any step's arguments, derived from the step's
operations and the arrays' paths.

Dimensions that must be sharded alike are a logical axis, and get one name.
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
from jaxtyping import PyTree

from .._ground.misuse import called
from .._ground.text import between_numbers, first_lines, html_text, joined, table
from .._step import explicit_mesh, lines_of, own_line, untraced, without_mesh
from ._asked import trace, without_shardings
from ._classes import Classes, LogicalAxis
from ._namer import named_classes


# How many places and operations of an axis a table shows.
_MOST_LISTED = 4


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

    def __contains__(self, name: object) -> bool:
        return any(axis.name == name for axis in self.axes)

    if not TYPE_CHECKING:
        # Without this, `__getitem__` would make it iterable by numbers. The axes are in
        # `axes`, and there are names for each argument in `names`.
        __iter__ = None

    def __str__(self) -> str:
        rows = [("axis", "size", "where", "tied by")]
        for axis in self.axes:
            joins = [f"{operation} {line}" for operation, line in axis.joins]
            row = (
                axis.name,
                str(axis.size),
                _first_few(axis.places),
                _first_few(joins),
            )
            rows.append(row)
        lines = list(table(rows, right={"size"}))
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)

    __repr__ = first_lines
    _repr_html_ = html_text


@called("name_axes(step, *args)")
def name_axes(step: object, *args: PyTree) -> NamedAxes:
    """Finds the logical axes of a step's arguments: dimensions that must be sharded
    alike get one name.

    The step is traced, not run. Two dimensions get one name if an operation pairs them,
    as an addition, a contraction or a loop does. If a reshape splits a dimension into
    heads and head widths, its name is that of the heads, and the head width is the unit
    that no shard splits. A name that a field of a module declares holds for its logical
    axis.

    An operation that is not understood relates no dimensions, and `notes` reports it.

    **Arguments:**

    - `step`: the function that is jitted: a forward pass or a whole training step; or
      what the `.trace` of `jax.jit` or of [`shardfx.filter_jit`][] returned, alone.
      The trace of `flax.nnx.jit` is refused.
    - `args`: its arguments: arrays or `jax.ShapeDtypeStruct`s, in any trees.

    **Returns:**

    A [`shardfx.auto.NamedAxes`][]. Names such as "batch", "embed", "mlp" or "heads" are
    given if a dimension's operations or path show them; otherwise the names are made
    from paths.

    **Raises:**

    `LeafTypeError` for a `step` that is no function, and for a traced step that cannot
    be traced again (see [`shardfx.auto.search`][]); the errors of tracing the step.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import shardfx
        from jax.sharding import PartitionSpec as P
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
        assert made["up"].spec == P(None, "tensor") and made["down"].spec == P("tensor")
        ```
    """
    function, args = untraced(step, args)
    explicit = explicit_mesh(args)
    if explicit is not None:
        searched = without_shardings(function, args, explicit)
        with without_mesh():
            return name_axes(searched.step, *searched.args)

    classes = named_classes(trace(function, *args))
    axes = []
    for axis in classes.unmerged_axes():
        if axis.name:
            axes.append(_named_axis(axis, classes))
    return NamedAxes(
        names=names_trees(classes),
        axes=tuple(axes),
        notes=notes_of(classes),
    )


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
    numbers = range(len(classes.dims))
    names_of_arrays = iter(map(classes.names_of, numbers))
    trees = []
    for flat in classes.traced.flats:
        leaves = []
        for is_array in flat.is_array:
            leaves.append(next(names_of_arrays) if is_array else None)
        trees.append(jax.tree.unflatten(flat.treedef, leaves))
    return tuple(trees)


def _named_axis(axis: LogicalAxis, classes: Classes) -> NamedAxis:
    """A logical axis as the caller sees it: its dimensions as texts, such as
    `model/layers/mlp/gate[2]`, and the operations that tie them.
    """
    arrays = classes.traced.arrays
    # The moments of an optimizer have the axes of the parameters; they are listed only
    # if nothing else is.
    main_places = [
        place
        for place in axis.places
        if arrays[place.array].which == classes.model_argument
    ]
    data_places = [
        place for place in axis.places if place.array not in classes.model_arrays
    ]
    # Paths that differ only in numbers are joined.
    alike: dict[tuple[object, str], list[str]] = {}
    for place in main_places + data_places or axis.places:
        path = arrays[place.array].path
        part = f".{place.index}" if place.count > 1 else ""
        key = (between_numbers(path), f"[{place.dim}{part}]")
        alike.setdefault(key, []).append(path)
    texts = [joined(sorted(paths)) + dim for (_, dim), paths in alike.items()]
    return NamedAxis(
        name=axis.name,
        size=axis.size,
        places=tuple(texts),
        joins=_joins(axis, classes),
    )


def _joins(axis: LogicalAxis, classes: Classes) -> tuple[tuple[str, str], ...]:
    """The operations in which two operands with the axis meet, products and lookups
    first: pairs of a primitive and a source line, "-" if it is not known.
    """
    tied = classes.tied
    joins: dict[tuple[str, str], None] = {}
    operations = sorted(
        tied.program.operations, key=lambda operation: not operation.factors.reduction
    )
    for operation in operations:
        if operation.name in ("carry", "return", "use"):
            continue
        operand_count = 0
        for value in set(operation.ins):
            has_axis = not tied.roots_of(value).isdisjoint(axis.roots)
            operand_count += has_axis
        if operand_count > 1:
            frame = own_line(lines_of(operation.location))
            place = "-" if frame is None else frame.place
            joins[operation.name, place] = None
    return tuple(joins)


def _first_few(texts: Sequence[str]) -> str:
    """The first texts as a list, with the number of the others."""
    listed = ", ".join(texts[:_MOST_LISTED])
    if len(texts) <= _MOST_LISTED:
        return listed
    return f"{listed}, and {len(texts) - _MOST_LISTED} more"

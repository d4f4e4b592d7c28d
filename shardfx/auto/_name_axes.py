"""Logical names for the arguments of any step, read off what the step does."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
from jaxtyping import PyTree

from .._ground.text import between_numbers, first_lines, html_text, joined, table
from .._step import lines_of, own_line
from ._asked import TracedStep, trace
from ._classes import Classes, ClassGroup
from ._naming import named_classes


@dataclasses.dataclass(frozen=True, slots=True)
class NamedAxis:
    """A logical axis that was found: its name and size, where it occurs, and which operations tied it together.

    `places` are texts as `model/layers/mlp/gate[2]`; arrays that differ in numbers only share one. `joins` are pairs
    of a primitive and the source line of the operation.
    """

    name: str
    size: int
    places: tuple[str, ...]
    joins: tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True)
class NamedAxes:
    """What [`shardfx.auto.name_axes`][] found.

    `names` holds one tree of names for each argument of the step, for `plan(args[i], ..., names=found.names[i])`.
    `notes` says what was not understood. Printed, it is a table with how each axis came about.
    """

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
    """Finds the logical axes of a step's arguments: dimensions that must be cut alike get one name.

    The step is traced, and dimensions that an operation ties together (contracted, added, scanned over, looked up) are
    one class. Where a reshape splits a fused dimension, its parts are classes of their own: heads are found so, and
    what one head has becomes the unit that no cut goes through. No rule and no name is needed beforehand; names that
    fields declare are used for the classes that have them.

    An operation that is not known ties nothing, and `notes` says so.

    **Arguments:**

    - `step`: the function that is jitted: a forward pass or a whole training step.
    - `args`: its arguments: arrays or `jax.ShapeDtypeStruct`s, in any trees. Nothing is run.

    **Returns:**

    A [`shardfx.auto.NamedAxes`][]. Names as "batch", "embed", "mlp" or "heads" are given where what is done with a
    dimension or its path tells them, else names made from paths.

    **Raises:**

    `LeafTypeError` for a `step` that is no function, and whatever tracing the step raises.

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
    return named(named_classes(trace(step, *args)))


def named(classes: Classes) -> NamedAxes:
    """What was found, as values."""
    axes = tuple(_axis(group, classes) for group in classes.live() if group.name)
    return NamedAxes(names_trees(classes), axes, notes_of(classes))


def notes_of(classes: Classes) -> tuple[str, ...]:
    """What of the step was not understood, in words."""
    notes = classes.tied.program.notes
    return tuple(words if count == 1 else f"{words} ({count} times)" for words, count in notes.items())


def names_trees(classes: Classes) -> tuple[PyTree, ...]:
    """For each argument of the step a tree of its structure, with names at the arrays."""
    traced = classes.traced
    columns: list[list[object]] = [[None] * len(flat.leaves) for flat in traced.flats]
    for argument, (which, leaf) in enumerate(traced.places):
        columns[which][leaf] = classes.names_of(argument)
    return tuple(jax.tree.unflatten(flat.treedef, column) for flat, column in zip(traced.flats, columns, strict=True))


def _axis(group: ClassGroup, classes: Classes) -> NamedAxis:
    traced = classes.traced
    alike: dict[tuple[object, str], list[str]] = {}
    # The moments of an optimizer have the parameters' axes: they are told of only where nothing else is.
    own = [place for place in group.places if traced.places[place.argument][0] == classes.main]
    data = [place for place in group.places if place.argument not in classes.model]
    for place in own + data or group.places:
        path = traced.path(place.argument)
        part = f".{place.at}" if place.of > 1 else ""
        alike.setdefault((between_numbers(path), f"[{place.dim}{part}]"), []).append(path)
    places = tuple(joined(sorted(paths)) + dim for (_, dim), paths in alike.items())
    return NamedAxis(group.name, group.size, places, _joins(group, traced))


def _joins(group: ClassGroup, traced: TracedStep) -> tuple[tuple[str, str], ...]:
    """The operations that two operands with the axis meet in, products and lookups first."""
    tied, roots = traced.tied, set(group.roots)
    found: dict[tuple[str, str], None] = {}
    for made in sorted(tied.program.operations, key=lambda made: not made.factors.reduction):
        having = [
            value
            for value in dict.fromkeys(made.ins)
            if any(not roots.isdisjoint(tied.parts.leaves(part)) for part in tied.dims[value])
        ]
        if len(having) > 1 and made.name not in ("carry", "return", "use"):
            found[made.name, source_line(made.location)] = None
    return tuple(found)


def source_line(location: object) -> str:
    """The file and line of the user's program that an operation comes from, without the folder."""
    frame = own_line(lines_of(location))
    return "-" if frame is None else frame.place


def _some(texts: Sequence[str], most: int = 4) -> str:
    return ", ".join(texts[:most]) + (f", and {len(texts) - most} more" if len(texts) > most else "")

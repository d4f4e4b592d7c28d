"""Pairs of a logical name and its target: reads them, and finds names that look alike."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from jax.sharding import PartitionSpec

from .._ground.errors import RuleError, check_type
from .._ground.spec import (
    UNCONSTRAINED,
    axes_of_entries,
    canonical_entry,
    entries_of,
    entry_axes,
)


# The target of a rule: `None`, a mesh axis, a tuple of mesh axes, or UNCONSTRAINED.
Target: TypeAlias = Any

# A logical name and its target.
Rule: TypeAlias = tuple[str, Target]


def as_names(name_or_names: str | Iterable[Any]) -> tuple[Any, ...]:
    """One name, or several, as a tuple."""
    if isinstance(name_or_names, str):
        return (name_or_names,)
    return tuple(name_or_names)


def declared_axes(mesh_axes: Iterable[object]) -> tuple[Any, ...]:
    """The names of mesh axes in `mesh_axes` without duplicates. Raises `RuleError` if one is
    no string or is empty.
    """
    fix = 'write their names: `mesh_axes=["data"]`'
    check_type(
        what="mesh_axes", value=mesh_axes, expected=Iterable, error=RuleError, fix=fix
    )
    names = as_names(mesh_axes)
    for name in names:
        if not isinstance(name, str) or not name:
            raise RuleError(
                f"`mesh_axes` holds {name!r}; it declares mesh axes by their names."
            )
    return tuple(dict.fromkeys(names))


def near(name: str, names: Sequence[str]) -> str:
    """The text "(did you mean ...?)" with the names in `names` that look like `name`;
    "" if there are none.
    """
    close = nearest(name, names)
    if close:
        return f" (did you mean {' or '.join(repr(match) for match in close)}?)"
    return ""


def nearest(name: str, names: Sequence[str]) -> list[str]:
    """The names in `names` that look like `name`, the nearest first."""
    return difflib.get_close_matches(name, names, n=3)


def read_pairs(mapping: Any, what: str) -> list[tuple[str, Any]]:
    """The pairs of a mapping, or of an iterable of pairs, whose first entry is a name.
    Raises `RuleError` for anything else; its message calls the argument `what`.
    """
    pairs = mapping.items() if isinstance(mapping, Mapping) else mapping
    fix = "write (name, value) in a list: `[(name, value)]`"
    check_type(what=what, value=pairs, expected=Iterable, error=RuleError, fix=fix)
    checked = []
    for pair in pairs:
        if (
            not isinstance(pair, tuple | list)
            or len(pair) != 2
            or not isinstance(pair[0], str)
        ):
            raise RuleError(
                f"`{what}`: {pair!r} is no pair that begins with a name; write (name,"
                " value), in a list: `[(name, value)]`."
            )
        checked.append((pair[0], pair[1]))
    return checked


def read_rules(pairs: object, what: str) -> tuple[Rule, ...]:
    """The rules of a mapping, or of an iterable of pairs of a logical name and a
    target, in canonical form. Raises `RuleError` for an invalid one; its message calls
    the argument `what`.
    """
    return tuple(
        (name, _checked_target(name, target, what))
        for name, target in read_pairs(pairs, what)
    )


def _checked_target(name: str, target: object, what: str) -> Target:
    """The target of the rule of a logical name in canonical form: a mesh axis, a tuple
    of them, `None` or UNCONSTRAINED. Raises `RuleError` for anything else, and for a
    mesh axis that occurs twice. `what` is the name of the argument with the rules.
    """
    is_tuple_of_axes = isinstance(target, list | tuple) and all(
        isinstance(axis, str) for axis in target
    )
    is_one_value = target is None or target is UNCONSTRAINED or isinstance(target, str)
    if not is_tuple_of_axes and not is_one_value:
        fix = ""
        if isinstance(target, PartitionSpec):
            axes = axes_of_entries(entries_of(target))
            # The target that the rule takes for these axes: one, several or none.
            entry = axes[0] if len(axes) == 1 else axes or None
            fix = f" Of the spec write its axes: `({name!r}, {entry!r})`."
        raise RuleError(
            f"`{what}`: ({name!r}, {target!r}) has no valid target; use a mesh axis, a"
            f" tuple of mesh axes, `None` or `PartitionSpec.UNCONSTRAINED`.{fix}"
        )
    if duplicates := repeated(entry_axes(target)):
        raise RuleError(
            f"`{what}`: ({name!r}, {target!r}) uses mesh axis `{duplicates[0]}` twice; use"
            " it once."
        )
    return canonical_entry(target)


def repeated(names: Sequence[str]) -> list[str]:
    """The names that occur more than once in a list: each occurrence after the first."""
    return [name for i, name in enumerate(names) if name in names[:i]]

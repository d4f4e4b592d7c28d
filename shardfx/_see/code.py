"""Values as the Python that makes them: what the fixes of findings are written in."""

import re
from collections.abc import Mapping, Sequence

from jax.sharding import PartitionSpec

from .._ground.spec import UNCONSTRAINED, entries_of
from .._ground.text import between_numbers
from .._rules import Atomic, Fsdp, Optional, Pipeline, Replicate


def code_of(target: object) -> str | None:
    """The target of a rule, or a value in one, as code; `None` for a callable, which has none."""
    if isinstance(target, PartitionSpec):
        return f"PartitionSpec({', '.join(map(_value, entries_of(target)))})"
    if isinstance(target, Fsdp):
        axes = repr(target.axes[0]) if len(target.axes) == 1 else repr(target.axes)
        least = f", {target.min_bytes}" if target.min_bytes else ""
        dims = target.skip[0] if len(target.skip) == 1 else target.skip
        return f"fsdp({axes}{least}{f', skip={dims}' if target.skip else ''})"
    if isinstance(target, Replicate):
        return "replicate"
    if isinstance(target, Atomic | Optional):
        inner = code_of(target.target)
        last = f", {target.unit!r}" if isinstance(target, Atomic) else ""
        return None if inner is None else f"{type(target).__name__.lower()}({inner}{last})"
    if isinstance(target, Pipeline):
        steps = [code_of(step) for step in target.steps]
        return None if None in steps else " | ".join(map(str, steps))
    return None if callable(target) and target is not UNCONSTRAINED else _value(target)


def _value(value: object) -> str:
    if value is UNCONSTRAINED:
        return "PartitionSpec.UNCONSTRAINED"
    if value is ...:
        return "..."
    if isinstance(value, Atomic):
        return f"atomic({_value(value.target)}, {value.unit!r})"
    if isinstance(value, tuple):
        return f"({', '.join(map(_value, value))}{',' if len(value) == 1 else ''})"
    return repr(value)


def regex_of(paths: Sequence[str], alike: Mapping[tuple[str, ...], int]) -> str:
    r"""A regex that finds these paths, and no others: with `\d+` for their numbers if it has all paths that are alike.

    `alike` says how many paths there are with the same text between their numbers.
    """
    found = []
    for parts, own in _by_parts(paths).items():
        if alike[parts] == len(own):
            found.append(r"\d+".join(map(re.escape, parts)))
        else:
            found += map(re.escape, dict.fromkeys(own))
    return f"^{found[0]}$" if len(found) == 1 else f"^(?:{'|'.join(found)})$"


def _by_parts(paths: Sequence[str]) -> dict[tuple[str, ...], list[str]]:
    found: dict[tuple[str, ...], list[str]] = {}
    for path in paths:
        found.setdefault(between_numbers(path), []).append(path)
    return found

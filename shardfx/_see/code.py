"""Values as the Python that makes them: what the fixes of findings are written in."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from .._ground.spec import UNCONSTRAINED, entries_of
from .._ground.text import between_numbers
from .._rules.strategies import Atomic, Fsdp, Optional, Pipeline, Replicate


def code_of(target: Any) -> str | None:
    """The target of a rule, or a value in one, as code; `None` for a callable, which has none."""
    if isinstance(target, PartitionSpec):
        return f"PartitionSpec({', '.join(map(_value, entries_of(target)))})"
    if isinstance(target, Fsdp):
        axes = repr(target.axes[0]) if len(target.axes) == 1 else repr(target.axes)
        return f"fsdp({axes}{f', {target.min_bytes}' if target.min_bytes else ''})"
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


def _value(value: Any) -> str:
    if value is UNCONSTRAINED:
        return "PartitionSpec.UNCONSTRAINED"
    if value is ...:
        return "..."
    if isinstance(value, Atomic):
        return f"atomic({_value(value.target)}, {value.unit!r})"
    if isinstance(value, tuple):
        return f"({', '.join(map(_value, value))}{',' if len(value) == 1 else ''})"
    return repr(value)


def regex_of(paths: Sequence[str], others: Iterable[str]) -> str:
    r"""A regex that finds these paths, and none of the `others`: with `\d+` for numbers where that tells them apart."""
    parts = dict.fromkeys(map(between_numbers, paths))
    found = [r"\d+".join(map(re.escape, part)) for part in parts]
    loose = f"^{found[0]}$" if len(found) == 1 else f"^(?:{'|'.join(found)})$"
    pattern, given = re.compile(loose), set(paths)
    if not any(pattern.search(path) for path in others if path not in given):
        return loose
    exact = [re.escape(path) for path in dict.fromkeys(paths)]
    return f"^{exact[0]}$" if len(exact) == 1 else f"^(?:{'|'.join(exact)})$"

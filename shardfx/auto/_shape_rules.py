"""Path rules that give each array of a tree its strategy, in as few lines as possible."""

import functools as ft
import operator
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .._rules import PathRules, fsdp, optional, replicate


class Step(NamedTuple):
    """Mesh axes that shard an array in its largest dimension but `skip_dims`."""

    axes: tuple[str, ...]
    skip_dims: tuple[int, ...] = ()


# The steps that shard an array, one after the other; none replicates it.
Steps = tuple[Step, ...]


def shape_rules(
    paths: Sequence[str],
    steps: Sequence[Steps],
    usual: Steps,
    min_bytes: int,
) -> PathRules:
    """The rules that shard the array at each of the paths by its steps. A last rule is
    for those with the steps `usual`. Arrays of fewer than `min_bytes` bytes are
    replicated. `usual` is empty if the others are replicated.
    """
    steps_by_path = dict(zip(paths, steps, strict=True))
    suffixes_by_steps = _suffixes(_templates(steps_by_path), usual)
    rules = []
    for steps_of_arrays, suffixes in suffixes_by_steps.items():
        regex = f"(^|/){_either(suffixes)}$"
        rules.append((regex, _target(steps_of_arrays, min_bytes)))
    target = _target(usual, min_bytes)
    rules.append((".*", optional(target) if usual else target))
    return PathRules(rules)


def _target(steps: Steps, min_bytes: int) -> object:
    """The target of a path rule for arrays with these steps."""
    strategies = [
        fsdp(step.axes, min_bytes, skip_dims=step.skip_dims) for step in steps
    ]
    return ft.reduce(operator.or_, strategies) if strategies else replicate


def _either(suffixes: Sequence[str]) -> str:
    """The regex of several ends of paths: `(q_proj|k_proj)/weight`."""
    if len(suffixes) == 1:
        return suffixes[0]
    paths = [suffix.split("/") for suffix in suffixes]
    shortest = min(map(len, paths))
    first_parts = {path[0] for path in paths}
    last_parts = {path[-1] for path in paths}
    if shortest > 1 and len(last_parts) == 1:
        heads = ["/".join(path[:-1]) for path in paths]
        return f"{_either(heads)}/{last_parts.pop()}"
    if shortest > 1 and len(first_parts) == 1:
        tails = ["/".join(path[1:]) for path in paths]
        return f"{first_parts.pop()}/{_either(tails)}"
    alternatives = "|".join(suffixes)
    return f"({alternatives})"


class _Template(NamedTuple):
    """Paths that differ only in numbers, and the steps that shard these arrays.

    - `general`: the regex of all paths that differ only in numbers.
    - `path`: the only path of the template, if paths that differ from it only in numbers
      have other steps; else `None`.
    """

    general: str
    steps: Steps
    path: str | None


def _templates(steps_by_path: Mapping[str, Steps]) -> list[_Template]:
    """A template for each path. Paths that differ only in numbers share one, unless
    their steps differ.
    """
    steps_by_general: dict[str, set[Steps]] = {}
    for path, steps in steps_by_path.items():
        steps_by_general.setdefault(_general(path), set()).add(steps)

    # A dict keeps the order of the paths.
    templates: dict[_Template, None] = {}
    for path, steps in steps_by_path.items():
        general = _general(path)
        is_alone = len(steps_by_general[general]) > 1
        template = _Template(
            general=general,
            steps=steps,
            path=path if is_alone else None,
        )
        templates[template] = None
    return list(templates)


def _general(path: str) -> str:
    """The regex of all paths that differ from this one only in numbers."""
    return re.sub(r"\d+", r"\\d+", re.escape(path))


def _suffixes(templates: Sequence[_Template], usual: Steps) -> dict[Steps, list[str]]:
    """For each tuple of steps, the shortest ends of paths that no array with other steps
    has. Arrays with the steps `usual` are left to the last rule.
    """
    steps_by_end: dict[str, set[Steps]] = {}
    for template in templates:
        for end in _all_ends(template.general):
            steps_by_end.setdefault(end, set()).add(template.steps)

    suffixes: dict[Steps, dict[str, None]] = {}
    for template in templates:
        if template.steps != usual:
            suffix = _shortest_suffix(template, steps_by_end)
            suffixes.setdefault(template.steps, {})[suffix] = None
    return {steps: list(texts) for steps, texts in suffixes.items()}


def _shortest_suffix(
    template: _Template,
    steps_by_end: Mapping[str, set[Steps]],
) -> str:
    """The shortest end of a template that has the steps of this one alone; else
    the whole template.
    """
    if template.path is not None:
        return f"^{re.escape(template.path)}"
    for end in _all_ends(template.general):
        if len(steps_by_end[end]) == 1:
            return end
    return f"^{template.general}"


def _all_ends(template: str) -> list[str]:
    """The ends of a path's regex, from its last two parts to all of them. One part,
    such as `weight`, says too little.
    """
    parts = template.split("/")
    ends = []
    for start in range(max(len(parts) - 2, 0), -1, -1):
        ends.append("/".join(parts[start:]))
    return ends

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
    """The rules that shard the array at each of the paths by its steps: mesh axes that
    shard it one after the other, each step in the largest dimension that is left. A
    last rule is for those with the steps `usual`. Arrays of fewer than `min_bytes`
    bytes are replicated. `usual` is empty if the others are replicated. Each array has
    its path and its steps at one position of `paths` and `steps`.
    """
    steps_by_path = dict(zip(paths, steps, strict=True))
    suffixes_by_steps = _suffixes(steps_by_path, usual)
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


def _suffixes(
    steps_by_path: Mapping[str, Steps],
    usual: Steps,
) -> dict[Steps, list[str]]:
    """For each tuple of steps, the shortest ends of paths that no array with other steps
    has. Arrays with the steps `usual` are left to the last rule.
    """
    ends_by_path = {path: _ends(path) for path in steps_by_path}
    steps_by_end: dict[str, set[Steps]] = {}
    for path, steps in steps_by_path.items():
        for end in ends_by_path[path]:
            steps_by_end.setdefault(end, set()).add(steps)

    # A dict has each end once, in the order of the paths.
    suffixes: dict[Steps, dict[str, None]] = {}
    for path, steps in steps_by_path.items():
        if steps != usual:
            ends = [end for end in ends_by_path[path] if len(steps_by_end[end]) == 1]
            suffixes.setdefault(steps, {})[ends[0]] = None
    return {steps: list(ends) for steps, ends in suffixes.items()}


def _ends(path: str) -> list[str]:
    """Regexes of the ends of a path, from its last two parts to the whole path. One
    part, such as `weight`, says too little. They match any numbers in the place of its
    own; the last one has its own, and so no other path has it.
    """
    general = re.sub(r"\d+", r"\\d+", re.escape(path))
    parts = general.split("/")
    ends = []
    for start in range(max(len(parts) - 2, 0), -1, -1):
        ends.append("/".join(parts[start:]))
    return [*ends, f"^{general}", f"^{re.escape(path)}"]

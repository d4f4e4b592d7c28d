"""Path rules that give each array of a tree its strategy, in as few lines as possible."""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .._rules import PathRules, fsdp, optional, replicate


def shape_rules(
    paths: Sequence[str],
    dims: Sequence[tuple[int, ...]],
    axes: Sequence[tuple[str, ...]],
    min_bytes: int,
) -> PathRules:
    """The rules that shard each array over mesh axes, but not its dimensions in `dims`.

    `axes` has the axes of one strategy after another; without any, all arrays are
    replicated. Arrays of fewer than `min_bytes` bytes are replicated.
    """
    if not axes:
        return PathRules([(".*", replicate)])
    dims_by_path = dict(zip(paths, dims, strict=True))
    rules = []
    for skipped, suffixes in _suffixes(_templates(dims_by_path)).items():
        strategy = _strategy(axes, min_bytes, skipped)
        rules.append((f"(^|/){_either(suffixes)}$", strategy))
    rules.append((".*", optional(_strategy(axes, min_bytes, ()))))
    return PathRules(rules)


def _strategy(
    axes: Sequence[tuple[str, ...]], min_bytes: int, skipped: tuple[int, ...]
) -> object:
    strategy = fsdp(axes[0], min_bytes, skip_dims=skipped)
    for others in axes[1:]:
        strategy = strategy | fsdp(others, min_bytes, skip_dims=skipped)
    return strategy


def _either(suffixes: Sequence[str]) -> str:
    """The regex of several ends of paths: `(q_proj|k_proj)/weight`."""
    if len(suffixes) == 1:
        return suffixes[0]
    if all("/" in suffix for suffix in suffixes):
        heads = [suffix.partition("/") for suffix in suffixes]
        tails = [suffix.rpartition("/") for suffix in suffixes]
        if len({last for _, _, last in tails}) == 1:
            _, _, last = tails[0]
            return f"{_either([before for before, _, _ in tails])}/{last}"
        if len({first for first, _, _ in heads}) == 1:
            first, _, _ = heads[0]
            return f"{first}/{_either([after for _, _, after in heads])}"
    return f"({'|'.join(suffixes)})"


class _Template(NamedTuple):
    """The regex of the paths that differ only in numbers, the dimensions that these
    arrays do not shard, and whether the regex has a path's own numbers.
    """

    regex: str
    dims: tuple[int, ...]
    is_exact: bool


def _templates(dims_by_path: Mapping[str, tuple[int, ...]]) -> list[_Template]:
    """A template for each path. Paths that differ only in numbers share one, unless
    their dimensions differ.
    """
    by_general: dict[str, set[tuple[int, ...]]] = {}
    for path, dims in dims_by_path.items():
        by_general.setdefault(_general(path), set()).add(dims)
    templates: dict[_Template, None] = {}
    for path, dims in dims_by_path.items():
        general = _general(path)
        is_exact = len(by_general[general]) > 1
        regex = re.escape(path) if is_exact else general
        templates[_Template(regex, dims, is_exact)] = None
    return list(templates)


def _general(path: str) -> str:
    return re.sub(r"\d+", r"\\d+", re.escape(path))


def _suffixes(templates: Sequence[_Template]) -> dict[tuple[int, ...], list[str]]:
    """For each tuple of dimensions, the shortest ends of paths that no array with other
    dimensions has. Arrays without such dimensions are left to the last rule.
    """
    dims_by_end: dict[str, set[tuple[int, ...]]] = {}
    for template in templates:
        if template.is_exact:
            general = _general(template.regex)
        else:
            general = template.regex
        for end in _all_ends(general):
            dims_by_end.setdefault(end, set()).add(template.dims)
    suffixes: dict[tuple[int, ...], dict[str, None]] = {}
    for template in templates:
        if template.dims:
            whole = f"^{template.regex}"
            choices = [] if template.is_exact else _all_ends(template.regex)
            unanimous = (end for end in choices if len(dims_by_end[end]) == 1)
            suffix = next(unanimous, whole)
            suffixes.setdefault(template.dims, {})[suffix] = None
    return {dims: list(texts) for dims, texts in suffixes.items()}


def _all_ends(template: str) -> list[str]:
    """The ends of a path's regex, from its last two parts to all of them. One part,
    such as `weight`, says too little.
    """
    parts = template.split("/")
    shortest = max(len(parts) - 2, 0)
    return ["/".join(parts[start:]) for start in range(shortest, -1, -1)]

"""Path rules that give each array of a tree its strategy, in as few lines as possible."""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .._rules import PathRules, fsdp, optional, replicate


# For each tuple of dimensions that are not sharded, the ends of the paths of the arrays.
Suffixes = dict[tuple[int, ...], list[str]]


def suffixes_of(paths: Sequence[str], dims: Sequence[tuple[int, ...]]) -> Suffixes:
    """The ends of the paths, by the dimensions that the arrays do not shard."""
    dims_by_path = dict(zip(paths, dims, strict=True))
    return _suffixes(_templates(dims_by_path))


def shape_rules(
    suffixes_by_dims: Suffixes,
    axes: Sequence[tuple[str, ...]],
    min_bytes: int,
) -> PathRules:
    """The rules that shard each array over mesh axes, but not its dimensions in
    `suffixes_by_dims`.

    `axes` has the axes of one strategy after another; without any, all arrays are
    replicated. Arrays of fewer than `min_bytes` bytes are replicated.
    """
    if not axes:
        return PathRules([(".*", replicate)])
    rules = []
    for skipped_dims, suffixes in suffixes_by_dims.items():
        regex = f"(^|/){_either(suffixes)}$"
        rules.append((regex, _strategy(axes, min_bytes, skipped_dims)))
    usual_strategy = _strategy(axes, min_bytes, skipped_dims=())
    rules.append((".*", optional(usual_strategy)))
    return PathRules(rules)


def _strategy(
    axes: Sequence[tuple[str, ...]],
    min_bytes: int,
    skipped_dims: tuple[int, ...],
) -> object:
    strategy = fsdp(axes[0], min_bytes, skip_dims=skipped_dims)
    for other_axes in axes[1:]:
        strategy = strategy | fsdp(other_axes, min_bytes, skip_dims=skipped_dims)
    return strategy


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
    dims_by_general: dict[str, set[tuple[int, ...]]] = {}
    for path, dims in dims_by_path.items():
        dims_by_general.setdefault(_general(path), set()).add(dims)

    # A dict keeps the order of the paths.
    templates: dict[_Template, None] = {}
    for path, dims in dims_by_path.items():
        regex = _general(path)
        is_exact = len(dims_by_general[regex]) > 1
        if is_exact:
            regex = re.escape(path)
        template = _Template(regex=regex, dims=dims, is_exact=is_exact)
        templates[template] = None
    return list(templates)


def _general(path: str) -> str:
    return re.sub(r"\d+", r"\\d+", re.escape(path))


def _suffixes(templates: Sequence[_Template]) -> Suffixes:
    """For each tuple of dimensions, the shortest ends of paths that no array with other
    dimensions has. Arrays without such dimensions are left to the last rule.
    """
    dims_by_end: dict[str, set[tuple[int, ...]]] = {}
    for template in templates:
        general = template.regex
        if template.is_exact:
            general = _general(general)
        for end in _all_ends(general):
            dims_by_end.setdefault(end, set()).add(template.dims)

    suffixes: dict[tuple[int, ...], dict[str, None]] = {}
    for template in templates:
        if template.dims:
            suffix = _shortest_suffix(template, dims_by_end)
            suffixes.setdefault(template.dims, {})[suffix] = None
    return {dims: list(texts) for dims, texts in suffixes.items()}


def _shortest_suffix(
    template: _Template,
    dims_by_end: Mapping[str, set[tuple[int, ...]]],
) -> str:
    """The shortest end of a template that has the dimensions of this one alone; else
    the whole template.
    """
    if not template.is_exact:
        for end in _all_ends(template.regex):
            if len(dims_by_end[end]) == 1:
                return end
    return f"^{template.regex}"


def _all_ends(template: str) -> list[str]:
    """The ends of a path's regex, from its last two parts to all of them. One part,
    such as `weight`, says too little.
    """
    parts = template.split("/")
    ends = []
    for start in range(max(len(parts) - 2, 0), -1, -1):
        ends.append("/".join(parts[start:]))
    return ends

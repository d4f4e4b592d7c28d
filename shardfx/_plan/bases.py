"""Requests of arrays that belong to a planned array: adapters and scales of a base, and
states of a parameter.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec

from .._ground.errors import RuleError
from .._ground.reason import Code, Reason, reason_for
from .._ground.spec import (
    axes_of_entries,
    entries_at,
    entries_of,
    entry_axes,
    trimmed,
    without_unconstrained,
)
from .._ground.text import between_numbers
from .._ground.tree import Flat
from .._rules import Matcher, PathRules
from .aligning import Dims, adapter_readings, scale_readings
from .leaf import LeafPlan
from .requests import Request


def matcher_of_bases(what: str, pairs: Iterable[tuple[str, str]]) -> Matcher:
    """Returns path rules from `pairs` of a regex and a replacement. A rule's target is
    `(replacement,)`. The replacement turns the path of an adapter or a scale into the
    path of the array that it belongs to. `what` is the argument with the pairs,
    "adapters" or "scales", for messages.
    """
    form = f'`{what}` takes pairs of a regex and a replacement, `[("lora_a$", "w")]`'
    if isinstance(pairs, str | Mapping) or not isinstance(pairs, Iterable):
        raise RuleError(f"{form}, and not {pairs!r:.80}.")
    rules = []
    for pair in pairs:
        is_pair = isinstance(pair, tuple | list) and len(pair) == 2
        if not is_pair or not all(isinstance(text, str) for text in pair):
            fix = ""
            if isinstance(pair, np.ndarray):
                fix = f"; of an array write `{what}=pairs.tolist()`"
            raise RuleError(f"{form}, and not {pair!r:.80}{fix}.")
        regex, replacement = pair
        rules.append((regex, (replacement,)))
    return Matcher(PathRules(rules))


def base_path(matcher: Matcher, rule_index: int, path: str) -> str:
    """Returns the path of the array to which the array at `path` belongs by the rule
    of `matcher` with the index `rule_index`. Raises `RuleError` if the replacement
    names a group that the regex lacks.
    """
    regex, (replacement,) = matcher.rules[rule_index]
    try:
        return matcher.patterns[rule_index].sub(replacement, path)
    except (re.error, IndexError) as error:
        raise RuleError(
            f"the pair {(regex, replacement)!r} makes no path of `{path}`: {error};"
            " the replacement may name the groups of the regex, as in"
            r" `('(.*)/lora_[ab]$', r'\1/weight')`."
        ) from error


def adapters_by_base(matcher: Matcher, flat: Flat) -> dict[str, list[tuple[int, ...]]]:
    """Returns the shapes of the adapters in the tree `flat`, by the path of the array
    to which they belong. `matcher` has the regexes of their paths.
    """
    shapes: dict[str, list[tuple[int, ...]]] = {}
    columns = zip(flat.leaves, flat.paths, flat.is_array, strict=True)
    for leaf, path, is_array in columns:
        rule_index = matcher.first(path) if is_array else None
        if rule_index is not None:
            path_of_base = base_path(matcher, rule_index, path)
            shapes.setdefault(path_of_base, []).append(tuple(leaf.shape))
    return shapes


def request_from_base(
    entry: str,
    base: LeafPlan,
    shape: tuple[int, ...],
    partners: tuple[Any, ...] | None,
) -> Request:
    """Returns the request of an array of the shape `shape`, an adapter or a scale of
    the planned array `base`.

    `partners` are the shapes of the base's other adapters; `None` for a scale. `entry`
    names the item of `adapters` or `scales` in messages. Where the dimensions may
    correspond in several ways, only the entries on which all of them agree are
    requested.
    """
    if partners is None:
        readings = scale_readings(base.shape, shape)
    else:
        readings = adapter_readings(base.shape, shape, partners)
    lost: list[Reason] = []
    specs = []
    for reading in readings:
        dims, reasons = _aligned(base, shape, reading.dims)
        specs.append(spec_at(base, dims))
        lost += reasons
    spec = agreed(specs, len(shape))
    if len(set(specs)) > 1 or not readings:
        lost = [unaligned(base, shape, [reading.dims for reading in readings], spec)]
    rule = f"{entry} of `{starred(base.path)}`"
    # A dimension that the base does not shard loses nothing.
    reasons = tuple(why for why in lost if why.axes)
    return Request(spec=spec, rule=rule, reasons=reasons)


def _aligned(
    base: LeafPlan,
    shape: tuple[int, ...],
    dims: Dims,
) -> tuple[Dims, list[Reason]]:
    """Returns `dims` with `None` for the dimensions that are not sharded as the base's
    dimension: those that were reduced to size 1, and those of a scale whose blocks are
    no whole number. The latter have a reason.
    """
    entries = entries_at(base.spec, len(base.shape))
    aligned: list[int | None] = []
    reasons = []
    for dim, (size, base_dim) in enumerate(zip(shape, dims, strict=True)):
        base_size = size if base_dim is None else base.shape[base_dim]
        is_even = size > 0 and base_size % size == 0
        if base_dim is None or base_size == size or (is_even and size > 1):
            aligned.append(base_dim)
            continue
        aligned.append(None)
        if not is_even:
            what = (
                f"{size} elements are not for whole blocks of dim {base_dim} of"
                f" `{starred(base.path)}`, which has {base_size}"
            )
            axes = entry_axes(entries[base_dim])
            reasons.append(reason_for(Code.unaligned, dim, axes, what=what))
    return tuple(aligned), reasons


def agreed(specs: Sequence[PartitionSpec], rank: int) -> PartitionSpec:
    """Returns the spec of `rank` entries that has the entries that all of `specs` have,
    and `None` elsewhere.
    """
    columns = zip(*(entries_at(spec, rank) for spec in specs), strict=True)
    common = []
    for first, *others in columns:
        is_agreed = all(entry == first for entry in others)
        entry = first if is_agreed else None
        common.append(entry)
    return trimmed(common)


def unaligned(
    base: LeafPlan,
    shape: tuple[int, ...],
    readings: Iterable[Dims],
    spec: Any,
) -> Reason:
    """Returns the reason why an array of the shape `shape` has only the spec `spec`:
    its dimensions may correspond to those of `base` in several ways, or in none.

    Each of `readings` is one way: for each dimension of `shape` the dimension of the
    base, or `None`. The reason names the mesh axes of the base that `spec` lacks.
    """
    sharding_axes = set(axes_of_entries(entries_of(spec)))
    base_axes = axes_of_entries(entries_of(without_unconstrained(base.spec)))
    axes = tuple(axis for axis in base_axes if axis not in sharding_axes)
    texts = list(map(_dims_text, readings))
    owner = f"`{starred(base.path)}`, shape {base.shape}"
    if texts:
        ways = " or ".join(sorted(texts))
        what = (
            f"the dimensions of shape {shape} may be those numbered {ways} of {owner},"
            " so only axes on which these agree are used"
        )
    else:
        what = f"no dimension of shape {shape} is one of {owner}"
    return reason_for(Code.unaligned, None, axes, what=what)


def at_dims(values: tuple[object, ...] | None, dims: Dims, other: object = None) -> Any:
    """Returns `values[dim]` for each of `dims`, or `other` if `dim` is `None` or beyond
    the end of `values`. The result is `None` if `values` is `None`.
    """
    if values is None:
        return None
    chosen = []
    for dim in dims:
        if dim is None or dim >= len(values):
            chosen.append(other)
        else:
            chosen.append(values[dim])
    return tuple(chosen)


def _dims_text(dims: Dims) -> str:
    """Dimensions as a text, such as "(0, -)"."""
    numbers = [str(dim) for dim in dims]
    return f"({', '.join(numbers).replace('None', '-')})"


def spec_at(leaf: LeafPlan, dims: Dims) -> PartitionSpec:
    """Returns the spec of an array with the dimensions `dims` that is sharded like the
    planned array `leaf`.
    """
    return trimmed(at_dims(entries_of(without_unconstrained(leaf.spec)), dims))


def starred(path: str) -> str:
    """Returns `path` with `*` for its numbers, so that the arrays of repeated layers
    have equal plans.
    """
    return "*".join(between_numbers(path))

"""What is wrong with a plan, all of it in one error: what, where, how large, and what to write instead."""

import difflib
import re
from collections.abc import Sequence
from typing import Any

from .._errors import RuleError, SpecError, UnmatchedError
from .._mesh import MeshSpec
from .._reason import Code
from .._tree import Flat
from .leaf import LeafPlan


_SHOWN = 40


def raise_errors(errors: list[tuple[str, Any]]) -> None:
    if not errors:
        return
    kind = type(errors[0][1])
    lines = [f"  leaf `{path}`: {error}" for path, error in errors[:_SHOWN]]
    more = [f"  and {len(errors) - _SHOWN} more"] if len(errors) > _SHOWN else []
    raise kind("\n".join([f"{len(errors)} leaves (or groups of leaves) cannot be planned:", *lines, *more]))


def raise_unmatched(flat: Flat, index: Sequence[int], rows: Sequence[LeafPlan], rules: Sequence[Any]) -> None:
    open_rows = {i for i, row in enumerate(rows) if row.rule is None and row.shape}
    if not open_rows:
        return
    found = [(rows[i].bytes, path, rows[i]) for i, path in zip(index, flat.paths, strict=True) if i in open_rows]
    found.sort(key=lambda item: -item[0])
    patterns = [pattern for pattern, _ in rules]
    lines = []
    for nbytes, path, row in found[:_SHOWN]:
        near = difflib.get_close_matches(path, patterns, n=1, cutoff=0.0)
        hint = f"; the nearest rule is {near[0]!r}" if near else ""
        lines.append(f"  `{path}`: {row.dtype}{list(row.shape)}, {nbytes} bytes{hint}")
    more = [f"  and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
    raise UnmatchedError(
        "\n".join(
            [
                f"no rule covers {len(found)} of {len(flat.paths)} leaves; add path rules or names for them, end the "
                'path rules with `(".*", fsdp(...))`, or pass `unmatched="replicate"`. Largest first:',
                *lines,
                *more,
            ]
        )
    )


def raise_unused(what: str, patterns: Sequence[re.Pattern[str]], used: dict[int, None], flat: Flat) -> None:
    # A tree without leaves, as the state of plain SGD, has nothing that a rule could match.
    for number, pattern in enumerate(patterns if flat.leaves else ()):
        if number not in used and not any(map(pattern.search, flat.paths)):
            near = difflib.get_close_matches(pattern.pattern, flat.paths, n=1, cutoff=0.0)
            raise RuleError(
                f"{what} {number}, the regex {pattern.pattern!r}, matches no path of the tree; the nearest path is "
                f'`{near[0]}`. Correct the regex, take the rule out, or pass `unmatched="replicate"`.'
            )


def raise_cut(flat: Flat, index: Sequence[int], rows: Sequence[LeafPlan], refined: MeshSpec | None) -> None:
    """Raises if any array is not sharded as asked; `refined` is the mesh, if its axes have been split."""
    whys = {i: [why for why in row.reasons if why.code is not Code.scalar] for i, row in enumerate(rows)}
    lines = [
        f"  leaf `{path}`, shape {rows[i].shape}: {why}"
        for i, path in zip(index, flat.paths, strict=True)
        if i >= 0
        for why in whys[i]
    ]
    if lines:
        more = [f"  and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
        if refined is not None:
            more.append(
                f"`refine=True` has split the mesh into {refined}. If they may be replicated over the rest, plan "
                "on that mesh, made with `MeshSpec.split`, by rules that name the parts; or leave `strict` out."
            )
        raise SpecError(
            "\n".join(["`strict=True`, and these leaves are not sharded as asked:", *lines[:_SHOWN], *more])
        )

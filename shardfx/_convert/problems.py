"""What does not fit between a map and two trees, all in one error."""

from collections.abc import Mapping, Sequence
from typing import Any

from .._ground.errors import MapError
from .._ground.text import between_numbers, joined, plural, printable
from .pieces import Made, Struct


TreeLeaf = Struct | Made
# The leaves of a tree, each with its shape and dtype, by path.
TreeLeaves = Mapping[str, TreeLeaf]
# A path, and a text about a problem with the leaf or the rule that it names.
Problem = tuple[str, str]
_SHOWN = 20


def two_rules(path: str, first: str, second: str) -> Problem:
    """The problem of a leaf `path` that two rules make, for these path patterns."""
    return path, f"two rules make it, `{first}` and `{second}`; keep one of them"


def raise_problems(problems: Sequence[Problem]) -> None:
    """Raises `MapError` with all problems. There is at least one."""
    # Equal problems of several layers are one line. Their texts differ in numbers only:
    # a kind has the path's and the text's parts between numbers.
    paths_by_kind: dict[tuple[Any, str], list[str]] = {}
    for path, text in problems:
        template = "".join(between_numbers(text))
        kind = (between_numbers(path), template)
        paths_by_kind.setdefault(kind, []).append(path)

    first_texts: dict[str, str] = {}
    for path, text in problems:
        first_texts.setdefault(path, text)
    lines = []
    for paths in paths_by_kind.values():
        name = printable(joined_paths(paths))
        lines.append(f"{name}: {first_texts[paths[0]]}.")

    hidden = ""
    if len(lines) > _SHOWN:
        hidden = f"\n  and {len(lines) - _SHOWN} more"
    raise MapError(
        f"the map does not fit, in {plural(len(problems), 'place')}; nothing was read"
        " or moved:\n  " + "\n  ".join(lines[:_SHOWN]) + hidden
    )


def joined_paths(paths: Sequence[str]) -> str:
    """Paths that differ only in numbers as one text."""
    return joined(paths) if len(paths) > 1 else paths[0]

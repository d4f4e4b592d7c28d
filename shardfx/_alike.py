"""Paths that differ in numbers only, as those of repeated layers do: one text for all of them."""

import re
from collections.abc import Sequence


# A number that stands alone: the 12 of `layers/12/w` and of `h.12.attn`, but not that of `fc12`.
_NUMBER = re.compile(r"(?<![A-Za-z0-9])[0-9]+(?![A-Za-z0-9])")
_SHOWN_RUNS = 3


def between_numbers(path: str) -> tuple[str, ...]:
    """The parts of a path around its numbers: equal for paths that differ in numbers only."""
    return tuple(_NUMBER.split(path))


def joined(paths: Sequence[str]) -> str:
    """One text for paths that differ in numbers only, with ranges: `layers/{0..31}/attn/q_proj/weight`."""
    if len(paths) == 1:
        return paths[0]
    columns = zip(*[map(int, _NUMBER.findall(path)) for path in paths], strict=True)
    texts = iter([_ranges(sorted(set(column))) for column in columns])
    return _NUMBER.sub(lambda _: next(texts), paths[0])


def _ranges(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    starts = [n for i, n in enumerate(numbers) if i == 0 or n != numbers[i - 1] + 1]
    stops = [n for i, n in enumerate(numbers) if i == len(numbers) - 1 or n + 1 != numbers[i + 1]]
    runs = [str(a) if a == b else f"{a}..{b}" for a, b in zip(starts, stops, strict=True)]
    if len(runs) > _SHOWN_RUNS:
        runs = [*runs[: _SHOWN_RUNS - 1], "..", runs[-1]]
    return "{" + ",".join(runs) + "}"

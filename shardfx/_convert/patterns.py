"""Path patterns: paths with placeholders, such as `layers/{i}/{part}/weight`."""

import dataclasses
import difflib
import functools as ft
import re
from collections.abc import Iterable, Mapping

from .._ground.errors import MapError
from .._ground.text import between_numbers, printable


# The values of the placeholders of a path pattern, by name: `{"i": 3}` for `{i}` in
# `layers/{i}/weight`.
Binding = Mapping[str, str | int]
# Comparing two names takes time in the product of their lengths, and there may be
# millions of names.
_COMPARED_NAMES = 2000
_COMPARED_CHARACTERS = 200
_FIELD = re.compile(r"\{([^{}]*)\}")
_TERM = re.compile(r"\s*(?:(\d+)\s*\*\s*)?(?:([A-Za-z_]\w*)(\*?)|(\d+))\s*")


@dataclasses.dataclass(frozen=True)
class Sum:
    """The sum inside a placeholder, such as `6*i+2`.

    - `terms`: pairs of a number and a name, here (6, "i").
    - `rest`: the number that is added, here 2.
    """

    terms: tuple[tuple[int, str], ...]
    rest: int

    @ft.cached_property
    def name(self) -> str | None:
        """The name, if the placeholder has only a name, as in `{i}`; else `None`."""
        return (
            self.terms[0][1]
            if len(self.terms) == 1 and self.terms[0][0] == 1 and not self.rest
            else None
        )

    def value(self, binding: Binding) -> str | int | None:
        """The value of the sum; `None` if a name has no value, or a text where the sum
        needs a number.
        """
        if self.name is not None:
            return binding.get(self.name)
        found = [(count, binding.get(name)) for count, name in self.terms]
        if not all(isinstance(value, int) for _, value in found):
            return None
        return self.rest + sum(
            count * value for count, value in found if isinstance(value, int)
        )

    def solved(self, value: str | int) -> tuple[str, str | int] | None:
        """The only name of the sum, and the value of this name for which the sum is
        `value`: ("i", 2) for `6*i+2` and 14.

        The result is `None` if there is no such value, or if the sum has several names.
        """
        if self.name is not None:
            return self.name, value
        if len(self.terms) != 1 or not isinstance(value, int):
            return None
        (count, name), over = self.terms[0], value - self.rest
        return (
            (name, over // count) if count and over >= 0 and over % count == 0 else None
        )


@ft.lru_cache(maxsize=4096)
def sum_of(text: str) -> Sum:
    """Parses the text inside the braces of a placeholder, such as `i`, `i+1` or
    `6*i+j+2`.
    """
    terms, rest = [], 0
    for part in text.split("+"):
        found = _TERM.fullmatch(part)
        if found is None or (found[4] and found[1]):
            raise MapError(
                f"`{{{text}}}` cannot be read: braces hold a name, or a sum as in"
                " `{6*i+2}`, without a minus; `{name*}` matches any text, also"
                " with slashes."
            )
        if found[2]:
            terms.append((int(found[1] or 1), found[2]))
        else:
            rest += int(found[4])
    return Sum(tuple(terms), rest)


@dataclasses.dataclass(frozen=True)
class Pattern:
    """A parsed path pattern: a path with placeholders, such as `layers/{i}/weight`.

    **Arguments:**

    - `text`: the pattern as it was written.
    - `parts`: alternately the text between placeholders and the sum in a placeholder;
      text is first and last.
    - `regex`: a regular expression that all matching paths match.
    """

    text: str
    parts: tuple[str | Sum, ...]
    regex: re.Pattern[str]

    @ft.cached_property
    def names(self) -> tuple[str, ...]:
        """The names in the placeholders of the pattern, without duplicates. For
        `{i}/{i+j}`: ("i", "j").
        """
        return tuple(
            dict.fromkeys(
                name
                for one in self.parts
                if isinstance(one, Sum)
                for _, name in one.terms
            )
        )

    @ft.cached_property
    def _format(self) -> str | None:
        """The pattern as a format string of Python, if each placeholder has only a
        name; else `None`.
        """
        texts = []
        for part in self.parts:
            if isinstance(part, str):
                texts.append(part)
            elif part.name is None:
                return None
            else:
                texts.append("{" + part.name + "}")
        return "".join(texts)

    def filled(self, binding: Binding) -> str | None:
        """The path with these values of the placeholders; `None` if a placeholder has
        no value.
        """
        if self._format is not None:
            try:
                return self._format.format_map(binding)
            except KeyError:
                return None
        done = []
        for part in self.parts:
            value = part if isinstance(part, str) else part.value(binding)
            if value is None:
                return None
            done.append(str(value))
        return "".join(done)

    def matched(self, path: str) -> dict[str, str | int] | None:
        """The values of the placeholders in a path: i = 3 for `layers/{i}/weight` and
        `layers/3/weight`.

        The result is `None` if the path does not match the pattern.
        """
        found = self.regex.fullmatch(path)
        if found is None:
            return None
        binding: dict[str, str | int] = {}
        for one, text in zip(self.parts[1::2], found.groups(), strict=True):
            assert isinstance(one, Sum)
            solved = one.solved(_number_or_text(text))
            if solved is None and len(one.terms) == 1:
                return None
            if solved is not None and binding.setdefault(*solved) != solved[1]:
                return None
        return binding


def _number_or_text(text: str) -> str | int:
    # "007" stays text: the number 7 would be written in another way.
    return (
        int(text)
        if text.isascii() and text.isdigit() and str(int(text[:18] or 0)) == text
        else text
    )


@ft.lru_cache(maxsize=4096)
def pattern(text: str) -> Pattern:
    """Parses a path pattern such as `layers/{i}/weight`, through a cache."""
    pieces = _FIELD.split(text)
    if any("{" in piece or "}" in piece for piece in pieces):
        raise MapError(f"the path `{text}` has a brace without its other half.")
    parts = tuple(
        piece if at % 2 == 0 else sum_of(piece) for at, piece in enumerate(pieces)
    )
    regex = [
        (
            re.escape(piece)
            if at % 2 == 0
            else "(.+)"
            if piece.endswith("*")
            else "([^/.]+)"
        )
        for at, piece in enumerate(pieces)
    ]
    return Pattern(text, parts, re.compile("".join(regex), re.DOTALL))


def near(path: str, names: Iterable[str], what: str = "") -> str:
    shown = " or ".join(
        f"`{printable(name)}`" for name in near_names(path, names, 2, 0.6)
    )
    return f"; near {what + ' ' if what else ''}{shown}" if shown else ""


def near_names(path: str, names: Iterable[str], most: int, cutoff: float) -> list[str]:
    """The `most` names that are most similar to `path`, with a similarity from `cutoff`
    to 1, in bounded time.
    """
    if len(path) > _COMPARED_CHARACTERS:
        return []
    found = [name for name in names if len(name) <= _COMPARED_CHARACTERS]
    if len(found) > _COMPARED_NAMES:
        template = "".join(between_numbers(path))
        found = [
            name
            for name in found
            if name[-4:] == path[-4:] or "".join(between_numbers(name)) == template
        ]
    return difflib.get_close_matches(
        path, found[:_COMPARED_NAMES], n=most, cutoff=cutoff
    )

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
# A term of a sum: a name, with a factor or a star, or a number.
_TERM = re.compile(
    r"\s*(?:(?P<factor>\d+)\s*\*\s*)?"
    r"(?:(?P<name>[A-Za-z_]\w*)(?P<star>\*?)|(?P<number>\d+))\s*"
)


@dataclasses.dataclass(frozen=True)
class Sum:
    """The sum inside a placeholder, such as `6*i+2`.

    - `terms`: pairs of a factor and a name, here (6, "i").
    - `constant`: the number that is added, here 2.
    """

    terms: tuple[tuple[int, str], ...]
    constant: int

    @ft.cached_property
    def name(self) -> str | None:
        """The name, if the placeholder has only a name, as in `{i}`; else `None`."""
        if len(self.terms) != 1 or self.constant:
            return None
        ((count, name),) = self.terms
        return name if count == 1 else None

    @property
    def names(self) -> list[str]:
        """The names of the terms, in order."""
        return [name for _, name in self.terms]

    def value(self, binding: Binding) -> str | int | None:
        """The value of the sum; `None` if a name has no value, or a text where the sum
        needs a number.
        """
        if self.name is not None:
            return binding.get(self.name)
        total = self.constant
        for count, name in self.terms:
            value = binding.get(name)
            if not isinstance(value, int):
                return None
            total += count * value
        return total

    def solved(self, value: str | int) -> tuple[str, str | int] | None:
        """The only name of the sum, and the value of this name for which the sum is
        `value`: ("i", 2) for `6*i+2` and 14.

        The result is `None` if there is no such value, or if the sum has several names.
        """
        if self.name is not None:
            return self.name, value
        if len(self.terms) != 1 or not isinstance(value, int):
            return None
        ((count, name),) = self.terms
        product = value - self.constant
        if not count or product < 0 or product % count:
            return None
        return name, product // count


@ft.lru_cache(maxsize=4096)
def sum_of(text: str) -> Sum:
    """Parses the text inside the braces of a placeholder, such as `i`, `i+1` or
    `6*i+j+2`.
    """
    terms = []
    constant = 0
    for part in text.split("+"):
        term = _TERM.fullmatch(part)
        if term is None or not _is_term_of(text, term):
            raise MapError(
                f"`{{{text}}}` cannot be read: braces hold a name, or a sum as in"
                " `{6*i+2}`, without a minus; `{name*}` matches any text, also"
                " with slashes."
            )
        if term["name"]:
            factor = int(term["factor"] or 1)
            # A path that does not change with its placeholder can be counted forever.
            if not factor:
                raise MapError(
                    f"`{{{text}}}` multiplies `{term['name']}` by 0, so that it names"
                    " one path for all numbers; leave the term out."
                )
            terms.append((factor, term["name"]))
        else:
            constant += int(term["number"])
    return Sum(tuple(terms), constant)


def _is_term_of(text: str, term: re.Match[str]) -> bool:
    """Whether a matched term may be in the placeholder `text`: products of numbers may
    not, and only a name by itself has a star, with which it matches slashes.
    """
    if term["number"]:
        return term["factor"] is None
    return not term["star"] or text.strip() == term["name"] + "*"


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
        names: dict[str, None] = {}
        for part in self.parts:
            if isinstance(part, Sum):
                names |= dict.fromkeys(part.names)
        return tuple(names)

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
        texts = []
        for part in self.parts:
            value = part if isinstance(part, str) else part.value(binding)
            if value is None:
                return None
            texts.append(str(value))
        return "".join(texts)

    def around(self, binding: Binding, name: str) -> list[str] | None:
        """The texts around each placeholder `name` of the path, all others filled, so
        that `"3".join(texts)` is the path for the value 3. The result is `None` if
        another placeholder has no value, or if the path has a sum.
        """
        texts = [""]
        for part in self.parts:
            if isinstance(part, Sum) and part.name == name:
                texts.append("")
                continue
            value = part
            if isinstance(part, Sum):
                value = None if part.name is None else part.value(binding)
            if value is None:
                return None
            texts[-1] += str(value)
        return texts

    def matched(self, path: str) -> dict[str, str | int] | None:
        """The values of the placeholders in a path: i = 3 for `layers/{i}/weight` and
        `layers/3/weight`.

        The result is `None` if the path does not match the pattern.
        """
        match = self.regex.fullmatch(path)
        if match is None:
            return None
        binding: dict[str, str | int] = {}
        # Texts and placeholders are parts in turn. The regex has a group for each
        # placeholder.
        placeholders = self.parts[1::2]
        for part, text in zip(placeholders, match.groups(), strict=True):
            assert isinstance(part, Sum)
            # A name and its value; `None` for a sum without a solution, or of several
            # names, whose values are in other placeholders.
            solved = part.solved(_number_or_text(text))
            if solved is None and len(part.terms) == 1:
                return None
            if solved is not None and binding.setdefault(*solved) != solved[1]:
                return None
        return binding


def _number_or_text(text: str) -> str | int:
    """A part of a path as a number, if it is written as Python writes this number; else
    the text.
    """
    # "007" stays text: the number 7 would be written in another way.
    digits = text[:18] or 0
    is_number = text.isascii() and text.isdigit() and str(int(digits)) == text
    return int(text) if is_number else text


@ft.lru_cache(maxsize=4096)
def pattern(text: str) -> Pattern:
    """Parses a path pattern such as `layers/{i}/weight`, through a cache."""
    # Text and the inside of braces, in turn.
    texts = _FIELD.split(text)
    if any("{" in inside or "}" in inside for inside in texts):
        raise MapError(f"the path `{text}` has a brace without its other half.")
    parts: list[str | Sum] = []
    regex = []
    for number, part_text in enumerate(texts):
        if number % 2 == 0:
            parts.append(part_text)
            regex.append(re.escape(part_text))
        else:
            parts.append(sum_of(part_text))
            is_starred = part_text.rstrip().endswith("*")
            regex.append("(.+)" if is_starred else "([^/.]+)")
    return Pattern(
        text=text,
        parts=tuple(parts),
        regex=re.compile("".join(regex), re.DOTALL),
    )


def near_hint(path: str, names: Iterable[str], subject: str = "") -> str:
    """The names that are similar to `path` as the end of a message, such as "; near
    `a/w` or `a/v`"; "" if none is. `subject` stands before them: "; near the rule for
    `a/w`".
    """
    quoted = [f"`{printable(name)}`" for name in near_names(path, names, 2, 0.6)]
    if not quoted:
        return ""
    subject_text = f"{subject} " if subject else ""
    return f"; near {subject_text}{' or '.join(quoted)}"


def near_names(path: str, names: Iterable[str], most: int, cutoff: float) -> list[str]:
    """The `most` names that are most similar to `path`, with a similarity from `cutoff`
    to 1, in bounded time.
    """
    if len(path) > _COMPARED_CHARACTERS:
        return []
    compared = [name for name in names if len(name) <= _COMPARED_CHARACTERS]
    if len(compared) > _COMPARED_NAMES:
        template = "".join(between_numbers(path))
        compared = [
            name
            for name in compared
            if name[-4:] == path[-4:] or "".join(between_numbers(name)) == template
        ]
    return difflib.get_close_matches(
        path,
        compared[:_COMPARED_NAMES],
        n=most,
        cutoff=cutoff,
    )

"""Formats results as text and HTML: tables, sizes, dtypes and shapes, and one path for
many paths that differ only in numbers.

Names can come from untrusted files, so every name is passed through `printable` before
it is shown.
"""

import html
import math
import re
import textwrap
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from typing import Any, TypeVar


# A number between separators: the 12 of `layers/12/w` and of `h.12.attn`, but not the
# 12 of `fc12`. Numbers of more digits count as names: no layer has such a number, and
# Python refuses to convert thousands of digits.
_NUMBER = re.compile(r"(?<![A-Za-z0-9])[0-9]{1,18}(?![A-Za-z0-9])")
_SHOWN_RANGES = 3
_Item = TypeVar("_Item")
_Key = TypeVar("_Key", bound=Hashable)


def printable(text: str) -> str:
    """`text` on one line, with escape sequences for control characters, direction marks
    and lone surrogates.
    """
    if text.isprintable():
        return text
    chars = []
    for char in text:
        if not char.isprintable():
            char = char.encode("unicode_escape").decode()
        chars.append(char)
    return "".join(chars)


def plural(count: int, singular: str, many: str | None = None) -> str:
    """A count with its noun: "1 array", "2 arrays". `many` is the plural if it does not
    end in "s".
    """
    if count == 1:
        return f"1 {singular}"
    return f"{count:,} {many or singular + 's'}"


def quoted(name: str, limit: int = 160) -> str:
    """`repr(name)`, without its middle if it is longer than `limit` characters."""
    text = repr(name)
    if len(text) <= limit:
        return text
    return f"{text[: limit // 3]}...{text[-(limit - limit // 3) :]}"


def between_numbers(path: str) -> tuple[str, ...]:
    """The parts of a path between its numbers: `("layers/", "/w")` for `layers/0/w`.

    Paths that differ only in numbers have equal parts.
    """
    return tuple(_NUMBER.split(path))


def together(
    items: Iterable[_Item],
    key: Callable[[_Item], _Key],
) -> dict[_Key, list[_Item]]:
    """Groups items by the result of `key`. The groups are in the order of their first
    items.
    """
    groups: dict[_Key, list[_Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def joined(paths: Sequence[str]) -> str:
    """One text with number ranges for paths that differ only in numbers:
    `layers/{0..31}/attn/q_proj/weight`.
    """
    if len(paths) == 1:
        return paths[0]
    numbers_of_paths = [map(int, _NUMBER.findall(path)) for path in paths]
    range_texts: list[str] = []
    for numbers_at_position in zip(*numbers_of_paths, strict=True):
        range_texts.append(_ranges(sorted(set(numbers_at_position))))
    return _with_numbers(paths[0], range_texts)


def _with_numbers(path: str, texts: Sequence[str]) -> str:
    """A path with a text in the place of each of its numbers."""
    remaining = iter(texts)
    return _NUMBER.sub(lambda _: next(remaining), path)


def joined_exactly(paths: Sequence[str]) -> list[tuple[str, int]]:
    """Texts for paths that differ only in numbers, each with the number of paths that
    it stands for.

    A text stands for every combination of the numbers in its ranges:
    `layers/{0..3}/experts/{0..7}/w` for 32 paths. Unlike the text of `joined`, these
    texts name all paths and no others.
    """
    if len(paths) == 1:
        return [(paths[0], 1)]
    distinct_paths: dict[str, None] = {}
    repeated_paths: list[str] = []
    for path in paths:
        if path in distinct_paths:
            repeated_paths.append(path)
        distinct_paths[path] = None
    numbers_of_paths = [tuple(_NUMBER.findall(path)) for path in distinct_paths]
    texts = []
    for product in _products(numbers_of_paths, 0):
        texts.append((_with_ranges(paths[0], product), len(product)))
    if repeated_paths:
        texts += joined_exactly(repeated_paths)
    return texts


def _with_ranges(path: str, rows: Sequence[tuple[str, ...]]) -> str:
    """A path with the range of its numbers in the place of each number, such as
    `layers/{0..3}/experts/{0..7}/w`.

    Each of `rows` has the numbers of one path that the text stands for, in the order in
    which they occur in it.
    """
    texts: list[str] = []
    for column in zip(*rows, strict=True):
        numbers = list(dict.fromkeys(column))
        text = numbers[0]
        if len(numbers) > 1:
            numbers_in_order = sorted(map(int, numbers))
            text = _ranges(numbers_in_order, len(numbers))
        texts.append(text)
    return _with_numbers(path, texts)


def _products(
    rows: Sequence[tuple[str, ...]],
    column: int,
) -> Iterator[Sequence[tuple[str, ...]]]:
    """Divides rows into groups that are products: each group has every combination of
    the numbers in its columns. The columns before `column` are divided already.

    A row has the numbers of one path, as ("0", "5") for `layers/0/experts/5/w`. From
    column 0 on, (0, 5), (0, 6), (1, 5), (1, 6) are one group, and (0, 5), (1, 6) two.
    """
    if column == len(rows[0]):
        yield rows
        return
    rows_by_number: dict[str, list[tuple[str, ...]]] = {}
    for row in rows:
        rows_by_number.setdefault(row[column], []).append(row)

    # Two numbers of the column share a group if their rows have the same remainders,
    # the rows without this column.
    groups: dict[object, list[tuple[str, ...]]] = {}
    for number, rows_of_number in rows_by_number.items():
        remainders = frozenset(
            row[:column] + row[column + 1 :] for row in rows_of_number
        )
        # A range would lose the zeros of `007`, so such a number has a group alone.
        padded_number = None if str(int(number)) == number else number
        groups.setdefault((padded_number, remainders), []).extend(rows_of_number)
    for rows_of_group in groups.values():
        yield from _products(rows_of_group, column + 1)


def _ranges(numbers: list[int], most: int = _SHOWN_RANGES) -> str:
    """Numbers in ascending order as a text with their ranges, such as `{0..3,7}`; a
    single number without braces. Of more than `most` ranges, the text has the first
    ones and the last, with ".." between them.
    """
    if len(numbers) == 1:
        return str(numbers[0])
    # The first and the last number of each range.
    bounds: list[list[int]] = []
    for number in numbers:
        if bounds and number == bounds[-1][1] + 1:
            bounds[-1][1] = number
        else:
            bounds.append([number, number])
    ranges = []
    for first, last in bounds:
        text = f"{first}..{last}"
        if first == last:
            text = str(first)
        ranges.append(text)
    if len(ranges) > most:
        first_ranges = ranges[: most - 1]
        ranges = [*first_ranges, "..", ranges[-1]]
    return "{" + ",".join(ranges) + "}"


# The short names of dtypes, as in `bf16` for `bfloat16`.
_KINDS = {"float": "f", "bfloat": "bf", "uint": "u", "int": "i", "complex": "c"}


def table(
    rows: Sequence[tuple[str, ...]],
    *,
    right: Collection[str],
    width: int | None = None,
    spare: Sequence[str] = (),
) -> list[str]:
    """The lines of a table under the header `rows[0]`. The columns named in `right` are
    right-aligned.

    If a line is longer than `width`, the columns named in `spare` are dropped, one
    after the other. If it is still too long, the paths of the first column are divided:
    the path of the layer becomes a heading above the rest. No path is shortened. Cells
    may hold any text, because it is made printable.
    """
    rows = [tuple(map(printable, row)) for row in rows]
    if width is None:
        return _lines(rows, right)
    for name in spare:
        if _line_width(rows) > width and name in rows[0]:
            position = rows[0].index(name)
            rows = [row[:position] + row[position + 1 :] for row in rows]
    path_width = _widths(rows)[0]
    # What the other columns leave for paths.
    path_room = width - (_line_width(rows) - path_width)
    if path_width <= path_room:
        return _lines(rows, right)

    header, *body = rows
    headings_and_rests = [_heading_and_rest(path) for path, *_ in body]
    shown: list[tuple[str, ...]] = [header]
    for (_, rest), (_, *cells) in zip(headings_and_rests, body, strict=True):
        # If the rest of a path is still too long, it has a line of its own.
        path = "" if len(rest) > path_room else rest
        shown.append((path, *cells))
    header_line, *lines = _lines(shown, right)
    printed = [header_line]
    last_heading = ""
    for (heading, rest), line in zip(headings_and_rests, lines, strict=True):
        if heading and heading != last_heading:
            printed.append(heading)
        if len(rest) > path_room:
            printed.append(rest)
        printed.append(line)
        last_heading = heading
    return printed


_GAP = 2


def _widths(rows: Sequence[tuple[str, ...]]) -> list[int]:
    """The width of each column, which is that of its longest cell."""
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


def _line_width(rows: Sequence[tuple[str, ...]]) -> int:
    """The width of a table's lines."""
    widths = _widths(rows)
    return sum(widths) + _GAP * (len(widths) - 1)


def _lines(rows: Sequence[tuple[str, ...]], right: Collection[str]) -> list[str]:
    """The lines of a table, with cells padded to the widths of their columns. Columns
    named in `right` are right-aligned.
    """
    header = rows[0]
    widths = _widths(rows)
    lines = []
    for row in rows:
        cells = []
        for name, cell, width in zip(header, row, widths, strict=True):
            align = str.rjust if name in right else str.ljust
            cells.append(align(cell, width))
        line = (_GAP * " ").join(cells)
        lines.append(line.rstrip())
    return lines


# The two parts of a path: up to the first numbers in braces, as in `layers/{0..31}/`,
# and the rest.
_LAYER = re.compile(r"(.*?\{[0-9][^}]*\}[/.])(.+)")


def _heading_and_rest(path: str) -> tuple[str, str]:
    """Divides a path into a heading, which is the path of the layer, and the indented
    rest.

    `layers/{0..31}/attn/w` has the heading `layers/{0..31}/`. A path without a layer
    has the heading "".
    """
    layer = _LAYER.fullmatch(path)
    if layer is None:
        return ("", path)
    return (layer[1], _GAP * " " + layer[2])


# A line with two blanks between words is a row of a table.
_COLUMNS = re.compile(r"\S {2,}\S")


def wrapped(text: str, width: int | None) -> str:
    """`text` with its long lines wrapped to `width`. Rows of tables are not wrapped."""
    if width is None:
        return text
    lines = []
    for line in text.split("\n"):
        if len(line) > width:
            line = _wrapped(line, width)
        lines.append(line)
    return "\n".join(lines)


def _wrapped(line: str, width: int) -> str:
    """A line wrapped to `width`, with its own indent; a row of a table as it is."""
    indent = line[: len(line) - len(line.lstrip())]
    if _COLUMNS.search(line.lstrip()):
        return line
    return textwrap.fill(
        line,
        width,
        subsequent_indent=indent + "    ",
        break_on_hyphens=False,
        break_long_words=False,
    )


class Shown(str):
    """A string whose `repr` is its text, so that a console or notebook shows it as
    `print` does.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def first_lines(self: object) -> str:
    """The first 40 lines of `str(self)`, for the `__repr__` of results whose text can
    be long.
    """
    lines = str(self).splitlines()
    if len(lines) > 40:
        lines = [*lines[:39], f"... {len(lines) - 39} lines more; print it."]
    return "\n".join(lines)


def spec_text(partitions: Sequence[object]) -> str:
    """The entries of a PartitionSpec, or of an array's logical names, as text such as
    `data+model,-`.

    "," separates dimensions, "+" joins the axes of one dimension, and "-" is a
    dimension without an axis.
    """
    return ",".join(map(entry_text, partitions)) or "-"


def entry_text(entry: object) -> str:
    """One entry of a PartitionSpec, or of an array's logical names, as text."""
    if isinstance(entry, tuple):
        return "+".join(map(entry_text, entry)) or "-"
    if isinstance(entry, str):
        return entry
    if entry is None:
        return "-"
    return "any"


def bytes_text(count: int) -> str:
    """A number of bytes with its unit: `512 B`, `32.0 KiB`, `1.5 TiB`."""
    if count < 1024:
        return f"{count} B"
    exponent = int(math.log2(count))
    power = min(exponent // 10, 6)
    return f"{count / 1024**power:,.1f} {'KMGTPE'[power - 1]}iB"


def array_text(dtype: Any, shape: Sequence[int]) -> str:
    """A dtype and shape as `bf16[1024,4096]`."""
    name = dtype if isinstance(dtype, str) else dtype.name
    letters = re.match("[a-z]*", name)
    kind = letters.group() if letters else ""
    short_kind = _KINDS.get(kind, kind)
    bits = name[len(kind) :]
    sizes = ",".join(map(str, shape))
    return f"{short_kind}{bits}[{sizes}]"


def html_table(
    rows: Sequence[Sequence[str]],
    *,
    right: Collection[str] = (),
    below: Sequence[str] = (),
) -> str:
    """An HTML table under the header `rows[0]`, for a `_repr_html_`. Without rows the
    result has no table.

    The columns named in `right` are right-aligned. Each text of `below` is a paragraph
    under the table. Cells may hold any text, because it is made printable and escaped.
    """
    lines = [f"<p>{_escaped(text)}</p>" for text in below]
    if rows:
        header, *others = rows
        sides: list[str] = []
        for name in header:
            side = "right" if name in right else "left"
            sides.append(side)
        table_lines = ["<table>", _html_row("th", header, sides)]
        for row in others:
            table_lines.append(_html_row("td", row, sides))
        lines = [*table_lines, "</table>", *lines]
    return "\n".join(lines)


def html_text(self: object) -> str:
    """The text of a result as preformatted HTML, for the `_repr_html_` of results that
    are more than one table.
    """
    escaped_lines = map(_escaped, str(self).splitlines())
    return "<pre>" + "\n".join(escaped_lines) + "</pre>"


def _escaped(text: str) -> str:
    return html.escape(printable(text))


def _html_row(tag: str, cells: Sequence[str], sides: Sequence[str]) -> str:
    texts: list[str] = []
    for cell, side in zip(cells, sides, strict=True):
        texts.append(f'<{tag} style="text-align: {side}">{_escaped(cell)}</{tag}>')
    return f"<tr>{''.join(texts)}</tr>"

import html
import re
import sys

import pytest
from hypothesis import given, settings, strategies as st

from shardfx._ground import text as _text


@pytest.mark.parametrize(
    "text, shown",
    [
        *(
            (text, text)
            for text in (
                "",
                "layers/0/w",
                "a b",
                "Größe/重み",
                "back\\slash",
                "quote'\"",
            )
        ),
        ("\x1b[31mred", r"\x1b[31mred"),
        ("a\nb\r\t", r"a\nb\r\t"),
        ("\x9b2J\x7f\0", r"\x9b2J\x7f\x00"),
        ("user\u202egpj.exe", r"user\u202egpj.exe"),
        ("\U000e0001tag", r"\U000e0001tag"),
    ],
)
def test_what_would_move_the_cursor_or_fail_to_encode_is_escaped(text, shown):
    assert _text.printable(text) == shown


SIZES = {
    0: "0 B",
    1023: "1023 B",
    1024: "1.0 KiB",
    1536 << 20: "1.5 GiB",
    1 << 60: "1.0 EiB",
    1 << 70: "1,024.0 EiB",
}


@pytest.mark.parametrize("count, text", SIZES.items())
def test_bytes_are_shown_in_the_largest_unit_below(count, text):
    assert _text.bytes_text(count) == text


def test_a_long_name_is_quoted_without_its_middle():
    assert _text.quoted("a/\x1bb") == r"'a/\x1bb'"
    text = _text.quoted("a" * 10**6 + "/weight")
    assert len(text) < 200
    assert text.startswith("'aaa")
    assert text.endswith("aaa/weight'")
    assert "..." in text


@given(st.text(st.characters(codec=None)))
def test_any_text_is_shown_on_one_line(text):
    shown = _text.printable(text)
    assert shown.isprintable()
    assert shown.encode().decode() == _text.printable(shown) == shown


def test_long_numbers_are_part_of_a_name():
    paths = [f"a/{digit * (sys.get_int_max_str_digits() + 1)}/w" for digit in "12"]
    actual = [_text.between_numbers(path) for path in paths]
    expected = [(paths[0],), (paths[1],)]
    assert actual == expected
    assert _text.between_numbers("a/12/w") == ("a/", "/w")
    assert _text.joined(["a/1/w", "a/2/w"]) == "a/{1..2}/w"


def test_a_table_has_one_line_per_row_and_keeps_paths():
    odd = [("path", "n"), ("a\nb", "1"), ("\x1b[2J", "2")]
    assert _text.table(odd, right={"n"}) == ["path     n", r"a\nb     1", r"\x1b[2J  2"]
    rows = [
        ("path", "n", "why"),
        ("layers/{0..3}/some/long/name", "12", "because"),
        ("head", "1", "-"),
    ]
    actual = _text.table(rows, right={"n"}, width=42)
    assert actual == _text.table(rows, right={"n"})
    narrow = _text.table(rows, right={"n"}, width=36, spare=("why", "n"))
    expected = [
        ["path", "n"],
        ["layers/{0..3}/some/long/name", "12"],
        ["head", "1"],
    ]
    assert [line.split() for line in narrow] == expected
    narrower = _text.table(rows, right={"n"}, width=24, spare=("why",))
    assert narrower == [
        "path               n",
        "layers/{0..3}/",
        "  some/long/name  12",
        "head               1",
    ]
    least = _text.table(rows, right={"n"}, width=12, spare=("why",))
    assert least == [
        "path   n",
        "layers/{0..3}/",
        "  some/long/name",
        "      12",
        "head   1",
    ]


def test_prose_is_wrapped_and_rows_are_not():
    text = "one two three four\n  five six seven eight\nname    rows of a table"
    parts = _text.wrapped(text, 12).split("\n")
    assert parts[:3] == ["one two", "    three", "    four"]
    assert parts[-1] == "name    rows of a table"
    assert parts[3:-1] == ["  five six", "      seven", "      eight"]
    assert _text.wrapped(text, None) == text


def test_plurals():
    assert _text.plural(1, "leaf", "leaves") == "1 leaf"
    assert _text.plural(0, "array") == "0 arrays"
    assert _text.plural(1200, "unit") == "1,200 units"


def test_a_table_with_a_column_aligned_right_and_text_below():
    rows = [("name", "bytes"), ("w", "12")]
    actual = _text.html_table(rows, right={"bytes"}, below=["12 in all."])
    assert (
        actual
        == '<table>\n<tr><th style="text-align: left">name</th><th style="text-align:'
        ' right">bytes</th></tr>\n<tr><td style="text-align: left">w</td><td'
        ' style="text-align: right">12</td></tr>\n</table>\n<p>12 in all.</p>'
    )
    assert _text.html_table([], below=["nothing"]) == "<p>nothing</p>"


@given(st.text(st.characters(codec=None), max_size=40))
def test_any_text_stays_text(text):
    rows = [("a",), ("<script>alert(1)</script>" + text,)]
    page = _text.html_table(rows, below=["&amp;" + text])
    expected = ["table", "tr", "th", "tr", "td", "p"]
    assert re.findall(r"<(\w+)", page) == expected
    texts = [
        html.unescape(text_node) for text_node in re.findall(r">([^<>\n]+)<", page)
    ]
    expected = [
        "a",
        "<script>alert(1)</script>" + _text.printable(text),
        "&amp;" + _text.printable(text),
    ]
    assert texts == expected


numbers = st.integers(0, 3).map(str) | st.sampled_from(["00", "01", "10", "11"])


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=12))
def test_exact_ranges_can_be_read_back(pairs):
    paths = [f"layers/{a}/fc1/{b}/w" for a, b in pairs]
    pattern = _text.joined_exactly(paths)
    actual = []
    for text, _ in pattern:
        actual += expanded(text)
    assert sorted(actual) == sorted(paths)
    assert sum(count for _, count in pattern) == len(paths)
    for text, count in pattern:
        assert len(expanded(text)) == count


def expanded(text):
    candidates = re.search(r"\{([^}]*)\}", text)
    if not candidates:
        return [text]
    numbers = []
    for part in candidates[1].split(","):
        first, _, last = part.partition("..")
        numbers += range(int(first), int(last or first) + 1)
    paths = []
    for number in numbers:
        paths += expanded(
            text[: candidates.start()] + str(number) + text[candidates.end() :]
        )
    return paths

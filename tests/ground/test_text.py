import html
import re
import sys

import pytest
from hypothesis import given, strategies as st

from shardfx._ground.text import (
    between_numbers,
    html_table,
    joined,
    plural,
    printable,
    quoted,
    table,
    wrapped,
)


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
    assert printable(text) == shown


def test_a_long_name_is_quoted_without_its_middle():
    assert quoted("a/\x1bb") == r"'a/\x1bb'"
    text = quoted("a" * 10**6 + "/weight")
    assert len(text) < 200
    assert text.startswith("'aaa")
    assert text.endswith("aaa/weight'")
    assert "..." in text


@given(st.text(st.characters(codec=None)))
def test_any_text_is_shown_on_one_line(text):
    shown = printable(text)
    assert shown.isprintable()
    assert shown.encode().decode() == printable(shown) == shown


def test_long_numbers_are_part_of_a_name():
    paths = [f"a/{digit * (sys.get_int_max_str_digits() + 1)}/w" for digit in "12"]
    actual = [between_numbers(path) for path in paths]
    expected = [(paths[0],), (paths[1],)]
    assert actual == expected
    assert between_numbers("a/12/w") == ("a/", "/w")
    assert joined(["a/1/w", "a/2/w"]) == "a/{1..2}/w"


def test_a_table_has_one_line_per_row_and_keeps_paths():
    odd = [("path", "n"), ("a\nb", "1"), ("\x1b[2J", "2")]
    assert table(odd, right={"n"}) == ["path     n", r"a\nb     1", r"\x1b[2J  2"]
    rows = [
        ("path", "n", "why"),
        ("layers/{0..3}/some/long/name", "12", "because"),
        ("head", "1", "-"),
    ]
    actual = table(rows, right={"n"}, width=42)
    assert actual == table(rows, right={"n"})
    narrow = table(rows, right={"n"}, width=36, spare=("why", "n"))
    expected = [
        ["path", "n"],
        ["layers/{0..3}/some/long/name", "12"],
        ["head", "1"],
    ]
    assert [line.split() for line in narrow] == expected
    narrower = table(rows, right={"n"}, width=24, spare=("why",))
    assert narrower == [
        "path               n",
        "layers/{0..3}/",
        "  some/long/name  12",
        "head               1",
    ]
    least = table(rows, right={"n"}, width=12, spare=("why",))
    assert least == [
        "path   n",
        "layers/{0..3}/",
        "  some/long/name",
        "      12",
        "head   1",
    ]


def test_prose_is_wrapped_and_rows_are_not():
    text = "one two three four\n  five six seven eight\nname    rows of a table"
    parts = wrapped(text, 12).split("\n")
    assert parts[:3] == ["one two", "    three", "    four"]
    assert parts[-1] == "name    rows of a table"
    assert parts[3:-1] == ["  five six", "      seven", "      eight"]
    assert wrapped(text, None) == text


def test_plurals():
    assert plural(1, "leaf", "leaves") == "1 leaf"
    assert plural(0, "array") == "0 arrays"
    assert plural(1200, "unit") == "1,200 units"


def test_a_table_with_a_column_aligned_right_and_text_below():
    rows = [("name", "bytes"), ("w", "12")]
    actual = html_table(rows, right={"bytes"}, below=["12 in all."])
    assert (
        actual
        == '<table>\n<tr><th style="text-align: left">name</th><th style="text-align:'
        ' right">bytes</th></tr>\n<tr><td style="text-align: left">w</td><td'
        ' style="text-align: right">12</td></tr>\n</table>\n<p>12 in all.</p>'
    )
    assert html_table([], below=["nothing"]) == "<p>nothing</p>"


@given(st.text(st.characters(codec=None), max_size=40))
def test_any_text_stays_text(text):
    rows = [("a",), ("<script>alert(1)</script>" + text,)]
    page = html_table(rows, below=["&amp;" + text])
    expected = ["table", "tr", "th", "tr", "td", "p"]
    assert re.findall(r"<(\w+)", page) == expected
    texts = [
        html.unescape(text_node) for text_node in re.findall(r">([^<>\n]+)<", page)
    ]
    expected = [
        "a",
        "<script>alert(1)</script>" + printable(text),
        "&amp;" + printable(text),
    ]
    assert texts == expected

import html
import re

from hypothesis import given, strategies as st

from shardfx._ground.text import html_table, printable


def test_a_table_with_a_column_aligned_right_and_text_below():
    assert html_table([("name", "bytes"), ("w", "12")], right={"bytes"}, below=["12 in all."]) == (
        '<table>\n<tr><th style="text-align: left">name</th><th style="text-align: right">bytes</th></tr>\n'
        '<tr><td style="text-align: left">w</td><td style="text-align: right">12</td></tr>\n'
        "</table>\n<p>12 in all.</p>"
    )
    assert html_table([], below=["nothing"]) == "<p>nothing</p>"


@given(st.text(st.characters(codec=None), max_size=40))
def test_any_text_stays_text(text):
    page = html_table([("a",), ("<script>alert(1)</script>" + text,)], below=["&amp;" + text])
    assert re.findall(r"<(\w+)", page) == ["table", "tr", "th", "tr", "td", "p"]
    texts = [html.unescape(found) for found in re.findall(r">([^<>\n]+)<", page)]
    assert texts == ["a", "<script>alert(1)</script>" + printable(text), "&amp;" + printable(text)]

import html.parser

from hypothesis import given, strategies as st

from shardfx._ground.html import html_table
from shardfx._ground.text import printable


class Page(html.parser.HTMLParser):
    """What a browser makes of it: tags with their attributes, and the text in each cell and paragraph."""

    def __init__(self, source: str):
        super().__init__()
        self.tags: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self.feed(source)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs).get("style")))
        if tag in ("td", "th", "p"):
            self.texts.append("")

    def handle_data(self, data):
        if data.strip("\n"):
            self.texts[-1] += data


def test_a_table_with_a_column_aligned_right_and_text_below():
    assert html_table([("name", "bytes"), ("w", "12")], right={"bytes"}, below=["12 in all."]) == (
        '<table>\n<tr><th style="text-align: left">name</th><th style="text-align: right">bytes</th></tr>\n'
        '<tr><td style="text-align: left">w</td><td style="text-align: right">12</td></tr>\n'
        "</table>\n<p>12 in all.</p>"
    )


def test_no_rows_are_no_table():
    assert html_table([], below=["nothing"]) == "<p>nothing</p>"


@given(st.text(st.characters(codec=None), max_size=40))
def test_any_text_stays_text(text):
    page = Page(html_table([("a",), ("<script>alert(1)</script>" + text,)], below=["&amp;" + text]))
    assert [tag for tag, _ in page.tags] == ["table", "tr", "th", "tr", "td", "p"]
    assert page.texts == ["a", "<script>alert(1)</script>" + printable(text), "&amp;" + printable(text)]

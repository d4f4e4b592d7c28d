"""The tables of `text` for a notebook: the same rows, escaped, so that a name from a file stays text."""

import html
from collections.abc import Collection, Sequence

from .text import printable


def html_table(rows: Sequence[Sequence[str]], *, right: Collection[str] = (), below: Sequence[str] = ()) -> str:
    """A plain HTML table under the header `rows[0]`, for a `_repr_html_`: no table where there are no rows.

    The columns named in `right` are aligned there, and each text of `below` is a paragraph under the table. Cells may
    hold any text: it is made printable, and escaped.
    """
    lines = [f"<p>{_escaped(text)}</p>" for text in below]
    if rows:
        sides = ["right" if name in right else "left" for name in rows[0]]
        body = [_row("td" if at else "th", row, sides) for at, row in enumerate(rows)]
        lines = ["<table>", *body, "</table>", *lines]
    return "\n".join(lines)


def html_text(self: object) -> str:
    """What `print` shows of a result, as it is: for the `_repr_html_` of what is no single table."""
    return "<pre>" + "\n".join(map(_escaped, str(self).splitlines())) + "</pre>"


def _escaped(text: str) -> str:
    return html.escape(printable(text))


def _row(tag: str, cells: Sequence[str], sides: Sequence[str]) -> str:
    pairs = zip(cells, sides, strict=True)
    inner = "".join(f'<{tag} style="text-align: {side}">{_escaped(cell)}</{tag}>' for cell, side in pairs)
    return f"<tr>{inner}</tr>"

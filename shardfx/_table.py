"""Tables of text for a terminal, and arrays and sizes in the few characters that a cell has."""

import math
import re
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np


_KINDS = {"float": "f", "bfloat": "bf", "uint": "u", "int": "i", "complex": "c"}


def table(rows: Sequence[tuple[str, ...]], *, right: set[str], width: int | None = None) -> list[str]:
    """Lines of aligned columns under the header `rows[0]`; the columns named in `right` are aligned there.

    With a `width` the first column (a path) and the last one (why) are cut where the lines would be longer.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if width is not None:
        widths = _fitted(widths, width)
    aligned = [str.rjust if name in right else str.ljust for name in rows[0]]
    return [
        "  ".join(
            align(_cut(cell, size, keep_end=column == 0), size)
            for column, (align, cell, size) in enumerate(zip(aligned, row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def bytes_text(count: int) -> str:
    """`count` bytes for a person: `512 B`, `32.0 KiB`, `1.5 TiB`."""
    if count < 1024:
        return f"{count} B"
    power = min(int(math.log2(count)) // 10, 6)
    return f"{count / 1024**power:,.1f} {'KMGTPE'[power - 1]}iB"


def array_text(dtype: Any, shape: Sequence[int]) -> str:
    """A dtype and shape as `bf16[1024,4096]`."""
    name = str(dtype) if not jnp.issubdtype(dtype, np.number) else jnp.dtype(dtype).name
    letters = re.match("[a-z]*", name)
    kind = letters.group() if letters else ""
    return f"{_KINDS.get(kind, kind)}{name[len(kind) :]}[{','.join(map(str, shape))}]"


def _fitted(widths: list[int], width: int) -> list[int]:
    """Column widths that fit if they can: the last column (why) and the first (path) give way in turn."""
    widths = list(widths)
    for column, least in ((-1, 16), (0, 32), (-1, 12), (0, 16)):
        excess = sum(widths) + 2 * (len(widths) - 1) - width
        widths[column] -= max(0, min(excess, widths[column] - least))
    return widths


def _cut(text: str, size: int, *, keep_end: bool) -> str:
    """`text` in at most `size` characters; what tells paths apart is mostly their end."""
    if len(text) <= size:
        return text
    tail = (size - 2) * 4 // 5 if keep_end else 0
    return f"{text[: size - 2 - tail]}..{text[len(text) - tail :]}"

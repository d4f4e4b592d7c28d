"""Python's numbers in a state, a step counter for one: they are no arrays, so a file's metadata holds them."""

import json
from collections.abc import Mapping
from typing import Any

from .._ground.errors import CheckpointError
from .._ground.text import quoted
from ._files import parsed_json


NUMBERS_KEY = "shardfx.numbers"
_KINDS = {"bool": bool, "int": int, "float": float, "complex": complex}
# Beyond 64 bits, Python's own text of an integer takes quadratic time.
_WIDE = 2**63


def is_number(leaf: Any) -> bool:
    """Whether a leaf is one of Python's numbers; a subclass, of an enumeration for one, is none."""
    return type(leaf) in (bool, int, float, complex)


def to_text(numbers: Mapping[str, Any]) -> str:
    """Numbers by path, as the metadata has them."""
    rows = {path: [type(value).__name__, _number_text(value)] for path, value in numbers.items()}
    return json.dumps(rows, separators=(",", ":"))


def _number_text(value: Any) -> str:
    return hex(value) if type(value) is int and abs(value) >= _WIDE else repr(value)


def from_metadata(metadata: Mapping[str, str], directory: str) -> dict[str, Any] | None:
    """The numbers of a checkpoint by path; `None` for one that was not written here."""
    text = metadata.get(NUMBERS_KEY)
    if text is None:
        return None
    where = f"`{NUMBERS_KEY}` in {directory!r}"
    rows = parsed_json(text.encode(), where)
    if not isinstance(rows, dict):
        raise CheckpointError(f"{where} must map paths to numbers; the file is damaged.")
    return {path: _number(row, path, where) for path, row in rows.items()}


def _number(row: Any, path: str, where: str) -> Any:
    match row:
        case [str() as kind, str() as text] if kind in _KINDS:
            try:
                if kind == "bool":
                    return {"True": True, "False": False}[text]
                return int(text, 0) if kind == "int" else _KINDS[kind](text)
            except (ValueError, KeyError):
                pass
    raise CheckpointError(f"{where} has no number for {quoted(path)}; the file is damaged.")

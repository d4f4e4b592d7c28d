"""Where other libraries lie, which are read and not imported."""

import importlib.util
from pathlib import Path

import pytest


def folder_of(library: str) -> Path:
    found = importlib.util.find_spec(library)
    if found is None or found.origin is None:
        pytest.skip(
            f"{library} is not installed; `pip install --no-deps {library}` is enough"
        )
    return Path(found.origin).parent

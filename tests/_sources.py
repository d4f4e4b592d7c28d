"""Where other libraries lie, which are read and not imported."""

import importlib.util
from pathlib import Path

import pytest


def folder_of(library: str) -> Path:
    module_spec = importlib.util.find_spec(library)
    if module_spec is None or module_spec.origin is None:
        pytest.skip(
            f"{library} is not installed; `pip install --no-deps {library}` is enough"
        )
    return Path(module_spec.origin).parent

"""What importing costs, measured in processes of their own; this module itself imports nothing of it."""

import importlib
import time


def seconds_to_import(first: str, then: str) -> float:
    """How long `import then` takes where `first` has been imported."""
    importlib.import_module(first)
    begin = time.perf_counter()
    importlib.import_module(then)
    return time.perf_counter() - begin

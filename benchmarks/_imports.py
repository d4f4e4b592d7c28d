"""What importing costs, measured in processes of their own; this module itself imports nothing of it."""

import importlib
import time


def seconds_to_import(first: str, then: str) -> float:
    """The processor time of `import then` where `first` has been imported."""
    importlib.import_module(first)
    begin = time.process_time()
    importlib.import_module(then)
    return time.process_time() - begin

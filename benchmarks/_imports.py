"""What importing costs, measured in processes of their own; this module itself imports
nothing of it.
"""

import importlib
import sys
import time


def seconds_to_import(
    first: str, then: str, bytecode: str, write: bool
) -> tuple[float, float]:
    """The processor time of `import first`, and of `import then` after it.

    **Arguments:**

    - `bytecode`: the folder in which the second import looks for compiled files:
      installers make them, and a checkout
        has none where Python is told to write none.
    - `write`: whether it leaves there what it does not find.
    """
    times = [time.process_time()]
    importlib.import_module(first)
    times.append(time.process_time())
    sys.pycache_prefix = bytecode
    sys.dont_write_bytecode = not write
    importlib.import_module(then)
    times.append(time.process_time())
    return times[1] - times[0], times[2] - times[1]

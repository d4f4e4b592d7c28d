"""`python -m tests.step.repros [--gspmd]`: all programs, as a line of JSON for each."""

import importlib
import json
import pkgutil
import sys
from pathlib import Path

import jax

from . import _run


def names() -> list[str]:
    """The modules that hold a fault's program."""
    folder = Path(__file__).parent
    modules = pkgutil.iter_modules([str(folder)])
    return sorted(module.name for module in modules if not module.name.startswith("_"))


if __name__ == "__main__":
    _run.emulate()
    if "--gspmd" in sys.argv:
        jax.config.update("jax_use_shardy_partitioner", False)
    for name in names():
        fault = importlib.import_module(f"{__package__}.{name}").cases()
        wrong = {case: _run.apart(program) for case, program in fault.wrong.items()}
        mended = {case: _run.apart(program) for case, program in fault.mended.items()}
        report = {
            "repro": name,
            "jax": jax.__version__,
            "wrong": wrong,
            "mended": mended,
        }
        print(json.dumps(report), flush=True)

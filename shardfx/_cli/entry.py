"""The entry point of `python -m shardfx`. It imports only Python's standard library, so
that it runs without click and rich and can report that they are missing.
"""

import sys
from collections.abc import Sequence


_INSTALL = "install it with: pip install 'shardfx[cli]'"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line with `arguments`, by default those of `sys.argv`.

    Returns the exit code: 0 for success; 1 if a check failed (findings, a plan that
    does not fit, losses that differ); 2 for bad input, after one line on stderr; 130
    after Ctrl-C.
    """
    try:
        from .group import run

        return run(arguments)
    except KeyboardInterrupt:
        print("shardfx: stopped", file=sys.stderr)
        return 130
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library not in ("click", "rich"):
            raise
        print(
            f"shardfx: error: the command line needs {library}; {_INSTALL}",
            file=sys.stderr,
        )
        return 2

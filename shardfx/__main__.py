"""`python -m shardfx`: see `_cli`."""

import sys

from ._cli import main as main


if __name__ == "__main__":
    sys.exit(main())

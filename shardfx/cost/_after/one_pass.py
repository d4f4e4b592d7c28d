"""One pass of a compiler, as data."""

import re
from collections.abc import Callable
from typing import NamedTuple

from .._hlo_text import HloModule


class Pass(NamedTuple):
    """A pass of a compiler over a partitioned program.

    **Arguments:**

    - `name`: as XLA calls it.
    - `apply`: returns a module as it is after the pass.
    - `link`: the file of XLA that it stands for.
    - `version`: of the compiler whose programs it was checked against.
    - `unsure`: the share of what it changes that the compiler may send otherwise, where it was found to differ.
    """

    name: str
    apply: Callable[[HloModule], HloModule]
    link: str
    version: str
    unsure: float = 0.0


class Doubt(NamedTuple):
    """Operations that a compiler sends for in a way of its own, which no pass stands for.

    **Arguments:**

    - `operations`: matches the path of JAX's operations that a collective came from.
    - `why`: what the compiler does.
    """

    operations: re.Pattern[str]
    why: str

"""A mistake with the rule by which its message is graded."""

from typing import NamedTuple


class Row(NamedTuple):
    """A mistake, what its message must name and tell, and the mended code."""

    wrong: str
    named: str
    write: str
    right: str

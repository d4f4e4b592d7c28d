"""The open half: thirty steps that may be read and learned from."""

from . import open_1, open_2, open_3, open_4, open_5
from ._case import Case


CASES: tuple[Case, ...] = (
    *open_1.CASES,
    *open_2.CASES,
    *open_3.CASES,
    *open_4.CASES,
    *open_5.CASES,
)

"""The sealed half: thirty steps that are not looked at before the work that they judge
is done.
"""

from . import sealed_1, sealed_2, sealed_3, sealed_4, sealed_5
from ._case import Case


CASES: tuple[Case, ...] = (
    *sealed_1.CASES,
    *sealed_2.CASES,
    *sealed_3.CASES,
    *sealed_4.CASES,
    *sealed_5.CASES,
)

"""What a save writes, and how."""

import dataclasses
import functools as ft
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .._plan import ShardPlan
from ._leaves import Leaves
from ._objects import TIMEOUT_SECONDS


class WriteOptions(NamedTuple):
    """The options of a save, as `save` explains them."""

    wait_seconds: float
    progress: bool | None
    overwrite: bool = False
    file_bytes: int | None = None
    timeout_seconds: float = TIMEOUT_SECONDS


@dataclasses.dataclass(frozen=True)
class SavedContent:
    """The input of a save: its arrays, their plan and the metadata.

    **Arguments:**

    - `leaves`: the arrays and Python numbers.
    - `lines`: a description of each array, for the processes to compare.
    - `digests`: digests for the processes to compare, under the names "map", "leaves"
      and "plan".
    - `plan`: the plan of the written arrays, if there is one.
    - `metadata`: the metadata for the headers of all files.
    """

    leaves: Leaves
    lines: Sequence[str]
    digests: Mapping[str, str]
    plan: ShardPlan | None
    metadata: Mapping[str, str]

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays."""
        return sum(array_bytes(value) for _, value in self.leaves.arrays)

    @ft.cached_property
    def plan_text(self) -> str | None:
        """The text of the plan, if there is one."""
        if self.plan is None:
            return None
        return self.plan.to_json()


def array_bytes(value: Any) -> int:
    """The number of bytes of an array in a file."""
    return math.prod(value.shape) * value.dtype.itemsize

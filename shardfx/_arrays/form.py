"""What a function of `filter_jit` remembers of one structure of its arguments."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from .partition import Static


@dataclasses.dataclass(eq=False)
class Form:
    """What one structure of arguments needs: its `jax.jit`, and the arrays to check at
    each call.

    **Arguments:**

    - `treedef`, `leaf_types`: the structure of the function's arrays and its arguments,
      and the type of each leaf.
    - `run`: the jitted function. It takes a static argument (all values that are no
      arrays) and then every array.
    - `is_array`: for each leaf of the function and its arguments, whether it is an
      array.
    - `static_positions`: the positions of the leaves that are no arrays.
    - `compares_data`: whether structures that are equal may hold different static data,
      such as fields 1 and True.
    - `first_of_shardings`: the positions, among the arrays, of the first array of each
      sharding in `in_shardings`. They are checked because JAX does not compare the
      devices of an array with the same sharding as an earlier one.
    - `is_donating`: whether an array is donated.
    - `checked_for_deletion`: the positions of the arrays to check for deletion: all if
      one is donated, else `first_of_shardings`.
    - `last`: the static values of the last call, and its static argument; one tuple, so
      that threads do not mix them. To make the argument again takes 3.7 us.
    - `shardings`: the shardings that the arrays of `first_of_shardings` had at the last
      call.
    """

    treedef: Any
    leaf_types: tuple[type, ...]
    run: Any
    is_array: tuple[bool, ...]
    static_positions: list[int]
    compares_data: bool
    first_of_shardings: list[int]
    is_donating: bool
    checked_for_deletion: list[int]
    last: tuple[Sequence[Any], Static | None] = ((), None)
    shardings: list[Any] | None = None

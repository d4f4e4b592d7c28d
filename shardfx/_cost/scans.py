"""Which operands of a scan are constants, and which are carried."""

from collections.abc import Mapping
from typing import Any


def scan_parts(params: Mapping[str, Any]) -> tuple[int, int]:
    """How many operands of a scan are constants, and how many are carried; those behind them are stacked.

    JAX before 0.11 counts them in the equation's parameters; since then these hold the trees of all three.
    """
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carried, _ = params["ft_in"].unpack()
    return len(consts), len(carried)

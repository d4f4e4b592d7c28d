"""Moves as accelerators make them, and the plans of moves that their tests look into."""

import functools as ft

import pytest

from shardfx import reshard
from shardfx._reshard.flight import carry_out as carry_out
from shardfx._reshard.move import move_of as move_of
from shardfx._reshard.mover import resharded


# Live arrays take the programs that accelerators take, where the CPU would copy in its
# memory.
through_programs = ft.partial(resharded, copies=False)
both_ways = pytest.mark.parametrize(
    "move", [reshard, through_programs], ids=["copies", "programs"]
)

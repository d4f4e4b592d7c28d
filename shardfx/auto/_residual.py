"""Residual sums: what a model adds to its own input again and again has the model's width."""

from .._step import Operation
from ._program import Tied


# How many operations back from a sum its other operand may lie.
_FAR = 400


def residual(tied: Tied, own: set[int]) -> set[int]:
    """The classes in sums of an activation and of what products make of it, neither spread from something smaller.

    `own` are the classes that the model's arrays have: a sum of those alone is an update.
    """
    operations = tied.program.operations
    maker = {out: made for made in operations for out in made.outs}
    spread = {out for made in operations if made.name == "broadcast_in_dim" for out in made.outs}
    found: set[int] = set()
    for made in operations:
        if made.name != "add" or not spread.isdisjoint(made.ins):
            continue
        leaves = {leaf for part in tied.dims[made.outs[0]] for leaf in tied.parts.leaves(part)}
        if leaves <= found or leaves <= own:
            continue
        first, second = made.ins
        if _is_made_of(second, first, maker) or _is_made_of(first, second, maker):
            found |= leaves
    return found


def _is_made_of(value: int, source: int, maker: dict[int, Operation]) -> bool:
    """Whether a value is made of another by a product, in not too many operations."""
    left, seen = [(value, False)], {(value, False)}
    while left and len(seen) < _FAR:
        one, by_product = left.pop(0)
        made = maker.get(one)
        if made is None:
            continue
        by_product |= made.flops > 0
        if by_product and source in made.ins:
            return True
        new = [(before, by_product) for before in made.ins if (before, by_product) not in seen]
        left += new
        seen.update(new)
    return False

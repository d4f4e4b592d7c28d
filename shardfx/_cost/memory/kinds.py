"""Kinds of operations, by what a fusion makes of them."""

from ..by_element import BY_ELEMENT


# These read each element once and write each once, so a fusion swallows them.
ELEMENTWISE = BY_ELEMENT | {"bitcast_convert_type", "random_bits_elementwise", "sharding_constraint"}
# These only say the same elements in another order, or more often, or again.
VIEWS = frozenset(["reshape", "transpose", "broadcast_in_dim", "squeeze", "expand_dims", "rev", "optimization_barrier"])
# Pieces of an array: what a fusion reads in place.
PIECES = frozenset(["slice", "dynamic_slice", "split"])
REDUCTIONS = frozenset(
    "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor argmax argmin".split()
)

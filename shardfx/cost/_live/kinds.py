"""Kinds of HLO operations, by what XLA's fusion makes of them.

XLA fuses what goes element by element, and what only says the same elements in another order, into the operations that
read it: `instruction_fusion.cc` and `priority_fusion.cc` of `openxla/xla`, November 2026.
"""

# These read each element once and write each once.
ELEMENTWISE = frozenset(
    "abs add and atan2 bitcast-convert cbrt ceil clamp compare complex convert cosine count-leading-zeros divide erf "
    "exponential exponential-minus-one floor imag is-finite log log-plus-one logistic map maximum minimum multiply "
    "negate not or popcnt power real reduce-precision remainder round-nearest-afz round-nearest-even rsqrt select "
    "shift-left shift-right-arithmetic shift-right-logical sign sine sqrt stochastic-convert subtract tan tanh "
    "xor".split()
)
# These only say the same elements in another order, or more often, or none at all.
VIEWS = frozenset(["broadcast", "transpose", "reverse", "reshape", "copy", "pad"])
# Constants are made where they are read.
CONSTANTS = frozenset(["constant", "iota", "partition-id", "replica-id"])
# Pieces of an array: a fusion reads them in place.
PIECES = frozenset(["slice", "dynamic-slice"])
PRODUCTS = frozenset(["dot", "convolution", "ragged-dot"])
# The result may take over the memory of an operand that dies.
IN_PLACE = ELEMENTWISE | {"dynamic-update-slice", "scatter", "all-reduce", "sort"}

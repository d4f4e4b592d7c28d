"""The opcodes of HLO, in sets by what the operations do."""

# Operations that compute each element of the result from the same element of each
# operand.
ELEMENTWISE = frozenset(
    "abs add and atan2 bitcast-convert cbrt ceil clamp compare complex convert cosine"
    " count-leading-zeros divide erf exponential exponential-minus-one floor imag"
    " is-finite log log-plus-one logistic map maximum minimum multiply negate not or"
    " popcnt power real reduce-precision remainder round-nearest-afz round-nearest-even"
    " rsqrt select shift-left shift-right-arithmetic shift-right-logical sign sine sqrt"
    " stochastic-convert subtract tan tanh xor".split()
)
# Operations whose result has elements of the operand in another order, or repeated, or
# padded.
VIEWS = frozenset(["broadcast", "transpose", "reverse", "reshape", "copy", "pad"])
# Copies of an array, which may be to another memory space. The last two are the halves
# of an asynchronous one.
COPIES = frozenset(["copy", "copy-start", "copy-done"])
# Operations whose result has the elements of the operand in the same order.
RESHAPES = frozenset(["bitcast", "reshape"])
# Operations whose result has all elements of the operand once, maybe in another order.
REORDERINGS = RESHAPES | {"copy", "transpose"}
# Operations whose result is their operand, so they make no new array.
ALIASES = RESHAPES | frozenset(
    "copy copy-done opt-barrier add-dependency domain after-all async-update".split()
)
# Constants take no memory: the operation that reads them computes them.
CONSTANTS = frozenset(["constant", "iota", "partition-id", "replica-id"])
# Operations whose text has something else in the place of operands, or nothing.
WITHOUT_OPERANDS = CONSTANTS | {"parameter", "after-all"}
# Operations that slice an array. A fusion reads the slice from the array, without a
# copy.
PIECES = frozenset(["slice", "dynamic-slice"])
PRODUCTS = frozenset(["dot", "convolution", "ragged-dot"])
# Operations whose result is the operand, or a slice, a part or a reshape of it. With
# several operands, each has its own result. Collectives that only move elements are
# more of these.
PASSING = (
    COPIES
    | REORDERINGS
    | PIECES
    | frozenset(
        "convert bitcast-convert pad opt-barrier slice-start slice-done recv-done"
        " while".split()
    )
)
# The results of these operations are no new arrays: they are operands, in which an
# operation may have written.
WITHOUT_NEW_ARRAY = frozenset(
    "parameter get-tuple-element dynamic-update-slice scatter while conditional".split()
)
# Operations that read operands from memory and write results to memory. Elementwise
# operations are fused with them.
UNFUSED = PRODUCTS | frozenset(
    "reduce reduce-window select-and-scatter sort fft custom-call".split()
)
REDUCTIONS = frozenset(["reduce", "reduce-window"])
# Operations that libtpu fuses with each other, and with the reductions that read them.
FUSED = (ELEMENTWISE | VIEWS | {"concatenate", "dynamic-update-slice"}) - {"broadcast"}
# A fusion of these alone is no kernel: the layout of its result does the same.
WITHOUT_WORK = RESHAPES | {"convert", "copy"}
# Each of these operations is a kernel of its own.
KERNELS = (UNFUSED - PRODUCTS - REDUCTIONS) | frozenset(
    "gather scatter rng-bit-generator dynamic-slice".split()
)
# Operations whose result can reuse the memory of an operand that no later operation
# reads.
IN_PLACE = ELEMENTWISE | {"dynamic-update-slice", "scatter", "all-reduce", "sort"}
# Operations whose result is never the same gradient as the operand, even if the shapes
# are equal.
RENEWING = PRODUCTS | frozenset(
    "custom-call reduce reduce-window gather scatter sort while conditional send".split()
)
# The beginnings of the opcodes of operations that combine elements by a computation.
COMBINING = ("all-reduce", "reduce", "scatter", "sort", "select-and-scatter")
GATHERS = frozenset(["all-gather", "all-gather-done"])
# Reductions whose result is the same if an element is taken more than once.
IDEMPOTENT = frozenset(["maximum", "minimum", "and", "or"])
# Collectives that add the operands of several devices up.
SUMS = frozenset(["all-reduce", "reduce-scatter"])
# Operations that run a computation on their operands. An asynchronous one has a second
# instruction for its end.
CALLS = frozenset(["call", "fusion"])
CALL_STARTS = frozenset(["async-start", "call-start", "fusion-start"])
CALL_ENDS = frozenset(["async-done", "call-done", "fusion-done"])
# The replica groups of these have device numbers if `use_global_device_ids` is true.
# The replica groups of the other collectives have device numbers if the collective has
# a channel.
WITH_ID_FLAG = SUMS | {"all-gather"}
# The suffixes of the opcodes that continue or end an asynchronous operation.
CONTINUATIONS = ("-done", "-update")

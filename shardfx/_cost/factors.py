"""Which dimensions of an operation's operands and results belong together, primitive by primitive.

A rule names *factors*: the loops that an operation runs over. Each dimension of each operand and result is one factor,
or several, major to minor, where a reshape splits or joins it. Devices that share a factor's loop work side by side;
what that costs is decided by the factor's kind.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal


# "pass": whoever holds a part works on it alone. "sum": parts are added up, and the sum may wait. "join": parts are
# combined in another way (a maximum), at once. "whole": every device needs all of it. "window": as "pass", but
# neighbours exchange the margins of their parts.
Kind = Literal["pass", "sum", "join", "whole", "window"]
Dim = tuple[int, ...]
Dims = tuple[Dim, ...]
Shape = tuple[int, ...]

ELEMENTWISE = frozenset(
    "abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz complex conj "
    "convert_element_type copy copy_p cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma "
    "igamma_grad_a igammac imag integer_pow is_finite le le_to lgamma log log1p logistic lt lt_to max min mul ne neg "
    "nextafter not or polygamma population_count pow real reduce_precision regularized_incomplete_beta rem round rsqrt "
    "select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub tan "
    "tanh threefry2x32 xor zeta name random_wrap random_unwrap random_fold_in random_gamma random_clone pvary pbroadcast "
    "pcast device_put reshard mesh_cast layout_constraint optimization_barrier reduced_vary_cast vary_unreduced_cast "
    "add_jaxvals".split()
)
# Sums of partial sums are partial sums, and so is a partial sum in another shape.
_LINEAR = frozenset("add add_any add_jaxvals neg convert_element_type copy sub reduce_precision".split())
# What passes its operand on, as it is or in another form: a weight is still that weight afterwards.
_MOVES = frozenset(
    "convert_element_type copy copy_p reduce_precision stop_gradient name reshape transpose squeeze expand_dims "
    "broadcast_in_dim slice dynamic_slice rev device_put reshard mesh_cast layout_constraint pvary pbroadcast pcast "
    "reduced_vary_cast vary_unreduced_cast".split()
)
_SILENT = frozenset(
    "iota axis_index create_token after_all rng_bit_generator rng_uniform random_seed random_bits random_split empty "
    "empty2 debug_callback debug_print".split()
)
_REDUCES: Mapping[str, Kind] = {
    "reduce_sum": "sum",
    **dict.fromkeys("reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor argmax argmin".split(), "join"),
}
_CUMULATIVE = frozenset("cumsum cumprod cummax cummin cumlogsumexp".split())
# Over matrices in the last two dimensions; all others are a batch.
_MATRICES = frozenset(
    "cholesky triangular_solve lu qr eigh eig svd householder_product hessenberg schur tridiagonal tridiagonal_solve "
    "geqrf geqp3 cholesky_update lu_pivots_to_permutation".split()
)


@dataclasses.dataclass(frozen=True)
class Sends:
    """What an operation of a `shard_map` sends by its own word: `kind` along the mesh axes `axes`.

    `share` is the part of the devices that receive, where not all do.
    """

    kind: str
    axes: tuple[str, ...]
    share: float = 1.0


@dataclasses.dataclass(frozen=True)
class Rule:
    """The factors of one operation.

    **Arguments:**

    - `sizes`, `kinds`: of each factor.
    - `operands`, `results`: for each array and each of its dimensions the factors that it runs over, major to minor.
    - `is_linear`: whether partial sums in give partial sums out.
    - `moves`: whether the result is the first operand, in another form or a part of it.
    - `is_simple`: whether an array is laid out the same before and after, so that it is asked first.
    - `is_product`: whether it multiplies two arrays and adds up: compilers match before they move.
    - `margins`: of a "window" factor, how many elements a device needs from its neighbours.
    - `sends`: what it sends whatever the layouts are.
    - `note`: what to say on its rows.
    """

    sizes: tuple[int, ...]
    kinds: tuple[Kind, ...]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    is_linear: bool = False
    moves: bool = False
    is_simple: bool = False
    is_product: bool = False
    margins: tuple[tuple[int, int], ...] = ()
    sends: Sends | None = None
    note: str = ""


class _Loops:
    """Factors as they are found."""

    def __init__(self):
        self.sizes: list[int] = []
        self.kinds: list[Kind] = []

    def new(self, size: int, kind: Kind = "pass") -> Dim:
        self.sizes.append(size)
        self.kinds.append(kind)
        return (len(self.sizes) - 1,)

    def dims(self, shape: Sequence[int], kind: Kind = "pass") -> list[Dim]:
        return [self.new(size, kind) for size in shape]

    def rule(self, operands: Sequence[Sequence[Dim]], results: Sequence[Sequence[Dim]], **more: Any) -> Rule:
        return Rule(
            tuple(self.sizes), tuple(self.kinds), tuple(map(tuple, operands)), tuple(map(tuple, results)), **more
        )


def rule_of(name: str, params: Mapping[str, Any], given: Sequence[Shape], made: Sequence[Shape]) -> Rule:
    """The rule of a primitive.

    **Arguments:**

    - `name`, `params`: of the equation.
    - `given`, `made`: the shapes of its operands and results.

    **Returns:**

    Its rule. A primitive that is not known needs all of each operand everywhere, and its rows say so.
    """
    if name in ELEMENTWISE:
        return elementwise(given, made, is_linear=name in _LINEAR, moves=name in _MOVES)
    if name in _SILENT:
        return _opaque(given, made, "")
    if name in _REDUCES:
        return _reduced(_REDUCES[name], params["axes"], given, made)
    if name in _CUMULATIVE:
        return _along([params["axis"]], given, made)
    if name in _MATRICES:
        return _matrices(given, made)
    if name.startswith("scatter"):
        return _scatter(name, params, given, made)
    if name.startswith("reduce_window") or name in ("select_and_scatter_add", "select_and_gather_add"):
        return _windows(params, given, made)
    found = _FAMILIES.get(name)
    if found is not None:
        return found(params, given, made)
    return _opaque(
        given, made, f"the primitive `{name}` is not known: counted as if each device took in all of its operands."
    )


def elementwise(
    given: Sequence[Shape], made: Sequence[Shape], *, is_linear: bool = False, moves: bool = False, **more: Any
) -> Rule:
    """Every operand has the shape of the results, or dimensions of size 1, or none."""
    loops = _Loops()
    if len(made) > 1 and len(given) == len(made):  # a barrier: one result for each operand, whatever their shapes
        pairs = [loops.dims(shape) for shape in given]
        return loops.rule(pairs, pairs, is_linear=is_linear, moves=moves, is_simple=True, **more)
    whole = max(made, key=len, default=())
    dims = loops.dims(whole)

    def of(shape: Shape) -> list[Dim]:
        if len(shape) != len(whole):
            return loops.dims(shape)
        return [dim if size == full else loops.new(size) for dim, size, full in zip(dims, shape, whole, strict=True)]

    return loops.rule(
        [of(s) for s in given], [of(s) for s in made], is_linear=is_linear, moves=moves, is_simple=True, **more
    )


def _opaque(given: Sequence[Shape], made: Sequence[Shape], note: str) -> Rule:
    loops = _Loops()
    operands = [loops.dims(shape, "whole") for shape in given]
    kind: Kind = "whole" if given else "pass"
    return loops.rule(operands, [loops.dims(shape, kind) for shape in made], note=note)


def _reduced(kind: Kind, axes: Sequence[int], given: Sequence[Shape], made: Sequence[Shape]) -> Rule:
    loops, shape = _Loops(), given[0]
    dims = [loops.new(size, kind if at in axes else "pass") for at, size in enumerate(shape)]
    kept = [dim for at, dim in enumerate(dims) if at not in axes]
    return loops.rule([dims] * len(given), [kept] * len(made), is_linear=kind == "sum")


def _along(axes: Sequence[int], given: Sequence[Shape], made: Sequence[Shape]) -> Rule:
    """Whole along some dimensions, and alone along all others, which operands and results share."""
    loops, rank = _Loops(), len(made[0])
    around = [at % rank for at in axes]
    shared = {at: loops.new(size) for at, size in enumerate(made[0]) if at not in around}

    def of(shape: Shape) -> list[Dim]:
        if len(shape) != rank:
            return loops.dims(shape, "whole")
        return [shared[at] if at in shared else loops.new(size, "whole") for at, size in enumerate(shape)]

    return loops.rule([of(shape) for shape in given], [of(shape) for shape in made])


def _matrices(given: Sequence[Shape], made: Sequence[Shape]) -> Rule:
    loops = _Loops()
    batch = loops.dims(max(given, key=len)[:-2])

    def of(shape: Shape) -> list[Dim]:
        kept = min(len(batch), len(shape))
        return [*batch[:kept], *loops.dims(shape[kept:], "whole")]

    return loops.rule([of(shape) for shape in given], [of(shape) for shape in made])


def _dot_general(params: Mapping[str, Any], given: Sequence[Shape], made: Sequence[Shape]) -> Rule:
    (left_sum, right_sum), (left_batch, right_batch) = params["dimension_numbers"]
    loops, (left, right) = _Loops(), given[:2]
    lefts: dict[int, Dim] = {at: loops.new(left[at]) for at in left_batch}
    rights = dict(zip(right_batch, lefts.values(), strict=True))
    batch = [*lefts.values()]
    for at, other in zip(left_sum, right_sum, strict=True):
        lefts[at] = rights[other] = loops.new(left[at], "sum")
    free = [[at for at in range(len(shape)) if at not in own] for shape, own in ((left, lefts), (right, rights))]
    for shape, own, rest in ((left, lefts, free[0]), (right, rights, free[1])):
        own.update({at: loops.new(shape[at]) for at in rest})
    result = [*batch, *[lefts[at] for at in free[0]], *[rights[at] for at in free[1]]]
    more = [loops.dims(shape) for shape in given[2:]]
    operands = [[own[at] for at in range(len(shape))] for shape, own in ((left, lefts), (right, rights))]
    return loops.rule([*operands, *more], [result], is_product=True)


def _ragged_dot(params: Mapping[str, Any], given: Sequence[Shape], made: Sequence[Shape]) -> Rule:
    numbers = params.get("ragged_dot_dimension_numbers")
    if numbers is None:  # (m, k) x (g, k, n), groups of rows
        ragged, groups, dots = [0], [0], (([1], [1]), ([], []))
    else:
        ragged, groups = numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions
        dots = numbers.dot_dimension_numbers
    (left_sum, right_sum), (left_batch, right_batch) = dots
    loops, (left, right, sizes) = _Loops(), given[:3]
    lefts: dict[int, Dim] = {at: loops.new(left[at]) for at in left_batch}
    rights = dict(zip(right_batch, lefts.values(), strict=True))
    batch = [*lefts.values()]
    for at, other in zip(left_sum, right_sum, strict=True):
        lefts[at] = rights[other] = loops.new(left[at], "whole" if at in ragged else "sum")
    # Each device would have to know which rows of others belong to its groups.
    group = [loops.new(right[at], "whole") for at in groups]
    rights.update(dict(zip(groups, group, strict=True)))
    for shape, own in ((left, lefts), (right, rights)):
        own.update({at: loops.new(shape[at]) for at in range(len(shape)) if at not in own})
    rows = [lefts[at] for at in range(len(left)) if at not in left_batch and at not in left_sum]
    columns = [
        rights[at] for at in range(len(right)) if at not in right_batch and at not in right_sum and at not in groups
    ]
    result = [*batch, *rows, *columns]
    if len(result) < len(made[0]):  # groups in the contraction: one product for each
        result = [*loops.dims(made[0][: len(made[0]) - len(result)], "whole"), *result]
    operands = [[own[at] for at in range(len(shape))] for shape, own in ((left, lefts), (right, rights))]
    return loops.rule([*operands, loops.dims(sizes, "whole"), *[loops.dims(s) for s in given[3:]]], [result], is_product=True)


def _broadcast(params: Mapping[str, Any], given: Sequence[Shape], made: Sequence[Shape]) -> Rule:
    loops, where = _Loops(), params["broadcast_dimensions"]
    dims = loops.dims(made[0])
    shape = given[0] if given else ()
    operand = [dims[to] if made[0][to] == size else loops.new(size) for to, size in zip(where, shape, strict=True)]
    more = [loops.dims(one) for one in given[1:]]
    is_simple = len(shape) == len(made[0])
    return loops.rule([operand, *more][: len(given)], [dims], moves=True, is_linear=True, is_simple=is_simple)


def _transpose(params: Mapping[str, Any], given: Sequence[Shape], made: Sequence[Shape]) -> Rule:
    loops = _Loops()
    dims = loops.dims(given[0])
    result = [dims[at] for at in params["permutation"]]
    return loops.rule([dims], [result], moves=True, is_linear=True, is_simple=True)


def _squeeze(params: Mapping[str, Any], given: Sequence[Shape], made: Sequence[Shape]) -> Rule:
    loops, rank = _Loops(), len(given[0])
    dims = loops.dims(given[0])
    gone = [at % rank for at in params["dimensions"]]
    kept = [dim for at, dim in enumerate(dims) if at not in gone]
    return loops.rule([dims], [kept], moves=True, is_linear=True, is_simple=True)


def _expand_dims(params: Mapping[str, Any], given: Sequence[Shape], made: Sequence[Shape]) -> Rule:
    loops, rank = _Loops(), len(made[0])
    dims = loops.dims(made[0])
    new = [at % rank for at in params["dimensions"]]
    kept = [dim for at, dim in enumerate(dims) if at not in new]
    return loops.rule([kept], [dims], moves=True, is_linear=True, is_simple=True)


def reshaped(source: Shape, target: Shape) -> tuple[list[int], list[Dim], list[Dim]]:
    """The common factors of two shapes of one size: their sizes, and those of each dimension on both sides."""
    sizes: list[int] = []
    sides: tuple[list[Dim], list[Dim]] = ([() for _ in source], [() for _ in target])
    shapes = (list(source), list(target))
    at, left = [0, 0], [1, 1]  # the dimension of each side, and what of it has no factor yet

    def step(side: int) -> bool:
        while left[side] == 1 and at[side] < len(shapes[side]):
            left[side] = shapes[side][at[side]]
            at[side] += 1
        return left[side] > 1

    while step(0) and step(1):
        size = min(left)
        if max(left) % size:  # 6 and 4: from here on no factor is common
            break
        sizes.append(size)
        for side in (0, 1):
            sides[side][at[side] - 1] += (len(sizes) - 1,)
            left[side] //= size
    return sizes, *sides


def _reshape(params: Mapping[str, Any], given: Sequence[Shape], made: Sequence[Shape]) -> Rule:
    if params.get("dimensions") is not None:
        return _opaque(given, made, "a reshape in another order of dimensions counts as if all of it were needed.")
    loops = _Loops()
    sizes, source, target = reshaped(given[0], made[0])
    loops.dims(sizes)
    operands = [_filled(loops, shape, dims) for shape, dims in ((given[0], source), (made[0], target))]
    more = [loops.dims(shape) for shape in given[1:]]
    return loops.rule([operands[0], *more], [operands[1]], moves=True, is_linear=True, is_simple=True)


def _filled(loops: _Loops, shape: Shape, dims: Sequence[Dim]) -> list[Dim]:
    """The factors of each dimension, with one more where those found do not make up its size."""
    found = []
    for size, dim in zip(shape, dims, strict=True):
        rest = size // math.prod(loops.sizes[at] for at in dim) if size else 1
        found.append((*dim, *loops.new(rest, "whole")) if rest > 1 else dim)
    return found


def _concatenate(params: Mapping[str, Any], given: Sequence[Shape], made: Sequence[Shape]) -> Rule:
    return _along([params["dimension"]], given, made)


def _split(params: Mapping[str, Any], given: Sequence[Shape], made: Sequence[Shape]) -> Rule:
    return dataclasses.replace(_along([params["axis"]], given, made), is_linear=True)


def _cut(params: Mapping[str, Any], given: Sequence[Shape], made: Sequence[Shape]) -> Rule:
    """A part of the first operand; more operands say where."""
    loops = _Loops()
    pairs = list(zip(given[0], made[0], strict=True))
    dims = [loops.new(size, "pass" if size == part else "whole") for size, part in pairs]
    result = [
        dim if size == part else loops.new(part, "whole") for dim, (size, part) in zip(dims, pairs, strict=True)
    ]
    return loops.rule([dims, *[loops.dims(s) for s in given[1:]]], [result], moves=True, is_linear=True)


def _put(params: Mapping[str, Any], given: Sequence[Shape], made: Sequence[Shape]) -> Rule:
    """The second operand in the place of a part of the first."""
    loops, (whole, part) = _Loops(), given[:2]
    dims = [loops.new(size, "pass" if size == own else "whole") for size, own in zip(whole, part, strict=True)]
    update = [
        dim if size == own else loops.new(own, "whole") for dim, size, own in zip(dims, whole, part, strict=True)
    ]
    return loops.rule([dims, update, *[loops.dims(s) for s in given[2:]]], [dims])


def _pad(params: Mapping[str, Any], given: Sequence[Shape], made: Sequence[Shape]) -> Rule:
    loops = _Loops()
    operand, result = [], []
    for size, (low, high, inside), full in zip(given[0], params["padding_config"], made[0], strict=True):
        kept = not (low or high or inside)
        operand.append(loops.new(size, "pass" if kept else "whole"))
        result.append(operand[-1] if kept else loops.new(full, "whole"))
    return loops.rule([operand, *[loops.dims(s) for s in given[1:]]], [result], is_linear=True)


def _sort(params: Mapping[str, Any], given: Sequence[Shape], made: Sequence[Shape]) -> Rule:
    return _along([params["dimension"]], given, made)


def _top_k(params: Mapping[str, Any], given: Sequence[Shape], made: Sequence[Shape]) -> Rule:
    return _along([params.get("axis", params.get("reduction_dimension", -1))], given, made)


def _rev(params: Mapping[str, Any], given: Sequence[Shape], made: Sequence[Shape]) -> Rule:
    return _along(params["dimensions"], given, made)


def _fft(params: Mapping[str, Any], given: Sequence[Shape], made: Sequence[Shape]) -> Rule:
    return _along([-1 - at for at in range(len(params["fft_lengths"]))], given, made)


def _bitcast(params: Mapping[str, Any], given: Sequence[Shape], made: Sequence[Shape]) -> Rule:
    loops, shared = _Loops(), min(len(given[0]), len(made[0]))
    dims = loops.dims(given[0][:shared])
    more = [[*dims, *loops.dims(shape[shared:], "whole")] for shape in (given[0], made[0])]
    return loops.rule(more[:1], more[1:], is_simple=True)


def _gather(params: Mapping[str, Any], given: Sequence[Shape], made: Sequence[Shape]) -> Rule:
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    loops, (table, places) = _Loops(), given[:2]
    indices = [*loops.dims(places[:-1]), loops.new(places[-1], "whole")]
    paired = dict(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
    operand: list[Dim] = []
    for at, (size, part) in enumerate(zip(table, sizes, strict=True)):
        if at in paired:
            operand.append(indices[paired[at]])
        elif at in numbers.collapsed_slice_dims:
            operand.append(loops.new(size, "sum"))  # who does not hold a row adds zero
        else:
            operand.append(loops.new(size, "pass" if size == part else "whole"))
    window = [at for at in range(len(table)) if at not in numbers.collapsed_slice_dims and at not in paired]
    inner = iter([operand[at] if table[at] == sizes[at] else loops.new(sizes[at], "whole") for at in window])
    outer = iter(indices[:-1])
    result = [next(inner) if at in numbers.offset_dims else next(outer) for at in range(len(made[0]))]
    return loops.rule([operand, indices], [result])


def _scatter(name: str, params: Mapping[str, Any], given: Sequence[Shape], made: Sequence[Shape]) -> Rule:
    numbers = params["dimension_numbers"]
    kind: Kind = {"scatter-add": "sum", "scatter_add": "sum", "scatter": "whole"}.get(name, "join")
    loops, (whole, places, updates) = _Loops(), given[:3]
    paired = dict(zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True))
    indices = [
        loops.new(size, "pass" if at in paired.values() else kind) for at, size in enumerate(places[:-1])
    ]
    window = iter(numbers.update_window_dims)
    operand: list[Dim] = []
    windows: dict[int, Dim] = {}
    for at, size in enumerate(whole):
        if at in paired:
            operand.append(indices[paired[at]])
        elif at in numbers.inserted_window_dims:
            operand.append(loops.new(size))  # each device keeps the rows that are its own
        else:
            place = next(window)
            fits = updates[place] == size
            operand.append(loops.new(size, "pass" if fits else "whole"))
            windows[place] = operand[-1] if fits else loops.new(updates[place], "whole")
    outer = iter(indices)
    update = [windows[at] if at in windows else next(outer) for at in range(len(updates))]
    return loops.rule([operand, [*indices, loops.new(places[-1], "whole")], update], [operand])


def _conv(params: Mapping[str, Any], given: Sequence[Shape], made: Sequence[Shape]) -> Rule:
    numbers, groups = params["dimension_numbers"], params["feature_group_count"]
    batches = params["batch_group_count"]
    (batch, feature, *space), (out, inner, *window) = numbers.lhs_spec, numbers.rhs_spec
    loops, (image, kernel), result = _Loops(), given[:2], made[0]
    lefts, rights, outs = ({} for _ in range(3))
    group = loops.new(max(groups, batches)) if max(groups, batches) > 1 else ()
    rows, channels = loops.new(result[numbers.out_spec[0]]), loops.new(kernel[inner], "sum")
    columns = loops.new(kernel[out] // max(groups, batches))
    lefts[batch] = group + rows if batches > 1 else rows
    lefts[feature] = group + channels if groups > 1 else channels
    rights[out], rights[inner] = group + columns, channels
    outs[numbers.out_spec[0]], outs[numbers.out_spec[1]] = rows, group + columns
    margins = []
    for number, (at, own, to) in enumerate(zip(space, window, numbers.out_spec[2:], strict=True)):
        rights[own] = loops.new(kernel[own], "whole")
        stride = image[at] // result[to] if result[to] and not image[at] % result[to] else 0
        if stride == params["window_strides"][number] and params["lhs_dilation"][number] == 1:
            place = loops.new(result[to], "window")
            margins.append((place[0], max(0, (kernel[own] - 1) * params["rhs_dilation"][number] + 1 - stride)))
            lefts[at], outs[to] = (place + loops.new(stride, "whole") if stride > 1 else place), place
        else:
            lefts[at], outs[to] = loops.new(image[at], "whole"), loops.new(result[to], "whole")
    operands = [[own[at] for at in range(len(own))] for own in (lefts, rights)]
    return loops.rule(operands, [[outs[at] for at in range(len(outs))]], margins=tuple(margins), is_product=True)


def _windows(params: Mapping[str, Any], given: Sequence[Shape], made: Sequence[Shape]) -> Rule:
    """Along dimensions with windows of one element each device works alone; along others all is needed."""
    sizes = params["window_dimensions"]
    return _along([at for at, size in enumerate(sizes) if size > 1], given, made)


def _psum(params: Mapping[str, Any], given: Sequence[Shape], made: Sequence[Shape]) -> Rule:
    return elementwise(given, made, sends=Sends("all-reduce", _named(params["axes"])))


def _collective(kind: str, dims: Sequence[str]) -> Callable[..., Rule]:
    def family(params: Mapping[str, Any], given: Sequence[Shape], made: Sequence[Shape]) -> Rule:
        loops = _Loops()
        share, changed = 1.0, [params[dim] for dim in dims]
        if kind == "collective-permute":
            moving = [pair for pair in params["perm"] if pair[0] != pair[1]]
            share = len(moving)
        if not changed or len(given[0]) != len(made[0]):
            same = given[0] == made[0]
            operand = loops.dims(given[0], "pass" if same else "whole")
            result = operand if same else loops.dims(made[0], "whole")
        else:
            kinds: list[Kind] = ["whole" if at in changed else "pass" for at in range(len(given[0]))]
            operand = [loops.new(size, own) for size, own in zip(given[0], kinds, strict=True)]
            result = [
                dim if own == "pass" else loops.new(size, "whole")
                for dim, own, size in zip(operand, kinds, made[0], strict=True)
            ]
        more = [loops.dims(shape, "whole") for shape in given[1:]]
        return loops.rule(
            [operand, *more][: len(given)],
            [result] * len(made),
            sends=Sends(kind, _named(params["axis_name"]), float(share)),
        )

    return family


def _named(axes: Any) -> tuple[str, ...]:
    return tuple(axis for axis in (axes if isinstance(axes, tuple | list) else (axes,)) if isinstance(axis, str))


_FAMILIES: Mapping[str, Callable[..., Rule]] = {
    "dot_general": _dot_general,
    "ragged_dot": _ragged_dot,
    "ragged_dot_general": _ragged_dot,
    "broadcast_in_dim": _broadcast,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "expand_dims": _expand_dims,
    "reshape": _reshape,
    "concatenate": _concatenate,
    "split": _split,
    "slice": _cut,
    "dynamic_slice": _cut,
    "dynamic_update_slice": _put,
    "pad": _pad,
    "sort": _sort,
    "top_k": _top_k,
    "approx_top_k": _top_k,
    "rev": _rev,
    "fft": _fft,
    "bitcast_convert_type": _bitcast,
    "gather": _gather,
    "conv_general_dilated": _conv,
    **dict.fromkeys(("psum", "psum2", "psum_invariant", "pmax", "pmin"), _psum),
    **dict.fromkeys(
        ("all_gather", "all_gather_invariant", "all_gather_reduced"), _collective("all-gather", ["all_gather_dimension"])
    ),
    **dict.fromkeys(
        ("reduce_scatter", "unreduced_reduce_scatter"), _collective("reduce-scatter", ["scatter_dimension"])
    ),
    "all_to_all": _collective("all-to-all", ["split_axis", "concat_axis"]),
    "ragged_all_to_all": _collective("ragged-all-to-all", []),
    "ppermute": _collective("collective-permute", []),
}

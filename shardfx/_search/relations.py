"""What each primitive says about its dimensions, as the labels of a generalised einsum.

A relation labels each dimension of each operand and result. Dimensions with one label are walked together: cut all of
them alike, and each device can do its part. A label of the operands alone is summed over, or looked up in, so a cut
leaves partial results. `None` is a dimension that the operation needs whole.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .._cost.by_element import BY_ELEMENT


Labels = tuple[int | None, ...]


class Relation(NamedTuple):
    """The labels of operands and results."""

    ins: tuple[Labels, ...]
    outs: tuple[Labels, ...]
    # Floating-point operations in products, and whether the operation reads and writes memory on its own: what is
    # only elementwise is fused with what makes or uses it.
    flops: float = 0.0
    heavy: bool = False
    # Sums of partial results may be added, reshaped and cast before they are completed.
    linear: bool = False
    # Labels by which names are told: those looked up by an index, and those that a product runs over in batches.
    looked_up: tuple[int, ...] = ()
    batched: tuple[int, ...] = ()
    contracted: tuple[int, ...] = ()


Shape = tuple[int, ...]
Rule = Callable[[dict[str, Any], Sequence[Shape], Sequence[Shape]], Relation]

ELEMENTWISE = BY_ELEMENT | {"device_put", "sharding_constraint", "threefry2x32"}
LINEAR = frozenset(
    "add add_any sub neg convert_element_type copy copy_p meant_for reduce_precision sharding_constraint".split()
)
_WHOLE_DIMENSION = frozenset("cumsum cumprod cummax cummin cumlogsumexp sort top_k approx_top_k argsort".split())
_REDUCTIONS = frozenset(
    "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor argmax argmin reduce".split()
)


def relation(name: str, params: dict[str, Any], ins: Sequence[Shape], outs: Sequence[Shape]) -> Relation | None:
    """The relation of a primitive, or `None` for one that is not known: nothing follows from it."""
    if name in ELEMENTWISE:
        return _elementwise(name, ins, outs)
    if name in _REDUCTIONS:
        return _reduce(params, ins, outs)
    if name in _WHOLE_DIMENSION:
        return _along(params, ins, outs)
    rule = _RULES.get(name)
    return None if rule is None else _plain(rule(params, ins, outs))


def _plain(found: Relation) -> Relation:
    """With Python's integers: parameters of primitives may hold NumPy's."""
    return found._replace(ins=_integers(found.ins), outs=_integers(found.outs))


def _integers(labels: Any) -> tuple[Labels, ...]:
    return tuple(tuple(None if label is None else int(label) for label in dims) for dims in labels)


def unknown(ins: Sequence[Shape], outs: Sequence[Shape]) -> Relation:
    """All dimensions whole."""
    return Relation(tuple((None,) * len(s) for s in ins), tuple((None,) * len(s) for s in outs), heavy=True)


def _elementwise(name: str, ins: Sequence[Shape], outs: Sequence[Shape]) -> Relation:
    # Several results of one shape each are of the operands in order (a barrier), or all of one shape.
    if len(outs) > 1 and len(outs) == len(ins):
        bases = [100 * i for i in range(len(ins))]
        labels = tuple(tuple(range(base, base + len(s))) for base, s in zip(bases, ins, strict=True))
        same = all(tuple(a) == tuple(b) for a, b in zip(ins, outs, strict=True))
        return Relation(labels, labels, linear=False) if same else unknown(ins, outs)
    operands, results = (tuple(_like(outs[0], shape) for shape in shapes) for shapes in (ins, outs))
    return Relation(operands, results, linear=name in LINEAR)


def _like(out: Shape, shape: Shape) -> tuple[int | None, ...]:
    # An operand may have one element where the others have more, and scalars have no dimensions.
    if len(shape) != len(out):
        return (None,) * len(shape)
    return tuple(dim if size == out[dim] else None for dim, size in enumerate(shape))


def _reduce(params: dict[str, Any], ins: Sequence[Shape], outs: Sequence[Shape]) -> Relation:
    axes = set(params.get("axes", params.get("dimensions", ())))
    count = len(outs)
    labels = tuple(range(len(ins[0])))
    kept = tuple(label for label in labels if label not in axes)
    operands = tuple(labels if i < count else (None,) * len(s) for i, s in enumerate(ins))
    return Relation(operands, (kept,) * count, heavy=True)


def _along(params: dict[str, Any], ins: Sequence[Shape], outs: Sequence[Shape]) -> Relation:
    """A dimension is sorted or summed up along; the others are independent."""
    rank = len(ins[0])
    axis = params.get("axis", params.get("dimension", params.get("reduction_dimension", rank - 1)))
    along = axis % rank if rank else 0
    labels = tuple(None if dim == along else dim for dim in range(rank))
    known = [tuple(s[:along]) + tuple(s[along + 1 :]) for s in (*ins, *outs)]
    if len(set(known)) > 1:
        return unknown(ins, outs)
    return Relation((labels,) * len(ins), (labels,) * len(outs), heavy=True)


def _dot(params: dict[str, Any], ins: Sequence[Shape], outs: Sequence[Shape]) -> Relation:
    (left_sum, right_sum), (left_batch, right_batch) = params["dimension_numbers"]
    return _product(ins[0], ins[1], left_sum, right_sum, left_batch, right_batch)


def _product(
    left: Shape,
    right: Shape,
    left_sum: Sequence[int],
    right_sum: Sequence[int],
    left_batch: Sequence[int],
    right_batch: Sequence[int],
) -> Relation:
    labels = list(range(len(left)))
    others: list[int | None] = [None] * len(right)
    for a, b in (*zip(left_sum, right_sum, strict=True), *zip(left_batch, right_batch, strict=True)):
        others[b] = a
    free = [dim for dim in range(len(right)) if others[dim] is None]
    for number, dim in enumerate(free):
        others[dim] = len(left) + number
    rows = [dim for dim in labels if dim not in left_sum and dim not in left_batch]
    out = (*left_batch, *rows, *(len(left) + number for number in range(len(free))))
    flops = 2.0 * math.prod(left) * math.prod(right[dim] for dim in free)
    return Relation(
        (tuple(labels), tuple(others)),
        (tuple(out),),
        flops,
        heavy=True,
        batched=tuple(left_batch),
        contracted=tuple(left_sum),
    )


def _ragged_dot(params: dict[str, Any], ins: Sequence[Shape], outs: Sequence[Shape]) -> Relation:
    """Rows in groups, each with its own matrix: the groups are looked up, so that cutting them leaves partial rows."""
    numbers = params["ragged_dot_dimension_numbers"]
    (left_sum, right_sum), (left_batch, right_batch) = numbers.dot_dimension_numbers
    groups = tuple(numbers.rhs_group_dimensions)
    left, right = ins[0], ins[1]
    if left_batch or len(groups) != 1:
        return unknown(ins, outs)
    bare = [dim for dim in range(len(right)) if dim not in groups]
    base = _product(
        left, tuple(right[d] for d in bare), left_sum, tuple(bare.index(d) for d in right_sum), left_batch, right_batch
    )
    group = len(left) + len(right)
    others: list[int | None] = [group] * len(right)
    for label, dim in zip(base.ins[1], bare, strict=True):
        others[dim] = label
    rest = tuple((group,) if i == 0 and len(s) == 1 else (None,) * len(s) for i, s in enumerate(ins[2:]))
    return base._replace(ins=(base.ins[0], tuple(others), *rest), looked_up=(), batched=(group,))


def _broadcast(params: dict[str, Any], ins: Sequence[Shape], outs: Sequence[Shape]) -> Relation:
    places, out = params["broadcast_dimensions"], outs[0]
    labels = tuple(place if size == out[place] else None for place, size in zip(places, ins[0], strict=True))
    return Relation((labels, *((None,) * len(s) for s in ins[1:])), (tuple(range(len(out))),))


def _transpose(params: dict[str, Any], ins: Sequence[Shape], outs: Sequence[Shape]) -> Relation:
    return Relation((tuple(range(len(ins[0]))),), (tuple(params["permutation"]),), linear=True)


def _squeeze(params: dict[str, Any], ins: Sequence[Shape], outs: Sequence[Shape]) -> Relation:
    gone = {dim % len(ins[0]) for dim in params["dimensions"]}
    labels = tuple(range(len(ins[0])))
    return Relation((labels,), (tuple(label for label in labels if label not in gone),), linear=True)


def _same_sizes(params: dict[str, Any], ins: Sequence[Shape], outs: Sequence[Shape]) -> Relation:
    """Slices, padding, concatenation, windows: dimensions that keep their size are walked together."""
    out = outs[0]
    labels = tuple(
        dim if all(len(s) == len(out) and s[dim] == out[dim] for s in (*ins[:1], *outs)) else None
        for dim in range(len(out))
    )
    return Relation(tuple(labels if len(s) == len(out) else (None,) * len(s) for s in ins), (labels,) * len(outs))


def _slice(params: dict[str, Any], ins: Sequence[Shape], outs: Sequence[Shape]) -> Relation:
    return _same_sizes(params, ins[:1], outs)._replace(
        ins=(*_same_sizes(params, ins[:1], outs).ins, *((None,) * len(s) for s in ins[1:]))
    )


def _update(params: dict[str, Any], ins: Sequence[Shape], outs: Sequence[Shape]) -> Relation:
    whole, part = ins[0], ins[1]
    labels = tuple(dim if whole[dim] == part[dim] else None for dim in range(len(whole)))
    return Relation((labels, labels, *((None,) * len(s) for s in ins[2:])), (labels,), heavy=True)


def _concatenate(params: dict[str, Any], ins: Sequence[Shape], outs: Sequence[Shape]) -> Relation:
    labels = tuple(None if dim == params["dimension"] else dim for dim in range(len(outs[0])))
    return Relation((labels,) * len(ins), (labels,))


def _split(params: dict[str, Any], ins: Sequence[Shape], outs: Sequence[Shape]) -> Relation:
    labels = tuple(None if dim == params["axis"] else dim for dim in range(len(ins[0])))
    return Relation((labels,), (labels,) * len(outs))


def _stack(params: dict[str, Any], ins: Sequence[Shape], outs: Sequence[Shape]) -> Relation:
    labels, axis = tuple(range(len(ins[0]))), params["axis"] % len(outs[0])
    return Relation((labels,) * len(ins), ((*labels[:axis], None, *labels[axis:]),))


def _unstack(params: dict[str, Any], ins: Sequence[Shape], outs: Sequence[Shape]) -> Relation:
    labels, axis = tuple(range(len(outs[0]))), params["axis"] % len(ins[0])
    return Relation(((*labels[:axis], None, *labels[axis:]),), (labels,) * len(outs))


def _bits(params: dict[str, Any], ins: Sequence[Shape], outs: Sequence[Shape]) -> Relation:
    """Numbers as others of their bits; the last dimension of wider ones is a number's parts."""
    shared = range(min(len(ins[0]), len(outs[0])))
    operand, result = ((*shared, *(None,) * (len(s) - len(shared))) for s in (ins[0], outs[0]))
    return Relation((operand,), (result,))


def _reverse(params: dict[str, Any], ins: Sequence[Shape], outs: Sequence[Shape]) -> Relation:
    labels = tuple(None if dim in params["dimensions"] else dim for dim in range(len(ins[0])))
    return Relation((labels,), (labels,))


def _windows(params: dict[str, Any], ins: Sequence[Shape], outs: Sequence[Shape]) -> Relation:
    window = params["window_dimensions"]
    rank = len(window)
    labels = tuple(dim if size == 1 else None for dim, size in enumerate(window))
    whole = _same_sizes(params, [s for s in ins if len(s) == rank][:1], [s for s in outs if len(s) == rank])
    labels = tuple(a if a is None else b for a, b in zip(labels, whole.outs[0], strict=True))

    def of(shape: Shape) -> tuple[int | None, ...]:
        return labels if len(shape) == rank else (None,) * len(shape)

    return Relation(tuple(map(of, ins)), tuple(map(of, outs)), heavy=True)


def _gather(params: dict[str, Any], ins: Sequence[Shape], outs: Sequence[Shape]) -> Relation:
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    operand, indices, out = ins[0], ins[1], outs[0]
    labels: list[int | None] = [None] * len(operand)
    offset = list(numbers.offset_dims)
    batching = tuple(numbers.operand_batching_dims)
    gone = (*numbers.collapsed_slice_dims, *batching)
    windows = [dim for dim in range(len(operand)) if dim not in gone]
    rows = [dim for dim in range(len(out)) if dim not in offset]
    found: list[int | None] = list(range(len(out)))
    for dim, place in zip(windows, offset, strict=True):
        if sizes[dim] == operand[dim]:
            labels[dim] = place
        else:
            found[place] = None
    index_labels: list[int | None] = [*rows, None]
    for dim, place in zip(batching, numbers.start_indices_batching_dims, strict=True):
        labels[dim] = index_labels[place]
    looked_up = []
    # One row is looked up, whether its dimension of one is dropped at once or kept, as under `jax.vmap`.
    for dim in (*numbers.collapsed_slice_dims, *_of_one(windows, numbers.start_index_map, sizes, operand)):
        labels[dim] = len(out) + dim
        looked_up.append(len(out) + dim)
    return Relation(
        (tuple(labels), tuple(index_labels[: len(indices)])), (tuple(found),), heavy=True, looked_up=tuple(looked_up)
    )


def _scatter(params: dict[str, Any], ins: Sequence[Shape], outs: Sequence[Shape]) -> Relation:
    numbers = params["dimension_numbers"]
    operand, indices, updates = ins[0], ins[1], ins[2]
    labels: list[int | None] = list(range(len(operand)))
    batching = tuple(numbers.operand_batching_dims)
    gone = (*numbers.inserted_window_dims, *batching)
    windows = [dim for dim in range(len(operand)) if dim not in gone]
    rows = [dim for dim in range(len(updates)) if dim not in numbers.update_window_dims]
    given: list[int | None] = [None] * len(updates)
    sizes = dict(zip(windows, [updates[place] for place in numbers.update_window_dims], strict=True))
    single = _of_one(windows, numbers.scatter_dims_to_operand_dims, sizes, operand)
    for dim, place in zip(windows, numbers.update_window_dims, strict=True):
        if updates[place] == operand[dim]:
            given[place] = dim
        elif dim not in single:
            labels[dim] = None
    for number, place in enumerate(rows):
        given[place] = len(operand) + number
    index_labels: list[int | None] = [*(given[place] for place in rows), None]
    for dim, place in zip(batching, numbers.scatter_indices_batching_dims, strict=True):
        given[rows[place]] = index_labels[place] = labels[dim]
    return Relation(
        (tuple(labels), tuple(index_labels[: len(indices)]), tuple(given)),
        (tuple(labels),),
        heavy=True,
        looked_up=(*numbers.inserted_window_dims, *single),
    )


def _of_one(windows: Sequence[int], indexed: Sequence[int], sizes: Any, operand: Shape) -> tuple[int, ...]:
    """The dimensions of windows that are one wide, of several, where an index says."""
    return tuple(dim for dim in windows if dim in indexed and sizes[dim] == 1 < operand[dim])


def _convolution(params: dict[str, Any], ins: Sequence[Shape], outs: Sequence[Shape]) -> Relation:
    """Batches, input and output channels; the spatial dimensions stay whole, as a cut needs its neighbours' edges."""
    numbers = params["dimension_numbers"]
    left_spec, right_spec, out_spec = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    left, right, out = ins[0], ins[1], outs[0]
    groups, batch_groups = params["feature_group_count"], params["batch_group_count"]
    rank = len(left)
    labels: list[list[int | None]] = [[None] * rank for _ in range(3)]
    if batch_groups == 1:
        labels[0][left_spec[0]] = labels[2][out_spec[0]] = 0
    if groups == 1 and batch_groups == 1:
        labels[0][left_spec[1]] = labels[1][right_spec[1]] = 1
        labels[1][right_spec[0]] = labels[2][out_spec[1]] = 2
    elif groups == left[left_spec[1]] == right[right_spec[0]]:
        # Each channel for itself.
        labels[0][left_spec[1]] = labels[1][right_spec[0]] = labels[2][out_spec[1]] = 2
    flops = 2.0 * math.prod(out) * math.prod(right) / max(1, right[right_spec[0]]) / max(1, batch_groups)
    return Relation((tuple(labels[0]), tuple(labels[1])), (tuple(labels[2]),), flops, heavy=True, contracted=(1,))


def _made(params: dict[str, Any], ins: Sequence[Shape], outs: Sequence[Shape]) -> Relation:
    """Made of nothing, or of a key: each device can make its part."""
    return Relation(tuple((None,) * len(s) for s in ins), tuple(tuple(range(len(s))) for s in outs))


def _fft(params: dict[str, Any], ins: Sequence[Shape], outs: Sequence[Shape]) -> Relation:
    count = len(ins[0]) - len(params["fft_lengths"])
    labels = tuple(dim if dim < count else None for dim in range(len(ins[0])))
    return Relation((labels,), (labels,), heavy=True)


_RULES: dict[str, Rule] = {
    "dot_general": _dot,
    "ragged_dot_general": _ragged_dot,
    "conv_general_dilated": _convolution,
    "broadcast_in_dim": _broadcast,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "slice": _slice,
    "dynamic_slice": _slice,
    "pad": _slice,
    "dynamic_update_slice": _update,
    "concatenate": _concatenate,
    "split": _split,
    "stack": _stack,
    "unstack": _unstack,
    "bitcast_convert_type": _bits,
    "rev": _reverse,
    "gather": _gather,
    "scatter": _scatter,
    **{f"scatter_{kind}": _scatter for kind in ("add", "sub", "mul", "min", "max")},
    **{f"scatter-{kind}": _scatter for kind in ("add", "sub", "mul", "min", "max")},
    **{f"reduce_window{kind}": _windows for kind in ("", "_sum", "_max", "_min")},
    "select_and_scatter_add": _windows,
    "select_and_gather_add": _windows,
    "iota": _made,
    "fft": _fft,
    **{
        name: _made
        for name in "random_bits random_seed random_wrap random_unwrap random_fold_in random_split rng_bit_generator "
        "rng_uniform empty create_token broadcasted_iota".split()
    },
}

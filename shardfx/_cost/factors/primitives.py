"""The rule of each primitive."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..by_element import BY_ELEMENT
from .by_word import collective, psum
from .indexed import gather, scatter
from .products import conv, dot_general, ragged_dot
from .reductions import fft, matrices, reduced, rev, sort, top_k, windows
from .rule import Kind, Rule, Shape, along, elementwise, opaque
from .shapes import (
    bitcast,
    broadcast,
    concatenate,
    cut,
    expand_dims,
    pad,
    piece,
    put,
    reshape,
    split,
    squeeze,
    transpose,
)


ELEMENTWISE = BY_ELEMENT | {
    "device_put",
    "random_clone",
    "random_fold_in",
    "random_gamma",
    "random_unwrap",
    "random_wrap",
    "threefry2x32",
}
# Sums of partial sums are partial sums, and so is a partial sum in another shape; in another dtype it is rounded anew.
_LINEAR = frozenset("add add_any add_jaxvals neg copy sub".split())
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
        return opaque(given, made, "")
    if name in _REDUCES:
        return reduced(_REDUCES[name], tuple(map(int, params["axes"])), given, made)
    if name in _CUMULATIVE:
        return along([params["axis"]], given, made)
    if name in _MATRICES:
        return matrices(given, made)
    if name.startswith("scatter"):
        return scatter(name, params, given, made)
    if name.startswith("reduce_window") or name in ("select_and_scatter_add", "select_and_gather_add"):
        return windows(params, given, made)
    found = _FAMILIES.get(name)
    if found is not None:
        return found(params, given, made)
    return opaque(
        given, made, f"the primitive `{name}` is not known: counted as if each device took in all of its operands."
    )


_FAMILIES: Mapping[str, Callable[..., Rule]] = {
    "dot_general": dot_general,
    "ragged_dot": ragged_dot,
    "ragged_dot_general": ragged_dot,
    "broadcast_in_dim": broadcast,
    "transpose": transpose,
    "squeeze": squeeze,
    "expand_dims": expand_dims,
    "reshape": reshape,
    "concatenate": concatenate,
    "split": split,
    "slice": piece,
    "dynamic_slice": cut,
    "dynamic_update_slice": put,
    "pad": pad,
    "sort": sort,
    "top_k": top_k,
    "approx_top_k": top_k,
    "rev": rev,
    "fft": fft,
    "bitcast_convert_type": bitcast,
    "gather": gather,
    "conv_general_dilated": conv,
    **dict.fromkeys(("psum", "psum2", "psum_invariant", "pmax", "pmin"), psum),
    **dict.fromkeys(
        ("all_gather", "all_gather_invariant", "all_gather_reduced"),
        collective("all-gather", ["all_gather_dimension"]),
    ),
    **dict.fromkeys(
        ("reduce_scatter", "unreduced_reduce_scatter"), collective("reduce-scatter", ["scatter_dimension"])
    ),
    "all_to_all": collective("all-to-all", ["split_axis", "concat_axis"]),
    "ragged_all_to_all": collective("ragged-all-to-all", []),
    "ppermute": collective("collective-permute", []),
}

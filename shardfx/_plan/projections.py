"""The usual names of an attention layer's arrays, and the dimension in which each has
its heads.
"""

from collections.abc import Sequence


# The roles of projections: of queries, keys, values, and of the output.
ROLES = {
    **dict.fromkeys(("q", "q_proj", "query", "wq", "to_q", "q_lin", "query_proj"), "q"),
    **dict.fromkeys(("k", "k_proj", "key", "wk", "to_k", "k_lin", "key_proj"), "k"),
    **dict.fromkeys(("v", "v_proj", "value", "wv", "to_v", "v_lin", "value_proj"), "v"),
    **dict.fromkeys(
        ("o", "o_proj", "out", "wo", "to_out", "out_lin", "out_proj", "output_proj"),
        "o",
    ),
}
# Arrays that hold several of these projections in one, and how many. `in_proj` may be
# something else: it counts where its size is that of three projections.
FUSED = {
    **dict.fromkeys(("qkv", "qkv_proj", "to_qkv", "wqkv", "Wqkv", "attn_qkv"), 3),
    **dict.fromkeys(("c_attn", "query_key_value", "in_proj", "in_proj_weight"), 3),
    "in_proj_bias": 3,
    **dict.fromkeys(("kv", "kv_proj", "to_kv", "wkv", "Wkv", "key_value"), 2),
}


def fused_dimension(part: str, suffix: str, shape: tuple[int, ...]) -> int | None:
    """The dimension with the heads of an array that holds several projections in one;
    `None` if it is not known.

    It is the last one for a bias or a path that ends in "kernel", and in GPT-2's layers,
    whose weights are `[in, out]`; the last but one for another "weight"; else the larger
    of the last two.
    """
    rank = len(shape)
    end = suffix or part
    if rank == 1 or end.endswith(("bias", "kernel")) or part == "c_attn":
        return rank - 1 if rank else None
    if end.endswith("weight"):
        return rank - 2
    if shape[-1] == shape[-2]:
        return None
    return rank - 1 if shape[-1] > shape[-2] else rank - 2


def head_dimension(suffix: str, shapes: Sequence[tuple[int, ...]]) -> int | None:
    """The dimension that contains the heads in the projections of queries, keys and
    values; `None` if it is not known.

    It is the one in which the `shapes` of the projections differ. If they are equal, it
    is the last one for a bias or a path that ends in "kernel" or "bias", and the last
    but one for "weight". `suffix` is the end of the path, after the name of the
    projection.
    """
    if len(shapes) < 2 or len({len(shape) for shape in shapes}) != 1 or not shapes[0]:
        return None
    differ = [
        dim
        for dim, sizes in enumerate(zip(*shapes, strict=True))
        if len(set(sizes)) > 1
    ]
    rank = len(shapes[0])
    if differ or rank > 3:
        return differ[0] if len(differ) == 1 else None
    if rank == 1 or suffix.endswith(("kernel", "bias")):
        return rank - 1
    return rank - 2 if suffix.endswith("weight") else None

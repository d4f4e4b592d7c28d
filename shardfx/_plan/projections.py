"""The usual names of an attention layer's arrays, and the dimension in which each has
its heads.
"""

from collections.abc import Sequence


# The names of the projections of queries, keys, values, and of the output, by role.
_NAMES_BY_ROLE = {
    "q": "q q_proj query wq to_q q_lin query_proj",
    "k": "k k_proj key wk to_k k_lin key_proj",
    "v": "v v_proj value wv to_v v_lin value_proj",
    "o": "o o_proj out wo to_out out_lin out_proj output_proj",
}
ROLES: dict[str, str] = {}
for _role, _names in _NAMES_BY_ROLE.items():
    ROLES |= dict.fromkeys(_names.split(), _role)
# Arrays that hold three, or two, of these projections in one. `in_proj` may be
# something else: it counts where its size is that of three projections.
_OF_THREE = (
    "qkv qkv_proj to_qkv wqkv Wqkv attn_qkv c_attn query_key_value in_proj"
    " in_proj_weight in_proj_bias"
)
_OF_TWO = "kv kv_proj to_kv wkv Wkv key_value"
FUSED = {**dict.fromkeys(_OF_THREE.split(), 3), **dict.fromkeys(_OF_TWO.split(), 2)}


def fused_dimension(part: str, suffix: str, shape: tuple[int, ...]) -> int | None:
    """The dimension with the heads of an array that holds several projections in one;
    `None` if it is not known. `part` is the part of the array's path that names the
    projections, such as "qkv_proj"; `suffix` is the path after it, such as "weight".

    It is the last one for a bias or a path that ends in "kernel", and in GPT-2's layers,
    whose weights are `[in, out]`; the last but one for another "weight"; else the larger
    of the last two.
    """
    rank = len(shape)
    if not rank:
        return None

    last = rank - 1
    last_but_one = rank - 2
    end = suffix or part
    if rank == 1 or end.endswith(("bias", "kernel")) or part == "c_attn":
        return last
    if end.endswith("weight"):
        return last_but_one

    if shape[last] > shape[last_but_one]:
        return last
    if shape[last] < shape[last_but_one]:
        return last_but_one
    return None


def head_dimension(suffix: str, shapes: Sequence[tuple[int, ...]]) -> int | None:
    """The dimension that contains the heads in the projections of queries, keys and
    values; `None` if it is not known.

    `shapes` has the shape of each projection, and `suffix` is the end of their paths
    after the name of the projection, such as "kernel". The dimension is the one in
    which the shapes differ. If they are equal, it is the last one for a bias or a path
    that ends in "kernel" or "bias", and the last but one for "weight".
    """
    if len(shapes) < 2 or len(set(map(len, shapes))) != 1 or not shapes[0]:
        return None

    differing_dims = []
    for dim, sizes in enumerate(zip(*shapes, strict=True)):
        if len(set(sizes)) > 1:
            differing_dims.append(dim)
    if len(differing_dims) == 1:
        return differing_dims[0]

    rank = len(shapes[0])
    if differing_dims or rank > 3:
        return None
    if rank == 1 or suffix.endswith(("kernel", "bias")):
        return rank - 1
    if suffix.endswith("weight"):
        return rank - 2
    return None

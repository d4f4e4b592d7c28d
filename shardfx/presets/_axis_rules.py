"""Other libraries' rules from logical axes to mesh axes: eformer's `PartitionAxis`, and
T5X's standard rules.

The tokens of `shardfx.presets.eformer` are in `shardfx.presets.tokens`, its layouts in
`shardfx.presets.layouts`.
"""

import enum
from typing import Final

from .._ground.errors import RuleError
from .._rules import AxisRules, RulesLike, axes_in
from . import tokens


class _Unset(enum.Enum):
    token = enum.auto()


# "Not given" means the default that eformer documents; `None` means replicated, in
# every mode.
NOT_GIVEN: Final = _Unset.token
# The mesh axes of a logical axis.
Axes = str | tuple[str, ...] | None
Field = Axes | _Unset


def eformer(
    *,
    data_parallel_axis: str = "dp",
    fully_sharded_data_parallel_axis: str = "fsdp",
    tensor_parallel_axis: str = "tp",
    sequence_parallel_axis: str = "sp",
    expert_parallel_axis: str = "ep",
    batch_axis: Field = NOT_GIVEN,
    sequence_axis: Field = NOT_GIVEN,
    query_sequence_axis: Field = NOT_GIVEN,
    head_axis: Field = NOT_GIVEN,
    kv_head_axis: Field = NOT_GIVEN,
    key_sequence_axis: Field = NOT_GIVEN,
    hidden_state_axis: Field = NOT_GIVEN,
    mlp_intermediate_axis: Field = NOT_GIVEN,
    vocab_axis: Field = NOT_GIVEN,
    expert_axis: Field = NOT_GIVEN,
    expert_gate_axis: Field = None,
    attention_dim_axis: Field = None,
    attention_kv_dim_axis: Field = None,
    bias_head_sequence_axis: Field = None,
    bias_key_sequence_axis: Field = None,
    decode_batch_axis: Field = NOT_GIVEN,
    decode_query_sequence_axis: Field = None,
    decode_head_axis: Field = NOT_GIVEN,
    decode_kv_head_axis: Field = NOT_GIVEN,
    decode_key_sequence_axis: Field = NOT_GIVEN,
    decode_attention_dim_axis: Field = None,
    decode_attention_kv_dim_axis: Field = None,
) -> AxisRules:
    """Returns AxisRules equivalent to eformer's `PartitionAxis(...)`; its semantic
    tokens are the logical names.

    If rules map several dimensions of an array to one mesh axis, the token that is
    first in `TOKENS` gets it. A mode, which `plan` takes as `mode=`, selects rules. The
    modes are "train", "prefill", and the two generation modes of eformer, "decode" and
    "insert".

    **Arguments:**

    - `data_parallel_axis`, `fully_sharded_data_parallel_axis`, `tensor_parallel_axis`,
      `sequence_parallel_axis`, `expert_parallel_axis`: the names of the mesh axes.
    - `decode_batch_axis` and the six other arguments that begin with `decode_`: mesh
      axes in the generation modes. `None` replicates; it is the default of the query
      sequence and of the two attention dims. The default of the others is the value of
      the argument without `decode_`.
    - The other arguments: the mesh axes of a logical axis: a name, a tuple of names, or
      `None` for replicated. The defaults are eformer's: batch over fsdp and dp,
      sequences over sp, heads, embedding, mlp and vocabulary over tp, experts over ep.

    **Returns:**

    AxisRules. Use `extend`, `prepend`, `with_alias` and `without` instead of eformer's
    registry.

    !!! Example

        ```python
        from jax.sharding import PartitionSpec as P
        from shardfx import resolve
        from shardfx.presets import eformer
        from shardfx.presets.tokens import BATCH, HEAD, HEAD_DIM, QUERY_LENGTH

        names = (BATCH, QUERY_LENGTH, HEAD, HEAD_DIM)
        rules = eformer(tensor_parallel_axis="model")
        assert resolve(names, rules, mode="train").spec == P(("fsdp", "dp"), "sp", "model")
        assert resolve(names, rules, mode="decode").spec == P(("fsdp", "dp"), None, "model")
        ```
    """
    arguments: dict[str, Field] = {**locals()}
    # One mesh axis may serve as both fsdp and dp.
    batch_axes = dict.fromkeys((fully_sharded_data_parallel_axis, data_parallel_axis))
    usual_axes_by_field: dict[str, Axes] = {
        "batch_axis": tuple(batch_axes),
        "sequence_axis": sequence_parallel_axis,
        "query_sequence_axis": sequence_parallel_axis,
        "key_sequence_axis": sequence_parallel_axis,
        "hidden_state_axis": tensor_parallel_axis,
        "head_axis": tensor_parallel_axis,
        "kv_head_axis": tensor_parallel_axis,
        "mlp_intermediate_axis": tensor_parallel_axis,
        "vocab_axis": tensor_parallel_axis,
        "expert_axis": expert_parallel_axis,
    }
    # By token, the mesh axes without a mode, and those in the generation modes.
    axes_by_token = dict[str, Axes]()
    decode_axes_by_token = dict[str, Axes]()
    # `field` is the name of an argument of this function.
    for field, token in tokens.TOKENS.items():
        given_axes = arguments[field]
        if isinstance(given_axes, _Unset):
            given_axes = usual_axes_by_field.get(field)
        axes_by_token[token] = given_axes
        if f"decode_{field}" in arguments:
            decode_axes = arguments[f"decode_{field}"]
            if isinstance(decode_axes, _Unset):
                decode_axes = given_axes
            decode_axes_by_token[token] = decode_axes
    decode = _generation_rules(axes_by_token, decode_axes_by_token)
    modes = {
        tokens.MODE_TRAIN: (),
        tokens.MODE_PREFILL: (),
        tokens.MODE_DECODE: decode,
        tokens.MODE_INSERT: decode,
    }
    axis_rules = AxisRules(axes_by_token, modes=modes)
    # A mesh may lack some of the five axes. eformer ignores these, so they are declared
    # here.
    return axis_rules.extend(mesh_axes=[axis for _, axis in axes_in(axis_rules)])


def _generation_rules(
    axes_by_token: dict[str, Axes],
    decode_axes_by_token: dict[str, Axes],
) -> list[tuple[str, Axes]]:
    """Returns the rules that a generation mode, such as "decode", needs before the
    rules without a mode.

    A token is a logical name. `axes_by_token` has the mesh axes of each token without a
    mode, `decode_axes_by_token` those of some tokens in the mode.
    """
    changed: dict[str, Axes] = {}
    # The position of the last token that is sharded otherwise in the mode.
    last_changed = 0
    for position, (token, axes) in enumerate(axes_by_token.items()):
        decode_axes = decode_axes_by_token.get(token, axes)
        if decode_axes != axes:
            changed[token] = decode_axes
            if decode_axes is not None:
                last_changed = position

    rules: list[tuple[str, Axes]] = []
    for position, (token, axes) in enumerate(axes_by_token.items()):
        if token in changed:
            rules.append((token, changed[token]))
            # `None` ends the search: the base rule of the token is no fallback in this
            # mode.
            if changed[token] is not None:
                rules.append((token, None))
        elif position < last_changed:
            # The rules of a mode come before the base rules, so tokens with priority
            # over a changed one are repeated.
            rules.append((token, axes))
    return rules


_SHARDED = (
    ("vocab", "model"),
    ("mlp", "model"),
    ("heads", "model"),
    ("kv", None),
    ("joined_kv", "model"),
)
_REPLICATED = (
    "relpos_buckets",
    "abspos_buckets",
    "length",
    "layers",
    "stack",
    "mlp_activations",
)
# The mesh axes of `embed`, by how many dimensions of activations and of parameters are
# sharded.
_EMBED = {
    (1, 1): (None,),
    (2, 1): ("model",),
    (1, 2): ("data",),
    (2, 2): ("model", "data"),
}


def t5x(
    activation_dims: int = 1,
    parameter_dims: int = 1,
    additional_rules: RulesLike | AxisRules = (),
) -> AxisRules:
    """Returns the rules of `t5x.partitioning.standard_logical_axis_rules`, for mesh
    axes "data" and "model".

    **Arguments:**

    - `activation_dims`: 1 shards activations only along the batch, 2 also along
      `embed`.
    - `parameter_dims`: 1 shards parameters over "model", 2 also over "data", as FSDP
      and ZeRO-3 do.
    - `additional_rules`: pairs, or AxisRules, that come after the standard rules, which
      have priority. To override a standard rule, call `.prepend(...)` on the result.

    **Returns:**

    AxisRules: 13 standard rules (14 if both arguments are 2), then the additional ones.

    **Raises:**

    `RuleError` if `activation_dims` or `parameter_dims` is neither 1 nor 2.

    !!! Example

        ```python
        from jax.sharding import PartitionSpec as P
        from shardfx import resolve
        from shardfx.presets import t5x

        rules = t5x(activation_dims=2, parameter_dims=2)
        assert resolve(("batch", "length", "embed"), rules).spec == P("data", None, "model")
        assert resolve(("embed", "mlp"), rules).spec == P("data", "model")
        ```
    """
    if (activation_dims, parameter_dims) not in _EMBED:
        raise RuleError(
            f"`t5x(activation_dims={activation_dims!r},"
            f" parameter_dims={parameter_dims!r})`: T5X shards one or two dimensions of"
            " each; use 1 or 2."
        )
    embed_rules = [
        ("embed", target) for target in _EMBED[activation_dims, parameter_dims]
    ]
    # T5X puts a replicated `embed` after `vocab`. The position has no effect, but the
    # list is the same as T5X's.
    if embed_rules == [("embed", None)]:
        vocab_rule, *others = _SHARDED
        sharded = [vocab_rule, *embed_rules, *others]
    else:
        sharded = [*_SHARDED, *embed_rules]
    if isinstance(additional_rules, AxisRules):
        added = additional_rules
    else:
        added = AxisRules(additional_rules)
    standard = AxisRules(
        [("batch", "data"), *sharded, *((name, None) for name in _REPLICATED)],
        mesh_axes=("data", "model"),
    )
    return standard.extend(added.rules, modes=added.modes, mesh_axes=added.mesh_axes)

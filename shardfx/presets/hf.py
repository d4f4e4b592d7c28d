"""Path rules for models under their Hugging Face names, with weights in torch's layout,
`[out, in]`.

Each function takes the names of the mesh axes, so that the rules fit any mesh. An axis
that the mesh lacks is dropped with a reason. The query, key, value, up and gate
projections are sharded over `tensor` along their rows (outputs), the projections back
to the model width along their columns (inputs). The other dimension is sharded over
`fsdp`. A dimension that holds several heads is sharded only between heads.
"""

from .._ground.errors import RuleError
from .._rules import PathRules
from ._row_rules import Axes, not_negative, optional_rules, positive


def llama(
    *,
    head_dim: int = 128,
    fsdp: Axes = "fsdp",
    tensor: Axes = "tensor",
) -> PathRules:
    """Returns rules for Llama 2 and 3, and for other models whose parameters have the
    same names.

    **Arguments:**

    - `head_dim`: the number of elements in one attention head.
    - `fsdp`, `tensor`: the mesh axes to use.

    **Returns:**

    [`shardfx.PathRules`][].

    !!! Example

        ```python
        import jax
        from shardfx import MeshSpec, plan
        from shardfx.presets import hf

        k_proj = jax.ShapeDtypeStruct((1024, 4096), "bfloat16")  # 8 heads of 128
        tree = {"model": {"layers": {"0": {"self_attn": {"k_proj": {"weight": k_proj}}}}}}
        made = plan(tree, MeshSpec({"fsdp": 8, "tensor": 16}), paths=hf.llama())
        # Not over `tensor`: 8 heads do not divide into 16
        print(made.leaves[0].spec, made.leaves[0].reasons[0])
        ```
    """
    return optional_rules("llama", {"dim": head_dim}, fsdp, tensor)


def mistral(
    *,
    head_dim: int = 128,
    fsdp: Axes = "fsdp",
    tensor: Axes = "tensor",
) -> PathRules:
    """Returns rules for Mistral's dense models. `head_dim` is the size of one head;
    `fsdp` and `tensor` are mesh axes.

    !!! Example

        ```python
        import jax
        from shardfx import MeshSpec, plan, presets

        array = jax.ShapeDtypeStruct((14336, 4096), "bfloat16")
        tree = {"model.layers.0.mlp.up_proj.weight": array}
        # Into the hidden size by rows, over `tensor`.
        made = plan(tree, MeshSpec({"fsdp": 8, "tensor": 4}), paths=presets.mistral())
        assert tuple(made.leaves[0].spec) == ("tensor", "fsdp")
        ```
    """
    return llama(head_dim=head_dim, fsdp=fsdp, tensor=tensor)


def mixtral(
    *,
    head_dim: int = 128,
    fsdp: Axes = "fsdp",
    tensor: Axes = "tensor",
) -> PathRules:
    """Returns rules for Mixtral 8x7B and 8x22B. `head_dim` is the size of one head;
    `fsdp` and `tensor` are mesh axes.

    !!! Example

        ```python
        import jax
        from shardfx import MeshSpec, plan, presets

        array = jax.ShapeDtypeStruct((4096, 14336), "bfloat16")
        tree = {"model.layers.0.block_sparse_moe.experts.7.w2.weight": array}
        # The projection back of an expert, by columns.
        made = plan(tree, MeshSpec({"fsdp": 8, "tensor": 4}), paths=presets.mixtral())
        assert tuple(made.leaves[0].spec) == ("fsdp", "tensor")
        ```
    """
    return optional_rules("mixtral", {"dim": head_dim}, fsdp, tensor)


def qwen2(
    *,
    head_dim: int = 128,
    fsdp: Axes = "fsdp",
    tensor: Axes = "tensor",
) -> PathRules:
    """Returns rules for Qwen2 and Qwen2.5, whose query, key and value have biases.

    `head_dim` is the size of one head; `fsdp` and `tensor` are mesh axes.

    !!! Example

        ```python
        import jax
        from shardfx import MeshSpec, plan, presets

        array = jax.ShapeDtypeStruct((512,), "bfloat16")
        tree = {"model.layers.0.self_attn.k_proj.bias": array}
        # Four heads of 128 do not divide into eight.
        made = plan(tree, MeshSpec({"fsdp": 8, "tensor": 8}), paths=presets.qwen2())
        assert tuple(made.leaves[0].spec) == ()
        ```
    """
    return optional_rules("qwen2", {"dim": head_dim}, fsdp, tensor)


def qwen3(
    *,
    head_dim: int = 128,
    fsdp: Axes = "fsdp",
    tensor: Axes = "tensor",
) -> PathRules:
    """Returns rules for the dense Qwen3 models. `head_dim` is the size of one head;
    `fsdp` and `tensor` are mesh axes.

    !!! Example

        ```python
        import jax
        from shardfx import MeshSpec, plan, presets

        array = jax.ShapeDtypeStruct((128,), "bfloat16")
        tree = {"model.layers.0.self_attn.q_norm.weight": array}
        # A norm is sharded over `fsdp` only.
        made = plan(tree, MeshSpec({"fsdp": 8, "tensor": 4}), paths=presets.qwen3())
        assert tuple(made.leaves[0].spec) == ("fsdp",)
        ```
    """
    return llama(head_dim=head_dim, fsdp=fsdp, tensor=tensor)


def qwen3_moe(
    *,
    head_dim: int = 128,
    fsdp: Axes = "fsdp",
    tensor: Axes = "tensor",
) -> PathRules:
    """Returns rules for the Qwen3 models with a mixture of experts.

    `head_dim` is the size of one head; `fsdp` and `tensor` are mesh axes.

    !!! Example

        ```python
        import jax
        from shardfx import MeshSpec, plan, presets

        array = jax.ShapeDtypeStruct((128, 2048), "bfloat16")
        tree = {"model.layers.0.mlp.gate.weight": array}
        # Every device of a `tensor` group routes to all experts.
        made = plan(tree, MeshSpec({"fsdp": 8, "tensor": 4}), paths=presets.qwen3_moe())
        assert tuple(made.leaves[0].spec) == (None, "fsdp")
        ```
    """
    return optional_rules("qwen3_moe", {"dim": head_dim}, fsdp, tensor)


def gemma(
    *,
    head_dim: int = 256,
    fsdp: Axes = "fsdp",
    tensor: Axes = "tensor",
) -> PathRules:
    """Returns rules for the text models of Gemma, Gemma 2 and Gemma 3.

    `head_dim` is the size of one head; `fsdp` and `tensor` are mesh axes.

    Gemma 2 27B and Gemma 3 27B have heads of 128.

    !!! Example

        ```python
        import jax
        from shardfx import MeshSpec, plan, presets

        array = jax.ShapeDtypeStruct((3584, 4096), "bfloat16")
        tree = {"model.layers.0.self_attn.o_proj.weight": array}
        # 16 heads of 256, four on each device.
        made = plan(tree, MeshSpec({"fsdp": 8, "tensor": 4}), paths=presets.gemma())
        assert tuple(made.leaves[0].spec) == ("fsdp", "tensor")
        ```
    """
    return llama(head_dim=head_dim, fsdp=fsdp, tensor=tensor)


def starcoder2(
    *,
    head_dim: int = 128,
    fsdp: Axes = "fsdp",
    tensor: Axes = "tensor",
) -> PathRules:
    """Returns rules for StarCoder2. `head_dim` is the size of one head; `fsdp` and
    `tensor` are mesh axes.

    !!! Example

        ```python
        import jax
        from shardfx import MeshSpec, plan, presets

        array = jax.ShapeDtypeStruct((6144, 24576), "bfloat16")
        tree = {"model.layers.0.mlp.c_proj.weight": array}
        # Back from the hidden size, by columns.
        made = plan(tree, MeshSpec({"fsdp": 8, "tensor": 4}), paths=presets.starcoder2())
        assert tuple(made.leaves[0].spec) == ("fsdp", "tensor")
        ```
    """
    return optional_rules("starcoder2", {"dim": head_dim}, fsdp, tensor)


def olmo2(
    *,
    head_dim: int = 128,
    fsdp: Axes = "fsdp",
    tensor: Axes = "tensor",
) -> PathRules:
    """Returns rules for OLMo 2. `head_dim` is the size of one head; `fsdp` and
    `tensor` are mesh axes.

    The norms of queries and keys are over all heads together, and sharded as these.

    !!! Example

        ```python
        import jax
        from shardfx import MeshSpec, plan, presets

        array = jax.ShapeDtypeStruct((4096,), "bfloat16")
        tree = {"model.layers.0.self_attn.q_norm.weight": array}
        # 32 heads of 128, eight on each device.
        made = plan(tree, MeshSpec({"fsdp": 8, "tensor": 4}), paths=presets.olmo2())
        assert tuple(made.leaves[0].spec) == ("tensor",)
        ```
    """
    return optional_rules("olmo2", {"dim": head_dim}, fsdp, tensor)


def phi3(
    *,
    head_dim: int = 128,
    fsdp: Axes = "fsdp",
    tensor: Axes = "tensor",
) -> PathRules:
    """Returns rules for Phi-3 and Phi-4. `head_dim` is the size of one head; `fsdp` and
    `tensor` are mesh axes.

    Phi-3 mini has heads of 96. `qkv_proj` holds query, key and value, concatenated, and
    `gate_up_proj` gate and up. They are sharded between heads, but a shard does not
    hold the query, key and value of the same heads. For that, split them.

    !!! Example

        ```python
        import jax
        from shardfx import MeshSpec, plan, presets

        array = jax.ShapeDtypeStruct((7680, 5120), "bfloat16")
        tree = {"model.layers.0.self_attn.qkv_proj.weight": array}
        # 40 heads of queries, ten of keys and ten of values, fifteen on each device.
        made = plan(tree, MeshSpec({"fsdp": 8, "tensor": 4}), paths=presets.phi3())
        assert tuple(made.leaves[0].spec) == ("tensor", "fsdp")
        ```
    """
    return optional_rules("phi3", {"dim": head_dim}, fsdp, tensor)


def glm4_moe(
    *,
    head_dim: int = 128,
    fsdp: Axes = "fsdp",
    tensor: Axes = "tensor",
) -> PathRules:
    """Returns rules for GLM-4.5, 4.6 and 4.7, and their Air models.

    `head_dim` is the size of one head; `fsdp` and `tensor` are mesh axes.

    The layer that predicts ahead has rules too.

    !!! Example

        ```python
        import jax
        from shardfx import MeshSpec, plan, presets

        array = jax.ShapeDtypeStruct((128, 4096), "bfloat16")
        tree = {"model.layers.1.mlp.gate.weight": array}
        # Every device of a `tensor` group routes to all experts.
        made = plan(tree, MeshSpec({"fsdp": 8, "tensor": 4}), paths=presets.glm4_moe())
        assert tuple(made.leaves[0].spec) == (None, "fsdp")
        ```
    """
    return optional_rules("glm4_moe", {"dim": head_dim}, fsdp, tensor)


def gemma3n(
    *,
    head_dim: int = 256,
    fsdp: Axes = "fsdp",
    tensor: Axes = "tensor",
) -> PathRules:
    """Returns rules for the text model of Gemma 3n.

    `head_dim` is the size of one head; `fsdp` and `tensor` are mesh axes.

    Its towers for images and sound have no rules: plan the text model alone, or say
    `unmatched="replicate"`.

    !!! Example

        ```python
        import jax
        from shardfx import MeshSpec, plan, presets

        array = jax.ShapeDtypeStruct((262144, 7680), "bfloat16")
        tree = {"model.language_model.embed_tokens_per_layer.weight": array}
        # The embeddings of all layers are by far the largest array.
        made = plan(tree, MeshSpec({"fsdp": 8, "tensor": 4}), paths=presets.gemma3n())
        assert tuple(made.leaves[0].spec) == ("tensor", "fsdp")
        ```
    """
    return optional_rules("gemma3n", {"dim": head_dim}, fsdp, tensor)


def gpt_oss(
    *,
    head_dim: int = 64,
    fsdp: Axes = "fsdp",
    tensor: Axes = "tensor",
) -> PathRules:
    """Returns rules for gpt-oss. `head_dim` is the size of one head; `fsdp` and
    `tensor` are mesh axes.

    The experts of a layer are one array, `[experts, in, out]`, whose columns of gate
    and up alternate and are sharded between pairs; or MXFP4 blocks, as published.

    !!! Example

        ```python
        import jax
        from shardfx import MeshSpec, plan, presets

        array = jax.ShapeDtypeStruct((32, 2880, 5760), "bfloat16")
        tree = {"model.layers.0.mlp.experts.gate_up_proj": array}
        # 2,880 pairs of gate and up, 720 on each device.
        made = plan(tree, MeshSpec({"fsdp": 8, "tensor": 4}), paths=presets.gpt_oss())
        assert tuple(made.leaves[0].spec) == (None, "fsdp", "tensor")
        ```
    """
    return optional_rules("gpt_oss", {"dim": head_dim, "two": 2}, fsdp, tensor)


def qwen3_next(
    *,
    head_dim: int = 256,
    linear_num_key_heads: int = 16,
    linear_num_value_heads: int = 32,
    linear_head_dim: int = 128,
    fsdp: Axes = "fsdp",
    tensor: Axes = "tensor",
) -> PathRules:
    """Returns rules for Qwen3-Next, with the layer that predicts ahead.

    **Arguments:**

    - `head_dim`: the number of elements in one head of the gated attention. The rows of
      a head of queries hold the query, then its gate.
    - `linear_num_key_heads`, `linear_num_value_heads`: as in the model's config.json.
      Linear attention is sharded between key heads, each with its values.
    - `linear_head_dim`: its `linear_key_head_dim` and `linear_value_head_dim`.
    - `fsdp`, `tensor`: the mesh axes to use.

    **Returns:**

    [`shardfx.PathRules`][].

    **Raises:**

    `RuleError` if a number is not positive, or if the number of value heads is no
    multiple of the number of key heads.

    !!! Example

        ```python
        import jax
        from shardfx import MeshSpec, plan, presets

        array = jax.ShapeDtypeStruct((12288, 2048), "bfloat16")
        tree = {"model.layers.0.linear_attn.in_proj_qkvz.weight": array}
        # 16 key heads, four on each device.
        made = plan(tree, MeshSpec({"fsdp": 8, "tensor": 4}), paths=presets.qwen3_next())
        assert tuple(made.leaves[0].spec) == ("tensor", "fsdp")
        ```
    """
    head_dim = positive(head_dim, "`head_dim`")
    linear_head_dim = positive(linear_head_dim, "`linear_head_dim`")
    heads = "heads, as `linear_num_key_heads=16`"
    key_heads = positive(linear_num_key_heads, "`linear_num_key_heads`", heads)
    value_heads = positive(linear_num_value_heads, "`linear_num_value_heads`", heads)
    if value_heads % key_heads:
        raise RuleError(
            f"`qwen3_next(linear_num_key_heads={key_heads},"
            f" linear_num_value_heads={value_heads})`: each key head has equally many"
            " value heads; give the numbers of the model's config.json."
        )
    values_of_key = value_heads // key_heads
    sizes = {
        "dim": head_dim,
        "two_dims": 2 * head_dim,
        "linear_head_dim": linear_head_dim,
        # The rows of a key head: its query and key, its values and their gates.
        "qkvz": 2 * linear_head_dim * (1 + values_of_key),
        "ba": 2 * values_of_key,
    }
    return optional_rules("qwen3_next", sizes, fsdp, tensor)


def llama4(
    *,
    head_dim: int = 128,
    vision_head_dim: int = 88,
    fsdp: Axes = "fsdp",
    tensor: Axes = "tensor",
) -> PathRules:
    """Returns rules for Llama 4, Scout and Maverick, with the vision encoder. `fsdp`
    and `tensor` are mesh axes; the other numbers are the sizes of one head.

    The experts of a layer are one array, `[experts, in, out]`. Gate and up are
    concatenated, so a shard may hold only one of them.

    !!! Example

        ```python
        import jax
        from shardfx import MeshSpec, plan, presets

        array = jax.ShapeDtypeStruct((16, 8192, 5120), "bfloat16")
        tree = {"language_model.model.layers.0.feed_forward.experts.down_proj": array}
        # Back from the hidden size, by its dimension.
        made = plan(tree, MeshSpec({"fsdp": 8, "tensor": 4}), paths=presets.llama4())
        assert tuple(made.leaves[0].spec) == (None, "tensor", "fsdp")
        ```
    """
    sizes = {"dim": head_dim, "vision_head_dim": vision_head_dim}
    return optional_rules("llama4", sizes, fsdp, tensor)


def deepseek_v3(
    *,
    qk_nope_head_dim: int = 128,
    qk_rope_head_dim: int = 64,
    v_head_dim: int = 128,
    fsdp: Axes = "fsdp",
    tensor: Axes = "tensor",
) -> PathRules:
    """Returns rules for DeepSeek-V3 and R1, with the block scales of the fp8 checkpoint
    and the multi-token prediction layer.

    **Arguments:**

    - `qk_nope_head_dim`, `qk_rope_head_dim`: the number of elements of a head's query
      or key without rotary positions, and the number of those with them, as in the
      model's config.json.
    - `v_head_dim`: the number of elements of a head's value.
    - `fsdp`, `tensor`: the mesh axes to use.

    **Returns:**

    [`shardfx.PathRules`][]. The compressed queries, keys and values belong to no head
    and are sharded only over `fsdp`.

    !!! Example

        ```python
        import jax
        from shardfx import MeshSpec, plan, presets

        array = jax.ShapeDtypeStruct((24576, 1536), "bfloat16")
        tree = {"model.layers.3.self_attn.q_b_proj.weight": array}
        # 128 heads of 128 + 64.
        made = plan(tree, MeshSpec({"fsdp": 8, "tensor": 4}), paths=presets.deepseek_v3())
        assert tuple(made.leaves[0].spec) == ("tensor", "fsdp")
        ```
    """
    # A head may have no element of one of the two kinds.
    nope_dim = not_negative(qk_nope_head_dim, "`qk_nope_head_dim`")
    rope_dim = not_negative(qk_rope_head_dim, "`qk_rope_head_dim`")
    value_dim = positive(v_head_dim, "`v_head_dim`")
    sizes = {
        "dim": positive(nope_dim + rope_dim, "`qk_nope_head_dim + qk_rope_head_dim`"),
        "both_dim": nope_dim + value_dim,
        "value_dim": value_dim,
    }
    return optional_rules("deepseek", sizes, fsdp, tensor)


def gpt2(
    *,
    head_dim: int = 64,
    fsdp: Axes = "fsdp",
    tensor: Axes = "tensor",
) -> PathRules:
    """Returns rules for GPT-2, whose Conv1D weights are `[in, out]`.

    `head_dim` is the size of one head; `fsdp` and `tensor` are mesh axes.

    `c_attn` holds query, key and value, concatenated. It is sharded between heads, but
    a shard does not hold the query, key and value of the same heads. For that, split
    `c_attn` into three arrays.

    !!! Example

        ```python
        import jax
        from shardfx import MeshSpec, plan, presets

        array = jax.ShapeDtypeStruct((768, 3072), "bfloat16")
        tree = {"h.0.mlp.c_fc.weight": array}
        # `[in, out]`: the hidden size is the second dimension.
        made = plan(tree, MeshSpec({"fsdp": 8, "tensor": 4}), paths=presets.gpt2())
        assert tuple(made.leaves[0].spec) == ("fsdp", "tensor")
        ```
    """
    return optional_rules("gpt", {"dim": head_dim}, fsdp, tensor)


def bert(
    *,
    head_dim: int = 64,
    fsdp: Axes = "fsdp",
    tensor: Axes = "tensor",
) -> PathRules:
    """Returns rules for BERT and for sentence encoders with the same names, such as
    MiniLM (heads of 32).

    `head_dim` is the size of one head; `fsdp` and `tensor` are mesh axes.

    !!! Example

        ```python
        import jax
        from shardfx import MeshSpec, plan, presets

        array = jax.ShapeDtypeStruct((384, 384), "bfloat16")
        tree = {"encoder.layer.0.attention.self.query.weight": array}
        # MiniLM: 12 heads of 32, three on each device.
        made = plan(tree, MeshSpec({"fsdp": 8, "tensor": 4}), paths=presets.bert(head_dim=32))
        assert tuple(made.leaves[0].spec) == ("tensor", "fsdp")
        ```
    """
    return optional_rules("bert", {"dim": head_dim}, fsdp, tensor)


def t5(
    *,
    head_dim: int = 64,
    fsdp: Axes = "fsdp",
    tensor: Axes = "tensor",
) -> PathRules:
    """Returns rules for T5 and T5 v1.1. `head_dim` is the size of one head; `fsdp` and
    `tensor` are mesh axes.

    !!! Example

        ```python
        import jax
        from shardfx import MeshSpec, plan, presets

        array = jax.ShapeDtypeStruct((512, 512), "bfloat16")
        tree = {"encoder.block.0.layer.0.SelfAttention.q.weight": array}
        # Eight heads of 64, two on each device.
        made = plan(tree, MeshSpec({"fsdp": 8, "tensor": 4}), paths=presets.t5())
        assert tuple(made.leaves[0].spec) == ("tensor", "fsdp")
        ```
    """
    return optional_rules("t5", {"dim": head_dim}, fsdp, tensor)

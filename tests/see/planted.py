"""One mistake for each check of `lint`, planted in correct rules, and the findings that
`lint` must return.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

import shardfx as sfx
from shardfx import AxisRules, MeshSpec, PathRules, atomic, fsdp, replicate
from shardfx.presets import models
from tests.structs import leaf


MESH = MeshSpec({"fsdp": 4, "tensor": 2})
SQUARE = MeshSpec({"fsdp": 4, "tensor": 4})
LAYER = {
    "attn": {
        "q_proj": leaf(512, 256),
        "k_proj": leaf(256, 256),
        "v_proj": leaf(256, 256),
        "o_proj": leaf(256, 512),
    },
    "mlp": {"up": leaf(1024, 256), "down": leaf(256, 1024)},
    "norm": leaf(256),
}
TREE = {"embed": leaf(1000, 256), "layers": [LAYER] * 4, "head": leaf(256, 1000)}
RULES = [
    (r"(q|k|v)_proj$|up$", P("tensor", "fsdp")),
    (r"o_proj$|down$", P("fsdp", "tensor")),
    (r"embed$", P("tensor", "fsdp")),
    (r"head$", P("fsdp", "tensor")),
    (r"norm$", P("fsdp")),
]
NAMED = {
    "attn": {
        "q_proj": ("heads", "embed"),
        "k_proj": ("kv_heads", "embed"),
        "v_proj": ("kv_heads", "embed"),
        "o_proj": ("embed", "heads"),
    },
    "mlp": {"up": ("mlp", "embed"), "down": ("embed", "mlp")},
    "norm": ("embed",),
}
NAMES = {"embed": ("vocab", "embed"), "layers": [NAMED] * 4, "head": ("embed", "vocab")}
AXES = AxisRules(
    [
        ("heads", "tensor"),
        ("kv_heads", "tensor"),
        ("mlp", "tensor"),
        ("vocab", "tensor"),
        ("embed", "fsdp"),
    ],
)


def by_path(*extra: Any, rules: Any = None, **others: Any) -> dict[str, Any]:
    """Path rules without mistakes, with other rules before them."""
    return (
        {"tree": TREE, "mesh": MESH}
        | {"paths": PathRules([*extra, *(RULES if rules is None else rules)])}
        | others
    )


def by_name(axes: AxisRules = AXES, **others: Any) -> dict[str, Any]:
    """Names and axis rules without mistakes."""
    return {
        "tree": TREE,
        "mesh": MESH,
        "names": NAMES,
        "axes": axes,
    } | others


CLEAN: dict[str, dict[str, Any]] = {"paths": by_path(), "names": by_name()}


def model(
    name: str, how: str, mesh: str, *first: Any, layers: int = 4
) -> dict[str, Any]:
    """A published model with few layers and its rules, with other rules before them."""
    tree = models.tree(name, layers=layers, stack_experts=how == "ep")
    return {
        "tree": tree,
        "mesh": MeshSpec.parse(mesh),
        "paths": models.rules_for(name, how).prepend(first),
    }


def changed_names(**changes: Any) -> Any:
    return sfx.auto.renamed(
        TREE,
        {f"{path.replace('__', '/')}$": names for path, names in changes.items()},
        names=NAMES,
    )


def with_attention(**leaves: Any) -> Any:
    return {**TREE, "layers": [{**LAYER, "attn": {**LAYER["attn"], **leaves}}] * 4}


def axes_with(name: str, target: Any) -> AxisRules:
    return AXES.extend([(name, target)])


def tree_with(vocab: int) -> Any:
    return {**TREE, "embed": leaf(vocab, 256)}


def without(rules: list[Any], *numbers: int) -> list[Any]:
    return [rule for position, rule in enumerate(rules) if position not in numbers]


def moments(
    spec: P | None = None, mesh: str = "data=4,fsdp=2", **how: Any
) -> sfx.ShardPlan:
    """The joined plan of parameters and of Adam's moments, one of which may be planned
    by other rules.
    """
    params = {
        "w": leaf(8192, 4096, dtype=jnp.float32),
        "b": leaf(4096, dtype=jnp.float32),
    }
    plan = sfx.plan(
        params, MeshSpec.parse(mesh), paths=PathRules.parse("w->fsdp, b->fsdp")
    )
    opt = sfx.follow(optax.adam(1e-3).init, plan, **how)
    joined = sfx.ShardPlan.join(params=plan, opt=opt)
    if spec is None:
        return joined
    return joined.replace("opt/0/nu/w", spec)


TOWER = {"layers": [{"weight": leaf(4096, 8192, dtype=jnp.float32)}] * 2}
BRANCHES = {
    "encoder": TOWER,
    "decoder": {"body": TOWER},
    "head": {"weight": leaf(4096, 8192, dtype=jnp.float32)},
}
CLEAN |= {
    "ZeRO": {"tree": moments(over="data")},
    "no states, but branches that are alike": {
        "tree": BRANCHES,
        "mesh": MESH,
        "paths": PathRules([("encoder", P("fsdp", "tensor")), (".*", P("fsdp"))]),
    },
    "rules of one's own before a preset's": model(
        "llama3-8b",
        "fsdp_tp",
        "fsdp=4,tensor=4",
        ("embed_tokens|lm_head", P("fsdp")),
        ("up_proj", P("tensor")),
    ),
    "one number": {"tree": leaf(), "mesh": MeshSpec({})},
    "one key": {"tree": jax.random.key(0), "mesh": MeshSpec({})},
}
# A finding is its code and what it is about; "; " is between two.
CUT_HEADS = "cut-head layers/{0..3}/attn/k_proj; cut-head layers/{0..3}/attn/v_proj"
ALL_KINDS = ("mlp/up", "mlp/down", "norm", *[f"attn/{name}" for name in LAYER["attn"]])
UNMATCHED = [
    f"unmatched {path}"
    for path in ("embed", "head", *[f"layers/{{0..3}}/{kind}" for kind in ALL_KINDS])
]
# The findings of a mistake, and the arguments with the mistake.
PLANTED: list[tuple[str, Callable[[], dict[str, Any]]]] = [
    (
        "unplannable layers/{0..3}/norm",
        lambda: by_path((r"norm$", P(None, "fsdp")), rules=without(RULES, 4)),
    ),
    (
        "unplannable layers/{0..3}/mlp/up",
        lambda: by_name(names=changed_names(up=("mlp",))),
    ),
    (
        "unplannable layers/{0..3}/mlp/up",
        lambda: by_name(names=changed_names(up=("embed", "embed"))),
    ),
    (
        "unplannable w",
        lambda: {"tree": {"w": leaf(8, 8)}, "mesh": MESH, "names": {"w": ("a", "b")}},
    ),
    (
        "; ".join(["invalid names", *UNMATCHED]),
        lambda: by_name(names={"embed": ("vocab", "embed")}),
    ),
    ("invalid mode 'trian'", lambda: by_name(mode="trian")),
    (
        "invalid memory_kinds[0] 'embed'",
        lambda: by_path(memory_kinds=(("embed", "pinned_hosts"),)),
    ),
    ("unmatched layers/{0..3}/norm", lambda: by_path(rules=without(RULES, 4))),
    (
        "unknown-name name 'mpl'",
        lambda: by_name(names=changed_names(up=("mpl", "embed"))),
    ),
    (
        "unknown-name name 'wholly_new'",
        lambda: by_name(names=changed_names(up=("wholly_new", "embed"))),
    ),
    (
        "unknown-name units 'headz'",
        lambda: by_name(AxisRules(AXES.rules, units={"headz": 64})),
    ),
    (
        "absent-axis mesh axis 'fspd'",
        lambda: by_path(rules=[*RULES[:4], (r"norm$", P("fspd"))]),
    ),
    (
        "absent-axis mesh axis 'fspd'",
        lambda: by_path(rules=[*RULES[:4], (r"norm$", P(("fsdp", "fspd")))]),
    ),
    ("absent-axis mesh axis 'fdsp'", lambda: by_name(axes_with("vocab", "fdsp"))),
    (
        "absent-axis mesh axis 'pipeline'",
        lambda: by_name(axes_with("vocab", "pipeline")),
    ),
    (
        "unused-axis mesh axis 'data'",
        lambda: by_path(mesh=MeshSpec({"data": 2, "fsdp": 4, "tensor": 2})),
    ),
    ("unused-rule paths[0] 'lm_haed'", lambda: by_path((r"lm_haed", P("tensor")))),
    (
        "unused-rule memory_kinds[0] 'opt_state'",
        lambda: by_path(memory_kinds=(("opt_state", "pinned_host"),)),
    ),
    (
        "shadowed-rule paths[5] 'v_proj'",
        lambda: by_path(
            rules=[*RULES, (r"v_proj", P("fsdp", "tensor")), (r".*", replicate)]
        ),
    ),
    (
        "shadowed-rule paths[1] 'o_proj'",
        lambda: by_path(
            rules=[
                (r"_proj|mlp|norm", fsdp("fsdp")),
                (r"o_proj", P("fsdp", "tensor")),
                *RULES[2:4],
            ]
        ),
    ),
    (
        "dead-rule axes.rules[6] 'batch' -> fsdp",
        lambda: by_name(AxisRules([*AXES.rules, ("batch", None), ("batch", "fsdp")])),
    ),
    (
        "dead-rule axes.rules[5] 'embed' -> fsdp+tensor",
        lambda: by_name(axes_with("embed", ("fsdp", "tensor"))),
    ),
    (
        "replicated embed",
        lambda: by_path(
            (r"embed$", ()), rules=without(RULES, 2), replicated_bytes=2**18
        ),
    ),
    (
        "replicated embed",
        lambda: by_path(
            (r"embed$", fsdp("fsdp", skip_dims=(0, 1))),
            rules=without(RULES, 2),
            replicated_bytes=2**18,
        ),
    ),
    (
        "replicated embed",
        lambda: by_name(
            axes_with("table", None),
            names=changed_names(embed=("table", None)),
            replicated_bytes=2**18,
        ),
    ),
    (
        "corrected embed",
        lambda: by_name(
            axes_with("odd", ("fsdp", "tensor")),
            names=changed_names(embed=("odd", None)),
            tree=tree_with(1004),
        ),
    ),
    (
        "corrected layers/{0..3}/mlp/up",
        lambda: by_name(
            axes_with("wide", "fsdp"),
            names=changed_names(up=("wide", "embed")),
            strict=True,
        ),
    ),
    ("corrected embed", lambda: by_path(tree=tree_with(1001))),
    (
        "corrected embed",
        lambda: by_name(
            axes_with("odd", "tensor"),
            names=changed_names(embed=("odd", "embed")),
            tree=tree_with(1001),
        ),
    ),
    (
        "cut-head layers/{0..3}/attn/v_proj",
        lambda: by_path(
            (r"q_proj$", atomic(P("tensor", "fsdp"), (256, 1))),
            (r"k_proj$", atomic(P(None, "fsdp"), (256, 1))),
        ),
    ),
    (
        CUT_HEADS,
        lambda: by_path((r"k_norm", replicate), tree=with_attention(k_norm=leaf(256))),
    ),
    (CUT_HEADS, lambda: by_name(head_dim=256)),
    (
        CUT_HEADS,
        lambda: by_path(
            tree=with_attention(q_proj=leaf(2048, 256), o_proj=leaf(256, 2048)),
            mesh=SQUARE,
        ),
    ),
    (
        "contradicted-name layers/2/mlp/up; uneven-layers layers/2/mlp/up",
        lambda: by_name(
            names=changed_names(**{"layers__2__mlp__up": ("embed", "mlp")})
        ),
    ),
    (
        "contradicted-name embed, name 'mlp'",
        lambda: by_name(names=changed_names(embed=("mlp", "embed"))),
    ),
    (
        "uneven-layers layers/3/mlp/up",
        lambda: by_path((r"layers/3/mlp/up$", P("fsdp"))),
    ),
    (
        "replicated opt/0/nu/w; optimizer-state opt/0/nu/w",
        lambda: {"tree": moments(P(), "fsdp=8")},
    ),
    ("optimizer-state opt", lambda: {"tree": moments()}),
    (
        "contradicted-name layers/{0..3}/mlp/up",
        lambda: by_name(names=changed_names(up=("embed", "mlp"))),
    ),
    (
        "absent-axis mesh axis 'tesnor'",
        lambda: model(
            "gemma2-2b",
            "fsdp_tp",
            "fsdp=4,tensor=4",
            ("embed_tokens", P("tesnor", "fsdp")),
        ),
    ),
    (
        (
            "shadowed-rule paths[3] '(q_proj|k_proj|v_proj).weight$'; shadowed-rule"
            " paths[4] 'o_proj.weight$'"
        ),
        lambda: model(
            "qwen3-8b", "fsdp_tp", "fsdp=4,tensor=4", ("self_attn", fsdp("fsdp"))
        ),
    ),
    (
        "; ".join(
            f"unplannable model/layers/{{0..3}}/self_attn/{item}_proj/bias"
            for item in "qkv"
        ),
        lambda: model(
            "qwen2.5-7b",
            "fsdp_tp",
            "fsdp=4,tensor=4",
            (r"_proj.bias$", P("tensor", "fsdp")),
        ),
    ),
    (
        "contradicted-name q",
        lambda: {
            "tree": {
                "q": leaf(4096, 32, 128),
                "k": leaf(4096, 8, 128),
                "o": leaf(32, 128, 4096),
            },
            "mesh": SQUARE,
            "names": {
                "q": ("embed", "kv", "heads"),
                "k": ("embed", "kv_heads", "kv"),
                "o": ("heads", "kv", "embed"),
            },
            "axes": AxisRules(
                [
                    ("embed", "fsdp"),
                    ("heads", "tensor"),
                    ("kv_heads", "tensor"),
                    ("kv", None),
                ]
            ),
        },
    ),
    (
        (
            "corrected model/layers/{0..3}/self_attn/v_proj/weight; cut-head"
            " model/layers/{0..3}/self_attn/k_proj/weight"
        ),
        lambda: model(
            "gemma-2b",
            "fsdp_tp",
            "fsdp=2,tensor=2",
            (r"k_proj.weight$", P("tensor", "fsdp")),
        ),
    ),
    (
        (
            "cut-head"
            " Transformer/encoderblock_{0..3}/MultiHeadDotProductAttention_0/key/kernel"
        ),
        lambda: model(
            "vit-b-16",
            "fsdp_tp",
            "fsdp=4,tensor=4",
            ("key.kernel", P(None, None, "tensor")),
        ),
    ),
    (
        "replicated lm_head/weight",
        lambda: model(
            "llama3-70b", "fsdp_tp", "fsdp=4,tensor=4", ("lm_head", replicate)
        ),
    ),
    (
        "uneven-layers model/layers/{1,10..11}/mlp/up_proj/weight",
        lambda: model(
            "llama3.2-1b",
            "fsdp_tp",
            "fsdp=4,tensor=4",
            (r"layers.1.*up_proj", P(None, "fsdp")),
            layers=12,
        ),
    ),
    (
        (
            "corrected"
            " language_model/model/layers/{0..1}/feed_forward/experts/down_proj;"
            " corrected"
            " language_model/model/layers/{0..1}/feed_forward/experts/gate_up_proj"
        ),
        lambda: model("llama4-scout", "ep", "expert=32,fsdp=2,tensor=2", layers=2),
    ),
    (
        "known-fault blocks/{0..2}/w",
        lambda: {
            "tree": {"blocks": [{"w": leaf(64, 64)}] * 3},
            "mesh": MeshSpec({"data": 2, "fsdp": 2, "tensor": 2}),
            "paths": PathRules([("w", P("tensor", "fsdp"))], mesh_axes=("data",)),
        },
    ),
    (
        "known-fault stack/w",
        lambda: {
            "tree": {"stack": {"w": leaf(3, 64, 64)}},
            "mesh": MeshSpec({"data": 2, "fsdp": 2, "tensor": 2}),
            "names": {"stack": {"w": ("layers", "in", "out")}},
            "axes": AxisRules(
                [
                    ("batch", ("data", "fsdp")),
                    ("layers", None),
                    ("in", "fsdp"),
                    ("out", "tensor"),
                ]
            ),
        },
    ),
    (
        "known-fault blocks/{0..2}/w",
        lambda: {
            "tree": {"blocks": [{"w": leaf(3, 3, 64, 64)}] * 3},
            "mesh": MeshSpec({"data": 2, "fsdp": 2, "tensor": 2}),
            "paths": PathRules(
                [("w", P(None, None, "tensor", "fsdp"))], mesh_axes=("data",)
            ),
        },
    ),
]

"""Mistakes of each kind, planted one by one in rules that have none: what `lint` must find, and nothing else."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

import shardfx as sfx
from shardfx import AxisRules, MeshSpec, PathRules, atomic, fsdp, replicate
from shardfx.presets import models


def leaf(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


MESH = MeshSpec({"fsdp": 4, "tensor": 2})
LAYER = {
    "attn": {"q_proj": leaf(512, 256), "k_proj": leaf(256, 256), "v_proj": leaf(256, 256), "o_proj": leaf(256, 512)},
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
    [("heads", "tensor"), ("kv_heads", "tensor"), ("mlp", "tensor"), ("vocab", "tensor"), ("embed", "fsdp")],
)


def by_path(*more: Any, rules: Any = None, **others: Any) -> dict[str, Any]:
    """The clean set of path rules, with some put before it."""
    return {"tree": TREE, "mesh": MESH} | {"paths": PathRules([*more, *(RULES if rules is None else rules)])} | others


def by_name(axes: AxisRules = AXES, **others: Any) -> dict[str, Any]:
    """The clean set of names and axis rules."""
    return {"tree": TREE, "mesh": MESH, "names": NAMES, "axes": axes} | others


CLEAN: dict[str, dict[str, Any]] = {"paths": by_path(), "names": by_name()}


def model(name: str, how: str, mesh: str, *first: Any, layers: int = 4) -> dict[str, Any]:
    """A published model with few layers and its rules, with some of one's own put before them."""
    tree = models.tree(name, layers=layers, stack_experts=how == "ep")
    return {"tree": tree, "mesh": MeshSpec.parse(mesh), "paths": models.rules_for(name, how).prepend(first)}


def changed_names(**changes: Any) -> Any:
    return sfx.auto.renamed(
        TREE, {f"{path.replace('__', '/')}$": names for path, names in changes.items()}, names=NAMES
    )


def with_attention(**leaves: Any) -> Any:
    return {**TREE, "layers": [{**LAYER, "attn": {**LAYER["attn"], **leaves}}] * 4}


def without(rules: list[Any], *numbers: int) -> list[Any]:
    return [rule for at, rule in enumerate(rules) if at not in numbers]


def moments(spec: P | None = None, mesh: str = "data=4,fsdp=2", **how: Any) -> sfx.ShardPlan:
    """A joined plan of parameters and Adam's moments, of which one may be planned otherwise."""
    params = {"w": leaf(8192, 4096, dtype=jnp.float32), "b": leaf(4096, dtype=jnp.float32)}
    made = sfx.plan(params, MeshSpec.parse(mesh), paths=PathRules.parse("w->fsdp, b->fsdp"))
    joined = sfx.ShardPlan.join(params=made, opt=sfx.follow(optax.adam(1e-3).init, made, **how))
    return joined if spec is None else joined.replace("opt/0/nu/w", spec)


TOWER = {"layers": [{"weight": leaf(4096, 8192, dtype=jnp.float32)}] * 2}
BRANCHES = {"encoder": TOWER, "decoder": {"body": TOWER}, "head": {"weight": leaf(4096, 8192, dtype=jnp.float32)}}
CLEAN |= {
    "ZeRO": {"tree": moments(over="data")},
    "no states, but branches that are alike": {
        "tree": BRANCHES,
        "mesh": MESH,
        "paths": PathRules([("encoder", P("fsdp", "tensor")), (".*", P("fsdp"))]),
    },
    "rules of one's own before a preset's": model(
        "llama3-8b", "fsdp_tp", "fsdp=4,tensor=4", ("embed_tokens|lm_head", P("fsdp")), ("up_proj", P("tensor"))
    ),
    "one number": {"tree": leaf(), "mesh": MeshSpec({})},
    "one key": {"tree": jax.random.key(0), "mesh": MeshSpec({})},
}
# Arguments with a mistake.
PLANTED: dict[str, Callable[[], dict[str, Any]]] = {
    "a spec that is too long": lambda: by_path((r"norm$", P(None, "fsdp")), rules=without(RULES, 4)),
    "names of another length": lambda: by_name(names=changed_names(up=("mlp",))),
    "a name twice": lambda: by_name(names=changed_names(up=("embed", "embed"))),
    "names without rules": lambda: {"tree": {"w": leaf(8, 8)}, "mesh": MESH, "names": {"w": ("a", "b")}},
    "names of another tree": lambda: by_name(names={"embed": ("vocab", "embed")}),
    "an unknown mode": lambda: by_name(mode="trian"),
    "an unknown memory kind": lambda: by_path(memory_kinds=(("embed", "pinned_hosts"),)),
    "a leaf without a rule": lambda: by_path(rules=without(RULES, 4)),
    "a name that is misspelled": lambda: by_name(names=changed_names(up=("mpl", "embed"))),
    "a name that nobody knows": lambda: by_name(names=changed_names(up=("wholly_new", "embed"))),
    "a unit of no name": lambda: by_name(AxisRules(AXES.rules, units={"headz": 64})),
    "a mesh axis that is misspelled": lambda: by_path(rules=[*RULES[:4], (r"norm$", P("fspd"))]),
    "a mesh axis of axis rules that is misspelled": lambda: by_name(AXES.extend([("vocab", "fdsp")])),
    "a mesh axis that is not there": lambda: by_name(AXES.extend([("vocab", "pipeline")])),
    "a mesh axis that nobody uses": lambda: by_path() | {"mesh": MeshSpec({"data": 2, "fsdp": 4, "tensor": 2})},
    "a rule that matches nothing": lambda: by_path((r"lm_haed", P("tensor"))),
    "a memory kind that matches nothing": lambda: by_path(memory_kinds=(("opt_state", "pinned_host"),)),
    "a rule behind one that takes all": lambda: by_path(
        rules=[*RULES, (r"v_proj", P("fsdp", "tensor")), (r".*", replicate)]
    ),
    "a special rule behind a wide one": lambda: by_path(
        rules=[(r"_proj|mlp|norm", fsdp("fsdp")), (r"o_proj", P("fsdp", "tensor")), *RULES[2:4]]
    ),
    "a rule after one for nothing": lambda: by_name(AxisRules([*AXES.rules, ("batch", None), ("batch", "fsdp")])),
    "a fallback that asks for more": lambda: by_name(AXES.extend([("embed", ("fsdp", "tensor"))])),
    "a large leaf that is whole": lambda: by_path((r"embed$", ()), rules=without(RULES, 2), replicated_bytes=2**18),
    "a large leaf whose names are of nothing": lambda: by_name(
        AXES.extend([("table", None)]), names=changed_names(embed=("table", None)), replicated_bytes=2**18
    ),
    "a size that one of two axes divides": lambda: by_name(
        AXES.extend([("odd", ("fsdp", "tensor"))]),
        names=changed_names(embed=("odd", None)),
        tree={**TREE, "embed": leaf(1004, 256)},
    ),
    "a name whose axis is taken, under strict": lambda: by_name(
        AXES.extend([("wide", "fsdp")]), names=changed_names(up=("wide", "embed")), strict=True
    ),
    "a size that does not divide": lambda: by_path() | {"tree": {**TREE, "embed": leaf(1001, 256)}},
    "a size of names that does not divide": lambda: (
        by_name(AXES.extend([("odd", "tensor")]), names=changed_names(embed=("odd", "embed")))
        | {"tree": {**TREE, "embed": leaf(1001, 256)}}
    ),
    "a head that is cut, said by its neighbour": lambda: by_path(
        (r"q_proj$", atomic(P("tensor", "fsdp"), (256, 1))), (r"k_proj$", atomic(P(None, "fsdp"), (256, 1)))
    ),
    "a head that is cut, said by a norm": lambda: (
        by_path((r"k_norm", replicate)) | {"tree": with_attention(k_norm=leaf(256))}
    ),
    "a head that is cut, said by the user": lambda: by_name(head_dim=256),
    "heads of the usual width that are cut": lambda: (
        by_path(tree=with_attention(q_proj=leaf(2048, 256), o_proj=leaf(256, 2048)))
        | {"mesh": MeshSpec({"fsdp": 4, "tensor": 4})}
    ),
    "names in the wrong order": lambda: by_name(names=changed_names(**{"layers__2__mlp__up": ("embed", "mlp")})),
    "one name for two axes": lambda: by_name(names=changed_names(embed=("mlp", "embed"))),
    "a layer that is sharded otherwise": lambda: by_path((r"layers/3/mlp/up$", P("fsdp"))),
    "a moment that is whole": lambda: {"tree": moments(P(), "fsdp=8")},
    "ZeRO that does nothing": lambda: {"tree": moments()},
    "names in the wrong order everywhere": lambda: by_name(names=changed_names(up=("embed", "mlp"))),
    "a misspelled axis beside strategies": lambda: model(
        "gemma2-2b", "fsdp_tp", "fsdp=4,tensor=4", ("embed_tokens", P("tesnor", "fsdp"))
    ),
    "a wide rule before a preset's": lambda: model(
        "qwen3-8b", "fsdp_tp", "fsdp=4,tensor=4", ("self_attn", fsdp("fsdp"))
    ),
    "biases with the spec of weights": lambda: model(
        "qwen2.5-7b", "fsdp_tp", "fsdp=4,tensor=4", (r"_proj.bias$", P("tensor", "fsdp"))
    ),
    "heads and their elements in the wrong order": lambda: {
        "tree": {"q": leaf(4096, 32, 128), "k": leaf(4096, 8, 128), "o": leaf(32, 128, 4096)},
        "mesh": MeshSpec({"fsdp": 4, "tensor": 4}),
        "names": {"q": ("embed", "kv", "heads"), "k": ("embed", "kv_heads", "kv"), "o": ("heads", "kv", "embed")},
        "axes": AxisRules([("embed", "fsdp"), ("heads", "tensor"), ("kv_heads", "tensor"), ("kv", None)]),
    },
    "one head cut, and the value's whole": lambda: model(
        "gemma-2b", "fsdp_tp", "fsdp=2,tensor=2", (r"k_proj.weight$", P("tensor", "fsdp"))
    ),
    "the elements of heads cut": lambda: model(
        "vit-b-16", "fsdp_tp", "fsdp=4,tensor=4", ("key.kernel", P(None, None, "tensor"))
    ),
    "the head whole": lambda: model("llama3-70b", "fsdp_tp", "fsdp=4,tensor=4", ("lm_head", replicate)),
    "a number that finds others too": lambda: model(
        "llama3.2-1b", "fsdp_tp", "fsdp=4,tensor=4", (r"layers.1.*up_proj", P(None, "fsdp")), layers=12
    ),
    "more experts than there are": lambda: model("llama4-scout", "ep", "expert=32,fsdp=2,tensor=2", layers=2),
}
# The findings that each mistake must be, a line for each: the code and what it is about.
FOUND = {
    "a spec that is too long": "unplannable layers/{0..3}/norm",
    "names of another length": "unplannable layers/{0..3}/mlp/up",
    "a name twice": "unplannable layers/{0..3}/mlp/up",
    "names without rules": "unplannable w",
    "names of another tree": (
        "invalid names",
        "unmatched embed",
        "unmatched head",
        "unmatched layers/{0..3}/mlp/up",
        "unmatched layers/{0..3}/mlp/down",
        "unmatched layers/{0..3}/norm",
        "unmatched layers/{0..3}/attn/q_proj",
        "unmatched layers/{0..3}/attn/k_proj",
        "unmatched layers/{0..3}/attn/v_proj",
        "unmatched layers/{0..3}/attn/o_proj",
    ),
    "an unknown mode": "invalid mode 'trian'",
    "an unknown memory kind": "invalid memory_kinds[0] 'embed'",
    "a leaf without a rule": "unmatched layers/{0..3}/norm",
    "a name that is misspelled": "unknown-name name 'mpl'",
    "a name that nobody knows": "unknown-name name 'wholly_new'",
    "a unit of no name": "unknown-name units 'headz'",
    "a mesh axis that is misspelled": "absent-axis mesh axis 'fspd'",
    "a mesh axis of axis rules that is misspelled": "absent-axis mesh axis 'fdsp'",
    "a mesh axis that is not there": "absent-axis mesh axis 'pipeline'",
    "a mesh axis that nobody uses": "unused-axis mesh axis 'data'",
    "a rule that matches nothing": "unused-rule paths[0] 'lm_haed'",
    "a memory kind that matches nothing": "unused-rule memory_kinds[0] 'opt_state'",
    "a rule behind one that takes all": "shadowed-rule paths[5] 'v_proj'",
    "a special rule behind a wide one": "shadowed-rule paths[1] 'o_proj'",
    "a rule after one for nothing": "dead-rule axes.rules[6] 'batch' -> fsdp",
    "a fallback that asks for more": "dead-rule axes.rules[5] 'embed' -> fsdp+tensor",
    "a large leaf that is whole": "replicated embed",
    "a large leaf whose names are of nothing": "replicated embed",
    "a size that one of two axes divides": "corrected embed",
    "a name whose axis is taken, under strict": "corrected layers/{0..3}/mlp/up",
    "a size that does not divide": "corrected embed",
    "a size of names that does not divide": "corrected embed",
    "a head that is cut, said by its neighbour": "cut-head layers/{0..3}/attn/v_proj",
    "a head that is cut, said by a norm": ("cut-head layers/{0..3}/attn/k_proj", "cut-head layers/{0..3}/attn/v_proj"),
    "a head that is cut, said by the user": (
        "cut-head layers/{0..3}/attn/k_proj",
        "cut-head layers/{0..3}/attn/v_proj",
    ),
    "heads of the usual width that are cut": (
        "cut-head layers/{0..3}/attn/k_proj",
        "cut-head layers/{0..3}/attn/v_proj",
    ),
    "names in the wrong order": ("contradicted-name layers/2/mlp/up", "uneven-layers layers/2/mlp/up"),
    "one name for two axes": "contradicted-name embed, name 'mlp'",
    "a layer that is sharded otherwise": "uneven-layers layers/3/mlp/up",
    "a moment that is whole": ("replicated opt/0/nu/w", "optimizer-state opt/0/nu/w"),
    "ZeRO that does nothing": "optimizer-state opt",
    "names in the wrong order everywhere": "contradicted-name layers/{0..3}/mlp/up",
    "a misspelled axis beside strategies": "absent-axis mesh axis 'tesnor'",
    "a wide rule before a preset's": (
        "shadowed-rule paths[3] '(q_proj|k_proj|v_proj).weight$'",
        "shadowed-rule paths[4] 'o_proj.weight$'",
    ),
    "biases with the spec of weights": (
        "unplannable model/layers/{0..3}/self_attn/q_proj/bias",
        "unplannable model/layers/{0..3}/self_attn/k_proj/bias",
        "unplannable model/layers/{0..3}/self_attn/v_proj/bias",
    ),
    "heads and their elements in the wrong order": "contradicted-name q",
    "one head cut, and the value's whole": (
        "corrected model/layers/{0..3}/self_attn/v_proj/weight",
        "cut-head model/layers/{0..3}/self_attn/k_proj/weight",
    ),
    "the elements of heads cut": "cut-head Transformer/encoderblock_{0..3}/MultiHeadDotProductAttention_0/key/kernel",
    "the head whole": "replicated lm_head/weight",
    "a number that finds others too": "uneven-layers model/layers/{1,10..11}/mlp/up_proj/weight",
    "more experts than there are": (
        "corrected language_model/model/layers/{0..1}/feed_forward/experts/down_proj",
        "corrected language_model/model/layers/{0..1}/feed_forward/experts/gate_up_proj",
    ),
}

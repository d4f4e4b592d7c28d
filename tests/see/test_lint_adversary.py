"""Mistakes in the rules of published models, as people make them: each is found, with nothing beside, and mended."""

from collections.abc import Callable
from typing import Any

import pytest
from jax.sharding import PartitionSpec as P
from test_lint import applied, lint

from shardfx import AxisRules, MeshSpec, PathRules, fsdp, replicate
from shardfx.presets import models
from tests.see.planted import leaf


FSDP_TP = {"fsdp": 4, "tensor": 4}
Arguments = dict[str, Any]


def model(name: str, how: str, sizes: dict[str, int], *first: Any, layers: int = 4, **others: Any) -> Arguments:
    """A published model with few layers and its rules, with some of one's own put before them."""
    rules = models.rules_for(name, how).prepend(first)
    tree = models.tree(name, layers=layers, stack_experts=how == "ep")
    return {"tree": tree, "mesh": MeshSpec(sizes), "paths": rules, **others}


def without(arguments: Arguments, part: str) -> Arguments:
    kept = [rule for rule in arguments["paths"].rules if part not in rule[0]]
    return {**arguments, "paths": PathRules(kept, axes=arguments["paths"].axes)}


LAYER = {
    **{name: leaf(4096, heads, 128) for name, heads in (("q", 32), ("k", 8), ("v", 8))},
    "o": leaf(32, 128, 4096),
    **{name: leaf(4096, 14336) for name in ("up", "gate")},
    "down": leaf(14336, 4096),
}
NAMED = {
    "q": ("embed", "heads", "kv"),
    "k": ("embed", "kv_heads", "kv"),
    "v": ("embed", "kv_heads", "kv"),
    "o": ("heads", "kv", "embed"),
    **{name: ("embed", "mlp") for name in ("up", "gate")},
    "down": ("mlp", "embed"),
}


def named(sizes: dict[str, int] | None = None, **changes: Any) -> Arguments:
    """A decoder by names, of which some are changed in every layer."""
    rules = [("embed", "fsdp"), *[(name, "tensor") for name in ("vocab", "heads", "kv_heads", "mlp")], ("kv", None)]
    tree = {"embed": leaf(32000, 4096), "layers": [LAYER] * 3, "head": leaf(4096, 32000)}
    ends = {"embed": ("vocab", "embed"), "head": ("embed", "vocab")}
    given = {name: changes.get(name, names) for name, names in (ends | NAMED).items()}
    layer = {name: given[name] for name in LAYER}
    names = {"embed": given["embed"], "head": given["head"], "layers": [layer] * 3}
    return {"tree": tree, "mesh": MeshSpec(sizes or FSDP_TP), "names": names, "axes": AxisRules(rules)}


ATTENTION, MLP = "model/layers/{0..3}/self_attn", "model/layers/{0..3}/mlp"
VIT = "Transformer/encoderblock_{0..3}/MultiHeadDotProductAttention_0"
CASES: dict[str, tuple[Callable[[], Arguments], list[tuple[str, str]]]] = {
    "a rule lost": (
        lambda: without(model("llama3-8b", "fsdp_tp", FSDP_TP), "down_proj"),
        [("unmatched", f"{MLP}/down_proj/weight")],
    ),
    "a wide rule first": (
        lambda: model("qwen3-8b", "fsdp_tp", FSDP_TP, ("self_attn", fsdp("fsdp"))),
        [
            ("shadowed-rule", "paths[3] '(q_proj|k_proj|v_proj).weight$'"),
            ("shadowed-rule", "paths[4] 'o_proj.weight$'"),
        ],
    ),
    "a misspelled axis": (
        lambda: model("gemma2-2b", "fsdp_tp", FSDP_TP, ("embed_tokens", P("tesnor", "fsdp"))),
        [("absent-axis", "mesh axis 'tesnor'")],
    ),
    "heads cut, as the query's rule says": (
        lambda: model("llama3-8b", "fsdp_tp", {"fsdp": 2, "tensor": 16}, (r"[kv]_proj.weight$", P("tensor", "fsdp"))),
        [("cut-head", f"{ATTENTION}/{role}_proj/weight") for role in "kv"],
    ),
    "one head cut": (
        lambda: model("gemma-2b", "fsdp_tp", {"fsdp": 2, "tensor": 2}, (r"k_proj.weight$", P("tensor", "fsdp"))),
        # The value's is whole, as it must be.
        [("corrected", f"{ATTENTION}/v_proj/weight"), ("cut-head", f"{ATTENTION}/k_proj/weight")],
    ),
    "the elements of heads cut": (
        lambda: model("vit-b-16", "fsdp_tp", FSDP_TP, ("key.kernel", P(None, None, "tensor"))),
        [("cut-head", f"{VIT}/key/kernel")],
    ),
    "biases with the spec of weights": (
        lambda: model("qwen2.5-7b", "fsdp_tp", FSDP_TP, (r"_proj.bias$", P("tensor", "fsdp"))),
        [("unplannable", f"{ATTENTION}/{role}_proj/bias") for role in "qkv"],
    ),
    "the head whole": (
        lambda: model("llama3-70b", "fsdp_tp", FSDP_TP, ("lm_head", replicate)),
        [("replicated", "lm_head/weight")],
    ),
    "one layer otherwise": (
        lambda: model("llama3-8b", "fsdp_tp", FSDP_TP, (r"layers.2.mlp.up_proj", P("tensor"))),
        [("uneven-layers", "model/layers/2/mlp/up_proj/weight")],
    ),
    "a number that finds others too": (
        lambda: model("llama3.2-1b", "fsdp_tp", FSDP_TP, (r"layers.1.*up_proj", P(None, "fsdp")), layers=12),
        [("uneven-layers", "model/layers/{1,10..11}/mlp/up_proj/weight")],
    ),
    "an axis that nobody uses": (
        lambda: model("llama3-8b", "fsdp_tp", {**FSDP_TP, "expert": 2}),
        [("unused-axis", "mesh axis 'expert'")],
    ),
    "more experts than there are": (
        lambda: model("llama4-scout", "ep", {"expert": 32, "fsdp": 2, "tensor": 2}, layers=2),
        [
            ("corrected", f"language_model/model/layers/{{0..1}}/feed_forward/experts/{name}_proj")
            for name in ("down", "gate_up")
        ],
    ),
    "a memory kind for what is not there": (
        lambda: model("llama3.2-1b", "fsdp_tp", FSDP_TP, memory_kinds=(("opt_state", "pinned_host"),)),
        [("unused-rule", "memory_kinds[0] 'opt_state'")],
    ),
    "two names in the wrong order everywhere": (
        lambda: named(up=("mlp", "embed"), gate=("mlp", "embed")),
        [("contradicted-name", "layers/{0..2}/gate"), ("contradicted-name", "layers/{0..2}/up")],
    ),
    "heads and their elements in the wrong order": (
        lambda: named(q=("embed", "kv", "heads")),
        [("contradicted-name", "layers/{0..2}/q")],
    ),
    "the head's names in the wrong order": (lambda: named(head=("vocab", "embed")), [("contradicted-name", "head")]),
    "a misspelled name": (lambda: named(down=("mpl", "embed")), [("unknown-name", "name 'mpl'")]),
    "an axis larger than the heads": (
        lambda: named({"fsdp": 4, "tensor": 16}),
        [("corrected", "layers/{0..2}/k"), ("corrected", "layers/{0..2}/v")],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_mistake_in_a_published_models_rules(case):
    make, expected = CASES[case]
    arguments = make()
    found = lint(arguments)
    assert sorted((one.code, one.where) for one in found) == sorted(expected), str(found)
    for one in found:
        after = lint(applied(one.fix, arguments))
        assert (one.code, one.where) not in {(other.code, other.where) for other in after}, f"{one.fix}\n{after}"


def test_rules_of_ones_own_before_a_presets_are_no_mistake():
    arguments = model("llama3-8b", "fsdp_tp", FSDP_TP, ("embed_tokens|lm_head", P("fsdp")), ("up_proj", P("tensor")))
    assert lint(arguments) == ()

import inspect
import itertools

import jax
import pytest
from jax.sharding import PartitionSpec as P

from shardfx import presets, resolve
from shardfx.errors import RuleError, SpecError
from shardfx.presets import Layout, eformer, infer_mode, t5x, tokens
from shardfx.presets.layouts import HiddenStateSharding
from tests.specs import canonical


MODES = (tokens.MODE_TRAIN, tokens.MODE_PREFILL, tokens.MODE_DECODE, tokens.MODE_INSERT)
PRESETS = {
    "eformer": eformer(),
    **{f"t5x({a}, {p})": t5x(a, p) for a, p in itertools.product((1, 2), (1, 2))},
}


def spec(*names, mode=None, **fields):
    return resolve(names, eformer(**fields), mode=mode).spec


@pytest.mark.parametrize("rules", PRESETS.values(), ids=PRESETS)
def test_names_of_presets_resolve_to_their_first_rule(
    rules,
):
    for mode in (None, *dict(rules.modes)):
        active = [*dict(rules.modes).get(mode, ()), *rules.rules]
        for name in rules.names:
            first = next(target for key, target in active if key == name)
            actual = resolve((name,), rules, mode=mode).spec
            assert actual == canonical(P(first))
    rebuilt = type(rules)(
        rules.rules,
        modes=rules.modes,
        units=rules.units,
        aliases=rules.aliases,
        mesh_axes=rules.mesh_axes,
    )
    assert rebuilt == rules
    assert hash(rebuilt) == hash(rules)


def test_t5x_additional_rules_can_override_by_going_first():
    # B76: appended, they come after `embed -> None` and say nothing.
    rules = t5x(additional_rules=[("embed", "model")])
    decision = resolve(("embed",), rules)
    actual = decision.spec
    assert actual == P()
    rules = t5x().prepend([("embed", "model")])
    decision = resolve(("embed",), rules)
    actual = decision.spec
    assert actual == P("model")


def test_t5x_takes_axis_rules_with_modes_as_additional_rules():
    modes = {"decode": {"x": None}}
    additional_rules = presets.t5x().without("batch").extend({"x": "data"}, modes=modes)
    rules = t5x(additional_rules=additional_rules)
    actual = resolve(("x",), rules, mode="decode").spec
    assert actual == P()
    assert resolve(("x",), rules).spec == P("data")


def test_eformer_has_the_27_fields():
    fields = list(inspect.signature(eformer).parameters)
    assert len(fields) == 27
    decode = [field for field in fields if field.startswith("decode_")]
    assert len(decode) == 7
    assert set(tokens.TOKENS) == set(fields) - set(decode)
    assert {field.removeprefix("decode_") for field in decode} < set(tokens.TOKENS)
    assert len(set(tokens.TOKENS.values())) == 20


@pytest.mark.parametrize("field", tokens.TOKENS)
def test_every_field_decides_its_token(field):
    token = tokens.TOKENS[field]
    assert spec(token, **{field: "other"}) == P("other")
    if not field.endswith("parallel_axis"):
        actual = spec(token, **{field: ("x", "y")})
        assert actual == P(("x", "y"))
        assert spec(token, **{field: None}) == P()


@pytest.mark.parametrize(
    "field",
    [f for f in inspect.signature(eformer).parameters if f.startswith("decode_")],
)
@pytest.mark.parametrize("mode", MODES)
def test_decode_fields_decide_tokens_in_generation_modes(field, mode):
    base = field.removeprefix("decode_")
    is_generation = mode in tokens.GENERATION_MODES
    token = tokens.TOKENS[base]
    actual = spec(token, mode=mode, **{base: "base", field: "gen"})
    assert actual == P("gen" if is_generation else "base")
    # B38: three states. `None` replicates, which eformer's own tokens could not say.
    actual = spec(token, mode=mode, **{base: "base", field: None})
    assert actual == (P() if is_generation else P("base"))


def test_one_mesh_axis_may_be_for_data_and_for_parameters():
    rules = eformer(data_parallel_axis="data", fully_sharded_data_parallel_axis="data")
    for names in ((tokens.BATCH, tokens.EMBED), (tokens.FSDP, tokens.TP)):
        assert resolve(names, rules).spec == P("data", "tp")


def test_overriding_is_explicit_and_part_of_the_value():
    # B35, B46: eformer's registry is outside the hash, and aliases the caller's lists.
    rules = eformer()
    with pytest.raises(RuleError, match="has rules; use `rules.without"):
        rules.with_alias(tokens.DP, tokens.TP)
    changed = rules.without(tokens.DP).with_alias(tokens.DP, tokens.TP)
    assert changed != rules
    assert hash(changed) != hash(rules)
    resolved = jax.jit(
        lambda x, arguments: x * len(resolve((tokens.DP,), arguments).spec[0] or ""),
        static_argnums=1,
    )
    binding = rules.prepend({tokens.DP: "d"})
    actual = int(resolved(1, binding))
    assert actual == 1
    binding = changed.prepend({tokens.TP: "tensor"})
    actual = int(resolved(1, binding))
    assert actual == 6


def test_layouts_are_all_there():
    layouts = {
        name: value
        for name, value in vars(presets.layouts).items()
        if isinstance(value, Layout)
    }
    assert len(layouts) == 17
    for name, layout in layouts.items():
        reasons = resolve(layout.axes, eformer(), unmatched="raise").reasons
        assert reasons == (), name
        dims = {"HiddenStateSharding", "AttnQSharding", "AttnKVSharding"}
        assert (layout.mode_dim == 1) == (name in dims)


@pytest.mark.parametrize(
    ("length", "fields", "spec"),
    [
        (8, {}, P(("fsdp", "dp"), "sp", "tp")),
        # B42: in eformer a query of length 1 asks for sp by default.
        (1, {}, P(("fsdp", "dp"), None, "tp")),
        (1, {"decode_query_sequence_axis": "x"}, P(("fsdp", "dp"), "x", "tp")),
        # dp is the batch's: eformer says P(("fsdp", "dp"), "dp", "tp"), which JAX
        # refuses.
        (1, {"decode_query_sequence_axis": "dp"}, P(("fsdp", "dp"), None, "tp")),
        (
            1,
            {"decode_query_sequence_axis": "dp", "decode_batch_axis": "fsdp"},
            P("fsdp", "dp", "tp"),
        ),
    ],
)
def test_the_mode_of_a_hidden_state_follows_from_its_shape(length, fields, spec):
    mode = infer_mode((2, length, 32), HiddenStateSharding.mode_dim)
    decision = resolve(HiddenStateSharding.axes, eformer(**fields), mode=mode)
    actual = decision.spec
    assert actual == spec


def test_a_blocked_generation_rule_has_no_training_fallback():
    names = (tokens.KV_LENGTH, tokens.HEAD)
    decision = resolve(
        names,
        eformer(decode_head_axis="sp"),
        mode=tokens.MODE_DECODE,
    )
    assert decision.spec == P("sp")
    actual = [(why.code.name, why.dim, why.axes) for why in decision.reasons]
    assert actual == [("blocked", 1, ("sp",))]


@pytest.mark.parametrize(
    "shape, dim, text",
    [
        ((2, 1, 32), 1, tokens.MODE_DECODE),
        ((2, 32, 1), -1, tokens.MODE_DECODE),
        ((2, 8, 32), 1, tokens.MODE_TRAIN),
        ((2, 1), None, tokens.MODE_TRAIN),
        (None, None, tokens.MODE_TRAIN),
        (None, 1, "the mode depends on the size of dim 1; pass the shape"),
        ((2, 1), 2, r"the shape has no dim -?\d; use one below 2"),
        ((2, 1), -3, r"the shape has no dim -?\d; use one below 2"),
    ],
)
def test_the_mode_of_a_shape(shape, dim, text):
    if text in MODES:
        assert infer_mode(shape, dim) == text
    else:
        with pytest.raises((RuleError, SpecError), match=text):
            infer_mode(shape, dim)

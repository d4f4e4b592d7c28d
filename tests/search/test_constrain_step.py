"""A step that is constrained as the search prices it computes the same, and sends what
was said.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import MODELS, f32

import shardfx
from benchmarks._zoo import small_models
from shardfx import AxisRules, MeshSpec, PathRules, plan
from shardfx.auto import constrain_step, name_axes
from shardfx.errors import MeshError, RuleError


MESH = MeshSpec({"data": 2, "model": 2})


def filled(tree):
    """Arrays with small numbers in them, the same each time."""
    rng = np.random.default_rng(0)

    def array_of(leaf):
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            numbers = rng.integers(0, 3, leaf.shape)
        else:
            numbers = rng.normal(size=leaf.shape) * 0.1
        return jnp.asarray(numbers, leaf.dtype)

    return jax.tree.map(array_of, tree)


def rules_for(step, args, **axes):
    """Rules for the names that the step has: each mesh axis with the names that it
    cuts, in order.
    """
    known_names = [axis.name for axis in name_axes(step, *args).axes]
    cuts: dict[str, tuple[str, ...]] = {}
    for axis, names in axes.items():
        for name in names:
            if name in known_names:
                cuts[name] = (*cuts.get(name, ()), axis)
    # What comes first in the rules is what an axis prefers.
    rules = []
    for name, cut in cuts.items():
        rules += [(name, target) for target in (cut, *cut)]
    rules += [(name, None) for name in known_names if name not in cuts]
    return AxisRules(rules, mesh_axes=tuple(axes))


def planned(step, args, mesh, rules):
    """A plan for each argument."""
    names_of_args = name_axes(step, *args).names
    plans = []
    for arg, names in zip(args, names_of_args, strict=True):
        plans.append(plan(arg, mesh, names=names, axes=rules))
    return tuple(plans)


def placed(step, args, mesh, rules):
    plans = planned(step, args, mesh, rules)
    return tuple(map(shardfx.shard, args, plans))


def arrays_of(tree):
    return jax.tree.leaves(eqx.filter(tree, eqx.is_array))


@pytest.mark.parametrize("name", ["equinox_attention", "experts", "scanned"])
def test_what_is_laid_out_computes_the_same(name):
    step, *structs = MODELS[name]()
    args = tuple(map(filled, structs))
    rules = rules_for(
        step,
        structs,
        data=("batch", "embed", "w1_0"),
        model=("heads", "kv_heads", "mlp", "experts", "w2_0"),
    )
    mesh = MESH.build(jax.devices()[:4])
    # A mesh without devices takes those of the arguments.
    jitted = shardfx.filter_jit(constrain_step(step, MESH, rules))
    outputs = arrays_of(jitted(*placed(step, args, mesh, rules)))
    expected_outputs = arrays_of(eqx.filter_jit(step)(*args))
    for output, expected in zip(outputs, expected_outputs, strict=True):
        np.testing.assert_allclose(output, expected, rtol=2e-3, atol=2e-5)


def loops(p, x):
    """A loop of each kind, a branch, and a rule of differentiation of its own."""

    def layer(_, y):
        return jnp.tanh(y @ p["a"])

    def is_small(y):
        return jnp.sum(y * y) < 3

    def increased(y):
        return y + p["b"]

    def with_row(y, row):
        return jax.nn.relu(y) + row, jnp.sum(y, -1)

    x = jax.lax.fori_loop(0, 3, layer, x)
    x = jax.lax.while_loop(is_small, increased, x)
    x = jax.lax.cond(jnp.sum(x) > 0, lambda y: y @ p["a"], lambda y: y * 2, x)
    x, sums = jax.lax.scan(with_row, x, p["rows"])
    return {
        "x": jax.jit(jnp.cos)(x),
        "sums": sums,
        "count": 3,
        "key": jax.random.key(0),
    }


def test_loops_branches_and_what_is_no_array():
    params = {"a": f32(8, 8), "b": f32(8), "rows": f32(3, 4, 8)}
    args = filled((params, f32(4, 8)))
    first_axis = name_axes(loops, *args).axes[0]
    rules = rules_for(loops, args, data=("batch",), model=(first_axis.name,))
    mesh = MESH.build(jax.devices()[:4])
    constrained = eqx.filter_jit(constrain_step(loops, mesh, rules))
    outputs = constrained(*args)
    expected = loops(*args)
    assert outputs["count"] == 3
    assert outputs["key"].dtype == expected["key"].dtype
    for name in ("x", "sums"):
        np.testing.assert_allclose(outputs[name], expected[name], rtol=1e-4, atol=1e-5)


def test_less_is_sent_and_remat_stays():
    """FSDP without a constraint: the embedding's cut goes into the activations, unless
    they are laid out.
    """
    step, *structs = MODELS["scanned"]()
    rules = rules_for(step, structs, fsdp=("batch", "embed"))
    devices = jax.devices()[:4]
    mesh = MeshSpec({"fsdp": 4}).build(devices)
    plans = planned(step, structs, mesh, rules)
    constrained = constrain_step(step, mesh, rules)

    def sent_bytes(step):
        jitted = shardfx.filter_jit(step, in_shardings=plans, out_shardings=plans[0])
        program = jitted.lower(*structs).compile()
        return shardfx.cost.traffic(program, mesh).wire_bytes

    assert sent_bytes(constrained) < 0.5 * sent_bytes(step)
    text = str(jax.make_jaxpr(constrained)(*structs))
    plain_text = str(jax.make_jaxpr(step)(*structs))
    expected_count = plain_text.count("prevent_cse")
    assert text.count("prevent_cse") == expected_count > 0


def test_a_lookup_that_is_summed_and_cut_along_one_axis():
    """Compiled at once, XLA's partitioner fails: "Slice dim size 128 greater than
    dynamic slice dimension: 64".
    """

    def step(p, tokens):
        return jnp.tanh(p["embedding"][tokens])

    tokens = jax.ShapeDtypeStruct((16, 64), "int32")
    args = ({"embedding": f32(1024, 128)}, tokens)
    names_of_params, _ = name_axes(step, *args).names
    vocab, embed = names_of_params["embedding"]
    rules = rules_for(step, args, c=(vocab, "sequence"), b=(embed,), a=("sequence",))
    mesh = MeshSpec({"c": 2, "b": 2, "a": 2}).build(jax.devices()[:8])
    constrained = jax.jit(constrain_step(step, mesh, rules))
    values = tuple(map(filled, args))
    result = constrained(*placed(step, values, mesh, rules))
    np.testing.assert_allclose(result, step(*values), rtol=2e-3, atol=1e-4)


def test_manual_axes_cannot_be_constrained():
    axis_types = {"b": jax.sharding.AxisType.Manual}
    mesh = MeshSpec({"a": 2, "b": 2}, axis_types=axis_types)
    with pytest.raises(
        MeshError,
        match=(
            "`constrain_step` constrains arrays along Auto and Explicit axes, and 'b'"
            " are Manual; call it outside of"
        ),
    ):
        constrain_step(lambda x: x, mesh, AxisRules([("batch", "a")]))


def mlp_step(params, x):
    hidden = jax.nn.relu(x @ params["up"])
    return jnp.mean((hidden @ params["down"]) ** 2)


MLP_ARGS = ({"up": f32(8, 64), "down": f32(64, 8)}, f32(16, 8))


def test_rules_by_path_are_refused():
    rules: Any = PathRules([("up", jax.P(None, "model"))])
    with pytest.raises(RuleError, match="must be of type AxisRules, not PathRules"):
        constrain_step(mlp_step, MESH, rules)


def test_a_mesh_axis_that_the_mesh_lacks_is_refused():
    rules = AxisRules([("batch", "dta"), ("mlp", "model")])
    with pytest.raises(RuleError, match="'dta' .did you mean 'data'.*, which the mesh"):
        constrain_step(mlp_step, MESH, rules)
    declared = AxisRules([("batch", "data"), ("mlp", "pod")], mesh_axes=("pod",))
    constrain_step(mlp_step, MESH, declared)


@pytest.mark.parametrize(
    "wrong, listed",
    [
        # Nothing would be sharded over `model`.
        ([("batch", "data"), ("hidden", "model")], r"rules\[1\] 'hidden' -> model\s"),
        # `data` shards the batch, but a name is misspelt.
        (
            [("batch", "data"), ("mlp", "model"), ("up0", "data")],
            r"rules\[2\] 'up0' -> data .did you mean 'up_0'",
        ),
    ],
)
def test_names_that_the_step_lacks_are_refused(wrong, listed):
    mesh = MESH.build(jax.devices()[:4])
    constrained = constrain_step(mlp_step, mesh, AxisRules(wrong))
    with pytest.raises(RuleError, match=listed) as caught:
        jax.eval_shape(constrained, *MLP_ARGS)
    assert "are called mlp, mlp_2, up_0, batch, as" in str(caught.value)


def test_rules_for_further_models_are_taken():
    mesh = MESH.build(jax.devices()[:4])
    rules = [("batch", "data"), ("mlp", "model"), ("kv_heads", "model")]
    constrained = constrain_step(mlp_step, mesh, AxisRules(rules))
    jax.eval_shape(constrained, *MLP_ARGS)


def test_a_usual_name_is_no_misspelling_of_another():
    """`heads` is what `kv_heads` and `head_dim` are in a model without groups."""
    step, *args = small_models()["dense 8B, 8 of 32 heads for keys"]()
    names = [axis.name for axis in name_axes(step, *args).axes]
    assert "heads" not in names
    assert "head_dim" in names
    rules = [("batch", "data"), ("heads", "model"), ("kv_heads", "model")]
    mesh = MESH.build(jax.devices()[:4])
    jax.eval_shape(constrain_step(step, mesh, AxisRules(rules)), *args)

"""A step that is constrained as the search prices it computes the same, and sends what
was said.
"""

import functools as ft
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

    def one(leaf):
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return jnp.asarray(rng.integers(0, 3, leaf.shape), leaf.dtype)
        array = rng.normal(size=leaf.shape)
        return jnp.asarray(array * 0.1, leaf.dtype)

    return jax.tree.map(one, tree)


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


def placed(step, args, mesh, rules):
    names = name_axes(step, *args).names
    plans = tuple(
        plan(arg, mesh, names=tree, axes=rules)
        for arg, tree in zip(args, names, strict=True)
    )
    return tuple(
        shardfx.shard(arg, sharding_plan)
        for arg, sharding_plan in zip(args, plans, strict=True)
    )


@pytest.mark.parametrize("name", ["equinox_attention", "experts", "scanned"])
def test_what_is_laid_out_computes_the_same(name):
    step, *structs = MODELS[name]()
    args = tuple(map(filled, structs))
    names = ("batch", "embed", "w1_0"), ("heads", "kv_heads", "mlp", "experts", "w2_0")
    rules = rules_for(step, structs, data=names[0], model=names[1])
    mesh = MESH.build(jax.devices()[:4])
    # A mesh without devices takes those of the arguments.
    outputs = shardfx.filter_jit(constrain_step(step, MESH, rules))(
        *placed(step, args, mesh, rules)
    )
    expected = eqx.filter_jit(step)(*args)
    outputs, expected = (eqx.filter(tree, eqx.is_array) for tree in (outputs, expected))
    jax.tree.map(
        ft.partial(np.testing.assert_allclose, rtol=2e-3, atol=2e-5), outputs, expected
    )


def loops(p, x):
    """A loop of each kind, a branch, and a rule of differentiation of its own."""
    x = jax.lax.fori_loop(0, 3, lambda _, y: jnp.tanh(y @ p["a"]), x)
    x = jax.lax.while_loop(lambda y: jnp.sum(y * y) < 3, lambda y: y + p["b"], x)
    x = jax.lax.cond(jnp.sum(x) > 0, lambda y: y @ p["a"], lambda y: y * 2, x)
    x, sums = jax.lax.scan(
        lambda y, row: (jax.nn.relu(y) + row, jnp.sum(y, -1)), x, p["rows"]
    )
    return {
        "x": jax.jit(jnp.cos)(x),
        "sums": sums,
        "count": 3,
        "key": jax.random.key(0),
    }


def test_loops_branches_and_what_is_no_array():
    struct = ft.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    args = filled(
        (
            {"a": struct((8, 8)), "b": struct((8,)), "rows": struct((3, 4, 8))},
            struct((4, 8)),
        )
    )
    axes = name_axes(loops, *args).axes[:1]
    axis_names = tuple(axis.name for axis in axes)
    rules = rules_for(
        loops,
        args,
        data=("batch",),
        model=axis_names,
    )
    mesh = MESH.build(jax.devices()[:4])
    laid = eqx.filter_jit(constrain_step(loops, mesh, rules))(*args)
    expected = loops(*args)
    assert laid["count"] == 3
    assert laid["key"].dtype == expected["key"].dtype
    for name in ("x", "sums"):
        np.testing.assert_allclose(laid[name], expected[name], rtol=1e-4, atol=1e-5)


def test_less_is_sent_and_remat_stays():
    """FSDP without a constraint: the embedding's cut goes into the activations, unless
    they are laid out.
    """
    step, *structs = MODELS["scanned"]()
    rules = rules_for(step, structs, fsdp=("batch", "embed"))
    devices = jax.devices()[:4]
    mesh = MeshSpec({"fsdp": 4}).build(devices)
    names = name_axes(step, *structs).names
    plans = tuple(
        plan(arg, mesh, names=tree, axes=rules)
        for arg, tree in zip(structs, names, strict=True)
    )
    sent = {}
    for how, fn in (("free", step), ("laid", constrain_step(step, mesh, rules))):
        lowered = shardfx.filter_jit(
            fn, in_shardings=plans, out_shardings=plans[0]
        ).lower(*structs)
        program = lowered.compile()
        sent[how] = shardfx.cost.traffic(program, mesh).wire_bytes
    assert sent["laid"] < 0.5 * sent["free"]
    jaxpr = jax.make_jaxpr(constrain_step(step, mesh, rules))(*structs)
    text = str(jaxpr)
    jaxpr = jax.make_jaxpr(step)(*structs)
    expected = str(jaxpr).count("prevent_cse")
    assert text.count("prevent_cse") == expected > 0


def test_a_lookup_that_is_summed_and_cut_along_one_axis():
    """Compiled at once, XLA's partitioner fails: "Slice dim size 128 greater than
    dynamic slice dimension: 64".
    """

    def step(p, tokens):
        return jnp.tanh(p["embedding"][tokens])

    args = {"embedding": f32(1024, 128)}, jax.ShapeDtypeStruct((16, 64), "int32")
    vocab, embed = name_axes(step, *args).names[0]["embedding"]
    rules = rules_for(step, args, c=(vocab, "sequence"), b=(embed,), a=("sequence",))
    axes = {"c": 2, "b": 2, "a": 2}
    mesh = MeshSpec(axes).build(jax.devices()[:8])
    laid = jax.jit(constrain_step(step, mesh, rules))
    values = tuple(map(filled, args))
    np.testing.assert_allclose(
        laid(*placed(step, values, mesh, rules)), step(*values), rtol=2e-3, atol=1e-4
    )


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
    return jnp.mean((jax.nn.relu(x @ params["up"]) @ params["down"]) ** 2)


MLP_ARGS = {"up": f32(8, 64), "down": f32(64, 8)}, f32(16, 8)


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

"""A plan without rules: what bytes decide, what stays whole, and the rules as code."""

import math
from typing import Any

import catalogue
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from auto_plans import by_code, state_per_device, struct

import shardfx as sfx
from shardfx import MeshSpec, chips
from shardfx.auto import _shape_rules
from shardfx.errors import (
    LeafTypeError,
    MeshError,
    OutOfMemoryError,
    RuleError,
    SpecError,
)
from shardfx.presets import models


GIB = 2**30


def test_a_small_model_is_data_parallel_on_the_devices_given():
    model = eqx.nn.MLP(16, 16, 32, depth=1, key=jax.random.key(0))
    auto_plan = sfx.auto.plan(model, jax.devices(), optimizer=optax.adamw(1e-3))
    assert dict(auto_plan.mesh.shape) == {"data": 8}
    assert auto_plan.jax_mesh is not None
    assert auto_plan.jax_mesh.devices.size == 8
    for leaf in auto_plan.leaves:
        assert leaf.spec == jax.P()
    assert "data parallel" in auto_plan.why
    assert "assumed" not in auto_plan.why
    assert by_code(auto_plan, model) == auto_plan.off()
    # It is a plan like any other.
    placed = sfx.shard(model, auto_plan)
    run = sfx.filter_jit(jax.vmap(model), in_shardings=(auto_plan.batch,))
    shape = run(jnp.ones((16, 16))).shape
    assert shape == (16, 16)
    assert not sfx.misplaced(placed, auto_plan)


def test_json_keeps_the_plan_and_code_keeps_its_rules():
    tree = {"w": struct(2**15, 2**15)}
    auto_plan = sfx.auto.plan(tree, 16, chip="v5e")
    read = sfx.ShardPlan.from_json(auto_plan.to_json(), like=tree)
    assert read == auto_plan.off()
    assert by_code(auto_plan, tree) == read
    for plain in (read, auto_plan.off()):
        assert not isinstance(plain, sfx.auto.AutoPlan)


@pytest.mark.parametrize("name", ["llama3-8b", "mixtral-8x7b", "gpt2"])
def test_fsdp_takes_the_least_devices_that_fit(name: str):
    tree = models.tree(name)
    auto_plan = sfx.auto.plan(tree, "tpu:v5p:2x4x8")
    half = chips.find("v5p").usable_hbm_bytes // 2
    assert auto_plan.mesh.size == 64
    assert state_per_device(auto_plan) <= half
    over = auto_plan.mesh.shape.get("fsdp", 1)
    if over > 1:
        mesh = MeshSpec({"fsdp": over // 2})
        fewer = sfx.plan(tree, mesh, paths=auto_plan.rules)
        assert state_per_device(fewer) > half
    assert by_code(auto_plan, tree) == auto_plan.off()


@pytest.mark.parametrize(
    "model",
    [model for model in catalogue.MODELS.values() if model.fused][:4],
    ids=lambda model: model.name,
)
def test_heads_of_published_models_stay_whole(model: catalogue.Model):
    auto_plan = sfx.auto.plan(model.make(), 1024, chip="v5e", optimizer=optax.sgd(0.1))
    cut = 0
    for path, shape, dim, unit in catalogue.fused_of(model):
        count = len(auto_plan[path].shape)
        entries = (*auto_plan[path].spec, *[None] * count)
        if entries[dim] is not None:
            assert shape[dim] % (auto_plan.mesh.axis_size("fsdp") * unit) == 0, path
        cut += entries != (None,) * len(entries)
    assert cut or "data parallel" in auto_plan.why


def test_slices_are_crossed_last():
    tree = {"w": struct(8192, 8192, 16)}
    inner = sfx.auto.plan(tree, "tpu:v5e:2x2*4")
    assert str(inner.mesh) == "data=4(dcn=4),fsdp=4"
    outer = sfx.auto.plan({"w": struct(8192, 8192, 48)}, "tpu:v5e:2x2*4")
    assert str(outer.mesh) == "data=2(dcn=2),fsdp=8(dcn=2)"
    actual = by_code(outer, {"w": struct(8192, 8192, 48)})
    assert actual == outer.off()


class Attention(eqx.Module):
    query: Any = sfx.field(names=("embed", "heads", None))
    up: Any = sfx.field(names=(..., "mlp"))


class Stack(eqx.Module):
    layers: Attention = sfx.field(stacked=("repeats",))


@pytest.mark.parametrize(
    ("devices", "fsdp"), [(24, 4), (12, 4), (40, 4), (16, 4), (6, 3)]
)
def test_groups_of_fsdp_lie_behind_one_switch(devices: int, fsdp: int):
    # Groups of three would cross the switch of eight, and in six there are such groups.
    tree = {"w": struct(24 * 1024, 2**18 + 2**13)}
    auto_plan = sfx.auto.plan(tree, f"gpu:h100:{devices}", optimizer=optax.adamw(1e-3))
    assert auto_plan.mesh.shape["fsdp"] == fsdp


@pytest.mark.parametrize(
    ("tree", "where"),
    [
        # Declared by the module: heads, and stacked layers under a name of its own.
        (
            Stack(
                Attention(struct(64, 8192, 64, 128), struct(64, 8192, 2**14)),
            ),
            {"layers/query": (None, "fsdp"), "layers/up": (None, None, "fsdp")},
        ),
        # Usual names: separate heads, and the output with the opposite order.
        (
            {
                "attn": {
                    "q_proj": {"kernel": struct(8192, 8192, 128)},
                    "k_proj": {"kernel": struct(8192, 8192, 128)},
                    "o_proj": {"kernel": struct(8192, 128, 8192)},
                }
            },
            {
                "attn/q_proj/kernel": ("fsdp",),
                "attn/k_proj/kernel": ("fsdp",),
                "attn/o_proj/kernel": (None, None, "fsdp"),
            },
        ),
        # A fused projection, layers stacked without a declaration, and experts.
        (
            {
                "layers": {
                    "qkv": {"weight": struct(64, 8192 * 3, 8192)},
                    "experts": {"up": struct(64, 256, 1024, 4096)},
                    "norm": struct(64, 8192),
                }
            },
            {
                "layers/qkv/weight": (None, None, "fsdp"),
                "layers/experts/up": (None, None, None, "fsdp"),
                "layers/norm": (None, "fsdp"),
            },
        ),
        # Numbered layers are no stack.
        (
            {
                "layers": [
                    {"w": struct(2**15, 2**14, 2)},
                    {"w": struct(2**15, 2**14, 2)},
                ]
            },
            {"layers/0/w": ("fsdp",), "layers/1/w": ("fsdp",)},
        ),
    ],
    ids=["declared", "separate", "fused", "numbered"],
)
def test_the_largest_free_dimension_is_cut(tree: Any, where: dict):
    auto_plan = sfx.auto.plan(tree, 2**12, chip="v5e")
    for path, entries in where.items():
        assert auto_plan[path].spec == jax.P(*entries), path
    assert by_code(auto_plan, tree) == auto_plan.off()


@pytest.mark.parametrize(
    ("heads", "spec"),
    [
        # 4,096 elements over 4 devices are whole heads of 32 to 256 elements.
        (4096, ("fsdp",)),
        # 960 over 4 would cut heads of 64 or 128.
        (960, (None, "fsdp")),
    ],
)
def test_an_output_projection_is_cut_between_heads_where_sure(heads: int, spec: tuple):
    """Its other dimension would shard the activations of all layers."""
    attention = {
        "q_proj": {"kernel": struct(4096, heads)},
        "k_proj": {"kernel": struct(4096, heads // 2)},
        "o_proj": {"kernel": struct(heads, 4096)},
    }
    tree = {"attn": attention, "up": struct(2**15, 2**15)}
    auto_plan = sfx.auto.plan(tree, 4, chip="v5e")
    assert dict(auto_plan.mesh.shape) == {"fsdp": 4}
    assert auto_plan["attn/o_proj/kernel"].spec == jax.P(*spec)
    assert auto_plan["attn/q_proj/kernel"].spec == jax.P("fsdp")
    assert by_code(auto_plan, tree) == auto_plan.off()


def test_names_given_say_what_is_whole():
    tree = {"a": struct(2**15, 2**15), "b": struct(2**15, 2**15)}
    names = {"a": ("experts", "embed"), "b": ("embed", sfx.atomic("wide", 128))}
    auto_plan = sfx.auto.plan(tree, 16, chip="v5e", names=names)
    assert auto_plan["a"].spec == jax.P(None, "fsdp")
    assert auto_plan["b"].spec == jax.P("fsdp")
    assert by_code(auto_plan, tree) == auto_plan.off()


def test_names_that_do_not_fit_are_refused():
    names = {"a": ("embed",)}
    with pytest.raises(SpecError, match="leaf `a`: 1 logical name .* of rank 2"):
        sfx.auto.plan({"a": struct(64, 64)}, 8, chip="v5e", names=names)


def test_arrays_that_are_tied_are_planned_alike():
    table = np.zeros((2, 2**20), "float32")
    tree = {"embed": table, "experts": {"head": table}, "big": struct(2**16, 2**16)}
    array = np.zeros((2, 2**20), "float32")
    other = {**tree, "experts": {"head": array}}
    auto_plan = sfx.auto.plan(tree, 16, chip="v5e")
    assert (
        auto_plan["embed"].spec == auto_plan["experts/head"].spec == jax.P(None, "fsdp")
    )
    leaves = sfx.auto.plan(other, 16, chip="v5e").leaves
    count = len(leaves)
    assert count == 3


def test_paths_that_differ_in_numbers_alone_can_differ_in_rules():
    tree = {
        "h": [
            {"experts": struct(2**12, 8, 2**15)},
            {"experts": struct(2**13, 2**13)},
            {"experts.w+": struct(2**13, 2**13)},
        ]
    }
    auto_plan = sfx.auto.plan(tree, 8, chip="v5e")
    assert auto_plan["h/0/experts"].spec == jax.P(None, None, "fsdp")
    assert auto_plan["h/1/experts"].spec == jax.P("fsdp")
    assert by_code(auto_plan, tree) == auto_plan.off()


def test_a_rule_for_numbers_leaves_out_those_of_other_steps():
    first = (_shape_rules.Step(("a",)),)
    second = (_shape_rules.Step(("b",)),)
    usual = (_shape_rules.Step(("c",)),)
    steps_by_path = {
        "dec/a-0/x/w": first,
        "dec/a-1/x/w": first,
        "enc/a-0/x/w": usual,
        "enc/a-1/x/w": second,
    }
    rules = _shape_rules.shape_rules(
        [*steps_by_path], [*steps_by_path.values()], usual, 0
    )
    mesh = MeshSpec({"a": 2, "b": 2, "c": 2})
    tree = {path: struct(64, 64) for path in steps_by_path}
    plan = sfx.plan(tree, mesh, paths=rules)
    for path, (step,) in steps_by_path.items():
        assert plan[path].spec == jax.P(*step.axes), path


def test_small_arrays_and_keys_are_replicated():
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 2**12))
    tree = {
        "big": struct(2**16, 2**15),
        "bias": struct(2**10),
        "keys": keys,
        "step": struct(dtype="int32"),
        "empty": struct(0, 8),
        "f": jnp.tanh,
    }
    auto_plan = sfx.auto.plan(tree, 16, chip="v5e")
    assert auto_plan["big"].spec == jax.P("fsdp")
    for path in ("bias", "step", "empty", "keys"):
        assert auto_plan[path].spec == jax.P()


@pytest.mark.parametrize(
    "shapes",
    [
        {"empty": (0,)},
        {"q": (), "k": (), "v": (), "o": ()},
        {"q": (64, 8, 16), "k": (), "v": (64, 8, 16), "o": (8, 16, 64)},
        {"q": (64, 8, 16), "k": (16,), "v": (64, 8, 16), "o": (8, 16, 64)},
    ],
)
def test_scalars_and_empty_arrays_are_replicated(shapes: dict[str, tuple[int, ...]]):
    arrays = {name: struct(*shape) for name, shape in shapes.items()}
    tree = {"w": struct(2**14, 2**15), "attention": arrays}
    for batch in (None, struct(64, 128, dtype=jnp.int32)):
        planned = sfx.auto.plan(tree, "tpu:v5e:2x4", batch=batch)
        for name, shape in shapes.items():
            if len(shape) < 2:
                assert planned[f"attention/{name}"].spec == jax.P()


def test_integers_have_no_gradients():
    floats = sfx.auto.plan({"w": struct(2**16, 2**15)}, "tpu:v5p:2x2x1")
    ints = sfx.auto.plan({"w": struct(2**16, 2**15, dtype="int32")}, "tpu:v5p:2x2x1")
    assert "32.0 GiB of state" in floats.why
    assert "8.0 GiB of state" in ints.why


def test_the_optimizer_counts():
    tree = {"w": struct(2**14, 2**15)}
    few = sfx.auto.plan(tree, "gpu:h100:8", optimizer=optax.sgd(0.1))
    many = sfx.auto.plan(tree, "gpu:h100:8", optimizer=optax.adamw(0.1).init)
    assert "4.0 GiB of state" in few.why
    assert "8.0 GiB of state" in many.why


def test_the_reason_says_what_explicit_axes_need():
    params = {"up": jnp.ones((256, 512)), "down": jnp.ones((512, 256))}
    axes = ("data", "fsdp")
    mesh = jax.make_mesh((2, 4), axes)
    auto_plan = sfx.auto.plan(params, mesh)
    call = "`shardfx.auto.auto_axes(step, plan, out=...)`"
    assert auto_plan.why.endswith(
        f"call a step that knows nothing of shardings as {call}."
    )
    sharding_plan = sfx.auto.plan(params, MeshSpec({"fsdp": 8}))
    others = sharding_plan.why
    assert "Explicit" not in others

    def step(params, x):
        hidden = x @ params["up"]
        return params, jnp.mean(hidden @ params["down"])

    rules = sfx.PathRules([(".*", sfx.fsdp(("data", "fsdp"), min_bytes=0))])
    assert auto_plan.jax_mesh is not None
    cut = sfx.plan(params, auto_plan.jax_mesh, paths=rules)
    replicated = jax.NamedSharding(auto_plan.jax_mesh, jax.P())
    x = jax.device_put(jnp.ones((8, 256)), replicated)
    placed = sfx.shard(params, cut)
    with pytest.raises(Exception, match="ambiguous"):
        jax.eval_shape(step, placed, x)
    out = (cut.specs, jax.P())
    typed = sfx.auto.auto_axes(step, cut, out=out)
    result, value = jax.jit(typed)(placed, x)
    assert not sfx.misplaced(result, cut)
    assert value == 256 * 512


def test_devices_are_counted_by_numbers_of_numpy_too():
    tree = {"w": struct(2**15, 2**15)}
    count = np.int64(16)
    assert sfx.auto.plan(tree, count) == sfx.auto.plan(tree, 16)  # pyright: ignore[reportArgumentType]
    step = lambda w, x: jnp.mean(x @ w["w"])
    x = struct(64, 2**15)
    options = {"chip": "v5e", "effort": "least", "keep": 1}
    (by_numpy,) = sfx.auto.search(step, tree, x, devices=count, **options)  # pyright: ignore[reportArgumentType]
    (usual,) = sfx.auto.search(step, tree, x, devices=16, **options)
    assert by_numpy.mesh == usual.mesh


def test_a_mesh_that_is_given_is_used():
    tree = {"w": struct(2**14, 2**14)}
    mesh = MeshSpec({"data": 2, "fsdp": 4})
    both = sfx.auto.plan(tree, mesh)
    assert both["w"].spec == jax.P("fsdp")
    assert "The mesh was given" in both.why
    big = {"w": struct(2**15, 2**15)}
    mesh = MeshSpec({"data": 8, "tensor": 1})
    over_data = sfx.auto.plan(big, mesh)
    assert over_data["w"].spec == jax.P("data")
    explicit = jax.make_mesh((8,), ("data",))
    auto_plan = sfx.auto.plan({"w": struct(64, 64)}, explicit)
    assert auto_plan.jax_mesh == explicit
    actual = by_code(auto_plan, {"w": struct(64, 64)})
    assert actual == auto_plan.off()
    abstract = sfx.auto.plan(tree, MeshSpec({"fsdp": 8}).abstract())
    assert abstract["w"].spec == jax.P("fsdp")


def test_a_tight_state_is_told():
    # 12 of 15.75 GiB on the only device.
    auto_plan = sfx.auto.plan({"w": struct(3 * 2**14, 2**14)}, "tpu:v5e:1x1")
    assert "Only 3.8 GiB are left for activations" in auto_plan.why
    # Little is enough for a step with few rows: qwen3-32b trains so.
    auto_plan = sfx.auto.plan(models.tree("qwen3-32b"), 16, chip="v5e")
    assert dict(auto_plan.mesh.shape) == {"fsdp": 16}
    assert "Only 501.0 MiB are left for activations" in auto_plan.why


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (({"w": struct(8)}, []), MeshError, "`devices=jax.devices()`"),
        (({"w": struct(8)}, 0), MeshError, 'write `devices=8, chip="v5e"`'),
        (
            ({"w": struct(8)}, "tpu:v9:4x4"),
            ValueError,
            "there is no chip 'tpu:v9'; did you mean",
        ),
        (({"w": struct(8)}, "everything"), MeshError, "is no slice; write it as"),
        (
            ({"f": jnp.tanh, "n": 3}, 8),
            LeafTypeError,
            "the tree, dict, holds no arrays",
        ),
        (
            ({"w": struct(8)}, MeshSpec({"data": 2, "tensor": 4})),
            MeshError,
            'axis `tensor` is for. It shards over `data` and `fsdp`: pass `MeshSpec({"data": 1, "fsdp": 8})`',
        ),
        (
            (models.tree("llama3-70b"), 8),
            OutOfMemoryError,
            'it fits on 64 chips: pass `devices=64, chip="v5e"`',
        ),
        (
            ({"w": struct(10**5 + 3, 99991)}, 8),
            OutOfMemoryError,
            "`w`, shape (100003, 99991), has no dimension that they divide",
        ),
    ],
)
def test_errors_say_what_to_pass(arguments: tuple, error: type, text: str):
    with pytest.raises(error) as caught:
        sfx.auto.plan(*arguments)
    assert text in str(caught.value)


def test_the_error_counts_the_least_chips():
    tree = models.tree("llama3-70b")
    with pytest.raises(OutOfMemoryError):
        sfx.auto.plan(tree, 32, chip="v5e")
    mesh = sfx.auto.plan(tree, 64, chip="v5e").mesh
    shape = dict(mesh.shape)
    assert shape == {"fsdp": 64}


def test_an_optimizer_that_is_none_is_told():
    with pytest.raises(RuleError, match=r"has no `init`; pass an optimizer of optax"):
        sfx.auto.plan({"w": struct(8)}, 8, optimizer=3)  # pyright: ignore[reportArgumentType]


def test_bytes_are_those_of_the_plan():
    """The text's numbers, recomputed."""
    tree = {"w": struct(2**14, 2**14)}
    auto_plan = sfx.auto.plan(tree, "tpu:v5e:2x2")
    total = 4 * math.prod((2**14, 2**14)) * 4
    assert (
        f"{total / GIB:.1f} GiB of state on 4 devices of 15.8 GiB (v5e)"
        in auto_plan.why
    )

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import MODELS, Struct, f32

from shardfx import (
    AxisRules,
    Limits,
    MeshError,
    MeshSpec,
    RuleError,
    SpecError,
    chips,
    filter_jit,
    plan,
    search,
    shard,
)
from shardfx._search.classes import Classes
from shardfx._search.layouts import Layouts, Role
from shardfx._search.search import Searched
from shardfx._search.trace import trace


@pytest.fixture(autouse=True)
def _standard_promotion():
    """Models of other libraries mix integers and floats."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def mlp_step(width, hidden, rows, dtype="bfloat16"):
    def loss(p, x):
        return jnp.mean((x + jax.nn.relu(x @ p["up"]) @ p["down"]) ** 2)

    def step(p, x):
        return jax.tree.map(lambda w, g: w - 0.1 * g, p, jax.grad(loss)(p, x))

    params = {"up": Struct((width, hidden), dtype), "down": Struct((hidden, width), dtype)}
    return step, params, Struct((rows, width), dtype)


def sent_under(names, *model):
    """What an axis of this role sends: pairs of a collective and a shape, in order."""
    classes = Classes(trace(*model))
    layouts = Layouts(classes, 8)
    known = {group.name: number for number, group in enumerate(classes.groups) if group.roots}
    made = layouts.under(Role(tuple(known[name] for name in names)))
    return [(event.kind, layouts.program.values[event.value].shape) for event in made.events]


def test_what_a_layer_sends_is_what_textbooks_say():
    model = mlp_step(64, 256, 512)
    scalar = ("all-reduce", ())
    assert [one for one in sent_under(("batch",), *model) if one != scalar] == [
        ("all-reduce", (256, 64)), ("all-reduce", (64, 256)),
    ] or sorted(one for one in sent_under(("batch",), *model) if one != scalar) == [
        ("all-reduce", (64, 256)), ("all-reduce", (256, 64)),
    ]  # fmt: skip
    stored = [one for one in sent_under(("batch", "embed"), *model) if one != scalar]
    assert sorted({kind for kind, _ in stored}) == ["all-gather", "reduce-scatter"]
    assert all(sorted(shape) == [64, 256] for _, shape in stored)
    # Megatron's: one sum of activations forward. There is none backward, as nothing is learnt before the layer.
    assert sent_under(("mlp",), *model) == [("all-reduce", (512, 64))]


def test_data_parallelism_for_many_rows_and_tensor_parallelism_for_few():
    many = search(*mlp_step(1024, 8192, 2**20), devices="tpu:v5e:2x4")[0]
    assert dict(many.roles)["data"] == ("batch",) and many.mesh.shape["data"] == 8
    few = search(*mlp_step(8192, 32768, 16), devices="tpu:v5e:2x4")[0]
    assert all("mlp" in names for _, names in few.roles), few.title


def test_states_that_do_not_fit_are_cut():
    """Two matrices of 8 GiB, their gradients, and a batch that data parallelism would like: memory decides."""
    model = mlp_step(32768, 65536, 65536, "float32")
    best = search(*model, devices="tpu:v5e:4x4")[0]
    assert best.fits and best.memory_bytes < best.limit_bytes
    whole = Limits(never=("embed", "mlp"))
    alone = search(*model, devices="tpu:v5e:4x4", limits=whole)
    assert len(alone) == 1 and not alone[0].fits
    assert "nothing fits: this takes least" in alone[0].reasons[0]
    assert "devices would not do either; use a smaller batch" in str(alone[0])


def test_candidates_differ_and_are_in_order():
    found = search(*MODELS["scanned"](), devices=16, chip="v5p", keep=6)
    assert len(found) == 6
    assert [one.seconds for one in found] == sorted(one.seconds for one in found)
    assert len({one.title for one in found}) == 6
    first = found[0]
    assert first.seconds == pytest.approx(
        first.compute_seconds + first.exposed_seconds + max(0, first.hidden_seconds - 0.5 * first.compute_seconds),
        rel=1e-4,
    )
    sent = dict.fromkeys(first.mesh.axis_names, 0.0)
    for row in first.traffic:
        sent[row.axis] += row.wire_bytes
    assert all((sent[axis] > 0) == (seconds > 0) for axis, seconds in first.axis_seconds)
    assert found[1].title in str(first) and first.title in str(first)


def test_the_estimate_of_memory_for_arguments_is_the_plans():
    step, *args = MODELS["scanned"]()
    made = Searched(step, args, 16, Limits())
    for one in search(step, *args, devices=16, chip="v5p"):
        planned = sum(made.bytes_per_device for made in one.plans)
        assert one.memory_bytes >= planned
    terms = made.terms
    whole = float(terms.arguments.sum())
    assert whole == sum(np.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(args))


def test_grouped_heads_are_cut_behind_those_they_share():
    """2 key heads and 8 query heads: cut 8 ways, queries lie on both parts, keys on the first alone."""
    step, *args = MODELS["scanned"]()
    limits = Limits(always=("query_groups", "kv_heads"), never=("batch", "sequence", "embed", "vocab"))
    found = search(step, *args, devices=8, chip="v5p", limits=limits, keep=50)
    for one in found:
        query, key = one.plans[0]["layers/q"], one.plans[0]["layers/k"]
        cut = one.mesh.axis_size(tuple(a for e in query.spec if e for a in ((e,) if isinstance(e, str) else e)))
        keys = one.mesh.axis_size(tuple(a for e in key.spec if e for a in ((e,) if isinstance(e, str) else e)))
        assert keys == 2 and cut in (4, 8)
    assert found


def test_the_code_makes_the_same_plans():
    step, *args = MODELS["flax_transformer"]()
    best = search(step, *args, devices=8, chip="v5e")[0]
    made: dict = {}
    exec(best.code(), made)
    assert made["MESH"] == best.mesh and made["RULES"].rules == best.rules.rules
    named = Searched(step, args, 8, Limits()).names
    for arg, names, wanted in zip(args, named, best.plans, strict=True):
        assert plan(arg, made["MESH"], names=names, axes=made["RULES"]) == wanted
    assert made["plans_of"](step, *args) == best.plans and "laid_out" not in made


def test_code_with_slices_and_several_axes_runs():
    found = search(*MODELS["scanned"](), devices=32, chip="v5p", slices=2, keep=8)
    for one in found:
        made: dict = {}
        exec(one.code(), made)
        assert made["MESH"] == one.mesh and one.mesh.dcn_sizes.count(2) == 1
        assert one.mesh.dcn_sizes[0] == 2, "what spans the slices stands outermost"


@pytest.mark.parametrize("name", ["mlp", "experts", "equinox_mlp"])
def test_a_step_under_the_chosen_plans_computes_the_same(name):
    step, *args = MODELS[name]()
    rng = np.random.default_rng(0)
    values = [
        jax.tree.map(lambda s: jnp.asarray(rng.normal(size=s.shape), s.dtype) if isinstance(s, Struct) else s, arg)
        for arg in args
    ]
    expected = eqx.filter(eqx.filter_jit(step)(*values), eqx.is_array)
    for one in search(step, *args, devices=8, chip="v5e", keep=3):
        mesh = one.mesh.build(jax.devices())
        plans = tuple(made.on(mesh) for made in one.plans)
        placed = [shard(value, made) for value, made in zip(values, plans, strict=True)]
        result = eqx.filter(filter_jit(step, in_shardings=plans)(*placed), eqx.is_array)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4), result, expected)


def test_limits_hold():
    model = MODELS["scanned"]()
    never = search(*model, devices=16, chip="v5p", limits=Limits(never=("vocab", "embed")), keep=8)
    assert not any(name in ("vocab", "embed") for one in never for _, names in one.roles for name in names)
    always = search(*model, devices=16, chip="v5p", limits=Limits(always=("mlp",)), keep=8)
    assert all(any("mlp" in names for _, names in one.roles) for one in always)
    least = search(*model, devices=16, chip="v5p", limits=Limits(least=(("batch", 4),)), keep=8)
    for one in least:
        cut = [axis for axis, names in one.roles if "batch" in names]
        assert one.mesh.axis_size(tuple(cut)) >= 4
    single = search(*model, devices=16, chip="v5p", limits=Limits(most_axes=1), keep=8)
    assert all(len(one.mesh.axis_names) == 1 for one in single)


def test_rules_that_are_kept():
    rules = AxisRules([("batch", "data"), ("mlp", "model"), ("kv_heads", "model"), ("vocab", "model")])
    found = search(*MODELS["scanned"](), devices=8, chip="v5p", limits=Limits(rules=rules), keep=8)
    assert found
    for one in found:
        assert {names[0] for _, names in one.roles} <= {"batch", "mlp"}


def test_free_memory_is_left_free():
    model = mlp_step(4096, 16384, 4096)
    free = chips.find("v5e").usable_hbm_bytes - 2**28
    assert search(*model, devices=8, chip="v5e", limits=Limits(free_bytes=free))[0].memory_bytes <= 2**28


@pytest.mark.parametrize("devices", [2, 3, 6, 7, 12])
def test_odd_numbers_of_devices(devices):
    found = search(*mlp_step(84, 84 * 4, 84 * 8), devices=devices, chip="v5e")
    assert found[0].mesh.size == devices


@pytest.mark.parametrize("name", MODELS)
def test_every_model_is_searched(name):
    found = search(*MODELS[name](), devices=4, chip="h100", keep=3)
    assert found and all(one.mesh.size == 4 for one in found)
    assert all(dataclasses.replace(one, reasons=()) != one or not one.reasons for one in found)


def test_errors():
    model = mlp_step(64, 256, 512)
    with pytest.raises(MeshError, match="is no slice; write it as `tpu:v5p:4x4x4`, or give a number and `chip=`"):
        search(*model, devices="v5p-64")
    with pytest.raises(MeshError, match=r"`devices=8` does not say which chip; add one, as `chip=\"v5e\"`"):
        search(*model, devices=8)
    with pytest.raises(MeshError, match="`slices=3` does not divide 8 devices"):
        search(*model, devices=8, chip="v5e", slices=3)
    with pytest.raises(MeshError, match="one device needs no plan"):
        search(*model, devices=1, chip="v5e")
    with pytest.raises(RuleError, match="`limits` names 'hidden', which no dimension of the step's arguments has"):
        search(*model, devices=8, chip="v5e", limits=Limits(never=("hidden",)))
    with pytest.raises(RuleError, match="`most_axes` is 5; a search can choose meshes of 1 to 4 axes"):
        Limits(most_axes=5)
    with pytest.raises(SpecError, match="no dimension of the step's arguments has a factor in common with 7 devices"):
        search(*model, devices=7, chip="v5e")
    with pytest.raises(SpecError, match="no mesh of 4096 devices divides the step's dimensions within the limits"):
        search(*mlp_step(2, 2, 2), devices=4096, chip="v5e")
    with pytest.raises(SpecError, match="`limits` wants 'batch' cut, but its size 3 has no factor in common with 8"):
        search(*mlp_step(64, 256, 3), devices=8, chip="v5e", limits=Limits(always=("batch",)))


def test_scalars_alone_cannot_be_searched():
    with pytest.raises(SpecError, match="pad one, or use another number of devices"):
        search(lambda x: x + 1, f32(), devices=8, chip="v5e")


def test_a_mesh_of_a_topology():
    best = search(*mlp_step(1024, 8192, 2**16), devices="tpu:v5p:2x2x4")[0]
    assert isinstance(best.mesh, MeshSpec) and best.mesh.size == 16

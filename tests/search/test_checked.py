import dataclasses
import html

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from models import MODELS, f32

from shardfx import (
    AxisRules,
    CostModel,
    LeafTypeError,
    Limits,
    MeshError,
    MeshSpec,
    OutOfMemoryError,
    chips,
    fit_chip,
    plan,
    search,
)
from shardfx._search.checked import Verifier, fits, fitting
from shardfx._search.reasons import various, worth_laying_out
from shardfx._search.search import Searched


def step(p, x):
    def loss(p):
        return jnp.mean((x + jax.nn.relu(x @ p["up"]) @ p["down"]) ** 2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, p, jax.grad(loss)(p))


ARGS = {"up": f32(64, 256), "down": f32(256, 64)}, f32(128, 64)
BY_HAND = AxisRules([("batch", "rows"), ("mlp", "columns")])


@pytest.fixture(scope="module")
def compiled():
    told = []
    found = search(
        step, *ARGS, devices=8, chip="v5e", keep=9, closely=6, verify="compile", also=[BY_HAND], progress=told.append
    )
    assert any(f"compiling candidate 1 of {len(found)}: " in line for line in told)
    return found


def test_compiled_programs_send_what_the_search_says(compiled):
    for one in compiled:
        estimate, program = one.checks
        assert (estimate.by, program.by) == ("estimate", "compile")
        assert one.wire_bytes == pytest.approx(estimate.wire_bytes, rel=0.1)
        assert sum(sent for _, sent in program.axis_bytes) == program.wire_bytes
        assert program.memory_bytes is not None and 0 < program.memory_bytes < one.limit_bytes
        assert ("by compile, the step laid out:" if one.laid_out else "by compile:") in str(one)
        assert "by its compiled program" in one.code()
        assert "<table>" in one._repr_html_() and html.escape(one.title) in one._repr_html_()
    assert [one.checks[-1].seconds for one in compiled] == sorted(one.checks[-1].seconds for one in compiled)


def test_ways_by_hand_are_compiled_too(compiled):
    """Of the rules that were given both sizes, and of known ways what nobody asked for: tensor parallelism alone."""
    titles = [one.title for one in compiled]
    assert len(titles) == len(set(titles)) == 8
    for sizes in ((2, 4), (4, 2)):
        assert any(one.mesh.axis_sizes == sizes and _names(one) == {("batch",), ("mlp",)} for one in compiled), titles
    assert any(one.mesh.axis_sizes == (8,) and _names(one) == {("mlp",)} for one in compiled), titles


def test_what_is_compiled_is_not_all_of_one_mesh(compiled):
    """Two of a mesh at most as long as there are others, and in order."""
    alone, other = compiled[0], next(one for one in compiled if one.mesh.shape != compiled[0].mesh.shape)
    crowd = [alone, alone, alone, alone, other]
    assert various(crowd, 3) == [alone, alone, other]
    assert various(crowd, 4) == [alone, alone, alone, other]
    assert various(crowd, 9) == crowd


def _names(one):
    return {names for _, names in one.roles}


def test_a_candidate_says_where_estimate_and_program_differ(compiled):
    told = compiled[0].explain()
    lines = told.splitlines()
    assert lines[0] == compiled[0].title
    assert [line.split()[0] for line in lines[1:5]] == ["by", "search", "estimate", "compile"]
    assert all(axis in lines[1] for axis in compiled[0].mesh.axis_names)
    assert "are sent to each device in a step" in told
    assert compiled[1].title in compiled[0].reasons[0] and "by compile" in compiled[0].reasons[0]


def test_the_code_of_every_candidate_makes_its_plans(compiled):
    names = Searched(step, ARGS, 8, Limits()).names
    for one in compiled:
        made: dict = {}
        exec(one.code(), made)
        again = tuple(
            plan(arg, made["MESH"], names=tree, axes=made["RULES"]) for arg, tree in zip(ARGS, names, strict=True)
        )
        assert again == one.plans


def test_what_does_not_fit_by_its_program_is_dropped(compiled):
    """With what the search thinks that the largest needs as the limit, all fit by its estimate, and not all do."""
    limit = max(one.memory_bytes for one in compiled)
    assert any(one.checks[-1].memory_bytes > limit for one in compiled)
    free = compiled[0].limit_bytes - limit
    kept = search(
        step, *ARGS, devices=8, chip="v5e", keep=9, closely=6, verify="compile", limits=Limits(free_bytes=free)
    )
    assert 0 < len(kept) < len(compiled)
    assert all(one.checks[-1].memory_bytes <= limit for one in kept)


def test_the_clock_orders_what_is_run():
    found = search(step, *ARGS, devices=jax.devices(), keep=4, closely=3, verify="run")
    assert {one.checks[-1].by for one in found} == {"run"} and len(found) == 3
    assert all(0 < one.checks[-1].seconds < 60 for one in found)
    first, second, _ = found
    assert first.checks[-1].seconds <= second.checks[-1].seconds
    assert "as measured" in first.code() and "by run" in first.explain() or "run" in first.explain()


def test_every_kind_of_argument_can_be_run():
    """Integers, keys, booleans, numbers that are no arrays, and functions in modules are made or passed on."""

    def odd(model, key, tokens, flags, scale):
        noise = jax.random.normal(key, (8, 16))
        return scale * jnp.sum(jax.nn.one_hot(tokens, 16) + noise + jnp.where(flags, 1.0, 0.0)) + model["act"](
            model["w"].sum()
        )

    model = {"w": f32(16, 16), "act": jax.nn.relu}
    key = jax.eval_shape(lambda: jax.random.key(0))
    args = (model, key, jax.ShapeDtypeStruct((8,), "int32"), jax.ShapeDtypeStruct((8, 16), "bool"), 2)
    (best,) = search(odd, *args, devices=jax.devices(), keep=1, closely=1, verify="run")
    assert best.checks[-1].by == "run"


@pytest.mark.parametrize("name", ["experts", "equinox_mlp"])
def test_programs_of_other_models_compile(name):
    with jax.numpy_dtype_promotion("standard"):
        (best,) = search(*MODELS[name](), devices=8, chip="v5e", keep=1, closely=1, verify=jax.devices())
    assert best.checks[-1].by == "compile"


def test_arrays_that_lie_on_a_mesh_are_searched_as_their_structs():
    """The mesh that they are on is what is looked for: no constraint, and no error."""
    mesh = MeshSpec({"data": 2, "tensor": 4}).build(jax.devices()[:8])
    placed = jax.device_put(jnp.ones((64, 256)), NamedSharding(mesh, P(None, "tensor")))
    asked = {"devices": 8, "chip": "v5e", "keep": 2}
    found = search(step, {"up": placed, "down": ARGS[0]["down"]}, ARGS[1], **asked)
    assert [one.title for one in found] == [one.title for one in search(step, *ARGS, **asked)]


def test_measured_steps_fit_a_machine():
    """Times made with known factors give them back."""
    found = search(step, *ARGS, devices=8, chip="v5e", keep=8, limits=Limits(least=(("batch", 2),)))
    measured = [
        (
            one,
            3 * one.compute_seconds + 2 * (one.exposed_seconds + max(0, one.hidden_seconds - one.compute_seconds / 4)),
        )
        for one in found
    ]
    fitted, usual = fit_chip(measured), CostModel()
    assert fitted.compute == pytest.approx(usual.compute / 3, rel=0.05)
    assert fitted.network == pytest.approx(usual.network / 2, rel=0.05)


def test_errors():
    with pytest.raises(MeshError, match=r'`verify="compile"` needs 64 devices, and there are 8; emulate them'):
        search(step, *ARGS, devices=64, chip="v5e", verify="compile")
    with pytest.raises(MeshError, match="`verify` has 8 devices, but the search is for 4; give as many"):
        search(step, *ARGS, devices=4, chip="v5e", verify=jax.devices())
    with pytest.raises(MeshError, match='`verify=\'quick\'` is not "compile", "run", or the devices to compile for'):
        search(step, *ARGS, devices="cpu:8", verify="quick")
    with pytest.raises(MeshError, match="`fit_chip` got 0 measurements; it needs at least two"):
        fit_chip([])


def test_errors_of_arguments():
    with pytest.raises(
        LeafTypeError, match=r"the arguments of the step hold no arrays \(tuple\); pass arrays, or structs"
    ):
        search(lambda x: x, (64, 128), devices=8, chip="v5e")
    with pytest.raises(MeshError, match="`devices=0` are none; give how many there are, as `devices=8"):
        search(step, *ARGS, devices=0, chip="v5e")
    with pytest.raises(MeshError, match="`devices` is empty; give JAX's devices, as `devices=jax.devices\\(\\)`"):
        search(step, *ARGS, devices=[])
    with pytest.raises(TypeError) as caught:
        search(lambda p, x: p["up"] @ x, *ARGS, devices=8, chip="v5e")
    (note,) = [note for note in caught.value.__notes__ if "`search` traced the step with arguments of these" in note]
    assert "f32[64,256]" in note and "f32[128,64]" in note


def test_what_fits_nowhere_says_how_many_devices_would_do():
    params = {"up": f32(65536, 131072), "down": f32(131072, 65536)}
    (alone,) = search(step, params, f32(256, 65536), devices="tpu:v5e:2x2")
    assert not alone.fits
    told = alone.reasons[0]
    assert "nothing fits: this takes least" in told and "devices would do, with" in told
    count = int(told.split("; ")[1].split()[0])
    assert search(step, params, f32(256, 65536), devices=count, chip="v5e", keep=1)[0].fits
    half = search(step, params, f32(256, 65536), devices=count // 2, chip="v5e", keep=1)
    assert not half[0].fits
    assert dataclasses.replace(alone, reasons=()) != alone


def test_what_the_compiler_refuses_is_dropped():
    """As it is or laid out: the one that has a program counts. What has none does not stop the others."""
    found = search(step, *ARGS, devices=8, chip="v5e", keep=3)
    verifier = Verifier(step, ARGS, tuple(jax.devices()), chips.find("v5e"), CostModel(), None, lambda _: None)
    first, second, third = found

    def program_of(one, its_step):
        if one.title == first.title or (one.title == second.title and its_step is step):
            raise OutOfMemoryError("no room", 2**40, 2**34)
        return verifier._program_of(one, its_step)

    looked = list(verifier.looked_at(found, program_of))
    assert [one.laid_out for one, _ in looked][1] and [program is None for _, program in looked] == [True, False, False]
    assert not fits(looked[0][0]) and looked[0][0].checks[-1].memory_bytes == 2**40
    kept = fitting([one for one, _ in looked])
    assert {one.title for one in kept} == {second.title, third.title}
    assert "1.0 TiB" in looked[0][0].explain()


def test_what_laying_out_would_gain_is_told():
    """The first as it is written, against the fastest as it was priced."""
    first, second, *_ = search(step, *ARGS, devices=8, chip="v5e", keep=3)
    (check,) = first.checks
    slow = dataclasses.replace(first, checks=(dataclasses.replace(check, seconds=2 * second.seconds),))
    (told,) = worth_laying_out(slow, [slow, dataclasses.replace(second, seconds=first.seconds / 2)])
    assert told.startswith(f"{second.title} takes") and "`laid_out=True`" in told
    assert not worth_laying_out(dataclasses.replace(slow, laid_out=True), [slow, second])
    assert not worth_laying_out(first, [dataclasses.replace(first, seconds=check.seconds)])

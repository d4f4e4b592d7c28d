import html

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from models import MODELS, f32, space_of

from shardfx import AxisRules, MeshSpec
from shardfx.auto import Limits, _checked as checked, search
from shardfx.auto._asked import asked_for
from shardfx.auto._candidate import Candidate, without_twins
from shardfx.auto._search import candidates_of, opened
from shardfx.errors import LeafTypeError, MeshError, OutOfMemoryError, RuleError


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
        step, *ARGS, devices="cpu:8", keep=12, closely=2, verify="compile", also=[BY_HAND], progress=told.append
    )
    assert any(f"compiling candidate 1 of {len(found)}: " in line for line in told)
    return found


def test_compiled_programs_say_what_a_candidate_costs(compiled):
    for one in compiled:
        assert one.by == "compile" and one.comparison is not None
        assert 0 < one.memory_bytes < one.limit_bytes
        # For CPUs the partitioned program sends what the compiled one does.
        assert one.comparison.different_bytes == 0 or one.wire_bytes > 0
        assert "by the compiled program" in str(one) and "by the compiled program" in one.code()
        assert "<table>" in one._repr_html_() and html.escape(one.title) in one._repr_html_()
    assert [one.seconds for one in compiled] == sorted(one.seconds for one in compiled)


def test_ways_by_hand_are_compiled_too(compiled):
    """However few are asked for: those that most people write, and the rules that were given."""
    titles = [one.title for one in compiled]
    assert len(titles) == len(set(titles))
    assert any(_names(one) == {("batch",), ("mlp",)} for one in compiled), titles
    for names in ({("batch",)}, {("batch", "embed")}, {("mlp",)}):
        assert any(one.mesh.size == one.mesh.axis_sizes[0] and _names(one) == names for one in compiled), titles


def _names(one: Candidate):
    return {names for _, names in one.assignments}


def test_a_candidate_says_where_both_programs_differ(compiled):
    told = compiled[0].explain()
    assert told.splitlines()[0].startswith(compiled[0].title)
    assert str(compiled[0].comparison) in told and str(compiled[0].traffic) in told


def test_what_does_not_fit_by_its_program_is_dropped(compiled):
    limit = sorted(one.memory_bytes for one in compiled)[len(compiled) // 2]
    free = compiled[0].limit_bytes - limit
    kept = search(step, *ARGS, devices="cpu:8", keep=12, closely=2, verify="compile", limits=Limits(free_bytes=free))
    assert 0 < len(kept) < len(compiled)
    assert all(one.memory_bytes <= limit for one in kept)


def test_the_clock_orders_what_is_run():
    found = search(step, *ARGS, devices=jax.devices(), keep=4, closely=3, verify="run")
    assert {one.by for one in found} == {"run"} and len(found) == 4
    assert all(0 < one.seconds < 60 for one in found)
    assert [one.seconds for one in found] == sorted(one.seconds for one in found)
    assert "as measured" in found[0].code() and "as measured" in found[0].explain()


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
    assert best.by == "run"


def test_programs_of_other_models_compile():
    with jax.numpy_dtype_promotion("standard"):
        (best,) = search(*MODELS["equinox_mlp"](), devices=8, chip="v5e", keep=1, closely=1, verify=jax.devices())
    assert best.by == "compile"


def test_arrays_that_lie_on_a_mesh_are_searched_as_their_structs():
    """The mesh that they are on is what is looked for: no constraint, and no error."""
    mesh = MeshSpec({"data": 2, "tensor": 4}).build(jax.devices()[:8])
    placed = jax.device_put(jnp.ones((64, 256)), NamedSharding(mesh, P(None, "tensor")))
    asked = {"devices": 8, "chip": "v5e", "keep": 2}
    found = search(step, {"up": placed, "down": ARGS[0]["down"]}, ARGS[1], **asked)
    assert [one.title for one in found] == [one.title for one in search(step, *ARGS, **asked)]


def test_twins_are_left_out():
    space = space_of((step, *ARGS), 8, "v5e")
    _, pricer = opened(step, ARGS, asked_for(8, "v5e"), Limits(), (), lambda _: None)
    found, _ = candidates_of(space, pricer, 3, lambda _: None)
    assert [*without_twins([*found, *found])] == [*without_twins(found)] == found


def test_errors():
    with pytest.raises(MeshError, match=r'`verify="compile"` needs 64 devices, and there are 8; emulate them'):
        search(step, *ARGS, devices=64, chip="v5e", verify="compile")
    with pytest.raises(MeshError, match="`verify` has 8 devices, but the search is for 4; give as many"):
        search(step, *ARGS, devices=4, chip="v5e", verify=jax.devices())
    with pytest.raises(RuleError, match='`verify=\'quick\'` is not "compile", "run", or the devices to compile for'):
        search(step, *ARGS, devices="cpu:8", verify="quick")


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


def test_what_fits_nowhere_says_so():
    params = {"up": f32(65536, 131072), "down": f32(131072, 65536)}
    (alone,) = search(step, params, f32(256, 65536), devices="tpu:v5e:2x2")
    assert not alone.fits and "nothing fits: this takes least" in alone.reasons[0]


def test_what_the_compiler_refuses_is_dropped(monkeypatch):
    """What has no program does not stop the others."""
    compile_for = checked.compile_for

    def refuses(jitted, *args, target, **rest):
        if target.shape.get("data") == 8:
            raise OutOfMemoryError("no room", 2**40, 2**34)
        return compile_for(jitted, *args, target=target, **rest)

    monkeypatch.setattr(checked, "compile_for", refuses)
    found = search(step, *ARGS, devices="cpu:8", keep=9, closely=3, verify="compile")
    assert found and not any(one.mesh.shape.get("data") == 8 for one in found)

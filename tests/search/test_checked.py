import html

import jax
import jax.numpy as jnp
import pytest
from models import f32, mlp_step

from shardfx import AxisRules
from shardfx.auto import Limits, _programs as programs, search
from shardfx.auto._candidate import Candidate, without_twins
from shardfx.errors import OutOfMemoryError


step, *ARGS = mlp_step(64, 256, 128, "float32")
BY_HAND = AxisRules([("batch", "rows"), ("mlp", "columns")])


@pytest.fixture(scope="module")
def compiled():
    told = []
    found = search(
        step,
        *ARGS,
        devices="cpu:8",
        keep=12,
        closely=2,
        verify="compile",
        also=[BY_HAND],
        progress=told.append,
    )
    assert any(f"compiling candidate 1 of {len(found)}: " in line for line in told)
    return [*found]


def test_compiled_programs_say_what_a_candidate_costs(compiled):
    for one in compiled:
        assert one.by == "compile" and one.comparison is not None
        assert 0 < one.memory_bytes < one.limit_bytes
        # For CPUs the partitioned program sends what the compiled one does.
        assert one.comparison.different_bytes == 0 or one.wire_bytes > 0
        assert (
            "by the compiled program" in str(one)
            and "by the compiled program" in one.code()
        )
        assert (
            str(one.comparison) in one.explain() and str(one.traffic) in one.explain()
        )
        assert (
            "<pre>" in one._repr_html_() and html.escape(one.title) in one._repr_html_()
        )
    assert [one.seconds for one in compiled] == sorted(one.seconds for one in compiled)


def test_ways_by_hand_are_compiled_too(compiled):
    """However few are asked for: those that most people write, and the rules that were
    given.
    """
    titles = [one.title for one in compiled]
    assert (
        len(titles) == len(set(titles))
        and [*without_twins([*compiled, *compiled])] == compiled
    )
    assert any(_names(one) == {("batch",), ("mlp",)} for one in compiled), titles
    for names in ({("batch",)}, {("batch", "embed")}, {("mlp",)}):
        assert any(
            one.mesh.size == one.mesh.axis_sizes[0] and _names(one) == names
            for one in compiled
        ), titles


def _names(one: Candidate):
    return {names for _, names in one.assignments}


def test_what_does_not_fit_by_its_program_is_dropped(compiled):
    limit = sorted(one.memory_bytes for one in compiled)[len(compiled) // 2]
    free = compiled[0].limit_bytes - limit
    kept = search(
        step,
        *ARGS,
        devices="cpu:8",
        keep=12,
        closely=2,
        verify="compile",
        limits=Limits(free_bytes=free),
    )
    assert 0 < len(kept) < len(compiled)
    assert all(one.memory_bytes <= limit for one in kept)


def test_the_clock_orders_what_is_run_of_every_kind_of_argument():
    """Integers, keys, booleans, numbers that are no arrays, and functions in modules
    are made or passed on.
    """

    def odd(model, key, tokens, flags, scale):
        noise = jax.random.normal(key, (8, 16))
        return scale * jnp.sum(
            jax.nn.one_hot(tokens, 16) + noise + jnp.where(flags, 1.0, 0.0)
        ) + model["act"](model["w"].sum())

    model = {"w": f32(16, 16), "act": jax.nn.relu}
    key = jax.eval_shape(lambda: jax.random.key(0))
    args = (
        model,
        key,
        jax.ShapeDtypeStruct((8,), "int32"),
        jax.ShapeDtypeStruct((8, 16), "bool"),
        2,
    )
    found = search(
        odd, *args, devices=jax.devices()[:4], keep=2, closely=2, verify="run"
    )
    assert {one.by for one in found} == {"run"} and len(found) == 2
    assert 0 < found[0].seconds <= found[1].seconds < 60
    assert "as measured" in found[0].code() and "as measured" in found[0].explain()


def test_what_the_compiler_refuses_is_dropped(monkeypatch):
    """What has no program does not stop the others."""
    compile_for = programs.compile_for

    def refuses(jitted, *args, target, **rest):
        if target.shape.get("data") == 8:
            raise OutOfMemoryError("no room", 2**40, 2**34)
        return compile_for(jitted, *args, target=target, **rest)

    monkeypatch.setattr(programs, "compile_for", refuses)
    found = search(step, *ARGS, devices="cpu:8", keep=9, closely=3, verify="compile")
    assert found and not any(one.mesh.shape.get("data") == 8 for one in found)

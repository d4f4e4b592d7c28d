import html

import jax
import jax.numpy as jnp
import pytest
from models import f32, mlp_step

from shardfx import AxisRules, MeshSpec, PathRules, plan
from shardfx.auto import Candidate, Limits, _measured, search
from shardfx.auto._candidate import without_twins
from shardfx.errors import OutOfMemoryError


step, *ARGS = mlp_step(64, 256, 128, "float32")
BY_HAND = AxisRules([("batch", "rows"), ("mlp", "columns")])


@pytest.fixture(scope="module")
def compiled():
    lines = []
    candidates = search(
        step,
        *ARGS,
        devices="cpu:8",
        keep=12,
        closely=2,
        verify="compile",
        also=[BY_HAND],
        progress=lines.append,
    )
    assert any(
        f"compiling candidate 1 of {len(candidates)}: " in line for line in lines
    )
    return [*candidates]


def test_compiled_programs_say_what_a_candidate_costs(compiled):
    for candidate in compiled:
        assert candidate.by == "compile"
        assert candidate.comparison is not None
        assert 0 < candidate.memory_bytes < candidate.limit_bytes
        # For CPUs the partitioned program sends what the compiled one does.
        assert candidate.comparison.different_bytes == 0 or candidate.wire_bytes > 0
        assert "by the compiled program" in str(candidate)
        assert "by the compiled program" in candidate.code()
        assert str(candidate.comparison) in candidate.explain()
        assert str(candidate.traffic) in candidate.explain()
        assert "<pre>" in candidate._repr_html_()
        assert html.escape(candidate.title) in candidate._repr_html_()
    expected = sorted(candidate.seconds for candidate in compiled)
    assert [candidate.seconds for candidate in compiled] == expected


def test_ways_by_hand_are_compiled_too(compiled):
    """However few are asked for: those that most people write, and the rules that were
    given.
    """
    titles = [candidate.title for candidate in compiled]
    assert len(titles) == len(set(titles))
    assert [*without_twins([*compiled, *compiled])] == compiled
    assert any(_names(candidate) == {("batch",), ("mlp",)} for candidate in compiled), (
        titles
    )
    for names in ({("batch",)}, {("batch", "embed")}, {("mlp",)}):
        assert any(
            candidate.mesh.size == candidate.mesh.axis_sizes[0]
            and _names(candidate) == names
            for candidate in compiled
        ), titles


def _names(candidate: Candidate):
    return {names for _, names in candidate.assignments}


def test_what_does_not_fit_by_its_program_is_dropped(compiled):
    memory_bytes = sorted(candidate.memory_bytes for candidate in compiled)
    limit = memory_bytes[len(compiled) // 2]
    free = compiled[0].limit_bytes - limit
    fitting = search(
        step,
        *ARGS,
        devices="cpu:8",
        keep=12,
        closely=2,
        verify="compile",
        limits=Limits(free_bytes=free),
    )
    assert 0 < len(fitting) < len(compiled)
    for candidate in fitting:
        assert candidate.memory_bytes <= limit


def test_the_clock_orders_what_is_run_of_every_kind_of_argument():
    """Integers, keys, booleans, numbers that are no arrays, and functions in modules
    are made or passed on.
    """

    def odd(model, key, tokens, flags, scale):
        noise = jax.random.normal(key, (8, 16))
        elements = jax.nn.one_hot(tokens, 16) + noise + jnp.where(flags, 1.0, 0.0)
        total = jnp.sum(elements)
        return scale * total + model["act"](model["w"].sum())

    model = {"w": f32(16, 16), "act": jax.nn.relu}
    key = jax.eval_shape(lambda: jax.random.key(0))
    args = (
        model,
        key,
        jax.ShapeDtypeStruct((8,), "int32"),
        jax.ShapeDtypeStruct((8, 16), "bool"),
        2,
    )
    devices = jax.devices()[:4]
    candidates = search(
        odd,
        *args,
        devices=devices,
        keep=2,
        closely=2,
        verify="run",
    )
    assert {candidate.by for candidate in candidates} == {"run"}
    assert len(candidates) == 2
    assert 0 < candidates[0].seconds <= candidates[1].seconds < 60
    assert "as measured" in candidates[0].code()
    assert "as measured" in candidates[0].explain()


def test_what_the_compiler_refuses_is_dropped(monkeypatch):
    """What has no program does not stop the others."""
    compile_for = _measured.compile_for

    def refuses(jitted, *args, target, **rest):
        if target.shape.get("data") == 8:
            raise OutOfMemoryError("no room", 2**40, 2**34)
        return compile_for(jitted, *args, target=target, **rest)

    monkeypatch.setattr(_measured, "compile_for", refuses)
    candidates = search(
        step,
        *ARGS,
        devices="cpu:8",
        keep=9,
        closely=3,
        verify="compile",
    )
    assert candidates
    for candidate in candidates:
        assert candidate.mesh.shape.get("data") != 8


class TooLarge:
    """A step that a device has no room for."""

    def lower(self, *_):
        return self

    def compile(self):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: there is no room.")


def test_what_has_no_room_is_dropped_before_it_runs(monkeypatch):
    jitted = _measured.jitted

    def refuses(lowered, candidate, plans):
        if candidate.mesh.shape.get("data") == 8:
            return TooLarge()
        return jitted(lowered, candidate, plans)

    monkeypatch.setattr(_measured, "jitted", refuses)
    candidates = search(
        step,
        *ARGS,
        devices=jax.devices()[:8],
        keep=9,
        closely=2,
        verify="run",
    )
    assert {candidate.by for candidate in candidates} == {"run"}
    for candidate in candidates:
        assert candidate.mesh.shape.get("data") != 8


def test_a_twin_has_the_same_dimensions_on_one_axis():
    mesh = MeshSpec({"fsdp": 2, "tensor": 2})
    tree = {"w": f32(8, 8), "x": f32(8, 8)}

    def candidate(mesh, **specs):
        rules = PathRules([(name, jax.P(*spec)) for name, spec in specs.items()])
        return Candidate(
            mesh=mesh,
            rules=AxisRules([]),
            assignments=(),
            plans=(plan(tree, mesh, paths=rules),),
            seconds=1.0,
            memory_bytes=0,
            limit_bytes=1,
        )

    gathered = candidate(mesh, w=["fsdp", "tensor"], x=["fsdp"])
    turned = candidate(mesh, w=["tensor", "fsdp"], x=["fsdp"])
    other_names = MeshSpec({"tensor": 2, "fsdp": 2})
    renamed = candidate(other_names, w=["tensor", "fsdp"], x=["tensor"])
    assert [*without_twins([gathered, turned, renamed])] == [gathered, turned]

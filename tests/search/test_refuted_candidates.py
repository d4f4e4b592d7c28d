"""A search drops what XLA's partitioner computes wrongly."""

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp
import pytest
from parts_of_search import MODEL, LoweredStep, trace

import shardfx as sfx
from shardfx import chips
from shardfx.auto import Candidate
from shardfx.auto._search import _without_refuted
from shardfx.cost._libtpu import target_of
from shardfx.errors import ProgramError


def residual(w, x):
    for _ in range(2):
        x = x + jnp.tanh(x @ w)
    return x


W = jax.ShapeDtypeStruct((32, 32), jnp.float32)
X = jax.ShapeDtypeStruct((16, 32), jnp.float32)
MESH = sfx.MeshSpec({"data": 2, "fsdp": 2, "tensor": 2})
RULES = sfx.AxisRules([("batch", ("data", "fsdp")), ("model", "tensor")])


def candidate(weight: jax.P, seconds: float) -> Candidate:
    rules = sfx.PathRules([(".*", weight)])
    sharding_plan = sfx.plan(W, MESH, paths=rules)
    plans = (
        sharding_plan,
        sfx.plan(X, MESH, paths=sfx.PathRules.parse(".*->data+fsdp")),
    )
    assignments = (
        ("data", ("batch",)),
        ("fsdp", ("batch",)),
        ("tensor", ("model",)),
    )
    return Candidate(
        mesh=MESH,
        rules=RULES,
        assignments=assignments,
        plans=plans,
        seconds=seconds,
        memory_bytes=1,
        limit_bytes=2,
    )


@pytest.fixture(scope="module")
def lowered():
    return LoweredStep(
        step=residual,
        traced=trace(residual, W, X),
        chip=chips.find("h100"),
        model=MODEL,
    )


def test_a_search_drops_a_candidate_that_is_refuted(lowered):
    wrong = candidate(jax.P("tensor", "fsdp"), 1.0)
    right = candidate(jax.P(), 2.0)
    assert lowered.refutations(wrong)
    assert not lowered.refutations(right)
    lines = []
    actual = _without_refuted(lowered, [wrong, right], 1, lines.append)
    assert actual == [right]
    assert len(lines) == 1
    assert "test_refuted_candidates.py" in lines[0]
    # What is beyond the number to keep is not judged.
    accepted = _without_refuted(lowered, [right, wrong], 1, lines.append)
    assert accepted == [right, wrong]


def test_a_search_without_a_right_candidate_says_what_is_wrong(lowered):
    wrong = candidate(jax.P("tensor", "fsdp"), 1.0)
    other = dataclasses.replace(wrong, seconds=3.0)
    message = r"wrongly under each of the 2 candidates.*test_refuted_candidates.py:\d+ residual"
    with pytest.raises(ProgramError, match=message):
        _without_refuted(lowered, [wrong, other], 1, print)


@pytest.mark.aot
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu is not installed: pip install 'shardfx[aot]'",
)
def test_a_search_reads_the_program_that_libtpu_partitions():
    chip = chips.find("v5e")
    lowered = LoweredStep(
        step=residual, traced=trace(residual, W, X), chip=chip, model=MODEL
    )
    target = target_of(chip, MESH)
    assert target is not None
    wrong = candidate(jax.P("tensor", "fsdp"), 1.0)
    right = candidate(jax.P(), 2.0)
    jitted = jax.jit(residual)
    for proposed in (wrong, right):
        structs = [plan.structs for plan in proposed.plans]
        verdict = sfx.testing.verify(jitted, *structs, compiler="tpu:v5e:2x4")
        refutations = lowered.refutations(proposed, target)
        assert len(refutations) == len(verdict.refutations)
        for ours, theirs in zip(refutations, verdict.refutations, strict=True):
            assert ours.operation == theirs.operation
    # libtpu is asked once for each candidate that is judged.
    asked = []
    accepted = _without_refuted(
        lowered=lowered,
        fitting=[right, wrong],
        keep=1,
        tell=print,
        target_of=lambda proposed: asked.append(proposed) or target,
    )
    assert accepted == [right, wrong]
    assert asked == [right]

"""What a search makes of libtpu's answers. `tests/house/test_aot.py` asks libtpu."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from parts_of_search import MODEL, LoweredStep, search_options, trace

import shardfx as sfx
from shardfx.auto import Candidate, _scheduled
from shardfx.errors import ProgramError


OPTIONS = search_options("tpu:v5e:2x2", None)
X = jax.ShapeDtypeStruct((16, 32), jnp.float32)
LIMIT = 100


@pytest.fixture(scope="module")
def lowered():
    return LoweredStep(
        step=jnp.sum, traced=trace(jnp.sum, X), chip=OPTIONS.chip, model=MODEL
    )


def candidate(axis: str, seconds: float, memory_bytes: int = 1) -> Candidate:
    mesh = sfx.MeshSpec({axis: 4})
    rules = sfx.AxisRules([("batch", axis)])
    assignments = ((axis, ("batch",)),)
    sharding_plan = sfx.plan(X, mesh, paths=sfx.PathRules.parse(f".*->{axis}"))
    plans = (sharding_plan,)
    return Candidate(
        mesh=mesh,
        rules=rules,
        assignments=assignments,
        plans=plans,
        seconds=seconds,
        memory_bytes=memory_bytes,
        limit_bytes=LIMIT,
    )


def answered(monkeypatch, answers):
    """Lets libtpu answer with these seconds and bytes by mesh axis, or with an error."""

    def scheduled(_lowered, candidate, _target):
        seconds, memory_bytes = answers[candidate.mesh.axis_names[0]]
        if seconds is None:
            raise ProgramError("libtpu cannot compile this step")
        return dataclasses.replace(
            candidate, seconds=seconds, memory_bytes=memory_bytes, by="schedule"
        )

    monkeypatch.setattr(_scheduled, "scheduled", scheduled)
    monkeypatch.setattr(_scheduled, "target_for", lambda *_: "v5e:2x2")


def settled_by(lowered, candidates, *, enough: int, most: int, tell=print):
    """What is settled of candidates of a step, with the options of all tests here."""
    return _scheduled.settled(
        lowered=lowered,
        options=OPTIONS,
        candidates=candidates,
        enough=enough,
        most=most,
        tell=tell,
    )


def names(candidates):
    return [candidate.mesh.axis_names[0] for candidate in candidates]


def test_libtpu_orders_candidates_and_drops_some(lowered, monkeypatch):
    answered(monkeypatch, {"a": (3.0, 50), "b": (1.0, 101), "c": (2.0, 50)})
    lines: list[str] = []
    ones = [candidate(axis, float(seconds)) for seconds, axis in enumerate("abcd")]
    answers = settled_by(lowered, ones, enough=2, most=4, tell=lines.append)
    # Two fit, so libtpu is not asked about "d".
    assert names(answers.fitting) == ["c", "a", "d"]
    assert names(answers.too_large) == ["b"]
    strategies = [candidate.by for candidate in answers.fitting]
    assert strategies == [
        "schedule",
        "schedule",
        "estimate",
    ]
    assert "dropped b=4 (batch): libtpu takes 101 B of 100 B" in lines
    answers = settled_by(lowered, ones, enough=2, most=1, tell=lines.append)
    assert names(answers.fitting) == ["a", "b", "c", "d"]


def test_where_nothing_fits_the_least_is_next(lowered, monkeypatch):
    full = {axis: (1.0, 101) for axis in "abc"}
    answered(monkeypatch, full | {"d": (9.0, 99)})
    ones = [
        candidate("a", 1.0, 90),
        candidate("b", 2.0, 80),
        candidate("c", 3.0, 70),
        candidate("d", 4.0, 60),
    ]
    answers = settled_by(lowered, ones, enough=2, most=3)
    assert names(answers.fitting) == ["d", "c"]
    assert names(answers.too_large) == ["a", "b"]
    answers = settled_by(lowered, ones, enough=2, most=2)
    assert "the 2 candidates that it was asked about do not fit" in str(
        answers.fitting[0]
    )
    answers = settled_by(lowered, ones[:3], enough=2, most=3)
    assert not answers.fitting
    assert names(answers.too_large) == ["a", "b", "c"]
    too_large = [candidate("a", 1.0, 101)]
    answers = settled_by(lowered, too_large, enough=2, most=0)
    assert not answers.fitting
    assert answers.too_large == tuple(too_large)


def test_what_libtpu_cannot_compile_is_dropped(lowered, monkeypatch):
    answered(monkeypatch, {"a": (None, 0), "b": (1.0, 10)})
    lines: list[str] = []
    ones = [candidate("a", 1.0), candidate("b", 2.0)]
    answers = settled_by(lowered, ones, enough=2, most=2, tell=lines.append)
    assert names(answers.fitting) == ["b"]
    assert "dropped a=4 (batch): libtpu cannot compile this step" in lines
    with pytest.raises(ProgramError, match="libtpu cannot compile this step"):
        settled_by(lowered, ones[:1], enough=2, most=2)

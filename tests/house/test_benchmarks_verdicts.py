"""What the benchmarks of verdicts count: unseen steps, and steps on several slices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

from benchmarks.faults import slices
from benchmarks.faults._coverage import Error
from benchmarks.faults._records import add_record, read_records
from benchmarks.unseen import _open, verdicts
from benchmarks.unseen._one_device import shard_map_on_one_device


CASE = _open.CASES[0]
REFUSED = {"refused": "ValueError: the size 3"}


def verdict(subject, **fields):
    line = {"kind": "verdict", "name": subject.name, "layout": subject.layout}
    return line | fields


def test_layouts_of_a_step_are_different():
    sizes = [tuple(layout.items()) for layout in verdicts.layouts(CASE)]
    assert len(set(sizes)) == len(sizes) >= 3
    assert sizes[0] == tuple(CASE.cpu.items())


def test_a_refused_layout_gives_way_to_the_next():
    lines: list[dict] = []
    asked = []
    for question in verdicts.questions(lines):
        if question.subject.name != CASE.name:
            break
        asked.append(question.subject.layout)
        fields = REFUSED if len(asked) == 1 else {"outcome": "proved", "bytes": 8}
        lines.append(verdict(question.subject, **fields))
    assert len(asked) == 4
    # Afterwards, the numbers of what is proved are asked.
    kinds = [
        question.kind
        for question in verdicts.questions(lines)
        if question.subject.name == CASE.name
    ]
    assert kinds == ["numbers"] * 3


@pytest.mark.parametrize(
    "size, said", [(1e-6, "right"), (0.3, "wrong"), (float("nan"), "not finite")]
)
def test_numbers_are_right_wrong_or_not_finite(size, said):
    errors = [Error(0.0, 1e-4), Error(size, 1e-4)]
    assert verdicts.numbers(errors)["numbers"] == said


def test_accusations_and_wrong_proofs_are_counted(tmp_path):
    (subject, other, *_) = verdicts.subjects(CASE)
    lines = [
        verdict(subject, outcome="refuted"),
        verdict(other, outcome="proved"),
        verdict(subject, kind="numbers", numbers="right", error="1e-07"),
        verdict(other, kind="numbers", numbers="wrong", error="0.4"),
    ]
    records = tmp_path / "records.jsonl"
    assert read_records(records) == []
    for line in lines:
        add_record(records, line)
    assert read_records(records) == lines
    assert len(verdicts.mistakes(lines)) == 2
    texts = verdicts.summary(lines)
    assert "1 steps, 2 layouts" in texts[0]
    assert texts[1].startswith("refuted, and right: ")
    assert texts[2].startswith("proved, and wrong: ")


def test_verdicts_on_two_slices_are_compared():
    proved = {"outcome": "proved"}
    lines = [
        {"name": "a", "layout": "batch", "slices": {"x": proved, "y": proved}},
        {
            "name": "b",
            "layout": "batch",
            "slices": {"x": proved, "y": {"outcome": "not judged"}},
        },
        {"name": "c", "layout": "batch", "slices": {"x": proved, "y": REFUSED}},
    ]
    head, row = slices.summary(lines)
    assert head == "1 of 2 steps have one outcome on all slices"
    assert row == "b, batch: {'x': 'proved', 'y': 'not judged'}"


def _of_two_axes(tree, rows):
    whole = lax.all_gather(tree["x"], "b", axis=1, tiled=True)
    scattered = lax.psum_scatter(whole @ whole.T, "a", scatter_dimension=0, tiled=True)
    exchanged = lax.all_to_all(rows, ("a", "b"), 0, 0, tiled=True)
    mean = lax.pmean(rows.sum() * lax.axis_index("b").astype(float), ("a", "b"))
    return scattered, exchanged, mean


@pytest.mark.parametrize("spec", [P("a", "b"), P(("b", "a")), P(None, ("a", "b")), P()])
def test_a_shard_map_on_one_device_has_its_results(spec):
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    options = {
        "mesh": mesh,
        "in_specs": ({"x": spec}, P(("a", "b"))),
        "out_specs": (P(("b", "a")), P(("a", "b")), P()),
    }
    tree = {"x": jnp.arange(64.0 * 64).reshape(64, 64) % 7}
    rows = jnp.arange(64.0 * 2).reshape(64, 2)
    sharded = jax.shard_map(_of_two_axes, check_vma=False, **options)
    results = jax.jit(sharded)(tree, rows)
    alone = shard_map_on_one_device(_of_two_axes, **options)(tree, rows)
    for result, expected in zip(alone, results, strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-6)

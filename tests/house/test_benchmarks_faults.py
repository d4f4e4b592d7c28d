"""The bank of layers, its cases as data, the comparison, the minimiser, the causes and
the mutations of `benchmarks/faults`.
"""

import dataclasses
import itertools
import json
import random
import re

import jax
import numpy as np

from benchmarks.faults import (
    _causes,
    _child,
    _data,
    _draws,
    _layers,
    _minimise,
    _mutate,
    _report,
    _verdicts,
)
from benchmarks.faults._data import Case, Layout, Operand, Operation, Program
from benchmarks.faults._driver import Configuration, Result
from benchmarks.faults._hunt import Tally, add_records
from benchmarks.faults._layers import LAYERS, draw as draw_layer
from benchmarks.faults._numbers import Prepared, compare, mesh_of, outcome, sharded
from benchmarks.faults._operations import OPERATIONS
from benchmarks.faults._texts import difference, explicit, run


TEXT = """HloModule step, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

ENTRY %main (x: f32[4,4]) -> f32[4,4] {
  %x = f32[4,4]{1,0} parameter(0)
  %table = s32[8]{0} constant({0, 0, 1, 1, 2, 2, 3, 3})
  %id = u32[] partition-id()
  %row = s32[1]{0} dynamic-slice(%table, %id), dynamic_slice_sizes={1}
  %sin = f32[4,4]{1,0} sine(%x)
  %moved = f32[4,4]{1,0} collective-permute(%sin), channel_id=1,\
 source_target_pairs={{0,1},{1,0},{2,3},{3,2}}
  %total = f32[4,4]{1,0} all-reduce(%moved), channel_id=2,\
 replica_groups=mesh['i'=2,'j'=2,'k'=2], device_ids=([2,4]T(1,0)) {'j'},\
 use_global_device_ids=true, to_apply=%add
  ROOT %out = f32[4,4]{1,0} multiply(%total, %moved)
}
"""


def doubled_case(**layout) -> Case:
    """A gradient of two operations on a mesh of three axes."""
    operations = (
        Operation("slice", {"low": [0, 0], "high": [8, 4], "strides": [1, 2]}, ()),
        Operation("elementwise", {}, (Operand((2,)),)),
    )
    program = Program("float32", Operand((8, 4)), operations, gradient=True)
    specs = {
        "mesh": "2x2x2",
        "arguments": (("a", "b"), ("",), ("c", "")),
        "constraints": (("ab", ""), None),
        "between": (None, ("c", "a")),
        "results": (("a", "b"), ("",)),
    }
    return Case(program, Layout(**(specs | layout)))


def test_every_layer_traces():
    assert len(LAYERS) >= 50
    for number, (name, entry) in enumerate(LAYERS.items()):
        sizes = "even" if number % 2 else "sixes"
        program = draw_layer(entry, random.Random(name), sizes)
        [shape] = _draws.shapes_between(program)
        assert np.prod(shape) <= 50_000, name


def test_odd_sizes_of_layers_are_drawn_where_they_trace():
    [case] = _draws.draw(1, 0, 1, "ssm")
    assert _draws.traces(case.program)
    window = LAYERS["local_blocks"]
    sizes = {
        "b": 5,
        "t": 9,
        "h": 4,
        "k": 6,
    }
    odd = _layers.sized(window, sizes, gradient=False)
    assert not _draws.traces(odd)


def test_a_draw_repeats_and_travels_as_json():
    first = []
    again = []
    for number in range(1, 50, 2):
        first += _draws.draw(3, number, 2)
        again += _draws.draw(3, number, 2)
    assert first == again
    drawn = set()
    for case in first:
        drawn.update(op.name for op in case.program.operations)
    assert len(drawn) > len(OPERATIONS) / 3
    for case in first:
        text = json.dumps(_data.to_json(case))
        document = _data.to_json(_data.from_json(json.loads(text)))
        encoded = json.dumps(document)
        assert encoded == text


def test_layouts_of_arguments_and_results_divide():
    draws = random.Random(1)
    uneven = 0
    for number in range(1, 50, 2):
        [case] = _draws.draw(9, number, 1)
        layout = _draws.layout(draws, case.program, is_uneven=True)
        shapes = [operand.shape for operand in case.program.operands]
        for shape, spec in zip(shapes, layout.arguments, strict=False):
            cuts = _data.tiles(spec, layout.mesh)
            for n, cut in zip(shape, cuts, strict=True):
                assert n % cut == 0
        for shape, spec in zip(shapes, layout.constraints, strict=True):
            cuts = _data.tiles(spec or ("",) * len(shape), layout.mesh)
            uneven += any(n % cut for n, cut in zip(shape, cuts, strict=True))
    assert uneven


def test_right_numbers_are_right_and_planted_ones_are_found():
    case = doubled_case()
    ready = Prepared(case.program)
    assert outcome(case, ready) == {"outcome": "right", "error": 0.0}
    right = [np.array(result) for result in jax.jit(sharded(case))(*ready.arguments)]
    assert compare(right, ready.expected)["outcome"] == "right"
    twice = [right[0], 2 * right[1]]
    assert compare(twice, ready.expected)["outcome"] == "wrong"
    assert compare(twice, ready.expected)["error"] == 1.0
    assert not ready.is_close(twice)
    one_element = right[0].copy()
    one_element[3, 2] += 1e-4
    comparison = compare([one_element, right[1]], ready.expected)
    actual = comparison["outcome"]
    assert actual == "wrong"
    nan = [right[0] * np.nan, right[1]]
    assert compare(nan, ready.expected)["error"] == float("inf")
    rounded = [right[0] * np.float32(1 + 1e-7), right[1]]
    assert compare(rounded, ready.expected)["outcome"] == "right"


def test_a_result_that_rounding_decides_is_not_judged():
    # A tie in float32 that float64 breaks: `argmax` may be either.
    sort = Operation("sort", {"dim": 0, "kind": "argmax", "largest": 1}, ())
    program = Program("float32", Operand((4,), "normal"), (sort,), gradient=False)
    ready = Prepared(program)
    [expected] = ready.expected
    assert expected.is_stable
    unstable = dataclasses.replace(expected, is_stable=False)
    comparison = compare([ready.alone[0] + 1], [unstable])
    assert comparison == {"outcome": "unstable"}
    comparison = compare([ready.alone[0] + 1], [expected])
    actual = comparison["outcome"]
    assert actual == "wrong"


def test_the_minimiser_keeps_what_fails_and_nothing_else():
    case = doubled_case()
    tried: list[Case] = []

    def fails(candidate: Case) -> bool:
        """Fails where a stride of 2 meets a dimension over `b`."""
        tried.append(candidate)
        first = candidate.program.operations[0]
        cuts = [candidate.layout.arguments[0], candidate.layout.constraints[0]]
        is_cut = any(spec is not None and "b" in "".join(spec) for spec in cuts)
        return first.name == "slice" and 2 in first.parameters["strides"] and is_cut

    assert fails(case)
    smallest, count = _minimise.minimised(case, fails, seconds=60)
    assert count == len(tried) - 1
    assert [op.name for op in smallest.program.operations] == ["slice"]
    assert not smallest.program.gradient
    entries = itertools.chain.from_iterable(smallest.layout.arguments)
    assert [entry for entry in entries if entry] == ["b"]
    assert smallest.layout.results is None
    assert smallest.layout.constraints == (None,)
    assert np.prod(smallest.program.first.shape) < 32
    # The smallest case still runs.
    assert outcome(smallest, Prepared(smallest.program))["outcome"] == "right"


def test_layers_shrink_by_their_letters():
    program = draw_layer(LAYERS["residual_pair"], random.Random(0), "even")
    layout = _draws.layout(random.Random(0), program, False, ("4x2",))
    fails = lambda case: case.program.first.shape[0] % 4 == 0
    smallest, _ = _minimise.minimised(Case(program, layout), fails, seconds=60)
    sizes = smallest.program.operations[0].parameters["sizes"]
    assert sizes == {"b": 2, "d": 1}
    assert smallest.program.first.shape == (4, 1)


def test_failures_are_grouped_by_how_they_fail():
    encoded = json.dumps(_data.to_json(doubled_case()))
    data = json.loads(encoded)
    abort = "F11 3 spmd_partitioner.cc:1115] Check failed: offset(0) == low() (2 vs. 1)"
    results = [
        Result(data, {"outcome": "wrong", "error": 1.0}),
        Result(data, {"outcome": "abort", "message": abort}),
        Result(data, {"outcome": "abort", "message": abort.replace("F11 3", "F12 9")}),
        Result(data, {"outcome": "error", "message": "ValueError: dim 3 of %x.7"}),
    ]
    tally = Tally(seed=1, first=0)
    for result in results:
        tally.add(result)
    symptoms = {
        group.key[0]: len(group.results) for group in _causes.groups(tally.failures)
    }
    assert symptoms == {
        "wrong": 1,
        "abort at spmd_partitioner.cc:1115 Check failed: offset": 2,
        "error: ValueError: dim _ of _": 1,
    }
    expected = {"wrong": 1, "abort": 2, "error": 1}
    assert tally.counts["all"] == expected
    assert tally.counts["mesh 2x2x2"] == tally.counts["of slice"] == tally.counts["all"]
    document = _report.document(tally, Configuration(), [])
    assert "| all | 2 | 1 | 1 |" in _report.table(document | {"versions": {"jax": "1"}})


def test_a_hunt_goes_on_behind_its_records(tmp_path):
    data = _data.to_json(doubled_case())
    right = {"outcome": "right", "verdict": {"outcome": "proved"}}
    lines = [
        {"case": data | {"number": 4}, "outcome": right, "seconds": 0.5},
        {"case": data | {"number": 5}, "outcome": right, "seconds": 0.25},
    ]
    records = tmp_path / "records.jsonl"
    records.write_text("".join(json.dumps(line) + "\n" for line in lines))
    tally = Tally(seed=1, first=4)
    add_records(tally, records)
    assert tally.count == 2
    assert tally.last == 6
    assert tally.seconds == 0.75
    assert tally.verdicts["all"] == {"right: proved": 2}


def test_a_case_that_is_not_judged_is_not_run(monkeypatch):
    [case] = _draws.draw(3, 1, 1)
    said = {"outcome": "not judged"}
    monkeypatch.setattr(_verdicts, "verdict", lambda case, step: said)
    answers = []
    request = {"cases": [_data.to_json(case)], "verify": "judged"}
    _child._answered(request, answers.append)
    assert answers[1:] == [{"outcome": "not run", "verdict": said}]
    said["outcome"] = "proved"
    _child._answered(request, answers.append)
    assert answers[-1]["outcome"] in ("right", "wrong")
    assert answers[-1]["verdict"] is said


def test_groups_in_mesh_notation_are_written_out():
    text = explicit(TEXT, 8)
    assert "replica_groups={{0,4},{2,6},{1,5},{3,7}}" in text.replace(" ", "") or (
        re.search(r"replica_groups=\{(\{\d,\d\},?){4}\}", text)
    )
    assert "mesh[" not in text
    assert explicit(text, 8) == text


def test_mutations_change_what_they_say():
    text = explicit(TEXT, 8)
    mutated = _mutate.mutations(text, 8, 100, seed=1)
    assert {mutation.kind for mutation in mutated} == set(_mutate.KINDS)
    before = set(text.splitlines())
    for mutation in mutated:
        changed = [line for line in mutation.text.splitlines() if line not in before]
        assert 1 <= len(changed) <= 2
        assert any(mutation.line.split(" = ")[0] in line for line in changed)
    by_kind = {mutation.kind: mutation.text for mutation in mutated}
    assert "%total = f32[4,4]{1,0} copy(%moved)" in by_kind["dropped"]
    assert by_kind["doubled"].count(" all-reduce(") == 2
    assert by_kind["pairs"].count("source_target_pairs") == 1
    assert "{{0,1},{1,0},{2,3},{3,2}}" not in by_kind["pairs"]
    assert "{0, 0, 1, 1, 2, 2, 3, 3}" not in by_kind["offset"]


def test_mutated_texts_run_and_change_numbers():
    text = explicit(TEXT, 8)
    mesh = mesh_of("2x2x2")
    spec = jax.sharding.PartitionSpec("a", ("b", "c"))
    sharding = jax.sharding.NamedSharding(mesh, spec)
    array = np.random.default_rng(0).normal(size=(8, 16))
    values = array.astype(np.float32)
    arguments = [jax.device_put(values, sharding)]
    right = run(text, arguments, 8)
    assert difference(right, right) == 0
    rows = [np.sin(values[4 * (n // 4) :][:4, 4 * (n % 4) :][:, :4]) for n in range(8)]
    moved = [rows[1], rows[0], rows[3], rows[2], *[np.zeros((4, 4))] * 4]
    [[first, *_]] = right
    [group] = [group for group in _groups(text) if 0 in group]
    total = sum(moved[device] for device in group)
    np.testing.assert_allclose(first, total * moved[0], rtol=1e-5)
    chosen = {m.kind: m.text for m in _mutate.mutations(text, 8, 100, seed=1)}
    assert difference(run(chosen["dropped"], arguments, 8), right) > 1e-2


def _groups(text: str) -> list[list[int]]:
    listed = re.search(r"replica_groups=\{(.*?)\}, use", text)
    assert listed is not None
    parts = listed[1][1:-1].split("},{")
    return [[*map(int, row.split(","))] for row in parts]


def test_the_table_of_mutations_says_what_the_numbers_say():
    lines = [
        {"kind": "pairs", "changed": 0.5, "verdict": {"outcome": "refuted"}},
        {"kind": "pairs", "changed": 0.0, "verdict": {"outcome": "proved"}},
        {"kind": "order", "changed": 0.5, "verdict": {"outcome": "proved"}},
        {"kind": "order", "verdict": {"outcome": "not judged"}},
        {"kind": "order", "refused": "no"},
    ]
    expected = {
        "all": {
            "changed, refuted": 1,
            "unchanged, proved": 1,
            "changed, proved": 1,
            "not judged": 1,
        },
        "order": {
            "changed, proved": 1,
            "not judged": 1,
            "refused by XLA": 1,
        },
        "pairs": {"changed, refuted": 1, "unchanged, proved": 1},
    }
    assert _report.mutation_table(lines) == expected
    actual = [_report.is_mistake(line) for line in lines]
    assert actual == [
        False,
        False,
        True,
        False,
        False,
    ]

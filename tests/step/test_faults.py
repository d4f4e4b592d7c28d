"""The records of faults, and their programs with the installed JAX."""

import importlib
import re
import tomllib
from pathlib import Path

import jax
import pytest

import shardfx as sfx
from benchmarks.fault_records import versions_of, with_table
from shardfx._step import faults
from tests.step.repros import _run
from tests.step.repros.__main__ import names


ROOT = Path(__file__).parents[2]
SIZES = {
    "data": 2,
    "fsdp": 2,
    "tensor": 2,
    "one": 1,
}


def test_every_record_has_a_program_and_every_program_a_record():
    stems = sorted(Path(fault.repro).stem for fault in faults.fault_records())
    assert stems == names()
    for fault in faults.fault_records():
        assert (ROOT / fault.repro).is_file()
        assert fault.id.replace("-", "_") == Path(fault.repro).stem


@pytest.mark.parametrize("fault", faults.fault_records(), ids=lambda fault: fault.id)
def test_a_program_is_what_its_record_says(fault):
    program = importlib.import_module(f"tests.step.repros.{Path(fault.repro).stem}")
    cases = program.cases()
    runs = fault.runs["shardy"]
    mended = next(iter(cases.mended.values()))
    assert _run.apart(mended) < _run.CLOSE
    # Of a JAX that was not run when the records were written, nothing is known.
    if jax.__version__ in runs.wrong:
        wrong_cases = [
            case for case in cases.wrong.values() if _run.apart(case) > _run.CLOSE
        ]
        assert wrong_cases
        for case in wrong_cases:
            verdict = sfx.testing.verify(*_run.placed(case))
            assert verdict.outcome != "proved"
    if jax.__version__ in runs.right:
        case = next(iter(cases.wrong.values()))
        assert _run.apart(case) < _run.CLOSE


def test_the_page_has_the_records_as_its_table():
    page = (ROOT / "docs" / "wrong_numbers.md").read_text()
    assert with_table(page) == page
    for fault in faults.fault_records():
        assert f"**{fault.id}**" in page


def test_versions_are_told_once_where_both_partitioners_agree():
    runs = {
        "shardy": {"wrong": ["1", "2"], "right": []},
        "gspmd": {"wrong": ["1", "2"], "right": ["3"]},
    }
    assert versions_of(runs, "wrong") == "1, 2"
    assert versions_of(runs, "right") == "3 (gspmd)"


def test_versions_are_written_by_the_command_only():
    for file in (ROOT / "shardfx/_step/faults/records").glob("*.toml"):
        by_hand, mark, by_command = file.read_text().partition("# What follows is")
        assert mark
        assert "runs" not in by_hand
        matches = re.findall(r"^\[(\w+)", by_command, re.M)[:2]
        assert matches == ["runs", "runs"]
        shardy = tomllib.loads(file.read_text())["runs"]["shardy"]
        assert shardy["wrong"]


SQUARE = faults.ArrayPredicate("square", unused_axes=1)
KERNEL = faults.ArrayPredicate("kernel", unused_axes=1)
T = ("tensor",)
F = ("fsdp",)
N = ()


@pytest.mark.parametrize(
    "predicate, shape, cuts, is_matched",
    [
        (SQUARE, (64, 64), [T, F], True),
        (SQUARE, (4, 64, 64), [N, T, F], True),
        (SQUARE, (64, 32), [T, F], False),
        (SQUARE, (64, 64), [T, N], False),
        (SQUARE, (64, 64), [T, ("one",)], False),
        (SQUARE, (64, 64), [("data", "tensor"), F], False),
        (SQUARE, (64,), [T], False),
        (SQUARE, (), [], False),
        (KERNEL, (64, 32, 3, 3), [T, F, N, N], True),
        (KERNEL, (3, 3, 64, 32), [N, N, T, F], True),
        (KERNEL, (1, 1, 64, 32), [N, N, T, F], False),
        (KERNEL, (4, 8, 64, 32), [N, N, T, F], False),
        (KERNEL, (3, 64, 32), [N, T, F], False),
        (KERNEL, (64, 32, 3, 3), [T, N, N, N], False),
    ],
)
def test_a_predicate_of_arrays_reads_shapes_and_specs(
    predicate,
    shape,
    cuts,
    is_matched,
):
    cut = faults.matches_array(predicate, shape, cuts, SIZES)
    expected = None
    if is_matched:
        expected = faults.ArrayCut(frozenset(T), frozenset(F))
    assert cut == expected


def test_the_language_of_records_is_closed():
    record = {
        "id": "a",
        "pattern": "",
        "operations": ["add"],
        "effect": "",
        "met_by": "",
        "mended_by": "",
        "repro": "",
    }
    assert (
        faults.records.fault_of(record).versions_text
        == f"not run with JAX {jax.__version__}"
    )
    for field in ({"arrays": {"kind": "square", "shaped": 1}}, {"remark": ""}):
        with pytest.raises(TypeError):
            faults.records.fault_of(record | field)

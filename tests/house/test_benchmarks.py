"""The runner, the tables and the comparison, on a suite that takes no time; and the
committed results.
"""

import gc
import json
from collections.abc import Callable
from types import SimpleNamespace

import jax
import pytest

from benchmarks import __main__ as command, _report
from benchmarks._case import Apart, Case, Finding, Limit, Race, Rival, Skip, memcpy
from benchmarks._progress import Progress
from benchmarks._runner import Options, Record, Unfinished, run_suite
from benchmarks.unseen.foreseen import (
    RESULTS,
    Pair,
    conformal_range,
    held_out,
    pairs_of,
)
from shardfx.cost import _foreseen


OPTIONS = Options(
    quick=True,
    repeats=2,
    devices=[],
    flags=SimpleNamespace(),  # pyright: ignore[reportArgumentType]
)


@pytest.fixture(autouse=True)
def _tests_stay_frozen(monkeypatch):
    """A measurement collects and thaws all garbage; `conftest.py` froze the modules and
    the tests, which are many.
    """
    for name in ("collect", "freeze", "unfreeze"):
        monkeypatch.setattr(gc, name, lambda: None)


def right(inputs, result):
    if result != inputs:
        raise AssertionError("the copy differs")


def race(
    ours: Callable[[bytes], bytes] = bytes, theirs: Callable[[bytes], bytes] = bytes
) -> Race:
    rivals = (
        Rival("shardfx", lambda: ours, right),
        Rival("theirs", lambda: theirs, right),
        Rival("nobody's", lambda: bytes, right, needs=("a_library_that_is_not_there",)),
    )
    return Race(
        rivals, lambda: b"12345678", byte_count=8, floor=memcpy(8), facts={"size": 8}
    )


def run(*entries):
    return run_suite(entries, OPTIONS, Progress("test", len(entries)))


def number(record: Record, key: str) -> float:
    value = record.values[key]
    assert isinstance(value, float)
    return value


def test_values_of_a_race(capsys):
    limits = (
        Limit("size", at_most=8),
        Limit("size", at_least=9),
        Limit("speedup.nobody's", at_least=1),
    )
    [record] = run(Case("copy", race, limits))
    seconds = {
        name: number(record, f"seconds.{name}")
        for name in ("shardfx", "theirs", "memcpy")
    }
    for name in ("shardfx", "theirs"):
        assert (
            number(record, f"floor_ratio.{name}") == seconds[name] / seconds["memcpy"]
        )
        assert number(record, f"gigabytes_per_second.{name}") == 8 / seconds[name] / 1e9
    assert number(record, "speedup.theirs") == seconds["theirs"] / seconds["shardfx"]
    assert number(record, "speedup.best") == number(record, "speedup.theirs")
    assert record.skipped == {"nobody's": "a_library_that_is_not_there not installed"}
    actual = [limit["holds"] for limit in record.limits]
    assert actual == [True, False, None]
    assert "[1/1] test: copy" in capsys.readouterr().err


def test_a_wrong_rival_is_dropped_and_a_wrong_own_result_fails():
    [dropped, failed] = run(
        Case("theirs is wrong", lambda: race(theirs=lambda b: b + b"!")),
        Case("ours is wrong", lambda: race(ours=lambda b: b + b"!")),
    )
    assert dropped.skipped["theirs"] == "AssertionError: the copy differs"
    assert dropped.failed is None
    assert "seconds.shardfx" in dropped.values
    assert failed.failed == "AssertionError: the copy differs"


def test_findings_skips_and_failures_have_their_lines():
    def lost():
        raise OSError("no disk")

    records = run(
        Finding("count", lambda: {"rows": 1234}, (Limit("rows", at_most=10),)),
        Finding("lost", lost),
        Skip("tpu", "no TPU compiler"),
    )
    text = _report.table(records)
    assert "| count   | rows  | 1,234    |" in text
    assert "- count: rows <= 10: **does not hold** (1,234)" in text
    assert "- tpu: tpu (no TPU compiler)" in text
    assert "- lost: OSError: no disk" in text


def test_cases_run_apart_on_as_many_devices_as_they_need():
    there = "tests.house.apart_cases:devices_there"
    [record] = run(Apart("elsewhere", there, cpu_devices=11))
    assert record.name == "devices"
    assert record.values == {"count": 11, "repeats": 2}
    [lost] = run(Apart("lost", "tests.house.apart_cases:nothing", cpu_devices=2))
    assert lost.failed is not None
    assert "nothing" in lost.failed


def test_a_suite_that_was_cut_off_goes_on(tmp_path):
    file = tmp_path / "test.json"
    runs = []

    def entry(name, error=None):
        def measure():
            runs.append(name)
            if error is not None:
                raise error
            return {"runs": len(runs)}

        return Finding(name, measure)

    def resumed(*entries):
        progress = Progress("test", len(entries))
        return run_suite(entries, OPTIONS, progress, Unfinished(file))

    with pytest.raises(KeyboardInterrupt):
        resumed(
            entry("a"), entry("b", OSError("disk")), entry("c", KeyboardInterrupt())
        )
    first, second, third = resumed(entry("a"), entry("b"), entry("c"))
    assert runs == ["a", "b", "c", "b", "c"]
    assert first.values == {"runs": 1}
    assert (second.values, second.failed) == ({"runs": 4}, None)
    assert third.values == {"runs": 5}


def document(records):
    machine = {
        "processor": "p",
        "cores": 2,
        "memory_gib": 4,
        "python": "3.11",
    }
    machine |= {"platform": "cpu", "device_kind": "cpu", "device_count": 8}
    return json.loads(
        _report.to_json({"test": records}, machine, {"jax": "0.10.2"}, quick=True)
    )


def test_compare_shows_ratios_and_what_only_one_file_has():
    output = run(
        Finding("a", lambda: {"bytes": 10}), Finding("b", lambda: {"bytes": 1})
    )
    first = document(output)
    output = run(Finding("a", lambda: {"bytes": 15}))
    second = document(output)
    second["versions"]["jax"] = "0.11.0"
    text = _report.compare(first, second)
    assert "| test  | a    | bytes | 10    | 15     | 1.500 |" in text
    assert "jax: 0.10.2 -> 0.11.0" in text
    assert "only in the first file: test: b" in text


def test_the_pages_and_plots_are_what_the_committed_results_give():
    arrays = command.pages()
    assert {file.name for file in arrays} >= {"benchmarks.md", "benchmarks_speed.svg"}
    for file, text in arrays.items():
        assert file.read_text() == text, f"{file.name}: run python -m benchmarks docs"


@pytest.mark.parametrize("name", list(command.SUITES))
def test_every_suite_lists_cases_with_names_of_their_own(name):
    parser, suites = command._parser()
    for flags in ([], ["--quick"]):
        options = Options(
            quick=bool(flags),
            repeats=1,
            devices=jax.devices(),
            flags=suites[name].parse_args(flags),
        )
        entries = command.importlib.import_module(
            f"benchmarks.{command.SUITES[name]}"
        ).cases(options)
        names = [entry.name for entry in entries]
        assert names
        assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    "number, told", [("wire", _foreseen.WIRE), ("temporary", _foreseen.TEMPORARIES)]
)
def test_told_ranges_hold_steps_that_have_no_part_in_them(number, told):
    cases = json.loads((RESULTS / "foreseen-v5e.json").read_text())["cases"]
    measured = held_out(pairs_of(cases, number), told.on_chip_bytes)
    assert told == measured.told and told.steps >= 60
    assert measured.steps > told.steps
    assert measured.held >= 0.95 * measured.steps


def test_a_range_leaves_out_as_few_steps_as_it_may():
    pairs = [Pair(bytes=size, foreseen=100) for size in range(50, 150)]
    told = conformal_range(pairs, 0)
    assert (told.least, told.most, told.steps) == (0.51, 1.48, 100)
    # The 38 bytes that may be on chip are no part of the ratio.
    assert conformal_range(pairs, 38).least == 0.89

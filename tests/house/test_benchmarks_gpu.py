"""The accelerator's suite as a trial run on the CPU: it runs through, and its file is one of the page's."""

import json
from types import SimpleNamespace

import jax
import pytest

from benchmarks import _report, gpu
from benchmarks._runner import Options


@pytest.fixture(scope="module")
def document():
    options = Options(True, 1, jax.devices()[:1], SimpleNamespace())  # pyright: ignore[reportArgumentType]
    text, failed = gpu.results(options)
    assert not failed
    return json.loads(text)


def test_the_file_is_written_as_those_of_the_common_runner(document):
    assert document["format"] == _report.FORMAT and document["quick"] is True
    assert list(document["suites"]) == ["accelerator"]
    assert document["machine"]["device_count"] == 1 and "jax" in document["versions"]
    for record in document["suites"]["accelerator"]:
        assert record["kind"] == "skip" or record["rivals"][0].startswith("shardfx")
        assert record["kind"] == "skip" or record["values"][f"seconds.{record['rivals'][0]}"] > 0


def test_the_page_shows_it_beside_the_others(document):
    page = _report.page({"cpu": {**document, "suites": {}}, "gpu-h200": {**document, "quick": False}})
    assert "## gpu-h200: accelerator" in page and "results/gpu-h200.json" in page
    records = [_report.Record(**record) for record in document["suites"]["accelerator"]]
    page = _report.table(records)
    for name in ("device to pinned_host", "pinned_host to device", "from a file", "a step of a wide network"):
        assert name in page
    assert "one copy from the host" in page


def test_an_accelerator_has_limits_against_a_copy_in_the_same_run():
    counting = SimpleNamespace(platform="gpu", memory_stats=lambda: {"bytes_in_use": 0})
    entries = gpu.cases(Options(False, 9, [counting], SimpleNamespace()))  # pyright: ignore[reportArgumentType]
    limits = {entry.name: [str(limit) for limit in getattr(entry, "limits", ())] for entry in entries}
    assert limits["a tree of four times the memory limit, out and back"] == ["beyond_over_limit <= 1.1"]
    assert limits["4096 MiB of Adam's state, device to pinned_host"] == ["floor_ratio.shardfx <= 1.11111"]
    assert limits["4096 MiB of Adam's state, pinned_host to device"] == ["floor_ratio.shardfx <= 1.11111"]

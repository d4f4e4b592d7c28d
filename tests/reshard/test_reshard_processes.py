"""Moves between processes: four of them, over JAX's own runtime and gloo's collectives."""

from pathlib import Path

import _processes
import moving_worker
import pytest


pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """What each of four processes found."""
    outcomes = _processes.run(
        "moves",
        4,
        2,
        tmp_path_factory.mktemp("job"),
        worker=Path(moving_worker.__file__),
    )
    for outcome in outcomes:
        assert outcome.returncode == 0, outcome.log[-4000:]
    return [outcome.result for outcome in outcomes]


@pytest.fixture
def mapping(job):
    return [result["maps"] for result in job]


def test_every_process_gets_its_shards(job):
    for result in job:
        names = {name for name in moving_worker.CASES if not result[name]["right"]}
        assert names == set()
        assert set(result["owned by one"].values()) == {True}
        assert result["many"] is True
    assert job[0]["way"] == "programs"


def test_every_process_plans_alike(job):
    for name in moving_worker.CASES:
        texts = {
            str(sorted(result[name]["how"])) + str(result[name]["bytes"])
            for result in job
        }
        count = len(texts)
        assert count == 1
    assert job[0]["same devices"]["how"] == {"steps"}
    assert job[0]["disjoint, same layout"]["how"] == {"tiles"}


def test_between_device_sets_only_what_is_needed_travels(job):
    for name in (
        "to a subset",
        "back from a subset",
        "disjoint, other layout",
        "to replicas",
        "to an odd subset",
    ):
        sent, bound = job[0][name]["bytes"]
        assert sent == bound > 0


def test_donated_and_limited_moves(job):
    for result in job:
        for name in ("donated", "donated replicas"):
            assert result[name]["right"]
            assert result[name]["deleted"]
        for name in ("limited", "steps limited"):
            assert result[name]["right"]
            # Every process counts alike, so that all of them raise, or none.
            assert result[name]["error"] == job[0][name]["error"]
            assert (
                "`memory_limit_bytes=10` is too little for it and "
                in result[name]["error"]
            )


def test_errors_come_on_every_process_before_anything_hangs(job):
    for result in job:
        assert (
            "leaf `odd`: dim 0 of shape (8, 8) does not divide into the 3 shards"
            in result["error"]
        )
        assert "elements are on lost devices only" in result["lost"]


def test_every_process_gets_what_a_map_makes_for_it(mapping, job):
    for name in (*moving_worker.MAPPED, "limited"):
        actual = [result[name]["wrong"] for result in mapping]
        assert actual == [[]] * 4, name
    assert [result["matrices"] for result in job] == ["right"] * 4


def test_processes_give_up_and_refuse_alike(mapping):
    actual = [result["disjoint"]["deleted"] for result in mapping]
    assert actual == [True] * 4
    assert "is too little for it and 4 more. Nothing was moved" in mapping[0]["error"]
    for result in mapping:
        assert result["error"] == mapping[0]["error"]


def test_processes_with_different_maps_raise_before_moving(mapping):
    for number, result in enumerate(mapping):
        other = 0 if number == 1 else 1
        assert (
            f"process {number} and process {other} move by different maps"
            in result["other map"]
        )

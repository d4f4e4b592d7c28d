"""Four processes save one checkpoint, and each reads back its own shards of it."""

from pathlib import Path

import _processes
import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import shardfx
from shardfx import PathRules, checkpoint


WORKER = Path(__file__).parents[1].joinpath("checkpoint_worker.py")


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    outcomes = _processes.run("saves_and_loads", 4, 2, folder, worker=WORKER)
    for outcome in outcomes:
        assert outcome.returncode == 0, outcome.log
    return folder, [outcome.result for outcome in outcomes]


def expected():
    random = np.random.default_rng(0)
    shapes = {"rows": (64, 32), "columns": (16, 64), "both": (24, 8, 4), "whole": (32,), "wide": (4, 2**18)}
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def test_every_process_reads_its_shards_and_they_are_right(job):
    _, results = job
    for result in results:
        assert all(value for name, value in result.items() if name.startswith("right."))
        for name, (read, planned, needed) in ((n, v) for n, v in result.items() if n.startswith("read.")):
            assert read == planned >= needed, name
            # Of 4 MiB each reads about its quarter: some columns are short, and what is between is read along.
            assert read < 1.03 * needed


def test_a_quarter_of_the_shards_is_a_quarter_of_the_bytes(job):
    _, results = job
    total = sum(array.nbytes for array in expected().values())
    for result in results:
        assert result["read.rows.rows"][2] == pytest.approx(total / 4, rel=0.01)


def test_replica_zero_writes_once(job):
    _, results = job
    total = sum(array.nbytes for array in expected().values())
    for name in ("rows", "others"):
        assert sum(result[f"written.{name}"] for result in results) == total


def test_one_process_reads_what_four_wrote(job):
    folder, _ = job
    mesh = Mesh(np.array(jax.devices()).reshape(8), ("x",))
    made = shardfx.plan(expected(), mesh, paths=PathRules.parse("rows->x, .*->replicate"))
    for name in ("rows", "others"):
        loaded = checkpoint.load(folder / name, made)
        assert all(np.array_equal(loaded[key], array) for key, array in expected().items())
        assert checkpoint.saved_plan(folder / name)["rows"].spec != made["rows"].spec


def test_where_one_process_fails_all_are_told_and_nothing_is_left(job):
    folder, results = job
    for number, result in enumerate(results):
        failed, elsewhere = result["errors"]
        if number == 2:
            assert "No space left on device" in failed
        else:
            assert "failed on process 2, whose error says why; nothing was changed there" in failed
        assert "the processes save to different paths" in elsewhere
    names = {path.name for path in folder.iterdir() if path.is_dir()}
    assert names == {"rows", "others"}

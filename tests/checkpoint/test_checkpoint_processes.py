"""Four processes save one checkpoint, and each reads back its own shards of it."""

import pickle
from pathlib import Path

import _processes
import checkpoint_worker
import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from safetensors.numpy import load_file

import shardfx
from shardfx import PathRules, checkpoint


pytestmark = pytest.mark.processes
WORKER = Path(__file__).parents[1].joinpath("checkpoint_worker.py")


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """The folder of a job that does all, and how its processes ended."""
    folder = tmp_path_factory.mktemp("job")
    return folder, _processes.run("one_after_the_other", 4, 2, folder, worker=WORKER)


def results_of(ended, task, processes=(0, 1, 2, 3)):
    folder, outcomes = ended
    stored = [folder / f"{task}.{number}.pickle" for number in processes]
    missing = [
        outcomes[number].log
        for number, path in zip(processes, stored, strict=True)
        if not path.exists()
    ]
    assert not missing, missing[0]
    return folder / task, [pickle.loads(path.read_bytes()) for path in stored]


@pytest.fixture(scope="module")
def job(ended):
    return results_of(ended, "saves_and_loads")


@pytest.fixture(scope="module")
def quarrel(ended):
    return results_of(ended, "disagreements")


def test_every_process_reads_its_shards_and_they_are_right(job):
    total = sum(array.nbytes for array in checkpoint_worker.tree().values())
    for result in job[1]:
        for name, value in result.items():
            if name.startswith("right."):
                assert value
        for name, (read, planned, needed) in (
            (n, v) for n, v in result.items() if n.startswith("read.")
        ):
            assert read == planned >= needed, name
            # Of 4 MiB each reads about its quarter: some columns are short, and what is
            # between is read along.
            assert read < 1.03 * needed
        expected = pytest.approx(total / 4, rel=0.01)
        assert result["read.rows.rows"][2] == expected
    for name in ("rows", "others"):
        # The first replicas are written, and no other.
        assert sum(result[f"written.{name}"] for result in job[1]) == total


def test_processes_write_another_layout_and_read_it_back(job):
    folder, results = job
    arrays = checkpoint_worker.EXPORT.apply(checkpoint_worker.tree())
    for name in ("rows", "others"):
        mapped = load_file(folder / f"{name}-mapped" / "model.safetensors")
        assert mapped.keys() == arrays.keys()
        for path, array in arrays.items():
            assert (mapped[path] == array).all()
        for result in results:
            assert result[f"right.{name}.mapped"]
    for result in results:
        assert "the source has no `row`" in result["map error"]
    assert not (folder / "no").exists()


def test_one_process_reads_what_four_wrote(job):
    folder, _ = job
    devices = np.array(jax.devices()).reshape(8)
    mesh = Mesh(devices, ("x",))
    plan = shardfx.plan(
        checkpoint_worker.tree(), mesh, paths=PathRules.parse("rows->x, .*->replicate")
    )
    for name in ("rows", "others"):
        loaded = checkpoint.load(folder / name, plan)
        for key, array in checkpoint_worker.tree().items():
            assert np.array_equal(loaded[key], array)
        spec = checkpoint.saved_plan(folder / name)["rows"].spec
        assert spec != plan["rows"].spec


def test_a_manager_of_processes_keeps_the_last_steps(job):
    folder, results = job
    names = {path.name for path in folder.iterdir() if path.is_dir()}
    assert names == {"rows", "others", "rows-mapped", "others-mapped", "numpy", "run"}
    actual = [(result["steps"], result["numpy"]) for result in results]
    expected = [(((2, 3), 3), "no error")] * 4
    assert actual == expected
    files = (folder / "run").iterdir()
    actual = sorted(path.name for path in files)
    assert actual == [
        "step-2",
        "step-3",
    ]
    specs = [
        checkpoint.saved_plan(folder / name)["rows"].spec
        for name in ("run/step-3", "rows")
    ]
    assert specs[0] == specs[1]
    saved = load_file(folder / "numpy" / "model.safetensors")
    for path, array in checkpoint_worker.tree().items():
        assert (saved[path] == array).all()


# What all say; where one process fails, it says the part after "with" alone.
TOLD = {
    "full disk": (
        "failed on process 2, with OSError: [Errno 28] No space left on device, while"
        " saving; what was at the path before is unchanged."
    ),
    "elsewhere": (
        "elsewhere-1' on processes 1, 3; give all of them the same. Nothing was"
        " written."
    ),
    "overwrite": (
        "save with different `overwrite`: False on processes 0, 1, 3, True on process"
        " 2; give all of them"
    ),
    "file_bytes": (
        "save with different `file_bytes`: 1000 on process 0, 5000000000 on processes"
        " 1, 2, 3; give all"
    ),
    "other plan": (
        " on process 2; `hosts.assert_same_plan(plan)` says where they differ. Nothing"
        " was written."
    ),
    "map": (
        " on process 1; `hosts.assert_same_plan(map)` says where they differ. Nothing"
        " was written."
    ),
    "dtype": "save with different `leaves`: leaf `rows` is float32[64, 32] in",
    "placed otherwise": (
        "leaf `both` is float32[24, 8, 4] in P('tensor', 'data') on mesh {'data': 4,"
        " 'tensor': 2} with"
    ),
    "leaf": "failed on process 1, with PlanMismatchError: leaf `whole` is str 'text'",
    "leaf of the first": (
        "failed on process 0, with PlanMismatchError: leaf `whole` is str 'text'"
    ),
    "tree": (
        "failed on process 3, with PlanMismatchError: this tree is not the one that was"
        " planned"
    ),
    "plan": (
        "failed on process 3, with LeafTypeError: `plan` must be of type ShardPlan, not"
        " str; give what"
    ),
    "path": (
        "failed on process 2, with LeafTypeError: `path` must be a text or a"
        " `pathlib.Path`, not int; write"
    ),
    "ctrl-c": "failed on process 3, with KeyboardInterrupt",
    "ctrl-c in the first": "failed on process 0, with KeyboardInterrupt",
    "ctrl-c before the first has come": "failed on process 2, with KeyboardInterrupt",
    "exists": "failed on process 0, with CheckpointError: ",
}


@pytest.mark.parametrize("name", TOLD)
def test_what_one_process_finds_wrong_all_say_soon(quarrel, name):
    where, _, why = TOLD[name].partition(", with ")
    for number, (text, seconds) in enumerate(result[name] for result in quarrel[1]):
        assert seconds < 30
        if where == f"failed on process {number}":
            assert text.startswith(why.partition("; nothing")[0])
        else:
            assert text.startswith("CheckpointError: ")
            assert TOLD[name] in text


def test_after_all_that_saves_are_right_and_nothing_lies_about(quarrel):
    folder, results = quarrel
    for result in results:
        assert (
            result["good"][0] == result["again"][0] == result["after"][0] == "no error"
        )
        assert result["right"]
        assert result["ours"]
        assert result["pair"]
        assert not result["left behind"]
    stems = {path.stem for path in folder.glob("*.safetensors")}
    assert stems == {
        "one",
        "ours",
        "pair",
    }
    assert not list(folder.glob(".*"))
    assert not folder.joinpath("never").exists()


def test_a_process_that_does_not_come_is_named(quarrel):
    for number, result in enumerate(quarrel[1]):
        text, seconds = result["absent"]
        assert number == 1 or "process 1 did not come within 1.5 s to save " in text
        assert seconds < 10


def test_only_those_who_hold_arrays_save_them(quarrel):
    for number, result in enumerate(quarrel[1]):
        error_of_one = result["one process's"][0]
        error_of_two = result["two processes'"][0]
        assert (error_of_one == "no error") == (number == 0)
        assert (error_of_two == "no error") == (number in (1, 2))
        if number != 0:
            assert "they lie on process 0: call `save` there alone" in error_of_one
        if number not in (1, 2):
            assert "they lie on processes 1, 2: call `save` there alone" in error_of_two


def test_a_killed_process_is_missed(ended):
    assert ended[1][2].returncode == -9
    folder, results = results_of(ended, "killed", (0, 1, 3))
    for number, (text, seconds) in zip((0, 1, 3), results, strict=True):
        assert "process 2 gave no sign of life for 4 s while saving to " in text
        # The first one's own disk hangs for 6 seconds and more, and is waited for after
        # the others were told.
        assert seconds < 12 or number == 0
    assert not (folder / "never").exists()

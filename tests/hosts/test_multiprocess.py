"""Four processes on JAX's own runtime get the results that one process gets."""

import _processes
import jax
import multiprocess_worker as worker
import numpy as np
import pytest

from shardfx import hosts


pytestmark = pytest.mark.processes
# JAX notices a process that is gone by its missing heartbeats, for which the worker
# allows ten seconds, or when the others end and wait for it.
NOTICED_SECONDS = 45.0


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """A job of four processes that do all, until the last one dies."""
    return _processes.run("everything", 4, 2, tmp_path_factory.mktemp("job"))


@pytest.fixture(scope="module")
def job(ended):
    for outcome in ended:
        assert outcome.result is not None, outcome.log[-4000:]
    return [outcome.result for outcome in ended]


@pytest.fixture(scope="module")
def alone():
    with jax.numpy_dtype_promotion("standard"):  # as optax needs it
        return worker.train(worker.SPEC.build(jax.devices()))


def assert_trees_equal(tree, other, **tolerance):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, **tolerance), tree, other
    )


def test_plans_and_training_give_what_one_process_gives(job, alone):
    model, momentum, losses, *digests = alone
    for result in job:
        assert result["trained"][3:] == tuple(digests)
        assert_trees_equal(result["trained"][0], model, rtol=1e-4, atol=1e-5)
        assert_trees_equal(result["trained"][1], momentum, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(result["trained"][2], losses, rtol=1e-5)
        trained = job[0]["trained"][:2]
        assert_trees_equal(result["trained"][:2], trained)


def test_processes_are_nodes_of_a_hybrid_mesh(job):
    count = len(job)
    for index, result in enumerate(job):
        expected = (
            {"data": 4, "tensor": 2},
            {"data": count, "tensor": 1},
            tuple((i, 0) for i in range(count)),
        )
        assert result["grid"] == expected
        assert result["layout"] == hosts.DataLayout(
            batch_size=24,
            shard_id=index,
            num_shards=count,
            is_first_host_in_replica_set=True,
        )
        expected = (
            "hybrid: mesh_utils",
            [[row * count // 4] * 2 for row in range(4)],
        )
        assert result["nodes"] == expected


def test_batches_come_back_whole_and_short_ones_raise(
    job,
):
    rows = 24 // len(job)
    for index, result in enumerate(job):
        assert_trees_equal(result["batch"], worker.batches()[0])
        assert_trees_equal(result["gathered"], worker.params())
        np.testing.assert_array_equal(*result["scattered"])
        doubled, spec = result["constrained"]
        np.testing.assert_array_equal(doubled, 2 * worker.batches()[0]["x"])
        assert "data" in spec
        message = (
            f"leaf `x` has shape (1, 16) here, but process {index} owns ({rows}, 16) of"
            " (24, 16)"
        )
        assert message in result["short"]
        assert "pass `pad=0`" in result["short"]


def test_a_batch_that_one_process_lacks_fails_on_all_that_ask(job):
    last = len(job) - 1
    rows = 24 // len(job)
    short = (
        f"PlanMismatchError: leaf `x` has shape ({rows - 1}, 16) here, but process"
        f" {last} owns ({rows}, 16) of (24, 16)"
    )
    for index, result in enumerate(job):
        shared = result["shared"]
        assert_trees_equal(shared["joined"], worker.batches()[0])
        if index == last:
            assert shared["few"].startswith(short)
        else:
            assert shared["few"].startswith(
                f"PlanMismatchError: process {last} failed to make the batch, so no"
                f" process has it. Process {last}: {short}"
            )
        # The late process gives up as the others did.
        assert (
            f"process {last} did not call `global_batch` with this plan and"
            " `wait_seconds` within 1 s; call it on every process"
        ) in shared["late"]
        elsewhere = "no error"
        if index != 0:
            elsewhere = f"process {index} owns no device of the plan's mesh; call"
        assert elsewhere in shared["elsewhere"]
        # A failed call leaves the next ones as they are.
        assert shared["rows"] == 23
        assert_trees_equal(shared["again"], worker.batches()[0])


def test_processes_with_other_plans_are_told_where_they_differ(job):
    last = len(job) - 1
    for index, result in enumerate(job):
        other = last if index == 0 else 0
        if index in (0, last):
            messages = result["agreement"]
        else:
            messages = job[0]["agreement"]
        ours, theirs = ("From('w').times(2.0)", "From('w')")[
            :: 1 if index == last else -1
        ]
        starts = {
            "spec": "plans, leaf `",
            "shape": "plans, leaf `more` is only in ",
            "devices": "plans, the devices of the mesh are [",
            "map": f"maps, `out/w <- {ours}` in one, `out/w <- {theirs}`",
        }
        for what, start in starts.items() if index in (0, last) else ():
            kind, _, first = start.partition(", ")
            assert (
                f"Error: the {kind} of process {index} and process {other} differ:"
                f" {first}" in messages[what]
            )
            assert "one has a plan, the other a map" in messages["map and plan"]
        # No process goes on to a collective that others will never join.
        expected = {
            "spec",
            "shape",
            "devices",
            "map",
            "map and plan",
        }
        assert set(result["agreement"]) == expected


def test_a_process_that_does_not_agree_is_named(job):
    *others, last = [result["alone"] for result in job]
    for text, seconds in others:
        assert (
            "process 3 did not call `assert_same_plan` within 1 s; call it once on"
            " every process" in text
        )
        assert seconds < 10
    assert "`assert_same_plan`" in last[0], (
        "it hears of it too, in one way or the other"
    )


def test_a_process_that_dies_makes_the_others_fail(ended, tmp_path):
    # The last of four, and of two the first, which holds the coordinator.
    output = _processes.run("dies", 2, 1, tmp_path, deadline_seconds=90)
    for dead, outcomes in (
        (3, ended),
        (0, output),
    ):
        gone = outcomes[dead]
        assert gone.returncode == 7, gone.log[-2000:]
        for outcome in outcomes[:dead] + outcomes[dead + 1 :]:
            assert outcome.returncode not in (
                None,
                0,
            ), "the survivor must end by itself, and not well"
            assert outcome.seconds - gone.seconds < NOTICED_SECONDS

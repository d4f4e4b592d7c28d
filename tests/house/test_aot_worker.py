"""The process that asks libtpu: what it leaves behind, and how often it is asked.
`pip install -e ".[aot,test]"`, no TPU needed.
"""

import importlib.util
import os
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec as P

from shardfx import _step, chips
from shardfx._step import libtpu
from shardfx.cost import estimate, fit
from shardfx.cost._libtpu import target_of
from shardfx.errors import ProgramError


HAS_LIBTPU = importlib.util.find_spec("libtpu") is not None
pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(
        not HAS_LIBTPU, reason="libtpu is not installed: pip install 'shardfx[aot]'"
    ),
]


def small_step():
    """A gradient on four chips, and its arguments."""
    mesh = AbstractMesh((4,), ("data",))
    weights = jax.ShapeDtypeStruct(
        (128, 128), jnp.float32, sharding=NamedSharding(mesh, P())
    )
    batch = jax.ShapeDtypeStruct(
        (64, 128), jnp.float32, sharding=NamedSharding(mesh, P("data"))
    )

    def loss(weights, batch):
        return jnp.mean(jnp.tanh(batch @ weights) ** 2)

    return jax.jit(jax.grad(loss)), (weights, batch)


def test_libtpu_leaves_nothing_behind():
    had_lock = Path("/tmp/libtpu_lockfile").exists()
    chip = chips.find("v5e")
    step = _step.step_of(*small_step())
    target = target_of(chip, step.mesh)
    assert target is not None
    texts = step.tpu_dumps(target.slices, target.order).texts
    assert "all-reduce" in step.tpu_partitioned(target.slices, target.order)

    program = step._tpu_program(b"no module", None, None)
    with pytest.raises(ProgramError, match="(?s)cannot compile.*is unknown"):
        libtpu.tpu_texts(program, target.slices, target.order)
    program = step._tpu_program(_step.bytecode(step.module("tpu")), None, None)
    with pytest.raises(ProgramError, match="no answer in 0 s"):
        libtpu.tpu_texts(program, target.slices, target.order, seconds=0.001)

    worker = libtpu._worker(libtpu.libtpu_path(), os.getpid())
    arguments: Any = worker._process.args
    folder = arguments[-2]
    assert os.listdir(folder) == ["stderr"]
    # The end of a job is for its own process; the worker ends with its input.
    worker._process.terminate()
    again = libtpu.tpu_texts(program, target.slices, target.order)
    assert again.report == texts.report
    assert worker.is_alive
    worker._process.kill()
    worker._process.wait()
    again = libtpu.tpu_texts(program, target.slices, target.order)
    assert again.report == texts.report
    assert not os.path.exists(folder)
    assert Path("/tmp/libtpu_lockfile").exists() == had_lock


def test_both_cores_of_a_chip_are_one_device():
    step, args = small_step()
    target = target_of(chips.find("v4"), _step.step_of(step, args).mesh)
    assert target is not None
    assert (target.slices.name, len(target.order)) == ("v4:2x2x1", 4)
    assert estimate(step, *args, compiler="tpu:v4").basis == "compiled"
    answer = fit(step, *args, chip="v4")
    assert answer.basis == "compiled"
    # The weights, the shard of the batch, and the gradient.
    assert answer.peak_bytes >= 4 * (128 * 128 + 16 * 128 + 128 * 128)


def test_libtpu_says_what_donation_saves():
    gradient, (weights, batch) = small_step()

    def step(weights, batch):
        return weights - gradient(weights, batch)

    whole = weights.sharding
    jitted = jax.jit(step, out_shardings=whole)
    changes = fit(jitted, weights, batch, chip="v5e").changes
    [donation] = [change for change in changes if change.what.startswith("donate")]
    donating = jax.jit(step, out_shardings=whole, donate_argnums=0)
    changed = fit(donating, weights, batch, chip="v5e")
    assert donation.peak_bytes == changed.peak_bytes
    # More than the copy of the weights that live ranges foresee.
    assert donation.saves_bytes > 4 * 128 * 128


def test_fit_does_not_ask_again_what_estimate_asked(monkeypatch):
    questions = []
    ask = libtpu.Worker.ask

    def counted_ask(worker, module, request):
        questions.append(request.get("last", ""))
        return ask(worker, module, request)

    monkeypatch.setattr(libtpu.Worker, "ask", counted_ask)
    libtpu.recent_tpu_dumps.cache_clear()
    step, args = small_step()
    estimate(step, *args, compiler="tpu:v5e")
    answered = fit(step, *args, chip="v5e")
    estimate(step, *args, compiler="tpu:v5e")
    dumps = [name.rpartition(".after_optimizations_")[2] for name in questions]
    assert answered.basis == "compiled"
    # The first of them stops at the scheduled module, and the second one goes on.
    scheduled = "before_buffer_assignment.txt"
    assert [name for name in dumps if name.endswith("buffer_assignment.txt")] == [
        scheduled,
        "after_buffer_assignment.txt",
    ]


def children_of(process_id):
    """The states of a process's children: "T" for one that is stopped."""
    task = Path(f"/proc/{process_id}/task/{process_id}/children")
    states = []
    for child in task.read_text().split():
        fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
        states.append(fields[0])
    return states


def test_fit_goes_on_where_estimate_stopped():
    step = _step.step_of(*small_step())
    target = target_of(chips.find("v5e"), step.mesh)
    assert target is not None
    program = step._tpu_program(_step.bytecode(step.module("tpu")), None, None)
    dumps = libtpu.TpuDumps(program=program, slices=target.slices, order=target.order)
    scheduled = dumps.scheduled
    process_id = libtpu._worker(libtpu.libtpu_path(), os.getpid())._process.pid
    # A process of many threads takes a moment to stop.
    deadline = time.monotonic() + 20
    while children_of(process_id) != ["T"]:
        assert time.monotonic() < deadline, children_of(process_id)
        time.sleep(0.01)
    assert dumps.texts.scheduled == scheduled
    assert children_of(process_id) == []
    # Another question ends a child that is stopped.
    again = libtpu.TpuDumps(program=program, slices=target.slices, order=target.order)
    assert again.scheduled == scheduled
    assert step.tpu_partitioned(target.slices, target.order)
    assert children_of(process_id) == []

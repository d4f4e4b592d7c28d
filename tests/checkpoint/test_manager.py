"""A manager: steps in the background, the latest few kept, and errors told."""

import errno
import os
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import shardfx
from shardfx import PathRules, checkpoint
from shardfx.errors import CheckpointError


@pytest.fixture
def state():
    mesh = Mesh(np.array(jax.devices()), ("x",))
    tree = {"w": jnp.zeros((8, 8)), "key": jax.random.key(0), "step": 0}
    sharding_plan = shardfx.plan(
        tree, mesh, paths=PathRules.parse("w->x, key->replicate")
    )
    return shardfx.shard(tree, sharding_plan)


def test_steps_are_kept_while_training_donates(tmp_path, state):
    increment = jax.jit(lambda w: w + 1, donate_argnums=0)
    with checkpoint.Manager(tmp_path / "run", keep=2) as manager:
        assert manager.latest() is None
        assert manager.steps() == ()
        for step in range(1, 5):
            state = {**state, "w": increment(state["w"]), "step": step}
            manager.save(step, state)
    assert manager.steps() == (3, 4)
    assert manager.latest() == 4
    for step in (3, 4):
        loaded = manager.load(state, step)
        assert loaded["step"] == step
        assert (np.asarray(loaded["w"]) == step).all()
        assert loaded["w"].sharding.is_equivalent_to(state["w"].sharding, 2)
    files = (tmp_path / "run").iterdir()
    names = sorted(path.name for path in files)
    assert names == [
        "step-3",
        "step-4",
    ]
    with pytest.raises(CheckpointError, match=r"has no step 1; it has 3, 4\."):
        manager.load(state, 1)
    with pytest.raises(CheckpointError, match="`keep=0` would keep no checkpoint"):
        checkpoint.Manager(tmp_path, keep=0)


def test_training_goes_on_while_a_step_is_written(tmp_path, state, monkeypatch):
    may_write = threading.Event()
    pwrite = os.pwritev

    def slow(*args):
        assert may_write.wait(60)
        return pwrite(*args)

    monkeypatch.setattr(os, "pwritev", slow)
    with checkpoint.Manager(tmp_path, keep=None) as manager:
        manager.save(1, state)
        state["w"].delete()
        assert manager.steps() == ()
        may_write.set()
        manager.wait()
        assert manager.steps() == (1,)


def test_what_goes_wrong_in_the_background_is_told_later(tmp_path, state):
    with checkpoint.Manager(tmp_path) as manager:
        manager.save(1, state)
        manager.save(1, state)
        with pytest.raises(
            CheckpointError, match="step-1' exists, and nothing was changed"
        ):
            manager.wait()
        manager.wait()
        with pytest.raises(
            CheckpointError, match="a leaf cannot be saved as `__metadata__`"
        ):
            manager.save(2, {"__metadata__": state["w"]})
        assert manager.steps() == (1,)


def test_arrays_say_by_themselves_how_they_lie(tmp_path, state):
    checkpoint.save(tmp_path / "one", state)
    plan = checkpoint.saved_plan(tmp_path / "one")
    assert plan["w"].spec == P("x")
    assert plan["key"].spec == P()
    assert plan.mesh.axis_names == ("x",)
    assert checkpoint.load(tmp_path / "one", state)["step"] == 0
    # On several meshes, or on none, there is no plan to write.
    devices = np.array(jax.devices()[:2])
    other = Mesh(devices, ("y",))
    placed = jax.device_put(jnp.ones(4), NamedSharding(other, P("y")))
    mixed = {**state, "v": placed}
    for name, tree in (("mixed", mixed), ("numpy", {"v": np.ones(4, np.float32)})):
        checkpoint.save(tmp_path / name, tree)
        checkpoint.save(tmp_path / f"{name}.safetensors", tree)
        assert checkpoint.read_index(tmp_path / name)["v"].shape == (4,)
        for path in (tmp_path / name, tmp_path / f"{name}.safetensors"):
            with pytest.raises(CheckpointError, match="holds no plan"):
                checkpoint.saved_plan(path)
    assert checkpoint.load(tmp_path / "mixed", mixed)["v"].sharding.spec == P("y")  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    "step", [np.float32(100), 1.0, -1, np.int32(-1), "5", True, None, 10.5]
)
def test_a_step_that_nobody_would_find_is_not_saved(tmp_path, state, step):
    text = r"^a step is a whole number( from 0 on)?, and this is .*(`int\(|from 0, as)"
    with checkpoint.Manager(tmp_path, keep=1) as manager:
        for use in (lambda: manager.save(step, state), lambda: manager.path(step)):
            with pytest.raises(CheckpointError, match=text):
                use()
    assert not list(tmp_path.iterdir())


def test_steps_are_whole_numbers_of_any_kind(tmp_path, state):
    with checkpoint.Manager(tmp_path, keep=1) as manager:
        for step in (0, np.int64(10), jnp.array(200)):
            manager.save(step, state)
        manager.wait()
        assert manager.steps() == (200,)
        assert manager.latest() == 200
        assert manager.load(state, np.int32(200))["step"] == 0
    # What a user, another program or an older version left there.
    for name in ("step-99999", "step-0007", "step-300.0", "step--1", "step-8"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-8" / "_METADATA").write_text("{}")
    (tmp_path / "step-0007" / "model.safetensors").write_bytes(b"")
    assert manager.steps() == (200,)
    assert manager.latest() == 200
    with checkpoint.Manager(tmp_path, keep=1) as manager:
        manager.save(201, state)
        with pytest.raises(CheckpointError, match="step-8' exists, and nothing was"):
            manager.save(8, state)
            manager.wait()
    assert manager.steps() == (201,)
    assert (tmp_path / "step-99999").exists()


def test_a_closed_manager_says_so(tmp_path, state):
    with checkpoint.Manager(tmp_path) as manager:
        manager.save(1, state)
    with pytest.raises(CheckpointError, match="is closed, so step 2 is not saved; sa"):
        manager.save(2, state)
    assert manager.load(state)["step"] == 0
    mistakes: list[Any] = [1.5, "3", np.float32(2)]
    for keep in mistakes:
        with pytest.raises(CheckpointError, match="is no number of steps; give a whol"):
            checkpoint.Manager(tmp_path, keep=keep)


def test_a_disk_that_fills_while_it_is_written_is_named(tmp_path, state, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    text = r"No space left on device, while saving.*Free some space.*step-1'$"
    with pytest.raises(OSError, match=text):
        checkpoint.save(tmp_path / "step-1", state)
    assert not list(tmp_path.iterdir())

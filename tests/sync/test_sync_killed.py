"""Either side killed at a random moment: the other has one revision, whole, and goes on
or says so.
"""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest


WORKER = Path(__file__).with_name("sync_worker.py")
# In `SYNC_KILLS=50 pytest tests/sync/test_sync_killed.py` each side is killed 25 times.
KILLS = int(os.environ.get("SYNC_KILLS", "2")) // 2


@pytest.fixture
def started():
    children = []

    def start(*arguments):
        command = [sys.executable, str(WORKER), *map(str, arguments)]
        text = str(WORKER.parents[2])
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": text,
        }
        child = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        children.append(child)
        return child

    yield start
    for child in children:
        child.kill()
        child.wait()
        child.stdout.close()


def whole(line):
    """The revision of a line of the engine, whose arrays all have the number of that
    revision.
    """
    _, revision, value, *_ = line.split()
    assert value == f"[{float(int(revision) % 100)}]", line
    return int(revision)


def first(engine):
    """The first line of an engine that has a revision."""
    return next(
        line for line in engine.stdout if line.startswith("has") and "None" not in line
    )


@pytest.mark.parametrize("seed", range(KILLS))
def test_each_side_goes_on_when_the_other_is_killed(started, seed):
    """The trainer serves the next engine, which keeps one revision when the trainer is
    killed in its turn.
    """
    trainer = started("trainer")
    port = int(trainer.stdout.readline())
    moments = random.Random(seed)
    killed_engine = started("engine", port)
    first(killed_engine)
    time.sleep(moments.random() / 2)
    killed_engine.kill()
    engine = started("engine", port)
    shown = first(engine)
    assert whole(shown) > 0
    assert trainer.poll() is None

    time.sleep(moments.random() / 2)
    trainer.kill()
    killed = time.monotonic()
    last = 0
    while shown.startswith("has"):
        last = whole(shown)
        shown = engine.stdout.readline()
    assert time.monotonic() - killed < 2 + 1
    assert shown.startswith("kept")
    assert whole(shown) == last
    assert "whole" in shown


def test_a_trainer_may_end_right_behind_a_sync(started):
    trainers = [started("leave", closes) for closes in (True, False)]
    assert [trainer.wait(60) for trainer in trainers] == [0, 0]

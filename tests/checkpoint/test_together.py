"""The rounds of processes that save together, played by threads over a service in memory."""

import concurrent.futures
import inspect
import itertools as it
import threading
import time

import jax
import pytest

from shardfx import checkpoint
from shardfx.checkpoint import _together
from shardfx.checkpoint._together import Together, meeting
from shardfx.errors import CheckpointError


MEMBERS = (3, 5, 8)


class Service:
    """What JAX's client of its coordination service does, in memory; `is_gone` makes it fail as where it has ended."""

    def __init__(self):
        self.notes, self.is_gone = {}, False
        self.barrier = threading.Barrier(len(MEMBERS))

    def _reachable(self):
        if self.is_gone:
            raise jax.errors.JaxRuntimeError("UNAVAILABLE: failed to connect\nmore")

    def wait_at_barrier(self, name, timeout_in_ms, processes):
        self._reachable()
        assert processes == MEMBERS
        try:
            self.barrier.wait(timeout_in_ms / 1000)
        except threading.BrokenBarrierError:
            text = "DEADLINE_EXCEEDED: Barrier timed out. Some timed out task names:\n8\n"
            raise jax.errors.JaxRuntimeError(text) from None

    def key_value_set(self, name, text, allow_overwrite=False):
        self._reachable()
        assert allow_overwrite
        self.notes[name] = text

    def key_value_try_get(self, name):
        self._reachable()
        if name not in self.notes:
            raise jax.errors.JaxRuntimeError(f"NOT_FOUND: Config key {name} not found.")
        return self.notes[name]

    def key_value_dir_get(self, folder):
        self._reachable()
        return [item for item in self.notes.items() if item[0].startswith(folder + "/")]


@pytest.fixture(autouse=True)
def rounds_are_short(monkeypatch):
    """What takes seconds in a job takes tenths of them here."""
    monkeypatch.setattr(_together, "_LOOK_SECONDS", 0.1)


def played(service, *acts):
    """What each of the processes got: what its act returns, or its error."""

    def play(me, act):
        try:
            with Together("'it'", me, MEMBERS, service, 20.0) as together:
                together.join()
                return act(together)
        except (CheckpointError, OSError, KeyboardInterrupt) as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(len(MEMBERS)) as pool:
        futures = [pool.submit(play, me, act) for me, act in zip(MEMBERS, acts, strict=True)]
        return [future.result() for future in futures]


def saving(did, begin=None, write=None, wrote=10, commit=None, waits=None):
    """One process's whole save; `did` lists what the first one did alone."""

    def act(together):
        token = together.agree({"path": "'it'"}, ())
        together.alone(begin or (lambda: did.append("began")))
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            total = together.attend([pool.submit(write or (lambda: wrote))])
        if waits is not None:
            waits()
        together.finish(total, 30, commit or (lambda: did.append("committed")))
        return token

    return act


def raising(error):
    def fails():
        raise error

    return fails


@pytest.mark.parametrize("work", ["begin", "commit"])
def test_what_the_first_cannot_do_alone_all_are_told(work):
    full = raising(OSError("disk full"))
    act = saving([], begin=full) if work == "begin" else saving([], commit=full)
    first, *others = played(Service(), *it.repeat(act, 3))
    assert isinstance(first, OSError)
    assert all("failed on process 3, with OSError: disk full" in str(other) for other in others)


def test_once_all_is_written_the_save_is_the_first_ones_alone():
    """Ctrl-C on another process comes too late to undo it, and that process waits for its end."""
    did = []

    def commit():
        time.sleep(0.2)
        did.append("committed")

    acts = [saving(did, commit=commit), saving(did), saving(did, waits=raising(KeyboardInterrupt()))]
    one, two, three = played(Service(), *acts)
    assert one == two and isinstance(three, KeyboardInterrupt) and did == ["began", "committed"]


@pytest.mark.parametrize("is_late", [False, True])
def test_one_that_dies_before_the_commit_ends_it_and_after_it_does_not(is_late):
    service, did = Service(), []

    def commit():
        did.append("committed")
        threading.Timer(0.2, service.barrier.abort).start()

    def dies(together):
        together.agree({"path": "'it'"}, ())
        together.alone(lambda: None)
        if is_late:
            return together.attend([])
        time.sleep(0.1)
        service.barrier.abort()

    act = saving(did, wrote=15, commit=commit)
    for got in played(service, act, act, dies)[:2]:
        text = (
            "process 8 gave no sign of life for 20 s while saving to 'it': it has died, or hangs. Nothing was changed"
        )
        assert isinstance(got, str) if is_late else str(got).startswith(text)
    assert did == ["began", "committed"][: 1 + is_late]


def test_bytes_that_nobody_writes_are_missed():
    did = []
    for got in played(Service(), *[saving(did, wrote=wrote) for wrote in (10, 10, 9)]):
        assert "the processes wrote 29 of 30 bytes to 'it', as nobody holds the first replica of some array" in str(got)
    assert did == ["began"]


def test_one_that_hung_is_not_taken_for_one_of_a_later_save():
    def late(together):
        together._at = ["another", 7]  # as it was when the others gave it up
        return saving([])(together)

    *others, last = played(Service(), saving([]), saving([]), late)
    for got in others:
        assert str(got) == "process 8 hung while saving to 'it'. Nothing was changed there; save again."
    assert "process 3 gave no sign of life for 20 s while saving to 'it': it has died, or hangs." in str(last)


def test_one_that_never_comes_is_missed_soon():
    # What all say, they say within 30 seconds.
    assert _together._SILENT_SECONDS < 29
    assert inspect.signature(checkpoint.save).parameters["wait_seconds"].default < 29


def test_a_service_that_has_gone_is_named():
    service = Service()
    service.is_gone = True
    for got in played(service, *it.repeat(saving([]), 3)):
        assert "service does not answer (UNAVAILABLE: failed to connect)" in str(got) and "start the job again" in str(
            got
        )


def test_processes_need_the_service():
    with pytest.raises(CheckpointError, match=r"call `jax.distributed.initialize\(\)` when the program starts"):
        meeting("'it'", (0, 1), 1.0)

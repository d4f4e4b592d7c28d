"""The rounds of processes that save together, played by threads over a coordination
service in memory.
"""

import concurrent.futures
import inspect
import itertools as it
import threading

import jax
import pytest

from shardfx import checkpoint
from shardfx.checkpoint import _coordination
from shardfx.errors import CheckpointError


MEMBERS = (3, 5, 8)


class Service:
    """JAX's client of its coordination service, in memory. With `is_gone`, its calls
    fail.
    """

    def __init__(self):
        self.notes = {}
        self.is_gone = False
        self.barriers = {}
        self.lock = threading.Lock()

    def _reachable(self):
        if self.is_gone:
            raise jax.errors.JaxRuntimeError("UNAVAILABLE: failed to connect\nmore")

    def wait_at_barrier(self, name, timeout_in_ms, processes):
        self._reachable()
        assert processes == MEMBERS
        with self.lock:
            barrier = self.barriers.setdefault(name, threading.Barrier(len(MEMBERS)))
        try:
            barrier.wait(timeout_in_ms / 1000)
        except threading.BrokenBarrierError:
            text = (
                "DEADLINE_EXCEEDED: Barrier timed out. Some timed out task names:\n8\n"
            )
            raise jax.errors.JaxRuntimeError(text) from None

    def key_value_set(self, name, text, allow_overwrite=False):
        self._reachable()
        assert allow_overwrite
        self.notes[name] = text

    def key_value_delete(self, name):
        self._reachable()
        self.notes.pop(name, None)

    def key_value_dir_get(self, folder):
        self._reachable()
        notes = self.notes.copy().items()
        return [item for item in notes if item[0].startswith(folder + "/")]


@pytest.fixture(autouse=True)
def rounds_are_short(monkeypatch):
    """The waits of seconds in a job take tenths of seconds here."""
    monkeypatch.setattr(_coordination, "_ROUND_SECONDS", 0.1)


def played(service, *acts):
    """The result of each process: the value that its act returns, or its error."""

    def play(me, act):
        try:
            with _coordination.SaveProcesses(
                "'it'",
                me=me,
                members=MEMBERS,
                client=service,
                wait_seconds=20.0,
            ) as processes:
                return act(processes)
        except (CheckpointError, OSError, KeyboardInterrupt) as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(len(MEMBERS)) as pool:
        futures = [
            pool.submit(play, me, act) for me, act in zip(MEMBERS, acts, strict=True)
        ]
        return [future.result() for future in futures]


def saving(did, wrote=10, begin=None, commit=None):
    """The whole save of one process; `did` lists the work of the first process alone."""

    def act(processes):
        token = processes.compare({"path": "'it'"}, ())
        processes.run_on_first(begin or (lambda: did.append("began")))
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            writes = [pool.submit(lambda: wrote)]
            end = commit or (lambda: did.append("committed"))
            processes.finish(writes, lambda _: None, 30, lambda _: end())
        return token

    return act


def raising(error):
    def fails():
        raise error

    return fails


@pytest.mark.parametrize("work", ["begin", "commit"])
def test_an_error_of_the_first_process_alone_is_told_to_all(work):
    full = raising(OSError("disk full"))
    if work == "begin":
        act = saving([], begin=full)
    else:
        act = saving([], commit=full)
    first, *others = played(Service(), *it.repeat(act, 3))
    assert isinstance(first, OSError)
    for other in others:
        assert "failed on process 3, with OSError: disk full" in str(other)


@pytest.mark.parametrize("odd", [0, 2])
def test_after_all_is_written_the_first_process_alone_decides(monkeypatch, odd):
    """Another process that dies then changes nothing; where the first one dies, the
    others name it.
    """
    did = []

    def dies(processes):
        processes.compare({"path": "'it'"}, ())
        processes.run_on_first(lambda: None)
        processes.wait([])
        processes._is_over = True  # nobody hears of this process any more

    monkeypatch.setattr(_coordination, "_SILENT_SECONDS", 0.5)
    acts = [saving(did, wrote=15)] * 3
    acts[odd] = dies
    for outcome in [
        outcome
        for process, outcome in enumerate(played(Service(), *acts))
        if process != odd
    ]:
        message = (
            "process 3 gave no sign of life for 0.5 s after everything was written to"
            " 'it'"
        )
        assert isinstance(outcome, str) if odd else message in str(outcome)
    assert did == (["began", "committed"] if odd else [])


def test_bytes_that_nobody_writes_are_missed():
    did = []
    for outcome in played(
        Service(), *[saving(did, wrote=wrote) for wrote in (10, 10, 9)]
    ):
        assert (
            "the processes wrote 29 of 30 bytes to 'it', as nobody holds the first"
            " replica of some array" in str(outcome)
        )
    assert did == ["began"]


def test_a_process_that_hung_meets_none_of_a_later_save(monkeypatch):
    def late(processes):
        processes.compare({"path": "'it'"}, ())
        processes._round_prefix += "/of an earlier save"
        processes.run_on_first(lambda: None)

    monkeypatch.setattr(_coordination, "_SILENT_SECONDS", 0.5)
    for outcome in played(Service(), saving([]), saving([]), late):
        assert (
            "process 8 gave no sign of life for 0.5 s while saving to 'it': it has"
            " died, or hangs." in str(outcome)
        )


def test_a_process_that_never_comes_is_missed_soon():
    # The documentation says 30 seconds, and a dead process may be missed a round late,
    # as `test_objects_together` measures.
    assert _coordination._SILENT_SECONDS + 9 < 30
    assert inspect.signature(checkpoint.save).parameters["wait_seconds"].default < 29


def test_a_service_that_has_gone_is_named():
    service = Service()
    service.is_gone = True
    for outcome in map(str, played(service, *it.repeat(saving([]), 3))):
        assert "service does not answer (UNAVAILABLE: failed to connect)" in outcome
        assert "start the job again" in outcome


def test_processes_need_the_service():
    with pytest.raises(
        CheckpointError,
        match=r"call `jax.distributed.initialize\(\)` when the program starts",
    ):
        with _coordination.SaveProcesses(
            "'it'",
            me=0,
            members=(0, 1),
            client=None,
            wait_seconds=1.0,
        ):
            pass

"""The talk of processes that save together, played by threads over a store in memory."""

import concurrent.futures
import inspect
import itertools as it
import threading
import time

import jax
import numpy as np
import pytest

from shardfx import checkpoint
from shardfx.checkpoint._together.board import Board, board_of_this_job
from shardfx.checkpoint._together.facts import different, digest_of, first_difference, lines_of
from shardfx.checkpoint._together.follower import Follower
from shardfx.checkpoint._together.leader import Leader
from shardfx.checkpoint._together.meeting import holders_of, meeting
from shardfx.checkpoint._together.talk import LOOK_SECONDS
from shardfx.errors import CheckpointError


class Store:
    """What JAX's client of its key-value store does, in memory; `ends` makes it fail as where the service is gone."""

    def __init__(self):
        self.notes, self.changed, self.is_gone = {}, threading.Condition(), False

    def _reachable(self):
        if self.is_gone:
            raise jax.errors.JaxRuntimeError("UNAVAILABLE: failed to connect\nmore")

    def key_value_set(self, name, text, allow_overwrite=False):
        self._reachable()
        with self.changed:
            assert allow_overwrite or name not in self.notes
            self.notes[name] = text
            self.changed.notify_all()

    def blocking_key_value_get(self, name, timeout_in_ms):
        self._reachable()
        with self.changed:
            if not self.changed.wait_for(lambda: name in self.notes, timeout_in_ms / 1000):
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: GetKeyValue() timed out")
            return self.notes[name]

    def key_value_try_get(self, name):
        self._reachable()
        with self.changed:
            if name not in self.notes:
                raise jax.errors.JaxRuntimeError(f"NOT_FOUND: Config key {name} not found.")
            return self.notes[name]

    def key_value_dir_get(self, folder):
        self._reachable()
        with self.changed:
            return [item for item in self.notes.items() if item[0].startswith(folder.rstrip("/") + "/")]

    def key_value_delete(self, name):
        self._reachable()
        with self.changed:
            for each in [each for each in self.notes if each == name or each.startswith(name + "/")]:
                del self.notes[each]


MEMBERS = (3, 5, 8)


def part(store, me, wait_seconds=20.0):
    kind = Leader if me == MEMBERS[0] else Follower
    return kind("'it'", me, MEMBERS, Board(store), wait_seconds)


def played(store, *acts, members=MEMBERS):
    """What each of the processes got: what its act returns, or its error."""

    def play(me, act):
        try:
            return act(me)
        except (CheckpointError, OSError, KeyboardInterrupt) as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(len(members)) as pool:
        return [
            future.result() for future in [pool.submit(play, me, act) for me, act in zip(members, acts, strict=True)]
        ]


def saving(store, did, facts=None, lines=(), begin=None, write=None, wrote=10, wait_seconds=20.0):
    """One process's whole save; `did` lists what the first one did alone."""

    def act(me):
        with part(store, me, wait_seconds) as together:
            token = together.join()
            together.agree(facts or {"path": "'it'"}, lines, begin or (lambda: did.append("began")))
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                for future in together.attend([pool.submit(write or (lambda: None))]):
                    future.result()
            together.finish(wrote, 30, lambda: did.append("committed"))
            return token

    return act


def test_all_save_once_and_leave_nothing_behind():
    store, did = Store(), []
    for _ in range(3):
        tokens = played(store, *it.repeat(saving(store, did), 3))
        assert len(set(tokens)) == 1
    assert did == ["began", "committed"] * 3
    assert store.notes == {}


def test_other_arguments_are_told_to_all():
    store, did = Store(), []
    acts = [saving(store, did, facts={"path": "'it'", "overwrite": value}) for value in ("False", "False", "True")]
    for got in played(store, *acts):
        assert str(got).startswith("the processes save with different `overwrite`: False on processes 3, 5, True on pr")
    assert did == []


def test_other_arrays_are_told_with_the_first_that_differs():
    store, lines = Store(), ["leaf `a` is float32[2]", "leaf `b` is int8[2]"]
    acts = [saving(store, [], {"leaves": digest_of(own)}, own) for own in (lines, lines[:1], lines)]
    for got in played(store, *acts):
        assert str(got) == (
            "the processes save different trees, one on processes 3, 8 and one on process 5: leaf `b` is int8[2] on "
            "process 3, nothing more on process 5; give all of them the same arrays. Nothing was written."
        )


def test_other_plans_are_told():
    store = Store()
    acts = [saving(store, [], {"plan": digest}) for digest in "aab"]
    for got in played(store, *acts):
        assert "by different plans, one on processes 3, 5 and one on process 8; `hosts.assert_same_plan(plan)`" in str(
            got
        )


@pytest.mark.parametrize("odd", range(3))
@pytest.mark.parametrize("kind", [OSError, KeyboardInterrupt])
def test_an_error_in_one_is_told_to_the_others_while_they_write(odd, kind):
    store, did, started = Store(), [], time.monotonic()

    def fails():
        raise kind("no space")

    acts = [saving(store, did, write=fails if number == odd else lambda: time.sleep(3)) for number in range(3)]
    got = played(store, *acts)
    for number, error in enumerate(got):
        if number == odd:
            assert isinstance(error, kind)
        else:
            assert f"saving to 'it' failed on process {MEMBERS[odd]}, with {kind.__name__}: no space; nothing" in str(
                error
            )
    assert did == ["began"] and time.monotonic() - started < 10
    # The next save is not disturbed by what this one left behind.
    did.clear()
    assert len(set(played(store, *it.repeat(saving(store, did), 3)))) == 1
    assert did == ["began", "committed"]


def test_one_that_fails_to_begin_or_to_commit_tells_all():
    def full():
        raise OSError("disk full")

    store = Store()
    first, *others = played(store, *it.repeat(saving(store, [], begin=full), 3))
    assert isinstance(first, OSError)
    assert all("failed on process 3, with OSError: disk full" in str(other) for other in others)


def test_bytes_that_nobody_writes_are_missed():
    store, did = Store(), []
    for got in played(store, *[saving(store, did, wrote=wrote) for wrote in (10, 10, 9)]):
        assert "the processes wrote 29 of 30 bytes to 'it', as nobody holds the first replica of some array" in str(got)
    assert did == ["began"]


def test_one_that_does_not_come_is_named():
    store, did = Store(), []
    one, two, _ = played(store, *it.repeat(saving(store, did, wait_seconds=1.0), 2), lambda me: None)
    for got in (one, two):
        assert "process 8 did not come within 1 s to save 'it', though the arrays lie there too" in str(got)
    one, two, three = played(store, lambda me: None, *it.repeat(saving(store, did, wait_seconds=1.0), 2))
    for got in (two, three):
        assert "process 3 did not come within 1 s" in str(got) and "a longer `wait_seconds`" in str(got)
    assert did == []


def test_one_that_never_comes_is_missed_soon():
    # What all say, they say within 30 seconds.
    assert inspect.signature(checkpoint.save).parameters["wait_seconds"].default + 2 * LOOK_SECONDS < 30


def test_one_that_left_does_not_answer_the_same_call_again():
    """A process that failed and tries again waits for the next call, while the first still tells late ones."""
    store, did = Store(), []

    def again(me):
        with pytest.raises(OSError), part(store, me) as together:
            together.join()
            raise OSError("mine")
        return saving(store, did)(me)

    def first(me):
        with pytest.raises(CheckpointError, match="failed on process 5"):
            saving(store, did)(me)
        return saving(store, did)(me)

    def late(me):
        time.sleep(1.5)
        return first(me)

    assert len(set(played(store, first, again, late))) == 1
    assert did == ["began", "committed"]


def test_one_that_loses_its_files_says_why():
    """The first process takes the files away where another has failed; then they are missing for the third."""
    store = Store()

    def missing(me):
        with part(store, me) as together:
            together.join()
            together.agree({"path": "'it'"}, (), lambda: None)
            time.sleep(3)
            raise FileNotFoundError("gone")

    def full():
        raise OSError("disk full")

    *_, last = played(store, saving(store, []), saving(store, [], write=full), missing)
    assert isinstance(last, CheckpointError) and "failed on process 5, with OSError: disk full" in str(last)


def test_a_service_that_has_gone_is_named():
    store = Store()
    store.is_gone = True
    with pytest.raises(
        CheckpointError, match=r"does not answer \(UNAVAILABLE: failed to connect\).*start the job again"
    ):
        with part(store, 3) as together:
            together.join()
    for call in (lambda: Board(store).look("x"), lambda: Board(store).find("x"), lambda: Board(store).get("x", 1.0)):
        with pytest.raises(CheckpointError, match="UNAVAILABLE"):
            call()
    with pytest.raises(CheckpointError, match="UNAVAILABLE"):
        Board(store).remove("x")


def test_without_a_service_there_is_no_board():
    with pytest.raises(CheckpointError, match=r"call `jax.distributed.initialize\(\)` when the program starts"):
        board_of_this_job()


def test_one_process_exchanges_nothing():
    did = []
    with meeting(holders_of({"w": np.ones(3)}), "'it'", 1.0) as together:
        assert together.is_first and together.join() != together.join()
        together.agree({}, (), lambda: did.append("began"))
        together.finish(0, 30, lambda: did.append("committed"))
    assert did == ["began", "committed"]


def test_lines_and_facts():
    lines = lines_of([("a", np.ones((2, 3), np.float32)), ("b", jax.numpy.ones(4))])
    assert lines == ["leaf `a` is float32[2, 3]", "leaf `b` is float32[4]"]
    assert first_difference(lines, lines, (0, 1)) == ""
    assert different({0: {"a": "1"}, 1: {"a": "1"}}) is None
    assert different({0: {}, 1: {"a": "1"}}) == ("a", {"nothing": [0], "1": [1]})

"""The first of the processes that save together."""

import concurrent.futures
import contextlib
import json
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, NoReturn

from ..._ground.errors import CheckpointError
from . import complaints
from .board import Board
from .facts import Facts, different, first_difference
from .talk import LINGER_SECONDS, LOOK_SECONDS, SILENT_SECONDS, Future, Talk, attended


class Leader:
    """Calls the others, reads their notes, does what one process does alone, and answers."""

    is_first = True

    def __init__(self, what: str, me: int, members: tuple[int, ...], board: Board, wait_seconds: float):
        self.what, self.members, self.wait_seconds = what, members, wait_seconds
        self.me, self.others = me, tuple(process for process in members if process != me)
        self.talk = Talk(board, secrets.token_hex(8), self.me)
        self.phase = "agree"
        # What is wrong, in words for all; else an error is this process's own.
        self.verdict: str | None = None
        self.is_committed = False
        self.linger_seconds = LINGER_SECONDS

    def __enter__(self) -> "Leader":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.is_committed:
            self.talk.clear()
            self.talk.answer("write", self.others, {})
            return
        # Where the service has failed too, the error that led here says more.
        with contextlib.suppress(CheckpointError):
            self._tell_all(self.verdict or complaints.failed(self.what, self.me, error))
            self.talk.board.remove(f"call/{self.me}")
            self.talk.clear()

    def join(self) -> str:
        """Calls the others; returns a name that only this save has."""
        self.talk.beat()
        self.talk.board.put(f"call/{self.me}", json.dumps({"token": self.talk.token, "members": self.members}))
        return self.talk.token

    def agree(self, facts: Facts, lines: Sequence[str], begin: Callable[[], None]) -> None:
        """Compares the arguments of all, and begins."""
        notes = self._gathered("agree", {"facts": dict(facts)})
        self.talk.board.remove(f"call/{self.me}")
        found = different({process: note["facts"] for process, note in notes.items()})
        if found is not None:
            name, groups = found
            more = self._compared([group[0] for group in groups.values()][:2], lines) if name == "leaves" else ""
            self._give_up(complaints.differs(name, groups, more))
        self._work(begin)
        self.phase = "write"
        self.talk.answer("agree", self.others, {})

    def attend(self, futures: Iterable[Future]) -> Iterator[Future]:
        """The futures as they end; raises where another process fails before."""
        return attended(futures, self._look)

    def finish(self, wrote_bytes: int, total_bytes: int, commit: Callable[[], None]) -> None:
        """Waits until all have written, and commits."""
        notes = self._gathered("write", {"wrote": wrote_bytes})
        wrote = sum(note["wrote"] for note in notes.values())
        if wrote < total_bytes:
            self._give_up(complaints.unwritten(self.what, wrote, total_bytes))

        def committing() -> None:
            commit()
            self.is_committed = True

        self._work(committing)

    def _give_up(self, verdict: str) -> NoReturn:
        self.verdict = verdict
        raise CheckpointError(verdict)

    def _gathered(self, phase: str, mine: dict[str, Any]) -> dict[int, dict[str, Any]]:
        """The notes of all."""
        self.phase, began = phase, time.monotonic()
        while True:
            notes = {self.me: mine} | self._told(phase)
            missing = [process for process in self.others if process not in notes]
            if not missing:
                return {process: notes[process] for process in self.members}
            self._hear()
            if phase == "agree" and time.monotonic() - began > self.wait_seconds:
                self.linger_seconds = 0.0
                self._give_up(complaints.absent(self.what, missing, self.wait_seconds))
            self.talk.wait_for(phase, missing[0])

    def _told(self, phase: str) -> dict[int, dict[str, Any]]:
        for note in self.talk.told("failed").values():
            self._give_up(note["error"])
        return self.talk.told(phase)

    def _look(self) -> None:
        self._told("write")
        self._hear()

    def _hear(self) -> None:
        self.talk.beat()
        silent = self.talk.silent(self.others)
        if silent:
            self._give_up(complaints.silent(self.what, silent, SILENT_SECONDS))

    def _work(self, work: Callable[[], None]) -> None:
        """Does what this process does alone, while the others hear that it is there."""
        with concurrent.futures.ThreadPoolExecutor(1, "shardfx-save") as pool:
            future = pool.submit(work)
            while not concurrent.futures.wait([future], LOOK_SECONDS).done:
                self.talk.beat()
            future.result()

    def _compared(self, pair: list[int], lines: Sequence[str]) -> str:
        """Where the arrays of two processes first differ."""
        self.talk.answer("agree", self.others, {"show": pair})
        notes = self._gathered("lines", {"lines": list(lines)})
        return first_difference(notes[pair[0]]["lines"], notes[pair[1]]["lines"], pair)

    def _tell_all(self, text: str) -> None:
        """Answers that the save has failed; of the first exchange also those who come while this process stays."""
        left, until = set(self.others), time.monotonic() + self.linger_seconds
        while left:
            failed = self.talk.told("failed").keys()
            here = self.talk.told("agree").keys() & left if self.phase == "agree" else left
            # Who has failed itself waits for no answer.
            self.talk.answer(self.phase, here - failed, {"error": text})
            left = left - here - failed
            if time.monotonic() > until:
                return
            if left:
                self.talk.beat()
                self.talk.wait_for("agree", min(left))

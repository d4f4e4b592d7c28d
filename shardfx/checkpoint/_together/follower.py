"""Any other of the processes that save together."""

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any

from ..._ground.errors import CheckpointError
from . import complaints
from .board import Board
from .facts import Facts
from .talk import LINGER_SECONDS, LOOK_SECONDS, SILENT_SECONDS, Future, Talk, attended


class Follower:
    """Comes when the first process calls, leaves it notes, and does as it answers."""

    is_first = False

    def __init__(self, what: str, me: int, members: tuple[int, ...], board: Board, wait_seconds: float):
        self.what, self.leader, self.wait_seconds = what, members[0], wait_seconds
        self.me, self.board = me, board
        self.talk: Talk | None = None
        # Whether the others know already what is wrong.
        self.is_known = False

    def __enter__(self) -> "Follower":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self._talk.hush()
            return
        reply = None
        # Where the service has failed too, the error that led here says more.
        with contextlib.suppress(CheckpointError):
            reply = self._left(error)
        if reply is not None and isinstance(error, OSError):
            # The leader took the files away, as another process had failed.
            raise CheckpointError(reply["error"]) from error

    def join(self) -> str:
        """Waits for the call of the first process; returns a name that only this save has."""
        self._come(self.wait_seconds)
        if self.talk is None:
            self.is_known = True
            raise CheckpointError(complaints.absent(self.what, [self.leader], self.wait_seconds))
        return self.talk.token

    def agree(self, facts: Facts, lines: Sequence[str], begin: Callable[[], None]) -> None:
        """Tells the arguments; returns when all have the same, and the first process has begun."""
        reply = self._exchanged("agree", {"facts": dict(facts)})
        if "show" in reply:
            self._exchanged("lines", {"lines": list(lines) if self.me in reply["show"] else []})

    def attend(self, futures: Iterable[Future]) -> Iterator[Future]:
        """The futures as they end; raises where another process fails before."""
        return attended(futures, self._look)

    def finish(self, wrote_bytes: int, total_bytes: int, commit: Callable[[], None]) -> None:
        """Returns when all have written, and the first process has committed."""
        self._exchanged("write", {"wrote": wrote_bytes})

    @property
    def _talk(self) -> Talk:
        assert self.talk is not None, "join first"
        return self.talk

    def _come(self, seconds: float) -> None:
        until, left = time.monotonic() + seconds, self.board.find(f"left/{self.me}")
        while self.talk is None and time.monotonic() < until:
            text = self.board.get(f"call/{self.leader}", LOOK_SECONDS)
            call = {"token": left, "members": []} if text is None else json.loads(text)
            if self.me in call["members"] and call["token"] != left:
                self.talk = Talk(self.board, call["token"], self.me)
                self.talk.beat()
            elif text is not None:
                time.sleep(0.1)

    def _exchanged(self, phase: str, note: dict[str, Any]) -> dict[str, Any]:
        self._talk.tell(phase, note)
        while True:
            reply = self._answered(phase, LOOK_SECONDS)
            if reply is not None:
                return reply
            self._hear()

    def _answered(self, phase: str, seconds: float) -> dict[str, Any] | None:
        reply = self._talk.answered(phase, seconds)
        if reply is not None and "error" in reply:
            self.is_known = True
            raise CheckpointError(reply["error"])
        return reply

    def _look(self) -> None:
        self._answered("write", 0.0)
        self._hear()

    def _hear(self) -> None:
        self._talk.beat()
        if self._talk.silent([self.leader]):
            raise CheckpointError(complaints.silent(self.what, [self.leader], SILENT_SECONDS))

    def _left(self, error: BaseException) -> dict[str, Any] | None:
        """Tells the others why this process leaves; returns what the first had answered meanwhile."""
        if self.talk is None and not self.is_known:
            self._come(LINGER_SECONDS)
        if self.talk is None:
            return None
        # A later save must not take the call of this one for its own.
        self.board.put(f"left/{self.me}", self.talk.token)
        reply = None if self.is_known else self.talk.answered("write")
        if reply is None and not self.is_known:
            self.talk.tell("failed", {"error": complaints.failed(self.what, self.me, error)})
        self.talk.hush()
        return reply

"""What the processes of one save tell each other: notes to the first of them, its answers, and signs of life."""

import dataclasses
import json
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future as _Future, wait
from typing import Any

from .board import Board


LOOK_SECONDS = 1.0
SILENT_SECONDS = 20.0
# How long a process that has failed stays to tell those who come later.
LINGER_SECONDS = 20.0
_BEAT_SECONDS = 2.0

Future = _Future[Any]


@dataclasses.dataclass
class Talk:
    """The notes of one save, under names that no other save has.

    **Arguments:**

    - `board`: where they are left.
    - `token`: the save's own name, drawn by its first process.
    - `me`: this process.
    """

    board: Board
    token: str
    me: int
    beat_at: float = -_BEAT_SECONDS
    beats: int = 0
    heard: dict[int, tuple[str, float]] = dataclasses.field(default_factory=dict)

    def tell(self, phase: str, note: dict[str, Any]) -> None:
        """Leaves this process's note for the first one."""
        self.board.put(f"notes/{self.token}/{phase}/{self.me}", json.dumps(note))

    def told(self, phase: str) -> dict[int, dict[str, Any]]:
        """The notes of a phase, by process."""
        return {int(name): json.loads(text) for name, text in self.board.look(f"notes/{self.token}/{phase}").items()}

    def wait_for(self, phase: str, process: int) -> None:
        """Returns when the note of a process is there, or soon."""
        self.board.get(f"notes/{self.token}/{phase}/{process}", LOOK_SECONDS)

    def answer(self, phase: str, processes: Iterable[int], reply: dict[str, Any]) -> None:
        """Answers the notes of other processes."""
        for process in processes:
            self.board.put(f"replies/{self.token}/{phase}/{process}", json.dumps(reply))

    def answered(self, phase: str, seconds: float = 0.0) -> dict[str, Any] | None:
        """The answer to this process's note, waited for so long; it is taken away, so that nothing piles up."""
        name = f"replies/{self.token}/{phase}/{self.me}"
        text = self.board.get(name, seconds) if seconds else self.board.find(name)
        if text is None:
            return None
        self.board.remove(name)
        return json.loads(text)

    def beat(self) -> None:
        """Lets the others know that this process is there; called often, it does so every two seconds."""
        now = time.monotonic()
        if now - self.beat_at >= _BEAT_SECONDS:
            self.beat_at, self.beats = now, self.beats + 1
            self.board.put(f"notes/{self.token}/alive/{self.me}", str(self.beats))

    def silent(self, processes: Iterable[int]) -> list[int]:
        """Those of the processes that took part and have not been heard of for 20 seconds."""
        now, found = time.monotonic(), self.board.look(f"notes/{self.token}/alive")
        for name, text in found.items():
            if self.heard.get(int(name), ("", 0.0))[0] != text:
                self.heard[int(name)] = text, now
        return [process for process in processes if now - self.heard.get(process, ("", now))[1] > SILENT_SECONDS]

    def hush(self) -> None:
        """Takes away this process's sign of life."""
        self.board.remove(f"notes/{self.token}/alive/{self.me}")

    def clear(self) -> None:
        """Takes away all notes; answers are taken away by those who read them."""
        self.board.remove(f"notes/{self.token}")


def attended(futures: Iterable[Future], look: Callable[[], None]) -> Iterator[Future]:
    """The futures as they end; between them `look` sees every second how the other processes do, and may raise."""
    left, looked_at = set(futures), time.monotonic()
    while left:
        done, left = wait(left, LOOK_SECONDS, FIRST_COMPLETED)
        if time.monotonic() - looked_at >= LOOK_SECONDS:
            look()
            looked_at = time.monotonic()
        yield from done

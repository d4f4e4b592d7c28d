"""Which processes save a tree, and the part that this one has in it."""

import concurrent.futures
import json
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any

import jax
import numpy as np

from ..._ground.errors import CheckpointError
from . import complaints
from .board import Board, board_of_this_job
from .facts import Facts
from .follower import Follower
from .leader import Leader
from .talk import Future, Talk


_STRAY_SECONDS = 2.0


class Alone:
    """A save by one process, in which nothing is exchanged."""

    is_first = True

    def __init__(self, what: str, board: Board | None = None):
        self.what = what
        # Given where no array says which processes save the tree: others may wait for this one.
        self.board = board

    def __enter__(self) -> "Alone":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None and self.board is not None:
            _tell_who_calls(self.board, self.what, error)

    def join(self) -> str:
        """A name that only this save has."""
        return secrets.token_hex(8)

    def agree(self, facts: Facts, lines: Sequence[str], begin: Callable[[], None]) -> None:
        begin()

    def attend(self, futures: Iterable[Future]) -> Iterator[Future]:
        return concurrent.futures.as_completed(futures)

    def finish(self, wrote_bytes: int, total_bytes: int, commit: Callable[[], None]) -> None:
        commit()


def holders_of(tree: Any) -> tuple[int, ...]:
    """The processes that save a tree together, whatever else is wrong with it; none, where no array says it."""
    if jax.process_count() == 1:
        return (0,)
    leaves = jax.tree.leaves(tree)
    shardings = dict.fromkeys(leaf.sharding for leaf in leaves if isinstance(leaf, jax.Array))
    holders = tuple(sorted({device.process_index for sharding in shardings for device in sharding.device_set}))
    if not holders and any(isinstance(leaf, np.ndarray | np.generic) for leaf in leaves):
        # NumPy arrays are the same on all processes, and lie on none of their devices: all save them together.
        return tuple(range(jax.process_count()))
    return holders


def meeting(holders: tuple[int, ...], what: str, wait_seconds: float) -> Alone | Leader | Follower:
    """The part that this process has in the save of a tree; for a `with`, at whose end the others hear of an error.

    **Arguments:**

    - `holders`: as `holders_of` gives them.
    - `what`: where they are saved, for messages.
    - `wait_seconds`: how long this process waits for others to come.

    **Raises:**

    `CheckpointError` if the arrays lie on devices of other processes alone, or JAX's coordination service does not run.
    """
    if jax.process_count() == 1:
        return Alone(what)
    me = jax.process_index()
    if holders and me not in holders:
        raise CheckpointError(complaints.elsewhere(what, me, holders))
    if len(holders) > 1:
        return (Leader if me == holders[0] else Follower)(what, me, holders, board_of_this_job(), wait_seconds)
    return Alone(what, None if holders else board_of_this_job())


def _tell_who_calls(board: Board, what: str, error: BaseException) -> None:
    """Tells the process that waits for this one, if there is one, that it will not come."""
    me, until = jax.process_index(), time.monotonic() + _STRAY_SECONDS
    while time.monotonic() < until:
        for call in map(json.loads, board.look("call").values()):
            if me in call["members"]:
                Talk(board, call["token"], me).tell("failed", {"error": complaints.failed(what, me, error)})
                return
        time.sleep(0.1)

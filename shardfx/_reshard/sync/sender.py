"""`Sender`, which serves the newest weights of one process of a trainer over sockets."""

import contextlib
import hashlib
import logging
import os
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from ..._ground.errors import (
    LeafTypeError,
    PlanMismatchError,
    SyncError,
    check_type,
)
from .door import Door
from .frames import (
    GONE,
    MISMATCH,
    MOST_BODY_BYTES,
    OFFER,
    REQUEST,
    TAKE,
    FrameLine,
    SocketChannel,
)
from .handshake import Security, Suite, as_sender, checked_secret, checked_suite
from .line import Line
from .messages import (
    MOST_REVISION,
    RUN_BYTES,
    Offer,
    Request,
    Revision,
    Take,
    is_new,
    leaf_digests,
)
from .publishing import Published, publishable
from .sending import send_published
from .transfer import TransferPlan


Address = tuple[str, int]

_LOG = logging.getLogger("shardfx.sync")
# The time in which a peer has to prove that it knows the secret.
_PROOF_SECONDS = 5.0


class _PublishedRevision:
    """A published revision, how many connections read it, and whether `publish` stopped
    waiting for them.
    """

    def __init__(self, number: int, arrays: Published):
        self.number = number
        self.arrays = arrays
        # The number of connections that read it.
        self.readers = 0
        self.is_withdrawn = False


class Sender:
    """Serves the newest published arrays of one process of a trainer, over a socket.

    Only receivers that know the secret get them, and what they get is authenticated; the
    page "Between jobs" has a table of what is promised against whom. If a receiver dies,
    its connection is dropped, and the trainer goes on.

    **Arguments:**

    - `plan`: the plan of the transfer.
    - `secret`: a secret of at least 16 random bytes that both jobs know.
    - `process`: the number of this sending process.
    - `host`, `port`: the address to listen on, by default on 127.0.0.1. Port 0 is any
      free port, and the attribute `address` has its number.
    - `timeout_seconds`: the time after which a receiver that neither reads nor writes
      counts as dead, and for which `publish` waits for receivers.
    - `run`: a text that names this run of the trainer, equal in all its processes and
      different after a restart. It is needed if the plan has several sending processes;
      by default it is random.
    - `security`: "authenticated", or "none" for a private network without the package
      `cryptography`.
    - `encrypt`: whether the arrays are encrypted too.

    **Raises:**

    `PlanMismatchError` if the plan has no sending process `process`; `SyncError` if the
    secret is short, if `run` is missing, or if `cryptography` is not installed.
    """

    __module__ = "shardfx.sync"

    def __init__(
        self,
        plan: TransferPlan,
        secret: bytes,
        *,
        process: int = 0,
        host: str = "127.0.0.1",
        port: int = 0,
        timeout_seconds: float = 30.0,
        run: str | None = None,
        security: Security = "authenticated",
        encrypt: bool = False,
    ):
        check_type(
            what="plan",
            value=plan,
            expected=TransferPlan,
            error=LeafTypeError,
            fix="give what `plan_transfer(src, dst)` returns",
        )
        if process not in plan.senders:
            raise PlanMismatchError(
                f"this plan has no sending process {process!r:.40}; it has the numbers"
                f" {sorted({*plan.senders})!r:.80}: give `Sender(..., process=number)`"
                " the one of this process."
            )
        self._plan = plan
        self._secret = checked_secret(secret)
        self._suite = checked_suite(security, encrypt)
        self._run = _run_id(plan, run)
        self._process = process
        self._timeout = timeout_seconds
        self._newest: _PublishedRevision | None = None
        # It guards `_newest` and the number of its readers.
        self._changed = threading.Condition()
        # One `publish` runs at a time.
        self._publishing = threading.Lock()
        listening = socket.create_server((host, port))
        self.address: Address = listening.getsockname()[:2]
        log_security("sender", self.address, self._suite)
        door = Door(listening, self._answer, timeout_seconds)
        door.open()
        # It also runs when the process ends.
        self._close = weakref.finalize(self, door.close)

    def publish(self, arrays: Any, revision: int) -> None:
        """Makes `arrays` the newest revision (version of all weights).

        The arrays are not copied: do not donate or delete them before the next
        `publish` returns. It waits until the receivers that are reading the previous
        revision have it, for at most `timeout_seconds`; then it withdraws that
        revision, and tells them so. Two revisions are alive until then, and this
        process holds no further memory for them but a round of each transfer.

        **Arguments:**

        - `arrays`: the tree that the sending job's plan was made of, or a dict by path,
          of arrays with the planned shapes and dtypes. Their shardings may be others.
        - `revision`: its number, above the one of the last call.

        **Raises:**

        `PlanMismatchError` if an array is missing, or has another shape or dtype than
        planned; `SyncError` if one is deleted, or for a number that is not above the
        last. Nothing is published then.
        """
        with self._publishing:
            newest = self._newest
            if isinstance(revision, bool) or not isinstance(revision, int):
                raise SyncError(
                    f"the revision {revision!r:.40} is no whole number; give the number"
                    " of the step, such as `int(step)`."
                )
            if not 0 <= revision <= MOST_REVISION:
                raise SyncError(
                    f"the revision {revision} is not between 0 and {MOST_REVISION}."
                )
            if newest is not None and revision <= newest.number:
                raise SyncError(
                    f"revision {revision} is not above {newest.number}, which is"
                    " published already."
                )
            published = _PublishedRevision(
                revision, publishable(arrays, self._plan.sources, self._plan.known)
            )
            with self._changed:
                self._newest = published
                if newest is not None:
                    self._changed.wait_for(lambda: not newest.readers, self._timeout)
                    newest.is_withdrawn = True

    def close(self) -> None:
        """Stops listening. Transfers that are under way may end within
        `timeout_seconds`. The end of the process does the same.
        """
        self._close()

    def _answer(
        self,
        connection: socket.socket,
        mark_proved: Callable[[], None],
    ) -> None:
        """Answers one receiver: handshake, request, offer, and the newest revision if
        it is new and the receiver takes it. `mark_proved` is called when the receiver
        has proved that it knows the secret.
        """
        host, port = connection.getpeername()[:2]
        peer = f"the receiver at {host}:{port}"
        line = Line(connection, min(_PROOF_SECONDS, self._timeout), peer)
        session = as_sender(line, self._secret, self._suite, self._process)
        mark_proved()
        line.set_timeout(self._timeout)
        frames = FrameLine(line, self._suite, session.keys)
        _, body = frames.receive_message(REQUEST)
        request = Request.from_bytes(body)
        if request.digest != self._plan.digest:
            digests = leaf_digests(self._plan.leaves)
            frames.send(MISMATCH, len(self._plan.leaves), [digests])
            return
        with self._reading() as published:
            if published is None:
                offer = Offer(revision=None, is_new=False)
                frames.send(OFFER, 0, [offer.to_bytes()])
                return
            revision = Revision(self._run, published.number)
            offer = Offer(revision, is_new(revision, request.revision))
            frames.send(OFFER, 0, [offer.to_bytes()])
            if not offer.is_new:
                return
            _, body = frames.receive_message(TAKE)
            take = Take.from_bytes(body)
            if take.revision == revision:
                self._send(published, frames, session.ends.receiver, take.check_content)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[_PublishedRevision | None]:
        """A context with the newest revision, `None` before the first. `publish` waits
        for the end of the context before it withdraws the revision.
        """
        with self._changed:
            published = self._newest
            if published is not None:
                published.readers += 1
        try:
            yield published
        finally:
            if published is not None:
                with self._changed:
                    published.readers -= 1
                    self._changed.notify_all()

    def _send(
        self,
        published: _PublishedRevision,
        frames: FrameLine,
        receiver: int,
        check_content: bool,
    ) -> None:
        """Sends the revision `published` to the process `receiver`. If it cannot be sent
        to the end, tells the receiver why, and raises `SyncError`.
        """

        def require_present() -> None:
            if published.is_withdrawn:
                raise SyncError(
                    f"revision {published.number} is withdrawn: the trainer published the"
                    f" next one, and waited {self._timeout:g} s for this transfer."
                )

        try:
            send_published(
                self._plan,
                published.arrays,
                SocketChannel(frames),
                published.number,
                sender=self._process,
                receiver=receiver,
                check_content=check_content,
                before_round=require_present,
            )
        except SyncError as error:
            frames.send(GONE, published.number, [str(error).encode()])
            raise
        except (RuntimeError, KeyError, TypeError, ValueError) as error:
            # An array was deleted, on an accelerator.
            text = f"revision {published.number} cannot be read at the trainer: {error}"
            frames.send(GONE, published.number, [text.encode()[:MOST_BODY_BYTES]])
            raise SyncError(text) from error


def _run_id(plan: TransferPlan, run: str | None) -> bytes:
    """The bytes that stand for a run of the trainer: a hash of `run`, or random ones.
    Raises `SyncError` without `run` if the plan has several sending processes.
    """
    if run is not None:
        return hashlib.sha256(run.encode()).digest()[:RUN_BYTES]
    if len({*plan.senders}) > 1:
        raise SyncError(
            f"the plan has {len({*plan.senders})} sending processes, so `run` must name"
            " this run of the trainer: give `Sender(..., run=text)` the same text in"
            " all of them, and another one after a restart, so that no receiver mixes"
            " two runs."
        )
    return os.urandom(RUN_BYTES)


def log_security(role: str, address: Address, suite: Suite) -> None:
    """Logs a warning for connections that are not secured. `role` says whose they are."""
    if suite.security == "none":
        _LOG.warning(
            "the %s at %s:%s has security='none': whoever is on the network can replace"
            " and read the weights",
            role,
            *address,
        )

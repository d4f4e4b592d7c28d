"""`Receiver`, which takes the newest weights from a trainer's senders over sockets."""

import contextlib
import socket
import threading
from collections.abc import Sequence
from typing import Any

from ..._ground.errors import PlanMismatchError, SyncError
from ..._plan import ShardPlan
from .frames import MISMATCH, OFFER, REQUEST, TAKE, FrameLine, SocketChannel
from .handshake import Ends, Security, as_receiver, checked_secret, checked_suite
from .line import Line
from .messages import Offer, Request, Revision, Take, first_difference
from .receiving import prepare, receive
from .sender import Address, log_security
from .spare import layout_of
from .transfer import TransferPlan


# The state that is used, and the one that arrives.
_STATES = 2


class Receiver:
    """Receives revisions (versions of all weights) from a trainer's `Sender`s, for one
    process of an inference engine.

    The attribute `arrays` has the last revision that arrived as a whole, as the tree
    that the engine's plan was made of, and `None` before the first. `revision` is its
    number.

    **Arguments:**

    - `plan`: the plan of the transfer.
    - `dst`: the engine's plan, made for its devices.
    - `addresses`: the address (host and port) of each sending process, in the order of
      their numbers.
    - `secret`: the secret of the senders.
    - `process`: the number of this receiving process.
    - `timeout_seconds`: the time after which a silent sender counts as dead.
    - `security`, `encrypt`: as the senders have them.

    **Raises:**

    `PlanMismatchError` if the plan is not for this process, was made from another plan
    than `dst`, or a sender's address is missing; `SyncError` if the secret is short, or
    `cryptography` is not installed.
    """

    __module__ = "shardfx.sync"

    def __init__(
        self,
        plan: TransferPlan,
        dst: ShardPlan,
        addresses: Sequence[Address],
        secret: bytes,
        *,
        process: int = 0,
        timeout_seconds: float = 30.0,
        security: Security = "authenticated",
        encrypt: bool = False,
    ):
        if process not in plan.receivers or plan.receiver not in (None, process):
            raise PlanMismatchError(
                f"this plan has no part for the receiving process {process}."
            )
        if len(addresses) <= max(plan.senders):
            raise PlanMismatchError(
                f"{len(addresses)} addresses for {max(plan.senders) + 1} sending"
                " processes."
            )
        self._layout = layout_of(plan, dst, process)
        self._plan = plan
        self._dst = dst
        self._addresses = tuple(addresses)
        self._secret = checked_secret(secret)
        self._suite = checked_suite(security, encrypt)
        self._process = process
        self._timeout = timeout_seconds
        # One `pull` runs at a time.
        self._pulling = threading.Lock()
        # The run of the trainer and the number of the revision that arrived last.
        self._revision: Revision | None = None
        self.arrays: Any = None
        self.revision: int | None = None
        for address in addresses[:1]:
            log_security("receiver from", address, self._suite)

    def warm(self) -> None:
        """Does what the first two pulls would do besides receiving: computes the order
        of the transfer, and has the kernel back the memory of two states.
        """
        for sender in self._plan.senders_to(self._process):
            prepare(self._plan, sender, self._process)
        self._layout.warm(_STATES)

    def pull(self, *, check_content: bool = False) -> bool:
        """Receives the newest revision into spare memory, and then replaces `arrays`
        and `revision`.

        A revision with another number of the same run of the trainer is new if its
        number is higher. Every revision of another run is new.

        **Arguments:**

        - `check_content`: whether to compare a checksum of each leaf's content with the
          senders', who compute it from their own arrays and the map. It also finds a
          wrong plan. It takes each side about as long as the transfer. A sender says
          nothing while it sums one leaf: for leaves of more than about 5 GiB a process
          give the receiver a longer `timeout_seconds`.

        **Returns:**

        Whether there was a newer revision.

        **Raises:**

        `SyncError` if a sender is dead, is silent, withdrew the revision or refuses the
        connection, or if bytes were changed on their way; `PlanMismatchError`, with the
        first leaf that differs, if the two jobs planned different transfers. `arrays`
        is then unchanged.
        """
        with self._pulling:
            try:
                with contextlib.ExitStack() as stack:
                    lines = {
                        sender: self._connected(sender, stack)
                        for sender in self._plan.senders_to(self._process)
                    }
                    return self._pulled(lines, check_content)
            except OSError as error:
                raise SyncError(f"{error}. {self._state_text()}") from error
            except SyncError as error:
                raise SyncError(f"{error} {self._state_text()}") from error

    def _state_text(self) -> str:
        """What errors say of the arrays that the receiver still has."""
        if self.revision is None:
            return "`arrays` is still `None`."
        return f"`arrays` is revision {self.revision}, whole."

    def _connected(self, sender: int, stack: contextlib.ExitStack) -> FrameLine:
        """A connection to a sender that has proved that it knows the secret. It is
        closed at the end of `stack`.
        """
        address = self._addresses[sender]
        peer = f"the sending process {sender} at {address[0]}:{address[1]}"
        try:
            connection = socket.create_connection(address, self._timeout)
        except OSError as error:
            raise ConnectionError(f"{peer} does not answer: {error}") from error
        line = Line(stack.enter_context(connection), self._timeout, peer)
        ends = Ends(sender=sender, receiver=self._process)
        session = as_receiver(line, self._secret, self._suite, ends)
        return FrameLine(line, self._suite, session.keys)

    def _pulled(self, lines: dict[int, FrameLine], check_content: bool) -> bool:
        """Asks all senders for a newer revision, and takes it. `lines` has the
        connection to each sending process. Returns whether there was one.
        """
        request = Request(digest=self._plan.digest, revision=self._revision)
        for frames in lines.values():
            frames.send(REQUEST, 0, [request.to_bytes()])
        offers = [self._offer(frames) for frames in lines.values()]
        revision = offers[0].revision
        if any(offer.revision != revision for offer in offers):
            numbers = [offer.revision and offer.revision.number for offer in offers]
            raise SyncError(
                f"the senders offer the revisions {numbers}, or are of several runs of"
                " the trainer; pull again when all have published."
            )
        if revision is None or not offers[0].is_new:
            return False
        take = Take(revision, check_content)
        for frames in lines.values():
            frames.send(TAKE, 0, [take.to_bytes()])
        channels = {sender: SocketChannel(frames) for sender, frames in lines.items()}
        arrays, number = receive(
            self._plan,
            self._dst,
            channels,
            receiver=self._process,
            check_content=check_content,
        )
        if number != revision.number:
            raise SyncError(
                f"the senders sent revision {number}, and offered {revision.number}."
            )
        self.arrays = arrays
        self.revision = revision.number
        self._revision = revision
        return True

    def _offer(self, frames: FrameLine) -> Offer:
        """What a sender offers. Raises `PlanMismatchError` if it has another plan."""
        header, body = frames.receive_message(OFFER, MISMATCH)
        if header.type == OFFER:
            return Offer.from_bytes(body)
        number = first_difference(self._plan.leaves, body)
        if number is None:
            raise PlanMismatchError(
                "the two jobs planned for other meshes, processes or limits; plan with"
                " the same."
            )
        raise PlanMismatchError(
            f"leaf `{self._plan.leaves[number].path}` is planned otherwise by the"
            " sender; plan both sides from the same plans and map."
        )

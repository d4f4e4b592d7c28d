"""The messages of a pull, which have a fixed size each.

1. The receiver asks: it has this plan, and this revision.
2. The sender offers its newest revision, or says that it has another plan.
3. The receiver takes the revision.
4. Rounds of rows follow, and a commit; or the sender says why the revision is gone.
"""

import struct
from typing import NamedTuple

from ..._ground.errors import SyncError
from .frames import MOST_BODY_BYTES
from .kinds import SentLeaf


RUN_BYTES = 16
MOST_REVISION = (1 << 63) - 1
# The bytes of each leaf's digest by which a receiver finds the first leaf that differs.
_DIGEST_BYTES = 8
_REQUEST = struct.Struct(f">32s?{RUN_BYTES}sq")
_OFFER = struct.Struct(f">??{RUN_BYTES}sq")
_TAKE = struct.Struct(f">{RUN_BYTES}sq?")


class Revision(NamedTuple):
    """A version of all weights: its number, in a run of the trainer."""

    run: bytes
    number: int


_NONE = Revision(run=bytes(RUN_BYTES), number=0)


class Request(NamedTuple):
    """A receiver's plan, and the revision that it has."""

    digest: str
    revision: Revision | None

    def to_bytes(self) -> bytes:
        """The message as it is sent."""
        run, number = self.revision or _NONE
        digest = bytes.fromhex(self.digest)
        return _REQUEST.pack(digest, self.revision is not None, run, number)

    @staticmethod
    def from_bytes(data: bytes) -> "Request":
        """Reads what `to_bytes` wrote. Raises `SyncError` for another length."""
        digest, is_there, run, number = _unpacked(_REQUEST, data)
        revision = Revision(run, number) if is_there else None
        return Request(digest=digest.hex(), revision=revision)


class Offer(NamedTuple):
    """A sender's newest revision, and whether it is new to the receiver."""

    revision: Revision | None
    is_new: bool

    def to_bytes(self) -> bytes:
        """The message as it is sent."""
        run, number = self.revision or _NONE
        return _OFFER.pack(self.revision is not None, self.is_new, run, number)

    @staticmethod
    def from_bytes(data: bytes) -> "Offer":
        """Reads what `to_bytes` wrote. Raises `SyncError` for another length."""
        is_there, is_new, run, number = _unpacked(_OFFER, data)
        revision = Revision(run, number) if is_there else None
        return Offer(revision=revision, is_new=is_new)


class Take(NamedTuple):
    """The revision that a receiver takes, and whether it wants checksums of the
    content.
    """

    revision: Revision
    check_content: bool

    def to_bytes(self) -> bytes:
        """The message as it is sent."""
        run, number = self.revision
        return _TAKE.pack(run, number, self.check_content)

    @staticmethod
    def from_bytes(data: bytes) -> "Take":
        """Reads what `to_bytes` wrote. Raises `SyncError` for another length."""
        run, number, check_content = _unpacked(_TAKE, data)
        return Take(revision=Revision(run, number), check_content=check_content)


def _unpacked(form: struct.Struct, data: bytes) -> tuple:
    """The values in a message. Raises `SyncError` for one of another length."""
    if len(data) != form.size:
        raise SyncError(
            f"a message of {len(data):,} bytes came where the protocol has"
            f" {form.size}; install the same shardfx in both jobs."
        )
    return form.unpack(data)


def is_new(revision: Revision, known: Revision | None) -> bool:
    """Whether a revision is newer than the one that a receiver has. Numbers of two runs
    of a trainer are not compared: the other run is the newer one.
    """
    return known is None or revision.run != known.run or revision.number > known.number


def leaf_digests(leaves: tuple[SentLeaf, ...]) -> bytes:
    """The first bytes of each leaf's digest, as a message."""
    digests = [bytes.fromhex(leaf.digest)[:_DIGEST_BYTES] for leaf in leaves]
    return b"".join(digests)[:MOST_BODY_BYTES]


def first_difference(leaves: tuple[SentLeaf, ...], theirs: bytes) -> int | None:
    """The number of the first leaf whose digest differs from that in the message
    `theirs`; `None` if there is none.
    """
    ours = leaf_digests(leaves)
    for number in range(len(leaves)):
        part = slice(number * _DIGEST_BYTES, (number + 1) * _DIGEST_BYTES)
        if ours[part] != theirs[part]:
            return number
    return None

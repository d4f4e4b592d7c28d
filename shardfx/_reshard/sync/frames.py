"""Frames: what goes over a connection behind the handshake.

A frame has a header of 32 bytes (its type, a number, the length of the body), a body
and a tag of 16 bytes. The tag authenticates header and body by AES-128-GCM: as
associated data, or, if the session is encrypted, the body as the encrypted text. The
nonce is a counter that both sides keep and nobody sends. So a frame that was altered,
left out, repeated, exchanged, sent back, or taken from another session has a wrong tag.
Each direction has keys of its own, and new ones after `FRAMES_PER_KEY` frames.

With `security="none"` the tag is a CRC-32, which shows damage and no attack.
"""

import struct
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..._ground.errors import SyncError
from .handshake import SessionKeys, Suite, expanded, primitives
from .line import Line, Memory


HEADER = struct.Struct(">B7xQQ8x")
TAG_BYTES = 16
# Even if each frame has 1 GiB, a key then authenticates at most 2**36 blocks of 16
# bytes. A forger who tried as often as frames pass would succeed once in 2**60 keys.
FRAMES_PER_KEY = 1 << 10
# Bodies of all types but rounds, and of encrypted parts at a time.
MOST_BODY_BYTES = 16 << 20
_PART_BYTES = 1 << 20

# The types of frames.
REQUEST, OFFER, TAKE, ROUND, COMMIT, GONE, MISMATCH = range(1, 8)


class Header(NamedTuple):
    """The header of a frame. `number` is that of a round or of a revision."""

    type: int
    number: int
    length: int

    def to_bytes(self) -> bytes:
        """The header as it is sent."""
        return HEADER.pack(self.type, self.number, self.length)


class _Counter:
    """The keys and the nonces of one direction."""

    def __init__(self, secret: bytes):
        # The secret from which the current key, and the next secret, are derived.
        self._chain = secret
        self._key = expanded(secret, "key", 16)
        # The number of frames with the current key.
        self._count = 0

    def next(self) -> tuple[bytes, bytes]:
        """The key and the nonce of the next frame. After `FRAMES_PER_KEY` frames the
        secret is replaced by one derived from it, and the key with it.
        """
        if self._count == FRAMES_PER_KEY:
            self._chain = expanded(self._chain, "next keys")
            self._key = expanded(self._chain, "key", 16)
            self._count = 0
        nonce = self._count.to_bytes(12)
        self._count += 1
        return self._key, nonce


class FrameLine:
    """A connection on which both sides send frames, with the keys of a session."""

    def __init__(self, line: Line, suite: Suite, keys: SessionKeys):
        self._line = line
        self._suite = suite
        # The keys and nonces of the frames in each direction.
        self._sent = _Counter(keys.to_send)
        self._received = _Counter(keys.to_receive)
        # The header of the next frame, if it was read behind the last one.
        self._next_header = b""
        # The memory for the encrypted bytes of a part.
        self._scratch = bytearray(_PART_BYTES if suite.encrypt else 0)
        if suite.security != "none":
            self._ciphers = primitives("ciphers")
            self._algorithms = primitives("ciphers.algorithms")
            self._modes = primitives("ciphers.modes")

    def send(self, type: int, number: int, parts: Sequence[Memory] = ()) -> None:
        """Sends a frame whose body is the bytes of `parts`. `number` is that of a round
        or of a revision.
        """
        length = sum(map(len, parts))
        header = Header(type=type, number=number, length=length).to_bytes()
        key, nonce = self._sent.next()
        if self._suite.security == "none":
            self._line.send([header, *parts, _crc_tag(nonce, [header, *parts])])
            return
        context = self._context(key, nonce).encryptor()
        context.authenticate_additional_data(header)
        if not self._suite.encrypt:
            for part in parts:
                context.authenticate_additional_data(part)
            context.finalize()
            self._line.send([header, *parts, context.tag])
            return
        # All calls together are one message, which has one time-out.
        message = self._line.message(len(header) + length + TAG_BYTES)
        self._line.send([header], message)
        for part in _slices(parts):
            count = context.update_into(part, self._scratch)
            self._line.send([memoryview(self._scratch)[:count]], message)
        context.finalize()
        self._line.send([context.tag], message)

    def receive_header(self) -> Header:
        """The header of the next frame, which is not authenticated yet."""
        data = self._next_header or self._line.read(HEADER.size)
        self._next_header = b""
        type, number, length = HEADER.unpack(data)
        header = Header(type=type, number=number, length=length)
        if header.to_bytes() != data:
            raise _damaged()
        return header

    def receive_body(self, header: Header, parts: Sequence[Memory]) -> None:
        """Reads the body of a frame into `parts`, which have `header.length` bytes in
        total. Raises `SyncError` if the tag is wrong; what is in `parts` is worth
        nothing then.
        """
        data = header.to_bytes()
        key, nonce = self._received.next()
        tag = bytearray(TAG_BYTES)
        # Behind a round there is always a frame. Its header comes by the same system
        # call.
        following = bytearray(HEADER.size if header.type == ROUND else 0)
        if self._suite.security == "none":
            self._line.fill([*parts, tag, following])
            self._next_header = bytes(following)
            if bytes(tag) != _crc_tag(nonce, [data, *parts]):
                raise _damaged()
            return
        context = self._context(key, nonce).decryptor()
        context.authenticate_additional_data(data)
        if self._suite.encrypt:
            message = self._line.message(header.length + len(tag) + len(following))
            for part in _slices(parts):
                encrypted = memoryview(self._scratch)[: len(part)]
                self._line.fill([encrypted], message)
                context.update_into(encrypted, part)
            self._line.fill([tag, following], message)
        else:
            self._line.fill([*parts, tag, following])
            for part in parts:
                context.authenticate_additional_data(part)
        self._next_header = bytes(following)
        try:
            context.finalize_with_tag(bytes(tag))
        except wrong_tag_error() as error:
            raise _damaged() from error

    def receive_message(self, *types: int) -> tuple[Header, bytes]:
        """A whole frame of one of the types `types`."""
        header = self.receive_header()
        if header.type not in (*types, GONE) or header.length > MOST_BODY_BYTES:
            raise _unexpected(header)
        body = bytearray(header.length)
        self.receive_body(header, [body])
        if header.type == GONE:
            raise SyncError(bytes(body).decode("utf-8", "replace"))
        return header, bytes(body)

    def _context(self, key: bytes, nonce: bytes) -> Any:
        """The cipher of one frame."""
        return self._ciphers.Cipher(self._algorithms.AES(key), self._modes.GCM(nonce))


def wrong_tag_error() -> type[Exception]:
    """The exception that `cryptography` raises for a wrong tag."""
    import cryptography.exceptions

    return cryptography.exceptions.InvalidTag


def _slices(parts: Sequence[Memory]) -> list[memoryview]:
    """The bytes of `parts` as views of at most `_PART_BYTES`."""
    slices: list[memoryview] = []
    for part in parts:
        view = memoryview(part)
        for start in range(0, len(part), _PART_BYTES):
            slices.append(view[start : start + _PART_BYTES])
    return slices


def _crc_tag(nonce: bytes, parts: Sequence[Memory]) -> bytes:
    """The tag of a frame without a cipher: the CRC-32 of its nonce and its bytes."""
    checksum = zlib.crc32(nonce)
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    return checksum.to_bytes(TAG_BYTES)


def _damaged() -> SyncError:
    """The error for a frame whose header, checksum or tag is wrong."""
    return SyncError(
        "a frame is not what the other side sent: it was damaged, altered, left out or"
        " repeated on its way; nothing was taken over. Pull again; if it happens again,"
        " something on the network changes what passes."
    )


def _unexpected(header: Header) -> SyncError:
    """The error for a frame of a type or length that the protocol has elsewhere."""
    return SyncError(
        f"a frame of type {header.type} with {header.length:,} bytes came where the"
        " protocol has another; nothing was taken over. Pull again."
    )


class SocketChannel:
    """A [`shardfx.sync.Channel`][] over a `FrameLine`: each round is a frame."""

    def __init__(self, frames: FrameLine):
        self._frames = frames

    def put(self, round: int, pieces: Sequence[np.ndarray]) -> None:
        """Sends the rows of bytes of a round as one frame."""
        self._frames.send(ROUND, round, [piece.data for piece in pieces])

    def get(self, round: int, memories: Sequence[np.ndarray]) -> None:
        """Receives the rows of bytes of a round into `memories`. Raises `SyncError` if
        the sender says that they are gone, or sends another frame.
        """
        length = sum(memory.nbytes for memory in memories)
        header = self._frames.receive_header()
        if header.type == GONE and header.length <= MOST_BODY_BYTES:
            body = bytearray(header.length)
            self._frames.receive_body(header, [body])
            raise SyncError(bytes(body).decode("utf-8", "replace"))
        if header != Header(type=ROUND, number=round, length=length):
            raise _unexpected(header)
        self._frames.receive_body(header, [memory.data for memory in memories])

    def commit(self, revision: int | None = None) -> int:
        """Ends a transfer: the sender gives the `revision`, and the receiver gets it."""
        if revision is not None:
            self._frames.send(COMMIT, revision)
            return revision
        header, _ = self._frames.receive_message(COMMIT)
        return header.number

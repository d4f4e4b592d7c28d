"""The handshake of two processes: each proves that it knows the secret, and both derive
the keys of their session.

1. The receiver, which connects, and the sender exchange a hello each: the version of
   the protocol, how frames are secured, the numbers of both processes, 32 random bytes,
   and the public half of a new X25519 key.
2. Both compute a hash of the two hellos, and from it, the secret and the shared half of
   the X25519 keys four keys by HKDF (RFC 5869): one for each role's proof, and one for
   each direction's frames.
3. The receiver proves first that it has the secret, by an HMAC of the hash under its
   role's key; then the sender. Nobody gets something to test guesses of the secret on
   by connecting to a sender.

A peer that passes the handshake on between two processes learns none of the keys. Since
every key depends on both hellos, a peer that changes one, such as the version, makes
the proofs fail.
"""

import hashlib
import hmac
import importlib
import os
import struct
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from ..._ground.errors import SyncError
from .line import Line


# Both sides also divide a transfer into the same rounds.
VERSION = 4
Security = Literal["authenticated", "none"]
Role = Literal["sender", "receiver"]

_MAGIC = b"shardfx\n"
_HELLO = struct.Struct(">8sHBBII32s32s")
_RANDOM_BYTES = 32
_PROOF_BYTES = 32
_LEAST_SECRET_BYTES = 16
_ROLES: Mapping[Role, int] = {"sender": 1, "receiver": 2}
_OTHER: Mapping[Role, Role] = {"sender": "receiver", "receiver": "sender"}


class Suite(NamedTuple):
    """How frames are secured: by "none" they have a CRC-32 each."""

    security: Security
    encrypt: bool

    @property
    def number(self) -> int:
        """The number by which a hello names the suite: 0, 1 or 2."""
        if self.security == "none":
            return 0
        return 2 if self.encrypt else 1

    def __str__(self) -> str:
        return f"security={self.security!r}, encrypt={self.encrypt}"


_SUITES = {
    suite.number: suite
    for suite in (
        Suite("none", False),
        Suite("authenticated", False),
        Suite("authenticated", True),
    )
}


class Ends(NamedTuple):
    """The two processes that a connection is between."""

    sender: int
    receiver: int


class Hello(NamedTuple):
    """The first message of a process."""

    version: int
    suite: int
    role: int
    ends: Ends
    random: bytes
    public_key: bytes

    def to_bytes(self) -> bytes:
        """The message's bytes, which `from_bytes` reads."""
        return _HELLO.pack(
            _MAGIC,
            self.version,
            self.suite,
            self.role,
            self.ends.sender,
            self.ends.receiver,
            self.random,
            self.public_key,
        )

    @staticmethod
    def from_bytes(data: bytes) -> "Hello":
        """Reads the first message of the other process. Raises `SyncError` for any other
        bytes.
        """
        magic, version, suite, role, sender, receiver, random, public_key = (
            _HELLO.unpack(data)
        )
        if magic != _MAGIC:
            raise SyncError(
                "the other side is no `Sender` or `Receiver`; is the address right?"
            )
        return Hello(
            version=version,
            suite=suite,
            role=role,
            ends=Ends(sender, receiver),
            random=random,
            public_key=public_key,
        )


class SessionKeys(NamedTuple):
    """The secrets of a session: one for each direction."""

    to_send: bytes
    to_receive: bytes


class Session(NamedTuple):
    """What a handshake leaves: the keys of the session, and the two processes."""

    keys: SessionKeys
    ends: Ends


def checked_suite(security: Security, encrypt: bool) -> Suite:
    """The suite of these arguments of `Sender` and `Receiver`.

    Raises `SyncError` if there is none, or if the package `cryptography` is missing.
    """
    suite = Suite(security, encrypt)
    if suite not in _SUITES.values():
        raise SyncError(
            f"{suite} is no way to secure a connection; give security='authenticated'"
            " (and `encrypt=True`, if nobody on the network may read the weights), or"
            " security='none' alone, for a private network."
        )
    if security != "none":
        primitives("asymmetric.x25519")
    return suite


def primitives(name: str) -> Any:
    """The module `name` of the primitives of the package `cryptography`."""
    try:
        return importlib.import_module(f"cryptography.hazmat.primitives.{name}")
    except ImportError as error:
        raise SyncError(
            "the package `cryptography` authenticates what is sent, and is not"
            " installed (pip install 'shardfx[sync]'). On a private network"
            ' `Sender(..., security="none")` and `Receiver(..., security="none")` do'
            " without it."
        ) from error


def checked_secret(secret: bytes) -> bytes:
    """The secret itself. Raises `SyncError` if it is short or no bytes."""
    fix = "take `secrets.token_bytes(32)`, and give it to both jobs"
    if not isinstance(secret, bytes | bytearray):
        raise SyncError(f"a secret of type {type(secret).__name__}; {fix}.")
    if len(secret) < _LEAST_SECRET_BYTES:
        raise SyncError(
            f"a secret of {len(secret)} bytes; it has at least"
            f" {_LEAST_SECRET_BYTES}: {fix}."
        )
    return bytes(secret)


def as_receiver(line: Line, secret: bytes, suite: Suite, ends: Ends) -> Session:
    """The receiver's side of the handshake: it sends its hello, reads the sender's,
    proves the secret, and requires the sender's proof. `ends` are the two processes.
    """
    exchange = _Exchange(role="receiver", secret=secret, suite=suite)
    line.send([exchange.hello(ends)])
    keys = exchange.keys(line.read(_HELLO.size))
    line.send([keys.proof("receiver")])
    try:
        proof = line.read(_PROOF_BYTES)
    except ConnectionResetError as error:
        raise SyncError(
            "the sender refused this process; do both jobs have the same secret?"
        ) from error
    keys.require_proof("sender", proof)
    return Session(keys.session("receiver"), ends)


def as_sender(line: Line, secret: bytes, suite: Suite, process: int) -> Session:
    """The sender's side of the handshake, in the sending process number `process`: it
    reads the receiver's hello, sends its own, requires the receiver's proof of the
    secret, and proves it.
    """
    exchange = _Exchange(role="sender", secret=secret, suite=suite)
    data = line.read(_HELLO.size)
    theirs = Hello.from_bytes(data)
    # A receiver of another version or suite learns from this hello what differs.
    ends = Ends(sender=process, receiver=theirs.ends.receiver)
    line.send([exchange.hello(ends)])
    keys = exchange.keys(data)
    keys.require_proof("receiver", line.read(_PROOF_BYTES))
    line.send([keys.proof("sender")])
    return Session(keys.session("sender"), ends)


class _Exchange:
    """The exchange of hellos, from the side of `role`."""

    def __init__(self, role: Role, secret: bytes, suite: Suite):
        self._role: Role = role
        self._secret = secret
        self._suite = suite
        # Set by `hello`: this process's key, its message, and the two processes.
        self._private_key = None
        self._own_hello = b""
        self._ends = Ends(0, 0)

    def hello(self, ends: Ends) -> bytes:
        """This process's hello, the first message to the other of the processes `ends`.
        It has the public half of a new key.
        """
        public_key = bytes(32)
        if self._suite.security != "none":
            x25519 = primitives("asymmetric.x25519")
            self._private_key = x25519.X25519PrivateKey.generate()
            public_key = self._private_key.public_key().public_bytes_raw()
        hello = Hello(
            version=VERSION,
            suite=self._suite.number,
            role=_ROLES[self._role],
            ends=ends,
            random=os.urandom(_RANDOM_BYTES),
            public_key=public_key,
        )
        self._ends = ends
        self._own_hello = hello.to_bytes()
        return self._own_hello

    def keys(self, data: bytes) -> "_Keys":
        """The keys that follow from both hellos. `data` has the bytes of the other
        process's. Raises `SyncError` if the hellos do not fit each other.
        """
        theirs = Hello.from_bytes(data)
        self._require_fit(theirs)
        # The receiver's hello comes first.
        if self._role == "receiver":
            transcript = hashlib.sha256(self._own_hello + data).digest()
        else:
            transcript = hashlib.sha256(data + self._own_hello).digest()
        return _Keys(self._secret, self._shared(theirs.public_key), transcript)

    def _shared(self, public_key: bytes) -> bytes:
        """The key that both processes compute from their own private and the other's
        public key; zeros without cryptography.
        """
        if self._private_key is None:
            return bytes(32)
        x25519 = primitives("asymmetric.x25519")
        try:
            theirs = x25519.X25519PublicKey.from_public_bytes(public_key)
            return self._private_key.exchange(theirs)
        except ValueError as error:
            raise SyncError("the other side sent no public key.") from error

    def _require_fit(self, theirs: Hello) -> None:
        """Raises `SyncError` unless the other process's hello has the same version,
        suite and pair of processes as this one's, and the other role.
        """
        other = _OTHER[self._role]
        if theirs.version != VERSION:
            raise SyncError(
                f"the {other} speaks version {theirs.version} of the protocol, and this"
                f" {self._role} version {VERSION}; install the same shardfx in both"
                " jobs."
            )
        if theirs.suite != self._suite.number:
            suite = _SUITES.get(theirs.suite, f"the unknown suite {theirs.suite}")
            raise SyncError(
                f"the {other} has {suite}, and this {self._role} {self._suite}; give"
                " both the same."
            )
        if theirs.role != _ROLES[other]:
            raise SyncError(f"the other side is no {other}; is the address right?")
        if theirs.ends == self._ends:
            return
        if self._role == "receiver":
            raise SyncError(
                f"this address is that of the sending process {theirs.ends.sender}, not"
                f" {self._ends.sender}; give `addresses` in the order of the sending"
                " processes."
            )
        raise SyncError(
            f"the receiver asked for the sending process {theirs.ends.sender}, and this"
            f" is {self._ends.sender}."
        )


class _Keys:
    """The keys that both processes derive from the secret, from their shared X25519 key
    and from a hash of their hellos.
    """

    def __init__(self, secret: bytes, shared: bytes, transcript: bytes):
        self._transcript = transcript
        length = len(secret).to_bytes(8)
        self._root = extracted(transcript, length + secret + shared)

    def proof(self, role: Role) -> bytes:
        """The proof of a role that it knows the secret."""
        key = expanded(self._root, f"proof of the {role}")
        return hmac.digest(key, self._transcript, "sha256")

    def require_proof(self, role: Role, proof: bytes) -> None:
        """Raises `SyncError` unless `proof` is that of a process with this role."""
        if not hmac.compare_digest(proof, self.proof(role)):
            raise SyncError(
                f"the {role} has another secret; nothing was sent. Give both jobs the"
                " same."
            )

    def session(self, role: Role) -> SessionKeys:
        """The secrets of the session, from the side of `role`."""
        other = _OTHER[role]
        return SessionKeys(
            to_send=expanded(self._root, f"frames from the {role}"),
            to_receive=expanded(self._root, f"frames from the {other}"),
        )


def extracted(salt: bytes, key: bytes) -> bytes:
    """HKDF-Extract of RFC 5869 with SHA-256."""
    return hmac.digest(salt, key, "sha256")


def expanded(key: bytes, label: str, length: int = 32) -> bytes:
    """HKDF-Expand of RFC 5869 with SHA-256, for at most 32 bytes."""
    info = f"shardfx sync {VERSION}: {label}".encode()
    return hmac.digest(key, info + b"\x01", "sha256")[:length]

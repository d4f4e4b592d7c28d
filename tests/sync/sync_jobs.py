"""A small trainer and a small engine, for tests of transfers."""

import contextlib
import hashlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec as P

import shardfx
from shardfx import MeshSpec, PathRules, ShardPlan
from shardfx.sync import (
    Receiver,
    Sender,
    TransferPlan,
    plan_transfer,
    receive,
    send,
)


SECRET = b"sixteen bytes or more"
SIZES = {"a": 2, "b": 2}


def sha256(text):
    """The checksum of a text, as whoever forges a plan computes it."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def mesh(start):
    devices = np.asarray(jax.devices()[start : start + 4])
    return Mesh(devices.reshape(2, 2), ("a", "b"))


def planned(tree, specs, where=None):
    structs = {
        path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        for path, leaf in tree.items()
    }
    rules = PathRules(
        [(f"^{path.replace('.', '[.]')}$", spec) for path, spec in specs.items()]
    )
    if where is None:
        where = MeshSpec(SIZES)
    return shardfx.plan(structs, where, paths=rules)


def tree_of():
    """Odd sizes, rank 0, empty arrays, narrow dtypes and keys."""
    numbers = np.random.default_rng(0)
    array = numbers.normal(size=(8, 6)).astype(np.float32)
    arrays = {
        "wide": array,
        "odd": numbers.normal(size=(3, 5)).astype(jnp.bfloat16),
        "one": np.float32(3),
        "none": np.zeros((0, 4), np.float32),
        "eight": numbers.normal(size=(4, 4)).astype(jnp.float8_e4m3fn),
        "four": numbers.integers(-8, 7, (4, 4)).astype(jnp.int4),
    }
    tree = {path: jnp.asarray(leaf) for path, leaf in arrays.items()}
    keys = jax.random.split(jax.random.key(0), 4)
    return tree | {"keys": keys}


class Transfer(NamedTuple):
    """The plans of both sides, the plan of the transfer, and the sender's arrays."""

    src: ShardPlan
    dst: ShardPlan
    plan: TransferPlan
    tree: dict[str, Any]


def job(processes=(1, 1), **changes):
    """A transfer of the tree as it is."""
    tree = tree_of()
    specs = {}
    for path, leaf in tree.items():
        is_even = leaf.ndim and leaf.shape[0] % 2 == 0
        if is_even:
            specs[path] = P("a")
        else:
            specs[path] = P()
    src = planned(tree, specs, mesh(0))
    dst = planned(tree, {**specs, "wide": P("b", "a")}, mesh(4))
    plan = plan_transfer(src, dst, processes=processes, **changes)
    placed = jax.device_put(tree, src.shardings)
    return Transfer(src=src, dst=dst, plan=plan, tree=placed)


def halves(processes=(2, 1), **changes):
    """An array whose halves two processes send."""
    values = jnp.arange(64, dtype=jnp.float32).reshape(8, 8)
    tree = {"w": values}
    src = planned(tree, {"w": P("a")}, mesh(0))
    dst = planned(tree, {"w": P(None, "b")}, mesh(4))
    plan = plan_transfer(src, dst, processes=processes, **changes)
    return Transfer(src=src, dst=dst, plan=plan, tree=tree)


def large():
    """A transfer that is larger than the buffers of sockets."""
    array = jnp.zeros((4, 6 << 20), jnp.uint8)
    tree = {"w": array}
    src = planned(tree, {"w": P("a")}, mesh(0))
    dst = planned(tree, {"w": P("a")}, mesh(4))
    plan = plan_transfer(src, dst, memory_limit_bytes=1 << 20)
    placed = jax.device_put(tree, src.shardings)
    return Transfer(src=src, dst=dst, plan=plan, tree=placed)


def bits(leaf):
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(leaf)
    return leaf


@contextlib.contextmanager
def sending(plan, **options):
    options = {"timeout_seconds": 2, **options}
    with contextlib.closing(Sender(plan, SECRET, **options)) as sender:
        yield sender


def receiver_of(plan, dst, *senders, secret=SECRET, timeout_seconds=2, **options):
    addresses = [sender.address for sender in senders]
    return Receiver(
        plan, dst, addresses, secret, timeout_seconds=timeout_seconds, **options
    )


class Served(NamedTuple):
    """The fields of a transfer, its sender, and options of the receiver."""

    src: ShardPlan
    dst: ShardPlan
    plan: TransferPlan
    tree: dict[str, Any]
    sender: Sender
    options: dict[str, Any]

    def receiver(self, **options):
        return receiver_of(
            self.plan, self.dst, self.sender, **{**self.options, **options}
        )


def served_by(sender, transfer, **options):
    return Served(
        src=transfer.src,
        dst=transfer.dst,
        plan=transfer.plan,
        tree=transfer.tree,
        sender=sender,
        options=options,
    )


class Wire:
    """A channel in memory."""

    def __init__(self):
        self.pieces = []
        self.revision = 0

    def put(self, round, pieces):
        self.pieces += [(round, piece.copy()) for piece in pieces]

    def get(self, round, memories):
        for memory in memories:
            number, piece = self.pieces.pop(0)
            assert number == round
            assert piece.nbytes == memory.nbytes
            memory[...] = piece

    def commit(self, revision: int | None = None) -> int:
        if revision is not None:
            self.revision = revision
        return self.revision


def carried(plan, arrays, dst):
    """What the receiver gets, and the bytes that were put."""
    wires = {sender: Wire() for sender in plan.senders_to(0)}
    for sender, wire in wires.items():
        send(plan, arrays, wire, 7, sender=sender, receiver=0, check_content=True)
    sent_bytes = 0
    for wire in wires.values():
        sent_bytes += sum(piece.nbytes for _, piece in wire.pieces)
        # The sums of the content.
        sent_bytes -= 16 * len(plan.leaves)
    arrays, revision = receive(plan, dst, wires, receiver=0, check_content=True)
    assert revision == 7
    return arrays, sent_bytes

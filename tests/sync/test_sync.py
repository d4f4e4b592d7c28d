"""Transfers between jobs: bit for bit what NumPy makes, each byte sent once, and nothing written by what is damaged."""

import json
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import Mesh, PartitionSpec as P
from maps import maps, same, written

import shardfx
from shardfx import From, MeshSpec, PathRules, TreeMap
from shardfx.errors import PlanFormatError, PlanMismatchError, SyncError
from shardfx.sync import Receiver, Sender, TransferPlan, plan_transfer, receive, send


SECRET = b"sixteen bytes or more"
SIZES = {"a": 2, "b": 2}


class Wire:
    """A channel in memory."""

    def __init__(self):
        self.pieces, self.revision = [], None

    def put(self, round, pieces):
        self.pieces += [(round, np.array(piece)) for piece in pieces]

    def get(self, round, sizes):
        for size in sizes:
            number, piece = self.pieces.pop(0)
            assert (number, piece.nbytes) == (round, size)
            yield piece.reshape(-1).view(np.uint8)

    def commit(self, revision=None):
        self.revision = self.revision if revision is None else revision
        return self.revision


def mesh(start):
    return Mesh(np.asarray(jax.devices()[start : start + 4]).reshape(2, 2), ("a", "b"))


def planned(tree, specs, where=None):
    structs = {path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in tree.items()}
    rules = PathRules([(f"^{path.replace('.', '[.]')}$", spec) for path, spec in specs.items()])
    return shardfx.plan(structs, MeshSpec(SIZES) if where is None else where, paths=rules)


def drawn(draw, tree):
    found = {}
    for path, leaf in tree.items():
        used, entries = set(), []
        for _ in leaf.shape:
            entry = draw(st.sampled_from([None, "a", "b", ("b", "a")]))
            names = {*((entry,) if isinstance(entry, str) else entry or ())}
            entries.append(None if names & used else entry)
            used |= names
        found[path] = shardfx.correct(P(*entries), leaf.shape, MeshSpec(SIZES)).spec
    return found


def carried(plan, arrays, dst, processes=(1, 1)):
    """What all receivers get, and the bytes that were put."""
    found = []
    for receiver in range(processes[1]):
        wires = {sender: Wire() for sender in plan.senders_to(receiver)}
        for sender, wire in wires.items():
            send(plan, arrays, wire, 7, sender=sender, receiver=receiver)
        sent = sum(piece.nbytes for wire in wires.values() for _, piece in wire.pieces)
        wires = wires or {0: Wire()}
        if not sent:
            wires[min(wires)].commit(7)
        made, revision = receive(plan, dst, wires, receiver=receiver)
        assert revision == 7
        found.append((made, sent))
    return found


@settings(max_examples=40, deadline=None)
@given(case=maps(), data=st.data())
def test_random_maps_between_random_plans_give_what_numpy_gives(case, data):
    made, arrays = written(case)
    whole = made.apply(arrays)
    specs = drawn(data.draw, arrays), drawn(data.draw, whole)
    src, dst = planned(arrays, specs[0], mesh(0)), planned(whole, specs[1], mesh(4))
    plan = plan_transfer(src, dst, made, limit_bytes=data.draw(st.sampled_from([16, 1 << 20])))
    tree = {path: jax.device_put(leaf, src.shardings[path]) for path, leaf in arrays.items()}
    again = TransferPlan.from_json(plan.to_json())
    ((found, sent),) = carried(again, tree, dst)
    for path, leaf in whole.items():
        same(found[path], leaf)
        assert found[path].sharding == dst.shardings[path]
    assert sent == plan.wire_bytes
    # The two jobs plan without the other's devices.
    abroad = planned(arrays, specs[0]), planned(whole, specs[1])
    other = plan_transfer(*abroad, made, limit_bytes=plan.limit_bytes)
    assert other.digest == plan.digest and other.to_json() == plan.to_json()

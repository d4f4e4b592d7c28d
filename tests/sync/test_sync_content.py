"""The checksums of content of a transfer, which show what the bytes of pieces do not."""

import dataclasses
import itertools as it

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from maps import same
from sync_jobs import Wire, bits, carried, halves, job, mesh, planned

from shardfx import From, TreeMap
from shardfx._reshard.sync import contents
from shardfx._reshard.sync.kinds import FIRST_POSITION
from shardfx.errors import SyncError
from shardfx.sync import TransferPlan, plan_transfer, receive, send


def checked(plan, dst, arrays, receiving_plan=None, swap=False):
    """Sends over channels in memory, with checksums of the content."""
    wires = {sender: Wire() for sender in plan.senders_to(0)}
    for sender, wire in wires.items():
        send(plan, arrays, wire, 7, sender=sender, receiver=0, check_content=True)
    if swap:
        wires = dict(zip(wires, reversed(wires.values()), strict=True))
    plan = receiving_plan or plan
    arrays, _ = receive(plan, dst, wires, receiver=0, check_content=True)
    return arrays


def with_rows(plan, change):
    """The plan with other rows in each of its kinds. Its digest stays the same."""
    kinds = []
    for kind in plan.kinds:
        rows = kind.rows.copy()
        change(kind, rows)
        kinds.append(dataclasses.replace(kind, rows=rows))
    return dataclasses.replace(plan, kinds=tuple(kinds))


def test_content_shows_a_wrong_sender():
    """Every byte is right, and comes from the other process's half: all totals, and
    what is checked for each piece, are right (tpu-inference#3379).
    """
    transfer = halves()
    sources = jax.device_put(transfer.tree, transfer.src.shardings)
    arrays = checked(transfer.plan, transfer.dst, sources)
    same(arrays["w"], transfer.tree["w"])
    with pytest.raises(SyncError, match="leaf `w`: its 64 elements have the checksum"):
        checked(transfer.plan, transfer.dst, sources, swap=True)


def test_content_shows_a_wrong_offset_on_both_sides():
    transfer = halves()
    arrays = jax.device_put(transfer.tree, transfer.src.shardings)

    def move(kind, rows):
        # The rows of the source are read in another order. Each target is written once.
        rows[:, FIRST_POSITION] = rows[::-1, FIRST_POSITION].copy()

    wrong = with_rows(transfer.plan, move)
    assert wrong.digest == transfer.plan.digest
    assert wrong.wire_bytes == transfer.plan.wire_bytes
    TransferPlan.from_json(wrong.to_json())  # It is whole, as far as bytes go.
    with pytest.raises(SyncError, match="leaf `w`: its 64 elements have the checksum"):
        checked(wrong, transfer.dst, arrays)


def test_content_shows_a_wrong_cast():
    values = jnp.arange(64, dtype=jnp.float32).reshape(8, 8)
    tree = {"w": values * 1e4}
    src = planned(tree, {"w": P("a")}, mesh(0))
    struct = jax.ShapeDtypeStruct((8, 8), jnp.bfloat16)
    dst = planned({"w": struct}, {"w": P("b")}, mesh(4))
    tree_map = TreeMap({"w": From("w").cast("bfloat16")})
    plan = plan_transfer(src, dst, tree_map)
    sources = jax.device_put(tree, src.shardings)
    arrays = checked(plan, dst, sources)
    same(arrays["w"], np.asarray(tree["w"]).astype(jnp.bfloat16))
    (kind,) = plan.kinds
    (form,) = kind.forms
    through_half = (np.dtype("float16"), *form.value.casts)
    value = form.value._replace(casts=through_half)
    forms = (form._replace(value=value, sender_casts=2),)
    wrong_kind = dataclasses.replace(kind, forms=forms)
    wrong = dataclasses.replace(plan, kinds=(wrong_kind,))
    with pytest.raises(SyncError, match="leaf `w`: its 64 elements have the checksum"):
        checked(wrong, dst, sources)


def test_content_shows_leaves_that_are_exchanged():
    tree = {"v": jnp.ones((4, 4)), "w": jnp.zeros((4, 4))}
    specs = {"v": P("a"), "w": P("a")}
    src = planned(tree, specs, mesh(0))
    dst = planned(tree, specs, mesh(4))
    plan = plan_transfer(src, dst)
    arrays = jax.device_put(tree, src.shardings)
    first, second = plan.leaves
    leaves = (
        first._replace(source_paths=second.source_paths),
        second._replace(source_paths=first.source_paths),
    )
    wrong = dataclasses.replace(plan, leaves=leaves)
    wire = Wire()
    send(wrong, arrays, wire, 7, sender=0, receiver=0)
    # The sums of the content are those of the right plan.
    right_wire = Wire()
    send(plan, arrays, right_wire, 7, sender=0, receiver=0, check_content=True)
    wire.pieces.append(right_wire.pieces[-1])
    with pytest.raises(SyncError, match=r"leaf `v`: .*\(2 leaves differ\)"):
        receive(plan, dst, {0: wire}, receiver=0, check_content=True)


def test_sums_of_content_are_sent_in_rounds(monkeypatch):
    """A sender that sums a large state is not silent for longer than a time-out."""
    monkeypatch.setattr(contents, "SUM_ROUND_BYTES", 200)
    transfer = job()
    rounds = contents.sum_rounds(transfer.plan)
    assert len(rounds) > 1
    numbers = it.chain.from_iterable(rounds)
    assert list(numbers) == list(range(len(transfer.plan.leaves)))
    arrays, _ = carried(transfer.plan, transfer.tree, transfer.dst)
    for path, leaf in transfer.tree.items():
        same(bits(arrays[path]), bits(leaf))
    wire = Wire()
    send(
        transfer.plan, transfer.tree, wire, 7, sender=0, receiver=0, check_content=True
    )
    assert len({number for number, _ in wire.pieces}) == len(rounds) + 1
    wire.pieces[-1][1][-1] ^= 1
    with pytest.raises(SyncError, match="elements have the checksum"):
        receive(transfer.plan, transfer.dst, {0: wire}, receiver=0, check_content=True)

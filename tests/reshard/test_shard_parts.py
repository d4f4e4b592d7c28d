import itertools as it
import math
import time
from unittest import mock

import jax
import numpy as np
from hypothesis import given, settings, strategies as st

from shardfx import _convert
from shardfx._reshard.pieces import parts as parts_module
from shardfx._reshard.pieces.rounds import matchings


DTYPES = {
    4: "int4",
    8: "int8",
    16: "int16",
    32: "float32",
}


def cuts(bits, sources, targets, group_of=None, sent_before=(), lost=()):
    """The parts of an array as it is, between devices and boxes."""
    all_boxes = []
    for _, b in [*sources, *targets]:
        all_boxes.append(b)
    columns = zip(*all_boxes, strict=True)
    sizes = []
    for column in columns:
        sizes.append(max(stop for _, stop in column))
    shape = tuple(sizes)
    holders = {}
    for device, b in sources:
        holders.setdefault(b, []).extend([] if device in lost else [device])
    kind = getattr(jax.numpy, DTYPES[bits])
    dtype = np.dtype(kind)
    leaf = _convert.leaf_made("x", _convert.Struct(shape, dtype))
    return parts_module.shard_parts(
        leaf,
        targets=targets,
        sources={"x": parts_module.Source(dtype, holders)},
        group_of=group_of or {},
        sent_before=sent_before,
    )


def box(*intervals):
    return tuple(intervals)


@st.composite
def layouts(draw, shape):
    """A layout of `shape` over some devices, as (device, box) pairs: any grid, any
    assignment, with replicas.
    """
    counts = [
        draw(st.sampled_from([c for c in range(1, size + 1) if size % c == 0] or [1]))
        for size in shape
    ]
    cells = list(
        it.product(
            *[
                [(i * s // c, (i + 1) * s // c) for i in range(c)]
                for s, c in zip(shape, counts, strict=True)
            ]
        )
    )
    copies = draw(st.integers(1, 3))
    count = len(cells) * copies
    all_devices = draw(st.permutations(range(2 * len(cells) * copies)))
    devices = all_devices[:count]
    copied_cells = cells * copies
    return list(zip(devices, copied_cells, strict=True))


@st.composite
def moves(draw):
    sizes = draw(st.lists(st.sampled_from([0, 1, 2, 3, 4, 6]), max_size=3))
    shape = tuple(sizes)
    return shape, draw(layouts(shape)), draw(layouts(shape))


def index(b):
    slices = []
    for interval in b:
        slices.append(slice(*interval))
    return tuple(slices)


@settings(deadline=None, max_examples=200)
@given(moves())
def test_each_target_receives_exactly_what_it_lacks(
    move,
):
    shape, sources, targets = move
    parts = cuts(16, sources, targets)
    assert not parts.missing
    elements = np.arange(math.prod(shape))
    whole = elements.reshape(shape)
    held = {}
    for device, b in sources:
        held[device] = whole[index(b)]
    built = {}
    for device, b in targets:
        built[device] = np.full([stop - start for start, stop in b], -1)
    for part in parts.all:
        target = built[part.receiver]
        place = index(_convert.hull(part.piece))
        is_empty = target[place] == -1
        assert is_empty.all()
        source = index(_convert.hull(_convert.swapped(part.piece)))
        target[place] = held[part.sender][source]
    lacking = 0
    for device, b in targets:
        expected = whole[index(b)]
        np.testing.assert_array_equal(built[device], expected)
        lacked = np.setdiff1d(whole[index(b)], held.get(device, ()))
        lacking += lacked.size
    sent_bytes = sum(parts.sent_bytes.values())
    assert sent_bytes == parts.wire_bytes == 2 * lacking


@settings(deadline=None, max_examples=100)
@given(moves(), st.data())
def test_lost_shards_are_named_exactly(move, data):
    shape, sources, targets = move
    subsets = st.lists(st.sampled_from(sources), unique=True, max_size=len(sources))
    remaining = data.draw(subsets)
    devices = set()
    for device, _ in sources:
        devices.add(device)
    remaining_devices = set()
    for device, _ in remaining:
        remaining_devices.add(device)
    lost = devices - remaining_devices
    parts = cuts(
        8,
        sources,
        targets,
        lost=lost,
    )
    have, need, missing = masks = np.zeros((3, *shape), bool)
    for position, boxes in enumerate(
        ([b for _, b in remaining], [b for _, b in targets], parts.missing)
    ):
        for b in boxes:
            masks[(position, *index(b))] = True
    np.testing.assert_array_equal(missing, need & ~have)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 3), st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_senders_are_balanced_within_four_thirds_of_the_optimum(replicas, sizes):
    length = sum(sizes)
    sources = [(device, box((0, length))) for device in range(replicas)]
    edges = [0, *it.accumulate(sizes)]
    targets = [(100 + i, box((edges[i], edges[i + 1]))) for i in range(len(sizes))]
    busiest = max(cuts(8, sources, targets).sent_bytes.values())
    choices = it.product(range(replicas), repeat=len(sizes))
    smallest = min(np.bincount(choice, weights=sizes).max() for choice in choices)
    limit = 4 * smallest
    assert 3 * busiest <= limit


def test_senders_of_the_receivers_process_come_first():
    whole = box((0, 4))
    cases = (0, 1, 2, 3)
    sources = [(device, whole) for device in cases]
    cases = (10, 11, 12, 13, 20)
    targets = [(device, whole) for device in cases]
    group_of = {
        0: 0,
        1: 0,
        2: 1,
        3: 1,
        10: 1,
        11: 1,
        12: 1,
        13: 1,
        20: 2,
    }
    parts = cuts(8, sources, targets, group_of)
    senders = lambda sent: [
        part.sender for part in cuts(8, sources[:3], targets[:2], sent_before=sent).all
    ]
    assert senders(()) == [0, 1]
    assert senders([(0, 4)]) == [1, 2]
    actual = senders([(0, 4), (1, 4)])
    assert actual == [2, 0]
    expected = {
        (2, 10): 4,
        (3, 11): 4,
        (2, 12): 4,
        (3, 13): 4,
        (0, 20): 4,
    }
    assert parts.links == expected


def test_sub_byte_elements_are_counted_by_their_bits():
    sent = cuts(4, [(0, box((0, 5)))], [(1, box((0, 5)))])
    assert sent.wire_bytes == 3


def test_planning_is_no_product_of_sources_and_targets():
    count = 4096
    sources = [(i, box((4 * i, 4 * i + 4), (0, 64))) for i in range(count)]
    targets = [(count + i, box((4 * i, 4 * i + 4), (0, 64))) for i in range(count)]
    replicas = [(i, box((0, 4 * count), (0, 64))) for i in range(count)]
    begin = time.process_time()
    assert len(cuts(32, sources, targets).all) == count
    sent_bytes = set(cuts(32, replicas, targets).sent_bytes.values())
    actual = len(sent_bytes)
    assert actual == 1
    # A product of 4096 sources and targets takes half a minute; this is no measurement
    # of speed.
    assert time.process_time() - begin < 10


def test_only_what_replicas_sent_more_than_each_other_matters():
    first_half = box((0, 4))
    right = box((4, 8))
    halves = [(0, first_half), (1, first_half), (2, right)]
    parts = cuts(8, halves, [(7, box((0, 8)))])
    assert parts.replicas == ((0, 1),)
    sent = {0: 10, 1: 10, 2: 99}
    actual = parts.sent_before(sent)
    assert actual == ()
    actual = parts.sent_before({0: 12, 1: 10})
    assert actual == ((0, 2),)
    # A device that has it takes it from itself.
    replicas = cuts(8, [(0, first_half), (1, first_half)], [(1, first_half)]).replicas
    assert replicas == ()


@settings(deadline=None, max_examples=150)
@given(moves(), st.data())
def test_a_table_has_the_parts_of_a_list(move, data):
    shape, sources, targets = move
    devices = sorted({device for device, _ in [*sources, *targets]})
    chosen = st.sets(st.sampled_from(devices))
    given_arguments = {
        "lost": data.draw(chosen),
        "group_of": data.draw(
            st.just({}) | st.fixed_dictionaries({d: st.integers(0, 1) for d in devices})
        ),
        "sent_before": [(device, 3) for device in data.draw(chosen)],
    }
    results = []
    for many in (0, 10**9):
        with mock.patch.object(parts_module, "_MANY_SHARDS", many):
            results.append(cuts(16, sources, targets, **given_arguments))
    table, listed = results
    # Without elements there is no table to make.
    assert (type(table.rows) is not type(listed.rows)) == (0 not in shape)
    assert table.all == listed.all
    assert table.missing == listed.missing
    assert table.replicas == listed.replicas
    assert list(table.links.items()) == list(listed.links.items())
    assert table.rows.least_memory_bytes == listed.rows.least_memory_bytes
    for limit in (None, 3):
        for group, other in zip(
            table.rows.groups(limit), listed.rows.groups(limit), strict=True
        ):
            assert (group.form, group.is_local) == (other.form, other.is_local)
            assert group.memory_bytes == other.memory_bytes
            assert rows_of(group) == rows_of(other)


def rows_of(group):
    columns = (group.senders, group.receivers, group.sources, group.targets)
    return sorted(zip(*[column.tolist() for column in columns], strict=True))


@given(moves(), st.dictionaries(st.integers(0, 40), st.integers(0, 10**6)))
def test_earlier_loads_change_senders_only(move, sent):
    _, sources, targets = move
    plain = cuts(8, sources, targets)
    loaded = cuts(8, sources, targets, sent_before=plain.sent_before(sent))
    parts = [part[1:] for part in plain.all]
    assert parts == [part[1:] for part in loaded.all]
    assert loaded.all == cuts(8, sources, targets, sent_before=sent.items()).all
    assert plain.wire_bytes == loaded.wire_bytes
    assert plain.replicas == loaded.replicas


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_rounds_are_matchings_and_as_few_as_possible(data):
    count = data.draw(st.integers(1, 6))
    cut = [(2 * i, 2 * i + 2) for i in range(count)]
    replicas = data.draw(st.integers(1, 3))
    sources = [(i, (cut[i % count],)) for i in range(count * replicas)]
    picked = data.draw(
        st.lists(st.sampled_from([*cut, (0, 2 * count)]), min_size=1, max_size=8)
    )
    targets = [(100 + i, (box,)) for i, box in enumerate(picked)]
    parts = cuts(8, sources, targets).all
    senders = np.array([part.sender for part in parts])
    receivers = np.array([part.receiver for part in parts])
    rounds = matchings(senders, receivers)
    assert sorted(np.concatenate(rounds).tolist()) == list(range(len(parts)))
    for devices in (senders, receivers):
        for rows in rounds:
            assert len(set(devices[rows].tolist())) == len(rows)
    assert len(rounds) == max(np.bincount(senders).max(), np.bincount(receivers).max())

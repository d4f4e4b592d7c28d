"""The time of a path on a torus, and the paths that it chooses."""

import dataclasses
import itertools as it
import math
import random

import jax
import numpy as np
import pytest
from _devices import chips as devices_of, objects
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from benchmarks._programs import lowered, program_of
from shardfx import MeshSpec, chips
from shardfx._reshard.steps.network import Network
from shardfx._reshard.steps.redistribution import paths_between
from shardfx._reshard.steps.times import TorusTimes
from shardfx.chips import _chip
from shardfx.cost import seconds, traffic
from tests.reshard.steps.step_layouts import check, layout, redistribute


V5P = chips.find("v5p")


def network_of(mesh, extents, chip=V5P):
    inside = {}
    for name, size, slice_count in zip(
        mesh.axis_names, mesh.axis_sizes, mesh.dcn_sizes, strict=True
    ):
        inside[name] = size // slice_count
    rings_by_axis = _chip.axes_on(chip, extents, inside)
    rings = []
    for name, slice_count in zip(mesh.axis_names, mesh.dcn_sizes, strict=True):
        if slice_count > 1:
            rings.append(())
        if inside[name] > 1:
            rings.append(rings_by_axis[name])
    return Network(
        rings=tuple(rings),
        link_bytes_per_second=chip.link_bytes_per_second,
        dcn_bytes_per_second=chip.dcn_bytes_per_second,
        hop_seconds=chip.hop_seconds,
    )


def on_torus(mesh, spec, rank, extents):
    network = network_of(mesh, extents)
    return dataclasses.replace(layout(mesh, spec, rank), network=network)


def kinds_of(plan):
    return [step.kind for step in plan.steps]


SQUARE = MeshSpec({"a": 8, "b": 8})


def test_a_transposed_square_gathers_what_fewer_messages_bring():
    ends = [on_torus(SQUARE, spec, 1, (8, 8, 1)) for spec in (P("a"), P("b"))]
    plan = redistribute((1 << 24,), 32, *ends)
    assert kinds_of(plan) == ["slice", "permute", "all_gather"]
    on_a_switch = [dataclasses.replace(end, network=None) for end in ends]
    permuted = redistribute((1 << 24,), 32, *on_a_switch)
    assert kinds_of(permuted) == ["permute"]
    assert permuted.wire_bytes < plan.wire_bytes
    check((64,), *ends)


def test_a_gather_slices_first_to_use_another_ring():
    src, dst = (on_torus(SQUARE, spec, 1, (8, 8, 1)) for spec in (P("a"), P()))
    plan = redistribute((1 << 24,), 32, src, dst)
    assert kinds_of(plan) == ["slice", "all_gather"]
    check((64,), src, dst)
    # 63 of 64 parts over the links of two rings, in place of 7 of 8 over those of one.
    times = [time.link_share for time in paths_between((64,), src, dst).times]
    assert times == pytest.approx([7 / 16, 63 / 256])
    # 72 elements have no 64 parts.
    plan = redistribute((72,), 1 << 30, src, dst)
    assert kinds_of(plan) == ["all_gather"]


def test_a_gather_over_all_of_three_rings_is_an_all_reduce():
    mesh = MeshSpec({"a": 4, "b": 4, "c": 4})
    src, dst = (on_torus(mesh, spec, 1, (4, 4, 4)) for spec in (P("a"), P()))
    paths = paths_between((64,), src, dst)
    # 15 of 16 parts over two rings, in place of 3 of 4 over one; over three rings it
    # would be 2 * 63 of 64.
    links = [time.link_share for time in paths.times]
    assert links == pytest.approx([3 / 8, 15 / 64])
    assert paths.paths[1][-1].source.shard_count == 16
    whole = on_torus(mesh, P(("a", "b", "c")), 1, (4, 4, 4))
    [time] = paths_between((64,), whole, dst).times
    assert time.link_share == pytest.approx(2 * 63 / 64 / 6)


def test_a_small_array_takes_the_path_of_the_fewest_hops():
    ends = [on_torus(SQUARE, spec, 1, (8, 8, 1)) for spec in (P("a"), P("b"))]
    plan = redistribute((64,), 32, *ends)
    assert kinds_of(plan) == ["permute"]


def test_the_time_of_a_permute_and_of_a_gather():
    ends = [on_torus(SQUARE, spec, 1, (8, 8, 1)) for spec in (P("a"), P("b"))]
    network = ends[0].network
    assert network is not None
    assert network.rings == ((_chip.Ring(8, True),), (_chip.Ring(8, True),))
    permuted, *_ = paths_between((64,), *ends).paths
    time = TorusTimes(ends[0], network).of_path(permuted)
    # All messages of a column go to one row first: three from one side of the ring, and
    # half of the one from the other end.
    assert time.link_share == pytest.approx(3.5 / 8)
    assert time.hops == 8
    whole = on_torus(SQUARE, P(), 1, (8, 8, 1))
    gathered, *_ = paths_between((64,), ends[0], whole).paths
    time = TorusTimes(ends[0], network).of_path(gathered)
    assert time.link_share == pytest.approx(7 / 8 / 2)
    assert time.hops == 4


@pytest.mark.parametrize("axes", [{"a": 2, "b": 4}, {"a": 2, "b": 2, "c": 2}])
def test_times_are_those_of_seconds(axes):
    extents = (*axes.values(), *[1] * (3 - len(axes)))
    spec_mesh = MeshSpec(axes)
    grid = np.array(jax.devices()[:8]).reshape(tuple(axes.values()))
    mesh = Mesh(grid, tuple(axes))
    names = [*axes]
    specs = [P(), P(("a", "b"))]
    for first, second in it.permutations(names, 2):
        specs += [P(first, second), P(None, first), P((first, second))]
    rng = random.Random(0)
    shape = (64, 96)
    moves = 0
    while moves < 6:
        specs_of_ends = rng.sample(specs, 2)
        src, dst = (on_torus(spec_mesh, spec, 2, extents) for spec in specs_of_ends)
        divisible_counts = tuple(math.gcd(size, src.size) for size in shape)
        [path, *_] = paths_between(divisible_counts, src, dst).paths
        if all(step.kind == "slice" for step in path):
            continue
        moves += 1
        assert src.network is not None
        time = TorusTimes(src, src.network).of_path(path)
        predicted = time.seconds(4 * 64 * 96, src.network)
        on_a_switch = [dataclasses.replace(end, network=None) for end in (src, dst)]
        plan = redistribute(shape, 32, *on_a_switch)
        source, target = (NamedSharding(mesh, spec) for spec in specs_of_ends)
        program = program_of(plan, 2, source, target)
        dtype = np.dtype(np.float32)
        compiled = lowered(program, shape, dtype, source, target).compile()
        sent = traffic(compiled, spec_mesh)
        extents_text = "x".join(map(str, extents))
        expected = seconds(sent, V5P, spec_mesh, slice=extents_text).seconds
        assert predicted == pytest.approx(expected, rel=1e-3)


def test_no_more_bytes_cross_slices_for_less_time():
    mesh = MeshSpec({"s": 2, "a": 4, "b": 4}, dcn={"s": 2})
    moves = 0
    for names in it.permutations(("s", "a", "b", None), 2):
        specs = [P(name) for name in names]
        ends = [on_torus(mesh, spec, 1, (4, 4, 1)) for spec in specs]
        on_a_switch = [dataclasses.replace(end, network=None) for end in ends]
        fastest = check((64,), *ends)
        fewest = check((64,), *on_a_switch)
        large = redistribute((1 << 24,), 32, *ends)
        fewest_of_large = redistribute((1 << 24,), 32, *on_a_switch)
        assert fastest.dcn_bytes <= fewest.dcn_bytes
        assert large.dcn_bytes <= fewest_of_large.dcn_bytes
        moves += large.steps != fewest_of_large.steps
    assert moves


def test_tpu_devices_tell_their_torus():
    grid = objects(devices_of((4, 4, 1, 1), kind="TPU v5p", slices=2))
    mesh = Mesh(grid.reshape(8, 4), ("a", "b"))
    network = layout(mesh, P("a"), 1).network
    expected = Network(
        rings=((), (_chip.Ring(4, True),), (_chip.Ring(4, True),)),
        link_bytes_per_second=V5P.link_bytes_per_second,
        dcn_bytes_per_second=V5P.dcn_bytes_per_second,
        hop_seconds=V5P.hop_seconds,
    )
    assert network == expected
    # Chips of another mesh lie between those of two corners.
    corners = Mesh(grid[[0, 5]], ("a",))
    assert layout(corners, P("a"), 1).network is None
    gpus = objects(devices_of((4, 1, 1, 1), kind="NVIDIA H100"))
    assert layout(Mesh(gpus, ("a",)), P("a"), 1).network is None

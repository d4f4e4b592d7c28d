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


def on_square(spec):
    """A layout of one dimension on a square of 64 chips, whose rows and columns are
    rings.
    """
    return on_torus(SQUARE, spec, rank=1, extents=(8, 8, 1))


def on_cube(spec):
    """A layout of one dimension on a cube of 64 chips."""
    return on_torus(CUBE, spec, rank=1, extents=(4, 4, 4))


def on_a_switch(step_layout):
    """The layout without its torus: all devices are equally far apart."""
    return dataclasses.replace(step_layout, network=None)


def kinds_of(plan):
    return [step.kind for step in plan.steps]


def link_shares(paths):
    """The share of the array that the busiest link carries, for each path."""
    return [time.link_share for time in paths.times]


SQUARE = MeshSpec({"a": 8, "b": 8})
CUBE = MeshSpec({"a": 4, "b": 4, "c": 4})
# An array whose bytes decide, and not the hops of its messages.
LARGE = (1 << 24,)
RING_OF_8 = _chip.Ring(8, True)
RING_OF_4 = _chip.Ring(4, True)


def test_a_transposed_square_gathers_what_fewer_messages_bring():
    src = on_square(P("a"))
    dst = on_square(P("b"))
    plan = redistribute(LARGE, 32, src, dst)
    assert kinds_of(plan) == ["slice", "permute", "all_gather"]
    permuted = redistribute(LARGE, 32, on_a_switch(src), on_a_switch(dst))
    assert kinds_of(permuted) == ["permute"]
    assert permuted.wire_bytes < plan.wire_bytes
    check((64,), src, dst)


def test_a_gather_slices_first_to_use_another_ring():
    src = on_square(P("a"))
    dst = on_square(P())
    plan = redistribute(LARGE, 32, src, dst)
    assert kinds_of(plan) == ["slice", "all_gather"]
    check((64,), src, dst)
    # 63 of 64 parts over the links of two rings, in place of 7 of 8 over those of one.
    shares = link_shares(paths_between((64,), src, dst))
    assert shares == pytest.approx([7 / 16, 63 / 256])
    # 72 elements have no 64 parts.
    plan = redistribute((72,), 1 << 30, src, dst)
    assert kinds_of(plan) == ["all_gather"]


def test_a_gather_over_all_of_three_rings_is_an_all_reduce():
    dst = on_cube(P())
    paths = paths_between((64,), on_cube(P("a")), dst)
    # 15 of 16 parts over two rings, in place of 3 of 4 over one; over three rings it
    # would be 2 * 63 of 64.
    assert link_shares(paths) == pytest.approx([3 / 8, 15 / 64])
    last_step = paths.paths[1][-1]
    assert last_step.source.shard_count == 16
    divided = on_cube(P(("a", "b", "c")))
    shares = link_shares(paths_between((64,), divided, dst))
    assert shares == pytest.approx([2 * 63 / 64 / 6])


def test_a_small_array_takes_the_path_of_the_fewest_hops():
    plan = redistribute((64,), 32, on_square(P("a")), on_square(P("b")))
    assert kinds_of(plan) == ["permute"]


def test_the_time_of_a_permute_and_of_a_gather():
    src = on_square(P("a"))
    network = src.network
    assert network is not None
    assert network.rings == ((RING_OF_8,), (RING_OF_8,))
    times = TorusTimes(src, network)
    permuted, *_ = paths_between((64,), src, on_square(P("b"))).paths
    time = times.of_path(permuted)
    # All messages of a column go to one row first: three from one side of the ring, and
    # half of the one from the other end.
    assert time.link_share == pytest.approx(3.5 / 8)
    assert time.hops == 8
    gathered, *_ = paths_between((64,), src, on_square(P())).paths
    time = times.of_path(gathered)
    assert time.link_share == pytest.approx(7 / 8 / 2)
    assert time.hops == 4


@pytest.mark.parametrize("axes", [{"a": 2, "b": 4}, {"a": 2, "b": 2, "c": 2}])
def test_times_are_those_of_seconds(axes):
    sizes = tuple(axes.values())
    missing_dims = 3 - len(axes)
    extents = sizes + (1,) * missing_dims
    spec_mesh = MeshSpec(axes)
    grid = np.array(jax.devices()[:8]).reshape(sizes)
    mesh = Mesh(grid, tuple(axes))
    specs = [P(), P(("a", "b"))]
    for first, second in it.permutations(axes, 2):
        specs.append(P(first, second))
        specs.append(P(None, first))
        specs.append(P((first, second)))
    rng = random.Random(0)
    shape = (64, 96)
    dtype = np.dtype(np.float32)
    nbytes = math.prod(shape) * dtype.itemsize
    moves = 0
    while moves < 6:
        src_spec, dst_spec = rng.sample(specs, 2)
        src = on_torus(spec_mesh, src_spec, rank=2, extents=extents)
        dst = on_torus(spec_mesh, dst_spec, rank=2, extents=extents)
        divisible_counts = tuple(math.gcd(size, src.size) for size in shape)
        path, *_ = paths_between(divisible_counts, src, dst).paths
        if all(step.kind == "slice" for step in path):
            continue
        moves += 1
        assert src.network is not None
        time = TorusTimes(src, src.network).of_path(path)
        predicted = time.seconds(nbytes, src.network)
        plan = redistribute(shape, 32, on_a_switch(src), on_a_switch(dst))
        source = NamedSharding(mesh, src_spec)
        target = NamedSharding(mesh, dst_spec)
        program = program_of(plan, 2, source, target)
        compiled = lowered(program, shape, dtype, source, target).compile()
        sent = traffic(compiled, spec_mesh)
        extents_text = "x".join(map(str, extents))
        expected = seconds(sent, V5P, spec_mesh, slice=extents_text).seconds
        assert predicted == pytest.approx(expected, rel=1e-3)


def test_no_more_bytes_cross_slices_for_less_time():
    mesh = MeshSpec({"s": 2, "a": 4, "b": 4}, dcn={"s": 2})
    moves = 0
    for names in it.permutations(("s", "a", "b", None), 2):
        src_name, dst_name = names
        src = on_torus(mesh, P(src_name), rank=1, extents=(4, 4, 1))
        dst = on_torus(mesh, P(dst_name), rank=1, extents=(4, 4, 1))
        fastest = check((64,), src, dst)
        fewest = check((64,), on_a_switch(src), on_a_switch(dst))
        large = redistribute(LARGE, 32, src, dst)
        fewest_of_large = redistribute(LARGE, 32, on_a_switch(src), on_a_switch(dst))
        assert fastest.dcn_bytes <= fewest.dcn_bytes
        assert large.dcn_bytes <= fewest_of_large.dcn_bytes
        moves += large.steps != fewest_of_large.steps
    assert moves


def test_tpu_devices_tell_their_torus():
    grid = objects(devices_of((4, 4, 1, 1), kind="TPU v5p", slices=2))
    mesh = Mesh(grid.reshape(8, 4), ("a", "b"))
    network = layout(mesh, P("a"), 1).network
    expected = Network(
        rings=((), (RING_OF_4,), (RING_OF_4,)),
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

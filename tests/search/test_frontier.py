"""Time against memory, and devices against time, by searches for several batches and numbers of devices."""

import jax.numpy as jnp
import pytest
from models import mlp_step

import shardfx
from shardfx.auto import Limits, frontier, search
from shardfx.errors import MeshError, RuleError


step, *ARGS = mlp_step(256, 1024, 512, "float32")


@pytest.fixture(scope="module")
def drawn():
    return frontier(step, *ARGS, devices=(4, 16), chip="v5e", batches=(512, 4096))


def test_each_point_is_smaller_than_all_that_are_faster(drawn):
    assert {(point.devices, point.batch) for point in drawn.points} == {(4, 512), (4, 4096), (16, 512), (16, 4096)}
    for devices in (4, 16):
        for batch in (512, 4096):
            points = drawn.of(devices, batch)
            assert len(points) >= 1 and all(point.candidate.mesh.size == devices for point in points)
            for faster, smaller in zip(points, points[1:], strict=False):
                assert faster.candidate.seconds < smaller.candidate.seconds
                assert faster.candidate.memory_bytes > smaller.candidate.memory_bytes


def test_the_fastest_is_what_a_search_finds(drawn):
    best = search(step, *ARGS, devices=16, chip="v5e", keep=1)[0]
    (first,) = (point for point in drawn.fastest() if (point.devices, point.batch) == (16, 512))
    assert (first.candidate.seconds, first.candidate.title) == (best.seconds, best.title)


def test_more_devices_take_less_time_and_print(drawn):
    assert drawn.of(16, 4096)[0].candidate.seconds < drawn.of(4, 4096)[0].candidate.seconds
    point = drawn.of(4, 512)[0]
    assert point.per_second == pytest.approx(512 / point.candidate.seconds)
    assert "examples/s" in str(drawn) and point.candidate.title in str(drawn)
    assert point.candidate.plans[0].mesh == point.candidate.mesh and point.candidate.code()


def test_slices_and_what_does_not_fit():
    limits = Limits(free_bytes=shardfx.chips.find("v5e").usable_hbm_bytes - 1000)
    points = frontier(step, *ARGS, devices=(8,), chip="v5e", slices=2, limits=limits).points
    ones = [point.candidate for point in points]
    assert ones and not any(one.fits for one in ones) and ones[0].mesh.dcn_sizes.count(2) == 1


def test_what_cannot_be_drawn():
    with pytest.raises(MeshError, match="`devices` is empty; give numbers or slices"):
        frontier(step, *ARGS, devices=(), chip="v5e")
    with pytest.raises(MeshError, match="`slices=3` does not divide 8 devices"):
        frontier(step, *ARGS, devices=(8,), chip="v5e", slices=3)
    with pytest.raises(RuleError, match='`batches` needs a dimension called "batch", and `name_axes` finds none'):
        frontier(lambda p: jnp.tanh(p["up"] @ p["down"]), ARGS[0], devices=(8,), chip="v5e", batches=(8,))

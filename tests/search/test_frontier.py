"""Time against memory, and devices against time, by searches for several batches and
numbers of devices.
"""

import jax.numpy as jnp
import pytest
from models import f32, mlp_step

import shardfx
from shardfx.auto import Limits, frontier, search
from shardfx.errors import MeshError, RuleError


step, *ARGS = mlp_step(256, 1024, 512, "float32")


@pytest.fixture(scope="module")
def drawn():
    return frontier(step, *ARGS, devices=(4, 16), chip="v5e", batches=(4096,))


def test_each_point_is_smaller_than_all_that_are_faster(drawn):
    assert {(point.devices, point.batch) for point in drawn.points} == {
        (4, 4096),
        (16, 4096),
    }
    for devices in (4, 16):
        points = drawn.of(devices, 4096)
        assert points and all(point.candidate.mesh.size == devices for point in points)
        for faster, smaller in zip(points, points[1:], strict=False):
            assert faster.candidate.seconds < smaller.candidate.seconds
            assert faster.candidate.memory_bytes > smaller.candidate.memory_bytes


def test_the_fastest_is_what_a_search_finds(drawn):
    best = search(step, ARGS[0], f32(4096, 256), devices=16, chip="v5e", keep=1)[0]
    less, first = drawn.fastest()
    assert (first.candidate.seconds, first.candidate.title) == (
        best.seconds,
        best.title,
    )
    assert first.candidate.seconds < less.candidate.seconds
    assert first.per_second == pytest.approx(4096 / best.seconds)
    assert "examples/s" in str(drawn) and best.title in str(drawn)
    assert (
        first.candidate.plans[0].mesh == first.candidate.mesh and first.candidate.code()
    )


def test_slices_and_what_does_not_fit():
    limits = Limits(free_bytes=shardfx.chips.find("v5e").usable_hbm_bytes - 1000)
    points = frontier(
        step, *ARGS, devices=(8,), chip="v5e", slices=2, limits=limits
    ).points
    ones = [point.candidate for point in points]
    assert (
        ones
        and not any(one.fits for one in ones)
        and ones[0].mesh.dcn_sizes.count(2) == 1
    )


def test_what_cannot_be_drawn():
    with pytest.raises(MeshError, match="`devices` is empty; give numbers or slices"):
        frontier(step, *ARGS, devices=(), chip="v5e")
    with pytest.raises(MeshError, match="`slices=3` does not divide 8 devices"):
        frontier(step, *ARGS, devices=(8,), chip="v5e", slices=3)
    with pytest.raises(
        RuleError,
        match='`batches` needs a dimension called "batch", and `name_axes` finds none',
    ):
        frontier(
            lambda p: jnp.tanh(p["up"] @ p["down"]),
            ARGS[0],
            devices=(8,),
            chip="v5e",
            batches=(8,),
        )

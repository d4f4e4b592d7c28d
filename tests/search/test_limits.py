"""Each limit of a search holds, and one that leaves nothing is told by name."""

import math

import jax.numpy as jnp
import pytest
from models import f32, sgd, space_of

import shardfx
from shardfx import AxisRules
from shardfx.auto import Limits, search
from shardfx.auto._space import fastest
from shardfx.errors import RuleError, SpecError


def step(p, x):
    return sgd(lambda p, x: jnp.mean((jnp.tanh(x @ p["up"]) @ p["down"]) ** 2))(p, x)


ARGS = {"up": f32(64, 256), "down": f32(256, 64)}, f32(48, 64)


def found(**limits):
    return fastest(space_of((step, *ARGS), 8, "v5e", Limits(**limits)), 8)


def cuts(one, name):
    return math.prod(one.mesh.shape[axis] for axis, names in one.assignments if name in names)


def test_names_that_are_never_or_always_cut():
    assert all(cuts(one, "mlp") == 1 for one in found(never=("mlp",)))
    assert all(cuts(one, "mlp") > 1 for one in found(always=("mlp",)))


def test_at_least_so_much_data_parallelism():
    assert all(cuts(one, "batch") >= 4 for one in found(least=(("batch", 4),)))


def test_axes_that_must_exist():
    for one in found(axes=("tensor",)):
        assert "tensor" in one.mesh.shape
    for one in found(axes=(("tensor", 4), "data")):
        assert one.mesh.shape["tensor"] == 4 and one.mesh.shape["data"] == 2


def test_memory_that_must_stay_free():
    chip = shardfx.chips.find("v5e")
    usable = chip.usable_hbm_bytes // chip.devices_per_chip
    tight = found(free_bytes=usable - 60_000)
    assert all(one.fits and one.memory_bytes <= 60_000 for one in tight)
    (one,) = search(step, *ARGS, devices=8, chip="v5e", limits=Limits(free_bytes=usable - 1000))
    assert not one.fits and "nothing fits" in one.reasons[0]


def test_rules_that_are_kept_leave_the_sizes_to_choose():
    rules = AxisRules([("batch", "a"), ("mlp", "b")])
    kept = found(rules=rules)
    assert {tuple(names) for one in kept for _, names in one.assignments} <= {("batch",), ("mlp",)} and len(kept) > 2


def test_the_number_of_axes():
    assert all(len(one.mesh.shape) == 1 for one in found(most_axes=1))


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        # 48 rows are never in 32 pieces.
        ({"least": (("batch", 32),)}, r"of 8 devices .* without `least='batch' in 32` there is one"),
        ({"never": ("batch",), "least": (("mlp", 16),)}, "without `least='mlp' in 16` there is one"),
        ({"axes": (("tensor", 3),)}, r"without `axes=\('tensor', 3\)` there is one"),
        (
            {"least": (("batch", 32),), "axes": (("tensor", 3),)},
            r"all of the limits together leave none: least='batch' in 32, axes=\('tensor', 3\)",
        ),
    ],
)
def test_a_limit_that_leaves_nothing_is_named(limits, message):
    with pytest.raises(SpecError, match=message):
        found(**limits)


def test_limits_that_contradict_themselves():
    with pytest.raises(RuleError, match="`limits` wants 'mlp' cut, and `never` forbids it; take it out of one"):
        Limits(never=("mlp",), always=("mlp",))
    with pytest.raises(RuleError, match="`least` wants 'batch' in 0 pieces; the fewest that there can be are 1"):
        Limits(least=(("batch", 0),))
    with pytest.raises(RuleError, match="`free_bytes` is -1; 0 leaves all memory to the step"):
        Limits(free_bytes=-1)
    with pytest.raises(RuleError, match="`axes` wants 2 mesh axes, and `most_axes` allows 1"):
        Limits(axes=("data", "tensor"), most_axes=1)
    with pytest.raises(RuleError, match="`axes` wants 'data' of size 1; an axis that shares something out has 2 or"):
        Limits(axes=(("data", 1),))
    with pytest.raises(
        RuleError, match="wants a mesh axis 'tensr', and no assignment of this step is called so.*tensor"
    ):
        found(axes=("tensr",))


def test_where_the_limits_leave_nothing_to_cut_they_are_to_blame():
    def step(params, x):
        return x @ params["w"]

    args = ({"w": f32(64, 32)}, f32(16, 64))
    names = tuple(axis.name for axis in shardfx.auto.name_axes(step, *args).axes)
    with pytest.raises(SpecError, match=r"within the limits; without `never='w_0'`, or without"):
        search(step, *args, devices=8, chip="v5e", limits=Limits(never=names))
    with pytest.raises(SpecError, match="7 devices; pad one, or use another number"):
        search(step, *args, devices=7, chip="v5e", limits=Limits(never=names))
    rules = AxisRules([("batch", "x")])
    with pytest.raises(SpecError, match=r"without `never='batch'`, or without `rules` there is one"):
        search(step, *args, devices=8, chip="v5e", limits=Limits(never=("batch",), rules=rules))
    with pytest.raises(SpecError, match=r"no mesh axis within the other limits cuts it; let `rules` cut it"):
        search(step, *args, devices=8, chip="v5e", limits=Limits(always=("w_1",), rules=rules))


def test_names_that_are_never_cut_are_not_by_rules_either():
    def step(params, x):
        return jnp.tanh(x @ params["up"]) @ params["down"]

    args = ({"up": f32(64, 256), "down": f32(256, 64)}, f32(16, 64))
    limits = Limits(never=("mlp",), rules=AxisRules([("batch", "x"), ("mlp", "x")]))
    for one in fastest(space_of((step, *args), 8, "v5e", limits), 8):
        assert all("mlp" not in names for _, names in one.assignments) and not any(one.plans[0]["up"].spec)

"""Each limit of a search holds, and one that leaves nothing is told by name."""

import math

import pytest
from models import mlp_step, space_of
from parts_of_search import fastest

import shardfx
from shardfx import AxisRules
from shardfx.auto import Limits
from shardfx.errors import RuleError, SpecError


MODEL = mlp_step(64, 256, 48)
USABLE = shardfx.chips.find("v5e").usable_hbm_bytes
TWO = AxisRules([("batch", "a"), ("mlp", "b")])


def found(**limits):
    space = space_of(MODEL, 8, "v5e", Limits(**limits))
    return fastest(space, 8)


def cuts(candidate, name):
    return math.prod(
        candidate.mesh.shape[axis]
        for axis, names in candidate.assignments
        if name in names
    )


@pytest.mark.parametrize(
    ("limits", "holds"),
    [
        ({"never": ("mlp",)}, lambda candidate: cuts(candidate, "mlp") == 1),
        ({"always": ("mlp",)}, lambda candidate: cuts(candidate, "mlp") > 1),
        ({"least": (("batch", 4),)}, lambda candidate: cuts(candidate, "batch") >= 4),
        ({"axes": ("tensor",)}, lambda candidate: "tensor" in candidate.mesh.shape),
        (
            {"axes": (("tensor", 4), "data")},
            lambda candidate: dict(candidate.mesh.shape) == {"data": 2, "tensor": 4},
        ),
        (
            {"free_bytes": USABLE - 60_000},
            lambda candidate: candidate.fits and candidate.memory_bytes <= 60_000,
        ),
        (
            {"rules": TWO},
            lambda candidate: (
                {names for _, names in candidate.assignments} <= {("batch",), ("mlp",)}
            ),
        ),
        (
            {"rules": AxisRules([("batch", "x"), ("mlp", "x")]), "never": ("mlp",)},
            lambda candidate: cuts(candidate, "mlp") == 1,
        ),
    ],
)
def test_a_limit_holds(limits, holds):
    ones = found(**limits)
    assert ones
    assert all(map(holds, ones))


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        # 48 rows are never in 32 pieces.
        (
            {"least": (("batch", 32),)},
            r"of 8 devices .* without `least=\('batch', 32\)` there is one",
        ),
        (
            {"never": ("batch",), "least": (("mlp", 16),)},
            r"without `least=\('mlp', 16\)` there is one",
        ),
        ({"axes": (("tensor", 3),)}, r"without `axes=\('tensor', 3\)` there is one"),
        (
            {"least": (("batch", 32),), "axes": (("tensor", 3),)},
            (
                r"all of the limits together leave none: least=\('batch', 32\),"
                r" axes=\('tensor', 3\)"
            ),
        ),
        (
            {"never": ("batch", "mlp", "embed")},
            r"within the limits .*; without `never='batch'`, or without",
        ),
        ({"never": ("batch", "mlp"), "rules": TWO}, r"without `rules` there is one"),
        (
            {"always": ("embed",), "rules": TWO},
            r"of 8 devices within the other limits divides its size 64; pad it, let",
        ),
    ],
)
def test_a_limit_that_leaves_nothing_is_named(limits, message):
    with pytest.raises(SpecError, match=message):
        found(**limits)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (
            {"never": ("mlp",), "always": ("mlp",)},
            "`limits` wants 'mlp' sharded, and `never` forbids it; take it out of one",
        ),
        (
            {"least": (("batch", 0),)},
            "`least` wants 0 shards of 'batch'; give 1 or more",
        ),
        ({"free_bytes": -1}, "`free_bytes` is -1; 0 leaves all memory to the step"),
        ({"axes": (("data", 1),)}, "`axes` wants 'data' of size 1; give 2 or more"),
        (
            {"axes": ("tensr",)},
            (
                "wants a mesh axis 'tensr', and no assignment of this step is called"
                " so.*tensor"
            ),
        ),
        (
            {"never": ("mpl",)},
            (
                "`limits` names 'mpl', which no dimension of the step's arguments has.*"
                " 'mlp'"
            ),
        ),
    ],
)
def test_limits_that_cannot_hold(limits, message):
    with pytest.raises(RuleError, match=message):
        found(**limits)

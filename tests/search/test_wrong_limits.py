"""The errors for limits and options of a search that are of a wrong type."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardfx import AxisRules, MeshSpec
from shardfx.auto import Limits, auto_axes, constrain_step, search
from shardfx.errors import LeafTypeError, MeshError, RuleError


RULES = AxisRules([("batch", "data")])
ARGS = (
    jax.ShapeDtypeStruct((64, 64), jnp.float32),
    jax.ShapeDtypeStruct((128, 64), jnp.float32),
)


def step(w, x):
    return w - jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        (
            {"always": "batch"},
            r"`always='batch'` must be .*write `always=\(\"batch\",\)",
        ),
        ({"never": "batch"}, r"`never='batch'` must be .*write `never=\(\"batch\",\)"),
        ({"never": {"batch": 1, 5: 2}}, "`never=.* must be a tuple of names"),
        ({"never": 5}, "`never=5` must be a tuple of names"),
        ({"least": (("batch", 2.5),)}, "`least=.* must be a tuple of pairs"),
        ({"least": (("batch", None),)}, "`least=.* must be a tuple of pairs"),
        ({"never": (5,)}, r"`never=\(5,\)` must be a tuple of names"),
        ({"least": 5}, r"`least=5` must be .*write `least=\(\(\"batch\", 8\),\)`"),
        ({"least": (("batch", "2"),)}, "`least=.* must be a tuple of pairs"),
        ({"least": ("batch", 8)}, "`least=.* must be a tuple of pairs"),
        ({"axes": "data"}, r"`axes='data'` must be .*write `axes=\(\"data\",\)"),
        ({"axes": (("data", 2.5),)}, "`axes=.* must be a tuple of names"),
        ({"free_bytes": "1 GiB"}, "`free_bytes='1 GiB'` is no number"),
    ],
)
def test_a_limit_of_a_wrong_type_is_named(limits, text):
    with pytest.raises(RuleError, match=text):
        Limits(**limits)


def test_free_bytes_may_be_a_number_of_numpy():
    limits = Limits(free_bytes=np.prod((1024, 1024)))  # pyright: ignore
    assert limits.free_bytes == 2**20


@pytest.mark.parametrize(
    "names",
    [
        ["mlp", "vocab"],
        {"vocab", "mlp"},
        frozenset(("vocab", "mlp")),
        {"mlp": 1, "vocab": 2}.keys(),
        iter(("mlp", "vocab")),
    ],
)
def test_names_come_in_any_collection(names):
    limits = Limits(never=names)
    assert limits == Limits(never=("mlp", "vocab"))
    assert hash(limits) == hash(Limits(never=("mlp", "vocab")))


def test_a_set_of_pairs_is_sorted():
    pairs: Any = {("mlp", 4), ("batch", 2)}
    assert Limits(least=pairs).least == (("batch", 2), ("mlp", 4))
    axes: Any = {"fsdp", ("data", 2), ("tensor", None)}
    assert Limits(axes=axes).wanted_axes == (
        ("data", 2),
        ("fsdp", None),
        ("tensor", None),
    )


def test_a_whole_float_is_a_number_and_none_is_any_size():
    least: Any = (("batch", 2.0),)
    axes: Any = (("data", None), ("fsdp", 4.0))
    limits = Limits(least=least, axes=axes)
    assert str(limits.least) == "(('batch', 2),)"
    assert limits.wanted_axes == (("data", None), ("fsdp", 4))


def test_rules_of_a_search_come_in_any_iterable():
    found = [
        search(step, *ARGS, devices=8, chip="v5e", keep=3, effort="least", also=also)
        for also in ([RULES], iter([RULES]), {5: RULES}.values())
    ]
    assert found[0] == found[1] == found[2]
    assert search(step, *ARGS, devices=8, chip="v5e", effort="least", also=iter(()))


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"limits": None}, RuleError, "`limits` must be of type Limits, not NoneType"),
        ({"limits": {"never": ()}}, RuleError, "`limits` must be .*auto.Limits"),
        (
            {"also": RULES},
            RuleError,
            r"`also`, of type .*, must be .*write `also=\[rules\]`",
        ),
        (
            {"also": [5]},
            RuleError,
            r"`also`, of type .*, must be .*write `also=\[rules\]`",
        ),
        ({"slices": "2"}, MeshError, "`slices='2'` is no number of slices, 1 or more"),
        ({"slices": 2.0}, MeshError, "`slices=2.0` is no number of slices"),
        ({"slices": 0}, MeshError, "`slices=0` is no number of slices"),
    ],
)
def test_an_option_of_a_wrong_type_is_named(options, error, text):
    with pytest.raises(error, match=text):
        search(step, *ARGS, devices=8, chip="v5e", **options)


def test_what_is_no_function_is_refused_before_it_is_called():
    with pytest.raises(LeafTypeError, match="`step` must be a function, not int"):
        constrain_step(5, MeshSpec({"data": 2}), RULES)  # pyright: ignore
    with pytest.raises(LeafTypeError, match="`function` must be a function, not int"):
        auto_axes(5, None, out=("batch",))  # pyright: ignore

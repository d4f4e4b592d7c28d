"""Maps that are wrong, odd or forged: one error that says what it is, or exactly what
NumPy makes.
"""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from maps import maps, same, written

from shardfx import From, TreeMap
from shardfx.errors import MapError


W = {"w": np.arange(12.0).reshape(3, 4)}
V = {**W, "v": np.ones(3)}
KEYS = {"k": jax.random.split(jax.random.key(3), 4)}
BYTES = {"w": np.ones((3, 4), np.int8)}


def leaf(path="w"):
    return From(path)


class Wrong(NamedTuple):
    """How a rule is made, the arrays, and what is said of it: an error may come with
    the expression or with the arrays.
    """

    make: Callable[[], From]
    arrays: dict[str, Any]
    message: str
    path: str


WRONG: dict[str, Wrong] = {}


def wrong(
    message: str,
    arrays: dict[str, Any] = W,
    *,
    path: str = "x",
    name: str | None = None,
):
    """Lists the function below as a wrong rule, under its own name or another."""

    def listed(make: Callable[[], From]):
        label = name or make.__name__.replace("_", " ")
        WRONG[label] = Wrong(
            make=make,
            arrays=arrays,
            message=message,
            path=path,
        )
        return make

    return listed


@wrong(r"`at` takes dim 5, and the array has 2 dimensions\.\n", path="x.{i}")
def at_dim():
    return leaf().at("i", dim=5)


@wrong(r"`stack` takes a whole number that is not negat")
def a_count():
    return leaf("w.{i}").stack("i", count=-1)


@wrong(r"the source has no `w.1`; near", arrays={"w.0": W["w"]})
def too_many():
    return leaf("w.{i}").stack("i", count=2)


@wrong(r"`stack` takes the name of a placeholder, not '6")
def a_name():
    return leaf("w.{i}").stack("6*i")


@wrong(r"`transpose\(0, 0\)` is no order of the 2 dimensions")
def order():
    return leaf().transpose(0, 0)


@wrong(r"`split` takes a whole number, not True")
def bools():
    return leaf().split(0, True, 3)


@wrong(r"nan is no whole number from -128 to 127, as", arrays=BYTES)
def nan():
    return leaf().pad_to(5, value=float("nan"))


@wrong(r"300 is no whole number from -128 to 127", arrays=BYTES)
def too_large():
    return leaf().pad_to(5, value=300)


@wrong(r"0.5 is no whole number from -128 to", arrays={})
def half():
    return From.constant(0.5, (2,), "int8")


@wrong(r"2 is no whole number from 0 to 1, as", arrays={})
def two():
    return From.constant(2, (2,), bool)


@wrong(r"`constant` takes the sizes of an array, not \(-2,\)", arrays={})
def sizes():
    return From.constant(2, (-2,), "int8")


@wrong(r"`cast` takes a dtype, not 'float99'")
def dtype():
    return leaf().cast("float99")


@wrong(r"`cast` takes a dtype, not 'S'")
def no_dtype_of_arrays():
    return leaf().cast("S")


@wrong(r"`cast` takes a dtype, not '999")
def a_long_text():
    return leaf().cast("9" * 5000)


@wrong(r"`cast` takes a dtype, not None")
def no_dtype():
    return leaf().cast(None)


@wrong(r"to int8, which has no imaginary", arrays={"w": np.ones(3, np.complex64)})
def complex():
    return leaf().cast("int8")


@wrong(r"`concat` of different shapes, \[\(3,\), ", arrays=V)
def ranks():
    return From.concat([leaf(), leaf("v")], dim=1)


@wrong(r"3 elements into sizes \(-1, 2\), which no value of -1 fits")
def an_odd_count():
    return leaf().split(0, -1, 2)


@wrong(r"`scale` takes the size of a block, 1 or more, not 0", arrays=V)
def block():
    return leaf().scale("v", block=(0, 1))


@wrong(r"key<fry> cannot be cast to int32: a PRNG key means", arrays=KEYS)
def key_cast():
    return leaf("k").cast("int32")


@wrong(r"<fry> is not multipl", arrays={**KEYS, "v": np.ones(1)})
def key_scale():
    return leaf("k").scale("v", block=(4,))


@wrong(r"`times` takes a finite number that is not 0, not inf")
def times_inf():
    return leaf().times(float("inf"))


@wrong(r"`times` takes a finite number that is not 0, not 1000")
def times_much():
    return leaf().times(10**400)


@wrong(r"`constant` takes a number, not 1000", arrays={})
def much():
    return From.constant(10**400, (2,), "float32")


@wrong(r"of shape \(138[0-9]*, 4\) has more elem")
def more_than_64_bits():
    return leaf().repeat(2**62).slice(0, 4)


@wrong(r"has more elements than any memory", arrays={})
def none_of_so_many():
    return From.constant(0, (2**62, 0), "int8")


@wrong(r"int8 takes no arithmetic with 2.0: cast it to a floa", arrays=BYTES)
def integers():
    return leaf().times(2)


@wrong(r"key<fry> takes no arithmetic with 1.0: cast it to a flo", arrays=KEYS)
def key_plus():
    return leaf("k").plus(1)


@wrong(r"PRNG keys cannot be made of a number; stack or concat keys", arrays=KEYS)
def key_pad():
    return leaf("k").pad_to(6)


@pytest.mark.parametrize("name", WRONG)
def test_wrong_rules_are_said(name):
    case = WRONG[name]
    with pytest.raises(MapError, match=case.message) as caught:
        TreeMap({case.path: case.make()}).apply(case.arrays)
    # What the rule would have used is not named as a second mistake.
    assert case.path != "x" or "source `" not in str(caught.value)


STEP = (
    '{"version": 1, "steps": [{"rules": [%s], "drop": [], "casts": false, "inverted":'
    " false}]}"
)


def forged(*rule):
    return STEP.replace("%s", json.dumps(["x", rule]))


LEAF = ["leaf", ["w"], []]
TWICE = '["x", ["leaf", ["v"], []]], ["x", ["leaf", ["w"], []]]'
FORGED = {
    "no path": (forged("leaf", [], []), r"`leaf` takes 1 arguments, not 0"),
    "a number": (forged("leaf", [3], []), r"`leaf` takes the path of a leaf, not 3"),
    "one part": (forged("scale", [1], [LEAF]), r"`scale` takes 2 expressions, not 1"),
    "more": (
        forged("stack", ["i", 0, 2, 3], [LEAF]),
        r"`stack` takes 3 arguments, not 4",
    ),
    "a float": (
        forged("at", [1.5, 0], [LEAF]),
        r"`at` takes a whole number, or a sum of placeholders, .*not 1.5",
    ),
    "text": (
        forged("pad_to", [5, 0, "a"], [LEAF]),
        r"`pad_to` takes a number, not 'a'",
    ),
    "a bool": (
        forged("plus", [True], [LEAF]),
        r"`plus` takes a finite number, not True",
    ),
    "a list": (
        forged("reshape", [[1]], [LEAF]),
        r"`reshape` takes a whole number, not \(1,\)",
    ),
    "an operation": (forged("open", ["w"], []), r"is no expression of a TreeMap"),
    "no steps": ('{"version": 1, "steps": []}', r"a TreeMap without a step"),
    "half a rule": (
        STEP.replace("%s", '["x"]'),
        r"no TreeMap's JSON \(ValueError: not enough",
    ),
    "a rule twice": (
        STEP.replace("%s", TWICE),
        r"\(ValueError: two rules make the same leaf\)",
    ),
    "dropped text": (
        forged(*LEAF).replace('"drop": []', '"drop": "w"'),
        r"\(TypeError: `drop` is 'w'\)",
    ),
    "a word": (
        forged(*LEAF).replace('"inverted": false', '"inverted": "false"'),
        r"`inverted` is 'false'",
    ),
    "a number for yes": (
        forged(*LEAF).replace('"casts": false', '"casts": 0'),
        r"`casts` is 0",
    ),
    "a step": (
        '{"version": 1, "steps": [1]}',
        r"this is no TreeMap's JSON \(TypeError: a step is 1\)",
    ),
    "a text of steps": ('{"version": 1, "steps": "x"}', r"a step is 'x'"),
    "without a direction": (
        forged(*LEAF).replace(', "inverted": false', ""),
        r"KeyError: 'inverted'",
    ),
    "a version": (
        forged(*LEAF).replace('"version": 1', '"version": true'),
        r"a TreeMap of version True; this reads",
    ),
    "a brace": (
        forged("leaf", ["{"], []),
        r"the path `\{` has a brace without its other half",
    ),
}


@pytest.mark.parametrize("text, message", FORGED.values(), ids=FORGED)
def test_forged_json_is_refused(text, message):
    with pytest.raises(MapError, match=message) as caught:
        TreeMap.from_json(text)
    assert "MapError" not in str(caught.value)


@pytest.mark.parametrize("field", ['"drop": [], ', '"casts": false, '])
def test_an_argument_with_a_default_may_be_missing(field):
    text = forged(*LEAF)
    assert field in text
    assert TreeMap.from_json(text.replace(field, "")) == TreeMap({"x": "w"})


ODD_NAMES = [
    "a.b[0]",
    "(x|y)*",
    "^$",
    "",
    "a\\b",
    "a\nb",
    "\x00",
    "%s",
    "ü/日本",
    "a'b\"c`",
    "model..weight/",
]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_names_are_taken_as_they_are(name):
    tree_map = TreeMap({name: From(name)})
    assert TreeMap.from_json(tree_map.to_json()) == tree_map
    actual = eval(str(tree_map.rules[name]))
    assert actual == tree_map.rules[name]
    applied = tree_map.apply({name: W["w"]})[name]
    same(applied, W["w"])
    replaced = name.replace(".", "x") + "y"
    for other in ("x", name + "x", replaced):
        with pytest.raises(MapError, match="the source has no"):
            tree_map.apply({other: W["w"]})


def test_names_in_a_circle():
    arrays = {name: np.full(2, number) for number, name in enumerate("abc")}
    circle = TreeMap({"a": "b", "b": "c", "c": "a"})
    applied = circle.then(circle).apply(arrays)
    actual = [int(applied[name][0]) for name in "abc"]
    assert actual == [2, 0, 1]
    for three in (
        circle.then(circle).then(circle),
        circle.then(circle.then(circle)),
        circle.then(circle.inverse()),
    ):
        for name, array in arrays.items():
            actual = three.apply(arrays, like=arrays)[name]
            assert (actual == array).all()


def test_numbers_of_numpy_are_plain_ones():
    dim = np.int64(0)
    size = np.int32(3)
    value = np.float32(2)
    tree_map = TreeMap({"x": leaf().split(dim, size).pad_to(5, value=value)})  # pyright: ignore[reportArgumentType]
    parts = leaf().split(0, 3)
    rules = {"x": parts.pad_to(5, value=2.0)}
    expected = TreeMap(rules)
    assert tree_map == TreeMap.from_json(tree_map.to_json()) == expected


def test_a_stack_of_so_many():
    rules = {"x": leaf("w.{i}").stack("i", count=2), "y": leaf("w.{i+2}").stack("i")}
    tree_map = TreeMap(rules)
    arrays = {f"w.{i}": np.full(3, i) for i in range(5)}
    applied = tree_map.apply(arrays)
    actual = applied["x"][:, 0].tolist()
    assert actual == [0, 1]
    actual = applied["y"][:, 0].tolist()
    assert actual == [
        2,
        3,
        4,
    ]
    assert str(tree_map.rules["x"]) == "From('w.{i}').stack('i', count=2)"
    assert TreeMap.from_json(tree_map.to_json()) == tree_map


A = np.arange(24, dtype=np.float32).reshape(4, 6)
B = np.ones((4, 6), np.float32)
LEAD_BACK = {
    "counted": ({"x": From("w.{i}").stack("i", count=1)}, {"w.0": A}),
    "no dimensions": (
        {"s": From("s.{i}").stack("i"), "t": From("t").reshape(1, 1)},
        {"s.0": np.float32(1), "s.1": np.float32(2), "t": np.array(3, np.int8)},
    ),
    "interleaved": (
        {
            "x": From.stacked([From("a"), From("b")], dim=2).merge(1),
            "y": From("a").pad_to(7),
        },
        {"a": A, "b": B},
    ),
    # Powers of two lose nothing; what was cast meanwhile goes back through the dtype in
    # which it was counted.
    "numbers": (
        {
            "x": From("x").T.times(0.25).plus(0),
            "n": From("n").times(4).cast("float32").times(0.5),
        },
        {"x": A, "n": A[0].astype(jnp.bfloat16)},
    ),
    **{
        impl: (
            {"x": From("k").reshape(2, 2).T.repeat(2)},
            {"k": jax.random.split(jax.random.key(3, impl=impl), 4)},
        )
        for impl in ("threefry2x32", "rbg")
    },
}


def leads_back(tree_map, arrays):
    """The inverse of a map, traced and with the arrays' own module, gives the arrays."""
    there = tree_map.apply(arrays)
    back = lambda tree: tree_map.inverse().apply(tree, like=arrays)
    for again in (
        back(there),
        jax.jit(back)({path: jnp.asarray(array) for path, array in there.items()}),
    ):
        for path, array in arrays.items():
            assert again[path].dtype == array.dtype
            is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
            if is_key:
                same(jax.random.key_data(again[path]), jax.random.key_data(array))
            else:
                same(again[path], array)


@pytest.mark.parametrize("rules, arrays", LEAD_BACK.values(), ids=LEAD_BACK)
def test_maps_lead_back(rules, arrays):
    leads_back(TreeMap(rules), arrays)


@settings(max_examples=10, deadline=None)
@given(maps(keeps_all=True, dtypes=("int32", "bfloat16")))
def test_random_maps_lead_back(case):
    leads_back(*written(case))


LAYERS = {f"layers.{i}.w": np.ones((4, 3), np.float32) for i in (0, 1, 3)}
LEFT_OUT = [
    (
        None,
        "layers.{i}.{x*}",
        (
            r"layers.3.w: `.stack\('i'\)` ends before it, at a number without a leaf;"
            r" give a count"
        ),
    ),
    (
        2,
        "layers.{i}.x",
        r"layers.\{i\}.x: `drop` names it, and the source has no such leaf",
    ),
]


@pytest.mark.parametrize("count, drop, message", LEFT_OUT)
def test_what_a_map_would_leave_out_is_named(count, drop, message):
    rule = leaf("layers.{i}.w").stack("i", count=count)
    with pytest.raises(MapError, match=message):
        TreeMap({"w": rule}, drop=[drop, "layers.3.w"]).apply(LAYERS)


def test_a_count_and_a_drop_leave_layers_out():
    rules = {"w": From("layers.{i}.w").stack("i", count=2)}
    tree_map = TreeMap(
        rules,
        drop=["layers.{i}.{x*}"],
        rest=["inv_freq"],
    )
    shape = tree_map.apply(LAYERS)["w"].shape
    assert shape == (2, 4, 3)
    assert TreeMap.from_json(tree_map.to_json()) == tree_map
    assert tree_map.rest == ("inv_freq",)
    applied = tree_map.apply(LAYERS | {"inv_freq": np.ones(2)})["w"]
    shape = applied.shape
    assert shape == (2, 4, 3)


def test_braces_do_not_subtract():
    with pytest.raises(MapError, match=r"`\{i-3\}` cannot be read: .* without a minus"):
        TreeMap({"moe/{i-3}": "layers.{i}"})


@pytest.mark.parametrize("braces", ["i*+1", "2*i*"])
def test_a_star_in_braces_stands_after_a_name_alone(braces):
    with pytest.raises(MapError, match="cannot be read: braces hold a name, or a sum"):
        TreeMap({"moe/{" + braces + "}": "layers.{i}"})


def test_a_star_before_a_space_matches_slashes():
    tree_map = TreeMap({"new/{name}": "old/{name}"}, drop=["rest/{name* }"])
    applied = tree_map.apply({"old/w": np.ones(2), "rest/a/b": np.ones(2)})
    assert list(applied) == ["new/w"]


def test_a_stack_that_says_how_many_needs_no_number_in_a_path():
    rows = np.arange(12).reshape(6, 2)
    rules = {"w": From("l").at("i").stack("i", count=6)}
    tree_map = TreeMap(rules)
    applied = tree_map.apply({"l": rows})
    np.testing.assert_array_equal(applied["w"], rows)
    with pytest.raises(
        MapError,
        match=r"in 1 place; .*(?s:.)*or give a count: `.stack\('i', count=...\)`",
    ):
        TreeMap({"w": From("l").at("i").stack("i")}).apply({"l": rows})


@pytest.mark.parametrize("braces", ["0*i", "00 * i", "0*i+j", "i+0*i+1"])
def test_a_factor_of_0_is_refused_and_not_counted(braces):
    path = "l/{" + braces + "}/w"
    arrays = {"l/0/w": np.ones(3)}
    with pytest.raises(MapError, match="multiplies `i` by 0, so that it names one pat"):
        TreeMap({"w": From(path).stack("i")}).apply(arrays)
    text = TreeMap({"w": From("l/{3*i}/w").stack("i")}).to_json()
    with pytest.raises(MapError, match="multiplies `i` by 0"):
        TreeMap.from_json(text.replace("3*i", braces)).apply(arrays)

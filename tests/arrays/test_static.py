"""What `filter_jit` does not trace is told apart by value and by type, and none of it
is kept for another call.
"""

import collections
import dataclasses
import enum
import gc
import inspect
import itertools
import itertools as it
import math
import weakref

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardfx import filter_jit
from shardfx.errors import LeafTypeError


X = np.ones(4, np.float32)


@dataclasses.dataclass(frozen=True)
class Config:
    value: object
    note: object = dataclasses.field(default=None, compare=False)


class Text(str):
    pass


class Level(enum.IntEnum):
    ONE = 1


Pair = collections.namedtuple("Pair", "a b")


class Module(eqx.Module):
    array: jax.Array | None
    value: object = eqx.field(static=True)
    leaf: object = None


def signed(value):
    """What a program may depend on, and equality does not see."""
    return f"{type(value).__name__} {value!r}"


DIFFERENT = [
    (1, 1.0),
    (1, True),
    (0.0, -0.0),
    (1 + 0j, 1),
    (complex(0.0, 0.0), complex(0.0, -0.0)),
    ("a", Text("a")),
    (1, Level.ONE),
    (frozenset({1}), frozenset({1.0})),
    (frozenset({(1, 2)}), frozenset({(1, True)})),
    (Config(1), Config(1.0)),
    (Config(Config((1, 2))), Config(Config((1, 2.0)))),
    (Config(frozenset({0.0})), Config(frozenset({-0.0}))),
]


def around(value):
    return {
        "leaf": value,
        "list": [1, {"deep": (value,)}],
        "pair": Pair(value, 2),
        "static field": Module(jnp.ones(2), value),
        "leaf of a module": Module(jnp.ones(2), "same", value),
        "module without arrays": Module(None, value),
        "nested in a field": Module(jnp.ones(2), (1, (value,))),
        "field of a dataclass": Config(value),
        "key": (
            {value: "text"}
            if not isinstance(value, complex | frozenset | Config)
            else value
        ),
    }


# Strings are compared as keys by what they say.
PLACED = [
    (pair, place)
    for pair, place in itertools.product(DIFFERENT, around(1))
    if place != "key" or not isinstance(pair[1], str)
]


@pytest.mark.parametrize("pair, place", PLACED, ids=str)
def test_equal_values_of_other_types_are_other_programs(pair, place):
    traced = []
    run = filter_jit(lambda x, tree: (traced.append(tree) or x, signed(tree)))
    for value in (*pair, *pair):
        values = around(value)[place]
        assert run(X, values)[1] == signed(values)
    assert len(traced) == 2


@pytest.mark.parametrize("place", list(around(1)))
@pytest.mark.parametrize(
    "value",
    [1, 2**40, 1.5, "text", (1, 2.0), frozenset({1, 2}), Config(3), Level.ONE],
    ids=str,
)
def test_equal_values_of_one_type_are_one_program(value, place):
    traced = []
    run = filter_jit(lambda x, tree: traced.append(tree) or x)
    for _ in range(3):
        # Equal, and not the same object.
        if value is not Level.ONE:
            again = eval(repr(value), {**globals(), "frozenset": frozenset})
        else:
            again = value
        run(X, around(again)[place])
    assert len(traced) == 1


ONE_PROGRAM = [
    (math.nan, float("nan"), np.float64("nan").item()),
    (Config(1, "a"), Config(1, 2)),  # a field that is not compared
    (np.float32(2), np.float32(3), jnp.float32(4)),  # arrays
]


@pytest.mark.parametrize("values", ONE_PROGRAM, ids=str)
def test_values_that_mean_the_same_are_one_program(values):
    traced = []
    run = filter_jit(lambda x, value: traced.append(value) or (x, value))
    for x, value in zip((X, jnp.asarray(X), X), values, strict=False):
        program = run(x, value)[1]
        assert program != program if isinstance(value, float) else program == value
    assert len(traced) == 1


class Token:
    """Hashed by identity."""


def test_calls_by_turns_are_traced_once():
    traced = []
    run = filter_jit(
        lambda tree, by: traced.append(by) or jax.tree.leaves(tree)[0] * by
    )
    trees = ([X], (X,), {"a": jnp.asarray(X)})
    for _ in range(3):
        gc.collect()
        for tree, by in it.product(trees, (2.0, 3.0, 2)):
            assert run(tree, by)[0] == by
    assert len(traced) == 9


def test_static_values_are_not_kept_alive():
    alive = weakref.WeakSet()

    def born():
        alive.add(token := Token())
        return token

    # A value is kept for the next call alone; in a structure it is kept with the
    # structure.
    for around_it, calls, most in (
        (lambda token: token, 20, 1),
        (lambda token: Module(None, token), 300, 200),
    ):
        run = filter_jit(lambda x, tree: x)
        with jax.disable_jit():  # each would be a program
            for _ in range(calls):
                run(X, around_it(born()))
        jax.clear_caches()
        gc.collect()
        assert 0 < len(alive) <= most


@pytest.mark.parametrize("value", [{1}, Config([1]), bytearray(b"a")], ids=str)
def test_what_cannot_be_hashed_is_named(value):
    with pytest.raises(
        LeafTypeError,
        match=r"is no array and cannot be hashed \(unhashable type: .*, so it can be",
    ):
        filter_jit(lambda x, tree: x)(X, value)


def test_a_static_field_need_not_be_hashable():
    run = filter_jit(lambda module: module.array + module.value[0])
    output = run(Module(jnp.ones(1), [1]))[0]
    assert output == 2
    output = run(Module(jnp.ones(1), [2]))[0]
    assert output == 3


def test_results_keep_their_order_and_their_functions():
    tree = {
        "b": (jnp.ones(2), jax.nn.relu, 3),
        "a": None,
        "c": [Module(jnp.zeros(1), "static", "leaf")],
    }
    out = filter_jit(lambda tree: tree)(tree)
    assert jax.tree.structure(out) == jax.tree.structure(tree)
    assert out["b"][1] is jax.nn.relu
    assert out["c"][0].leaf == "leaf"
    # Also of arrays alone.
    out = filter_jit(lambda x: {"b": (x, None), "a": [x + 1]})(jnp.zeros(1))
    expected = jax.tree.structure({"b": (0, None), "a": [0]})
    assert jax.tree.structure(out) == expected
    assert out["a"][0][0] == 1


def test_the_program_has_the_name_of_the_function():
    def my_step(x):
        return x

    assert "jit_my_step" in filter_jit(my_step).lower(X).as_text()
    assert inspect.unwrap(filter_jit(my_step)) is my_step


def test_it_nests_in_transformations():
    module = eqx.nn.Linear(4, 4, key=jax.random.key(0))
    run = filter_jit(lambda module, x, scale: (module(x) * scale).sum())
    grads = eqx.filter_grad(run)(module, X, 2.0)
    assert np.allclose(grads.bias, 2.0)
    shape = jax.vmap(lambda x: run(module, x, 2.0))(jnp.stack([X, X])).shape
    assert shape == (2,)
    bias = eqx.filter_grad(lambda module: filter_jit(module)(X).sum())(module).bias
    assert np.allclose(bias, 1.0)
    shape = filter_jit(lambda x: run(module, x, 2.0))(X).shape
    assert shape == ()


def test_defaults_count_and_so_do_names():
    traced = []
    run = filter_jit(lambda x, scale=2.0: traced.append(scale) or x * scale)
    runs = [run(X), run(X, 3.0), run(X), run(X, 2.0), run(X, scale=3.0)]
    actual = [float(run_result[0]) for run_result in runs]
    assert actual == [
        2,
        3,
        2,
        2,
        3,
    ]
    assert traced == [2.0, 3.0]


class Rounded(float):
    def __repr__(self):
        return f"{float(self):.1f}"


class Named(dict):
    def __hash__(self):  # pyright: ignore[reportIncompatibleVariableOverride]
        return 1


def test_equal_texts_and_equal_dicts_are_told_apart():
    by = filter_jit(lambda by, x: float(by) * x)
    assert by(Rounded(1.01), jnp.ones(1)) != by(Rounded(1.04), jnp.ones(1))
    of = filter_jit(lambda names, x: (2 if names["a"] is True else 3) * x)
    actual = of(Named(a=1, b=True), jnp.ones(1))
    assert actual == 3
    actual = of(Named(b=1, a=True), jnp.ones(1))
    assert actual == 2


def test_a_function_need_not_be_hashable():
    @dataclasses.dataclass
    class Times:
        by: float

        def __call__(self, x):
            return x * self.by

    class Layer(eqx.Module):
        weight: jax.Array
        sizes: list = eqx.field(static=True)

        def __call__(self, x):
            return x * self.weight * self.sizes[0]

    for fn in (Times(2.0), Layer(jnp.array(1.0), [2])):
        assert filter_jit(fn)(jnp.ones(())) == 2


def test_values_are_hashed_once_while_they_stay_the_same():
    class Counted:
        calls = 0

        def __hash__(self):
            Counted.calls += 1
            return 1

    by = filter_jit(lambda x, value: 2 * x)
    value = Counted()
    by(X, value)
    by(X, value)
    calls = Counted.calls
    for _ in range(5):
        by(X, value)
    assert Counted.calls == calls
    by(X, Counted())
    assert Counted.calls > calls

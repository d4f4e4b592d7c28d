"""`estimate` and `fit` warn of a step that XLA's partitioner computes wrongly."""

import dataclasses
import re
import warnings

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import shardfx as sfx
from shardfx.cost import _refuted
from shardfx.errors import WrongNumbersWarning


MESH = sfx.MeshSpec({"data": 2, "fsdp": 2, "tensor": 2}).abstract()
ROWS = P(("data", "fsdp"))


def struct(shape, spec):
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(MESH, spec))


X = struct((16, 32), ROWS)
W = struct((32, 32), P("tensor", "fsdp"))


def block(x, w):
    return x + jnp.tanh(x @ w)


def wrong(x, w):
    return block(block(x, w), w)


def right(x, w):
    rows = NamedSharding(MESH, ROWS)
    hold = lambda x: jax.lax.with_sharding_constraint(x, rows)
    return hold(block(hold(block(x, w)), w))


@pytest.mark.parametrize("ask", [sfx.cost.estimate, sfx.cost.fit])
def test_a_refutation_is_a_warning_with_its_line(ask):
    with pytest.warns(WrongNumbersWarning) as warned:
        ask(wrong, X, W)
    [warning] = warned
    assert warning.filename == __file__
    text = str(warning.message)
    assert re.search(
        r"wrongly: %\S+ \(add\) at test_refuted.py:\d+ block, called from ", text
    )
    assert "right would be" in text
    assert "constrain" in text
    assert "shardfx.testing.verify" in text


@pytest.mark.parametrize("ask", [sfx.cost.estimate, sfx.cost.fit])
def test_a_right_step_gives_no_warning(ask):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ask(right, X, W)


def test_the_number_of_operations_decides_what_is_judged(monkeypatch):
    monkeypatch.setattr(_refuted, "MOST_JUDGED", 10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sfx.cost.estimate(wrong, X, W)


def test_the_estimate_is_that_of_a_program_that_is_not_judged(monkeypatch):
    gradient = jax.grad(lambda x, w: right(x, w).sum(), 1)
    for compiler in ("tpu", "gpu"):
        shown = sfx.cost.estimate(gradient, X, W, compiler=compiler)
        with monkeypatch.context() as patch:
            patch.setattr(_refuted, "MOST_JUDGED", 0)
            others = sfx.cost.estimate(gradient, X, W, compiler=compiler)
        # The stacks have the lines of the two calls.
        pairs = zip(shown.rows, others.rows, strict=True)
        for row, other in pairs:
            assert dataclasses.replace(row, stack=()) == dataclasses.replace(
                other, stack=()
            )

"""Each leaf of a tree that is saved is written, is a definition of the program, or is
an error that names it.
"""

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools as ft
import itertools
import pathlib
import types

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import shardfx
from shardfx import PathRules, checkpoint
from shardfx.errors import CheckpointError


REPLICATE = PathRules.parse(".*->replicate")


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))


def planned(tree, mesh):
    plan = shardfx.plan(tree, mesh, paths=REPLICATE)
    return shardfx.shard(tree, plan), plan


class Speed(enum.IntEnum):
    fast = 1


@dataclasses.dataclass
class Statistics:
    """Not registered, so one leaf for JAX."""

    mean: object


class Held(eqx.Module):
    weight: jax.Array
    other: object


# Leaves that are no data: they are made again with the program.
DEFINITIONS = (
    jax.nn.gelu,
    jax.jit(jnp.sin),
    ft.partial(jnp.sum, axis=0),
    len,
    [].append,
    jnp.float32,
    np.dtype("float32"),
    Speed,
    Speed.fast,
)
DATA = (
    "text",
    b"bytes",
    pathlib.Path("data"),
    datetime.date(2026, 1, 1),
    fractions.Fraction(1, 3),
    decimal.Decimal("0.1"),
    range(3),
    slice(3),
    {1, 2},
    frozenset({1}),
    object(),
    Statistics(0.5),
    types.MappingProxyType({"a": 1}),
)
HIDDEN = (
    Statistics(jnp.ones(2)),
    Statistics({"of": [np.ones(2)]}),
    collections.deque([jnp.ones(2)]),
    types.MappingProxyType({"a": jnp.ones(2)}),
)


def test_each_leaf_is_saved_a_definition_or_an_error(tmp_path):
    """Alone, below a name, and in an Equinox module."""
    ones = jnp.ones(2)
    number = itertools.count()

    def saved(tree):
        path = tmp_path / str(next(number))
        checkpoint.save(path, tree)
        return checkpoint.read_index(path)

    for value in (ones, np.ones(2, np.float32), np.float32(1), jax.random.key(0)):
        assert set(saved({"a": ones, "b": value})) == {"a", "b"}
        assert set(saved(Held(ones, value))) == {"weight", "other"}
    for value in DEFINITIONS:
        assert set(saved({"a": ones, "b": value})) == {"a"}
        assert set(saved(Held(ones, value))) == {"weight"}
    for value in DATA:
        with pytest.raises(CheckpointError, match="1 other leaf: `b` "):
            saved({"a": ones, "b": value})
        assert set(saved(Held(ones, value))) == {"weight"}
    for value in HIDDEN:
        for tree in ({"a": ones, "b": value}, Held(ones, value)):
            with pytest.raises(CheckpointError, match="which is one leaf for JAX"):
                saved(tree)


def test_a_text_is_not_lost_without_a_word(tmp_path, mesh):
    state = {"w": jnp.arange(8.0), "names": {"run": "first", "host": b"a"}, "step": 3}
    arrays, plan = planned(state, mesh)
    message = "2 other leaves: `names/host` .*`names/run`"
    for arguments in ((arrays,), (arrays, plan)):
        with pytest.raises(CheckpointError, match=message):
            checkpoint.save(tmp_path / "c", *arguments)
    assert not list(tmp_path.iterdir())
    kept = eqx.filter(arrays, eqx.is_array_like)
    checkpoint.save(tmp_path / "c", kept, plan)
    loaded = checkpoint.load(tmp_path / "c", arrays)
    assert loaded["step"] == 3
    assert loaded["names"] == state["names"]


def test_texts_of_modules_are_made_again_as_functions_are(tmp_path, mesh):
    norm, counts = eqx.nn.make_with_state(eqx.nn.BatchNorm)(4, "batch", mode="batch")
    assert "batch" in jax.tree.leaves(norm)
    state, plan = planned({"model": (norm, counts), "step": 3}, mesh)
    checkpoint.save(tmp_path / "c", state, plan)
    loaded = checkpoint.load(tmp_path / "c", state)
    assert eqx.tree_equal(loaded, state)
    # Beside a module, a text is lost.
    with pytest.raises(CheckpointError, match="1 other leaf: `run` "):
        checkpoint.save(tmp_path / "d", {"model": norm, "run": "first"})

"""A hundred mistakes: the error of each has the part that is the fix."""

import re
from typing import Any

import equinox as eqx
import jax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import shardfx as sfx
from tests.house import (
    mistakes_of_arguments,
    mistakes_of_calls,
    mistakes_of_newcomers,
    mistakes_of_plans,
    mistakes_of_readers,
)
from tests.house.mistakes import ADAM, PLAN, SPEC


MISTAKES = {
    **mistakes_of_plans.MISTAKES,
    **mistakes_of_calls.MISTAKES,
    **mistakes_of_readers.MISTAKES,
    **mistakes_of_arguments.MISTAKES,
    **mistakes_of_newcomers.MISTAKES,
}


def test_there_are_a_hundred():
    assert len(MISTAKES) >= 100


@pytest.mark.parametrize("name", MISTAKES)
def test_the_message_of_a_mistake_has_the_fix(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mistake = MISTAKES[name]
    message = re.escape(mistake.fix)
    with pytest.raises((TypeError, ValueError, KeyError), match=message):
        mistake.make()


def test_a_mesh_spec_says_what_jax_takes_in_its_place():
    with pytest.raises(AttributeError, match=r"spec.build\(jax.devices\(\)\)"):
        NamedSharding(SPEC, P("data"))  # pyright: ignore[reportArgumentType]
    assert not hasattr(SPEC, "device")


def test_the_error_of_an_init_says_what_follow_called():
    with pytest.raises(TypeError) as raised:
        sfx.follow(ADAM.update, PLAN)
    assert "pass `optimizer.init`" in raised.value.__notes__[-1]


def test_a_function_among_arrays_is_told():
    network: Any = eqx.nn.MLP(2, 2, 2, 1, key=jax.random.key(0))
    with pytest.raises(TypeError) as raised:
        sfx.filter_jit(ADAM.init)(network)
    assert any("eqx.filter" in note for note in raised.value.__notes__)

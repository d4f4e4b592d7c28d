"""Values that say what to write for an operation that they lack are otherwise as values
without such operations.
"""

import collections.abc
import copy
import inspect
import operator
import pickle
from typing import Any

import jax
import pytest

from shardfx import (
    AxisRules,
    From,
    MeshSpec,
    PathRules,
    plan,
)


MESH = MeshSpec({"data": 4, "tensor": 2})
RULES = PathRules([("w", jax.P("data"))])
SHAPES = {"w": jax.ShapeDtypeStruct((8,), "float32")}
PLAN = plan(SHAPES, MESH, paths=RULES)
# Operations that type checkers would refuse.
NO_NAMES: Any = MESH
OTHER_RULES: Any = RULES
VALUES = [MESH, RULES, AxisRules([("embed", "data")]), PLAN, PLAN["w"], From("w")]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_value_is_copied_and_asked_for_attributes(value):
    for again in (copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
        assert again == value
    assert getattr(value, "another", 3) == 3
    # As it is while a copy of it is made.
    empty = object.__new__(type(value))
    for name in ("data", "another", "__deepcopy__"):
        assert not hasattr(empty, name)


@pytest.mark.parametrize("value", VALUES[1:3], ids=lambda value: type(value).__name__)
def test_what_refuses_an_index_says_what_to_iterate_over(value):
    with pytest.raises(TypeError, match=r"`iter\(.*\)`.*; write `\w+\.rules`"):
        list(value)
    with pytest.raises(TypeError, match=r"\[0\]`: .* does not support this; write"):
        value[0]


def test_path_rules_are_joined_by_their_pairs():
    with pytest.raises(
        TypeError, match=r"of other PathRules `rules.extend\(other.rules"
    ):
        operator.add(RULES, OTHER_RULES)
    assert RULES.extend(RULES.rules).rules == RULES.rules * 2


def test_axis_rules_are_joined_with_their_units():
    rules = AxisRules([("heads", "tensor")], units={"heads": 2})
    for join in (lambda: VALUES[2] + rules, lambda: VALUES[2].extend(rules)):
        with pytest.raises(
            TypeError, match=r"other AxisRules.* `rules.merge\(other\)`"
        ):
            join()
    assert VALUES[2].merge(rules).units == (("heads", 2),)


@pytest.mark.parametrize("value", [PLAN["w"], From("w")])
def test_what_has_one_value_is_not_iterable(value):
    assert not isinstance(value, collections.abc.Iterable)
    with pytest.raises(TypeError, match="object is not iterable"):
        list(value)


def test_what_has_names_says_where_they_are():
    with pytest.raises(
        TypeError, match=r"`'data' in spec`.*`'data' in spec.axis_names`"
    ):
        assert "data" in NO_NAMES
    with pytest.raises(
        TypeError, match=r"`'embed' in rules`.*`'embed' in rules.names`"
    ):
        assert "embed" in VALUES[2]


def test_a_told_method_is_as_other_methods():
    method = PLAN.sharding
    assert method == PLAN.sharding
    assert method.__name__ == "sharding"
    assert method.__doc__ == type(PLAN).sharding.__doc__
    parameters = inspect.signature(type(PLAN).sharding).parameters
    assert list(inspect.signature(method).parameters) == list(parameters)[1:]
    assert pickle.loads(pickle.dumps(method))(jax.P("data")) == method(jax.P("data"))

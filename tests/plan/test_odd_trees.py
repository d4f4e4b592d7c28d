"""What a plan's JSON holds of unusual trees: half characters in paths, keys that are
equal, modules that cannot be compared, and too many levels.
"""

import dataclasses
import functools as ft
import pickle
import sys
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from shardfx import AxisRules, MeshSpec, PathRules, ShardPlan, plan
from shardfx.errors import PlanFormatError


ROW = MeshSpec({"data": 4, "x\udcff": 2})
RULES_FOR_ALL = PathRules([("", P("data"))])


@ft.partial(jtu.register_dataclass, data_fields=["weight"], meta_fields=["table"])
@dataclasses.dataclass
class Tabled:
    """A module that cannot be compared, since NumPy's arrays cannot."""

    weight: jax.Array
    table: np.ndarray


SURROGATE_NAMES = AxisRules([("\udc80", "x\udcff")])
SURROGATES = {
    "a path": lambda x: plan({"a\ud800": {"\udfffb": x}}, ROW, paths=RULES_FOR_ALL),
    "a rule": lambda x: plan({"w": x}, ROW, paths=PathRules([("\ud800|w", P("data"))])),
    "a name": lambda x: plan(
        {"w": x}, ROW, names={"w": ("\udc80",)}, axes=SURROGATE_NAMES
    ),
}


@pytest.mark.parametrize("kind", SURROGATES)
def test_half_a_character_in_a_plan_is_read_again(kind):
    made = SURROGATES[kind](jnp.ones(8))
    restored = ShardPlan.from_json(made.to_json())
    assert restored == made
    assert list(restored) == list(made)
    assert pickle.loads(pickle.dumps(made)) == made


def test_a_tree_of_too_many_levels_is_a_format_error():
    tree: Any = jnp.ones(8)
    for _ in range(700):
        tree = {"k": tree}
    # Where the tests check types, planning takes more frames for each level.
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(4 * limit)
    made = plan(tree, ROW, paths=RULES_FOR_ALL)
    sys.setrecursionlimit(limit)
    for use in (made.to_json, lambda: made.digest, lambda: hash(made)):
        with pytest.raises(PlanFormatError, match="nested too deeply for JSON"):
            use()


def test_a_text_of_too_many_levels_is_a_format_error():
    text = plan({"k": jnp.ones(8)}, ROW, paths=RULES_FOR_ALL).to_json()
    leaf = '{"dict":[["k","leaf"]]}'
    assert leaf in text
    begin = '{"list":[' * 3000
    end = "]}" * 3000
    with pytest.raises(PlanFormatError, match="nested too deeply for JSON"):
        ShardPlan.from_json(text.replace(leaf, f"{begin}{leaf}{end}"))


EQUAL_KEYS = [{1: 0, 2: 0}, {True: 0, 2.0: 0}, {1.0: 0, 2: 0}]


def test_equal_keys_of_other_types_stay_in_json():
    tree = jax.tree.map(lambda _: jnp.ones(8), EQUAL_KEYS)
    made = plan(tree, ROW, paths=RULES_FOR_ALL)
    paths = ["0/1", "0/2", "1/True", "1/2.0", "2/1.0", "2/2"]
    assert list(made) == paths
    restored = ShardPlan.from_json(made.to_json())
    assert list(restored) == paths
    keys = [list(layer) for layer in restored.specs]
    assert keys == [[1, 2], ["2.0", "True"], ["1.0", "2"]]
    again = ShardPlan.from_json(made.to_json(), like=tree)
    assert again == made
    assert jax.tree.structure(again.specs) == jax.tree.structure(tree)


def test_plans_of_modules_with_arrays_as_static_fields_have_json():
    tree = [Tabled(jnp.ones(8), np.arange(size)) for size in (2, 2, 3)]
    made = plan(tree, ROW, paths=RULES_FOR_ALL)
    restored = ShardPlan.from_json(made.to_json())
    assert list(restored) == ["0/weight", "1/weight", "2/weight"]
    assert restored == made

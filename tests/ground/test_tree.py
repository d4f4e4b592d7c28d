import collections
import dataclasses
import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from hypothesis import given, strategies as st

from shardfx._ground.tree import flatten


Pair = collections.namedtuple("Pair", ["left", "right"])


@jtu.register_dataclass
@dataclasses.dataclass
class Record:
    x: object
    y: object


def expected_path(keys):
    """The path of a leaf from JAX's key paths, which `flatten` does not build."""
    return "/".join(
        str(getattr(key, "name", getattr(key, "key", getattr(key, "idx", None))))
        for key in keys
    )


leaves = st.integers(0, 9)
trees = st.recursive(
    st.one_of(leaves, st.none()),
    lambda inner: st.one_of(
        st.dictionaries(st.text("ab/0 ", max_size=3), inner, max_size=3),
        st.dictionaries(st.integers(0, 12), inner, max_size=3),
        st.lists(inner, max_size=4),
        st.builds(lambda x: [x] * 12, inner),
        st.tuples(inner, inner),
        st.builds(Pair, inner, inner),
        st.builds(Record, inner, inner),
        st.builds(lambda x, y: collections.OrderedDict(z=x, a=y), inner, inner),
        st.builds(lambda x: collections.defaultdict(int, k=x), inner),
    ),
    max_leaves=12,
)


@given(trees)
def test_paths_are_those_of_jax_and_templates_have_zeros(tree):
    flat = flatten(tree)
    keyed, treedef = jtu.tree_flatten_with_path(tree)
    assert flat.treedef == treedef
    assert flat.leaves == [leaf for _, leaf in keyed]
    expected = [expected_path(keys) for keys, _ in keyed]
    assert list(flat.paths) == expected
    zeros = str.maketrans("123456789", "000000000")
    expected = [path.translate(zeros) for path in flat.paths]
    assert list(flat.templates) == expected


def test_a_structure_that_comes_again_has_its_own_keys():
    flat = flatten({"a": [1, 2], "b": 3})
    for other in (
        {"a": [1, 2], "c": 3},
        {"a": (1, 2), "b": 3},
        {"b": 3, "a": [1, 2]},
        [[1, 2], 3],
    ):
        paths = list(flatten(other).paths)
        expected = [
            expected_path(keys) for keys, _ in jtu.tree_flatten_with_path(other)[0]
        ]
        assert paths == expected
    tree = {"a": [4, 5], "b": 6}
    paths = flatten(tree).paths
    assert paths == flat.paths == ("a/0", "a/1", "b")


class Shown(str):
    """A text that `str` shows as another, as members of enumerations may be."""

    def __str__(self):
        return f"shown {self!r}"


EQUAL_KEYS = {
    "numbers": [1, True, 1.0, 1 + 0j],
    "texts": ["red", Shown("red")],
}


@pytest.mark.parametrize("kind", EQUAL_KEYS)
@pytest.mark.parametrize("node", [dict, collections.OrderedDict])
def test_equal_keys_of_other_types_have_their_own_paths(kind, node):
    keys = EQUAL_KEYS[kind]
    texts = ["1", "True", "1.0", "(1+0j)"]
    if kind == "texts":
        texts = ["red", "red"]
    for key, text in [*zip(keys, texts, strict=True)] * 2:
        flat = flatten({"layers": node([(key, [0, 1])])})
        assert flat.paths == (f"layers/{text}/0", f"layers/{text}/1")
    both = flatten([node([(key, [0])]) for key in [*keys, *keys]])
    expected = [f"{number}/{text}/0" for number, text in enumerate([*texts, *texts])]
    assert list(both.paths) == expected
    zeros = str.maketrans("123456789", "000000000")
    assert list(both.templates) == [path.translate(zeros) for path in expected]


@ft.partial(jtu.register_dataclass, data_fields=["weight"], meta_fields=["table"])
@dataclasses.dataclass
class Tabled:
    weight: jax.Array
    table: np.ndarray


def test_static_fields_that_cannot_be_compared_are_no_hindrance():
    for size in (2, 2, 3):
        tree = Tabled(jnp.ones(2), np.arange(size))
        paths = flatten(tree).paths
        assert paths == ("weight",)
        several = {"a": [tree, Tabled(jnp.ones(2), np.arange(size))], "b": 1}
        paths = flatten(several).paths
        assert paths == ("a/0/weight", "a/1/weight", "b")


def test_only_arrays_are_arrays():
    tree = [
        jnp.ones(1),
        np.ones(1),
        np.float32(1),
        jax.ShapeDtypeStruct((1,), jnp.int8),
        jax.random.key(0),
    ]
    is_array = flatten([*tree, 1.0, 1, "s", print]).is_array
    assert is_array == [True] * 5 + [False] * 4
    seen = []
    jax.jit(lambda x: seen.append(flatten({"x": x}).is_array))(jnp.ones(2))
    assert seen == [[True]]


class Norms(eqx.Module):
    blocks: list[eqx.nn.BatchNorm]
    by_name: dict[str, eqx.nn.StateIndex]

    def __init__(self):
        self.blocks = [eqx.nn.BatchNorm(4, "batch", mode="batch") for _ in range(2)]
        self.by_name = {
            "a.b": eqx.nn.StateIndex(jnp.zeros(3)),
            "c/d": eqx.nn.StateIndex({"k": jnp.zeros(2)}),
        }


def test_states_of_modules_have_paths_that_name_the_module():
    _, state = eqx.nn.make_with_state(Norms)()
    parts = ("batch_counter", "batch_state_index/0", "batch_state_index/1")
    paths = list(flatten({"state": state}).paths)
    assert paths == [
        *[f"state/blocks.0.{part}" for part in parts],
        *[f"state/blocks.1.{part}" for part in parts],
        "state/by_name.a.b",
        "state/by_name.c.d/k",
    ]
    _, abstract = eqx.filter_eval_shape(eqx.nn.make_with_state(Norms))
    assert flatten(abstract).paths == flatten(state).paths
    _, alone = eqx.nn.make_with_state(lambda: eqx.nn.StateIndex(jnp.zeros(3)))()
    assert list(flatten(alone).paths) == ["StateIndex"]
    tree = eqx.nn.State(Norms())
    paths = flatten(tree).paths[:3]
    assert paths == ("0", "1/0", "1/1")

"""Plans as values: pickled, copied, read by path, and read from text that someone has tampered with."""

import copy
import json
import pickle
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import AxisType, PartitionSpec as P

from shardfx import (
    AxisRules,
    MeshSpec,
    PathRules,
    ShardPlan,
    fsdp,
    plan,
    replicate,
    report,
)
from shardfx.errors import PlanFormatError, PlanMismatchError


MESH = MeshSpec({"a": 2, "b": 4})
TREE = {"w": jnp.ones((8, 16)), "l": [jax.ShapeDtypeStruct((7,), jnp.bfloat16)] * 2, "t": (None, jnp.ones(3), "text")}
RULES = PathRules([("w", ("m", "n")), ("l", P("a")), (".*", fsdp("b"))])
AXES = AxisRules([("m", "a"), ("n", "b")], units={"n": 2}, modes={"x": [("m", None)]}, aliases={"z": "m"})
MADE = plan(TREE, MESH, paths=RULES, axes=AXES, mode="x", memory_kinds=[("w", "pinned_host")])


def trees() -> list[Any]:
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 8))
    return [TREE, eqx.nn.MLP(4, 4, 8, 1, key=jax.random.key(0)), {"keys": keys}, [], jnp.ones(8)]


@pytest.mark.parametrize("tree", trees(), ids=["dict", "module", "keys", "empty", "array"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("on", [False, True])
def test_a_plan_pickles_and_copies(tree, kind, on):
    spec = MeshSpec({"a": 2, "b": 4}, axis_types=kind)
    mesh = spec.build(jax.devices()[::-1]) if on else spec
    made = plan(tree, mesh, paths=PathRules([(".*", fsdp("a"))]), unmatched="replicate", unused="allow")
    for again in (pickle.loads(pickle.dumps(made)), copy.deepcopy(made), copy.copy(made)):
        assert again == made and hash(again) == hash(made) and again.leaves == made.leaves
        assert again.jax_mesh == made.jax_mesh and again.shardings == made.shardings
        assert jax.tree.structure(again.specs) == jax.tree.structure(made.specs)


def test_a_plan_read_from_json_pickles():
    model = eqx.nn.MLP(4, 4, 8, 1, key=jax.random.key(0))
    made = ShardPlan.from_json(plan(model, MESH, paths=PathRules([(".*", fsdp("a"))])).to_json())
    again = pickle.loads(pickle.dumps(made))
    assert again == made and again.specs == made.specs


def test_a_pickled_plan_needs_its_devices():
    made = plan(TREE, MESH.build(jax.devices()), paths=RULES, axes=AXES)
    make, (text, skeleton, order, devices) = made.content.__reduce__()
    assert make(text, skeleton, order, devices) == made.content
    for others in ([*devices[:-1], ("cpu", 99)], [("abc", number) for _, number in devices]):
        with pytest.raises(PlanMismatchError, match=r"that this process does not have \(.*pickle `plan.off\(\)`"):
            make(text, skeleton, order, others)


def test_off_drops_the_devices():
    mesh = MESH.build(jax.devices())
    made = plan(TREE, mesh, paths=RULES, axes=AXES)
    assert made.off().jax_mesh is None and made.off().digest == made.digest
    assert made.off() == plan(TREE, MESH, paths=RULES, axes=AXES) == made.off().off()
    assert made.off().on(mesh) == made


def test_a_plan_is_read_by_path():
    assert list(MADE) == [leaf.path for leaf in MADE.leaves] == ["l/0", "l/1", "t/1", "w"]
    assert len(MADE) == 4 and "w" in MADE and "t/1" in MADE
    assert "t/2" not in MADE and "t" not in MADE and 3 not in MADE
    assert all(MADE[path].path == path for path in MADE)
    nothing = plan({"f": "text"}, MESH, unused="allow")
    assert len(nothing) == 0 and list(nothing) == [] and nothing


DEEP: Any = []
for _ in range(300):
    DEEP = [DEEP]
HOSTILE = [
    *[None, True, -1, 1.5, 10**30, 2**63, "", "a", "\ud800", "leaf", DEEP, [], {}, [[]], [None], ["a", "a"]],
    *[{"a": 1}, {"dict": []}, {"list": [None]}, {"node": "x", "children": []}, {"int": "9" * 5000}],
    *[{"unconstrained": True}, {"atomic": "m", "unit": 0}, [["a", 2, "Auto", 1]], float("nan"), float("inf")],
]


def spots(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where in a JSON value something else could stand."""
    inner = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [path, *[spot for key, value in inner for spot in spots(value, (*path, key))]]


def edited(data: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    changed = copy.copy(data)
    changed[path[0]] = edited(data[path[0]], path[1:], value)
    return changed


PAYLOAD = {key: value for key, value in json.loads(MADE.to_json()).items() if key != "digest"}


@settings(max_examples=400)
@given(st.lists(st.tuples(st.sampled_from(spots(PAYLOAD)), st.sampled_from(HOSTILE)), min_size=1, max_size=2))
def test_an_edited_plan_is_valid_or_a_format_error(edits):
    data = PAYLOAD
    for path, value in edits:
        try:
            data = edited(data, path, value)
        except (KeyError, TypeError, IndexError):
            continue  # an earlier edit has taken the place away
    try:
        read = ShardPlan.from_json(json.dumps(data))
    except PlanFormatError:
        return
    assert ShardPlan.from_json(read.to_json()) == read and report(read) and len(read.leaves) == len(read)


@pytest.mark.parametrize(
    "text, message",
    [
        ("[" * 100_000, "maximum recursion depth"),
        ('{"a":' * 100_000, "maximum recursion depth"),
        ("1" * 5000, "Exceeds the limit"),
        ("NaN", "not JSON compliant"),
        ('{"format": 1e400}', "not JSON compliant"),
        ('"\ud800"', "surrogates not allowed"),
        (r'{"format": "\ud800"}', "surrogates not allowed"),
        ("", "no whole JSON text"),
        ("\ufeff{}", "no whole JSON text"),
        ("\x00", "no whole JSON text"),
        ("[1]", "this JSON is no plan"),
        ('{"format": "shardfx.plan", "version": 2}', "this shardfx reads version 1"),
        ('{"format": "shardfx.plan", "version": 1}', "the plan's JSON is invalid: KeyError: 'mesh'"),
    ],
)
def test_hostile_text_is_a_format_error(text, message):
    with pytest.raises(PlanFormatError, match=message):
        ShardPlan.from_json(text)


def test_a_replicated_plan_of_a_deep_tree_comes_back():
    tree = jnp.ones(2)
    for _ in range(100):
        tree = {"a": [tree]}
    made = plan(tree, MESH, paths=PathRules([(".*", replicate)]))
    assert ShardPlan.from_json(made.to_json()) == made == pickle.loads(pickle.dumps(made))


def test_one_array_and_a_tree_are_told_apart_in_words():
    tree, array = {"w": jnp.ones(8)}, jnp.ones(8)
    of_tree, of_array = (plan(one, MESH, paths=PathRules([("", P("a"))])).to_json() for one in (tree, array))
    with pytest.raises(PlanMismatchError, match="this is one array, and the plan is for a tree, as of `w`; the tree"):
        ShardPlan.from_json(of_tree, like=array)
    with pytest.raises(PlanMismatchError, match="the plan has no `w`; the plan is for one array"):
        ShardPlan.from_json(of_array, like=tree)

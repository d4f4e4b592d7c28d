"""Plans as values: pickled, copied, indexed by path, and read from JSON that was
edited.
"""

import collections
import copy
import json
import pickle
import re
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from shardfx import (
    AxisRules,
    MeshSpec,
    PathRules,
    ShardPlan,
    atomic,
    fsdp,
    plan,
    report,
    shard,
)
from shardfx.errors import PlanFormatError, PlanMismatchError


MESH = MeshSpec({"a": 2, "b": 4})
TREE = {
    "w": jnp.ones((8, 16)),
    "l": [jax.ShapeDtypeStruct((7,), jnp.bfloat16)] * 2,
    "t": (None, jnp.ones(3), "text"),
}
RULES = PathRules([("w", ("m", "n")), ("l", P("a")), (".*", fsdp("b"))])
AXES = AxisRules(
    [("m", "a"), ("n", "b")],
    units={"n": 2},
    modes={"x": [("m", None)]},
    aliases={"z": "m"},
)


def trees() -> list[Any]:
    def make_keys():
        return jax.random.split(jax.random.key(0), 8)

    keys = jax.eval_shape(make_keys)
    deep = jnp.ones(2)
    for _ in range(100):
        deep = {"a": [deep]}
    key = jax.random.key(0)
    model = eqx.nn.MLP(4, 4, 8, 1, key=key)
    return [
        TREE,
        model,
        {"keys": keys},
        [],
        jnp.ones(8),
        deep,
    ]


@pytest.mark.parametrize(
    "tree", trees(), ids=["dict", "module", "keys", "empty", "array", "deep"]
)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("on", [False, True])
def test_a_plan_pickles_and_copies(tree, kind, on):
    spec = MeshSpec({"a": 2, "b": 4}, axis_types=kind)
    if on:
        mesh = spec.build(jax.devices()[::-1])
    else:
        mesh = spec
    rules = PathRules([(".*", fsdp("a"))])
    sharding_plan = plan(
        tree,
        mesh,
        paths=rules,
        unmatched="replicate",
        unused="allow",
    )
    pickled = pickle.dumps(sharding_plan)
    decoded = pickle.loads(pickled)
    deep_copy = copy.deepcopy(sharding_plan)
    shallow_copy = copy.copy(sharding_plan)
    for again in (
        decoded,
        deep_copy,
        shallow_copy,
    ):
        assert again == sharding_plan
        assert hash(again) == hash(sharding_plan)
        assert again.leaves == sharding_plan.leaves
        assert again.jax_mesh == sharding_plan.jax_mesh
        assert again.shardings == sharding_plan.shardings
        structure = jax.tree.structure(again.specs)
        expected = jax.tree.structure(sharding_plan.specs)
        assert structure == expected
    text = sharding_plan.to_json()
    read = ShardPlan.from_json(text)
    pickled_again = pickle.dumps(read)
    again = pickle.loads(pickled_again)
    assert again == read == sharding_plan.off()
    assert again.specs == read.specs
    if isinstance(tree, eqx.Module):  # which is read as dicts
        weight_spec = read.specs["layers"][0]["weight"]
        assert weight_spec == P("a")


def test_a_pickled_plan_needs_its_devices():
    mesh = MESH.build(jax.devices())
    sharding_plan = plan(TREE, mesh, paths=RULES, axes=AXES)
    make, (text, path_tree, order, devices) = sharding_plan.content.__reduce__()
    content = make(text, path_tree, order, devices)
    assert content == sharding_plan.content
    other_devices = [*devices[:-1], ("cpu", 99)]
    other_platforms = []
    for _, number in devices:
        other_platforms.append(("abc", number))
    for others in (
        other_devices,
        other_platforms,
    ):
        with pytest.raises(
            PlanMismatchError,
            match=r"that this process does not have \(.*pickle `plan.off\(\)`",
        ):
            make(text, path_tree, order, others)


def test_shardings_without_devices_say_how_to_get_them():
    tree = {"w": jnp.ones((8, 8))}
    spec = MeshSpec({"d": 4})
    off = plan(tree, spec, paths=PathRules.parse("w->d"))
    sharding: Any = off.shardings["w"]
    values = np.ones((8, 8))
    places = (
        lambda: jax.device_put(tree, off.shardings),
        lambda: jax.make_array_from_callback((8, 8), sharding, values.__getitem__),
        lambda: jax.make_array_from_process_local_data(sharding, values),
        lambda: sharding.device_set,
        lambda: sharding.is_fully_addressable,
    )
    for place in places:
        with pytest.raises(PlanMismatchError, match=r"`plan\.on\(plan\.mesh\.build"):
            place()
    # In all else it is JAX's own.
    usual = NamedSharding(spec.abstract(), P("d"))
    assert sharding == usual and usual == sharding
    assert hash(sharding) == hash(usual)
    assert repr(sharding) == repr(usual)
    assert pickle.loads(pickle.dumps(sharding)) == usual
    assert copy.deepcopy(sharding) == usual
    assert sharding.shard_shape((8, 8)) == (2, 8)
    texts = []
    for each in (sharding, usual):
        step = jax.jit(jnp.sin, in_shardings=each, out_shardings=each)
        traced = step.trace(jax.ShapeDtypeStruct((8, 8), jnp.float32))
        texts.append(traced.lower(lowering_platforms=("tpu",)).as_text())
    assert texts[0] == texts[1]
    on = off.on(spec.build(jax.devices()[:4]))
    assert jax.device_put(tree, on.shardings)["w"].sharding.spec == P("d")


def test_a_plan_is_read_by_path():
    sharding_plan = plan(TREE, MESH, paths=RULES, axes=AXES)
    expected = []
    for leaf in sharding_plan.leaves:
        expected.append(leaf.path)
    assert list(sharding_plan) == expected == ["l/0", "l/1", "t/1", "w"]
    assert len(sharding_plan) == 4
    assert "w" in sharding_plan
    assert "t/1" in sharding_plan
    assert "t/2" not in sharding_plan
    assert "t" not in sharding_plan
    assert 3 not in sharding_plan
    assert all(sharding_plan[path].path == path for path in sharding_plan)
    nothing = plan({"f": "text"}, MESH, unused="allow")
    assert len(nothing) == 0
    assert list(nothing) == []
    assert nothing


DEEP: Any = []
for _ in range(300):
    DEEP = [DEEP]
HOSTILE: list[Any] = [
    *[0, 1, 2**70, "data", "float32", [1], ["a"], [["a"]]],
    *[
        None,
        True,
        -1,
        1.5,
        10**30,
        2**63,
        "",
        "a",
        "\ud800",
        "leaf",
        DEEP,
        [],
        {},
        [[]],
        [None],
        ["a", "a"],
    ],
    *[
        {"a": 1},
        {"dict": []},
        {"list": [None]},
        {"node": "x", "children": []},
        {"int": "9" * 5000},
    ],
    *[
        {"unconstrained": True},
        {"atomic": "m", "unit": 0},
        [["a", 2, "Auto", 1]],
        float("nan"),
        float("inf"),
    ],
]


MODES = {"m": [("a", P.UNCONSTRAINED)]}
UNITS = {"a": 3}
RICH_AXES = AxisRules(
    {"a": ("data", "tensor"), "b": None},
    modes=MODES,
    units=UNITS,
    aliases={"c": "a"},
    mesh_axes=["pod"],
)
RICH = plan(
    {
        "w": jnp.ones((6, 8)),
        "layers": [jnp.ones((4,), jnp.int4), None, "x"],
        "keys": jax.random.split(jax.random.key(0), 4),
        "scalar": jnp.ones(()),
        "by_number": {1: jnp.ones((3, 4, 5))},
        "module": eqx.nn.Linear(4, 4, key=jax.random.key(0)),
    },
    MeshSpec(
        {"data": 2, "tensor": 4},
        axis_types={"tensor": AxisType.Explicit},
        dcn={"data": 2},
    ),
    paths=PathRules(
        [
            ("^w", (atomic("a", 3), "b")),
            ("layers", fsdp("data", min_bytes=2)),
            ("keys", P("gone")),
            ("by_number/1", atomic(P(None, "tensor"), (1, 2, 1))),
            ("scalar|module", ()),
        ],
        mesh_axes=["gone"],
    ),
    axes=RICH_AXES,
    memory_kinds=[("^w", "pinned_host")],
)
JSON = json.loads(RICH.to_json())


def edited(change: Callable[[Any], Any]) -> str:
    """The JSON of the plan after a change, without its digest."""
    data = copy.deepcopy(JSON)
    del data["digest"]
    change(data)
    return json.dumps(data)


def test_json_brings_back_a_whole_plan():
    text = RICH.to_json()
    again = ShardPlan.from_json(text)
    assert again == RICH
    assert again.mesh == RICH.mesh
    assert again.axes == RICH.axes
    assert again.leaves == RICH.leaves
    assert again["w"].reasons
    unchanged = edited(lambda d: None)
    assert ShardPlan.from_json(unchanged) == RICH

    def to_device(d):
        return d["rows"][0].update(memory_kind="device")

    text_on_device = edited(to_device)
    changed = ShardPlan.from_json(text_on_device)
    memory_kinds = []
    for leaf in changed.leaves:
        memory_kinds.append(leaf.memory_kind)
    kinds_before = []
    for leaf in RICH.leaves:
        kinds_before.append(leaf.memory_kind)
    assert memory_kinds != kinds_before


@pytest.mark.parametrize(
    "change, text",
    [
        (lambda d: d["rows"][0].update(spec=[3]), "3 is no entry of a spec"),
        (
            lambda d: d["rows"][0].update(requested=[{"foo": 1}]),
            "{'foo': 1} is no entry of a spec",
        ),
        (
            lambda d: d["rows"][0].update(requested=[{"atomic": "a"}]),
            "{'atomic': 'a'} is no entry of a spec",
        ),
        (
            lambda d: d["rows"][0].update(requested=[{"atomic": "a", "unit": "a"}]),
            "'a' is no unit; it must be a number of elements from 1 on",
        ),
        (
            lambda d: d["rows"][0].update(requested=[{"atomic": "a", "unit": 0}]),
            "0 is no unit; it must be a number of elements from 1 on",
        ),
        (
            lambda d: d.update(version=2),
            "the plan has version 2, and this shardfx reads version 1; update shardfx",
        ),
        (lambda d: d.update(strict=1), "`strict` is 1; it must be true or left out"),
        (
            lambda d: d.update(digest=JSON["digest"], mode="m"),
            "edited: its digest is not that of its content",
        ),
        (
            lambda d: d["rows"][0].update(spec=["tensor"] * 2),
            "the spec P('tensor', 'tensor') is invalid for shape",
        ),
        (
            lambda d: d["rows"][0].update(dtype="float13"),
            "dtype 'float13' is unknown to this version of JAX.",
        ),
        (lambda d: d["rows"][0].pop("shape"), "row 0 has no `shape`."),
        (
            lambda d: d["rows"][0].update(shape=[-4]),
            "row 0: `shape` is [-4]; it must be a list of sizes.",
        ),
        (
            lambda d: d["rows"][0].update(units=[0]),
            "SpecError: `units` must hold one positive int",
        ),
        (
            lambda d: d["rows"][0].update(names=["a"]),
            "row 0: shape (3, 4, 5) needs one name for each dimension, not",
        ),
        (
            lambda d: d["rows"][0].update(memory_kind="tape"),
            "memory kind 'tape' is none of device, pinned_host",
        ),
        (lambda d: d["rows"].__setitem__(0, 3), "row 0 is 3; it must be an object."),
        (
            lambda d: d["rows"][0].update(strategies=[["data", 4]]),
            "['data', 4] is no strategy; it must be [list of",
        ),
        (
            lambda d: d["rows"][0].update(reasons=[["small", -1, [], ""]]),
            "is no reason; it must be [code, dimension",
        ),
        (
            lambda d: d["leaves"][0].__setitem__(1, 99),
            "`leaves` must hold pairs of a path and the number of a row",
        ),
        (lambda d: d["leaves"].pop(), "`structure` has"),
        (
            lambda d: d["mesh"][0].__setitem__(1, -1),
            "the mesh has an axis of unknown size",
        ),
        (
            lambda d: d.update(mesh={}),
            "`mesh` must hold a list [name, size, axis type, slices] for each axis.",
        ),
        (
            lambda d: d["rows"][0].update(requested=[None] * 3 + ["data"]),
            "SpecError: P(None, None, None, 'data') has 4 entries, but shape (3, 4, 5)",
        ),
        (
            lambda d: d["rows"][0].update(names=[[["a"]], None, None]),
            "SpecError: (('a',),) is no entry of an array's names",
        ),
        (
            lambda d: d["rows"][0].update(requested=[{"atomic": "a", "unit": 2}]),
            "is no entry of a PartitionSpec",
        ),
        (
            lambda d: (
                d["rows"][0].update(names=["a"] + [None] * 2),
                d.update(mode="q"),
            ),
            "RuleError: mode 'q' is unknown",
        ),
    ],
)
def test_json_edited_to_be_invalid(change, text):
    with pytest.raises(PlanFormatError, match=re.escape(text)):
        ShardPlan.from_json(edited(change))


def test_a_unit_in_json_is_the_unit_that_was_written():
    named = PathRules([("w", (atomic("m", 4), "n"))])
    by_paths = PathRules([("w", atomic(P("a", "b"), (1, 8)))])
    for paths, axes in ((named, AXES), (by_paths, None)):
        sharding_plan = plan({"w": TREE["w"]}, MESH, paths=paths, axes=axes)
        read = ShardPlan.from_json(sharding_plan.to_json())
        assert read == sharding_plan
        assert read["w"] == sharding_plan["w"]


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places in the JSON that a test can edit."""
    if path:
        yield path
    entries = ()
    if isinstance(node, dict):
        entries = node.items()
    elif isinstance(node, list):
        entries = enumerate(node)
    for key, below in entries:
        yield from places(below, (*path, key))


PLACES = [path for path in places(JSON) if path[0] != "digest"]


@given(
    st.lists(
        st.tuples(st.sampled_from(PLACES), st.sampled_from(HOSTILE)),
        min_size=1,
        max_size=3,
    )
)
@settings(deadline=None, max_examples=500)
def test_edited_json_is_a_whole_plan_or_an_error(edits):
    def change(data):
        for path, value in edits:
            node = data
            for key in path[:-1]:
                if not (
                    isinstance(node, dict)
                    and key in node
                    or isinstance(node, list)
                    and key in range(len(node))
                ):
                    return
                node = node[key]
            if (
                isinstance(node, dict)
                or isinstance(node, list)
                and path[-1] in range(len(node))
            ):
                node[path[-1]] = copy.deepcopy(value)

    try:
        text = edited(change)
        restored = ShardPlan.from_json(text)
    except PlanFormatError:
        return
    text_again = restored.to_json()
    again = ShardPlan.from_json(text_again)
    assert again == restored
    assert again.leaves == restored.leaves
    assert report(restored)
    replanned = restored.replan(restored.mesh)
    assert len(replanned.leaves) == len(restored.leaves)
    structs = jax.tree.leaves(restored.structs)
    count = len(structs)
    assert count == len(restored.leaves)
    shardings = jax.tree.leaves(restored.shardings)
    count = len(shardings)
    assert count == len(restored.leaves)
    assert 0 <= restored.bytes_per_device <= restored.bytes_total
    for leaf in restored.leaves:
        for why in leaf.reasons:
            message = str(why)
            assert message == why.message or why.dim is not None


@pytest.mark.parametrize(
    "text, message",
    [
        ("[" * 100_000, "nested too deeply for JSON: .* Nest it less"),
        ("1" * 5000, "Exceeds the limit"),
        ("NaN", "JSON has NaN, and its numbers are whole"),
        ('{"format": 1e400}', "JSON has 1e400, and its numbers are whole"),
        ('"\ud800"', "is no plan: its `format` is not 'shardfx.plan'"),
        (r'{"format": "\ud800"}', "is no plan: its `format` is not 'shardfx.plan'"),
        ("", r"no whole JSON text \(.* of 0\); was the file truncated\?"),
        (RICH.to_json()[:-1], r"no whole JSON text \(.*\); was the file truncated\?"),
        ("\x00", "no whole JSON text"),
        *[
            (other, "is no plan: its `format` is not 'shardfx.plan'; write")
            for other in ("{}", "[1]", "null", '"a"')
        ],
        (
            '{"format": "shardfx.plan", "version": 1}',
            "the plan's JSON is invalid: KeyError: 'mesh'",
        ),
    ],
)
def test_hostile_text_is_a_format_error(text, message):
    with pytest.raises(PlanFormatError, match=message):
        ShardPlan.from_json(text)


AB = {"a": jnp.ones(8), "b": jnp.ones(8)}
LIKE = {
    "act": jnp.tanh,
    "b": jnp.ones(16),
    "none": None,
    "w": jnp.ones((8, 16)),
}


@pytest.mark.parametrize(
    "tree, like, message",
    [
        (LIKE, jnp.ones(8), "the plan has no array alone; the tree has no `b`"),
        (jnp.ones(8), LIKE, "the plan has no `b`; the tree has no array alone"),
        (
            LIKE,
            {**LIKE, "b": None},
            r"\(0 arrays more, 1 missing\): the tree has no `b`",
        ),
        (
            AB,
            collections.OrderedDict(b=AB["b"], a=AB["a"]),
            "the arrays are in another order",
        ),
    ],
    ids=["one array", "a tree", "fewer", "order"],
)
def test_like_must_be_the_planned_tree(tree, like, message):
    rules = PathRules([("", P("a"))])
    mesh = MESH.build(jax.devices())
    sharding_plan = plan(tree, mesh, paths=rules)

    def read():
        return ShardPlan.from_json(sharding_plan.to_json(), like=like)

    def placed():
        return shard(like, sharding_plan)

    for attempt in (
        read,
        placed,
    ):
        with pytest.raises(PlanMismatchError, match=message):
            attempt()

"""Every vector measured on eformer's `serialization.sharding_utils`, and cases that no
vector has.
"""

import json
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance.vectors import Raises, Suite, entry, outcome
from jax.sharding import (
    Mesh,
    NamedSharding,
    PartitionSpec as P,
    Sharding,
    SingleDeviceSharding,
)
from safetensors.numpy import save_file

from shardfx import MeshSpec, PathRules, checkpoint
from shardfx.errors import (
    CheckpointError,
    LeafTypeError,
    MeshError,
    PlanMismatchError,
    SpecError,
)
from shardfx.interop import eformer


MESH = Mesh(np.array(jax.devices()).reshape(2, 4), ("dp", "tp"))
# Of an index with prefixes: all of them, where eformer took the first.
EVERY_PREFIX = {
    "model": {"w": "model/w"},
    "other": {"z": "other/z"},
    "opt": {"mu": {"w": "opt/mu/w"}},
}
PREFIXED = {"a": P("dp"), "n": {"b": P()}}
DEVIATIONS: dict[str, tuple[Any, str]] = {
    "eformer-0291": (
        {"model": {"b": P("dp"), "w": P("dp")}, "step": P()},
        "corrected to the rank",
    ),
    "eformer-0292": ({"b": "model/b", "w": "model/w"}, "a prefix filters"),
    "eformer-0295": (Raises(LeafTypeError), "'hello' is no sharding"),
    "eformer-0296": (EVERY_PREFIX, "no prefix is no choice of one"),
    "eformer-0300": (EVERY_PREFIX, "a version may be a number"),
    "eformer-0301": ({}, "no prefix, no array"),
    "eformer-0305": (Raises(CheckpointError), "an array lies under another"),
    "eformer-0306": (Raises(CheckpointError), "an array lies under another"),
    "eformer-0308": (Raises(CheckpointError), "there is no index"),
    "eformer-0313": (PREFIXED, "a spec is on the mesh"),
    "eformer-0314": (Raises(PlanMismatchError), "an entry is missing"),
    "eformer-0315": (Raises(PlanMismatchError), "an entry is left over"),
    "eformer-0316": (PREFIXED, "prefixes are trees"),
    "eformer-0317": (Raises(SpecError), "three devices cannot cut eight rows"),
    "eformer-0318": (PREFIXED, "a function gives a sharding"),
    "eformer-0319": (PREFIXED, "a function gives a sharding"),
    "eformer-0323": (True, "`None` is a leaf"),
    "eformer-0327": (True, "`None` is a leaf"),
    "eformer-0328": (("a", "b", "c"), "NumPy arrays are arrays, too"),
}
SUITE = Suite("eformer.json", {}, DEVIATIONS, within="sharding_utils.")


def test_every_vector_is_run():
    SUITE.check()


def mesh_of(pairs) -> Any:
    sizes = [size for _, size in pairs or ()]
    return pairs and Mesh(
        np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes),
        [name for name, _ in pairs],
    )


def value_of(data) -> Any:
    """A sharding tree as the vectors write it."""
    match data:
        case {"named_sharding": spec, "mesh": pairs}:
            return NamedSharding(mesh_of(pairs), P(*map(entry, spec)))
        case {"spec": spec}:
            return P(*map(entry, spec))
        case dict():
            return {key: value_of(value) for key, value in data.items()}
        case str() if data.strip("<").startswith("SingleDeviceSharding"):
            return SingleDeviceSharding(jax.devices()[0])
    return data


def wanted_of(vector) -> Any:
    """As the vector has it, with whole shardings."""
    measured = vector["expected"]
    if vector["id"] in DEVIATIONS:
        return SUITE.expected(vector)
    if "raises" in measured:
        return Raises(ValueError, re.escape(measured["message_contains"]))
    return value_of(measured)


@SUITE.of("sharding_utils.create_sharding_tree_from_index")
def test_shardings_of_an_index(vector, tmp_path):
    inputs = vector["inputs"]
    seen = {}

    def remember(entry):
        # Here a default gives shardings; a fresh one for each entry tells which entry
        # ended up where.
        mesh = mesh_of([["x", 1]])
        sharding = NamedSharding(mesh, P(), memory_kind="device")
        seen[id(sharding)] = (entry.path, sharding)
        return sharding

    default = inputs.get("default_sharding")
    if str(default).startswith("lambda"):
        default = remember
    else:
        default = value_of(default)
    if "index" in inputs:
        (tmp_path / "tensorstore_index.json").write_text(json.dumps(inputs["index"]))
    with outcome(wanted_of(vector)) as expected:
        index = checkpoint.read_index(tmp_path)
        mesh = mesh_of(inputs.get("mesh"))
        shardings = eformer.shardings(
            index,
            mesh,
            default=default,
            prefix=inputs.get("prefix"),
        )
        if seen:
            shardings = jax.tree.map(lambda leaf: seen[id(leaf)][0], shardings)
        elif vector["tag"] == "deviate":
            shardings = jax.tree.map(lambda leaf: leaf.spec, shardings)
        assert shardings == expected


@SUITE.of("sharding_utils.apply_sharding_tree")
def test_applying_shardings(vector):
    inputs = vector["inputs"]
    mesh = mesh_of(inputs.get("mesh", [["dp", 2], ["tp", 4]]))
    arrays = {"a": np.ones((8, 8), np.float32), "n": {"b": np.ones(8, np.float32)}}
    tree = value_of(inputs.get("sharding_tree", {"a": "<callable>", "n": {"b": None}}))
    if tree["a"] == "<callable>":
        tree["a"] = lambda array: NamedSharding(mesh, P("dp"))
    with outcome(wanted_of(vector)) as expected:
        placed = eformer.apply(arrays, tree, mesh=mesh)
        is_sharding = isinstance(expected["a"], Sharding)
        actual = jax.tree.map(
            lambda array: array.sharding if is_sharding else array.sharding.spec,
            placed,
        )
        assert actual == expected


@SUITE.of("sharding_utils.validate_sharding_tree")
def test_comparing_structures(vector):
    tree = value_of(vector["inputs"]["sharding_tree"])
    structure = vector["inputs"]["expected_structure"]
    if isinstance(structure, str):
        structure = {"a": None}
    assert (eformer.structure_diff(tree, structure) == ()) is SUITE.expected(vector)


@SUITE.of("sharding_utils.make_itsharded")
def test_replicate_places_every_array_and_compiles_nothing(vector):
    values = np.arange(64.0).reshape(8, 8)
    sharded = jax.device_put(values, NamedSharding(MESH, P("dp", "tp")))
    tree = {
        "a": sharded,
        "b": jnp.ones(2),
        "c": np.arange(3),
        "d": 4,
        "e": "text",
        "f": None,
    }
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compiled.append(event)
    )
    copies = eformer.replicate(tree, MESH)
    jax.monitoring.clear_event_listeners()
    assert not [name for name in compiled if "compile" in name]
    for key in SUITE.expected(vector):
        assert copies[key].sharding == NamedSharding(MESH, P())
        assert np.array_equal(copies[key], tree[key])
    assert copies["d"] == 4
    assert copies["e"] == "text"
    assert copies["f"] is None


# --- what no vector shows


@pytest.fixture
def index(tmp_path):
    save_file(
        {"model/w": np.ones((8, 8)), "model/b": np.ones(6), "step": np.ones(())},
        tmp_path / "x.safetensors",
    )
    return checkpoint.read_index(tmp_path)


def test_a_spec_is_corrected_to_each_shape(index):
    spec = MeshSpec({"dp": 2, "tp": 4})
    for mesh, on in ((MESH, MESH), (spec, spec.abstract())):
        cases = (P("tp", "dp"), P(), P())
        w, *others = (NamedSharding(on, spec) for spec in cases)
        shardings = eformer.shardings(index, mesh, default=P("tp", "dp"))
        expected = {"model": {"w": w, "b": others[0]}, "step": others[1]}
        assert shardings == expected


def test_a_function_decides_per_entry(index):
    single = SingleDeviceSharding(jax.devices()[3])
    decide = lambda entry: {"model/w": P("dp"), "model/b": single}.get(entry.path)
    shardings = eformer.shardings(index, MESH, default=decide)
    model = {"w": NamedSharding(MESH, P("dp")), "b": single}
    assert shardings == {"model": model, "step": NamedSharding(MESH, P())}
    assert eformer.shardings(index, MESH, default=decide, prefix="model") == model
    structs = checkpoint.structs(index, prefix="model").keys()
    assert structs == {"w", "b"}


BY_TP = NamedSharding(MESH, P("tp"))
MEANINGLESS = {
    "a text": (
        MESH,
        "hello",
        LeafTypeError,
        "leaf `model/b`: str is no sharding; give a Sharding",
    ),
    "no mesh": (
        None,
        P("dp"),
        MeshError,
        "PartitionSpecs cut arrays over a mesh, but there is none",
    ),
    "rules": (
        MESH,
        PathRules.parse(".*->dp"),
        LeafTypeError,
        r"by `shardfx.plan\(checkpoint.structs\(index\), mesh",
    ),
    "no fit": (
        MESH,
        lambda entry: BY_TP if entry.shape else None,
        SpecError,
        r"`model/b`, .* does not fit: .*correct",
    ),
}


@pytest.mark.parametrize(
    "mesh, default, error, message", MEANINGLESS.values(), ids=MEANINGLESS
)
def test_a_default_that_means_nothing_names_the_array(
    index, mesh, default, error, message
):
    with pytest.raises(error, match=message):
        eformer.shardings(index, mesh, default=default)


def test_apply_takes_shardings_specs_functions_and_none():
    tree = {
        "a": np.ones((8, 8)),
        "b": jnp.ones(8),
        "c": jnp.ones((4, 4)),
        "d": np.float32(1),
        "e": "text",
        "f": 3,
    }
    entries = {
        "a": NamedSharding(MESH, P("dp")),
        "b": P("tp"),
        "c": lambda x: P(*["dp"] * (x.ndim - 1)),
        "d": None,
    }
    placed = eformer.apply(tree, {**entries, "e": None, "f": P("dp")}, mesh=MESH)
    expected = {
        "a": P("dp"),
        "b": P("tp"),
        "c": P("dp"),
        "d": P(),
    }
    assert {k: placed[k].sharding.spec for k in "abcd"} == expected
    for key in "abcd":
        assert np.array_equal(placed[key], tree[key])
    assert placed["e"] == "text"
    assert placed["f"] == 3
    with pytest.raises(MeshError, match="PartitionSpecs cut arrays"):
        eformer.apply({"a": np.ones(3)}, {"a": P("dp")})


def test_apply_takes_prefixes():
    tree = [One(jnp.ones((8, 8)), 1), One(jnp.ones((8, 4)), 1), {"b": jnp.ones(4)}]
    placed = eformer.apply(tree, [P("tp"), One(P("dp"), 1), None], mesh=MESH)
    specs = [leaf.sharding.spec for leaf in jax.tree.leaves(placed)]
    assert specs == [
        P("tp"),
        P("dp"),
        P(),
    ]
    applied = eformer.apply(tree, P("dp"), mesh=MESH)
    for leaf in jax.tree.leaves(applied):
        assert leaf.sharding.spec == P("dp")


@pytest.mark.parametrize(
    "asked, error, message",
    [
        (P("tp"), SpecError, r"leaf `n/b`, shape \(6,\)"),
        (P("dp", "tp"), SpecError, r"leaf `n/b`, shape \(6,\)"),
        (3, LeafTypeError, "leaf `n/b`: int is no sharding"),
        (lambda x: x, LeafTypeError, "leaf `n/b`: ndarray is no sharding"),
        (
            [None],
            PlanMismatchError,
            (
                r"no prefix of the tree .*\n  `n/b`: list in the left tree, a leaf in"
                r" the right"
            ),
        ),
    ],
)
def test_apply_moves_nothing_if_one_leaf_fails(monkeypatch, asked, error, message):
    moved = []
    monkeypatch.setattr(jax, "device_put", lambda *args: moved.append(args))
    with pytest.raises(error, match=message):
        eformer.apply(
            {"a": np.ones((8, 8)), "n": {"b": np.ones(6)}},
            {"a": P("dp"), "n": {"b": asked}},
            mesh=MESH,
        )
    assert moved == []


class One(eqx.Module):
    w: Any
    size: int = eqx.field(static=True)


class Two(One):
    pass


def test_structure_diff_lists_every_difference():
    a = {
        "x": 1,
        "y": {"z": None, "w": [1, 2]},
        "only": 0,
        "node": (1,),
        "class": One(1, 1),
        "static": One(1, 1),
    }
    b = {
        "x": {"deep": 1},
        "y": {"z": P("a"), "w": [1]},
        "node": [1],
        "new": {"q": 1},
    }
    b |= {"class": Two(1, 1), "static": One(1, 2)}
    arrays = {d.path: (d.left, d.right) for d in eformer.structure_diff(a, b)}
    before, right = arrays.pop("static")
    assert before != right
    expected = [
        ("class", ("One", "Two")),
        ("node", ("tuple", "list")),
        ("only", ("a leaf", "nothing")),
        ("x", ("a leaf", "dict")),
        ("y/w/1", ("a leaf", "nothing")),
        ("new", ("nothing", "dict")),
    ]
    assert [*arrays.items()] == expected
    assert eformer.structure_diff(a, a) == ()

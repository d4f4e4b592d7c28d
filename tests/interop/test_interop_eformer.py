"""Shardings for a checkpoint, applying them, and comparing structures."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding
from safetensors.numpy import save_file

from shardfx import MeshSpec, PathRules, checkpoint
from shardfx._ground.errors import CheckpointError
from shardfx.errors import LeafTypeError, MeshError, PlanMismatchError, SpecError
from shardfx.interop import eformer


@pytest.fixture
def mesh():
    return Mesh(np.array(jax.devices()).reshape(2, 4), ("dp", "tp"))


@pytest.fixture
def index(tmp_path):
    arrays = {"model/w": np.ones((8, 8)), "model/b": np.ones(6), "step": np.ones(())}
    save_file(arrays, tmp_path / "x.safetensors")
    return checkpoint.read_index(tmp_path)


def named(mesh, **specs):
    return {key: NamedSharding(mesh, spec) for key, spec in specs.items()}


def test_a_spec_is_corrected_to_each_shape(index, mesh):
    found = eformer.shardings(index, mesh, default=P("tp", "dp"))
    assert found == {"model": named(mesh, w=P("tp", "dp"), b=P()), "step": NamedSharding(mesh, P())}
    for array, sharding in ((np.ones((8, 8)), found["model"]["w"]), (np.ones(6), found["model"]["b"])):
        jax.device_put(array, sharding)


def test_a_function_decides_per_entry(index, mesh):
    def decide(entry):
        if entry.path == "step":
            return None
        return P("dp") if len(entry.shape) == 2 else SingleDeviceSharding(jax.devices()[3])

    found = eformer.shardings(index, mesh, default=decide)
    assert found["model"]["w"] == NamedSharding(mesh, P("dp"))
    assert found["model"]["b"] == SingleDeviceSharding(jax.devices()[3])
    assert found["step"] == NamedSharding(mesh, P())


def test_a_mesh_without_devices_will_do(index):
    spec = MeshSpec({"dp": 2, "tp": 4})
    assert eformer.shardings(index, spec, default=P("dp"))["model"]["w"] == NamedSharding(spec.abstract(), P("dp"))


def test_a_prefix_filters(index, mesh):
    assert eformer.shardings(index, mesh, prefix="model").keys() == {"w", "b"}
    assert checkpoint.structs(index, prefix="model").keys() == {"w", "b"}
    with pytest.raises(CheckpointError, match=r"Prefix 'mod' not found. Available: \['model', 'step'\]"):
        eformer.shardings(index, mesh, prefix="mod")


def test_a_sharding_that_does_not_fit_names_the_array(index, mesh):
    with pytest.raises(SpecError, match=r"leaf `model/b`, shape \(6,\).* does not fit: .*shardfx.correct"):
        eformer.shardings(index, mesh, default=lambda entry: NamedSharding(mesh, P("tp")) if entry.shape else None)


def test_a_default_that_means_nothing(index, mesh):
    with pytest.raises(LeafTypeError, match="array 'model/b': 'hello' is no sharding; `default` must be"):
        eformer.shardings(index, mesh, default="hello")
    with pytest.raises(MeshError, match="PartitionSpecs cut arrays over a mesh, but there is none"):
        eformer.shardings(index, None, default=P("dp"))
    with pytest.raises(LeafTypeError, match=r"Rules decide by `shardfx.plan\(checkpoint.structs\(index\), mesh"):
        eformer.shardings(index, mesh, default=PathRules.parse(".*->dp"))


def test_apply_takes_shardings_specs_functions_and_none(mesh):
    tree = {"a": np.ones((8, 8)), "b": jnp.ones(8), "c": jnp.ones((4, 4)), "d": np.float32(1), "e": "text", "f": 3}
    given = {"a": NamedSharding(mesh, P("dp")), "b": P("tp"), "c": lambda x: P(*["dp"] * (x.ndim - 1)), "d": None}
    placed = eformer.apply(tree, {**given, "e": None, "f": P("dp")}, mesh=mesh)
    assert {k: placed[k].sharding.spec for k in "abcd"} == {"a": P("dp"), "b": P("tp"), "c": P("dp"), "d": P()}
    assert placed["e"] == "text"
    assert placed["f"] == 3
    for key in "abcd":
        assert np.array_equal(placed[key], tree[key])


def test_apply_takes_prefixes(mesh):
    class Layer(eqx.Module):
        w: Any
        b: Any

    tree = [Layer(jnp.ones((8, 8)), jnp.ones(8)), Layer(jnp.ones((8, 4)), jnp.ones(4))]
    placed = eformer.apply(tree, [P("tp"), Layer(P("dp"), None)], mesh=mesh)
    assert [leaf.sharding.spec for leaf in jax.tree.leaves(placed)] == [P("tp"), P("tp"), P("dp"), P()]
    assert all(leaf.sharding.spec == P("dp") for leaf in jax.tree.leaves(eformer.apply(tree, P("dp"), mesh=mesh)))


def test_apply_without_a_mesh_uses_the_default_device():
    placed = eformer.apply({"a": np.ones(3)}, {"a": None})
    assert isinstance(placed["a"].sharding, SingleDeviceSharding)
    with pytest.raises(MeshError, match="PartitionSpecs cut arrays"):
        eformer.apply({"a": np.ones(3)}, {"a": P("dp")})


@pytest.mark.parametrize(
    ("asked", "error", "message"),
    [
        (P("tp"), SpecError, r"leaf `n/b`, shape \(6,\)"),
        (P("dp", "tp"), SpecError, r"leaf `n/b`, shape \(6,\)"),
        (3, LeafTypeError, "leaf `n/b`: int is no sharding"),
        (lambda x: x, LeafTypeError, "leaf `n/b`: ndarray is no sharding"),
    ],
)
def test_apply_moves_nothing_if_one_leaf_fails(mesh, monkeypatch, asked, error, message):
    moved = []
    monkeypatch.setattr(jax, "device_put", lambda *args: moved.append(args))
    tree = {"a": np.ones((8, 8)), "n": {"b": np.ones(6)}}
    with pytest.raises(error, match=message):
        eformer.apply(tree, {"a": P("dp"), "n": {"b": asked}}, mesh=mesh)
    assert moved == []


@pytest.mark.parametrize("given", [{"a": None}, {"a": None, "n": {"b": None}, "z": None}, {"a": None, "n": [None]}])
def test_apply_lists_how_the_structures_differ(mesh, given):
    tree = {"a": np.ones(8), "n": {"b": np.ones(8)}}
    with pytest.raises(PlanMismatchError, match="no prefix of the tree") as caught:
        eformer.apply(tree, given, mesh=mesh)
    assert str(eformer.structure_diff(given, tree)[0]) in str(caught.value)


def test_structure_diff_lists_every_difference():
    a = {"x": 1, "y": {"z": None, "w": [1, 2]}, "only": 0, "node": (1,)}
    b = {"x": {"deep": 1}, "y": {"z": P("a"), "w": [1]}, "node": [1], "new": {"q": 1}}
    assert [(d.path, d.left, d.right) for d in eformer.structure_diff(a, b)] == [
        ("node", "tuple", "list"),
        ("only", "a leaf", "nothing"),
        ("x", "a leaf", "dict"),
        ("y/w/1", "a leaf", "nothing"),
        ("new", "nothing", "dict"),
    ]
    assert eformer.structure_diff(a, a) == ()


def test_structure_diff_sees_static_fields_and_classes():
    class One(eqx.Module):
        w: jax.Array
        size: int = eqx.field(static=True)

    class Two(eqx.Module):
        w: jax.Array
        size: int = eqx.field(static=True)

    assert eformer.structure_diff(One(jnp.ones(1), 1), One(jnp.ones(2), 1)) == ()
    [difference] = eformer.structure_diff([One(jnp.ones(1), 1)], [One(jnp.ones(1), 2)])
    assert difference.path == "0"
    assert difference.left != difference.right
    [difference] = eformer.structure_diff([One(jnp.ones(1), 1)], [Two(jnp.ones(1), 1)])
    assert (difference.left, difference.right) == ("One", "Two")


def test_replicate_places_every_array_and_compiles_nothing(mesh):
    sharded = jax.device_put(np.arange(64.0).reshape(8, 8), NamedSharding(mesh, P("dp", "tp")))
    tree = {"a": sharded, "b": np.arange(3), "c": jnp.ones(2), "d": 4, "e": "text", "f": None}
    compiled: list[str] = []

    def record_event(event: str, duration_secs: float, **kwargs: str | int) -> None:
        compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(record_event)
    copies = eformer.replicate(tree, mesh)
    jax.monitoring.clear_event_listeners()
    assert not [name for name in compiled if "compile" in name]
    for key in "abc":
        assert copies[key].sharding == NamedSharding(mesh, P())
        assert np.array_equal(copies[key], tree[key])
    assert (copies["d"], copies["e"], copies["f"]) == (4, "text", None)

"""Facts measured on eformer's `serialization.sharding_utils`, replayed: what conforms, and what is better here.

Where a vector is marked "deviate", `BETTER` says what happens instead; docs/migrating_checkpoint.md says why.
"""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, Sharding, SingleDeviceSharding

from shardfx import checkpoint
from shardfx._ground.errors import CheckpointError
from shardfx.errors import LeafTypeError, PlanMismatchError, SpecError
from shardfx.interop import eformer


RECORDS = [
    record
    for record in json.loads((Path(__file__).parents[1] / "data" / "eformer.json").read_text())
    if record["function"].startswith("sharding_utils.")
]


def of(function):
    chosen = [record for record in RECORDS if record["function"] == f"sharding_utils.{function}"]
    return pytest.mark.parametrize("record", chosen, ids=lambda record: record["id"])


def mesh_of(pairs) -> Any:
    if pairs is None:
        return None
    sizes = [size for _, size in pairs]
    return Mesh(np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes), [name for name, _ in pairs])


def entry_of(entry):
    return tuple(entry) if isinstance(entry, list) else entry


def value_of(data) -> Any:
    """A sharding tree as the vectors write it."""
    match data:
        case {"named_sharding": spec, "mesh": pairs}:
            return NamedSharding(mesh_of(pairs), P(*map(entry_of, spec)))
        case {"spec": spec}:
            return P(*map(entry_of, spec))
        case dict():
            return {key: value_of(value) for key, value in data.items()}
        case "<SingleDeviceSharding>":
            return SingleDeviceSharding(jax.devices()[0])
    return data


# By id: the error that is raised, or the tree that comes back (of paths, where `default` tells which entry it saw).
BETTER_INDEX = {
    "eformer-0291": {"model": {"b": ["dp"], "w": ["dp"]}, "step": []},
    "eformer-0292": {"b": "model/b", "w": "model/w"},
    "eformer-0295": LeafTypeError,
    "eformer-0296": {"model": {"w": "model/w"}, "other": {"z": "other/z"}, "opt": {"mu": {"w": "opt/mu/w"}}},
    "eformer-0300": {"model": {"w": "model/w"}, "other": {"z": "other/z"}, "opt": {"mu": {"w": "opt/mu/w"}}},
    "eformer-0301": {},
    "eformer-0305": CheckpointError,
    "eformer-0306": CheckpointError,
    "eformer-0308": CheckpointError,
}


@of("create_sharding_tree_from_index")
def test_shardings_of_an_index(record, tmp_path):
    inputs, expected = record["inputs"], record["expected"]
    mesh, seen = mesh_of(inputs.get("mesh")), {}
    default: Any = inputs.get("default_sharding")
    if isinstance(default, str) and default.startswith("lambda"):
        # Here a default gives shardings; a fresh one for each entry tells which entry ended up where.
        def remember(entry):
            made = NamedSharding(mesh_of([["x", 1]]), P(), memory_kind="device")
            seen[id(made)] = (entry.path, made)
            return made

        default = remember
    elif isinstance(default, str) and default.startswith("SingleDevice"):
        default = SingleDeviceSharding(jax.devices()[0])
    else:
        default = value_of(default)
    if "index" in inputs:
        (tmp_path / "tensorstore_index.json").write_text(json.dumps(inputs["index"]))

    def run():
        index = checkpoint.read_index(tmp_path)
        return eformer.shardings(index, mesh, default=default, prefix=inputs.get("prefix"))

    if record["tag"] == "deviate":
        expected = BETTER_INDEX[record["id"]]
    if isinstance(expected, type):
        with pytest.raises(expected):
            run()
    elif isinstance(expected, dict) and "raises" in expected:
        with pytest.raises(ValueError) as caught:
            run()
        assert expected["message_contains"] in str(caught.value)
    else:
        found = run()
        if seen:
            found = jax.tree.map(lambda leaf: seen[id(leaf)][0], found)
        elif record["tag"] == "deviate":
            found = jax.tree.map(lambda leaf: list(leaf.spec), found)
        else:
            expected = value_of(expected)
        assert found == expected


BETTER_APPLY = {
    "eformer-0313": {"a": P("dp"), "n": {"b": P()}},
    "eformer-0314": PlanMismatchError,
    "eformer-0315": PlanMismatchError,
    "eformer-0316": {"a": P("dp"), "n": {"b": P()}},
    "eformer-0317": SpecError,
    "eformer-0318": {"a": P("dp"), "n": {"b": P()}},
    "eformer-0319": {"a": P("dp"), "n": {"b": P()}},
}


@of("apply_sharding_tree")
def test_applying_shardings(record):
    inputs = record["inputs"]
    mesh = mesh_of(inputs.get("mesh", [["dp", 2], ["tp", 4]]))
    arrays = {"a": np.ones((8, 8), np.float32), "n": {"b": np.ones(8, np.float32)}}
    if record["id"] in ("eformer-0318", "eformer-0319"):
        given = {"a": lambda array: NamedSharding(mesh, P("dp")), "n": {"b": None}}
    else:
        given = value_of(inputs["sharding_tree"])
    if record["id"] == "eformer-0317":
        # A mesh of three devices cannot cut eight rows.
        given["a"] = NamedSharding(mesh, P("dp", "tp"))
    expected = value_of(record["expected"]) if record["tag"] == "conform" else BETTER_APPLY[record["id"]]
    if isinstance(expected, type):
        with pytest.raises(expected):
            eformer.apply(arrays, given, mesh=mesh)
        return
    placed = eformer.apply(arrays, given, mesh=mesh)
    is_sharding = isinstance(expected["a"], Sharding)
    assert jax.tree.map(lambda array: array.sharding if is_sharding else array.sharding.spec, placed) == expected


def test_a_function_that_returns_an_array_is_refused():
    with pytest.raises(LeafTypeError, match="ArrayImpl is no sharding"):
        eformer.apply({"a": jnp.ones(8)}, {"a": lambda array: array})


BETTER_STRUCTURE = {"eformer-0323": True, "eformer-0327": True}


@of("validate_sharding_tree")
def test_comparing_structures(record):
    inputs = record["inputs"]
    sharding_tree, structure = value_of(inputs["sharding_tree"]), inputs["expected_structure"]
    if isinstance(structure, str):
        structure, sharding_tree = {"a": None}, {"a": SingleDeviceSharding(jax.devices()[0])}
    expected = record["expected"] if record["tag"] == "conform" else BETTER_STRUCTURE[record["id"]]
    assert (eformer.structure_diff(sharding_tree, structure) == ()) is expected


@of("make_itsharded")
def test_replicating(record):
    mesh = mesh_of(record["inputs"]["mesh"])
    tree = {"a": jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, P("dp", "tp"))), "b": jnp.ones(3)}
    copies = eformer.replicate({**tree, "c": np.ones(2), "d": 4, "e": "str"}, mesh)
    for key in ("a", "b"):
        assert copies[key].sharding == value_of(record["expected"][key])
    # Better: a numpy array is an array, too.
    assert copies["c"].sharding == NamedSharding(mesh, P())
    assert (copies["d"], copies["e"]) == (4, "str")


def test_every_vector_is_replayed():
    replayed = {
        *("create_sharding_tree_from_index", "apply_sharding_tree", "validate_sharding_tree", "make_itsharded"),
    }
    assert {record["function"].split(".")[1] for record in RECORDS} == replayed
    deviating = {record["id"] for record in RECORDS if record["tag"] == "deviate"}
    assert deviating == {*BETTER_INDEX, *BETTER_APPLY, *BETTER_STRUCTURE, "eformer-0328"}

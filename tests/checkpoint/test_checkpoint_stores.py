"""Stores of chunks: zarr, OCDBT, Orbax and eformer directories, written by the
libraries that own the formats.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from _stores import eformer, orbax, zarr
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from shardfx import From, PathRules, TreeMap, checkpoint, plan
from shardfx.checkpoint import StoreArray
from shardfx.errors import CheckpointError
from shardfx.interop.eformer import shardings


@pytest.fixture
def mesh():
    devices = np.array(jax.devices()).reshape(2, 4)
    return Mesh(devices, ("a", "b"))


def arrays_of():
    random = np.random.default_rng(0)
    array = random.normal(size=(16, 24)).astype(np.float32)
    return {
        "layer/w": array,
        "layer/h": random.normal(size=(8, 8)).astype(jnp.bfloat16),
        "n": np.arange(8, dtype=np.int32),
    }


def check(path, mesh, rules="w->a.b, h->None.b, n->a"):
    """Everything is read as it was written, and what the reads need and take in excess
    is known.
    """
    index = checkpoint.read_index(path)
    tree = checkpoint.structs(index)
    sharding_plan = plan(tree, mesh, paths=PathRules.parse(rules))
    loaded = checkpoint.load(path, sharding_plan)
    expected = arrays_of()
    for leaf in sharding_plan.leaves:
        if "/" in leaf.path:
            array = loaded["layer"][leaf.path[-1]]
        else:
            array = loaded[leaf.path]
        assert array.sharding.spec == leaf.spec
        assert array.dtype == expected[leaf.path].dtype
        assert np.array_equal(
            np.asarray(array, np.float32), np.asarray(expected[leaf.path], np.float32)
        )
    return index, sharding_plan


@pytest.mark.parametrize(
    ("driver", "ocdbt"),
    [("zarr", False), ("zarr3", False), ("zarr", True), ("zarr3", True)],
)
def test_zarr_trees_and_databases(tmp_path, mesh, driver, ocdbt):
    for path, array in arrays_of().items():
        zarr(tmp_path, path, array, chunks=[4] * array.ndim, driver=driver, ocdbt=ocdbt)
    index, sharding_plan = check(tmp_path, mesh)
    assert index.format == ("ocdbt" if ocdbt else "zarr")
    stored = index["layer/w"]
    assert isinstance(stored, StoreArray)
    assert stored.chunks == (4, 4)
    assert stored.driver == driver
    reads = checkpoint.plan_reads(index, sharding_plan)
    assert reads.needed_bytes == index.bytes_total
    # (16, 24) in pieces of (8, 6) touches chunks of 4 twice along the columns; the
    # others fit.
    [reads_of_process] = reads.processes
    expected = 16 * (8 - 6) * 4 * 4 + 8 * 2 * 4 * 2
    assert reads_of_process.excess_bytes == expected


@pytest.mark.parametrize("use_ocdbt", [True, False])
@pytest.mark.parametrize("use_zarr3", [True, False])
def test_orbax_is_read_and_without_its_metadata_refused(
    tmp_path, mesh, use_ocdbt, use_zarr3
):
    expected = arrays_of()
    placed = jax.device_put(expected["layer/w"], NamedSharding(mesh, P("b", "a")))
    tree = {
        "layer": [{"w": placed}],
        "n": jnp.arange(8),
    }
    orbax(tmp_path / "c", tree, use_ocdbt=use_ocdbt, use_zarr3=use_zarr3)
    index = checkpoint.read_index(tmp_path / "c")
    assert index.format == "orbax"
    actual = {entry.path: (entry.shape, entry.dtype) for entry in index.entries}
    assert actual == {
        "layer/0/w": ((16, 24), np.float32),
        "n": ((8,), np.int32),
    }
    stored = index["layer/0/w"]
    assert isinstance(stored, StoreArray)
    assert stored.chunks == (4, 12)
    sharding_plan = plan(tree, mesh, paths=PathRules.parse("w->a.b, n->replicate"))
    loaded = checkpoint.load(tmp_path / "c", sharding_plan)
    spec = loaded["layer"][0]["w"].sharding.spec
    assert spec == P("a", "b")
    layer = loaded["layer"][0]["w"]
    assert np.array_equal(layer, expected["layer/w"])
    assert np.array_equal(loaded["n"], np.arange(8))
    (tmp_path / "c" / "_METADATA").unlink()
    with pytest.raises(
        CheckpointError,
        match="of Orbax, as '.*' shows, without _METADATA: its save was int",
    ):
        checkpoint.read_index(tmp_path / "c")


def test_a_step_of_orbax_names_its_items(tmp_path):
    with ocp.CheckpointManager(tmp_path) as manager:
        params = ocp.args.StandardSave({"w": jnp.ones(8)})
        manager.save(3, args=ocp.args.Composite(params=params))
    with pytest.raises(
        CheckpointError,
        match=r"is a step .* with the items \['params'\]; name one, as in `read_index",
    ):
        checkpoint.read_index(tmp_path / "3")
    shape = checkpoint.read_index(tmp_path / "3" / "params")["w"].shape
    assert shape == (8,)


def test_eformer_directories_are_read_through_their_index(tmp_path, mesh):
    for path, array in arrays_of().items():
        zarr(tmp_path, path, array, chunks=list(array.shape))
    zarr(tmp_path, "not/listed", np.ones(3), chunks=[3])
    rows = [
        {"path": p, "shape": list(a.shape), "dtype": str(a.dtype)}
        for p, a in arrays_of().items()
    ]
    eformer(tmp_path, version="1.0", arrays=rows)
    index, _ = check(tmp_path, mesh)
    assert index.format == "eformer"
    assert [entry.path for entry in index.entries] == list(arrays_of())
    # As eformer writes it today: its own version, and lists by prefix.
    prefixes = {"layer": rows[:2]}
    eformer(tmp_path, version="0.0.101", prefixes=prefixes, arrays=rows[2:])
    index = checkpoint.read_index(tmp_path)
    structs = checkpoint.structs(index, prefix="layer").keys()
    assert structs == {"w", "h"}
    assert checkpoint.structs(index).keys() == {"layer", "n"}


def test_an_eformer_checkpoint_that_eformer_wrote(tmp_path, mesh):
    serialization = pytest.importorskip("eformer.serialization.serialization")
    expected = arrays_of()
    tree = {
        "layer": {
            "w": jnp.asarray(expected["layer/w"]),
            "h": jnp.asarray(expected["layer/h"]),
        }
    }
    serialization.tree_serialize_leaves(str(tmp_path), tree, prefix="model")
    index = checkpoint.read_index(tmp_path)
    assert index.format == "eformer"
    structs = checkpoint.structs(index, prefix="model")
    sharding_plan = plan(structs, mesh, paths=PathRules.parse("w->a.b, h->b"))
    loaded = checkpoint.load(
        index, sharding_plan, TreeMap({"layer/{name}": "model/layer/{name}"})
    )
    assert np.array_equal(loaded["layer"]["w"], expected["layer/w"])
    assert loaded["layer"]["w"].sharding.spec == P("a", "b")


def test_maps_and_casts_reach_into_stores(tmp_path, mesh):
    layers = [
        np.random.default_rng(i).normal(size=(8, 12)).astype(np.float32)
        for i in range(4)
    ]
    for number, layer in enumerate(layers):
        zarr(tmp_path, f"h/{number}", layer, chunks=[3, 5])
    stacked = np.stack([layer.T for layer in layers])
    sharding = NamedSharding(mesh, P("b", None, "a"))
    struct = jax.ShapeDtypeStruct(stacked.shape, jnp.bfloat16, sharding=sharding)
    structs = {"w": struct}
    rules = {"w": From("h/{i}").T.stack("i")}
    tree_map = TreeMap(rules)
    loaded = checkpoint.load(tmp_path, structs, tree_map, dtype="plan")
    assert np.array_equal(np.asarray(loaded["w"]), stacked.astype(jnp.bfloat16))


def test_links_out_of_a_store_are_not_followed(tmp_path, mesh):
    (tmp_path / "outside").write_bytes(bytes(12))
    model = tmp_path / "model"
    zarr(model, "w", np.ones(3, np.float32), chunks=[3])
    index = checkpoint.read_index(model)
    struct = jax.ShapeDtypeStruct((3,), np.float32, sharding=NamedSharding(mesh, P()))
    structs = {"w": struct}
    (model / "w" / "0").unlink()
    (model / "w" / "0").symlink_to(tmp_path / "outside")
    with pytest.raises(CheckpointError, match="symbolic link that leaves"):
        checkpoint.load(index, structs)
    (model / "w" / "0").unlink()
    (model / "w" / "0").symlink_to("nothing")
    with pytest.raises(CheckpointError, match="nothing' is missing"):
        checkpoint.load(index, structs)
    (model / "w").rename(tmp_path / "moved")
    (model / "w").symlink_to(tmp_path / "moved")
    eformer(model, arrays=[{"path": "w"}])
    with pytest.raises(CheckpointError, match="symbolic link that leaves"):
        checkpoint.read_index(model)
    database = tmp_path / "database"
    zarr(database, "w", np.ones(3, np.float32), chunks=[3], ocdbt=True)
    data = next((database / "d").iterdir())
    data.rename(tmp_path / "moved-data")
    data.symlink_to(tmp_path / "moved-data")
    with pytest.raises(CheckpointError, match="symbolic link that leaves"):
        checkpoint.read_index(database)


EFORMER = [
    ({"format": "zip"}, "Unsupported index format: zip"),
    ({"arrays": {}}, "`arrays` must be a list"),
    ({"prefixes": []}, "`prefixes` must map each prefix"),
    ({"prefixes": {"a": 3}}, "prefix 'a' must be a list"),
    ({"arrays": [3]}, "lists '3', which has no `path`"),
    ({"arrays": [{"path": "w", "shape": [-1]}]}, "it must be a list of sizes"),
    ({"arrays": [{"path": "w", "shape": [2**70]}]}, "it must be a list of sizes"),
    *[
        ({"arrays": [{"path": name}]}, "not a relative path below")
        for name in ("../out", "/etc", "a/../../b")
    ],
    (
        {"arrays": [{"path": "real", "shape": [4]}]},
        r"the shape \[4\], but its own metadata says \(3,\)",
    ),
]
ZARR = (
    *("{", "[]", "{}", '{"shape": [3], "chunks": [0], "dtype": "<f4"}'),
    *(
        '{"shape": [3], "chunks": [3, 3], "dtype": "<f4"}',
        '{"shape": ["3"], "chunks": [3], "dtype": "<f4"}',
    ),
)
ORBAX = ("{", "{}", "[]", '{"tree_metadata": 3}', '{"tree_metadata": {"a": {}}}')
BROKEN = [
    (
        "tensorstore_index.json",
        json.dumps({"format": "tensorstore"} | metadata),
        message,
    )
    for metadata, message in EFORMER
]
BROKEN += [
    ("real/.zarray", text, "describes no zarr array|is no valid JSON") for text in ZARR
]
BROKEN += [
    ("_METADATA", text, "has no keys and value|has no `tree_metadata`|no valid JSON")
    for text in ORBAX
]


@pytest.mark.parametrize(("file", "text", "message"), BROKEN)
def test_metadata_that_make_no_sense(tmp_path, file, text, message):
    zarr(tmp_path, "real", np.ones(3), chunks=[3])
    (tmp_path / file).write_text(text)
    with pytest.raises(CheckpointError, match=message):
        checkpoint.read_index(tmp_path)


def test_shapes_that_an_index_does_not_say(tmp_path, mesh):
    arrays = [{"path": "w"}, {"path": "v", "shape": [4], "dtype": "datetime64"}]
    eformer(
        tmp_path,
        arrays=arrays,
    )
    index = checkpoint.read_index(tmp_path)
    expected = dict.fromkeys("wv", NamedSharding(mesh, P()))
    assert shardings(index, mesh) == expected
    with pytest.raises(CheckpointError, match="does not say the shape of 'w'"):
        shardings(index, mesh, default=P("a"))
    with pytest.raises(CheckpointError, match="array 'w' .* has no known shape"):
        checkpoint.structs(index)
    assert index["v"].dtype is None
    assert index["v"].nbytes is None
    lines = str(index).splitlines()[1:3]
    parts = [line.split()[2:] for line in lines]
    assert parts == [
        ["unknown[?]", "?"],
        ["datetime64[4]", "?"],
    ]


@pytest.mark.parametrize(
    "dtype",
    [
        "O",
        "|O",
        "<M8[ns]",
        [["a", "<i4"]],
        "<U8",
        "V16",
        "<f16",
        "import os",
        "<05",
        "|b1",
        "<i2",
    ],
)
def test_zarr_dtypes_are_from_a_list(tmp_path, dtype):
    (tmp_path / "w").mkdir()
    encoded = json.dumps({"shape": [3], "chunks": [3], "dtype": dtype})
    (tmp_path / "w" / ".zarray").write_text(encoded)
    # numpy would evaluate "<05", and fail with a SyntaxError.
    dtype_read = checkpoint.read_index(tmp_path)["w"].dtype
    expected = {"|b1": np.dtype(bool), "<i2": np.dtype("int16")}.get(str(dtype))
    assert dtype_read == expected


@pytest.mark.parametrize("damage", ["chunk", "cut chunk", "shape", "manifest", "dtype"])
def test_damaged_stores_name_what_is_damaged(tmp_path, mesh, damage):
    zarr(
        tmp_path,
        "w",
        np.arange(64, dtype=np.float32),
        chunks=[64],
        ocdbt=damage == "manifest",
    )
    index = checkpoint.read_index(tmp_path)
    sharding = NamedSharding(mesh, P("a"))
    struct = jax.ShapeDtypeStruct((64,), np.float32, sharding=sharding)
    structs = {"w": struct}
    metadata = tmp_path / "w" / ".zarray"
    if damage.endswith("chunk"):
        chunk = metadata.with_name("0")
        chunk.write_bytes(b"nonsense" if damage == "chunk" else chunk.read_bytes()[:-9])
    elif damage == "manifest":
        (tmp_path / "manifest.ocdbt").write_bytes(b"nonsense")
        with pytest.raises(CheckpointError, match="cannot be read"):
            checkpoint.read_index(tmp_path)
    else:
        other = {"shape": {"shape": [32]}, "dtype": {"dtype": "<f8"}}[damage]
        encoded = json.dumps(json.loads(metadata.read_text()) | other)
        metadata.write_text(encoded)
    messages = {
        "chunk": "claims to unpack to",
        "cut chunk": "w, array w' cannot be read",
    }
    with pytest.raises(CheckpointError, match=messages.get(damage, "was replaced")):
        checkpoint.load(index, structs)

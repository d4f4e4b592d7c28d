"""Files of other libraries: packed elements, msgpack, T5X, and kinds that are not read."""

import gzip
import json
import pickle
import zipfile

import hypothesis as hyp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import msgpack
import numpy as np
import pytest
from _stores import zarr
from flax import serialization
from jax.sharding import NamedSharding, PartitionSpec as P

import shardfx
from shardfx import From, TreeMap, checkpoint
from shardfx.errors import CheckpointError


F4 = np.dtype(jnp.float4_e2m1fn)


def replicated(tree, mesh):
    return shardfx.plan(tree, mesh, unmatched="replicate")


def write(path, tensors):
    """A safetensors file of pairs of a dtype's name, a shape and bytes."""
    header = {}
    reached = 0
    for name, (dtype, shape, data) in tensors.items():
        offsets = [reached, reached + len(data)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        reached += len(data)
    text = json.dumps(header).encode()
    rest = b"".join(data for _, _, data in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + rest)


def halves(values):
    """Two elements a byte, the first in the lower half."""
    flat = values.reshape(-1)
    return (flat[0::2] | flat[1::2] << 4).astype(np.uint8).tobytes()


# Four bits


@hyp.settings(max_examples=25, deadline=None)
@hyp.given(
    st.sampled_from([(16, 32), (8, 6), (8, 3), (2, 8, 8), (8, 1), (16,), (0, 4)]),
    st.sampled_from([0, 1]),
    st.sampled_from([None, "bfloat16", "float32"]),
    st.booleans(),
)
def test_two_elements_in_a_byte(tmp_path_factory, mesh, shape, dim, to, by_map):
    path = tmp_path_factory.mktemp("f4") / "x.safetensors"
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 16, shape).astype(np.uint8)
    other = np.arange(4, dtype=np.float32)
    write(path, {"w": ("F4", shape, halves(bits)), "b": ("F32", [4], other.tobytes())})
    values = bits.view(F4)
    index = checkpoint.read_index(path)
    assert index["w"].nbytes == bits.size // 2
    structs = checkpoint.structs(index)
    assert structs["w"].dtype == F4
    assert structs["w"].shape == shape
    entries: list[str | None] = [None] * len(shape)
    if dim < len(shape) and shape[dim] % 8 == 0:
        entries[dim] = "x"
    sharding = NamedSharding(mesh, P(*entries))
    dtype = F4 if to is None else to
    w = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    placed = jax.device_put(other, NamedSharding(mesh, P()))
    target = {"w": w, "b": placed}
    asked = None if to is None else "plan"
    want = values.astype(dtype)
    tree_map = None
    if by_map:
        target_sharding = NamedSharding(mesh, P(*entries[::-1]))
        flipped = jax.ShapeDtypeStruct(shape[::-1], dtype, sharding=target_sharding)
        target["w"] = flipped
        want = want.T
        tree_map = TreeMap({"w": From("w").T, "b": "b"})
    loaded = checkpoint.load(path, target, tree_map, dtype=asked)
    assert loaded["w"].sharding == target["w"].sharding
    for shard in loaded["w"].addressable_shards:
        part = np.asarray(shard.data)
        assert part.tobytes() == np.ascontiguousarray(want[shard.index]).tobytes()
    assert (loaded["b"] == other).all()


def test_bytes_of_packed_tensors_by_choice(tmp_path, mesh):
    bits = np.arange(64, dtype=np.uint8) % 16
    tensors = {
        "w": ("F4", [4, 16], halves(bits)),
        "odd": ("F6_E2M3", [2, 3, 2], bytes(range(9))),
        "six": ("F6_E3M2", [2, 8], bytes(range(12))),
        "b": ("F32", [1], b"\0\0\0\0"),
    }
    write(tmp_path / "x.safetensors", tensors)
    structs = checkpoint.structs(tmp_path)
    # JAX has no dtype of 6 bits: those are their bytes.
    actual = [structs["odd"].shape, structs["six"].shape]
    assert actual == [(9,), (2, 6)]
    structs["w"] = jax.ShapeDtypeStruct((4, 8), jnp.uint8)
    loaded = checkpoint.load(tmp_path, replicated(structs, mesh))
    for name in ("w", "odd", "six"):
        assert loaded[name].dtype == jnp.uint8
        actual = np.asarray(loaded[name]).tobytes()
        assert actual == tensors[name][2]
    structs["six"] = jax.ShapeDtypeStruct((2, 8), jnp.float16)
    text = (
        r"stored as F6_E3M2, a dtype that JAX lacks; load its bytes: plan it as `jax\."
    )
    with pytest.raises(CheckpointError, match=text):
        checkpoint.load(tmp_path, replicated(structs, mesh))


@pytest.mark.parametrize(
    ("dtype", "row_bytes"), [("F4", 4), ("F6_E2M3", 6), ("F6_E3M2", 6)]
)
def test_packed_tensors_of_one_shape_are_loaded_as_bytes(
    tmp_path, mesh, dtype, row_bytes
):
    rng = np.random.default_rng(0)
    tensors = {}
    for name in ("a", "b", "c"):
        data = rng.integers(0, 256, (4, row_bytes)).astype(np.uint8).tobytes()
        tensors[name] = (dtype, [4, 8], data)
    write(tmp_path / "x.safetensors", tensors)
    structs = dict.fromkeys(tensors, jax.ShapeDtypeStruct((4, row_bytes), jnp.uint8))
    loaded = checkpoint.load(tmp_path, replicated(structs, mesh))
    for name, (_, _, data) in tensors.items():
        assert np.asarray(loaded[name]).tobytes() == data


def test_packed_elements_beside_those_with_a_byte_each(tmp_path, mesh):
    bits = np.arange(32, dtype=np.uint8).reshape(4, 8) % 16
    saved = jnp.asarray(bits.view(F4)[::-1])
    checkpoint.save(tmp_path / "a.safetensors", {"a": saved})
    write(tmp_path / "b.safetensors", {"b": ("F4", [4, 8], halves(bits))})
    struct = jax.ShapeDtypeStruct((4, 8), F4)
    loaded = checkpoint.load(tmp_path, replicated({"a": struct, "b": struct}, mesh))
    assert np.asarray(loaded["a"]).tobytes() == bits[::-1].tobytes()
    assert np.asarray(loaded["b"]).tobytes() == bits.tobytes()


def test_an_unreadable_array_blocks_no_other(tmp_path, mesh):
    for name, dtype in (("date", "<M8[s]"), ("w", "<f4")):
        (tmp_path / name).mkdir()
        meta = {
            "zarr_format": 2,
            "shape": [4],
            "chunks": [4],
            "dtype": dtype,
        }
        meta |= {
            "compressor": None,
            "fill_value": 0,
            "filters": None,
            "order": "C",
        }
        (tmp_path / name / ".zarray").write_text(json.dumps(meta))
        (tmp_path / name / "0").write_bytes(bytes(32 if name == "date" else 16))
    structs = checkpoint.structs(tmp_path)
    assert list(structs) == ["w"]
    plan = replicated(structs, mesh)
    with pytest.raises(CheckpointError, match="1 of its 2 arrays in no leaf.*'date'"):
        checkpoint.load(tmp_path, plan)
    shape = checkpoint.load(tmp_path, plan, unread="allow")["w"].shape
    assert shape == (4,)
    named = {"date": jax.ShapeDtypeStruct((4,), jnp.int32), **structs}
    text = r"stored as <M8\[s\]\); leave it out of the plan, and load the others with"
    with pytest.raises(CheckpointError, match=text):
        checkpoint.load(tmp_path, replicated(named, mesh))


# msgpack


STATE = {
    "step": np.int32(1000),
    "rate": 0.5,
    "count": 2**40,
    "negative": -7,
    "flag": True,
    "z": 1 + 2j,
    "none": None,
    "name": "run",
    "empty": {},
    "norm": {"scale": np.linspace(0, 1, 6, dtype=np.float32).reshape(2, 3)},
    "half": np.asarray(jnp.arange(5, dtype=jnp.bfloat16)),
    "big": np.arange(40_000, dtype=np.int32),
    "nothing": np.zeros((0, 3), np.float32),
}
ARRAYS = {name: value for name, value in STATE.items() if isinstance(value, np.ndarray)}
NUMBERS = {
    name: type(STATE[name])() for name in ("rate", "count", "negative", "flag", "z")
}
NUMBERS["step"] = np.int32(0)


def test_files_of_flax(tmp_path, mesh):
    path = tmp_path / "flax_model.msgpack"
    path.write_bytes(serialization.to_bytes(STATE))
    plan = replicated({**ARRAYS, **NUMBERS, "norm": STATE["norm"]}, mesh)
    for where in (path, tmp_path):
        index = checkpoint.read_index(where)
        assert index.format == "flax"
        assert index["norm/scale"].shape == (2, 3)
        loaded = checkpoint.load(where, plan)
        for name in NUMBERS:
            if name != "step":
                assert type(loaded[name]) is type(STATE[name])
            assert loaded[name] == STATE[name]
        assert loaded["step"] == 1000
        for name, value in {**ARRAYS, **STATE["norm"]}.items():
            if name == "scale":
                leaf = loaded["norm"][name]
            else:
                leaf = loaded[name]
            assert np.asarray(leaf).tobytes() == value.tobytes()
    with pytest.raises(CheckpointError, match="has 5 Python numbers in no leaf of the"):
        checkpoint.load(path, replicated({**ARRAYS, "step": 0, **tree_of(STATE)}, mesh))


def test_files_of_flax_that_are_damaged_anywhere(tmp_path, mesh):
    """It is an error, and never anything else."""
    path = tmp_path / "flax_model.msgpack"
    data = serialization.to_bytes(STATE)
    path.write_bytes(data)
    plan = replicated({**ARRAYS, **NUMBERS, "norm": STATE["norm"]}, mesh)
    rng = np.random.default_rng(0)
    for position in [*range(0, 60), *rng.integers(0, len(data), 60)]:
        for broken in (
            data[:position],
            data[:position] + b"\xc1" + data[position + 1 :],
        ):
            path.write_bytes(broken)
            try:
                checkpoint.load(path, plan)
            except CheckpointError:
                pass
    # A tree, and arrays of more bytes than there are.
    for broken in (b"\xdf\xff\xff\xff\xff\xa1a", b"\x81\xa1a\xc6\xff\xff\xff\xff"):
        path.write_bytes(broken)
        with pytest.raises(CheckpointError, match="it ends too early, at byte"):
            checkpoint.read_index(path)
    path.write_bytes(b"\x81\xa1a" * 5000)
    with pytest.raises(CheckpointError, match="is nested more than 100 deep"):
        checkpoint.read_index(path)


def test_bytes_in_the_other_order_are_not_taken_for_numbers(tmp_path, mesh):
    path = tmp_path / "flax_model.msgpack"
    array = np.arange(4, dtype=">i4")
    content = msgpack.packb((array.shape, array.dtype.str, array.tobytes()))
    path.write_bytes(msgpack.packb({"w": msgpack.ExtType(1, content)}))
    structs = {"w": jax.ShapeDtypeStruct((4,), jnp.int32)}
    with pytest.raises(CheckpointError, match="stored as >i4"):
        checkpoint.load(path, replicated(structs, mesh))


ONE = np.ones(2, np.float32)
SAME_PATHS = [
    {"a": {"b": ONE}, "a/b": 2 * ONE},
    {"a": {"b": 1}, "a/b": 2},
    {"a": {"b": 1}, "a/b": ONE},
]


@pytest.mark.parametrize("state", SAME_PATHS)
def test_a_file_of_flax_with_two_leaves_of_one_path(tmp_path, state):
    path = tmp_path / "flax_model.msgpack"
    path.write_bytes(serialization.msgpack_serialize(state))
    with pytest.raises(CheckpointError, match="has two leaves with the path 'a/b', "):
        checkpoint.read_index(path)


def tree_of(state):
    return {"norm": state["norm"]}


def t5x(path, *, cast=False):
    """A checkpoint as t5x/checkpoints.py writes it."""
    kernel = np.arange(32, dtype=np.float32).reshape(8, 4)
    name = "target.decoder.layers_0.kernel"
    zarr(path, name, kernel, chunks=[4, 4])
    spec = {
        "driver": "zarr",
        "dtype": "float32",
        "kvstore": {"driver": "file", "path": f"{name}/"},
        "metadata": {"shape": [8, 4], "chunks": [4, 4]},
    }
    if cast:
        spec = {"driver": "cast", "dtype": "bfloat16", "base": spec}
    scale = np.arange(4, dtype=np.float32)
    target = {"decoder": {"layers_0": {"kernel": spec}, "norm": {"scale": scale}}}
    state = {"step": np.int32(7), "param_states": {}}
    content = {"version": 3, "optimizer": {"state": state, "target": target}}
    (path / "checkpoint").write_bytes(serialization.to_bytes(content))
    return kernel, scale


@pytest.mark.parametrize("cast", [False, True])
def test_both_halves_of_t5x(tmp_path, mesh, cast):
    kernel, scale = t5x(tmp_path, cast=cast)
    index = checkpoint.read_index(tmp_path)
    assert index.format == "t5x"
    assert sorted(index) == [
        "state/step",
        "target/decoder/layers_0/kernel",
        "target/decoder/norm/scale",
    ]
    structs = checkpoint.structs(index)
    rules = shardfx.PathRules([("kernel", P("x")), (".*", ())])
    sharding_plan = shardfx.plan(structs, mesh, paths=rules)
    loaded = checkpoint.load(index, sharding_plan)
    decoder = loaded["target"]["decoder"]
    assert (decoder["layers_0"]["kernel"] == kernel).all()
    assert decoder["layers_0"]["kernel"].sharding.spec == P("x")
    assert (decoder["norm"]["scale"] == scale).all()
    assert loaded["state"]["step"] == 7
    with pytest.raises(
        CheckpointError, match="checkpoint of T5X, and 'optimizer/target"
    ):
        checkpoint.read_index(tmp_path / "checkpoint")


def test_half_of_t5x_is_an_error(tmp_path):
    t5x(tmp_path)
    whole = (tmp_path / "checkpoint").read_bytes()
    kernel = tmp_path / "target.decoder.layers_0.kernel"
    for content, text in (
        (whole[:-5], "cannot be read: it ends too early"),
        (b"model_checkpoint_path: 3", "half of the checkpoint is damaged; it has 'che"),
        (b"", "which is an empty file. T5X keeps the small arrays and the step in"),
    ):
        (tmp_path / "checkpoint").write_bytes(content)
        with pytest.raises(CheckpointError, match=text):
            checkpoint.read_index(tmp_path)
    (tmp_path / "checkpoint").unlink()
    text = "not its file `checkpoint`, which has the small arrays and the step; it has"
    with pytest.raises(CheckpointError, match=text):
        checkpoint.read_index(tmp_path)
    (tmp_path / "checkpoint").write_bytes(whole)
    kernel.rename(tmp_path / "elsewhere")
    text = r"is in 'target\.decoder\.layers_0\.kernel', but .* holds no such zarr array"
    with pytest.raises(CheckpointError, match=text):
        checkpoint.read_index(tmp_path)


# Kinds that are not read


KINDS = {
    "model.safetensors": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n",
        "is a pointer of Git LFS, and not the weights; run `git lfs pull`",
    ),
    "model.gguf": (b"GGUF\x03\0\0\0" + bytes(64), "is a GGUF file of llama.cpp; take"),
    "weights.h5": (b"\x89HDF\r\n\x1a\n" + bytes(64), "is an HDF5 file, as of Keras"),
    "w.gz": (gzip.compress(bytes(1000)), "is a gzip file; unpack it first"),
    "page.safetensors": (
        b"<!DOCTYPE html><html></html>",
        "is a page of HTML or XML; the download",
    ),
    "empty.safetensors": (b"", "is an empty file; its download or its save failed"),
    "old.pt": (pickle.dumps([1] * 50, 4), "is a pickle, as of an older `torch.save`"),
    "w.npy": (b"\x93NUMPY\x01\0" + bytes(100), "is an array of `numpy.save`"),
    "flax_model": (serialization.to_bytes(STATE), "is a msgpack file, as of flax; g"),
}


@pytest.mark.parametrize("name", KINDS)
def test_other_kinds_of_files_are_told(tmp_path, name):
    data, text = KINDS[name]
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=f"{name}' {text}"):
        checkpoint.read_index(path)
    # A directory with nothing else names it.
    message = text.split(";")[0].removeprefix("is ")
    with pytest.raises(CheckpointError, match=message):
        checkpoint.read_index(tmp_path)


def test_zip_files_are_told(tmp_path):
    for name in ("pytorch_model.bin", "weights.npz"):
        path = tmp_path / name
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("archive/data.pkl", b"data")
        text = "is a zip file, as of `torch.save` or `numpy.savez`; a pickle is a prog"
        with pytest.raises(CheckpointError, match=text):
            checkpoint.read_index(path)
    text = "holds no checkpoint: .* It holds other files: 'pytorch_model.bin' is a zip"
    with pytest.raises(CheckpointError, match=text):
        checkpoint.read_index(tmp_path)
    zarr(tmp_path, "w", np.ones(4, np.float32), chunks=[4])
    text = "holds zarr arrays, and 'pytorch_model.bin' is a zip file.*move the other"
    with pytest.raises(CheckpointError, match=text):
        checkpoint.read_index(tmp_path)


@pytest.mark.parametrize(
    "shape", [[0, 2**62, 2**62], [2**62, 0, 4], [0, 2**59], [0] + [2**20] * 3]
)
def test_shapes_that_numpy_cannot_hold(tmp_path, shape):
    write(tmp_path / "x.safetensors", {"w": ("F32", shape, b"")})
    with pytest.raises(CheckpointError, match=r"must have a product below 2\*\*59"):
        checkpoint.read_index(tmp_path)
    (tmp_path / "x.safetensors").unlink()
    (tmp_path / "w").mkdir()
    meta = {"zarr_format": 2, "shape": shape, "chunks": [1] * len(shape)}
    encoded = json.dumps(meta | {"dtype": "<f4"})
    (tmp_path / "w" / ".zarray").write_text(encoded)
    with pytest.raises(CheckpointError, match=r"and their product below 2\*\*59"):
        checkpoint.read_index(tmp_path)

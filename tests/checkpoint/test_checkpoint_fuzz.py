"""For any bytes in the place of a header, `checkpoint.read_index` returns a checked
index or raises one error.
"""

import contextlib
import json
import math
from pathlib import Path

import hypothesis as hyp
import hypothesis.strategies as st
import jax
import pytest
import safetensors

from shardfx import checkpoint
from shardfx.errors import CheckpointError


INDEX = "model.safetensors.index.json"
KINDS = ("header", "file", INDEX, "tensorstore_index.json", ".zarray", "zarr.json")
# The bits of an element of each dtype of the format.
BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "U16": 16,
    "I16": 16,
    "U32": 32,
    "I32": 32,
    "U64": 64,
    "I64": 64,
    "F16": 16,
    "BF16": 16,
    "F32": 32,
    "F64": 64,
    "C64": 64,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}


def consume(data: bytes, directory: Path) -> bool:
    """Reads `data` as the kind of file that its first byte says; whether it was
    accepted.
    """
    kind = KINDS[data[0] % len(KINDS)]
    data = data[1:]
    if kind == "header":
        return consume_header(data, directory)
    file = directory / ("x.safetensors" if kind == "file" else kind)
    file.write_bytes(data)
    try:
        index = checkpoint.read_index(directory)
        for entry in index.entries:
            assert entry.file.startswith(str(directory)), "a file outside the directory"
        with contextlib.suppress(CheckpointError):
            checkpoint.structs(index)
    except CheckpointError as error:
        check_text(error)
        return False
    finally:
        file.unlink()
    return True


def consume_header(data: bytes, directory: Path) -> bool:
    """Reads `data` as a header, behind which its last two bytes say how many bytes
    there are.
    """
    buffer_bytes = int.from_bytes(data[-2:], "little")
    data = data[:-2]
    file = directory / "x.safetensors"
    file.write_bytes(len(data).to_bytes(8, "little") + data + bytes(buffer_bytes))
    try:
        index = checkpoint.read_index(file)
    except CheckpointError as error:
        check_text(error)
        return False
    finally:
        file.unlink()
    reached = 8 + len(data)
    for array in index.entries:
        assert isinstance(array, checkpoint.FileArray)
        assert array.offset == reached, "a hole or an overlap"
        stored_bits = math.prod(array.shape) * BITS[array.stored]
        if array.dtype is not None and jax.numpy.issubdtype(
            array.dtype, jax.dtypes.prng_key
        ):
            struct = jax.ShapeDtypeStruct((), array.dtype)
            structs = jax.eval_shape(jax.random.key_data, struct)
            shape = structs.shape
            stored_bits *= math.prod(shape)
        assert stored_bits % 8 == 0
        reached += stored_bits // 8
    assert reached == 8 + len(data) + buffer_bytes
    return True


def check_text(error: CheckpointError) -> None:
    """What a file says must not flood a terminal, and must be printable."""
    text = str(error)
    assert len(text) < 2000, len(text)
    text.encode()


def seeds() -> list[bytes]:
    """One accepted input of each kind."""
    encoded = json.dumps(
        {
            "__metadata__": {"shardfx.dtypes": '{"b": "int4"}'},
            "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
            "b": {"dtype": "U8", "shape": [8], "data_offsets": [24, 32]},
        }
    )
    header = encoded.encode()
    file = len(header).to_bytes(8, "little") + header + bytes(32)
    eformer = {
        "format": "tensorstore",
        "version": "1.0",
        "arrays": [{"path": "a/b", "shape": [2], "dtype": "float32"}],
    }
    prefixes = {
        "format": "tensorstore",
        "prefixes": {"p": [{"path": "p/a", "shape": []}]},
    }
    zarr = {"shape": [4, 4], "chunks": [2, 4], "dtype": "<f4"}
    grid = {"name": "regular", "configuration": {"chunk_shape": [2]}}
    zarr3 = {
        "node_type": "array",
        "shape": [4],
        "data_type": "bfloat16",
        "chunk_grid": grid,
    }
    weights = {"weight_map": {"a": "x.safetensors"}}
    return [
        b"\0" + header + (32).to_bytes(2, "little"),
        b"\1" + file,
        b"\2" + json.dumps(weights).encode(),
        b"\3" + json.dumps(eformer).encode(),
        b"\3" + json.dumps(prefixes).encode(),
        b"\4" + json.dumps(zarr).encode(),
        b"\5" + json.dumps(zarr3).encode(),
    ]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz").resolve()


def test_the_seeds_are_accepted(directory):
    refused = [seed[0] for seed in seeds() if not consume(seed, directory)]
    # The index of a set names a file that is not there.
    assert refused == [2]


@hyp.settings(max_examples=200, deadline=None)
@hyp.given(data=st.data())
def test_any_bytes_and_real_files_with_some_bytes_changed(directory, data):
    seed = bytearray(
        data.draw(st.sampled_from(seeds()) | st.binary(min_size=2, max_size=200))
    )
    for _ in range(data.draw(st.integers(0, 4))):
        start = data.draw(st.integers(1, len(seed) - 1))
        seed[start : start + data.draw(st.integers(0, 8))] = data.draw(
            st.binary(max_size=8)
        )
        hyp.assume(len(seed) > 1)
    consume(bytes(seed), directory)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)


@hyp.settings(max_examples=150, deadline=None)
@hyp.given(kind=st.integers(1, 5), data=st.data())
def test_real_files_with_other_values(directory, kind, data):
    [seed, *_] = [seed for seed in seeds() if seed[0] == kind]
    content = json.loads(
        seed[9 : 9 + int.from_bytes(seed[1:9], "little")] if kind == 1 else seed[1:]
    )
    node = content
    key = data.draw(st.sampled_from(sorted(content)))
    while isinstance(node[key], dict | list) and node[key] and data.draw(st.booleans()):
        node = node[key]
        key = data.draw(
            st.sampled_from(
                sorted(node) if isinstance(node, dict) else range(len(node))
            )
        )
    node[key] = data.draw(JSON)
    text = json.dumps(content).encode()
    if kind == 1:
        text = len(text).to_bytes(8, "little") + text + bytes(32)
    consume(bytes([kind]) + text, directory)


DTYPES = st.sampled_from([*BITS, "F33"])
SIZES = st.lists(st.integers(-1, 4), max_size=3)


@hyp.settings(max_examples=500, deadline=None)
@hyp.given(
    st.lists(
        st.tuples(DTYPES, SIZES, st.integers(-2, 2), st.integers(-2, 2)), max_size=4
    ),
    st.integers(-2, 2),
)
def test_files_are_accepted_as_by_the_library_of_the_format(directory, rows, extra):
    header = {}
    reached = 0
    for number, (dtype, shape, early, late) in enumerate(rows):
        nbytes = -(-math.prod(shape) * BITS.get(dtype, 8) // 8)
        # Mostly right, sometimes off by a little at either end.
        begin = reached + early // 2
        end = reached + nbytes + late // 2
        header[f"t{number}"] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [begin, end],
        }
        reached = end
    buffer_bytes = max(0, reached + extra // 2)
    text = json.dumps(header).encode()
    file = len(text).to_bytes(8, "little") + text + bytes(buffer_bytes)
    try:
        safetensors.deserialize(file)
        accepted = True
    except safetensors.SafetensorError:
        accepted = False
    header_and_size = text + buffer_bytes.to_bytes(2, "little")
    assert consume_header(header_and_size, directory) == accepted

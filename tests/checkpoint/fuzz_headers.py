"""Any bytes as any of the headers that `checkpoint.read_index` reads: a checked index comes back, or one error.

The suite runs this on what hypothesis makes (`test_checkpoint_fuzz.py`). For a longer run guided by coverage:

    pip install atheris
    python tests/checkpoint/fuzz_headers.py -max_total_time=600
"""

import contextlib
import json
import math
import sys
import tempfile
import types
from pathlib import Path

import jax

from shardfx import checkpoint
from shardfx._ground.errors import CheckpointError
from shardfx.checkpoint._safetensors import DTYPES, parse_header


INDEX = "model.safetensors.index.json"
KINDS = ("header", "file", INDEX, "tensorstore_index.json", ".zarray", "zarr.json")


def consume(data: bytes, directory: Path) -> bool:
    """Reads `data` as the kind of file that its first byte says; whether it was accepted."""
    kind, data = KINDS[data[0] % len(KINDS)] if data else "header", data[1:]
    if kind == "header":
        return consume_header(data)
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


def consume_header(data: bytes) -> bool:
    """Reads `data` as a header, behind which its last two bytes say how many bytes there are."""
    buffer_bytes = int.from_bytes(data[-2:], "little")
    data = data[:-2]
    try:
        header = parse_header(data, buffer_bytes, "x")
    except CheckpointError as error:
        check_text(error)
        return False
    reached = 8 + len(data)
    for array in header.arrays:
        assert array.offset == reached, "a hole or an overlap"
        stored_bits = math.prod(array.shape) * DTYPES[array.stored][0]
        if array.dtype is not None and jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key):
            stored_bits *= math.prod(jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), array.dtype)).shape)
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
    header = json.dumps(
        {
            "__metadata__": {"shardfx.dtypes": '{"b": "int4"}'},
            "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
            "b": {"dtype": "U8", "shape": [8], "data_offsets": [24, 32]},
        }
    ).encode()
    file = len(header).to_bytes(8, "little") + header + bytes(32)
    eformer = {"format": "tensorstore", "version": "1.0", "arrays": [{"path": "a/b", "shape": [2], "dtype": "float32"}]}
    prefixes = {"format": "tensorstore", "prefixes": {"p": [{"path": "p/a", "shape": []}]}}
    zarr = {"shape": [4, 4], "chunks": [2, 4], "dtype": "<f4"}
    grid = {"name": "regular", "configuration": {"chunk_shape": [2]}}
    zarr3 = {"node_type": "array", "shape": [4], "data_type": "bfloat16", "chunk_grid": grid}
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


def instrumented() -> list[types.FunctionType]:
    """The readers' own functions; all of JAX would take minutes to instrument and tell nothing."""
    modules = [module for name, module in sys.modules.items() if name.startswith("shardfx.checkpoint")]
    members = [value for module in modules for value in vars(module).values()]
    return [value for value in members if isinstance(value, types.FunctionType)]


def main() -> None:
    import atheris  # pyright: ignore[reportMissingImports]

    corpus = Path(tempfile.mkdtemp(prefix="fuzz-headers-"))
    for number, seed in enumerate(seeds()):
        (corpus / str(number)).write_bytes(seed)
    with tempfile.TemporaryDirectory() as directory:
        real = Path(directory).resolve()
        for function in instrumented():
            atheris.instrument_func(function)  # pyright: ignore[reportAttributeAccessIssue]
        atheris.Setup([*sys.argv, str(corpus)], lambda data: (consume(data, real), None)[1])
        atheris.Fuzz()


if __name__ == "__main__":
    main()

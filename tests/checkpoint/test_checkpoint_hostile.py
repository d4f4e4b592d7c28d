"""Damaged and hostile files are refused with a message, in bounded memory and time."""

import json
import os
import subprocess
import sys
import tempfile
import textwrap
import zlib
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from _stores import eformer, orbax, zarr

from shardfx import checkpoint
from shardfx.errors import CheckpointError
from tests.checkpoint.wanted_arrays import wanted


# Loads one checkpoint after the other, and prints each error and the MiB by which the
# process has grown.
LOADS = """
    import json, sys
    import jax, numpy as np
    import tensorstore
    from jax.sharding import SingleDeviceSharding
    from shardfx import checkpoint
    from shardfx.errors import CheckpointError
    def peak_bytes():
        with open("/proc/self/status") as status:
            return next(1024 * int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    for path, size in json.loads(sys.argv[1]):
        struct = jax.ShapeDtypeStruct((size,), np.float32, sharding=SingleDeviceSharding(jax.devices()[0]))
        text, before = "", peak_bytes()
        try:
            checkpoint.load(path, {"w": struct})
        except CheckpointError as error:
            text = str(error)
        print(json.dumps([text, (peak_bytes() - before) >> 20]))
"""


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """The errors of a separate process, which must end by itself, for the files that
    could end it.
    """
    makers = {
        **dict.fromkeys(TOO_LARGE, too_large),
        **dict.fromkeys(BOMBS, bombed),
        **dict.fromkeys(PIPES, piped),
    }
    makers |= {"outside": led_outside}
    paths = {name: tmp_path_factory.mktemp("hostile") for name in makers}
    for name, make in makers.items():
        make(paths[name], name)
    todo = []
    for name, path in paths.items():
        rows = 8
        if name in TOO_LARGE:
            rows = 4
        todo.append((str(path), rows))
    command = [sys.executable, "-c", textwrap.dedent(LOADS), json.dumps(todo)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    return dict(zip(makers, map(json.loads, done.stdout.splitlines()), strict=True))


# Chunks


@pytest.mark.parametrize("kind", ["zarr", "zarr3", "eformer", "orbax", "orbax3"])
def test_a_lost_chunk_is_no_zero(tmp_path, mesh, kind):
    array = np.arange(1, 9, dtype=np.float32)
    if kind.startswith("orbax"):
        tree = {"w": jnp.asarray(array)}
        orbax(
            tmp_path / "c",
            tree,
            use_ocdbt=False,
            use_zarr3=kind == "orbax3",
        )
    else:
        driver = "zarr"
        if kind == "zarr3":
            driver = "zarr3"
        zarr(tmp_path / "c", "w", array, chunks=[4], driver=driver)
    if kind == "eformer":
        arrays = [{"path": "w", "shape": [8], "dtype": "float32"}]
        eformer(tmp_path / "c", arrays=arrays)
    structs = {"w": wanted(mesh)}
    loaded = checkpoint.load(tmp_path / "c", structs)["w"]
    assert np.array_equal(loaded, array)
    files = (tmp_path / "c" / "w").rglob("*")
    chunks = [file for file in files if file.is_file() and file.name.isdigit()]
    min(chunks).unlink()
    with pytest.raises(
        CheckpointError,
        match=r"array 'w': a chunk is missing in .*missing_chunks=\"fill\"",
    ):
        checkpoint.load(tmp_path / "c", structs)
    filled = checkpoint.load(tmp_path / "c", structs, missing_chunks="fill")["w"]
    actual = set(np.asarray(filled).tolist()) - set(array.tolist())
    assert actual == {0.0}


TOO_LARGE = {
    "4 elements": ([4], "claims chunks of (1099511627776,)"),
    "2**40 elements": ([2**40], "gives shape (1099511627776,)"),
}


def too_large(folder, name):
    (folder / "w").mkdir()
    metadata = {
        "shape": TOO_LARGE[name][0],
        "chunks": [2**40],
        "dtype": "<f4",
        "zarr_format": 2,
        "order": "C",
    }
    metadata |= {"compressor": None, "fill_value": None, "filters": None}
    (folder / "w" / ".zarray").write_text(json.dumps(metadata))
    (folder / "w" / "0").write_bytes(b"\0" * 16)


@pytest.mark.parametrize("name", TOO_LARGE)
def test_a_chunk_that_no_memory_holds_ends_no_process(hostile, name):
    assert TOO_LARGE[name][1] in hostile[name][0]


def bomb(kind):
    """A file that unpacks to 64 MiB."""
    count = 2**26
    if kind in WINDOW_BITS:
        packer = zlib.compressobj(9, zlib.DEFLATED, WINDOW_BITS[kind])
        zeros = bytes(2**24)
        packed = [packer.compress(zeros) for _ in range(count // len(zeros))]
        return b"".join([*packed, packer.flush()])
    compressor = {"id": kind}
    if kind == "blosc":
        compressor |= {"cname": "zstd", "clevel": 1, "shuffle": 0}
    with tempfile.TemporaryDirectory() as directory:
        store = zarr(
            directory,
            "w",
            np.ones(count, np.uint8),
            chunks=[count],
            metadata={"compressor": compressor},
        )
        return store["0"]


# What tells zlib which of the two formats to write.
WINDOW_BITS = {"gzip": 31, "zlib": 15}


LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}
BIG = {"name": "bytes", "configuration": {"endian": "big"}}
BOMBS = (
    "gzip",
    "zlib",
    "bz2",
    "zstd",
    "blosc",
    "blosc in zarr3",
    "sparse",
    "sparse zarr3",
)


def bombed(folder, kind):
    """An array of 8 floats in one chunk, whose file is larger, or unpacks to more."""
    is_new = kind.endswith("zarr3")
    packed = kind.split()[0]
    blosc = {
        "name": "blosc",
        "configuration": {
            "cname": "zstd",
            "clevel": 1,
            "shuffle": "noshuffle",
            "typesize": 1,
        },
    }
    if is_new:
        driver = "zarr3"
        chunk = folder / "w" / "c/0"
        metadata = {}
        if packed == "blosc":
            metadata = {"codecs": [LITTLE, blosc]}
    else:
        driver = "zarr"
        chunk = folder / "w" / "0"
        metadata = {"compressor": {"id": packed}}
        if packed == "sparse":
            metadata = {"compressor": None}
    ones = np.ones(8, np.float32)
    zarr(folder, "w", ones, chunks=[8], driver=driver, metadata=metadata)
    if packed == "sparse":
        chunk.write_bytes(b"")
        os.truncate(chunk, 2**26)
    else:
        chunk.write_bytes(bomb(packed))


@pytest.mark.parametrize("kind", BOMBS)
def test_a_chunk_that_unpacks_to_more_than_it_is_takes_no_memory(hostile, kind):
    text, grown = hostile[kind]
    assert grown < 32, "the chunk was unpacked whole"
    claims = {
        "blosc": "claims to unpack to 67108864 bytes",
        "sparse": "has 67108864 bytes",
    }
    claim = claims.get(kind.split()[0])
    if claim is None:
        assert "cannot be read" in text
    else:
        assert f"{claim}, and a chunk of it has 32; it is damaged" in text


def sharded(chunk, codecs, **index):
    return {
        "name": "sharding_indexed",
        "configuration": {"chunk_shape": chunk, "codecs": codecs, **index},
    }


BLOSC = {"name": "blosc"}
SUM = {"name": "crc32c"}
# How an array is packed, the file of its last chunk, and where the first chunk in that
# begins.
PACKED: dict[str, tuple[Any, str, int]] = {
    "zarr .": ({"dimension_separator": "."}, "1.0", 0),
    "zarr /": ({"dimension_separator": "/"}, "1/0", 0),
}
for mark, name, configuration, key in (
    (".", "default", {"separator": "."}, "c.1.0"),
    ("/", "default", {}, "c/1/0"),
    ("v2", "v2", {}, "1.0"),
):
    key_encoding = {"name": name, "configuration": configuration}
    metadata = {"codecs": [BLOSC], "chunk_key_encoding": key_encoding}
    PACKED[f"zarr3 {mark}"] = (metadata, key, 0)
for name, table in {
    "summed": [LITTLE, SUM],
    "little": [LITTLE],
    "big": [BIG],
}.items():
    table_bytes = 32 + 4 * (SUM in table)
    for location, first in (("start", table_bytes), ("end", 0)):
        codec = sharded(
            [2, 8],
            [LITTLE, BLOSC],
            index_codecs=table,
            index_location=location,
        )
        PACKED[f"shards, {name} at the {location}"] = (
            {"codecs": [codec]},
            "c/1/0",
            first,
        )


@pytest.mark.parametrize("is_database", [False, True])
@pytest.mark.parametrize("name", PACKED)
def test_chunks_packed_by_blosc_load_if_their_claims_are_true(
    tmp_path, mesh, name, is_database
):
    metadata, key, first = PACKED[name]
    driver = name.split()[0].replace("shards,", "zarr3")
    if driver == "zarr":
        metadata = metadata | {
            "compressor": {
                "id": "blosc",
                "cname": "lz4",
                "clevel": 5,
                "shuffle": 1,
            }
        }
    array = np.arange(64, dtype=np.float32).reshape(8, 8)
    store = zarr(
        tmp_path,
        "w",
        array,
        chunks=[4, 8],
        driver=driver,
        ocdbt=is_database,
        metadata=metadata,
    )
    loaded = checkpoint.load(tmp_path, {"w": wanted(mesh, (8, 8))})["w"]
    assert np.array_equal(loaded, array)
    # The last of the chunks claims too much; its bytes begin with blosc's version.
    content = store[key]
    last = content.rindex(content[first : first + 4])
    store[key] = content[: last + 4] + b"\xff\xff\xff\x7f" + content[last + 8 :]
    chunk_bytes = 128
    if "shards" in name:
        chunk_bytes = 64
    claim = f"claims to unpack to 2147483647 bytes, and a chunk of it has {chunk_bytes}"
    with pytest.raises(CheckpointError, match=claim):
        checkpoint.load(tmp_path, {"w": wanted(mesh, (8, 8))})


def test_a_shard_whose_table_cannot_be_read_is_not_unpacked(tmp_path, mesh):
    inner = sharded([2, 8], [LITTLE, BLOSC])
    metadata = {"codecs": [sharded([4, 8], [inner])]}
    array = np.ones((8, 8), np.float32)
    zarr(
        tmp_path,
        "w",
        array,
        chunks=[8, 8],
        driver="zarr3",
        metadata=metadata,
    )
    with pytest.raises(
        CheckpointError, match="behind a table that is packed or nested itself"
    ):
        checkpoint.load(tmp_path, {"w": wanted(mesh, (8, 8))})


def test_a_chunk_may_be_larger_than_a_small_array(tmp_path, mesh):
    zarr(tmp_path, "w", np.arange(8, dtype=np.float32), chunks=[2**20])
    loaded = checkpoint.load(tmp_path, {"w": wanted(mesh)})["w"]
    assert np.array_equal(loaded, np.arange(8))


PIPES = ("chunk", "orbax chunk", "orbax database", "orbax metadata", "link")


def piped(folder, kind):
    if kind.startswith("orbax"):
        folder.rmdir()
        tree = {"w": jnp.arange(8.0)}
        orbax(
            folder,
            tree,
            use_ocdbt=kind == "orbax database",
            use_zarr3=False,
        )
        names = {
            "orbax chunk": "w/0",
            "orbax database": "manifest.ocdbt",
            "orbax metadata": "_METADATA",
        }
        pipe = folder / names[kind]
    else:
        zarr(folder, "w", np.arange(8, dtype=np.float32), chunks=[8])
        pipe = folder / "w" / "0"
    pipe.unlink()
    if kind == "link":
        os.mkfifo(folder / "pipe")
        pipe.symlink_to("../pipe")
    else:
        os.mkfifo(pipe)


@pytest.mark.parametrize("kind", PIPES)
def test_a_pipe_is_not_waited_for(hostile, kind):
    assert "is no regular file" in hostile[kind][0]


def led_outside(folder, _):
    folder.rmdir()
    tree = {"w": jnp.ones(8)}
    orbax(folder, tree, use_ocdbt=False, use_zarr3=False)
    outside = folder.with_name(f"{folder.name}-outside")
    (folder / "w").rename(outside)
    content = json.loads((folder / "_METADATA").read_text())
    [row] = content["tree_metadata"].values()
    row["key_metadata"] = [{"key": str(outside), "key_type": 2}]
    (folder / "_METADATA").write_text(json.dumps(content))
    # Whoever opens it waits: for the kernel counts no accesses that are not written
    # down (relatime).
    (outside / ".zarray").unlink()
    os.mkfifo(outside / ".zarray")


def test_nothing_outside_is_opened_for_orbax(hostile):
    assert (
        "is not a relative path below the directory; nothing outside it is opened"
        in hostile["outside"][0]
    )

"""Damaged and hostile files are refused with a message, in bounded memory and time."""

import concurrent.futures
import itertools as it
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _stores import eformer, orbax, zarr
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from safetensors.numpy import save_file

import shardfx
from shardfx import PathRules, TreeMap, checkpoint
from shardfx._ground.errors import CheckpointError, UnknownPathError
from shardfx.errors import PlanMismatchError


@pytest.fixture
def mesh():
    return Mesh(np.array(jax.devices()), ("x",))


def wanted(mesh, shape=(8,), dtype=np.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P()))


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
    todo = json.dumps(
        [(str(path), 4 if name in TOO_LARGE else 8) for name, path in paths.items()]
    )
    command = [sys.executable, "-c", textwrap.dedent(LOADS), todo]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    return dict(zip(makers, map(json.loads, done.stdout.splitlines()), strict=True))


# Chunks


@pytest.mark.parametrize("kind", ["zarr", "zarr3", "eformer", "orbax", "orbax3"])
def test_a_lost_chunk_is_no_zero(tmp_path, mesh, kind):
    array = np.arange(1, 9, dtype=np.float32)
    if kind.startswith("orbax"):
        orbax(
            tmp_path / "c",
            {"w": jnp.asarray(array)},
            use_ocdbt=False,
            use_zarr3=kind == "orbax3",
        )
    else:
        zarr(
            tmp_path / "c",
            "w",
            array,
            chunks=[4],
            driver="zarr3" if kind == "zarr3" else "zarr",
        )
    if kind == "eformer":
        eformer(
            tmp_path / "c", arrays=[{"path": "w", "shape": [8], "dtype": "float32"}]
        )
    structs = {"w": wanted(mesh)}
    assert np.array_equal(checkpoint.load(tmp_path / "c", structs)["w"], array)
    chunks = [
        file
        for file in (tmp_path / "c" / "w").rglob("*")
        if file.is_file() and file.name.isdigit()
    ]
    min(chunks).unlink()
    with pytest.raises(
        CheckpointError,
        match=r"array 'w': a chunk is missing in .*missing_chunks=\"fill\"",
    ):
        checkpoint.load(tmp_path / "c", structs)
    filled = checkpoint.load(tmp_path / "c", structs, missing_chunks="fill")["w"]
    assert set(np.asarray(filled).tolist()) - set(array.tolist()) == {0.0}


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
    if kind in ("gzip", "zlib"):
        packer = zlib.compressobj(9, zlib.DEFLATED, 31 if kind == "gzip" else 15)
        return (
            b"".join([packer.compress(bytes(2**24)) for _ in range(count >> 24)])
            + packer.flush()
        )
    compressor = (
        {"id": "blosc", "cname": "zstd", "clevel": 1, "shuffle": 0}
        if kind == "blosc"
        else {"id": kind}
    )
    with tempfile.TemporaryDirectory() as directory:
        ones = np.ones(count, np.uint8)
        return zarr(
            directory, "w", ones, chunks=[count], metadata={"compressor": compressor}
        )["0"]


LITTLE, BIG = (
    {"name": "bytes", "configuration": {"endian": endian}}
    for endian in ("little", "big")
)
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
    is_new, packed = kind.endswith("zarr3"), kind.split()[0]
    blosc = {
        "name": "blosc",
        "configuration": {
            "cname": "zstd",
            "clevel": 1,
            "shuffle": "noshuffle",
            "typesize": 1,
        },
    }
    codecs = {"codecs": [LITTLE, blosc]} if packed == "blosc" else {}
    metadata = (
        codecs
        if is_new
        else {"compressor": None if packed == "sparse" else {"id": packed}}
    )
    zarr(
        folder,
        "w",
        np.ones(8, np.float32),
        chunks=[8],
        driver="zarr3" if is_new else "zarr",
        metadata=metadata,
    )
    chunk = folder / "w" / ("c/0" if is_new else "0")
    chunk.write_bytes(b"" if packed == "sparse" else bomb(packed))
    if packed == "sparse":
        os.truncate(chunk, 2**26)


@pytest.mark.parametrize("kind", BOMBS)
def test_a_chunk_that_unpacks_to_more_than_it_is_takes_no_memory(hostile, kind):
    text, grown = hostile[kind]
    assert grown < 32, "the chunk was unpacked whole"
    claims = {
        "blosc": "claims to unpack to 67108864 bytes",
        "sparse": "has 67108864 bytes",
    }
    claim = claims.get(kind.split()[0])
    assert (
        f"{claim}, and a chunk of it has 32; it is damaged" in text
        if claim
        else "cannot be read" in text
    )


def sharded(chunk, codecs, **index):
    return {
        "name": "sharding_indexed",
        "configuration": {"chunk_shape": chunk, "codecs": codecs, **index},
    }


BLOSC, SUM = {"name": "blosc"}, {"name": "crc32c"}
# How an array is packed, the file of its last chunk, and where the first chunk in that
# begins.
PACKED = {
    "zarr .": ({"dimension_separator": "."}, "1.0", 0),
    "zarr /": ({"dimension_separator": "/"}, "1/0", 0),
    **{
        f"zarr3 {mark}": (
            {
                "codecs": [BLOSC],
                "chunk_key_encoding": {"name": name, "configuration": configuration},
            },
            key,
            0,
        )
        for mark, name, configuration, key in (
            (".", "default", {"separator": "."}, "c.1.0"),
            ("/", "default", {}, "c/1/0"),
            ("v2", "v2", {}, "1.0"),
        )
    },
    **{
        f"shards, {name} at the {location}": (
            {
                "codecs": [
                    sharded(
                        [2, 8],
                        [LITTLE, BLOSC],
                        index_codecs=table,
                        index_location=location,
                    )
                ]
            },
            "c/1/0",
            (32 + 4 * (SUM in table)) * (location == "start"),
        )
        for name, table in {
            "summed": [LITTLE, SUM],
            "little": [LITTLE],
            "big": [BIG],
        }.items()
        for location in ("start", "end")
    },
}


@pytest.mark.parametrize("is_database", [False, True])
@pytest.mark.parametrize("name", PACKED)
def test_chunks_packed_by_blosc_load_if_their_claims_are_true(
    tmp_path, mesh, name, is_database
):
    metadata, key, first = PACKED[name]
    driver = name.split()[0].replace("shards,", "zarr3")
    if driver == "zarr":
        metadata = metadata | {
            "compressor": {"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 1}
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
    assert np.array_equal(
        checkpoint.load(tmp_path, {"w": wanted(mesh, (8, 8))})["w"], array
    )
    # The last of the chunks claims too much; its bytes begin with blosc's version.
    held = store[key]
    last = held.rindex(held[first : first + 4])
    store[key] = held[: last + 4] + b"\xff\xff\xff\x7f" + held[last + 8 :]
    claim = (
        "claims to unpack to 2147483647 bytes, and a chunk of it has"
        f" {64 if 'shards' in name else 128}"
    )
    with pytest.raises(CheckpointError, match=claim):
        checkpoint.load(tmp_path, {"w": wanted(mesh, (8, 8))})


def test_a_shard_whose_table_cannot_be_read_is_not_unpacked(tmp_path, mesh):
    metadata = {"codecs": [sharded([4, 8], [sharded([2, 8], [LITTLE, BLOSC])])]}
    zarr(
        tmp_path,
        "w",
        np.ones((8, 8), np.float32),
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
    assert np.array_equal(
        checkpoint.load(tmp_path, {"w": wanted(mesh)})["w"], np.arange(8)
    )


PIPES = ("chunk", "orbax chunk", "orbax database", "orbax metadata", "link")


def piped(folder, kind):
    if kind.startswith("orbax"):
        folder.rmdir()
        orbax(
            folder,
            {"w": jnp.arange(8.0)},
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
    os.mkfifo(folder / "pipe" if kind == "link" else pipe)
    if kind == "link":
        pipe.symlink_to("../pipe")


@pytest.mark.parametrize("kind", PIPES)
def test_a_pipe_is_not_waited_for(hostile, kind):
    assert "is no regular file" in hostile[kind][0]


# Names


def test_two_orbax_arrays_of_one_name(tmp_path):
    for name, ocdbt, where in (
        ("c", False, "in '.*a.b' and in '.*a/b'"),
        ("d", True, "in 'a.b' and in 'a/b'"),
    ):
        orbax(
            tmp_path / name,
            {"a": {"b": jnp.zeros(2)}, "a/b": jnp.ones(2)},
            use_ocdbt=ocdbt,
        )
        with pytest.raises(
            CheckpointError, match=f"has two arrays with the path 'a/b', {where}"
        ):
            checkpoint.read_index(tmp_path / name)
    content = json.loads((tmp_path / "c" / "_METADATA").read_text())
    row = content["tree_metadata"]["('a', 'b')"]
    content["tree_metadata"] = {
        "('a', 'b')": row,
        "x": row | {"key_metadata": [{"key": "a.b", "key_type": 2}]},
    }
    (tmp_path / "c" / "_METADATA").write_text(json.dumps(content))
    with pytest.raises(
        CheckpointError,
        match=r"by \['a.b'\] and by \['a', 'b'\], which Orbax keeps under one name",
    ):
        checkpoint.read_index(tmp_path / "c")


@pytest.mark.parametrize("ocdbt", [True, False])
def test_what_is_no_array_in_an_orbax_tree_is_passed_over(tmp_path, ocdbt):
    tree = {
        "w": jnp.arange(4.0),
        "name": "llama",
        "step": 3,
        "none": None,
        "empty": {},
        "list": [jnp.ones(2), ()],
    }
    orbax(tmp_path / "c", tree, use_ocdbt=ocdbt, use_zarr3=False)
    structs = checkpoint.structs(checkpoint.read_index(tmp_path / "c"))
    assert {key: structs[key].shape for key in ("w", "step")} == {"w": (4,), "step": ()}
    assert structs.keys() == {"w", "step", "list"} and structs["list"]["0"].shape == (
        2,
    )
    if not ocdbt:
        (tmp_path / "c" / "w" / ".zarray").unlink()
        with pytest.raises(
            CheckpointError, match="names the array 'w', but .* does not hold it"
        ):
            checkpoint.read_index(tmp_path / "c")


def led_outside(folder, _):
    folder.rmdir()
    orbax(folder, {"w": jnp.ones(8)}, use_ocdbt=False, use_zarr3=False)
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


def test_an_eformer_index_that_names_an_array_without_metadata(tmp_path, mesh):
    (tmp_path / "w").mkdir()
    eformer(tmp_path, arrays=[{"path": "w", "shape": [8], "dtype": "float32"}])
    index = checkpoint.read_index(tmp_path)
    for read in (checkpoint.load, checkpoint.plan_reads):
        with pytest.raises(
            CheckpointError,
            match="lists 'w', but there is no .zarray and no zarr.json in '.*/w'",
        ):
            read(index, {"w": wanted(mesh)})


@pytest.mark.parametrize(
    "name",
    ["layer\x1b[2J\u202e\x9b/w", "a" * 2**20],
    ids=["escape codes", "a megabyte"],
)
def test_names_neither_command_nor_flood_the_terminal(tmp_path, mesh, name):
    save_file(
        {name: np.ones(2, np.float32), f"{name}/below": np.ones(2, np.float32)},
        tmp_path / "x.safetensors",
    )
    index = checkpoint.read_index(tmp_path)
    texts = [str(index)]
    for call in (
        lambda: checkpoint.load(
            index, {name: wanted(mesh, (3,)), "absent" + name[:99]: wanted(mesh)}
        ),
        lambda: checkpoint.structs(index),
        lambda: index[name + "c"],
        lambda: index["layer"],
        lambda: checkpoint.structs(index, prefix="none"),
        lambda: checkpoint.load(index, {"x\x1b": object()}),
    ):
        with pytest.raises(
            (CheckpointError, UnknownPathError, PlanMismatchError)
        ) as caught:
            call()
        texts.append(str(caught.value))
    assert all(not {"\x1b", "\x9b", "\u202e"} & set(text) for text in texts)
    # A leaf's own path is the caller's, and is not shortened.
    assert all(len(text) < 2000 for text in texts[2:])


def test_of_many_leaves_that_cannot_be_read_the_first_are_named(tmp_path, mesh):
    names = [f"model.layers.{i}.up.weight" for i in range(20_000)]
    save_file(dict.fromkeys(names, np.zeros(0, np.float32)), tmp_path / "x.safetensors")
    index = checkpoint.read_index(tmp_path)
    structs = {f"model.layer.{i}.up.weights": wanted(mesh) for i in range(5_000)}
    # Comparing each of them with each name would take 200 us a pair.
    with pytest.raises(
        CheckpointError, match="5000 of 5000 leaves (.|\n)*and 4980 more"
    ):
        checkpoint.load(index, structs)
    with pytest.raises(
        UnknownPathError, match="did you mean 'model.layers.117.up.weight'"
    ):
        index["model.layer.7.up.weight"]


def test_a_path_of_thousands_of_parts_is_no_tree(tmp_path, mesh):
    deep = "/".join(["a"] * 50_000)
    save_file({deep: np.ones(8, np.float32)}, tmp_path / "x.safetensors")
    index = checkpoint.read_index(tmp_path)
    for call in (lambda: checkpoint.structs(index), index.tree):
        with pytest.raises(
            CheckpointError,
            match="has more than 100 parts between slashes; no tree is that deep",
        ):
            call()
    loaded = checkpoint.load(index, {"w": wanted(mesh)}, TreeMap({"w": deep}))
    assert np.array_equal(loaded["w"], np.ones(8))
    save_file(
        {"/".join(["a"] * 100): np.ones(8, np.float32)}, tmp_path / "x.safetensors"
    )
    assert (
        len(jax.tree.leaves(checkpoint.structs(checkpoint.read_index(tmp_path)))) == 1
    )


# Files that change


# How long a reader reads beside a writer.
SECONDS = float(os.environ.get("SHARDFX_TEST_SECONDS", "0.7"))


@pytest.mark.parametrize("name", ["model.safetensors", "current"])
def test_a_reader_beside_a_writer_gets_one_state_whole(tmp_path, mesh, name):
    """All values of a state are equal: whether a file is replaced, or the directories
    of two files are swapped.
    """
    size, stop = 2**14, threading.Event()
    path = tmp_path / name

    def saved(number, to, **scalars):
        tree = {key: np.full(size, number, np.float32) for key in "ab"} | scalars
        plan = shardfx.plan(tree, mesh, paths=PathRules.parse(".*->x"))
        checkpoint.save(
            to,
            shardfx.shard(tree, plan),
            plan,
            overwrite=to == path,
            file_bytes=size * 4,
        )
        return plan

    def replacing():
        for number in it.count():
            if stop.is_set():
                break
            # Every other header is another one, so that everything lies elsewhere.
            saved(number, path, **({"c": np.ones(8, np.float32)} if number % 2 else {}))

    def swapping():
        while not stop.is_set():
            path.rename(tmp_path / "aside")
            (tmp_path / "other").rename(path)
            (tmp_path / "aside").rename(tmp_path / "other")
            time.sleep(0.02)

    is_file = name.endswith("s")
    plan = (
        saved(1, path) if is_file else saved(2, tmp_path / "other") and saved(1, path)
    )
    errors, count, end = [], 0, time.monotonic() + SECONDS
    with concurrent.futures.ThreadPoolExecutor() as pool:
        writer = pool.submit(replacing if is_file else swapping)
        while time.monotonic() < end and not writer.done():
            try:
                loaded = checkpoint.load(path, plan, unread="allow")
                assert len({*np.unique(loaded["a"]), *np.unique(loaded["b"])}) == 1
                count += 1
            except CheckpointError as error:
                errors.append(str(error))
        stop.set()
    assert writer.result() is None and count > SECONDS
    allowed = (
        "there is no checkpoint",
        "is missing",
        "holds no checkpoint",
        "was replaced or written to",
    )
    assert all(
        not is_file and any(text in error for text in allowed) for error in errors
    ), set(errors)

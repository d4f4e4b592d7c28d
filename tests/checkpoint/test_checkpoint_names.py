"""Names of arrays that clash, attack a terminal or change while they are read."""

import concurrent.futures
import itertools as it
import json
import os
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _stores import eformer, orbax
from safetensors.numpy import save_file

import shardfx
from shardfx import PathRules, TreeMap, checkpoint
from shardfx.errors import CheckpointError, PlanMismatchError, UnknownPathError
from tests.checkpoint.wanted_arrays import wanted


# Names


def test_two_orbax_arrays_of_one_name(tmp_path):
    for name, ocdbt, where in (
        ("c", False, "in '.*a.b' and in '.*a/b'"),
        ("d", True, "in 'a.b' and in 'a/b'"),
    ):
        tree = {"a": {"b": jnp.zeros(2)}, "a/b": jnp.ones(2)}
        orbax(
            tmp_path / name,
            tree,
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
    shapes = {key: structs[key].shape for key in ("w", "step")}
    assert shapes == {"w": (4,), "step": ()}
    assert structs.keys() == {"w", "step", "list"}
    assert structs["list"]["0"].shape == (2,)
    if not ocdbt:
        (tmp_path / "c" / "w" / ".zarray").unlink()
        with pytest.raises(
            CheckpointError, match="names the array 'w', but .* does not hold it"
        ):
            checkpoint.read_index(tmp_path / "c")


def test_an_eformer_index_that_names_an_array_without_metadata(tmp_path, mesh):
    (tmp_path / "w").mkdir()
    arrays = [{"path": "w", "shape": [8], "dtype": "float32"}]
    eformer(tmp_path, arrays=arrays)
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
    for text in texts:
        assert not {"\x1b", "\x9b", "\u202e"} & set(text)
    # A leaf's own path is the caller's, and is not shortened.
    for text in texts[2:]:
        assert len(text) < 2000


def test_of_many_leaves_that_cannot_be_read_the_first_are_named(tmp_path, mesh):
    names = [f"model.layers.{i}.up.weight" for i in range(20_000)]
    save_file(dict.fromkeys(names, np.zeros(0, np.float32)), tmp_path / "x.safetensors")
    index = checkpoint.read_index(tmp_path)
    structs = {f"model.layer.{i}.up.weights": wanted(mesh) for i in range(5_000)}
    # Comparing each of them with each name would take 200 us a pair.
    with pytest.raises(
        CheckpointError, match="5000 of 5000 leaves (.|\n)*and 4994 more"
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
    structs = checkpoint.structs(checkpoint.read_index(tmp_path))
    leaves = jax.tree.leaves(structs)
    count = len(leaves)
    assert count == 1


# Files that change


# How long a reader reads beside a writer.
SECONDS = float(os.environ.get("SHARDFX_TEST_SECONDS", "0.7"))


@pytest.mark.parametrize("name", ["model.safetensors", "current"])
def test_a_reader_beside_a_writer_gets_one_state_whole(tmp_path, mesh, name):
    """All values of a state are equal: whether a file is replaced, or the directories
    of two files are swapped.
    """
    size = 2**14
    stop = threading.Event()
    path = tmp_path / name
    is_file = name.endswith("s")

    def saved(number, to, **scalars):
        arrays = {key: np.full(size, number, np.float32) for key in "ab"}
        tree = arrays | scalars
        plan = shardfx.plan(tree, mesh, paths=PathRules.parse(".*->x"))
        checkpoint.save(
            to,
            shardfx.shard(tree, plan),
            plan,
            overwrite=to == path,
            file_bytes=None if is_file else size * 4,
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

    if is_file:
        plan = saved(1, path)
    else:
        plan = saved(2, tmp_path / "other") and saved(1, path)
    errors = []
    count = 0
    end = time.monotonic() + SECONDS
    with concurrent.futures.ThreadPoolExecutor() as pool:
        writer = pool.submit(replacing if is_file else swapping)
        while time.monotonic() < end and not writer.done():
            try:
                loaded = checkpoint.load(path, plan, unread="allow")
                actual = len({*np.unique(loaded["a"]), *np.unique(loaded["b"])})
                assert actual == 1
                count += 1
            except CheckpointError as error:
                errors.append(str(error))
        stop.set()
    assert writer.result() is None
    assert count > SECONDS
    allowed = (
        "there is no checkpoint",
        "is missing",
        "holds no checkpoint",
        "was replaced or written to",
    )
    assert all(
        not is_file and any(text in error for text in allowed) for error in errors
    ), set(errors)

"""A saved tree is loaded bit by bit under any other plan, and a save that is killed at
any call loses nothing.
"""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from safetensors.numpy import load_file, save_file

import shardfx
from shardfx import PathRules, checkpoint
from shardfx.errors import (
    CheckpointError,
    LeafTypeError,
    PlanFormatError,
    PlanMismatchError,
)


def mesh_of(sizes, names="abc"):
    count = int(np.prod(sizes))
    devices = np.array(jax.devices()[:count]).reshape(sizes)
    return Mesh(devices, tuple(names[: len(sizes)]))


def tree_of(dtype=jnp.float32):
    def values(*shape):
        rng = np.random.default_rng(len(shape))
        raw = rng.integers(0, 256, (*shape, np.dtype(dtype).itemsize), np.uint8)
        return raw.reshape(-1).view(dtype).reshape(shape)

    return {
        "layers": [
            {"w": values(16, 8), "b": values(8)},
            {"w": values(16, 8), "b": values(8)},
        ],
        "s": values(),
    }


def planned(tree, mesh, rules):
    plan = shardfx.plan(tree, mesh, paths=PathRules.parse(rules))
    return shardfx.shard(tree, plan), plan


def same(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(
        x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes()
        for x, y in pairs
    )


LAYOUTS = [
    ((8,), "w->a, .*->replicate"),
    ((2, 4), "w->a.b, b$->b, .*->replicate"),
    ((2, 2, 2), "w->c.b, .*->replicate"),
    ((4,), "w->None.a, .*->replicate"),
    ((1,), ".*->replicate"),
]


def test_any_layout_is_read_under_any_other(tmp_path):
    dtypes = ("float32", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "uint32")
    tree = {dtype: tree_of(jnp.dtype(dtype)) for dtype in dtypes}
    states = [planned(tree, mesh_of(sizes), rules) for sizes, rules in LAYOUTS]
    for number, (arrays, plan) in enumerate(states):
        checkpoint.save(tmp_path / str(number), arrays, plan)
        for _, other in states:
            loaded = checkpoint.load(tmp_path / str(number), other)
            assert same(loaded, tree)
            actual = jax.tree.map(lambda x: x.sharding, loaded)
            assert actual == other.shardings


@pytest.mark.parametrize(
    "dtype", ["bool", "int4", "uint4", "float8_e4m3b11fnuz", "float4_e2m1fn"]
)
def test_dtypes_that_safetensors_has_no_name_for(tmp_path, dtype):
    values = np.arange(64).reshape(8, 8)
    array = jnp.asarray(values % 2, jnp.dtype(dtype))
    arrays, plan = planned({"w": array}, mesh_of((8,)), "w->a")
    checkpoint.save(tmp_path / "x.safetensors", arrays, plan)
    loaded = checkpoint.load(tmp_path / "x.safetensors", plan)
    assert loaded["w"].dtype == array.dtype
    assert np.array_equal(loaded["w"].astype(np.float32), array.astype(np.float32))


def test_other_libraries_read_a_saved_module(tmp_path):
    model = eqx.nn.MLP(4, 8, 16, 2, key=jax.random.key(0))
    plan = shardfx.plan(
        model, mesh_of((8,)), paths=PathRules.parse("weight->a, .*->replicate")
    )
    checkpoint.save(tmp_path / "step", shardfx.shard(model, plan), plan)
    assert sorted(os.listdir(tmp_path)) == ["step"]
    assert sorted(os.listdir(tmp_path / "step")) == ["model.safetensors", "plan.json"]
    arrays = load_file(tmp_path / "step" / "model.safetensors")
    header = (tmp_path / "step" / "model.safetensors").read_bytes()[:8]
    actual = int.from_bytes(header, "little") % 64
    assert actual == 64 - len(header), "arrays begin at a multiple of 64"
    assert arrays.keys() == {leaf.path for leaf in plan.leaves}
    assert np.array_equal(arrays["layers/0/weight"], model.layers[0].weight)
    assert checkpoint.saved_plan(tmp_path / "step").digest == plan.digest


def test_a_large_tree_is_spread_over_files(tmp_path):
    tree = tree_of()
    arrays, plan = planned(tree, mesh_of((2, 4)), LAYOUTS[1][1])
    checkpoint.save(tmp_path / "step", arrays, plan, file_bytes=600)
    files = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    actual = sorted(os.listdir(tmp_path / "step"))
    assert actual == [
        *files,
        "model.safetensors.index.json",
        "plan.json",
    ]
    index = json.loads((tmp_path / "step" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 2 * (512 + 32) + 4
    assert same(checkpoint.load(tmp_path / "step", plan), tree)
    actual = checkpoint.saved_plan(tmp_path / "step", like=tree).on(mesh_of((2, 4)))
    assert actual == plan


def test_a_file_carries_its_plan_and_is_replaced_at_once(tmp_path):
    arrays, plan = planned(tree_of(), mesh_of((8,)), LAYOUTS[0][1])
    path = tmp_path / "model.safetensors"
    checkpoint.save(path, arrays, plan)
    assert checkpoint.saved_plan(path).digest == plan.digest
    with pytest.raises(
        CheckpointError,
        match="exists, and nothing was changed; pass `overwrite=True` to replace it",
    ):
        checkpoint.save(path, arrays, plan)
    doubled = jax.tree.map(lambda x: x * 2, arrays)
    checkpoint.save(path, doubled, plan, overwrite=True)
    assert same(checkpoint.load(path, plan), doubled)
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_a_directory_is_never_replaced(tmp_path):
    arrays, plan = planned(tree_of(), mesh_of((8,)), LAYOUTS[0][1])
    checkpoint.save(tmp_path / "step", arrays, plan)
    for overwrite, why in (
        (False, "$"),
        (True, " `overwrite=True` replaces .safetensors files"),
    ):
        with pytest.raises(
            CheckpointError,
            match="exists, .* save to a new name, or remove it first." + why,
        ):
            checkpoint.save(tmp_path / "step", arrays, plan, overwrite=overwrite)
    assert same(checkpoint.load(tmp_path / "step", plan), arrays)


def test_numpy_arrays_and_odd_layouts(tmp_path, capsys):
    values = np.arange(12.0, dtype=np.float32).reshape(3, 4)
    array = np.zeros((0, 3), np.int8)
    tree = {
        "f": np.asfortranarray(values),
        "z": array,
    }
    plan = shardfx.plan(tree, mesh_of((1,)), paths=PathRules.parse(".*->replicate"))
    checkpoint.save(tmp_path / "step", tree, plan, progress=True)
    assert "saving [########################]" in capsys.readouterr().err
    loaded = checkpoint.load(tmp_path / "step", plan)["f"]
    assert np.array_equal(loaded, tree["f"])


UNSAVED: dict[str, tuple[Any, Any, str]] = {
    "w": (
        np.ones(3, np.complex128),
        LeafTypeError,
        "leaf `w` is complex128, which safetensors cannot hold",
    ),
    "struct": (
        jax.ShapeDtypeStruct((3,), jnp.float32),
        LeafTypeError,
        "is a ShapeDtypeStruct, which holds no values",
    ),
    "__metadata__": (
        jnp.ones(8),
        CheckpointError,
        "a leaf cannot be saved as `__metadata__`: safetensors keeps",
    ),
    "half \ud800": (
        jnp.ones(8),
        CheckpointError,
        r"leaf `half \\ud800`: its path holds half of a character",
    ),
    # two arrays of one path are refused by `plan`
    "a/b": ({"c": 5}, CheckpointError, "two leaves have the path `a/b/c`"),
    "long": (
        np.ones(3, np.float32),
        CheckpointError,
        r"a safetensors header of \d+ bytes is over the format's limit",
    ),
}


@pytest.mark.parametrize("name", UNSAVED)
def test_trees_that_cannot_be_saved(tmp_path, monkeypatch, name):
    value, error, text = UNSAVED[name]
    tree = {name: value, "a": {"b/c": jnp.ones(1)}}
    if name == "long":
        monkeypatch.setattr("shardfx.checkpoint._safetensors.HEADER_LIMIT_BYTES", 100)
    plan = shardfx.plan(tree, mesh_of((8,)), paths=PathRules.parse(".*->replicate"))
    with pytest.raises(error, match=text):
        checkpoint.save(tmp_path / "x", tree, plan)
    with pytest.raises(PlanMismatchError):
        checkpoint.save(tmp_path / "x", {"w": jnp.ones(4)}, plan)
    assert os.listdir(tmp_path) == []


def test_plans_that_are_not_there(tmp_path):
    save_file({"w": np.ones(3)}, tmp_path / "x.safetensors")
    for path in (tmp_path, tmp_path / "x.safetensors"):
        with pytest.raises(
            CheckpointError,
            match=r"holds no plan: `save\(path, tree, plan\)` writes one, unless by a map",
        ):
            checkpoint.saved_plan(path)
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(PlanFormatError):
        checkpoint.saved_plan(tmp_path)


def failing(name, number, error):
    """`os.<name>` that raises at its n-th call."""
    calls = []
    original = getattr(os, name)

    def call(*args, **kwargs):
        calls.append(args)
        if len(calls) == number:
            raise error
        return original(*args, **kwargs)

    return call


@pytest.fixture
def writes(monkeypatch):
    """The number of bytes of each write."""
    seen = []
    pwritev = os.pwritev
    monkeypatch.setattr(
        os, "pwritev", lambda *arguments: seen.append(pwritev(*arguments)) or seen[-1]
    )
    return seen


def test_small_arrays_are_written_by_replica_zero_alone(tmp_path, writes):
    tree = {f"w{number}": np.full((8, 8), number, np.float32) for number in range(500)}
    for sizes, rules in (((8,), ".*->a"), ((2, 4), "w.?3->b, .*->replicate")):
        arrays, plan = planned(tree, mesh_of(sizes), rules)
        writes.clear()
        checkpoint.save(tmp_path / f"{len(sizes)}", arrays, plan)
        assert len(writes) <= 4
        assert sum(writes) == 500 * 8 * 8 * 4
        assert same(checkpoint.load(tmp_path / f"{len(sizes)}", plan), tree)
    array = np.ones((1024, 1024), np.float32)
    arrays, plan = planned({"w": array}, mesh_of((2, 4)), "w->b")
    writes.clear()
    checkpoint.save(tmp_path / "large", arrays, plan)
    assert sum(writes) == 2**22


CALLS = [("pwritev", 1), ("pwritev", 3), ("fsync", 1), ("fsync", 2)]


# Only what is a folder needs one.
@pytest.mark.parametrize(
    ("target", "name", "number"),
    [
        *[("step", *call) for call in CALLS],
        *[("model.safetensors", *call) for call in CALLS],
        ("step", "mkdir", 2),
    ],
)
def test_a_full_disk_changes_nothing(tmp_path, monkeypatch, target, name, number):
    tree = tree_of()
    arrays, plan = planned(tree, mesh_of((8,)), LAYOUTS[0][1])
    if target.endswith("s"):
        checkpoint.save(tmp_path / target, arrays, plan)
    before = os.listdir(tmp_path)
    with monkeypatch.context() as patched:
        # No two arrays are small enough to be written together.
        patched.setattr("shardfx.checkpoint._tensor_writes.COPY_BYTES", 1)
        patched.setattr(
            os,
            name,
            failing(
                name, number, OSError(errno.ENOSPC, "No space left on device", "here")
            ),
        )
        with pytest.raises(OSError, match="No space left"):
            checkpoint.save(
                tmp_path / target,
                jax.tree.map(lambda x: x + 1, arrays),
                plan,
                overwrite=True,
            )
    assert os.listdir(tmp_path) == before
    if before:
        assert same(checkpoint.load(tmp_path / target, plan), tree)


def test_too_little_space_is_noticed_before_anything_is_written(tmp_path, monkeypatch):
    arrays, plan = planned(tree_of(), mesh_of((8,)), LAYOUTS[0][1])
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: types.SimpleNamespace(free=1000)
    )
    with pytest.raises(
        OSError, match=r"saving takes \d+ bytes and 1000 are free; nothing was written"
    ):
        checkpoint.save(tmp_path / "run" / "new" / "step", arrays, plan)
    assert os.listdir(tmp_path) == []


KILLED = """
import os, signal, sys
import jax, jax.numpy as jnp
jax.config.update("jax_num_cpu_devices", 2)
import shardfx
from shardfx import MeshSpec, PathRules, checkpoint

tree = {"w": jnp.full((64, 8), 2.0), "b": jnp.full(8, 2.0)}
made = shardfx.plan(tree, MeshSpec({"a": 2}).build(jax.devices()), paths=PathRules.parse("w->a, b->replicate"))
arrays = shardfx.shard(tree, made)
def saved_by_a_child(path):
    if os.fork() == 0:
        try:
            checkpoint.save(path, arrays, made, overwrite=True)
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.wait()[1])

left = 0
for name in ("pwritev", "fsync", "rename", "replace", "link", "mkdir"):
    def dying(*args, original=getattr(os, name), **kwargs):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)
    setattr(os, name, dying)
for target in ("model.safetensors", "step"):
    for number in range(1, 30):
        left = number
        status = saved_by_a_child(os.path.join(sys.argv[1], target))
        print(target, number, status, flush=True)
        sys.stdin.readline()
        if status == 0 or os.path.isdir(os.path.join(sys.argv[1], target)):
            break
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """What a program says whose children are killed one after the other, each a system
    call later.

    For each target the number, the exit status, and the values that are there when a
    child has ended.
    """
    folder = tmp_path_factory.mktemp("killed")
    seen = {"model.safetensors": [], "step": []}
    arrays, plan = planned(
        {"w": jnp.ones((64, 8)), "b": jnp.ones(8)}, mesh_of((8,)), "w->a, b->replicate"
    )
    command = [sys.executable, "-W", "ignore", "-c", KILLED, str(folder)]
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        command,
        cwd=root,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        checkpoint.save(folder / "model.safetensors", arrays, plan)
        for line in child.stdout:
            target, number, status = line.split()
            values = None
            if os.path.exists(folder / target):
                loaded = checkpoint.load(folder / target, plan)
                values = set()
                for leaf in jax.tree.leaves(loaded):
                    values.update(map(float, np.asarray(leaf).ravel()))
            seen[target].append((int(number), int(status), values))
            child.stdin.write("\n")
            child.stdin.flush()
    return folder, seen


@pytest.mark.parametrize("target", ["model.safetensors", "step"])
def test_whoever_is_killed_leaves_the_old_checkpoint_whole(killed, target):
    folder, seen = killed
    *dead, last = seen[target]
    assert len(dead) >= 4
    for _, status, _ in dead:
        assert status == -signal.SIGKILL
    # All old, or all new once the rename was done; never mixed, and never new before
    # the end.
    if target.endswith("s"):
        old = {1.0}
    else:
        old = None
    actual = [values for _, _, values in dead][:4]
    assert actual == [old] * 4
    for _, _, values in dead:
        assert values in (old, {2.0})
    # A directory that is killed after its rename, before the flush of its parent, is
    # there as a whole.
    if target.endswith("s"):
        expected = (0, {2.0})
    else:
        expected = (-signal.SIGKILL, {2.0})
    assert last[1:] == expected
    # What the killed ones left is hidden, and no checkpoint.
    for name in os.listdir(folder):
        if name not in seen:
            assert name.startswith(".")


@pytest.mark.parametrize("target", ["model.safetensors", "step"])
def test_of_two_writers_the_second_gets_an_error(tmp_path, monkeypatch, target):
    arrays, plan = planned(tree_of(), mesh_of((8,)), LAYOUTS[0][1])
    others = jax.tree.map(lambda x: x * 3, arrays)
    last = "rename" if target == "step" else "link"
    put = getattr(os, last)

    def late(staging, path):
        # Another writer comes through between the writing and the last call of this
        # one.
        monkeypatch.setattr(os, last, put)
        checkpoint.save(tmp_path / target, others, plan)
        put(staging, path)

    monkeypatch.setattr(os, last, late)
    with pytest.raises(
        CheckpointError,
        match="appeared while this was saving, from another writer, and stays as it",
    ):
        checkpoint.save(tmp_path / target, arrays, plan)
    assert same(checkpoint.load(tmp_path / target, plan), others)
    assert os.listdir(tmp_path) == [target]


def test_a_sharding_that_no_plan_made(tmp_path):
    mesh = mesh_of((2, 2, 2))
    values = np.arange(4 * 6 * 8, dtype=np.int32)
    array = values.reshape(4, 6, 8)
    plan = shardfx.plan({"w": array}, mesh, paths=PathRules.parse("w->replicate"))
    for spec in (
        P(None, "a", "b"),
        P("c", "b"),
        P(None, None, ("c", "a", "b")),
        P(("b", "a"), None, "c"),
    ):
        placed = {"w": jax.device_put(array, NamedSharding(mesh, spec))}
        path = tmp_path / f"{spec}.safetensors".replace("/", "")
        checkpoint.save(path, placed, plan)
        assert np.array_equal(load_file(path)["w"], array)


def test_what_killed_saves_left_is_found_and_removed(tmp_path):
    old, new = (tmp_path / f".step-{n}.partial-0123456789abcde{n}" for n in (1, 2))
    file = tmp_path / ".one.safetensors.partial-0123456789abcdef"
    for directory in (old, new):
        directory.mkdir()
        (directory / "model.safetensors").write_bytes(b"0" * 5000)
    file.write_bytes(b"0" * 100)
    for path in (old, old / "model.safetensors", file):
        os.utime(path, (1e9, 1e9))
    # Another program's, and a directory into which something was written a moment ago.
    for name in ("step-3", ".step-4.partial-x", ".partial-0123456789abcdef"):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (1e9, 1e9))
    os.utime(new, (1e9, 1e9))
    partial_saves = checkpoint.left_over(tmp_path)
    expected = [
        (str(file), str(tmp_path / "one.safetensors")),
        (str(old), str(tmp_path / "step-1")),
    ]
    assert [
        (partial_save.path, partial_save.target) for partial_save in partial_saves
    ] == expected
    assert 5000 <= partial_saves[1].nbytes <= 1 << 20
    assert partial_saves[0].age_seconds > 1e8
    assert "written to" in str(partial_saves[0])
    assert old.exists()
    assert len(checkpoint.left_over(tmp_path, remove=True)) == 2
    assert not old.exists()
    assert not file.exists()
    assert new.exists()
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize(
    "path", ["az://bucket/step-1", "abfs://bucket/x.safetensors", "hf://org/model"]
)
def test_addresses_of_other_machines_are_told_from_paths(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    mesh = mesh_of((8,), "x")
    plan = shardfx.plan({"w": jnp.ones(8)}, mesh, paths=PathRules.parse("w->x"))
    for call in (
        lambda: checkpoint.read_index(path),
        lambda: checkpoint.save(path, shardfx.shard({"w": jnp.ones(8)}, plan), plan),
    ):
        with pytest.raises(
            CheckpointError,
            match="is an address",
        ):
            call()
    assert not list(tmp_path.iterdir())
    with pytest.raises(
        CheckpointError,
        match="no checkpoint at 'org/model'.*is downloaded first: `hf download",
    ):
        checkpoint.read_index("org/model")

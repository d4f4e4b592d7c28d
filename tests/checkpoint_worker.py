"""One process of a job that saves and loads together; started by `_processes.run` as
`multiprocess_worker.py` is.
"""

import errno
import functools as ft
import os
import pickle
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import multiprocess_worker as worker
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import shardfx
from shardfx import From, MeshSpec, PathRules, TreeMap, checkpoint
from shardfx._ground.processes import coordination
from shardfx.checkpoint import _coordination


# Each task of the job has a folder of its own in that of the job.
JOB = FOLDER = Path(sys.argv[-1])
RULES = {
    "rows": (
        "rows->data+tensor, columns->None.data+tensor, both->tensor.data,"
        " whole->replicate, wide->None.data"
    ),
    "others": (
        "rows->None.tensor, columns->data, both->data.tensor, whole->tensor,"
        " wide->tensor+data"
    ),
}


@ft.cache
def tree():
    random = np.random.default_rng(0)
    shapes = {
        "rows": (64, 32),
        "columns": (16, 64),
        "both": (24, 8, 4),
        "whole": (32,),
        "wide": (4, 2**18),
    }
    return {
        name: random.normal(size=shape).astype(np.float32)
        for name, shape in shapes.items()
    }


def planned():
    """The plan of each rule set."""
    axes = {"data": 4, "tensor": 2}
    mesh = MeshSpec(axes).build(jax.devices())
    return {
        name: shardfx.plan(tree(), mesh, paths=PathRules.parse(rules))
        for name, rules in RULES.items()
    }


def counting(name):
    """Counts the bytes that `os.<name>` moves."""
    moved = []
    original = getattr(os, name)

    def call(*args):
        done = original(*args)
        moved.append(done)
        return done

    setattr(os, name, call)
    return moved


def right(arrays):
    expected = tree()
    for name, array in arrays.items():
        for shard in array.addressable_shards:
            if not np.array_equal(shard.data, expected[name][shard.index]):
                return False
    return True


def placed(array, sharding):
    return jax.make_array_from_callback(
        array.shape, sharding, lambda index: array[index], dtype=array.dtype
    )


def saves_and_loads():
    plans = planned()
    read = counting("preadv")
    wrote = counting("pwritev")
    result = {}
    for name, plan in plans.items():
        wrote.clear()
        sharded = shardfx.shard(tree(), plan)
        checkpoint.save(FOLDER / name, sharded, plan)
        result[f"written.{name}"] = sum(wrote)
        index = checkpoint.read_index(FOLDER / name)
        for other, target_plan in plans.items():
            read.clear()
            loaded = checkpoint.load(index, target_plan)
            result[f"right.{name}.{other}"] = right(loaded)
            reads = checkpoint.plan_reads(index, target_plan).processes[
                jax.process_index()
            ]
            result[f"read.{name}.{other}"] = (
                sum(read),
                reads.read_bytes,
                reads.needed_bytes,
            )
    result |= through_a_map(plans)
    result |= with_few_devices()
    result["numpy"] = saved(FOLDER / "numpy", tree(), plans["rows"])[0]
    with checkpoint.Manager(FOLDER / "run", keep=2) as manager:
        for step in range(4):
            sharded = shardfx.shard(tree(), plans["rows"])
            manager.save(step, {"step": step, **sharded})
    multihost_utils.sync_global_devices("managed")
    result["steps"] = (manager.steps(), manager.latest())
    # The plan has no leaf for the number `step`.
    managed = manager.load(plans["others"], unread="allow")
    result["right.managed"] = right(managed)
    result["right.numpy"] = right(checkpoint.load(FOLDER / "numpy", plans["rows"]))
    return result


EXPORT = TreeMap(
    {
        "r.{i}": From("rows").split(0, 2, -1).at("i").T,
        "columns_and_both": From.concat(
            [From("columns").T, From("both").merge(0).reshape(64, 12)], dim=1
        ),
        "whole": From("whole").reshape(4, 8),
        "wide": From("wide").slice(0, 4),
    }
)


def with_few_devices():
    """Arrays of which most processes hold nothing: put, saved and loaded, with and
    without a map.
    """
    mesh = Mesh(jax.devices()[:2], "x")
    few = mesh
    result = {}
    arrays = tree() | {"key": jax.random.key(3)}
    plan = shardfx.plan(
        arrays, few, paths=PathRules.parse("rows->x, columns->None.x, .*->replicate")
    )
    put = shardfx.shard(arrays, plan)
    numbers = {path: array for path, array in put.items() if path != "key"}
    result["right.few put"] = right(numbers) and all(
        array.sharding == plan.shardings[p] for p, array in put.items()
    )
    everywhere = {
        p: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=plan.shardings[p])
        for p, a in numbers.items()
    }
    for name in ("rows", "others"):
        loaded = checkpoint.load(FOLDER / name, everywhere)
        result[f"right.few {name}"] = right(loaded) and len(loaded) == len(everywhere)
        mapped = checkpoint.load(
            FOLDER / f"{name}-mapped", everywhere, EXPORT.inverse()
        )
        result[f"right.few {name} mapped"] = right(mapped)
    return result


def through_a_map(plans):
    """Another layout is written under each plan, and read back under the other."""
    shapes_by_path = {path: array.shape for path, array in tree().items()}
    result = {}
    shapes = shapes_by_path
    for (name, plan), other in zip(
        plans.items(), reversed(plans.values()), strict=True
    ):
        sharded = shardfx.shard(tree(), plan)
        checkpoint.save(FOLDER / f"{name}-mapped", sharded, plan, map=EXPORT)
        loaded = checkpoint.load(FOLDER / f"{name}-mapped", other, EXPORT.inverse())
        result[f"right.{name}.mapped"] = (
            right(loaded)
            and {path: array.shape for path, array in loaded.items()} == shapes
        )
    result["map error"], _ = saved(
        FOLDER / "no", tree(), plans["rows"], map=TreeMap({"x": "row"})
    )
    return result


def saved(*args, **options):
    """The error of a save, and the seconds that the save took."""
    return worker.raised(checkpoint.save, *args, **options)


def interrupted(after_seconds):
    """Sends this process what Ctrl-C sends, which processes that a shell starts in the
    background ignore at first.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(after_seconds, os.kill, (os.getpid(), signal.SIGINT)).start()


def slowed(seconds):
    """Makes each write last as long as it does on a slow disk."""
    pwrite = os.pwritev

    def slow(*args):
        time.sleep(seconds)
        return pwrite(*args)

    os.pwritev = slow
    return pwrite


def full(*arguments):
    """Writes as on a full disk."""
    raise OSError(errno.ENOSPC, "No space left on device")


def disagreements():
    """What every process is told where one of them, its number in the name, does not do
    as the others do.
    """
    me = jax.process_index()
    plan, other = planned().values()
    arrays = shardfx.shard(tree(), plan)
    half = arrays | {"rows": arrays["rows"].astype("bfloat16")}
    rules = PathRules.parse(RULES["rows"])
    halved = shardfx.plan(half, plan.mesh.build(jax.devices()), paths=rules)
    file = FOLDER / "one.safetensors"
    result = {}

    def tried(name, odd, *arguments, path: Any = FOLDER / "never", **options):
        """Of the process `odd` the arguments are others."""
        multihost_utils.sync_global_devices(name)
        result[name] = saved(
            path,
            *(arguments if me == odd and arguments else (arrays, plan)),
            **(options if me == odd else {}),
        )

    def cut(name, odd, after_seconds, late=None):
        """On the process `odd` somebody presses Ctrl-C."""
        multihost_utils.sync_global_devices(name)
        # Even the process with the fewest writes is still at it when the key is pressed.
        pwrite = slowed(1.2)
        if me == odd:
            interrupted(after_seconds)
        if me == late:
            time.sleep(1.2)
        result[name] = saved(FOLDER / "never", arrays, plan)
        os.pwritev = pwrite

    pwritev = os.pwritev
    if me == 2:
        os.pwritev = full
    tried("full disk", 2)
    os.pwritev = pwritev
    tried("elsewhere", 1, path=FOLDER / f"elsewhere-{me % 2}")
    tried("overwrite", 2, path=file, overwrite=True)
    tried("file_bytes", 0, file_bytes=1000)
    tried("leaf", 1, arrays | {"whole": "text"}, plan)
    tried("leaf of the first", 0, arrays | {"whole": "text"}, plan)
    tried("tree", 3, None, plan)
    tried("plan", 3, arrays, "plan")
    tried("other plan", 2, arrays, other)
    tried("dtype", 1, half, halved)
    tried("placed otherwise", 1, shardfx.shard(tree(), other), plan)
    tried("path", 2, path=7 if me == 2 else FOLDER / "never")
    rules = {"x": From("rows").times(float(me == 1) + 1)}
    times = TreeMap(
        rules,
        drop=["both", "columns", "whole", "wide"],
    )
    multihost_utils.sync_global_devices("map")
    result["map"] = saved(FOLDER / "never", arrays, plan, map=times)
    cut("ctrl-c", 3, 0.8)
    cut("ctrl-c in the first", 0, 0.8)
    cut("ctrl-c before the first has come", 2, 0.6, late=0)
    result |= saved_again(me, file, arrays, plan)
    result |= saved_by_some(plan)
    result["left behind"] = coordination().key_value_dir_get("shardfx.save")
    multihost_utils.sync_global_devices("listed")
    return result


def saved_again(me, file, arrays, plan):
    """A file that is there already, and a process that stays away."""
    result = {}
    result["good"] = saved(file, arrays, plan)
    result["exists"] = saved(file, arrays, plan)
    result["again"] = saved(file, arrays, plan, overwrite=True)
    result["right"] = right(checkpoint.load(file, plan))
    if me == 1:
        result["absent"] = ("stayed away", 0.0)
    else:
        result["absent"] = saved(FOLDER / "never", arrays, plan, wait_seconds=1.5)
    multihost_utils.sync_global_devices("absent")
    result["after"] = saved(file, arrays, plan, overwrite=True)
    return result


def saved_by_some(plan):
    """Arrays that lie on one process, and on two."""
    layouts = {
        "ours": NamedSharding(Mesh(jax.devices()[:2], "x"), P()),
        "pair": NamedSharding(Mesh(jax.devices()[2:6], "x"), P("x")),
    }
    titles = {"ours": "one process's", "pair": "two processes'"}
    result = {}
    for name, sharding in layouts.items():
        arrays = {path: placed(array, sharding) for path, array in tree().items()}
        file = FOLDER / f"{name}.safetensors"
        result[titles[name]] = saved(file, arrays, plan)
    multihost_utils.sync_global_devices("pair")
    for name in layouts:
        loaded = checkpoint.load(FOLDER / f"{name}.safetensors", plan)
        result[name] = right(loaded)
    return result


def killed():
    """The third process is killed while all write."""
    me = jax.process_index()
    plan = planned()["rows"]
    arrays = shardfx.shard(tree(), plan)
    # What takes 20 seconds takes 4 here; the disk of the first one hangs for longer
    # than that.
    _coordination._SILENT_SECONDS = 4.0
    slowed(6.0 if me == 0 else 1.0)
    if me == 2:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
    return saved(FOLDER / "never", arrays, plan)


def one_after_the_other():
    """All tasks in one job, as starting its processes takes longer than most of them;
    the last one ends it.
    """
    global FOLDER
    for task in (saves_and_loads, disagreements, killed):
        FOLDER = JOB / task.__name__
        FOLDER.mkdir(exist_ok=True)
        result = task()
        (JOB / f"{task.__name__}.{jax.process_index()}.pickle").write_bytes(
            pickle.dumps(result)
        )


if __name__ == "__main__":
    worker.TASKS[one_after_the_other.__name__] = one_after_the_other
    # Of a killed process the save itself must notice, before JAX does and ends all
    # others.
    worker.main(*sys.argv[1:], heartbeat_seconds=100, shutdown_seconds=1)

"""One process of a job that saves and loads together; started by `_processes.run` as `multiprocess_worker.py` is."""

import errno
import os
import sys
from pathlib import Path

import jax
import multiprocess_worker as worker
import numpy as np

import shardfx
from shardfx import MeshSpec, PathRules, checkpoint
from shardfx._errors import CheckpointError


FOLDER = Path(sys.argv[-1])
RULES = {
    "rows": "rows->data+tensor, columns->None.data+tensor, both->tensor.data, whole->replicate, wide->None.data",
    "others": "rows->None.tensor, columns->data, both->data.tensor, whole->tensor, wide->tensor+data",
}


def tree():
    random = np.random.default_rng(0)
    shapes = {"rows": (64, 32), "columns": (16, 64), "both": (24, 8, 4), "whole": (32,), "wide": (4, 2**18)}
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def counting(name):
    """Counts the bytes that `os.<name>` moves."""
    moved, original = [], getattr(os, name)

    def call(*args):
        done = original(*args)
        moved.append(done)
        return done

    setattr(os, name, call)
    return moved


def right(arrays):
    expected = tree()
    return all(
        np.array_equal(shard.data, expected[name][shard.index])
        for name, array in arrays.items()
        for shard in array.addressable_shards
    )


def saves_and_loads():
    mesh = MeshSpec({"data": 4, "tensor": 2}).build(jax.devices())
    plans = {name: shardfx.plan(tree(), mesh, paths=PathRules.parse(rules)) for name, rules in RULES.items()}
    read, written = counting("preadv"), counting("pwrite")
    result = {}
    for name, made in plans.items():
        written.clear()
        checkpoint.save(FOLDER / name, shardfx.shard(tree(), made), made)
        result[f"written.{name}"] = sum(written)
        index = checkpoint.read_index(FOLDER / name)
        for other, wanted in plans.items():
            read.clear()
            loaded = checkpoint.load(index, wanted)
            result[f"right.{name}.{other}"] = right(loaded)
            planned = checkpoint.plan_reads(index, wanted).processes[jax.process_index()]
            result[f"read.{name}.{other}"] = (sum(read), planned.read_bytes, planned.needed_bytes)
    result["errors"] = errors(plans["rows"])
    return result


def errors(made):
    """What each process gets where one of them fails, or saves elsewhere."""
    arrays, pwrite = shardfx.shard(tree(), made), os.pwrite

    def full(*args):
        if jax.process_index() == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(*args)

    os.pwrite = full
    found = []
    for path in (FOLDER / "failed", FOLDER / f"elsewhere-{jax.process_index() % 2}"):
        try:
            checkpoint.save(path, arrays, made)
        except (CheckpointError, OSError) as error:
            found.append(f"{type(error).__name__}: {error}")
        os.pwrite = pwrite
    return found


if __name__ == "__main__":
    worker.TASKS[saves_and_loads.__name__] = saves_and_loads
    worker.main(*sys.argv[1:])

"""What the processes of an engine do to test that shards of replicas are pulled once,
and spread inside the engine; see `test_sync_replicas.py`.
"""

import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import multiprocess_worker
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec as P

import shardfx
from shardfx import From, MeshSpec, PathRules, TreeMap
from shardfx.errors import SyncError
from shardfx.sync import Receiver, plan_transfer


SECRET = b"sixteen bytes or more"
PROCESSES = 4
# Dimensions that the replicas divide, and others; the keys are of a type of their own.
STRUCTS = {
    "kernel": jax.ShapeDtypeStruct((96, 64), jnp.float32),
    "row": jax.ShapeDtypeStruct((64,), jnp.bfloat16),
    "odd": jax.ShapeDtypeStruct((6, 5), jnp.float32),
    "scalar": jax.ShapeDtypeStruct((), jnp.float32),
    "keys": jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 8)),
}
SERVED = STRUCTS | {"kernel": jax.ShapeDtypeStruct((64, 96), jnp.bfloat16)}
RULES = {path: path for path in STRUCTS}
TURN = TreeMap(RULES | {"kernel": From("kernel").T.cast("bfloat16")})


def plans(trainer, engine):
    """The plans of the trainer, of the engine, and of the engine with each replica's
    shards divided among the replicas.
    """
    rules = PathRules([("kernel", P("data", "model")), (".*", P())])
    src = shardfx.plan(STRUCTS, trainer, paths=rules)
    rules = PathRules([("kernel|row", P("model")), (".*", P())])
    dst = shardfx.plan(SERVED, engine, paths=rules)
    return src, dst, shardfx.follow(lambda tree: tree, dst, over="replica")


def transfers(src, dst, divided):
    """The transfers into the engine's plan, and into the divided one."""
    return {
        "direct": plan_transfer(src, dst, TURN, processes=(1, PROCESSES)),
        "divided": plan_transfer(src, divided, TURN, processes=(1, PROCESSES)),
    }


def arrays_of(revision):
    """The trainer's arrays. Each value is that of one revision."""
    arrays = {}
    for path, struct in STRUCTS.items():
        if path == "keys":
            arrays[path] = jax.random.split(jax.random.key(revision), 8)
        else:
            numbers = np.random.default_rng(revision).normal(size=struct.shape)
            arrays[path] = jnp.asarray(numbers, struct.dtype)
    return arrays


def pulled_together(engine):
    """Pulls until all processes have one revision. Returns how often it pulled, and how
    often there was a new revision.
    """
    news = []
    while True:
        try:
            news.append(engine.pull())
        except SyncError:
            time.sleep(0.05)
        revisions = multihost_utils.process_allgather(np.array(engine.revision or 0))
        if revisions.min() == revisions.max() > 0:
            return len(news), sum(news)


def bits_of(arrays):
    """This process's shards of each array, as bytes."""
    shards = {}
    for path, leaf in arrays.items():
        if path == "keys":
            leaf = jax.random.key_data(leaf)
        shards[path] = [
            (str(shard.index), np.asarray(shard.data).tobytes())
            for shard in leaf.addressable_shards
        ]
    return shards


def expected_bits(revision, dst):
    """What the shards of the engine's plan should have."""
    turned = TURN.apply(arrays_of(revision))
    arrays = {}
    for path, leaf in turned.items():
        sharding = dst.shardings[path]
        if path == "keys":
            arrays[path] = shardfx.shard({path: leaf}, dst.select("^keys$"))[path]
            continue
        values = np.asarray(leaf)
        arrays[path] = jax.make_array_from_callback(
            leaf.shape, sharding, lambda index, values=values: values[index]
        )
    return bits_of(arrays)


def pulls():
    """Pulls revisions both ways while the trainer goes on publishing. Returns for each
    way and pull the revision, whether all bits are those of this revision, how often
    this process pulled, and how often there was a new revision.
    """
    folder = Path(sys.argv[6])
    # The devices of one process are one replica.
    mesh = MeshSpec({"replica": PROCESSES, "model": 2}).build(jax.devices())
    src, dst, divided = plans(MeshSpec({"data": 2, "model": 2}), mesh)
    own_plans = {"direct": dst, "divided": divided}
    found = {}
    for way, transfer in transfers(src, dst, divided).items():
        port = int((folder / f"{way}.port").read_text())
        engine = Receiver(
            transfer,
            own_plans[way],
            [("127.0.0.1", port)],
            SECRET,
            process=jax.process_index(),
            timeout_seconds=20,
        )
        pulls_of_way = []
        for _ in range(3):
            counts = pulled_together(engine)
            arrays = engine.arrays
            if way == "divided":
                arrays = shardfx.reshard(arrays, dst)
            is_right = bits_of(arrays) == expected_bits(engine.revision, dst)
            pulls_of_way.append((engine.revision, is_right, *counts))
        found[way] = pulls_of_way
    return found


multiprocess_worker.TASKS["pulls"] = pulls

if __name__ == "__main__":
    multiprocess_worker.main(*sys.argv[1:])

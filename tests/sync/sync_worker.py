"""A trainer or an engine of its own, for tests that end one: `sync_worker.py trainer`,
`engine PORT`, `leave True`.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import shardfx
from shardfx import From, MeshSpec, PathRules, TreeMap
from shardfx.errors import SyncError
from shardfx.sync import Receiver, Sender, plan_transfer


SECRET = b"sixteen bytes or more"
HEADS = 2
DIM = 8
WIDTH = 64
LAYERS = 12


def plans(side, devices):
    """A trainer of 8 devices, and an engine of 4 with fused, repeated, bf16 weights.
    `side` is 0 for the trainer and 1 for the engine.
    """
    jax.config.update("jax_num_cpu_devices", devices)
    weight = jax.ShapeDtypeStruct((WIDTH, HEADS * DIM), jnp.float32)
    trained = {}
    for layer in range(LAYERS):
        trained[f"layers/{layer}/query"] = weight
        trained[f"layers/{layer}/key"] = weight
    repeated = From("layers/{i}/key").T.repeat(2, dim=0, unit=DIM)
    parts = [From("layers/{i}/query").T, repeated]
    rules = {"{i}.qk": From.concat(parts).cast("bfloat16")}
    tree_map = TreeMap(rules)
    served = {
        f"{i}.qk": jax.ShapeDtypeStruct((3 * HEADS * DIM, WIDTH), jnp.bfloat16)
        for i in range(LAYERS)
    }
    mesh = MeshSpec({"data": 4, "model": 2})
    meshes = [mesh, MeshSpec({"model": 4})]
    meshes[side] = meshes[side].build(jax.devices())
    rules = PathRules([(".*", P("data", "model"))])
    src = shardfx.plan(trained, meshes[0], paths=rules)
    rules = PathRules([(".*", P("model"))])
    dst = shardfx.plan(served, meshes[1], paths=rules)
    plan = plan_transfer(src, dst, tree_map, memory_limit_bytes=1 << 12)
    return src, dst, plan


def train():
    src, _, plan = plans(0, 8)
    sender = Sender(plan, SECRET, timeout_seconds=2)
    print(sender.address[1], flush=True)
    for revision in range(1, 1_000_000):
        arrays = {}
        for leaf in src.leaves:
            values = np.full(leaf.shape, revision % 100, np.float32)
            arrays[leaf.path] = jax.device_put(values, src.shardings[leaf.path])
        sender.publish(arrays, revision)


def serve(port):
    _, dst, plan = plans(1, 4)
    receiver = Receiver(plan, dst, [("127.0.0.1", port)], SECRET, timeout_seconds=2)
    while True:
        failed = None
        try:
            receiver.pull(check_content=True)
        except SyncError as error:
            failed = error
        # What it has is of one revision, whole.
        values = set()
        for leaf in (receiver.arrays or {}).values():
            values.update(map(float, np.unique(np.asarray(leaf))))
        state = "has"
        if failed:
            state = "kept"
        print(
            state,
            receiver.revision,
            sorted(values),
            failed or "",
            flush=True,
        )
        if failed:
            return


def leave(closes):
    """Publishes, pulls and ends, while the sender's threads may still let go of arrays."""
    jax.config.update("jax_num_cpu_devices", 8)
    mesh = MeshSpec({"data": 8}).build(jax.devices())
    tree = {f"w{i}": np.ones((64, 1024), np.float32) for i in range(200)}
    rules = PathRules([(".*", P("data"))])
    sharding_plan = shardfx.plan(tree, mesh, paths=rules)
    plan = plan_transfer(sharding_plan, sharding_plan)
    sender = Sender(plan, SECRET)
    sender.publish(jax.device_put(tree, sharding_plan.shardings), 1)
    receiver = Receiver(plan, sharding_plan, [sender.address], SECRET)
    assert receiver.pull(check_content=True)
    if closes:
        sender.close()


if __name__ == "__main__":
    match sys.argv[1]:
        case "trainer":
            train()
        case "engine":
            serve(int(sys.argv[2]))
        case "leave":
            leave(sys.argv[2] == "True")

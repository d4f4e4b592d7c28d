"""The program of one process in a job. `_processes.run` starts the processes and gives
them their arguments.
"""

import functools as ft
import os
import pickle
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import shardfx
from shardfx import (
    From,
    MeshSpec,
    PathRules,
    TreeMap,
    constrain,
    fsdp,
    gather,
    hosts,
    plan,
    shard,
)


SPEC = MeshSpec({"data": 4, "tensor": 2})
RULES = PathRules(
    [
        ("in/w", P("data", "tensor")),
        ("out/w", P("tensor", "data")),
        ("/b", fsdp("tensor")),
        ("steps", P()),
    ]
)
BATCH_RULES = PathRules([(".*", P("data"))])
STEP_SIZE = 0.1


def params():
    rng = np.random.default_rng(0)
    array = rng.normal(size=(16, 32)).astype(np.float32)
    return {
        "in": {
            "w": array,
            "b": np.zeros(32, np.float32),
        },
        "out": {
            "w": rng.normal(size=(32, 8)).astype(np.float32),
            "b": np.zeros(8, np.float32),
        },
    }


def batches():
    rng = np.random.default_rng(1)
    return [
        {
            "x": rng.normal(size=(24, 16)).astype(np.float32),
            "y": rng.normal(size=(24, 8)).astype(np.float32),
        }
        for _ in range(2)
    ]


def loss(params, batch, mask, batch_plan):
    hidden = jax.nn.relu(batch["x"] @ params["in"]["w"] + params["in"]["b"])
    hidden = constrain(hidden, P("data", "tensor"), batch_plan)
    error = hidden @ params["out"]["w"] + params["out"]["b"] - batch["y"]
    elements = jnp.mean(error**2, axis=1) * mask
    total = jnp.sum(elements)
    return total / jnp.sum(mask)


def planned(mesh, tree=None, rules=RULES):
    return plan(
        tree or params(), mesh, paths=rules, unmatched="replicate", unused="allow"
    )


def planned_batch(mesh):
    return plan(batches()[0], mesh, paths=BATCH_RULES)


def raised(call, *args, **kwargs):
    """The class and the text of a call's error, and the seconds that the call took."""
    started = time.monotonic()
    text = "no error"
    try:
        call(*args, **kwargs)
    except (ValueError, TypeError, OSError, RuntimeError, KeyboardInterrupt) as error:
        text = f"{type(error).__name__}: {error}"
    return text, time.monotonic() - started


def is_last():
    return jax.process_index() == jax.process_count() - 1


def local_rows(batch, batch_plan, mesh, rows=None):
    """What this process would load: its chunk of each array, by its place in the host
    grid.
    """
    grid = hosts.grid_of(mesh)
    out = {}
    for name, array in batch.items():
        chunk = hosts.local_chunk(
            array.shape, batch_plan[name].spec, grid, jax.process_index()
        )
        out[name] = array[chunk.slices][:rows]
    return out


def train(mesh):
    """Two steps of Adam, the second on a ragged batch, from host arrays and back to
    them.
    """
    # No other process of the tests needs it, and its import takes as long as NumPy's.
    import optax

    optimizer = optax.adam(STEP_SIZE)
    params_plan = planned(mesh)
    state_plan = shardfx.follow(optimizer.init, params_plan)
    batch_plan = planned_batch(mesh)
    model = shard(params(), params_plan)
    state = shardfx.filter_jit(optimizer.init, out_shardings=state_plan)(model)

    def step(model, state, batch, mask):
        value, grads = jax.value_and_grad(loss)(model, batch, mask, batch_plan)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(model, updates), state, value

    run = shardfx.filter_jit(step, out_shardings=(params_plan, state_plan, None))
    losses = []
    for number, batch in enumerate(batches()):
        # The last process of several runs short of rows in the second batch.
        if number == 1 and is_last():
            rows = -2
        else:
            rows = None
        local = local_rows(batch, batch_plan, mesh, rows=rows)
        arrays, mask = hosts.global_batch(local, batch_plan, pad=0)
        model, state, value = run(model, state, arrays, mask)
        losses.append(float(value))
    moments: Any = state
    return (
        gather(model),
        gather(moments[0].mu),
        losses,
        params_plan.digest,
        state_plan.digest,
        batch_plan.digest,
    )


def agreement(mesh):
    """What `assert_same_plan` says about equal plans and maps, then about pairs of
    which the last process has one.
    """
    mine = planned(mesh)
    same = TreeMap({"out/w": "w"})
    twice = TreeMap({"out/w": From("w").times(2.0)})
    hosts.assert_same_plan(mine)
    hosts.assert_same_plan(same)
    rules = PathRules([("out/w", P("tensor")), *RULES.rules])
    devices = mesh.devices[::-1]
    pairs = {
        "spec": (
            mine,
            planned(mesh, rules=rules),
        ),
        "shape": (mine, planned(mesh, {**params(), "more": np.ones(3)})),
        "devices": (mine, mine.on(Mesh(devices, mesh.axis_names))),
        "map": (same, twice),
        "map and plan": (same, mine),
    }
    return {
        what: raised(hosts.assert_same_plan, pair[is_last()])[0]
        for what, pair in pairs.items()
    }


def alone(mesh):
    """What `assert_same_plan` says where the last process calls it too late."""
    if is_last():
        time.sleep(3)
    return raised(hosts.assert_same_plan, planned(mesh), wait_seconds=1.0)


def shared_batches(batch_plan, mesh):
    """What `global_batch` gives where the processes tell each other how it went: the
    last one is right, has a row too few, is late, and is right again.
    """
    batch = batches()[0]
    whole = local_rows(batch, batch_plan, mesh)
    short = local_rows(batch, batch_plan, mesh, rows=-1 if is_last() else None)
    joined = gather(hosts.global_batch(whole, batch_plan, wait_seconds=30))
    few, _ = raised(hosts.global_batch, short, batch_plan, wait_seconds=30)
    padded, mask = hosts.global_batch(short, batch_plan, pad=0, wait_seconds=30)
    rows = int(jax.jit(jnp.sum)(mask))
    if is_last():
        time.sleep(3)
    late, _ = raised(hosts.global_batch, whole, batch_plan, wait_seconds=1)
    multihost_utils.sync_global_devices("late")
    again = gather(hosts.global_batch(whole, batch_plan, wait_seconds=30))
    devices = jax.devices()[:2]
    first_mesh = MeshSpec({"data": 2}).build(devices)
    first_plan = plan(batch, first_mesh, paths=BATCH_RULES)
    elsewhere, _ = raised(hosts.global_batch, batch, first_plan)
    return {
        "elsewhere": elsewhere,
        "joined": joined,
        "few": few,
        "rows": rows,
        "late": late,
        "again": again,
    }


def everything():
    mesh = SPEC.build(jax.devices())
    grid = hosts.grid_of(mesh)
    process = jax.process_index()
    result: dict[str, Any] = {
        "grid": (dict(grid.axis_sizes), dict(grid.num_chunks), grid.chunk_ids)
    }
    # The devices of different processes alternate, so no process has a box, and each
    # lists its rows.
    devices = mesh.devices.reshape(-1)[
        np.arange(8).reshape(2, 4).T.reshape(-1)
    ].reshape(8)
    mixed = Mesh(
        devices,
        ("all",),
    )
    owned = hosts.owned((16, 3), NamedSharding(mixed, P("all")), process)
    whole = np.arange(48.0, dtype=np.float32).reshape(16, 3)
    rules = PathRules([("x", P("all"))])
    scattered_plan = plan({"x": whole}, mixed, paths=rules)
    scattered = np.concatenate([whole[chunk.slices] for chunk in owned])
    gathered = gather(hosts.global_batch({"x": scattered}, scattered_plan))["x"]
    result["scattered"] = (
        gathered,
        whole,
    )
    dcn = {"data": jax.process_count()}
    order = MeshSpec(SPEC.shape, dcn=dcn).order(jax.devices())
    process_indexes = [
        [device.process_index for device in row] for row in order.devices
    ]
    result["nodes"] = (
        order.method,
        process_indexes,
    )
    result["layout"] = hosts.data_layout(24, "data", grid, process)
    batch_plan = planned_batch(mesh)
    arrays = hosts.global_batch(local_rows(batches()[0], batch_plan, mesh), batch_plan)
    result["batch"] = gather(arrays)
    result["short"], _ = raised(
        hosts.global_batch,
        local_rows(batches()[0], batch_plan, mesh, rows=1),
        batch_plan,
    )
    result["shared"] = shared_batches(batch_plan, mesh)
    result["gathered"] = gather(shard(params(), planned(mesh)))
    doubled = jax.jit(lambda x: constrain(2 * x, P("data"), batch_plan))(arrays["x"])
    result["constrained"] = (gather(doubled), str(doubled.sharding.spec))
    result["trained"] = train(mesh)
    result["agreement"] = agreement(mesh)
    result["alone"] = alone(mesh)
    keep(result)
    dies(jax.process_count() - 1)


def keep(result):
    """Hands `result` to the test, whatever becomes of this process."""
    Path(sys.argv[-1], f"{jax.process_index()}.pickle").write_bytes(
        pickle.dumps(result)
    )


def dies(dead=0):
    """The process `dead` leaves without a word once all are connected; the others run
    collectives while they can.
    """
    multihost_utils.sync_global_devices("connected")
    if jax.process_index() == dead:
        os._exit(7)
    batch = np.ones((8, 8), np.float32)
    fitted = SPEC.fit(jax.device_count())
    sharding_plan = plan(
        {"x": batch},
        fitted.build(jax.devices()),
        paths=BATCH_RULES,
    )
    x = shard(
        {"x": batch},
        sharding_plan,
    )
    for _ in range(10_000):
        gather(x)


def matrices():
    """A function of whole matrices, mapped over sharded ones; for the job of
    `moving_worker.py`.
    """
    tree = {
        f"w{number}": np.arange(number, number + 8 * 16, dtype=np.float32).reshape(
            8, 16
        )
        for number in range(5)
    }
    matrix_plan = plan(
        tree,
        MeshSpec({"fsdp": 8}).build(jax.devices()),
        paths=PathRules([(".*", fsdp("fsdp"))]),
    )
    mapped = shardfx.map_matrices(
        lambda matrix: matrix / jnp.linalg.norm(matrix), matrix_plan
    )
    result = jax.jit(mapped, out_shardings=matrix_plan.shardings)(
        shard(tree, matrix_plan)
    )
    for name, matrix in tree.items():
        for piece in result[name].addressable_shards:
            np.testing.assert_allclose(
                piece.data, (matrix / np.linalg.norm(matrix))[piece.index], rtol=1e-5
            )
    return "right"


TASKS: dict[str, Callable[[], Any]] = {
    task.__name__: task for task in (everything, dies)
}


def main(
    task,
    index,
    count,
    devices,
    port,
    folder,
    *,
    heartbeat_seconds=10,
    shutdown_seconds=20,
):
    jax.config.update("jax_num_cpu_devices", int(devices))
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # Gloo listens on whatever the host's name resolves to unless it is told a name, and
    # JAX has no option for it.
    from jax._src import xla_bridge

    bridge = xla_bridge._jax  # pyright: ignore[reportPrivateImportUsage]
    bridge.make_gloo_tcp_collectives = ft.partial(
        bridge.make_gloo_tcp_collectives, hostname="127.0.0.1"
    )
    address = f"127.0.0.1:{port}"
    jax.distributed.initialize(
        coordinator_address=address,
        coordinator_bind_address=address,
        num_processes=int(count),
        process_id=int(index),
        initialization_timeout=60,
        heartbeat_timeout_seconds=heartbeat_seconds,
        shutdown_timeout_seconds=shutdown_seconds,
    )
    result = TASKS[task]()
    Path(folder, f"{index}.pickle").write_bytes(pickle.dumps(result))
    jax.distributed.shutdown()


if __name__ == "__main__":
    # All jobs of this program lose a process. Until they end, Gloo asks for it all the
    # time.
    main(*sys.argv[1:], shutdown_seconds=1)

"""A trainer's process and an engine's: a sync of many arrays against one stream between
the same two processes.
"""

import contextlib
import socket
import statistics
import threading
import time
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from shardfx import MeshSpec, PathRules, ShardPlan, TreeMap, plan, sync

from ._case import Value
from ._machine import fresh_process, peak_resident_bytes, reset_peak, resident_bytes


SECRET = b"the two processes know it"
BLOCK = 1 << 20
AXES = "data", "replica"
# Both of the receiver's states are new memory in the first two rounds; what counts is
# what each later sync takes.
WARM, ROUNDS = 2, 7


def plans(count: int, mebibytes: int, own: int) -> tuple[ShardPlan, ShardPlan]:
    """So many arrays on a trainer's 8 devices and on an engine's 4; `own` says whose
    devices are there.
    """
    rows = mebibytes * BLOCK // count // 4096 // 8 * 8
    structs = {
        f"w{number}": jax.ShapeDtypeStruct((rows, 1024), jnp.float32)
        for number in range(count)
    }
    specs = MeshSpec({"data": 8}), MeshSpec({"model": 4})
    meshes = [
        spec.build(jax.devices()[: spec.size]) if at == own else spec
        for at, spec in enumerate(specs)
    ]
    src, dst = (
        plan(structs, mesh, paths=PathRules([(".*", P(axis))]))
        for mesh, axis in zip(meshes, ("data", "model"), strict=True)
    )
    return src, dst


def between(count: int, mebibytes: int) -> Mapping[str, Value]:
    """What a sync carries in a second, over what one stream carries."""
    src, dst = plans(count, mebibytes, 0)
    made = sync.plan_transfer(src, dst)
    arrays = {
        path: jax.device_put(
            np.full(leaf.shape, number, np.float32), src.shardings[path]
        )
        for number, (path, leaf) in enumerate(src.structs.items())
    }
    trainer = sync.Sender(made, SECRET)
    block = memoryview(bytearray(b"x" * made.wire_bytes))

    def stream(connection: socket.socket, _: int) -> None:
        for at in range(0, len(block), BLOCK):
            connection.sendall(block[at : at + BLOCK])

    with (
        _served(stream) as streams,
        _served(lambda _, revision: trainer.publish(arrays, revision)) as publishes,
    ):
        ports = {"port": trainer.address[1], "streams": streams, "publishes": publishes}
        found = fresh_process(
            "benchmarks._jobs:pull", {**ports, "count": count, "mebibytes": mebibytes}
        )
    trainer.close()
    return found


@contextlib.contextmanager
def _served(answer: Callable[[socket.socket, int], None]):
    """The port of a server that answers each connection once, with its number."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        for number in range(1, 1 << 20):
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection:
                answer(connection, number)

    thread = threading.Thread(target=serve)
    thread.start()
    yield server.getsockname()[1]
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    thread.join()


def pull(
    port: int, streams: int, publishes: int, count: int, mebibytes: int
) -> Mapping[str, Value]:
    """The engine's side."""
    jax.config.update("jax_num_cpu_devices", 4)
    src, dst = plans(count, mebibytes, 1)
    begin = time.perf_counter()
    made = sync.plan_transfer(src, dst)
    planned = time.perf_counter() - begin
    engine = sync.Receiver(made, dst, [("127.0.0.1", port)], SECRET)
    memory = memoryview(bytearray(b"x" * made.wire_bytes))
    taken, before = [], 0
    for number in range(ROUNDS):
        if number == WARM:
            # Both states are there.
            before = resident_bytes()
            reset_peak()
        begin, at = time.perf_counter(), 0
        with socket.create_connection(("127.0.0.1", streams)) as connection:
            while part := connection.recv_into(memory[at:]) if at < len(memory) else 0:
                at += part
        streamed = time.perf_counter() - begin
        with socket.create_connection(("127.0.0.1", publishes)) as connection:
            connection.recv(1)
        begin = time.perf_counter()
        assert engine.pull()
        taken.append((streamed, time.perf_counter() - begin))
    warm = taken[WARM:]
    peak = peak_resident_bytes()
    for number, path in enumerate(dst.structs):
        assert (np.asarray(engine.arrays[path]) == number).all(), path
    return {
        "mebibytes_beside_both_states": (peak - before) / 2**20,
        "plan_seconds": planned,
        "first_sync_seconds": taken[0][1],
        "stream_seconds": statistics.median(streamed for streamed, _ in warm),
        "sync_seconds": statistics.median(synced for _, synced in warm),
        "sync_over_stream": statistics.median(
            streamed / synced for streamed, synced in warm
        ),
    }


def of_a_large_llama(
    devices: tuple[int, int], processes: tuple[int, int]
) -> Mapping[str, Value]:
    """Seconds to plan for the 1,137 arrays of a Llama of 405 billion, and for one host;
    to write and read the plan.
    """
    width, keys, feed, words = 16384, 1024, 53248, 128256
    shapes = {
        "q": (width, width),
        "k": (width, keys),
        "v": (width, keys),
        "o": (width, width),
        "norm1": (width,),
    }
    shapes |= {
        "gate": (width, feed),
        "up": (width, feed),
        "down": (feed, width),
        "norm2": (width,),
    }
    every = {
        f"layers/{i}/{name}": shape
        for i in range(126)
        for name, shape in shapes.items()
    }
    every |= {"embed": (words, width), "head": (width, words), "norm": (width,)}
    structs = {
        path: jax.ShapeDtypeStruct(shape, jnp.float32) for path, shape in every.items()
    }
    served = {
        path: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16)
        for path, leaf in structs.items()
    }
    here, there = (
        MeshSpec({axis: size // 8, "model": 8})
        for axis, size in zip(AXES, devices, strict=True)
    )
    src = plan(
        structs,
        here,
        paths=PathRules([("norm", P("data")), (".*", P("data", "model"))]),
    )
    rules = [("norm", P()), ("(down|o|embed)$", P("model")), (".*", P(None, "model"))]
    dst = plan(served, there, paths=PathRules(rules))
    taken = []
    for receiver in (3, None):
        begin = time.perf_counter()
        made = sync.plan_transfer(
            src,
            dst,
            TreeMap({"{path*}": "{path*}"}, casts=True),
            processes=processes,
            receiver=receiver,
        )
        taken.append(time.perf_counter() - begin)
    begin = time.perf_counter()
    text = made.to_json()
    written = time.perf_counter() - begin
    begin = time.perf_counter()
    assert sync.TransferPlan.from_json(text).digest == made.digest
    read = time.perf_counter() - begin
    pieces = sum(len(kind.rows) for kind in made.kinds)
    seconds = {
        "host_seconds": taken[0],
        "plan_seconds": taken[1],
        "write_seconds": written,
        "read_seconds": read,
    }
    return {
        **seconds,
        "pieces": pieces,
        "megabytes": len(text) / 1e6,
        "peak_gigabytes": peak_resident_bytes() / 1e9,
    }

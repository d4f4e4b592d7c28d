"""A trainer's process and an engine's: a sync of many arrays against one stream between
the same two processes.
"""

import contextlib
import socket
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

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
WARM = 2
ROUNDS = 7
# The specs of a trainer's 8 devices and of an engine's 4. Plain pieces are contiguous on
# both sides, and strided ones on neither.
LAYOUTS = {
    "plain": (P(("data", "model")), P("model")),
    "strided": (P("data", "model"), P("model")),
}
TRAINER = MeshSpec({"data": 4, "model": 2})
ENGINE = MeshSpec({"model": 4})


def plans(
    count: int, mebibytes: int, layout: str, job: str
) -> tuple[ShardPlan, ShardPlan]:
    """The plans of `count` arrays on a trainer's and on an engine's devices. `job` is
    the one whose devices are there.
    """
    rows = mebibytes * BLOCK // count // 4096 // 8 * 8
    structs = {
        f"w{number}": jax.ShapeDtypeStruct((rows, 1024), jnp.float32)
        for number in range(count)
    }
    meshes: dict[str, Any] = {"trainer": TRAINER, "engine": ENGINE}
    devices = jax.devices()[: meshes[job].size]
    meshes[job] = meshes[job].build(devices)
    sent, received = LAYOUTS[layout]
    rules = PathRules([(".*", sent)])
    src = plan(structs, meshes["trainer"], paths=rules)
    rules = PathRules([(".*", received)])
    dst = plan(structs, meshes["engine"], paths=rules)
    return src, dst


def between(
    count: int, mebibytes: int, layout: str = "plain", encrypt: bool = False
) -> Mapping[str, Value]:
    """A sync against one plain stream between the same two processes, in turns: what it
    carries in a second over what the stream carries, and the processor time of the
    busier process over that of the stream.
    """
    src, dst = plans(count, mebibytes, layout, "trainer")
    transfer = sync.plan_transfer(src, dst)
    arrays = {
        path: jax.device_put(
            np.full(leaf.shape, number, np.float32), src.shardings[path]
        )
        for number, (path, leaf) in enumerate(src.structs.items())
    }
    trainer = sync.Sender(transfer, SECRET, encrypt=encrypt)
    block = memoryview(bytearray(b"x" * transfer.wire_bytes))
    clock = _Clock()

    def stream(connection: socket.socket, _: int) -> None:
        clock.end("sync")
        clock.begin()
        for start in range(0, len(block), BLOCK):
            connection.sendall(block[start : start + BLOCK])
        clock.end("stream")

    def publish(_: socket.socket, revision: int) -> None:
        clock.begin()
        trainer.publish(arrays, revision)
        clock.end("publish")
        clock.begin()

    with _served(stream) as streams, _served(publish) as publishes:
        arguments = {
            "port": trainer.address[1],
            "streams": streams,
            "publishes": publishes,
            "count": count,
            "mebibytes": mebibytes,
            "layout": layout,
            "encrypt": encrypt,
        }
        answer = fresh_process("benchmarks._jobs:pull", arguments)
    trainer.close()
    sending = {name: clock.median(name) for name in ("stream", "sync", "publish")}
    busier = {
        name: max(sending[name], float(answer[f"{name}_processor_seconds"]))
        for name in ("stream", "sync")
    }
    return {
        **answer,
        "sending_stream_processor_seconds": sending["stream"],
        "sending_sync_processor_seconds": sending["sync"],
        "publish_processor_seconds": sending["publish"],
        "processor_over_stream": busier["sync"] / busier["stream"],
    }


class _Clock:
    """The processor time of this process, in named spans."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._spans: dict[str, list[float]] = {}

    def begin(self) -> None:
        self._began = time.process_time()

    def end(self, name: str) -> None:
        if self._began is not None:
            span = time.process_time() - self._began
            self._spans.setdefault(name, []).append(span)
        self._began = None

    def median(self, name: str) -> float:
        return statistics.median(self._spans[name][WARM:])


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
    port: int,
    streams: int,
    publishes: int,
    count: int,
    mebibytes: int,
    layout: str,
    encrypt: bool,
) -> Mapping[str, Value]:
    """The engine's side."""
    jax.config.update("jax_num_cpu_devices", 4)
    src, dst = plans(count, mebibytes, layout, "engine")
    begin = time.perf_counter()
    transfer = sync.plan_transfer(src, dst)
    planned = time.perf_counter() - begin
    address = ("127.0.0.1", port)
    engine = sync.Receiver(transfer, dst, [address], SECRET, encrypt=encrypt)
    begin = time.perf_counter()
    engine.warm()
    warmed = time.perf_counter() - begin
    memory = memoryview(bytearray(b"x" * transfer.wire_bytes))
    clock = _Clock()
    walls: list[tuple[float, float]] = []
    before = 0
    for number in range(ROUNDS):
        if number == WARM:
            # Both states are there.
            before = resident_bytes()
            reset_peak()
        begin = time.perf_counter()
        clock.begin()
        _read_stream(streams, memory)
        clock.end("stream")
        streamed = time.perf_counter() - begin

        _wait_for_answer(publishes)
        begin = time.perf_counter()
        clock.begin()
        assert engine.pull()
        clock.end("sync")
        walls.append((streamed, time.perf_counter() - begin))
    peak = peak_resident_bytes()
    # It ends the trainer's measure of the last sync.
    _read_stream(streams, memory)
    for number, path in enumerate(dst.structs):
        assert (np.asarray(engine.arrays[path]) == number).all(), path
    warm = walls[WARM:]
    return {
        "mebibytes_beside_both_states": (peak - before) / 2**20,
        "plan_seconds": planned,
        "warm_seconds": warmed,
        "first_sync_seconds": walls[0][1],
        "stream_seconds": statistics.median(streamed for streamed, _ in warm),
        "sync_seconds": statistics.median(synced for _, synced in warm),
        "sync_over_stream": statistics.median(
            streamed / synced for streamed, synced in warm
        ),
        "stream_processor_seconds": clock.median("stream"),
        "sync_processor_seconds": clock.median("sync"),
    }


def _read_stream(port: int, memory: memoryview) -> None:
    position = 0
    with socket.create_connection(("127.0.0.1", port)) as connection:
        while position < len(memory):
            position += connection.recv_into(memory[position:])


def _wait_for_answer(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.recv(1)


def of_a_large_llama(
    devices: tuple[int, int], processes: tuple[int, int]
) -> Mapping[str, Value]:
    """Seconds to plan for the 1,137 arrays of a Llama of 405 billion, and for one host;
    to write and read the plan.
    """
    src, dst = _plans_of_a_large_llama(devices)
    taken = []
    processor_taken = []
    for receiver in (3, None):
        begin = time.perf_counter()
        processor_begin = time.process_time()
        tree_map = TreeMap({"{path*}": "{path*}"}, casts=True)
        transfer = sync.plan_transfer(
            src,
            dst,
            tree_map,
            processes=processes,
            receiver=receiver,
        )
        taken.append(time.perf_counter() - begin)
        processor_taken.append(time.process_time() - processor_begin)
    begin = time.perf_counter()
    text = transfer.to_json()
    written = time.perf_counter() - begin
    begin = time.perf_counter()
    assert sync.TransferPlan.from_json(text).digest == transfer.digest
    read = time.perf_counter() - begin
    pieces = sum(len(kind.rows) for kind in transfer.kinds)
    seconds = {
        "host_seconds": taken[0],
        "host_processor_seconds": processor_taken[0],
        "plan_seconds": taken[1],
        "plan_processor_seconds": processor_taken[1],
        "write_seconds": written,
        "read_seconds": read,
    }
    return {
        **seconds,
        "pieces": pieces,
        "megabytes": len(text) / 1e6,
        "peak_gigabytes": peak_resident_bytes() / 1e9,
    }


def _plans_of_a_large_llama(devices: tuple[int, int]) -> tuple[ShardPlan, ShardPlan]:
    """The trainer's and the engine's."""
    shapes = _shapes_of_a_large_llama()
    structs = {
        path: jax.ShapeDtypeStruct(shape, jnp.float32) for path, shape in shapes.items()
    }
    served = {
        path: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16)
        for path, leaf in structs.items()
    }
    trainer, there = (
        MeshSpec({axis: size // 8, "model": 8})
        for axis, size in zip(AXES, devices, strict=True)
    )
    src = plan(
        structs,
        trainer,
        paths=PathRules([("norm", P("data")), (".*", P("data", "model"))]),
    )
    rules = [("norm", P()), ("(down|o|embed)$", P("model")), (".*", P(None, "model"))]
    dst = plan(served, there, paths=PathRules(rules))
    return src, dst


def _shapes_of_a_large_llama() -> dict[str, tuple[int, ...]]:
    width = 16384
    keys = 1024
    feed = 53248
    words = 128256
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
    every = {}
    for layer in range(126):
        for name, shape in shapes.items():
            every[f"layers/{layer}/{name}"] = shape
    every |= {"embed": (words, width), "head": (width, words), "norm": (width,)}
    return every

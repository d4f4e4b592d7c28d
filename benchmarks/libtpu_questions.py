"""`python -m benchmarks.libtpu_questions row|pair|disk`: what many questions to libtpu
leave behind, and whether each answer is right.

`row` asks `--count` questions in a row; during `--kills` of them, the process that asks
libtpu or its child is killed at a random moment. `pair` asks from two processes at the
same time. `disk` asks while the folder of temporary files is on a disk of a few KiB,
which it mounts, so it needs root.

An answer is right if it is that of the same question alone. The counts are saved in
`benchmarks/results/libtpu-questions.json`.
"""

import argparse
import collections
import contextlib
import itertools
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardfx import MeshSpec, PathRules, plan
from shardfx._step import libtpu
from shardfx.cost import estimate, fit
from shardfx.errors import ProgramError

from .unseen.measure import RESULTS, versions


_FILE = RESULTS / "libtpu-questions.json"
_MESH = MeshSpec({"data": 16})
_RULES = PathRules.parse(".*->data")
_WIDTHS = range(1, 9)
_LONGEST = "longest question, in milliseconds"
# The longest time after which a process is killed that asks. A question takes 0.5 s.
_DELAY_SECONDS = 0.4
_LOOK_EVERY_SECONDS = 0.005
# The sizes of small disks, and the questions to ask on each.
_DISK_KIBIBYTES = (4, 64, *range(200, 400, 16), 400, 1000)
_QUESTIONS_PER_DISK = 2

Counts = collections.Counter[str]


class Question(NamedTuple):
    """A question about a tiny program: `verb` is "estimate" or "fit"."""

    verb: str
    width: int

    def answer(self) -> int:
        """The bytes that libtpu answers with, asked anew."""
        libtpu.recent_tpu_dumps.cache_clear()
        rows = jax.ShapeDtypeStruct((64 * self.width, 128), jnp.float32)
        batch = jax.ShapeDtypeStruct((512, 64 * self.width), jnp.float32)
        args = [plan(leaf, _MESH, paths=_RULES).structs for leaf in (rows, batch)]
        if self.verb == "fit":
            memory = fit(_product, *args, chip="v5e")
            assert memory.basis == "compiled"
            return memory.peak_bytes
        sent = estimate(_product, *args, compiler="tpu:v5e")
        assert sent.basis == "compiled"
        return sent.wire_bytes


QUESTIONS = tuple(
    Question(verb, width)
    for width, verb in itertools.product(_WIDTHS, ("estimate", "fit"))
)


def _product(weights: jax.Array, batch: jax.Array) -> jax.Array:
    return jnp.tanh(batch @ weights)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.libtpu_questions", description=__doc__
    )
    parser.add_argument("what", choices=["row", "pair", "disk"])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args(arguments)
    jax.config.update("jax_platforms", "cpu")

    begin = time.monotonic()
    had_lock = Path("/tmp/libtpu_lockfile").exists()
    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = folder
        if flags.what == "row":
            counts = row(flags.count, flags.kills, random.Random(flags.seed))
        elif flags.what == "pair":
            counts = pair(flags.count)
        else:
            counts = disk(Path(folder))
        _end_worker()
        counts["folders left behind"] = len(os.listdir(folder))
        tempfile.tempdir = None
    counts["processes left behind"] = _left_processes(folder)
    has_lock = Path("/tmp/libtpu_lockfile").exists()
    counts["lock files made"] = int(has_lock and not had_lock)
    counts["seconds"] = round(time.monotonic() - begin)

    if _FILE.exists():
        document = json.loads(_FILE.read_text())
    else:
        document = {}
    document["versions"] = versions()
    document[flags.what] = dict(counts)
    _FILE.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document[flags.what], indent=1))
    return 0


def _counted(counts: Counts, question: Question, expected: dict[Question, int]) -> None:
    """Asks a question, and counts what became of it."""
    begin = time.monotonic()
    try:
        is_right = question.answer() == expected[question]
        counts["right" if is_right else "wrong"] += 1
    except ProgramError:
        counts["ProgramError"] += 1
    except Exception as error:  # noqa: BLE001 (It is what is counted.)
        counts[f"raw {type(error).__name__}"] += 1
        print(repr(error), file=sys.stderr)
    milliseconds = round(1000 * (time.monotonic() - begin))
    counts[_LONGEST] = max(counts[_LONGEST], milliseconds)


def _expected() -> dict[Question, int]:
    """The answer to each question, asked alone."""
    return {question: question.answer() for question in QUESTIONS}


def row(count: int, kills: int, draws: random.Random) -> Counts:
    """Counts of `count` questions in a row, during `kills` of which a process is
    killed.
    """
    counts = Counts()
    expected = _expected()
    disturbed = set(draws.sample(range(count), kills))
    for number in range(count):
        question = QUESTIONS[number % len(QUESTIONS)]
        if number in disturbed:
            of_child = draws.random() < 0.5
            delay = draws.uniform(0, _DELAY_SECONDS)
            with _killed_after(delay, counts, of_child=of_child):
                _counted(counts, question, expected)
        else:
            _counted(counts, question, expected)
        print(number, dict(counts), file=sys.stderr, flush=True)
    return counts


@contextlib.contextmanager
def _killed_after(delay: float, counts: Counts, *, of_child: bool) -> Iterator[None]:
    """Kills the process that asks libtpu, or its child, after the child has run for a
    delay, unless the block ends before.
    """
    is_over = threading.Event()

    def kill() -> None:
        while not (children := _children(_worker_id())):
            if is_over.wait(_LOOK_EVERY_SECONDS):
                break
        if is_over.wait(delay):
            counts["answered before the kill"] += 1
            return
        target = children[0] if of_child else _worker_id()
        with contextlib.suppress(ProcessLookupError):
            os.kill(target, signal.SIGKILL)
            counts["killed children" if of_child else "killed processes"] += 1

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _worker() -> Any:
    return libtpu._worker(libtpu.libtpu_path(), os.getpid())


def _worker_id() -> int:
    return _worker()._process.pid


def _end_worker() -> None:
    """Ends the process that asks libtpu, as the end of Python does."""
    _worker().end()
    libtpu._worker.cache_clear()


def _children(process: int) -> list[int]:
    try:
        text = Path(f"/proc/{process}/task/{process}/children").read_text()
    except FileNotFoundError:
        return []
    return [*map(int, text.split())]


def _left_processes(folder: str) -> int:
    """The number of processes whose command names a folder."""
    count = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            count += folder.encode() in path.read_bytes()
    return count


def _asked(count: int, expected: dict[Question, int], seed: int) -> Counts:
    counts = Counts()
    draws = random.Random(seed)
    for _ in range(count):
        _counted(counts, draws.choice(QUESTIONS), expected)
    return counts


def _in_process(
    count: int, expected: dict[Question, int], seed: int, folder: str, sink: Any
) -> None:
    jax.config.update("jax_platforms", "cpu")
    tempfile.tempdir = folder
    sink.put(_asked(count, expected, seed))


def pair(count: int) -> Counts:
    """Counts of two processes that ask `count` questions between them."""
    expected = _expected()
    spawn = multiprocessing.get_context("spawn")
    queue = spawn.Queue()
    folder = tempfile.gettempdir()
    processes = [
        spawn.Process(
            target=_in_process, args=(count // 2, expected, seed, folder, queue)
        )
        for seed in range(2)
    ]
    for process in processes:
        process.start()
    parts = [queue.get() for _ in processes]
    for process in processes:
        process.join()
    counts = sum(parts, Counts())
    counts[_LONGEST] = max(part[_LONGEST] for part in parts)
    return counts


def disk(folder: Path) -> Counts:
    """Counts of questions whose temporary files lie on small disks."""
    counts = Counts()
    expected = _expected()
    _end_worker()
    for kibibytes in _DISK_KIBIBYTES:
        small = folder / f"disk-{kibibytes}"
        small.mkdir()
        _run("mount", "-t", "tmpfs", "-o", f"size={kibibytes}k", "tmpfs", str(small))
        try:
            tempfile.tempdir = str(small)
            disk_counts = _asked(_QUESTIONS_PER_DISK, expected, seed=kibibytes)
            _end_worker()
            disk_counts["left"] = len(os.listdir(small))
        finally:
            tempfile.tempdir = str(folder)
            _run("umount", str(small))
            small.rmdir()
        for name, number in disk_counts.items():
            counts[f"{kibibytes} KiB: {name}"] = number
        print(dict(counts), file=sys.stderr, flush=True)
    return counts


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


if __name__ == "__main__":
    sys.exit(main())

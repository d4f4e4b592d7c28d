"""Runs cases in processes that XLA may abort.

A `Child` is a process with one interpreter and one partitioner. It is started again
after an abort, after a time-out, and now and then so that its memory stays small.
"""

import dataclasses
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


ROOT = Path(__file__).parent.parent.parent
# A case compiles in a second; what takes this long hangs.
SECONDS_A_CASE = 90.0
STARTING_SECONDS = 120.0
REQUESTS_A_PROCESS = 60
_ABORTS = ("Check failed", "terminate called", "Fatal Python error", "SIG")


@dataclasses.dataclass(frozen=True)
class Configuration:
    """What runs the cases.

    **Arguments:**

    - `python`: the interpreter, which has JAX.
    - `shardy`: whether Shardy is the partitioner's front, or GSPMD.
    - `optimised`: whether XLA optimises as by default. Compiling without is faster,
      and the partitioner runs all the same.
    """

    python: str = sys.executable
    shardy: bool = True
    optimised: bool = False


@dataclasses.dataclass
class Result:
    """A case as JSON, and its outcome: "right", "wrong", "unstable" (rounding alone
    changes it), "refused" (on one device too), "error", "abort" or "timeout".
    """

    case: Mapping[str, Any]
    outcome: Mapping[str, Any]


class Child:
    """One process that answers requests, started again when it ends."""

    def __init__(self, configuration: Configuration):
        self.configuration = configuration
        self.versions: Mapping[str, str] = {}
        self.aborts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._errors = tempfile.TemporaryFile()
        self._buffer = b""
        self._requests = 0

    def __enter__(self) -> "Child":
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def results(self, request: Mapping[str, Any]) -> Iterator[Result]:
        """The results of the cases of a request. After an abort or a time-out the rest
        of the request's cases is not run.
        """
        if self._process is None or self._requests >= REQUESTS_A_PROCESS:
            self._start()
        assert self._process is not None and self._process.stdin is not None
        self._requests += 1
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        case: Mapping[str, Any] | None = None
        while True:
            line = self._line(SECONDS_A_CASE)
            if line is None:
                result = self._ended()
                if case is None:
                    message = result.get("message")
                    raise RuntimeError(f"the process ended before a case: {message}")
                yield Result(case, result)
                return
            if "done" in line:
                return
            if "case" in line:
                case = line["case"]
                continue
            assert case is not None
            yield Result(case, line)

    def _start(self) -> None:
        self._end()
        flags = self.configuration
        self._errors = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [
                flags.python,
                "-m",
                "benchmarks.faults._child",
                f"--shardy={int(flags.shardy)}",
                f"--optimised={int(flags.optimised)}",
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"},
        )
        self._buffer = b""
        self._requests = 0
        line = self._line(STARTING_SECONDS)
        if line is None:
            raise RuntimeError(f"`{flags.python}` does not start: {self._said()}")
        self.versions = line["versions"]

    def _line(self, seconds: float) -> dict[str, Any] | None:
        """The next line that the process writes; `None` if it ends or hangs."""
        assert self._process is not None and self._process.stdout is not None
        stream = self._process.stdout.fileno()
        deadline = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            remaining = deadline - time.monotonic()
            if remaining <= 0 or not select.select([stream], [], [], remaining)[0]:
                return None
            read = os.read(stream, 1 << 20)
            if not read:
                return None
            self._buffer += read
        line, self._buffer = self._buffer.split(b"\n", 1)
        return json.loads(line)

    def _ended(self) -> dict[str, Any]:
        """The outcome of the case that ended the process, or that hangs in it."""
        assert self._process is not None
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._end()
            return {"outcome": "timeout", "message": f"over {SECONDS_A_CASE:.0f} s"}
        self.aborts += 1
        message = self._said()
        self._end()
        return {"outcome": "abort", "code": code, "message": message}

    def _said(self) -> str:
        """The lines of the error output that say why the process ended."""
        self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, self._errors.tell() - 20_000))
        lines = self._errors.read().decode(errors="replace").splitlines()
        telling = [line for line in lines if any(word in line for word in _ABORTS)]
        return "\n".join(telling or lines[-3:])[:800]

    def _end(self) -> None:
        process = self._process
        self._process = None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()

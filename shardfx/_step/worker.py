"""The program of the process that runs XLA's partitioner; `partitioner.py` starts it.

It reads requests from standard input and writes answers to standard output. Each is a
line of JSON followed by bytes. For each request, a forked child makes a CPU client with
the mesh's number of devices and compiles the module. XLA dumps the module after its
partitioner, or before Shardy. Then the child is killed, since the rest of XLA's work is
not needed. A child that aborts affects neither this process nor the user's.

This file imports jaxlib, but neither JAX nor shardfx, so it starts in 0.2 s.
"""

import functools as ft
import glob
import importlib.util
import json
import os
import select
import signal
import sys
import tempfile
import time
import types

import numpy as np
from jaxlib import xla_client


# The passes before and after which texts are requested:
# xla/service/spmd/shardy/shardy_xla_pass.cc and spmd_partitioner.cc, run by
# xla/service/cpu/cpu_compiler.cc. For one device nothing is partitioned.
_WHOLE, _FINISHED = "*before_optimizations.txt", "after_optimizations"
_OPTIONS = {"xla_backend_optimization_level": 0}
_LOOK_EVERY_SECONDS = 0.003
# XLA assumes several processes for a client with more devices, and then needs a
# transport. It sends nothing: see TfrtCpuClient::CompileInternal,
# xla/pjrt/cpu/cpu_client.cc.
_ALONE = 2048


def main() -> None:
    """Answers requests until standard input ends."""
    # Ctrl-C in a terminal is for the parent process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    while line := source.readline():
        request = json.loads(line)
        module = source.read(request["size"])
        text, error = partitioned(
            module,
            request["devices"],
            request["options"],
            request["seconds"],
            request["dumped"],
        )
        if text and request["propagated"] is not None:
            text, error = _shardy().propagated(text, request | request["propagated"])
        answer = {"size": len(text), "error": error}
        try:
            sink.write(json.dumps(answer).encode() + b"\n" + text)
            sink.flush()
        except BrokenPipeError:
            os._exit(0)


@ft.lru_cache(maxsize=1)
def _shardy() -> types.ModuleType:
    """The Python module `propagate.py` beside this file, loaded by its path."""
    spec = importlib.util.spec_from_file_location(
        "propagate", os.path.join(os.path.dirname(__file__), "propagate.py")
    )
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def partitioned(
    module: bytes, devices: int, options: dict[str, str], seconds: float, dumped: str
) -> tuple[bytes, str]:
    """The text of the program at the stage `dumped` of XLA's pipeline, such as
    "after_spmd-partitioning", and an error text. One of them is empty. `options` are
    XLA's debug options. XLA may take at most `seconds`.
    """
    with tempfile.TemporaryDirectory(prefix="shardfx-") as folder:
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            os.close(reading)
            told = {
                "xla_dump_to": folder,
                "xla_dump_hlo_pass_re": dumped.partition("_")[2],
            }
            _compile(module, devices, {**told, **_OPTIONS, **options}, writing)
        os.close(writing)
        try:
            name = f"*{dumped}*.txt" if devices > 1 or dumped == _FINISHED else _WHOLE
            return _text_from(folder, name, reading, time.monotonic() + seconds)
        finally:
            os.close(reading)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _compile(
    module: bytes, devices: int, debug_options: dict[str, str | int], writing: int
) -> None:
    """Compiles the module in the child process, and ends the process. Writes any error
    to the pipe `writing`.
    """
    # XLA writes its warnings to standard error, and nothing may reach the standard
    # output of the parent.
    silence = os.open(
        os.path.join(str(debug_options["xla_dump_to"]), "stderr"),
        os.O_WRONLY | os.O_CREAT,
    )
    for stream in (0, 1, 2):
        os.dup2(silence, stream)
    try:
        made = xla_client._xla.make_mpi_collectives  # pyright: ignore[reportPrivateImportUsage]
        wires = made() if devices > _ALONE else None
        client = xla_client.make_cpu_client(num_devices=devices, collectives=wires)
        options = xla_client.CompileOptions()
        build = options.executable_build_options
        build.num_replicas, build.num_partitions = 1, devices
        build.use_spmd_partitioning = build.use_shardy_partitioner = True
        ids = np.array([device.id for device in client.devices()])
        build.device_assignment = xla_client.DeviceAssignment.create(
            ids.reshape(1, devices)
        )
        for name, value in debug_options.items():
            setattr(build.debug_options, name, value)
        client.compile_and_load(
            module, xla_client.DeviceList(tuple(client.devices())), options
        )
        os.write(writing, b"XLA compiled the program without its partitioner")
    except (
        RuntimeError,
        ValueError,
        TypeError,
    ) as error:  # XLA's errors are RuntimeErrors
        os.write(writing, str(error).encode()[:60_000])
    finally:
        os._exit(0)


def _text_from(
    folder: str, dumped: str, reading: int, deadline: float
) -> tuple[bytes, str]:
    """The text that XLA dumps to a file in `folder`, and an error text from the pipe
    `reading`. `dumped` is the pattern of the file's name. Returns when the dump is
    complete, when the child process ends, or at the deadline.
    """
    said = None
    while True:
        for path in glob.glob(os.path.join(folder, dumped)):
            if text := _whole(path):
                return text, ""
        if said is not None:
            return b"", said.decode(errors="replace") or _error_output(folder)
        if time.monotonic() > deadline:
            return b"", "the time is over"
        # The parent sends nothing before it has the answer, so standard input becomes
        # ready only when it ends.
        ready = select.select([reading, 0], [], [], _LOOK_EVERY_SECONDS)[0]
        if 0 in ready:
            return b"", "nobody waits for the answer"
        if reading in ready:
            said = os.read(reading, 65_536)


def _whole(path: str) -> bytes:
    """The text that XLA dumps to `path`; "" until it has an entry computation and ends
    with a brace on a line.
    """
    with open(path, "rb") as file:
        # A large file is checked many times while it is written.
        file.seek(max(0, file.seek(0, os.SEEK_END) - 8))
        if not file.read().rstrip().endswith(b"\n}"):
            return b""
        file.seek(0)
        text = file.read()
    return text if b"\nENTRY " in text and text.rstrip().endswith(b"\n}") else b""


def _error_output(folder: str) -> str:
    """The end of the error output, in `folder`, of a child process that XLA aborted."""
    with open(os.path.join(folder, "stderr"), "rb") as file:
        return f"XLA aborted: {file.read()[-2000:].decode(errors='replace')}"


if __name__ == "__main__":
    main()

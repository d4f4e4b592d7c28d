"""The program of the process that runs XLA's partitioner; `partitioner.py` starts it.

It reads requests from standard input and writes answers to standard output. Each is a
line of JSON followed by bytes. For each request, a forked child makes a CPU client and
compiles the module. XLA dumps the module after its partitioner, or before Shardy. Then
the child is killed, since the rest of XLA's work is not needed. A child that aborts
affects neither this process nor the user's.

This file imports jaxlib, but neither JAX nor shardfx, so it starts in 0.2 s.
"""

import functools as ft
import glob
import importlib.util
import json
import os
import re
import resource
import select
import signal
import sys
import tempfile
import time
import types
from typing import Any

import numpy as np
from jaxlib import xla_client


try:
    from jaxlib import _hlo as hlo  # pyright: ignore[reportAttributeAccessIssue]
except ImportError:  # before JAX 0.10
    hlo = xla_client._xla  # pyright: ignore[reportPrivateImportUsage]


# The passes before and after which texts are requested:
# xla/service/spmd/shardy/shardy_xla_pass.cc and spmd_partitioner.cc, run by
# xla/service/cpu/cpu_compiler.cc. For one device nothing is partitioned.
_WHOLE = "*before_optimizations.txt"
_FINISHED = "after_optimizations"
_OPTIONS = {"xla_backend_optimization_level": 0}
# How XLA prints a constant of many numbers, and the bytes of a program above which it
# stays so.
_ELIDED = b"constant({...})"
_MOST_BYTES = 2**27
_LOOK_EVERY_SECONDS = 0.003
# XLA assumes several processes for a client with more devices, and then needs a
# transport. It sends nothing: see TfrtCpuClient::CompileInternal,
# xla/pjrt/cpu/cpu_client.cc.
_ALONE = 2048
# A client starts threads for each of its devices: 777 for 512 devices, which take 65 ms.
# To partition a program for all of them, a client of one device is enough.
_PARTITIONING_DEVICES = 1


# Routines of LAPACK and of its like on GPUs, whose leading dimensions XLA may
# partition: `batch_partitionable_targets` in jaxlib/lapack.py and jaxlib/gpu_solver.py.
_ROUTINES = re.compile(
    rb"(?:lapack|cusolver|hipsolver)_[a-z0-9]+_ffi"
    rb"|(?:cu|hip)hybrid_[a-z0-9_]+"
    rb"|(?:cu|hip)sparse_gtsv2_ffi"
    rb"|(?:cu|hip)_lu_pivots_to_permutation"
)


def main() -> None:
    """Answers requests until standard input ends."""
    # Ctrl-C in a terminal is for the parent process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    source = sys.stdin.buffer
    sink = sys.stdout.buffer
    while line := source.readline():
        request = json.loads(line)
        module = source.read(request["size"])
        try:
            texts, error = _answer(module, request)
        except OSError as full_disk:
            texts = []
            error = str(full_disk)
        answer = {"sizes": [len(text) for text in texts], "error": error}
        try:
            sink.write(json.dumps(answer).encode() + b"\n" + b"".join(texts))
            sink.flush()
        except BrokenPipeError:
            os._exit(0)


def _answer(module: bytes, request: dict[str, Any]) -> tuple[list[bytes], str]:
    """The texts that a request names, and an error text. One of them is empty. With
    `request["propagated"]`, there is one text: the module that Shardy makes of the HLO.
    """
    texts, error = partitioned(
        module=module,
        devices=request["devices"],
        seconds=request["seconds"],
        dumped=request["dumped"],
    )
    if texts and request["propagated"] is not None:
        asked = request | request["propagated"]
        text, error = _shardy().propagated(texts[0], asked)
        texts = [text]
    return texts, error


@ft.lru_cache(maxsize=1)
def _shardy() -> types.ModuleType:
    """The Python module `propagate.py` beside this file, loaded by its path."""
    spec = importlib.util.spec_from_file_location(
        "propagate", os.path.join(os.path.dirname(__file__), "propagate.py")
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def partitioned(
    module: bytes,
    devices: int,
    seconds: float,
    dumped: list[str],
) -> tuple[list[bytes], str]:
    """The texts of the program at the stages `dumped` of one pass of XLA's pipeline,
    such as "after_spmd-partitioning", and an error text. One of them is empty. If
    there are several stages, all numbers of constants are in the texts. XLA may take at
    most `seconds`.
    """
    for name in set(_ROUTINES.findall(module)):
        _register(name.decode())
    with tempfile.TemporaryDirectory(prefix="shardfx-") as folder:
        error_pipe, child_pipe = os.pipe()
        child = os.fork()
        if not child:
            os.close(error_pipe)
            # A stage is "before" or "after" a pass, and all stages are of one pass.
            _, _, pass_name = dumped[0].partition("_")
            settings = {"xla_dump_to": folder, "xla_dump_hlo_pass_re": pass_name}
            if len(dumped) > 1:
                settings |= {
                    "xla_dump_hlo_as_text": True,
                    "xla_dump_hlo_as_proto": True,
                }
            client_devices = _PARTITIONING_DEVICES
            if _FINISHED in dumped:
                # XLA optimizes for the threads that the client has.
                client_devices = devices
            _compile(
                module=module,
                devices=devices,
                client_devices=client_devices,
                debug_options=settings | _OPTIONS,
                error_pipe=child_pipe,
            )
        os.close(child_pipe)
        try:
            texts = []
            deadline = time.monotonic() + seconds
            for stage in dumped:
                has_pass = devices > 1 or stage == _FINISHED
                name = f"*{stage}*.txt" if has_pass else _WHOLE
                text, error = _text_from(folder, name, error_pipe, deadline)
                if error:
                    return [], error
                if len(dumped) > 1 and _ELIDED in text:
                    complete = _with_all_constants(folder, f"*{stage}*.pb", deadline)
                    text = complete or text
                texts.append(text)
            return texts, ""
        finally:
            os.close(error_pipe)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


@ft.lru_cache(maxsize=1024)
def _register(name: str) -> None:
    """Tells XLA, once, that it may partition a routine along leading dimensions, as JAX
    does when it is imported.
    """
    xla_client.register_custom_call_as_batch_partitionable(name)


def _compile(
    module: bytes,
    devices: int,
    client_devices: int,
    debug_options: dict[str, str | int | bool],
    error_pipe: int,
) -> None:
    """Compiles the module for `devices` devices in the child process, and ends the
    process. The client has `client_devices` of them: all, or one in the place of all.
    Writes any error to the pipe `error_pipe`.

    The parent kills the process as soon as the dump is complete. A compilation that
    ends before has no partitioner, which is an error.
    """
    # Nothing may be raised out of this block: the child would go on as a second parent.
    try:
        # XLA writes its warnings to standard error, and nothing may reach the standard
        # output of the parent.
        silent_file = os.open(
            os.path.join(str(debug_options["xla_dump_to"]), "stderr"),
            os.O_WRONLY | os.O_CREAT,
        )
        for stream in (0, 1, 2):
            os.dup2(silent_file, stream)
        # XLA aborts once it has compiled for a device that stands for several.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        # XLA needs a transport for a client of many devices, and does not use it.
        make_collectives = xla_client._xla.make_mpi_collectives  # pyright: ignore[reportPrivateImportUsage]
        collectives = make_collectives() if client_devices > _ALONE else None
        client = xla_client.make_cpu_client(
            num_devices=client_devices,
            collectives=collectives,
        )
        options = xla_client.CompileOptions()
        build = options.executable_build_options
        build.num_replicas = 1
        build.num_partitions = devices
        build.use_spmd_partitioning = True
        build.use_shardy_partitioner = True
        ids = [device.id for device in client.devices()]
        build.device_assignment = xla_client.DeviceAssignment.create(
            np.resize(ids, (1, devices))
        )
        for name, value in debug_options.items():
            setattr(build.debug_options, name, value)
        client.compile_and_load(
            module, xla_client.DeviceList(tuple(client.devices())), options
        )
        os.write(error_pipe, b"XLA compiled the program without its partitioner")
    # XLA's errors are RuntimeErrors; an unknown option is an AttributeError.
    except (RuntimeError, ValueError, TypeError, AttributeError, OSError) as error:
        os.write(error_pipe, str(error).encode()[:60_000])
    finally:
        os._exit(0)


def _text_from(
    folder: str,
    name_pattern: str,
    error_pipe: int,
    deadline: float,
) -> tuple[bytes, str]:
    """The text that XLA dumps to a file in `folder`, and an error text from the pipe
    `error_pipe`. `name_pattern` is the pattern of the file's name. Returns when the
    dump is complete, when the child process ends, or at the deadline.
    """
    error_text = None
    while True:
        for path in glob.glob(os.path.join(folder, name_pattern)):
            if text := _complete_file(path):
                return text, ""
        if error_text is not None:
            return b"", error_text.decode(errors="replace") or _error_output(folder)
        if time.monotonic() > deadline:
            return b"", "the time is over"
        # The parent sends nothing before it has the answer, so standard input becomes
        # ready only when it ends.
        ready = select.select([error_pipe, 0], [], [], _LOOK_EVERY_SECONDS)[0]
        if 0 in ready:
            return b"", "nobody waits for the answer"
        if error_pipe in ready:
            error_text = os.read(error_pipe, 65_536)


def _complete_file(path: str) -> bytes:
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


def _with_all_constants(folder: str, name: str, deadline: float) -> bytes:
    """The text of the module that XLA dumps to a file in `folder`, with all numbers of
    its constants; "" if the file is not there in time, or is too large.
    """
    while time.monotonic() < deadline:
        for path in glob.glob(os.path.join(folder, name)):
            size = os.path.getsize(path)
            if size > _MOST_BYTES:
                return b""
            with open(path, "rb") as file:
                message = file.read()
            if text := complete_text(message):
                return text
        time.sleep(_LOOK_EVERY_SECONDS)
    return b""


def complete_text(message: bytes) -> bytes:
    """The text of the module in a message, with all numbers of its constants; "" while
    the message is written.
    """
    module = module_in(message)
    if module is None:
        return b""
    options = hlo.HloPrintOptions()
    options.print_large_constants = True
    return module.to_string(options).encode()


def module_in(message: bytes) -> Any:
    """The module in the first field of a message; `None` while it is written."""
    # The number of the field is the first byte, and its size follows as a varint, which
    # has seven bits in each byte.
    size = 0
    shift = 0
    position = 1
    while position < len(message):
        size |= (message[position] & 127) << shift
        shift += 7
        position += 1
        if message[position - 1] < 128:
            break
    if not size or len(message) < position + size:
        return None
    return hlo.HloModule.from_serialized_hlo_module_proto(
        message[position : position + size]
    )


def _error_output(folder: str) -> str:
    """The end of the error output, in `folder`, of a child process that XLA aborted."""
    with open(os.path.join(folder, "stderr"), "rb") as file:
        return f"XLA aborted: {file.read()[-2000:].decode(errors='replace')}"


if __name__ == "__main__":
    main()

"""The program of the process that asks libtpu; `libtpu.py` starts it.

It loads libtpu once and starts none of it. For each request, a forked child describes a
slice that is not there and compiles the module for it, while libtpu dumps its texts.
The child is killed as soon as the requested texts are whole: what follows, code
generation, takes most of the time of a compilation.

Nothing that runs on this machine's TPUs is disturbed. The environment variable
ALLOW_MULTIPLE_LIBTPU_LOAD keeps libtpu from taking /tmp/libtpu_lockfile, which a job on
TPUs takes; TPU_SKIP_MDS_QUERY keeps it from asking the cloud for this machine's TPUs. A
description of a slice opens no TPU, and a child that finds one open ends with an error.

This file imports jaxlib, but neither JAX nor shardfx.
"""

import contextlib
import ctypes
import fcntl
import functools as ft
import glob
import importlib.util
import json
import os
import select
import shutil
import signal
import sys
import tempfile
import time
import types
from typing import Any, BinaryIO, NamedTuple, NoReturn

import numpy as np
from jaxlib import xla_client
from jaxlib.mlir import ir


_LOOK_EVERY_SECONDS = 0.005
_STARTING_SECONDS = 60.0
# How long a stopped child waits for a request that goes on with it.
_KEPT_SECONDS = 60.0
# The entries of a request that say what is compiled, and how.
_COMPILATION = (
    "target",
    "slices",
    "order",
    "free_arguments",
    "free_results",
    "options",
    "is_tupled",
    "passes",
)
# The files that the child writes itself: the devices of a slice, the text and the
# memory of a compiled program, and libtpu's chatter.
_DEVICES = "devices.json"
_COMPILED = "compiled.txt"
_MEMORY = "memory.json"
_CHATTER = "stderr"
# The end of the name of the one module in text form that is read as soon as it is
# there.
_SCHEDULED = "after_optimizations_before_buffer_assignment.txt"
# The sizes of JAX's memory analysis. JAX 0.9 has no peak.
_SIZES = tuple(
    f"{name}_in_bytes"
    for name in (
        "argument_size",
        "output_size",
        "alias_size",
        "temp_size",
        "generated_code_size",
        "host_argument_size",
        "host_output_size",
        "host_temp_size",
        "host_alias_size",
        "peak_memory",
    )
)
# Options of a step that are no options of libtpu, but fields of XLA's build options.
_BUILD_OPTIONS = (
    "exec_time_optimization_effort",
    "memory_fitting_effort",
    "optimization_level",
    "memory_fitting_level",
)
# The configuration of a chip in which both of its cores are one device, for chips of
# which libtpu describes two devices otherwise. It is the one of a machine with such chips.
_CONFIGURATIONS = {"v4": "megacore"}
_TPUS = ("/dev/accel", "/dev/vfio/")
_MOST_BYTES_OF_ERROR = 60_000
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Answers requests until standard input ends. The arguments of the process are its
    folder, and the path of libtpu.

    A request is a line of JSON and a module. The answer is a line of JSON and the texts
    of the files that libtpu dumps.
    """
    folder, library = sys.argv[1:]
    # Ctrl-C in a terminal and a job's end are for the parent process: this one ends
    # with its standard input, and then removes its folder.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    lock = _locked(folder)
    _remove_abandoned(folder)
    os.putenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    os.putenv("TPU_SKIP_MDS_QUERY", "1")
    _write_chatter_to(folder, (2,))
    loading_error = _loaded(library)
    source = sys.stdin.buffer
    sink = sys.stdout.buffer
    # At most one child, stopped after its answer: the next request may let it go on.
    kept_children: list[_Child] = []
    while line := _next_line(source, kept_children):
        request = json.loads(line)
        module = source.read(request["size"])
        texts: list[bytes] = []
        error = loading_error
        if not loading_error:
            texts, error = _answer(module, request, folder, kept_children)
        answer = {"sizes": [len(text) for text in texts], "error": error}
        try:
            sink.write(json.dumps(answer).encode() + b"\n" + b"".join(texts))
            sink.flush()
        except BrokenPipeError:
            break
    _end_all(kept_children)
    # The parent removes the folder, too, unless it was killed.
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)
    os._exit(0)


def _locked(folder: str) -> int:
    """Locks a folder for as long as this process and its children live, and returns the
    lock's file descriptor.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def _remove_abandoned(folder: str) -> None:
    """Removes the folders of earlier processes that were killed with their parents. A
    folder without a lock is abandoned, unless it is so new that its process starts.
    """
    parent, own_name = os.path.split(folder)
    prefix = own_name[: own_name.rindex("-") + 1]
    for path in glob.glob(os.path.join(parent, f"{prefix}*")):
        with contextlib.suppress(OSError):  # another user's, or locked
            age_seconds = time.time() - os.stat(path).st_mtime
            if age_seconds > _STARTING_SECONDS:
                os.close(_locked(path))
                shutil.rmtree(path, ignore_errors=True)


def _loaded(library: str) -> str:
    """Loads libtpu, and returns an error text, or ""."""
    try:
        xla_client.load_pjrt_plugin_dynamically("tpu", library)
    except RuntimeError as error:
        return str(error)
    return ""


def _next_line(source: BinaryIO, kept_children: list["_Child"]) -> bytes:
    """The first line of the next request. The child in `kept_children`, if any, ends if
    there is none for some time.
    """
    if kept_children and not select.select([source], [], [], _KEPT_SECONDS)[0]:
        _end_all(kept_children)
    return source.readline()


def _answer(
    module: bytes,
    request: dict[str, Any],
    folder: str,
    kept_children: list["_Child"],
) -> tuple[list[bytes], str]:
    """The texts of the files that a request names, and an error text. A file that
    libtpu did not write is empty.

    After a request that "may go on", the child is stopped and kept in `kept_children`.
    It goes on if the next request asks for later files of the same compilation.
    """
    question = (module, *(request.get(name) for name in _COMPILATION))
    if kept_children and kept_children[0].question == question:
        child = kept_children.pop()
        os.kill(child.id, signal.SIGCONT)
    else:
        _end_all(kept_children)
        child = None
    try:
        if child is None:
            own_folder = tempfile.mkdtemp(dir=folder)
            child = _started(module, request, own_folder, question)
        error = _wait(child.folder, request, child.words_pipe)
        texts = [_text(child.folder, name) for name in request["files"]]
    except OSError as full_disk:
        texts = []
        error = str(full_disk)
    if child is not None:
        kept_children.append(child)
        if request["may_go_on"] and not error:
            os.kill(child.id, signal.SIGSTOP)
        else:
            _end_all(kept_children)
    return texts, error


class _Child(NamedTuple):
    """A child process that compiles.

    - `question`: what it compiles, and how.
    - `folder`: the folder to which libtpu dumps.
    - `words_pipe`: the pipe with its last words.
    """

    question: tuple[Any, ...]
    folder: str
    id: int
    words_pipe: int


def _started(
    module: bytes,
    request: dict[str, Any],
    folder: str,
    question: tuple[Any, ...] = (),
) -> _Child:
    """Starts a child process that compiles."""
    words_pipe, child_pipe = os.pipe()
    parent = os.getpid()
    child_id = os.fork()
    if not child_id:
        os.close(words_pipe)
        _compile(
            module=module,
            request=request,
            folder=folder,
            child_pipe=child_pipe,
            parent=parent,
        )
    os.close(child_pipe)
    return _Child(question=question, folder=folder, id=child_id, words_pipe=words_pipe)


def _end_all(children: list[_Child]) -> None:
    """Ends children, and removes their folders."""
    while children:
        child = children.pop()
        os.close(child.words_pipe)
        os.kill(child.id, signal.SIGKILL)
        os.waitpid(child.id, 0)
        shutil.rmtree(child.folder, ignore_errors=True)


def _wait(folder: str, request: dict[str, Any], words_pipe: int) -> str:
    """Waits until the file is there that libtpu writes after the requested ones, until
    the child ends, or until its time is over. Returns an error text, or "".
    `words_pipe` is the pipe with the last words of the child.
    """
    last_file = os.path.join(folder, request["last"])
    deadline = time.monotonic() + request["seconds"]
    while not _is_whole(last_file):
        if time.monotonic() > deadline:
            return f"libtpu had no answer in {request['seconds']:.0f} s"
        # The parent sends nothing before it has the answer, so standard input becomes
        # ready only when it ends.
        ready = select.select([words_pipe, 0], [], [], _LOOK_EVERY_SECONDS)[0]
        if 0 in ready:
            return "nobody waits for the answer"
        if words_pipe in ready:
            return _last_words(folder, words_pipe)
    return ""


def _is_whole(name: str) -> bool:
    """Whether the file whose path matches `name` is there; for a module, whether all of
    it is.
    """
    paths = glob.glob(name)
    if not paths:
        return False
    if name.endswith(".pb"):
        with open(paths[0], "rb") as file:
            return _beside("worker").module_in(file.read()) is not None
    if name.endswith(_SCHEDULED):
        # Only the end of a computation stands at the start of a line, and the entry is
        # the last one.
        with open(paths[0], "rb") as file:
            text = file.read()
        return text.rstrip().endswith(b"\n}") and b"\nENTRY " in text
    return True


@ft.lru_cache(maxsize=2)
def _beside(name: str) -> types.ModuleType:
    """The Python module of this name beside this file, loaded by its path."""
    path = os.path.join(os.path.dirname(__file__), f"{name}.py")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _last_words(folder: str, words_pipe: int) -> str:
    """The error text of a child that ends; "" if it compiled the module."""
    words = b""
    while part := os.read(words_pipe, 65_536):
        words += part
    if words.startswith(b"\0"):
        return ""
    return words.decode(errors="replace") or _chatter(folder)


def _chatter(folder: str) -> str:
    with open(os.path.join(folder, _CHATTER), "rb") as file:
        return f"libtpu aborted: {file.read()[-2000:].decode(errors='replace')}"


def _text(folder: str, name: str) -> bytes:
    """The text of the largest file whose name matches `name`. Beside the step's own
    module, libtpu may compile small ones.
    """
    paths = glob.glob(os.path.join(folder, name))
    if not paths:
        return b""
    with open(max(paths, key=os.path.getsize), "rb") as file:
        text = file.read()
    return _beside("worker").complete_text(text) if name.endswith(".pb") else text


def _compile(
    module: bytes,
    request: dict[str, Any],
    folder: str,
    child_pipe: int,
    parent: int,
) -> NoReturn:
    """Compiles the module in the child process, and ends the process. Writes a null
    byte to the pipe `child_pipe`, or an error text.
    """
    words = b"\0"
    # Nothing may be raised out of this block: the child would go on as a second parent.
    try:
        _end_with_parent(parent)
        # A stopped process in the group of the user's processes would let the kernel
        # hang all of them up when the first one ends.
        os.setpgid(0, 0)
        os.putenv("TPU_LOG_DIR", folder)
        _write_chatter_to(folder, (0, 1, 2))
        devices = _devices(request["target"], request["slices"])
        if request["order"] is None:
            _write_devices(devices, folder)
        else:
            client = devices[0].client
            by_id = {device.id: device for device in devices}
            chosen = [by_id[number] for number in request["order"]]
            executable = client.compile(
                ir.Module.parse(module, _beside("propagate").context_with_dialects()),
                executable_devices=xla_client.DeviceList(tuple(chosen)),
                compile_options=_options(request, folder),
            )
            _write_executable(executable, folder)
    # XLA's errors are RuntimeErrors, MLIR's are Exceptions of their own.
    except (RuntimeError, ValueError, TypeError, OSError, ir.MLIRError) as error:
        words = str(error).encode()[:_MOST_BYTES_OF_ERROR]
    finally:
        os.write(child_pipe, words)
        os._exit(0)


def _end_with_parent(parent: int) -> None:
    """Lets the kernel kill this child when its parent is killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # It may have been killed before.
    if os.getppid() != parent:
        os._exit(1)


def _write_chatter_to(folder: str, streams: tuple[int, ...]) -> None:
    """Sends standard streams to a file: libtpu writes warnings to standard error, and
    nothing may reach the standard output of the parent.
    """
    path = os.path.join(folder, _CHATTER)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in streams:
        os.dup2(file, stream)
    os.close(file)


def _devices(target: str, slices: int) -> list[Any]:
    """The devices of slices that are not there."""
    xla_client.initialize_pjrt_plugin("tpu")
    options: dict[str, Any] = {}
    if slices > 1:
        options["num_slices"] = slices
    chip, _, _ = target.partition(":")
    if chip in _CONFIGURATIONS:
        options["chip_config_name"] = _CONFIGURATIONS[chip]
    topology = xla_client.make_tfrt_tpu_c_api_device_topology(target, **options)
    _raise_if_tpus_are_open()
    return topology._make_compile_only_devices()


def _raise_if_tpus_are_open() -> None:
    """Raises `RuntimeError` if this process has a TPU of this machine open."""
    for number in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:  # the folder's own descriptor
            continue
        if path.startswith(_TPUS):
            raise RuntimeError(
                f"this libtpu opens {path}, a TPU of this machine, to compile; ask on a"
                " machine without TPUs"
            )


def _write_executable(executable: Any, folder: str) -> None:
    """Writes the text of a compiled program, and then libtpu's count of its memory."""
    modules = executable.hlo_modules()
    with open(os.path.join(folder, _COMPILED), "w") as file:
        file.write("\n\n".join(module.to_string() for module in modules))
    stats = executable.get_compiled_memory_stats()
    sizes = {name: getattr(stats, name) for name in dir(stats) if name in _SIZES}
    _write_json(sizes, os.path.join(folder, _MEMORY))


def _write_json(value: Any, path: str) -> None:
    """Writes a file that is whole as soon as it has this name."""
    with open(f"{path}.part", "w") as file:
        json.dump(value, file)
    os.rename(f"{path}.part", path)


def _write_devices(devices: list[Any], folder: str) -> None:
    """Writes the devices of a slice, with the attributes of JAX's own."""
    rows = [
        {
            "id": device.id,
            "process_index": device.process_index,
            "coords": list(device.coords),
            "core_on_chip": device.core_on_chip,
            "slice_index": getattr(device, "slice_index", 0),
            "device_kind": device.device_kind,
        }
        for device in devices
    ]
    _write_json(rows, os.path.join(folder, _DEVICES))


def _options(request: dict[str, Any], folder: str) -> Any:
    """JAX's options of a compilation, with the dumps that are read."""
    count = len(request["order"])
    options = xla_client.CompileOptions()
    # JAX's value for a program without a profile.
    options.profile_version = -1
    options.parameter_is_tupled_arguments = request["is_tupled"]
    build = options.executable_build_options
    build.num_replicas = 1
    build.num_partitions = count
    build.use_spmd_partitioning = True
    build.use_shardy_partitioner = True
    build.allow_spmd_sharding_propagation_to_parameters = request["free_arguments"]
    build.allow_spmd_sharding_propagation_to_output = request["free_results"]
    build.device_assignment = xla_client.DeviceAssignment.create(
        np.array(request["order"]).reshape(1, count)
    )
    libtpu_options = []
    for name, value in request["options"]:
        if name in _BUILD_OPTIONS:
            setattr(build, name, value)
        else:
            libtpu_options.append((name, value))
    options.env_option_overrides = libtpu_options
    debug = build.debug_options
    debug.xla_dump_to = folder
    debug.xla_dump_hlo_as_text = True
    debug.xla_dump_hlo_pass_re = request["passes"]
    # The file that is waited for is a message then.
    debug.xla_dump_hlo_as_proto = request["last"].endswith(".pb")
    return options


if __name__ == "__main__":
    main()

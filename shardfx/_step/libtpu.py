"""libtpu's own texts of a step, without its code generation and without a TPU.

libtpu runs in a second process (`libtpu_worker.py`). It describes a slice that is not
there, compiles a module for it, and dumps its texts. Code generation comes after all of
them, and is not waited for.
"""

import dataclasses
import functools as ft
import importlib.metadata
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .._ground.errors import MeshError, ProgramError
from .._ground.text import bytes_text
from .process import Worker


_WORKER = Path(__file__).with_name("libtpu_worker.py")
_SECONDS = 600.0
# The same with code generation.
_SECONDS_OF_CODE = 7200.0
# How libtpu's error begins if a program does not fit. It is raised after the texts are
# dumped.
_FULL = "RESOURCE_EXHAUSTED"
# The names of the files that libtpu dumps, in the order in which it writes them. The
# last one shows that the others are whole.
_SCHEDULED = "*.after_optimizations_before_buffer_assignment.txt"
_ASSIGNMENT = "*.after_optimizations-buffer-assignment.txt"
_RANGES = "*.after_optimizations-live-range.txt"
_REPORT = "*.after_optimizations-memory-usage-report.txt"
_DUMPS = (_SCHEDULED, _ASSIGNMENT, _RANGES, _REPORT)
_AFTER = "*.after_optimizations_after_buffer_assignment.txt"
_PARTITIONER = "tpu-spmd-partitioning"
_PARTITIONED = f"*.after_{_PARTITIONER}*.pb"
_NO_PASS = "$^"
# JAX passes more arguments than these to a TPU's program as one tuple:
# `should_tuple_args` in jax/_src/dispatch.py.
_MOST_ARGUMENTS = 2000


class TpuSlice(NamedTuple):
    """The slices that a program is compiled for.

    - `name`: libtpu's name of one slice, such as "v5e:4x4".
    - `slices`: the number of such slices.
    """

    name: str
    slices: int = 1


class TpuProgram(NamedTuple):
    """A program to compile.

    - `module`: the StableHLO module as bytecode.
    - `free_arguments`, `free_results`: for each argument and each result, whether the
      compiler chooses its sharding.
    - `options`: the `compiler_options` with which the step was jitted.
    """

    module: bytes
    free_arguments: tuple[bool, ...]
    free_results: tuple[bool, ...]
    options: tuple[tuple[str, Any], ...] = ()


@dataclasses.dataclass(frozen=True)
class TpuDevice:
    """A device of a slice that is not there, with the attributes of JAX's own."""

    id: int
    process_index: int
    coords: tuple[int, ...]
    core_on_chip: int
    slice_index: int
    device_kind: str
    platform: str = "tpu"


class TpuTexts(NamedTuple):
    """What libtpu dumps of a program. `out_of_memory` is its error for a program that
    does not fit, or "".

    - `scheduled`: the optimized HLO module in the order in which it runs.
    - `assignment`: the allocations of memory, and the values in each.
    - `ranges`: the order of the instructions, and the live range of each value.
    - `report`: the bytes of each memory space.
    """

    scheduled: str
    assignment: str
    ranges: str
    report: str
    out_of_memory: str


def libtpu_path() -> str | None:
    """The path of libtpu, or `None` if it is not installed."""
    spec = importlib.util.find_spec("libtpu")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).with_name("libtpu.so")
    return str(path) if path.is_file() else None


@ft.lru_cache(maxsize=64)
def devices_of_slices(slices: TpuSlice) -> tuple[TpuDevice, ...]:
    """The devices of slices that are not there. Raises `MeshError` if libtpu knows no
    such slice.
    """
    request = {"order": None, "last": "devices.json", "files": ["devices.json"]}
    (text,), error = _asked(b"", slices, request)
    if error or not text:
        raise MeshError(
            f"there is no description of the TPU topology {slices.name!r}: {error:.600}."
            " Write it as `v5p:8x8x8`."
        )
    return tuple(
        TpuDevice(**row | {"coords": tuple(row["coords"])}) for row in json.loads(text)
    )


def tpu_texts(
    program: TpuProgram,
    slices: TpuSlice,
    order: Sequence[int],
    *,
    seconds: float = _SECONDS,
) -> TpuTexts:
    """What libtpu dumps of a program.

    **Arguments:**

    - `program`: the program.
    - `slices`: the slices to compile for.
    - `order`: the ids of the devices in the order of the mesh.
    - `seconds`: the time that libtpu may take.

    **Raises:**

    `ProgramError` with libtpu's own message if it cannot compile the module.
    """
    request = _compilation(program, order, seconds) | {
        "last": _AFTER,
        "files": _DUMPS,
    }
    texts, error = _asked(program.module, slices, request)
    return _tpu_texts(texts, error, slices)


@dataclasses.dataclass(frozen=True, eq=False)
class TpuDumps:
    """What libtpu dumps of a program, which it is asked for when it is read. The fields
    and errors are those of `tpu_texts`.
    """

    program: TpuProgram
    slices: TpuSlice
    order: tuple[int, ...]

    @ft.cached_property
    def texts(self) -> TpuTexts:
        """All texts."""
        return tpu_texts(self.program, self.slices, self.order)

    @ft.cached_property
    def scheduled(self) -> str:
        """The scheduled module alone. It is there before libtpu assigns memory, so it
        takes two thirds of the time. If all texts are read then, libtpu goes on.
        """
        if "texts" in vars(self):
            return self.texts.scheduled
        request = _compilation(self.program, self.order, _SECONDS) | {
            "last": _SCHEDULED,
            "files": [_SCHEDULED],
            "may_go_on": True,
        }
        (text,), error = _asked(self.program.module, self.slices, request)
        if not text or (error and not error.startswith(_FULL)):
            raise _cannot(
                verb="compile",
                slices=self.slices,
                error=error,
                names=request["files"],
                texts=[text],
            )
        return text.decode()


@ft.lru_cache(maxsize=2)
def recent_tpu_dumps(
    program: TpuProgram,
    slices: TpuSlice,
    order: tuple[int, ...],
) -> TpuDumps:
    """The dumps of a program. Those of the last two are kept: `estimate` and `fit` of
    one step ask about the same program, and libtpu takes 85 processor seconds for 48
    unrolled layers.
    """
    return TpuDumps(program=program, slices=slices, order=order)


def _tpu_texts(texts: Sequence[bytes], error: str, slices: TpuSlice) -> TpuTexts:
    """What libtpu dumped, from the texts of the files `_DUMPS` and its error text.
    Raises `ProgramError` if a text is missing, or for an error that is not of memory.
    """
    is_full = error.startswith(_FULL)
    if (error and not is_full) or not all(texts):
        raise _cannot(
            verb="compile", slices=slices, error=error, names=_DUMPS, texts=texts
        )
    scheduled, assignment, ranges, report = (text.decode() for text in texts)
    return TpuTexts(
        scheduled=scheduled,
        assignment=assignment,
        ranges=ranges,
        report=report,
        out_of_memory=error,
    )


class TpuCompiled(NamedTuple):
    """A compiled program.

    - `text`: the text of its optimized HLO module.
    - `sizes`: the bytes of its memory analysis, by JAX's names.
    - `texts`: what libtpu dumped of it.
    """

    text: str
    sizes: dict[str, int]
    texts: TpuTexts


def tpu_compiled(
    program: TpuProgram,
    slices: TpuSlice,
    order: Sequence[int],
) -> TpuCompiled | TpuTexts:
    """A program that libtpu compiles to the end; what it dumped, of a program that does
    not fit. The arguments and errors are those of `tpu_texts`.
    """
    request = _compilation(program, order, _SECONDS_OF_CODE) | {
        "last": "memory.json",
        "files": [*_DUMPS, "compiled.txt", "memory.json"],
    }
    texts, error = _asked(program.module, slices, request)
    dumped = _tpu_texts(texts[: len(_DUMPS)], error, slices)
    if dumped.out_of_memory:
        return dumped
    text, sizes = texts[len(_DUMPS) :]
    if not sizes:
        raise ProgramError(f"libtpu did not compile this step for {slices.name}.")
    return TpuCompiled(text=text.decode(), sizes=json.loads(sizes), texts=dumped)


def tpu_partitioned(
    program: TpuProgram,
    slices: TpuSlice,
    order: Sequence[int],
) -> str:
    """The HLO text of one device's program as libtpu's own partitioner leaves it, with
    all numbers of its constants. The arguments and errors are those of `tpu_texts`.
    """
    request = _compilation(program, order, _SECONDS) | {
        "last": _PARTITIONED,
        "files": [_PARTITIONED],
        "passes": _PARTITIONER,
    }
    texts, error = _asked(program.module, slices, request)
    if not all(texts):
        raise _cannot(
            verb="partition",
            slices=slices,
            error=error,
            names=request["files"],
            texts=texts,
        )
    return texts[0].decode()


def _compilation(
    program: TpuProgram,
    order: Sequence[int],
    seconds: float,
) -> dict[str, Any]:
    """The part of a request that says how a program is compiled, as JAX does it."""
    return {
        "order": list(order),
        "free_arguments": program.free_arguments,
        "free_results": program.free_results,
        "options": program.options,
        "is_tupled": is_tupled(len(program.free_arguments)),
        "seconds": seconds,
    }


def is_tupled(arguments: int) -> bool:
    """Whether a TPU's program takes its arguments as one tuple, from their number."""
    return arguments > _MOST_ARGUMENTS


def _cannot(
    verb: str,
    slices: TpuSlice,
    error: str,
    names: Sequence[str],
    texts: Sequence[bytes],
) -> ProgramError:
    """The error if libtpu says `error`, or does not write the texts with these names."""
    if not error:
        missing = [name for name, text in zip(names, texts, strict=True) if not text]
        version = importlib.metadata.version("libtpu")
        folder = tempfile.gettempdir()
        free = bytes_text(shutil.disk_usage(folder).free)
        error = (
            f"libtpu {version} writes no {', '.join(missing)}; {folder} has {free} left,"
            " where it writes them: free some, or set TMPDIR to another folder."
        )
    return ProgramError(f"libtpu cannot {verb} this step for {slices.name}: {error}")


def _asked(
    module: bytes,
    slices: TpuSlice,
    request: dict[str, Any],
) -> tuple[list[bytes], str]:
    """The texts of the files that a request names, and an error text."""
    path = libtpu_path()
    if path is None:
        raise MeshError(
            "libtpu is not installed; install it with `pip install 'shardfx[aot]'`."
        )
    worker = _worker(path, os.getpid())
    if not worker.is_alive:
        worker.end()
        _worker.cache_clear()
        worker = _worker(path, os.getpid())
    defaults = {"seconds": _SECONDS, "passes": _NO_PASS, "may_go_on": False}
    question = {"target": slices.name, "slices": slices.slices}
    texts, error = worker.ask(module, defaults | question | request)
    return texts or [b""] * len(request["files"]), error.strip()


@ft.lru_cache(maxsize=1)
def _worker(library: str, _process_id: int) -> Worker:
    """The process that asks libtpu for the Python process with this id. A forked child
    starts its own.
    """
    folder = tempfile.mkdtemp(prefix="shardfx-libtpu-")
    return Worker([str(_WORKER), folder, library], folder)

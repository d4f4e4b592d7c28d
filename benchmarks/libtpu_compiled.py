"""`python -m benchmarks.libtpu_compiled whole|full|times`: what libtpu says when it is
asked, against full compilations, and the seconds that it takes.

`whole` compiles `--count` sealed steps of `benchmarks.unseen` to the end, for 16 chips
of each of `--chips`, those first that v5e compiled fastest. `full` asks about steps that
do not fit, and compiles them by JAX's own way. `times` asks about 126 scanned layers
and about 48 unrolled ones with AdamW. The numbers are saved in
`benchmarks/results/libtpu-compiled.json` after each step, so that it resumes.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from shardfx import chips
from shardfx._step import libtpu, process, step_of
from shardfx.cost import compile_for, estimate, fit, traffic
from shardfx.cost._libtpu import target_of
from shardfx.errors import OutOfMemoryError
from shardfx.interop import tpu

from ._step_plans import LAYOUTS, Planned, planned
from ._steps import STUDY, STUDY_EXPERTS, Sizes, Way
from .unseen import _sealed
from .unseen.judge import mesh_of
from .unseen.measure import RESULTS, versions


_FILE = RESULTS / "libtpu-compiled.json"
_V5E: dict[str, Any] = json.loads((RESULTS / "unseen-v5e.json").read_text())["cases"]
# Sequences in the batch of the steps that do not fit. The study has 16.
_BATCH = 4096
_SLICE = "tpu:v5e:4x4"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.libtpu_compiled", description=__doc__
    )
    parser.add_argument("what", choices=["whole", "full", "times"])
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--chips", nargs="*", default=["v5p", "v6e"])
    flags = parser.parse_args(arguments)
    jax.config.update("jax_platforms", "cpu")

    if _FILE.exists():
        document = json.loads(_FILE.read_text())
    else:
        document = {}
    document["versions"] = versions()
    records = document.setdefault(flags.what, {})
    if flags.what == "whole":
        steps = whole(records, flags.chips, flags.count)
    else:
        if flags.what == "full":
            steps = full(records)
        else:
            steps = times(records)
    for name, record in steps:
        records[name] = record
        _FILE.write_text(json.dumps(document, indent=1) + "\n")
        print(name, record, flush=True)
    return 0


def whole(
    records: dict[str, Any], chip_names: Sequence[str], count: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the bytes of sealed steps as libtpu says them when it is asked, and as
    they are in the compiled program.
    """
    compiled_on_v5e = [
        case for case in _sealed.CASES if "compile_seconds" in _V5E[case.name]
    ]
    fastest = sorted(
        compiled_on_v5e, key=lambda case: _V5E[case.name]["compile_seconds"]
    )
    for case in fastest[:count]:
        for chip_name in chip_names:
            name = f"{chip_name} {case.name}"
            if name not in records:
                step, args = case.make(mesh_of({"mesh": case.v5e}))
                yield name, _both(step, args, chip_name)


def _both(step: Any, args: Any, chip_name: str) -> dict[str, Any]:
    target = target_of(chips.find(chip_name), step_of(step, args).mesh)
    assert target is not None
    begin = time.perf_counter()
    sent = estimate(step, *args, compiler=f"tpu:{chip_name}")
    memory = fit(step, *args, chip=chip_name)
    asked_seconds = time.perf_counter() - begin
    assert sent.basis == memory.basis == "compiled"

    begin = time.perf_counter()
    program = compile_for(step, *args, target=f"tpu:{target.slices.name}")
    compiled_seconds = time.perf_counter() - begin
    return {
        "slice": target.slices.name,
        "wire_bytes": sent.wire_bytes,
        "compiled_wire_bytes": traffic(program).wire_bytes,
        "hbm_bytes": memory.peak_bytes,
        "compiled_hbm_bytes": fit(program, chip=chip_name).peak_bytes,
        "asked_twice_seconds": round(asked_seconds, 2),
        "compiled_seconds": round(compiled_seconds, 2),
    }


def full(records: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the bytes that steps need that do not fit v5e, as `fit` says them, and as
    the error of JAX's own compilation does.
    """
    devices = tpu.devices_of(_SLICE)
    for name, layout in LAYOUTS.items():
        if name in records:
            continue
        sizes = STUDY_EXPERTS if layout.experts else STUDY
        sizes = dataclasses.replace(sizes, layers=2, batch=_BATCH)
        made = planned(sizes, Way(scan=True, remat=False), layout)
        found = fit(made.jitted, *made.args, chip="v5e")
        record: dict[str, Any] = {
            "fits": found.fits,
            "peak_bytes": found.peak_bytes,
            "peak_gib": _as_libtpu_prints(found.peak_bytes),
            "error": found.out_of_memory[:200],
        }
        try:
            compile_for(made.jitted, *made.args, target=devices)
            record["compiled_fits"] = True
        except OutOfMemoryError as error:
            record["compiled_fits"] = False
            needed = error.needed_bytes
            if needed is None:
                record["compiled_gib"] = None
            else:
                record["compiled_gib"] = round(needed / 2**30, 2)
        yield name, record


def _as_libtpu_prints(size: int) -> float:
    """The GiB of a size as libtpu's messages print it: whole MiB, divided by 1,024
    (`HumanReadableNumBytes` in tsl/platform/numbers.cc).
    """
    mebibytes = size // 2**20
    return round(mebibytes / 2**10, 2)


def times(records: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the seconds of `estimate` and `fit` of deep steps. Both ask anew, and then
    `fit` reads what was asked.
    """
    shapes = {
        "126 scanned layers": (126, Way(scan=True, remat=True)),
        "48 unrolled layers with AdamW": (48, Way(scan=False, remat=True)),
    }
    warm_up = planned(Sizes(), Way(), LAYOUTS["fsdp"])
    estimate(warm_up.jitted, *warm_up.args, compiler="tpu:v5e")
    for name, (layers, strategy) in shapes.items():
        sizes = dataclasses.replace(STUDY, layers=layers)
        made = planned(sizes, strategy, LAYOUTS["fsdp x tp"])
        for question in ("estimate", "fit"):
            libtpu.recent_tpu_dumps.cache_clear()
            record_name = f"{question} of {name}"
            if record_name not in records:
                yield record_name, _seconds(question, made)
        record_name = f"fit after fit of {name}"
        if record_name not in records:
            yield record_name, _seconds("fit", made)


def _seconds(question: str, made: Planned) -> dict[str, Any]:
    """The seconds of a question, how many of them pass in compilers' processes, and the
    processor seconds of both. The latter say more on a busy machine.
    """
    with _asking() as asked:
        begin = time.perf_counter()
        own_begin = time.process_time()
        compilers_begin = _processor_seconds_of_compilers()
        if question == "estimate":
            estimate(made.jitted, *made.args, compiler="tpu:v5e")
        else:
            fit(made.jitted, *made.args, chip="v5e")
        seconds = time.perf_counter() - begin
    own_seconds = time.process_time() - own_begin
    compiler_seconds = _processor_seconds_of_compilers() - compilers_begin
    return {
        "seconds": round(seconds, 2),
        "in compilers": round(sum(asked), 2),
        "own processor seconds": round(own_seconds, 2),
        "processor seconds of compilers": round(compiler_seconds, 2),
    }


def _processor_seconds_of_compilers() -> float:
    """The processor seconds of the processes that ask compilers, with their children."""
    own = os.getpid()
    ticks = 0
    text = Path(f"/proc/{own}/task/{own}/children").read_text()
    for process_id in text.split():
        # Behind the name in parentheses, fields 14 to 17 of proc(5).
        stat = Path(f"/proc/{process_id}/stat").read_text()
        fields = stat.rpartition(")")[2].split()
        ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def _asking() -> Iterator[list[float]]:
    """The seconds of each question to a compiler's process within the block."""
    seconds: list[float] = []
    ask = process.Worker.ask

    def timed(
        self: process.Worker, module: bytes, request: dict[str, object]
    ) -> tuple[list[bytes], str]:
        begin = time.perf_counter()
        try:
            return ask(self, module, request)
        finally:
            seconds.append(time.perf_counter() - begin)

    process.Worker.ask = timed
    try:
        yield seconds
    finally:
        process.Worker.ask = ask


if __name__ == "__main__":
    sys.exit(main())

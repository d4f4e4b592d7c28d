"""What a step sends: estimated from its jaxpr, against what compilers for CPUs and TPUs
make of it.
"""

import argparse
import dataclasses
import functools as ft
import gzip
import math
import os
import statistics
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from shardfx import MeshSpec, plan
from shardfx._cli import demo
from shardfx.cost import Traffic, compare, estimate, traffic

from ._case import Apart, Entry, Finding, Limit, Value
from ._machine import fresh_process
from ._runner import Options
from ._step_plans import LAYOUTS, Layout, Planned, planned, random_layout
from ._steps import LARGE, MIDDLE, MIDDLE_EXPERTS, STUDY, STUDY_EXPERTS, Sizes, Way


SUMMARY = (
    "bytes that enter a device in a step: estimated without compiling, against the"
    " compiled program's"
)
WAYS = {
    "scan": Way(),
    "scan, remat": Way(remat=True),
    "unrolled": Way(scan=False),
    "unrolled, remat": Way(scan=False, remat=True),
}
QUICK = ("fsdp", "tp + sp")
WITHIN = 10


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--aot",
        metavar="tpu:TOPOLOGY",
        help="by the TPU compiler, as in tpu:v5e:4x4; minutes a plan",
    )
    parser.add_argument(
        "--plans", default=",".join(LAYOUTS), help="with --aot: which plans, by commas"
    )
    parser.add_argument(
        "--programs",
        metavar="DIR",
        help="with --aot: keep compiled programs there, and compile no more",
    )


def cases(options: Options) -> list[Entry]:
    flags = options.flags
    if flags.aot:
        arguments = {
            "aot": flags.aot,
            "names": flags.plans.split(","),
            "programs": flags.programs,
        }
        return [
            Finding(
                f"estimate against the {flags.aot.removeprefix('tpu:')} compiler, 2"
                " scanned layers, bf16",
                lambda: fresh_process(
                    "benchmarks.cost:on_tpu", arguments, timeout_seconds=14400
                ),
                (Limit("worst dense plan, % off", at_most=10),),
            )
        ]
    return [
        Apart(
            "estimate against compiled, 16 devices", "benchmarks.cost:on_sixteen", 16
        ),
        _speed(),
    ]


def on_sixteen(options: Options) -> list[Entry]:
    """The cases that compile for 16 emulated devices."""
    if options.quick:
        ways = {"scan, remat": WAYS["scan, remat"]}
    else:
        ways = WAYS
    names = QUICK if options.quick else tuple(LAYOUTS)
    layers = 2 if options.quick else MIDDLE.layers
    entries: list[Entry] = [
        Finding(
            f"{len(names)} plans, {name}",
            ft.partial(_plans, strategy, names, layers, options.devices),
            (Limit("worst dense plan, % off", at_most=5),),
        )
        for name, strategy in ways.items()
    ]
    count = 1 if options.quick else 20
    return [
        *entries,
        Finding(
            "the demo's transformer",
            ft.partial(_demo, options.devices),
            (Limit("% off", at_most=5),),
        ),
        Finding(
            f"{count} random assignments",
            ft.partial(_random, count, options.devices),
            (Limit("median, % off", at_most=10),),
        ),
    ]


def _plans(
    strategy: Way, names: Sequence[str], layers: int, devices: list[Any]
) -> dict[str, Value]:
    values = {}
    worst = 0.0
    for name in names:
        layout = LAYOUTS[name]
        sizes = dataclasses.replace(
            MIDDLE_EXPERTS if layout.experts else MIDDLE, layers=layers
        )
        planned_step = planned(sizes, strategy, layout, devices)
        ours, theirs = _both(planned_step)
        values |= _described(name, ours, theirs, theirs.wire_bytes)
        if not layout.experts:
            worst = max(worst, abs(_off(ours, theirs.wire_bytes)))
    return values | {"worst dense plan, % off": worst}


def _both(planned_step: Planned) -> tuple[Traffic, Traffic]:
    estimated = estimate(planned_step.jitted, *planned_step.args, compiler="cpu")
    return estimated, traffic(planned_step.lowered().compile())


def _off(ours: Traffic, compiled_bytes: float) -> float:
    if compiled_bytes:
        return 100 * (ours.wire_bytes / compiled_bytes - 1)
    return 0.0


def _described(
    name: str, ours: Traffic, theirs: Traffic, compiled_bytes: float
) -> dict[str, Value]:
    off = _off(ours, compiled_bytes)
    values: dict[str, Value] = {
        f"{name}, compiled MB": compiled_bytes / 1e6,
        f"{name}, % off": off,
    }
    if abs(off) > 1:
        values[f"{name}, why"] = _explained(ours, theirs)
    return values


def _explained(ours: Traffic, theirs: Traffic) -> str:
    """The line with the largest difference, and what it is like."""
    rows = compare(ours, theirs).rows
    if not rows:
        return ""
    row = rows[0]
    line = "" if row.source is None else f" at {row.source.function}"
    return f"{row.why}{line}: +{row.extra_bytes / 1e6:.1f} MB"


def _demo(devices: list[Any]) -> dict[str, Value]:
    """One step of plain gradient descent on the demo's model, by its own rules."""
    import equinox as eqx

    axes = {"data": 2, "fsdp": 4, "tensor": 2}
    mesh = MeshSpec(axes).build(devices)
    model = eqx.filter_eval_shape(demo.Transformer, key=jax.random.key(0))
    ours = plan(model, mesh, axes=demo.AXIS_RULES)
    struct = jax.ShapeDtypeStruct((32, 65), jnp.int32)
    text = plan(
        struct,
        mesh,
        names=("batch", None),
        axes=demo.AXIS_RULES,
        unused="allow",
    )

    def step(model: Any, text: Any) -> Any:
        gradients = jax.grad(demo.loss)(model, text, ours)
        return jax.tree.map(lambda a, b: a - 1e-3 * b, model, gradients)

    in_shardings = (ours.shardings, text.shardings)
    jitted = jax.jit(
        step,
        in_shardings=in_shardings,
        out_shardings=ours.shardings,
    )
    estimated = estimate(jitted, ours.structs, text.structs, compiler="cpu")
    compiled = jitted.lower(ours.structs, text.structs).compile()
    theirs = traffic(compiled)
    off = _off(estimated, theirs.wire_bytes)
    return {
        "compiled MB": theirs.wire_bytes / 1e6,
        "estimated MB": estimated.wire_bytes / 1e6,
        "% off": abs(off),
        "why": _explained(estimated, theirs),
    }


def _random(count: int, devices: list[Any]) -> dict[str, Value]:
    """Three axes of 2, 2 and 4 devices cut what is drawn. Most of it makes no sense,
    which compilers take worst.
    """
    errors = []
    signed = []
    for seed in range(count):
        planned_step = planned(
            dataclasses.replace(MIDDLE, layers=2), Way(), random_layout(seed), devices
        )
        ours, theirs = _both(planned_step)
        off = _off(ours, theirs.wire_bytes)
        errors.append(abs(off))
        signed.append(f"{off:+.1f}")
    return {
        "median, % off": statistics.median(errors),
        "worst, % off": max(errors),
        f"more than {WITHIN} % off": sum(error > WITHIN for error in errors),
        "each, %": ", ".join(signed),
    }


def _speed() -> Finding:
    def measure() -> dict[str, Value]:
        planned_step = planned(LARGE, Way(remat=True), LAYOUTS["fsdp x tp"])
        times = []
        rows = ()
        for _ in range(3):
            jax.clear_caches()
            begin = time.process_time()
            rows = estimate(planned_step.jitted, *planned_step.args).rows
            times.append(time.process_time() - begin)
        return {
            "seconds of processor time": statistics.median(times),
            "rows": len(rows),
        }

    limits = (Limit("seconds of processor time", at_most=1.0),)
    return Finding("estimating 126 scanned layers, traced anew", measure, limits)


def on_tpu(aot: str, names: Iterable[str], programs: str | None) -> dict[str, Value]:
    """In a process of its own: plans by the compiler of a TPU that is not there."""
    # Else libtpu looks for a metadata server for minutes, and refuses a second process
    # beside the first.
    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    jax.config.update("jax_platforms", "cpu")
    values = {}
    worst = 0.0
    for name in names:
        layout = LAYOUTS[name]
        sizes = dataclasses.replace(
            STUDY_EXPERTS if layout.experts else STUDY, layers=2
        )
        planned_step = planned(sizes, Way(), layout)
        ours = estimate(planned_step.jitted, *planned_step.args)
        theirs = traffic(
            _program(
                aot,
                sizes,
                layout,
                None if programs is None else Path(programs, f"{name}.txt.gz"),
            ),
            layout.mesh,
        )
        as_gathers = sum(_without_window(row, layout) for row in theirs.rows)
        values |= _described(name, ours, theirs, as_gathers)
        values[f"{name}, compiled MB, windows as they are"] = theirs.wire_bytes / 1e6
        if not layout.experts:
            worst = max(worst, abs(_off(ours, as_gathers)))
    return values | {"worst dense plan, % off": worst}


def _program(aot: str, sizes: Sizes, layout: Layout, cache: Path | None) -> str:
    if cache is not None and cache.exists():
        return gzip.decompress(cache.read_bytes()).decode()
    from jax.experimental import topologies

    platform, _, topology = aot.partition(":")
    devices = topologies.get_topology_desc(
        platform=platform, topology_name=topology
    ).devices
    compiled = planned(sizes, Way(), layout, devices).lowered().compile()
    text = compiled.as_text()
    if cache is not None:
        cache.parent.mkdir(parents=True, exist_ok=True)
        cache.write_bytes(gzip.compress(text.encode(), mtime=0))
    return text


def _without_window(row: Any, layout: Layout) -> float:
    """A ring of permutes that adds up sends n + 1 pieces where a reduction that
    scatters sends n - 1.
    """
    count = math.prod(layout.axes[axis] for axis in row.axes)
    is_ring = row.windowed and row.kind == "reduce-scatter"
    if is_ring:
        return row.wire_bytes * (count - 1) / (count + 1)
    return row.wire_bytes

"""The choice of mesh and rules: how fast, how well it ranks, and whether it beats what
people write by hand.
"""

import argparse
import functools as ft
import math
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import shardfx as sfx
from shardfx.auto import Limits
from shardfx.auto._asked import EMULATED, search_options, trace
from shardfx.auto._core import assignment_count, find
from shardfx.auto._mesh_sizes import sizes_and_slices
from shardfx.auto._namer import named_classes
from shardfx.auto._space import Space

from . import search_answers, search_hands, search_order
from ._case import Entry, Finding, Limit, Value
from ._llama import llama
from ._runner import Options


SUMMARY = (
    "search: candidates per second, seconds of a whole search, and its order against"
    " compiled and timed steps"
)
_BY_HAND = {
    "dp": [("batch", "a")],
    "fsdp": [("batch", "a"), ("embed", "a")],
    "tp": [("heads", "a"), ("mlp", "a"), ("vocab", "a")],
    "dp x tp": [("batch", "a"), ("heads", "b"), ("mlp", "b"), ("vocab", "b")],
    "fsdp x tp": [
        ("batch", "a"),
        ("embed", "a"),
        ("heads", "b"),
        ("mlp", "b"),
        ("vocab", "b"),
    ],
}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--hands",
        action="store_true",
        help="only the table against rules by hand, which goes on",
    )
    parser.add_argument(
        "--slice", default="cpu:8", help="of that table, as tpu:v5e:4x4"
    )
    parser.add_argument(
        "--models", default="", help="of that table: those with this in their names"
    )
    parser.add_argument(
        "--answered",
        action="store_true",
        help="of that table: what `search` answers, not compiled before",
    )
    parser.add_argument(
        "--clock",
        action="store_true",
        help="of that table: small models, run on these devices",
    )
    parser.add_argument(
        "--candidates",
        type=int,
        default=40,
        help="candidates that are compiled for the order",
    )


def cases(options: Options) -> list[Entry]:
    if options.flags.hands:
        flags = options.flags
        return search_hands.cases(
            flags.slice, flags.models, flags.clock, flags.answered
        )
    entries: list[Entry] = [
        Finding(
            "speed of the core, 256 devices",
            _speed,
            (Limit("million candidates per second", at_least=1.0),),
        ),
        Finding(
            "search, 126 layers, 256 devices",
            ft.partial(_seconds, 256, 1),
            (Limit("seconds", at_most=10.0),),
        ),
    ]
    if not options.quick:
        entries.append(
            Finding(
                "search, 126 layers, 8,192 devices",
                ft.partial(_seconds, 8192, 1),
                (Limit("seconds", at_most=60.0),),
            )
        )
    entries.append(Finding("known answers", _known, (Limit("right", at_least=4.0),)))
    entries.append(
        Finding(
            "published answers", search_answers.answers, (Limit("right", at_least=3.0),)
        )
    )
    if len(options.devices) >= 8 and not options.quick:
        entries += [
            *search_order.cases(options.flags.candidates, options.devices[:8]),
            Finding(
                "chosen plan against plans by hand, step times on 8 devices",
                ft.partial(_against_hands, options),
                (Limit("best by hand over chosen", at_least=0.98),),
            ),
        ]
    return entries


def _large() -> tuple[Any, ...]:
    return llama(
        layers=126,
        width=16384,
        hidden=53248,
        kv=8,
        group=16,
        head=128,
        vocab=128256,
        batch=512,
        length=4096,
    )


def _small() -> tuple[Any, ...]:
    return llama(
        layers=4,
        width=128,
        hidden=512,
        kv=8,
        group=1,
        head=16,
        vocab=1024,
        batch=16,
        length=64,
        dtype=jnp.float32,
    )


def _speed() -> dict[str, Value]:
    """The estimate of all candidates as a search makes it; by the wall clock, median of
    5.
    """
    step, *args = _large()
    classes = named_classes(trace(step, *args))
    space = Space(classes=classes, hardware=search_options(256, "v5p"), limits=Limits())
    machine = space.machine()
    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        find(space.terms, machine, 256)
        seconds.append(time.perf_counter() - begin)
    shares = [sizes_and_slices(256, axes, 1) for axes in range(1, 5)]
    assignments = assignment_count(space.terms, shares)
    count = sum(
        math.comb(assignments, axes) * len(sizes)
        for axes, (sizes, _) in enumerate(shares, start=1)
    )
    return {
        "million candidates per second": count / statistics.median(seconds) / 1e6,
        "candidates": count,
        "assignments": assignments,
        "seconds": statistics.median(seconds),
    }


def _seconds(devices: int, slices: int) -> dict[str, Value]:
    jax.clear_caches()
    model = _large()
    begin = time.perf_counter()
    used = time.process_time()
    candidates = sfx.auto.search(*model, devices=devices, chip="v5p", slices=slices)
    return {
        "seconds": time.perf_counter() - begin,
        "processor seconds": time.process_time() - used,
        "chosen": candidates[0].title,
        "ms a step": candidates[0].seconds * 1e3,
        "GiB a device": candidates[0].memory_bytes / 2**30,
    }


def _known() -> dict[str, Value]:
    """Answers that textbooks give: each is 1 where the search finds it."""
    mlp = ft.partial(_mlp, 8192, 32768)
    search_result = sfx.auto.search(*mlp(64), devices="tpu:v5p:2x2x2")
    few = search_result[0]
    search_result = sfx.auto.search(*mlp(2**20), devices="tpu:v5p:2x2x2")
    many = search_result[0]
    agreements = {
        # Few rows against large matrices: what a device sends of activations is little,
        # of weights much.
        "few rows: tensor": int(all("mlp" in names for _, names in few.assignments)),
        "many rows: data": int(
            all(names[0] == "batch" for _, names in many.assignments)
        ),
        "too large: cut": _large_is_cut(),
        "crossover": _crossover(),
    }
    return {
        "right": float(sum(agreements.values())),
        **agreements,
        "few": few.title,
        "many": many.title,
    }


def _mlp(width: int, hidden: int, rows: int) -> tuple[Any, ...]:
    def loss(p, x):
        hidden = jax.nn.relu(x @ p["up"])
        return jnp.mean((x + hidden @ p["down"]) ** 2)

    def step(p, x):
        grads = jax.grad(loss)(p, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, p, grads)

    struct = ft.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    params = {"up": struct((width, hidden)), "down": struct((hidden, width))}
    return (
        step,
        params,
        struct((rows, width)),
    )


def _large_is_cut() -> int:
    """405 billion parameters with moments, 16-bit each: 2.4 TB on 64 chips of 95 GiB
    leave no way but to cut all.
    """
    struct = jax.ShapeDtypeStruct((64, 4096), jnp.int32)
    search_result = sfx.auto.search(
        *_large()[:-1],
        struct,
        devices="tpu:v5p:4x4x4",
    )
    best = search_result[0]
    layer = best.plans[0]["layers/up"]
    return int(layer.bytes_per_device * 64 == layer.bytes)


def _crossover() -> int:
    """The more rows, the less tensor parallelism: the cut of `mlp` never grows with the
    batch.
    """
    cuts = []
    for power in range(8, 21, 3):
        model = _mlp(8192, 32768, 2**power)
        search_result = sfx.auto.search(*model, devices="tpu:v5p:2x2x4")
        best = search_result[0]
        axes = [axis for axis, names in best.assignments if names[0] == "mlp"]
        cuts.append(math.prod(best.mesh.shape[axis] for axis in axes))
    return int(cuts == sorted(cuts, reverse=True) and cuts[0] > cuts[-1])


def _against_hands(options: Options) -> dict[str, Value]:
    """Step times on emulated devices, each way in turn."""
    model = _small()
    by_hand = {}
    for name, rules in _BY_HAND.items():
        limits = Limits(rules=sfx.AxisRules(rules))
        search_result = sfx.auto.search(
            *model,
            devices=8,
            chip=EMULATED,
            limits=limits,
            keep=1,
        )
        by_hand[name] = search_result[0]
    ways = {
        name: _runner(model, candidate, options.devices[:8])
        for name, candidate in by_hand.items()
    }
    chosen = sfx.auto.search(*model, devices=8, chip=EMULATED, keep=3)
    ways |= {
        f"choice {i + 1}": _runner(model, candidate, options.devices[:8])
        for i, candidate in enumerate(chosen)
    }
    times = _timed(ways, options.repeats)
    best = min(times[name] for name in by_hand)
    predicted = [candidate.seconds for candidate in by_hand.values()]
    return {
        "best by hand over chosen": best / times["choice 1"],
        "spearman of times": search_order.spearman(
            predicted, [times[name] for name in by_hand]
        ),
        **{f"{name} ms": seconds * 1e3 for name, seconds in times.items()},
        "chosen": chosen[0].title,
        "best by hand": min(by_hand, key=lambda name: times[name]),
    }


def _runner(model: tuple[Any, ...], candidate: sfx.auto.Candidate, devices: Any) -> Any:
    step, *args = model
    mesh = candidate.mesh.build(devices)
    plans = tuple(plan.on(mesh) for plan in candidate.plans)
    if candidate.constrained:
        step = sfx.auto.constrain_step(step, mesh, candidate.rules)
    values = [
        jax.tree.map(lambda s: jnp.full(s.shape, 0.01, s.dtype), arg)
        for arg in args[:3]
    ]
    tokens = np.random.default_rng(0).integers(0, 1000, args[3].shape)
    values.append(jnp.asarray(tokens, jnp.int32))
    state = [sfx.shard(value, plan) for value, plan in zip(values, plans, strict=True)]
    jitted = sfx.filter_jit(step, in_shardings=plans, out_shardings=plans[:3])

    def run() -> None:
        state[:3] = jitted(*state)
        jax.block_until_ready(state)

    run()
    return run


def _timed(ways: dict[str, Any], repeats: int) -> dict[str, float]:
    """The least time of each way over rounds in which all take their turn: others use
    this machine too.
    """
    least = dict.fromkeys(ways, math.inf)
    for _ in range(3 * repeats):
        for name, run in ways.items():
            begin = time.perf_counter()
            run()
            least[name] = min(least[name], time.perf_counter() - begin)
    return least

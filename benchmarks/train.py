"""Training the demo's model: what a plan costs per call, and tokens per second by
layout.
"""

import argparse
import functools as ft
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from shardfx import MeshSpec, filter_jit, shard
from shardfx._cli.demo import (
    TOLERANCE,
    DemoPlans,
    Run,
    batch,
    make_optimizer,
    make_plans,
    make_step,
    start_sharded,
    start_unsharded,
    stdlib_text,
)

from . import _matrices
from ._case import Case, Entry, Finding, Limit, Race, Rival, Skip, Value
from ._runner import Options


SUMMARY = (
    "Overhead of a planned jit over a plain one, and tokens per second of the demo's"
    " model by layout."
)
# Steps that are compared with one device before any is timed.
CHECKED_STEPS = 3


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--batch", type=int, default=16, help="texts in a batch (default: 16)"
    )
    parser.add_argument(
        "--length", type=int, help="bytes in a text (default: 128, with --quick 32)"
    )


def cases(options: Options) -> list[Entry]:
    count = len(options.devices)
    length = options.flags.length or (32 if options.quick else 128)
    run = Run(steps=1000, batch_size=options.flags.batch, length=length)
    layouts = {
        "dp": f"data={count},fsdp=1,tensor=1",
        "fsdp": f"data=1,fsdp={count},tensor=1",
        "tp": f"data=1,fsdp=1,tensor={count}",
        "fsdp x tp": f"data=1,fsdp={count // 2},tensor=2",
    }
    square = layouts["fsdp x tp" if count % 2 == 0 else "dp"]
    limits = (Limit("speedup.jax.jit", at_least=0.9),)
    entries: list[Entry] = [
        Case(
            "a call that does next to nothing, with model and optimizer state",
            lambda: _call(_plans(square, run, options), run),
        ),
        Case(
            "a training step, compiled from the same plan",
            lambda: _step(_plans(square, run, options), run),
            limits=limits,
        ),
    ]
    if count > 1:
        entries += _matrices.cases(options.devices, 4 if options.quick else 1)
    for name, layout in layouts.items():
        if count == 1 and name != "dp":
            entries.append(Skip(name, "there is one device"))
        elif count % 2 and name == "fsdp x tp":
            entries.append(Skip(name, f"{count} devices are not even in number"))
        else:
            entries.append(
                Finding(
                    f"{name} ({layout})",
                    lambda layout=layout: _speed(
                        _plans(layout, run, options), run, options
                    ),
                )
            )
    return entries


def _plans(layout: str, run: Run, options: Options) -> DemoPlans:
    return make_plans(MeshSpec.parse(layout).build(options.devices), run)


def _call(plans: DemoPlans, run: Run) -> Race:
    """One array of many is read, so that what is timed is the way into the compiled
    program and back.
    """
    started = start_sharded(plans, run)
    model = started.model
    state = started.state

    def read(model, state) -> jax.Array:
        return model.norm[0] + 1

    shardings = (plans.model.shardings, plans.optimizer.shardings)
    arrays = eqx.filter((model, state), eqx.is_array)

    def plain() -> Callable[[Any], Any]:
        jitted = jax.jit(read, in_shardings=shardings)
        return lambda inputs: jitted(*inputs)

    def equinox() -> Callable[[Any], Any]:
        jitted = eqx.filter_jit(read)
        return lambda inputs: jitted(*inputs)

    def planned() -> Callable[[Any], Any]:
        jitted = filter_jit(read, in_shardings=(plans.model, plans.optimizer))
        return lambda inputs: jitted(*inputs)

    def check(inputs, result) -> None:
        assert float(result) == 2.0

    rivals = (
        Rival("shardfx.filter_jit", planned, check),
        Rival("jax.jit", plain, check),
        Rival("eqx.filter_jit", equinox, check),
    )
    facts = {"arrays": len(jax.tree.leaves(arrays))}
    return Race(
        rivals=rivals,
        fresh=lambda: arrays,
        number=50,
        facts=facts,
    )


def _step(plans: DemoPlans, run: Run) -> Race:
    trainer = _Trainer(run, plans)
    model = trainer.model
    state = trainer.state
    tokens = trainer.tokens(0)
    step = make_step(make_optimizer(run), plans.model)
    into = (plans.model, plans.optimizer, plans.batch)
    (expected,) = _one_device_losses(run)[:1]

    def planned() -> Callable[[Any], Any]:
        out_shardings = (*into[:2], None)
        jitted = filter_jit(step, in_shardings=into, out_shardings=out_shardings)
        return lambda inputs: jitted(*inputs)

    def plain() -> Callable[[Any], Any]:
        shardings = tuple(plan.shardings for plan in into)
        out_shardings = (*shardings[:2], None)
        jitted = jax.jit(step, in_shardings=shardings, out_shardings=out_shardings)
        return lambda inputs: jitted(*inputs)

    def check(inputs, result) -> None:
        np.testing.assert_allclose(float(result[2]), expected, atol=TOLERANCE)

    rivals = (
        Rival("shardfx.filter_jit", planned, check),
        Rival("jax.jit", plain, check),
    )
    facts = {"tokens": run.batch_size * run.length}
    return Race(
        rivals=rivals,
        fresh=lambda: (model, state, tokens),
        facts=facts,
    )


class _Trainer:
    """A model in training; without plans, on one device."""

    def __init__(self, run: Run, plans: DemoPlans | None = None):
        self.run = run
        self.plans = plans
        if plans is None:
            started = start_unsharded(run)
        else:
            started = start_sharded(plans, run)
        self.step = started.step
        self.model = started.model
        self.state = started.state

    def tokens(self, number: int) -> jax.Array:
        run = self.run
        drawn = batch(
            stdlib_text(1 << 20),
            number,
            size=run.batch_size,
            length=run.length + 1,
            seed=run.seed,
        )
        if self.plans is None:
            return jnp.asarray(drawn)
        return shard(drawn, self.plans.batch)

    def loss(self, tokens: jax.Array) -> float:
        self.model, self.state, loss = self.step(self.model, self.state, tokens)
        return float(loss)

    def seconds_per_step(self, steps: int) -> float:
        tokens = self.tokens(0)
        begin = time.perf_counter()
        for _ in range(steps):
            self.loss(tokens)
        return (time.perf_counter() - begin) / steps


@ft.lru_cache(maxsize=1)
def _one_device(run: Run) -> _Trainer:
    return _Trainer(run)


@ft.lru_cache(maxsize=1)
def _one_device_losses(run: Run) -> tuple[float, ...]:
    trainer = _one_device(run)
    return tuple(
        [trainer.loss(trainer.tokens(number)) for number in range(CHECKED_STEPS)]
    )


def _speed(plans: DemoPlans, run: Run, options: Options) -> Mapping[str, Value]:
    """Tokens per second of a layout and of one device, in turn; their first losses must
    agree.
    """
    expected = _one_device_losses(run)
    begin = time.perf_counter()
    trainer = _Trainer(run, plans)
    first = trainer.loss(trainer.tokens(0))
    compile_seconds = time.perf_counter() - begin
    losses = [
        first,
        *[trainer.loss(trainer.tokens(number)) for number in range(1, CHECKED_STEPS)],
    ]
    largest = np.abs(np.array(losses) - np.array(expected)).max()
    difference = float(largest)
    assert difference <= TOLERANCE, (
        f"the losses differ from those of one device by {difference}"
    )

    contestants = {"sharded": trainer, "one device": _one_device(run)}
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(options.repeats):
        for name, contestant in contestants.items():
            seconds[name].append(contestant.seconds_per_step(2 if options.quick else 5))
    rates = {
        name: run.batch_size * run.length / statistics.median(taken)
        for name, taken in seconds.items()
    }
    bytes_per_device = plans.model.bytes_per_device + plans.optimizer.bytes_per_device
    return {
        "tokens per second": rates["sharded"],
        "tokens per second on one device": rates["one device"],
        "ratio": rates["sharded"] / rates["one device"],
        "largest difference of losses": difference,
        "seconds to compile and start": compile_seconds,
        "bytes of state per device": bytes_per_device,
    }

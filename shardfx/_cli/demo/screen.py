"""The demo on a terminal: the plan, the training, and the comparison."""

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from shardfx import MeshSpec, misplaced, report, shard, testing

from .train import (
    TOLERANCE,
    Plans,
    Run,
    batch,
    make_plans,
    start_sharded,
    start_unsharded,
    stdlib_text,
    train,
)


_BAR = 30


def show(mesh: MeshSpec, devices: Sequence[Any], run: Run, *, width: int | None = None) -> bool:
    """Trains twice, sharded and not, and prints everything on the way.

    **Arguments:**

    - `mesh`: the mesh to shard over.
    - `devices`: as many as it has.
    - `run`: what to train.
    - `width`: columns of text; `None` for no limit.

    **Returns:**

    Whether both runs have the same losses, within `TOLERANCE`.
    """
    begin = time.perf_counter()
    text = stdlib_text()
    plans = make_plans(mesh.build(devices), run)
    one = f"emulated {devices[0].device_kind}" if devices[0].platform == "cpu" else devices[0].device_kind
    print(f"{len(devices)} x {one}, as the mesh {mesh}.\n")
    print(f"The plan of the model:\n\n{report(plans.model, width=width)}\n")
    print(f"{_others(plans)}\n")

    started = start_sharded(plans, run)
    print(_placed(plans, started))
    print(
        f"Training on {text.size:,} bytes of Python's standard library, batches of {run.batch_size} x {run.length}.\n"
    )
    tokens = shard(batch(text, 0, size=run.batch_size, length=run.length + 1, seed=run.seed), plans.batch)
    checked = testing.check_step(*started, tokens)
    sharded = train(started, text, run, place=lambda tokens: shard(tokens, plans.batch), show=_progress("sharded", run))
    del started
    print("\nThe same on one of the devices, without a plan, with Equinox alone:\n")
    unsharded = train(start_unsharded(run), text, run, show=_progress("one device", run))

    largest = max(abs(one - two) for one, two in zip(sharded, unsharded, strict=True))
    print(f"\n{_curves(sharded, unsharded)}\n")
    curves_agree = largest <= TOLERANCE
    print(f"Largest difference over {run.steps} steps: {largest:.1e} nats (allowed: {TOLERANCE:.0e}).")
    print("The curves are the same up to rounding." if curves_agree else "THE CURVES DIFFER.")
    print(f"One step under the plan, beside one device in float64 (`check_step`):\n{checked}")
    print(f"{time.perf_counter() - begin:.0f} s in all.")
    return curves_agree and bool(checked)


def _others(plans: Plans) -> str:
    share, batch = plans.optimizer.bytes_per_device, plans.batch.leaves[0]
    return (
        f"The optimizer's state follows it: {len(plans.optimizer.leaves)} arrays, {share:,} bytes per device.\n"
        f"A batch, {list(batch.shape)}, is sharded as {batch.spec}."
    )


def _placed(plans: Plans, started: tuple[object, ...]) -> str:
    _, model, state = started
    wrong = [*misplaced(model, plans.model), *misplaced(state, plans.optimizer)]
    return (
        "Parameters and optimizer state were made in shards: no device ever held a whole one.\n"
        f"Each holds {plans.model.bytes_per_device:,} and {plans.optimizer.bytes_per_device:,} bytes of them, "
        f"{f'NOT as planned: {wrong}' if wrong else 'as planned'}."
    )


def _progress(name: str, run: Run) -> Callable[[int, float, float], None]:
    """A line every tenth of the run; on a terminal one that moves, in between."""
    every, moving = max(run.steps // 10, 1), sys.stdout.isatty()

    def progress(step: int, loss: float, rate: float) -> None:
        kept = step == 1 or step % every == 0 or step == run.steps
        if not kept and not moving:
            return
        speed = f"{rate:>9,.0f} tokens/s" if rate else " compiled"
        line = f"{name:>10}  step {step:>4}/{run.steps}  loss {loss:.4f}  {speed}"
        print(f"\r{line}  " if moving else line, end="\n" if kept else "", flush=True)

    return progress


def _curves(sharded: list[float], unsharded: list[float]) -> str:
    """Both curves, a line every tenth of the way; a bar is as long as the loss."""
    count, top = len(sharded), max(sharded)
    steps = sorted({0, count - 1, *range(max(count // 10, 1) - 1, count, max(count // 10, 1))})
    lines = [f"{'step':>6}  {'sharded':>9}  {'one device':>10}  {'difference':>10}"]
    for i in steps:
        bar = "#" * round(_BAR * sharded[i] / top)
        difference = abs(sharded[i] - unsharded[i])
        lines.append(f"{i + 1:>6}  {sharded[i]:>9.5f}  {unsharded[i]:>10.5f}  {difference:>10.1e}  {bar}")
    return "\n".join(lines)

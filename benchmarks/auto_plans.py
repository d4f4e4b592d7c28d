"""Plans without rules of 40 models: `python -m benchmarks.auto_plans`.

`shardfx.auto.plan` plans each model for 1, 8, 16 and 256 chips (v5e), and
`shardfx.cost.fit` says whether its training step fits. Twelve are the steps of
`_zoo.py`, twelve those of `_explicit_steps.py`, and sixteen are published models, of
which the training state is counted. Where a plan does not fit, the step is searched:
the plan is at fault only if a candidate of `search` fits. No search is needed where the
least state that every device must hold does not fit. With `--seconds`, the step under
the plan is partitioned and priced as the search does, beside the search's best
candidate and the usual ways by hand. With `--compile SLICE`, such as tpu:v5e:4x4, the
steps are planned for that slice and compiled by libtpu, whose memory is kept beside
that of `fit`: `results/auto-plans-libtpu.json`.

`--json FILE` keeps the results and goes on from them; `--only` takes parts of names,
`--devices` numbers.
"""

import argparse
import dataclasses
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import shardfx as sfx
from shardfx.auto import Limits
from shardfx.auto._asked import search_options
from shardfx.auto._candidate import Candidate, rank
from shardfx.auto._search import candidates_of, opened_search
from shardfx.cost._compile_for import memory_of
from shardfx.errors import OutOfMemoryError
from shardfx.presets import models as published

from ._explicit_steps import STEPS, Form
from ._zoo import models


CHIP = "v5e"
DEVICES = (1, 8, 16, 256)
PUBLISHED = (
    "gpt2",
    "gpt2-xl",
    "bert-large",
    "t5.1.1-xl",
    "t5.1.1-xxl",
    "vit-bigg-14",
    "llama3-8b",
    "llama3-70b",
    "llama4-scout",
    "mixtral-8x7b",
    "qwen3-32b",
    "qwen3-30b-a3b",
    "gemma2-9b",
    "gemma3-27b",
    "deepseek-v2-lite",
    "gpt-oss-20b",
)
# The steps that scan over time, the first dimension of their data. A scan over
# microbatches reduces gradients in each iteration, which a plan does not count.
SCANNED_DATA = ("recurrent",)
Row = dict[str, Any]


class Trained(NamedTuple):
    """A training step, `step(params, moments, *data)`, that returns updated parameters
    and moments first. `init` makes the moments. All trees are of structs. `step` is
    `None` where only the state is known. The rows of the data are in `batch_dim`.
    """

    step: Callable[..., Any] | None
    params: Any
    init: Callable[[Any], Any]
    data: tuple[Any, ...] = ()
    batch_dim: int = 0


def adam_moments(params: Any) -> Any:
    zeros = jax.tree.map(jnp.zeros_like, params)
    return zeros, zeros


def of_zoo(make: Callable[[], tuple[Any, ...]]) -> Trained:
    step, params, _, _, *data = make()

    def with_moments(params, moments, *data):
        params, *moments = step(params, *moments, *data)
        return params, tuple(moments)

    return Trained(
        step=with_moments, params=params, init=adam_moments, data=tuple(data)
    )


def of_explicit(name: str) -> Trained:
    """The plain form of a step: with AdamW, or by gradient descent."""
    step, args = STEPS[name](Form(is_typed=False))
    if name.startswith("adamw"):
        params, _, *data = args
        return Trained(
            step=step, params=params, init=optax.adamw(1e-3).init, data=tuple(data)
        )
    params, *data = args

    def without_moments(params, _moments, *data):
        results = step(params, *data)
        if name == "accumulated":
            return results, ()
        return results[0], (), results[1]

    batch_dim = 1 if name in SCANNED_DATA else 0
    return Trained(
        step=without_moments,
        params=params,
        init=lambda _params: (),
        data=tuple(data),
        batch_dim=batch_dim,
    )


def cases() -> dict[str, Callable[[], Trained]]:
    found: dict[str, Callable[[], Trained]] = {}
    for name, make in models(jnp.float32).items():
        found[name] = lambda make=make: of_zoo(make)
    for name in STEPS:
        found[f"explicit: {name}"] = lambda name=name: of_explicit(name)
    for name in PUBLISHED:
        found[f"published: {name}"] = lambda name=name: Trained(
            step=None, params=published.tree(name), init=adam_moments
        )
    return found


class Planned(NamedTuple):
    """The plans of a step's arguments, and the jitted step."""

    params: sfx.auto.AutoPlan
    moments: sfx.ShardPlan
    data: tuple[sfx.ShardPlan, ...]
    step: Any

    @property
    def structs(self) -> tuple[Any, ...]:
        plans = (self.params, self.moments, *self.data)
        return tuple(plan.structs for plan in plans)


def planned(case: Trained, devices: int | str) -> Planned:
    """The step as the documentation says: moments follow the parameters, and the rows
    of a batch are sharded over all axes that divide them. `devices` are a number of
    `CHIP`, or a slice.
    """
    params = sfx.auto.plan(
        case.params,
        devices,
        chip=CHIP if isinstance(devices, int) else None,
        optimizer=case.init,
        batch=case.data or None,
        batch_dim=case.batch_dim,
    )
    moments = sfx.follow(case.init, params)
    rows = sfx.PathRules([("", params.batch.spec)])
    data = tuple(sfx.plan(each, params.mesh, paths=rows) for each in case.data)
    step = None
    if case.step is not None:
        results = jax.eval_shape(case.step, case.params, moments.structs, *case.data)
        others = (None,) * (len(results) - 2)
        step = sfx.filter_jit(
            case.step, out_shardings=(params, moments, *others), donate="all"
        )
    return Planned(params, moments, data, step)


def least_bytes(case: Trained, devices: int) -> int:
    """The bytes of the parameters and moments on a device, if each array is sharded
    over all devices; of the gradients too, if there is no step that may free them.
    """
    moments = jax.eval_shape(case.init, case.params)
    gradients = case.params if case.step is None else ()
    return sum(
        math.ceil(math.prod(struct.shape) * struct.dtype.itemsize / devices)
        for struct in jax.tree.leaves((case.params, moments, gradients))
    )


def judged(case: Trained, devices: int, *, is_timed: bool = False) -> Row:
    begin = time.process_time()
    usable = sfx.chips.find(CHIP).usable_hbm_bytes_per_device
    row: Row = {}
    try:
        plan = planned(case, devices)
    except OutOfMemoryError as error:
        row |= {"mesh": "", "fits": False, "error": str(error)}
    else:
        row["mesh"] = str(plan.params.mesh)
        row["planning seconds"] = time.process_time() - begin
        if plan.step is None:
            state = sfx.ShardPlan.join(params=plan.params, moments=plan.moments)
            fit = sfx.cost.fit(state, chip=CHIP)
        else:
            fit = sfx.cost.fit(plan.step, *plan.structs, chip=CHIP)
        row |= {"fits": fit.fits, "GiB": fit.peak_bytes / 2**30, "basis": fit.basis}
    if not row["fits"]:
        if least_bytes(case, devices) > usable:
            row["search"] = "nothing can fit: the state alone is larger"
        elif devices == 1:
            row["search"] = "nothing fits: one device has one plan"
        elif case.step is None:
            row["search"] = "no step"
        else:
            row["search"] = of_search(case.step, case, devices)
    if is_timed and row["fits"] and case.step is not None and devices > 1:
        row["beside search"] = seconds_beside_search(
            case.step, case, planned(case, devices), devices
        )
    row["is right"] = row["fits"] or row["search"] not in ("fits", "no step")
    row["processor seconds"] = time.process_time() - begin
    return row


def compiled(case: Trained, target: str) -> Row:
    """The memory of the step under its plan for the slice `target`, by libtpu and by
    `fit`.
    """
    plan = planned(case, target)
    chip = sfx.chips.parse_slice(target).chip
    usable_bytes = chip.usable_hbm_bytes_per_device
    fit = sfx.cost.fit(plan.step, *plan.structs, chip=chip)
    try:
        program = sfx.cost.compile_for(plan.step, *plan.structs, target=target)
        needed_bytes = memory_of(program).needed_bytes
    except OutOfMemoryError as error:
        needed_bytes = max(error.needed_bytes or 0, usable_bytes + 1)
    return {
        "mesh": str(plan.params.mesh),
        "GiB": fit.peak_bytes / 2**30,
        "compiled GiB": needed_bytes / 2**30,
        "usable GiB": usable_bytes / 2**30,
        "is under": needed_bytes <= usable_bytes,
    }


def seconds_beside_search(
    step: Callable[..., Any], case: Trained, plan: Planned, devices: int
) -> Row:
    """The seconds of the step under the plan over those of the search's best candidate,
    and over those of the fastest and the slowest usual way by hand that fits.
    """
    moments = jax.eval_shape(case.init, case.params)
    args = (case.params, moments, *case.data)
    donating = sfx.filter_jit(step, donate=(0, 1))
    options = search_options(devices, CHIP)
    space, lowered = opened_search(
        step=donating,
        args=args,
        options=options,
        limits=Limits(),
        also=(),
        tell=lambda _: None,
    )
    candidates, titles = candidates_of(space, lowered, 1, lambda _: None)
    best = candidates[0]
    planned = dataclasses.replace(
        best,
        mesh=plan.params.mesh,
        plans=(plan.params, plan.moments, *plan.data),
        constrained=False,
        state_over=(),
    )
    priced = lowered.partitioned(planned)

    def is_usual(candidate: Candidate) -> bool:
        return candidate.title in titles and candidate.fits

    by_hand = sorted(filter(is_usual, candidates), key=rank)
    row: Row = {"seconds": priced.seconds, "search": best.title}
    row["over search"] = priced.seconds / best.seconds
    if by_hand:
        row["over best by hand"] = priced.seconds / by_hand[0].seconds
        row["over slowest by hand"] = priced.seconds / by_hand[-1].seconds
    return row


def of_search(step: Callable[..., Any], case: Trained, devices: int) -> str:
    """Whether a candidate of a search fits, as text."""
    moments = jax.eval_shape(case.init, case.params)
    args = (case.params, moments, *case.data)
    try:
        found = sfx.auto.search(step, *args, devices=devices, chip=CHIP, effort="least")
    except OutOfMemoryError:
        return "nothing fits"
    return "fits" if any(candidate.fits for candidate in found) else "nothing fits"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="parts of names, with commas")
    parser.add_argument("--devices", default=",".join(map(str, DEVICES)))
    parser.add_argument("--seconds", action="store_true", help="beside a search")
    parser.add_argument("--compile", metavar="SLICE", help="the steps, by libtpu")
    parser.add_argument("--json", type=Path, help="results to go on from")
    flags = parser.parse_args()
    rows: dict[str, Row] = {}
    if flags.json and flags.json.exists():
        rows = json.loads(flags.json.read_text())
    targets: list[int | str] = [flags.compile]
    if not flags.compile:
        targets = [int(devices) for devices in flags.devices.split(",")]
    for name, make in cases().items():
        if not any(part in name for part in flags.only.split(",")):
            continue
        case = make()
        if flags.compile and case.step is None:
            continue
        for devices in targets:
            key = f"{name} on {devices}"
            if key in rows:
                continue
            if isinstance(devices, str):
                rows[key] = compiled(case, devices)
            else:
                rows[key] = judged(case, devices, is_timed=flags.seconds)
            print(key, rows[key], flush=True)
            if flags.json:
                flags.json.write_text(json.dumps(rows, indent=1) + "\n")
    if flags.compile:
        under = sum(row["is under"] for row in rows.values())
        print(f"{under} of {len(rows)} are under the memory of their chip")
        return
    wrong = [key for key, row in rows.items() if not row["is right"]]
    print(f"{len(rows) - len(wrong)} of {len(rows)} fit wherever a candidate fits")
    for key in wrong:
        print(" ", key)
    ratios = [
        row["beside search"]["over search"]
        for row in rows.values()
        if "beside search" in row
    ]
    if ratios:
        close = sum(ratio <= 1.15 for ratio in ratios)
        print(
            f"{close} of {len(ratios)} within 1.15 of search, worst {max(ratios):.2f}"
        )


if __name__ == "__main__":
    main()

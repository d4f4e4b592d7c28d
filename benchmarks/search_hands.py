"""What a search chooses against the rules that people write by hand, by compiled
programs: a table that goes on.

Each case is kept in `results/hands/`, so that a run that was stopped goes on where it
was.
"""

import dataclasses
import functools as ft
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import shardfx as sfx
from shardfx.auto._asked import search_options
from shardfx.auto._measured import devices_for, measured
from shardfx.auto._search import candidates_of, opened_search

from ._case import Entry, Finding, Limit, Value
from ._report import BETTER
from ._zoo import models, small_models
from .search_order import SEALED, UNSEEN, unseen_step


KEPT = Path(__file__).parent / "results" / "hands"
# How many of the search's own are compiled beside the ways by hand.
_OWN = 4


def cases(target: str, only: str, clock: bool, answered: bool) -> list[Entry]:
    """A finding for each model on this slice. With `answered`, the choice is what
    `search` answers without compiling.
    """
    if target.startswith("cpu"):
        dtype = jnp.float32
    else:
        dtype = jnp.bfloat16
    called = target
    measure = _measured
    if clock:
        called = f"{target} by the clock"
        measure = _run
    elif answered:
        called = f"{target}, not compiled before"
        measure = _answered
    entries: list[Entry] = [
        Finding(
            f"{name} on {called}",
            ft.partial(_kept, name, called, lambda make=make: measure(target, make())),
            (Limit("choice over best by hand", at_most=1.02),),
        )
        for name, make in (
            small_models() if clock else models(dtype) | _unseen()
        ).items()
        if only in name
    ]
    return [
        *entries,
        Finding(
            f"all on {called}",
            ft.partial(_all, called),
            (Limit("part that is better", at_least=1 / 3),),
        ),
    ]


def _unseen() -> dict[str, Callable[[], tuple[Any, ...]]]:
    """Steps by authors who had not read the search, whose plans are left out. The
    sealed ones were not looked at while it was written.
    """
    steps: dict[str, Callable[[], tuple[Any, ...]]] = {}
    for name in UNSEEN:
        steps[f"unseen {name}"] = ft.partial(unseen_step, name)
    for name in SEALED:
        steps[f"sealed {name}"] = ft.partial(unseen_step, name)
    return steps


def _kept(
    name: str, target: str, measured: Callable[[], dict[str, Any]]
) -> dict[str, Value]:
    file = _file(target, name)
    if not file.exists():
        KEPT.mkdir(exist_ok=True)
        measurement = measured()
        encoded = (
            json.dumps(
                {
                    "model": name,
                    "target": target,
                    "jax": jax.__version__,
                    **measurement,
                },
                indent=1,
            )
            + "\n"
        )
        file.write_text(encoded)
    values = json.loads(file.read_text())["values"]
    assert isinstance(values, dict)
    return values


def _file(target: str, name: str) -> Path:
    return KEPT / (re.sub(r"\W+", "-", f"{target}-{name}") + ".json")


def _all(target: str) -> dict[str, Value]:
    files = sorted(KEPT.glob("*.json"))
    read = [json.loads(file.read_text()) for file in files]
    ratios = [
        record["values"]["choice over best by hand"]
        for record in read
        if record["target"] == target
    ]
    assert ratios, f"nothing was measured on {target}"
    total = sum(ratio < BETTER for ratio in ratios)
    return {
        "models": len(ratios),
        "part that is better": total / len(ratios),
        "never worse than 1.02": int(max(ratios) <= 1.02),
        "best": min(ratios),
        "worst": max(ratios),
    }


def _measured(target: str, model: tuple[Any, ...]) -> dict[str, Any]:
    """The choice and all ways by hand, compiled; seconds are computation and sending,
    nothing hidden.
    """
    return _held_against(
        target,
        model,
        lambda lowered, ones, on: measured(lowered, ones, on, print, runs=False),
    )


def _run(target: str, model: tuple[Any, ...]) -> dict[str, Any]:
    """The same on the devices, in turn."""
    return _held_against(
        target,
        model,
        lambda lowered, ones, on: measured(lowered, ones, on, print, runs=True),
    )


def _answered(target: str, model: tuple[Any, ...]) -> dict[str, Any]:
    """What `search` answers, and all ways by hand that fit, compiled."""
    step, *args = model
    begin = time.process_time()
    answer, *_ = sfx.auto.search(step, *args, devices=target, keep=1)
    seconds = time.process_time() - begin
    options = search_options(target, None)
    space, lowered = opened_search(
        step, args, options, sfx.auto.Limits(), (), lambda _: None
    )
    lowered.model = dataclasses.replace(lowered.model, overlap=0.0)
    candidates, hands = candidates_of(space, lowered, 1, lambda _: None)
    chosen = {(answer.title, answer.constrained): answer}
    for candidate in candidates:
        if candidate.fits and candidate.title in hands:
            chosen.setdefault((candidate.title, candidate.constrained), candidate)
    devices = devices_for("compile", options, None)
    looked = measured(lowered, list(chosen.values()), devices, print, runs=False)
    by_key = {(one.title, one.constrained): one for one in looked}
    choice = by_key[answer.title, answer.constrained]
    best = next(one for one in looked if one.title in hands)
    values = _compared(choice, best, len(looked), seconds)
    rows = []
    for one in looked:
        estimated = chosen[one.title, one.constrained]
        rows.append(_row(one, estimated, one.title in hands))
    return {"values": values, "rows": rows}


def _compared(
    choice: sfx.auto.Candidate,
    best: sfx.auto.Candidate,
    compiled_count: int,
    search_seconds: float,
) -> dict[str, Any]:
    """The values of a row: the search's choice beside the best candidate by hand."""
    return {
        "choice over best by hand": choice.seconds / best.seconds,
        "choice": choice.title,
        "best by hand": best.title,
        "choice ms": choice.seconds * 1e3,
        "best by hand ms": best.seconds * 1e3,
        "compiled": compiled_count,
        "processor seconds of the search": search_seconds,
    }


def _held_against(
    target: str, model: tuple[Any, ...], look: Callable[..., list[sfx.auto.Candidate]]
) -> dict[str, Any]:
    step, *args = model
    begin = time.process_time()
    asked = search_options(target, None)
    space, lowered = opened_search(
        step, args, asked, sfx.auto.Limits(), (), lambda _: None
    )
    # Emulated devices hide nothing; a TPU's compiler does, but how much is not in its
    # program's text.
    lowered.model = dataclasses.replace(lowered.model, overlap=0.0)
    candidates, hands = candidates_of(space, lowered, 1, lambda _: None)
    seconds = time.process_time() - begin
    fitting = [candidate for candidate in candidates if candidate.fits]
    chosen = [
        candidate
        for rank, candidate in enumerate(fitting)
        if rank < _OWN or candidate.title in hands
    ]
    looked = look(lowered, chosen, devices_for("compile", asked, None))
    choice = looked[0]
    best = next(candidate for candidate in looked if candidate.title in hands)
    first = next(
        candidate for candidate in looked if candidate.title == fitting[0].title
    )
    values = _compared(choice, best, len(looked), seconds)
    values["unverified over best by hand"] = first.seconds / best.seconds
    candidate_by_title = {candidate.title: candidate for candidate in candidates}
    return {
        "values": values,
        "rows": [
            _row(
                candidate, candidate_by_title[candidate.title], candidate.title in hands
            )
            for candidate in looked
        ],
    }


def _row(
    candidate: sfx.auto.Candidate, priced: sfx.auto.Candidate, by_hand: bool
) -> dict[str, object]:
    return {
        "candidate": candidate.title,
        "by hand": by_hand,
        "seconds": candidate.seconds,
        "estimated seconds": priced.seconds,
        "computation": candidate.compute_seconds,
        "MB": candidate.wire_bytes / 1e6,
        "estimated MB": priced.wire_bytes / 1e6,
        "GiB": candidate.memory_bytes / 2**30,
        "estimated GiB": priced.memory_bytes / 2**30,
        "constrained": candidate.constrained,
        "fits": candidate.fits,
    }

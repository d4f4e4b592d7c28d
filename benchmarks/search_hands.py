"""What a search chooses against the rules that people write by hand, by compiled programs: a table that goes on.

Each case is kept in `results/hands/`, so that a run that was stopped goes on where it was.
"""

import functools as ft
import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import shardfx as sfx
from shardfx._cost.estimate import HABITS, Prepared
from shardfx._search.asked import asked_for
from shardfx._search.checked import Verifier, devices_for, estimated, promised, promising, with_check
from shardfx._search.core import CostModel
from shardfx._search.limits import Limits
from shardfx._search.reasons import various, without_twins
from shardfx._search.search import COMPILED, Searched

from ._case import Entry, Finding, Limit, Value
from ._hands_page import BETTER
from ._screen import Table
from ._zoo import models, small_models


KEPT = Path(__file__).parent / "results" / "hands"
# How many candidates get a closer look; of a way by hand one does, with the sizes that the estimate prefers.
_LOOKED_AT = 32
# What seems so many times slower than the fastest is not compiled: of the search's own, and of ways by hand.
_HOPELESS, _HOPELESS_BY_HAND = 1.6, 2.5
# How many of each kind are run.
_RUN = 4


def cases(target: str, only: str, programs: Path | None, clock: bool) -> list[Entry]:
    """A finding for each model on this slice."""
    dtype = jnp.float32 if target.startswith("cpu") else jnp.bfloat16
    called = f"{target} by the clock" if clock else target
    measure = _run if clock else _measured
    found: list[Entry] = [
        Finding(
            f"{name} on {called}",
            ft.partial(_kept, name, called, lambda make=make: measure(target, make(), programs)),
            (Limit("choice over best by hand", at_most=1.02),),
        )
        for name, make in (small_models() if clock else models(dtype)).items()
        if only in name
    ]
    return [
        *found,
        Finding(f"all on {called}", ft.partial(_all, called), (Limit("part that is better", at_least=1 / 3),)),
    ]


def _kept(name: str, target: str, measured: Callable[[], dict[str, Any]]) -> dict[str, Value]:
    file = _file(target, name)
    if not file.exists():
        KEPT.mkdir(exist_ok=True)
        made = measured()
        file.write_text(json.dumps({"model": name, "target": target, "jax": jax.__version__, **made}, indent=1) + "\n")
    values = json.loads(file.read_text())["values"]
    assert isinstance(values, dict)
    return values


def _file(target: str, name: str) -> Path:
    return KEPT / (re.sub(r"\W+", "-", f"{target}-{name}") + ".json")


def _all(target: str) -> dict[str, Value]:
    read = [json.loads(file.read_text()) for file in sorted(KEPT.glob("*.json"))]
    ratios = [one["values"]["choice over best by hand"] for one in read if one["target"] == target]
    assert ratios, f"nothing was measured on {target}"
    return {
        "models": len(ratios),
        "part that is better": sum(ratio < BETTER for ratio in ratios) / len(ratios),
        "never worse than 1.02": int(max(ratios) <= 1.02),
        "best": min(ratios),
        "worst": max(ratios),
    }


class _Ways:
    """What a search would compile for a model, and the ways by hand."""

    def __init__(self, target: str, model: tuple[Any, ...], programs: Path | None):
        step, *args = model
        asked = asked_for(target, None)
        count, chip, self.slice_ = asked.total, asked.chip, asked.target
        # Emulated devices hide nothing; a TPU's compiler does, but how much is not in its program's text.
        costs = CostModel(overlap=0.0)
        begin = time.process_time()
        habits = HABITS["cpu" if self.slice_ is None else "tpu"]
        searched, prepared = Searched(step, args, count, Limits(), (), habits), Prepared(step, args)

        def priced(found: Any) -> tuple[sfx.Candidate, ...]:
            return promising(with_check(one, estimated(prepared, one, chip, costs)) for one in found)

        self.chosen = priced(searched.candidates(chip, 1, _LOOKED_AT, Limits(), costs))
        self.hands = priced(searched.by_hand(searched.known, chip, 1, Limits(), costs, sizes=1))
        self.seconds = time.process_time() - begin
        # What `search(verify="compile")` compiles, and then all other ways by hand.
        self.own = without_twins([*various(self.chosen, COMPILED // 2), *self.hands], COMPILED)
        # Of twins, whose arguments lie alike, the way by hand: laid out, the other is another program.
        self.every = promising(without_twins([*self.hands, *self.own], len(self.own) + len(self.hands)))
        devices = devices_for("compile", asked, None)
        self.verifier = Verifier(step, tuple(args), devices, chip, costs, programs, print)

    def table(self) -> Table:
        """All that are not hopeless, compiled."""
        least = promised(self.every[0])
        worth = [
            one
            for one in self.every
            if promised(one) < (_HOPELESS_BY_HAND if self.is_by_hand(one) else _HOPELESS) * least
        ]
        return Table(self.verifier, self.slice_ is not None, worth)

    def is_own(self, one: sfx.Candidate) -> bool:
        """Whether a search would compile it."""
        return any(not _differ(one, other) for other in self.own)

    def is_by_hand(self, one: sfx.Candidate) -> bool:
        """Whether people write it."""
        return any(not _differ(one, hand) for hand in self.hands)


def _measured(target: str, model: tuple[Any, ...], programs: Path | None) -> dict[str, Any]:
    """The best of the search and the ways by hand, compiled; seconds are computation and sending, nothing hidden."""
    ways = _Ways(target, model, programs)
    table = ways.table()
    choice, best = table.best(ways.is_own), table.best(ways.is_by_hand)
    first = table.full(next(row for row in table.rows if not _differ(row.given, ways.chosen[0])))
    values = {
        "choice over best by hand": _cost(choice) / _cost(best),
        "unverified over best by hand": _cost(first) / _cost(best),
        "choice": choice.title,
        "best by hand": best.title,
        "choice ms": _cost(choice) * 1e3,
        "best by hand ms": _cost(best) * 1e3,
        "compiled": sum(row.fully is not None for row in table.rows),
        "screened": len(table.rows),
        "left out by estimate": len(ways.every) - len(table.rows),
        "processor seconds of the search": ways.seconds,
    }
    return {"values": values, "rows": [row.told(ways.is_by_hand(row.given)) for row in table.rows]}


def _run(target: str, model: tuple[Any, ...], programs: Path | None) -> dict[str, Any]:
    """The best few by their programs on the devices, in turn: what `verify="compile"` and `verify="run"` choose."""
    ways = _Ways(target, model, programs)
    rows = sorted(ways.table().rows, key=lambda row: _cost(row.quickly))
    own, hands = ([row for row in rows if suits(row.given)][:_RUN] for suits in (ways.is_own, ways.is_by_hand))
    ran = ways.verifier.ran([row.given for row in rows if row in own or row in hands])
    compiled = next(one for one in ran if not _differ(one, own[0].given))
    chosen, best = next(filter(ways.is_own, ran)), min(filter(ways.is_by_hand, ran), key=_cost)
    values = {
        "choice over best by hand": _cost(compiled) / _cost(best),
        "choice by the clock over best by hand": _cost(chosen) / _cost(best),
        "choice": compiled.title,
        "choice by the clock": chosen.title,
        "best by hand": best.title,
        "choice ms": _cost(compiled) * 1e3,
        "best by hand ms": _cost(best) * 1e3,
        "run": len(ran),
        "load": os.getloadavg()[0],
    }
    rows_told = [
        {
            "candidate": one.title,
            "by hand": ways.is_by_hand(one),
            "seconds": _cost(one),
            "MB": one.checks[-1].wire_bytes / 1e6,
            "laid out": one.laid_out,
        }
        for one in ran
    ]
    return {"values": values, "rows": rows_told}


def _differ(one: sfx.Candidate, other: sfx.Candidate) -> bool:
    return len(without_twins([one, other], 2)) == 2


def _cost(one: sfx.Candidate) -> float:
    return one.checks[-1].seconds

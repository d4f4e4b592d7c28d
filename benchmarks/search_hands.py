"""What a search chooses against the rules that people write by hand, by compiled programs: a table that goes on.

Each case is kept in `results/hands/`, so that a run that was stopped goes on where it was.
"""

import functools as ft
import json
import re
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import shardfx as sfx
from shardfx._cost.estimate import HABITS, Prepared
from shardfx._search.asked import hardware
from shardfx._search.checked import Verifier, devices_for, estimated, fits, in_order, with_check
from shardfx._search.core import CostModel
from shardfx._search.limits import Limits
from shardfx._search.reasons import without_twins
from shardfx._search.search import COMPILED, Searched

from ._case import Entry, Finding, Limit, Value
from ._zoo import models


KEPT = Path(__file__).parent / "results" / "hands"
# Of a way by hand the size that the estimate prefers.
_LOOKED_AT = 12


def cases(target: str, only: str) -> list[Entry]:
    """A finding for each model on this slice."""
    dtype = jnp.float32 if target.startswith("cpu") else jnp.bfloat16
    found: list[Entry] = [
        Finding(
            f"{name} on {target}",
            ft.partial(_kept, name, target, make),
            (Limit("choice over best by hand", at_most=1.02),),
        )
        for name, make in models(dtype).items()
        if only in name
    ]
    return [
        *found,
        Finding(f"all on {target}", ft.partial(_all, target), (Limit("part that is better", at_least=1 / 3),)),
    ]


def _kept(name: str, target: str, make: Any) -> dict[str, Value]:
    file = _file(target, name)
    if not file.exists():
        KEPT.mkdir(exist_ok=True)
        made = _measured(target, make())
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
        "part that is better": sum(ratio < 0.995 for ratio in ratios) / len(ratios),
        "never worse than 1.02": int(max(ratios) <= 1.02),
        "best": min(ratios),
        "worst": max(ratios),
    }


def _measured(target: str, model: tuple[Any, ...]) -> dict[str, Any]:
    """Every way by hand and the best of the search, compiled; seconds are computation and sending, nothing hidden."""
    step, *args = model
    count, chip, slice_ = hardware(target, None)
    # Emulated devices hide nothing; a TPU's compiler does, but how much is not in its program's text.
    costs = CostModel(overlap=0.0)
    begin = time.process_time()
    habits = HABITS["cpu" if slice_ is None else "tpu"]
    searched, prepared = Searched(step, args, count, Limits(), (), habits), Prepared(step, args)

    def priced(found: Any) -> Any:
        return in_order(with_check(one, estimated(prepared, one, costs.overlap)) for one in found)

    chosen = priced(searched.candidates(chip, 1, _LOOKED_AT, Limits(), costs))
    hands = priced(searched.by_hand(searched.known, chip, 1, Limits(), costs, sizes=1))
    seconds = time.process_time() - begin
    # What `search(verify="compile")` compiles, and then all other ways by hand.
    own = without_twins([*chosen[: COMPILED // 2], *hands], COMPILED)
    every = without_twins([*own, *hands], len(own) + len(hands))
    verifier = Verifier(step, tuple(args), devices_for("compile", count, slice_, None), chip, costs, None, print)
    looked = verifier.compiled(every)
    by_hand = [one for one in looked if len(without_twins([one, *hands], 99)) == len(without_twins(hands, 99))]
    verified = [one for one in looked if any(one.title == other.title and one.mesh == other.mesh for other in own)]
    choice = min(filter(fits, verified), key=_cost)
    best = min(filter(fits, by_hand), key=_cost)
    first = next(one for one in looked if one.title == chosen[0].title)
    rows = [
        {
            "candidate": one.title,
            "by hand": one in by_hand,
            "seconds": _cost(one),
            "computation": one.checks[-1].compute_seconds,
            "MB": one.checks[-1].wire_bytes / 1e6,
            "estimated MB": one.checks[0].wire_bytes / 1e6,
            "GiB": (one.checks[-1].memory_bytes or 0) / 2**30,
            "laid out": one.laid_out,
            "fits": fits(one),
        }
        for one in looked
    ]
    values = {
        "choice over best by hand": _cost(choice) / _cost(best),
        "unverified over best by hand": _cost(first) / _cost(best),
        "choice": choice.title,
        "best by hand": best.title,
        "choice ms": _cost(choice) * 1e3,
        "best by hand ms": _cost(best) * 1e3,
        "compiled": len(looked),
        "processor seconds of the search": seconds,
    }
    return {"values": values, "rows": rows}


def _cost(one: sfx.Candidate) -> float:
    return one.checks[-1].seconds

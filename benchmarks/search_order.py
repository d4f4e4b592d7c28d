"""Whether the search's estimate orders meshes as compiled programs do: candidates at random, laid out and compiled."""

import functools as ft
import math
import statistics
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

import shardfx as sfx
from shardfx._cost.estimate import HABITS
from shardfx._search.core import CostModel, find, machine_of
from shardfx._search.emulated import EMULATED
from shardfx._search.limits import Limits
from shardfx._search.search import Searched

from ._case import Finding, Limit, Value
from ._zoo import models


# A dense model, experts, an encoder with a decoder, convolutions.
_MODELS = ("dense 0.1B", "experts", "T5", "convolutions")


def cases(few: int, devices: Sequence[Any]) -> list[Finding]:
    """A finding for each model."""
    return [
        Finding(
            f"order of {few} candidates against compiled programs, {name}",
            ft.partial(_order, name, few, devices),
            (Limit("spearman of bytes", at_least=0.9),),
        )
        for name in _MODELS
    ]


def _order(name: str, few: int, devices: Sequence[Any]) -> dict[str, Value]:
    """Candidates drawn from all places of the order, by bytes that their programs send once they are laid out."""
    step, *args = models(jnp.float32)[name]()
    made = Searched(step, args, 8, Limits(), habits=HABITS["cpu"])
    machine = machine_of(EMULATED, 8, CostModel(), "float32", math.inf)
    found, _ = find(made.terms, machine, 8, keep=4000)
    rng = np.random.default_rng(0)
    drawn = [found[i] for i in sorted(rng.permutation(len(found))[: 6 * few])]
    pairs = list(made.diverse(drawn, 6 * few))
    pairs = [pairs[i] for i in sorted(rng.permutation(len(pairs))[:few])]
    sent, compiled = [], []
    for one, built in pairs:
        candidate = made.candidate(one, built, machine, 2**62)
        mesh = candidate.mesh.build(devices)
        plans = tuple(plan.on(mesh) for plan in candidate.plans)
        laid = sfx.lay_out(step, mesh, candidate.rules)
        program = sfx.filter_jit(laid, in_shardings=plans, out_shardings=plans[:3]).lower(*args).compile()
        compiled.append(float(sfx.traffic(program, mesh).wire_bytes))
        sent.append(candidate.wire_bytes)
    ratios = [a / b for a, b in zip(sent, compiled, strict=True)]
    return {
        "spearman of bytes": spearman(sent, compiled),
        "candidates": len(sent),
        "median of bytes over compiled": statistics.median(ratios),
        "least": min(ratios),
        "most": max(ratios),
    }


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """The correlation of two orders."""
    return float(np.corrcoef(_ranks(a), _ranks(b))[0, 1])


def _ranks(values: Sequence[float]) -> np.ndarray:
    """Ranks, with the mean of those that are equal."""
    array = np.array(values)
    return np.array([(np.sum(array < v) + np.sum(array <= v) - 1) / 2 for v in array])

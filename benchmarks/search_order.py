"""Whether a search orders meshes as compiled programs do: candidates at random, compiled as written and laid out."""

import functools as ft
import math
import statistics
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

import shardfx as sfx
from shardfx import chips
from shardfx._cost.estimate import HABITS, Prepared
from shardfx._cost.work import work_of
from shardfx._search.core import CostModel, find, machine_of
from shardfx._search.emulated import EMULATED
from shardfx._search.limits import Limits
from shardfx._search.search import Searched

from ._case import Finding, Limit, Value
from ._zoo import models


_Pair = tuple[float, float]  # ours, the program's

# Whose seconds are compared.
_CHIP = "v5e"
_LAID_OUT, _WRITTEN, _SECONDS = (
    "spearman of bytes, laid out",
    "spearman of bytes, as written",
    "spearman of seconds, as written",
)
# A dense model, experts, an encoder with a decoder, convolutions.
_MODELS = ("dense 0.1B", "experts", "T5", "convolutions")


def cases(few: int, devices: Sequence[Any]) -> list[Finding]:
    """A finding for each model."""
    return [
        Finding(
            f"order of {few} candidates against compiled programs, {name}",
            ft.partial(_order, name, few, devices),
            tuple(Limit(value, at_least=0.9) for value in (_LAID_OUT, _WRITTEN, _SECONDS)),
        )
        for name in _MODELS
    ]


def _order(name: str, few: int, devices: Sequence[Any]) -> dict[str, Value]:
    """Candidates drawn from all places of the order, by what their programs send and compute.

    Each is held against the estimate of its operations, as it is written and laid out. Seconds are those of products
    and sending on a TPU, nothing hidden.
    """
    step, *args = models(jnp.float32)[name]()
    made = Searched(step, args, 8, Limits(), habits=HABITS["cpu"])
    machine = machine_of(EMULATED, 8, CostModel(), "float32", math.inf)
    found, _ = find(made.terms, machine, 8, keep=4000)
    rng = np.random.default_rng(0)
    drawn = [found[i] for i in sorted(rng.permutation(len(found))[: 6 * few])]
    pairs = list(made.diverse(drawn, 6 * few))
    pairs = [pairs[i] for i in sorted(rng.permutation(len(pairs))[:few])]
    prepared = Prepared(step, made.args)
    laid_out: list[_Pair] = []
    priced: list[_Pair] = []
    written: list[_Pair] = []
    seconds: list[_Pair] = []
    for one, built in pairs:
        candidate = made.candidate(one, built, machine, 2**62)
        mesh = candidate.mesh.build(devices)
        plans = tuple(plan.on(mesh) for plan in candidate.plans)
        laid = sfx.lay_out(step, mesh, candidate.rules)
        ours, theirs = Prepared(laid, made.args).worked(candidate.plans, compiler="cpu"), _compiled(laid, args, plans)
        laid_out.append((float(ours[0].wire_bytes), float(theirs[0].wire_bytes)))
        priced.append((candidate.wire_bytes, float(theirs[0].wire_bytes)))
        ours, theirs = prepared.worked(candidate.plans, compiler="cpu"), _compiled(step, args, plans)
        written.append((float(ours[0].wire_bytes), float(theirs[0].wire_bytes)))
        seconds.append((_seconds(*ours, candidate.mesh), _seconds(*theirs, candidate.mesh)))
    return {
        _LAID_OUT: _spearman(laid_out),
        _WRITTEN: _spearman(written),
        _SECONDS: _spearman(seconds),
        "spearman of bytes, laid out, by the core alone": _spearman(priced),
        "candidates": len(pairs),
        **_ratios("laid out", laid_out),
        **_ratios("as written", written),
    }


def _compiled(step: Any, args: Sequence[Any], plans: Sequence[sfx.ShardPlan]) -> tuple[sfx.Traffic, float]:
    """What a program sends, and how many operations of products a device does."""
    program = sfx.filter_jit(step, in_shardings=plans, out_shardings=plans[:3]).lower(*args).compile()
    return sfx.traffic(program, plans[0].mesh), work_of(program.as_text()).flops


def _seconds(sent: sfx.Traffic, flops: float, mesh: sfx.MeshSpec) -> float:
    """Products and sending on the chip of `_CHIP`, nothing hidden."""
    return flops / chips.find(_CHIP).flops("bfloat16") + sfx.seconds(sent, _CHIP, mesh).seconds


def _ratios(how: str, pairs: Sequence[_Pair]) -> dict[str, Value]:
    found = [ours / theirs for ours, theirs in pairs]
    return {
        f"median of bytes over compiled, {how}": statistics.median(found),
        f"least, {how}": min(found),
        f"most, {how}": max(found),
    }


def _spearman(pairs: Sequence[_Pair]) -> float:
    ours, theirs = zip(*pairs, strict=True)
    return spearman(ours, theirs)


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """The correlation of two orders."""
    return float(np.corrcoef(_ranks(a), _ranks(b))[0, 1])


def _ranks(values: Sequence[float]) -> np.ndarray:
    """Ranks, with the mean of those that are equal."""
    array = np.array(values)
    return np.array([(np.sum(array < v) + np.sum(array <= v) - 1) / 2 for v in array])

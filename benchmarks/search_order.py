"""Whether a search orders meshes as compiled programs do: candidates at random, as written and constrained."""

import functools as ft
import statistics
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

import shardfx as sfx
from shardfx import chips
from shardfx.auto._asked import asked_for
from shardfx.auto._checked import jitted
from shardfx.auto._core import find
from shardfx.auto._search import opened
from shardfx.auto._space import various
from shardfx.cost._hlo_text import parse_hlo
from shardfx.cost._work import work_of

from ._case import Finding, Limit, Value
from ._zoo import models


_Pair = tuple[float, float]  # ours, the program's

# Whose seconds are compared.
_CHIP = "v5e"
_CONSTRAINED, _WRITTEN, _SECONDS = (
    "spearman of bytes, constrained",
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
            tuple(Limit(value, at_least=0.9) for value in (_CONSTRAINED, _WRITTEN, _SECONDS)),
        )
        for name in _MODELS
    ]


def _order(name: str, few: int, devices: Sequence[Any]) -> dict[str, Value]:
    """Candidates drawn from all places of the core's order, by what their programs send and compute.

    Each is partitioned, and compiled, as it is written and as it is constrained. Seconds are those of products and
    sending on a TPU, nothing hidden.
    """
    step, *args = models(jnp.float32)[name]()
    space, pricer = opened(step, args, asked_for("cpu:8", None), sfx.auto.Limits(), (), lambda _: None)
    found, _ = find(space.terms, space.machine(), 8, keep=4000)
    rng = np.random.default_rng(0)
    drawn = [found[i] for i in sorted(rng.permutation(len(found))[: 6 * few])]
    ones = list(various(space, drawn, 6 * few))
    ones = [ones[i] for i in sorted(rng.permutation(len(ones))[:few])]
    pairs: dict[bool, list[_Pair]] = {False: [], True: []}
    seconds: list[_Pair] = []
    for one in ones:
        for constrained in (False, True):
            made = pricer.priced(one, constrained=constrained)
            sent, flops = _compiled(pricer, made, devices)
            pairs[constrained].append((float(made.wire_bytes), float(sent.wire_bytes)))
            if not constrained:
                assert made.traffic is not None
                # Both by the flops of the compiled program: what is held against it is the sending.
                seconds.append((_seconds(made.traffic, flops, made.mesh), _seconds(sent, flops, made.mesh)))
    return {
        _CONSTRAINED: _spearman(pairs[True]),
        _WRITTEN: _spearman(pairs[False]),
        _SECONDS: _spearman(seconds),
        "candidates": len(ones),
        **_ratios("constrained", pairs[True]),
        **_ratios("as written", pairs[False]),
    }


def _compiled(pricer: Any, one: sfx.auto.Candidate, devices: Sequence[Any]) -> tuple[sfx.cost.Traffic, float]:
    """What a program sends, and how many operations of products a device does."""
    plans = [plan.on(one.mesh.build(devices)) for plan in one.plans]
    program = jitted(pricer, one, plans).lower(*pricer.args).compile()
    return sfx.cost.traffic(program, one.mesh), work_of(parse_hlo(program.as_text())).flops


def _seconds(sent: sfx.cost.Traffic, flops: float, mesh: sfx.MeshSpec) -> float:
    """Products and sending on the chip of `_CHIP`, nothing hidden."""
    return flops / chips.find(_CHIP).flops("bfloat16") + sfx.cost.seconds(sent, _CHIP, mesh).seconds


def _ratios(how: str, pairs: Sequence[_Pair]) -> dict[str, Value]:
    found = [ours / theirs for ours, theirs in pairs if theirs]
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

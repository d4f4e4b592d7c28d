"""Whether a search orders meshes as compiled programs do: candidates at random, as the
step is written.
"""

import functools as ft
import statistics
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh

import shardfx as sfx
from shardfx import chips
from shardfx._step import parse_hlo
from shardfx.auto._asked import search_options
from shardfx.auto._core import find
from shardfx.auto._programs import jitted
from shardfx.auto._search import opened_search
from shardfx.auto._space import distinct_candidates
from shardfx.cost._work import work_of

from ._case import Finding, Limit, Value
from ._zoo import models
from .unseen import _open, _sealed


_Pair = tuple[float, float]  # ours, the program's

# Whose seconds are compared.
_CHIP = "v5e"
_BYTES = "spearman of bytes"
_SECONDS = "spearman of seconds"
# A dense model, experts, an encoder with a decoder, convolutions; and steps by authors
# who had not read the search.
_MODELS = ("dense 0.1B", "experts", "T5", "convolutions")
UNSEEN = (
    "gru-language-hidden-cut",
    "clip-two-towers",
    "decode-dynamic-update-slice",
    "vit-fused-qkv-equinox",
)
# Three with convolutions, one with windows, and two plain ones.
SEALED = (
    "resnet-nhwc-batch-norm",
    "unet-nhwc-channels-cut",
    "conformer-on-three-by-two",
    "swin-shifted-windows",
    "byol-two-views-target-average",
    "zero-one-optimizer-cut-alone",
)


def cases(few: int, devices: Sequence[Any]) -> list[Finding]:
    """A finding for each model."""
    return [
        Finding(
            f"order of {few} candidates against compiled programs, {name}",
            ft.partial(_order, name, few, devices),
            (Limit(_BYTES, at_least=0.98),),
        )
        for name in (*_MODELS, *UNSEEN)
    ]


def _order(name: str, few: int, devices: Sequence[Any]) -> dict[str, Value]:
    """Candidates drawn from all places of the core's order, by what their programs send
    and compute.

    Each is partitioned as the step is written, as a search does it for a CPU, and
    compiled for as many CPU devices. Seconds are those of products and sending on a
    TPU, nothing hidden.
    """
    if name in UNSEEN:
        step, *args = unseen_step(name)
    else:
        step, *args = models(jnp.float32)[name]()
    space, lowered = opened_search(
        step=step,
        args=args,
        options=search_options("cpu:8", None),
        limits=sfx.auto.Limits(),
        also=(),
        tell=lambda _: None,
    )
    candidates = find(space.terms, space.machine(), 8, keep=4000)
    rng = np.random.default_rng(0)
    drawn = [candidates[i] for i in sorted(rng.permutation(len(candidates))[: 6 * few])]
    ones = list(distinct_candidates(space, drawn, 6 * few))
    ones = [ones[i] for i in sorted(rng.permutation(len(ones))[:few])]
    sent: list[_Pair] = []
    seconds: list[_Pair] = []
    for candidate in ones:
        partitioned = lowered.partitioned(candidate)
        compiled, flops = _compiled(lowered, partitioned, devices)
        sent.append((float(partitioned.wire_bytes), float(compiled.wire_bytes)))
        # Both by the flops of the compiled program: what is held against it is the
        # sending.
        seconds.append(
            (
                _seconds(partitioned.traffic, flops, partitioned.mesh),
                _seconds(compiled, flops, partitioned.mesh),
            )
        )
    return {
        _BYTES: _spearman(sent),
        _SECONDS: _spearman(seconds),
        "candidates": len(ones),
        **_ratios(sent),
    }


def unseen_step(name: str) -> tuple[Any, ...]:
    """The step of an unseen case and its arguments, without the plan that the case has."""
    cases = (*_open.CASES, *_sealed.CASES)
    case = next(unseen for unseen in cases if unseen.name == name)
    axis_sizes = tuple(case.v5e.values())
    step, args = case.make(AbstractMesh(axis_sizes, tuple(case.v5e)))
    return step, *jax.tree.map(
        lambda leaf: (
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
            if isinstance(leaf, jax.ShapeDtypeStruct)
            else leaf
        ),
        args,
    )


def _compiled(
    lowered: Any, candidate: sfx.auto.Candidate, devices: Sequence[Any]
) -> tuple[sfx.cost.Traffic, float]:
    """What a program sends, and how many operations of products a device does."""
    plans = [plan.on(candidate.mesh.build(devices)) for plan in candidate.plans]
    program = jitted(lowered, candidate, plans).lower(*lowered.args).compile()
    sent = sfx.cost.traffic(program, candidate.mesh)
    return (
        sent,
        work_of(parse_hlo(program.as_text())).flops,
    )


def _seconds(sent: sfx.cost.Traffic, flops: float, mesh: sfx.MeshSpec) -> float:
    """Products and sending on the chip of `_CHIP`, nothing hidden."""
    return (
        flops / chips.find(_CHIP).flops("bfloat16")
        + sfx.cost.seconds(sent, _CHIP, mesh).seconds
    )


def _ratios(pairs: Sequence[_Pair]) -> dict[str, Value]:
    ratios = [ours / theirs for ours, theirs in pairs if theirs]
    return {
        "median of bytes over compiled": statistics.median(ratios),
        "least of bytes over compiled": min(ratios),
        "most of bytes over compiled": max(ratios),
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

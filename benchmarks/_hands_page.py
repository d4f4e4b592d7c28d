"""The page of the choices against rules by hand, from the cases that were kept."""

from collections.abc import Mapping, Sequence
from typing import Any


NAME = "search_hands.md"
# From this ratio on a choice is no better.
BETTER = 0.995
_INTRODUCTION = """Twelve training steps, and for each the plan that [`shardfx.auto.search`][] chooses among those that
`verify="compile"` compiles, against the best of the ways that people write by hand: data parallelism, fully sharded,
tensor parallelism and their pairs, with and without cut sequences, and experts apart, each with the sizes that the
estimate prefers. The rules of T5X, MaxText and Megatron are among them.

A step's time is computation and sending, nothing hidden: on TPUs the cycles that their compiler tells, on emulated CPU
devices the products; the sending is what the compiled program sends, over the links of the data sheet. All ways are
compiled in a hurry first (`jax_exec_time_optimization_effort=-1`), then the best of each kind with all care; only those
times count. A way by hand that seems 2.5 times slower than the best by estimate is not compiled, another at 1.6 times.
By the clock means small versions of the same models, run in turn on 8 emulated CPU devices; there the choice is still
the one that compiling made. Those times are of a machine that had other work, and 0.05 is within their noise.

`python -m benchmarks search --hands --slice tpu:v5e:4x4` measures what is missing, and keeps each case in
`benchmarks/results/hands`, with every candidate. A ratio below 1 says that the choice is faster."""


def page(cases: Sequence[Mapping[str, Any]]) -> str:
    """docs/search_hands.md: a table for each slice."""
    parts = ["# The choice against rules by hand", _INTRODUCTION]
    for target in dict.fromkeys(case["target"] for case in cases):
        these = [case for case in cases if case["target"] == target]
        ratios = [case["values"]["choice over best by hand"] for case in these]
        better = sum(ratio < BETTER for ratio in ratios)
        told = (
            f"{len(these)} of 12 models: better for {better}, {min(ratios):.3f} at best and {max(ratios):.3f} at worst."
        )
        timed = [case["values"].get("choice by the clock over best by hand") for case in these]
        if all(timed):
            told += f' What `verify="run"` would choose of the same: {min(timed):.3f} to {max(timed):.3f}.'
        parts += [f"## {target}", told, _table(these)]
    return "\n\n".join(parts) + "\n"


def _table(cases: Sequence[Mapping[str, Any]]) -> str:
    lines = ["| model | choice | ms | best by hand | ms | ratio |", "| --- | --- | ---: | --- | ---: | ---: |"]
    for case in cases:
        values = case["values"]
        cells = (
            case["model"],
            values["choice"],
            _ms(values["choice ms"]),
            values["best by hand"],
            _ms(values["best by hand ms"]),
            f"{values['choice over best by hand']:.3f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"

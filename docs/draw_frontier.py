"""Draws what a step costs for several batches and numbers of devices, as
docs/frontier.svg.

python docs/draw_frontier.py
"""

import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import jax.numpy as jnp

import shardfx


ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks._llama import llama  # noqa: E402


DEVICES, BATCHES = (16, 32, 64, 128, 256), (64, 256, 1024)
COLORS = {64: "#0b6e4f", 256: "#1f5fa8", 1024: "#b4451f"}
WIDTH, HEIGHT, LEFT, TOP, GAP = 760, 250, 76, 34, 70
ROW = 16


def logarithmic(
    values: Sequence[float], start: float, end: float
) -> Callable[[float], float]:
    """From a value to a place between two pixels."""
    low, high = math.log(min(values)), math.log(max(values))
    return lambda value: (
        start + (end - start) * (math.log(value) - low) / max(high - low, 1e-9)
    )


def line(points: Sequence[tuple[float, float]], color: str) -> list[str]:
    """Points that are joined."""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dots = [
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{color}"/>' for x, y in points
    ]
    return [
        f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>',
        *dots,
    ]


def text(
    x: float, y: float, words: str, anchor: str = "start", color: str = "#333"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
        f' fill="{color}">{words}</text>'
    )


def number(value: float) -> str:
    """Three digits, and no exponent."""
    return f"{float(f'{value:.3g}'):,g}"


def ticks(
    values: Sequence[float],
    place: Callable[[float], float],
    at: float,
    unit: str,
    upright: bool,
) -> list[str]:
    """Numbers along an axis: the ends, and one between."""
    ends = sorted({min(values), max(values), math.sqrt(min(values) * max(values))})
    if upright:
        return [
            text(LEFT - 8, place(value) + 4, f"{number(value)}{unit}", "end")
            for value in ends
        ]
    return [
        text(place(value), at + 18, f"{number(value)}{unit}", "middle")
        for value in ends
    ]


def drawn() -> str:
    """The picture."""
    model = llama(2, 4096, 14336, 8, 4, 128, 128256, 64, 2048, jnp.bfloat16)
    found = shardfx.auto.frontier(*model, devices=DEVICES, chip="v5p", batches=BATCHES)
    parts: list[str] = []
    fastest = found.fastest()
    rates = [point.per_second for point in fastest]
    x, y = (
        logarithmic(DEVICES, LEFT, WIDTH - 120),
        logarithmic(rates, TOP + HEIGHT, TOP),
    )
    parts += [
        text(
            LEFT,
            TOP - 14,
            "examples per second, by devices (v5p): the fastest mesh that fits",
        )
    ]
    free = TOP + HEIGHT + ROW
    for batch in BATCHES:
        points = [(x(p.devices), y(p.per_second)) for p in fastest if p.batch == batch]
        parts += line(points, COLORS[batch])
        if points:
            # Lines may end at one point; their labels stand a row apart.
            free = min(free - ROW, points[-1][1] + 4)
            words = f"batch of {batch}"
            parts += [text(WIDTH - 108, free, words, color=COLORS[batch])]
    parts += ticks(rates, y, 0, "", True)
    parts += [
        text(x(count), TOP + HEIGHT + 20, str(count), "middle") for count in DEVICES
    ]
    top = TOP + HEIGHT + GAP
    chosen = {batch: found.of(64, batch) for batch in BATCHES}
    times = [
        point.candidate.seconds * 1e3 for points in chosen.values() for point in points
    ]
    held = [
        point.candidate.memory_bytes / 2**30
        for points in chosen.values()
        for point in points
    ]
    x, y = logarithmic(held, LEFT, WIDTH - 120), logarithmic(times, top + HEIGHT, top)
    parts += [
        text(
            LEFT,
            top - 14,
            "ms of a step, by GiB that a device holds, on 64: what nothing beats in"
            " both",
        )
    ]
    for batch, points in chosen.items():
        parts += line(
            [
                (x(p.candidate.memory_bytes / 2**30), y(p.candidate.seconds * 1e3))
                for p in points
            ],
            COLORS[batch],
        )
    parts += ticks(times, y, 0, "", True) + ticks(held, x, top + HEIGHT, " GiB", False)
    size = top + HEIGHT + 34
    box = f'viewBox="0 0 {WIDTH} {size}"'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {box} font-family="sans-serif"'
        ' font-size="12">'
    )
    return "\n".join(
        [
            head,
            f'<rect width="{WIDTH}" height="{size}" fill="white"/>',
            *parts,
            "</svg>",
            "",
        ]
    )


if __name__ == "__main__":
    (ROOT / "docs" / "frontier.svg").write_text(drawn())

"""Plots of results as SVG text: each from the same files as the tables, or nothing
where they lack its numbers.
"""

import html
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple


# Okabe and Ito's palette, which colour-blind people can tell apart; marks differ in
# form, too.
OURS = "#0072b2"
THEIRS = "#e69f00"
SLOWER = "#d55e00"
INK = "#16202c"
SOFT = "#5a6675"
GRID = "#e3e7ec"
FONT = (
    'font-family="system-ui, -apple-system, Segoe UI, Roboto, Helvetica, Arial,'
    ' sans-serif"'
)
_CENSUS = re.compile(r"(XLA|shardfx): pairs (?:at|above) (.*)")
_SIZES = re.compile(r"ns per leaf at ([\d,]+)")


class Race(NamedTuple):
    """A race of a suite, and how many times as fast as each rival shardfx is."""

    suite: str
    name: str
    speedups: Mapping[str, float]


def plots(files: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[str, str]]:
    """For each plot that the results have the numbers for: its file's name, what it
    shows, and the SVG.
    """
    plot_by_name = {
        "benchmarks_speed.svg": (SPEED_TEXT, speed(files)),
        "benchmarks_memory.svg": (MEMORY_TEXT, memory(files)),
        "benchmarks_planning.svg": (PLANNING_TEXT, planning(files)),
    }
    return {
        name: (text, drawn)
        for name, (text, drawn) in plot_by_name.items()
        if drawn is not None
    }


SPEED_TEXT = (
    "Speed against rivals: each line is a race, from the fastest rival (a full mark) to"
    " the slowest. Right of 1, shardfx is faster."
)
MEMORY_TEXT = (
    "Temporary memory of moves: how many of them take how much, over the larger shard,"
    " for random pairs of shardings on one large matrix. XLA's own program against the"
    " planned steps."
)
PLANNING_TEXT = (
    "Planning time against size: a tree of equal layers as a line, and the races as"
    " marks, rivals included."
)


def _records(
    files: Mapping[str, Mapping[str, Any]],
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The suite and each record of the files that were measured at full size."""
    for document in files.values():
        if not document["quick"]:
            for suite, records in document["suites"].items():
                yield from ((suite, record) for record in records)


def races(files: Mapping[str, Mapping[str, Any]]) -> list[Race]:
    """Every race at full size in which a rival was timed."""
    rows = []
    for suite, record in _records(files):
        # What begins with "shardfx" is another way of ours.
        rivals = [name for name in record["rivals"] if not name.startswith("shardfx")]
        pairs = {name: record["values"].get(f"speedup.{name}") for name in rivals}
        speedups = {
            name: float(value)
            for name, value in pairs.items()
            if isinstance(value, int | float)
        }
        if speedups:
            rows.append(Race(suite, record["name"], speedups))
    return rows


def speed(files: Mapping[str, Mapping[str, Any]]) -> str | None:
    """A line for each race on a logarithmic scale, by suite."""
    rows = races(files)
    if not rows:
        return None
    suites = list(dict.fromkeys(row.suite for row in rows))
    low = min(min(row.speedups.values()) for row in rows)
    high = max(max(row.speedups.values()) for row in rows)
    scale = _Scale(
        low=min(0.5, low * 0.9), high=max(2.0, high * 1.1), start=430, end=880
    )
    marks = []
    y = 56
    for suite in suites:
        marks.append(_text(20, y + 4, suite, weight=600))
        y += 22
        for row in (row for row in rows if row.suite == suite):
            marks += _line_of(row, y, scale)
            y += 18
        y += 10
    cases = (0.001, 0.01, 0.1, 0.5, 1, 2, 5, 10, 100, 1000)
    ticks = [tick for tick in cases if scale.holds(tick)]
    parts = [
        *_ticks(
            scale,
            ticks=ticks,
            top=40,
            bottom=y,
            unit="x",
        ),
        *marks,
    ]
    return _picture(910, y + 24, "shardfx is faster by", parts)


def _line_of(row: Race, y: float, scale: "_Scale") -> list[str]:
    nearest = min(row.speedups.values())
    farthest = max(row.speedups.values())
    colour = OURS if nearest >= 1 else SLOWER
    speedups = "; ".join(
        f"{value:.2f} x {name}" for name, value in row.speedups.items()
    )
    named = [
        f'<circle cx="{scale(value):.1f}" cy="{y}" r="3.2" fill="#ffffff"'
        f' stroke="{colour}" stroke-width="1.4"/>'
        for value in row.speedups.values()
        if value != nearest
    ]
    return [
        f"<g><title>{html.escape(f'{row.name}: {speedups}')}</title>",
        _text(410, y + 4, _short(row.name, 58), anchor="end", size=11.5),
        (
            f'<line x1="{scale(nearest):.1f}" x2="{scale(farthest):.1f}" y1="{y}"'
            f' y2="{y}" stroke="{colour}" stroke-width="1.6" stroke-opacity=".45"/>'
        ),
        *named,
        f'<circle cx="{scale(nearest):.1f}" cy="{y}" r="4.2" fill="{colour}"/></g>',
    ]


def memory(files: Mapping[str, Mapping[str, Any]]) -> str | None:
    """A histogram of both programs' temporary memory, for the census with most pairs
    that has it.
    """
    counted = [
        (record["values"].get("pairs", 0), record)
        for _, record in _records(files)
        if _spread(record["values"])
    ]
    if not counted:
        return None
    pairs, record = max(counted, key=lambda item: item[0])
    counts = _spread(record["values"])
    most = max(max(bars.values()) for bars in counts.values())
    margin = 60
    width = 820 / len(counts)
    top = 86
    height = 210
    parts = [_text(20, 48, f"{record['name']}: moves", colour=SOFT)]
    for group, (label, bars) in enumerate(counts.items()):
        x = margin + group * width
        for name, colour, shift in (("XLA", THEIRS, 0.1), ("shardfx", OURS, 0.5)):
            count = bars.get(name, 0)
            tall = height * count / most
            parts.append(
                f"<g><title>{name}, {label}: {count} of {pairs}</title><rect"
                f' x="{x + shift * width:.1f}" y="{top + height - tall:.1f}"'
                f' width="{0.38 * width:.1f}" height="{tall:.1f}" fill="{colour}"/></g>'
            )
            place = x + (shift + 0.19) * width
            parts.append(
                _text(
                    place, top + height - tall - 5, str(count), anchor="middle", size=11
                )
            )
        parts.append(
            _text(x + width / 2, top + height + 18, label, anchor="middle", size=11.5)
        )
    base = top + height
    parts.append(
        f'<line x1="{margin - 6}" x2="{margin + 826}" y1="{base}" y2="{base}"'
        f' stroke="{SOFT}"/>'
    )
    parts.append(
        _text(
            margin + 410,
            base + 38,
            "temporary memory, times the larger shard",
            anchor="middle",
            colour=SOFT,
        )
    )
    entries = [("XLA's program", THEIRS), ("shardfx's steps", OURS)]
    parts += _key(690, 44, entries)
    return _picture(910, base + 52, "Memory of a move", parts)


def _spread(values: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """For each interval of the census the counts of both programs."""
    counts: dict[str, dict[str, int]] = {}
    for key, value in values.items():
        if match := _CENSUS.fullmatch(key):
            name = match[1]
            interval = match[2].replace("x, up to ", " to ")
            if interval == "0x":
                label = "none"
            elif " to " in interval:
                label = interval.removesuffix("x")
            else:
                label = f"> {interval}"
            counts.setdefault(label.removesuffix("x"), {})[name] = value
    return counts


class _Timed(NamedTuple):
    """What a library needs to plan one case."""

    leaves: int
    library: str
    seconds: float
    case: str


def planning(files: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Seconds against leaves, both logarithmic."""
    lines = []
    points: list[_Timed] = []
    for suite, record in _records(files):
        line = _line_of_sizes(record["values"])
        if line:
            lines.append(line)
        if suite == "plan" and "leaves" in record["values"]:
            points += _points_of(record)
    if not lines or not points:
        return None
    times = [point.seconds for point in points]
    for line in lines:
        times += [seconds for _, seconds in line]
    across = _Scale(low=700, high=150_000, start=80, end=640)
    down = _Scale(low=min(times) * 0.7, high=max(times) * 1.4, start=330, end=60)
    names = list(dict.fromkeys(point.library for point in points))
    looks = {
        name: _LOOKS[position % len(_LOOKS)] for position, name in enumerate(names)
    }
    parts = _ticks(
        across,
        ticks=[1000, 10_000, 100_000],
        top=60,
        bottom=330,
        unit="",
    )
    parts += _rows_of_seconds(down)
    for line in lines:
        path = " ".join(
            f"{across(leaves):.1f},{down(seconds):.1f}" for leaves, seconds in line
        )
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{OURS}"'
            ' stroke-width="2.4"/>'
        )
    for point in points:
        x = across(point.leaves)
        y = down(point.seconds)
        text = f"{point.library}, {point.case}: {_seconds(point.seconds)}"
        mark = looks[point.library].mark(x, y)
        parts.append(f"<g><title>{html.escape(text)}</title>{mark}</g>")
        if point.library == names[0]:
            parts.append(_label_of(point, x, y))
    parts.append(_text(360, 368, "leaves", anchor="middle", colour=SOFT))
    parts.append(
        f'<line x1="670" x2="690" y1="78" y2="78" stroke="{OURS}" stroke-width="2.4"/>'
    )
    parts.append(_text(698, 82, "shardfx, equal layers", size=12))
    for row, name in enumerate(names):
        parts.append(looks[name].mark(680, 102 + 24 * row))
        parts.append(_text(698, 106 + 24 * row, name, size=12))
    return _picture(910, 384, "Time to plan", parts)


def _line_of_sizes(values: Mapping[str, Any]) -> list[tuple[int, float]]:
    """Pairs of leaves and seconds."""
    line = []
    for key, nanoseconds in values.items():
        if match := _SIZES.fullmatch(key):
            leaves = int(match[1].replace(",", ""))
            line.append((leaves, leaves * nanoseconds * 1e-9))
    return line


def _points_of(record: Mapping[str, Any]) -> list[_Timed]:
    values = record["values"]
    return [
        _Timed(
            leaves=values["leaves"],
            library=name,
            seconds=values[f"seconds.{name}"],
            case=record["name"],
        )
        for name in _timed(record)
    ]


def _label_of(point: _Timed, x: float, y: float) -> str:
    label = point.case.replace(f"{point.leaves:,} leaves", "").strip(", ")
    if x > 240:
        return _text(x - 9, y + 4, label, anchor="end", size=11, colour=SOFT)
    return _text(x + 9, y + 14, label, anchor="start", size=11, colour=SOFT)


def _timed(record: Mapping[str, Any]) -> list[str]:
    return [name for name in record["rivals"] if f"seconds.{name}" in record["values"]]


class _Look(NamedTuple):
    """A mark for a contestant: points of a polygon about its middle, or none for a
    circle.
    """

    colour: str
    corners: tuple[tuple[float, float], ...] = ()

    def mark(self, x: float, y: float) -> str:
        if not self.corners:
            return (
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{self.colour}"'
                ' stroke="#ffffff"/>'
            )
        points = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in self.corners)
        return f'<polygon points="{points}" fill="{self.colour}" stroke="#ffffff"/>'


_LOOKS = (
    _Look(OURS),
    _Look(THEIRS, ((-5, -5), (5, -5), (5, 5), (-5, 5))),
    _Look("#cc79a7", ((0, -6), (6, 5), (-6, 5))),
    _Look("#009e73", ((0, -6.5), (6.5, 0), (0, 6.5), (-6.5, 0))),
)


class _Scale:
    """A logarithmic scale from values to pixels."""

    def __init__(self, low: float, high: float, start: float, end: float):
        self.low = low
        self.high = high
        self.start = start
        self.end = end

    def __call__(self, value: float) -> float:
        return self.start + (self.end - self.start) * math.log(
            value / self.low
        ) / math.log(self.high / self.low)

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high


def _rows_of_seconds(down: _Scale) -> list[str]:
    parts = []
    for tick in (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0):
        if down.holds(tick):
            y = down(tick)
            parts.append(
                f'<line x1="80" x2="640" y1="{y:.1f}" y2="{y:.1f}" stroke="{GRID}"/>'
            )
            parts.append(
                _text(72, y + 4, _seconds(tick), anchor="end", size=11.5, colour=SOFT)
            )
    return parts


def _ticks(
    scale: _Scale, ticks: Sequence[float], top: float, bottom: float, unit: str
) -> list[str]:
    parts = []
    for tick in ticks:
        x = scale(tick)
        if unit and tick == 1:
            colour = SOFT
            wide = 1.4
        else:
            colour = GRID
            wide = 1
        line = f'x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}"'
        parts.append(f'<line {line} stroke="{colour}" stroke-width="{wide}"/>')
        parts.append(
            _text(
                x,
                bottom + 16,
                f"{tick:,g}{unit}",
                anchor="middle",
                size=11.5,
                colour=SOFT,
            )
        )
    return parts


def _key(x: float, y: float, entries: Sequence[tuple[str, str]]) -> list[str]:
    parts = []
    for row, (name, colour) in enumerate(entries):
        parts.append(
            f'<rect x="{x}" y="{y + 20 * row}" width="12" height="12" rx="2"'
            f' fill="{colour}"/>'
        )
        parts.append(_text(x + 20, y + 20 * row + 10, name, size=12))
    return parts


def _picture(width: float, height: float, title: str, parts: Sequence[str]) -> str:
    box = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {box} {FONT} role="img">'
    back = f'<rect width="{width:g}" height="{height:g}" rx="8" fill="#ffffff"/>'
    named = [
        f"<title>{html.escape(title)}</title>",
        back,
        _text(20, 28, title, weight=600, size=15),
    ]
    return "\n".join([head, *named, *parts, "</svg>", ""])


def _text(
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "start",
    size: float = 12.5,
    weight: int = 400,
    colour: str = INK,
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"'
        f' font-weight="{weight}" fill="{colour}">{html.escape(text)}</text>'
    )


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}\u2026"


def _seconds(value: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if value * scale >= 0.999:
            return f"{value * scale:.3g} {unit}"
    return f"{value * 1e9:.3g} ns"

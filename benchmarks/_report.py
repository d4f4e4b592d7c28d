"""Results as tables, as JSON, as a comparison of two files, and as the pages of docs/."""

import dataclasses
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from ._case import Value
from ._plots import plots
from ._runner import Record


FORMAT = 1
HEADER = (
    "case",
    "contestant",
    "cold",
    "median",
    "GB/s",
    "x floor",
    "shardfx is faster by",
)
COMMANDS = """\
```bash
pip install '.[bench]'             # in a clone
python -m benchmarks all --quick   # every suite, a few minutes
python -m benchmarks plan          # one suite at full size; so reshard, load, train
python -m benchmarks docs          # this page
```"""
INTRODUCTION = """\
Written by `python -m benchmarks docs` from the files in `benchmarks/results`; do not edit by hand.
`benchmarks/README.md` says how each number is taken. Rivals run in the same process and in turn with
shardfx, on fresh inputs, after their results were checked. Times are medians; *cold* is the first call,
compilation included; *x floor* is the median over that of the least possible work, the last row of its
case; *shardfx is faster by* is the contestant's median over shardfx's, so that below 1 it is the faster one."""
# Where the files with every number are.
FILES = "https://github.com/shardfx/shardfx/blob/main/benchmarks/results"
HANDS_HEADER = ("devices", "models", "choice is faster", "best ratio", "worst ratio")
# From this ratio on a choice is no better.
BETTER = 0.995
SHORT_HEADER = ("race", "shardfx", "fastest rival", "shardfx is faster by")
HANDS = """\
Training steps under the plan that `search` chooses; the ratio is its time over that of the best plan by hand. *By the
clock* is small models on 8 emulated devices; other times are the compiler's cycles plus the bytes over the links."""
POLICIES = """\
`python -m benchmarks.policy models`: twelve losses, each under four budgets. Memory is libtpu's count. The ratio is
the gradient's operations over those of the best of JAX's stock policies that fits."""
SUBSETS = (
    "The operations of a policy over the fewest of all subsets of a layer's values that"
    " fit, the worst of twelve budgets"
)
POLICIES_HEADER = ("chip", "policies", "under the budget", "least", "median", "most")
SHOWN_APART = (
    "seconds.",
    "cold_seconds.",
    "gigabytes_per_second.",
    "floor_ratio.",
    "speedup.",
)


def to_json(
    results: Mapping[str, Sequence[Record]],
    machine: Mapping[str, Any],
    versions: Mapping[str, str],
    quick: bool,
) -> str:
    suites = {
        name: [dataclasses.asdict(record) for record in records]
        for name, records in results.items()
    }
    document = {
        "format": FORMAT,
        "quick": quick,
        "machine": dict(machine),
        "versions": dict(versions),
        "suites": suites,
    }
    return json.dumps(document, indent=1) + "\n"


def table(records: Sequence[Record]) -> str:
    """The records of one suite as Markdown tables, of races and of findings; then
    limits, and what was skipped.
    """
    rows = list(chain.from_iterable(map(_rows, records)))
    if rows:
        parts = [_aligned([HEADER, *rows])]
    else:
        parts = []
    texts = [
        f"{r.name}: {_facts(r)}" for r in records if r.kind == "race" and _facts(r)
    ]
    parts += _lines(
        "Values",
        texts,
    )
    findings = [record for record in records if record.kind == "finding"]
    findings_rows = list(chain.from_iterable(map(_found, findings)))
    if findings_rows:
        parts += [_aligned([("finding", "value", "measured"), *findings_rows])]
    limits = []
    for record in records:
        limits += [f"{record.name}: {_limit(limit)}" for limit in record.limits]
    parts += _lines("Limits", limits)
    parts += _lines("Skipped", _skipped(records))
    parts += _lines("Failed", [f"{r.name}: {r.failed}" for r in records if r.failed])
    return "\n\n".join(parts)


def compare(first: Mapping[str, Any], second: Mapping[str, Any]) -> str:
    """Every number that both files hold, with the ratio second / first."""
    rows = [("suite", "case", "value", "first", "second", "ratio")]
    for suite, records in first["suites"].items():
        others = {record["name"]: record for record in second["suites"].get(suite, ())}
        for record in records:
            before = record["values"]
            after = others.get(record["name"], {"values": {}})["values"]
            for key, value in before.items():
                if _is_number(value) and _is_number(after.get(key)):
                    ratio = f"{after[key] / value:.3f}" if value else "-"
                    rows.append(
                        (
                            suite,
                            record["name"],
                            key,
                            _number(value),
                            _number(after[key]),
                            ratio,
                        )
                    )
    versions = sorted({*first["versions"], *second["versions"]})
    changed = [
        v for v in versions if first["versions"].get(v) != second["versions"].get(v)
    ]
    notes = [
        f"{v}: {first['versions'].get(v, 'none')} ->"
        f" {second['versions'].get(v, 'none')}"
        for v in changed
    ]
    notes += _only("first", first, second) + _only("second", second, first)
    if first["machine"] != second["machine"]:
        notes.append("the machines differ: compare ratios, not seconds")
    return "\n\n".join([_aligned(rows), *_lines("Differences", notes)])


def page(
    files: Mapping[str, Mapping[str, Any]], hands: Sequence[Mapping[str, Any]] = ()
) -> str:
    """docs/benchmarks.md: what does not hold, the plots, then a short table for each
    suite at full size.

    **Arguments:**

    - `files`: the committed results by name.
    - `hands`: the cases of the search against rules by hand.
    """
    parts = ["# Benchmarks", COMMANDS, *_summary(files), INTRODUCTION]
    for name, (text, _) in plots(files).items():
        parts += [f"![{text.partition(':')[0]}]({name})", text]
    counted = []
    for name, document in files.items():
        if document["quick"]:
            continue
        link = f"[All numbers]({FILES}/{name}.json)"
        for suite, plain_records in document["suites"].items():
            records = [Record(**record) for record in plain_records]
            races = _race_rows(records)
            if not races:
                _, limits = _counts(records)
                counted.append(f"[{name}]({FILES}/{name}.json) ({limits})")
                continue
            table_of_races = _aligned([SHORT_HEADER, *races])
            findings, limits = _counts(records)
            counts = f"{findings} findings, {limits} limits hold. {link}."
            parts += [f"## {name}: {suite}", table_of_races, counts]
    if counted:
        results = ", ".join(counted)
        parts += ["## Without a race", f"Limits that hold: {results}."]
    if hands:
        parts += [
            "## The search against rules by hand",
            HANDS,
            _aligned([HANDS_HEADER, *_by_hand(hands)]),
        ]
    return "\n\n".join(parts) + "\n"


def policies(document: Mapping[str, Any], subsets: Mapping[str, Any]) -> str:
    """The section about memory policies, from the results of `benchmarks.policy` and
    `benchmarks.policy_subsets`.
    """
    rows: list[tuple[str, ...]] = [POLICIES_HEADER]
    for chip, models in document["models"].items():
        records = list(chain.from_iterable(models.values()))
        ratios = [
            record["flops"] / record["flops_of_best_stock_policy"]
            for record in records
            if record["flops_of_best_stock_policy"] is not None
        ]
        under = sum(
            record["peak_bytes"] <= record["budget_bytes"] for record in records
        )
        numbers = (min(ratios), statistics.median(ratios), max(ratios))
        cells = (f"{number:.3f}" for number in numbers)
        rows.append((chip, str(len(records)), str(under), *cells))
    parts = ["## Memory policies", POLICIES, _aligned(rows)]
    deep = []
    for chip, models in document["times"].items():
        for name, record in models.items():
            deep.append(f"{name} for {chip}: {record['seconds']:.1f} s")
    parts += _lines("The time of a policy", deep)
    compiled = [
        f"{name}, {record['subsets']} subsets compiled by libtpu:"
        f" {max(row['ratio'] for row in record['budgets']):.3f}"
        for name, record in subsets.items()
        if "budgets" in record
    ]
    parts += _lines(SUBSETS, compiled)
    return "\n\n".join(parts) + "\n"


def plans_without_rules(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """The section about the memory of steps under plans without rules, from the results
    of `benchmarks.auto_plans --compile`.
    """
    chips: dict[str, list[Mapping[str, Any]]] = {}
    for key, row in rows.items():
        _, _, target = key.rpartition(" on ")
        chips.setdefault(target, []).append(row)
    lines = []
    for target, of_target in chips.items():
        under = sum(row["is under"] for row in of_target)
        fullest = max(row["compiled GiB"] / row["usable GiB"] for row in of_target)
        lines.append(
            f"{target}: {under} of {len(of_target)}, at most {fullest:.2%} of it"
        )
    heading = "Steps under `auto.plan` whose memory by libtpu is below their chip's"
    return "\n\n".join(["## Plans without rules", *_lines(heading, lines)]) + "\n"


def _by_hand(cases: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """One row for each kind of devices."""
    ratios: dict[str, list[float]] = {}
    for case in cases:
        ratios.setdefault(case["target"], []).append(
            case["values"]["choice over best by hand"]
        )
    return [
        (
            target,
            str(len(target_ratios)),
            str(sum(ratio < BETTER for ratio in target_ratios)),
            f"{min(target_ratios):.3f}",
            f"{max(target_ratios):.3f}",
        )
        for target, target_ratios in ratios.items()
    ]


def _race_rows(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """One row for each race: the times of shardfx and of the fastest rival."""
    races = [record for record in records if record.kind == "race"]
    return list(chain.from_iterable(map(_short_row, races)))


def _counts(records: Sequence[Record]) -> tuple[str, str]:
    """How many findings there are, and how many of the limits hold."""
    limits = chain.from_iterable(record.limits for record in records)
    measured = [limit for limit in limits if limit["holds"] is not None]
    held_count = sum(bool(limit["holds"]) for limit in measured)
    findings = sum(record.kind == "finding" for record in records)
    return str(findings), f"{held_count} of {len(measured)}"


def _short_row(record: Record) -> list[tuple[str, ...]]:
    times = {name: record.values.get(f"seconds.{name}") for name in record.rivals}
    measured = {
        name: time for name, time in times.items() if isinstance(time, int | float)
    }
    ours, *others = record.rivals
    rivals = [
        name for name in others if name in measured and not name.startswith("shardfx")
    ]
    if ours not in measured or not rivals:
        return []
    best = min(rivals, key=lambda name: measured[name])
    faster = _number(record.values.get(f"speedup.{best}"))
    return [
        (
            record.name,
            _seconds(measured[ours]),
            f"{_seconds(measured[best])}, {best}",
            faster,
        )
    ]


def _summary(files: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """How many of the limits hold and where, then each that does not, with a link to
    its file.
    """
    measured_count = 0
    broken = []
    for name, document in files.items():
        for suite, records in document["suites"].items():
            for case, limit in _measured_limits(records):
                measured_count += 1
                if not limit["holds"]:
                    broken.append(
                        f"[{name}: {suite}]({FILES}/{name}.json): {case}:"
                        f" {limit['text']}: {_number(limit['measured'])}"
                    )
    machines = "; ".join(
        dict.fromkeys(_machine(document) for document in files.values())
    )
    counted = (
        f"Of {measured_count} limits that were measured,"
        f" {measured_count - len(broken)} hold. Machines: {machines}."
    )
    return [counted, *_lines("These do not hold", broken)]


def _measured_limits(
    records: Sequence[Mapping[str, Any]],
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The name of each record with each of its limits that was measured."""
    for record in records:
        for limit in record["limits"]:
            if limit["holds"] is not None:
                yield record["name"], limit


def _machine(document: Mapping[str, Any]) -> str:
    machine = document["machine"]
    devices = (
        f"{machine['device_count']} x {machine['device_kind']} ({machine['platform']})"
    )
    return (
        f"{devices}, on {machine['processor']}, {machine['cores']} cores,"
        f" {machine['memory_gib']} GiB"
    )


def _rows(record: Record) -> list[tuple[str, ...]]:
    names = [*record.rivals]
    if record.floor:
        names.append(record.floor)
    rows = []
    label = record.name
    for name in names:
        if f"seconds.{name}" in record.values:
            cells = (
                label,
                name,
                _seconds(record.values.get(f"cold_seconds.{name}")),
                _seconds(record.values.get(f"seconds.{name}")),
                _number(record.values.get(f"gigabytes_per_second.{name}")),
                _number(record.values.get(f"floor_ratio.{name}")),
                _number(record.values.get(f"speedup.{name}")),
            )
            rows.append(cells)
        label = ""
    return rows


def _facts(record: Record) -> str:
    shown = {k: v for k, v in record.values.items() if not k.startswith(SHOWN_APART)}
    return ", ".join(f"{key} {_number(value)}" for key, value in shown.items())


def _found(record: Record) -> list[tuple[str, str, str]]:
    rows = []
    label = record.name
    for key, value in record.values.items():
        rows.append((label, key, _number(value)))
        label = ""
    return rows


def _skipped(records: Sequence[Record]) -> list[str]:
    """One line for each contestant and reason, with the cases that it is about."""
    cases: dict[tuple[str, str], list[str]] = {}
    for record in records:
        for name, why in record.skipped.items():
            cases.setdefault((name, why), []).append(record.name)
    return [
        f"{'; '.join(names)}: {name} ({why})" for (name, why), names in cases.items()
    ]


def _limit(limit: Mapping[str, Any]) -> str:
    if limit["holds"] is None:
        return f"{limit['text']}: not measured"
    verdict = "holds" if limit["holds"] else "**does not hold**"
    return f"{limit['text']}: {verdict} ({_number(limit['measured'])})"


def _only(
    name: str, results: Mapping[str, Any], others: Mapping[str, Any]
) -> list[str]:
    other_rows = set(_suites_and_cases(others))
    return [
        f"only in the {name} file: {suite}: {case}"
        for suite, case in _suites_and_cases(results)
        if (suite, case) not in other_rows
    ]


def _suites_and_cases(results: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for suite, records in results["suites"].items():
        for record in records:
            yield suite, record["name"]


def _lines(heading: str, lines: Sequence[str]) -> list[str]:
    if lines:
        return [f"{heading}:\n\n" + "\n".join(f"- {line}" for line in lines)]
    return []


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "| "
        + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        + " |"
        for row in rows
    ]
    text = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    lines.insert(1, text)
    return "\n".join(lines)


def _seconds(value: Value | None) -> str:
    if value is None or isinstance(value, str):
        return "-"
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if value * scale >= 1 or unit == "us":
            return f"{value * scale:.3g} {unit}"
    return "-"


def _number(value: Value | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.3g}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)

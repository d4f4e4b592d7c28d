"""The results of a hunt as a file and as a table."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ._coverage import table as coverage_table
from ._data import Case
from ._driver import Configuration
from ._hunt import MISTAKES, Tally
from ._mutate import UNCHANGED


def document(
    tally: Tally,
    configuration: Configuration,
    causes: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """What the results file holds."""
    return {
        "versions": dict(tally.versions),
        "shardy": configuration.shardy,
        "seed": tally.seed,
        "first": tally.first,
        "draws": tally.last - tally.first,
        "seconds": tally.seconds,
        "counts": {key: dict(tally.counts[key]) for key in sorted(tally.counts)},
        "verdicts": {key: dict(tally.verdicts[key]) for key in sorted(tally.verdicts)},
        "judged": judged_shares(tally),
        "accused": tally.accused,
        "causes": list(causes),
    }


def judged_shares(tally: Tally) -> dict[str, dict[str, float]]:
    """The fractions of operations and of bytes that were judged, by family."""
    shares = {}
    for family, sums in sorted(tally.judged.items()):
        shares[family] = {
            "programs": sums["programs"],
            "operations": round(sums["judged"] / max(1, sums["operations"]), 4),
            "bytes": round(sums["judged_bytes"] / max(1, sums["bytes"]), 4),
        }
    return shares


def mistakes(data: Mapping[str, Any]) -> list[str]:
    """What `verify` says that the numbers refute."""
    verdicts: Mapping[str, int] = data["verdicts"].get("all", {})
    return [word for word in MISTAKES if verdicts.get(word)]


def is_mistake(line: Mapping[str, Any]) -> bool:
    """Whether `verify` proves a mutation that changes numbers, or fails.

    One that it refutes and that changes none is no mistake: a sum of zeros is the same
    when it is done twice.
    """
    if "verdict" not in line:
        return False
    said = line["verdict"]["outcome"]
    if said == "failed":
        return True
    return said == "proved" and line["changed"] > UNCHANGED


def is_harmless(line: Mapping[str, Any]) -> bool:
    """Whether `verify` refutes a mutation that changes no number of the arguments that
    were drawn, such as a softmax that another maximum is taken off.
    """
    return "changed_otherwise" in line


def table(data: Mapping[str, Any]) -> str:
    """The counts, the causes, and what `verify` says, as Markdown."""
    versions = data["versions"]
    lines = [
        f"JAX {versions['jax']}, {_front(data)}, seed {data['seed']}: {data['draws']} programs"
        f" in {data['seconds'] / 60:.0f} minutes",
        "",
    ]
    lines += _counts(data["counts"])
    if data["causes"]:
        lines += [
            "",
            "| cause | cases | smallest program | error |",
            "|---|---|---|---|",
        ]
    for entry in data["causes"]:
        operations = entry["minimal"]["program"]["operations"]
        name = "+".join(op["name"] for op in operations)
        lines.append(
            f"| {entry['cause']} | {entry['cases']} | {name} |"
            f" {entry['outcome'].get('error', '')} |"
        )
    verdicts = data["verdicts"].get("all", {})
    if verdicts:
        lines += ["", "| numbers: verdict | cases |", "|---|---|"]
        lines += [f"| {words} | {count} |" for words, count in sorted(verdicts.items())]
    return "\n".join(lines)


def _counts(counts: Mapping[str, Mapping[str, int]]) -> list[str]:
    chosen = [
        key
        for key in counts
        if key in ("all", "forward", "gradient") or key.startswith("mesh ")
    ]
    outcomes = sorted(set().union(*[counts[key] for key in chosen]))
    lines = [
        "| cases | " + " | ".join(outcomes) + " |",
        "|---" * (len(outcomes) + 1) + "|",
    ]
    for key in chosen:
        numbers = [str(counts[key].get(outcome, 0)) for outcome in outcomes]
        lines.append(f"| {key} | " + " | ".join(numbers) + " |")
    return lines


def replay_line(
    case: Case, outcome: Mapping[str, Any], cause: str, is_same: bool
) -> str:
    """One replayed case in a line."""
    same = "as before" if is_same else "not as before"
    details = {
        key: outcome[key]
        for key in ("error", "equation", "refutation", "message")
        if outcome.get(key)
    }
    return (
        f"{outcome['outcome']}, {same}: {case.program.name} on {case.layout.mesh}"
        f" ({cause}) {details}"
    )


def mutation_table(lines: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """Counts by kind of mutation: changed or not, and what the judge says."""
    counts: dict[str, Counter[str]] = {}
    for line in lines:
        if "verdict" not in line:
            reason = "refused by XLA" if "refused" in line else "skipped"
            counts.setdefault(line.get("kind", "all"), Counter())[reason] += 1
            continue
        words = line["verdict"]["outcome"]
        if "changed" in line:
            words = f"{_change(line)}, {words}"
        for kind in ("all", line["kind"]):
            counts.setdefault(kind, Counter())[words] += 1
    return {kind: dict(counts[kind]) for kind in sorted(counts)}


def _change(line: Mapping[str, Any]) -> str:
    """Whether a mutation changes numbers: of the arguments that were drawn, or at least
    of others.
    """
    if line["changed"] > UNCHANGED:
        return "changed"
    if line.get("changed_otherwise", 0.0) > UNCHANGED:
        return "changed for other arguments"
    return "unchanged"


def section(
    documents: Mapping[str, Mapping[str, Any]],
    rule_sets: Sequence[Mapping[str, Any]] = (),
) -> str:
    """The section of docs/benchmarks.md, from the results files of hunts by name, and
    from those of the sweeps of rule sets.
    """
    lines = [
        "## What XLA's partitioner computes wrongly",
        "",
        "`python -m benchmarks faults`: layers of models and random programs under random",
        "layouts on five meshes of emulated devices, beside one device in float64. Layouts",
        "are uniform over mesh axes, so the rates are not those of users.",
        "Causes are grouped by the faulty operation.",
        "",
        "| JAX | partitioner | cases | wrong | errors | aborts | causes of wrong numbers |",
        "|---|---|---|---|---|---|---|",
    ]
    # Where `verify` judged first, most cases did not run.
    hunts = {
        name: data
        for name, data in documents.items()
        if "causes" in data and not data["verdicts"]
    }
    for data in hunts.values():
        lines.append(_hunt_row(data))
    lines += [
        "",
        "[Wrong numbers](wrong_numbers.md) has the known causes.",
        "",
    ]
    lines += _verdict_rows(documents)
    for data in rule_sets:
        counts = ", ".join(
            f"{outcome}: {count:,}" for outcome, count in data["counts"].items()
        )
        lines.append(
            f"- Rule sets of README, pages and presets on five meshes,"
            f" JAX {data['jax']}: {counts}, not run: {data['not_run']:,}."
        )
    for data in documents.values():
        lines += _form_rows(data)
    lines.append("")
    for data in documents.values():
        if "coverage" in data:
            lines += _coverage_rows(data)
    return "\n".join(lines)


def _hunt_row(data: Mapping[str, Any]) -> str:
    counts: Mapping[str, int] = data["counts"]["all"]
    wrong_causes = [
        entry for entry in data["causes"] if entry["outcome"]["outcome"] == "wrong"
    ]
    cells = (
        data["versions"]["jax"],
        _front(data),
        f"{sum(counts.values()):,}",
        f"{counts.get('wrong', 0):,}",
        f"{counts.get('error', 0):,}",
        f"{counts.get('abort', 0):,}",
        str(len(wrong_causes)) if data["causes"] else "not asked",
    )
    return "| " + " | ".join(cells) + " |"


def _verdict_rows(documents: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What `verify` says beside the numbers, and of mutated programs."""
    lines: list[str] = []
    for data in documents.values():
        counts = data.get("verdicts", {}).get("all") or data.get("mutations", {}).get(
            "all"
        )
        if not counts:
            continue
        what = "mutations" if "mutations" in data else "layouts"
        verdict_counts = ", ".join(
            f"{words}: {count:,}" for words, count in counts.items()
        )
        lines.append(
            f"- `verify` on {what}, JAX {data['versions']['jax']}: {verdict_counts}."
        )
    return lines


def _form_rows(data: Mapping[str, Any]) -> list[str]:
    """What `verify` says of the known faults in other forms, by family, where numbers
    were run.
    """
    lines: list[str] = []
    for family, counts in data.get("forms", {}).items():
        texts = [
            f"{words}: {count:,}"
            for words, count in counts.items()
            if not words.startswith("not run")
        ]
        lines.append(f"- {family.capitalize()} in other forms: {'; '.join(texts)}.")
    return lines


def _coverage_rows(data: Mapping[str, Any]) -> list[str]:
    """How much of training steps `verify` judges."""
    return [
        "`python -m benchmarks faults --coverage`: what `verify` judges of training steps"
        f" with JAX {data['versions']['jax']},",
        "with gradients and AdamW. *Refuted* are steps that XLA computes wrongly; *accused*",
        "would be right ones.",
        "",
        *coverage_table(data["coverage"]),
        "",
    ]


def _front(data: Mapping[str, Any]) -> str:
    return front_of(data["shardy"])


def front_of(shardy: bool) -> str:
    """The name of what propagates shardings before the partitioner."""
    return "Shardy" if shardy else "GSPMD"

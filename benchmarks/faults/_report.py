"""The results of a hunt as a file and as a table."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

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
    when it is done twice, and a softmax when another maximum is taken off.
    """
    if "verdict" not in line:
        return False
    said = line["verdict"]["outcome"]
    return said == "failed" or (said == "proved" and line["changed"] > UNCHANGED)


def table(data: Mapping[str, Any]) -> str:
    """The counts, the causes, and what `verify` says, as Markdown."""
    versions = data["versions"]
    front = "Shardy" if data["shardy"] else "GSPMD"
    lines = [
        f"JAX {versions['jax']}, {front}, seed {data['seed']}: {data['draws']} programs"
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
            f"| {entry['cause']} | {entry['cases']} | {name} | {entry['error'] or ''} |"
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
    outcomes = sorted({outcome for key in chosen for outcome in counts[key]})
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
        if "changed" not in line:
            reason = "refused by XLA" if "refused" in line else "skipped"
            counts.setdefault(line.get("kind", "all"), Counter())[reason] += 1
            continue
        part = "changed" if line["changed"] > UNCHANGED else "unchanged"
        said = line["verdict"]["outcome"]
        for kind in ("all", line["kind"]):
            counts.setdefault(kind, Counter())[f"{part}, {said}"] += 1
    return {kind: dict(counts[kind]) for kind in sorted(counts)}

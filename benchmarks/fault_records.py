"""`python -m benchmarks.fault_records PYTHON...`: runs the program of each fault with
the JAX of each Python, and writes the records of `shardfx/_step/faults` from that.

Versions that were run before and are not run now stay. The precision of a predicate is
measured with the JAX of the first Python: random programs that the predicate selects
are run, and counted where a plan changes their numbers.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


_ROOT = Path(__file__).parents[1]
_RECORDS = _ROOT / "shardfx" / "_step" / "faults" / "records"
_MARK = "# What follows is written by `python -m benchmarks.fault_records`.\n"
_PAGE = _ROOT / "docs" / "wrong_numbers.md"
_TABLE = re.compile(r"(?<=<!-- table -->\n).*(?=<!-- end of table -->)", re.DOTALL)
_CLOSE = 1e-4


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fault_records", description=__doc__
    )
    parser.add_argument("pythons", nargs="+", help="a Python with a JAX each")
    parser.add_argument(
        "--samples", type=int, default=40, help="programs for each precision; 0: none"
    )
    flags = parser.parse_args(arguments)
    runs: dict[str, dict[str, dict[str, str]]] = {}
    for python in flags.pythons:
        for partitioner, options in (("shardy", ()), ("gspmd", ("--gspmd",))):
            for outcome in _told(python, "tests.step.repros", *options):
                by_version = runs.setdefault(outcome["repro"], {}).setdefault(
                    partitioner, {}
                )
                by_version[outcome["jax"]] = _outcome(outcome)
    precision: dict[str, dict[str, int]] = {}
    if flags.samples:
        python = flags.pythons[0]
        count = str(flags.samples)
        for outcome in _told(python, "benchmarks.fault_samples", count):
            precision[outcome.pop("fault")] = outcome
    for file in sorted(_RECORDS.glob("*.toml")):
        _write(file, runs, precision)
    _PAGE.write_text(with_table(_PAGE.read_text()))
    return 0


def with_table(page: str) -> str:
    """The page about wrong numbers with the table of the records."""
    files = sorted(_RECORDS.glob("*"))
    records = [tomllib.loads(file.read_text()) for file in files]
    rows = [
        ("the program", "wrong with JAX", "what is wrong", "who meets it")
        + ("what mends it",),
        ("---",) * 5,
        *map(_row, records),
    ]
    text = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    return _TABLE.sub(lambda _: f"\n{text}\n", page)


def _row(record: Mapping[str, Any]) -> tuple[str, ...]:
    runs = record.get("runs", {})
    versions = versions_of(runs, "wrong")
    right_versions = versions_of(runs, "right")
    if right_versions:
        versions += f"; right: {right_versions}"
    return (
        f"**{record['id']}**: {record['pattern']}",
        versions,
        record["effect"],
        record["met_by"],
        record["mended_by"],
    )


def versions_of(runs: Mapping[str, Any], outcome: str) -> str:
    """The versions with this outcome, by partitioner if it is another for each."""
    by_partitioner = {
        partitioner: ", ".join(run[outcome]) for partitioner, run in runs.items()
    }
    lists = {*by_partitioner.values()}
    if len(lists) == 1:
        return lists.pop()
    return "; ".join(
        f"{versions} ({partitioner})"
        for partitioner, versions in by_partitioner.items()
        if versions
    )


def _told(python: str, module: str, *options: str) -> list[dict[str, Any]]:
    """The lines of JSON that a module prints. A process that XLA ends has told what it
    did before.
    """
    command = [python, "-m", module, *options]
    environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
    ran = subprocess.run(
        command,
        cwd=_ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    if ran.returncode:
        print(f"{' '.join(command)} ended with {ran.returncode}", file=sys.stderr)
    outcomes = [json.loads(line) for line in ran.stdout.splitlines()]
    for line in outcomes:
        print(json.dumps(line), flush=True)
    return outcomes


def _outcome(outcome: Mapping[str, Any]) -> str:
    unmended = [name for name, share in outcome["mended"].items() if share > _CLOSE]
    if unmended:
        raise AssertionError(
            f"{outcome['repro']} is not mended by {unmended}: {outcome}"
        )
    if max(outcome["wrong"].values()) > _CLOSE:
        return "wrong"
    return "right"


def _write(file: Path, runs: Mapping[str, Any], precision: Mapping[str, Any]) -> None:
    text = file.read_text()
    record = tomllib.loads(text)
    lines = [text.partition(_MARK)[0].rstrip("\n"), "", _MARK.rstrip("\n")]
    for partitioner in ("shardy", "gspmd"):
        recorded = record.get("runs", {}).get(partitioner, {})
        outcomes = {}
        for outcome, versions in recorded.items():
            outcomes |= dict.fromkeys(versions, outcome)
        stem = Path(record["repro"]).stem
        outcomes |= runs.get(stem, {}).get(partitioner, {})
        lines.append(f"[runs.{partitioner}]")
        for outcome in ("wrong", "right"):
            versions = [
                version for version in sorted(outcomes) if outcomes[version] == outcome
            ]
            lines.append(f"{outcome} = {json.dumps(versions)}")
        lines.append("")
    counts = precision.get(record["id"], record.get("precision", {}))
    if counts:
        lines += ["[precision]", *(f"{name} = {n}" for name, n in counts.items()), ""]
    file.write_text("\n".join(lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

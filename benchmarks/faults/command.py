"""`python -m benchmarks faults`: the options, and what they do."""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import _report
from ._data import Case, from_json
from ._driver import Child, Configuration
from ._hunt import Tally, add_records, hunt, judge_again
from ._records import add_record, read_records


SUMMARY = "what XLA's partitioner computes wrongly, found by random layouts"
MUTATIONS_A_PROGRAM = 12


def arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    add = parser.add_argument
    add("--minutes", type=float, default=10, help="how long programs are drawn")
    add("--seed", type=int, default=1, help="the seed of the draws")
    add("--first", type=int, default=0, help="the number of the first draw")
    add("--layouts", type=int, default=6, help="layouts of each program")
    add("--family", help="only the layers of this family, such as attention")
    add("--python", default=sys.executable, help="an interpreter with another JAX")
    add("--gspmd", action="store_true", help="without Shardy, where JAX still can")
    add(
        "--verify",
        nargs="?",
        const="beside",
        choices=("beside", "first", "judged"),
        help="ask shardfx.testing.verify, too; first: and run only what it refutes;"
        " judged: and run what it refutes or proves",
    )
    add(
        "--minimise",
        type=float,
        default=60,
        help="seconds to shrink each failure; 0: no causes",
    )
    add("--mutations", type=int, help="mutate this many right programs instead")
    add(
        "--forms",
        action="store_true",
        help="no draws: the known faults under vmap, scanned, recomputed and larger",
    )
    add(
        "--coverage",
        action="store_true",
        help="no draws: how much of training steps of each family verify judges",
    )
    add("--replay", type=Path, help="run the cases of a results file again")
    add("--cases", type=int, help="how many cases run at most")
    add(
        "--records",
        type=Path,
        help="add each result to this file as it comes, and go on behind those it has",
    )
    add(
        "--judge-again",
        action="store_true",
        help="ask verify again about the cases in --records, before others are drawn",
    )
    add("--summarise", type=Path, help="no draws: the results in this file of records")
    add("--json", type=Path, help="write the results here")


def main(flags: argparse.Namespace) -> int:
    """Runs the command. Returns 1 if wrong numbers are what `verify` proves, if it
    accuses right ones, or if a replay fails again.
    """
    configuration = Configuration(python=flags.python, shardy=not flags.gspmd)
    if flags.replay is not None:
        return _replayed(flags, configuration)
    if flags.coverage:
        return _covered(flags)
    if flags.forms:
        return _in_forms(flags, configuration)
    if flags.mutations is not None:
        return _mutated(flags, configuration)
    tally = _tally(flags, configuration)
    causes: Sequence[Mapping[str, Any]] = []
    if flags.minimise > 0:
        causes = _causes(tally, configuration, flags.minimise)
    document = _report.document(tally, configuration, causes)
    _write(document, flags.json)
    print(_report.table(document))
    return int(bool(_report.mistakes(document)))


def _tally(flags: argparse.Namespace, configuration: Configuration) -> Tally:
    if flags.judge_again:
        judge_again(configuration, flags.records)
    if flags.summarise is None:
        return hunt(
            configuration,
            seed=flags.seed,
            minutes=flags.minutes,
            first=flags.first,
            layouts=flags.layouts,
            family=flags.family,
            verify=flags.verify,
            records=flags.records,
            cases=flags.cases,
        )
    tally = Tally(seed=flags.seed, first=flags.first)
    add_records(tally, flags.summarise)
    with Child(configuration) as child:
        tally.versions = child.versions
    return tally


def _causes(
    tally: Tally, configuration: Configuration, seconds: float
) -> Sequence[Mapping[str, Any]]:
    from ._causes import explained, groups

    return explained(
        groups(tally.failures), configuration, seconds=seconds, progress=_progress
    )


def _replayed(flags: argparse.Namespace, configuration: Configuration) -> int:
    """Runs the minimal cases of a results file, and says what becomes of each. With
    `--json`, the results file that it writes says so, too.
    """
    from ._causes import is_alike, once, symptom

    document = json.loads(flags.replay.read_text())
    failing = 0
    with Child(configuration) as child:
        where = f"JAX {child.versions['jax']} {_report.front_of(configuration.shardy)}"
        print(where)
        for entry in document["causes"]:
            case: Case = from_json(entry["minimal"])
            outcome = once(child, case)
            failing += outcome["outcome"] not in ("right", "unstable")
            same = is_alike(outcome, entry["outcome"])
            entry.setdefault("elsewhere", {})[where] = symptom(outcome)
            print(_report.replay_line(case, outcome, entry["cause"], same))
    _write(document, flags.json)
    return int(failing > 0)


def _covered(flags: argparse.Namespace) -> int:
    """Judges training steps of each family, or of one. Returns 1 if `verify` accuses a
    step whose numbers are right.
    """
    from . import _coverage

    lines = _coverage.judged_steps(flags.family, _progress)
    _write(_coverage.document(lines), flags.json)
    print("\n".join(_coverage.table(lines)))
    return int(any(line.get("numbers_right") for line in lines))


def _in_forms(flags: argparse.Namespace, configuration: Configuration) -> int:
    """Judges the programs of the known faults in other forms. Returns 1 if `verify`
    proves a wrong one or accuses a right one. With `--records`, it goes on behind the
    programs of that file.
    """
    from ._forms import Program, document, mistakes, programs, words_of

    lines: dict[Program, Mapping[str, Any]] = {}
    for record in read_records(flags.records):
        lines[Program(*record["form"])] = record["line"]
    with Child(configuration) as child:
        for program in programs():
            if program in lines:
                continue
            for result in child.results({"form": list(program)}):
                lines[program] = result.outcome
                record = {"form": list(program), "line": result.outcome}
                add_record(flags.records, record)
            _progress(f"{', '.join(program)}: {words_of(lines[program])}")
        versions = dict(child.versions)
    results = document(lines, versions)
    _write(results, flags.json)
    print(json.dumps(results["forms"], indent=1))
    return int(bool(mistakes(results)))


def _mutated(flags: argparse.Namespace, configuration: Configuration) -> int:
    """Mutates right programs of the bank until enough mutations ran, or the time is
    over. With `--records`, it goes on behind the programs of that file that have the
    same seed.
    """
    lines: list[dict[str, Any]] = []
    number: int = flags.first
    seeds: Counter[int] = Counter()
    for record in read_records(flags.records):
        lines += record["mutated"]
        seeds[record["seed"]] += len(record["mutated"])
        if record["seed"] == flags.seed:
            number = record["number"] + 2
    started = time.monotonic()
    with Child(configuration) as child:
        while (
            len(lines) < flags.mutations
            and time.monotonic() - started < 60 * flags.minutes
        ):
            request = {
                "draw": [flags.seed, number, 1, flags.family],
                "mutations": min(MUTATIONS_A_PROGRAM, flags.mutations - len(lines)),
            }
            mutated: list[dict[str, Any]] = []
            for result in child.results(request):
                mutated += result.outcome.get("mutated", [])
            lines += mutated
            seeds[flags.seed] += len(mutated)
            record = {"seed": flags.seed, "number": number, "mutated": mutated}
            add_record(flags.records, record)
            number += 2
            _progress(f"{len(lines)} mutations")
        versions = dict(child.versions)
    document = {
        "versions": versions,
        "mutations_by_seed": dict(seeds),
        "mutations": _report.mutation_table(lines),
        "mistakes": [line for line in lines if _report.is_mistake(line)],
        # Refutations to be looked at, if other arguments do not change either.
        "harmless": [line for line in lines if _report.is_harmless(line)],
    }
    _write(document, flags.json)
    print(json.dumps(document["mutations"], indent=1))
    return int(bool(document["mistakes"]))


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _write(document: Mapping[str, Any], path: Path | None) -> None:
    if path is not None:
        path.write_text(json.dumps(document, indent=1) + "\n")

"""Draws cases for some minutes and keeps what fails."""

import dataclasses
import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ._driver import Child, Configuration, Result
from ._layers import LAYERS
from ._records import read_records


FAILURES = ("wrong", "error", "abort", "timeout")
# What the numbers say, and what `verify` must not say then.
MISTAKES = ("right: refuted", "wrong: proved", "right: failed", "wrong: failed")


@dataclasses.dataclass
class Tally:
    """What a hunt has seen.

    **Arguments:**

    - `counts`: the outcomes, in total, by mesh, and by name of the layer or operation.
    - `failures`: the results that failed.
    - `verdicts`: what `verify` says beside the numbers, such as "right: proved", in
      total and by family of layers.
    - `judged`: sums of operations and bytes, and of those judged, by family.
    - `accused`: the cases that `verify` judges wrongly.
    """

    seed: int
    first: int
    last: int = 0
    seconds: float = 0.0
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    counts: dict[str, Counter[str]] = dataclasses.field(default_factory=dict)
    failures: list[Result] = dataclasses.field(default_factory=list)
    verdicts: dict[str, Counter[str]] = dataclasses.field(default_factory=dict)
    judged: dict[str, Counter[str]] = dataclasses.field(default_factory=dict)
    accused: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    @property
    def count(self) -> int:
        """The number of cases."""
        return sum(self.counts.get("all", Counter()).values())

    def add(self, result: Result) -> None:
        """Counts one result."""
        outcome = result.outcome["outcome"]
        program = result.case["program"]
        names = {op["name"] for op in program["operations"]}
        mesh = result.case["layout"]["mesh"]
        part = "gradient" if program["gradient"] else "forward"
        for key in ("all", f"mesh {mesh}", part, *sorted(f"of {n}" for n in names)):
            self.counts.setdefault(key, Counter())[outcome] += 1
        if outcome in FAILURES:
            self.failures.append(result)
        if "verdict" in result.outcome:
            self._add_verdict(result, sorted({family_of(name) for name in names}))

    def _add_verdict(self, result: Result, families: Sequence[str]) -> None:
        verdict = result.outcome["verdict"]
        words = f"{result.outcome['outcome']}: {verdict['outcome']}"
        for family in ("all", *families):
            self.verdicts.setdefault(family, Counter())[words] += 1
            sums = self.judged.setdefault(family, Counter())
            sums["programs"] += 1
            for key in ("operations", "judged", "bytes", "judged_bytes"):
                sums[key] += verdict.get(key, 0)
        if words in MISTAKES:
            self.accused.append({"case": result.case, "outcome": result.outcome})


def family_of(name: str) -> str:
    """The family of a layer; "random programs" for operations."""
    return LAYERS[name].family if name in LAYERS else "random programs"


def hunt(
    configuration: Configuration,
    *,
    seed: int,
    minutes: float,
    first: int = 0,
    layouts: int = 6,
    family: str | None = None,
    verify: str | None = None,
    records: Path | None = None,
    cases: int | None = None,
) -> Tally:
    """Runs cases from number `first` on until the time is over, or until `cases` ran.

    With `verify="beside"`, `shardfx.testing.verify` judges each case that ran; with
    "first", only what it refutes is run, so many more cases are judged for accusations;
    with "judged", what it refutes or proves. `records` gets each result as a line of
    JSON; the hunt goes on behind those that it has.
    """
    tally = Tally(seed=seed, first=first, last=first)
    if records is not None and records.exists():
        add_records(tally, records)
    before = tally.seconds
    started = time.monotonic()
    with Child(configuration) as child:
        tally.versions = child.versions
        while time.monotonic() - started < 60 * minutes:
            if cases is not None and tally.count >= cases:
                break
            request = {"draw": [seed, tally.last, layouts, family], "verify": verify}
            for result in _recorded(child.results(request), records):
                tally.add(result)
            tally.last += 1
    tally.seconds = round(before + time.monotonic() - started, 1)
    return tally


def add_records(tally: Tally, records: Path) -> None:
    """Counts the results in a file of records."""
    for record in read_records(records):
        tally.add(Result(record["case"], record["outcome"]))
        tally.seconds = round(tally.seconds + record["seconds"], 2)
        tally.last = max(tally.last, record["case"]["number"] + 1)


def judge_again(configuration: Configuration, records: Path, most: int = 24) -> None:
    """Asks `verify` again about the cases in a file of records that it judged, at most
    `most` in one request. What their numbers said stays.
    """
    lines = read_records(records)
    judged = [line for line in lines if "verdict" in line["outcome"]]
    with Child(configuration) as child:
        for start in range(0, len(judged), most):
            batch = judged[start : start + most]
            request = {"cases": [line["case"] for line in batch], "verify": "only"}
            for line, result in zip(batch, child.results(request), strict=True):
                line["outcome"]["verdict"] = result.outcome["verdict"]
    texts = [json.dumps(line) + "\n" for line in lines]
    records.write_text("".join(texts))


def _recorded(results: Iterator[Result], records: Path | None) -> Iterator[Result]:
    started = time.monotonic()
    for result in results:
        if records is not None:
            seconds = round(time.monotonic() - started, 2)
            line = {
                "outcome": result.outcome,
                "case": result.case,
                "seconds": seconds,
            }
            with records.open("a") as file:
                file.write(json.dumps(line) + "\n")
        yield result
        started = time.monotonic()

"""The common runner of all suites.

A suite is a module `benchmarks/<suite>.py` with three names:

- `SUMMARY: str`: one line for `--help` and for the heading of its table.
- `arguments(parser: argparse.ArgumentParser) -> None`: adds the suite's own flags (may
  do nothing). Without any flag given, the suite runs what belongs into
  `python -m benchmarks all`.
- `cases(options: Options) -> list[Case | Finding | Skip | Apart]`: cheap; the work
  happens in `Case.setup` and `Finding.measure` when their turn comes. With
  `options.quick` the whole suite takes at most 45 seconds on 2 cores.

For every `Case` the runner: makes each rival (or skips it with a line); runs it once on
a fresh input, takes that as `cold_seconds`, and checks the result before any other time
is taken; then alternates all rivals and the floor, in turn from front and from back,
with a fresh input for each run; and reports medians. The garbage collector stays on,
but what lived before a run is frozen, so that each pays for its own garbage alone.

The values of a `Case`, by key (`<rival>` is `Rival.name`; the first rival is called
"ours" below):

- `seconds.<rival>`, `cold_seconds.<rival>`, `seconds.<floor>`: medians, per call
- `gigabytes_per_second.<rival>`: where `byte_count` is given
- `speedup.<rival>`: the rival's median over ours (above 1: we are faster);
  `speedup.best`: over the fastest rival
- `floor_ratio.<rival>`: its median over the floor's
- `processor_seconds.<rival>`, `processor_speedup.<rival>`: the same runs by the race's
  second clock, if it has one
- everything in `Race.facts`

A rival that fails its check, or that raises, is no rival: its line says so, and the
suite goes on; where ours fails, the runner exits with an error at the end. A `Limit` on
a value that was not measured (a skipped rival) is reported so.
"""

import argparse
import dataclasses
import gc
import importlib
import importlib.util
import json
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax

from ._case import Apart, Case, Entry, Finding, Limit, Race, Rival, Skip, Value
from ._machine import fresh_process
from ._progress import Progress


@dataclasses.dataclass(frozen=True)
class Options:
    """What the command line says. `flags` holds the suite's own flags."""

    quick: bool
    repeats: int
    devices: list[Any]
    flags: argparse.Namespace


@dataclasses.dataclass
class Record:
    """One line of the results, as it goes into the JSON file."""

    name: str
    kind: str
    values: dict[str, Value] = dataclasses.field(default_factory=dict)
    rivals: list[str] = dataclasses.field(default_factory=list)
    floor: str | None = None
    skipped: dict[str, str] = dataclasses.field(default_factory=dict)
    limits: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    failed: str | None = None


class Unfinished:
    """The records of a suite that may be cut off, kept in a file after each entry. An
    entry that failed is not kept.
    """

    def __init__(self, file: Path):
        self.file = file
        self._records: dict[str, list[dict[str, Any]]] = {}
        if file.exists():
            self._records = json.loads(file.read_text())

    def records_of(self, entry: Entry) -> list[Record] | None:
        """The records of an entry that ran before; `None` if it did not."""
        if entry.name not in self._records:
            return None
        return [Record(**fields) for fields in self._records[entry.name]]

    def keep(self, entry: Entry, records: list[Record]) -> None:
        """Keeps the records of an entry, unless it failed."""
        if any(record.failed for record in records):
            return
        self._records[entry.name] = list(map(dataclasses.asdict, records))
        self.file.write_text(json.dumps(self._records))

    def end(self) -> None:
        """Removes the file of a suite that has run to its end."""
        self.file.unlink(missing_ok=True)


def run_suite(
    entries: Iterable[Entry],
    options: Options,
    progress: Progress,
    unfinished: Unfinished | None = None,
) -> list[Record]:
    """Runs every entry in order; a failed one is recorded and the rest go on. Entries of
    which `unfinished` has records do not run again.
    """
    records = []
    for entry in entries:
        progress.begin(entry.name)
        kept = None
        if unfinished is not None:
            kept = unfinished.records_of(entry)
        if kept is not None:
            entry_results = kept
        elif isinstance(entry, Apart):
            entry_results = _apart(entry, options, unfinished)
        else:
            entry_results = [_run_entry(entry, options)]
        if unfinished is not None:
            unfinished.keep(entry, entry_results)
        records += entry_results
        text = "; ".join(record.failed for record in entry_results if record.failed)
        progress.end(text)
        gc.collect()
    return records


def run_apart(
    target: str, quick: bool, repeats: int, cpu_devices: int, file: str | None
) -> list[dict[str, Any]]:
    """In a process of its own: the records of the entries that `target` returns, as
    dictionaries. They are kept in `file` as in `Unfinished`.
    """
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", cpu_devices)
    options = Options(
        quick=quick, repeats=repeats, devices=jax.devices(), flags=argparse.Namespace()
    )
    module, name = target.split(":")
    entries = getattr(importlib.import_module(module), name)(options)
    unfinished = None if file is None else Unfinished(Path(file))
    records = run_suite(entries, options, Progress(name, len(entries)), unfinished)
    if unfinished is not None and not any(record.failed for record in records):
        unfinished.end()
    return list(map(dataclasses.asdict, records))


def _apart(
    entry: Apart, options: Options, unfinished: Unfinished | None
) -> list[Record]:
    file = None
    if unfinished is not None:
        _, _, function = entry.target.partition(":")
        file = str(unfinished.file.with_suffix(f".{function}.json"))
    arguments = dataclasses.asdict(entry) | {
        "quick": options.quick,
        "repeats": options.repeats,
        "file": file,
    }
    del arguments["name"]
    try:
        records = fresh_process(
            "benchmarks._runner:run_apart", arguments, timeout_seconds=3600
        )
    except RuntimeError as error:
        return [Record(entry.name, "race", failed=str(error))]
    return [Record(**record) for record in records]


def _run_entry(entry: Case | Finding | Skip, options: Options) -> Record:
    if isinstance(entry, Skip):
        return Record(entry.name, "skip", skipped={entry.name: entry.why})
    record = Record(entry.name, "race" if isinstance(entry, Case) else "finding")
    try:
        if isinstance(entry, Case):
            _race(entry.setup(), options.repeats, record)
        else:
            record.values.update(entry.measure())
    except (
        AssertionError,
        RuntimeError,
        ValueError,
        TypeError,
        MemoryError,
        OSError,
    ) as error:
        record.failed = f"{type(error).__name__}: {error}"
    record.limits = [_judge(limit, record.values) for limit in entry.limits]
    return record


def _race(race: Race, repeats: int, record: Record) -> None:
    record.values.update(race.facts)
    runs: dict[str, Callable[[Any], Any]] = {}
    for position, rival in enumerate(race.rivals):
        missing = [
            name for name in rival.needs if importlib.util.find_spec(name) is None
        ]
        if missing:
            record.skipped[rival.name] = f"{', '.join(missing)} not installed"
            continue
        try:
            runs[rival.name], cold = _first_run(rival, race)
        except (
            AssertionError,
            RuntimeError,
            ValueError,
            TypeError,
            KeyError,
            AttributeError,
        ) as error:
            if position == 0:
                raise
            parts = str(error).splitlines()[0].split(". ")
            sentence = parts[0]
            record.skipped[rival.name] = f"{type(error).__name__}: {sentence[:200]}"
            continue
        record.values[f"cold_seconds.{rival.name}"] = cold
    record.rivals = list(runs)
    if race.floor is not None:
        record.floor = race.floor.name
        runs[race.floor.name] = race.floor.run
    wall, also = _alternate(runs, race, repeats)
    record.values.update(_ratios(wall, record, race.byte_count))
    if also:
        record.values.update(
            {f"processor_seconds.{name}": seconds for name, seconds in also.items()}
        )
        ours, *others = record.rivals
        record.values.update(
            {
                f"processor_speedup.{name}": also[name] / also[ours]
                for name in others
                if also[ours]
            }
        )


def _first_run(rival: Rival, race: Race) -> tuple[Callable[[Any], Any], float]:
    run = rival.make()
    if race.clear_caches:
        jax.clear_caches()
    arguments = race.fresh()
    begin = race.clock()
    result = _finished(run(arguments), race.block)
    cold = race.clock() - begin
    if rival.check is not None:
        rival.check(arguments, result)
    return run, cold


def _alternate(
    runs: dict[str, Callable[[Any], Any]], race: Race, repeats: int
) -> tuple[dict[str, float], dict[str, float]]:
    """The median of each by the race's clock, and by its second one if it has one."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    others: dict[str, list[float]] = {
        name: [] for name in runs if race.also is not None
    }
    also = race.also or race.clock
    order = list(runs.items())
    first = time.monotonic()
    for repeat in range(repeats + 1):
        if repeat > 3 and time.monotonic() - first > race.most_seconds:
            break
        # Nobody is first, or after the same rival, more often than the others: memory
        # is slow when it is touched anew.
        start = repeat % len(order)
        turn = order[start:] + order[:start]
        for name, run in turn if repeat % 2 else reversed(turn):
            arguments = race.fresh()
            gc.collect()
            gc.freeze()
            begin = race.clock()
            other = also()
            result = None
            for _ in range(race.number):
                result = _finished(run(arguments), race.block)
            seconds = (race.clock() - begin) / race.number
            other = (also() - other) / race.number
            gc.unfreeze()
            if repeat > 0:  # round 0 warms caches that the first run could not
                times[name].append(seconds)
                others.get(name, []).append(other)
            # Not timed: to free a result of 128 MiB takes 40 ms.
            del arguments, result
    by_clock, by_other = (
        {name: statistics.median(taken) for name, taken in durations.items()}
        for durations in (times, others)
    )
    return by_clock, by_other


def _ratios(
    medians: dict[str, float], record: Record, byte_count: int | None
) -> dict[str, Value]:
    values: dict[str, Value] = {
        f"seconds.{name}": seconds for name, seconds in medians.items()
    }
    ours, *others = record.rivals
    for name in record.rivals:
        if byte_count is not None:
            values[f"gigabytes_per_second.{name}"] = byte_count / medians[name] / 1e9
        if record.floor is not None:
            values[f"floor_ratio.{name}"] = medians[name] / medians[record.floor]
    for name in others:
        values[f"speedup.{name}"] = medians[name] / medians[ours]
    if others:
        smallest = min(medians[name] for name in others)
        values["speedup.best"] = smallest / medians[ours]
    return values


def _judge(limit: Limit, values: dict[str, Value]) -> dict[str, Any]:
    measured = values.get(limit.value)
    if isinstance(measured, int | float):
        number = measured
    else:
        number = None
    return {
        "text": str(limit),
        "measured": number,
        "holds": None if number is None else limit.holds(number),
    }


def _finished(result: Any, block: bool) -> Any:
    return jax.block_until_ready(result) if block else result

"""`python -m benchmarks SUITE|all|compare|docs`."""

import argparse
import importlib
import importlib.util
import json
import sys
from pathlib import Path

import jax

from . import _machine, _plots, _report
from ._progress import Progress
from ._runner import Options, Record, Unfinished, run_suite
from .faults import _report as fault_report, command as faults


FILES = {
    "plan": "plan",
    "reshard": "reshard",
    "reshard-trees": "reshard_trees",
    "load": "load",
    "convert": "convert",
    "train": "train",
    "search": "search",
    "cost": "cost",
    "fit": "cost_memory",
    "gpu": "gpu",
}
SUITES = {
    name: file
    for name, file in FILES.items()
    if importlib.util.find_spec(f"benchmarks.{file}")
}
RESULTS = Path(__file__).parent / "results"
DOCS = Path(__file__).parent.parent / "docs"


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["reshard"] and "--trees" in arguments:
        arguments = ["reshard-trees", *(a for a in arguments[1:] if a != "--trees")]
    parser, suites = _parser()
    flags = parser.parse_args(arguments)
    if flags.command == "faults":
        return faults.main(flags)
    if flags.command == "compare":
        print(_report.compare(_read(flags.first), _read(flags.second)))
        return 0
    if flags.command == "docs":
        for file, text in pages().items():
            file.write_text(text)
        return 0
    names = [flags.command]
    if flags.command == "all":
        names = [name for name in SUITES if name != "gpu"]
    return _run(names, flags, suites)


def pages() -> dict[Path, str]:
    """The pages and plots of docs/, from the committed results."""
    read = {file.stem: _read(file) for file in sorted(RESULTS.glob("*.json"))}
    # What compilers send for given steps is data, in a form of its own.
    files = {name: document for name, document in read.items() if "suites" in document}
    pages_by_name = {
        "benchmarks.md": _report.page(
            files, [_read(file) for file in sorted(RESULTS.glob("hands/*.json"))]
        )
    }
    if "auto-plans-libtpu" in read:
        section = _report.plans_without_rules(read["auto-plans-libtpu"])
        pages_by_name["benchmarks.md"] += "\n" + section
    if "policy" in read:
        pages_by_name["benchmarks.md"] += "\n" + _report.policies(
            read["policy"], read["policy-subsets"]["v5e"]
        )
    hunts = {name: data for name, data in read.items() if name.startswith("faults")}
    sweeps = [data for name, data in read.items() if name.startswith("rule-sets")]
    if hunts:
        section = fault_report.section(hunts, sweeps)
        pages_by_name["benchmarks.md"] += "\n" + section
    pages_by_name |= {name: drawn for name, (_, drawn) in _plots.plots(files).items()}
    return {DOCS / name: text for name, text in pages_by_name.items()}


def _run(
    names: list[str],
    flags: argparse.Namespace,
    suites: dict[str, argparse.ArgumentParser],
) -> int:
    jax.config.update("jax_num_cpu_devices", flags.cpu_devices)
    if flags.platform is not None:
        jax.config.update("jax_platforms", flags.platform)
    devices = jax.devices()
    results: dict[str, list[Record]] = {}
    unfinished_suites: list[Unfinished] = []
    for name in names:
        if flags.command == name:
            suite_flags = flags
        else:
            suite_flags = suites[name].parse_args([])
        repeats = flags.repeats or (3 if flags.quick else 9)
        options = Options(
            quick=flags.quick,
            repeats=repeats,
            devices=devices,
            flags=suite_flags,
        )
        module = importlib.import_module(f"benchmarks.{SUITES[name]}")
        entries = module.cases(options)
        progress = Progress(name, len(entries))
        unfinished = None
        if flags.resume is not None:
            flags.resume.mkdir(parents=True, exist_ok=True)
            unfinished = Unfinished(flags.resume / f"{name}.json")
            unfinished_suites.append(unfinished)
        results[name] = run_suite(entries, options, progress, unfinished)
        print(
            f"\n{name}: {module.SUMMARY}\n\n{_report.table(results[name])}\n",
            flush=True,
        )
    if flags.json is not None:
        document = _report.to_json(
            results, _machine.machine(devices), _machine.versions(), flags.quick
        )
        flags.json.write_text(document)
    failed = []
    for name, records in results.items():
        failed += [
            f"{name}: {record.name}: {record.failed}"
            for record in records
            if record.failed
        ]
    for line in failed:
        print(f"FAILED {line}", file=sys.stderr)
    if not failed:
        for unfinished in unfinished_suites:
            unfinished.end()
    return 1 if failed else 0


def _parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    suites = {}
    for name, file in SUITES.items():
        module = importlib.import_module(f"benchmarks.{file}")
        suites[name] = commands.add_parser(name, help=module.SUMMARY)
        _common(suites[name])
        module.arguments(suites[name])
    _common(commands.add_parser("all", help="every suite, one after another"))
    faults.arguments(commands.add_parser("faults", help=faults.SUMMARY))
    compare = commands.add_parser("compare", help="two JSON files side by side")
    compare.add_argument("first", type=Path)
    compare.add_argument("second", type=Path)
    commands.add_parser(
        "docs",
        help="write docs/benchmarks*.md and their plots from benchmarks/results/*.json",
    )
    return parser, suites


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--quick", action="store_true", help="small sizes and few repeats"
    )
    parser.add_argument(
        "--repeats", type=int, help="timed runs per rival (default 9, with --quick 3)"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the results here"
    )
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="FOLDER",
        help="keep the records of each entry there until all have run; entries that are"
        " there do not run again",
    )
    parser.add_argument("--platform", help="JAX platform to use, for example cpu")
    parser.add_argument(
        "--cpu-devices",
        type=int,
        default=8,
        help="emulated devices where there is no accelerator",
    )


def _read(path: Path) -> dict:
    return json.loads(path.read_text())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

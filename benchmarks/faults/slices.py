"""What `shardfx.testing.verify` says of libtpu's partitioned programs of training steps
on several slices, none of which is there:
`python -m benchmarks.faults.slices --records FILE [--json FILE]`.

The steps are those of `--coverage`. It needs libtpu, and no TPU. A line that a records
file has is not asked again.
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType

from shardfx import testing

from ._families import Subject, subjects
from ._records import add_record, read_records


_SLICES = ("tpu:v5e:2x4", "tpu:v5p:2x2x2")
# A step that libtpu, or the slice, refuses.
_REFUSED = (ValueError, TypeError, NotImplementedError)


def verdict_on(subject: Subject, name: str) -> dict[str, Any]:
    """What `verify` says of a step's program for the slice `name`."""
    sizes = subject.sizes
    types = (AxisType.Auto,) * len(sizes)
    mesh: Any = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=types)
    step, arguments = subject.make(mesh)
    try:
        verdict = testing.verify(step, *arguments, compiler=name)
    except _REFUSED as error:
        return {"refused": f"{type(error).__name__}: {error}"[:200]}
    return {
        "outcome": verdict.outcome,
        "operations": verdict.operations,
        "judged": verdict.judged_operations,
        "refuted": sorted({row.operation for row in verdict.refutations}),
        "reasons": sorted({row.reason for row in verdict.unjudged})[:4],
    }


def are_alike(line: Mapping[str, Any]) -> bool:
    """Whether the verdicts on all slices have the same outcome."""
    return len({verdict.get("outcome") for verdict in line["slices"].values()}) == 1


def summary(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """The number of steps whose verdicts are alike, and the others."""
    asked = [
        line
        for line in lines
        if all("outcome" in verdict for verdict in line["slices"].values())
    ]
    alike = [line for line in asked if are_alike(line)]
    texts = [f"{len(alike)} of {len(asked)} steps have one outcome on all slices"]
    for line in asked:
        if not are_alike(line):
            outcomes = {
                name: verdict["outcome"] for name, verdict in line["slices"].items()
            }
            texts.append(f"{line['name']}, {line['layout']}: {outcomes}")
    return texts


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.faults.slices", description=__doc__
    )
    add = parser.add_argument
    add("--records", type=Path, required=True, help="the lines so far")
    add("--json", type=Path, help="where the results go")
    add("--minutes", type=float, default=30, help="how long steps begin")
    add("--slices", nargs="*", default=_SLICES, help="slices of as many devices")
    flags = parser.parse_args(arguments)
    jax.config.update("jax_platforms", "cpu")
    lines = read_records(flags.records)
    known = {(line["name"], line["layout"]) for line in lines}
    deadline = time.monotonic() + 60 * flags.minutes
    for subject in subjects():
        if (subject.name, subject.layout) in known:
            continue
        if time.monotonic() > deadline:
            break
        line: dict[str, Any] = {
            "family": subject.family,
            "name": subject.name,
            "layout": subject.layout,
            "slices": {name: verdict_on(subject, name) for name in flags.slices},
        }
        lines.append(line)
        add_record(flags.records, line)
        print(subject.name, subject.layout, *line["slices"].values(), flush=True)
        jax.clear_caches()
    print("\n".join(summary(lines)))
    if flags.json is not None:
        document = {"versions": {"jax": jax.__version__}, "slices": lines}
        flags.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

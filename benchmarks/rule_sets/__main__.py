"""`python -m benchmarks.rule_sets`: every rule set that ships, its models and five
meshes, in numbers.

`shardfx.testing.verify` proves the program of a case. Where it does not, the loss and
the gradients under the plan are compared with those of one device, in float32. Where
they differ by more than a ten-thousandth of their norm, they are compared in float64,
and where that differs by a billionth, `shardfx.testing.check_step` decides, and names
the line. XLA may end the process, so cases run in a second one, which goes on behind the
case that ended it.
"""

import argparse
import functools as ft
import json
import math
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np


_CLOSE = 1e-4
_CLOSE_IN_FLOAT64 = 1e-9
_RESULTS = Path(__file__).parents[1] / "results"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rule_sets", description=__doc__
    )
    parser.add_argument("--only", default="", help="a regex of names of cases")
    parser.add_argument(
        "--records",
        type=Path,
        help="add each result to this file as it comes, and run only what it lacks",
    )
    parser.add_argument(
        "--minutes", type=float, help="how long cases begin; the others are counted"
    )
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    flags = parser.parse_args(arguments)
    if flags.work:
        _work(flags.only, set(json.load(sys.stdin)))
        return 0
    minutes = math.inf if flags.minutes is None else flags.minutes
    results, left = _all(flags.only, flags.records, minutes)
    outcomes = [result["outcome"] for result in results.values()]
    counts = {outcome: outcomes.count(outcome) for outcome in sorted({*outcomes})}
    print(f"JAX {jax.__version__}: {counts}, {left} cases not run")
    file = flags.json or _RESULTS / f"rule-sets-{jax.__version__}.json"
    document = {
        "jax": jax.__version__,
        "counts": counts,
        "not_run": left,
        "cases": results,
    }
    file.write_text(json.dumps(document, indent=1) + "\n")
    if {*outcomes} & {"wrong", "ended", "refused"}:
        return 1
    return 0


def _all(only: str, records: Path | None, minutes: float) -> tuple[dict[str, Any], int]:
    """The result of each case that began within these minutes, by its name, and the
    number of other cases.
    """
    deadline = time.monotonic() + 60 * minutes
    results: dict[str, Any] = {}
    left = 0
    if records is not None and records.exists():
        for text in records.read_text().splitlines():
            row = json.loads(text)
            results[row.pop("case")] = row
    while True:
        pending = ""
        command = [sys.executable, "-m", "benchmarks.rule_sets"]
        command += ["--only", only, "--work"]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdin is not None and process.stdout is not None
            json.dump([*results], process.stdin)
            process.stdin.close()
            for text in process.stdout:
                print(text, end="", flush=True)
                row = json.loads(text)
                if "begins" in row:
                    pending = row["begins"]
                    left = row["left"]
                    if time.monotonic() > deadline:
                        process.kill()
                        return results, left
                    continue
                pending = ""
                left = 0
                _record(records, row)
                results[row.pop("case")] = row
        if not pending:
            if process.returncode:
                raise RuntimeError(f"the process of cases ended: {process.returncode}")
            return results, left
        row = {"outcome": "ended", "code": process.returncode}
        _record(records, {"case": pending, **row})
        results[pending] = row


def _record(records: Path | None, row: dict[str, Any]) -> None:
    if records is not None:
        with records.open("a") as file:
            file.write(json.dumps(row) + "\n")


def _work(only: str, done: set[str]) -> None:
    """Runs the cases whose names are not in `done`."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    from . import _pages, _presets

    every = [*_pages.cases(), *_presets.cases()]
    chosen = [case for case in every if re.search(only, case.name)]
    remaining = [case for case in chosen if case.name not in done]
    for place, case in enumerate(remaining):
        begins = {"begins": case.name, "left": len(remaining) - place}
        print(json.dumps(begins), flush=True)
        began = time.perf_counter()
        try:
            outcome = _result(case)
        except (ValueError, TypeError, jax.errors.JaxRuntimeError) as error:
            # XLA or JAX refuses the program; the sweep goes on.
            outcome = {"outcome": "refused", "told": f"{type(error).__name__}: {error}"}
        seconds = round(time.perf_counter() - began, 1)
        row = {"case": case.name, **outcome, "seconds": seconds}
        print(json.dumps(row), flush=True)


# Programs that run once need not be fast.
_QUICKLY = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}


def _result(case: Any) -> dict[str, Any]:
    """The outcome of a case: "proved", or by numbers "right" or "wrong"."""
    import shardfx as sfx
    from shardfx._step import judged

    verdict = judged(case.programs())
    if verdict.outcome == "proved":
        return {"outcome": "proved"}
    apart = _largest(case, is_wide=False)
    result = {"verdict": verdict.outcome, "apart": float(f"{apart:.1e}")}
    if apart <= _CLOSE:
        return {"outcome": "right", **result, "told": str(verdict)}
    # Rounding takes some models further off than that.
    with jax.enable_x64(True):
        apart = _largest(case, is_wide=True)
    result["apart in float64"] = float(f"{apart:.1e}")
    if apart <= _CLOSE_IN_FLOAT64:
        return {"outcome": "right", **result, "told": str(verdict)}
    step, args = case.step()
    checked = sfx.testing.check_step(step, *args)
    outcome = "right" if checked else "wrong"
    return {"outcome": outcome, **result, "told": f"{verdict}\n{checked}"}


def _largest(case: Any, *, is_wide: bool) -> float:
    """How far a result of a case is off, at most; in float64 if `is_wide`."""
    step, args = case.step()
    arrays = _arrays(args, is_wide=is_wide)
    answer = step.lower(*arrays).compile(_QUICKLY)(*arrays)
    whole = _on_one(case.make, is_wide)
    return max(map(_apart, jax.tree.leaves(answer), whole))


def _arrays(args: Any, *, is_wide: bool) -> Any:
    """Random arrays for the arguments of a step, in float64 if `is_wide`."""
    from shardfx.testing._args import with_arrays

    def widened(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        if leaf.dtype != np.float32:
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, np.float64, sharding=leaf.sharding)

    structs = jax.tree.map(widened, args) if is_wide else args
    return with_arrays(structs, mild=True)


@ft.lru_cache(maxsize=8)
def _on_one(make: Any, is_wide: bool) -> list[np.ndarray]:
    """Loss and gradients on one device, for the arguments that a case gets."""
    model = make()
    arrays = _arrays((model.params, model.batch), is_wide=is_wide)
    step = jax.jit(
        jax.value_and_grad(model.held_by(lambda x: x)), compiler_options=_QUICKLY
    )
    leaves = jax.tree.leaves(step(*arrays))
    return [np.asarray(leaf) for leaf in leaves]


def _apart(answer: Any, whole: np.ndarray) -> float:
    """The norm of the difference, as a share of the norm of the right array."""
    scale = max(float(np.linalg.norm(whole)), 1e-12)
    return float(np.linalg.norm(np.asarray(answer) - whole)) / scale


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

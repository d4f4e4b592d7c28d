"""The process that runs cases; XLA can abort it. `_driver.py` starts it, with any
interpreter that has JAX.

It reads a request a line from standard input: `{"draw": [seed, number, layouts]}`
draws its cases, `{"cases": [...]}` holds them, and `{"form": [...]}` names the program
of a known fault. For each case it writes the case, and then its outcome; so whoever
reads knows which case ended the process. A line `{"done": true}` follows each request.
"""

import argparse
import importlib.metadata
import json
import os
import sys
from typing import Any

import jax


DEVICES = 8
# Requests after which compiled programs are forgotten.
_REQUESTS_A_CACHE = 8


def main() -> None:
    """Answers requests until standard input ends."""
    flags = _flags()
    configure(shardy=bool(flags.shardy), optimised=bool(flags.optimised))
    # Libraries that print do not reach the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(line: dict[str, Any]) -> None:
        answers.write(json.dumps(line) + "\n")
        answers.flush()

    answer({"versions": versions()})
    for number, line in enumerate(sys.stdin, start=1):
        _answered(json.loads(line), answer)
        answer({"done": True})
        # Traces of JAX's own functions serve the next programs, too.
        if number % _REQUESTS_A_CACHE == 0:
            jax.clear_caches()


def configure(*, shardy: bool, optimised: bool) -> None:
    """Sets JAX up for emulated devices, before it starts them."""
    # XLA reads it when JAX starts it. The older way to make code compiles three times
    # as fast; from 0.12 on there is but one way, and the flag is an error. One module
    # of code in place of 32 takes a third less.
    if not optimised and jax.__version_info__ < (0, 12):
        os.environ["XLA_FLAGS"] = (
            "--xla_cpu_use_fusion_emitters=false"
            " --xla_cpu_parallel_codegen_split_count=1"
        )
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.config.update("jax_use_shardy_partitioner", shardy)
    jax.config.update("jax_disable_most_optimizations", not optimised)


def versions() -> dict[str, str]:
    """The versions of what computes the numbers."""
    return {
        "python": sys.version.split()[0],
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
    }


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shardy", type=int, default=1)
    parser.add_argument("--optimised", type=int, default=0)
    return parser.parse_args()


# The verdicts on cases that do not run, by what the request asks for.
_NOT_RUN = {
    "first": ("proved", "not judged"),
    "judged": ("not judged",),
    "only": ("proved", "refuted", "not judged", "failed"),
}


def _answered(request: dict[str, Any], answer: Any) -> None:
    if "form" in request:
        _answered_form(request["form"], answer)
        return
    from ._data import from_json, to_json
    from ._draws import draw
    from ._numbers import Prepared, outcome

    if "draw" in request:
        cases = draw(*request["draw"])
    else:
        cases = [from_json(data) for data in request["cases"]]
    ready: dict[str, Any] = {}
    for case in cases:
        answer({"case": to_json(case)})
        step = _traced(case) if request.get("verify") else None
        said: dict[str, Any] | None = None
        if request.get("verify") in _NOT_RUN:
            from ._verdicts import verdict

            said = verdict(case, step)
            if said["outcome"] in _NOT_RUN[request["verify"]]:
                answer({"outcome": "not run", "verdict": said})
                continue
        key = json.dumps(to_json(case)["program"])
        if key not in ready:
            try:
                ready[key] = Prepared(case.program)
            except Exception as error:  # JAX's and XLA's errors have many types
                ready[key] = f"{type(error).__name__}: {error}"[:800]
        if isinstance(ready[key], str):
            answer({"outcome": "refused", "message": ready[key]})
            continue
        line = outcome(case, ready[key], _compiled(step))
        answer(_compared(request=request, case=case, step=step, line=line, said=said))


def _answered_form(form: list[str], answer: Any) -> None:
    """Answers what becomes of the program of a fault in a form."""
    from ._forms import Program, outcome

    program = Program(*form)
    answer({"case": program._asdict()})
    answer(outcome(program))


def _traced(case: Any) -> Any:
    """The step of a case, traced once for its verdict and its numbers; `None` if JAX
    refuses it, which both of them say.
    """
    from ._verdicts import traced_step

    try:
        return traced_step(case)
    except Exception:  # JAX's errors have many types
        return None


def _compiled(step: Any) -> Any:
    """A function that compiles and runs a traced step; `None` for none."""
    if step is None:
        return None
    return lambda *arrays: step.lowered("cpu").compile()(*arrays)


def _compared(
    request: dict[str, Any],
    case: Any,
    step: Any,
    line: dict[str, Any],
    said: dict[str, Any] | None,
) -> dict[str, Any]:
    """The outcome of a case, `line`, with what the request asks for beside the numbers.
    `said` is the verdict on it, if that is known already.
    """
    is_run = line["outcome"] in ("right", "wrong", "unstable")
    if request.get("verify") and is_run:
        from ._verdicts import verdict

        line["verdict"] = verdict(case, step) if said is None else said
    if request.get("explain") and line["outcome"] == "wrong":
        from ._verdicts import explanation

        line |= explanation(case)
    if request.get("mutations") and line["outcome"] == "right":
        from ._mutations import mutated
        from ._numbers import sharded

        count = request["mutations"]
        line["mutated"] = mutated(case, sharded(case), count, case.number)
    return line


if __name__ == "__main__":
    main()

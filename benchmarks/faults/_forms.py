"""The programs of the known faults in other forms: under `vmap`, in a `lax.scan`,
recomputed within an inner `jit`, with other sizes, and at full size.

Numbers say which of them are wrong with the installed JAX. Of these it says whether
`shardfx.testing.verify` refutes them, at a line of the function that holds the faulty
operation, and of those that it does not refute, whether `shardfx.testing.check_step`
finds them. At full size no numbers are computed.
"""

import importlib
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

from shardfx import testing
from tests.step.repros import _run
from tests.step.repros.__main__ import names


# Dimensions of more elements are enlarged: smaller ones are windows and heads.
_SMALL = 4
_LARGER = 2
_FULL = 64
# The functions of a fault's program whose lines hold the faulty operation, or that which
# takes its misplaced result: a gradient of `conv_channels` is multiplied in `loss`. Of
# other faults, any line of the program is right.
_FAULTY_FUNCTIONS: Mapping[str, tuple[str, ...]] = {
    "residual_order": ("block",),
    "conv_channels": ("conv", "loss"),
    "conv_groups": ("conv", "causal"),
    "conv_replicas": ("conv", "causal"),
}
_FAMILIES: Mapping[str, str] = {
    "residual_order": "residual stacks",
    "conv_channels": "convolutions",
    "conv_groups": "convolutions",
    "conv_replicas": "convolutions",
}
_OTHERS = "other faults"


class Program(NamedTuple):
    """The program of a fault in a form.

    - `fault`: the module of `tests/step/repros`.
    - `kind`: "wrong", or "mended" for a program that mends the fault.
    - `title`: the name of its case there.
    - `form`: the name of its form.
    """

    fault: str
    kind: str
    title: str
    form: str

    @property
    def family(self) -> str:
        return _FAMILIES.get(self.fault, _OTHERS)


def programs() -> list[Program]:
    """All programs, in the order of the faults."""
    programs = []
    for fault in names():
        for kind, cases in _cases(fault).items():
            for title, form in itertools.product(cases, _FORMS):
                programs.append(Program(fault, kind, title, form))
    return programs


def _cases(fault: str) -> dict[str, Mapping[str, _run.Case]]:
    cases: _run.Fault = importlib.import_module(f"tests.step.repros.{fault}").cases()
    return {"wrong": cases.wrong, "mended": cases.mended}


def outcome(program: Program) -> dict[str, Any]:
    """What numbers, `verify` and `check_step` say of a program, as JSON holds it."""
    case = _FORMS[program.form](_cases(program.fault)[program.kind][program.title])
    step, structs = _step(case)
    try:
        verdict = testing.verify(step, *structs)
        numbers = {"numbers": "not run"}
        if program.form != "full size":
            numbers = _numbers(case)
    except Exception as error:  # XLA's and JAX's errors have many types
        return {
            "numbers": "refused",
            "message": f"{type(error).__name__}: {error}"[:200],
        }
    line: dict[str, Any] = {**numbers, "verdict": verdict.outcome}
    if verdict.refutations:
        line["functions"] = sorted({_function(fault) for fault in verdict.refutations})
        line["is_right_line"] = _is_at_fault(program.fault, verdict.refutations)
    elif line["numbers"] == "wrong":
        arrays = map(jax.device_put, case.args, [struct.sharding for struct in structs])
        line["checked"] = "right" if testing.check_step(step, *arrays) else "wrong"
    return line


def _numbers(case: _run.Case) -> dict[str, Any]:
    """Whether the numbers of a case are right, and how far they are from those of one
    device.
    """
    try:
        apart = _run.apart(case)
    except ValueError as error:
        # The program returns shards of another size, of which JAX makes no array.
        return {"numbers": "wrong", "message": str(error)[:200]}
    words = "wrong" if apart > _run.CLOSE else "right"
    return {"numbers": words, "apart": float(f"{apart:.1e}")}


def _step(case: _run.Case) -> tuple[Any, list[jax.ShapeDtypeStruct]]:
    """The jitted function of a case and structs of its arguments. Unlike those of the
    programs, it has no compiler options: with these, no other function may call it.
    """
    _, *structs = _run.placed(case)
    shardings = tuple(struct.sharding for struct in structs)
    mesh = shardings[0].mesh
    result = None if case.result is None else NamedSharding(mesh, case.result)
    jitted = jax.jit(case.step(mesh), in_shardings=shardings, out_shardings=result)
    return jitted, structs


def _function(refutation: testing.Refutation) -> str:
    """The function that holds the line of a refutation; "" if the line is not known."""
    return "" if refutation.source is None else refutation.source.function


def _is_at_fault(fault: str, refutations: Sequence[testing.Refutation]) -> bool:
    """Whether each refutation names a line of the fault's program, in a function that
    holds the faulty operation.
    """
    for refutation in refutations:
        source = refutation.source
        if source is None or Path(source.file).stem != fault:
            return False
        functions = _FAULTY_FUNCTIONS.get(fault, (source.function,))
        if source.function not in functions:
            return False
    return True


# The forms.


def _mapped(case: _run.Case) -> _run.Case:
    """The program under `vmap`."""
    return _stacked(case, jax.vmap)


def _scanned(case: _run.Case) -> _run.Case:
    """The program in a loop over stacked arguments."""
    return _stacked(case, _in_scan)


def _in_scan(step: Callable[..., Any]) -> Callable[..., Any]:
    def loop(*args: jax.Array) -> Any:
        def turn(carry: jax.Array, args: Sequence[jax.Array]) -> Any:
            return carry, step(*args)

        return jax.lax.scan(turn, jax.numpy.zeros(()), args)[1]

    return loop


def _stacked(
    case: _run.Case,
    change: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> _run.Case:
    """The case with stacked arguments, whose function `change` maps over them."""
    step = case.step
    return case._replace(
        step=lambda mesh: change(step(mesh)),
        args=tuple(_stack(array) for array in case.args),
        specs=tuple(P(None, *spec) for spec in case.specs),
        result=None if case.result is None else P(None, *case.result),
    )


def _stack(array: np.ndarray) -> np.ndarray:
    """An array and another one of its shape, for `vmap` and `lax.scan`."""
    if array.dtype.kind == "i":
        return np.stack([array, array])
    other = _run.normal(array.size, *array.shape)
    return np.stack([array, other])


def _recomputed(case: _run.Case) -> _run.Case:
    """The program recomputed within an inner `jit`."""
    step = case.step
    return case._replace(step=lambda mesh: jax.checkpoint(jax.jit(step(mesh))))


def _larger(case: _run.Case) -> _run.Case:
    """The program with other sizes, and with numbers for these."""
    args = []
    for array in case.args:
        shape = _enlarged(array.shape, _LARGER)
        if array.dtype.kind == "i":
            args.append(_more_indices(array, shape))
        else:
            args.append(_run.normal(array.size, *shape))
    return case._replace(args=tuple(args))


def _full_size(case: _run.Case) -> _run.Case:
    """The program with the sizes of large models, whose arguments have no numbers."""
    args = []
    for array in case.args:
        shape = _enlarged(array.shape, _FULL)
        args.append(np.broadcast_to(np.zeros((), array.dtype), shape))
    return case._replace(args=tuple(args))


def _enlarged(shape: Sequence[int], factor: int) -> tuple[int, ...]:
    sizes = []
    for size in shape:
        sizes.append(size * factor if size > _SMALL else size)
    return tuple(sizes)


def _more_indices(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Indices, and the numbers behind the largest of them."""
    if array.shape == shape:
        return array
    more = np.arange(np.prod(shape) - array.size) + array.max() + 1
    return np.concatenate([array, more])


_FORMS: Mapping[str, Callable[[_run.Case], _run.Case]] = {
    "mapped": _mapped,
    "scanned": _scanned,
    "recomputed": _recomputed,
    "larger": _larger,
    "full size": _full_size,
}


# The counts.


def document(
    lines: Mapping[Program, Mapping[str, Any]],
    versions: Mapping[str, str],
) -> dict[str, Any]:
    """What the results file holds: the counts by family, and each line."""
    counts: dict[str, Counter[str]] = {}
    for program, line in lines.items():
        counts.setdefault(program.family, Counter())[words_of(line)] += 1
    return {
        "versions": dict(versions),
        "forms": {family: dict(sorted(counts[family].items())) for family in counts},
        "lines": [{**program._asdict(), **line} for program, line in lines.items()],
    }


def words_of(line: Mapping[str, Any]) -> str:
    """The numbers and the verdict of a line in words."""
    numbers = line.get("numbers", line.get("outcome", ""))
    if "verdict" not in line:
        return numbers
    words = f"{numbers}, {line['verdict']}"
    if line["verdict"] == "refuted":
        return words if line["is_right_line"] else f"{words} elsewhere"
    if line.get("checked") == "wrong":
        return "wrong, found by check_step"
    return words


def mistakes(document: Mapping[str, Any]) -> list[str]:
    """The counts that no family may have: wrong programs that are proved, and right
    ones that are refuted.
    """
    mistaken = []
    for family, counts in document["forms"].items():
        for words in counts:
            is_accused = words.startswith("right, refuted")
            if is_accused or words.startswith("wrong, proved"):
                mistaken.append(f"{family}: {words}")
    return mistaken

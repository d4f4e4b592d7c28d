"""The number of times that each computation of an HLO module runs in a step, from loop
trip counts and calls.
"""

import collections
import dataclasses
import operator
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from .._ground import opcodes
from .._ground.errors import ProgramError
from .._step import HloModule, Instruction, index_of, root_of


_KNOWN_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_COMPARED = re.compile(r"direction=(LT|LE|GT|GE|NE)")
_COMPARISONS = {
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
    "NE": operator.ne,
}
_INTEGER = re.compile(r"-?\d+")
# The operations that return an integer scalar unchanged.
_UNCHANGED = opcodes.COPIES | opcodes.RESHAPES | {"convert"}


@dataclasses.dataclass(frozen=True)
class Runs:
    """The number of times that a computation runs in one step.

    - `count`: the number of times. A loop of unknown trip count counts as one
      iteration.
    - `unknown`: the enclosing loops of unknown trip count, as lines of HLO.
    - `branch`: for each enclosing conditional, outermost first, its name and the number
      of the branch.
    - `slice`: the number of the TPU slice that runs the computation; `None` if all
      slices do.
    """

    count: int
    unknown: tuple[str, ...] = ()
    branch: tuple[tuple[str, int], ...] = ()
    slice: int | None = None


def runs_of(module: HloModule) -> dict[str, tuple[Runs, ...]]:
    """For the name of each computation that runs, the number of times that it runs in a
    step. A computation has several entries if it is called from several branches, or
    from loops of unknown trip count.
    """
    # For each computation, the number of its runs within the same loops and branches.
    # The `count` of a key is not used.
    runs_by_name = {module.entry: collections.Counter({Runs(0): 1})}
    # Callees come before callers in the text. In reverse order, each count is complete
    # when it is reached.
    for name in reversed(module.computations):
        if name not in runs_by_name:
            continue
        for instruction in module.computations[name].values():
            # The `-done` of an asynchronous operation names the computation again. A
            # reducer contains no collectives.
            opcode = instruction.opcode
            is_continued = opcode.endswith(opcodes.CONTINUATIONS)
            if is_continued or opcode.startswith(opcodes.COMBINING):
                continue
            for caller_runs, count in runs_by_name[name].items():
                for call in _calls(module, name, instruction, caller_runs):
                    if call.target not in module.computations:
                        raise ProgramError(
                            f"the HLO module is cut off: it lacks `{call.target}`, which"
                            f" {instruction.text:.200}"
                        )
                    counts = runs_by_name.setdefault(call.target, collections.Counter())
                    counts[call.runs] += count * call.times

    runs_of_names: dict[str, tuple[Runs, ...]] = {}
    for name, counts in runs_by_name.items():
        runs_of_names[name] = tuple(
            dataclasses.replace(runs, count=count) for runs, count in counts.items()
        )
    return runs_of_names


class _Call(NamedTuple):
    """A call of a computation.

    - `target`: the computation's name.
    - `runs`: the loops and branches around it; the field `count` is not used.
    - `times`: how often one run of the calling instruction calls it.
    """

    target: str
    runs: Runs
    times: int = 1


def _calls(
    module: HloModule,
    name: str,
    instruction: Instruction,
    caller_runs: Runs,
) -> Iterator[_Call]:
    """Yields the calls of an instruction in the computation `name`. `caller_runs` has
    the loops of unknown trip count (`unknown`) and the branches around that
    computation, and each call has those around the called one.
    """
    caller = module.computations[name]
    if instruction.opcode == "while":
        trips = trip_count(module, caller, instruction)
        if trips is None:
            unknown = (*caller_runs.unknown, instruction.text)
            runs = dataclasses.replace(caller_runs, unknown=unknown)
            times = {"body": 1, "condition": 1}
        else:
            runs = caller_runs
            # The condition runs once more, and can contain collectives too.
            times = {"body": trips, "condition": trips + 1}
        for role, target in instruction.called:
            if role in times:
                yield _Call(
                    target=target,
                    runs=runs,
                    times=times[role],
                )
    elif instruction.opcode == "conditional":
        index = caller.get(instruction.operands[0])
        # In programs for several TPU slices, each slice runs the branch of its own
        # number.
        is_by_slice = (
            index is not None and 'custom_call_target="SliceId"' in index.attributes
        )
        for number, (_, target) in enumerate(instruction.called):
            if is_by_slice:
                runs = dataclasses.replace(caller_runs, slice=number)
            else:
                branch = (*caller_runs.branch, (f"{name}/{instruction.name}", number))
                runs = dataclasses.replace(caller_runs, branch=branch)
            yield _Call(target, runs)
    else:
        for _, target in instruction.called:
            yield _Call(target, caller_runs)


def trip_count(
    module: HloModule,
    around: Mapping[str, Instruction],
    loop: Instruction,
) -> int | None:
    """The trip count of a loop; `None` if it is not a constant. It is read from the
    loop's `backend_config`. If that has none, it is found from the loop's condition and
    the increment of its counter, as a part of `ComputeWhileLoopTripCount` in
    xla/service/while_loop_analysis.cc does. `around` is the computation that contains
    the loop: its instructions, by name.
    """
    if match := _KNOWN_TRIPS.search(loop.attributes):
        return int(match[1])
    targets = dict(loop.called)
    condition = module.computations[targets["condition"]]
    body = module.computations[targets["body"]]
    comparison = _fusion_root(module, condition, root_of(condition))
    root = root_of(body)
    initial = around.get(loop.operands[0])
    direction = _COMPARED.search(comparison.instruction.attributes)
    if comparison.instruction.opcode != "compare" or direction is None:
        return None
    if initial is None or initial.opcode != "tuple" or root.opcode != "tuple":
        return None

    compared = [
        _scalar(module, comparison.scope, operand)
        for operand in comparison.instruction.operands
    ]
    if len(compared) != 2:
        return None
    # The loop's counter, an element of the loop's tuple, is compared with a constant.
    # Of a scalar, `carried` is the element of the tuple (`None` for a constant), and
    # `added` the constant added to it.
    counter, stop = compared
    if counter is None or counter.carried is None:
        return None
    if stop is None or stop.carried is not None:
        return None
    start = _scalar(module, around, initial.operands[counter.carried])
    step = _scalar(module, body, root.operands[counter.carried])
    if start is None or start.carried is not None:
        return None
    if step is None or step.carried != counter.carried:
        return None
    return _trip_count_of(
        start.added + counter.added, step.added, stop.added, direction[1]
    )


def _trip_count_of(start: int, step: int, stop: int, direction: str) -> int | None:
    """The trip count of a loop over an integer from `start` in increments of `step`;
    `None` if the loop never ends. It runs while the counter's comparison with `stop` is
    true. For 0, 2, 5 and "LT" (less than), the trip count is 3. `direction` is HLO's
    name of the comparison.
    """
    if not _COMPARISONS[direction](start, stop):
        return 0
    # The first value of the counter at which the loop has ended.
    end = stop + {"LE": 1, "GE": -1}.get(direction, 0)
    is_reached = (end - start) * step > 0 and (
        direction != "NE" or (stop - start) % step == 0
    )
    if is_reached:
        return len(range(start, end, step))
    return None


class _Scoped(NamedTuple):
    """An instruction, and the instructions that it may read, by name."""

    instruction: Instruction
    scope: Mapping[str, Instruction]


def _fusion_root(
    module: HloModule,
    scope: Mapping[str, Instruction],
    instruction: Instruction,
) -> _Scoped:
    """The instruction that computes the result of `instruction`: of a fusion, the root
    of its computation. `scope` has the instructions of the computation that contains
    `instruction`.
    """
    if instruction.opcode != "fusion":
        return _Scoped(instruction, scope)
    target = next(name for _, name in instruction.called)
    inner = module.computations[target]
    inner_scope = {**scope, **inner}
    for parameter in inner.values():
        if parameter.opcode == "parameter":
            operand = instruction.operands[int(parameter.inside)]
            inner_scope[parameter.name] = scope[operand]
    return _Scoped(root_of(inner), inner_scope)


class _Scalar(NamedTuple):
    """An integer: element `carried` of the loop's tuple, plus a constant. For "element
    2 of the tuple, plus 1", `carried` is 2, and `added` is 1. For the constant 5,
    `carried` is `None`, and `added` is 5.
    """

    carried: int | None
    added: int


def _scalar(
    module: HloModule,
    scope: Mapping[str, Instruction],
    name: str,
) -> _Scalar | None:
    """The integer that the instruction `name` returns; `None` if it is not known.
    `scope` has the instructions by name. Element 2 of the loop's tuple, plus 1, is
    `_Scalar(carried=2, added=1)`; the constant 5 is `_Scalar(carried=None, added=5)`.
    """
    if name not in scope:
        return None
    instruction, scope = _fusion_root(module, scope, scope[name])
    if instruction.opcode in _UNCHANGED:
        return _scalar(module, scope, instruction.operands[0])
    if instruction.opcode == "get-tuple-element":
        return _Scalar(carried=index_of(instruction), added=0)
    if instruction.opcode == "constant" and _INTEGER.fullmatch(instruction.inside):
        return _Scalar(carried=None, added=int(instruction.inside))
    if instruction.opcode not in ("add", "subtract"):
        return None

    first, second = (
        _scalar(module, scope, operand) for operand in instruction.operands
    )
    if first is None or second is None:
        return None
    if second.carried is None:
        sign = 1 if instruction.opcode == "add" else -1
        return _Scalar(first.carried, first.added + sign * second.added)
    if first.carried is None and instruction.opcode == "add":
        return _Scalar(second.carried, first.added + second.added)
    return None

"""The number of times that each computation of an HLO module runs in a step, from loop
trip counts and calls.
"""

import collections
import dataclasses
import operator
import re
from collections.abc import Iterator, Mapping

from .._ground.errors import ProgramError
from .._step import HloModule, Instruction, index_of, root_of


_KNOWN = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_COMPARED = re.compile(r"direction=(LT|LE|GT|GE|NE)")
_COMPARISONS = {
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
    "NE": operator.ne,
}
_INTEGER = re.compile(r"-?\d+")
_ENDS = ("-done", "-update")
# The operations that return an integer scalar unchanged.
_UNCHANGED = ("copy", "copy-start", "copy-done", "convert", "bitcast", "reshape")
_REDUCES = ("all-reduce", "reduce", "scatter", "sort", "select-and-scatter")


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
    runs_by_name = {module.entry: collections.Counter({Runs(0): 1})}
    # Callees come before callers in the text. In reverse order, each count is complete
    # when it is reached.
    for name in reversed(module.computations):
        for instruction in (
            module.computations[name].values() if name in runs_by_name else ()
        ):
            # The `-done` of an asynchronous operation names the computation again. A
            # reducer contains no collectives.
            if instruction.opcode.endswith(_ENDS) or instruction.opcode.startswith(
                _REDUCES
            ):
                continue
            for caller_runs, count in runs_by_name[name].items():
                for called, runs, times in _calls(
                    module, name, instruction, caller_runs
                ):
                    if called not in module.computations:
                        raise ProgramError(
                            f"the HLO module is cut off: it lacks `{called}`, which"
                            f" {instruction.text:.200}"
                        )
                    runs_by_name.setdefault(called, collections.Counter())[runs] += (
                        count * times
                    )
    return {
        name: tuple(
            dataclasses.replace(runs_of_caller, count=count)
            for runs_of_caller, count in runs.items()
        )
        for name, runs in runs_by_name.items()
    }


def _calls(
    module: HloModule, name: str, instruction: Instruction, caller_runs: Runs
) -> Iterator[tuple[str, Runs, int]]:
    """Yields, for each computation that an instruction calls: its name, the loops and
    branches around it, and how often one run of the instruction calls it. The
    instruction is in the computation `name`, and `own` has the loops and branches
    around `name`. The field `count` of these `Runs` is not used.
    """
    around = module.computations[name]
    if instruction.opcode == "while":
        trips = trip_count(module, around, instruction)
        if trips is None:
            caller_runs = dataclasses.replace(
                caller_runs, unknown=(*caller_runs.unknown, instruction.text)
            )
        # The condition runs once more than the body, and can contain collectives too.
        times = {
            "body": 1 if trips is None else trips,
            "condition": 1 if trips is None else trips + 1,
        }
        yield from (
            (target, caller_runs, times[what])
            for what, target in instruction.called
            if what in times
        )
    elif instruction.opcode == "conditional":
        index = around.get(instruction.operands[0])
        # In programs for several TPU slices, each slice runs the branch of its own
        # number.
        is_by_slice = (
            index is not None and 'custom_call_target="SliceId"' in index.attributes
        )
        for number, (_, target) in enumerate(instruction.called):
            branch = (*caller_runs.branch, (f"{name}/{instruction.name}", number))
            yield (
                target,
                dataclasses.replace(
                    caller_runs,
                    **({"slice": number} if is_by_slice else {"branch": branch}),
                ),
                1,
            )
    else:
        yield from ((target, caller_runs, 1) for _, target in instruction.called)


def trip_count(
    module: HloModule, around: Mapping[str, Instruction], loop: Instruction
) -> int | None:
    """The trip count of a loop; `None` if it is not a constant. It is read from the
    loop's `backend_config`. If that has none, it is found from the loop's condition and
    the increment of its counter, as a part of `ComputeWhileLoopTripCount` in
    xla/service/while_loop_analysis.cc does. `around` is the computation that contains
    the loop: its instructions, by name.
    """
    if match := _KNOWN.search(loop.attributes):
        return int(match[1])
    targets = dict(loop.called)
    condition, body = (
        module.computations[targets[what]] for what in ("condition", "body")
    )
    test, scope = _fusion_root(module, condition, root_of(condition))
    root, start_tuple = root_of(body), around.get(loop.operands[0])
    direction = _COMPARED.search(test.attributes)
    if (
        test.opcode != "compare"
        or direction is None
        or start_tuple is None
        or {start_tuple.opcode, root.opcode} != {"tuple"}
    ):
        return None
    match [_scalar(module, scope, operand) for operand in test.operands]:
        case [(int(index), shift), (None, stop)]:
            start, step = (
                _scalar(module, around, start_tuple.operands[index]),
                _scalar(module, body, root.operands[index]),
            )
            if (
                start is not None
                and step is not None
                and (start[0], step[0]) == (None, index)
            ):
                return _trip_count_of(start[1] + shift, step[1], stop, direction[1])
    return None


def _trip_count_of(start: int, step: int, stop: int, direction: str) -> int | None:
    """The trip count of a loop over an integer from `start` in increments of `step`;
    `None` if the loop never ends. It runs while the counter's comparison with `stop` is
    true. For 0, 2, 5 and "LT" (less than), the trip count is 3.
    """
    if not _COMPARISONS[direction](start, stop):
        return 0
    last = stop + {"LE": 1, "GE": -1}.get(direction, 0)
    is_reached = (last - start) * step > 0 and (
        direction != "NE" or (stop - start) % step == 0
    )
    return len(range(start, last, step)) if is_reached else None


def _fusion_root(
    module: HloModule, scope: Mapping[str, Instruction], one: Instruction
) -> tuple[Instruction, Mapping[str, Instruction]]:
    """The instruction that computes the result of `one`, and a dict with the
    instructions that it may read, by name. For a fusion, it is the root of the fusion's
    computation, and the dict has the instructions of this computation too. Any other
    `one` is returned with `scope`: the instructions of the computation that contains
    `one`.
    """
    if one.opcode != "fusion":
        return one, scope
    inner = module.computations[next(target for _, target in one.called)]
    parameters = (
        parameter for parameter in inner.values() if parameter.opcode == "parameter"
    )
    return root_of(inner), {
        **scope,
        **inner,
        **{
            parameter.name: scope[one.operands[int(parameter.inside)]]
            for parameter in parameters
        },
    }


def _scalar(
    module: HloModule, scope: Mapping[str, Instruction], name: str
) -> tuple[int | None, int] | None:
    """The integer that the instruction `name` returns, as a pair: the index of a
    loop-carried integer, and a constant that is added to it. For "element 2 of the
    loop's tuple, plus 1", the pair is (2, 1). For the constant 5, it is (None, 5). For
    any other value, the result is `None`. `scope` has the instructions by name.
    """
    if name not in scope:
        return None
    instruction, scope = _fusion_root(module, scope, scope[name])
    if instruction.opcode in _UNCHANGED:
        return _scalar(module, scope, instruction.operands[0])
    if instruction.opcode == "get-tuple-element":
        return index_of(instruction), 0
    if instruction.opcode == "constant" and _INTEGER.fullmatch(instruction.inside):
        return None, int(instruction.inside)
    if instruction.opcode in ("add", "subtract"):
        match [_scalar(module, scope, operand) for operand in instruction.operands]:
            case [(index, one), (None, other)]:
                return index, one + (other if instruction.opcode == "add" else -other)
            case [(None, one), (index, other)] if instruction.opcode == "add":
                return index, one + other
    return None

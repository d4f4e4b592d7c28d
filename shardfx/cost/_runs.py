"""How often each computation of a compiled program runs in a step, through loops, branches, calls and fusions."""

import dataclasses
import re
from collections.abc import Mapping

from .._ground.errors import ProgramError
from ._hlo_text import HloModule, Instruction, index_of, root_of


_KNOWN = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_COMPARED = re.compile(r"direction=(LT|LE|GT|GE|NE)")
_ENDS = ("-done", "-update")
# These return a number unchanged.
_MOVES = ("copy", "copy-start", "copy-done", "convert", "bitcast", "reshape")
_REDUCES = ("all-reduce", "reduce", "scatter", "sort", "select-and-scatter")


@dataclasses.dataclass(frozen=True)
class Runs:
    """How often a computation runs in one step.

    **Arguments:**

    - `count`: times, where a loop whose trips are not known counts once.
    - `unknown`: the loops around it whose trips are not known, as lines of HLO.
    - `branch`: the conditional whose branch it is in and the number of the branch, outermost first.
    - `slice`: the only slice of TPUs that runs it, by number; `None` where all do.
    """

    count: int
    unknown: tuple[str, ...] = ()
    branch: tuple[tuple[str, int], ...] = ()
    slice: int | None = None


def runs_of(module: HloModule) -> dict[str, tuple[Runs, ...]]:
    """How often each computation runs that the entry reaches.

    **Arguments:**

    - `module`: the program.

    **Returns:**

    The counts by the name of the computation. A computation with several callers has the sum, with an entry for each
    branch, and for each loop of unknown length, that contains it.
    """
    found = {module.entry: [Runs(1)]}
    # Callees come before callers in the text. In reverse order, each count is complete when it is reached.
    for name in reversed(module.computations):
        for instruction in module.computations[name].values() if name in found else ():
            # The end of an asynchronous operation names its computation again; a reducer runs within one device.
            if instruction.opcode.endswith(_ENDS) or instruction.opcode.startswith(_REDUCES):
                continue
            for own in found[name]:
                for called, runs in _called(module, name, instruction, own):
                    if called not in module.computations:
                        raise ProgramError(
                            f"the HLO module is cut off: it lacks `{called}`, which {instruction.text:.200}"
                        )
                    _add(found.setdefault(called, []), runs)
    return {name: tuple(runs) for name, runs in found.items()}


def _called(module: HloModule, name: str, instruction: Instruction, own: Runs) -> list[tuple[str, Runs]]:
    called = list(instruction.called)
    if instruction.opcode == "while":
        trips = trip_count(module, module.computations[name], instruction)
        unknown = own.unknown if trips is not None else (*own.unknown, instruction.text)
        # The condition runs once more than the body, and may communicate too.
        times = {"body": 1 if trips is None else trips, "condition": 1 if trips is None else trips + 1}
        return [
            (target, dataclasses.replace(own, count=own.count * times[attribute], unknown=unknown))
            for attribute, target in called
            if attribute in times
        ]
    if instruction.opcode == "conditional":
        by_slice = _is_by_slice(module.computations[name], instruction)
        label = f"{name}/{instruction.name}"
        return [
            (target, dataclasses.replace(own, **_in_branch(own, label, number, by_slice=by_slice)))
            for number, (_, target) in enumerate(called)
        ]
    return [(target, own) for _, target in called]


def _in_branch(own: Runs, label: str, number: int, *, by_slice: bool) -> dict[str, object]:
    return {"slice": number} if by_slice else {"branch": (*own.branch, (label, number))}


def _is_by_slice(around: Mapping[str, Instruction], conditional: Instruction) -> bool:
    """Whether a conditional branches on the number of the TPU slice. Every branch then runs, each in its own slice."""
    asked = around.get(conditional.operands[0])
    return asked is not None and 'custom_call_target="SliceId"' in asked.attributes


def _add(before: list[Runs], more: Runs) -> None:
    for at, own in enumerate(before):
        if dataclasses.replace(own, count=more.count) == more:
            before[at] = dataclasses.replace(own, count=own.count + more.count)
            return
    before.append(more)


def trip_count(module: HloModule, around: Mapping[str, Instruction], loop: Instruction) -> int | None:
    """The number of iterations of a loop, from the compiler's note or from its condition and the step of its counter.

    **Arguments:**

    - `module`: the program.
    - `around`: the computation that the loop is in.
    - `loop`: the loop.

    **Returns:**

    The count, or `None` if it depends on values that are not in the program.
    """
    if known := _KNOWN.search(loop.attributes):
        return int(known[1])
    targets = dict(loop.called)
    condition, body = module.computations[targets["condition"]], module.computations[targets["body"]]
    test = _unwrapped(module, condition, root_of(condition))
    if test is None:
        return None
    compare, scope = test
    direction = _COMPARED.search(compare.attributes)
    if compare.opcode != "compare" or direction is None:
        return None
    left, right = (_element(scope, condition, operand) for operand in compare.operands)
    start, step, stop = None, None, None
    if isinstance(left, int) and isinstance(right, str):
        start, step, stop = _initial(around, loop, left), _step(module, body, left), _integer(right)
    if start is None or step is None or stop is None:
        return None
    return _trips(start, step, stop, direction[1])


def _trips(start: int, step: int, stop: int, direction: str) -> int | None:
    if direction in ("LT", "LE") and step > 0:
        return max(0, -(-(stop + (direction == "LE") - start) // step))
    if direction in ("GT", "GE") and step < 0:
        return max(0, -(-(start - stop + (direction == "GE")) // -step))
    if direction == "NE" and step and (stop - start) % step == 0 and (stop - start) // step >= 0:
        return (stop - start) // step
    return None


def _unwrapped(
    module: HloModule, computation: Mapping[str, Instruction], root: Instruction
) -> tuple[Instruction, dict[str, Instruction]] | None:
    """The comparison that a loop's condition returns, with the instructions around it, also if it is inside
    a fusion.
    """
    if root.opcode != "fusion":
        return root, dict(computation)
    inner = module.computations[next(target for _, target in root.called)]
    scope = dict(inner)
    for instruction in inner.values():
        if instruction.opcode == "parameter":
            scope[instruction.name] = computation[root.operands[int(instruction.inside)]]
    return root_of(inner), scope


def _element(scope: Mapping[str, Instruction], outer: Mapping[str, Instruction], name: str) -> int | str | None:
    """An operand of the comparison: the index of a loop-carried variable, or the text of a constant; `None` for other
    operands.
    """
    found = _moved({**outer, **scope}, name)
    if found is None:
        return None
    if found.opcode == "get-tuple-element":
        return index_of(found)
    return found.inside if found.opcode == "constant" else None


def _initial(around: Mapping[str, Instruction], loop: Instruction, index: int) -> int | None:
    given = around.get(loop.operands[0])
    if given is None or given.opcode != "tuple":
        return None
    value = _moved(around, given.operands[index])
    return _integer(value.inside) if value is not None and value.opcode == "constant" else None


def _step(module: HloModule, body: Mapping[str, Instruction], index: int) -> int | None:
    """The constant that the body of a loop adds to its variable `index`; `None` if the body changes it in
    another way.
    """
    root = root_of(body)
    if root.opcode != "tuple":
        return None
    last = _moved(body, root.operands[index])
    made = None if last is None else _unwrapped(module, body, last)
    if made is None or made[0].opcode not in ("add", "subtract"):
        return None
    add, scope = made
    parts = [_element(scope, body, operand) for operand in add.operands]
    moved = [_integer(part) for part in parts if isinstance(part, str)]
    if index not in parts or len(moved) != 1 or moved[0] is None:
        return None
    return moved[0] if add.opcode == "add" else -moved[0]


def _moved(scope: Mapping[str, Instruction], name: str) -> Instruction | None:
    """The instruction that a name stands for, found through copies, conversions and reshapes."""
    found = scope.get(name)
    while found is not None and found.opcode in _MOVES:
        found = scope.get(found.operands[0])
    return found


def _integer(text: str) -> int | None:
    return int(text) if re.fullmatch(r"-?\d+", text) else None

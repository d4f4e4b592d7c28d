"""The judge: goes through the program of one device, operation by operation, and says
what the devices hold of each result.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from ..hlo_text import (
    ELEMENTWISE,
    HloModule,
    Instruction,
    arrays_in,
    index_of,
    parse_hlo,
    parts_of,
    root_of,
)
from ..lowered import own_line
from ..partitioner import Programs
from . import exchanges, indices, pieces, products, sources, views
from .cuts import Cut, Cuts
from .held import (
    Axis,
    Context,
    Faulty,
    Held,
    Result,
    Unknown,
    view_of,
)
from .joining import joined_cut
from .matching import expressed, is_matched
from .pointwise import elementwise
from .shardings import axes_of, shardings_in
from .values import Global, Loop, WholeProgram, conditional_key, read_whole, unchanged
from .verdict import (
    Refutation,
    Unjudged,
    UnjudgedOperation,
    Verdict,
    Wrong,
)


_Rule: TypeAlias = Callable[[Context, Instruction, Sequence[Held]], Held]
# Turns of a loop after which what it carries has to be settled.
_TURNS = 6
# Errors of a rule that meets a form of an operation for which it was not written.
_UNREAD = (AssertionError, KeyError, IndexError, TypeError, ValueError)
_CALLS = ("call", "fusion", "map", "while", "conditional")
# The bytes of their results are no work of the program.
_FREE = frozenset("parameter constant tuple get-tuple-element partition-id".split())


def judged(programs: Programs) -> Verdict:
    """Judges XLA's partitioned program by the same program before the partitioner, as
    `Step.programs` returns both.
    """
    whole = parse_hlo(programs.whole)
    if whole.partitions == 1:
        return Verdict("proved", program="the program of one device")
    # XLA leaves the number out of the partitioned text of 32 devices or more.
    partitioned = parse_hlo(programs.partitioned)
    module = dataclasses.replace(partitioned, partitions=whole.partitions)
    return Judge(module, read_whole(whole)).verdict()


class Judge:
    """Goes through a partitioned program once.

    - `faults`, `causes`: what is wrong and what is not judged, by number.
    """

    def __init__(self, module: HloModule, program: WholeProgram):
        self.module = module
        self.program = program
        self.context = Context(module, program, Cuts(module.partitions))
        self.faults: list[Refutation] = []
        self.causes: list[tuple[Instruction, str]] = []
        self.fault_numbers: dict[tuple[str, str], int] = {}
        self.cause_numbers: dict[tuple[str, str], int] = {}
        # For each operation, by computation and name: the cause for which it is not
        # judged, or `None`.
        self.states: dict[tuple[str, str], int | None] = {}
        self.reached: set[int] = set()
        self.loops_used: set[int] = set()
        self.taken_loops: list[int] = []

    def verdict(self) -> Verdict:
        arguments = self.arguments()
        result = self.run(self.module.entry, arguments)
        leaves = list(_leaves(result))
        is_proved = self.compared(leaves)
        sizes = self._sizes()
        judged_names = [name for name, cause in self.states.items() if cause is None]
        hanging: dict[int, int] = {}
        for name, cause in self.states.items():
            if cause is not None:
                hanging[cause] = hanging.get(cause, 0) + sizes[name]
        unjudged = [
            UnjudgedOperation(
                operation=f"%{instruction.name} ({instruction.opcode})",
                source=own_line(self.module.frames(instruction)),
                reason=reason,
                bytes=hanging.get(number, 0),
            )
            for number, (instruction, reason) in enumerate(self.causes)
        ]
        unjudged.sort(key=lambda one: -one.bytes)
        refutations = tuple(self.faults[number] for number in sorted(self.reached))
        outcome = "not judged"
        if refutations:
            outcome = "refuted"
        elif is_proved:
            outcome = "proved"
        return Verdict(
            outcome=outcome,
            refutations=refutations,
            unjudged=tuple(unjudged),
            operations=len(self.states),
            judged_operations=len(judged_names),
            bytes=sum(sizes.values()),
            judged_bytes=sum(sizes[name] for name in judged_names),
        )

    def _sizes(self) -> dict[tuple[str, str], int]:
        sizes = {}
        for computation, name in self.states:
            instruction = self.module.computations[computation][name]
            total = 0
            if instruction.opcode not in _FREE:
                total = sum(int(array.bytes) for array in arrays_in(instruction.result))
            sizes[computation, name] = total
        return sizes

    # Arguments and results.

    def arguments(self) -> list[Result]:
        found: dict[int, Result] = {}
        for instruction in self.module.computations[self.module.entry].values():
            if instruction.opcode == "parameter":
                number = int(instruction.inside)
                found[number] = self.argument(number, instruction)
        return [found[number] for number in range(len(found))]

    def argument(self, number: int, instruction: Instruction) -> Result:
        key = (self.module.entry, instruction.name)
        array = self.program.parameters.get(number)
        if array is None:
            return self.unknown(key, instruction, "an argument that is no array")
        shape = arrays_in(instruction.result)[0].shape
        whole = self.program.values.nodes[array.view.root].instruction
        assert whole is not None
        (sharding,) = shardings_in(whole.attributes) or ("",)
        try:
            cuts = axes_of(self.context.cuts, sharding, array.shape, shape)
        except Unjudged as error:
            return self.unknown(key, instruction, str(error))
        self.states[key] = None
        return held_of(array, shape, cuts)

    def compared(self, leaves: Sequence[Result]) -> bool:
        """Compares the results with those of the whole program, and with the shardings
        that these have. Says whether all are right.
        """
        wanted = self.program.results
        shardings = shardings_in(self.program.root.attributes)
        root = root_of(self.module.computations[self.module.entry])
        if len(shardings) != len(wanted):
            shardings = [""] * len(wanted)
        is_proved = len(leaves) == len(wanted)
        for number, (result, array) in enumerate(zip(leaves, wanted, strict=False)):
            if isinstance(result, Faulty):
                self.reached.add(result.number)
            if not isinstance(result, Held):
                is_proved = False
                continue
            key = (self.module.entry, f"{root.name}/{number}")
            try:
                self.compare(number, result, array, shardings[number])
            except Wrong as error:
                self.reached.add(self.fault(key, root, error).number)
            except Unjudged as error:
                self.unknown((self.module.entry, root.name), root, str(error))
                is_proved = False
        return is_proved and not self.reached

    def compare(self, number: int, result: Held, array: Global, sharding: str) -> None:
        what = f"result {number}"
        if result.idiom is not None:
            raise Unjudged(f"{what} is an unfinished lookup")
        seen = expressed(self.context, result, array)
        if seen is None or view_of(seen) != _squeezed(seen, array):
            raise Unjudged(f"{what} is not matched with the whole program's")
        if not seen.is_finished:
            if seen.terms is not None:
                raise Wrong(
                    f"{what} is a sum that is not finished",
                    "an all-reduce before it is returned",
                    "constrain the sharding of this result",
                )
            raise Wrong(
                f"{what} is {seen.scale} times what it should be",
                "a reduction over the devices that hold different terms, and no others",
                "constrain the sharding of this result",
            )
        cuts = axes_of(self.context.cuts, sharding, array.shape, seen.shape)
        for place, (axis, cut) in enumerate(zip(seen.axes, cuts, strict=True)):
            if axis is None:
                if array.view.dims[place] is not None:
                    raise Unjudged(f"{what} is not followed along dimension {place}")
                continue
            if axis.cut is cut:
                continue
            same = self.context.cuts.joined(axis.cut, cut)
            if same is None:
                device = next(
                    device
                    for device in range(self.context.devices)
                    if axis.cut.on(device) != cut.on(device)
                )
                raise Wrong(
                    f"{what}, along dimension {place}: device {device} returns"
                    f" {axis.cut.on(device)}, and its sharding says {cut.on(device)}",
                    f"{cut.on(device)} on device {device}",
                    "constrain the sharding of this result, and of what it is made of",
                )
            if same is not cut:
                raise Unjudged(f"{what} has parts that are not followed")

    # Computations.

    def run(self, name: str, arguments: Sequence[Result]) -> Result:
        results: dict[str, Result] = {}
        for instruction in self.module.computations[name].values():
            if instruction.opcode == "parameter":
                result = arguments[int(instruction.inside)]
            else:
                operands = [results[operand] for operand in instruction.operands]
                result = self.result(name, instruction, operands)
            results[instruction.name] = result
            if instruction.is_root:
                return result
        raise AssertionError(f"computation {name} has no root")

    def result(
        self, computation: str, instruction: Instruction, operands: Sequence[Result]
    ) -> Result:
        opcode = instruction.opcode
        key = (computation, instruction.name)
        if opcode == "tuple":
            return tuple(operands)
        if opcode == "get-tuple-element" and isinstance(operands[0], tuple):
            number = index_of(instruction)
            assert number is not None
            whole = operands[0]
            assert not isinstance(whole, Faulty | Unknown)
            return whole[number]
        if opcode in ("opt-barrier", "optimization-barrier"):
            return operands[0] if len(operands) == 1 else tuple(operands)
        if opcode in _CALLS:
            return self.called(key, instruction, operands)
        leaves = [leaf for operand in operands for leaf in _leaves(operand)]
        for leaf in leaves:
            if isinstance(leaf, Faulty):
                self.states[key] = None
                return _each(instruction, leaf)
        for leaf in leaves:
            if isinstance(leaf, Unknown):
                self.states[key] = leaf.cause
                return _each(instruction, leaf)
        held = [leaf for leaf in leaves if isinstance(leaf, Held)]
        try:
            result = self.applied(instruction, held)
            check(instruction, result)
        except Wrong as error:
            if not all(is_matched(self.context, operand) for operand in held):
                return _each(instruction, self.unknown(key, instruction, error.fault))
            self.states[key] = None
            return _each(instruction, self.fault(key, instruction, error))
        except Unjudged as error:
            return _each(instruction, self.unknown(key, instruction, str(error)))
        except _UNREAD as error:
            reason = f"a form that its rule cannot read ({type(error).__name__})"
            return _each(instruction, self.unknown(key, instruction, reason))
        self.states[key] = None
        self.note_match(key, instruction, held, result)
        return result

    def note_match(
        self,
        key: tuple[str, str],
        instruction: Instruction,
        operands: Sequence[Held],
        result: Result,
    ) -> None:
        """Counts an operation on numbers of the step as not judged if the whole program
        has no such operation.
        """
        for leaf in _leaves(result):
            if not isinstance(leaf, Held) or is_matched(self.context, leaf):
                continue
            if leaf.known is not None or leaf.idiom is not None:
                continue
            if all(is_matched(self.context, operand) for operand in operands):
                self.unknown(
                    key, instruction, "the whole program has no such operation"
                )
                return
            if instruction.opcode in ELEMENTWISE:
                self.states[key] = self.states.get(key)

    def applied(self, instruction: Instruction, operands: Sequence[Held]) -> Result:
        opcode, context = instruction.opcode, self.context
        if any(operand.idiom is not None for operand in operands):
            if opcode not in indices.IDIOMS:
                raise Unjudged("a lookup that is not finished")
            if opcode == "reduce":
                return indices.any_of_columns(instruction, operands[0])
        if opcode in ELEMENTWISE:
            return elementwise(context, instruction, operands)
        rule = _RULES.get(opcode)
        if rule is not None:
            return rule(context, instruction, operands)
        unary = _UNARY.get(opcode)
        if unary is not None and len(operands) == 1:
            return unary(context, instruction, operands[0])
        if opcode == "reduce" and len(operands) == 2:
            return products.reduce(context, instruction, operands)
        if opcode == "reduce":
            return products.reduce_several(context, instruction, operands)
        if opcode in ("all-reduce", "all-gather") and len(operands) > 1:
            return self.several(instruction, operands)
        if opcode in sources.OPCODES:
            return sources.source(context, instruction)
        return products.whole_operation(context, instruction, operands)

    def several(self, instruction: Instruction, operands: Sequence[Held]) -> Result:
        """A collective of several arrays."""
        parts = parts_of(instruction.result)
        rule = _UNARY[instruction.opcode]
        return tuple(
            rule(self.context, instruction._replace(result=part), operand)
            for part, operand in zip(parts, operands, strict=True)
        )

    # Calls, conditionals and loops.

    def called(
        self,
        key: tuple[str, str],
        instruction: Instruction,
        operands: Sequence[Result],
    ) -> Result:
        names = dict(instruction.called)
        try:
            if instruction.opcode == "while":
                return self.loop(key, instruction, operands[0])
            if instruction.opcode == "conditional":
                return self.conditional(key, instruction, operands)
        except Unjudged as error:
            return _each(instruction, self.unknown(key, instruction, str(error)))
        return self.run(names.get("calls") or names["to_apply"], operands)

    def conditional(
        self,
        key: tuple[str, str],
        instruction: Instruction,
        operands: Sequence[Result],
    ) -> Result:
        chosen = operands[0]
        branches = [
            list(_leaves(self.run(name, [operand])))
            for (_, name), operand in zip(instruction.called, operands[1:], strict=True)
        ]
        if isinstance(chosen, Unknown):
            self.states[key] = chosen.cause
            return _each(instruction, chosen)
        if not isinstance(chosen, Held) or not chosen.is_finished:
            raise Unjudged("a conditional on something unfinished")
        results = [
            self.branched(chosen, leaves) for leaves in zip(*branches, strict=True)
        ]
        self.states[key] = None
        return tuple(results) if instruction.result.startswith("(") else results[0]

    def branched(self, chosen: Held, leaves: Sequence[Result]) -> Result:
        """The result of a conditional, from those of its branches."""
        for leaf in leaves:
            if not isinstance(leaf, Held):
                return leaf
        branches = [leaf for leaf in leaves if isinstance(leaf, Held)]
        for branch in branches:
            if not branch.is_finished or branch.idiom is not None or branch.rest:
                raise Unjudged("a conditional whose branches are unfinished")
        views_ = [view_of(branch) for branch in branches]
        found = self.context.values.with_key(conditional_key(view_of(chosen), views_))
        if len(found) != 1:
            raise Unjudged("no conditional of the whole program has these results")
        shape = branches[0].shape
        array = self.context.values.nodes[found[0]].result
        assert array is not None
        cuts = []
        for place in range(len(shape)):
            axes = [branch.axes[place] for branch in branches]
            cuts.append(joined_cut(self.context, "conditional", place, axes))
        if any(
            cut is None and dim is not None
            for cut, dim in zip(cuts, array.view.dims, strict=True)
        ):
            raise Unjudged("a conditional whose branches are broadcasts")
        whole = [
            self.context.cuts.whole(size) if cut is None else cut
            for cut, size in zip(cuts, shape, strict=True)
        ]
        return held_of(array, shape, whole)

    def loop(
        self, key: tuple[str, str], instruction: Instruction, initial: Result
    ) -> Result:
        starts = list(_leaves(initial))
        names = dict(instruction.called)
        reason = "no loop of the whole program starts like this"
        for loop in self.program.values.loops:
            if len(loop.initial) != len(starts) or loop.number in self.taken_loops:
                continue
            if not self._may_be(instruction, loop):
                continue
            state = self._initial_state(loop, starts, instruction, names["body"])
            if state is None:
                continue
            self.taken_loops.append(loop.number)
            results = self._turned(loop, starts, state, names)
            self.taken_loops.pop()
            if results is None:
                reason = "a loop whose turns change how its values lie"
                continue
            self.states[key] = None
            return tuple(results)
        # What is inside is judged as far as it goes.
        raise Unjudged(reason)

    def _may_be(self, instruction: Instruction, loop: Loop) -> bool:
        return instruction.op_name == loop.instruction.op_name and arrays_count(
            instruction
        ) == arrays_count(loop.instruction)

    def _initial_state(
        self,
        loop: Loop,
        starts: Sequence[Result],
        instruction: Instruction,
        body: str,
    ) -> list[Result] | None:
        """What the devices hold at the start of a turn; `None` if the loop of the whole
        program starts with other values.
        """
        same = unchanged(self.module, body, len(starts))
        shardings = shardings_in(loop.instruction.attributes)
        shapes = [array.shape for array in arrays_in(instruction.result)]
        state: list[Result] = []
        for place, (start, array, carried) in enumerate(
            zip(starts, loop.initial, loop.carried, strict=True)
        ):
            if not isinstance(start, Held):
                state.append(start)
                continue
            if place in same and carried == array:
                state.append(start)
                continue
            seen = expressed(self.context, start, array)
            if seen is None or seen.idiom is not None or seen.rest:
                return None
            sharding = shardings[place] if len(shardings) == len(starts) else ""
            state.append(self._carried(seen, array, carried, sharding, shapes[place]))
        return state

    def _carried(
        self,
        seen: Held,
        initial: Global,
        carried: Global,
        sharding: str,
        shape: tuple[int, ...],
    ) -> Result:
        """An array at the start of a turn. Where nothing changes along a dimension of
        the first one, a guess from the loop's sharding, which the turn has to confirm.
        """
        del initial
        if not seen.is_finished:
            raise Unjudged("a loop that starts with an unfinished sum")
        guess: list[Cut] | None = None
        cuts = []
        for place, axis in enumerate(seen.axes):
            if axis is not None:
                cuts.append(axis.cut)
                continue
            if guess is None:
                guess = axes_of(self.context.cuts, sharding, carried.shape, shape)
            cuts.append(guess[place])
        return held_of(carried, shape, cuts)

    def _turned(
        self,
        loop: Loop,
        starts: Sequence[Result],
        state: Sequence[Result],
        names: Mapping[str, str],
    ) -> list[Result] | None:
        """The results of a loop, if each turn leaves what it carries as it was."""
        state = list(state)
        for _ in range(_TURNS):
            goes_on = self.run(names["condition"], [tuple(state)])
            if isinstance(goes_on, Held) and goes_on.root != loop.goes_on.view.root:
                return None
            ahead = list(_leaves(self.run(names["body"], [tuple(state)])))
            is_settled = True
            for place, (now, turned) in enumerate(zip(state, ahead, strict=True)):
                settled = self._after_turn(now, turned, loop.ahead[place])
                if settled is None:
                    return None
                if settled != now:
                    state[place] = settled
                    is_settled = False
            if is_settled:
                return self._loop_results(loop, starts, state, goes_on)
        return None

    def _after_turn(
        self, now: Result, turned: Result, array: Global
    ) -> "Result | None":
        """What a loop carries after a turn; `None` if a turn changes it."""
        if not isinstance(now, Held):
            return now
        if not isinstance(turned, Held):
            return turned
        if turned is now:
            return now
        seen = expressed(self.context, turned, array)
        if seen is None or view_of(seen) != _squeezed(seen, array):
            raise Unjudged("a loop whose turn is not matched with the whole program's")
        if not seen.is_finished or seen.idiom is not None or seen.rest:
            raise Unjudged("a loop that carries an unfinished sum")
        for before, after in zip(now.axes, seen.axes, strict=True):
            if before is None or after is None:
                continue
            if before.cut is not after.cut:
                return None
        return now

    def _loop_results(
        self,
        loop: Loop,
        starts: Sequence[Result],
        state: Sequence[Result],
        goes_on: Result,
    ) -> list[Result]:
        results: list[Result] = []
        for place, held in enumerate(state):
            array = loop.results[place]
            if not isinstance(held, Held) or held is starts[place]:
                results.append(held)
                continue
            if not isinstance(goes_on, Held):
                results.append(goes_on)
                continue
            cuts = [
                self.context.cuts.whole(size) if axis is None else axis.cut
                for axis, size in zip(held.axes, held.shape, strict=True)
            ]
            results.append(held_of(array, held.shape, cuts))
        return results

    # Faults and causes.

    def fault(
        self, key: tuple[str, str], instruction: Instruction, error: Wrong
    ) -> Faulty:
        if key not in self.fault_numbers:
            self.fault_numbers[key] = len(self.faults)
            self.faults.append(
                Refutation(
                    operation=f"%{instruction.name} ({instruction.opcode})",
                    source=own_line(self.module.frames(instruction)),
                    fault=error.fault,
                    right=error.right,
                    mend=error.mend,
                )
            )
        return Faulty(self.fault_numbers[key])

    def unknown(
        self, key: tuple[str, str], instruction: Instruction, reason: str
    ) -> Unknown:
        if key not in self.cause_numbers:
            self.cause_numbers[key] = len(self.causes)
            self.causes.append((instruction, reason))
        self.states[key] = self.cause_numbers[key]
        return Unknown(self.cause_numbers[key])


def check(instruction: Instruction, result: Result) -> None:
    """Every rule ends here: raises `Unjudged` if the axes do not fit the array of one
    device.
    """
    shapes = [array.shape for array in arrays_in(instruction.result)]
    leaves = list(_leaves(result))
    if len(leaves) != len(shapes):
        raise Unjudged(f"a {instruction.opcode} with other results than its rule says")
    for held, shape in zip(leaves, shapes, strict=True):
        assert isinstance(held, Held)
        is_right = held.shape == shape and len(held.axes) == len(shape)
        if is_right:
            is_right = all(
                axis is None or axis.cut.size == size
                for axis, size in zip(held.axes, shape, strict=True)
            )
        if held.known is not None:
            is_right &= held.known.ndim == 1 + len(shape)
        if not is_right:
            raise Unjudged(f"a {instruction.opcode} in a form that its rule has not")


def arrays_count(instruction: Instruction) -> int:
    return len(arrays_in(instruction.result))


def held_of(array: Global, shape: tuple[int, ...], cuts: Sequence[Cut]) -> Held:
    axes = tuple(
        None if dim is None else Axis(dim, cut)
        for dim, cut in zip(array.view.dims, cuts, strict=True)
    )
    return Held(array.view.root, shape, axes)


def _squeezed(held: Held, array: Global) -> object:
    """The view that `held` has to have to be `array`."""
    dims = []
    for axis, dim, size in zip(held.axes, array.view.dims, array.shape, strict=True):
        is_first = axis is None or (axis.cut.size == 1 and not axis.cut.starts.any())
        dims.append(None if is_first and size == 1 else dim)
    return array.view._replace(dims=tuple(dims))


def _leaves(result: Result):
    if isinstance(result, tuple) and not isinstance(result, Faulty | Unknown):
        for part in result:
            yield from _leaves(part)
    else:
        yield result


def _each(instruction: Instruction, leaf: Faulty | Unknown) -> Result:
    """The same for each result of an instruction."""
    return _tree(instruction.result, leaf)


def _tree(result: str, leaf: Faulty | Unknown) -> Result:
    if result.startswith("("):
        return tuple(_tree(part, leaf) for part in parts_of(result) if part)
    return leaf


_RULES: Mapping[str, _Rule] = {
    "dot": products.dot,
    "convolution": products.convolution,
    "reduce-window": products.reduce_window,
    "concatenate": pieces.concatenate,
    "dynamic-slice": pieces.dynamic_slice,
    "dynamic-update-slice": pieces.dynamic_update_slice,
    "pad": pieces.pad,
    "gather": indices.gather,
    "scatter": indices.scatter,
}
_UNARY: Mapping[str, Callable[[Context, Instruction, Held], Held]] = {
    "broadcast": views.broadcast,
    "reshape": views.reshape,
    "bitcast": views.reshape,
    "transpose": lambda context, instruction, operand: views.transpose(
        instruction, operand
    ),
    "copy": lambda context, instruction, operand: operand,
    "slice": pieces.slice_,
    "reverse": pieces.reverse,
    "collective-permute": exchanges.permute,
    "all-gather": exchanges.all_gather,
    "all-reduce": exchanges.all_reduce,
    "reduce-scatter": exchanges.reduce_scatter,
    "all-to-all": exchanges.all_to_all,
}

"""The judge: goes through the program of one device, operation by operation, and says
what the devices hold of each result.
"""

import dataclasses
import functools as ft
from collections.abc import Mapping, Sequence

from ..._ground.errors import MeshError
from ..hlo_text import (
    HloModule,
    Instruction,
    arrays_in,
    index_of,
    parse_hlo,
    root_of,
)
from ..partitioner import Programs
from .conditionals import branched
from .cuts import Cut, Cuts
from .elements import expressed
from .held import Context, Faulty, Held, Memory, Result, Unknown, view_of
from .loops import Loops
from .manual_calls import called_manually
from .matching import is_matched
from .origins import origin_of
from .record import OperationName, Record
from .results import (
    dtypes_of,
    each_result,
    held_of,
    leaves_in,
    leaves_of,
    require_shapes,
    required_view,
)
from .rules import applied, applied_bitcast
from .shardings import WrongShard, cuts_of, shardings_in
from .sources import without_row_of_iota
from .values import Global
from .verdict import Outcome, Unjudged, UnjudgedOperation, Verdict, Wrong
from .whole_program import WholeProgram, read_whole


# Errors of a rule that meets a form of an operation for which it was not written.
_UNREAD = (AssertionError, KeyError, IndexError, TypeError, ValueError)
_CALLS = ("call", "fusion", "while", "conditional")
# The bytes of their results are no work of the program.
_FREE = frozenset("parameter constant tuple get-tuple-element partition-id".split())


def judged(programs: Programs, partitioned: HloModule | None = None) -> Verdict:
    """Judges XLA's partitioned program by the same program before the partitioner, as
    `Step.programs` returns both. `partitioned` is the module of the partitioned
    program, if the caller has read its text.
    """
    whole = parse_hlo(programs.whole)
    if whole.partitions == 1:
        return Verdict("proved", program="the program of one device")
    if partitioned is None:
        partitioned = parse_hlo(programs.partitioned)
    # XLA leaves the number out of the partitioned text of 32 devices or more.
    module = dataclasses.replace(partitioned, partitions=whole.partitions)
    return Judge(module, read_whole(whole)).verdict()


def judged_text(
    whole_text: str,
    text: str,
    program: str,
    is_sharded_as_step: Sequence[bool] | None = None,
) -> Verdict:
    """Judges the text of a program that a compiler partitioned in a run of its own,
    such as libtpu's, or that XLA compiled to the end. `program` names it in the
    verdict. Its arguments have to lie as those of the whole program; a result that lies
    otherwise is not judged, since each compiler chooses free shardings by itself.

    `is_sharded_as_step` says of each argument whether it lies as the step's, for
    programs of JAX 0.12, whose text does not say how their arguments lie.
    """
    whole = parse_hlo(whole_text)
    module = parse_hlo(text)
    if module.partitions not in (1, whole.partitions):
        raise MeshError(
            f"{program} is for {module.partitions} devices, and the step's mesh has"
            f" {whole.partitions}; compile the step for its own mesh."
        )
    module = dataclasses.replace(module, partitions=whole.partitions)
    judge = Judge(
        module,
        read_whole(whole),
        is_foreign=True,
        is_sharded_as_step=is_sharded_as_step,
    )
    return dataclasses.replace(judge.verdict(), program=program)


@ft.lru_cache(maxsize=2**12)
def _bytes_of(result: str) -> int:
    """The bytes of all arrays in the text of a result."""
    return sum(int(array.bytes) for array in arrays_in(result))


class Judge:
    """Goes through a partitioned program once.

    - `is_foreign`: whether the program is of another run than the whole program.
    - `is_sharded_as_step`: whether its arguments lie as those of the whole program, by
      number; `None` if its text says how they lie.
    - `record`: what is wrong and what is not judged.
    - `reached_faults`: the numbers of the faults on which results of the program hang.
    """

    def __init__(
        self,
        module: HloModule,
        whole_program: WholeProgram,
        *,
        is_foreign: bool = False,
        is_sharded_as_step: Sequence[bool] | None = None,
    ):
        self.is_foreign = is_foreign
        self.is_sharded_as_step = is_sharded_as_step
        self.module = module
        self.whole_program = whole_program
        self.context = Context(
            module=module,
            whole_program=whole_program,
            cuts=Cuts(module.partitions),
            memory=Memory(),
        )
        self.record = Record(module)
        self.reached_faults: set[int] = set()
        self.loops = Loops(self.context, self.record)

    def verdict(self) -> Verdict:
        """Judges the program, from its arguments to its results."""
        arguments = self.arguments()
        result = self.run(self.module.entry, arguments)
        leaves = list(leaves_of(result))
        is_proved = self.are_results_right(leaves)
        bytes_by_operation = self._bytes_by_operation()
        cause_numbers = self.record.states
        judged_names = [name for name, cause in cause_numbers.items() if cause is None]
        reached_numbers = sorted(self.reached_faults)
        refutations = tuple(self.record.faults[number] for number in reached_numbers)
        outcome: Outcome = "not judged"
        if refutations:
            outcome = "refuted"
        elif is_proved:
            outcome = "proved"
        return Verdict(
            outcome=outcome,
            refutations=refutations,
            unjudged=self._unjudged(bytes_by_operation),
            operations=len(cause_numbers),
            judged_operations=len(judged_names),
            bytes=sum(bytes_by_operation.values()),
            judged_bytes=sum(bytes_by_operation[name] for name in judged_names),
        )

    def _unjudged(
        self,
        bytes_by_operation: Mapping[OperationName, int],
    ) -> tuple[UnjudgedOperation, ...]:
        """The operations that no rule follows, those with most bytes first.
        `bytes_by_operation` holds the bytes of each operation's results. The bytes of
        an operation are those of all operations that are not judged because of it.
        """
        bytes_by_cause: dict[int, int] = {}
        for name, cause_number in self.record.states.items():
            if cause_number is not None:
                bytes_before = bytes_by_cause.get(cause_number, 0)
                bytes_by_cause[cause_number] = bytes_before + bytes_by_operation[name]

        operations: list[UnjudgedOperation] = []
        for number, cause in enumerate(self.record.causes):
            instruction = cause.instruction
            origin = origin_of(self.module.frames(instruction))
            operation = UnjudgedOperation(
                operation=f"%{instruction.name} ({instruction.opcode})",
                source=origin.source,
                caller=origin.caller,
                first_traced=origin.first_traced,
                reason=cause.reason,
                bytes=bytes_by_cause.get(number, 0),
            )
            operations.append(operation)
        operations.sort(key=lambda operation: -operation.bytes)
        return tuple(operations)

    def _bytes_by_operation(self) -> dict[OperationName, int]:
        """The bytes of the results of each operation; 0 for operations that only name
        arrays, such as parameters and tuples.
        """
        bytes_by_operation: dict[OperationName, int] = {}
        for computation, name in self.record.states:
            instruction = self.module.computations[computation][name]
            result_bytes = 0
            if instruction.opcode not in _FREE:
                result_bytes = _bytes_of(instruction.result)
            bytes_by_operation[computation, name] = result_bytes
        return bytes_by_operation

    # Arguments and results.

    def arguments(self) -> list[Result]:
        """What devices hold of the arguments, by their number."""
        results: dict[int, Result] = {}
        for instruction in self.module.computations[self.module.entry].values():
            if instruction.opcode == "parameter":
                number = int(instruction.inside)
                results[number] = self.argument(number, instruction)
        if self.is_foreign and len(results) != len(self.whole_program.parameters):
            # Arguments that a step does not use are no arguments of a finished program.
            root = root_of(self.module.computations[self.module.entry])
            reason = (
                f"the program takes {len(results)} arrays, and the step"
                f" {len(self.whole_program.parameters)}"
            )
            unknown = self.record.unknown((self.module.entry, root.name), root, reason)
            return [unknown for _ in results]
        return [results[number] for number in range(len(results))]

    def argument(self, number: int, instruction: Instruction) -> Result:
        """What devices hold of argument `number`, whose parameter is `instruction`, as
        its sharding in the whole program says.
        """
        key = (self.module.entry, instruction.name)
        array = self.whole_program.parameters.get(number)
        if array is None:
            return self.record.unknown(key, instruction, "an argument that is no array")
        shard_shape = arrays_in(instruction.result)[0].shape
        whole_parameter = self.whole_program.values.nodes[array.view.root].instruction
        assert whole_parameter is not None
        (sharding,) = shardings_in(whole_parameter.attributes) or ("",)
        try:
            cuts = cuts_of(self.context.cuts, sharding, array.shape, shard_shape)
            if self.is_foreign:
                self._require_cuts(number, instruction, array, cuts)
            held = held_of(array, shard_shape, cuts)
        except Unjudged as error:
            return self.record.unknown(key, instruction, str(error))
        self.record.judged(key)
        return held

    def _require_cuts(
        self,
        number: int,
        instruction: Instruction,
        array: Global,
        step_cuts: Sequence[Cut],
    ) -> None:
        """Raises `Unjudged` if argument `number` of a foreign program lies otherwise
        than in the whole program, where `step_cuts` are those of its dimensions, or
        does not say how it lies. `instruction` is its parameter, and `array` the
        argument of the whole program.
        """
        (sharding,) = shardings_in(instruction.attributes) or ("",)
        are_sharded_as_step = self.is_sharded_as_step or ()
        if not sharding and number < len(are_sharded_as_step):
            if not are_sharded_as_step[number]:
                raise Unjudged("an argument that lies otherwise than the step's")
            return
        shard_shape = arrays_in(instruction.result)[0].shape
        cuts_of_program = cuts_of(self.context.cuts, sharding, array.shape, shard_shape)
        if any(
            cut is not step_cut
            for cut, step_cut in zip(cuts_of_program, step_cuts, strict=True)
        ):
            raise Unjudged("an argument that lies otherwise than the step's")

    def are_results_right(self, leaves: Sequence[Result]) -> bool:
        """Compares the results, whose arrays are `leaves`, with those of the whole
        program and with their shardings. Notes what is wrong or not judged, and says
        whether all are right.
        """
        arrays = self.whole_program.results
        root = root_of(self.module.computations[self.module.entry])
        for leaf in leaves:
            if isinstance(leaf, Faulty):
                self.reached_faults.add(leaf.fault_number)
        if len(leaves) != len(arrays):
            # Which of them belong together is not known.
            reason = (
                f"the program returns {len(leaves)} arrays, and the step {len(arrays)}"
            )
            self.record.unknown((self.module.entry, root.name), root, reason)
            return False
        whole_root = self.whole_program.root
        if dtypes_of(root) != dtypes_of(whole_root):
            reason = "the program returns arrays of other types than the step"
            self.record.unknown((self.module.entry, root.name), root, reason)
            return False
        shardings = shardings_in(whole_root.attributes)
        if len(shardings) != len(arrays):
            shardings = [""] * len(arrays)
        if not self.is_foreign:
            self._require_shards(root, shardings)
        is_proved = True
        for number, (leaf, array) in enumerate(zip(leaves, arrays, strict=True)):
            if not isinstance(leaf, Held):
                is_proved = False
                continue
            key = (self.module.entry, f"{root.name}/{number}")
            try:
                self.require_result(number, leaf, array, shardings[number])
            except Wrong as error:
                maker = self._maker_of(root, number)
                self.reached_faults.add(
                    self.record.fault(key, maker, error).fault_number
                )
            except Unjudged as error:
                self.record.unknown((self.module.entry, root.name), root, str(error))
                is_proved = False
        return is_proved and not self.reached_faults

    def _maker_of(self, root: Instruction, number: int) -> Instruction:
        """The operation that makes result `number`, or the nearest one before it that
        comes from a line of the step: the partitioner's own exchanges have none.
        """
        computation = self.module.computations[self.module.entry]
        maker = root
        if root.opcode == "tuple":
            maker = computation[root.operands[number]]
        ancestor = maker
        while not self.module.frames(ancestor) and ancestor.operands:
            ancestor = computation[ancestor.operands[0]]
        return ancestor if self.module.frames(ancestor) else maker

    def _require_shards(self, root: Instruction, shardings: Sequence[str]) -> None:
        """Refutes results whose arrays on one device do not have the shape of a shard,
        whether or not their elements are judged. `root` returns the results, and
        `shardings` has the text of each one's sharding; "" if it has none.
        """
        shard_shapes = [array.shape for array in arrays_in(root.result)]
        for number, (shard_shape, array) in enumerate(
            zip(shard_shapes, self.whole_program.results, strict=True)
        ):
            try:
                cuts_of(self.context.cuts, shardings[number], array.shape, shard_shape)
            except WrongShard:
                error = Wrong(
                    fault=f"result {number}: each device returns an array of the shape"
                    f" {shard_shape}, which is no shard of {array.shape} as its sharding says",
                    right="a shard of the result on each device",
                    mend="constrain the sharding of the arrays that this line reads",
                )
                key = (self.module.entry, f"{root.name}/{number}")
                maker = self._maker_of(root, number)
                self.reached_faults.add(
                    self.record.fault(key, maker, error).fault_number
                )
            except Unjudged:
                # The comparison of the elements says why.
                continue

    def require_result(
        self,
        number: int,
        result: Held,
        array: Global,
        sharding: str,
    ) -> None:
        """Raises `Wrong` if devices return something else than result `number` of the
        whole program, `array`, in the shards of its sharding, and `Unjudged` if that is
        not known.
        """
        name = f"result {number}"
        if result.idiom is not None:
            raise Unjudged(f"{name} is an unfinished lookup")
        held_array = expressed(self.context, result, array)
        if held_array is None or view_of(held_array) != required_view(
            held_array, array
        ):
            raise Unjudged(f"{name} is not matched with the whole program's")
        if not held_array.is_finished:
            if held_array.terms is not None:
                raise Wrong(
                    fault=f"{name} is a sum that is not finished",
                    right="an all-reduce before it is returned",
                    mend="constrain the sharding of this result",
                )
            raise Wrong(
                fault=f"{name} is {held_array.scale} times what it should be",
                right="a reduction over the devices that hold different terms, and no"
                " others",
                mend="constrain the sharding of this result",
            )
        required_cuts = cuts_of(
            self.context.cuts, sharding, array.shape, held_array.shape
        )
        for place, (axis, required_cut) in enumerate(
            zip(held_array.axes, required_cuts, strict=True)
        ):
            if axis is None:
                if array.view.dims[place] is not None:
                    raise Unjudged(f"{name} is not followed along dimension {place}")
                continue
            if axis.cut is required_cut:
                continue
            common_cut = self.context.cuts.joined(axis.cut, required_cut)
            if common_cut is None and self.is_foreign:
                raise Unjudged(f"{name} lies otherwise than in the whole program")
            if common_cut is None:
                device = next(
                    device
                    for device in range(self.context.devices)
                    if axis.cut.text_on(device) != required_cut.text_on(device)
                )
                raise Wrong(
                    fault=f"{name}, along dimension {place}: device {device} returns"
                    f" {axis.cut.text_on(device)}, and its sharding says"
                    f" {required_cut.text_on(device)}",
                    right=f"{required_cut.text_on(device)} on device {device}",
                    mend="constrain the sharding of this result, and of what it is made of",
                )
            if common_cut is not required_cut:
                raise Unjudged(f"{name} has parts that are not followed")

    # Computations.

    def run(self, name: str, arguments: Sequence[Result]) -> Result:
        """The result of a computation for these arguments."""
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
        self,
        computation: str,
        instruction: Instruction,
        operands: Sequence[Result],
    ) -> Result:
        """The result of an operation of the computation `computation`. It is wrong or
        not judged if an operand is, and else what its rule says, which is noted in the
        record.
        """
        opcode = instruction.opcode
        key = (computation, instruction.name)
        if opcode == "tuple":
            return tuple(operands)
        if opcode == "get-tuple-element" and isinstance(operands[0], tuple):
            number = index_of(instruction)
            assert number is not None
            elements = operands[0]
            assert not isinstance(elements, Faulty | Unknown)
            return elements[number]
        if opcode in ("opt-barrier", "optimization-barrier"):
            return operands[0] if len(operands) == 1 else tuple(operands)
        if opcode in _CALLS:
            return self.called(key, instruction, operands)
        leaves = leaves_in(operands)
        for leaf in leaves:
            if isinstance(leaf, Faulty):
                self.record.judged(key)
                return each_result(instruction, leaf)
        for leaf in leaves:
            if isinstance(leaf, Unknown):
                self.record.states[key] = leaf.cause_number
                return each_result(instruction, leaf)
        held = [leaf for leaf in leaves if isinstance(leaf, Held)]
        try:
            if opcode == "bitcast":
                source = self.module.computations[computation][instruction.operands[0]]
                result = applied_bitcast(self.context, instruction, held[0], source)
            else:
                result = applied(self.context, instruction, held)
            require_shapes(instruction, result)
            if isinstance(result, Held):
                result = without_row_of_iota(self.context, result)
        except Wrong as error:
            if not all(is_matched(self.context, operand) for operand in held):
                return each_result(
                    instruction, self.record.unknown(key, instruction, error.fault)
                )
            self.record.judged(key)
            return each_result(instruction, self.record.fault(key, instruction, error))
        except Unjudged as error:
            return each_result(
                instruction, self.record.unknown(key, instruction, str(error))
            )
        except _UNREAD as error:
            reason = f"a form that its rule cannot read ({type(error).__name__})"
            return each_result(
                instruction, self.record.unknown(key, instruction, reason)
            )
        self.record.judged(key)
        self.note_match(key, instruction, held, result)
        return result

    def note_match(
        self,
        key: tuple[str, str],
        instruction: Instruction,
        operands: Sequence[Held],
        result: Result,
    ) -> None:
        """Notes an operation as not judged if its operands are values of the whole
        program and its result is none. `key` is its name in the record.
        """
        for leaf in leaves_in([result]):
            if not isinstance(leaf, Held) or is_matched(self.context, leaf):
                continue
            if leaf.known_numbers is not None or leaf.idiom is not None:
                continue
            if all(is_matched(self.context, operand) for operand in operands):
                self.record.unknown(
                    key, instruction, "the whole program has no such operation"
                )
                return

    # Calls, conditionals and loops.

    def called(
        self,
        key: tuple[str, str],
        instruction: Instruction,
        operands: Sequence[Result],
    ) -> Result:
        """The result of a loop, a conditional, or the call of a computation. `key` is
        the name of the operation in the record. The body of a `shard_map` is judged as
        a whole; operations of other computations one by one.
        """
        called_names = dict(instruction.called)
        try:
            if instruction.opcode == "while":
                results = self.loops.loop(instruction, operands[0], self.run)
                self.record.judged(key)
                return results
            if instruction.opcode == "conditional":
                return self.conditional(key, instruction, operands)
        except Wrong as error:
            return each_result(instruction, self.record.fault(key, instruction, error))
        except Unjudged as error:
            return each_result(
                instruction, self.record.unknown(key, instruction, str(error))
            )
        body_name = called_names.get("calls") or called_names["to_apply"]
        try:
            results = called_manually(
                context=self.context,
                instruction=instruction,
                operands=operands,
                name=body_name,
                run=self.run,
            )
        except Unjudged as error:
            cause = self.record.unknown(key, instruction, str(error))
            self._note_body(body_name, cause)
            return each_result(instruction, cause)
        if results is None:
            return self.run(body_name, operands)
        self._note_body(body_name, None)
        return results

    def _note_body(self, name: str, cause: Unknown | None) -> None:
        """Notes that the operations of a `shard_map`'s body are judged, or for which
        cause they are not.
        """
        for instruction in self.module.computations[name].values():
            cause_number = None if cause is None else cause.cause_number
            self.record.states[name, instruction.name] = cause_number

    def conditional(
        self,
        key: tuple[str, str],
        instruction: Instruction,
        operands: Sequence[Result],
    ) -> Result:
        """The result of a conditional: operand 0 is the number of the branch, and the
        others are what each branch takes. `key` is its name in the record.
        """
        branch_number = operands[0]
        branches = [
            list(leaves_of(self.run(name, [operand])))
            for (_, name), operand in zip(instruction.called, operands[1:], strict=True)
        ]
        if isinstance(branch_number, Unknown):
            self.record.states[key] = branch_number.cause_number
            return each_result(instruction, branch_number)
        if not isinstance(branch_number, Held):
            raise Unjudged("a conditional on something unfinished")
        results = [
            branched(self.context, branch_number, leaves)
            for leaves in zip(*branches, strict=True)
        ]
        self.record.judged(key)
        return tuple(results) if instruction.result.startswith("(") else results[0]

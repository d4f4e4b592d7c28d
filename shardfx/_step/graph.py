"""A StableHLO module as JAX lowers it, as one flat list of operations with factors.

A function is read once, and inlined at every call. The body of a loop is inlined once, and counts as often as the loop
runs. A value that a loop carries unchanged is one value inside and outside.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend.mlir import ir, passmanager

from .factors import (
    RULE,
    Factors,
    Operation,
    Program,
    StepValue,
    by_element,
    dtype_of,
    flops_of,
    handed,
    of_rule,
    opaque,
    own,
)
from .lowered import Laid, Module, Op, laid_arguments, laid_results


PASS = "builtin.module(func.func(sdy-populate-op-sharding-rules))"
# Operations with programs of their own. The regions of other operations only combine two elements.
_NESTED = ("while", "case", "if", "manual_computation")
_CALLS = {"call": "callee", "composite": "decomposition"}


class BlockOp(NamedTuple):
    """One operation of a block; its operands and results are numbers of the function's values."""

    name: str
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    factors: Factors | None
    flops: float
    # The function that it calls, or its literal integer, or the text that identifies it.
    detail: Any
    blocks: "tuple[Block, ...]"
    location: ir.Location


class Block(NamedTuple):
    """A sequence of operations, with the values that it takes and returns."""

    arguments: tuple[int, ...]
    instructions: tuple[BlockOp, ...]
    results: tuple[int, ...]


class Function(NamedTuple):
    """A block, and the shape and dtype of each numbered value in it."""

    block: Block
    values: tuple[StepValue, ...]


def program_of(module: Module) -> Program:
    """The operations of a module's `main`, with their factors. The module is not changed.

    **Arguments:**

    - `module`: an `ir.Module` of StableHLO, as `lowered.compiler_ir("stablehlo")` is.
    """
    with module.context:
        whole = module.operation.clone()
        passmanager.PassManager.parse(PASS).run(whole)
        functions = {
            ir.StringAttr(one.attributes["sym_name"]).value: _Reader().function(one.operation)
            for one in whole.regions[0].blocks[0].operations
            if one.operation.name == "func.func"
        }
    return _Walk(functions).program()


class _Reader:
    """Reads one function into numbered values, so that MLIR's objects are read only once."""

    def __init__(self):
        self.numbers: dict[ir.Value, int] = {}
        self.values: list[StepValue] = []

    def function(self, operation: Op) -> Function:
        laid = laid_arguments(operation)
        return Function(self.block(operation.regions[0].blocks[0], laid), tuple(self.values))

    def block(self, block: ir.Block, laid: Sequence[Laid | None] = ()) -> Block:
        pairs = itertools.zip_longest(block.arguments, laid)
        arguments = tuple(self.new(value, own) for value, own in pairs)
        *body, last = (inner.operation for inner in block.operations)
        instructions = tuple(map(self.instruction, body))
        return Block(arguments, instructions, tuple(self.numbers[value] for value in last.operands))

    def new(self, value: ir.Value, laid: Laid | None = None) -> int:
        number = self.numbers[value] = len(self.values)
        self.values.append(dataclasses.replace(_value(value.type), laid=laid))
        return number

    def instruction(self, operation: Op) -> BlockOp:
        full = operation.name
        name = full.rpartition(".")[2]
        ins = tuple(self.numbers[value] for value in operation.operands)
        blocks: tuple[Block, ...] = ()
        if name in _NESTED:
            blocks = tuple(self.block(region.blocks[0]) for region in operation.regions)
        pairs = itertools.zip_longest(operation.results, laid_results(operation))
        outs = tuple(self.new(value, laid) for value, laid in pairs)
        shapes = [[self.values[number].shape for number in numbers] for numbers in (ins, outs)]
        attributes = operation.attributes
        factors = of_rule(attributes[RULE]) if RULE in attributes else None
        if factors is None and outs and name not in (*_NESTED, *_CALLS, "constant", "iota"):
            factors = own(operation, full, *shapes)
        flops = flops_of(name, operation, factors, *shapes) if factors else 0.0
        detail = _detail(name, attributes, self.values[outs[0]] if outs else None)
        return BlockOp(name, ins, outs, factors, flops, detail, blocks, operation.location)


def _value(kind: ir.Type) -> StepValue:
    if not isinstance(kind, ir.RankedTensorType):
        return StepValue((), dtype_of("i1"))
    return StepValue(tuple(kind.shape), dtype_of(str(kind.element_type)))


def _detail(name: str, attributes: ir.OpAttributeMap, out: StepValue | None) -> Any:
    if name in _CALLS:
        return ir.FlatSymbolRefAttr(attributes[_CALLS[name]]).value
    if name == "constant" and out is not None and not out.shape and out.dtype.kind in "iu":
        return int(ir.IntegerAttr(ir.DenseElementsAttr(attributes["value"]).get_splat_value()).value)
    if name == "compare":
        return str(attributes["comparison_direction"])
    if name == "custom_call":
        return ir.StringAttr(attributes["call_target_name"]).value
    return attributes["dimension_numbers"] if name == "convolution" else None


class _Walk:
    """Walks through the functions of a module from `main`, and lists the operations with their factors."""

    def __init__(self, functions: dict[str, Function]):
        self.functions = functions
        self.values: list[StepValue] = []
        self.operations: list[Operation] = []
        self.notes: dict[str, int] = {}
        # The locations of the calls around the operation that is being read.
        self.calls: list[ir.Location] = []
        # The known integers, and the integers that count the iterations of a loop, with the loop's number.
        self.literals: dict[int, int] = {}
        self.counters: dict[int, int] = {}

    def program(self) -> Program:
        main = self.functions["main"]
        arguments = tuple(self.add(main.values[number]) for number in main.block.arguments)
        results = self.enter(main, main.block, dict(zip(main.block.arguments, arguments, strict=True)), 1.0)
        operations = _used(self.operations, results)
        return Program(self.values, operations, arguments, tuple(results), self.notes)

    def add(self, value: StepValue) -> int:
        self.values.append(value)
        return len(self.values) - 1

    def at(self, made: BlockOp) -> tuple[ir.Location, ...]:
        """The location of an operation, followed by those of the calls around it."""
        return (made.location, *reversed(self.calls))

    def note(self, words: str) -> None:
        self.notes[words] = self.notes.get(words, 0) + 1

    def enter(self, function: Function, block: Block, known: dict[int, int], times: float) -> list[int]:
        """Appends the operations of a block whose arguments are known, and returns the block's results."""
        for made in block.instructions:
            ins = tuple(known[number] for number in made.ins)
            outs = self.step(function, made, ins, known, times)
            known.update(zip(made.outs, outs, strict=True))
        return [known[number] for number in block.results]

    def step(
        self, function: Function, made: BlockOp, ins: tuple[int, ...], known: dict[int, int], times: float
    ) -> Sequence[int]:
        if made.name in _CALLS:
            called = self.functions[made.detail]
            self.calls.append(made.location)
            results = self.enter(called, called.block, dict(zip(called.block.arguments, ins, strict=True)), times)
            self.calls.pop()
            return results
        if made.name == "while":
            return self.loop(function, made, ins, known, times)
        if made.name == "optimization_barrier":
            # A barrier returns each of its arrays unchanged.
            return [self.hand(made.name, (value,), times, self.at(made)) for value in ins]
        if made.name in ("case", "if"):
            return self.branches(function, made, known, times)
        if made.name == "manual_computation":
            return self.manual(function, made, ins, known, times)
        return self.plain(function, made, ins, times)

    def plain(self, function: Function, made: BlockOp, ins: tuple[int, ...], times: float) -> Sequence[int]:
        values = [function.values[number] for number in made.outs]
        if _is_free(made, [self.values[value] for value in ins]):
            values = [dataclasses.replace(value, free=True) for value in values]
        outs = tuple(map(self.add, values))
        if made.name == "constant":
            if made.detail is not None:
                self.literals[outs[0]] = made.detail
            return outs
        if not made.outs or (values[0].free and all(self.values[value].free for value in ins)):
            return outs
        if made.name == "sharding_constraint":
            self.note("the step constrains arrays over a mesh of its own: that is not priced")
        if made.factors is None:
            what = made.detail if made.name == "custom_call" else made.name
            self.note(f"`{what}` is not known: the dimensions of what it takes and makes are not tied")
        factors = made.factors or opaque([self.values[v].shape for v in ins], [value.shape for value in values])
        self.count(made, ins, outs)
        name = "opaque" if made.factors is None else made.name
        windows = made.detail if name == "convolution" else None
        counted = self.counted(made.name, ins)
        self.operations.append(Operation(name, ins, outs, factors, times, made.flops, self.at(made), counted, windows))
        return outs

    def count(self, made: BlockOp, ins: Sequence[int], outs: Sequence[int]) -> None:
        """Marks values that are computed from loop counters and literals only."""
        scalar = len(outs) == 1 and not self.values[outs[0]].shape and self.values[outs[0]].dtype.kind in "iu"
        numbers = [value for value in ins if self.values[value].dtype.kind in "iu"]
        known = all(value in self.literals or value in self.counters for value in numbers)
        loops = [self.counters[value] for value in numbers if value in self.counters]
        if scalar and known and loops:
            self.counters[outs[0]] = loops[0]

    def counted(self, name: str, ins: Sequence[int]) -> tuple[tuple[int, int], ...]:
        first = {"dynamic_slice": 1, "dynamic_update_slice": 2}.get(name, len(ins))
        return tuple((dim, self.counters[at]) for dim, at in enumerate(ins[first:]) if at in self.counters)

    def hand(
        self, name: str, ins: tuple[int, ...], times: float, location: tuple[ir.Location, ...], out: int | None = None
    ) -> int:
        """Appends an operation that passes an array on: into a loop, to its next iteration, or out of a branch."""
        shape = self.values[ins[0]].shape
        if out is None:
            out = self.add(dataclasses.replace(self.values[ins[0]], free=False))
        factors = handed(shape, len(ins) + 1)
        self.operations.append(Operation(name, ins, (out,), factors, times, 0.0, location))
        return out

    def loop(
        self, function: Function, made: BlockOp, ins: tuple[int, ...], known: dict[int, int], times: float
    ) -> list[int]:
        test, body = made.blocks
        changed = [number != given for number, given in zip(body.results, body.arguments, strict=True)]
        pairs = zip(changed, ins, strict=True)
        begun = [self.hand("carry", (value,), times, self.at(made)) if new else value for new, value in pairs]
        for value, out in zip(begun, made.outs, strict=True):
            if (laid := function.values[out].laid) is not None:
                self.values[value] = dataclasses.replace(self.values[value], laid=laid)
        trips, counter = self.trips(test, body, ins, known)
        if trips is None:
            self.note("the trips of a loop are not in the program: it counts once")
        if counter is not None:
            self.counters[begun[counter]] = begun[counter]
        many = times * (1 if trips is None else trips)
        ended = self.enter(function, body, {**known, **dict(zip(body.arguments, begun, strict=True))}, many)
        self.enter(function, test, {**known, **dict(zip(test.arguments, begun, strict=True))}, many)
        results = [
            self.hand("return", (last, first), many, self.at(made)) if new else first
            for new, last, first in zip(changed, ended, begun, strict=True)
        ]
        read = tuple(value for new, value in zip(changed, ins, strict=True) if not new and self.values[value].shape)
        self.operations.append(Operation("use", read, (), Factors((), (), ()), times, 0.0, self.at(made)))
        return results

    def trips(
        self, test: Block, body: Block, ins: Sequence[int], known: dict[int, int]
    ) -> tuple[float | None, int | None]:
        """The number of iterations of a loop that counts up to a known number, and the index of its counter; `None` if
        unknown.
        """
        outer = {**known, **dict(zip(test.arguments, ins, strict=True))}
        literals = {number: self.literals[value] for number, value in outer.items() if value in self.literals}
        literals |= _literals(test) | _literals(body)
        asked = next((one for one in test.instructions if one.outs == test.results and one.name == "compare"), None)
        if asked is None or "LT" not in asked.detail or asked.ins[0] not in test.arguments:
            return None, None
        at = test.arguments.index(asked.ins[0])
        if asked.ins[1] in test.arguments:
            bound = test.arguments.index(asked.ins[1])
            if body.results[bound] != body.arguments[bound]:
                return None, at
        added = next((one for one in body.instructions if one.outs == (body.results[at],)), None)
        if added is None or added.name != "add" or body.arguments[at] not in added.ins:
            return None, None
        (by,) = [number for number in added.ins if number != body.arguments[at]] or [-1]
        start, stop, step = (literals.get(number) for number in (test.arguments[at], asked.ins[1], by))
        if start is None or stop is None or not step:
            return None, at
        return float(max(0, math.ceil((stop - start) / step))), at

    def branches(self, function: Function, made: BlockOp, known: dict[int, int], times: float) -> list[int]:
        outs = [self.add(function.values[number]) for number in made.outs]
        for block in made.blocks:
            # It is not known which branch runs, so each counts for its share.
            share = times / len(made.blocks)
            ended = self.enter(function, block, dict(known), share)
            for value, out in zip(ended, outs, strict=True):
                self.hand("carry", (value,), share, self.at(made), out)
        return outs

    def manual(
        self, function: Function, made: BlockOp, ins: tuple[int, ...], known: dict[int, int], times: float
    ) -> list[int]:
        """Appends the operations of a `shard_map`, whose arrays are shards."""
        self.note("a `shard_map` shards arrays over a mesh of its own: that is not priced")
        (block,) = made.blocks
        inner = [self.add(function.values[number]) for number in block.arguments]
        pairs = [(self.values[a].shape, self.values[b].shape) for a, b in zip(ins, inner, strict=True)]
        shards = max((math.prod(a) / max(1, math.prod(b)) for a, b in pairs), default=1.0)
        for value, shard in zip(ins, inner, strict=True):
            self.apart(value, shard, times, self.at(made))
        arguments = dict(zip(block.arguments, inner, strict=True))
        ended = self.enter(function, block, {**known, **arguments}, times * shards)
        outs = [self.add(function.values[number]) for number in made.outs]
        for shard, out in zip(ended, outs, strict=True):
            self.apart(shard, out, times, self.at(made))
        return outs

    def apart(self, value: int, out: int, times: float, location: tuple[ir.Location, ...]) -> None:
        """Ties an array to its shards in the dimensions that are not sharded."""
        shapes = [self.values[value].shape], [self.values[out].shape]
        factors = by_element(*shapes) if shapes[0] == shapes[1] else opaque(*shapes)
        self.operations.append(Operation("opaque", (value,), (out,), factors, times, 0.0, location))


def _literals(block: Block) -> dict[int, int]:
    return {one.outs[0]: one.detail for one in block.instructions if one.name == "constant" and one.detail is not None}


def _is_free(made: BlockOp, ins: Sequence[StepValue]) -> bool:
    """Whether an operation depends on constants only, so that every device computes its own shard in place."""
    if made.name in ("constant", "iota"):
        return True
    if made.name == "broadcast_in_dim" and not ins[0].shape:
        return True
    plain = made.factors is not None and not made.factors.reduction and not made.factors.replicated
    return bool(plain and ins and made.outs and not made.flops and all(value.free or not value.shape for value in ins)
                and any(value.free for value in ins))  # fmt: skip


def _used(operations: list[Operation], results: Sequence[int]) -> list[Operation]:
    """The operations whose results are used, inside loops too, as compilers keep them."""
    live, kept = set(results), [False] * len(operations)
    before = -1
    while before != len(live):
        before = len(live)
        for number in range(len(operations) - 1, -1, -1):
            made = operations[number]
            # The next iteration of a loop reads this iteration's results instead of the initial values.
            read = (*made.outs, made.ins[1]) if made.name == "return" else made.outs
            if not kept[number] and not live.isdisjoint(read):
                kept[number] = True
                live.update(made.ins)
    ended = (dataclasses.replace(made, ins=tuple(filter(live.__contains__, made.ins))) for made in operations)
    return [made for made, keep in zip(ended, kept, strict=True) if keep or (made.name == "use" and made.ins)]

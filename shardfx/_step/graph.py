"""A StableHLO module, as JAX lowers it, as one flat list of operations with factors.

A function is inlined at every call. The body of a loop is inlined once, and its
operations count once per iteration. A value that a loop carries unchanged is one value
inside and outside of the loop.
"""

import dataclasses
import functools as ft
import itertools
import math
from collections.abc import Mapping, Sequence

from jax.extend.mlir import ir, passmanager

from .factors import (
    RULE,
    Factors,
    Operation,
    Program,
    StepValue,
    dtype_of,
    elementwise,
    flops_of,
    identity,
    of_rule,
    opaque,
    without_rule,
)
from .lowered import (
    ArraySharding,
    Module,
    Op,
    argument_shardings,
    is_callback,
    maker,
    result_shardings,
)


PASS = "builtin.module(func.func(sdy-populate-op-sharding-rules))"
_CALLS = {"call": "callee", "composite": "decomposition"}
# The number of each MLIR value in one call of a function.
_Known = dict[ir.Value, int]


def program_of(module: Module) -> Program:
    """The operations of a module's function `main`, each with its Shardy sharding rule.
    The module is not changed.
    """
    with module.context:
        whole = module.operation.clone()
        passmanager.PassManager.parse(PASS).run(whole)
        functions = {
            ir.StringAttr(function.attributes["sym_name"]).value: function.operation
            for function in whole.regions[0].blocks[0].operations
            if function.operation.name == "func.func"
        }
        return _Walk(functions).program()


@ft.lru_cache(maxsize=4096)
def _value(kind: ir.Type) -> StepValue:
    if not isinstance(kind, ir.RankedTensorType):
        return StepValue((), dtype_of("i1"))
    return StepValue(tuple(kind.shape), dtype_of(str(kind.element_type)))


def _returned(block: ir.Block) -> list[ir.Value]:
    """The values that a block returns: the operands of its terminator."""
    *_, last = block.operations
    return list(last.operands)


def _integer(constant: Op) -> int | None:
    """The value of a constant that is one integer; `None` for another constant."""
    value = _value(constant.results[0].type)
    if value.shape or value.dtype.kind not in "iu":
        return None
    return int(
        ir.IntegerAttr(
            ir.DenseElementsAttr(constant.attributes["value"]).get_splat_value()
        ).value
    )


class _Walk:
    """Lists the operations of a module, from `main` on, with their sharding rules.

    In its methods, an array is a number. `ins` and `outs` are the operands and results
    of an operation `op`, `times` is the number of times that it runs in one step, and
    `value_numbers` has the numbers of MLIR values.
    """

    def __init__(self, functions: dict[str, Op]):
        self.functions = functions
        self.values: list[StepValue] = []
        self.operations: list[Operation] = []
        self.notes: dict[str, int] = {}
        # The locations of the calls around the operation that is being read.
        self.calls: list[ir.Location] = []
        # For the number of a value: the integer if it is known; the loop counter from
        # which it is computed.
        self.literals: dict[int, int] = {}
        self.counters: dict[int, int] = {}
        # For each result of an operation that is not listed since all of its operands
        # are free: these operands. They may be computed from arrays of the step.
        self.free_operands: dict[int, Sequence[int]] = {}

    def program(self) -> Program:
        main = self.functions["main"]
        block = main.regions[0].blocks[0]
        arguments = self.new(block.arguments, argument_shardings(main))
        results = self.inline(block, arguments, {}, 1.0)
        operations = _used(self.operations, results, self.free_operands)
        return Program(
            self.values, operations, tuple(arguments), tuple(results), self.notes
        )

    def new(
        self, values: Sequence[ir.Value], sharding: Sequence[ArraySharding | None] = ()
    ) -> list[int]:
        """Adds MLIR values to the program, with their shardings if they are known, and
        returns their numbers.
        """
        pairs = itertools.zip_longest(values, sharding)
        return [
            self.add(dataclasses.replace(_value(value.type), sharding=sharding))
            for value, sharding in pairs
        ]

    def add(self, value: StepValue) -> int:
        self.values.append(value)
        return len(self.values) - 1

    def locations(self, op: Op) -> tuple[ir.Location, ...]:
        """The location of an operation, followed by the locations of the calls around
        it.
        """
        return (op.location, *reversed(self.calls))

    def note(self, words: str) -> None:
        self.notes[words] = self.notes.get(words, 0) + 1

    def inline(
        self, block: ir.Block, arguments: Sequence[int], outer: _Known, times: float
    ) -> list[int]:
        """Adds the operations of an MLIR block, and returns the numbers of the block's
        results. `arguments` are the numbers of the block's arguments. `outer` has the
        numbers of the values around the block.
        """
        numbers_of = outer | dict(zip(block.arguments, arguments, strict=True))
        *body, last = (inner.operation for inner in block.operations)
        for op in body:
            numbers_of.update(
                zip(op.results, self.step(op, numbers_of, times), strict=True)
            )
        return [numbers_of[value] for value in last.operands]

    def step(self, op: Op, value_numbers: _Known, times: float) -> Sequence[int]:
        """Adds an operation, or the operations that it calls, and returns the numbers
        of its results.
        """
        name = op.name.rpartition(".")[2]
        ins = [value_numbers[value] for value in op.operands]
        if name in _CALLS:
            called = self.functions[
                ir.FlatSymbolRefAttr(op.attributes[_CALLS[name]]).value
            ]
            self.calls.append(op.location)
            results = self.inline(called.regions[0].blocks[0], ins, {}, times)
            self.calls.pop()
            return results
        if name == "while":
            return self.loop(op, ins, value_numbers, times)
        if name == "optimization_barrier":
            # A barrier returns each of its arrays unchanged.
            return [self.identity(name, (value,), times, op) for value in ins]
        outs = self.new(op.results, result_shardings(op))
        if name in ("case", "if"):
            for region in op.regions:
                # The program does not show which branch runs, so all branches count
                # equally.
                part = times / len(op.regions)
                for value, out in zip(
                    self.inline(region.blocks[0], (), value_numbers, part),
                    outs,
                    strict=True,
                ):
                    self.identity("carry", (value,), part, op, out)
        elif name == "manual_computation":
            self.shard_map(op, ins, outs, value_numbers, times)
        elif name == "constant":
            self.values[outs[0]] = dataclasses.replace(self.values[outs[0]], free=True)
            if (number := _integer(op)) is not None:
                self.literals[outs[0]] = number
        elif outs:
            self.plain(op, name, ins, outs, times)
        return outs

    def plain(
        self, op: Op, name: str, ins: Sequence[int], outs: Sequence[int], times: float
    ) -> None:
        """Adds an operation with nothing to inline. If it has regions, they only
        combine two elements, as in a sum.
        """
        taken, outputs = (
            [self.values[number] for number in numbers] for numbers in (ins, outs)
        )
        shapes = [value.shape for value in taken], [value.shape for value in outputs]
        factors = (
            of_rule(op.attributes[RULE])
            if RULE in op.attributes
            else without_rule(op, op.name, *shapes)
        )
        flops = flops_of(name, op, factors, *shapes) if factors else 0.0
        if name == "iota" or _is_free(name, taken, None if flops else factors):
            for out, value in zip(outs, outputs, strict=True):
                self.values[out] = dataclasses.replace(value, free=True)
            if all(value.free for value in taken):
                self.free_operands.update(dict.fromkeys(outs, ins))
                return
        if name == "sharding_constraint":
            self.note(
                "the step constrains arrays over a mesh of its own: that is not priced"
            )
        if is_callback(op):
            self.note("a callback to Python takes and returns whole arrays")
        elif factors is None:
            what = (
                ir.StringAttr(op.attributes["call_target_name"]).value
                if name == "custom_call"
                else name
            )
            self.note(
                f"`{what}` is not known: its operands and results have no factor in"
                " common"
            )
        self.count(ins, outs)
        first = {"dynamic_slice": 1, "dynamic_update_slice": 2}.get(name, len(ins))
        counted = tuple(
            (dim, self.counters[number])
            for dim, number in enumerate(ins[first:])
            if number in self.counters
        )
        windows = op.attributes["dimension_numbers"] if name == "convolution" else None
        name, factors = (
            ("opaque", opaque(*shapes)) if factors is None else (name, factors)
        )
        self.operations.append(
            Operation(
                name,
                tuple(ins),
                tuple(outs),
                factors,
                times,
                flops,
                self.locations(op),
                counted,
                windows,
            )
        )

    def count(self, ins: Sequence[int], outs: Sequence[int]) -> None:
        """Records an operation's result as a loop counter if it is an integer that is
        computed from a loop counter and known integers only.
        """
        scalar = (
            len(outs) == 1
            and not self.values[outs[0]].shape
            and self.values[outs[0]].dtype.kind in "iu"
        )
        numbers = [value for value in ins if self.values[value].dtype.kind in "iu"]
        are_known = all(
            value in self.literals or value in self.counters for value in numbers
        )
        loops = [self.counters[value] for value in numbers if value in self.counters]
        if scalar and are_known and loops:
            self.counters[outs[0]] = loops[0]

    def identity(
        self,
        name: str,
        ins: tuple[int, ...],
        times: float,
        op: Op,
        out: int | None = None,
    ) -> int:
        """Adds an operation `name`, such as "carry", that returns an array unchanged,
        with the source lines of `op`. Returns the number of its result, which is `out`
        if that is given.
        """
        if out is None:
            out = self.add(dataclasses.replace(self.values[ins[0]], free=False))
        factors = identity(self.values[ins[0]].shape, len(ins) + 1)
        self.operations.append(
            Operation(name, ins, (out,), factors, times, 0.0, self.locations(op))
        )
        return out

    def loop(
        self, op: Op, ins: Sequence[int], value_numbers: _Known, times: float
    ) -> list[int]:
        test, body = (region.blocks[0] for region in op.regions)
        changed = [
            value != given
            for value, given in zip(_returned(body), body.arguments, strict=True)
        ]
        pairs = zip(changed, ins, strict=True)
        begun = [
            self.identity("carry", (value,), times, op) if new else value
            for new, value in pairs
        ]
        for value, sharding in zip(begun, result_shardings(op), strict=False):
            if sharding is not None:
                self.values[value] = dataclasses.replace(
                    self.values[value], sharding=sharding
                )
        trips, counter = self.trips(test, body, ins, value_numbers)
        if trips is None:
            self.note("the trips of a loop are not in the program: it counts once")
        if counter is not None:
            self.counters[begun[counter]] = begun[counter]
        many = times * (1 if trips is None else trips)
        ended = self.inline(body, begun, value_numbers, many)
        self.inline(test, begun, value_numbers, many)
        results = [
            self.identity("return", (last, first), many, op) if new else first
            for new, last, first in zip(changed, ended, begun, strict=True)
        ]
        read = tuple(
            value
            for new, value in zip(changed, ins, strict=True)
            if not new and self.values[value].shape
        )
        self.operations.append(
            Operation(
                "use", read, (), Factors((), (), ()), times, 0.0, self.locations(op)
            )
        )
        return results

    def trips(
        self, test: ir.Block, body: ir.Block, ins: Sequence[int], value_numbers: _Known
    ) -> tuple[float | None, int | None]:
        """The number of iterations of a loop that counts up to a known number, and the
        position of its counter among the values that the loop carries. Each is `None`
        if it is unknown. `test` and `body` are the blocks of the loop's condition and
        body, and `ins` are the initial values.
        """
        carried, ended = dict(zip(test.arguments, ins, strict=True)), _returned(body)

        def literal(value: ir.Value) -> int | None:
            if value in carried or value in value_numbers:
                return self.literals.get((value_numbers | carried)[value])
            constant = maker(value, "constant")
            return None if constant is None else _integer(constant)

        asked = maker(_returned(test)[0], "compare")
        if (
            asked is None
            or "LT" not in str(asked.attributes["comparison_direction"])
            or asked.operands[0] not in carried
        ):
            return None, None
        first, bound = asked.operands
        order: list[ir.Value] = [*carried]
        place = order.index(first)
        if (
            bound in carried
            and ended[order.index(bound)] != body.arguments[order.index(bound)]
        ):
            return None, place
        counter = body.arguments[place]
        added = maker(ended[place], "add")
        if added is None or counter not in [*added.operands]:
            return None, None
        by = next((value for value in added.operands if value != counter), counter)
        start, stop, step = literal(first), literal(bound), literal(by)
        if start is None or stop is None or not step:
            return None, place
        return float(max(0, math.ceil((stop - start) / step))), place

    def shard_map(
        self,
        op: Op,
        ins: Sequence[int],
        outs: Sequence[int],
        value_numbers: _Known,
        times: float,
    ) -> None:
        """Adds the operations of a `shard_map`, whose body computes on shards of the
        operands.
        """
        self.note(
            "a `shard_map` shards arrays over a mesh of its own: that is not priced"
        )
        block = op.regions[0].blocks[0]
        inner = self.new(block.arguments)
        pairs = [
            (self.values[a].shape, self.values[b].shape)
            for a, b in zip(ins, inner, strict=True)
        ]
        shards = max(
            (math.prod(a) / max(1, math.prod(b)) for a, b in pairs), default=1.0
        )
        self.shard_boundary(ins, inner, times, op)
        self.shard_boundary(
            self.inline(block, inner, value_numbers, times * shards), outs, times, op
        )

    def shard_boundary(
        self, ins: Sequence[int], outs: Sequence[int], times: float, op: Op
    ) -> None:
        """Adds an operation for each array that enters or leaves the body of a
        `shard_map`, from the whole array to its shard or back. If the two have
        different shapes, they have no factor in common. `op` is the `shard_map`.
        """
        for value, out in zip(ins, outs, strict=True):
            shapes = [self.values[value].shape], [self.values[out].shape]
            factors = (
                elementwise(*shapes) if shapes[0] == shapes[1] else opaque(*shapes)
            )
            self.operations.append(
                Operation(
                    "opaque", (value,), (out,), factors, times, 0.0, self.locations(op)
                )
            )


def _is_free(name: str, ins: Sequence[StepValue], factors: Factors | None) -> bool:
    """Whether every device can compute any shard of an operation's result, since the
    operands are constants or scalars. `factors` is the operation's sharding rule, if it
    is known.
    """
    if name == "broadcast_in_dim" and not ins[0].shape:
        return True
    is_plain = factors is not None and not factors.reduction and not factors.replicated
    return (
        is_plain
        and any(value.free for value in ins)
        and all(value.free or not value.shape for value in ins)
    )


def _used(
    operations: list[Operation],
    results: Sequence[int],
    free_operands: Mapping[int, Sequence[int]],
) -> list[Operation]:
    """The operations on which the step's results depend, also inside loops. Compilers
    remove all other operations. `free_operands` has the operands of each free value
    that no operation of `operations` computes.
    """
    live: set[int] = set()
    are_kept = [False] * len(operations)

    def add(values: Sequence[int]) -> None:
        stack = [*values]
        while stack:
            value = stack.pop()
            if value not in live:
                live.add(value)
                stack += free_operands.get(value, ())

    add(results)
    before = -1
    while before != len(live):
        before = len(live)
        for number in range(len(operations) - 1, -1, -1):
            operation = operations[number]
            # The next iteration of a loop reads this iteration's results instead of the
            # initial values.
            read = (
                (*operation.outs, operation.ins[1])
                if operation.name == "return"
                else operation.outs
            )
            if not are_kept[number] and not live.isdisjoint(read):
                are_kept[number] = True
                add(operation.ins)
    ended = (
        dataclasses.replace(
            operation, ins=tuple(filter(live.__contains__, operation.ins))
        )
        for operation in operations
    )
    return [
        operation
        for operation, keep in zip(ended, are_kept, strict=True)
        if keep or (operation.name == "use" and operation.ins)
    ]

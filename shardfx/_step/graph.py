"""A StableHLO module, as JAX lowers it, as one flat list of operations with factors.

A function is inlined at every call. The body of a loop is inlined once, and its
operations count once per iteration. A value that a loop carries unchanged is one value
inside and outside of the loop.
"""

import dataclasses
import functools as ft
import itertools
import math
import operator
from collections.abc import Iterable, Sequence

from jax.extend.mlir import ir, passmanager

from .factors import (
    RULE,
    Factors,
    Operation,
    Program,
    Shapes,
    StepValue,
    dtype_of,
    elementwise,
    factors_without_rule,
    flops_of,
    identity,
    of_rule,
    opaque,
)
from .lowered import (
    ArraySharding,
    Module,
    Op,
    argument_shardings,
    is_callback,
    maker,
    result_shardings,
    text_attribute,
)
from .used import used_operations


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
        functions: dict[str, Op] = {}
        for op in whole.regions[0].blocks[0].operations:
            if op.operation.name == "func.func":
                functions[text_attribute(op, "sym_name")] = op.operation
        return _Walk(functions).program()


@ft.lru_cache(maxsize=4096)
def _value(kind: ir.Type) -> StepValue:
    """A new value of an MLIR type; a scalar for what is no array, such as a token."""
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
    elements = ir.DenseElementsAttr(constant.attributes["value"])
    return int(ir.IntegerAttr(elements.get_splat_value()).value)


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
        # For each note on what is not modelled exactly, the number of operations.
        self.notes: dict[str, int] = {}
        # The locations of the calls around the operation that is being read.
        self.calls: list[ir.Location] = []
        # The integer that a value is, by the value's number, if it is known.
        self.literals: dict[int, int] = {}
        # The number of the loop counter from which a value is computed, by the value's
        # number.
        self.counters: dict[int, int] = {}
        # For each result of an operation that is not listed since all of its operands
        # are free: these operands. They may be computed from arrays of the step.
        self.free_operands: dict[int, Sequence[int]] = {}

    def program(self) -> Program:
        """The operations of `main`, without those on which no result depends."""
        main = self.functions["main"]
        block = main.regions[0].blocks[0]
        arguments = self.add_values(block.arguments, argument_shardings(main))
        results = self.inline(block, arguments, {}, 1.0)
        operations = used_operations(self.operations, results, self.free_operands)
        return Program(
            values=self.values,
            operations=operations,
            arguments=tuple(arguments),
            results=tuple(results),
            notes=self.notes,
        )

    def add_values(
        self,
        values: Sequence[ir.Value],
        shardings: Sequence[ArraySharding | None] = (),
    ) -> list[int]:
        """Adds MLIR values to the program, with their shardings if they are known, and
        returns their numbers.
        """
        numbers = []
        for value, sharding in itertools.zip_longest(values, shardings):
            unsharded = _value(value.type)
            step_value = dataclasses.replace(unsharded, sharding=sharding)
            numbers.append(self.add_value(step_value))
        return numbers

    def add_value(self, value: StepValue) -> int:
        """Adds a value to the program, and returns its number."""
        self.values.append(value)
        return len(self.values) - 1

    def locations(self, op: Op) -> tuple[ir.Location, ...]:
        """The location of an operation, followed by the locations of the calls around
        it.
        """
        return (op.location, *reversed(self.calls))

    def add_note(self, words: str) -> None:
        """Counts one more operation with this note."""
        self.notes[words] = self.notes.get(words, 0) + 1

    def inline(
        self,
        block: ir.Block,
        arguments: Sequence[int],
        outer: _Known,
        runs: float,
    ) -> list[int]:
        """Adds the operations of an MLIR block that a step runs `runs` times, and
        returns the numbers of the block's results. `arguments` are the numbers of the
        block's arguments. `outer` has the numbers of the values around the block.
        """
        numbers_of = outer | dict(zip(block.arguments, arguments, strict=True))
        *body, last = block.operations
        for inner in body:
            op = inner.operation
            results = self.add_operation(op, numbers_of, runs)
            numbers_of.update(zip(op.results, results, strict=True))
        return [numbers_of[value] for value in last.operation.operands]

    def add_operation(
        self,
        op: Op,
        value_numbers: _Known,
        runs: float,
    ) -> Sequence[int]:
        """Adds an operation, or the operations that it calls, and returns the numbers
        of its results.
        """
        _, _, name = op.name.rpartition(".")
        ins = [value_numbers[value] for value in op.operands]
        if name in _CALLS:
            return self.inline_call(op, _CALLS[name], ins, runs)
        if name == "while":
            return self.inline_loop(op, ins, value_numbers, runs)
        if name == "optimization_barrier":
            # A barrier returns each of its arrays unchanged.
            return [self.add_identity(name, (value,), runs, op) for value in ins]
        outs = self.add_values(op.results, result_shardings(op))
        if name in ("case", "if"):
            self.inline_branches(op, outs, value_numbers, runs)
        elif name == "manual_computation":
            self.inline_shard_map(
                op=op, ins=ins, outs=outs, value_numbers=value_numbers, runs=runs
            )
        elif name == "constant":
            self.set_free(outs[0])
            number = _integer(op)
            if number is not None:
                self.literals[outs[0]] = number
        elif outs:
            self.add_plain(op=op, name=name, ins=ins, outs=outs, runs=runs)
        return outs

    def inline_call(
        self,
        op: Op,
        attribute: str,
        ins: Sequence[int],
        runs: float,
    ) -> list[int]:
        """Adds the operations of the function that the attribute of a call names."""
        symbol = ir.FlatSymbolRefAttr(op.attributes[attribute]).value
        block = self.functions[symbol].regions[0].blocks[0]
        self.calls.append(op.location)
        results = self.inline(block, ins, {}, runs)
        self.calls.pop()
        return results

    def inline_branches(
        self,
        op: Op,
        outs: Sequence[int],
        value_numbers: _Known,
        runs: float,
    ) -> None:
        """Adds the operations of all branches of a conditional."""
        # The program does not show which branch runs, so all branches count equally.
        runs_of_branch = runs / len(op.regions)
        for region in op.regions:
            results = self.inline(region.blocks[0], (), value_numbers, runs_of_branch)
            for value, out in zip(results, outs, strict=True):
                self.add_identity(
                    name="carry", ins=(value,), runs=runs_of_branch, op=op, out=out
                )

    def set_free(self, number: int) -> None:
        """Notes that every device can compute any shard of a value."""
        self.values[number] = dataclasses.replace(self.values[number], free=True)

    def add_plain(
        self,
        op: Op,
        name: str,
        ins: Sequence[int],
        outs: Sequence[int],
        runs: float,
    ) -> None:
        """Adds an operation with nothing to inline. `ins` and `outs` are the numbers of
        its operands and results. If it has regions, they only combine two elements.
        Results that every device can compute are free. Where all operands are free too,
        the operation is not listed.
        """
        operands = [self.values[number] for number in ins]
        shapes_in = [value.shape for value in operands]
        shapes_out = [self.values[number].shape for number in outs]
        factors = _factors_of(op, shapes_in, shapes_out)
        flops = 0.0
        if factors is not None:
            flops = flops_of(
                name=name, operation=op, factors=factors, ins=shapes_in, outs=shapes_out
            )

        is_free = _is_free(name, operands, factors, flops)
        if is_free:
            for out in outs:
                self.set_free(out)
        if is_free and all(value.free for value in operands):
            self.free_operands.update(dict.fromkeys(outs, ins))
            return

        self.note_inexact(op, name, is_known=factors is not None)
        self.note_counter(ins, outs)
        counted = self.counted_dims(name, ins)
        dimension_numbers = None
        if name == "convolution":
            dimension_numbers = op.attributes["dimension_numbers"]
        if factors is None:
            name = "opaque"
            factors = opaque(shapes_in, shapes_out)
        operation = Operation(
            name=name,
            ins=tuple(ins),
            outs=tuple(outs),
            factors=factors,
            times=runs,
            flops=flops,
            location=self.locations(op),
            counted=counted,
            dimension_numbers=dimension_numbers,
        )
        self.operations.append(operation)

    def note_inexact(self, op: Op, name: str, *, is_known: bool) -> None:
        """Notes what is not modelled exactly of an operation. `is_known` says whether
        it has a sharding rule.
        """
        if name == "sharding_constraint":
            self.add_note(
                "the step constrains arrays over a mesh of its own: that is not priced"
            )
        if is_callback(op):
            self.add_note("a callback to Python takes and returns whole arrays")
        elif not is_known:
            what = name
            if name == "custom_call":
                what = text_attribute(op, "call_target_name")
            self.add_note(
                f"`{what}` is not known: its operands and results have no factor in"
                " common"
            )

    def counted_dims(
        self,
        name: str,
        ins: Sequence[int],
    ) -> tuple[tuple[int, int], ...]:
        """The dimensions of an operation's first operand that a loop counter indexes,
        each with the counter.
        """
        # The position of the first index among the operands.
        if name == "dynamic_slice":
            first = 1
        elif name == "dynamic_update_slice":
            first = 2
        else:
            return ()
        counted = []
        for dim, number in enumerate(ins[first:]):
            if number in self.counters:
                counted.append((dim, self.counters[number]))
        return tuple(counted)

    def note_counter(self, ins: Sequence[int], outs: Sequence[int]) -> None:
        """Records an operation's result as a loop counter if it is an integer that is
        computed from a loop counter and known integers only. `self.counters` has the
        counters, and `self.literals` the known integers.
        """
        if len(outs) != 1:
            return
        (out,) = outs
        if self.values[out].shape or not self.is_integer(out):
            return
        counters_read = []
        for value in filter(self.is_integer, ins):
            if value in self.counters:
                counters_read.append(self.counters[value])
            elif value not in self.literals:
                return
        if counters_read:
            self.counters[out] = counters_read[0]

    def is_integer(self, value: int) -> bool:
        return self.values[value].dtype.kind in "iu"

    def add_identity(
        self,
        name: str,
        ins: tuple[int, ...],
        runs: float,
        op: Op,
        out: int | None = None,
    ) -> int:
        """Adds an operation `name`, such as "carry", that returns an array unchanged,
        with the source lines of `op`. Returns the number of its result, which is `out`
        if that is given.
        """
        operand = self.values[ins[0]]
        if out is None:
            out = self.add_value(dataclasses.replace(operand, free=False))
        self.operations.append(
            Operation(
                name=name,
                ins=ins,
                outs=(out,),
                factors=identity(operand.shape, len(ins) + 1),
                times=runs,
                flops=0.0,
                location=self.locations(op),
            )
        )
        return out

    def inline_loop(
        self,
        op: Op,
        ins: Sequence[int],
        value_numbers: _Known,
        runs: float,
    ) -> list[int]:
        """Adds the operations of a `while` loop, whose body and condition count once
        per iteration, and returns the numbers of its results. A value that the body
        does not change keeps its number.
        """
        test, body = (region.blocks[0] for region in op.regions)
        are_changed: list[bool] = []
        for value, argument in zip(_returned(body), body.arguments, strict=True):
            are_changed.append(value != argument)
        # The numbers of the values with which an iteration starts.
        firsts: list[int] = []
        for value, is_changed in zip(ins, are_changed, strict=True):
            if is_changed:
                value = self.add_identity("carry", (value,), runs, op)
            firsts.append(value)
        for value, sharding in zip(firsts, result_shardings(op), strict=False):
            if sharding is not None:
                self.values[value] = dataclasses.replace(
                    self.values[value], sharding=sharding
                )

        trips, counter = self.trips(test, body, ins, value_numbers)
        if trips is None:
            self.add_note("the trips of a loop are not in the program: it counts once")
        if counter is not None:
            self.counters[firsts[counter]] = firsts[counter]
        iterations = runs if trips is None else runs * trips
        lasts = self.inline(body, firsts, value_numbers, iterations)
        self.inline(test, firsts, value_numbers, iterations)
        results: list[int] = []
        for first, last, is_changed in zip(firsts, lasts, are_changed, strict=True):
            result = first
            if is_changed:
                result = self.add_identity("return", (last, first), iterations, op)
            results.append(result)
        self.add_use(op, itertools.compress(ins, map(operator.not_, are_changed)), runs)
        return results

    def add_use(self, op: Op, values: Iterable[int], runs: float) -> None:
        """Adds the use of the arrays that a loop reads until it ends."""
        arrays = [value for value in values if self.values[value].shape]
        self.operations.append(
            Operation(
                name="use",
                ins=tuple(arrays),
                outs=(),
                factors=Factors(sizes=(), ins=(), outs=()),
                times=runs,
                flops=0.0,
                location=self.locations(op),
            )
        )

    def trips(
        self,
        test: ir.Block,
        body: ir.Block,
        ins: Sequence[int],
        value_numbers: _Known,
    ) -> tuple[float | None, int | None]:
        """The number of iterations of a loop that counts up to a known number, and the
        position of its counter among the values that the loop carries. Each is `None`
        if it is unknown. `test` and `body` are the blocks of the loop's condition and
        body, and `ins` are the initial values.
        """
        numbers = value_numbers | dict(zip(test.arguments, ins, strict=True))

        def literal(value: ir.Value) -> int | None:
            if value in numbers:
                return self.literals.get(numbers[value])
            constant = maker(value, "constant")
            if constant is None:
                return None
            return _integer(constant)

        carried_values: list[ir.Value] = list(test.arguments)
        next_values = _returned(body)
        comparison = maker(_returned(test)[0], "compare")
        if comparison is None or comparison.operands[0] not in carried_values:
            return None, None
        if "LT" not in str(comparison.attributes["comparison_direction"]):
            return None, None
        first, bound = comparison.operands
        counter_place = carried_values.index(first)
        # A bound that the loop carries must not change.
        if bound in carried_values:
            bound_place = carried_values.index(bound)
            if next_values[bound_place] != body.arguments[bound_place]:
                return None, counter_place
        counter_value = body.arguments[counter_place]
        addition = maker(next_values[counter_place], "add")
        if addition is None or counter_value not in list(addition.operands):
            return None, None
        increments = [value for value in addition.operands if value != counter_value]
        start = literal(first)
        stop = literal(bound)
        step = literal(increments[0] if increments else counter_value)
        if start is None or stop is None or not step:
            return None, counter_place
        trips = max(0, math.ceil((stop - start) / step))
        return float(trips), counter_place

    def inline_shard_map(
        self,
        op: Op,
        ins: Sequence[int],
        outs: Sequence[int],
        value_numbers: _Known,
        runs: float,
    ) -> None:
        """Adds the operations of a `shard_map`, whose body computes on shards of the
        operands.
        """
        self.add_note(
            "a `shard_map` shards arrays over a mesh of its own: that is not priced"
        )
        block = op.regions[0].blocks[0]
        inner = self.add_values(block.arguments)
        shard_counts: list[float] = []
        for whole, shard in zip(ins, inner, strict=True):
            shard_elements = max(1, math.prod(self.values[shard].shape))
            shard_counts.append(math.prod(self.values[whole].shape) / shard_elements)
        shards = max(shard_counts, default=1.0)
        self.shard_boundary(ins, inner, runs, op)
        results = self.inline(block, inner, value_numbers, runs * shards)
        self.shard_boundary(results, outs, runs, op)

    def shard_boundary(
        self,
        ins: Sequence[int],
        outs: Sequence[int],
        runs: float,
        op: Op,
    ) -> None:
        """Adds an operation for each array that enters or leaves the body of a
        `shard_map`, from the whole array to its shard or back. If the two have
        different shapes, they have no factor in common. `op` is the `shard_map`.
        """
        for value, out in zip(ins, outs, strict=True):
            shape = self.values[value].shape
            other_shape = self.values[out].shape
            rule = elementwise if shape == other_shape else opaque
            self.operations.append(
                Operation(
                    name="opaque",
                    ins=(value,),
                    outs=(out,),
                    factors=rule([shape], [other_shape]),
                    times=runs,
                    flops=0.0,
                    location=self.locations(op),
                )
            )


def _factors_of(op: Op, ins: Shapes, outs: Shapes) -> Factors | None:
    """The sharding rule of an operation, from Shardy if it has one; `None` if it is not
    known. `ins` and `outs` are the shapes of its operands and results.
    """
    if RULE in op.attributes:
        return of_rule(op.attributes[RULE])
    return factors_without_rule(op, op.name, ins, outs)


def _is_free(
    name: str,
    ins: Sequence[StepValue],
    factors: Factors | None,
    flops: float,
) -> bool:
    """Whether every device can compute any shard of an operation's result, since the
    operands are constants or scalars. `factors` is the operation's sharding rule, if it
    is known, and `flops` are those of a matrix product.
    """
    if name == "iota":
        return True
    # A matrix product is never free.
    if flops:
        return False
    if name == "broadcast_in_dim" and not ins[0].shape:
        return True
    if factors is None or factors.reduction or factors.replicated:
        return False
    has_free = any(value.free for value in ins)
    return has_free and all(value.free or not value.shape for value in ins)

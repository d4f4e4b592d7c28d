"""A step as a flat list of operations over values, each with the labels of its dimensions.

Calls are entered, each on its own, because JAX shares the traced code of equal calls. Loops are entered once, and what
is in them counts as often as they run.
"""

import dataclasses
import functools as ft
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.extend.core as jex
import numpy as np

from .._cost.nested import CALLS, scan_parts
from .._ground.spec import bits
from .parts import Parts
from .relations import Relation, relation, unknown


@dataclasses.dataclass(frozen=True, slots=True)
class Value:
    """One array of the step: its shape, and for each dimension the part that it began as."""

    shape: tuple[int, ...]
    dtype: Any
    parts: tuple[int, ...]
    # How much memory the whole array takes.
    bytes: float = dataclasses.field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "bytes", float(math.prod(self.shape)) * _bits(self.dtype) / 8)


@dataclasses.dataclass(frozen=True, slots=True)
class Operation:
    """What one primitive does, `times` over: on which values, with which labels.

    `kind` is "einsum" for what follows its labels; "reshape" for the same elements in the same order; "carry" and
    "return" where a loop takes up its state and hands it on; "use" for a value that lives until here.
    """

    kind: str
    primitive: str
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    labels: Relation
    times: float
    # Where the primitive stands: the source info of its equation.
    source: Any


class Visit(NamedTuple):
    """One equation as it was walked: what it made, the last of its operations, and the programs within it."""

    outs: tuple[int, ...]
    operation: int
    bodies: "tuple[Body, ...]"


@dataclasses.dataclass(frozen=True, slots=True)
class Body:
    """One jaxpr as it was walked: the values of its arguments, and a visit for each of its equations."""

    arguments: tuple[int, ...]
    visits: list[Visit]


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """A whole step."""

    values: list[Value]
    operations: list[Operation]
    parts: Parts
    arguments: tuple[int, ...]
    results: tuple[int, ...]
    # Parts that loops run over, that an index looks up, that products run over in batches, that they sum over.
    marks: dict[str, list[int]]
    # What was not understood, in words, with how often.
    notes: dict[str, int]
    # The way through the jaxpr, for who walks it again.
    body: Body


def program_of(closed: Any) -> Program:
    """The program of a closed jaxpr."""
    walk = _Walk()
    arguments = tuple(walk.value(var.aval, origin=number) for number, var in enumerate(closed.jaxpr.invars))
    results = tuple(walk.enter(closed, arguments, 1.0))
    (body,) = walk.bodies[-1]
    return Program(walk.values, walk.operations, walk.parts, arguments, results, walk.marks, walk.notes, body)


class _Walk:
    def __init__(self):
        self.values: list[Value] = []
        self.operations: list[Operation] = []
        self.parts = Parts()
        self.marks: dict[str, list[int]] = {
            kind: [] for kind in ("scanned", "looked_up", "batched", "contracted", "words")
        }
        self.notes: dict[str, int] = {}
        # For each equation that is being walked, the programs within it so far.
        self.bodies: list[list[Body]] = [[]]

    def value(self, aval: Any, origin: int = -1) -> int:
        shape = tuple(int(size) for size in getattr(aval, "shape", ()))
        parts = tuple(self.parts.new(size, origin) for size in shape)
        self.values.append(Value(shape, getattr(aval, "dtype", np.dtype("int32")), parts))
        return len(self.values) - 1

    def enter(self, closed: Any, arguments: Sequence[int], times: float) -> list[int]:
        """Walks through a jaxpr with these arguments; returns its results."""
        jaxpr = closed.jaxpr if isinstance(closed, jex.ClosedJaxpr) else closed
        known: dict[Any, int] = dict(zip(jaxpr.invars, arguments, strict=True))
        for var in jaxpr.constvars:
            known[var] = self.value(var.aval)

        def read(atom: Any) -> int:
            return self.value(atom.aval) if isinstance(atom, jex.Literal) else known[atom]

        body = Body(tuple(arguments), [])
        self.bodies[-1].append(body)
        for equation in jaxpr.eqns:
            ins = [read(atom) for atom in equation.invars]
            self.bodies.append([])
            outs = self.step(equation, ins, times)
            body.visits.append(Visit(tuple(outs), len(self.operations) - 1, tuple(self.bodies.pop())))
            known |= zip(equation.outvars, outs, strict=True)
        return [read(atom) for atom in jaxpr.outvars]

    def step(self, equation: Any, ins: list[int], times: float) -> list[int]:
        name = equation.primitive.name
        if name in CALLS and CALLS[name] in equation.params:
            inner = equation.params[CALLS[name]]
            jaxpr = inner.jaxpr if isinstance(inner, jex.ClosedJaxpr) else inner
            if len(jaxpr.invars) == len(ins):
                return self.enter(inner, ins, times)
        if name == "scan":
            return self.scan(equation, ins, times)
        if name == "while":
            return self.loop(equation, ins, times)
        if name == "cond":
            return self.branches(equation, ins, times)
        outs = [self.value(var.aval) for var in equation.outvars]
        self.apply(equation, ins, outs, times)
        return outs

    def apply(self, equation: Any, ins: Sequence[int], outs: Sequence[int], times: float) -> None:
        name = equation.primitive.name
        in_shapes, out_shapes = [self.values[i].shape for i in ins], [self.values[i].shape for i in outs]
        if name == "reshape":
            ins = [self.permuted(ins[0], equation.params.get("dimensions"), times, equation.source_info)]
            labels = unknown([self.values[ins[0]].shape], out_shapes)._replace(linear=True)
            self.add("reshape", name, ins, outs, labels, times, equation.source_info)
            return
        if name == "random_wrap":
            # The numbers of a raw key, as `jax.random.PRNGKey` makes it, are one thing.
            self.marks["words"] += self.values[ins[0]].parts[len(out_shapes[0]) :]
        found = relation(name, equation.params, in_shapes, out_shapes)
        if found is None:
            self.note(f"`{name}` is not known: the dimensions of what it takes and makes are not tied")
            found = unknown(in_shapes, out_shapes)
        self.add("einsum", name, ins, outs, found, times, equation.source_info)

    def add(
        self,
        kind: str,
        name: str,
        ins: Sequence[int],
        outs: Sequence[int],
        labels: Relation,
        times: float,
        source: Any,
    ) -> None:
        """Adds an operation, and ties the dimensions that it labels alike."""
        number = len(self.operations)
        self.operations.append(Operation(kind, name, tuple(ins), tuple(outs), labels, times, source))
        if kind == "reshape":
            (a,), (b,) = ins, outs
            self.parts.align(self.values[a].parts, self.values[b].parts, number)
            return
        first: dict[int, int] = {}
        pairs = (*zip(ins, labels.ins, strict=True), *zip(outs, labels.outs, strict=True))
        for value, dims in pairs:
            for part, label in zip(self.values[value].parts, dims, strict=True):
                if label is None or self.parts.sizes[part] == 1:
                    continue
                if label in first:
                    self.parts.align([first[label]], [part], number)
                else:
                    first[label] = part
        for what in ("looked_up", "batched", "contracted"):
            self.marks[what] += [first[label] for label in getattr(labels, what) if label in first]

    def permuted(self, value: int, order: Sequence[int] | None, times: float, source: Any) -> int:
        """The value with its dimensions in another order, which a reshape may ask for."""
        if order is None:
            return value
        given = self.values[value]
        parts = tuple(map(self.parts.new, (given.shape[dim] for dim in order)))
        self.values.append(Value(tuple(given.shape[dim] for dim in order), given.dtype, parts))
        out = len(self.values) - 1
        labels = Relation((tuple(range(len(order))),), (tuple(map(int, order)),), linear=True)
        self.add("einsum", "transpose", [value], [out], labels, times, source)
        return out

    def note(self, words: str) -> None:
        self.notes[words] = self.notes.get(words, 0) + 1

    def scan(self, equation: Any, ins: list[int], times: float) -> list[int]:
        params, source = equation.params, equation.source_info
        (consts, carries), length = scan_parts(params), params["length"]
        given, carried, stacked = ins[:consts], ins[consts : consts + carries], ins[consts + carries :]
        results = [self.value(var.aval) for var in equation.outvars]
        inner = params["jaxpr"].jaxpr.invars
        state = [self.carried(value, times, source) for value in carried]
        rows = [self.value(var.aval) for var in inner[consts + carries :]]
        many = times * length
        for whole, row in zip(stacked, rows, strict=True):
            self.slice(whole, row, many, source, "slice")
        outs = self.enter(params["jaxpr"], [*given, *state, *rows], many)
        for result, begun, ended in zip(results[:carries], state, outs[:carries], strict=True):
            self.returned(ended, begun, result, many, source)
        for row, whole in zip(outs[carries:], results[carries:], strict=True):
            self.slice(row, whole, many, source, "stack")
        # All that the loop reads lives until it ends.
        self.operations.append(Operation("use", "scan", (*given, *stacked), (), Relation((), ()), times, source))
        layers = [self.values[value].parts[0] for value in (*stacked, *results[carries:])]
        for part in layers[1:]:
            self.parts.align(layers[:1], [part], len(self.operations) - 1)
        self.marks["scanned"] += layers[:1]
        return results

    def carried(self, value: int, times: float, source: Any) -> int:
        begun = self.like(value)
        self.add("carry", "loop", (value,), (begun,), self.alike(value, 2), times, source)
        return begun

    def returned(self, ended: int, begun: int, result: int, times: float, source: Any) -> None:
        relation = self.alike(ended, 3)
        self.add("return", "loop", (ended, begun), (result,), relation, times, source)

    def alike(self, value: int, count: int) -> Relation:
        labels = tuple(range(len(self.values[value].shape)))
        return Relation((labels,) * (count - 1), (labels,))

    def like(self, value: int) -> int:
        made = self.values[value]
        self.values.append(Value(made.shape, made.dtype, tuple(map(self.parts.new, made.shape))))
        return len(self.values) - 1

    def slice(self, source_value: int, result: int, times: float, source: Any, kind: str) -> None:
        """One iteration's part of an array with a leading dimension, in or out."""
        rows = tuple(range(min(len(self.values[source_value].shape), len(self.values[result].shape))))
        ins, outs = ((None, *rows), rows) if kind == "slice" else (rows, (None, *rows))
        self.add(kind, "scan", (source_value,), (result,), Relation((ins,), (outs,), heavy=True), times, source)

    def loop(self, equation: Any, ins: list[int], times: float) -> list[int]:
        params, source = equation.params, equation.source_info
        tested, consts = params["cond_nconsts"], params["body_nconsts"]
        begun = [self.carried(value, times, source) for value in ins[tested + consts :]]
        length = _trips(equation, tested + consts)
        if length is None:
            self.note("a `while` loop whose length is not in the program counts once")
        many = times * (length or 1)
        ended = self.enter(params["body_jaxpr"], [*ins[tested : tested + consts], *begun], many)
        self.enter(params["cond_jaxpr"], [*ins[:tested], *begun], many)
        results = [self.value(var.aval) for var in equation.outvars]
        for last, first, result in zip(ended, begun, results, strict=True):
            self.returned(last, first, result, many, source)
        self.operations.append(
            Operation("use", "while", tuple(ins[: tested + consts]), (), Relation((), ()), times, source)
        )
        return results

    def branches(self, equation: Any, ins: list[int], times: float) -> list[int]:
        branches = equation.params["branches"]
        results = [self.value(var.aval) for var in equation.outvars]
        for branch in branches:
            # Which one runs is not known: each counts for its share.
            ended = self.enter(branch, ins[1:], times / len(branches))
            for value, result in zip(ended, results, strict=True):
                self.add(
                    "carry",
                    "cond",
                    (value,),
                    (result,),
                    self.alike(value, 2),
                    times / len(branches),
                    equation.source_info,
                )
        return results


def _trips(equation: Any, constants: int) -> int | None:
    """How often a loop that counts up to a literal runs, as `fori_loop` with fixed ends does."""
    test = equation.params["cond_jaxpr"].jaxpr
    if len(test.eqns) != 1 or test.eqns[0].primitive.name != "lt":
        return None
    counter, limit = test.eqns[0].invars
    if not isinstance(limit, jex.Literal) or isinstance(counter, jex.Literal) or counter not in test.invars:
        return None
    place = test.invars.index(counter) - equation.params["cond_nconsts"]
    start = equation.invars[constants + place]
    return int(limit.val) - int(start.val) if isinstance(start, jex.Literal) else None


@ft.lru_cache(maxsize=256)
def _bits(dtype: Any) -> int:
    return bits(dtype)

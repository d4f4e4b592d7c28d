"""From a jaxpr to a flat list of operations."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from .._ground.spec import UNCONSTRAINED, entries_of, entry_axes
from .factors import Kind, Rule, Shape, elementwise, rule_of
from .graph import Bound, Op, Pin, Scope, Traced, Value
from .nested import CALLS, scan_parts


_CONSTRAINTS = ("sharding_constraint", "reshard")
Numbers = tuple[int, ...]


class _Place(NamedTuple):
    """Where equations are read: their scope, the calls around them, the mesh axes that a `shard_map` took, the way."""

    scope: int = 0
    sources: tuple[Any, ...] = ()
    manual: frozenset[str] = frozenset()
    path: tuple[int, ...] = ()


def traced(closed: ClosedJaxpr, paths: Sequence[str | None] | None = None) -> Traced:
    """Reads a jaxpr.

    **Arguments:**

    - `closed`: of the step.
    - `paths`: the path of each of its arguments, for rows to name.

    **Returns:**

    The step as a list of operations.
    """
    reader = _Reader()
    given = closed.jaxpr.invars
    arguments = tuple(
        reader.value(var.aval, path) for var, path in zip(given, paths or [None] * len(given), strict=True)
    )
    results = reader.read(closed, arguments, _Place())
    ops = _needed(reader.ops, results)
    return Traced(tuple(reader.values), ops, tuple(reader.scopes), arguments, results, reader.bound)


def _needed(ops: Sequence[Op], results: Numbers) -> tuple[Op, ...]:
    """The operations that a result is made by: compilers leave out all others."""
    needed, before = set(results), 0
    while len(needed) > before:  # a loop may carry what only a later trip needs
        before = len(needed)
        for op in reversed(ops):
            if not needed.isdisjoint(op.results):
                needed.update(op.operands)
    return tuple(op for op in ops if not needed.isdisjoint(op.results))


def constrained_results(graph: Traced, pins: Sequence[Pin | None]) -> Traced:
    """The step with its results brought into layouts, where one is given."""
    reader = _Reader()
    reader.values, reader.ops = list(graph.values), list(graph.ops)
    results = [
        value if pin is None or not pin.entries else reader.same("result", value, _Place(), pin=pin)
        for value, pin in zip(graph.results, pins, strict=True)
    ]
    return dataclasses.replace(graph, values=tuple(reader.values), ops=tuple(reader.ops), results=tuple(results))


class _Reader:
    def __init__(self):
        self.values: list[Value] = []
        self.ops: list[Op] = []
        self.scopes: list[Scope] = [Scope(0)]
        self.branching = 0
        self.bound: dict[Bound, int] = {}
        self.families: Mapping[str, Callable[..., Numbers]] = {
            "scan": self.scan,
            "while": self.loop,
            "cond": self.cond,
            "shard_map": self.shard_map,
            "stack": self.joined,
            "unstack": self.parted,
        }

    def value(self, aval: Any, path: str | None = None, *, is_free: bool = False) -> int:
        shape, dtype = _type_of(aval)
        self.values.append(Value(shape, dtype, path, is_free))
        return len(self.values) - 1

    def like(self, value: int, *, is_free: bool = False) -> int:
        self.values.append(self.values[value]._replace(path=None, is_free=is_free))
        return len(self.values) - 1

    def shape(self, value: int) -> Shape:
        return self.values[value].shape

    def op(
        self, name: str, operands: Numbers, results: Numbers, rule: Rule, place: _Place, pin: Pin | None = None
    ) -> None:
        self.ops.append(Op(name, operands, results, rule, place.scope, place.sources, pin))

    def same(self, name: str, operand: int, place: _Place, result: int | None = None, pin: Pin | None = None) -> int:
        """A value that is another one, in another place or layout."""
        made = self.like(operand, is_free=self.values[operand].is_free and pin is None) if result is None else result
        shape = self.shape(operand)
        rule = elementwise([shape], [shape], is_linear=pin is not None, moves=True)
        self.op(name, (operand,), (made,), rule, place, pin)
        return made

    def read(self, jaxpr: Any, given: Numbers, place: _Place) -> Numbers:
        """The values that a jaxpr makes of others."""
        body: Jaxpr = jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr
        numbers: dict[Any, int] = dict(zip(body.invars, given, strict=True))
        for var in body.constvars:
            numbers[var] = self.value(var.aval, is_free=True)
        self.bound |= {(place.path, var): number for var, number in numbers.items()}

        def of(atom: Any) -> int:
            return self.value(atom.aval, is_free=True) if isinstance(atom, Literal) else numbers[atom]

        for at, equation in enumerate(body.eqns):
            operands = tuple(of(atom) for atom in equation.invars)
            inner = place._replace(sources=(equation.source_info, *place.sources), path=(*place.path, at))
            made = self.equation(equation, operands, inner)
            numbers.update(zip(equation.outvars, made, strict=True))
            self.bound |= {(place.path, var): number for var, number in zip(equation.outvars, made, strict=True)}
        return tuple(of(atom) for atom in body.outvars)

    def equation(self, equation: Any, operands: Numbers, place: _Place) -> Numbers:
        name, params = equation.primitive.name, equation.params
        if name == "meant_for":
            return operands  # `constrain` marks what it is given, and the mark is no operation
        if name in CALLS and CALLS[name] in params:
            return self.call(name, params, operands, place)
        if name in self.families:
            return self.families[name](equation, operands, place)
        if name in _CONSTRAINTS:
            sharding = params.get("sharding", params.get("dst_sharding"))
            pin = _pin(sharding, params.get("unconstrained_dims", ()), len(self.shape(operands[0])))
            return (self.same(name, operands[0], place, pin=pin),)
        is_free = all(self.values[operand].is_free for operand in operands)
        results = tuple(self.value(var.aval, is_free=is_free) for var in equation.outvars)
        shapes = [[self.shape(value) for value in values] for values in (operands, results)]
        self.op(name, operands, results, rule_of(name, params, *shapes), place, _typed(equation.outvars))
        return results

    def call(self, name: str, params: Mapping[str, Any], operands: Numbers, place: _Place) -> Numbers:
        if "in_shardings" in params:
            operands = self.pinned(operands, params["in_shardings"], place)
        if params.get("prevent_cse") and params.get("differentiated"):
            # What is computed again does not share what was sent for the first time.
            operands = tuple(self.same("again", value, place) for value in operands)
        results = self.read(params[CALLS[name]], operands, place)
        return self.pinned(results, params["out_shardings"], place) if "out_shardings" in params else results

    def pinned(self, values: Numbers, shardings: Sequence[Any], place: _Place) -> Numbers:
        return tuple(
            self.same("sharding_constraint", value, place, pin=_pin(sharding, (), len(self.shape(value))))
            if isinstance(sharding, NamedSharding) and self.shape(value)
            else value
            for value, sharding in zip(values, shardings, strict=True)
        )

    def scope(self, place: _Place, trips: int | None = 1, branch: tuple[int, int] | None = None) -> _Place:
        self.scopes.append(Scope(place.scope, trips, branch))
        return place._replace(scope=len(self.scopes) - 1)

    def scan(self, equation: Any, operands: Numbers, place: _Place) -> Numbers:
        params = equation.params
        first, carries = scan_parts(params)
        last = first + carries
        inside = self.scope(place, params["length"])
        carried = tuple(self.carried(value, place) for value in operands[first:last])
        layers = tuple(self.layer(value, inside) for value in operands[last:])
        made = self.read(
            params["jaxpr"], (*operands[:first], *carried, *layers), inside._replace(path=(*inside.path, 0))
        )
        for old, new in zip(carried, made[: len(carried)], strict=True):
            self.same("carry", new, inside, old)
        stacks = [
            self.stack(value, var.aval, inside)
            for value, var in zip(made[len(carried) :], equation.outvars[len(carried) :], strict=True)
        ]
        return (*carried, *stacks)

    def carried(self, value: int, place: _Place) -> int:
        """What a loop carries begins as `value`, and is no constant whatever that is."""
        return self.same("carry", value, place, self.like(value))

    def layer(self, stacked: int, inside: _Place) -> int:
        """One of what a loop goes through."""
        shape = self.shape(stacked)
        value = self.shaped(stacked, shape[1:])
        rule = _with_first(elementwise([shape[1:]], [shape[1:]]), shape[0])
        self.op("layer", (stacked,), (value,), rule, inside)
        return value

    def stack(self, value: int, aval: Any, inside: _Place) -> int:
        stacked, shape = self.value(aval, is_free=self.values[value].is_free), self.shape(value)
        rule = _with_first(elementwise([shape], [shape]), self.shape(stacked)[0], of_results=True)
        self.op("stack", (value,), (stacked,), rule, inside)
        return stacked

    def joined(self, equation: Any, operands: Numbers, place: _Place) -> Numbers:
        """`jnp.stack`, as it is lowered: each array gets a dimension of one, and they are put one behind the other."""
        (var,), axis = equation.outvars, equation.params["axis"]
        whole = self.value(var.aval, is_free=all(self.values[operand].is_free for operand in operands))
        full = self.shape(whole)
        shape, kept = (*full[:axis], 1, *full[axis + 1 :]), tuple(at for at in range(len(full)) if at != axis)
        rows = []
        for operand in operands:
            rows.append(self.shaped(operand, shape))
            rule = rule_of("broadcast_in_dim", {"broadcast_dimensions": kept}, [self.shape(operand)], [shape])
            self.op("broadcast_in_dim", (operand,), (rows[-1],), rule, place)
        rule = rule_of("concatenate", {"dimension": axis}, [shape] * len(rows), [full])
        self.op("concatenate", tuple(rows), (whole,), rule, place, _typed(equation.outvars))
        return (whole,)

    def parted(self, equation: Any, operands: Numbers, place: _Place) -> Numbers:
        """`jnp.unstack`, as it is lowered: slices of one, without that dimension."""
        (whole,), axis = operands, equation.params["axis"]
        full = self.shape(whole)
        shape, made = (*full[:axis], 1, *full[axis + 1 :]), []
        for _ in equation.outvars:
            row = self.shaped(whole, shape)
            self.op("slice", (whole,), (row,), rule_of("slice", {}, [full], [shape]), place)
            made.append(self.shaped(row, (*full[:axis], *full[axis + 1 :])))
            rule = rule_of("squeeze", {"dimensions": (axis,)}, [shape], [self.shape(made[-1])])
            self.op("squeeze", (row,), (made[-1],), rule, place)
        return tuple(made)

    def shaped(self, value: int, shape: Shape) -> int:
        """A new value of another shape; it is free where this one is."""
        made = self.like(value, is_free=self.values[value].is_free)
        self.values[made] = self.values[made]._replace(shape=shape)
        return made

    def loop(self, equation: Any, operands: Numbers, place: _Place) -> Numbers:
        params = equation.params
        tests, bodies = params["cond_nconsts"], params["body_nconsts"]
        inside = self.scope(place, None)
        carried = tuple(self.carried(value, place) for value in operands[tests + bodies :])
        self.read(params["cond_jaxpr"], (*operands[:tests], *carried), inside._replace(path=(*inside.path, 1)))
        made = self.read(
            params["body_jaxpr"], (*operands[tests : tests + bodies], *carried), inside._replace(path=(*inside.path, 0))
        )
        for old, new in zip(carried, made, strict=True):
            self.same("carry", new, inside, old)
        return carried

    def cond(self, equation: Any, operands: Numbers, place: _Place) -> Numbers:
        results = tuple(self.value(var.aval) for var in equation.outvars)
        self.branching += 1
        number = self.branching
        for at, branch in enumerate(equation.params["branches"]):
            inside = self.scope(place, branch=(number, at))
            inside = inside._replace(path=(*place.path, at))
            for value, result in zip(self.read(branch, operands[1:], inside), results, strict=True):
                self.same("branch", value, inside, result)
        return results

    def shard_map(self, equation: Any, operands: Numbers, place: _Place) -> Numbers:
        params, body = equation.params, equation.params["jaxpr"]
        manual = frozenset(params.get("newly_manual_axes", params.get("manual_axes", params["mesh"].axis_names)))
        inside = place._replace(manual=place.manual | manual)
        given = []
        for value, spec, var in zip(operands, params["in_specs"], body.invars, strict=True):
            whole = self.same("shard_map", value, place, pin=_manual_pin(spec, manual, len(self.shape(value))))
            local = self.value(var.aval, is_free=self.values[value].is_free)
            rule = _entering(spec, manual, self.shape(whole), self.shape(local))
            self.op("enter", (whole,), (local,), rule, place)
            given.append(local)
        made = self.read(body, tuple(given), inside._replace(path=(*inside.path, 0)))
        results = []
        for value, spec, var in zip(made, params["out_specs"], equation.outvars, strict=True):
            whole = self.value(var.aval)
            entering = _entering(spec, manual, self.shape(whole), self.shape(value))
            rule = Rule(entering.sizes, entering.kinds, entering.results, entering.operands, is_simple=True)
            pin = _manual_pin(spec, manual, len(self.shape(whole)))
            self.op("leave", (value,), (whole,), rule, place, pin)
            results.append(whole)
        return tuple(results)


def _type_of(aval: Any) -> tuple[Shape, Any]:
    """The shape and dtype of an array; of a token or a reference inside a kernel those of nothing."""
    if isinstance(aval, ShapedArray):
        return tuple(aval.shape), aval.dtype
    return (), np.dtype(bool)


def _pin(sharding: Any, free: Any, rank: int) -> Pin | None:
    """A spec as one entry per dimension: mesh axes, or UNCONSTRAINED."""
    spec = sharding if isinstance(sharding, PartitionSpec) else getattr(sharding, "spec", None)
    if spec is None:
        return None
    entries = [*entries_of(spec), *[None] * rank][:rank]
    return Pin(
        tuple(
            UNCONSTRAINED if entry is UNCONSTRAINED or at in free else entry_axes(entry)
            for at, entry in enumerate(entries)
        )
    )


def _typed(outvars: Sequence[Any]) -> Pin | None:
    """What the type of a result says under Explicit axes."""
    if len(outvars) != 1 or not isinstance(outvars[0].aval, ShapedArray):
        return None
    sharding = outvars[0].aval.sharding
    if sharding.mesh.empty or AxisType.Explicit not in sharding.mesh.axis_types:
        return None
    return _pin(sharding, (), len(outvars[0].aval.shape))


def _manual_pin(spec: Any, manual: frozenset[str], rank: int) -> Pin:
    """What a `shard_map` takes and gives, along its own axes."""
    entries = [*entries_of(spec), *[None] * rank][:rank]
    return Pin(tuple(tuple(axis for axis in entry_axes(entry) if axis in manual) for entry in entries), manual)


def _entering(spec: Any, manual: frozenset[str], whole: Shape, local: Shape) -> Rule:
    """Each dimension of the whole is the parts of all devices, then what one device has."""
    operand, result, factors = [], [], []
    pins = _manual_pin(spec, manual, len(whole))
    for axes, full, part in zip(pins.entries, whole, local, strict=True):
        dim = ()
        if axes:
            factors.append(full // part if part else 1)
            dim = (len(factors) - 1,)
        factors.append(part)
        operand.append((*dim, len(factors) - 1))
        result.append((len(factors) - 1,))
    return Rule(
        tuple(factors), ("pass",) * len(factors), (tuple(operand),), (tuple(result),), moves=True, is_simple=True
    )


def _with_first(rule: Rule, size: int, *, of_results: bool = False) -> Rule:
    """A rule whose operand, or result, has a first dimension more, of which each trip of a loop has one."""
    first = ((len(rule.sizes),),)
    operands, results = rule.operands, rule.results
    if of_results:
        results = ((*first, *results[0]),)
    else:
        operands = ((*first, *operands[0]),)
    sizes = (*rule.sizes, size)
    kinds: tuple[Kind, ...] = (*rule.kinds, "whole")
    return Rule(sizes, kinds, operands, results, is_simple=True, moves=not of_results)

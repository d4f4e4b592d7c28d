"""The regions of a loss: the bodies of its scans, its unrolled blocks, and the stretches
of equations before, between and behind them.

Each region is checkpointed alone, so its inputs are always kept. A program here is a
jaxpr in which a region stands in place of its equations.
"""

import collections
import dataclasses
import functools as ft
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.extend.core as jex
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import PyTree

from ..._ground.text import array_text
from ..._step import (
    CALLS,
    applied,
    array_leaves,
    carry_of,
    evaluated,
    frames_of,
    is_library,
    opened,
    own_line,
    place_text,
    retraced,
    structs_like,
    typed_struct_of,
    unwrapped,
)
from .work import SCANS, USERS_CHECKPOINTS, dependent, has_products, work_of


# An inner scan with more of a body's work than this is divided in place of the body.
_MOST_WORK = 0.5
# Periods of repeated blocks that are tried, by the places of one product.
_MOST_PERIODS = 500


class ValueKey(NamedTuple):
    """The identity of a value within a region. Equal regions have equal keys.

    - `line`, `function`: the source line that computes the value, and its function.
    - `operation`: the name of JAX's primitive.
    - `shape`, `dtype`: those of the whole array.
    - `number`: the position among the values of the region that are alike so far.
    """

    line: str
    function: str
    operation: str
    shape: tuple[int, ...]
    dtype: str
    number: int

    @property
    def name(self) -> str:
        """The name that `checkpoint_name` gives the value."""
        array = array_text(self.dtype, self.shape)
        return f"{self.line} {self.operation} {array} #{self.number}"


@dataclasses.dataclass(frozen=True, eq=False)
class Region:
    """Equations that are checkpointed together.

    - `jaxpr`: the equations, with the values that they read and return.
    - `is_body`: whether they are the whole body of a scan.
    - `keys`: the keys of each equation's results, by the equation's id.
    """

    jaxpr: jex.Jaxpr
    is_body: bool
    keys: Mapping[int, tuple[ValueKey, ...]]

    @property
    def invars(self) -> Sequence[Any]:
        return self.jaxpr.invars

    @property
    def outvars(self) -> Sequence[Any]:
        return self.jaxpr.outvars

    @property
    def all_keys(self) -> Iterator[ValueKey]:
        """The keys of all values, in the order in which they are computed."""
        return itertools.chain.from_iterable(self.keys.values())

    def named(
        self, args: Sequence[Any], names: Callable[[ValueKey], bool]
    ) -> list[Any]:
        """The results of the region, whose values with a key in `names` are named."""

        def rule(jaxpr: Any, equation: Any, operands: list[Any]) -> list[Any]:
            results = applied(jaxpr, equation, operands)
            return [
                checkpoint_name(result, key.name) if names(key) else result
                for result, key in zip(results, self.keys[id(equation)], strict=True)
            ]

        return evaluated(self.jaxpr, (), args, rule)


@dataclasses.dataclass(frozen=True, eq=False)
class Loop:
    """A scan, and the program of its body."""

    equation: jex.JaxprEqn
    body: "Program"

    @property
    def invars(self) -> Sequence[Any]:
        return self.equation.invars

    @property
    def outvars(self) -> Sequence[Any]:
        return self.equation.outvars

    @property
    def length(self) -> int:
        return self.equation.params["length"]


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A jaxpr, divided: it has the fields of a jaxpr, with regions and loops among its
    equations.
    """

    constvars: Sequence[Any]
    invars: Sequence[Any]
    outvars: Sequence[Any]
    eqns: tuple[Any, ...]
    jaxpr: jex.Jaxpr

    def regions(self) -> Iterator[Region]:
        """Yields each region, with those in the bodies of loops."""
        for part in self.eqns:
            if isinstance(part, Region):
                yield part
            elif isinstance(part, Loop):
                yield from part.body.regions()

    def placed(self, active: Sequence[bool], count: int = 1) -> Iterator["Placed"]:
        """Yields each region with the number of times that it runs, and with the inputs
        that are differentiated. `active` says so of the program's inputs.
        """
        reached = dependent(self.jaxpr, active)
        for part in self.eqns:
            inputs = tuple(atom in reached for atom in part.invars if _is_var(atom))
            if isinstance(part, Region):
                yield Placed(part, count, inputs)
            elif isinstance(part, Loop):
                flags = [_is_var(atom) and atom in reached for atom in part.invars]
                first, carried = carry_of(part.equation)
                for position in range(carried):
                    flags[first + position] |= part.outvars[position] in reached
                yield from part.body.placed(flags, count * part.length)

    def left_alone(self) -> Iterator[jex.JaxprEqn]:
        """Yields the equations with products that no region contains."""
        for part in self.eqns:
            if isinstance(part, Loop):
                yield from part.body.left_alone()
            elif not isinstance(part, Region) and has_products(part):
                yield part


class Placed(NamedTuple):
    """A region, the number of times that it runs, and which inputs are
    differentiated.
    """

    region: Region
    runs: int
    active: tuple[bool, ...]


class DividedLoss(NamedTuple):
    """A traced loss, divided into regions.

    - `program`, `consts`: its program, and the values of the program's constants.
    - `out`, `rest`: its result, as `eqx.filter_make_jaxpr` returns it.
    """

    program: Program
    consts: Sequence[Any]
    out: PyTree
    rest: PyTree

    def result(
        self, arrays: Sequence[Any], checkpointed: Callable[[Region], Any]
    ) -> PyTree:
        """The result of the loss for the arrays of its arguments. `checkpointed` makes
        a function of a region's inputs, which returns its outputs.
        """
        outputs = _run(self.program, self.consts, arrays, checkpointed)
        filled = jax.tree.unflatten(jax.tree.structure(self.out), outputs)
        return eqx.combine(filled, self.rest)


def divided(loss: Callable[..., PyTree], args: PyTree) -> DividedLoss:
    """Traces a loss and divides it. `args` is a pair of its arguments and its keyword
    arguments.
    """
    positional, named = structs_like(args, typed=True)
    closed, out, rest = eqx.filter_make_jaxpr(unwrapped(loss))(*positional, **named)
    flat = _flat(closed.jaxpr, closed.consts, array_leaves((positional, named)))
    return DividedLoss(_program(flat.jaxpr, is_body=False), flat.consts, out, rest)


def _run(
    program: Program,
    consts: Sequence[Any],
    args: Sequence[Any],
    checkpointed: Callable[[Region], Any],
) -> list[Any]:
    def rule(_: Any, part: Any, operands: list[Any]) -> Sequence[Any]:
        if isinstance(part, Region):
            return checkpointed(part)(*operands)
        if not isinstance(part, Loop):
            return applied(program.jaxpr, part, operands)

        def body(_: Any, inner_consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
            return _run(part.body, inner_consts, args, checkpointed)

        scan = part.equation
        jaxpr = retraced(scan.params["jaxpr"], body, typed_struct_of)
        params = {**scan.params, "jaxpr": jaxpr}
        return applied(program.jaxpr, scan.replace(params=params), operands)

    return evaluated(program, consts, args, rule)


def _is_var(atom: Any) -> bool:
    return not isinstance(atom, jex.Literal)


def _flat(
    jaxpr: jex.Jaxpr, consts: Sequence[Any], args: Sequence[Any]
) -> jex.ClosedJaxpr:
    """The jaxpr with the programs of its calls, and of calls in its scans, in place of
    the calls.
    """

    def run(
        jaxpr: jex.Jaxpr,
        consts: Sequence[Any],
        args: Sequence[Any],
        call: jex.JaxprEqn | None = None,
    ) -> list[Any]:
        return evaluated(jaxpr, consts, args, ft.partial(rule, call))

    def rule(
        call: jex.JaxprEqn | None,
        jaxpr: jex.Jaxpr,
        equation: jex.JaxprEqn,
        operands: list[Any],
    ) -> Sequence[Any]:
        if call is not None and not _is_of_user(equation):
            # JAX traces its own functions once, without the lines that call them.
            equation = equation.replace(source_info=call.source_info)
        name = equation.primitive.name
        if name in CALLS and not _has_shardings(equation):
            return run(*opened(equation.params[CALLS[name]]), operands, equation)
        if name in SCANS:
            body = retraced(equation.params["jaxpr"], run, typed_struct_of)
            equation = equation.replace(params={**equation.params, "jaxpr": body})
        return applied(jaxpr, equation, operands)

    return jax.make_jaxpr(lambda *args: run(jaxpr, consts, args))(*args)


def _is_of_user(equation: jex.JaxprEqn) -> bool:
    """Whether a source line of the user's own program is known for an equation."""
    frame = own_line(frames_of(equation))
    return frame is not None and not is_library(frame)


def _has_shardings(call: jex.JaxprEqn) -> bool:
    shardings = [
        sharding
        for name in ("in_shardings", "out_shardings")
        for sharding in call.params.get(name, ())
    ]
    return any(isinstance(sharding, jax.sharding.Sharding) for sharding in shardings)


def _program(jaxpr: jex.Jaxpr, *, is_body: bool) -> Program:
    """Divides a flat jaxpr: a loss, or the body of a scan."""
    works = [work_of(equation).flops for equation in jaxpr.eqns]
    total = sum(works)
    parts: list[Any] = []
    stretch: list[jex.JaxprEqn] = []
    whole = is_body
    for equation, work in zip(jaxpr.eqns, works, strict=True):
        is_loop = equation.primitive.name in SCANS and has_products(equation)
        if is_loop and is_body:
            is_loop = work > _MOST_WORK * total
        is_boundary = is_loop or equation.primitive.name in USERS_CHECKPOINTS
        if not is_boundary and not equation.effects:
            stretch.append(equation)
            continue
        whole = False
        parts += [stretch] if is_body else _blocks(stretch)
        stretch = []
        parts.append(equation)
        if is_loop:
            body, _ = opened(equation.params["jaxpr"])
            parts[-1] = Loop(equation, _program(body, is_body=True))
    parts += [stretch] if is_body else _blocks(stretch)

    parts = [part for part in parts if part != []]
    return Program(
        constvars=jaxpr.constvars,
        invars=jaxpr.invars,
        outvars=jaxpr.outvars,
        eqns=tuple(_with_regions(jaxpr, parts, whole)),
        jaxpr=jaxpr,
    )


def _with_regions(
    jaxpr: jex.Jaxpr, parts: Sequence[Any], whole: bool
) -> Iterator[Region | Loop | jex.JaxprEqn]:
    """The parts of a program, in which a list of equations becomes a region."""
    later: list[set[Any]] = [set(filter(_is_var, jaxpr.outvars))]
    for part in reversed(parts):
        equations = part if isinstance(part, list) else [part]
        read = {atom for one in equations for atom in one.invars if _is_var(atom)}
        later.append(later[-1] | read)
    later.reverse()

    for part, read_later in zip(parts, later[1:], strict=True):
        if not isinstance(part, list):
            yield part
            continue
        results = [var for equation in part for var in equation.outvars]
        operands = [atom for equation in part for atom in equation.invars]
        inner = set(results)
        inputs = dict.fromkeys(
            atom for atom in operands if _is_var(atom) and atom not in inner
        )
        if whole:
            inputs = dict.fromkeys((*jaxpr.constvars, *jaxpr.invars))
        region = jaxpr.replace(
            constvars=[],
            invars=[*inputs],
            outvars=[var for var in results if var in read_later],
            eqns=part,
            debug_info=jaxpr.debug_info.with_unknown_names(),
        )
        yield Region(region, whole, _keys(part))


def _keys(equations: Sequence[jex.JaxprEqn]) -> dict[int, tuple[ValueKey, ...]]:
    counts: collections.Counter[tuple[Any, ...]] = collections.Counter()
    keys = {}
    for equation in equations:
        frame = own_line(frames_of(equation))
        results = []
        for var in equation.outvars:
            line = "-" if frame is None else frame.place
            shape = tuple(getattr(var.aval, "shape", ()))
            dtype = str(getattr(var.aval, "dtype", ""))
            alike = (line, equation.primitive.name, shape, dtype)
            key = ValueKey(
                line=line,
                function="" if frame is None else frame.function,
                operation=equation.primitive.name,
                shape=shape,
                dtype=dtype,
                number=counts[alike],
            )
            results.append(key)
            counts[alike] += 1
        keys[id(equation)] = tuple(results)
    return keys


def _blocks(equations: list[jex.JaxprEqn]) -> list[list[jex.JaxprEqn]]:
    """Divides equations into their repeated blocks, such as the layers of a model, and
    the stretches before and behind them.
    """
    period, start, stop = _repeated(equations)
    if not period:
        return [equations]
    crossing = _crossing_bytes(equations)
    phases = range(min(period, stop - start - 2 * period + 1))
    phase = min(phases, key=lambda phase: crossing[start + phase + period])
    first = start + phase
    last = first + (stop - first) // period * period
    blocks = [equations[at : at + period] for at in range(first, last, period)]
    return [*_blocks(equations[:first]), *blocks, *_blocks(equations[last:])]


def _repeated(equations: Sequence[jex.JaxprEqn]) -> tuple[int, int, int]:
    """The period of the longest stretch of repeated equations with products, and its
    start and end; zeros if nothing is repeated.
    """
    kinds = [_kind(equation) for equation in equations]
    numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
    codes = np.array([numbers[kind] for kind in kinds], dtype=np.int64)
    products = [at for at, one in enumerate(equations) if has_products(one)]
    periods: dict[int, None] = {}
    places: dict[int, int] = {}
    for position in products:
        first = places.setdefault(int(codes[position]), position)
        periods[position - first] = None

    best = (0, 0, 0)
    for period in itertools.islice(sorted(filter(None, periods)), _MOST_PERIODS):
        start, length = _longest_run(codes[:-period] == codes[period:])
        stop = start + length + period
        if length < period or not any(start <= at < stop for at in products):
            continue
        # A multiple of a period repeats as much as the period does.
        if stop - start > 1.1 * (best[2] - best[1]):
            best = (period, start, stop)
    return best


def _kind(equation: jex.JaxprEqn) -> tuple[Any, ...]:
    frame = own_line(frames_of(equation))
    shapes = tuple(str(var.aval) for var in equation.outvars)
    return equation.primitive.name, place_text(frame), shapes


def _longest_run(is_equal: np.ndarray) -> tuple[int, int]:
    """The start and the length of the longest run of true entries."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], is_equal, [0]])))
    starts = edges[::2]
    lengths = edges[1::2] - starts
    if not len(lengths):
        return 0, 0
    longest = int(np.argmax(lengths))
    return int(starts[longest]), int(lengths[longest])


def _crossing_bytes(equations: Sequence[jex.JaxprEqn]) -> list[int]:
    """For each position, the bytes of values that equations before it compute and
    equations behind it read.
    """
    made: dict[Any, int] = {}
    last: dict[Any, int] = {}
    for position, equation in enumerate(equations):
        made.update(dict.fromkeys(equation.outvars, position))
        last.update((atom, position) for atom in equation.invars if _is_var(atom))
    changes = [0] * (len(equations) + 2)
    for var, position in made.items():
        size = bytes_of_var(var)
        changes[position + 1] += size
        changes[last.get(var, position) + 1] -= size
    return list(itertools.accumulate(changes))


def bytes_of_var(var: Any) -> int:
    shape = getattr(var.aval, "shape", ())
    dtype = getattr(var.aval, "dtype", None)
    return math.prod(shape) * getattr(dtype, "itemsize", 0)

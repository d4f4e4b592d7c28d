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
        self,
        args: Sequence[Any],
        names: Callable[[ValueKey], bool],
    ) -> list[Any]:
        """The results of the region, whose values with a key in `names` are named."""

        def rule(jaxpr: Any, equation: Any, operands: list[Any]) -> list[Any]:
            results = applied(jaxpr, equation, operands)
            named = []
            for result, key in zip(results, self.keys[id(equation)], strict=True):
                if names(key):
                    result = checkpoint_name(result, key.name)
                named.append(result)
            return named

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
            if isinstance(part, Region):
                inputs = [var in reached for var in part.invars]
                yield Placed(region=part, runs=count, active=tuple(inputs))
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
        self,
        arrays: Sequence[Any],
        checkpointed: Callable[[Region], Any],
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
    arrays = array_leaves((positional, named))
    flat = _flat(closed.jaxpr, closed.consts, arrays)
    program = _program(flat.jaxpr, is_body=False)
    return DividedLoss(program=program, consts=flat.consts, out=out, rest=rest)


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
    jaxpr: jex.Jaxpr,
    consts: Sequence[Any],
    args: Sequence[Any],
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
    for name in ("in_shardings", "out_shardings"):
        for sharding in call.params.get(name, ()):
            if isinstance(sharding, jax.sharding.Sharding):
                return True
    return False


def _program(jaxpr: jex.Jaxpr, *, is_body: bool) -> Program:
    """Divides a flat jaxpr: a loss, or the body of a scan."""
    works = [work_of(equation).flops for equation in jaxpr.eqns]
    total_work = sum(works)
    parts: list[Any] = []
    stretch: list[jex.JaxprEqn] = []

    def end_stretch() -> None:
        blocks = [stretch.copy()] if is_body else _blocks(stretch.copy())
        parts.extend(filter(None, blocks))
        stretch.clear()

    is_whole = is_body
    for equation, work in zip(jaxpr.eqns, works, strict=True):
        is_loop = equation.primitive.name in SCANS and has_products(equation)
        if is_loop and is_body:
            is_loop = work > _MOST_WORK * total_work
        is_boundary = is_loop or equation.primitive.name in USERS_CHECKPOINTS
        if not is_boundary and not equation.effects:
            stretch.append(equation)
            continue
        is_whole = False
        end_stretch()
        if is_loop:
            body, _ = opened(equation.params["jaxpr"])
            parts.append(Loop(equation, _program(body, is_body=True)))
        else:
            parts.append(equation)
    end_stretch()
    return Program(
        constvars=jaxpr.constvars,
        invars=jaxpr.invars,
        outvars=jaxpr.outvars,
        eqns=tuple(_with_regions(jaxpr, parts, is_whole)),
        jaxpr=jaxpr,
    )


def _with_regions(
    jaxpr: jex.Jaxpr,
    parts: Sequence[Any],
    is_whole: bool,
) -> Iterator[Region | Loop | jex.JaxprEqn]:
    """The parts of a program, in which a list of equations becomes a region. With
    `is_whole`, it takes all that the program takes.
    """
    # For each part, the values that the parts after it, or the program's end, read.
    read_later: list[set[Any]] = []
    read = set(filter(_is_var, jaxpr.outvars))
    for part in reversed(parts):
        read_later.append(read)
        equations = part if isinstance(part, list) else [part]
        read = read.union(_operands(equations))
    read_later.reverse()

    for part, read_after in zip(parts, read_later, strict=True):
        if not isinstance(part, list):
            yield part
            continue
        results: list[Any] = []
        for equation in part:
            results += equation.outvars
        if is_whole:
            inputs = [*jaxpr.constvars, *jaxpr.invars]
        else:
            inner = set(results)
            inputs = [atom for atom in _operands(part) if atom not in inner]
        region = jaxpr.replace(
            constvars=[],
            invars=list(dict.fromkeys(inputs)),
            outvars=[var for var in results if var in read_after],
            eqns=part,
            debug_info=jaxpr.debug_info.with_unknown_names(),
        )
        yield Region(jaxpr=region, is_body=is_whole, keys=_keys(part))


def _operands(equations: Sequence[Any]) -> list[Any]:
    """The variables that equations read."""
    operands: list[Any] = []
    for equation in equations:
        operands += filter(_is_var, equation.invars)
    return operands


def _keys(equations: Sequence[jex.JaxprEqn]) -> dict[int, tuple[ValueKey, ...]]:
    counts: collections.Counter[ValueKey] = collections.Counter()
    keys = {}
    for equation in equations:
        line = "-"
        function = ""
        frame = own_line(frames_of(equation))
        if frame is not None:
            line = frame.place
            function = frame.function
        results = []
        for var in equation.outvars:
            first = ValueKey(
                line=line,
                function=function,
                operation=equation.primitive.name,
                shape=tuple(getattr(var.aval, "shape", ())),
                dtype=str(getattr(var.aval, "dtype", "")),
                number=0,
            )
            alike = first._replace(function="")
            results.append(first._replace(number=counts[alike]))
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
    crossing_bytes = _crossing_bytes(equations)
    # The blocks begin where the fewest bytes cross.
    phase_count = min(period, stop - start - 2 * period + 1)
    first = min(
        range(start, start + phase_count),
        key=lambda first: crossing_bytes[first + period],
    )
    last = first + (stop - first) // period * period
    blocks = _blocks(equations[:first])
    for position in range(first, last, period):
        blocks.append(equations[position : position + period])
    return blocks + _blocks(equations[last:])


class _Stretch(NamedTuple):
    """A stretch of repeated equations: its period, and its start and end."""

    period: int
    start: int
    stop: int


def _repeated(equations: Sequence[jex.JaxprEqn]) -> _Stretch:
    """The longest stretch of repeated equations with products; zeros if nothing is
    repeated.
    """
    kinds = [_kind(equation) for equation in equations]
    numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
    codes = np.array([numbers[kind] for kind in kinds], dtype=np.int64)
    products = [
        position
        for position, equation in enumerate(equations)
        if has_products(equation)
    ]
    periods: set[int] = set()
    first_positions: dict[int, int] = {}
    for position in products:
        code = int(codes[position])
        first_position = first_positions.setdefault(code, position)
        periods.add(position - first_position)
    periods.discard(0)

    longest = _Stretch(period=0, start=0, stop=0)
    for period in sorted(periods)[:_MOST_PERIODS]:
        start, length = _longest_run(codes[:-period] == codes[period:])
        stop = start + length + period
        has_product = any(start <= position < stop for position in products)
        if length < period or not has_product:
            continue
        # A multiple of a period repeats as much as the period does.
        if stop - start > 1.1 * (longest.stop - longest.start):
            longest = _Stretch(period=period, start=start, stop=stop)
    return longest


def _kind(equation: jex.JaxprEqn) -> tuple[Any, ...]:
    frame = own_line(frames_of(equation))
    shapes = tuple(str(var.aval) for var in equation.outvars)
    return equation.primitive.name, place_text(frame), shapes


def _longest_run(is_equal: np.ndarray) -> tuple[int, int]:
    """The start and the length of the longest run of true entries."""
    with_ends = np.concatenate([[0], is_equal, [0]])
    edges = np.flatnonzero(np.diff(with_ends))
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
    makers: dict[Any, int] = {}
    last_readers: dict[Any, int] = {}
    for position, equation in enumerate(equations):
        makers.update(dict.fromkeys(equation.outvars, position))
        operands = filter(_is_var, equation.invars)
        last_readers.update(dict.fromkeys(operands, position))
    changes = [0] * (len(equations) + 2)
    for var, position in makers.items():
        nbytes = bytes_of_var(var)
        changes[position + 1] += nbytes
        changes[last_readers.get(var, position) + 1] -= nbytes
    return list(itertools.accumulate(changes))


def bytes_of_var(var: Any) -> int:
    shape = getattr(var.aval, "shape", ())
    dtype = getattr(var.aval, "dtype", None)
    return math.prod(shape) * getattr(dtype, "itemsize", 0)

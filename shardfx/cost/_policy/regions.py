"""The regions of a loss: the bodies of its scans, its unrolled blocks, and the stretches
of equations before, between and behind them.

Each region is checkpointed alone, so its inputs are always kept. A body is the jaxpr of
one iteration of a scan.
"""

import collections
import functools as ft
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.extend.core as jex
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
    retraced,
    structs_like,
    typed_struct_of,
    unwrapped,
)
from .work import SCANS, dependent, has_products, is_var, work_of


_USERS_CHECKPOINTS = ("checkpoint", "remat", "remat2")
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
    number: int = 0

    @property
    def name(self) -> str:
        """The name that `checkpoint_name` gives the value."""
        array = array_text(self.dtype, self.shape)
        return f"{self.line} {self.operation} {array} #{self.number}"


class Region(NamedTuple):
    """Equations that are checkpointed together.

    - `invars`, `outvars`: the values that they read, and those that others read of
      them.
    - `jaxpr`: the equations.
    - `is_body`: whether they are the whole body of a scan.
    - `keys`: the keys of each equation's results, by the equation's id.
    """

    invars: Sequence[Any]
    outvars: Sequence[Any]
    jaxpr: jex.Jaxpr
    is_body: bool
    keys: Mapping[int, tuple[ValueKey, ...]]

    @property
    def all_keys(self) -> Iterator[ValueKey]:
        """The keys of all values, in the order in which they are computed."""
        return itertools.chain.from_iterable(self.keys.values())

    def named(
        self,
        args: Sequence[Any],
        is_named: Callable[[ValueKey], bool],
    ) -> list[Any]:
        """The results of the region for inputs `args`. `checkpoint_name` names the
        values whose keys `is_named` accepts.
        """

        def rule(jaxpr: Any, equation: Any, operands: list[Any]) -> list[Any]:
            results = applied(jaxpr, equation, operands)
            for number, key in enumerate(self.keys[id(equation)]):
                if is_named(key):
                    results[number] = checkpoint_name(results[number], key.name)
            return results

        return evaluated(self.jaxpr, (), args, rule)


class Loop(NamedTuple):
    """A scan, with the values that it reads and returns, and its divided body."""

    invars: Sequence[Any]
    outvars: Sequence[Any]
    scan: jex.JaxprEqn
    body: "Program"


class Placed(NamedTuple):
    """A region, the number of times that it runs, and which inputs are
    differentiated.
    """

    region: Region
    run_count: int
    active: tuple[bool, ...]


class Program(NamedTuple):
    """A jaxpr, and the regions, loops and equations into which it is divided."""

    jaxpr: jex.Jaxpr
    parts: tuple[Any, ...]

    def placed(
        self,
        active: Sequence[bool] = (),
        run_count: int = 1,
    ) -> Iterator[Placed]:
        """Yields each region with the number of times that it runs, also those in the
        bodies of loops. `active` says which of the program's inputs are differentiated,
        and `run_count` how often the program itself runs.
        """
        reached = dependent(self.jaxpr, active)
        for part in self.parts:
            # Whether each input of the part is differentiated.
            flags = [is_var(atom) and atom in reached for atom in part.invars]
            if isinstance(part, Region):
                yield Placed(region=part, run_count=run_count, active=tuple(flags))
            elif isinstance(part, Loop):
                # A carried value is if the one that the loop returns is. A scan's inputs
                # are its constants, its carried values and its slices.
                const_count, carry_count = carry_of(part.scan)
                for position in range(carry_count):
                    flags[const_count + position] |= part.outvars[position] in reached
                body_run_count = run_count * part.scan.params["length"]
                yield from part.body.placed(flags, body_run_count)

    def left_alone(self) -> Iterator[jex.JaxprEqn]:
        """Yields the equations with products that no region contains."""
        for part in self.parts:
            if isinstance(part, Loop):
                yield from part.body.left_alone()
            elif not isinstance(part, Region) and has_products(part):
                yield part

    def results(
        self,
        consts: Sequence[Any],
        args: Sequence[Any],
        checkpointed: Callable[[Region], Any],
    ) -> list[Any]:
        """The results of the program for inputs `args` and constants `consts`.
        `checkpointed` makes a function of a region's inputs, which returns its outputs;
        it replaces each region.
        """

        def body(_: Any, consts: Sequence[Any], args: Sequence[Any], part: Any):
            return part.body.results(consts, args, checkpointed)

        def rule(_: Any, part: Any, operands: list[Any]) -> Sequence[Any]:
            if isinstance(part, Region):
                return checkpointed(part)(*operands)
            if isinstance(part, Loop):
                run = ft.partial(body, part=part)
                part = _with_body(part.scan, run)
            return applied(self.jaxpr, part, operands)

        # `evaluated` gives each part to `rule`, as if it were an equation.
        jaxpr_of_parts = self.jaxpr.replace(eqns=self.parts)
        return evaluated(jaxpr_of_parts, consts, args, rule)


def _with_body(scan: jex.JaxprEqn, run: Callable[..., Any]) -> jex.JaxprEqn:
    """A copy of a scan whose body is traced again as `run` evaluates it. `run` takes
    the body's jaxpr, its constants and its inputs.
    """
    body = retraced(scan.params["jaxpr"], run, typed_struct_of)
    return scan.replace(params={**scan.params, "jaxpr": body})


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
        """The result of the loss for the arrays of its arguments, with its regions as
        in `Program.results`. `checkpointed` makes the function of each region.
        """
        outputs = self.program.results(self.consts, arrays, checkpointed)
        filled = jax.tree.unflatten(jax.tree.structure(self.out), outputs)
        return eqx.combine(filled, self.rest)


def divided(loss: Callable[..., PyTree], args: PyTree) -> DividedLoss:
    """Traces a loss and divides it. `args` is a pair of its arguments and its keyword
    arguments.
    """
    positional, named = structs_like(args, typed=True)
    closed, out, rest = eqx.filter_make_jaxpr(unwrapped(loss))(*positional, **named)
    arrays = array_leaves((positional, named))
    whole = flat(closed.jaxpr, closed.consts, arrays)
    program = _program(whole.jaxpr, is_body=False)
    return DividedLoss(program=program, consts=whole.consts, out=out, rest=rest)


def flat(
    jaxpr: jex.Jaxpr,
    consts: Sequence[Any],
    args: Sequence[Any],
) -> jex.ClosedJaxpr:
    """The jaxpr with the programs of its calls (`jit`, `custom_jvp` and so on), and of
    calls in its scans, in place of the calls. Calls with shardings of their own stay.
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
        """The results of an equation in the program of `call`; outermost, it is `None`."""
        frame = own_line(frames_of(equation))
        if call is not None and (frame is None or is_library(frame)):
            # JAX traces its own functions once, without the lines that call them.
            equation = equation.replace(source_info=call.source_info)
        name = equation.primitive.name
        if name in CALLS and not _has_shardings(equation):
            return run(*opened(equation.params[CALLS[name]]), operands, equation)
        if name in SCANS:
            equation = _with_body(equation, run)
        return applied(jaxpr, equation, operands)

    return jax.make_jaxpr(lambda *args: run(jaxpr, consts, args))(*args)


def _has_shardings(call: jex.JaxprEqn) -> bool:
    """Whether a call of a jitted function says how its arguments or results lie."""
    for name in ("in_shardings", "out_shardings"):
        for sharding in call.params.get(name, ()):
            if isinstance(sharding, jax.sharding.Sharding):
                return True
    return False


def _program(jaxpr: jex.Jaxpr, *, is_body: bool) -> Program:
    """Divides a flat jaxpr: a loss, or the body of a scan (`is_body`).

    Scans with products are divided in turn, of a body only one that has most of its
    work. Checkpoints of the user and equations with effects stay alone. The equations
    between two such ones are a stretch, and become regions: in a loss one for each
    repeated block. `opened` gives the jaxpr of a closed one, with its constants.
    """
    works = [work_of(equation).flops for equation in jaxpr.eqns]
    parts: list[Any] = []
    stretch: list[jex.JaxprEqn] = []

    def end_stretch() -> None:
        blocks = [stretch.copy()] if is_body else _blocks(stretch.copy())
        parts.extend(filter(None, blocks))
        stretch.clear()

    # Whether one region takes all equations of a body.
    is_whole = is_body
    for equation, work in zip(jaxpr.eqns, works, strict=True):
        name = equation.primitive.name
        is_loop = name in SCANS and has_products(equation)
        if is_body:
            is_loop &= work > _MOST_WORK * sum(works)
        if not is_loop and name not in _USERS_CHECKPOINTS and not equation.effects:
            stretch.append(equation)
            continue
        is_whole = False
        end_stretch()
        if is_loop:
            inner, _ = opened(equation.params["jaxpr"])
            body = _program(inner, is_body=True)
            parts.append(
                Loop(
                    invars=equation.invars,
                    outvars=equation.outvars,
                    scan=equation,
                    body=body,
                )
            )
        else:
            parts.append(equation)
    end_stretch()
    return Program(jaxpr, tuple(_with_regions(jaxpr, parts, is_whole)))


def _with_regions(
    jaxpr: jex.Jaxpr,
    parts: Sequence[Any],
    is_whole: bool,
) -> Iterator[Region | Loop | jex.JaxprEqn]:
    """Yields the parts of a program; a part that is a list of equations becomes a
    region. If the region `is_whole`, the only part, all inputs of the program are its
    inputs, read or not. `_operands` has the variables that a part reads, as the keys of
    a dict.
    """
    operands_of_parts = [_operands(part) for part in parts]
    # How many of the parts that follow, with the program's end, read each value.
    reader_counts = collections.Counter(filter(is_var, jaxpr.outvars))
    reader_counts.update(itertools.chain.from_iterable(operands_of_parts))
    for part, operands in zip(parts, operands_of_parts, strict=True):
        reader_counts.subtract(operands.keys())
        if not isinstance(part, list):
            yield part
            continue
        results = _results(part)
        inputs = [*jaxpr.constvars, *jaxpr.invars]
        if not is_whole:
            inputs = list(itertools.filterfalse(set(results).__contains__, operands))
        outputs = [var for var in results if reader_counts[var]]
        region = jaxpr.replace(
            constvars=[],
            invars=inputs,
            outvars=outputs,
            eqns=part,
            debug_info=jaxpr.debug_info.with_unknown_names(),
        )
        yield Region(
            invars=inputs,
            outvars=outputs,
            jaxpr=region,
            is_body=is_whole,
            keys=_keys(part),
        )


def _operands(part: Any) -> dict[Any, None]:
    """The variables that an equation, or a list of them, reads."""
    equations = part if isinstance(part, list) else [part]
    read = itertools.chain.from_iterable(equation.invars for equation in equations)
    return dict.fromkeys(filter(is_var, read))


def _results(equations: Sequence[jex.JaxprEqn]) -> list[Any]:
    """The variables that equations compute."""
    return list(
        itertools.chain.from_iterable(equation.outvars for equation in equations)
    )


def _keys(equations: Sequence[jex.JaxprEqn]) -> dict[int, tuple[ValueKey, ...]]:
    """The keys of each equation's results, by the equation's id. Values that are alike
    in all but their number are numbered in order.
    """
    counts: collections.Counter[str] = collections.Counter()
    keys = {}
    for equation in equations:
        numbered = []
        for key in _unnumbered(equation):
            numbered.append(key._replace(number=counts[key.name]))
            counts[key.name] += 1
        keys[id(equation)] = tuple(numbered)
    return keys


def _unnumbered(equation: jex.JaxprEqn) -> tuple[ValueKey, ...]:
    """The keys of an equation's results, with 0 as their numbers."""
    line = "-"
    function = ""
    frame = own_line(frames_of(equation))
    if frame is not None:
        line = frame.place
        function = frame.function
    keys = []
    for var in equation.outvars:
        shape = tuple(getattr(var.aval, "shape", ()))
        dtype = str(getattr(var.aval, "dtype", ""))
        keys.append(
            ValueKey(
                line=line,
                function=function,
                operation=equation.primitive.name,
                shape=shape,
                dtype=dtype,
            )
        )
    return tuple(keys)


def _blocks(equations: list[jex.JaxprEqn]) -> list[list[jex.JaxprEqn]]:
    """Divides equations into their repeated blocks, such as the layers of a model, and
    the stretches before and behind them.
    """
    period, start, stop = _repeated(equations)
    if not period:
        return [equations]
    # The blocks can begin at any equation of the first period. They begin where the
    # fewest bytes cross.
    phase_count = min(period, stop - start - 2 * period + 1)
    first = min(
        range(start, start + phase_count),
        key=lambda first: _crossing_bytes(equations, first + period),
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
    kinds = list(map(_unnumbered, equations))
    numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
    # Equal equations have equal codes.
    codes = [numbers[kind] for kind in kinds]
    products = [
        position
        for position, equation in enumerate(equations)
        if has_products(equation)
    ]
    # Periods to try: the distances of products from the first one equal to them.
    first_positions: dict[int, int] = {}
    periods: set[int] = set()
    for position in products:
        first_position = first_positions.setdefault(codes[position], position)
        periods.add(position - first_position)
    periods.discard(0)

    longest = _Stretch(period=0, start=0, stop=0)
    for period in sorted(periods)[:_MOST_PERIODS]:
        start = 0
        # For each equation, whether the one a period later is equal.
        is_repeated = map(operator.eq, codes, codes[period:])
        for is_equal, run in itertools.groupby(is_repeated):
            length = len(list(run))
            stop = start + length + period
            has_product = any(start <= position < stop for position in products)
            # A multiple of a period repeats as much as the period does.
            is_longer = stop - start > 1.1 * (longest.stop - longest.start)
            if is_equal and length >= period and has_product and is_longer:
                longest = _Stretch(period=period, start=start, stop=stop)
            start += length
    return longest


def _crossing_bytes(equations: list[jex.JaxprEqn], position: int) -> int:
    """The bytes of values that equations before a position compute and later ones
    read.
    """
    read = _operands(equations[position:])
    crossing_bytes = 0
    for var in _results(equations[:position]):
        if var in read:
            aval: Any = var.aval
            crossing_bytes += math.prod(aval.shape) * aval.dtype.itemsize
    return crossing_bytes

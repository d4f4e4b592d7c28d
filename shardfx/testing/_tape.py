"""Evaluates the jaxpr of a step equation by equation, under its plan or on one device,
and records each result.
"""

import contextlib
import functools as ft
import itertools as it
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from .._ground.errors import ProgramError
from .._ground.spec import DType
from .._step import (
    CALLS,
    MARKED_CALLS,
    Frame,
    applied,
    carry_of,
    evaluated,
    frames_of,
    is_library,
    manual_axes_of,
    opened,
    place_text,
    retraced,
)


# Equations whose programs are inlined, with the parameter that holds the program.
_INLINED = {**CALLS, **MARKED_CALLS}
# These set shardings and change no values.
_LAYOUTS = ("sharding_constraint", "reshard", "mesh_cast", "device_put")
# These do not round.
_EXACT = frozenset(
    """abs and argmax argmin broadcast_in_dim ceil clamp concatenate copy copy_p cummax cummin dynamic_slice
    dynamic_update_slice eq floor gather ge gt iota is_finite le lt max min ne neg not or pad all_gather all_to_all
    ppermute pvary pcast reduce_and reduce_max reduce_min reduce_or reduce_precision reshape rev round select_n sign
    slice sort split squeeze stop_gradient top_k transpose pmax pmin pgather stop_gradient reduce_window_max""".split()
)
Arrays: TypeAlias = Sequence[Any]
# For each array, the index in `Tape.records` of the record of the equation that made
# it. It is negative if no equation made the array: an argument, a literal or a
# constant.
Numbers: TypeAlias = Sequence[int]
Made: TypeAlias = tuple[Arrays, Numbers]
# The name of the records for the values with which an iteration of a loop starts.
CARRY = "carry"
# These operate on the bits of their dtype.
_BITS = (
    "bitcast_convert_type random_bits rng_bit_generator random_gamma pallas_call"
    " ffi_call pure_callback".split()
)


class _Numbered(NamedTuple):
    """An array with its number."""

    array: Any
    number: int


class Record(NamedTuple):
    """One result of an equation of a step that was evaluated. Its number is its index
    in `Tape.records`.

    - `primitive`: JAX's name for the equation's primitive, or "carry" for a value with
      which a loop iteration starts.
    - `frames`: the source lines of the user, the innermost first.
    - `reads`: the numbers of the operands.
    - `leading`: an entry for each leading dimension that the loops and `shard_map`s
      around the equation add to its
        result. The entry of a loop is 1, or -1 if it runs backwards; its dimension has
        the iterations. The entry of a `shard_map` has its mesh axes and their sizes;
        its dimension stacks the devices' results. For a loop in a `shard_map` over 4
        devices of "x": `((("x", 4),), 1)`.
    - `dtype`: the dtype of the result in the step.
    - `loop`: the number of the first record in the outermost loop around the equation;
      `None` outside of loops.
    - `axes`: the mesh axes of a collective; empty for other primitives.
    - `counted`: for an `iota`, the size of the dimension that it counts; else 0.
    """

    primitive: str
    frames: tuple[Frame, ...]
    reads: Numbers
    leading: tuple[tuple[tuple[str, int], ...] | int, ...]
    dtype: DType
    loop: int | None = None
    axes: frozenset[str] = frozenset()
    counted: int = 0


class ShardMapBody(NamedTuple):
    """A `shard_map` of a step that was evaluated.

    - `equation`: the `shard_map` itself.
    - `reads`, `results`: the numbers of its operands and results.
    - `numbers`: the numbers of the records inside of it.
    """

    equation: jex.JaxprEqn
    reads: Numbers
    results: Numbers
    numbers: range


class Tape:
    """Evaluates a jaxpr and records the result of each equation.

    `records` gets a `Record` for each result, whose number is its index there. `values`
    has the results by number. An array that no equation made has a negative number.
    Methods that evaluate one equation take its operands `ins`, with their numbers
    `reads`, and return the results with their numbers.

    **Arguments:**

    - `alone`: whether to evaluate on one device, without shardings.
    - `wide`: the dtype to which narrower floats are cast, from the arguments on.
    - `noise`: the rounding of each equation's result, as two numbers. The first is 0
      for no rounding, 1 for rounding to
        the dtype of the step, and 2 for rounding to the wider of that dtype and
        float32. The second is odd, and decides which results are rounded up. Needs
        `wide=np.float64`.
    """

    def __init__(self, *, alone: bool, wide: DType = None, noise: Any = None):
        self.alone, self.wide, self.noise = alone, wide, noise
        self.records: list[Record] = []
        self.values: dict[int, Any] = {}
        self.frames: tuple[Frame, ...] = ()
        self.bodies: list[ShardMapBody] = []
        self.carried: dict[int, int] = {}
        self.count = it.count(-2, -1)

    def run(self, jaxpr: jex.Jaxpr, consts: Arrays, args: Arrays, ids: Numbers) -> Made:
        """Evaluates a jaxpr and returns its results with their numbers.

        `ids` are the numbers of `args`, and `consts` the values of the jaxpr's
        constants.
        """
        outer_frames = self.frames
        entered = {
            **dict.fromkeys(_INLINED, self.inlined),
            "custom_linear_solve": self.solved,
            "scan": self.scan,
            "while": self.loop,
            "cond": self.branch,
            "shard_map": self.shard_map,
        }

        def rule(
            jaxpr: jex.Jaxpr, equation: jex.JaxprEqn, operands: list[_Numbered]
        ) -> list[_Numbered]:
            user_frames = [
                frame for frame in frames_of(equation) if not is_library(frame)
            ]
            self.frames = tuple(user_frames) or outer_frames
            ins = [operand.array for operand in operands]
            reads = [operand.number for operand in operands]
            if equation.primitive.name in entered:
                outs, numbers = entered[equation.primitive.name](equation, ins, reads)
            else:
                outs = self.applied(jaxpr, equation, ins)
                numbers = self.all_kept(equation, outs, reads)
                outs = [
                    self.values.get(number, out)
                    for number, out in zip(numbers, outs, strict=True)
                ]
            return list(map(_Numbered, outs, numbers))

        constants = map(_Numbered, map(self.widened, consts), self.unknown(consts))
        results = evaluated(
            jaxpr,
            list(constants),
            list(map(_Numbered, args, ids)),
            rule,
            lambda literal: _Numbered(self.literal(literal), -1),
        )
        self.frames = outer_frames
        return (
            [result.array for result in results],
            [result.number for result in results],
        )

    def literal(self, atom: Any) -> Any:
        """The value of a literal in the jaxpr, cast to `wide` if it is a narrower
        float.
        """
        is_own = self.wide is None
        return (
            atom.val
            if is_own
            else jnp.asarray(np.asarray(atom.val), _wider(atom.aval.dtype, self.wide))
        )

    def unknown(self, arrays: Sequence[object]) -> list[int]:
        """Returns new negative numbers for `arrays`, which no equation made."""
        return [next(self.count) for _ in arrays]

    def kept(
        self,
        name: str,
        var: Any,
        out: Any,
        reads: Numbers,
        axes: frozenset[str] = frozenset(),
        counted: int = 0,
    ) -> int:
        """Adds a record for an equation's result and returns its number.

        If the result is a PRNG key, it adds no record and returns the largest number in
        `reads`. `name` is the name of the equation's primitive. `var` is the variable
        of the result in the jaxpr, and `out` its value. `reads`, `axes` and `counted`
        become fields of the record.
        """
        if jnp.issubdtype(out.dtype, jax.dtypes.extended):
            return max(reads, default=-1)  # a PRNG key
        number = len(self.records)
        self.records.append(
            Record(
                name,
                self.frames,
                (*reads,),
                (),
                var.aval.dtype,
                axes=axes,
                counted=counted,
            )
        )
        if (
            self.alone or not jax.typeof(out).sharding.spec.unreduced
        ):  # no device has the value of an incomplete sum
            noise = self.noise
            self.values[number] = (
                out
                if noise is None or name in _EXACT
                else _rounded(out, var.aval.dtype, *noise)
            )
        return number

    def all_kept(
        self, equation: jex.JaxprEqn, outs: Arrays, reads: Numbers
    ) -> list[int]:
        name, params = equation.primitive.name, equation.params
        axes = params.get("axes", params.get("axis_name", ()))
        named = frozenset(
            one
            for one in (axes if isinstance(axes, tuple) else (axes,))
            if isinstance(one, str)
        )
        counted = params["shape"][params["dimension"]] if name == "iota" else 0
        pairs = zip(equation.outvars, outs, strict=True)
        return [self.kept(name, var, out, reads, named, counted) for var, out in pairs]

    def widened(self, array: Any) -> Any:
        """`array`, cast to `wide` if it has narrower floats."""
        if self.wide is None or jnp.issubdtype(array.dtype, jax.dtypes.extended):
            return array
        return jnp.asarray(array, _wider(array.dtype, self.wide))

    def applied(self, jaxpr: jex.Jaxpr, equation: jex.JaxprEqn, ins: Arrays) -> Arrays:
        """Evaluates one equation of `jaxpr` with the operands `ins`.

        With `wide`, the equation computes in wider dtypes. If it cannot, it computes in
        its own dtypes, and the results are cast.
        """
        if self.wide is None:
            return self.bound(jaxpr, equation, ins)
        pairs: list[tuple[Any, Any]] = [
            *zip(map(jnp.asarray, ins), equation.invars, strict=True)
        ]
        if equation.primitive.name not in _BITS:
            # Some equations have a fixed dtype and refuse a wider one. Other errors are
            # raised again below.
            with contextlib.suppress(TypeError, ValueError, NotImplementedError):
                params = {key: self.param(one) for key, one in equation.params.items()}
                invars = [
                    jex.Literal(one, var.aval) if isinstance(var, jex.Literal) else var
                    for one, var in pairs
                ]
                return self.bound(
                    jaxpr, equation.replace(params=params, invars=invars), ins
                )
        own = [
            one.astype(var.aval.dtype) if jnp.issubdtype(one.dtype, np.inexact) else one
            for one, var in pairs
        ]
        return [self.widened(out) for out in self.bound(jaxpr, equation, own)]

    def param(self, param: Any) -> Any:
        """A parameter of an equation. If it is a dtype or a jaxpr, `wide` replaces the
        narrower float dtypes in it.
        """
        if isinstance(param, jex.ClosedJaxpr | jex.Jaxpr):
            inner = Tape(alone=self.alone, wide=self.wide)
            return retraced(
                param,
                lambda jaxpr, consts, args: inner.run(
                    jaxpr, consts, args, [-1] * len(args)
                )[0],
                ft.partial(_wider, wide=self.wide),
            )
        is_dtype = isinstance(param, np.dtype) or (
            isinstance(param, type) and issubclass(param, np.generic)
        )
        return _wider(np.dtype(param), self.wide) if is_dtype else param

    def bound(self, jaxpr: jex.Jaxpr, equation: jex.JaxprEqn, ins: Arrays) -> Arrays:
        if not self.alone:
            return applied(jaxpr, equation, ins)
        if equation.primitive.name in _LAYOUTS:
            return ins
        params = {
            key: None if isinstance(one, NamedSharding) else one
            for key, one in equation.params.items()
        }
        # Without the mesh of the trace.
        context = jax.make_jaxpr(jnp.sin)(0.0).jaxpr.eqns[0].ctx
        return applied(jaxpr, equation.replace(params=params, ctx=context), ins)

    def inlined(self, equation: jex.JaxprEqn, ins: Arrays, reads: Numbers) -> Made:
        params = equation.params
        program = opened(params[_INLINED[equation.primitive.name]])
        outs, ids = self.run(
            *program, self.placed(ins, params.get("in_shardings", ())), reads
        )
        return self.placed(outs, params.get("out_shardings", ())), ids

    def placed(self, arrays: Arrays, asked: Sequence[Any]) -> Arrays:
        """`arrays` with the shardings `asked`, the `in_shardings` or `out_shardings` of
        a `jax.jit` in the step.
        """
        if self.alone:
            return arrays
        return [
            (
                jax.lax.with_sharding_constraint(one, own)
                if isinstance(own, NamedSharding)
                and {*own.mesh.axis_types} == {AxisType.Auto}
                else one
            )
            for one, own in it.zip_longest(arrays, asked)
        ]

    def solved(self, equation: jex.JaxprEqn, ins: Arrays, reads: Numbers) -> Made:
        """Evaluates a `custom_linear_solve` by its jaxpr `solve`. Its other jaxprs, for
        derivatives, are not needed.
        """
        lengths, solve = (
            equation.params["const_lengths"],
            equation.params["jaxprs"].solve,
        )
        first = lengths.matvec + lengths.vecmat
        own = [*range(first, first + lengths.solve), *range(sum(lengths), len(ins))]
        return self.run(
            *opened(solve), [ins[at] for at in own], [reads[at] for at in own]
        )

    @contextlib.contextmanager
    def within(self, start: int) -> Iterator[dict[int, Any]]:
        """A context in which the inner jaxpr of a loop or `shard_map` is evaluated.

        Its value is a dict of the inner results, which the loop or `shard_map` must
        return, because they are tracers. `start` is the number of the first inner
        record. JAX may trace the inner jaxpr several times, so entering the context
        deletes all records from `start` on.
        """
        del self.records[start:]
        outer, self.values = self.values, {}
        yield self.values
        self.values = outer

    def held(self, start: int, values: dict[int, Any], leading: object) -> None:
        """Stores `values`, the results inside of a loop or `shard_map` by number. Their
        records begin at `start`.

        The loop or `shard_map` has added a dimension to each result. `leading` is its
        entry in `Record.leading`.
        """
        self.values.update(values)
        for at in range(start, len(self.records)):
            one = self.records[at]
            loop = start if isinstance(leading, int) else one.loop
            self.records[at] = one._replace(leading=(leading, *one.leading), loop=loop)

    def scan(self, equation: jex.JaxprEqn, ins: Arrays, reads: Numbers) -> Made:
        params, start, ids = equation.params, len(self.records), []
        first, carried = carry_of(equation)
        middle = first + carried
        jaxpr, consts = opened(params["jaxpr"])

        def turn(carry: Arrays, xs: Arrays) -> tuple[Arrays, Any]:
            with self.within(start) as found:
                own = zip(
                    jaxpr.invars[first:middle], carry, reads[first:middle], strict=True
                )
                begun = [self.kept(CARRY, var, one, [read]) for var, one, read in own]
                numbers = [*reads[:first], *begun, *reads[middle:]]
                outs, ids[:] = self.run(
                    jaxpr, consts, [*ins[:first], *carry, *xs], numbers
                )
                self.carried.update(zip(begun, ids, strict=False))
            return _like(outs[:carried], carry), (outs[carried:], found)

        with contextlib.nullcontext() if self.alone else equation.ctx.manager:
            carry, (ys, found) = jax.lax.scan(
                turn,
                [*ins[first:middle]],
                [*ins[middle:]],
                length=params["length"],
                reverse=params["reverse"],
            )
        self.held(start, found, -1 if params["reverse"] else 1)
        return [*carry, *ys], ids

    def forgotten(self, closed: object, *args: object) -> Arrays:
        """Evaluates the ClosedJaxpr `closed` with `args`, without records."""
        start = len(self.records)
        with self.within(start):
            outs = self.run(*opened(closed), args, [-1] * len(args))[0]
        del self.records[start:]
        return outs

    def loop(self, equation: jex.JaxprEqn, ins: Arrays, reads: Numbers) -> Made:
        """Evaluates a `while` loop, with records only for its results."""
        params = equation.params
        one, two = (
            params["cond_nconsts"],
            params["cond_nconsts"] + params["body_nconsts"],
        )
        outs = jax.lax.while_loop(
            lambda carry: self.forgotten(params["cond_jaxpr"], *ins[:one], *carry)[0],
            lambda carry: _like(
                self.forgotten(params["body_jaxpr"], *ins[one:two], *carry), carry
            ),
            ins[two:],
        )
        return outs, self.all_kept(equation, outs, reads)

    def branch(self, equation: jex.JaxprEqn, ins: Arrays, reads: Numbers) -> Made:
        """Evaluates a `cond`, with records only for its results."""
        branches = [
            ft.partial(self.forgotten, one) for one in equation.params["branches"]
        ]
        outs = jax.lax.switch(ins[0], branches, *ins[1:])
        return outs, self.all_kept(equation, outs, reads)

    def shard_map(self, equation: jex.JaxprEqn, ins: Arrays, reads: Numbers) -> Made:
        params, start, ids = equation.params, len(self.records), []
        mesh = params["mesh"]
        names = manual_axes_of(equation)
        if self.alone and mesh.size > 1:
            place = place_text(next(iter(self.frames), None))
            raise ProgramError(
                f"a `shard_map` at {place} is over a mesh of {mesh.size} devices, so"
                " the step has no form for one device. Pass the same step in plain"
                " JAX, `reference=`; or a function of the mesh that returns the step,"
                " with the mesh: `check_step(make_step, *args, mesh=mesh)`."
            )

        def body(*args: object) -> Any:
            with self.within(start) as found:
                outs, ids[:] = self.run(*opened(params["jaxpr"]), args, reads)
            return outs, {at: one[None] for at, one in found.items()}

        out_specs = [*params["out_specs"]], PartitionSpec(names)
        check = params["check_vma"]
        own = jax.shard_map(
            body,
            mesh=mesh,
            in_specs=params["in_specs"],
            out_specs=out_specs,
            axis_names={*names},
            check_vma=check,
        )
        with contextlib.nullcontext() if self.alone else equation.ctx.manager:
            outs, found = own(*ins)
        self.held(start, found, tuple((name, mesh.shape[name]) for name in names))
        self.bodies.append(
            ShardMapBody(equation, reads, ids, range(start, len(self.records)))
        )
        return outs, ids


def _wider(dtype: DType, wide: DType) -> DType:
    """The float dtype `wide` if `dtype` is a narrower float, else `dtype`. With a
    `wide` of 64 bits, complex64 becomes complex128.
    """
    if jnp.issubdtype(dtype, np.complexfloating):
        return np.dtype(np.complex128) if np.dtype(wide).itemsize == 8 else dtype
    is_narrow = (
        jnp.issubdtype(dtype, np.floating)
        and jnp.finfo(dtype).bits < jnp.finfo(wide).bits
    )
    return np.dtype(wide) if is_narrow else dtype


def _like(arrays: Arrays, others: Arrays) -> Arrays:
    return [
        array.astype(other.dtype) for array, other in zip(arrays, others, strict=True)
    ]


def _rounded(array: Any, dtype: DType, kind: Any, odd: Any) -> Any:
    """A float64 `array` rounded to the numbers of a narrower dtype. Numbers of that
    dtype do not change.

    With `kind` 0 nothing is rounded, with 1 the numbers are rounded to `dtype`, and
    with 2 to the wider of `dtype` and float32. The bits of a number times the odd
    number `odd` decide whether it is rounded up or down.
    """
    if not jnp.issubdtype(dtype, np.floating):
        return array
    own = jnp.finfo(dtype if jnp.finfo(dtype).bits >= 16 else jnp.bfloat16)
    bits = jax.lax.bitcast_convert_type(array, np.uint64) * odd >> np.uint64(63)
    is_narrow = own.bits < 32
    for to, is_on in (
        [(own, kind == 1), (jnp.finfo(np.float32), kind == 2)]
        if is_narrow
        else [(own, kind > 0)]
    ):
        moved = array * (1.0 + (bits.astype(np.float64) - 0.5) * float(to.eps))
        near, moved = (
            jax.lax.reduce_precision(one, to.nexp, to.nmant) for one in (array, moved)
        )
        array = jnp.where(is_on & ((near != array) | (to.bits == 64)), moved, array)
    return array

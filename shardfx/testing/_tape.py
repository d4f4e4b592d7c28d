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
from .._ground.keys import is_key
from .._ground.spec import DType
from .._step import (
    CALLS,
    MARKED_CALLS,
    Frame,
    applied,
    auto_twin,
    carry_of,
    evaluated,
    frames_of,
    is_library,
    manual_axes_of,
    opened,
    place_text,
    retraced,
    struct_of,
)
from ._records import CARRY, Numbers, Record, ShardMapBody, is_rough, key_of
from ._rounding import EXACT, OF_BITS, Noise, rounded, wider, with_dtypes_of
from ._sums import reordered


# Equations whose programs are inlined, with the parameter that holds the program.
_INLINED = {**CALLS, **MARKED_CALLS}
# These set shardings and change no values.
_LAYOUTS = ("sharding_constraint", "reshard", "mesh_cast", "device_put")
Arrays: TypeAlias = Sequence[Any]
# The results of equations, with their numbers.
Results: TypeAlias = tuple[Arrays, Numbers]


class _Numbered(NamedTuple):
    """An array with its number."""

    array: Any
    number: int


class Tape:
    """Evaluates a jaxpr and records the result of each equation.

    `records` gets a `Record` for each result, whose number is its index there. `values`
    has the results by number. An array that no equation made has a negative number.
    Methods that evaluate one equation take its operands `ins`, with their numbers
    `reads`, and return the results with their numbers.

    **Arguments:**

    - `alone`: whether to evaluate on one device, without shardings.
    - `wide`: the dtype to which narrower floats are cast, from the arguments on.
    - `noise`: the rounding of each equation's result. Needs `wide=np.float64`.
    - `reorders_sums`: whether a rounded sum also has the error of another order of its
      summands.
    """

    def __init__(
        self,
        *,
        alone: bool,
        wide: DType = None,
        noise: Noise | None = None,
        reorders_sums: bool = False,
    ):
        """The arguments are those of the class; `run` fills the rest."""
        self.alone = alone
        self.wide = wide
        self.noise = noise
        self.reorders_sums = reorders_sums
        self.records: list[Record] = []
        self.values: dict[int, Any] = {}
        # The user's source lines of the equation that is evaluated.
        self.frames: tuple[Frame, ...] = ()
        self.bodies: list[ShardMapBody] = []
        # For each carried value of a loop's iteration, what the iteration makes of it.
        self.carry_results: dict[int, int] = {}
        self.new_number = it.count(-2, -1)
        # The constants of jaxprs with their numbers, by the constants' ids. A function
        # that is evaluated again has the same constants.
        self.constants: dict[int, _Numbered] = {}
        # The contexts of equations, by the meshes over which they are evaluated.
        self.contexts: dict[Any, Any] = {}

    def run(
        self,
        jaxpr: jex.Jaxpr,
        consts: Arrays,
        args: Arrays,
        numbers: Numbers,
    ) -> Results:
        """Evaluates a jaxpr and returns its results with their numbers. The number of
        an array is that of the record of the equation that made it; negative for none.

        `numbers` are those of `args`, and `consts` the values of the jaxpr's constants.
        """
        outer_frames = self.frames
        inner_evaluators = {
            **dict.fromkeys(_INLINED, self.inlined),
            "custom_linear_solve": self.linear_solve,
            "scan": self.scan,
            "while": self.loop,
            "cond": self.branch,
            "shard_map": self.shard_map,
        }

        def rule(
            jaxpr: jex.Jaxpr,
            equation: jex.JaxprEqn,
            operands: list[_Numbered],
        ) -> list[_Numbered]:
            """Evaluates one equation: the results with their numbers."""
            frames = frames_of(equation)
            user_frames = [frame for frame in frames if not is_library(frame)]
            self.frames = tuple(user_frames) or outer_frames
            arrays = [operand.array for operand in operands]
            reads = [operand.number for operand in operands]
            evaluate_inner = inner_evaluators.get(equation.primitive.name)
            if evaluate_inner is not None:
                return list(map(_Numbered, *evaluate_inner(equation, arrays, reads)))
            outs = self.applied(jaxpr, equation, arrays)
            if self.noise is not None and self.reorders_sums:
                outs = self.reordered(jaxpr, equation, arrays, reads, outs)
            results = []
            out_numbers = self.recorded_results(equation, outs, reads)
            for number, out in zip(out_numbers, outs, strict=True):
                if not is_key(out.dtype):
                    # The rounded result. A PRNG key has the number of an operand.
                    out = self.values.get(number, out)
                results.append(_Numbered(out, number))
            return results

        # `evaluated` calls `rule` for each equation, in order.
        constants = map(
            _Numbered, map(self.widened, consts), map(self.number_of_constant, consts)
        )
        results = evaluated(
            jaxpr=jaxpr,
            consts=list(constants),
            args=list(map(_Numbered, args, numbers)),
            rule=rule,
            literal=lambda literal: _Numbered(self.literal(literal), -1),
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
        if self.wide is None:
            return atom.val
        return jnp.asarray(np.asarray(atom.val), wider(atom.aval.dtype, self.wide))

    def new_numbers(self, arrays: Sequence[object]) -> list[int]:
        """Returns new negative numbers for `arrays`, which no equation made."""
        return [next(self.new_number) for _ in arrays]

    def number_of_constant(self, constant: Any) -> int:
        """The negative number of a jaxpr's constant."""
        if id(constant) not in self.constants:
            numbered = _Numbered(constant, next(self.new_number))
            self.constants[id(constant)] = numbered
        return self.constants[id(constant)].number

    def recorded(
        self,
        name: str,
        var: Any,
        out: Any,
        reads: Numbers,
        key: int,
        axes: frozenset[str] = frozenset(),
        counted: int = 0,
    ) -> int:
        """Adds a record for an equation's result and returns its number.

        If the result is a PRNG key, it adds no record and returns the largest number in
        `reads`. `name` is the name of the equation's primitive. `var` is the variable
        of the result in the jaxpr, and `out` its value. `reads` are the numbers of the
        operands, `key` is that of `key_of`, `axes` are the mesh axes of a collective,
        and `counted` is the size of the dimension that an `iota` counts.
        """
        if is_key(out.dtype):
            return max(reads, default=-1)
        number = len(self.records)
        record = Record(
            primitive=name,
            frames=self.frames,
            reads=tuple(reads),
            leading=(),
            dtype=var.aval.dtype,
            key=key,
            is_rough=is_rough(name, var.aval.dtype, reads, self.records),
            axes=axes,
            counted=counted,
        )
        self.records.append(record)
        # No device has the value of an incomplete sum.
        if self.alone or not jax.typeof(out).sharding.spec.unreduced:
            if self.noise is not None and name not in EXACT:
                out = rounded(out, var.aval.dtype, self.noise.of_equation(key))
            self.values[number] = out
        return number

    def recorded_results(
        self,
        equation: jex.JaxprEqn,
        outs: Arrays,
        reads: Numbers,
    ) -> list[int]:
        """Adds a record for each result of an equation, and returns their numbers."""
        name = equation.primitive.name
        params = equation.params
        axes = params.get("axes", params.get("axis_name", ()))
        if not isinstance(axes, tuple):
            axes = (axes,)
        mesh_axes = frozenset(axis for axis in axes if isinstance(axis, str))
        counted = 0
        if name == "iota":
            counted = params["shape"][params["dimension"]]
        key = key_of(name, params, reads, self.records)
        numbers = []
        for var, out in zip(equation.outvars, outs, strict=True):
            number = self.recorded(
                name=name,
                var=var,
                out=out,
                reads=reads,
                key=key,
                axes=mesh_axes,
                counted=counted,
            )
            numbers.append(number)
        return numbers

    def widened(self, array: Any) -> Any:
        """`array`, cast to `wide` if it has narrower floats."""
        if self.wide is None or jnp.issubdtype(array.dtype, jax.dtypes.extended):
            return array
        return jnp.asarray(array, wider(array.dtype, self.wide))

    def applied(self, jaxpr: jex.Jaxpr, equation: jex.JaxprEqn, ins: Arrays) -> Arrays:
        """Evaluates one equation of `jaxpr` with the operands `ins`.

        With `wide`, the equation computes in wider dtypes. If it cannot, it computes in
        its own dtypes, and the results are cast.
        """
        if self.wide is None:
            return self.applied_as_is(jaxpr, equation, ins)
        arrays: list[Any] = list(map(jnp.asarray, ins))
        if equation.primitive.name not in OF_BITS:
            # Some equations have a fixed dtype and refuse a wider one, with one of
            # these errors of JAX. An error with another cause is raised again below.
            with contextlib.suppress(TypeError, ValueError, NotImplementedError):
                wide = self.wide_equation(equation, arrays)
                return self.applied_as_is(jaxpr, wide, ins)
        narrow: list[Any] = []
        avals: list[Any] = [var.aval for var in equation.invars]
        for array, aval in zip(arrays, avals, strict=True):
            if jnp.issubdtype(array.dtype, np.inexact):
                array = array.astype(aval.dtype)
            narrow.append(array)
        return list(map(self.widened, self.applied_as_is(jaxpr, equation, narrow)))

    def reordered(
        self,
        jaxpr: jex.Jaxpr,
        equation: jex.JaxprEqn,
        ins: Arrays,
        reads: Numbers,
        outs: Arrays,
    ) -> Arrays:
        """The results `outs` of one equation of `jaxpr`, with the error of sums."""
        if self.noise is None or len(outs) != 1:
            return outs

        def evaluate(operands: Arrays) -> Any:
            (result,) = self.applied(jaxpr, equation, operands)
            return result

        name = equation.primitive.name
        key = key_of(name, equation.params, reads, self.records)
        rough = [number >= 0 and self.records[number].is_rough for number in reads]
        out = reordered(
            equation=equation,
            operands=ins,
            result=outs[0],
            evaluate=evaluate,
            noise=self.noise.of_equation(key),
            may_be_exact=not any(rough),
        )
        return [out]

    def wide_equation(self, equation: jex.JaxprEqn, ins: Arrays) -> jex.JaxprEqn:
        """The equation with operands `ins`, and with `wide` in the place of narrower
        float dtypes.
        """
        params = {name: self.param(param) for name, param in equation.params.items()}
        invars = []
        for array, var in zip(ins, equation.invars, strict=True):
            # The value of a literal is in the equation.
            if isinstance(var, jex.Literal):
                var = jex.Literal(array, var.aval)
            invars.append(var)
        return equation.replace(params=params, invars=invars)

    def param(self, param: Any) -> Any:
        """A parameter of an equation. If it is a dtype or a jaxpr, `wide` replaces the
        narrower float dtypes in it.
        """
        if isinstance(param, jex.ClosedJaxpr | jex.Jaxpr):
            inner_tape = Tape(alone=self.alone, wide=self.wide)

            def run(jaxpr: jex.Jaxpr, consts: Arrays, args: Arrays) -> Arrays:
                """The jaxpr's results in wide dtypes, without records of this tape."""
                outs, _ = inner_tape.run(jaxpr, consts, args, [-1] * len(args))
                return outs

            def struct(var: Any) -> jax.ShapeDtypeStruct:
                """The shape and the wide dtype of an argument of the jaxpr."""
                narrow = struct_of(var)
                return narrow.update(dtype=wider(narrow.dtype, self.wide))

            return retraced(param, run, struct)
        is_scalar_type = isinstance(param, type) and issubclass(param, np.generic)
        if is_scalar_type or isinstance(param, np.dtype):
            return wider(np.dtype(param), self.wide)
        return param

    def applied_as_is(
        self,
        jaxpr: jex.Jaxpr,
        equation: jex.JaxprEqn,
        ins: Arrays,
    ) -> Arrays:
        """Evaluates one equation of `jaxpr` in its own dtypes, without shardings if
        `alone`.
        """
        if not self.alone:
            return applied(jaxpr, equation, ins)
        # These only change shardings.
        if equation.primitive.name in _LAYOUTS:
            return ins
        params = {}
        for name, param in equation.params.items():
            params[name] = None if isinstance(param, NamedSharding) else param
        context = self.context()
        return applied(jaxpr, equation.replace(params=params, ctx=context), ins)

    def context(self) -> Any:
        """The context of equations over the mesh of this evaluation, not over that of
        the step's trace.
        """
        mesh = jax.sharding.get_abstract_mesh()
        if mesh not in self.contexts:
            self.contexts[mesh] = jax.make_jaxpr(jnp.sin)(0.0).jaxpr.eqns[0].ctx
        return self.contexts[mesh]

    def inlined(self, equation: jex.JaxprEqn, ins: Arrays, reads: Numbers) -> Results:
        """Evaluates a call of a jaxpr, such as a `jax.jit` in the step, by that jaxpr."""
        params = equation.params
        jaxpr, consts = opened(params[_INLINED[equation.primitive.name]])
        args = self.placed(ins, params.get("in_shardings", ()))
        outs, numbers = self.run(jaxpr, consts, args, reads)
        return self.placed(outs, params.get("out_shardings", ())), numbers

    def placed(self, arrays: Arrays, shardings: Sequence[Any]) -> Arrays:
        """The arrays with these shardings, the `in_shardings` or `out_shardings` of a
        `jax.jit` in the step.
        """
        if self.alone:
            return arrays
        placed = []
        for array, sharding in it.zip_longest(arrays, shardings):
            if isinstance(sharding, NamedSharding):
                if {*sharding.mesh.axis_types} == {AxisType.Auto}:
                    array = jax.lax.with_sharding_constraint(array, sharding)
            placed.append(array)
        return placed

    def linear_solve(
        self,
        equation: jex.JaxprEqn,
        ins: Arrays,
        reads: Numbers,
    ) -> Results:
        """Evaluates a `custom_linear_solve` by its jaxpr `solve`. Its other jaxprs, for
        derivatives, are not needed.
        """
        lengths = equation.params["const_lengths"]
        jaxpr, consts = opened(equation.params["jaxprs"].solve)
        # The operands are the constants of `matvec`, `vecmat`, `solve` and
        # `transpose_solve`, then the right side.
        first = lengths.matvec + lengths.vecmat
        used = slice(first, first + lengths.solve)
        right_side = slice(sum(lengths), None)
        args = [*ins[used], *ins[right_side]]
        numbers = [*reads[used], *reads[right_side]]
        return self.run(jaxpr, consts, args, numbers)

    @contextlib.contextmanager
    def within(self, start: int) -> Iterator[dict[int, Any]]:
        """A context in which the inner jaxpr of a loop or `shard_map` is evaluated.

        Its value is a dict of the inner results, which the loop or `shard_map` must
        return, because they are tracers. `start` is the number of the first inner
        record. JAX may trace the inner jaxpr several times, so entering the context
        deletes all records from `start` on.
        """
        del self.records[start:]
        outer_values = self.values
        self.values = {}
        yield self.values
        self.values = outer_values

    def store_inner(
        self,
        start: int,
        values: dict[int, Any],
        leading_entry: object,
    ) -> None:
        """Stores `values`, the results inside of a loop or `shard_map` by number. Their
        records begin at `start`.

        The loop or `shard_map` has added a dimension to each result. `leading_entry` is
        its entry in `Record.leading`: an int for a loop.
        """
        self.values.update(values)
        for number in range(start, len(self.records)):
            record = self.records[number]
            loop = start if isinstance(leading_entry, int) else record.loop
            self.records[number] = record._replace(
                leading=(leading_entry, *record.leading),
                loop=loop,
            )

    def scan(self, equation: jex.JaxprEqn, ins: Arrays, reads: Numbers) -> Results:
        """Evaluates a `scan`, with a record for each equation of its body, and one for
        each carried value with which an iteration starts.
        """
        params = equation.params
        start = len(self.records)
        out_numbers: list[int] = []
        # The operands are constants, the carry, and arrays with a part for each
        # iteration.
        carry_start, carry_count = carry_of(equation)
        carry_part = slice(carry_start, carry_start + carry_count)
        consts_in = ins[:carry_start]
        carry_in = ins[carry_part]
        arrays_in = ins[carry_part.stop :]
        jaxpr, consts = opened(params["jaxpr"])
        carry_vars = jaxpr.invars[carry_part]
        carry_reads = reads[carry_part]

        def iteration(carry: Arrays, arrays: Arrays) -> tuple[Arrays, Any]:
            """The new carry, and what the scan stacks: the outputs of the iteration,
            and the results of its equations.
            """
            # JAX may trace this more than once; `within` forgets earlier records.
            with self.within(start) as values:
                carry_numbers = []
                columns = zip(carry_vars, carry, carry_reads, strict=True)
                for var, array, read in columns:
                    key = key_of(CARRY, {}, [read], self.records)
                    number = self.recorded(CARRY, var, array, [read], key)
                    carry_numbers.append(number)
                numbers = [
                    *reads[:carry_start],
                    *carry_numbers,
                    *reads[carry_part.stop :],
                ]
                args = [*consts_in, *carry, *arrays]
                outs, out_numbers[:] = self.run(jaxpr, consts, args, numbers)
                self.carry_results.update(zip(carry_numbers, out_numbers, strict=False))
            # JAX demands a new carry of the dtypes of the old one.
            new_carry = with_dtypes_of(outs[:carry_count], carry)
            return new_carry, (outs[carry_count:], values)

        with self.mesh_of(equation):
            carry, (stacked, values) = jax.lax.scan(
                iteration,
                list(carry_in),
                list(arrays_in),
                length=params["length"],
                reverse=params["reverse"],
            )
        leading = -1 if params["reverse"] else 1
        self.store_inner(start, values, leading)
        return [*carry, *stacked], out_numbers

    def mesh_of(self, equation: jex.JaxprEqn) -> contextlib.AbstractContextManager[Any]:
        """The context of the mesh under which JAX traced an equation; none on one
        device.
        """
        if self.alone:
            return contextlib.nullcontext()
        return equation.ctx.manager

    def unrecorded(self, closed: object, *args: object) -> Arrays:
        """Evaluates the ClosedJaxpr `closed` with `args`, without records."""
        start = len(self.records)
        jaxpr, consts = opened(closed)
        with self.within(start):
            outs, _ = self.run(jaxpr, consts, args, [-1] * len(args))
        del self.records[start:]
        return outs

    def loop(self, equation: jex.JaxprEqn, ins: Arrays, reads: Numbers) -> Results:
        """Evaluates a `while` loop, with records only for its results."""
        params = equation.params
        carry_start = params["cond_nconsts"] + params["body_nconsts"]
        cond_consts = ins[: params["cond_nconsts"]]
        body_consts = ins[params["cond_nconsts"] : carry_start]

        def condition(carry: Arrays) -> Any:
            (goes_on,) = self.unrecorded(params["cond_jaxpr"], *cond_consts, *carry)
            return goes_on

        def body(carry: Arrays) -> Arrays:
            outs = self.unrecorded(params["body_jaxpr"], *body_consts, *carry)
            return with_dtypes_of(outs, carry)

        outs = jax.lax.while_loop(condition, body, ins[carry_start:])
        return outs, self.recorded_results(equation, outs, reads)

    def branch(self, equation: jex.JaxprEqn, ins: Arrays, reads: Numbers) -> Results:
        """Evaluates a `cond`, with records only for its results."""
        jaxprs = equation.params["branches"]
        branches = [ft.partial(self.unrecorded, jaxpr) for jaxpr in jaxprs]
        outs = jax.lax.switch(ins[0], branches, *ins[1:])
        return outs, self.recorded_results(equation, outs, reads)

    def shard_map(self, equation: jex.JaxprEqn, ins: Arrays, reads: Numbers) -> Results:
        """Evaluates a `shard_map`, with a record for each equation of its body. Raises
        `ProgramError` for one device if its mesh has more.
        """
        params = equation.params
        start = len(self.records)
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
        if self.alone:
            # A reference is evaluated without Explicit axes in types.
            mesh = auto_twin(mesh.abstract_mesh)
        jaxpr, consts = opened(params["jaxpr"])
        out_numbers: list[int] = []

        def body(*args: object) -> Any:
            with self.within(start) as values:
                outs, out_numbers[:] = self.run(jaxpr, consts, args, reads)
            # The devices' values of each equation are stacked.
            return outs, {number: value[None] for number, value in values.items()}

        run = jax.shard_map(
            body,
            mesh=mesh,
            in_specs=params["in_specs"],
            out_specs=([*params["out_specs"]], PartitionSpec(names)),
            axis_names={*names},
            check_vma=params["check_vma"],
        )
        with self.mesh_of(equation):
            outs, values = run(*ins)
        leading = tuple((name, mesh.shape[name]) for name in names)
        self.store_inner(start, values, leading)
        body_record = ShardMapBody(
            equation=equation,
            reads=reads,
            results=out_numbers,
            numbers=range(start, len(self.records)),
        )
        self.bodies.append(body_record)
        return outs, out_numbers

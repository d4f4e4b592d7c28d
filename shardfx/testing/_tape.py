"""A step's jaxpr carried out with a record of what every equation makes, under its plan or on one device."""

import contextlib
import functools as ft
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from .._ground.errors import ProgramError
from .._step.equations import applied, carry_of, frames_of, opened
from .._step.lines import Frame, is_library, place_text


# Equations that are entered in place, with the parameter that holds their program.
_INLINED = {
    **dict.fromkeys(("jit", "pjit", "checkpoint", "remat", "remat2", "eval_jaxpr"), "jaxpr"),
    **dict.fromkeys(("closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"), "call_jaxpr"),
}
# These say how arrays lie, and change no number.
_LAYOUTS = ("sharding_constraint", "reshard", "mesh_cast", "device_put")
# These round nothing.
_EXACT = frozenset(
    """abs and argmax argmin broadcast_in_dim ceil clamp concatenate copy copy_p cummax cummin dynamic_slice
    dynamic_update_slice eq floor gather ge gt iota is_finite le lt max min ne neg not or pad all_gather all_to_all
    ppermute pvary pcast reduce_and reduce_max reduce_min reduce_or reduce_precision reshape rev round select_n sign
    slice sort split squeeze stop_gradient top_k transpose pmax pmin pgather stop_gradient reduce_window_max""".split()
)
# What a loop begins a turn with.
CARRY = "carry"
# What these do is about the bits of their dtype.
_BITS = ("bitcast_convert_type", "random_bits", "rng_bit_generator", "random_gamma", "pallas_call", "ffi_call", "pure_callback")


class Record(NamedTuple):
    """One equation of a step.

    **Arguments:**

    - `primitive`: as JAX names it.
    - `frames`: the lines of the user, the innermost first.
    - `reads`: the numbers of the records whose values it takes; -1 for arguments, literals and constants.
    - `leading`: what the leading dimensions of its value are, which loops and shard_maps around it add: for the turns
        of a loop 1, or -1 if it runs backwards; else the mesh axes, with their sizes, along which each device's own
        value is stacked.
    - `dtype`: that the step computes it in.
    - `loop`: the number of the outermost loop around it.
    """

    primitive: str
    frames: tuple[Frame, ...]
    reads: tuple[int, ...]
    leading: tuple[tuple[tuple[str, int], ...] | int, ...]
    dtype: Any
    loop: int | None = None


class Tape:
    """Carries out a jaxpr.

    **Arguments:**

    - `alone`: on one device, without shardings.
    - `wide`: the dtype that narrower floats are replaced by, from the arguments on.
    - `noise`: rounding errors to add to what each equation makes: their size for each dtype of the step, and an odd
        number that says where they are up and where down. Needs `wide=np.float64`.
    """

    def __init__(self, *, alone: bool, wide: Any = None, noise: Any = None):
        self.alone, self.wide, self.noise = alone, wide, noise
        self.records: list[Record] = []
        self.values: dict[int, Any] = {}
        self.frames: tuple[Frame, ...] = ()

    def run(
        self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], ids: Sequence[int]
    ) -> tuple[list[Any], list[int]]:
        """The results of a jaxpr, and the numbers of the records that they are."""
        arrays = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
        numbers = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*[-1] * len(consts), *ids), strict=True))

        def read(given: Any) -> Any:
            if not isinstance(given, jex.Literal):
                return arrays[given]
            atom: Any = given
            return (
                atom.val if self.wide is None else jnp.asarray(np.asarray(atom.val), _wider(atom.aval.dtype, self.wide))
            )

        def number(atom: Any) -> int:
            return -1 if isinstance(atom, jex.Literal) else numbers[atom]

        frames = self.frames
        for equation in jaxpr.eqns:
            self.frames = tuple(one for one in frames_of(equation) if not is_library(one)) or frames
            ins, reads = [*map(read, equation.invars)], [*map(number, equation.invars)]
            enter = self.entered(equation)
            if enter is not None:
                outs, made = enter(equation, ins, reads)
            else:
                outs = self.applied(jaxpr, equation, ins)
                made = self.all_kept(equation, outs, reads)
                outs = [self.values.get(at, out) for at, out in zip(made, outs, strict=True)]
            arrays.update(zip(equation.outvars, outs, strict=True))
            numbers.update(zip(equation.outvars, made, strict=True))
        self.frames = frames
        return [*map(read, jaxpr.outvars)], [*map(number, jaxpr.outvars)]

    def entered(self, equation: Any) -> Callable[..., tuple[Sequence[Any], Sequence[int]]] | None:
        """How to enter an equation that holds programs; `None` for one that is carried out as it is."""
        name = equation.primitive.name
        if name in _INLINED:
            return self.inlined
        entered = {"scan": self.scan, "while": self.loop, "cond": self.branch, "shard_map": self.shard_map}
        return {**entered, "custom_linear_solve": self.solved}.get(name)

    def kept(self, name: str, var: Any, out: Any, reads: Sequence[int]) -> int:
        """The number of the record of what an equation made."""
        if jnp.issubdtype(out.dtype, jax.dtypes.extended):
            return max(reads, default=-1)  # a key
        number = len(self.records)
        self.records.append(Record(name, self.frames, (*reads,), (), var.aval.dtype))
        if self.alone or not jax.typeof(out).sharding.spec.unreduced:  # no device has the value of a sum to come
            is_exact = self.noise is None or name in _EXACT
            self.values[number] = out if is_exact else _noisy(out, var.aval.dtype, self.noise)
        return number

    def all_kept(self, equation: Any, outs: Sequence[Any], reads: Sequence[int]) -> list[int]:
        name = equation.primitive.name
        return [self.kept(name, var, out, reads) for var, out in zip(equation.outvars, outs, strict=True)]

    def widened(self, array: Any) -> Any:
        """An array with floats at least as wide as asked for."""
        if self.wide is None or jnp.issubdtype(array.dtype, jax.dtypes.extended):
            return array
        return jnp.asarray(array, _wider(array.dtype, self.wide))

    def applied(self, jaxpr: Any, equation: Any, ins: Sequence[Any]) -> Sequence[Any]:
        """What one equation makes."""
        if self.wide is None or equation.primitive.name in _BITS:
            return self.at_its_own_dtypes(jaxpr, equation, ins)
        try:
            params = {key: self.param(one) for key, one in equation.params.items()}
            invars = [
                jex.Literal(one, atom.aval) if isinstance(atom, jex.Literal) else atom
                for one, atom in zip(ins, equation.invars, strict=True)
            ]
            return self.bound(jaxpr, equation.replace(params=params, invars=invars), ins)
        # Some equations carry out what has a fixed dtype, and refuse a wider one. Other errors are raised again below.
        except (TypeError, ValueError, NotImplementedError):
            return self.at_its_own_dtypes(jaxpr, equation, ins)

    def at_its_own_dtypes(self, jaxpr: Any, equation: Any, ins: Sequence[Any]) -> Sequence[Any]:
        if self.wide is not None:
            ins = [
                one.astype(var.aval.dtype) if jnp.issubdtype(one.dtype, np.inexact) else one
                for one, var in zip(map(jnp.asarray, ins), equation.invars, strict=True)
            ]
        return [self.widened(out) for out in self.bound(jaxpr, equation, ins)]

    def param(self, param: Any) -> Any:
        """A parameter of an equation, with wider dtypes."""
        if isinstance(param, jex.ClosedJaxpr | jex.Jaxpr):
            return self.anew(param)
        is_dtype = isinstance(param, np.dtype) or (isinstance(param, type) and issubclass(param, np.generic))
        return _wider(np.dtype(param), self.wide) if is_dtype else param

    def anew(self, given: Any) -> Any:
        jaxpr, consts = opened(given)
        structs = [jax.ShapeDtypeStruct(var.aval.shape, _wider(var.aval.dtype, self.wide)) for var in jaxpr.invars]
        inner = Tape(alone=self.alone, wide=self.wide)
        made = jax.make_jaxpr(lambda *args: inner.run(jaxpr, consts, args, [-1] * len(args))[0])(*structs)
        return made if isinstance(given, jex.ClosedJaxpr) else made.jaxpr

    def bound(self, jaxpr: Any, equation: Any, ins: Sequence[Any]) -> Sequence[Any]:
        if not self.alone:
            return applied(jaxpr, equation, ins)
        if equation.primitive.name in _LAYOUTS:
            return ins
        params = {key: None if isinstance(one, NamedSharding) else one for key, one in equation.params.items()}
        context = jax.make_jaxpr(jnp.sin)(0.0).jaxpr.eqns[0].ctx  # without the mesh that the step was traced under
        return applied(jaxpr, equation.replace(params=params, ctx=context), ins)

    def inlined(self, equation: Any, ins: list[Any], reads: list[int]) -> tuple[Sequence[Any], Sequence[int]]:
        params = equation.params
        jaxpr, consts = opened(params[_INLINED[equation.primitive.name]])
        ins = [
            self.placed(one, asked)
            for one, asked in zip(ins, params.get("in_shardings", [None] * len(ins)), strict=True)
        ]
        outs, ids = self.run(jaxpr, consts, ins, reads)
        asked = params.get("out_shardings", [None] * len(outs))
        return [self.placed(one, sharding) for one, sharding in zip(outs, asked, strict=True)], ids

    def solved(self, equation: Any, ins: list[Any], reads: list[int]) -> tuple[Sequence[Any], Sequence[int]]:
        """A linear solve, whose equation holds further programs for derivatives."""
        lengths, solve = equation.params["const_lengths"], equation.params["jaxprs"].solve
        first = lengths.matvec + lengths.vecmat
        own = [*range(first, first + lengths.solve), *range(sum(lengths), len(ins))]
        return self.run(*opened(solve), [ins[at] for at in own], [reads[at] for at in own])

    def placed(self, array: Any, asked: Any) -> Any:
        is_asked = isinstance(asked, NamedSharding) and not self.alone and set(asked.mesh.axis_types) == {AxisType.Auto}
        return jax.lax.with_sharding_constraint(array, asked) if is_asked else array

    def body(
        self, closed: Any, args: Sequence[Any], ids: Sequence[int] | Callable[..., Sequence[int]], start: int
    ) -> tuple[list[Any], list[int], dict[int, Any]]:
        """What a program within an equation makes, and the values of its records, which its equation has to return.

        JAX may trace it several times: its records begin anew at `start`.
        """
        del self.records[start:]
        outer, self.values = self.values, {}
        jaxpr, consts = opened(closed)
        outs, made = self.run(jaxpr, consts, args, ids if isinstance(ids, Sequence) else ids(jaxpr, args))
        found, self.values = self.values, outer
        return outs, made, found

    def held(self, start: int, values: dict[int, Any], leading: Any) -> None:
        """Takes over what the records of an equation's program made."""
        self.values.update(values)
        for at in range(start, len(self.records)):
            one = self.records[at]
            loop = start if isinstance(leading, int) else one.loop
            self.records[at] = one._replace(leading=(leading, *one.leading), loop=loop)

    def scan(self, equation: Any, ins: list[Any], reads: list[int]) -> tuple[Sequence[Any], Sequence[int]]:
        params, start = equation.params, len(self.records)
        first, carried = carry_of(equation)
        middle = first + carried
        ids: list[int] = []

        def turn(carry: Any, xs: Any) -> Any:
            def begun(jaxpr: Any, args: Sequence[Any]) -> list[int]:
                own = zip(jaxpr.invars[first:middle], args[first:middle], reads[first:middle], strict=True)
                return [
                    *reads[:first],
                    *[self.kept(CARRY, var, one, [read]) for var, one, read in own],
                    *reads[middle:],
                ]

            outs, made, found = self.body(params["jaxpr"], [*ins[:first], *carry, *xs], begun, start)
            ids[:] = made
            left = [_like(out, one) for out, one in zip(outs[: len(carry)], carry, strict=True)]
            return left, (outs[len(carry) :], found)

        with contextlib.nullcontext() if self.alone else equation.ctx.manager:
            carry, (ys, found) = jax.lax.scan(
                turn, ins[first:middle], ins[middle:], length=params["length"], reverse=params["reverse"]
            )
        self.held(start, found, -1 if params["reverse"] else 1)
        return [*carry, *ys], ids

    def loop(self, equation: Any, ins: list[Any], reads: list[int]) -> tuple[Sequence[Any], Sequence[int]]:
        """A loop of unknown length is one equation."""
        params, start = equation.params, len(self.records)
        one, two = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]

        def turn(carry: Any) -> Any:
            outs = self.body(params["body_jaxpr"], [*ins[one:two], *carry], [-1] * (len(ins) - one), start)[0]
            return [_like(out, old) for out, old in zip(outs, carry, strict=True)]

        def is_on(carry: Any) -> Any:
            return self.body(params["cond_jaxpr"], [*ins[:one], *carry], [-1] * (len(ins) - two + one), start)[0][0]

        outs = jax.lax.while_loop(is_on, turn, ins[two:])
        del self.records[start:]
        return outs, self.all_kept(equation, outs, reads)

    def branch(self, equation: Any, ins: list[Any], reads: list[int]) -> tuple[Sequence[Any], Sequence[int]]:
        """A conditional is one equation."""
        start = len(self.records)

        def chosen(closed: Any, *args: Any) -> Any:
            return self.body(closed, args, [-1] * len(args), start)[0]

        outs = jax.lax.switch(ins[0], [ft.partial(chosen, one) for one in equation.params["branches"]], *ins[1:])
        del self.records[start:]
        return outs, self.all_kept(equation, outs, reads)

    def shard_map(self, equation: Any, ins: list[Any], reads: list[int]) -> tuple[Sequence[Any], Sequence[int]]:
        params, start, ids = equation.params, len(self.records), []
        mesh = params["mesh"]
        manual = params["newly_manual_axes"] if "newly_manual_axes" in params else params["manual_axes"]
        names = tuple(name for name in mesh.axis_names if name in manual)
        if self.alone and mesh.size > 1:
            place = place_text(next(iter(self.frames), None))
            raise ProgramError(
                f"a `shard_map` at {place} is over a mesh of {mesh.size} devices, so the step has no form for one "
                "device. Pass the same step in plain JAX, `reference=`; or a function of the mesh that returns the "
                "step, with the mesh: `check_step(make_step, *args, mesh=mesh)`."
            )

        def body(*args: Any) -> Any:
            outs, made, found = self.body(params["jaxpr"], args, reads, start)
            ids[:] = made
            return outs, {at: one[None] for at, one in found.items()}

        own = jax.shard_map(
            body,
            mesh=mesh,
            in_specs=params["in_specs"],
            out_specs=([*params["out_specs"]], PartitionSpec(names)),
            axis_names={*names},
            check_vma=params["check_vma"],
        )
        with contextlib.nullcontext() if self.alone else equation.ctx.manager:
            outs, found = own(*ins)
        self.held(start, found, tuple((name, mesh.shape[name]) for name in names))
        return outs, ids


def _wider(dtype: Any, wide: Any) -> Any:
    """A dtype of the same kind that is at least as wide as `wide`."""
    if jnp.issubdtype(dtype, np.complexfloating):
        return np.dtype(np.complex128) if np.dtype(wide).itemsize == 8 else dtype
    is_narrow = jnp.issubdtype(dtype, np.floating) and jnp.finfo(dtype).bits < jnp.finfo(wide).bits
    return np.dtype(wide) if is_narrow else dtype


def _like(array: Any, other: Any) -> Any:
    return array if array.dtype == other.dtype else array.astype(other.dtype)


def _noisy(array: Any, dtype: Any, noise: Any) -> Any:
    """A float64 array with an error of one unit in the last place of a dtype, whose signs hang on its own bits.

    A number that the dtype holds has none: a count stays a whole number.
    """
    if not jnp.issubdtype(dtype, np.floating):
        return array
    (amplitude, odd), kind = noise, jnp.finfo(dtype)
    bits = jax.lax.bitcast_convert_type(array, np.uint64) * odd >> np.uint64(63)
    error = (bits.astype(np.float64) - 0.5) * amplitude.get(np.dtype(dtype).name, amplitude["bfloat16"])
    return jnp.where(jax.lax.reduce_precision(array, kind.nexp, kind.nmant) == array, array, array * (1.0 + error))

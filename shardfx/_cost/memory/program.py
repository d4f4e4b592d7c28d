"""A traced step as blocks of operations on numbered values: calls are opened, loops and branches hold blocks."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var

from ..graph import Bound, Traced
from ..nested import scan_parts
from ..trace import traced


class Value(NamedTuple):
    """What one value of a program is.

    **Arguments:**

    - `shape`, `dtype`: of the whole array.
    - `aval`: what JAX knows of it, its type's sharding among it.
    """

    shape: tuple[int, ...]
    dtype: Any
    aval: Any

    @property
    def on_host(self) -> bool:
        """Whether it lies in a host's memory."""
        return getattr(self.aval, "memory_space", None) == jax.memory.Space.Host


@dataclasses.dataclass
class Op:
    """One operation. `ins` and `outs` are numbers of values; literals are left out, as `None`.

    `blocks` are the bodies of a loop or the branches of a conditional; `trips` is how often a body runs, `None` where
    nobody knows. `source` is the equation's, for messages.
    """

    name: str
    params: dict[str, Any]
    ins: tuple[int | None, ...]
    outs: tuple[int, ...]
    blocks: tuple["Block", ...] = ()
    trips: int | None = 1
    source: Any = None


@dataclasses.dataclass
class Block:
    """Operations in order, with the values that come in and go out."""

    ins: tuple[int, ...]
    outs: tuple[int | None, ...]
    ops: list[Op]


@dataclasses.dataclass
class Program:
    """A step: its values by number, and the block of its operations.

    `constants` are the values of arrays that the step holds; `donated` says of each of the block's `ins` whether its
    memory may be reused, and `given` is what the outermost `jit` says of the shardings of arguments and results.
    `variables` says which variable of the jaxpr each value is, and `graph` is that jaxpr as estimates of traffic read
    it, which decides how arrays lie.
    """

    values: list[Value]
    block: Block
    constants: tuple[int, ...] = ()
    donated: tuple[bool, ...] = ()
    given: tuple[tuple[Any, ...], tuple[Any, ...]] = ((), ())
    variables: dict[int, Bound] = dataclasses.field(default_factory=dict)
    graph: Traced | None = None


def program_of(closed: ClosedJaxpr) -> Program:
    """The program of a jaxpr, without operations whose results nobody uses."""
    reader = _Reader()
    jaxpr = closed.jaxpr
    ins = tuple(reader.new(var, ()) for var in jaxpr.invars)
    constants = tuple(reader.new(var, ()) for var in jaxpr.constvars)
    names: dict[Any, int | None] = dict(zip([*jaxpr.invars, *jaxpr.constvars], [*ins, *constants], strict=True))
    ops, outs = reader.opened(jaxpr, names, ())
    block = _needed(Block(ins, outs, ops), set(outs))
    donated, given = _outermost(jaxpr, names, ins)
    return Program(reader.values, block, constants, donated, given, reader.variables, traced(closed))


class _Reader:
    def __init__(self):
        self.values: list[Value] = []
        self.variables: dict[int, Bound] = {}

    def new(self, var: Any, path: tuple[int, ...]) -> int:
        aval = var.aval
        self.variables[len(self.values)] = path, var
        self.values.append(Value(tuple(getattr(aval, "shape", ())), getattr(aval, "dtype", None), aval))
        return len(self.values) - 1

    def block(self, jaxpr: Jaxpr, path: tuple[int, ...]) -> Block:
        """A body with values of its own; the constants that it closes over are values that nobody gives."""
        ins = tuple(self.new(var, path) for var in jaxpr.invars)
        names: dict[Any, int | None] = dict(zip(jaxpr.invars, ins, strict=True))
        names |= {var: self.new(var, path) for var in jaxpr.constvars}
        ops, outs = self.opened(jaxpr, names, path)
        return Block(ins, outs, ops)

    def opened(
        self, jaxpr: Jaxpr, names: dict[Any, int | None], path: tuple[int, ...]
    ) -> tuple[list[Op], tuple[int | None, ...]]:
        """The operations of a jaxpr whose inputs have numbers, calls opened, and the numbers of its outputs."""
        ops: list[Op] = []

        def number(atom: Any) -> int | None:
            return None if isinstance(atom, Literal) else names[atom]

        for at, eqn in enumerate(jaxpr.eqns):
            here = (*path, at)
            ins = tuple(map(number, eqn.invars))
            inner = _called(eqn)
            if inner is not None:
                body = inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner
                barriers, ins = self.barriers(eqn, ins, body, here)
                ops += barriers
                own = {
                    **dict(zip(body.invars, ins, strict=True)),
                    **{var: self.new(var, here) for var in body.constvars},
                }
                more, results = self.opened(body, own, here)
                ops += more
                names.update(zip(eqn.outvars, results, strict=True))
                continue
            outs = tuple(self.new(var, path) for var in eqn.outvars)
            names.update(zip(eqn.outvars, outs, strict=True))
            if eqn.primitive.name == "optimization_barrier":
                ops += [self.barrier(eqn, *pair) for pair in zip(ins, outs, strict=True)]
                continue
            blocks, trips = self.inside(eqn, here)
            ops.append(Op(eqn.primitive.name, eqn.params, ins, outs, blocks, trips, eqn.source_info))
        return ops, tuple(map(number, jaxpr.outvars))

    def barriers(
        self, eqn: Any, ins: tuple[int | None, ...], body: Jaxpr, path: tuple[int, ...]
    ) -> tuple[list[Op], tuple[int | None, ...]]:
        """What keeps a compiler from merging what is computed again with what was: copies in name only.

        So a weight that was gathered in the forward pass is gathered again, and not kept until then.
        """
        stops = eqn.params.get("prevent_cse", False) if eqn.params.get("differentiated") else False
        which = (stops,) * len(ins) if isinstance(stops, bool) else stops
        ops: list[Op] = []
        found: list[int | None] = []
        for number, var, stop in zip(ins, body.invars, which, strict=True):
            if number is not None and stop:
                ops.append(self.barrier(eqn, number, self.new(var, path)))
                number = ops[-1].outs[0]
            found.append(number)
        return ops, tuple(found)

    def barrier(self, eqn: Any, number: int | None, out: int) -> Op:
        """One value of a barrier, which holds nothing and changes nothing."""
        return Op("optimization_barrier", {}, (number,), (out,), source=eqn.source_info)

    def inside(self, eqn: Any, path: tuple[int, ...]) -> tuple[tuple[Block, ...], int | None]:
        name, params = eqn.primitive.name, eqn.params
        bodies: Sequence[Jaxpr] = ()
        if name == "scan":
            bodies = [params["jaxpr"].jaxpr]
        elif name == "while":
            bodies = [params["body_jaxpr"].jaxpr, params["cond_jaxpr"].jaxpr]
        elif name == "cond":
            bodies = [branch.jaxpr for branch in params["branches"]]
        elif name == "shard_map":
            bodies = [params["jaxpr"]]
        trips = params["length"] if name == "scan" else None if name == "while" else 1
        return tuple(self.block(body, (*path, at)) for at, body in enumerate(bodies)), trips


def _called(eqn: Any) -> Any:
    """The jaxpr that an equation calls once, with the equation's own inputs; `None` for all others."""
    if eqn.primitive.name in ("scan", "while", "cond", "shard_map", "pallas_call", "custom_root", "linear_solve"):
        return None
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        inner = eqn.params.get(key)
        if isinstance(inner, ClosedJaxpr | Jaxpr):
            body = inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner
            if len(body.invars) == len(eqn.invars) and len(body.outvars) == len(eqn.outvars):
                return inner
    return None


def _needed(block: Block, wanted: set[int | None]) -> Block:
    """The block without operations of which nobody wants a result."""
    wanted = set(wanted)
    kept: list[Op] = []
    for op in reversed(block.ops):
        if op.outs and not any(out in wanted for out in op.outs):
            continue
        op.blocks = tuple(_needed(inner, _wanted_inside(op, inner, wanted)) for inner in op.blocks)
        kept.append(op)
        wanted.update(op.ins)
    return Block(block.ins, block.outs, kept[::-1])


def _wanted_inside(op: Op, inner: Block, wanted: set[int | None]) -> set[int | None]:
    if op.name == "scan":
        # What is carried may be needed by the next trip; what is stacked only by those who use the stack.
        _, carried = scan_parts(op.params)
        return {out for n, out in enumerate(inner.outs) if n < carried or op.outs[n] in wanted}
    if op.name == "cond":
        return {out for n, out in enumerate(inner.outs) if op.outs[n] in wanted}
    return set(inner.outs)


def _outermost(jaxpr: Jaxpr, names: dict[Any, Any], ins: tuple[int, ...]) -> tuple[tuple[bool, ...], Any]:
    """What a `jit` around the whole step says: which arguments are donated, and where arguments and results lie."""
    calls = [eqn for eqn in jaxpr.eqns if "donated_invars" in eqn.params]
    if len(jaxpr.eqns) != 1 or len(calls) != 1:
        return (False,) * len(ins), ((), ())
    (eqn,) = calls
    donated = {
        names[var]
        for var, given in zip(eqn.invars, eqn.params["donated_invars"], strict=True)
        if given and not isinstance(var, Literal)
    }
    at = {var: n for n, var in enumerate(eqn.outvars)}
    shardings = dict(
        zip([None if isinstance(v, Literal) else names[v] for v in eqn.invars], eqn.params["in_shardings"], strict=True)
    )
    results = tuple(
        eqn.params["out_shardings"][at[var]] if isinstance(var, Var) and var in at else None for var in jaxpr.outvars
    )
    return tuple(one in donated for one in ins), (tuple(shardings.get(one) for one in ins), results)

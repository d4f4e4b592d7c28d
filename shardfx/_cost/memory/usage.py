"""What a traced step keeps in memory: its arguments, its results, and the worst moment between."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import equinox as eqx
from jax.sharding import NamedSharding

from ..graph import Pin
from ..nested import without_dead
from .layouts import Dims, Layouts, as_compiled, dims_of
from .liveness import Changed, Peak, peak_of
from .on_tpu import as_on_tpu
from .program import Program, program_of


@dataclasses.dataclass(frozen=True)
class Usage:
    """Bytes of a step on one device.

    **Arguments:**

    - `arguments`: of each array that comes in, in order.
    - `outputs`: of all results together.
    - `aliased`: how many of those take over the memory of arguments that are donated.
    - `peak`: the worst moment, arguments and results aside.
    - `program`, `layouts`: what was measured.
    """

    arguments: tuple[int, ...]
    outputs: int
    aliased: int
    peak: Peak
    program: Program
    layouts: Layouts

    @property
    def bytes(self) -> int:
        """All together: arguments, results that take memory of their own, and what else is live."""
        return sum(self.arguments) + self.outputs - self.aliased + self.peak.bytes


def traced(function: Callable[..., Any], trees: Sequence[Any], *, tpu: bool = False) -> Program:
    """The program of a function of trees of structs; what is no array is static.

    **Arguments:**

    - `tpu`: whether it is the TPU's compiler that will compile it.
    """
    closed, _, _ = eqx.filter_make_jaxpr(function)(*trees)
    program = program_of(without_dead(closed))
    return as_on_tpu(program) if tpu else program


def usage_of(
    program: Program,
    shardings: Sequence[Any],
    sizes: Mapping[str, int],
    *,
    donated: Sequence[bool],
    tile: tuple[int, int] | None = None,
    changed: Changed | None = None,
    pins: Mapping[int, Pin] = MappingProxyType({}),
    on_host: Sequence[bool] = (),
    tpu: bool = False,
) -> Usage:
    """The bytes of a program under the shardings of its arguments.

    **Arguments:**

    - `program`: the step.
    - `shardings`: of its arguments, `None` where nobody says.
    - `sizes`: of the mesh axes.
    - `donated`: which of its arguments may be overwritten.
    - `tile`: what the chip pads the last two dimensions of an array to.
    - `changed`: what is to be taken as other than it is written.
    - `pins`: of values that are to be constrained beside those that are, by their numbers in the program's graph.
    - `on_host`: which of its arguments lie in a host's memory and count for nothing here.
    - `tpu`: whether it is the TPU's compiler that will place its arrays.
    """
    ins, known = program.block.ins, known_layouts(program, shardings, sizes)
    layouts = Layouts(program, *as_compiled(program, sizes, known, pins), tile)
    outs = [number for number in program.block.outs if number is not None]
    spare = [_kind(layouts, number) for number, yes in zip(ins, donated, strict=True) if yes]
    aliased: list[int] = []
    for number in outs:
        if (kind := _kind(layouts, number)) in spare:
            spare.remove(kind)
            aliased.append(number)
    away = on_host or (False,) * len(ins)
    arguments = tuple(0 if host else layouts.bytes_of(number) for number, host in zip(ins, away, strict=True))
    outputs = sum(map(layouts.bytes_of, outs))
    peak = peak_of(program, layouts, changed, aliased=frozenset(aliased), tpu=tpu)
    return Usage(arguments, outputs, sum(map(layouts.bytes_of, aliased)), peak, program, layouts)


def known_layouts(program: Program, shardings: Sequence[Any], sizes: Mapping[str, int]) -> dict[int, Dims]:
    """How the arguments of a program lie, and those of its results of which that is said or follows, by number."""
    ins, (given, results) = program.block.ins, program.given
    known: dict[int, Dims] = {}
    for number, sharding in [
        *zip(program.block.outs, results, strict=False),
        *zip(ins, given, strict=False),
        *zip(ins, shardings, strict=True),
    ]:
        if isinstance(sharding, NamedSharding) and number is not None:
            known[number] = dims_of(sharding.spec, len(program.values[number].shape), sizes)
    _returned_as_given(program, shardings, known, sizes)
    # An argument that nobody shards is whole.
    return {**{number: ((),) * len(program.values[number].shape) for number in ins}, **known}


def _returned_as_given(
    program: Program, shardings: Sequence[Any], known: dict[int, Dims], sizes: Mapping[str, int]
) -> None:
    """Lays a result out as the argument of its shape and dtype, in order, where nobody says how it lies.

    A step returns its state as it came, or the next call would compile anew.
    """
    free = [
        (program.values[number], sharding)
        for number, sharding in zip(program.block.ins, shardings, strict=True)
        if isinstance(sharding, NamedSharding)
    ]
    for number in program.block.outs:
        if number is None or number in known:
            continue
        value = program.values[number]
        same = next((one for one in free if (one[0].shape, one[0].dtype) == (value.shape, value.dtype)), None)
        if same is not None:
            free.remove(same)
            known[number] = dims_of(same[1].spec, len(value.shape), sizes)


def _kind(layouts: Layouts, number: int) -> tuple[Any, ...]:
    value = layouts.values[number]
    return value.shape, value.dtype, layouts.dims[number]

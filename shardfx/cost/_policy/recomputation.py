"""What the backward pass of a region needs, and what it costs to keep only some of the
region's values: by the region's derivative, as JAX differentiates it.
"""

import dataclasses
import functools as ft
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex

from ..._step import CALLS, applied, evaluated, opened, typed_struct_of
from .regions import Placed, ValueKey
from .work import Work, dependent, total, work_of


class Kept(NamedTuple):
    """The consequences of keeping some values.

    - `bytes`: the bytes of the kept values that the backward pass reads, on one device.
    - `work`: the work of computing the others again, on all devices together.
    - `used`: the keys of the values that are kept and read.
    """

    bytes: int
    work: Work
    used: frozenset[ValueKey]


class _Value(NamedTuple):
    """A value of a region's derivative.

    - `key`: its key, if it has a name.
    - `bytes`: its bytes on one device.
    - `producer`: the number of the equation that computes it.
    """

    key: ValueKey | None
    bytes: int
    producer: int


@dataclasses.dataclass(frozen=True, eq=False)
class Recomputation:
    """The values of a region that its backward pass needs, and how they are computed.

    - `count`: the number of times that the region runs.
    - `is_body`: whether the region is the body of a loop.
    - `forward`: the work of one run of the region.
    - `values`, `operands`, `works`: the values, and the operands and the work of the
      equations that compute them.
    - `needed`: the numbers of the values that the backward pass reads.
    """

    count: int
    is_body: bool
    forward: Work
    values: tuple[_Value, ...]
    operands: tuple[tuple[int, ...], ...]
    works: tuple[Work, ...]
    needed: tuple[int, ...]

    @ft.cached_property
    def bytes_of(self) -> dict[ValueKey, int]:
        """The bytes of each value that can be kept, on one device."""
        bytes_of_keys = {}
        for value in self.values:
            if value.key is not None:
                bytes_of_keys[value.key] = value.bytes
        return bytes_of_keys

    @property
    def keys(self) -> frozenset[ValueKey]:
        """The keys of the values that can be kept."""
        return frozenset(self.bytes_of)

    def keeping(self, keys: Collection[ValueKey]) -> Kept:
        """The consequences of keeping the values with these keys, in all runs."""
        computed: set[int] = set()
        used: set[ValueKey] = set()
        visited: set[int] = set()
        kept_bytes = 0
        flops = 0.0
        passed_bytes = 0.0
        waiting = list(self.needed)
        while waiting:
            number = waiting.pop()
            if number in visited:
                continue
            visited.add(number)
            key, value_bytes, producer = self.values[number]
            if key is not None and key in keys:
                used.add(key)
                kept_bytes += value_bytes
            elif producer not in computed:
                computed.add(producer)
                flops += self.works[producer].flops
                passed_bytes += self.works[producer].bytes
                waiting += self.operands[producer]
        work = Work(flops=flops, bytes=passed_bytes)
        return Kept(
            bytes=kept_bytes * self.count,
            work=work.times(self.count),
            used=frozenset(used),
        )


def recomputation_of(
    placed: Placed,
    bytes_of: Callable[[ValueKey, Any], int],
) -> Recomputation:
    """The needs of a region's backward pass. `bytes_of` gives the bytes of a value on
    one device, from its key and its type.
    """
    region = placed.region
    keys = {key.name: key for key in region.all_keys}
    derivative = _derivative(placed)
    value_count = len(region.invars)
    tangent_count = len(derivative.invars) - value_count
    is_tangent = [False] * value_count + [True] * tangent_count
    tangents = dependent(derivative, is_tangent)

    values: list[_Value] = []
    numbers: dict[Any, int] = {}
    operands: list[tuple[int, ...]] = []
    works: list[Work] = []
    needed: dict[int, None] = {}
    for equation in derivative.eqns:
        read = []
        for atom in equation.invars:
            if not isinstance(atom, jex.Literal) and atom in numbers:
                read.append(numbers[atom])
        results = [var for var in equation.outvars if var not in tangents]
        is_differentiated = len(results) < len(equation.outvars)
        if is_differentiated:
            needed.update(dict.fromkeys(read))
        if not results:
            continue

        key = None
        if equation.primitive.name == "name":
            key = keys.get(equation.params["name"])
        for var in results:
            nbytes = 0 if key is None else bytes_of(key, var.aval)
            numbers[var] = len(values)
            values.append(_Value(key=key, bytes=nbytes, producer=len(operands)))
        # A loop that computes values and tangents together does so in thirds: a product
        # has one value, and a tangent for each operand.
        share = 1 / 3 if is_differentiated else 1.0
        operands.append(tuple(read))
        works.append(work_of(equation).times(share))
    return Recomputation(
        count=placed.runs,
        is_body=region.is_body,
        forward=total(map(work_of, region.jaxpr.eqns)),
        values=tuple(values),
        operands=tuple(operands),
        works=tuple(works),
        needed=tuple(needed),
    )


def _derivative(placed: Placed) -> jex.Jaxpr:
    """The jaxpr of a region's values and tangents, with a name for each value. Its
    arguments are those of the region, and a tangent for each that is differentiated.
    """
    region = placed.region
    structs = list(map(typed_struct_of, region.invars))

    def derivative(*arrays: Any) -> Any:
        inputs = arrays[: len(structs)]
        tangents = arrays[len(structs) :]

        def run(*varied: Any) -> list[Any]:
            remaining = iter(varied)
            args = list(inputs)
            for number, is_active in enumerate(placed.active):
                if is_active:
                    args[number] = next(remaining)
            return region.named(args, can_be_kept)

        varied = tuple(itertools.compress(inputs, placed.active))
        return jax.jvp(run, varied, tuple(tangents))

    arguments = [*structs, *itertools.compress(structs, placed.active)]
    closed = jax.make_jaxpr(derivative)(*arguments)

    def inlined(*arrays: Any) -> list[Any]:
        return evaluated(closed.jaxpr, closed.consts, arrays, _inlined)

    return jax.make_jaxpr(inlined)(*arguments).jaxpr


def _inlined(jaxpr: Any, equation: Any, arrays: list[Any]) -> Sequence[Any]:
    name = equation.primitive.name
    if name in CALLS:
        return evaluated(*opened(equation.params[CALLS[name]]), arrays, _inlined)
    return applied(jaxpr, equation, arrays)


def can_be_kept(key: ValueKey) -> bool:
    """Whether a value is an array of numbers, larger than one element."""
    return (
        any(size > 1 for size in key.shape)
        and 0 not in key.shape
        and not (key.dtype.startswith("key<"))
    )

"""What the backward pass of a region needs, and what it costs to keep only some of the
region's values: by the residuals of `jax.vjp`.
"""

import dataclasses
import itertools
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex

from ..._step import array_leaves, typed_struct_of
from .regions import Placed, ValueKey, flat
from .work import Work, is_var, total, work_of


class Kept(NamedTuple):
    """The consequences of keeping some values.

    - `bytes`: the bytes of the kept values that the backward pass reads, on one device.
    - `work`: the work of computing the others again, on all devices together.
    - `keys`: the keys of the values that are kept and read.
    """

    bytes: int
    work: Work
    keys: frozenset[ValueKey]


class _Source(NamedTuple):
    """The equation that computes a value.

    - `position`: its position.
    - `key`: the key of its result, if it names one.
    - `operands`: the variables that it reads.
    """

    position: int
    key: ValueKey | None
    work: Work
    operands: tuple[Any, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Recomputation:
    """The values of a region that its backward pass needs, and how they are computed.

    - `placed`: the region.
    - `needed`: the variables that the backward pass reads.
    - `sources`: the equation that computes each variable; inputs have none.
    - `bytes_by_key`: the bytes of each value that can be kept, on one device.
    """

    placed: Placed
    needed: tuple[Any, ...]
    sources: dict[Any, _Source]
    bytes_by_key: dict[ValueKey, int]

    @property
    def forward(self) -> Work:
        """The work of one run of the region."""
        return total(map(work_of, self.placed.region.jaxpr.eqns))

    def keeping(self, keys: Collection[ValueKey]) -> Kept:
        """The consequences of keeping the values with these keys, in all runs of the
        region: from what the backward pass needs, equations are computed again back to
        values that are kept, and to inputs. `needed` are the variables that it needs,
        and `sources` the equation that computes each.
        """
        kept_keys: set[ValueKey] = set()
        works: list[Work] = []
        visited: set[int] = set()
        waiting_variables = list(self.needed)
        while waiting_variables:
            source = self.sources.get(waiting_variables.pop())
            if source is None or source.position in visited:
                continue
            visited.add(source.position)
            if source.key is not None and source.key in keys:
                kept_keys.add(source.key)
            else:
                works.append(source.work)
                waiting_variables += source.operands
        run_count = self.placed.run_count
        return Kept(
            bytes=run_count * sum(self.bytes_by_key[key] for key in kept_keys),
            work=total(works).times(run_count),
            keys=frozenset(kept_keys),
        )


def recomputation_of(
    placed: Placed,
    bytes_of: Callable[[ValueKey, Any], int],
) -> Recomputation:
    """What the backward pass of a region needs, and the equations that compute it.
    `bytes_of` gives the bytes of a value on one device, from its key and its type
    (`aval`). A source is the equation that computes a variable.
    """
    key_by_name = {key.name: key for key in placed.region.all_keys}
    residuals = _residuals(placed)
    sources: dict[Any, _Source] = {}
    bytes_by_key: dict[ValueKey, int] = {}
    for position, equation in enumerate(residuals.eqns):
        key = None
        if equation.primitive.name == "name":
            key = key_by_name.get(equation.params["name"])
        if key is not None:
            bytes_by_key[key] = bytes_of(key, equation.outvars[0].aval)
        operands = tuple(filter(is_var, equation.invars))
        source = _Source(
            position=position, key=key, work=work_of(equation), operands=operands
        )
        sources.update(dict.fromkeys(equation.outvars, source))
    needed = tuple(filter(is_var, residuals.outvars))
    return Recomputation(
        placed=placed, needed=needed, sources=sources, bytes_by_key=bytes_by_key
    )


def _residuals(placed: Placed) -> jex.Jaxpr:
    """The jaxpr of what the backward pass of a region reads, with a name for each value
    that can be kept. The function that `jax.vjp` returns holds it as its leaves.
    """
    region = placed.region
    structs = list(map(typed_struct_of, region.invars))

    def residuals(*arrays: Any) -> list[Any]:
        """The arrays that the derivative by the active (differentiated) inputs holds,
        for all inputs of the region.
        """

        def run(*varied: Any) -> list[Any]:
            remaining = iter(varied)
            args = list(arrays)
            for position, is_active in enumerate(placed.active):
                if is_active:
                    args[position] = next(remaining)
            return region.named(args, can_be_kept)

        _, backward = jax.vjp(run, *itertools.compress(arrays, placed.active))
        return array_leaves(backward)

    closed = jax.make_jaxpr(residuals)(*structs)
    return flat(closed.jaxpr, closed.consts, structs).jaxpr


def can_be_kept(key: ValueKey) -> bool:
    """Whether a value is an array of numbers, larger than one element."""
    return (
        any(size > 1 for size in key.shape)
        and 0 not in key.shape
        and not key.dtype.startswith("key<")
    )

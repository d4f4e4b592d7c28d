"""What is suspicious in shard_map bodies that JAX does not check, read off the jaxpr."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from .._ground.spec import entries_of, entry_axes
from .._step.equations import carry_of, frames_of, opened
from .._step.lines import is_library, place_text


_SUMS = ("psum", "psum2", "psum_invariant", "pmax", "pmin", "pmean")
_ALIKE = (*_SUMS, "all_gather", "all_gather_invariant")
_APART = ("ppermute", "all_to_all", "psum_scatter", "reduce_scatter", "axis_index")
_Axes = frozenset[str]


def suspects(closed: Any) -> tuple[str, ...]:
    """What is suspicious, in words, each once."""
    found: dict[str, None] = {}
    for equation in equations_of(opened(closed)[0]):
        if equation.primitive.name == "shard_map" and not equation.params["check_vma"]:
            found.update(dict.fromkeys(_Body(equation).said()))
    return tuple(found)


def equations_of(jaxpr: Any) -> Iterator[Any]:
    """All equations, those within others too."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in _programs(equation):
            yield from equations_of(inner)


def _programs(equation: Any) -> list[Any]:
    held = [one for param in equation.params.values() for one in (param if isinstance(param, tuple) else (param,))]
    return [opened(one)[0] for one in held if isinstance(one, jex.ClosedJaxpr | jex.Jaxpr)]


class _Body:
    """One body: along which mesh axes the devices' values may differ."""

    def __init__(self, equation: Any):
        self.equation, self.words = equation, []
        self.sizes = dict(equation.params["mesh"].shape)

    def said(self) -> list[str]:
        params = self.equation.params
        ins = [self.cut(spec) for spec in params["in_specs"]]
        body = opened(params["jaxpr"])[0]
        for var, differs, spec in zip(body.outvars, self.flow(body, ins), params["out_specs"], strict=True):
            if left := [axis for axis in self.sizes if axis in differs - self.cut(spec) and self.sizes[axis] > 1]:
                made = next((one for one in reversed(body.eqns) if var in one.outvars), self.equation)
                what = f"may differ along {', '.join(left)}, and `out_specs` say that it does not"
                self.say(made, f"{what}: is a psum missing?")
        self.positions(body, params["in_specs"])
        return self.words

    def cut(self, spec: Any) -> _Axes:
        return frozenset(axis for entry in entries_of(spec) for axis in entry_axes(entry))

    def say(self, equation: Any, what: str) -> None:
        frame = next((one for one in frames_of(equation) if not is_library(one)), None)
        self.words.append(f"`{equation.primitive.name}` at {place_text(frame)}: {what}")

    def flow(self, jaxpr: Any, ins: Sequence[_Axes]) -> list[_Axes]:
        """Along which axes the results of a program may differ, from what it takes."""
        known: dict[Any, _Axes] = dict(zip(jaxpr.invars, ins, strict=True))

        def axes(atom: Any) -> _Axes:
            return frozenset() if isinstance(atom, jex.Literal) else known.get(atom, frozenset())

        for equation in jaxpr.eqns:
            known.update(zip(equation.outvars, self.made(equation, [*map(axes, equation.invars)]), strict=True))
        return [*map(axes, jaxpr.outvars)]

    def made(self, equation: Any, taken: list[_Axes]) -> list[_Axes]:
        name, count, union = equation.primitive.name, len(equation.outvars), frozenset().union(*taken)
        axes = self.axes(equation)
        if name in _ALIKE:
            for axis in (axis for axis in axes if axis not in union and self.sizes.get(axis, 1) > 1):
                self.say(equation, f"is over {axis}, along which all devices have the same: is it doubled?")
            dtype = equation.outvars[0].aval.dtype
            if name in _SUMS[:3] and jnp.issubdtype(dtype, np.floating) and jnp.finfo(dtype).bits < 32:
                self.say(equation, f"adds up in {dtype}: its error grows with the devices")
            return [one - axes for one in taken] if len(taken) == count else [union - axes] * count
        if name in _APART:
            return [union | axes] * count
        programs = _programs(equation)
        if len(programs) == 1 and len(programs[0].invars) == len(taken) and len(programs[0].outvars) == count:
            if name != "scan":
                return self.flow(programs[0], taken)
            words, (first, carried) = len(self.words), carry_of(equation)
            for _ in self.sizes:  # what a turn makes the next one takes
                for at, one in enumerate(self.flow(programs[0], taken)[:carried]):
                    taken[first + at] |= one
                del self.words[words:]
            return self.flow(programs[0], taken)
        return [union] * count

    def axes(self, equation: Any) -> _Axes:
        named = equation.params.get("axes", equation.params.get("axis_name", ()))
        return frozenset(
            one for one in (named if isinstance(named, tuple | list) else (named,)) if isinstance(one, str)
        )

    def positions(self, body: Any, in_specs: Sequence[Any]) -> None:
        inside = [*equations_of(body)]
        offset = frozenset().union(*(self.axes(one) for one in inside if one.primitive.name == "axis_index"))
        cut = {
            var.aval.shape[dim]: axis
            for var, spec in zip(body.invars, in_specs, strict=True)
            for dim, entry in enumerate(entries_of(spec))
            for axis in entry_axes(entry)
            if axis not in offset and self.sizes[axis] > 1
        }
        for one in inside:
            shape = one.outvars[0].aval.shape if one.primitive.name == "iota" else ()
            if shape and shape[one.params["dimension"]] in cut:
                axis = cut[shape[one.params["dimension"]]]
                self.say(one, f"counts from 0 on every device along {axis}, and no axis_index offsets it")

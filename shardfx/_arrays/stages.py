"""The stages of a `filter_jit` function: traced, lowered, compiled.

Each also has the attributes of the stage that `jax.jit` returns, such as `as_text()` and `memory_analysis()`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import jax

from ..topology import MeshSpec


P = ParamSpec("P")
R = TypeVar("R")


@dataclasses.dataclass(frozen=True)
class TracedArray:
    """One array that a traced function takes or returns.

    **Arguments:**

    - `path`: the name of its argument, and the path within it: "params/layers/0/w". Of a result the path within what
        the function returns.
    - `struct`: its shape and dtype, and its sharding where `in_shardings`, `out_shardings` or the argument says it.
    - `is_donated`: whether its buffer may be reused.
    - `argument`: the position of its argument; `None` for results, and for arrays of the function itself.
    - `name`: the name of the array in the program's text; "" for results.
    """

    path: str
    struct: jax.ShapeDtypeStruct
    is_donated: bool = False
    argument: int | None = None
    name: str = ""


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Traced(Generic[P, R]):
    """A function traced for arguments of some shapes.

    **Arguments:**

    - `arrays`: the arrays that it takes, one for each input of the jaxpr.
    - `results`: the arrays that it returns, one for each output of the jaxpr.
    - `traced`: the object that `jax.jit(...).trace` returned.
    - `mesh`: the mesh of the first plan among its shardings, with the slices that it spans; `None` without plans.
    """

    _call: Any
    traced: jax.stages.Traced
    arrays: tuple[TracedArray, ...]
    results: tuple[TracedArray, ...]
    mesh: MeshSpec | None

    @property
    def jaxpr(self) -> Any:
        """The closed jaxpr. Its inputs are `arrays`, and its outputs are `results`."""
        return self.traced.jaxpr

    def __getattr__(self, name: str) -> Any:
        return getattr(self.traced, name)

    @property
    def argument_paths(self) -> dict[str, str]:
        """The path of each array that the function takes, by the array's name in the program's text."""
        return {one.name: one.path for one in self.arrays}

    def lower(self, *, lowering_platforms: Sequence[str] | None = None) -> "Lowered[P, R]":
        """Lowers the function for the named platforms, or for the platform of its shardings' devices.

        Plans without devices need `lowering_platforms`, and no device.
        """
        named = None if lowering_platforms is None else tuple(lowering_platforms)
        return Lowered(self._call, self.traced.lower(lowering_platforms=named), self.argument_paths)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Lowered(Generic[P, R]):
    """A function lowered for arguments of some shapes."""

    _call: Any
    lowered: jax.stages.Lowered
    argument_paths: dict[str, str]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.lowered, name)

    def compile(self, compiler_options: dict[str, Any] | None = None) -> "Compiled[P, R]":
        """Compiles the function for its devices."""
        return Compiled(self._call, self.lowered.compile(compiler_options), self.argument_paths)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Compiled(Generic[P, R]):
    """A function compiled for arguments of some shapes, and for the static arguments that it was lowered with."""

    _call: Any
    compiled: jax.stages.Compiled
    argument_paths: dict[str, str]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._call(self.compiled, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.compiled, name)

"""The stages of a function of `filter_jit`: traced, lowered, compiled.

Each stage also has the attributes of the stage that `jax.jit` returns, such as
`as_text()` and `memory_analysis()`. Its `argument_paths` has the path of each array
that the function takes, by the array's name in the program's text, such as "arrays[0]".
Its `_call` runs a compiled stage of `jax.jit` on the arguments of a call.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

import jax

from ..topology import MeshSpec


P = ParamSpec("P")
R = TypeVar("R")


@dataclasses.dataclass(frozen=True)
class TracedArray:
    """One array that a traced function takes or returns.

    **Arguments:**

    - `path`: the name of the argument, and the path of the array within it, such as
      "params/layers/0/w". For a result, the path within the results of the function.
    - `struct`: the shape and dtype, and the sharding if `in_shardings`, `out_shardings`
      or the argument has one.
    - `is_donated`: whether the program may reuse the buffer of the array.
    - `argument`: the position of the argument that holds the array; `None` for results,
      and for arrays that the function itself holds.
    - `name`: the name of the array in the program's text, such as "arrays[0]"; "" for
      results.
    """

    path: str
    struct: jax.ShapeDtypeStruct
    is_donated: bool = False
    argument: int | None = None
    name: str = ""


class TracedCall(NamedTuple):
    """A function of `filter_jit`, and the arguments that it was traced with: trees with
    structs in the place of arrays.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def _attribute_of(stage: object, field: str, name: str) -> Any:
    """The attribute `name` of JAX's own object, which the field `field` of a stage
    holds. A stage that `copy` makes has no fields yet.
    """
    if field not in vars(stage):
        raise AttributeError(name)
    return getattr(vars(stage)[field], name)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Traced(Generic[P, R]):
    """A function of `filter_jit` that is traced for arguments of certain shapes.

    **Arguments:**

    - `arrays`: the arrays that the function takes, one for each input of the jaxpr.
    - `results`: the arrays that the function returns, one for each output of the jaxpr.
    - `traced`: the object that `jax.jit(...).trace` returned.
    - `mesh`: the mesh of the first plan in `in_shardings` and `out_shardings`, as a
      MeshSpec, which also says how the mesh spans TPU slices; `None` without plans.
    - `traced_call`: the function and the arguments that were traced.
    """

    _call: Any
    traced: jax.stages.Traced
    arrays: tuple[TracedArray, ...]
    results: tuple[TracedArray, ...]
    mesh: MeshSpec | None
    traced_call: TracedCall

    @property
    def jaxpr(self) -> Any:
        """The closed jaxpr. Its inputs are `arrays`, and its outputs are `results`."""
        return self.traced.jaxpr

    def __getattr__(self, name: str) -> Any:
        return _attribute_of(self, "traced", name)

    @property
    def argument_paths(self) -> dict[str, str]:
        """The path of each array that the function takes, by the name of the array in
        the program's text.
        """
        return {array.name: array.path for array in self.arrays}

    def lower(
        self,
        *,
        lowering_platforms: Sequence[str] | None = None,
    ) -> "Lowered[P, R]":
        """Lowers the function for the given platforms, or for the platform of its
        devices.

        If the plans of the function have no devices, `lowering_platforms` is needed.
        """
        named = None if lowering_platforms is None else tuple(lowering_platforms)
        return Lowered(
            _call=self._call,
            lowered=self.traced.lower(lowering_platforms=named),
            argument_paths=self.argument_paths,
        )


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Lowered(Generic[P, R]):
    """A function of `filter_jit` that is lowered for arguments of certain shapes."""

    _call: Any
    lowered: jax.stages.Lowered
    argument_paths: dict[str, str]

    def __getattr__(self, name: str) -> Any:
        return _attribute_of(self, "lowered", name)

    def compile(
        self,
        compiler_options: dict[str, Any] | None = None,
    ) -> "Compiled[P, R]":
        """Compiles the function for its devices. `compiler_options` has options of XLA,
        by name.
        """
        return Compiled(
            _call=self._call,
            compiled=self.lowered.compile(compiler_options),
            argument_paths=self.argument_paths,
        )


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Compiled(Generic[P, R]):
    """A function of `filter_jit` that is compiled for certain shapes and certain static
    arguments.
    """

    _call: Any
    compiled: jax.stages.Compiled
    argument_paths: dict[str, str]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._call(self.compiled, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return _attribute_of(self, "compiled", name)

"""A case as plain data: the program, how its arrays lie, and what came of it.

A `Program` is a first array and operations that follow one another: the result of each
is the first operand of the next. A model layer is a program of one operation. A
`Layout` is a mesh and a spec for each array. Both travel as JSON, so that a failure is
replayed, shrunk and stored as it was drawn.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any


# One string of mesh axes per dimension: ("a", "", "bc") is P("a", None, ("b", "c")).
Spec = tuple[str, ...]

# The five meshes; axes are named by letters in this order.
MESHES: dict[str, tuple[int, ...]] = {
    "2x2x2": (2, 2, 2),
    "4x2": (4, 2),
    "2x4": (2, 4),
    "2x2x1": (2, 2, 1),
    "3x2": (3, 2),
}


def axes_of(mesh: str) -> dict[str, int]:
    """The sizes of a mesh's axes by name."""
    sizes = MESHES[mesh]
    return dict(zip("abc"[: len(sizes)], sizes, strict=True))


def tiles(spec: Spec, mesh: str) -> tuple[int, ...]:
    """Into how many tiles the spec cuts each dimension."""
    sizes = axes_of(mesh)
    return tuple(math.prod(sizes[axis] for axis in entry) for entry in spec)


@dataclasses.dataclass(frozen=True)
class Operand:
    """An array that a program takes: its shape, and what its values are.

    `values` is "normal", or "below:16" (indices in range), "loose:16" (also out of
    range), "permuted:16" (indices, each at most once), "apart:16" (each at most once,
    also out of range), "positive", or "mask".
    """

    shape: tuple[int, ...]
    values: str = "normal"

    @property
    def is_index(self) -> bool:
        """Whether the values are integers by their kind."""
        return ":" in self.values


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation, with its parameters and the arrays that it takes beside the first."""

    name: str
    parameters: Mapping[str, Any]
    operands: tuple[Operand, ...]


@dataclasses.dataclass(frozen=True)
class Program:
    """A first array and the operations that follow. With `gradient`, the program is the
    gradient of the result's product with one more array, its cotangent.
    """

    dtype: str
    first: Operand
    operations: tuple[Operation, ...]
    gradient: bool

    @property
    def operands(self) -> tuple[Operand, ...]:
        """All arrays but the cotangent, in order."""
        operands = [self.first]
        for op in self.operations:
            operands += op.operands
        return tuple(operands)

    @property
    def name(self) -> str:
        """The names of the operations, and whether it is a gradient."""
        names = "+".join(op.name for op in self.operations)
        return f"{names} gradient" if self.gradient else names


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the arrays of a program lie.

    **Arguments:**

    - `mesh`: the name of one of the five meshes.
    - `arguments`: the spec of each argument, the cotangent last.
    - `constraints`: a constraint on each argument but the cotangent, or `None`.
    - `between`: a constraint on the result of each operation, or `None`.
    - `results`: the spec of each result, or `None` where the compiler chooses.
    """

    mesh: str
    arguments: tuple[Spec, ...]
    constraints: tuple[Spec | None, ...]
    between: tuple[Spec | None, ...]
    results: tuple[Spec, ...] | None


@dataclasses.dataclass(frozen=True)
class Case:
    """A program under one layout. `seed` and `number` say which draw it is."""

    program: Program
    layout: Layout
    seed: int = 0
    number: int = 0


def to_json(case: Case) -> dict[str, Any]:
    """The case as JSON holds it."""
    return dataclasses.asdict(case)


def from_json(data: Mapping[str, Any]) -> Case:
    """The case that `to_json` wrote."""
    program = data["program"]
    layout = data["layout"]
    return Case(
        program=Program(
            dtype=program["dtype"],
            first=_operand(program["first"]),
            operations=tuple(_operation(op) for op in program["operations"]),
            gradient=program["gradient"],
        ),
        layout=Layout(
            mesh=layout["mesh"],
            arguments=tuple(tuple(spec) for spec in layout["arguments"]),
            constraints=tuple(_spec(spec) for spec in layout["constraints"]),
            between=tuple(_spec(spec) for spec in layout["between"]),
            results=_specs(layout["results"]),
        ),
        seed=data["seed"],
        number=data["number"],
    )


def _operand(data: Mapping[str, Any]) -> Operand:
    return Operand(shape=tuple(data["shape"]), values=data["values"])


def _operation(data: Mapping[str, Any]) -> Operation:
    operands = tuple(_operand(operand) for operand in data["operands"])
    return Operation(data["name"], data["parameters"], operands)


def _spec(spec: list[str] | None) -> Spec | None:
    return None if spec is None else tuple(spec)


def _specs(specs: list[list[str]] | None) -> tuple[Spec, ...] | None:
    return None if specs is None else tuple(tuple(spec) for spec in specs)

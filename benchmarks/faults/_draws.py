"""Draws programs and layouts. The same seed and number give the same case in every
process of one version of JAX.
"""

import random
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from . import (
    bank_attention as _attention,
    bank_convolution as _convolution,
    bank_residual as _residual,
    bank_sequence as _sequence,
    operations_indexed as _indexed,
    operations_reduced as _reduced,
    operations_shaped as _shaped,
)
from ._data import MESHES, Case, Layout, Operand, Operation, Program, Spec, axes_of
from ._layers import LAYERS, Layer, draw as draw_layer
from ._operations import OPERATIONS, RandomOperation, size
from ._values import dtype_of


# Importing these modules fills the two tables.
FILLED = (
    _attention,
    _convolution,
    _residual,
    _sequence,
    _indexed,
    _reduced,
    _shaped,
)
DENSITIES = (0.4, 0.7, 0.9)


def draw(seed: int, number: int, layouts: int, family: str | None = None) -> list[Case]:
    """One program under several layouts.

    Even numbers take the layers of the bank in turn, odd ones random programs. With a
    `family`, all take the layers of this family.
    """
    draws = random.Random(f"faults {seed} {number}")
    if family is not None:
        layers = [entry for entry in LAYERS.values() if entry.family == family]
        return _of_layer(
            draws=draws,
            entry=layers[number % len(layers)],
            layouts=layouts,
            seed=seed,
            number=number,
        )
    if number % 2 == 0:
        layers = list(LAYERS.values())
        return _of_layer(
            draws=draws,
            entry=layers[number // 2 % len(layers)],
            layouts=layouts,
            seed=seed,
            number=number,
        )
    program = _random_program(draws)
    is_uneven = draws.random() < 0.5
    return [
        Case(program, layout(draws, program, is_uneven), seed, number)
        for _ in range(layouts)
    ]


def _of_layer(
    draws: random.Random, entry: Layer, layouts: int, seed: int, number: int
) -> list[Case]:
    sizes = draws.choices(("even", "sixes", "odd"), (6, 2, 2))[0]
    program = draw_layer(entry, draws, sizes)
    if not traces(program):
        # Some layers split a dimension, and odd sizes do not split.
        program = draw_layer(entry, draws, "even")
    is_uneven = sizes == "odd"
    meshes = ("3x2", "2x2x1", "2x2x2") if sizes == "sixes" else tuple(MESHES)
    return [
        Case(program, layout(draws, program, is_uneven, meshes), seed, number)
        for _ in range(layouts)
    ]


def layout(
    draws: random.Random,
    program: Program,
    is_uneven: bool,
    meshes: Sequence[str] = tuple(MESHES),
) -> Layout:
    """A random layout. JAX refuses arguments and results whose tiles are not equal, so
    uneven tiles come from constraints.
    """
    mesh = draws.choice(meshes)
    density = draws.choice(DENSITIES)
    shapes = [operand.shape for operand in program.operands]
    steps = shapes_between(program)
    specs = [_spec(draws, shape, mesh, density) for shape in shapes]
    share = 0.25 if is_uneven else 0.1
    constraints: list[Spec | None] = [None] * len(shapes)
    between: list[Spec | None] = [None] * len(steps)
    for constrained, of_shapes in ((constraints, shapes), (between, steps)):
        for place, shape in enumerate(of_shapes):
            if draws.random() < share:
                constrained[place] = _spec(
                    draws=draws,
                    shape=shape,
                    mesh=mesh,
                    density=density,
                    is_uneven=is_uneven,
                )
    results: tuple[Spec, ...] | None = None
    if draws.random() < 0.6:
        results = (_spec(draws, steps[-1], mesh, density),)
    if program.gradient:
        specs.append(results[0] if results else ("",) * len(steps[-1]))
        results = None
        if draws.random() < 0.7:
            floats = float_places(program)
            results = tuple(specs[place] for place in floats)
    return Layout(
        mesh=mesh,
        arguments=tuple(specs),
        constraints=tuple(constraints),
        between=tuple(between),
        results=results,
    )


def _spec(
    draws: random.Random,
    shape: Sequence[int],
    mesh: str,
    density: float,
    is_uneven: bool = False,
) -> Spec:
    """A random spec. Each axis cuts one dimension with this probability, if it divides
    the dimension's tile, or if uneven tiles are allowed.
    """
    if not shape:
        return ()
    axes = list(axes_of(mesh).items())
    draws.shuffle(axes)
    entries = ["" for _ in shape]
    tile = list(shape)
    for axis, extent in axes:
        if draws.random() >= density:
            continue
        dim = draws.randrange(len(shape))
        divides = tile[dim] % extent == 0
        if divides or (is_uneven and shape[dim] > 1):
            entries[dim] += axis
            tile[dim] = -(-tile[dim] // extent)
    return tuple(entries)


def float_places(program: Program) -> list[int]:
    """The places of the operands that have a gradient."""
    return [
        place for place, operand in enumerate(program.operands) if not operand.is_index
    ]


def shapes_between(program: Program) -> list[tuple[int, ...]]:
    """The shape of each operation's result."""
    return [struct.shape for struct in _structs(program)]


def traces(program: Program) -> bool:
    """Whether JAX takes the program's shapes."""
    try:
        shapes_between(program)
    except (TypeError, ValueError, ArithmeticError, IndexError, KeyError):
        return False
    return True


def _structs(program: Program) -> list[jax.ShapeDtypeStruct]:
    current = _struct(program.first, program.dtype)
    results = []
    for op in program.operations:
        current = result_of(op, current, program.dtype)
        results.append(current)
    return results


def result_of(
    op: Operation, first: jax.ShapeDtypeStruct, dtype: str
) -> jax.ShapeDtypeStruct:
    """Shape and dtype of one operation's result."""
    operands = [_struct(operand, dtype) for operand in op.operands]
    return jax.eval_shape(lambda *arrays: apply(op, arrays, None), first, *operands)


def apply(op: Operation, arrays: Sequence[Any], mesh: Any) -> Any:
    """The operation, or the layer, on arrays."""
    if op.name in OPERATIONS:
        return OPERATIONS[op.name].apply(*arrays, **op.parameters)
    entry = LAYERS[op.name]
    if entry.takes_mesh:
        return entry.function(*arrays, mesh=mesh)
    return entry.function(*arrays)


def _struct(operand: Operand, dtype: str) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(operand.shape, dtype_of(operand, dtype))


def _random_program(draws: random.Random) -> Program:
    """One to three random operations. What JAX refuses is drawn again."""
    while True:
        program = _tried(draws)
        if program is not None:
            return program


def _tried(draws: random.Random) -> Program | None:
    choice = list(OPERATIONS.values())
    entry = draws.choices(choice, [op.weight for op in choice])[0]
    dtype = entry.dtypes[0]
    if draws.random() < 0.35:
        dtype = draws.choice(entry.dtypes)
    shape = tuple(size(draws) for _ in range(draws.randint(*entry.ranks)))
    if entry.name == "convolution":
        spatial = [draws.choice((4, 8, 8, 6, 7, 5, 9)) for _ in range(len(shape) - 2)]
        shape = (*shape[:2], *spatial)
    values = "index:20" if dtype == "int32" else "normal"
    first = Operand(shape, values)
    operations: list[Operation] = []
    current = _struct(first, dtype)
    has_gradient = dtype in ("float32", "bfloat16")
    for _ in range(draws.choices((1, 2, 3), (6, 3, 1.5))[0]):
        step = _next(draws, entry, current, dtype)
        if step is None:
            break
        operations.append(step)
        has_gradient = has_gradient and entry.gradient
        current = result_of(step, current, dtype)
        rank = len(current.shape)
        fitting = [
            op
            for op in choice
            if op.ranks[0] <= rank <= op.ranks[1] and dtype in op.dtypes
        ]
        if str(current.dtype) != dtype or not fitting:
            break
        entry = draws.choices(fitting, [op.weight for op in fitting])[0]
    if not operations:
        return None
    has_gradient = has_gradient and jnp.issubdtype(current.dtype, jnp.floating)
    return Program(
        dtype=dtype,
        first=first,
        operations=tuple(operations),
        gradient=bool(has_gradient and draws.random() < 0.5),
    )


def _next(
    draws: random.Random,
    entry: RandomOperation,
    current: jax.ShapeDtypeStruct,
    dtype: str,
) -> Operation | None:
    """An operation of this kind on the current array, or `None` if JAX refuses it."""
    shape = tuple(current.shape)
    if not shape or not _reduced.fits(shape):
        return None
    parameters, operands = entry.draw(draws, shape)
    op = Operation(entry.name, parameters, tuple(operands))
    if not all(_reduced.fits(operand.shape) for operand in operands):
        return None
    try:
        result = result_of(op, current, dtype)
    except (TypeError, ValueError, ArithmeticError, IndexError, NotImplementedError):
        return None
    return op if _reduced.fits(result.shape) or result.shape == () else None

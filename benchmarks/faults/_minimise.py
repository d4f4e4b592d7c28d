"""Makes a failing case smaller while it fails in the same way.

Each step proposes smaller cases: fewer operations, no gradient, fewer constraints,
fewer mesh axes, plain parameters, smaller sizes. The first that fails like the case is
the next one. What JAX refuses is passed over.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ._data import Case, Layout, Operand, Operation, Program, Spec, tiles
from ._draws import shapes_between, traces
from ._layers import LAYERS, sized


# The plain value of a parameter, for each of its entries.
_PLAIN: dict[str, Any] = {
    "strides": 1,
    "stride": 1,
    "dilation": 1,
    "kernel_dilation": 1,
    "groups": 1,
    "batch_groups": 1,
    "reverse": False,
    "with_itself": False,
    "keeps": False,
    "mode": None,
    "padding": 0,
    "low": 0,
}


def minimised(
    case: Case, fails: Callable[[Case], bool], seconds: float
) -> tuple[Case, int]:
    """The smallest case that was found within the time, and how many were tried.

    `fails` runs a case and says whether it fails like the first one.
    """
    deadline = time.monotonic() + seconds
    seen: set[str] = set()
    tried = 0
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for candidate in candidates(case):
            if time.monotonic() > deadline:
                return case, tried
            if repr(candidate) in seen:
                continue
            seen.add(repr(candidate))
            tried += 1
            if fails(candidate):
                case = candidate
                is_smaller = True
                break
    return case, tried


def candidates(case: Case) -> Iterator[Case]:
    """Smaller cases, those that remove most first."""
    for program, layout in _smaller(case.program, case.layout):
        if _is_possible(program, layout):
            yield dataclasses.replace(case, program=program, layout=layout)


def _smaller(program: Program, layout: Layout) -> Iterator[tuple[Program, Layout]]:
    yield from _fewer_operations(program, layout)
    if program.gradient:
        yield _forward(program, layout)
    for smaller in _fewer_constraints(layout):
        yield program, smaller
    if program.dtype != "float32":
        yield dataclasses.replace(program, dtype="float32"), layout
    for smaller in _fewer_axes(layout):
        yield program, smaller
    for smaller in _plainer(program):
        yield smaller, layout
    for smaller in _lesser_sizes(program):
        yield smaller, layout


def _is_possible(program: Program, layout: Layout) -> bool:
    """Whether the operations fit together, and the arguments divide. JAX says the rest
    when it runs the case.
    """
    if len(layout.between) != len(program.operations) or not traces(program):
        return False
    shapes = [operand.shape for operand in program.operands]
    if program.gradient:
        shapes.append(shapes_between(program)[-1])
    for shape, spec in zip(shapes, layout.arguments, strict=True):
        if len(shape) != len(spec):
            return False
        cuts = tiles(spec, layout.mesh)
        if any(size % cut for size, cut in zip(shape, cuts, strict=True)):
            return False
    return True


def _fewer_operations(
    program: Program, layout: Layout
) -> Iterator[tuple[Program, Layout]]:
    operations = program.operations
    if len(operations) < 2:
        return
    yield _without_last(program, layout)
    # The first array is what the first operation made, as it lay.
    first_shape = shapes_between(program)[0]
    skipped = 1 + len(operations[0].operands)
    whole: Spec = ("",) * len(first_shape)
    shorter = Program(
        dtype=program.dtype,
        first=Operand(first_shape, program.first.values),
        operations=operations[1:],
        gradient=program.gradient,
    )
    first_spec = layout.arguments[0]
    is_alike = len(first_spec) == len(first_shape)
    for spec in (layout.between[0], first_spec if is_alike else None, whole):
        if spec is None:
            continue
        yield (
            shorter,
            Layout(
                mesh=layout.mesh,
                arguments=(whole, *layout.arguments[skipped:]),
                constraints=(spec, *layout.constraints[skipped:]),
                between=layout.between[1:],
                results=None if program.gradient else layout.results,
            ),
        )


def _without_last(program: Program, layout: Layout) -> tuple[Program, Layout]:
    shorter = dataclasses.replace(program, operations=program.operations[:-1])
    count = len(shorter.operands)
    arguments = layout.arguments[:count]
    if program.gradient:
        cotangent: Spec = ("",) * len(shapes_between(shorter)[-1])
        arguments = (*arguments, cotangent)
    smaller = Layout(
        mesh=layout.mesh,
        arguments=arguments,
        constraints=layout.constraints[:count],
        between=layout.between[:-1],
        results=None,
    )
    return shorter, smaller


def _forward(program: Program, layout: Layout) -> tuple[Program, Layout]:
    *arguments, cotangent = layout.arguments
    forward = dataclasses.replace(layout, arguments=tuple(arguments))
    forward = dataclasses.replace(forward, results=(cotangent,))
    return dataclasses.replace(program, gradient=False), forward


def _fewer_constraints(layout: Layout) -> Iterator[Layout]:
    if layout.results is not None:
        yield dataclasses.replace(layout, results=None)
    for place, spec in enumerate(layout.constraints):
        if spec is None:
            continue
        constraints = _replaced(layout.constraints, place, None)
        without = dataclasses.replace(layout, constraints=constraints)
        yield without
        moved = _replaced(layout.arguments, place, spec)
        yield dataclasses.replace(without, arguments=moved)
    for place, spec in enumerate(layout.between):
        if spec is not None:
            between = _replaced(layout.between, place, None)
            yield dataclasses.replace(layout, between=between)


def _fewer_axes(layout: Layout) -> Iterator[Layout]:
    for field in ("arguments", "constraints", "between", "results"):
        specs: Sequence[Spec | None] = getattr(layout, field) or ()
        for place, spec in enumerate(specs):
            for smaller in _fewer_in(spec or ()):
                changed = {field: _replaced(specs, place, smaller)}
                yield dataclasses.replace(layout, **changed)


def _fewer_in(spec: Spec) -> Iterator[Spec]:
    if sum(bool(entry) for entry in spec) > 1:
        yield ("",) * len(spec)
    for dim, entry in enumerate(spec):
        if entry:
            yield _replaced(spec, dim, "")
        if len(entry) > 1:
            for axis in entry:
                yield _replaced(spec, dim, entry.replace(axis, ""))


def _plainer(program: Program) -> Iterator[Program]:
    for place, op in enumerate(program.operations):
        for name, value in op.parameters.items():
            if name not in _PLAIN:
                continue
            for plain in _plain_values(value, _PLAIN[name]):
                parameters = {**op.parameters, name: plain}
                changed = dataclasses.replace(op, parameters=parameters)
                yield _with_operation(program, place, changed)
        for number, operand in enumerate(op.operands):
            kind, _, limit = operand.values.partition(":")
            if kind == "loose":
                tame = dataclasses.replace(operand, values=f"below:{limit}")
                operands = _replaced(op.operands, number, tame)
                changed = dataclasses.replace(op, operands=operands)
                yield _with_operation(program, place, changed)


def _plain_values(value: Any, plain: Any) -> Iterator[Any]:
    """The value with one of its entries plain."""
    if not isinstance(value, list | tuple):
        if value != plain:
            yield plain
        return
    for place, entry in enumerate(value):
        for changed in _plain_values(entry, plain):
            yield [*value[:place], changed, *value[place + 1 :]]


def _lesser_sizes(program: Program) -> Iterator[Program]:
    op = program.operations[0]
    if op.name in LAYERS:
        sizes = op.parameters["sizes"]
        for letter, size in sizes.items():
            for lesser in _lesser(size):
                smaller = {**sizes, letter: lesser}
                yield sized(LAYERS[op.name], smaller, program.gradient)
        return
    extents: set[int] = set()
    for operand in program.operands:
        extents.update(operand.shape)
    for extent in sorted(extents, reverse=True):
        for lesser in _lesser(extent):
            yield _with_size(program, extent, lesser)


def _lesser(size: int) -> list[int]:
    halves = [size // 2] if size % 2 == 0 else [size - 1]
    return [lesser for lesser in (1, *halves) if 0 < lesser < size]


def _with_size(program: Program, extent: int, lesser: int) -> Program:
    """The program with one size exchanged for another, wherever it stands."""

    def exchanged(operand: Operand) -> Operand:
        kind, _, limit = operand.values.partition(":")
        values = f"{kind}:{lesser}" if limit == str(extent) else operand.values
        return Operand(tuple(_exchanged(operand.shape, extent, lesser)), values)

    operations = []
    for op in program.operations:
        parameters = dict(op.parameters)
        for name in ("to", "high", "sizes", "segments", "classes"):
            if name in parameters:
                parameters[name] = _exchanged(parameters[name], extent, lesser)
        operands = tuple(exchanged(operand) for operand in op.operands)
        operations.append(Operation(op.name, parameters, operands))
    return Program(
        dtype=program.dtype,
        first=exchanged(program.first),
        operations=tuple(operations),
        gradient=program.gradient,
    )


def _exchanged(value: Any, extent: int, lesser: int) -> Any:
    if isinstance(value, list | tuple):
        return [_exchanged(entry, extent, lesser) for entry in value]
    return lesser if value == extent else value


def _with_operation(program: Program, place: int, op: Operation) -> Program:
    operations = _replaced(program.operations, place, op)
    return dataclasses.replace(program, operations=operations)


def _replaced(entries: Sequence[Any], place: int, entry: Any) -> tuple[Any, ...]:
    return (*entries[:place], entry, *entries[place + 1 :])

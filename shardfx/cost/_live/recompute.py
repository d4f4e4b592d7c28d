"""What recomputing each layer would change: the stacks that a loop forward leaves to a loop backward."""

import dataclasses
from collections.abc import Callable

from .._hlo_types import ELEMENTWISE, VIEWS
from .program import Body, LiveOp, OpenedProgram, Uses, reached


@dataclasses.dataclass(frozen=True)
class Recomputed:
    """A step that recomputes each layer in its backward pass, though it is not written so.

    **Arguments:**

    - `values`: the arrays that are then not kept.
    - `kept_bytes`: what is kept in their place: what the loop carries, for each layer.
    - `inside_bytes`: by the identity of a backward loop's body, what one layer takes while it is computed again.
    """

    values: frozenset[int] = frozenset()
    kept_bytes: int = 0
    inside_bytes: dict[int, int] = dataclasses.field(default_factory=dict)


def recomputed(program: OpenedProgram, bytes_of: Callable[[int], int]) -> Recomputed:
    """The hypothesis; one without values where there is nothing to win."""
    uses = Uses(program)
    loops = {id(body): op for op in uses.ops if op.opcode == "while" for body in op.bodies}
    gone: set[int] = set()
    stacks: list[int] = []
    kept, inside = 0, {}
    for op in [one for one in program.entry.ops if one.opcode == "while"]:
        own = [at for at, value in enumerate(op.makes) if _is_stack(op, at, uses) and _reader(value, uses, loops)]
        if not own:
            continue
        length = program.buffers[op.makes[own[0]]].shape[0]
        carried = [op.makes[at] for at in range(len(op.makes)) if not _is_stack(op, at, uses)]
        carried = [value for value in carried if program.buffers[value].shape]
        for at in own:
            value, shape = op.makes[at], program.buffers[op.makes[at]].shape[1:]
            stacks.append(value)
            gone.update((value, op.reads[at], op.bodies[0].carried[at], op.bodies[0].results[at]))
            # What is carried is kept for each layer, and nothing of it is computed again.
            same = next((one for one in carried if program.buffers[one].shape == shape), None)
            if same is not None:
                carried.remove(same)
                kept += bytes_of(value)
            elif not _is_of_others(op, at, own, uses):
                body = id(_reader(value, uses, loops))
                inside[body] = inside.get(body, 0) + bytes_of(value) // length
        kept += sum(length * bytes_of(one) for one in carried)
    if sum(map(bytes_of, stacks)) <= 1.1 * kept:
        return Recomputed()
    return Recomputed(frozenset(gone), kept, inside)


def _is_stack(loop: LiveOp, at: int, uses: Uses) -> bool:
    """Whether a loop writes one slice of an array in each turn and does not read it."""
    body = loop.bodies[0]
    op = uses.maker.get(body.results[at])
    readers = [one for one, _, _ in uses.users.get(body.carried[at], ())]
    return op is not None and op.opcode == "dynamic-update-slice" and readers == [op]


def _reader(value: int, uses: Uses, loops: dict[int, LiveOp]) -> Body | None:
    """The body of the one loop that reads a value."""
    bodies = {id(body): body for _, _, body in uses.users.get(value, ())}
    return next(iter(bodies.values())) if len(bodies) == 1 and next(iter(bodies)) in loops else None


def _is_of_others(loop: LiveOp, at: int, stacks: list[int], uses: Uses) -> bool:
    """Whether what a loop stacks follows by elements from something else that it stacks: a fusion computes it again."""
    written = {_written(loop, one, uses) for one in stacks if one != at}

    def before(value: int) -> tuple[int, ...]:
        op = uses.maker.get(value)
        return op.reads if op is not None and (op.opcode in ELEMENTWISE or op.opcode in VIEWS) else ()

    begun = _written(loop, at, uses)
    return any(value != begun and value in written for value in reached([begun], before))


def _written(loop: LiveOp, at: int, uses: Uses) -> int:
    """The slice that a turn of a loop writes to a stack."""
    value = uses.maker[loop.bodies[0].results[at]].reads[1]
    while (op := uses.maker.get(value)) is not None and op.opcode == "reshape":
        value = op.reads[0]
    return value

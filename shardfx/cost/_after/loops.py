"""What compilers take out of loops: reductions that are only added up."""

from .._hlo_text import HloModule, Instruction
from .graph import (
    Computation,
    carried,
    in_each,
    index_of,
    loops_of,
    renamed,
    root_of,
    users_of,
    with_operands,
)


def summed_after(module: HloModule) -> HloModule:
    """The module with all-reduces that a loop only adds up made once, of the sum, after the loop."""
    return in_each(module, _with_sums_after)


# What changes only the form of a sum.
_FORMS = ("bitcast", "convert", "reshape", "transpose", "copy")


def _with_sums_after(module: HloModule, name: str, computation: Computation) -> Computation:
    for loop, body_name, body in loops_of(module, computation):
        found = {own.name: _buffers(body, own) for own in body.values() if own.opcode == "all-reduce"}
        moved = {name: indices for name, indices in found.items() if indices}
        read = users_of(computation)[loop.name]
        if not moved or loop.is_root or any(own.opcode != "get-tuple-element" for own in read):
            continue
        names = {name: body[name].operands[0] for name in moved}
        inner = {key: renamed(own, names) for key, own in body.items() if key not in moved}
        module.computations[body_name] = inner
        computation = _after(computation, loop, {at: body[name] for name, found in moved.items() for at in found}, body)
    return computation


def _after(computation: Computation, loop: Instruction, sums: dict[int, Instruction], body: Computation) -> Computation:
    outer: Computation = {}
    names: dict[str, str] = {}
    for name, own in computation.items():
        outer[name] = renamed(own, names)
        index = index_of(own)
        if index is not None and own.operands[0] == loop.name and index in sums:
            reduction = sums[index]
            shape = own.result.partition("[")[2]
            names[name] = f"{reduction.name}.after.{name}"
            outer[name] = own._replace(is_root=False)
            outer[names[name]] = with_operands(reduction, (name,))._replace(
                name=names[name], result=f"{reduction.result.partition('[')[0]}[{shape}", is_root=own.is_root
            )
    return outer


def _buffers(body: Computation, reduction: Instruction) -> tuple[int, ...]:
    """The elements that a body carries to which an all-reduce is only added; none if it is read otherwise."""
    users, given, last = users_of(body), carried(body), root_of(body)
    found: list[int] = []
    waiting = [reduction.name] if len(reduction.operands) == 1 else []
    while waiting:
        value = waiting.pop()
        for user in users[value]:
            if user.opcode in _FORMS:
                waiting.append(user.name)
                continue
            other = [own for own in user.operands if own != value]
            if user.opcode != "add" or len(other) != 1:
                return ()
            index = _origin(body, other[0], given)
            if index is None or not _is_only_added(users, given, last, user, index):
                return ()
            found.append(index)
    return tuple(found)


def _origin(body: Computation, value: str, given: dict[str, int]) -> int | None:
    """The element that a body carries of which a value is another form, or a slice."""
    while value not in given:
        own = body[value]
        if own.opcode not in (*_FORMS, "dynamic-slice"):
            return None
        value = own.operands[0]
    return given[value]


def _is_only_added(
    users: dict[str, list[Instruction]], given: dict[str, int], last: Instruction, add: Instruction, index: int
) -> bool:
    """Whether nothing but this sum reads an element, and the sum is what the loop carries in its place."""
    waiting, ends = [add.name], False
    while waiting:
        value = waiting.pop()
        for user in users[value]:
            if user.name == last.name:
                ends = last.operands[index] == value and last.operands.count(value) == 1
                if not ends:
                    return False
            elif user.opcode in (*_FORMS, "dynamic-update-slice"):
                waiting.append(user.name)
            else:
                return False
    waiting = [name for name, at in given.items() if at == index]
    while waiting:
        for user in users[waiting.pop()]:
            if user.opcode in (*_FORMS, "dynamic-slice"):
                waiting.append(user.name)
            elif user.name != add.name and user.opcode != "dynamic-update-slice":
                return False
    return ends

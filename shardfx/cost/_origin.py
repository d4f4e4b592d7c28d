"""Which argument of a compiled program a collective is about: the weight that it gathers, or whose gradient it adds."""

import math
import re
from collections.abc import Iterator

from .._step.lines import Frame
from ._hlo_text import HloModule, Instruction
from ._hlo_types import array_of, index_of, root_of


# What passes its first operand on, in another form or a part of it.
_PASSES = frozenset(
    "copy copy-start copy-done convert bitcast bitcast-convert reshape transpose slice dynamic-slice pad "
    "optimization-barrier all-gather all-gather-start all-gather-done collective-permute collective-permute-start "
    "collective-permute-done all-to-all all-to-all-start all-to-all-done async-done async-update slice-start "
    "slice-done fusion-done".split()
)
# What was read slice by slice, in one piece.
_JOINED = 'custom_call_target="ConcatBitcast"'
_PRODUCTS = ("dot", "convolution", "ragged-dot")
# What begins apart gives out its operands too: the values are where it ends.
_BEGUN = ("all-reduce-start", "reduce-scatter-start", "all-to-all-start", "collective-permute-start")
_AGAIN = ("-done", "-update")
# What runs a computation of its own with its operands.
_RUNS = ("fusion", "fusion-start", "async-start", "call")
# Their results are other values, whatever shape they have.
_ENDS_HERE = (*_PRODUCTS, "custom-call", "reduce", "reduce-window", "gather", "scatter", "sort", "while", "conditional")
_ARGUMENT = re.compile(r"^[A-Za-z_]\w*")
_KEY = re.compile(r"\[(?:'([^']*)'|\"([^\"]*)\"|([^\]]*))\]|\.([A-Za-z_]\w*)")
# How many instructions a value is followed back, and on.
_FAR, _MANY = 64, 2000


class Origins:
    """Follows values through a module: from an instruction back to an argument, and from one on to an update."""

    def __init__(self, module: HloModule):
        self._module = module
        self._callers: dict[str, tuple[str, Instruction]] = {}
        self._users: dict[tuple[str, str], list[Instruction]] = {}
        # What many collectives become is the same.
        self._next: dict[tuple[str, str], tuple[tuple[str, Instruction], ...]] = {}
        self._ends: dict[tuple[str, str, str], Instruction] = {}
        for name, computation in module.computations.items():
            for instruction in computation.values():
                if (meets := instruction.rendezvous) is not None:
                    self._ends[name, instruction.opcode, meets] = instruction
                # The end of what began elsewhere names its computation again, and has other operands.
                for _, called in () if instruction.opcode.endswith(_AGAIN) else instruction.called:
                    self._callers[called] = (name, instruction)
                for operand in instruction.operands:
                    self._users.setdefault((name, operand), []).append(instruction)

    def sender(self, computation: str, instruction: Instruction) -> Instruction:
        """The instruction that has what is sent: of a receive the send that goes with it, else itself."""
        return self._ends.get((computation, "send", instruction.rendezvous or ""), instruction)

    def frames(self, computation: str, instruction: Instruction) -> tuple[Frame, ...]:
        """The lines that an instruction came from.

        What lays a result out is no line's: it came from the line that made what is sent, or else from that which uses
        what arrives.
        """
        instruction = self.sender(computation, instruction)
        where, made = computation, instruction
        for _ in range(_FAR):
            if found := self._module.frames(made):
                return found
            if made.opcode == "parameter" and where in self._callers:
                given = self._operand(where, int(made.inside))
                where, call = self._callers[where]
                if call.opcode in _RUNS and (found := self._module.frames(call)):
                    return found
                made = self._module.computations[where].get(given or "", call)
            elif made.operands and made.operands[0] in self._module.computations[where]:
                made = self._module.computations[where][made.operands[0]]
            else:
                break
        open_ends, seen = [(computation, instruction)], {instruction.name}
        while open_ends and len(seen) < _FAR:
            where, made = open_ends.pop(0)
            for user in self._users.get((where, made.name), ()):
                if found := self._module.frames(user):
                    return found
                if user.name not in seen:
                    seen.add(user.name)
                    open_ends.append((where, user))
        return ()

    def _operand(self, computation: str, number: int) -> str | None:
        """The name of what a computation's caller gives it as the parameter of a number; `None` for a loop's."""
        _, call = self._callers[computation]
        if call.opcode == "while":
            return None
        if call.opcode == "conditional":
            number = 1 + [name for _, name in call.called].index(computation)
        return call.operands[number] if number < len(call.operands) else None

    def gathered(self, computation: str, instruction: Instruction, element: int | None) -> str | None:
        """The argument of which an instruction moves a part, by the name that JAX gave it.

        `element` is the number of the array among those that are moved, where there are several.
        """
        moved = self.sender(computation, instruction).operands[element or 0 :]
        return self._argument(computation, moved[0], 0) if moved else None

    def updated(self, computation: str, instruction: Instruction, element: int | None) -> str | None:
        """The argument to which the result of a reduction is added in the end: the one whose gradient it is of.

        `element` is the number of the array in the result, where that is a tuple.
        """
        for found in self._elements(computation, instruction, element):
            for where, value in self._later(computation, found):
                for user in self._users.get((where, value.name), ()):
                    partner = self._partner(where, value, user)
                    if partner is not None and self._is_returned(where, user):
                        return partner
        return None

    def _later(self, where: str, value: Instruction) -> Iterator[tuple[str, Instruction]]:
        """A value and all that it becomes, the nearest first."""
        open_ends, seen = [(where, value)], {(where, value.name)}
        while open_ends and len(seen) < _MANY:
            end = open_ends.pop(0)
            yield end
            key = end[0], end[1].name
            if key not in self._next:
                self._next[key] = tuple(self._onward(*end))
            following = [found for found in self._next[key] if (found[0], found[1].name) not in seen]
            seen |= {(found[0], found[1].name) for found in following}
            open_ends += following

    def _is_returned(self, where: str, value: Instruction) -> bool:
        """Whether a value becomes a result of the program: an updated weight does, a difference from data does not."""
        entry = self._module.entry
        return any(
            place == entry and (end.is_root or any(user.is_root for user in self._users.get((entry, end.name), ())))
            for place, end in self._later(where, value)
        )

    def is_sum_of_products(self, computation: str, instruction: Instruction) -> bool:
        """Whether a permute passes on products that others add to, and no argument as it is.

        Such a sum begins with zeros, and in a loop it is what the body made the last time.
        """
        instructions, seen = self._module.computations[computation], set()
        open_ends, arguments = list(instruction.operands), False
        while open_ends and len(seen) < _FAR:
            made = instructions.get(open_ends.pop(0))
            if made is None or made.name in seen:
                continue
            seen.add(made.name)
            if made.opcode in _PRODUCTS or any(self._has_product(name) for _, name in made.called):
                return True
            if made.opcode == "get-tuple-element" and instructions[made.operands[0]].opcode == "parameter":
                root = root_of(instructions)
                open_ends += [root.operands[index_of(made) or 0]] if root.opcode == "tuple" else []
                arguments = True
            elif made.opcode not in ("parameter", "all-gather", "all-gather-done"):
                open_ends += made.operands
            else:
                arguments = True
        return not arguments

    def _has_product(self, computation: str) -> bool:
        inner = self._module.computations[computation].values()
        return any(
            made.opcode in _PRODUCTS or any(self._has_product(name) for _, name in made.called) for made in inner
        )

    def _elements(self, computation: str, instruction: Instruction, element: int | None) -> Iterator[Instruction]:
        if element is None:
            yield instruction
            return
        for user in self._users.get((computation, instruction.name), ()):
            if user.opcode.endswith("-done"):
                yield from self._elements(computation, user, element)
            elif index_of(user) == element:
                yield user

    def _ends_of(self, where: str, begun: Instruction, operand: str) -> Iterator[Instruction]:
        """What becomes of an operand where what was begun ends."""
        for done in self._users.get((where, begun.name), ()):
            if len(begun.operands) == 1:
                yield done
            else:
                yield from self._elements(where, done, begun.operands.index(operand))

    def _partner(self, where: str, value: Instruction, user: Instruction) -> str | None:
        """An argument, of the shape of `value` or of a shard of it, that an instruction combines with it."""
        if user.opcode not in ("add", "subtract"):
            return None
        others = [operand for operand in user.operands if operand != value.name]
        fitting = [name for name in others if _is_shard(self._module.computations[where][name], value)]
        return next(filter(None, (self._argument(where, name, 0) for name in fitting)), None)

    def _onward(self, where: str, value: Instruction) -> Iterator[tuple[str, Instruction]]:
        """Where a value is one instruction later, in the same shape, as a shard, or as a part of what is stacked."""
        if value.is_root and where in self._callers:
            yield self._callers[where]
        for user in self._users.get((where, value.name), ()):
            if user.opcode in _RUNS:
                inner = next(called for _, called in user.called)
                for given in self._module.computations[inner].values():
                    if given.opcode == "parameter" and user.operands[int(given.inside)] == value.name:
                        yield inner, given
            elif user.opcode == "tuple" and user.is_root and where in self._callers:
                caller, call = self._callers[where]
                for position in [at for at, operand in enumerate(user.operands) if operand == value.name]:
                    yield from ((caller, found) for found in self._elements(caller, call, position))
            elif user.opcode == "send":
                received = self._ends.get((where, "recv", user.rendezvous or ""))
                yield from () if received is None else ((where, found) for found in self._elements(where, received, 0))
            elif value.opcode in _RUNS and user.opcode.endswith("-done"):
                yield where, user
            elif user.opcode in _BEGUN:
                ends = self._ends_of(where, user, value.name)
                yield from ((where, end) for end in ends if _is_shard(end, value) or _same_count(end, value))
            elif user.opcode in _ENDS_HERE:
                continue
            elif (
                user.opcode in ("copy-start", "dynamic-update-slice")
                or _is_shard(user, value)
                or _same_count(user, value)
            ):
                yield where, user

    def _argument(self, computation: str, name: str, depth: int) -> str | None:
        """The argument of the whole program that a value is, or is a part of."""
        made = self._module.computations[computation].get(name)
        if made is None or depth > _FAR:
            return None
        if made.opcode == "parameter":
            if computation == self._module.entry:
                return made.op_name or None
            return self._given(computation, int(made.inside), depth + 1)
        if made.opcode == "get-tuple-element":
            return self._tuple_element(computation, made, depth + 1)
        if (made.opcode in _PASSES or _JOINED in made.attributes) and made.operands:
            return self._argument(computation, made.operands[0], depth + 1)
        if made.opcode in _RUNS:
            inner = next(called for _, called in made.called)
            return self._argument(inner, root_of(self._module.computations[inner]).name, depth + 1)
        return None

    def _given(self, computation: str, number: int, depth: int) -> str | None:
        """What a computation's caller gave it."""
        given = self._operand(computation, number) if computation in self._callers else None
        return None if given is None else self._argument(self._callers[computation][0], given, depth)

    def _tuple_element(self, computation: str, made: Instruction, depth: int) -> str | None:
        index, holder = index_of(made), self._module.computations[computation].get(made.operands[0])
        while holder is not None and holder.opcode.endswith(("optimization-barrier", "copy", *_AGAIN)):
            holder = self._module.computations[computation].get(holder.operands[0])
        if holder is None or index is None:
            return None
        if holder.opcode == "tuple" or (holder.opcode in _PASSES and len(holder.operands) > index):
            return self._argument(computation, holder.operands[index], depth)
        if holder.opcode == "while":
            given = self._module.computations[computation].get(holder.operands[0])
            return self._tuple_given(computation, given, index, depth)
        if holder.opcode == "parameter" and computation in self._callers:
            caller, call = self._callers[computation]
            given = self._operand(computation, int(holder.inside)) or ""
            if call.opcode == "while":
                given = call.operands[0] if self._is_carried_unchanged(computation, index) else ""
            return self._tuple_given(caller, self._module.computations[caller].get(given), index, depth)
        return None

    def _tuple_given(self, computation: str, given: Instruction | None, index: int, depth: int) -> str | None:
        if given is None or given.opcode != "tuple":
            return None
        return self._argument(computation, given.operands[index], depth)

    def _is_carried_unchanged(self, body: str, index: int) -> bool:
        """Whether a loop hands the variable `index` on as it came, if need be through loops inside it."""
        instructions = self._module.computations[body]
        root = root_of(instructions)
        carried = instructions.get(root.operands[index]) if root.opcode == "tuple" else None
        while carried is not None:
            if carried.opcode in ("copy", "copy-done", "copy-start"):
                carried = instructions.get(carried.operands[0])
                continue
            position = index_of(carried)
            if position is None:
                return False
            holder = instructions[carried.operands[0]]
            if holder.opcode == "parameter":
                return position == index
            if holder.opcode != "while" or not self._is_carried_unchanged(dict(holder.called)["body"], position):
                return False
            given = instructions[holder.operands[0]]
            carried = instructions.get(given.operands[position]) if given.opcode == "tuple" else None
        return False


def path_of(argument: str) -> str:
    """The path of a leaf in its own argument, from the name that JAX gives it: `w['mlp'].up[0]` is `mlp/up/0`."""
    named = _ARGUMENT.match(argument)
    keys = _KEY.findall(argument[named.end() :] if named else argument)
    return "/".join(next(filter(None, key), "") for key in keys) or argument


def _same_count(one: Instruction, other: Instruction) -> bool:
    is_array = not one.result.startswith("(")
    ours, theirs = array_of(one).shape, array_of(other).shape
    return is_array and math.prod(ours) == math.prod(theirs) and bool(theirs)


def _is_shard(part: Instruction, whole: Instruction) -> bool:
    sizes, limits = array_of(part).shape, array_of(whole).shape
    if part.result.startswith("(") or not sizes:
        return False
    return len(sizes) == len(limits) and all(
        size and not limit % size for size, limit in zip(sizes, limits, strict=True)
    )

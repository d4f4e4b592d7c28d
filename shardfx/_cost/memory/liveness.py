"""When each value of a program is in memory, and how much that is at the worst moment.

Operations run in the order in which they are traced. What goes element by element is swallowed by the operations that
use it, as compilers do, unless a product, a loop or the caller wants it as an array. Remat needs no rule: what is
computed again is in the program twice.
"""

import bisect
import dataclasses

from ..nested import scan_parts
from .kinds import ELEMENTWISE, PIECES, REDUCTIONS, VIEWS
from .layouts import Dims, Layouts
from .program import Block, Op, Program


_CONSTRAINTS = ("sharding_constraint", "reshard")
# Between host and device; each array lies there as it does here, however many are moved at once.
_PUT = "device_put"
# The sum of parts passes through these: they may be done to the parts, or to what is left of the sum on a device.
_SUMS_PASS = frozenset(["add", "add_any", "convert_element_type", "meant_for", *_CONSTRAINTS])


@dataclasses.dataclass(frozen=True)
class Held:
    """One array in memory at the worst moment.

    **Arguments:**

    - `number`: of the value.
    - `bytes`: on one device.
    - `op`: which operation made it.
    - `copy`: whether it is a copy of the value in the layout that an operation needs.
    """

    number: int
    bytes: int
    op: Op | None
    copy: bool = False


@dataclasses.dataclass(frozen=True)
class Peak:
    """The worst moment of a block: how much is in memory beside its arguments, and what."""

    bytes: int
    held: tuple[Held, ...]
    op: Op | None = None


@dataclasses.dataclass(frozen=True)
class Changed:
    """What a step is asked to be that it is not, so that a change can be priced before it is made.

    **Arguments:**

    - `recomputed`: values that the backward pass would compute again and not keep: stacks of a loop over layers.
    - `kept`: bytes that are kept in their place.
    - `inside`: of each loop that would compute them again, by the identity of its body, the bytes of one layer.
    """

    recomputed: frozenset[int]
    kept: int
    inside: dict[int, int]


def peak_of(
    program: Program,
    layouts: Layouts,
    changed: Changed | None = None,
    *,
    aliased: frozenset[int] = frozenset(),
    tpu: bool = False,
) -> Peak:
    """The worst moment of a step, its arguments and results aside.

    **Arguments:**

    - `aliased`: results that take over the memory of arguments. Nothing else can lie there before them.
    - `tpu`: whether it is the TPU's compiler, which gathers the weights of the next layer while a loop computes one.
        Those for CPUs and GPUs do not, and put also what is inside of loops where results will lie.
    """
    return _Timeline(program.block, layouts, changed, aliased=aliased, tpu=tpu, outermost=True).peak()


# A value, or a copy of it in another layout.
_Key = tuple[int, Dims | None]


class _Timeline:
    """The arrays of one block, and from when to when each is in memory."""

    def __init__(
        self,
        block: Block,
        layouts: Layouts,
        changed: Changed | None = None,
        *,
        aliased: frozenset[int] = frozenset(),
        tpu: bool = False,
        outermost: bool = False,
    ):
        self.block, self.layouts, self.changed, self.outermost = block, layouts, changed, outermost
        self.aliased, self.tpu = aliased, tpu
        self.made = {out: op for op in block.ops for out in op.outs}
        self.uses: dict[int, list[Op]] = {}
        for op in block.ops:
            for number in op.ins:
                if number is not None:
                    self.uses.setdefault(number, []).append(op)
        self.results = {out for out in block.outs if out is not None}
        self.arrays: dict[int, bool] = {}
        self.copiers: dict[_Key, Op] = {}
        self.unsummed: dict[int, frozenset[str]] = {}
        self.pieces: dict[tuple[int, int], Dims | None] = {}
        for op in block.ops:  # the mesh axes over which parts of each value are still to be added up
            self.unsummed.update((out, self.left_to_sum(op, out)) for out in op.outs)
        for op in reversed(block.ops):  # readers first, so that no long chain is followed to its end at once
            for number in op.ins:
                if number is not None:
                    self.scattered(number, op)

    def peak(self) -> Peak:
        """The worst moment."""
        begins, ends = self.lifetimes()
        homes, rooms = self.results_homes(begins, ends) if self.outermost else (set(), [])
        born: dict[int, list[_Key]] = {}
        dies: dict[int, list[_Key]] = {}
        for key, at in begins.items():
            if key[1] is not None or key[0] not in homes:
                born.setdefault(at, []).append(key)
                dies.setdefault(max(ends.get(key, at), at), []).append(key)
        live: dict[_Key, int] = {}
        best = Peak(0, ())
        total = self.changed.kept if self.outermost and self.changed is not None else 0
        for at, op in enumerate(self.block.ops):
            spare = self.taken_over(op, born.get(at, ()), dies.get(at, ()), live)
            for key in born.get(at, ()):
                live[key] = self.bytes_of(key)
                total += live[key]
            inner = self.inside(op)
            needed = total + inner.bytes - spare
            if needed > best.bytes:
                waiting = [(size, ends.get(key, at)) for key, size in live.items()]
                if not self.tpu:  # whose compiler places what is inside of loops elsewhere
                    waiting += [(one.bytes, at) for one in inner.held]
                needed -= _hosted(waiting, rooms, at)
            if needed > best.bytes:
                held = tuple(self.held(key, size) for key, size in live.items())
                best = Peak(needed, held + inner.held, op)
            for key in dies.get(at, ()):
                total -= live.pop(key)
        return best

    def held(self, key: _Key, size: int) -> Held:
        """An array at the worst moment."""
        number, dims = key
        return Held(number, size, self.maker(number) if dims is None else self.copiers[key], dims is not None)

    def maker(self, number: int) -> Op | None:
        """The operation that makes a value; of what a loop leaves, the one in its body."""
        op, ops = self.made.get(number), self.block.ops
        while op is not None and op.name == "scan":
            inner, ops = op.blocks[0].outs[op.outs.index(number)], op.blocks[0].ops
            number = -1 if inner is None else inner
            op = next((one for one in ops if number in one.outs), None)
        return op

    def inside(self, op: Op) -> Peak:
        """The worst moment of a body, or of the branch that takes most."""
        peaks = []
        for block in op.blocks:
            timeline = _Timeline(block, self.layouts, self.changed, tpu=self.tpu)
            peak = timeline.peak()
            if self.tpu and op.name == "scan" and op.params["length"] > 1:
                peak = timeline.with_next(peak, block.ins[sum(scan_parts(op.params)) :])
            again = 0 if self.changed is None else self.changed.inside.get(id(block), 0)
            peaks.append(dataclasses.replace(peak, bytes=peak.bytes + again))
        return max(peaks, key=lambda one: one.bytes, default=Peak(0, ()))

    def with_next(self, peak: Peak, slices: tuple[int, ...]) -> Peak:
        """The worst moment of a loop's body while what its next turn needs whole is gathered already."""
        held = [
            self.held((number, dims), self.bytes_of((number, dims)))
            for number, dims in self.copiers
            if dims is not None and self.is_made_of(number, slices)
        ]
        return dataclasses.replace(peak, bytes=peak.bytes + sum(one.bytes for one in held), held=(*peak.held, *held))

    def is_made_of(self, number: int, slices: tuple[int, ...]) -> bool:
        """Whether a value is one of these, or one of them cast or turned: a weight of this layer."""
        if number in slices:
            return True
        op = self.made.get(number)
        if op is None or not (op.name in ELEMENTWISE or op.name in VIEWS):
            return False
        return all(source is None or self.is_made_of(source, slices) for source in op.ins)

    def bytes_of(self, key: _Key) -> int:
        number, dims = key
        if self.changed is not None and number in self.changed.recomputed:
            return 0
        return self.layouts.bytes_of(number, dims)

    def lifetimes(self) -> tuple[dict[_Key, int], dict[_Key, int]]:
        """From which operation to which each array is in memory, by position."""
        begins: dict[_Key, int] = {}
        ends: dict[_Key, int] = {}
        for at, op in enumerate(self.block.ops):
            outs = [out for out in op.outs if self.is_array(out)]
            if op.outs and not outs:
                continue
            for key in self.reads(op):
                ends[key] = at
                if key[1] is not None:  # a device's part of a sum, which is scattered as soon as it is there
                    begins.setdefault(key, begins[key[0], None])
                    self.copiers.setdefault(key, op)
            for key in self.copies(op):
                begins.setdefault(key, at)
                self.copiers.setdefault(key, op)
                ends[key] = at
            begins.update({(out, None): self.first_use(op, at) for out in outs})
        for result in self.results:
            ends[result, None] = len(self.block.ops) - 1
        return begins, ends

    def first_use(self, op: Op, at: int) -> int:
        """From when on the results of an operation are in memory; what comes from the host comes when it is read."""
        if op.name != _PUT:
            return at
        users = {id(user) for out in op.outs for user in self.uses.get(out, ())}
        return next((later for later, one in enumerate(self.block.ops) if id(one) in users), at)

    def copies(self, op: Op) -> list[_Key]:
        """Copies that an operation needs: operands gathered to how it computes, results before they are spread."""
        if op.blocks or op.name in VIEWS or op.name in ELEMENTWISE or op.name in PIECES or op.name == _PUT:
            return []
        found: list[_Key] = []
        for number, dims in zip(*self.layouts.inside(op), strict=True):
            if self.layouts.bytes_of(number, dims) > self.layouts.bytes_of(number):
                found.append((number, dims))
        return found

    def taken_over(self, op: Op, born: list[_Key] | tuple, dies: list[_Key] | tuple, live: dict[_Key, int]) -> int:
        """Bytes of operands that die here and whose memory the results take over."""
        if op.name not in ELEMENTWISE and not op.blocks and op.name not in ("dynamic_update_slice", "scatter-add"):
            return 0
        if op.name == "scan":  # what it goes through and what it stacks are there to the last turn
            first, carried = scan_parts(op.params)
            dies = [key for key in dies if key[0] in op.ins[first : first + carried]]
            born = [key for key in born if key[0] in op.outs[:carried]]
        room = [live[key] for key in dies if key in live]
        spare = 0
        for key in born:
            size = self.bytes_of(key)
            if size in room:
                room.remove(size)
                spare += size
        return spare

    def results_homes(self, begins: dict[_Key, int], ends: dict[_Key, int]) -> tuple[set[int], list[tuple[int, int]]]:
        """The values that lie where a result will: the results, and what they are made of element by element.

        Also each result's memory, by its size and the first moment at which one of these is there; before that, it
        is room for others. An argument that a result takes over is read until then: nothing else lies there.
        """
        found: set[int] = set()
        rooms: list[tuple[int, int]] = []
        for result in sorted(self.results):
            if result in self.aliased and self.is_made_while_read(result):
                continue
            number: int | None = result
            first = len(self.block.ops)
            while number is not None and number not in found and number in self.made:
                found.add(number)
                first = min(first, begins.get((number, None), first))
                number = None if number in self.aliased else self.predecessor(number, begins, ends, found)
            if result in self.made and result not in self.aliased:
                rooms.append((self.layouts.bytes_of(result), first))
        return found, sorted(rooms)

    def is_made_while_read(self, result: int) -> bool:
        """Whether a loop stacks a result up while it goes through the argument whose memory that is to take over.

        It lies elsewhere then, and is copied in the end: a cache that comes from layer to layer is there twice.
        """
        op = self.made.get(result)
        if op is None or op.name != "scan" or op.outs.index(result) < scan_parts(op.params)[1]:
            return False
        stacked = op.ins[sum(scan_parts(op.params)) :]
        return any(number in self.block.ins and self.is_alike(number, result) for number in stacked)

    def is_alike(self, number: int | None, other: int) -> bool:
        """Whether one value may take over the memory of another."""
        if number is None:
            return False
        ours, theirs = self.layouts.values[number], self.layouts.values[other]
        is_same = (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        return is_same and self.layouts.dims[number] == self.layouts.dims[other]

    def predecessor(self, number: int, begins: dict[_Key, int], ends: dict[_Key, int], taken: set[int]) -> int | None:
        """The array whose memory a value takes over: of its size, and read for the last time on the way to it."""
        at, size = begins.get((number, None)), self.layouts.bytes_of(number)
        if self.made[number].name not in ELEMENTWISE or at is None:
            return None
        for source in self.roots(number, set()):
            key = (source, None)
            if key in begins and source not in taken and ends.get(key, at) <= at and self.bytes_of(key) == size:
                return source
        return None

    def roots(self, number: int, seen: set[int]) -> list[int]:
        """What a value is computed from element by element, other results on the way included: one fusion does all."""
        found: list[int] = []
        for source in self.made[number].ins:
            if source is None or source in seen:
                continue
            seen.add(source)
            op = self.made.get(source)
            if op is not None and (op.name in ELEMENTWISE or not self.is_array(source)):
                found += self.roots(source, seen)
            else:
                found.append(source)
        return found

    def is_array(self, number: int) -> bool:
        """Whether a value is an array in memory of its own."""
        if number not in self.arrays:
            self.arrays[number] = self._is_array(number)
        return self.arrays[number]

    def _is_array(self, number: int) -> bool:
        op = self.made.get(number)
        if op is None:
            return False  # it comes from outside
        if number in self.results or not self.layouts.values[number].shape:
            return True  # a number is computed once, before the many that it is read for
        if op.name in VIEWS or op.name in PIECES or op.name == "iota":
            return False
        if any(self.scattered(number, user) is not None for user in self.uses.get(number, ())):
            return True
        if op.name in _CONSTRAINTS:
            source = op.ins[0]
            return source is not None and self.layouts.dims[source] != self.layouts.dims[number]
        return op.name not in ELEMENTWISE or any(not _swallows(user) for user in self.users(number))

    def users(self, number: int) -> list[Op]:
        """Who reads a value, views looked through."""
        found: list[Op] = []
        for user in self.uses.get(number, ()):
            if user.name in VIEWS or (user.name in _CONSTRAINTS and not self.is_array(user.outs[0])):
                found += self.users(user.outs[0])
            else:
                found.append(user)
        return found

    def reads(self, op: Op) -> set[_Key]:
        """The arrays that an operation reads, those that its operands are computed from on the way included."""
        found: set[_Key] = set()
        seen: set[int] = set()
        waiting = [op]
        while waiting:
            one = waiting.pop()
            for number in one.ins:
                if number is None:
                    continue
                dims = self.scattered(number, one)
                if dims is not None or number not in self.made or self.is_array(number):
                    found.add((number, dims))
                elif number not in seen:
                    seen.add(number)
                    waiting.append(self.made[number])
        return found

    def scattered(self, number: int, op: Op) -> Dims | None:
        """How a sum lies that an operation by elements reads in pieces only; `None` where it is no such sum.

        A device then keeps its piece: compilers scatter a sum as soon as its parts are there.
        """
        if not self.unsummed.get(number) or len(op.outs) != 1:
            return None
        if (number, id(op)) not in self.pieces:
            self.pieces[number, id(op)] = self._scattered(number, op, op.outs[0])
        return self.pieces[number, id(op)]

    def _scattered(self, number: int, op: Op, out: int) -> Dims | None:
        if self.layouts.values[number].shape != self.layouts.values[out].shape:
            return None
        dims, own = self.layouts.dims[out], self.layouts.dims[number]
        more = {axis for axes in dims for axis in axes} - {axis for axes in own for axis in axes}
        if op.name in ELEMENTWISE and op.name not in _CONSTRAINTS and more and more <= self.unsummed[number]:
            return dims
        if op.name not in _SUMS_PASS or more or out in self.results:
            return None
        # What is added to it, and where it is said to lie, comes before those who read pieces of the whole sum.
        found = {self.scattered(out, user) for user in self.uses.get(out, ())}
        return found.pop() if len(found) == 1 else None

    def left_to_sum(self, op: Op, out: int) -> frozenset[str]:
        """The mesh axes over which devices hold parts of a result that are still to be added up."""
        own = {axis for axes in self.layouts.dims[out] for axis in axes}
        if op.name in _SUMS_PASS:
            axes = [self.unsummed.get(number, frozenset()) for number in op.ins if number is not None]
            return frozenset().union(*axes) - own
        if op.blocks or op.name in ELEMENTWISE or op.name in VIEWS or op.name in PIECES:
            return frozenset()
        laid = dict(zip(*self.layouts.inside(op), strict=True))
        cut = {axis for number in op.ins if number is not None for axes in laid[number] for axis in axes}
        return frozenset(cut - {axis for axes in laid[out] for axis in axes})


def _hosted(arrays: list[tuple[int, int]], rooms: list[tuple[int, int]], at: int) -> int:
    """Bytes of arrays that lie where results will, as compilers place them: one array in the memory of one result.

    **Arguments:**

    - `arrays`: by size, and by the moment at which they are read last.
    - `rooms`: the results, by size, smallest first, and by the moment from which they need their memory.
    - `at`: the moment.
    """
    free = [room for room in rooms if room[1] > at]
    hosted = 0
    for size, until in sorted(arrays, reverse=True):
        start = bisect.bisect_left(free, (size, 0))
        taken = next((i for i in range(start, len(free)) if free[i][1] > until), None)
        if size and taken is not None:
            del free[taken]
            hosted += size
    return hosted


def _swallows(op: Op) -> bool:
    """Whether an operation computes its operands while it reads them."""
    return op.name in ELEMENTWISE or op.name in VIEWS or op.name in PIECES or op.name in REDUCTIONS

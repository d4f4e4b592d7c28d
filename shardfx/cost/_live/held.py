"""The bytes that one device holds at the worst moment of a partitioned program, and the same with each layer
rematerialized.
"""

import bisect
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence

from ..._step import Frame, own_line
from .._hlo_text import ELEMENTWISE, IN_PLACE, PRODUCTS, VIEWS, Array, HloModule, Phase, bytes_of, phase_of
from .arrays import Arrays, listed
from .narrow import narrowed
from .program import Body, LiveOp, OpenedProgram, Uses, program_of, reached


@dataclasses.dataclass(frozen=True)
class Recomputed:
    """The effect of rematerializing each layer in the backward pass, for a step that does not do so.

    **Arguments:**

    - `values`: the arrays that are then not kept.
    - `kept_bytes`: bytes that are kept in their place: the loop-carried values, for each layer.
    - `inside_bytes`: for each body of a backward loop, by its identity, the bytes of one layer while it is recomputed.
    """

    values: frozenset[int] = frozenset()
    kept_bytes: int = 0
    inside_bytes: dict[int, int] = dataclasses.field(default_factory=dict)


def recomputed(program: OpenedProgram, bytes_of: Callable[[int], int]) -> Recomputed:
    """The effect of rematerializing each layer; an empty one if that saves nothing."""
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
            # Values that a loop carries are kept for each layer, and none of them is computed again.
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
    """Whether a loop only writes one slice of the loop-carried array number `at` in each iteration, and never reads the
    array.
    """
    body = loop.bodies[0]
    op = uses.maker.get(body.results[at])
    readers = [one for one, _, _ in uses.users.get(body.carried[at], ())]
    return op is not None and op.opcode == "dynamic-update-slice" and readers == [op]


def _reader(value: int, uses: Uses, loops: dict[int, LiveOp]) -> Body | None:
    """The body of the loop that reads a value; `None` unless exactly one loop does."""
    bodies = {id(body): body for _, _, body in uses.users.get(value, ())}
    return next(iter(bodies.values())) if len(bodies) == 1 and next(iter(bodies)) in loops else None


def _is_of_others(loop: LiveOp, at: int, stacks: list[int], uses: Uses) -> bool:
    """Whether a stacked value is an elementwise function of another stacked value, so that a fusion can
    recompute it.
    """
    written = {_written(loop, one, uses) for one in stacks if one != at}

    def before(value: int) -> tuple[int, ...]:
        op = uses.maker.get(value)
        return op.reads if op is not None and (op.opcode in ELEMENTWISE or op.opcode in VIEWS) else ()

    begun = _written(loop, at, uses)
    return any(value != begun and value in written for value in reached([begun], before))


def _written(loop: LiveOp, at: int, uses: Uses) -> int:
    """The slice that one iteration of a loop writes to a stacked array."""
    value = uses.maker[loop.bodies[0].results[at]].reads[1]
    while (op := uses.maker.get(value)) is not None and op.opcode == "reshape":
        value = op.reads[0]
    return value


# The part of the 128 MiB on chip that a TPU's compiler fills. These bytes count too: where there is room, the compiler
# copies arguments there ahead of time.
_ON_CHIP = 112 * 2**20
# A TPU starts these during a product, so that their results are ready when they are read.
_ASYNC = ("all-gather", "collective-permute")


@dataclasses.dataclass(frozen=True)
class HeldArray:
    """One temporary array in memory at the worst moment.

    **Arguments:**

    - `buffer`: its dtype and shape on one device.
    - `bytes`: bytes with tile padding.
    - `opcode`: the opcode of the HLO operation that makes it.
    - `op_name`: the path of JAX's operations that it came from.
    - `source`: the line of your program that makes it.
    """

    buffer: Array
    bytes: int
    opcode: str
    op_name: str
    source: Frame | None

    @property
    def phase(self) -> Phase:
        """The pass that makes it, as JAX's name stack says."""
        return phase_of(self.op_name)


@dataclasses.dataclass(frozen=True)
class Held:
    """The bytes that one device holds: arguments, results and temporaries.

    **Arguments:**

    - `arguments`: bytes of each parameter of the entry, in order; 0 for one in host memory.
    - `results`: bytes of each result; 0 for one that takes over the memory of a donated argument, or is moved to the
        host.
    - `temporary_bytes`: bytes at the worst moment, beside arguments and results.
    - `arrays`: the temporaries of that moment, largest first. Those that lie where a result will are among them.
    - `timeline`: the bytes in memory while each operation of the entry runs, in their order.
    """

    arguments: tuple[int, ...]
    results: tuple[int, ...]
    temporary_bytes: int
    arrays: tuple[HeldArray, ...]
    timeline: tuple[int, ...]

    @property
    def peak_bytes(self) -> int:
        """Bytes of arguments, results and temporaries at the worst moment."""
        return sum(self.arguments) + sum(self.results) + self.temporary_bytes


def held(
    module: HloModule,
    *,
    donated: Sequence[bool] = (),
    on_host: Sequence[bool] = (),
    results_on_host: Sequence[bool] = (),
    tile: tuple[int, int] | None = None,
    tpu: bool = False,
    recomputes: bool = False,
) -> Held:
    """The bytes that one device holds while it runs a program.

    **Arguments:**

    - `module`: the program of one device behind XLA's partitioner.
    - `donated`: for each parameter of the entry, whether a result may reuse its memory.
    - `on_host`, `results_on_host`: for each parameter and each result, whether it is in host memory.
    - `tile`: the rows and columns that the chip pads the last two dimensions of an array to.
    - `tpu`: whether the TPU's compiler places its arrays.
    - `recomputes`: counts as if the backward pass computed each layer of a loop again.
    """
    program = program_of(module)
    arrays = Arrays(narrowed(program) if tpu else program, tpu=tpu)
    return _Memory(module, arrays, tile, tpu).held(donated, on_host, results_on_host, recomputes)


@dataclasses.dataclass(frozen=True)
class _Peak:
    bytes: int
    values: tuple[int, ...] = ()


class _Memory:
    def __init__(self, module: HloModule, arrays: Arrays, tile: tuple[int, int] | None, tpu: bool):
        self.module, self.arrays, self.program, self.tile, self.tpu = module, arrays, arrays.program, tile, tpu
        self.peaks: dict[int, _Peak] = {}
        self.changed = Recomputed()
        # Results that reuse the memory of donated arguments.
        self.aliased: set[int] = set()

    def bytes_of(self, value: int) -> int:
        """Bytes of a value in the device's memory, tile padding included; 0 for a rematerialized value."""
        if value in self.changed.values:
            return 0
        return bytes_of(self.program.buffers[value], self.tile)

    def held(
        self, donated: Sequence[bool], on_host: Sequence[bool], results_on_host: Sequence[bool], recomputes: bool
    ) -> Held:
        """The memory of the program, with these arguments donated or in host memory."""
        if recomputes:
            self.changed = recomputed(self.program, self.bytes_of)
        entry = self.program.entry
        spare = [self.program.buffers[value] for value, yes in zip(entry.carried, donated, strict=False) if yes]
        results: list[int] = []
        for value, is_away in itertools.zip_longest(entry.results, results_on_host, fillvalue=False):
            buffer = self.program.buffers[value]
            if buffer in spare and not is_away:
                spare.remove(buffer)
                self.aliased.add(value)
            results.append(0 if value in self.aliased or is_away else self.bytes_of(value))
        away = {value for value, yes in zip(entry.carried, on_host, strict=False) if yes}
        arguments = tuple(0 if value in away else self.bytes_of(value) for value in entry.carried)
        timeline: list[int] = []
        peak = self.peak(entry, timeline)
        temporary = peak.bytes + self.changed.kept_bytes
        ahead = min(sum(arguments), max(0, _ON_CHIP - temporary)) if self.tpu else 0
        found = tuple(sorted(map(self.described, peak.values), key=lambda one: -one.bytes))
        beside = sum(arguments) + sum(results) + self.changed.kept_bytes
        return Held(arguments, tuple(results), temporary + ahead, found, tuple(beside + one for one in timeline))

    def described(self, value: int) -> HeldArray:
        """A temporary with the operation that made it. For a loop's result this is the operation in the loop's body."""
        op = made = self.arrays.maker.get(value)
        while made is not None and made.opcode == "while":
            op, value = made, made.bodies[0].results[made.makes.index(value)]
            made = self.arrays.maker.get(value)
        size, buffer = self.bytes_of(value), self.program.buffers[value]
        op = made or op
        assert op is not None
        line = own_line(self.module.frames(op.instruction))
        return HeldArray(buffer, size, op.opcode, op.instruction.op_name, line)

    def peak(self, body: Body, timeline: list[int] | None = None) -> _Peak:
        """The worst moment of a body, without the values that the body carries."""
        if id(body) not in self.peaks:
            found = _Schedule(self, body).peak([] if timeline is None else timeline)
            more = self.changed.inside_bytes.get(id(body), 0)
            self.peaks[id(body)] = dataclasses.replace(found, bytes=found.bytes + more)
        return self.peaks[id(body)]


class _Schedule:
    """The operations of a body in the order in which they run, and the live range of each array."""

    def __init__(self, memory: _Memory, body: Body):
        self.memory, self.body, self.is_entry = memory, body, body is memory.program.entry
        arrays = memory.arrays
        ops = [op for op in body.ops if op.bodies or any(map(arrays.is_array, op.makes))]
        makes = [tuple(value for value in op.makes if arrays.is_array(value)) for op in ops]
        reads = [frozenset(arrays.reads(op)) for op in ops]
        order = listed(reads, makes, memory.bytes_of)
        self.ops = [ops[at] for at in order]
        self.makes = [makes[at] for at in order]
        self.reads = [reads[at] for at in order]
        self.born = {value: at for at, values in enumerate(self.makes) for value in values}
        self.last = {value: at for at, values in enumerate(self.reads) for value in values}

    def peak(self, timeline: list[int]) -> _Peak:
        """The bytes at the worst moment. The bytes at every moment are appended to `timeline`."""
        at_home, ends = self.at_home(), {**self.last, **dict.fromkeys(self.body.results, len(self.ops))}
        starts = self.started() if self.memory.tpu else {}
        spans = {
            value: (starts.get(value, at), max(ends.get(value, at), at))
            for value, at in self.born.items()
            if value not in at_home
        }
        begins: dict[int, list[int]] = {}
        dies: dict[int, list[int]] = {}
        for value, (begin, end) in spans.items():
            begins.setdefault(begin, []).append(value)
            dies.setdefault(end, []).append(value)
        live: dict[int, int] = {}
        inside: list[tuple[int, ...]] = []
        for at, op in enumerate(self.ops):
            spare = self.taken_over(op, begins.get(at, ()), dies.get(at, ()), live)
            live |= {value: self.memory.bytes_of(value) for value in begins.get(at, ())}
            inner = max(map(self.memory.peak, op.bodies), key=lambda one: one.bytes, default=_Peak(0))
            timeline.append(sum(live.values()) + inner.bytes - spare)
            inside.append(inner.values)
            for value in dies.get(at, ()):
                del live[value]
        self.host(timeline, spans)
        worst = max(range(len(timeline)), key=timeline.__getitem__, default=None)
        if worst is None:
            return _Peak(0)
        there = (value for value, (begin, end) in spans.items() if begin <= worst <= end)
        return _Peak(timeline[worst], (*there, *inside[worst]))

    def host(self, timeline: list[int], spans: Mapping[int, tuple[int, int]]) -> None:
        """Subtracts temporaries that share memory with results, for each moment that could still be the worst one."""
        rooms, best = self.rooms(), 0
        for at in sorted(range(len(timeline)), key=lambda at: -timeline[at]) if rooms else ():
            if timeline[at] <= best:
                return
            there = [(self.memory.bytes_of(value), end) for value, (begin, end) in spans.items() if begin <= at <= end]
            # An array that fits on chip stays there.
            least = min(timeline[at], _ON_CHIP if self.memory.tpu else 0)
            timeline[at] = max(least, timeline[at] - _hosted(there, rooms, at))
            best = max(best, timeline[at])

    def at_home(self) -> set[int]:
        """The results that are written directly to the loop-carried buffer, or to the caller's result buffer."""
        if self.is_entry:
            return {value for value in self.body.results if value in self.born}
        found: set[int] = set()
        for result, carried in zip(self.body.results, self.body.carried, strict=False):
            at, read = self.born.get(result), self.last.get(carried, -1)
            if at is not None and (read < at or (read == at and self.ops[at].opcode in IN_PLACE)):
                found.add(result)
        return found

    def rooms(self) -> list[tuple[int, int]]:
        """The memory of each result that reuses no argument's memory: its size, and the moment from which the result
        needs it.
        """
        if not self.is_entry:
            return []
        own = [value for value in self.body.results if value in self.born and value not in self.memory.aliased]
        return sorted((self.memory.bytes_of(value), self.born[value]) for value in own)

    def started(self) -> Mapping[int, int]:
        """The moment from which each collective's result occupies memory: that of the product that the collective
        overlaps with.
        """
        found: dict[int, int] = {}
        for at, op in enumerate(self.ops):
            if op.opcode in _ASYNC:
                ready = max((self.born.get(value, -1) for value in self.reads[at]), default=-1)
                before = (one for one in range(at - 1, ready, -1) if self.ops[one].opcode in PRODUCTS)
                found.update(dict.fromkeys(self.makes[at], next(before, at)))
        return found

    def taken_over(self, op: LiveOp, begins: Sequence[int], dies: Sequence[int], live: Mapping[int, int]) -> int:
        """Bytes of operands that are read here for the last time and whose memory the results reuse."""
        if op.opcode != "while" and op.opcode not in IN_PLACE:
            return 0
        room = [live[value] for value in dies if value in live and (op.opcode != "while" or value in op.reads)]
        spare = 0
        for value in begins:
            size = self.memory.bytes_of(value)
            if size in room:
                room.remove(size)
                spare += size
        return spare


def _hosted(arrays: list[tuple[int, int]], rooms: list[tuple[int, int]], at: int) -> int:
    """Bytes of temporaries that fit into the memory of later results, one temporary per result, as compilers place
    them.

    **Arguments:**

    - `arrays`: the size of each temporary, and the moment at which it is read last.
    - `rooms`: the results, by size, smallest first, and by the moment from which they need their memory.
    - `at`: the moment.
    """
    free: dict[int, list[int]] = {}
    for size, needed in rooms:
        if needed > at:
            free.setdefault(size, []).append(needed)
    sizes, hosted = list(free), 0
    for size, until in sorted(arrays, reverse=True):
        for room in sizes[bisect.bisect_left(sizes, size) :] if size else ():
            first = bisect.bisect_right(free[room], until)
            if first < len(free[room]):
                del free[room][first]
                hosted += size
                break
    return hosted

"""The memory of one device while it runs a partitioned program, and the same with each
layer rematerialized.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ..._step import (
    IN_PLACE,
    HloModule,
    Tile,
    bytes_of,
    own_line,
)
from .._memory import LiveArray, Memory
from .arrays import list_schedule, sources_of
from .program import Body, FlatOp, FlatProgram, Uses, program_of


class Rematerialized(NamedTuple):
    """The change of memory if each layer were rematerialized in the backward pass.

    - `values`: the numbers of the arrays that are no longer stored between the forward
      and the backward pass.
    - `kept_bytes`: the bytes of what is stored instead: the loop-carried values of all
      layers.
    """

    values: frozenset[int] = frozenset()
    kept_bytes: int = 0


def rematerialized(
    program: FlatProgram, uses: Uses, bytes_of: Callable[[int], int]
) -> Rematerialized:
    """The change of memory if each layer were rematerialized; empty if that would save
    almost nothing.

    In each iteration, a loop of the forward pass can write one slice of an array that
    another loop then reads. With rematerialization, such arrays are not stored.
    Instead, the values that the forward loop carries from layer to layer are stored for
    every layer. `bytes_of` returns the bytes of an array.
    """
    loops = {id(body) for op in uses.ops if op.opcode == "while" for body in op.bodies}
    dropped: set[int] = set()
    stacked = kept = 0
    for op in [one for one in program.entry.ops if one.opcode == "while"]:
        stacks = [at for at in range(len(op.makes)) if _is_stack(op, at, uses)]
        own = [
            at
            for at in stacks
            if {id(body) for _, _, body in uses.users.get(op.makes[at], ())} <= loops
        ]
        for at in own:
            stacked += bytes_of(op.makes[at])
            dropped.update(
                (
                    op.makes[at],
                    op.reads[at],
                    op.bodies[0].carried[at],
                    op.bodies[0].results[at],
                )
            )
        carried = [
            value
            for at, value in enumerate(op.makes)
            if at not in stacks and program.buffers[value].shape
        ]
        # A loop may stack its carried values already. Then these are stored in the
        # dtype of the stack.
        sizes = {
            program.buffers[op.makes[at]].shape: bytes_of(op.makes[at]) for at in own
        }
        for value in carried if own else ():
            length, shape = (
                program.buffers[op.makes[own[0]]].shape[0],
                program.buffers[value].shape,
            )
            kept += sizes.get((length, *shape), length * bytes_of(value))
    return (
        Rematerialized(frozenset(dropped), kept)
        if stacked > 1.1 * kept
        else Rematerialized()
    )


def _is_stack(loop: FlatOp, at: int, uses: Uses) -> bool:
    """Whether each iteration of a loop writes a slice of its loop-carried array number
    `at`, and none reads it.
    """
    body = loop.bodies[0]
    op = uses.maker.get(body.results[at])
    readers = [one for one, _, _ in uses.users.get(body.carried[at], ())]
    return op is not None and op.opcode == "dynamic-update-slice" and readers == [op]


def device_memory(
    module: HloModule,
    *,
    donated: Sequence[bool] = (),
    on_host: Sequence[bool] = (),
    results_on_host: Sequence[bool] = (),
    tile: Tile = None,
    remat: bool = False,
) -> Memory:
    """The memory of one device while it runs a program, as XLA's partitioner leaves it.

    **Arguments:**

    - `module`, `tile`: the partitioned program, and the chip's tile of memory.
    - `donated`: for each parameter of the entry computation, whether a result may reuse
      its memory.
    - `on_host`, `results_on_host`: for each parameter and each result, whether it is in
      host memory.
    - `remat`: whether to count as if the backward pass rematerialized each layer of a
      loop.
    """
    program = program_of(module)
    memory = _Counter(module, program, tile)
    if remat:
        memory.remat = rematerialized(program, memory.uses, memory.bytes_of)
    entry = program.entry
    spare = [
        program.buffers[value]
        for value, yes in zip(entry.carried, donated, strict=False)
        if yes
    ]
    results: list[int] = []
    for value, is_away in itertools.zip_longest(
        entry.results, results_on_host, fillvalue=False
    ):
        buffer = program.buffers[value]
        is_alias = buffer in spare and not is_away
        if is_alias:
            spare.remove(buffer)
        results.append(0 if is_alias or is_away else memory.bytes_of(value))
    away = {value for value, yes in zip(entry.carried, on_host, strict=False) if yes}
    arguments = tuple(
        0 if value in away else memory.bytes_of(value) for value in entry.carried
    )
    peak = memory.peak(entry, dict(zip(entry.results, results, strict=True)))
    temporary = peak.bytes + memory.remat.kept_bytes
    found = tuple(
        sorted(map(memory.live_array, peak.values), key=lambda one: -one.bytes)
    )
    return Memory(
        arguments=arguments,
        results=tuple(results),
        temporary_bytes=temporary,
        arrays=found,
    )


class _Peak(NamedTuple):
    """The peak bytes of the temporaries in a loop's body, branch or entry computation,
    and the numbers of the arrays that are live at the peak.
    """

    bytes: int = 0
    values: tuple[int, ...] = ()


class _Counter:
    """Counts the memory of a program's values. A value is the number of an array. A
    temporary is a value that is neither an argument nor a result.
    """

    def __init__(self, module: HloModule, program: FlatProgram, tile: Tile):
        self.module = module
        self.program = program
        self.tile = tile
        self.uses = Uses(program)
        self.sources = sources_of(program, self.uses)
        self.remat = Rematerialized()

    def bytes_of(self, value: int) -> int:
        """The bytes of an array, with tile padding; 0 if the array is rematerialized
        and thus not stored.
        """
        if value in self.remat.values:
            return 0
        return bytes_of(self.program.buffers[value], self.tile)

    def live_array(self, value: int) -> LiveArray:
        """The temporary `value`, with the operation that made it. A loop's result is
        made in the loop's body.
        """
        op = made = self.uses.maker.get(value)
        while made is not None and made.opcode == "while":
            op, value = made, made.bodies[0].results[made.makes.index(value)]
            made = self.uses.maker.get(value)
        size, buffer = self.bytes_of(value), self.program.buffers[value]
        op = made or op
        assert op is not None
        line = own_line(self.module.frames(op.instruction))
        return LiveArray(buffer, size, op.opcode, op.instruction.op_name, line)

    def peak(self, body: Body, result_bytes: Mapping[int, int]) -> _Peak:
        """The peak of the temporaries of `body`. The parameters and results of `body`
        do not count. Until a result of the program is computed, temporaries can use its
        memory. `result_bytes` has the bytes of each result, by its number; empty for a
        nested body.
        """
        ops = [op for op in body.ops if op.bodies or any(map(self.is_array, op.makes))]
        makes = [tuple(filter(self.is_array, op.makes)) for op in ops]
        reads = [frozenset(self.reads(op)) for op in ops]
        order = list_schedule(reads, makes, self.bytes_of)
        ops, makes, reads = (
            [ops[at] for at in order],
            [makes[at] for at in order],
            [reads[at] for at in order],
        )
        born = {value: at for at, values in enumerate(makes) for value in values}
        last = born | {value: at for at, values in enumerate(reads) for value in values}
        # The body writes its results to the buffers of its carried values, or to
        # buffers of its caller.
        kept = {*body.results}
        begins: dict[int, list[int]] = {}
        for value, at in born.items():
            if value not in kept:
                begins.setdefault(at, []).append(value)
        live: dict[int, int] = {}
        worst = _Peak()
        for at, op in enumerate(ops):
            is_in_place = op.opcode in IN_PLACE
            live = {
                value: size
                for value, size in live.items()
                if last[value] >= at + is_in_place
            }
            live |= {value: self.bytes_of(value) for value in begins.get(at, ())}
            inner = max(
                (self.peak(one, {}) for one in op.bodies),
                key=lambda one: one.bytes,
                default=_Peak(),
            )
            whole = sum(live.values()) + inner.bytes
            free = [
                size for value, size in result_bytes.items() if born.get(value, -1) > at
            ]
            largest = max(free, default=0)
            hosted = min(
                sum(free), sum(size for size in live.values() if size <= largest)
            )
            needed = whole - hosted
            if needed > worst.bytes:
                worst = _Peak(needed, (*live, *inner.values))
        return worst

    def is_array(self, value: int) -> bool:
        """Whether a value occupies memory as an array. It does not if XLA fuses it into
        its readers.
        """
        return value in self.sources[value]

    def reads(self, op: FlatOp) -> set[int]:
        """The arrays in memory that an operation reads, also inside its bodies."""
        read = [*op.reads, *(value for body in op.bodies for value in body.results)]
        found = set().union(*(self.sources[value] for value in read))
        return found.union(
            *(self.reads(inner) for body in op.bodies for inner in body.ops)
        )

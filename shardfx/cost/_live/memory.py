"""The memory of one device while it runs a partitioned program, and the same with each
layer rematerialized.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ..._ground import opcodes
from ..._step import HloModule, Tile, arrays_in, bytes_of, own_line
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
    program: FlatProgram,
    uses: Uses,
    bytes_of: Callable[[int], int],
) -> Rematerialized:
    """The change of memory if each layer were rematerialized; empty if that would save
    almost nothing.

    In each iteration, a loop of the forward pass can write one slice of an array that
    another loop then reads. With rematerialization, such arrays are not stored.
    Instead, the values that the forward loop carries from layer to layer are stored for
    every layer. `bytes_of` returns the bytes of an array, from its number.

    The loop-carried value number `index` has four numbers of arrays: before the loop
    (`loop.reads[index]`), after it (`loop.makes[index]`), and at the start and the end
    of an iteration (`body.carried[index]`, `body.results[index]`).
    """
    loop_bodies: set[int] = set()
    for op in uses.ops:
        if op.opcode == "while":
            loop_bodies.update(map(id, op.bodies))
    dropped_arrays: set[int] = set()
    stacked_bytes = 0
    kept_bytes = 0
    for loop in program.entry.ops:
        if loop.opcode != "while":
            continue
        stack_indices = [
            index for index in range(len(loop.makes)) if _is_stack(loop, index, uses)
        ]
        dropped_indices: list[int] = []
        for index in stack_indices:
            readers = {id(use.body) for use in uses.reads_of(loop.makes[index])}
            if readers <= loop_bodies:
                dropped_indices.append(index)
        if not dropped_indices:
            continue
        body = loop.bodies[0]
        # A loop may stack its carried values already. Then these are stored in the
        # dtype of the stack.
        bytes_by_stack_shape: dict[tuple[int, ...], int] = {}
        for index in dropped_indices:
            stack = loop.makes[index]
            stacked_bytes += bytes_of(stack)
            bytes_by_stack_shape[program.buffers[stack].shape] = bytes_of(stack)
            dropped_arrays.add(stack)
            dropped_arrays.add(loop.reads[index])
            dropped_arrays.add(body.carried[index])
            dropped_arrays.add(body.results[index])
        # The first dimension of a stack is the number of layers.
        first_stack = loop.makes[dropped_indices[0]]
        length = program.buffers[first_stack].shape[0]
        for index, value in enumerate(loop.makes):
            shape = program.buffers[value].shape
            if index not in stack_indices and shape:
                nbytes = length * bytes_of(value)
                kept_bytes += bytes_by_stack_shape.get((length, *shape), nbytes)
    if stacked_bytes <= 1.1 * kept_bytes:
        return Rematerialized()
    return Rematerialized(values=frozenset(dropped_arrays), kept_bytes=kept_bytes)


def _is_stack(loop: FlatOp, index: int, uses: Uses) -> bool:
    """Whether each iteration of a loop writes a slice of its loop-carried array number
    `index`, and none reads it. The array is `body.carried[index]` at the start of an
    iteration, and `body.results[index]` at its end.
    """
    body = loop.bodies[0]
    op = uses.maker.get(body.results[index])
    readers = [use.op for use in uses.reads_of(body.carried[index])]
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
    counter = _Counter(module, program, tile)
    if remat:
        counter.remat = rematerialized(program, counter.uses, counter.bytes_of)
    entry = program.entry
    arguments = counter.device_bytes(entry.carried, on_host)
    results = counter.device_bytes(entry.results, results_on_host)
    donated_values = itertools.compress(entry.carried, donated)
    # A result takes the memory of a donated argument of its dtype and shape.
    reusable_buffers = [program.buffers[value] for value in donated_values]
    for number, value in enumerate(entry.results):
        buffer = program.buffers[value]
        is_on_host = number < len(results_on_host) and results_on_host[number]
        if not is_on_host and buffer in reusable_buffers:
            reusable_buffers.remove(buffer)
            results[number] = 0

    peak = counter.peak(entry, dict(zip(entry.results, results, strict=True)))
    constants = constants_of(module, tile)
    constant_bytes = sum(array.bytes for array in constants)
    arrays = [counter.live_array(value) for value in peak.values]
    arrays += constants
    arrays.sort(key=lambda array: -array.bytes)
    return Memory(
        arguments=tuple(arguments),
        results=tuple(results),
        temporary_bytes=peak.bytes + counter.remat.kept_bytes + constant_bytes,
        arrays=tuple(arrays),
    )


# Smaller constants are single numbers, and the partitioner's own tables, which have a
# number for each device.
_LEAST_ELEMENTS = 1024


def constants_of(module: HloModule, tile: Tile) -> list[LiveArray]:
    """The arrays whose numbers are part of a program, such as those that a step closes
    over; without small ones. Each device holds them whole, as long as the program is
    loaded.
    """
    constants = []
    for instructions in module.computations.values():
        for instruction in instructions.values():
            if instruction.opcode != "constant":
                continue
            (buffer,) = arrays_in(instruction.result)
            if math.prod(buffer.shape) < _LEAST_ELEMENTS:
                continue
            array = LiveArray(
                buffer=buffer,
                bytes=bytes_of(buffer, tile),
                opcode=instruction.opcode,
                op_name=instruction.op_name,
                source=own_line(module.frames(instruction)),
            )
            constants.append(array)
    return constants


class _Peak(NamedTuple):
    """The peak bytes of the temporaries in a loop's body, branch or entry computation,
    and the numbers of the arrays that are live at the peak.
    """

    bytes: int = 0
    values: tuple[int, ...] = ()


class _ArrayOp(NamedTuple):
    """An operation, and the numbers of the arrays in memory that it reads and makes."""

    op: FlatOp
    reads: frozenset[int]
    makes: tuple[int, ...]


class _Counter:
    """Counts the memory of a program's values. A value is the number of an array. A
    temporary is a value that is neither an argument nor a result.
    """

    def __init__(self, module: HloModule, program: FlatProgram, tile: Tile):
        """Starts without rematerialization. `tile` is the chip's tile of memory, to
        which arrays are padded.
        """
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

    def device_bytes(self, values: Sequence[int], on_host: Sequence[bool]) -> list[int]:
        """The bytes of each value; 0 for those that are in host memory."""
        sizes = list(map(self.bytes_of, values))
        for number in itertools.compress(range(len(sizes)), on_host):
            sizes[number] = 0
        return sizes

    def live_array(self, value: int) -> LiveArray:
        """The temporary `value`, with the operation that made it. A loop's result is
        made in the loop's body.
        """
        maker = self.uses.maker[value]
        while maker.opcode == "while":
            value = maker.bodies[0].results[maker.makes.index(value)]
            inner_maker = self.uses.maker.get(value)
            if inner_maker is None:
                break
            maker = inner_maker
        return LiveArray(
            buffer=self.program.buffers[value],
            bytes=self.bytes_of(value),
            opcode=maker.opcode,
            op_name=maker.instruction.op_name,
            source=own_line(self.module.frames(maker.instruction)),
        )

    def peak(self, body: Body, result_bytes: Mapping[int, int]) -> _Peak:
        """The peak of the temporaries of `body`. The parameters and results of `body`
        do not count. Until a result of the program is computed, temporaries can use its
        memory. `result_bytes` has the bytes of each result, by its number; empty for a
        nested body. An operation of `ops` reads and makes arrays; `op.op` is the one of
        the program.
        """
        ops = self.scheduled(body)
        # The positions at which each array is made and last read.
        made_at: dict[int, int] = {}
        last_used_at: dict[int, int] = {}
        for position, op in enumerate(ops):
            made_at.update(dict.fromkeys(op.makes, position))
            last_used_at.update(dict.fromkeys((*op.makes, *op.reads), position))

        # The body writes its results to the buffers of its carried values, or to
        # buffers of its caller.
        results_of_body = frozenset(body.results)
        live: dict[int, int] = {}
        worst = _Peak()
        for position, op in enumerate(ops):
            # An operation in place takes over the memory of what it reads last.
            is_in_place = op.op.opcode in opcodes.IN_PLACE
            oldest = position + 1 if is_in_place else position
            for value in list(live):
                if last_used_at[value] < oldest:
                    del live[value]
            for value in op.makes:
                if value not in results_of_body:
                    live[value] = self.bytes_of(value)
            inner = self.largest_peak(op.op.bodies)
            later_results: list[int] = []
            for value, nbytes in result_bytes.items():
                if made_at.get(value, -1) > position:
                    later_results.append(nbytes)
            reused_bytes = _reused_bytes(live, later_results)
            needed_bytes = sum(live.values()) + inner.bytes - reused_bytes
            if needed_bytes > worst.bytes:
                worst = _Peak(bytes=needed_bytes, values=(*live, *inner.values))
        return worst

    def largest_peak(self, bodies: Sequence[Body]) -> _Peak:
        """The largest of the peaks of nested bodies; zero without any."""
        peaks = [self.peak(body, {}) for body in bodies]
        return max(peaks, key=lambda peak: peak.bytes, default=_Peak())

    def scheduled(self, body: Body) -> list[_ArrayOp]:
        """The operations of a body that make arrays or run other bodies, in the order in
        which XLA schedules them.
        """
        ops: list[_ArrayOp] = []
        for op in body.ops:
            makes = tuple(filter(self.is_array, op.makes))
            if makes or op.bodies:
                ops.append(_ArrayOp(op=op, reads=self.reads(op), makes=makes))
        order = list_schedule(
            reads=[op.reads for op in ops],
            makes=[op.makes for op in ops],
            bytes_of=self.bytes_of,
        )
        return [ops[number] for number in order]

    def is_array(self, value: int) -> bool:
        """Whether a value occupies memory as an array. It does not if XLA fuses it into
        its readers.
        """
        return value in self.sources[value]

    def reads(self, op: FlatOp) -> frozenset[int]:
        """The arrays in memory that an operation reads, also inside its bodies. A value
        that XLA fuses into its readers is no array: `sources` has the arrays from which
        it is computed.
        """
        arrays: set[int] = set()
        for value in op.reads:
            arrays |= self.sources[value]
        for body in op.bodies:
            for value in body.results:
                arrays |= self.sources[value]
            for inner in body.ops:
                arrays |= self.reads(inner)
        return frozenset(arrays)


def _reused_bytes(live: Mapping[int, int], result_sizes: Sequence[int]) -> int:
    """The bytes of live arrays that fit into the memory of later results. `live` has
    the bytes of each array, `result_sizes` those of each result.
    """
    largest_result = max(result_sizes, default=0)
    fitting_sizes = [size for size in live.values() if size <= largest_result]
    return min(sum(result_sizes), sum(fitting_sizes))

"""A program's memory as libtpu assigns it, from the texts that it dumps: the bytes of
each memory space, and the arrays that are live at the worst moment. An allocation is a
part of memory that several values take at different times.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from .._ground import opcodes
from .._ground.errors import ProgramError
from .._step import (
    Array,
    HloModule,
    Instruction,
    TpuTexts,
    arrays_in,
    own_line,
    root_of,
)
from ._memory import LiveArray, Memory


# libtpu's numbers of memory spaces: "color" in its texts.
_HBM = 0
_ON_CHIP = 1
_ALLOCATION = re.compile(r"allocation \d+: size (\d+)(.*):$")
_COLOR = re.compile(r", color (\d+)")
_PARAMETER = re.compile(r", parameter (\d+),")
_INDEX = re.compile(r"at ShapeIndex \{([\d,]*)\}")
_VALUE = re.compile(
    r" value: <\d+ (\S+?)(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (.*)$"
)
_RANGE = re.compile(r"    (\S+\{[\d,]*\}):(\d+)-(\d+)$")
_SPACE = re.compile(r"Memory Space: \S+ \(color=(\d+)\)\nTotal bytes: (\d+)")


class _Value(NamedTuple):
    """A value in an allocation.

    - `name`: the instruction's name and the index in its tuple, as "fusion.84{5}".
    - `bytes`, `offset`: its bytes with padding, and its place in the allocation.
    - `type`: the text of its type.
    """

    name: str
    bytes: int
    offset: int
    type: str


class _Allocation(NamedTuple):
    """An allocation, and the values that share it at different times.

    - `color`: libtpu's number of the memory space.
    - `parameter`: the number of the program's array in it; `None` for other memory.
    - `kind`: the text after its size.
    """

    bytes: int
    color: int
    parameter: int | None
    kind: str
    values: list[_Value]

    @property
    def is_temporary(self) -> bool:
        return "preallocated-temp" in self.kind

    @property
    def is_result(self) -> bool:
        return "maybe-live-out" in self.kind and self.parameter is None


class _Range(NamedTuple):
    """The numbers of the first and the last instruction between which a value lives."""

    first: int
    last: int


def assigned_memory(
    texts: TpuTexts,
    module: HloModule,
    argument_count: int,
    *,
    is_tupled: bool,
) -> Memory:
    """The memory of one device in HBM as libtpu assigns it.

    **Arguments:**

    - `texts`, `module`: what libtpu dumps of the program, and its scheduled module.
    - `argument_count`: the number of the program's arguments.
    - `is_tupled`: whether the program takes its arguments as one tuple.

    **Raises:**

    `ProgramError` if the texts contradict each other, as after a disk was full.
    """
    allocations = _read_allocations(texts.assignment, is_tupled)
    spaces = {int(color): int(size) for color, size in _SPACE.findall(texts.report)}
    _check_sums(allocations, spaces)
    in_hbm = [allocation for allocation in allocations if allocation.color == _HBM]
    arguments = _argument_bytes(allocations, argument_count)
    results = [allocation.bytes for allocation in in_hbm if allocation.is_result]
    temporary_sizes = [
        allocation.bytes for allocation in in_hbm if allocation.is_temporary
    ]
    places = _values_by_place(in_hbm)
    moment = _worst_moment(places, _ranges(texts.ranges))
    finder = _Arrays(module)
    arrays = [
        finder.live_array(value, places[place])
        for place, value in moment.values.items()
    ]
    arrays.sort(key=lambda array: -array.bytes)
    return Memory(
        arguments=arguments,
        results=tuple(results),
        temporary_bytes=spaces[_HBM] - sum(arguments) - sum(results),
        arrays=tuple(arrays),
        gap_bytes=sum(temporary_sizes) - moment.bytes,
        on_chip_bytes=spaces.get(_ON_CHIP, 0),
        out_of_memory=texts.out_of_memory,
        is_counted=True,
    )


def _check_sums(allocations: Sequence[_Allocation], spaces: Mapping[int, int]) -> None:
    """Raises `ProgramError` if the allocations of each memory space do not add up to
    the bytes that libtpu reports for it. `spaces` has these bytes, by the number
    (color) of the memory space.
    """
    sums: dict[int, int] = dict.fromkeys(spaces, 0)
    for allocation in allocations:
        sums[allocation.color] = sums.get(allocation.color, 0) + allocation.bytes
    if sums != spaces or _HBM not in spaces:
        raise ProgramError(
            "libtpu's texts about memory contradict each other: its allocations are"
            f" {sums} bytes by memory space, its report says {spaces}; look whether the"
            " disk of temporary files is full."
        )


def _read_allocations(text: str, is_tupled: bool) -> list[_Allocation]:
    """The allocations in the text of the buffer assignment, each with its values.
    `is_tupled` says whether the program takes its arguments as one tuple.
    """
    allocations: list[_Allocation] = []
    for line in text.splitlines():
        if (header := _ALLOCATION.match(line)) is not None:
            allocations.append(_allocation(int(header[1]), header[2], is_tupled))
        elif allocations and (match := _VALUE.match(line)) is not None:
            # The text of live ranges has an index for every value.
            name = match[1]
            if not name.endswith("}"):
                name += "{}"
            value = _Value(
                name=name,
                bytes=int(match[2]),
                offset=int(match[3]),
                type=match[4],
            )
            allocations[-1].values.append(value)
    return allocations


def _allocation(size: int, kind: str, is_tupled: bool) -> _Allocation:
    """An allocation without values yet, from its bytes and the text after them. If the
    program takes its arguments as one tuple (`is_tupled`), the number of an argument is
    its index in parameter 0; the tuple itself is no argument.
    """
    color = _COLOR.search(kind)
    parameter = _PARAMETER.search(kind)
    index = _INDEX.search(kind)
    number = None
    if parameter is not None and not is_tupled:
        number = int(parameter[1])
    elif parameter is not None and index is not None and index[1]:
        number = int(index[1])
    return _Allocation(
        bytes=size,
        color=int(color[1]) if color else _HBM,
        parameter=number,
        kind=kind,
        values=[],
    )


def _argument_bytes(allocations: Iterable[_Allocation], count: int) -> tuple[int, ...]:
    """The bytes in HBM of each of the program's arguments."""
    sizes: dict[int, int] = {}
    for allocation in allocations:
        if allocation.parameter is not None:
            in_hbm = allocation.bytes if allocation.color == _HBM else 0
            sizes[allocation.parameter] = sizes.get(allocation.parameter, 0) + in_hbm
    return tuple(sizes.get(number, 0) for number in range(count))


def _ranges(text: str) -> dict[str, _Range]:
    """The live range of each value, by its name."""
    ranges: dict[str, _Range] = {}
    for line in text.splitlines():
        if (match := _RANGE.match(line)) is not None:
            ranges[match[1]] = _Range(int(match[2]), int(match[3]))
    return ranges


class _Place(NamedTuple):
    """A part of an allocation that values take at different times."""

    allocation: int
    offset: int


class _Moment(NamedTuple):
    """The moment at which temporaries take the most memory.

    - `bytes`: the bytes that live values take.
    - `values`: the largest live value of each place that is taken, by its place.
    """

    bytes: int
    values: dict[_Place, _Value]


def _values_by_place(
    allocations: Sequence[_Allocation],
) -> dict[_Place, list[_Value]]:
    """The values of temporary allocations, by the place that they take. A place is an
    offset in an allocation; the allocation is named by its position in `allocations`.
    """
    places: dict[_Place, list[_Value]] = {}
    for number, allocation in enumerate(allocations):
        if not allocation.is_temporary:
            continue
        for value in allocation.values:
            places.setdefault(_Place(number, value.offset), []).append(value)
    return places


def _worst_moment(
    places: Mapping[_Place, Sequence[_Value]],
    ranges: Mapping[str, _Range],
) -> _Moment:
    """The moment at which the values of temporary allocations take the most memory.
    Values that share a place, such as the states of an array that a loop updates, take
    it once. `places` has the values that share each place, and `ranges` the live range
    of each value by its name, in numbers of scheduled instructions.
    """
    starts: dict[int, list[tuple[_Place, _Value]]] = {}
    stops: dict[int, list[tuple[_Place, _Value]]] = {}
    for place, values in places.items():
        for value in values:
            if (live_range := ranges.get(value.name)) is not None:
                starts.setdefault(live_range.first, []).append((place, value))
                stops.setdefault(live_range.last + 1, []).append((place, value))

    live: dict[_Place, list[_Value]] = {}
    live_bytes = 0
    worst = _Moment(bytes=0, values={})
    for position in sorted({*starts, *stops}):
        for place, value in stops.get(position, ()):
            live_bytes -= _bytes_of(live[place])
            live[place].remove(value)
            live_bytes += _bytes_of(live[place])
        for place, value in starts.get(position, ()):
            sharing_values = live.setdefault(place, [])
            live_bytes -= _bytes_of(sharing_values)
            sharing_values.append(value)
            live_bytes += _bytes_of(sharing_values)
        if live_bytes > worst.bytes:
            worst = _Moment(bytes=live_bytes, values=_largest_values(live))
    return worst


def _largest_values(live: Mapping[_Place, Sequence[_Value]]) -> dict[_Place, _Value]:
    """The largest value of each place that has one."""
    largest = {}
    for place, values in live.items():
        if values:
            largest[place] = max(values, key=lambda value: value.bytes)
    return largest


def _bytes_of(values: Sequence[_Value]) -> int:
    """The bytes that values take which share one place; 0 for none."""
    return max((value.bytes for value in values), default=0)


class _Arrays:
    """Finds the operations of a scheduled module that make its arrays."""

    def __init__(self, module: HloModule):
        self.module = module
        self.instructions: dict[str, Instruction] = {}
        for computation in module.computations.values():
            for instruction in computation.values():
                self.instructions[instruction.name] = instruction

    def live_array(self, value: _Value, values_of_place: Sequence[_Value]) -> LiveArray:
        """The array of a value. `values_of_place` are the values that share its place:
        the state of an array before a loop is a value of its own, and may have no
        source line.
        """
        maker = self.maker_with_line(value, values_of_place)
        # A value of another type than an array is shown as its bytes.
        array = Array("u8", (value.bytes,))
        if not value.type.startswith(("(", "token")):
            array = next(iter(arrays_in(value.type)), array)
        if maker is None:
            return LiveArray(
                buffer=array,
                bytes=value.bytes,
                opcode="",
                op_name="",
                source=None,
            )
        return LiveArray(
            buffer=array,
            bytes=value.bytes,
            opcode=maker.opcode,
            op_name=maker.op_name,
            source=own_line(self.module.frames(maker)),
        )

    def maker_with_line(
        self,
        value: _Value,
        values_of_place: Sequence[_Value],
    ) -> Instruction | None:
        """The operation that makes a value, or else one of the same bytes in
        `values_of_place`, if it says its source line; else the one that makes the
        value.
        """
        own_maker = self.maker(value)
        if _says_its_line(own_maker):
            return own_maker
        for other in values_of_place:
            if other.bytes != value.bytes:
                continue
            maker = self.maker(other)
            if _says_its_line(maker):
                return maker
        return own_maker

    def maker(self, value: _Value) -> Instruction | None:
        """The operation that makes a value: within a fusion, the one that makes this
        element of its results.
        """
        name, _, index = value.name.partition("{")
        instruction = self.instructions.get(name)
        if instruction is None or instruction.opcode != "fusion":
            return self.copied(instruction)
        called = dict(instruction.called).get("calls")
        if called is None:
            return instruction
        root = root_of(self.module.computations[called])
        number = index.rstrip("}")
        if root.opcode == "tuple" and number.isdigit():
            root = self.instructions[root.operands[int(number)]]
        if _says_its_line(root):
            return root
        return instruction

    def copied(self, instruction: Instruction | None) -> Instruction | None:
        """The operation whose result a copy between memories holds."""
        while instruction is not None and instruction.opcode in opcodes.COPIES:
            instruction = self.instructions.get(instruction.operands[0])
        return instruction


def _says_its_line(instruction: Instruction | None) -> bool:
    """Whether an instruction says from which source line it comes."""
    return instruction is not None and "stack_frame_id" in instruction.attributes

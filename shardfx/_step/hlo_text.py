"""A parser of HLO text: the computations of a module, their instructions, result types
and source lines.
"""

import dataclasses
import functools as ft
import itertools
import math
import re
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Literal, NamedTuple, TypeAlias

from .._ground.errors import ProgramError
from .._ground.opcodes import WITHOUT_OPERANDS
from .lowered import Frame


_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .* )?\{$")
_NAME = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
# Most instructions: an array as the result, and operands that are names alone.
_SIMPLE = re.compile(
    r"\s+(ROOT )?%?([\w.\-]+) = ([^\s(]+) ([\w\-]+)\(([^()\[\]{}\"]*)\)"
)
# In the text of JAX 0.12, `%param#0` is an element of the tuple `%param`, without a
# `get-tuple-element` instruction.
_OPERAND = re.compile(r"%([\w.\-]+(?:#\d+)*)")
# In texts without `%`, the last word of an operand is its name.
_LAST_WORD = re.compile(r"([A-Za-z_][\w.\-]*)\s*(?:,|$)")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_END_OF_COMPUTATION = re.compile(r"^\}(\s*$|,)")
_CALLED = re.compile(
    r"\b(calls|to_apply|body|condition|branch_computations|true_computation|false_computation|called_computations)="
    r"(?:\{([^}]*)\}|%?([\w.\-]+))"
)
_REPLICAS = re.compile(r"\breplica_count=(\d+)")
_PARTITIONS = re.compile(r"\bnum_partitions=(\d+)")
_TABLE = re.compile(r"^(FileNames|FunctionNames|FileLocations|StackFrames)$")
_NUMBER = re.compile(r"(\w+)=(\d+)")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_OLD_SOURCE = re.compile(r'source_file="([^"]*)"(?:.*?source_line=(\d+))?')
# The attribute that a `send` and its `recv` have in common: a name between hosts,
# device pairs between GPUs.
_RENDEZVOUS = re.compile(
    r'_xla_host_transfer_rendezvous="([^"]*)"|_xla_send_recv_source_target_pairs="?(\{\{.*?\}\})'
)
_OPENING = "([{"
_CLOSING = ")]}"
# A bracket, a comma, or a whole quoted text, so that brackets and commas in quotes do
# not match.
_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"|[()\[\]{},]', re.DOTALL)


Phase = Literal["", "forward", "backward", "recomputed"]


def phase_of(op_name: str) -> Phase:
    """The pass of an operation, from its JAX name stack: "forward", "backward" or
    "recomputed". It is "" for an operation that `jax.grad` did not transform.
    """
    if "rematted_computation" in op_name:
        return "recomputed"
    if "transpose(" in op_name:
        return "backward"
    if "jvp(" in op_name:
        return "forward"
    return ""


class Instruction(NamedTuple):
    """One instruction of HLO.

    - `name`: the name of the instruction.
    - `result`: the text of its result type.
    - `opcode`: the opcode, such as "dot".
    - `operands`: the names of its operands.
    - `inside`: the text between the parentheses after the opcode.
    - `attributes`: the text after these parentheses.
    - `is_root`: whether the computation returns the instruction's result.
    """

    name: str
    result: str
    opcode: str
    operands: tuple[str, ...]
    inside: str
    attributes: str
    is_root: bool

    @property
    def text(self) -> str:
        """The text of the instruction, without its `backend_config`."""
        line = (
            f"%{self.name} = {self.result}"
            f" {self.opcode}({self.inside}){self.attributes}"
        )
        return line.partition(", backend_config=")[0]

    @property
    def structure(self) -> str:
        """The attributes without quoted texts, since users' names in quotes can look
        like attributes.
        """
        return _QUOTED.sub('""', self.attributes)

    @property
    def rendezvous(self) -> str | None:
        """The text that only a `send` and its `recv` have in common; `None` for other
        instructions.
        """
        if self.opcode not in ("send", "recv"):
            return None
        match = _RENDEZVOUS.search(self.attributes)
        return match[1] or match[2] if match else None

    @property
    def op_name(self) -> str:
        """The JAX name stack of the operation that was lowered to this instruction; ""
        if it has none.
        """
        return _op_name_in(self.attributes)

    @property
    def phase(self) -> Phase:
        """The pass of the instruction: "forward", "backward" or "recomputed"; ""
        outside of gradients.
        """
        return phase_of(self.op_name)

    @property
    def called(self) -> Iterator[tuple[str, str]]:
        """Yields, for each computation that the instruction calls, its attribute (such
        as "body") and its name.
        """
        # Most instructions call no computation, and a search for eight attributes in
        # each line is slow. `condition=` comes with `body=`, and the other attributes
        # have "computation" in their names.
        text = self.attributes
        if (
            "calls=" not in text
            and "to_apply=" not in text
            and "body=" not in text
            and "comp" not in text
        ):
            return
        for attribute, several, single in _CALLED.findall(self.structure):
            for name in several.split(",") if several else [single]:
                yield attribute, name.strip().lstrip("%")


@ft.lru_cache(maxsize=2**12)
def _op_name_in(attributes: str) -> str:
    """The name stack in the attributes of an instruction, without escape characters."""
    match = _OP_NAME.search(attributes)
    if match is None:
        return ""
    name = match[1]
    if "\\" not in name:
        return name
    return re.sub(r"\\(.)", r"\1", name)


@dataclasses.dataclass(frozen=True)
class HloModule:
    """An HLO module.

    - `entry`: the name of the entry computation.
    - `computations`: for the name of each computation, its instructions by name.
      Callees come before their callers.
    - `tables`: the rows of the tables at the end of the text, by the name of each.
    - `partitions`: the number of partitions (devices) in the module's first line; 1 if
      the line does not have it.
    """

    entry: str
    computations: dict[str, dict[str, Instruction]]
    tables: dict[str, list[str]]
    partitions: int = 1

    @ft.cached_property
    def stacks(self) -> dict[int, tuple[Frame, ...]]:
        """For each stack frame id in the attributes of instructions, the call stack,
        innermost frame first.
        """
        return _stacks(self.tables)

    def frames(self, instruction: Instruction) -> tuple[Frame, ...]:
        """The call stack of the operation that was lowered to an instruction, innermost
        frame first.
        """
        if match := _FRAME.search(instruction.attributes):
            return self.stacks.get(int(match[1]), ())
        if match := _OLD_SOURCE.search(instruction.attributes):
            return (Frame(file=match[1], line=int(match[2] or 0), function=""),)
        return ()


def parse_hlo(text: str) -> HloModule:
    """Parses the text of an HLO module, as `compiled.as_text()` returns it. Raises
    `ProgramError`, with the line, for text that is no HLO module or has an instruction
    that cannot be read.
    """
    sections = _Sections()
    for line in text.splitlines():
        sections.read(line)
    if sections.unread:
        cut_off = sections.unread.strip()
        raise ProgramError(f"the HLO module is cut off after: {cut_off:.300}")
    if not sections.entry:
        raise ProgramError(
            "this text is no optimized HLO module: it has no ENTRY computation; pass a"
            " compiled program, or its `as_text()`."
        )
    header = text.partition("\n")[0]
    replicas = _count_in(header, _REPLICAS)
    if replicas > 1:
        raise ProgramError(
            f"the program runs as {replicas} replicas, as `jax.pmap` once wrote it;"
            " write the step for `jax.jit` and a mesh of as many devices."
        )
    return HloModule(
        entry=sections.entry,
        computations=sections.computations,
        tables=sections.tables,
        partitions=_count_in(header, _PARTITIONS),
    )


def _count_in(header: str, pattern: re.Pattern[str]) -> int:
    """The number that a pattern finds in the first line of a module; 1 without it."""
    match = pattern.search(header)
    if match is None:
        return 1
    return int(match[1])


class _Sections:
    """The computations and tables of an HLO module, read line by line.

    - `unread`: the lines of an instruction that may go on in the next line.
    """

    def __init__(self):
        self.entry = ""
        self.computations: dict[str, dict[str, Instruction]] = {}
        self.tables: dict[str, list[str]] = {}
        self.unread = ""
        self._computation: dict[str, Instruction] | None = None
        self._rows: list[str] | None = None

    def read(self, line: str) -> None:
        """Reads the next line of a module."""
        if self._computation is not None:
            self._read_inside(line, self._computation)
        elif table := _TABLE.match(line):
            self._rows = self.tables.setdefault(table[1], [])
        elif self._rows is not None and line[:1].isdigit():
            self._rows.append(line.partition(" ")[2])
        elif header := _HEADER.match(line):
            self._computation = self.computations.setdefault(header[2], {})
            self._rows = None
            if header[1]:
                self.entry = header[2]

    def _read_inside(self, line: str, computation: dict[str, Instruction]) -> None:
        """Reads the next line of a computation. An instruction is added when the line
        after it shows that it is complete.
        """
        # The attributes of a kernel can span several lines, and one of these lines can
        # start with a bracket.
        if (
            self.unread
            and not _NAME.match(line)
            and not _has_closed_braces(self.unread)
        ):
            self.unread += f"\n{line}"
            return
        if self.unread:
            instruction = _instruction(self.unread)
            for operand in instruction.operands:
                if "#" in operand:
                    _add_tuple_element(computation, operand)
            computation[instruction.name] = instruction
        if line.startswith("}") and _END_OF_COMPUTATION.match(line):
            self._computation = None
            self.unread = ""
        else:
            self.unread = line if line.strip() else ""


def _instruction(line: str) -> Instruction:
    """Reads the text of one instruction. Raises `ProgramError` if it cannot be read."""
    simple = _SIMPLE.match(line)
    if simple is not None:
        root, name, result, opcode, inside = simple.groups()
        operands = tuple(_OPERAND.findall(inside))
        # Operands without `%` are read below.
        if operands or not inside or opcode in WITHOUT_OPERANDS:
            return Instruction(
                name=name,
                result=result,
                opcode=opcode,
                operands=operands,
                inside=inside,
                attributes=line[simple.end() :],
                is_root=root is not None,
            )

    head = _NAME.match(line)
    start = head.end() if head else 0
    # The result type ends at its bracket if it is a tuple, else at a space.
    if line[start] == "(":
        stop = _after_bracket(line, start)
    else:
        stop = line.find(" ", start)
    opening = line.find("(", stop + 1)
    if head is None or stop < 0 or opening < 0:
        raise ProgramError(
            f"an instruction of the HLO module cannot be read: {line.strip():.300}"
        )
    root, name = head.groups()
    closing = _after_bracket(line, opening)
    inside = line[opening + 1 : closing - 1]
    opcode = line[stop + 1 : opening].strip()
    operands = tuple(_OPERAND.findall(inside))
    if not operands and inside and opcode not in WITHOUT_OPERANDS:
        operands = tuple(_LAST_WORD.findall(inside))
    return Instruction(
        name=name,
        result=line[start:stop].strip(),
        opcode=opcode,
        operands=operands,
        inside=inside,
        attributes=line[closing:],
        is_root=root is not None,
    )


def _add_tuple_element(instructions: dict[str, Instruction], operand: str) -> None:
    """If `operand` is a name such as `param#0`, adds an instruction with this name to
    the computation `instructions`: element 0 of the tuple `param`. Names such as
    `param#0#1` add one for each element.
    """
    whole, mark, index = operand.rpartition("#")
    if not mark or operand in instructions:
        return
    _add_tuple_element(instructions, whole)
    part = parts_of(instructions[whole].result)[int(index)]
    instructions[operand] = Instruction(
        name=operand,
        result=part,
        opcode="get-tuple-element",
        operands=(whole,),
        inside=f"%{whole}",
        attributes=f", index={index}",
        is_root=False,
    )


def parts_of(result: str) -> list[str]:
    """The texts of the elements of the tuple type `result`; for an array type, its own
    text.
    """
    inside = result
    if result.startswith("("):
        inside = result[1:-1]
    parts = []
    start = 0
    # The number of brackets that are open; only commas outside of them divide.
    depth = 0
    for bracket in _BRACKET.finditer(inside):
        depth += (bracket[0] in _OPENING) - (bracket[0] in _CLOSING)
        if bracket[0] == "," and not depth:
            parts.append(inside[start : bracket.start()].strip())
            start = bracket.end()
    return [*parts, inside[start:].strip()]


def _has_closed_braces(line: str) -> bool:
    """Whether each brace that a text opens outside of quotes is closed in it."""
    bare = _QUOTED.sub("", line)
    return bare.count("{") <= bare.count("}")


def _after_bracket(line: str, opening: int) -> int:
    """The position in `line` after the bracket that closes the bracket at position
    `opening`. Raises `ProgramError` if there is none.
    """
    depth = 0
    for bracket in _BRACKET.finditer(line, opening):
        depth += (bracket[0] in _OPENING) - (bracket[0] in _CLOSING)
        if not depth:
            return bracket.end()
    raise ProgramError(
        f"an instruction of the HLO module is cut off: {line.strip():.300}"
    )


def _stacks(tables: dict[str, list[str]]) -> dict[int, tuple[Frame, ...]]:
    """The call stack of each stack frame id, innermost frame first, from the rows of
    the tables at the end of a module.
    """
    files = [row.strip('"') for row in tables.get("FileNames", ())]
    functions = [row.strip('"') for row in tables.get("FunctionNames", ())]
    places = list(map(_numbers_in, tables.get("FileLocations", ())))
    frames = list(map(_numbers_in, tables.get("StackFrames", ())))
    stacks: dict[int, tuple[Frame, ...]] = {}
    # The rows of a table are numbered from 1.
    for number, row in enumerate(frames, start=1):
        place = places[row["file_location_id"] - 1]
        frame = Frame(
            file=files[place["file_name_id"] - 1],
            line=place["line"],
            function=functions[place["function_name_id"] - 1],
        )
        # XLA prints the number of the outer frame plus one; 1 means that there is none.
        stacks[number] = (frame, *stacks.get(row["parent_frame_id"] - 1, ()))
    return stacks


def _numbers_in(row: str) -> dict[str, int]:
    """The numbers of a table's row by their keys, as in `{line=41 file_name_id=1}`."""
    return {key: int(number) for key, number in _NUMBER.findall(row)}


_ARRAY = re.compile(r"\b([a-z][a-z0-9]*)\[([^\]]*)\]")
_BITS = re.compile(r"(?:[sufc]|bf)(\d+)\w*")
# A bounded dynamic size counts as its bound.
_SIZES = re.compile(r"^(?:<=)?\d+(?:,(?:<=)?\d+)*$|^$")
_INDEX = re.compile(r"\bindex=(\d+)")
_NO_MEMORY = ("token", "opaque")


class Array(NamedTuple):
    """The dtype of an array in HLO's notation, and its shape on one device."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"

    @property
    def bits(self) -> int:
        """The bits of one element. Raises `ProgramError` for a dtype of unknown size."""
        if self.dtype in _NO_MEMORY:
            return 0
        if self.dtype == "pred":
            return 8
        match = _BITS.fullmatch(self.dtype)
        if match is None:
            raise ProgramError(f"the size of `{self}` is not known")
        return int(match[1])

    @property
    def bytes(self) -> Fraction:
        """The bytes of all elements, without padding."""
        return Fraction(self.bits * math.prod(self.shape), 8)


@ft.lru_cache(maxsize=65536)
def arrays_in(result: str) -> tuple[Array, ...]:
    """The arrays of a result type, with those inside tuples. Raises `ProgramError` for
    dimensions it cannot read.
    """
    matches = _ARRAY.findall(result)
    for dtype, sizes in matches:
        if not _SIZES.match(sizes):
            raise ProgramError(f"the size of `{dtype}[{sizes}]` is not known")
    return tuple(
        Array(dtype, tuple(map(int, re.findall(r"\d+", sizes))))
        for dtype, sizes in matches
    )


def array_of(instruction: Instruction) -> Array:
    """The array that an instruction returns; the first array of a tuple."""
    return next(iter(arrays_in(instruction.result)), Array("", ()))


def index_of(instruction: Instruction) -> int | None:
    """The tuple index of a `get-tuple-element`; `None` for other instructions."""
    if instruction.opcode != "get-tuple-element":
        return None
    match = _INDEX.search(instruction.structure)
    if match is None:
        return None
    return int(match[1])


def root_of(computation: Mapping[str, Instruction]) -> Instruction:
    """The instruction whose result a computation returns."""
    return next(
        instruction for instruction in computation.values() if instruction.is_root
    )


# The rows and columns of a tile of memory; `None` if the chip does not pad arrays to
# whole tiles.
Tile: TypeAlias = tuple[int, int] | None
# The result type of an instruction: an array, or a tuple of result types.
Result: TypeAlias = "Array | tuple[Result, ...]"


def result_of(text: str) -> Result:
    """Parses the text of a result type."""
    if text.startswith("("):
        return tuple(result_of(part) for part in parts_of(text) if part)
    return next(iter(arrays_in(text)), Array("token", ()))


@ft.lru_cache(maxsize=65536)
def bytes_of(buffer: Array, tile: Tile) -> int:
    """The bytes of an array in memory, padded to whole tiles. Elements smaller than a
    byte are packed.
    """
    return -(-math.prod(padded(buffer.shape, tile)) * buffer.bits // 8)


def padded(shape: tuple[int, ...], tile: Tile) -> tuple[int, ...]:
    """A shape padded to whole tiles, as the TPU's compiler pads it, in the layout with
    the least padding. Any two dimensions can be the rows and columns of the tiles. A
    dimension shorter than a tile's rows is padded to a power of two.
    """
    if tile is None or not shape or 0 in shape:
        return shape
    rows, columns = tile
    if len(shape) == 1:
        return (_rounded_up(shape[0], columns),)
    shapes = []
    for column_dim, row_dim in itertools.permutations(range(len(shape)), 2):
        sizes = list(shape)
        sizes[column_dim] = _rounded_up(sizes[column_dim], columns)
        power_of_two = 1 << (sizes[row_dim] - 1).bit_length()
        sizes[row_dim] = _rounded_up(sizes[row_dim], min(rows, power_of_two))
        shapes.append(tuple(sizes))
    return min(shapes, key=math.prod)


def _rounded_up(size: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `size`."""
    return -(-size // multiple) * multiple

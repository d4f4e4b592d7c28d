"""The text of an optimized HLO module as data: its computations, their instructions, and the lines they came from."""

import dataclasses
import re
from collections.abc import Iterator
from typing import Literal, NamedTuple

from .._ground.errors import ProgramError
from .._step import Frame


_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .* )?\{$")
_NAME = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
# JAX 0.12 writes a part of a tuple as `%param#0`, and no instruction that takes it out.
_OPERAND = re.compile(r"%([\w.\-]+(?:#\d+)*)")
# Texts without `%` end each operand with its name.
_BARE = re.compile(r"([A-Za-z_][\w.\-]*)\s*(?:,|$)")
_NO_OPERANDS = ("constant", "parameter", "iota", "partition-id", "replica-id", "after-all")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_ENDS = re.compile(r"^\}(\s*$|,)")
_CALLED = re.compile(
    r"\b(calls|to_apply|body|condition|branch_computations|true_computation|false_computation|called_computations)="
    r"(?:\{([^}]*)\}|%?([\w.\-]+))"
)
_REPLICAS, _PARTITIONS = re.compile(r"\breplica_count=(\d+)"), re.compile(r"\bnum_partitions=(\d+)")
_TABLE = re.compile(r"^(FileNames|FunctionNames|FileLocations|StackFrames)$")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_OLD_SOURCE = re.compile(r'source_file="([^"]*)"(?:.*?source_line=(\d+))?')
# Between hosts it has a name; between GPUs it is whoever sends to whom.
_RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="([^"]*)"|_xla_send_recv_source_target_pairs="?(\{\{.*?\}\})')
_OPENING, _CLOSING = "([{", ")]}"


Phase = Literal["", "forward", "backward", "recomputed"]


def phase_of(op_name: str) -> Phase:
    """The pass that a path of JAX's operations is of; "" where there is no gradient."""
    if "rematted_computation" in op_name:
        return "recomputed"
    return "backward" if "transpose(" in op_name else "forward" if "jvp(" in op_name else ""


class Instruction(NamedTuple):
    """One instruction: what it makes, from what, and the rest of its line.

    `passes` names the passes of a compiler that would make it of another one, and `unsure` is the share of what it
    sends that the compiler may send otherwise, for the reason in `note`; they are empty in a program as it was read.
    """

    name: str
    result: str
    opcode: str
    operands: tuple[str, ...]
    inside: str
    attributes: str
    is_root: bool
    passes: tuple[str, ...] = ()
    unsure: float = 0.0
    note: str = ""

    @property
    def text(self) -> str:
        """The line, without what the compiler noted for itself."""
        line = f"%{self.name} = {self.result} {self.opcode}({self.inside}){self.attributes}"
        return line.partition(", backend_config=")[0]

    @property
    def structure(self) -> str:
        """The rest of its line without what is in quotes: names that users give can look like attributes."""
        return _QUOTED.sub('""', self.attributes)

    @property
    def rendezvous(self) -> str | None:
        """What a send and the receive that goes with it have in common; `None` for all else."""
        if self.opcode not in ("send", "recv"):
            return None
        found = _RENDEZVOUS.search(self.attributes)
        return found[1] or found[2] if found else None

    @property
    def op_name(self) -> str:
        """The path of JAX's operations that it came from."""
        found = _OP_NAME.search(self.attributes)
        return re.sub(r"\\(.)", r"\1", found[1]) if found else ""

    @property
    def phase(self) -> Phase:
        """The pass that makes it, as JAX's name stack says."""
        return phase_of(self.op_name)

    @property
    def called(self) -> Iterator[tuple[str, str]]:
        """The computations that it names, each with the attribute that names it."""
        # Most instructions name none, and to search each line for eight attributes takes long.
        told = self.attributes
        if "calls=" not in told and "to_apply=" not in told and "body=" not in told and "comp" not in told:
            return
        for attribute, several, one in _CALLED.findall(self.structure):
            for name in several.split(",") if several else [one]:
                yield attribute, name.strip().lstrip("%")


@dataclasses.dataclass(frozen=True)
class HloModule:
    """A module.

    **Arguments:**

    - `entry`: the name of the computation that runs first.
    - `computations`: by name, the instructions by name; callees come before their callers.
    - `stacks`: by the number that instructions give, the frames of the trace, innermost first.
    - `partitions`: how many devices run it, as its first line says; 1 where it does not.
    """

    entry: str
    computations: dict[str, dict[str, Instruction]]
    stacks: dict[int, tuple[Frame, ...]]
    partitions: int = 1

    def frames(self, instruction: Instruction) -> tuple[Frame, ...]:
        """The lines of the program that an instruction came from, innermost first."""
        if found := _FRAME.search(instruction.attributes):
            return self.stacks.get(int(found[1]), ())
        if found := _OLD_SOURCE.search(instruction.attributes):
            return (Frame(found[1], int(found[2] or 0), ""),)
        return ()


def parse_hlo(text: str) -> HloModule:
    """Reads the text of a compiled module.

    **Arguments:**

    - `text`: as by `compiled.as_text()`.

    **Returns:**

    The module.

    **Raises:**

    `ProgramError` for text that is no HLO module, or an instruction that cannot be read; it shows the line.
    """
    computations: dict[str, dict[str, Instruction]] = {}
    tables: dict[str, list[str]] = {}
    entry, own, rows, open_line = "", None, None, ""
    for line in text.splitlines():
        if own is not None:
            # A kernel's own words can go over several lines, and begin one with a bracket.
            if open_line and not _NAME.match(line) and not _is_whole(open_line):
                open_line += f"\n{line}"
                continue
            if open_line:
                made = _instruction(open_line)
                for operand in made.operands:
                    _take_out(own, operand)
                own[made.name] = made
            open_line = "" if _ENDS.match(line) else line if line.strip() else ""
            own = None if _ENDS.match(line) else own
        elif found := _TABLE.match(line):
            rows = tables.setdefault(found[1], [])
        elif rows is not None and line[:1].isdigit():
            rows.append(line.partition(" ")[2])
        elif found := _HEADER.match(line):
            own = computations.setdefault(found[2], {})
            entry, rows = found[2] if found[1] else entry, None
    if open_line:
        raise ProgramError(f"the HLO module is cut off after: {open_line.strip():.300}")
    if not entry:
        raise ProgramError(
            "this text is no optimized HLO module: it has no ENTRY computation; pass a compiled program, or its "
            "`as_text()`."
        )
    header = text.partition("\n")[0]
    replicas, partitions = (int(found[1]) if (found := form.search(header)) else 1 for form in (_REPLICAS, _PARTITIONS))
    if replicas > 1:
        raise ProgramError(
            f"the program runs as {replicas} replicas, as `jax.pmap` once wrote it; write the step for `jax.jit` and a "
            "mesh of as many devices."
        )
    return HloModule(entry, computations, _stacks(tables), partitions)


def _instruction(line: str) -> Instruction:
    found = _NAME.match(line)
    if found is None:
        raise ProgramError(f"an instruction of the HLO module cannot be read: {line.strip():.300}")
    start = found.end()
    if line[start] == "(":
        stop = _closed(line, start)
    else:
        stop = line.find(" ", start)
    opening = line.find("(", stop + 1)
    if stop < 0 or opening < 0:
        raise ProgramError(f"an instruction of the HLO module cannot be read: {line.strip():.300}")
    closing = _closed(line, opening)
    inside = line[opening + 1 : closing - 1]
    result, opcode = line[start:stop].strip(), line[stop + 1 : opening].strip()
    operands = tuple(_OPERAND.findall(inside))
    if not operands and inside and opcode not in _NO_OPERANDS:
        operands = tuple(_BARE.findall(inside))
    return Instruction(found[2], result, opcode, operands, inside, line[closing:], found[1] is not None)


def _take_out(own: dict[str, Instruction], operand: str) -> None:
    """Adds the instruction that takes an operand `param#0` out of its tuple."""
    whole, mark, index = operand.rpartition("#")
    if not mark or operand in own:
        return
    _take_out(own, whole)
    part = parts_of(own[whole].result)[int(index)]
    own[operand] = Instruction(operand, part, "get-tuple-element", (whole,), f"%{whole}", f", index={index}", False)


def parts_of(result: str) -> list[str]:
    """The types in the type of a tuple; an array alone is one."""
    depth, parts = 0, [""]
    for letter in result[1:-1] if result.startswith("(") else result:
        depth += (letter in _OPENING) - (letter in _CLOSING)
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def _is_whole(line: str) -> bool:
    bare = _QUOTED.sub("", line)
    return bare.count("{") <= bare.count("}")


def _closed(line: str, opening: int) -> int:
    """The position after the bracket that closes the one at `opening`."""
    depth, position, quoted = 0, opening, False
    while position < len(line):
        letter = line[position]
        if letter == '"' and line[position - 1] != "\\":
            quoted = not quoted
        elif not quoted and letter in _OPENING:
            depth += 1
        elif not quoted and letter in _CLOSING:
            depth -= 1
            if not depth:
                return position + 1
        position += 1
    raise ProgramError(f"an instruction of the HLO module is cut off: {line.strip():.300}")


def _stacks(tables: dict[str, list[str]]) -> dict[int, tuple[Frame, ...]]:
    files = [name.strip('"') for name in tables.get("FileNames", [])]
    functions = [name.strip('"') for name in tables.get("FunctionNames", [])]
    places = [_numbers(row) for row in tables.get("FileLocations", [])]
    frames = [_numbers(row) for row in tables.get("StackFrames", [])]
    found: dict[int, tuple[Frame, ...]] = {}
    for number, row in enumerate(frames, start=1):
        place = places[row["file_location_id"] - 1]
        frame = Frame(files[place["file_name_id"] - 1], place["line"], functions[place["function_name_id"] - 1])
        # XLA prints the number of the outer frame plus one; none is 1.
        found[number] = (frame, *found.get(row["parent_frame_id"] - 1, ()))
    return found


def _numbers(row: str) -> dict[str, int]:
    return {name: int(number) for name, number in re.findall(r"(\w+)=(\d+)", row)}

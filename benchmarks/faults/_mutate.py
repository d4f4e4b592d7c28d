"""Changes one thing in the text of a partitioned program, as a faulty partitioner
would.

- "pairs": two devices of a permute get each other's data.
- "groups": two devices of a collective change groups, or places in one group.
- "dropped": an all-reduce is left out.
- "doubled": an all-reduce is done twice.
- "offset": a table that devices read at their number has two entries exchanged.
- "order": an operation reads an operand whose devices are in another order: the
  operand of a permute for its result, or the result of a new permute.
"""

import random
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ._texts import GROUPS, groups_text


class Mutation(NamedTuple):
    """A changed text, the kind of the change, and the changed line before it."""

    kind: str
    line: str
    text: str


class Line(NamedTuple):
    """One instruction of a text."""

    number: int
    name: str
    result: str
    opcode: str
    operands: tuple[str, ...]


_LINE = re.compile(
    r"^\s+(?:ROOT )?%(?P<name>[\w.-]+) = (?P<result>\w+\[[\d,]*\](?:\{[\d,]*\})?)"
    r" (?P<opcode>[\w-]+)\((?P<inside>[^)]*)\)"
)
_OPERAND = re.compile(r"%([\w.-]+)")
_PAIRS = re.compile(r"source_target_pairs=\{(.*?\})\}")
_PAIR = re.compile(r"\{(\d+),(\d+)\}")
_LISTED = re.compile(r"replica_groups=\{(\{.*?\})\}")
_CHANNEL = re.compile(r"channel_id=(\d+)")
_TABLE = re.compile(r"constant\(\{([^{}]*)\}\)")
_GROUPED = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
# What an exchanged operand would not change for certain.
_UNORDERED = ("constant", "iota", "broadcast", "partition-id", "parameter", "tuple")
# A smaller difference is of rounding.
UNCHANGED = 1e-5
KINDS = ("pairs", "groups", "dropped", "doubled", "offset", "order")


def mutations(text: str, devices: int, count: int, seed: int) -> list[Mutation]:
    """Up to `count` different mutations of a program, of all kinds that it allows in
    turn.
    """
    draws = random.Random(f"mutations {seed}")
    lines = text.split("\n")
    by_kind = {kind: list(_MAKERS[kind](lines, devices, draws)) for kind in KINDS}
    for choices in by_kind.values():
        draws.shuffle(choices)
    mutated: list[Mutation] = []
    while len(mutated) < count and any(by_kind.values()):
        for choices in by_kind.values():
            if choices and len(mutated) < count:
                mutated.append(choices.pop())
    return mutated


def instructions(lines: list[str]) -> Iterator[Line]:
    """The instructions of a text that have one array as their result."""
    for number, line in enumerate(lines):
        match = _LINE.match(line)
        if match is None:
            continue
        yield Line(
            number=number,
            name=match["name"],
            result=match["result"],
            opcode=match["opcode"],
            operands=tuple(_OPERAND.findall(match["inside"])),
        )


def _changed(lines: list[str], kind: str, number: int, *changed: str) -> Mutation:
    """The text with other lines in the place of one."""
    text = "\n".join([*lines[:number], *changed, *lines[number + 1 :]])
    return Mutation(kind=kind, line=lines[number].strip()[:300], text=text)


def _pairs(lines: list[str], devices: int, draws: random.Random) -> Iterator[Mutation]:
    for line in instructions(lines):
        pairs_match = _PAIRS.search(lines[line.number])
        if line.opcode != "collective-permute" or pairs_match is None:
            continue
        pairs = [(int(a), int(b)) for a, b in _PAIR.findall(pairs_match[1])]
        if len(pairs) < 2:
            continue
        first, second = draws.sample(range(len(pairs)), 2)
        targets = [target for _, target in pairs]
        targets[first], targets[second] = targets[second], targets[first]
        listed = [
            f"{{{source},{target}}}"
            for (source, _), target in zip(pairs, targets, strict=True)
        ]
        text = "source_target_pairs={" + ",".join(listed) + "}"
        changed = _PAIRS.sub(text, lines[line.number])
        yield _changed(lines, "pairs", line.number, changed)


def _groups(lines: list[str], devices: int, draws: random.Random) -> Iterator[Mutation]:
    for line in instructions(lines):
        rows = _rows(lines[line.number])
        if line.opcode not in _GROUPED or not rows or len(rows[0]) < 2:
            continue
        changed_rows = [list(row) for row in rows]
        if len(rows) > 1:
            first, second = draws.sample(range(len(rows)), 2)
            place = draws.randrange(len(rows[0]))
            changed_rows[first][place] = rows[second][place]
            changed_rows[second][place] = rows[first][place]
        elif line.opcode == "all-reduce":
            half = len(rows[0]) // 2
            changed_rows = [rows[0][:half], rows[0][half:]]
        else:
            changed_rows[0] = [rows[0][1], rows[0][0], *rows[0][2:]]
        changed = GROUPS.sub(groups_text(changed_rows), lines[line.number], count=1)
        yield _changed(lines, "groups", line.number, changed)


def _rows(line: str) -> list[list[int]]:
    listed_match = _LISTED.search(line)
    if listed_match is None:
        return []
    listed = listed_match[1][1:-1].split("},{")
    return [[int(device) for device in row.split(",")] for row in listed if row]


def _dropped(
    lines: list[str], devices: int, draws: random.Random
) -> Iterator[Mutation]:
    for line in instructions(lines):
        if line.opcode != "all-reduce" or len(line.operands) != 1:
            continue
        before, _, _ = lines[line.number].partition(" all-reduce(")
        changed = f"{before} copy(%{line.operands[0]}){_metadata(lines[line.number])}"
        yield _changed(lines, "dropped", line.number, changed)


def _doubled(
    lines: list[str], devices: int, draws: random.Random
) -> Iterator[Mutation]:
    for line in instructions(lines):
        whole = lines[line.number]
        is_large = any(len(row) > 1 for row in _rows(whole))
        if line.opcode != "all-reduce" or len(line.operands) != 1 or not is_large:
            continue
        first = whole.replace(f"%{line.name} =", f"%{line.name}.first =", 1)
        first = first.replace("ROOT ", "", 1)
        second = whole.replace(f"(%{line.operands[0]})", f"(%{line.name}.first)", 1)
        channel = f"channel_id={_free_channel(lines)}"
        second = _CHANNEL.sub(channel, second, count=1)
        yield _changed(lines, "doubled", line.number, first, second)


def _offset(lines: list[str], devices: int, draws: random.Random) -> Iterator[Mutation]:
    line_by_name = {line.name: line for line in instructions(lines)}
    read = {
        line.operands[0]
        for line in line_by_name.values()
        if line.opcode == "dynamic-slice"
        and line.operands
        and line.result.split("{")[0].endswith("[1]")
    }
    for name in sorted(read & set(line_by_name)):
        line = line_by_name[name]
        table_match = _TABLE.search(lines[line.number])
        if line.opcode != "constant" or table_match is None:
            continue
        entries = [entry.strip() for entry in table_match[1].split(",")]
        places = [place for place, entry in enumerate(entries) if entry != entries[0]]
        if not places:
            continue
        place = draws.choice(places)
        entries[0], entries[place] = entries[place], entries[0]
        table = "constant({" + ", ".join(entries) + "})"
        changed = _TABLE.sub(table, lines[line.number], count=1)
        yield _changed(lines, "offset", line.number, changed)


def _order(lines: list[str], devices: int, draws: random.Random) -> Iterator[Mutation]:
    line_by_name: dict[str, Line] = {}
    for line in instructions(lines):
        line_by_name[line.name] = line
        if line.opcode in _UNORDERED or line.opcode.startswith("collective"):
            continue
        for operand in line.operands:
            source = line_by_name.get(operand)
            if source is None or source.opcode in _UNORDERED:
                continue
            if "[]" in source.result or source.result.startswith("pred"):
                continue
            if source.opcode == "collective-permute":
                changed = _reading(lines[line.number], operand, source.operands[0])
                yield _changed(lines, "order", line.number, changed)
                continue
            moved = f"{operand}.moved"
            pairs = _exchange(devices, draws)
            permute = (
                f"  %{moved} = {source.result} collective-permute(%{operand}),"
                f" channel_id={_free_channel(lines)}, source_target_pairs={pairs}"
            )
            changed = _reading(lines[line.number], operand, moved)
            yield _changed(lines, "order", line.number, permute, changed)


def _reading(line: str, operand: str, other: str) -> str:
    """The line with the first use of an operand exchanged."""
    opening = line.index("(", line.index(" = "))
    use = re.compile(rf"%{re.escape(operand)}(?![\w.-])")
    return line[:opening] + use.sub(f"%{other}", line[opening:], count=1)


def _exchange(devices: int, draws: random.Random) -> str:
    """The pairs of a permute that exchanges two devices."""
    first, second = draws.sample(range(devices), 2)
    targets = list(range(devices))
    targets[first], targets[second] = second, first
    pairs = ",".join(f"{{{n},{target}}}" for n, target in enumerate(targets))
    return "{" + pairs + "}"


def _free_channel(lines: list[str]) -> int:
    channels = [0]
    for line in lines:
        channels += map(int, _CHANNEL.findall(line))
    return max(channels) + 1


def _metadata(line: str) -> str:
    start = line.find(", metadata=")
    return "" if start < 0 else line[start:]


_MAKERS: dict[str, Callable[[list[str], int, random.Random], Iterator[Mutation]]] = {
    "pairs": _pairs,
    "groups": _groups,
    "dropped": _dropped,
    "doubled": _doubled,
    "offset": _offset,
    "order": _order,
}

"""How rows are looked up by number, and added up where numbers say, as XLA's partitioner does it.

A table that is cut along its rows is asked by every device, and the answers are added up. Where the width of a table
and the numbers are cut by the same devices, the numbers give them up: to others if they are whole along as many.
"""

from collections.abc import Iterable, Iterator, Mapping

from .factors import Rule
from .layout import MeshParts, Parts
from .matched import Cut


def can_look_up(name: str, rule: Rule) -> bool:
    """Whether an operation is a plain lookup of whole rows, or adds up rows."""
    if name not in ("gather", "scatter-add", "scatter_add"):
        return False
    sides = (*rule.operands, *rule.results)
    return len(rule.results) == 1 and all(len(dim) == 1 for dims in sides for dim in dims)


def looked_up(rule: Rule, axes: MeshParts, table: Cut, numbers: Cut, wanted: Mapping[int, Parts]) -> Iterator[Cut]:
    """The ways to look rows up: what cuts the rows, the width and the numbers of a table.

    **Arguments:**

    - `rule`: of the lookup.
    - `axes`: of the mesh.
    - `table`, `numbers`: what cuts the factors of its operands.
    - `wanted`: what cuts those of its result.
    """
    rows = {factor for factor in table if rule.kinds[factor] == "sum"}
    width = {factor: parts for factor, parts in table.items() if factor not in rows}
    held, used = _parts(numbers.values()), _parts(width.values())
    asked = {factor: table[factor] for factor in rows}
    if not held & used:
        yield _without(asked, held | used) | width | numbers
        if held & _parts(asked.values()):
            # Those that hold rows get all the numbers.
            yield asked | width | _without(numbers, _parts(asked.values()))
        # Where the result is to be cut by those that hold rows, the rows are brought there.
        slots = {dim[0] for dim in rule.operands[1]}
        more = {factor: parts for factor, parts in wanted.items() if factor in slots and parts}
        if not used and _parts(more.values()) & _parts(asked.values()) and held <= _parts(more.values()):
            yield more
        return
    fewer = _given_up(axes, numbers, used)
    yield _without(asked, used) | width | _without(fewer, _parts(asked.values()) | used)
    kept = _without(width, held)
    yield _without(asked, held) | kept | numbers


def added_up(rule: Rule, axes: MeshParts, updates: Cut, wanted: Mapping[int, Parts]) -> Iterator[Cut]:
    """The ways to add rows up where numbers say; `updates` and `wanted` cut the rows and the sums."""
    slots = {factor: parts for factor, parts in updates.items() if rule.kinds[factor] == "sum"}
    own = {factor: parts for factor, parts in updates.items() if factor not in slots}
    rows = {dim[0] for dim in rule.results[0]} - {dim[0] for dims in rule.operands[1:] for dim in dims}
    width = {factor: parts for factor, parts in wanted.items() if factor not in rows and parts}
    held, used = _parts(slots.values()), _parts(width.values())
    kept = {factor: parts for factor, parts in own.items() if wanted.get(factor) == parts}
    overlap = used & held
    spare = axes.count(part for part in range(len(axes.sizes)) if part not in held | _parts(own.values()))
    has_others = bool(overlap) and spare > 1 and spare % axes.count(overlap) == 0
    if not has_others:
        yield _with_rows(slots | kept, rows, wanted)
        mine = _parts(wanted.get(factor, ()) for factor in rows)
        if mine & held and not overlap:
            yield _with_rows(_without(slots, mine) | width, rows, wanted)
    if has_others or any(overlap and set(parts) == overlap for parts in slots.values()):
        yield _with_rows(_without(_given_up(axes, slots, used), used) | width, rows, wanted)


def _with_rows(cut: Cut, rows: set[int], wanted: Mapping[int, Parts]) -> Cut:
    """Each device keeps the rows that are its own, where it has nothing else to do."""
    return _without({factor: wanted.get(factor, ()) for factor in rows}, _parts(cut.values())) | cut


def _given_up(axes: MeshParts, numbers: Cut, used: set[int]) -> Cut:
    """The numbers, off the devices that cut the width: on others, if there are as many."""
    held = _parts(numbers.values())
    spare = tuple(part for part in range(len(axes.sizes)) if part not in held | used)
    found: Cut = {}
    for factor, parts in numbers.items():
        less = tuple(part for part in parts if part not in used)
        fits = len(less) < len(parts) and spare and axes.count(spare) % axes.count(parts) == 0
        found[factor] = spare if fits else less
        spare = () if fits else spare
    return found


def _without(cut: Cut, parts: set[int]) -> Cut:
    return {factor: own for factor, own in cut.items() if parts.isdisjoint(own)}


def _parts(cuts: Iterable[Parts]) -> set[int]:
    return {part for own in cuts for part in own}

"""Draws the house: which room of the package imports which, as docs/house.svg.

    python docs/draw_house.py          # writes docs/house.svg
    python docs/draw_house.py --check  # exits 1 if it is out of date

A room is a file or a folder in the package's root. A room stands one floor above the
highest room that it imports.
"""

import ast
import functools as ft
import html
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path


ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "shardfx"
PICTURE = ROOT / "docs" / "house.svg"
# What each floor is for, from the ground up.
FLOORS = (
    "errors, reasons, words, specs, trees",
    "meshes, device orders, rules, chips, maps",
    "what each array gets, and why",
    "what is done with it: arrays, moves, files, processes",
    "what a step costs",
    "plans explained, compared, found",
    "the public names",
    "commands, and the demo",
    "python -m shardfx",
)
# In pixels: the picture, one floor, one room, the strip with the floor's name, the
# legend.
WIDTH, BAND, BOX, WIDEST, MARGIN, LABEL, TOP = 1120, 118, 66, 300, 16, 128, 64
LEGEND = (
    (
        "Each box is a room of shardfx/: a folder (blue) or one file (white). An arrow"
        " leads from a room to one that it imports;"
    ),
    (
        "imports that a chain of arrows implies are left out. A room knows nothing of"
        " the rooms above it."
    ),
)


def sources() -> list[Path]:
    """The package's source files, in order."""
    return sorted(PACKAGE.rglob("*.py"))


def module_of(path: Path) -> tuple[str, ...]:
    """The parts of a file's module below the package: ("_mesh",) or ("_plan",
    "correct").
    """
    return path.relative_to(PACKAGE).with_suffix("").parts


@ft.cache
def imports(path: Path) -> tuple[tuple[tuple[str, ...], int], ...]:
    """The modules of the package that a file imports, late and for types only too, with
    their lines.
    """
    return tuple(_imports(path))


def statements_of(tree: ast.Module) -> Iterator[ast.AST]:
    """The statements of a file at any depth: a tenth of what `ast.walk` visits."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            waiting += getattr(node, field, [])


def _imports(path: Path) -> Iterator[tuple[tuple[str, ...], int]]:
    for node in statements_of(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield from ((target, node.lineno) for target in _named(node, path))
        elif isinstance(node, ast.Import):
            for alias in node.names:
                first, *parts = alias.name.split(".")
                if first == "shardfx":
                    yield tuple(parts) or ("__init__",), node.lineno


def _named(node: ast.ImportFrom, path: Path) -> Iterator[tuple[str, ...]]:
    named = tuple(node.module.split(".")) if node.module else ()
    if node.level:
        base = module_of(path)[: -node.level] + named
    elif named[:1] == ("shardfx",):
        base = named[1:]
    else:
        return
    for alias in node.names:
        inner = PACKAGE.joinpath(*base, alias.name)
        is_module = inner.with_suffix(".py").exists() or inner.is_dir()
        yield (*base, alias.name) if is_module else base or ("__init__",)


def _room(module: tuple[str, ...]) -> str:
    """The room of a module; `errors`, `results` and `sync` are tables of names, as the
    root's `__init__` is.
    """
    return "__init__" if module[0] in ("errors", "results", "sync") else module[0]


def rooms() -> dict[str, set[str]]:
    """Each room, and the rooms that it imports."""
    found: dict[str, set[str]] = {}
    for path in sources():
        room = _room(module_of(path))
        found.setdefault(room, set()).update(
            _room(target) for target, _ in imports(path) if _room(target) != room
        )
    return found


def floors(graph: dict[str, set[str]]) -> list[list[str]]:
    """The rooms of each floor, from the ground up, in the order of their names; a
    circle is a RecursionError.
    """
    heights: dict[str, int] = {}

    def height(room: str) -> int:
        if room not in heights:
            heights[room] = 1 + max(
                (height(below) for below in sorted(graph[room])), default=-1
            )
        return heights[room]

    found: list[list[str]] = [[] for _ in range(1 + max(map(height, graph)))]
    for room in sorted(graph):
        found[heights[room]].append(room)
    return found


def words(room: str) -> str:
    """What a room is for, in a few words: its docstring up to the first stop."""
    file = PACKAGE / room / "__init__.py"
    file = file if file.exists() else PACKAGE / f"{room}.py"
    told = ast.get_docstring(ast.parse(file.read_text())) or ""
    return re.split(r"[.;]\s|\.$", told.replace("`", ""), maxsplit=1)[0].replace(
        "\n", " "
    )


def drawn(graph: dict[str, set[str]]) -> str:
    """The picture."""
    storeys = _untangled(floors(graph), graph)
    total = TOP + BAND * len(storeys) + MARGIN
    lines = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {total}"'
            ' font-family="sans-serif">'
        ),
        (
            '<defs><marker id="to" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7"'
            ' markerHeight="7" orient="auto"><path d="M0,0 L8,4 L0,8 z"'
            ' fill="#7681b4"/></marker></defs>'
        ),
        f'<rect width="{WIDTH}" height="{total}" fill="#ffffff"/>',
    ]
    for number, line in enumerate(LEGEND):
        lines.append(_text(MARGIN, 24 + 17 * number, line, size=13, fill="#445"))
    boxes: dict[str, tuple[float, float, float]] = {}
    for floor, storey in enumerate(storeys):
        top = total - MARGIN - BAND * (floor + 1)
        shade = "#f6f7fb" if floor % 2 else "#eceef6"
        lines.append(
            f'<rect x="{MARGIN}" y="{top}" width="{WIDTH - 2 * MARGIN}" height="{BAND}"'
            f' fill="{shade}"/>'
        )
        told = FLOORS[floor] if floor < len(FLOORS) else ""
        for number, line in enumerate([f"floor {floor}", *textwrap.wrap(told, 17)]):
            weight = "normal" if number else "bold"
            lines.append(
                _text(
                    MARGIN + 8,
                    top + 22 + 14 * number,
                    line,
                    size=11,
                    fill="#667",
                    weight=weight,
                )
            )
        left = MARGIN + LABEL
        space = (WIDTH - MARGIN - left) / len(storey)
        for at, room in enumerate(storey):
            boxes[room] = (
                left + space * (at + 0.5),
                top + (BAND - BOX) / 2,
                min(space - 12, WIDEST),
            )
    lines += _arrows(boxes, graph)
    for room, (x, y, wide) in sorted(boxes.items()):
        folder = (PACKAGE / room).is_dir()
        lines.append(
            f'<rect x="{x - wide / 2:.0f}" y="{y:.0f}" width="{wide:.0f}"'
            f' height="{BOX}" rx="6" fill="{"#dfe5ff" if folder else "#ffffff"}"'
            ' stroke="#4a5aa8"/>'
        )
        name = f"{room}/" if folder else f"{room}.py"
        lines.append(
            _text(
                x, y + 19, name, size=13, fill="#1c2450", anchor="middle", weight="bold"
            )
        )
        for number, line in enumerate(_short(words(room), int(wide / 5.6))):
            lines.append(
                _text(
                    x,
                    y + 33 + 12 * number,
                    line,
                    size=10.5,
                    fill="#334",
                    anchor="middle",
                )
            )
    return "\n".join([*lines, "</svg>", ""])


def _short(told: str, columns: int) -> list[str]:
    """At most three lines of words."""
    return textwrap.wrap(told, columns, max_lines=3, placeholder=" ...")


def _untangled(storeys: list[list[str]], graph: dict[str, set[str]]) -> list[list[str]]:
    """Each floor's rooms so ordered that a room stands near what it imports, and near
    what imports it.
    """
    place = {
        room: (at + 0.5) / len(storey)
        for storey in storeys
        for at, room in enumerate(storey)
    }
    near: dict[str, set[str]] = {room: set() for room in graph}
    for room in graph:
        for other in _direct(room, graph):
            near[room].add(other)
            near[other].add(room)
    for _ in range(12):
        for number, storey in enumerate(storeys):
            middle = {
                room: (
                    sum(place[other] for other in near[room]) / max(1, len(near[room]))
                )
                for room in storey
            }
            storeys[number] = sorted(
                storey, key=lambda room: (round(middle[room], 9), room)
            )
            place |= {
                room: (at + 0.5) / len(storey)
                for at, room in enumerate(storeys[number])
            }
    return storeys


def _arrows(
    boxes: dict[str, tuple[float, float, float]], graph: dict[str, set[str]]
) -> Iterator[str]:
    """A curve from the lower edge of each room to the upper edge of each that it
    imports, side by side.
    """
    down = {
        room: sorted(_direct(room, graph), key=lambda other: (boxes[other][0], other))
        for room in graph
    }
    up = {
        room: sorted(
            [o for o in graph if room in down[o]], key=lambda other: boxes[other][0]
        )
        for room in graph
    }
    for room in sorted(graph):
        for other in down[room]:
            (x, y, wide), (to_x, to_y, to_wide) = boxes[room], boxes[other]
            x += wide * ((down[room].index(other) + 1) / (len(down[room]) + 1) - 0.5)
            to_x += to_wide * ((up[other].index(room) + 1) / (len(up[other]) + 1) - 0.5)
            y, bend = y + BOX, (to_y - y - BOX) / 2
            path = (
                f"M{x:.0f},{y:.0f} C{x:.0f},{y + bend:.0f} {to_x:.0f},{to_y - bend:.0f}"
                f" {to_x:.0f},{to_y:.0f}"
            )
            yield (
                f'<path d="{path}" fill="none" stroke="#7681b4" stroke-width="1.3"'
                ' marker-end="url(#to)"/>'
            )


def _text(
    x: float,
    y: float,
    told: str,
    *,
    size: float,
    fill: str,
    anchor: str = "start",
    weight: str = "normal",
) -> str:
    return (
        f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}" fill="{fill}"'
        f' text-anchor="{anchor}" font-weight="{weight}">{html.escape(told)}</text>'
    )


def _direct(room: str, graph: dict[str, set[str]]) -> set[str]:
    """The rooms that a room imports and that no other of its imports stands on."""
    further: set[str] = set()
    for below in graph[room]:
        further |= _under(below, graph)
    return graph[room] - further


def _under(room: str, graph: dict[str, set[str]]) -> set[str]:
    return graph[room].union(*(_under(below, graph) for below in graph[room]))


def main() -> int:
    """Writes the picture, or says whether it is up to date."""
    picture = drawn(rooms())
    if "--check" in sys.argv[1:]:
        return int(PICTURE.read_text() != picture)
    PICTURE.write_text(picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())

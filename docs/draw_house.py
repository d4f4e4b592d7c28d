"""Draws the house: which room of the package imports which, as docs/house.svg.

    python docs/draw_house.py          # writes docs/house.svg
    python docs/draw_house.py --check  # exits 1 if it is out of date

A room is a file or a folder in the package's root. A room stands one floor above the highest room that it imports.
"""

import ast
import html
import sys
from collections.abc import Iterator
from pathlib import Path


ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "shardfx"
PICTURE = ROOT / "docs" / "house.svg"
# What each floor is for, from the ground up.
FLOORS = (
    "errors, reasons, words",
    "specs, trees, device orders",
    "meshes, and what is asked",
    "what each array gets, and why",
    "what is done with it: arrays, moves, files, processes",
    "the public names",
    "the demo",
    "commands",
    "python -m shardfx",
)
WIDTH, BAND, BOX, MARGIN = 960, 84, 34, 20


def sources() -> list[Path]:
    """The package's source files, in order."""
    return sorted(PACKAGE.rglob("*.py"))


def module_of(path: Path) -> tuple[str, ...]:
    """The parts of a file's module below the package: ("_mesh",) or ("_plan", "correct")."""
    return path.relative_to(PACKAGE).with_suffix("").parts


def imports(path: Path) -> Iterator[tuple[tuple[str, ...], int]]:
    """The modules of the package that a file imports, late and for types only too, with their lines."""
    for node in ast.walk(ast.parse(path.read_text())):
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


def rooms() -> dict[str, set[str]]:
    """Each room, and the rooms that it imports."""
    found: dict[str, set[str]] = {}
    for path in sources():
        room = module_of(path)[0]
        found.setdefault(room, set()).update(
            target[0] for target, _ in imports(path) if target[0] != room
        )
    return found


def floors(graph: dict[str, set[str]]) -> list[list[str]]:
    """The rooms of each floor, from the ground up, in the order of their names; a circle is a RecursionError."""
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


def drawn(graph: dict[str, set[str]]) -> str:
    """The picture."""
    storeys = floors(graph)
    total = BAND * len(storeys) + 2 * MARGIN
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" '
        f'viewBox="0 0 {WIDTH} {total}" font-family="monospace" font-size="13">',
        f'<rect width="{WIDTH}" height="{total}" fill="#ffffff"/>',
    ]
    boxes: dict[str, tuple[float, float, float]] = {}
    for floor, storey in enumerate(storeys):
        top = total - MARGIN - BAND * (floor + 1)
        shade = "#f4f5f9" if floor % 2 else "#eceef5"
        lines.append(
            f'<rect x="{MARGIN}" y="{top}" width="{WIDTH - 2 * MARGIN}" height="{BAND}" fill="{shade}"/>'
        )
        words = f"{floor}  {FLOORS[floor] if floor < len(FLOORS) else ''}"
        lines.append(
            f'<text x="{MARGIN + 8}" y="{top + 17}" fill="#667" font-size="11">{html.escape(words)}</text>'
        )
        space = (WIDTH - 2 * MARGIN) / len(storey)
        for at, room in enumerate(storey):
            boxes[room] = (
                MARGIN + space * (at + 0.5),
                top + 30,
                min(space - 14, 9.5 * len(room) + 26),
            )
    for room in sorted(graph):
        x, y, _ = boxes[room]
        for other in sorted(_direct(room, graph)):
            to_x, to_y, _ = boxes[other]
            lines.append(
                f'<line x1="{x:.0f}" y1="{y + BOX:.0f}" x2="{to_x:.0f}" y2="{to_y:.0f}" stroke="#8a93b8" '
                'stroke-width="1.2"/>'
            )
    for room, (x, y, wide) in sorted(boxes.items()):
        folder = (PACKAGE / room).is_dir()
        name = f"{room}/" if folder else room
        lines.append(
            f'<rect x="{x - wide / 2:.0f}" y="{y:.0f}" width="{wide:.0f}" height="{BOX}" rx="5" '
            f'fill="{"#dfe5ff" if folder else "#ffffff"}" stroke="#4a5aa8"/>'
        )
        lines.append(
            f'<text x="{x:.0f}" y="{y + 22:.0f}" text-anchor="middle" fill="#1c2450">{name}</text>'
        )
    return "\n".join([*lines, "</svg>", ""])


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

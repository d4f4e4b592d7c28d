"""Every example runs, as it does for a reader: the pages of docs/, the README, and the
docstrings of the package.

A fence that opens with exactly
"```python" runs; the blocks of one page (or one docstring) share a namespace, top to bottom. A "```text"
fence right after one must equal what that block printed (`...` stands for anything). A
fence with `title="name.py"` is written to that file. Fences of any other language,
"```py" among them, are only shown.
"""

import ast
import contextlib
import dataclasses
import doctest
import io
import itertools
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest


pytestmark = pytest.mark.docs
ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SOURCES = sorted((ROOT / "shardfx").rglob("*.py"))
FENCE = re.compile(
    r"""^(?P<indent> *)```(?P<language>\S*)(?: title="(?P<file>[\w.]+)")?[^\n]*\n(?P<body>.*?)^(?P=indent)```[ ]*$""",
    re.DOTALL | re.MULTILINE,
)
WIDTH = 88
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclasses.dataclass(frozen=True)
class Block:
    code: str
    line: int
    printed: str | None
    file: str | None = None


def blocks(text: str) -> list[Block]:
    fences = list(FENCE.finditer(text))
    rows = []
    for fence, following in itertools.zip_longest(fences, fences[1:]):
        if fence["language"] != "python":
            continue
        if following is None:
            between = "no output follows"
        else:
            between = text[fence.end() : following.start()]
        shows_output = (
            following is not None
            and following["language"] == "text"
            and not between.strip()
        )
        if following is not None and shows_output:
            printed = textwrap.dedent(following["body"])
        else:
            printed = None
        line = text[: fence.start()].count("\n") + 1
        rows.append(
            Block(
                code=textwrap.dedent(fence["body"]),
                line=line,
                printed=printed,
                file=fence["file"],
            )
        )
    return rows


def run(
    example: list[Block], where: str, namespace: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Runs the blocks of one page or docstring. Returns the names that they define."""
    if namespace is None:
        namespace = {"__name__": "example"}
    for block in example:
        if block.file is not None:
            Path(block.file).write_text(block.code)
            continue
        source = "\n" * block.line + block.code
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(source, where, "exec"), namespace)
        if block.printed is not None:
            checker = doctest.OutputChecker()
            expected = block.printed
            printed = out.getvalue()
            message = (
                f"{where}:{block.line}: wanted\n{expected}\nbut it printed\n{printed}"
            )
            assert checker.check_output(expected, printed, FLAGS), message
    return namespace


def docstrings(path: Path) -> Iterator[tuple[str, list[Block]]]:
    """The blocks of every docstring whose owner, and whose owner's owners, have public
    names.
    """

    def visit(node: ast.AST, name: str) -> Iterator[tuple[str, list[Block]]]:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            examples = blocks(ast.get_docstring(node) or "")
            if examples:
                yield name, examples
            for child in node.body:
                if isinstance(child, ast.ClassDef | ast.FunctionDef) and is_public(
                    child.name
                ):
                    yield from visit(child, f"{name}.{child.name}")

    parts = path.relative_to(ROOT).with_suffix("").parts
    module = ".".join(parts)
    text = path.read_text()
    if "```python" in text:
        yield from visit(ast.parse(text), module)


def is_public(name: str) -> bool:
    return not name.startswith("_") or name == "__init__"


EXAMPLES = list(itertools.chain.from_iterable(map(docstrings, SOURCES)))


@pytest.fixture
def scratch(tmp_path, monkeypatch):
    """Examples that write files write them here."""
    monkeypatch.chdir(tmp_path)


# testing/test_recipes.py runs the page of recipes.
RUN = [page for page in PAGES if blocks(page.read_text()) and page.name != "recipes.md"]


@pytest.mark.parametrize("page", RUN, ids=lambda p: str(p.relative_to(ROOT)))
def test_page(page, scratch):
    assert len(jax.devices()) >= 8
    run(blocks(page.read_text()), str(page))


@pytest.mark.parametrize("name, example", EXAMPLES, ids=[name for name, _ in EXAMPLES])
def test_docstring(name, example, scratch):
    run(example, name)


def test_every_fence_is_closed():
    for page in PAGES:
        groups = [m.group() for m in FENCE.finditer(page.read_text())]
        matches = re.findall(r"^ *```", page.read_text(), re.MULTILINE)
        expected = len(matches)
        assert 2 * len(groups) == expected, page


def too_wide(text: str, languages: tuple[str, ...] = ()) -> list[str]:
    """The lines of code that a page would cut off, those in `languages` apart."""
    lines = []
    for fence in FENCE.finditer(text):
        if fence["language"] not in languages:
            lines += textwrap.dedent(fence["body"]).splitlines()
    return [line for line in lines if len(line) > WIDTH]


def test_lines_of_code_fit_the_page():
    lines = [f"```python\n{'x' * width}\n```\n" for width in (WIDTH, WIDTH + 1)]
    counts = [len(too_wide(text)) for text in lines]
    assert counts == [0, 1]
    assert too_wide(lines[1], ("python",)) == []
    # A command of the README stands on one line, so that it is copied whole; .ci/run
    # reads it there.
    actual = []
    for page in PAGES:
        languages = ("bash",) if page.name == "README.md" else ()
        actual += [(page, line) for line in too_wide(page.read_text(), languages)]
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef)
    for path in (path for path in SOURCES if "```" in path.read_text()):
        nodes = [
            node
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, owners)
        ]
        for node in nodes:
            text = ast.get_docstring(node) or ""
            actual += [(path, line) for line in too_wide(text)]
    assert actual == []


def test_a_wrong_example_is_noticed():
    page = (
        "```python\nx = 1\n```\n    ```python\n    print(x + 1)\n    ```\n    ```text\n"
        "    {}\n    ```\n"
    )
    run(blocks(page.format("2")), "good")
    with pytest.raises(AssertionError, match=r"but it printed\s+2"):
        run(blocks(page.format("3")), "bad")
    with pytest.raises(NameError):
        run(blocks("```python\nmissing\n```"), "bad")
    assert blocks("```py\nmissing\n```\n```text\n```") == []


HOUSE_PAGE = ROOT / "docs" / "contributing.md"
FILE = r"[\w./-]*(?:\.(?:py|md|svg|toml)|/run)"


def files_named(text: str) -> dict[str, Path]:
    """The files and folders that a page names in backticks: from the repository's root,
    or from the package's.
    """
    names = re.findall(rf"`({FILE}|[\w.]+/)`", text)
    files = {}
    for name in names:
        candidates = (ROOT / name, ROOT / "shardfx" / name)
        existing = (file for file in candidates if file.exists())
        files[name] = next(existing, Path("missing"))
    return files


def test_files_and_functions_of_contributing_exist():
    named = files_named(HOUSE_PAGE.read_text())
    # What one adds is not there yet.
    missing = [
        name
        for name, file in named.items()
        if not file.exists() and "_yours" not in name
    ]
    assert missing == []
    assert len(named) > 50
    text = " ".join(HOUSE_PAGE.read_text().split())
    matches = re.findall(rf"`(\w+)` in `({FILE})`", text)
    for name, file in matches:
        assert re.search(
            rf"^(def|class) {name}\b", named[file].read_text(), re.MULTILINE
        ), name
    assert len(matches) > 15
    assert not files_named("`_plan/nothing.py`")["_plan/nothing.py"].exists()


def test_contributing_knows_every_room_and_readme_line():
    text = HOUSE_PAGE.read_text()
    index = text[text.index("## Where is it?") : text.index("## Three walks")]
    files = (ROOT / "shardfx").iterdir()
    rooms = {
        path.name for path in files if path.is_dir() and (path / "__init__.py").exists()
    }
    assert [room for room in sorted(rooms) if f"`{room}/`" not in index] == []
    matches = re.findall(
        r"^\| .+? \| (.+) \|$", (ROOT / "README.md").read_text(), re.MULTILINE
    )
    expected = matches[1:]
    names = set()
    for cell in expected:
        names.update(re.findall(r"`(?:shardfx\.)?(\w+)`", cell))
    recorded = {*re.findall(r"\w+", index)}
    aliases = {"PathRules": "path_rules", "AxisRules": "axis_rules", "plan": "planner"}
    actual = [name for name in sorted(names) if aliases.get(name, name) not in recorded]
    assert actual == []


def test_readme_commands_name_what_exists():
    readme = (ROOT / "README.md").read_text()
    extras = re.findall(r"\.\[([a-z,]+)\]", readme)
    declared = (ROOT / "pyproject.toml").read_text()
    assert extras
    for extra in ",".join(extras).split(","):
        assert re.search(rf"^{extra} = \[", declared, re.MULTILINE), extra


def test_the_pages_are_short():
    words = (ROOT / "README.md").read_text().split()
    assert len(words) <= 900
    word_counts = [len(page.read_text().split()) for page in PAGES]
    assert sum(word_counts) <= 46_000


def test_a_page_that_takes_jax_devices_emulates_them_first():
    """So that it runs on a laptop, too."""
    taking = re.compile(r"^[^#\n]*jax\.(devices|make_mesh)\(", re.MULTILINE)
    for page in RUN:
        examples = blocks(page.read_text())
        code = "\n".join(block.code for block in examples if block.file is None)
        devices = taking.search(code)
        if devices is not None:
            assert "jax_num_cpu_devices" in code[: devices.start()], page


def test_no_title_stands_twice():
    pages = [page for page in PAGES if page.name != "README.md"]
    titles = [page.read_text().partition("\n")[0] for page in pages]
    assert all(title.startswith("# ") for title in titles)
    assert len({*titles}) == len(titles)
    # The labels of the navigation.
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    labels = re.findall(r"- ([^:\n]+):", navigation)
    assert len(labels) > len(titles)
    assert len({*labels}) == len(labels)


def test_pages_spell_partition_specs_one_way():
    """As `P`, which `from jax.sharding import PartitionSpec as P` defines."""
    other = re.compile(
        r"\b(?:jax\.P|PartitionSpec\(|(?:import|,) PartitionSpec\b(?! as P))"
    )
    assert other.search("assert spec == jax.P()")
    assert other.search("from jax.sharding import PartitionSpec\n")
    assert not other.search("from jax.sharding import PartitionSpec as P")
    notebook = (ROOT / "docs" / "draw_notebook.py").read_text()
    assert "jax.P" not in notebook
    for page in PAGES:
        for fence in FENCE.finditer(page.read_text()):
            # Other fences show what a program printed.
            if fence["language"] in ("python", "py"):
                assert not other.search(fence["body"]), (page, fence["body"])
    for name, example in EXAMPLES:
        for block in example:
            assert not other.search(block.code), name

"""The house rules, read off the source: who imports whom, what may not be there, what
must be documented.
"""

import ast
import functools as ft
import graphlib
import importlib
import importlib.metadata
import inspect
import itertools
import json
import pkgutil
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import draw_house
import pytest

import shardfx
from shardfx._ground import opcodes


ROOT = Path(__file__).parents[2]
PACKAGE = draw_house.PACKAGE
SOURCES = draw_house.sources()
INITS = [path for path in SOURCES if path.name == "__init__.py"]
RUNTIME = {"jax", "jaxlib", "equinox", "jaxtyping", "numpy", "shardfx"}
FORBIDDEN_NAMES = {"ContextVar", "environ", "getenv", "set_mesh", "use_mesh", "hasattr"}
# JAX's error for a sharding that it cannot type is not public.
# What a function of the user raises can be anything.
# A reference on one device runs without the mesh that a user has set.
EXCUSED = {
    "state_evaluation.py": ["broad except"],
    "requests.py": ["broad except"],
    "explicit.py": ["set_mesh"],
    "_typed.py": ["broad except"],
}
FORBIDDEN_MODULES = {"threading.local", "contextvars", "__future__", "pickle"}


@ft.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def functions_of(tree: ast.Module) -> list[ast.FunctionDef]:
    """The functions of a file at any depth."""
    statements = draw_house.statements_of(tree)
    return [node for node in statements if isinstance(node, ast.FunctionDef)]


def test_functions_at_any_depth_are_found():
    text = """
        async def a():
            def b(): ...
        class C:
            def d(self): ...
        for _ in x:
            def e(): ...
        else:
            def f(): ...
        try:
            def g(): ...
        except ValueError:
            def h(): ...
        finally:
            def i(): ...
        match x:
            case 1:
                def j(): ...
        with x:
            if x:
                def k(): ...
            elif y:
                def l(): ...
    """
    functions = functions_of(ast.parse(textwrap.dedent(text)))
    assert sorted(node.name for node in functions) == [*"bdefghijkl"]


def test_the_house_is_small_and_has_no_circle():
    graph = draw_house.rooms()
    storeys = draw_house.floors(graph)  # a circle would be a RecursionError
    assert len(graph) <= 20
    assert len(storeys) == len(draw_house.FLOORS) <= 9, (
        "say in docs/draw_house.py what each floor is for"
    )
    with pytest.raises(RecursionError):
        draw_house.floors({"a": {"b"}, "b": {"a"}})


def test_the_picture_of_the_house_is_true():
    expected = draw_house.drawn(draw_house.rooms())
    assert draw_house.PICTURE.read_text() == expected, "run python docs/draw_house.py"


def test_a_room_says_what_it_is():
    for room in INITS:
        words = ast.get_docstring(tree_of(room))
        assert words, (
            f"{room}: say what lives here, what it may import, what it never does"
        )
        assert room.parent == PACKAGE or ("may import" in words and "never" in words), (
            room
        )


# Public rooms list what users need. These rooms have more of another: one reads
# programs as the other does, say.
PAST_THE_TABLE = {
    *(
        ("auto", "cost"),
        ("auto", "chips"),
        ("auto", "interop"),
        ("cost", "chips"),
        ("_reshard", "chips"),
    ),
    ("_cli", "auto"),
}


def test_a_room_is_entered_by_its_table_of_contents():
    """Files of the ground alone are imported one by one: its words are there before JAX
    is, for the command line.
    """
    past = set()
    for path in SOURCES:
        room, *inside = draw_house.module_of(path)
        if inside:
            others = (
                target
                for target, _ in draw_house.imports(path)
                if target[0] not in (room, "_ground")
            )
            past |= {(room, target[0]) for target in others if len(target) > 1}
    assert past == PAST_THE_TABLE


def test_no_cycles_inside_a_package():
    graph = {
        draw_house.module_of(path): {target for target, _ in draw_house.imports(path)}
        for path in SOURCES
    }
    # Packages are entered by their `__init__`, which imports their modules.
    modules = {
        module: targets & graph.keys()
        for module, targets in graph.items()
        if len(module) > 1
    }
    # A cycle would be a CycleError.
    assert list(graphlib.TopologicalSorter(modules).static_order())


def test_init_is_a_table_of_contents():
    for path in INITS:
        # Behind the docstring.
        is_root = path.parent == PACKAGE
        body = tree_of(path).body[1:]
        entries = [node for node in body if isinstance(node, ast.ImportFrom)]
        # At the root some parts load when they are first named, and so does the module
        # of each foreign library; nothing else may stand beside the table.
        others = [type(node).__name__ for node in body if node not in entries]
        functions = ["FunctionDef", "FunctionDef"]
        late = {
            PACKAGE: ["Import", "Import", "If", *["Assign"] * 3, *functions],
            PACKAGE / "interop": ["Import", "Import", "If", "Assign", *functions],
        }
        assert others == late.get(path.parent, []), path
        names = list(itertools.chain.from_iterable(node.names for node in entries))
        assert not is_root or all(alias.asname == alias.name for alias in names), (
            "write `x as x`"
        )


def test_the_parts_that_load_late_are_there():
    code = """
        import sys
        import shardfx
        assert not [name for name in sys.modules if name.startswith(("jax", "numpy", "shardfx."))]
        shardfx.plan, shardfx.filter_jit
        late = ("checkpoint", "chips", "interop", "presets", "_reshard")
        assert not [name for name in late if f"shardfx.{name}" in sys.modules]
        from shardfx import plan_reshard, reshard
        from shardfx._reshard import LeafMove, ReshardPlan
        assert shardfx.checkpoint.read_index and shardfx.presets.t5x()
        # Libraries of stores load when a checkpoint needs them.
        assert not {"tensorstore", "orbax", "safetensors"} & sys.modules.keys()
        try:
            shardfx.nothing
        except AttributeError as error:
            print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "module 'shardfx' has no attribute 'nothing'\n"


def test_every_public_name_is_listed():
    named = set()
    for node in ast.walk(tree_of(PACKAGE / "__init__.py")):
        if isinstance(node, ast.ImportFrom):
            named.update(alias.asname for alias in node.names)
    space: dict = {}
    exec("from shardfx import *", space)
    expected = set(dir(shardfx)) - {"__version__"}
    assert named == set(shardfx.__all__) == set(space) - {"__builtins__"} == expected
    assert shardfx.__version__ == importlib.metadata.version("shardfx")


def ambient(tree: ast.Module) -> list[str]:
    """What keeps state outside of values, hides an error, or probes instead of knowing."""
    rows = []
    for node in ast.walk(tree):
        match node:
            case ast.Global():
                rows.append(f"{node.lineno}: global")
            case ast.Name(id=name) | ast.Attribute(attr=name) if (
                name in FORBIDDEN_NAMES
            ):
                rows.append(f"{node.lineno}: {name}")
            case ast.Raise(
                exc=ast.Call(func=ast.Name(id="NotImplementedError"))
                | ast.Name(id="NotImplementedError")
            ):
                rows.append(f"{node.lineno}: NotImplementedError")
            case ast.ImportFrom(module=str(module)) if module in FORBIDDEN_MODULES:
                rows.append(f"{node.lineno}: {module}")
            case ast.Import() if any(
                alias.name in FORBIDDEN_MODULES for alias in node.names
            ):
                rows.append(f"{node.lineno}: {node.names[0].name}")
            case (
                ast.ExceptHandler(type=None)
                | ast.ExceptHandler(type=ast.Name(id="Exception" | "BaseException"))
            ):
                rows.append(f"{node.lineno}: broad except")
            case ast.Attribute(value=ast.Name(id="threading"), attr="local"):
                rows.append(f"{node.lineno}: threading.local")
            case ast.Attribute(attr="cache", value=ast.Name(id="functools" | "ft")):
                rows.append(f"{node.lineno}: unbounded cache")
            case ast.keyword(arg="maxsize", value=ast.Constant(value=None)):
                rows.append(f"{node.value.lineno}: unbounded cache")
    return rows


def test_nothing_ambient():
    ambient_by_path = {path: ambient(tree_of(path)) for path in SOURCES}
    excused = {
        path: [line.split(": ")[1] for line in lines]
        for path, lines in ambient_by_path.items()
        if path.name in EXCUSED
    }
    lines_by_path = {
        path: lines
        for path, lines in ambient_by_path.items()
        if lines and path not in excused
    }
    assert lines_by_path == {}
    lines_by_name = {path.name: lines for path, lines in excused.items()}
    assert lines_by_name == EXCUSED


def test_ambient_state_would_be_noticed():
    for line in (
        "import os; os.environ['A']",
        "from contextvars import ContextVar",
        "def f():\n    global x",
        "jax.set_mesh(m)",
        "try:\n    f()\nexcept Exception:\n    pass",
        "try:\n    f()\nexcept:\n    pass",
        "@ft.lru_cache(maxsize=None)\ndef f(): ...",
        "@ft.cache\ndef f(): ...",
        "threading.local()",
        "from __future__ import annotations",
    ):
        assert ambient(ast.parse(line)), line


def test_files_are_short():
    for folder in ("shardfx", "tests", "benchmarks", "docs"):
        for path in (ROOT / folder).rglob("*.py"):
            assert path.read_text().count("\n") <= 600, path


def test_functions_are_short():
    for path in SOURCES:
        for node in functions_of(tree_of(path)):
            body = node.body
            if ast.get_docstring(node) is not None:
                body = body[1:]
            if body:
                lines = (body[-1].end_lineno or 0) - body[0].lineno + 1
                assert lines <= 60, f"{path}: {node.name} has {lines} lines"


def test_long_signatures_have_one_parameter_a_line():
    for path in SOURCES:
        for node in functions_of(tree_of(path)):
            arguments = node.args
            parameters = [
                *arguments.posonlyargs,
                *arguments.args,
                *arguments.kwonlyargs,
            ]
            lines = [parameter.lineno for parameter in parameters]
            if lines and min(lines) > node.lineno:
                assert len(set(lines)) == len(lines), f"{path}: {node.name}"


def test_functions_of_tests_and_benchmarks_are_short():
    """Their lines of code count, without signature, docstring, comments and blanks. The
    name of a test says the noun and the law, in at most 60 characters.
    """
    for folder in ("tests", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text()
            lines = text.splitlines()
            for node in functions_of(ast.parse(text)):
                if path.name.startswith("test_"):
                    assert len(node.name) <= 60, f"{path}: {node.name}"
                first = node.body[0].lineno - 1
                if ast.get_docstring(node) is not None:
                    first = node.body[0].end_lineno or first
                body = [line.strip() for line in lines[first : node.end_lineno]]
                count = sum(bool(line) and line[0] != "#" for line in body)
                assert count <= 60, f"{path}: {node.name} has {count} lines of code"


def test_raw_data_of_keys_has_one_boundary():
    names = {"key_data", "wrap_key_data", "key_impl", "prng_key"}
    files = set()
    for path in SOURCES:
        text = path.read_text()
        if not any(name in text for name in names):
            continue
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Attribute) and node.attr in names:
                files.add(path.name)
    assert files == {"keys.py"}


def strings_of(node: ast.expr) -> list[str]:
    """The strings of a constant: the entries of a tuple, a list or a set, or the words
    of `"a b".split()`; [] if it has others.
    """
    if isinstance(node, ast.Call) and len(node.args) == 1:
        return strings_of(node.args[0])
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Constant(value=str(text)))):
            return text.split()
        case ast.Tuple(elts=entries) | ast.List(elts=entries) | ast.Set(elts=entries):
            return [
                entry.value
                for entry in entries
                if isinstance(entry, ast.Constant) and isinstance(entry.value, str)
            ]
    return []


def test_opcodes_have_one_vocabulary():
    """Sets of HLO's opcodes stand in `_ground/opcodes.py`, but for those of the judge:
    they say which operations its rules take.
    """
    sets = [value for value in vars(opcodes).values() if isinstance(value, frozenset)]
    known = frozenset().union(*sets)
    for path in SOURCES:
        room = draw_house.module_of(path)[0]
        if room not in ("_step", "cost") or path.parent.name == "judge":
            continue
        for node in tree_of(path).body:
            if isinstance(node, ast.Assign):
                names = strings_of(node.value)
                assert len(names) < 2 or not known.issuperset(names), (path, names)


def test_files_are_finished():
    for path in SOURCES:
        text = path.read_text()
        assert not re.search(r"\b(TODO|FIXME|XXX)\b", text), path
        assert not path.stem.endswith("_utils"), path
        assert text.startswith('"""'), (
            f"{path}: say in the first line what this file is for"
        )
        functions = [
            node.name
            for node in tree_of(path).body
            if isinstance(node, ast.FunctionDef)
        ]
        assert path.stem not in functions, (
            f"{path}: a type checker takes its function for the module"
        )


def test_optional_libraries_stay_in_their_files():
    """At their top, modules import the runtime dependencies alone; interop/ and the
    command line may import more.
    """
    for path in SOURCES:
        module = draw_house.module_of(path)
        # The way into the command line must be able to say what is missing.
        if module[0] == "interop" or (
            module[0] == "_cli" and module[1] not in ("__init__", "entry")
        ):
            continue
        for node in tree_of(path).body:
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            for top in (name.split(".")[0] for name in names):
                assert top in RUNTIME or top in sys.stdlib_module_names, (
                    f"{path}:{node.lineno} imports {top}"
                )


# Runs in a process of its own: the runtime dependencies first, then what each statement
# reads of the environment, and loads.
WATCH = """
import json, os, sys
import equinox, jax, jaxtyping, numpy
from jax.sharding import AbstractMesh
from jax._src import xla_bridge

kind = type(os.environ)
original, found = kind.__getitem__, []
for statement in sys.argv[1:]:
    reads, before = [], set(sys.modules)
    kind.__getitem__ = lambda self, key: (reads.append(key), original(self, key))[1]
    exec(statement)
    kind.__getitem__ = original
    new = sorted({name.split(".")[0] for name in sys.modules} - {name.split(".")[0] for name in before})
    found.append((reads, xla_bridge.backends_are_initialized(), new))
print(json.dumps(found))
"""


def test_import_starts_nothing_and_loads_nothing():
    statements = (
        "import shardfx",
        "import os, jax, pytest; os.getenv('HOME'); jax.devices()",
    )
    done = subprocess.run(
        [sys.executable, "-c", WATCH, *statements],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = done.stdout.splitlines()[-1]
    (reads, starts, new), bad = json.loads(lines)
    assert reads == []
    assert not starts
    assert [name for name in new if name not in sys.stdlib_module_names] == ["shardfx"]
    # Another import would be noticed.
    assert "HOME" in bad[0]
    assert bad[1]
    assert "pytest" in bad[2]


def documented() -> set[str]:
    files = (ROOT / "docs").rglob("*.md")
    pages = "\n".join(page.read_text() for page in files)
    return set(re.findall(r"^::: (shardfx[\w.]*)", pages, re.MULTILINE))


def exported(package: Path) -> set[str]:
    """What a package's `__init__` exports, subpackages apart."""
    nodes = ast.walk(tree_of(package / "__init__.py"))
    package_name = ".".join(package.relative_to(ROOT).parts)
    names = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            names.update(f"{package_name}.{alias.name}" for alias in node.names)
    return names


def public() -> set[str]:
    """What the package and its public subpackages export; where an `__init__` is empty,
    what its modules define.
    """
    # A private room exports to the rest of the house, and the root says what of it is
    # public.
    rooms = {path.parent: draw_house.module_of(path)[:-1] for path in INITS}
    packages = [
        room
        for room, parts in rooms.items()
        if not any(part.startswith("_") for part in parts)
    ]
    names: set[str] = set()
    for package in packages:
        result = exported(package)
        for path in [] if result else sorted(package.glob("[!_]*.py")):
            defined = [
                n
                for n in tree_of(path).body
                if isinstance(n, ast.ClassDef | ast.FunctionDef)
            ]
            prefix = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            result |= {
                f"{prefix}.{node.name}"
                for node in defined
                if not node.name.startswith("_")
            }
        names |= result
    # The root has MeshSpec of topology, too.
    return names - {"shardfx.topology.MeshSpec"}


def test_every_public_name_is_documented():
    assert sorted(public() - documented()) == []


def test_type_checkers_read_a_use_of_every_public_function():
    nodes = [*ast.walk(tree_of(ROOT / "tests/types/uses.py"))]
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    used |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    for path in sorted((PACKAGE / "interop").glob("[!_]*.py")):
        importlib.import_module(f"shardfx.interop.{path.stem}")
    functions = [
        name for name in public() if inspect.isfunction(pkgutil.resolve_name(name))
    ]
    assert len(functions) > 90
    names = [name for name in functions if name.rpartition(".")[2] not in used]
    assert names == []


def test_every_documented_name_exists():
    for path in sorted((PACKAGE / "interop").glob("[!_]*.py")):
        importlib.import_module(f"shardfx.interop.{path.stem}")
    for name in sorted(documented()):
        assert pkgutil.resolve_name(name).__doc__, name


def test_all_files_of_a_release_name_one_version():
    version = shardfx.__version__
    texts = {
        name: (ROOT / name).read_text()
        for name in ("pyproject.toml", "CHANGELOG.md", "CITATION.cff")
    }
    assert f'\nversion = "{version}"\n' in texts["pyproject.toml"]
    assert f"\nversion: {version}\n" in texts["CITATION.cff"]
    headings = re.findall(r"^## (\S+)$", texts["CHANGELOG.md"], re.MULTILINE)
    assert headings[0] in (version, "Unreleased")
    assert version in headings
    assert (ROOT / "shardfx" / "py.typed").exists()


def test_issues_ask_for_the_versions():
    templates = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
    asking = [path for path in templates if path.name != "config.yml"]
    assert len(asking) == 2
    for path in asking:
        assert "`shardfx --version --verbose`" in path.read_text()

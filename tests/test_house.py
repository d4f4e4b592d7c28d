"""The house rules, read off the source: who imports whom, what may not be there, what must be documented."""

import ast
import importlib
import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardfx


ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "shardfx"
SOURCES = sorted(PACKAGE.rglob("*.py"))
# Every module of the package stands on one floor; imports go to lower floors only.
FLOORS = (
    ("_errors",),
    ("_reason", "topology", "_hlo", "_bits", "_alike", "_table"),
    ("_mesh", "_spec", "_tree", "_layout", "_tiles"),
    ("_axis_rules", "_paths", "_correct", "_refine", "_factors", "_assemble", "_rounds", "_pieces", "_sliced"),
    ("_rules", "_exchange", "_lacking", "_transfer"),
    ("_walk",),
    ("_search",),
    ("_codec", "_redistribute", "_names"),
    ("_content", "_program"),
    ("_plan", "_collective", "_complaints"),
    ("_planner", "_follow", "_moving"),
    ("_apply", "_jit", "hosts", "_elastic"),
    ("_targets", "checkpoint", "_report"),
    ("_reshard", "_reshard_plan"),
    ("presets", "interop"),
    ("__init__",),
    ("_demo", "_cli"),
    ("__main__",),
)
FLOOR_OF = {module: floor for floor, modules in enumerate(FLOORS) for module in modules}
RUNTIME = {"jax", "equinox", "jaxtyping", "numpy", "shardfx"}
FORBIDDEN_NAMES = {
    "ContextVar",
    "environ",
    "getenv",
    "set_mesh",
    "use_mesh",
    "hasattr",
}
# JAX's error for a sharding that it cannot type is not public; and each jitted function owns one small cache.
EXCUSED = {"_follow.py": ["broad except"], "_jit.py": ["unbounded cache"]}
FORBIDDEN_MODULES = {"threading.local", "contextvars", "__future__", "pickle"}


def module_of(path: Path) -> tuple[str, ...]:
    """("_plan",) or ("presets", "llama")"""
    return path.relative_to(PACKAGE).with_suffix("").parts


def resolved(node: ast.ImportFrom, path: Path) -> Iterator[tuple[str, ...]]:
    """The modules of this package that a `from` statement names, as parts below `shardfx`."""
    if node.level == 0:
        parts = (node.module or "").split(".")
        base = tuple(parts[1:])
        if parts[0] != "shardfx":
            return
    else:
        outer = module_of(path)[: -node.level]
        base = outer + tuple((node.module or "").split(".") if node.module else ())
    for alias in node.names:
        candidate = PACKAGE.joinpath(*base, alias.name)
        is_module = candidate.with_suffix(".py").exists() or candidate.is_dir()
        yield (*base, alias.name) if is_module else base or ("__init__",)


def imports(path: Path) -> list[tuple[tuple[str, ...], int]]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            found += [(target, node.lineno) for target in resolved(node, path)]
        elif isinstance(node, ast.Import):
            named = [alias.name.split(".") for alias in node.names]
            found += [(tuple(parts[1:]) or ("__init__",), node.lineno) for parts in named if parts[0] == "shardfx"]
    return found


def wrong_imports(path: Path) -> list[str]:
    """Imports between different parts of the house that do not go strictly downward."""
    own = module_of(path)[0]
    return [
        f"{path.name}:{line} (floor {FLOOR_OF[own]}) imports {'.'.join(target)} (floor {FLOOR_OF[target[0]]})"
        for target, line in imports(path)
        if target[0] != own and FLOOR_OF[target[0]] >= FLOOR_OF[own]
    ]


def test_every_module_has_a_floor():
    parts = {module_of(path)[0] for path in SOURCES}
    assert parts - set(FLOOR_OF) == set(), "give each new module its floor in FLOORS"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_strictly_downward(path):
    assert wrong_imports(path) == []


def test_no_cycles_inside_a_package():
    graph = {module_of(path): {target for target, _ in imports(path)} for path in SOURCES if len(module_of(path)) > 1}
    done: set[tuple[str, ...]] = set()

    def visit(module: tuple[str, ...], trail: tuple[tuple[str, ...], ...]) -> None:
        assert module not in trail, f"import cycle: {trail}"
        if module in graph and module not in done:
            for target in sorted(graph[module]):
                visit(target, (*trail, module))
            done.add(module)

    for module in graph:
        visit(module, ())


@pytest.mark.parametrize("path", [p for p in SOURCES if p.name == "__init__.py"], ids=lambda p: p.parent.name)
def test_init_is_a_table_of_contents(path):
    body = ast.parse(path.read_text()).body
    if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        body = body[1:]
    if path.parent == PACKAGE:
        # Two parts load when they are first named; nothing else may stand beside the table.
        lazy = [node for node in body if not isinstance(node, ast.ImportFrom)]
        assert [type(node) for node in lazy] == [ast.Import, ast.Import, ast.If, ast.FunctionDef]
        body = [node for node in body if isinstance(node, ast.ImportFrom)]
    for node in body:
        assert isinstance(node, ast.ImportFrom), f"line {node.lineno}"
        if path.parent == PACKAGE:
            assert all(alias.asname == alias.name for alias in node.names), f"line {node.lineno}: write `x as x`"


def test_the_parts_that_load_late_are_there():
    code = """
        import sys
        import shardfx
        late = ("checkpoint", "presets", "_reshard", "_reshard_plan", "_collective", "_transfer")
        assert not [name for name in late if f"shardfx.{name}" in sys.modules]
        from shardfx import LeafMove, ReshardPlan, plan_reshard, reshard
        assert shardfx.checkpoint.read_index and shardfx.presets.t5x()
        try:
            shardfx.nothing
        except AttributeError as error:
            print(error)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert done.stdout == "module 'shardfx' has no attribute 'nothing'\n"


def ambient(source: str) -> list[str]:
    """What keeps state outside of values, hides an error, or probes instead of knowing."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Global():
                found.append(f"{node.lineno}: global")
            case ast.Name(id=name) | ast.Attribute(attr=name) if name in FORBIDDEN_NAMES:
                found.append(f"{node.lineno}: {name}")
            case ast.Raise(exc=ast.Call(func=ast.Name(id="NotImplementedError")) | ast.Name(id="NotImplementedError")):
                found.append(f"{node.lineno}: NotImplementedError")
            case ast.ImportFrom(module=str(module)) if module in FORBIDDEN_MODULES:
                found.append(f"{node.lineno}: {module}")
            case ast.Import() if any(alias.name in FORBIDDEN_MODULES for alias in node.names):
                found.append(f"{node.lineno}: {node.names[0].name}")
            case ast.ExceptHandler(type=None) | ast.ExceptHandler(type=ast.Name(id="Exception" | "BaseException")):
                found.append(f"{node.lineno}: broad except")
            case ast.Attribute(value=ast.Name(id="threading"), attr="local"):
                found.append(f"{node.lineno}: threading.local")
            case ast.Attribute(attr="cache", value=ast.Name(id="functools" | "ft")):
                found.append(f"{node.lineno}: unbounded cache")
            case ast.keyword(arg="maxsize", value=ast.Constant(value=None)):
                found.append(f"{node.value.lineno}: unbounded cache")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_nothing_ambient(path):
    found = [line.split(": ")[1] for line in ambient(path.read_text())]
    assert found == EXCUSED.get(path.name, [])


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
        assert ambient(line), line


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_files_are_small_and_finished(path):
    text = path.read_text()
    assert text.count("\n") <= 500
    assert not re.search(r"\b(TODO|FIXME|XXX)\b", text)
    assert not path.stem.endswith("_utils")


def test_optional_libraries_stay_in_their_files():
    """At their top, modules import the runtime dependencies alone; interop/ and _demo/ may import more."""
    for path in SOURCES:
        if module_of(path)[0] in ("interop", "_demo"):
            continue
        for node in ast.parse(path.read_text()).body:
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            for top in (name.split(".")[0] for name in names):
                assert top in RUNTIME or top in sys.stdlib_module_names, f"{path}:{node.lineno} imports {top}"


# Runs in a process of its own: the runtime dependencies first, then it records every read of the environment.
WATCH = """
import json, os, sys
import equinox, jax, jaxtyping, numpy
from jax.sharding import AbstractMesh
from jax._src import xla_bridge

reads = []
kind = type(os.environ)
original, before = kind.__getitem__, set(sys.modules)
kind.__getitem__ = lambda self, key: (reads.append(key), original(self, key))[1]
exec(sys.argv[1])
kind.__getitem__ = original
new = sorted({name.split(".")[0] for name in sys.modules} - {name.split(".")[0] for name in before})
print(json.dumps({"reads": reads, "backend": xla_bridge.backends_are_initialized(), "new": new}))
"""


def watched(statement: str) -> dict:
    command = [sys.executable, "-c", textwrap.dedent(WATCH), statement]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_import_starts_nothing_and_loads_nothing():
    seen = watched("import shardfx")
    assert seen["reads"] == []
    assert not seen["backend"]
    assert [name for name in seen["new"] if name not in sys.stdlib_module_names] == ["shardfx"]


def test_a_bad_import_would_be_noticed():
    seen = watched("import os, jax, pytest; os.getenv('HOME'); jax.devices()")
    assert "HOME" in seen["reads"]
    assert seen["backend"]
    assert "pytest" in seen["new"]


def documented() -> set[str]:
    pages = "\n".join(page.read_text() for page in (ROOT / "docs").rglob("*.md"))
    return set(re.findall(r"^::: (shardfx[\w.]*)", pages, re.MULTILINE))


def exported(package: Path) -> set[str]:
    """What a package's `__init__` exports, subpackages apart."""
    nodes = ast.walk(ast.parse((package / "__init__.py").read_text()))
    imported = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    return {".".join((*package.relative_to(ROOT).parts, alias.name)) for node in imported for alias in node.names}


def public() -> set[str]:
    """What the package and its public subpackages export; where an `__init__` is empty, what its modules define."""
    packages = [path.parent for path in SOURCES if path.name == "__init__.py" and not path.parent.name.startswith("_")]
    names: set[str] = set()
    for package in packages:
        found = exported(package)
        for path in [] if found else sorted(package.glob("[!_]*.py")):
            defined = [n for n in ast.parse(path.read_text()).body if isinstance(n, ast.ClassDef | ast.FunctionDef)]
            prefix = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found |= {f"{prefix}.{node.name}" for node in defined if not node.name.startswith("_")}
        names |= found
    return names


def test_every_public_name_is_documented():
    assert sorted(public() - documented()) == []


def test_every_documented_name_exists():
    for path in sorted((PACKAGE / "interop").glob("[!_]*.py")):
        importlib.import_module(f"shardfx.interop.{path.stem}")
    for name in sorted(documented()):
        thing = shardfx
        for part in name.split(".")[1:]:
            thing = getattr(thing, part)
        assert thing.__doc__, name

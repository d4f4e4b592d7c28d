"""Values of options and of results that are one of a few strings: pages and docstrings
list those that the code has.
"""

import importlib
import inspect
import pkgutil
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.cli.commands import run
from tests.house.test_house import PACKAGE, ROOT, public


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Code within a line, and blocks of code.
CODE = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)


class Option(NamedTuple):
    """A parameter of a public function, or a field of a public class, whose values are
    a few strings.

    - `owner`: the function or the class, by its public name.
    - `text`: the owner's docstring.
    """

    owner: str
    name: str
    values: tuple[str, ...]
    text: str


def strings_of(annotation: Any) -> tuple[str, ...] | None:
    """The strings that an annotation allows; `None` if it allows others too. `None` as
    a value is not counted.
    """
    origin = typing.get_origin(annotation)
    if annotation in (None, types.NoneType):
        return ()
    if origin is typing.Literal:
        values = typing.get_args(annotation)
        return values if all(isinstance(value, str) for value in values) else None
    if origin in (typing.Union, types.UnionType):
        strings: list[str] = []
        for member in typing.get_args(annotation):
            values = strings_of(member)
            if values is None:
                return None
            strings += values
        return tuple(strings)
    return None


def annotations_of(value: Any) -> dict[str, Any]:
    """The annotations of a function's parameters, or of a class's fields."""
    if inspect.isclass(value):
        return inspect.get_annotations(value)
    parameters = inspect.signature(value).parameters.values()
    return {parameter.name: parameter.annotation for parameter in parameters}


def owners() -> Iterator[tuple[str, Any]]:
    """Public functions and classes, and the public methods of these."""
    for path in sorted((PACKAGE / "interop").glob("[!_]*.py")):
        importlib.import_module(f"shardfx.interop.{path.stem}")
    for name in sorted(public()):
        value = pkgutil.resolve_name(name)
        if inspect.isfunction(value):
            yield name, value
        if not inspect.isclass(value):
            continue
        yield name, value
        for method_name, method in vars(value).items():
            is_constructor = method_name == "__init__" and inspect.isfunction(method)
            is_public = not method_name.startswith("_") and inspect.isfunction(method)
            if is_constructor or is_public:
                yield f"{name}.{method_name}", method


def options() -> list[Option]:
    rows = []
    for owner, value in owners():
        # A constructor's arguments are described with the class.
        described = owner.removesuffix(".__init__")
        text = inspect.getdoc(pkgutil.resolve_name(described)) or ""
        for name, annotation in annotations_of(value).items():
            values = strings_of(annotation)
            if values and not name.startswith("_"):
                rows.append(Option(owner=owner, name=name, values=values, text=text))
    return rows


OPTIONS = options()


class Item(NamedTuple):
    """An item of a docstring's list: the names that it is about, and its words."""

    names: str
    words: str


def item_of(option: Option) -> Item:
    """The item of a docstring that is about an option, alone or with others."""
    for text in re.split(r"^- (?=`)", option.text, flags=re.MULTILINE)[1:]:
        names, _, words = text.partition(": ")
        if f"`{option.name}`" in names:
            return Item(names, words.split("\n\n")[0])
    raise AssertionError(f"{option.owner} says nothing of `{option.name}`")


def default_of(option: Option) -> object:
    owner = pkgutil.resolve_name(option.owner)
    if inspect.isclass(owner):
        return None
    return inspect.signature(owner).parameters[option.name].default


@pytest.mark.parametrize(
    "option", OPTIONS, ids=[f"{option.owner}({option.name})" for option in OPTIONS]
)
def test_a_docstring_lists_the_values_of_an_option(option: Option):
    """Or it says whose option of that name it is, and lists none."""
    item = item_of(option)
    listed = set(re.findall(r'"([^"\n]*)"', item.words))
    if not listed and re.search(r"\bas (in|the|of)\b", item.words):
        return
    assert listed | {default_of(option)} >= set(option.values)
    described: set[str] = set()
    for other in OPTIONS:
        if other.owner == option.owner and f"`{other.name}`" in item.names:
            described.update(other.values)
    assert listed <= described


def test_options_are_found():
    named = {(option.owner, option.name): option.values for option in OPTIONS}
    assert named["shardfx.plan", "unmatched"] == ("raise", "replicate")
    assert named["shardfx.auto.search", "verify"] == ("compile", "run")
    assert len(OPTIONS) > 20


def code_of(path: Path) -> str:
    return "\n".join(CODE.findall(path.read_text()))


def test_pages_give_options_values_that_they_have():
    values: dict[str, set[str]] = {}
    for option in OPTIONS:
        values.setdefault(option.name, set()).update(option.values)
    counted = 0
    for page in PAGES:
        for name, value in re.findall(r'\b(\w+)="([^"]*)"', code_of(page)):
            if name in values:
                assert value in values[name], f'{page}: {name}="{value}"'
                counted += 1
    assert counted > 15


def help_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert run(*words, "--help") == 0
    return capsys.readouterr().out


def test_commands_on_pages_give_options_values_that_they_have(
    capsys: pytest.CaptureFixture[str],
):
    listed = help_of([], capsys).partition("Commands:")[2]
    values: dict[str, set[str]] = {}
    for verb in re.findall(r"^  (\w+)  ", listed, re.MULTILINE):
        text = help_of([verb], capsys)
        for flag, choices in re.findall(r"(--[\w-]+) \[([\w-]+(?:\|[\w-]+)+)\]", text):
            values.setdefault(flag, set()).update(choices.split("|"))
    assert values["--verify"] == {"compile", "run"}
    assert values["--unmatched"] == {"raise", "replicate"}
    counted = 0
    for page in PAGES:
        code = code_of(page)
        for flag, choices in values.items():
            for value in re.findall(rf"{flag}[ =](\w[\w-]*)", code):
                assert value in choices, f"{page}: {flag} {value}"
                counted += 1
    assert counted > 3

"""The commands of docs/cli.md print what the page shows, and its pictures show what the
verbs print now.
"""

import doctest
import importlib.util
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.cli.commands import ROOT, VERBS, run
from tests.cli.verb_files import PAGE, write_files


FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
# A command, and what is shown after it.
COMMANDS = re.findall(
    r"^```bash\n(.*?)^```\n(?:\n```text\n(.*?)^```)?", PAGE, re.DOTALL | re.MULTILINE
)


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """The directory in which the page's commands run, with its model."""
    folder = tmp_path_factory.mktemp("page")
    write_files(folder)
    yield folder
    sys.modules.pop("my_model", None)


@pytest.mark.parametrize(
    "command, shown",
    COMMANDS,
    ids=[" ".join(command.split()) for command, _ in COMMANDS],
)
def test_a_command_of_the_page_prints_what_it_shows(
    command, shown, project, monkeypatch, capsys
):
    monkeypatch.chdir(project)
    monkeypatch.syspath_prepend(project)
    monkeypatch.delitem(sys.modules, "my_model", raising=False)
    words = shlex.split(command.replace("\\\n", " "))
    assert words[0] == "shardfx"
    assert run(*words[1:]) in (0, 1)
    out, err = capsys.readouterr()
    assert err == ""
    message = f"{command}wanted\n{shown}\nbut it printed\n{out}"
    assert not shown or doctest.OutputChecker().check_output(shown, out, FLAGS), message
    for word in words:
        if words[words.index(word) - 1] in ("--json", "--html", "--write"):
            assert Path(word).stat().st_size > 0


def test_every_verb_has_a_section():
    matches = sorted(re.findall(r"^## (\w+)$", PAGE, re.MULTILINE))
    assert matches == sorted(VERBS)


# Numbers that JAX's tracer decides may differ between its versions.
TRACED = ("search", "traffic")


@pytest.fixture(scope="module")
def pictures():
    """docs/draw_verbs.py as a module."""
    spec = importlib.util.spec_from_file_location(
        "draw_verbs", ROOT / "docs" / "draw_verbs.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_verb_has_its_picture_on_the_page(pictures):
    assert set(pictures.COMMANDS) | {"report"} == set(VERBS)
    matches = re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    sections = dict(matches)
    for verb in VERBS:
        picture = "report.png" if verb == "report" else f"verbs/{verb}.svg"
        assert re.search(rf"^!\[.+\]\({picture}\)$", sections[verb], re.MULTILINE), verb
        assert (ROOT / "docs" / picture).stat().st_size < 200_000
    stems = sorted(file.stem for file in pictures.FOLDER.iterdir())
    assert stems == sorted(pictures.COMMANDS)


@pytest.mark.parametrize(
    "verb", [verb for verb in VERBS if verb not in ("report", "demo")]
)
def test_a_picture_shows_what_the_verb_prints(verb, pictures):
    with pictures.place():
        now = pictures.text_of(pictures.drawn(verb))
    shown = pictures.text_of((pictures.FOLDER / f"{verb}.svg").read_text())
    if verb in TRACED:
        now, shown = (re.sub(r"[\d.,]+", "0", text) for text in (now, shown))
    assert now == shown, f"run: python docs/draw_verbs.py {verb}"
    assert "my_model" not in sys.modules


def test_pictures_hold_no_links_and_no_folders(pictures):
    for file in pictures.FOLDER.iterdir():
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "http" not in text, file
        assert "/tmp" not in text, file
        assert "@font-face" not in text, file

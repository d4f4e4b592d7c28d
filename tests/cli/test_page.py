"""The commands of docs/cli.md run in the order of the page, and print what it shows."""

import doctest
import re
import shlex
import sys
from pathlib import Path

import pytest
from test_cli import VERBS, run
from test_verbs import PAGE, write_files


FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
# A command, and what is shown after it.
COMMANDS = re.findall(r"^```bash\n(.*?)^```\n(?:\n```text\n(.*?)^```)?", PAGE, re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """The directory in which the page's commands run, with its model."""
    folder = tmp_path_factory.mktemp("page")
    write_files(folder)
    yield folder
    sys.modules.pop("my_model", None)


@pytest.mark.parametrize("command, shown", COMMANDS, ids=[" ".join(command.split()) for command, _ in COMMANDS])
def test_a_command_of_the_page_prints_what_it_shows(command, shown, here, monkeypatch, capsys):
    monkeypatch.chdir(here)
    monkeypatch.syspath_prepend(here)
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
    assert sorted(re.findall(r"^## (\w+)$", PAGE, re.MULTILINE)) == sorted(VERBS)

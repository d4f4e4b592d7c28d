import sys

import jax
import pytest

from tests.cli.commands import MODEL, NUMBERS
from tests.cli.verb_files import MORE, write_files


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The name of a module, in the current directory, that holds MODEL; each test has
    its own.
    """
    name = f"cli_model_{next(NUMBERS)}"
    (tmp_path / f"{name}.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return name


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A directory with all files that the examples name."""
    write_files(tmp_path, MORE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    jax.devices()  # those of the tests, not as many as a verb would start
    yield tmp_path
    sys.modules.pop("my_model", None)

"""Mistakes of somebody new: the message names what was wrong and the call to write, and
that call runs.
"""

import jax
import pytest

from tests.house.graded_mistakes import ROWS, graded, namespace


# An error of Python's for a module: nothing here makes its text.
OF_OTHERS = "checkpoint.restore('c', plan)"
WRONG = [row for row in ROWS if row.wrong != OF_OTHERS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The directory in which all rows run. The first one saves a checkpoint there."""
    path = tmp_path_factory.mktemp("mistakes")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        yield path


def test_there_are_a_hundred():
    assert len({row.wrong for row in ROWS}) == len(ROWS) >= 100


@pytest.mark.parametrize("row", WRONG, ids=lambda row: row.wrong)
def test_a_message_has_the_fix(row, folder):
    result = graded(row)
    assert result.grade == "fix", result.message


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.wrong)
def test_the_mended_code_runs(row, folder):
    with jax.numpy_dtype_promotion("standard"):
        exec(row.right, namespace())

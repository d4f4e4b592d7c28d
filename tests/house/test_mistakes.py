"""A hundred mistakes: the error of each has the part that is the fix."""

import re

import pytest

from tests.house import mistakes_of_calls, mistakes_of_plans, mistakes_of_readers


MISTAKES = {
    **mistakes_of_plans.MISTAKES,
    **mistakes_of_calls.MISTAKES,
    **mistakes_of_readers.MISTAKES,
}


def test_there_are_a_hundred():
    assert len(MISTAKES) >= 100


@pytest.mark.parametrize("name", MISTAKES)
def test_the_message_of_a_mistake_has_the_fix(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mistake = MISTAKES[name]
    message = re.escape(mistake.fix)
    with pytest.raises((TypeError, ValueError, KeyError), match=message):
        mistake.make()

"""The page of recipes runs, and its steps compute under their plans what they compute
on one device.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shardfx as sfx
from tests.house.test_docs import blocks, run


# Those that train and serve; the rest only makes arrays.
STEPS = ("mixed_step", "accumulated", "decode")
PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"


def test_no_recipe_is_accused(monkeypatch: pytest.MonkeyPatch):
    filter_jit = sfx.filter_jit
    checked = []

    def checking(fn: Any, **how: Any) -> Callable[..., Any]:
        jitted = filter_jit(fn, **how)
        is_new = [fn.__name__ in STEPS]

        def called(*args: Any) -> Any:
            if is_new.pop() if is_new else False:
                check = sfx.testing.check_step(jitted, *args)
                assert check, f"{fn}: {check}"
                checked.append(fn)
            return jitted(*args)

        called.lower = jitted.lower  # pyright: ignore[reportFunctionMemberAccess]
        return called

    monkeypatch.setattr(sfx, "filter_jit", checking)
    run(blocks(PAGE.read_text()), str(PAGE))
    assert [fn.__name__ for fn in checked] == [*STEPS]

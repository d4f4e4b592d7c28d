"""The signatures of the package are checked while its tests run."""

import importlib.util
import textwrap

import jaxtyping
import numpy as np
import pytest
from import_hook import Loader

from shardfx import MeshSpec


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    path = tmp_path_factory.mktemp("checked") / "example_of_checks.py"
    path.write_text(
        textwrap.dedent("""
            import dataclasses
            import functools
            from typing import Any

            import numpy as np
            from jaxtyping import Float

            @dataclasses.dataclass(frozen=True)
            class Point:
                x: int

                @property
                def wrong(self) -> str:
                    return self.x

            @dataclasses.dataclass(frozen=True)
            class Row:
                values: Float[np.ndarray, "n"]

            @functools.cache
            def total(items: tuple[int, ...]) -> int:
                return sum(items)

            def both(a: Float[np.ndarray, "n"], b: list[Float[np.ndarray, "n"]]) -> Float[np.ndarray, "m"]:
                return a

            def quoted(x: "NowhereToBeFound") -> int:
                return x

            def outer(x: Any) -> Any:
                def inner(y: int) -> int:
                    return y

                return inner(x)
        """)
    )
    spec = importlib.util.spec_from_file_location("example_of_checks", path, loader=Loader("made", str(path)))
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_what_is_right_passes(module):
    assert module.Point(3).x == module.total((1, 2)) == module.outer(3) == module.quoted(3) == 3
    one = np.zeros(3)
    assert module.both(one, [one]) is module.Row(one).values


def test_arguments_results_and_fields_are_checked(module):
    wrong = [
        lambda: module.Point("3"),
        lambda: module.Point(3).wrong,
        lambda: module.total((2.0,)),
        lambda: module.outer("3"),
        lambda: MeshSpec({"data": 8}).axis_size(8),  # type: ignore
    ]
    for call in wrong:
        with pytest.raises(jaxtyping.TypeCheckError):
            call()


def test_dimensions_are_compared(module):
    one, two, whole = np.zeros(3), np.zeros(4), np.zeros(3, int)
    wrong = [
        lambda: module.both(one, [two]),
        lambda: module.both(whole, []),
        lambda: module.Row(whole),
        lambda: module.quoted("3"),
    ]
    for call in wrong:
        with pytest.raises(jaxtyping.TypeCheckError):
            call()


def test_tests_of_messages_turn_the_checks_off(module):
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        assert module.outer("3") == module.quoted("3") == module.Point("3").x == "3"
        assert module.both(None, None) is None
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)

"""Vectors measured on other libraries: what each must give here."""

import contextlib
import json
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jax.sharding import PartitionSpec as P


U = P.UNCONSTRAINED


class Raises(types.SimpleNamespace):
    """What a vector gives where it raises."""


def raises(error: Any, match: str) -> Raises:
    return Raises(error=error, match=match)


@contextlib.contextmanager
def outcome(wanted: Any) -> Iterator[Any]:
    """Yields what is wanted; where that is an error, demands it of the block."""
    if isinstance(wanted, Raises):
        with pytest.raises(wanted.error, match=wanted.match):
            yield None
    else:
        yield wanted


def entry(value: Any) -> Any:
    return U if value == "<UNCONSTRAINED>" else tuple(value) if isinstance(value, list) else value


def read(name: str) -> list[Any]:
    return json.loads((Path(__file__).parents[1] / "data" / name).read_text())


def parametrized(chosen: list[Any]) -> pytest.MarkDecorator:
    assert chosen
    return pytest.mark.parametrize("vector", chosen, ids=[vector["id"] for vector in chosen])

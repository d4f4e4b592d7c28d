"""Vectors measured on other libraries, and the result that shardfx must give for each.

For a "conform" vector that is the measured result. For a "deviate" vector it stands
beside its id, with the reason.
"""

import contextlib
import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jax.sharding import PartitionSpec as P

from tests.specs import canonical


ROOT = Path(__file__).parents[2]
U = P.UNCONSTRAINED


@dataclasses.dataclass
class Raises:
    """What a vector gives where it raises."""

    error: Any
    match: str = "."


@contextlib.contextmanager
def outcome(expected: Any) -> Iterator[Any]:
    """Yields what is wanted; where that is an error, demands it of the block."""
    if isinstance(expected, Raises):
        with pytest.raises(expected.error, match=expected.match):
            yield None
    else:
        yield expected


def entry(value: Any) -> Any:
    if value == "<UNCONSTRAINED>":
        return U
    if isinstance(value, list):
        return tuple(value)
    return value


def spec_of(entries: Any) -> P:
    return canonical(P(*map(entry, entries)))


def decoded(value: Any) -> Any:
    """A value of a vector, its specs and errors read."""
    if isinstance(value, dict):
        if "raises" in value:
            return Raises((ValueError, TypeError))
        entries = value.get("spec", value.get("named_sharding"))
        if entries is None:
            return {key: decoded(item) for key, item in value.items()}
        return spec_of(entries)
    if isinstance(value, list):
        return [decoded(item) for item in value]
    return value


class Suite:
    """The vectors of one library: those that run, those that are skipped for a reason,
    and those that deviate.
    """

    def __init__(
        self,
        name: str,
        skipped: dict[str, str],
        deviations: dict[str, Any],
        within: str = "",
    ):
        """`skipped` are ids or beginnings of functions, and `within` is the beginning
        of all functions.
        """
        text = (ROOT / "tests" / "data" / name).read_text()
        every = json.loads(text)
        self.vectors = [
            vector for vector in every if vector["function"].startswith(within)
        ]
        starts = tuple(skipped)
        self.skipped = [
            v["id"]
            for v in self.vectors
            if v["id"] in skipped or v["function"].startswith(starts)
        ]
        for v in self.vectors:
            if v["id"] in skipped:
                assert v["tag"] == "context"
        self.deviations = deviations
        self.run = []

    def of(self, *functions: str) -> pytest.MarkDecorator:
        chosen = [
            v
            for v in self.vectors
            if v["function"] in functions and v["id"] not in self.skipped
        ]
        assert chosen
        self.run += [vector["id"] for vector in chosen]
        vectors = [vector["id"] for vector in chosen]
        return pytest.mark.parametrize("vector", chosen, ids=vectors)

    def expected(self, vector: Any) -> Any:
        """What shardfx must give: measured, or stated."""
        if vector["id"] in self.deviations:
            return self.deviations[vector["id"]][0]
        return decoded(vector["expected"])

    def check(self, more_deviations: tuple[str, ...] = ()) -> None:
        """Every vector runs once or is skipped, and just those deviate that are tagged,
        and these `more_deviations`.
        """
        ids = [vector["id"] for vector in self.vectors]
        expected = sorted([*self.run, *self.skipped])
        assert sorted(ids) == expected
        assert len(set(ids)) == len(ids)
        vectors = {
            vector["id"] for vector in self.vectors if vector["tag"] == "deviate"
        }
        tagged = vectors - set(self.skipped)
        assert set(self.deviations) == tagged | set(more_deviations)


def missing_on(page: str, symbols: Any) -> list[str]:
    """The symbols of a library that its page of docs does not have."""
    text = (ROOT / "docs" / page).read_text()
    return [name for name in symbols if not re.search(rf"\b{name}\b", text)]

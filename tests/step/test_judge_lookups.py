"""Masks of lookups in a table that is cut, changed so that the numbers are wrong
for some indices.
"""

import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from judging import proved_programs, verdict_of

import shardfx as sfx


CLAMP = re.compile(
    r"%(?P<name>clamp[\w.]*) = (?P<kind>s32\[\S+) clamp\((?P<low>%\S+), (?P<raw>%\S+),"
    r" %\S+\)"
)


def pairs(table, indices):
    return table[indices, indices[::-1]]


@pytest.fixture(scope="module")
def programs():
    mesh = sfx.MeshSpec({"a": 2, "b": 2}).abstract()
    blocks = NamedSharding(mesh, P("a", "b"))
    table = jax.ShapeDtypeStruct((12, 12), jnp.float32, sharding=blocks)
    rows = NamedSharding(mesh, P("a"))
    indices = jax.ShapeDtypeStruct((12,), jnp.int32, sharding=rows)
    return proved_programs(pairs, (table, indices))


def by_one_column(text: str) -> str:
    return text.replace("pred[] or(%x, %y)", "pred[] or(%x, %x)")


def masked_everywhere(text: str) -> str:
    return text.replace("constant(false)", "constant(true)")


def compared(text: str, other: str, directions: str) -> str:
    """The comparisons of clamped indices, of `other` ones."""
    match = CLAMP.search(text)
    assert match is not None
    return re.sub(
        rf"compare\(%{re.escape(match['name'])}, (%\S+)\), direction={directions}",
        lambda old: old[0].replace(f"%{match['name']}", other),
        text,
    )


def below_unclamped(text: str) -> str:
    match = CLAMP.search(text)
    assert match is not None
    return compared(text, match["raw"], "LT")


def all_unclamped(text: str) -> str:
    match = CLAMP.search(text)
    assert match is not None
    return compared(text, match["raw"], "(?:LT|GT)")


def clamped_otherwise(text: str) -> str:
    """A mask of indices up to 20, in a table whose last one is 11."""
    match = CLAMP.search(text)
    assert match is not None
    high = f"  %high = {match['kind']} broadcast(%twenty), dimensions={{}}\n"
    inserted = (
        "  %twenty = s32[] constant(20)\n"
        + high
        + f"  %wide = {match['kind']} clamp({match['low']}, {match['raw']}, %high)\n"
    )
    line = text.rindex("\n", 0, match.start()) + 1
    return compared(text[:line] + inserted + text[line:], "%wide", "(?:LT|GT)")


@pytest.mark.parametrize(
    "changed",
    [
        by_one_column,
        masked_everywhere,
        below_unclamped,
        all_unclamped,
        clamped_otherwise,
    ],
)
def test_another_mask_of_a_lookup_is_not_proved(
    programs, changed: Callable[[str], str]
):
    text = changed(programs.partitioned)
    assert text != programs.partitioned
    assert verdict_of(programs, text).outcome != "proved"

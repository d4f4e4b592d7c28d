"""Masks of lookups in a table that is cut, and updates of one, changed so that the numbers
are wrong for some indices.
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
    programs,
    changed: Callable[[str], str],
):
    text = changed(programs.partitioned)
    assert text != programs.partitioned
    assert verdict_of(programs, text).outcome != "proved"


def rows_at_sums(table, parts):
    return jnp.take(table, jnp.sum(parts, 0), axis=0, mode="clip")


def test_a_mask_of_unfinished_indices_is_not_proved():
    mesh = sfx.MeshSpec({"a": 2, "b": 2}).abstract()
    rows = NamedSharding(mesh, P("b"))
    table = jax.ShapeDtypeStruct((12, 4), jnp.float32, sharding=rows)
    halves = NamedSharding(mesh, P("a"))
    parts = jax.ShapeDtypeStruct((2, 12), jnp.int32, sharding=halves)
    programs = proved_programs(rows_at_sums, (table, parts))
    text = programs.partitioned
    match = CLAMP.search(text)
    summed = re.search(r"s32\[12\]\S* all-reduce\((?P<part>%[\w.]+)\)", text)
    assert match is not None and summed is not None
    kind = match["kind"]
    inserted = (
        f"  %unfinished = {kind} reshape({summed['part']})\n"
        f"  %masked = {match[0].partition(' = ')[2]}\n"
    ).replace(match["raw"], "%unfinished")
    line = text.rindex("\n", 0, match.start()) + 1
    changed = compared(text[:line] + inserted + text[line:], "%masked", "(?:LT|GT)")
    assert changed.count("%masked") == 3
    assert verdict_of(programs, changed).outcome != "proved"


def with_clamp(text: str, instruction: str, kind: str, bound: int) -> str:
    """The index in the first line that matches `instruction` is clamped to `bound`."""
    match = re.search(instruction, text)
    assert match is not None
    index = match["index"]
    inserted = (
        f"  %zero = s32[] constant(0)\n  %bound = s32[] constant({bound})\n"
        f"  %zeros = {kind} broadcast(%zero), dimensions={{}}\n"
        f"  %bounds = {kind} broadcast(%bound), dimensions={{}}\n"
        f"  %small = {kind} clamp(%zeros, {index}, %bounds)\n"
    )
    changed = re.sub(rf"{re.escape(index)}\b", "%small", match[0])
    return text[: match.start()] + inserted + changed + text[match.end() :]


def added(table, indices):
    return table.at[indices].add(1.0)


def one_row(table, indices):
    start = jnp.clip(indices[0], 0, 11)
    return jax.lax.dynamic_update_slice(table, jnp.ones((1, 4)), (start, 0))


def columns(table, indices):
    return jnp.take(table, indices, axis=0, mode="clip")


def arguments(spec: P) -> tuple[jax.ShapeDtypeStruct, ...]:
    mesh = sfx.MeshSpec({"b": 2}).abstract()
    return (
        jax.ShapeDtypeStruct((12, 4), jnp.float32, sharding=NamedSharding(mesh, spec)),
        jax.ShapeDtypeStruct((6,), jnp.int32, sharding=NamedSharding(mesh, P())),
    )


@pytest.mark.parametrize("bound", [8, 11])
def test_a_clamped_scatter_is_not_proved(bound):
    programs = proved_programs(added, arguments(P("b")))
    shift = r"  %\S+ = s32\S+ subtract\((?P<index>%[\w.]+), "
    text = with_clamp(programs.partitioned, shift, "s32[6,1]{1,0}", bound)
    assert verdict_of(programs, text).outcome != "proved"


def test_an_update_at_another_clamped_index_is_not_proved():
    programs = proved_programs(one_row, arguments(P("b")))
    text = programs.partitioned
    match = re.search(r"subtract\((%\S+), (%multiply\S*)\)", text)
    assert match is not None
    index = match[1]
    line = text.rindex("\n", 0, text.index(f"({index}, ")) + 1
    inserted = (
        "  %zero = s32[] constant(0)\n  %eight = s32[] constant(8)\n"
        f"  %small = s32[] clamp(%zero, {index}, %eight)\n"
    )
    rest = text[line:]
    for changed in (("compare",), ("subtract",), ("compare", "subtract")):
        other = rest
        for opcode in changed:
            other = other.replace(f"{opcode}({index}, ", f"{opcode}(%small, ")
        assert other != rest
        outcome = verdict_of(programs, text[:line] + inserted + other).outcome
        assert outcome != "proved", changed


@pytest.mark.parametrize("bound, outcome", [(11, "proved"), (8, "not judged")])
def test_a_lookup_of_whole_columns_is_clamped_as_before(bound, outcome):
    programs = proved_programs(columns, arguments(P(None, "b")))
    lookup = r"  (?:ROOT )?%\S+ = f32\[6,2\]\S* gather\(%\S+, (?P<index>%[\w.]+)\)"
    text = with_clamp(programs.partitioned, lookup, "s32[6,1]{1,0}", bound)
    assert verdict_of(programs, text).outcome == outcome


def rows_of_largest(parts, indices):
    return jnp.take(jnp.max(parts, 0), indices, axis=0, mode="clip")


def test_rows_of_parts_of_a_maximum_are_not_summed():
    mesh = sfx.MeshSpec({"a": 2, "b": 2}).abstract()
    cut = NamedSharding(mesh, P("a", "b"))
    parts = jax.ShapeDtypeStruct((4, 12, 4), jnp.float32, sharding=cut)
    whole = NamedSharding(mesh, P())
    indices = jax.ShapeDtypeStruct((6,), jnp.int32, sharding=whole)
    programs = proved_programs(rows_of_largest, (parts, indices))
    text = programs.partitioned
    summed = re.search(r"(?P<whole>%\S+) = \S+ all-reduce\((?P<part>%[\w.]+)\)", text)
    assert summed is not None
    text = text.replace(f"gather({summed['whole']}, ", f"gather({summed['part']}, ")
    last = text.rindex("all-reduce(")
    groups = r"replica_groups=.*?, use_global"
    everyone = "replica_groups={{0,1,2,3}}, use_global"
    changed = text[:last] + re.sub(groups, everyone, text[last:], count=1)
    assert changed != programs.partitioned
    assert verdict_of(programs, changed).outcome != "proved"

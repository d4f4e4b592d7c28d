"""A value has elements of its twin, such as `-x[1:]` of `-x`: the partitioner computes
from pieces of `x`, which may be pieces of the operand of either.
"""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from judging import programs_of, verdict_of

import shardfx as sfx


MESH = sfx.MeshSpec({"data": 2, "fsdp": 2, "tensor": 2}).abstract()


def summed(x):
    return jnp.sum(jnp.sin(-x)) + jnp.sum(jnp.cos(-x[1:]))


def halves(x):
    return (-x)[:8] * (-x[8:])


def behind_a_function(x):
    return jnp.sin(-x[:8]) * 2, -x


def of_numbers(x):
    return jnp.sin(2 * x[1:] - 1), 2 * x - 1


def rotated(x):
    return jnp.concatenate([-x[8:], x[:8]]) * (-x)


STEPS = [summed, halves, behind_a_function, of_numbers, rotated]


def programs_over(step, rows=("data",)):
    sharding = NamedSharding(MESH, P(rows))
    x = jax.ShapeDtypeStruct((16, 8), jnp.float32, sharding=sharding)
    return programs_of(step, (x,))


@pytest.mark.parametrize("rows", [("data",), ("data", "tensor")])
@pytest.mark.parametrize("step", STEPS)
def test_an_operation_on_a_slice_is_proved_beside_that_on_all(step, rows):
    verdict = verdict_of(programs_over(step, rows))
    assert verdict.outcome == "proved", verdict


BOUNDS = re.compile(r"slice=\{\[(\d+):(\d+)\]")
PADDING = re.compile(r"padding=(\d+)_(\d+)")
PAIR = re.compile(r"\{(\d+),(\d+)\}")


def shifted(bounds: re.Match[str]) -> str:
    start = int(bounds[1])
    stop = int(bounds[2])
    shift = -1 if start else 1
    return f"slice={{[{start + shift}:{stop + shift}]"


def turned(line: str) -> str:
    """A permute that sends the other way."""
    before, pairs, behind = line.partition("source_target_pairs={")
    inside, end, rest = behind.partition("}}")
    return before + pairs + PAIR.sub(r"{\2,\1}", inside + "}") + end[1:] + rest


def changed(line: str) -> str:
    """The line with other elements, or with another function of them."""
    if " slice(" in line:
        return BOUNDS.sub(shifted, line)
    if " negate(" in line:
        return line.replace(" negate(", " sine(")
    if " pad(" in line:
        return PADDING.sub(r"padding=\2_\1", line)
    if " collective-permute(" in line:
        return turned(line)
    return line


@pytest.mark.parametrize("step", STEPS)
def test_other_elements_of_a_twin_are_not_proved(step):
    programs = programs_over(step)
    text = programs.partitioned
    count = 0
    for line in text.splitlines():
        other = changed(line)
        if other == line:
            continue
        count += 1
        mutated = programs._replace(partitioned=text.replace(line, other))
        assert verdict_of(mutated).outcome != "proved", other
    assert count

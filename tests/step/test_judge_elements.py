"""Which elements of a value a slice, a pad or a concatenation has: every other slice of
the partitioned program is found out.
"""

import functools as ft

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from judging import proved_programs, verdict_of

import shardfx as sfx
from shardfx._step.judge import matching


MESH = sfx.MeshSpec({"data": 2, "fsdp": 2, "tensor": 2}).abstract()
ROWS = NamedSharding(MESH, P("data"))
X = jax.ShapeDtypeStruct((16, 8), jnp.float32, sharding=ROWS)


def computed(x, z):
    return jnp.sin(x[:, 3:4]) * z


def dropped_and_repeated(x, z):
    return x[:, 3][:, None] * z


def summed(x, z):
    return x[:, 3:4].sum(1)


def joined(x, z):
    return jnp.concatenate([x[:, 3:4], z], 1)


def of_a_slice(x, z):
    return jnp.sin(x[:, 1:7][:, 2:3])


def of_a_slice_dropped(x, z):
    return jnp.sin(x[:, 1:7][:, 2])


def of_a_reversed_array(x, z):
    return jnp.sin(x[:, ::-1][:, 3])


def of_two(x, z):
    return jnp.sin(x[:, 3:5]) * z[:, :2]


def of_two_arrays(x, z):
    return jnp.sin(jnp.concatenate([x, z], 1)[:, 3])


# What becomes of column 3, and of columns 3 and 4.
USES = {
    "returned": lambda x, z: x[:, 3:4],
    "computed": computed,
    "dropped": lambda x, z: jnp.sin(x[:, 3]),
    "dropped and returned": lambda x, z: x[:, 3],
    "dropped and repeated": dropped_and_repeated,
    "summed": summed,
    "transposed": lambda x, z: x[:, 3:4].T @ z,
    "joined": joined,
    "of a slice": of_a_slice,
    "of a slice, dropped": of_a_slice_dropped,
    "of a reversed array": of_a_reversed_array,
    "of two": of_two,
    "of two arrays": of_two_arrays,
}


@pytest.mark.parametrize("name", USES)
def test_another_slice_is_not_proved(name):
    programs = proved_programs(USES[name], (X, X))
    text = programs.partitioned
    slices = [line for line in text.splitlines() if " slice(" in line]
    assert slices
    for line in slices:
        before, _, after = line.partition("slice={")
        bounds, _, behind = after.partition("}")
        rows, columns = bounds.strip("[]").split("], [")
        parts = columns.split(":")[:2]
        start, stop = (int(number) for number in parts)
        for other in range(9 - (stop - start)):
            if other == start:
                continue
            columns = f"[{other}:{other + stop - start}]"
            changed = f"{before}slice={{[{rows}], {columns}}}{behind}"
            mutated = text.replace(line, changed)
            assert verdict_of(programs, mutated).outcome != "proved", changed


def test_a_repeated_array_is_no_concatenation():
    def step(x, column):
        repeated = jnp.broadcast_to(column, (16, 4))
        return jnp.sin(jnp.concatenate([repeated, x], 1))

    x = jax.ShapeDtypeStruct((16, 4), jnp.float32, sharding=ROWS)
    column = jax.ShapeDtypeStruct((16, 1), jnp.float32, sharding=ROWS)
    programs = proved_programs(step, (x, column))
    lines = programs.partitioned.splitlines()
    (line,) = [line for line in lines if " concatenate(" in line]
    repeated = line.split("concatenate(")[1].split(",")[0]
    both = line.split("concatenate(")[1].split(")")[0]
    changed = line.replace(f"({both})", f"({repeated}, {repeated})")
    text = programs.partitioned.replace(line, changed)
    assert verdict_of(programs, text).outcome != "proved"


def test_other_padding_of_a_slice_is_not_proved():
    def step(x, z):
        operands = [(0, 0, 0), (0, 1, 1)]
        even = jax.lax.pad(x[:, ::2], 0.0, operands)
        operands = [(0, 0, 0), (1, 0, 1)]
        odd = jax.lax.pad(x[:, 1::2], 0.0, operands)
        weighted = (even + 2 * odd) @ z
        return jnp.sin(weighted)

    z = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(MESH, P()))
    programs = proved_programs(step, (X, z))
    text = programs.partitioned
    for before, after in (("0_1_1", "1_0_1"), ("1_0_1", "0_1_1"), ("0_1_1", "0_4_0")):
        changed = text.replace(f"padding=0_0_0x{before}", f"padding=0_0_0x{after}")
        assert changed != text
        assert verdict_of(programs, changed).outcome != "proved"


def test_a_triangle_is_no_other_triangle():
    def step(x):
        lower = jax.scipy.linalg.solve_triangular(x, x, lower=True)
        upper = jax.scipy.linalg.solve_triangular(x, x, lower=False)
        return lower, upper

    x = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(MESH, P()))
    programs = proved_programs(step, (x,))
    text = programs.partitioned
    lines = text.splitlines()
    (line,) = [line for line in lines if "ROOT %tuple" in line and "tuple(" in line]
    before, _, behind = line.partition("tuple(")
    first, second = behind.split(")")[0].split(", ")
    changed = line.replace(f"({first}, {second})", f"({second}, {first})")
    assert changed != line
    mutated = text.replace(line, changed)
    assert verdict_of(programs, mutated).outcome != "proved"


def test_equal_layers_are_matched_in_linear_time(monkeypatch):
    # Each layer has operations of the same names; none is compared with all others.
    def rotated(layers, x):
        def loss(x):
            for _ in range(layers):
                turned = jnp.concatenate([-x[:, 4:], x[:, :4]], 1)
                x = jnp.tanh(2 * x + 3 * turned)
            return jnp.sum(x)

        return jax.grad(loss)(x)

    calls = []
    original = matching.expressed

    def counted(*arguments):
        calls.append(None)
        return original(*arguments)

    monkeypatch.setattr(matching, "expressed", counted)
    counts = []
    for layers in (8, 16):
        calls.clear()
        verdict = sfx.testing.verify(ft.partial(rotated, layers), X)
        assert verdict.outcome == "proved"
        counts.append(len(calls))
    assert 0 < counts[1] < 2.5 * counts[0]

"""Where each axis of each array of a step comes from, against taking shardings away and looking again."""

import random

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P

from shardfx.cost import shardings


MESH = AbstractMesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
SIZES = (8, 16)


def struct(shape, spec=P(), dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(MESH, spec))


def random_spec(draw, rank):
    axes = draw.sample(["a", "b"], draw.randint(0, 2))
    dims = [None] * rank
    for axis in axes:
        dims[draw.randrange(rank)] = axis
    return P(*dims)


def a_program(seed):
    """A random step of products and the like; `cuts` says how its arguments and its two constrained arrays lie."""
    draw = random.Random(seed)
    cuts = {name: random_spec(draw, 2) for name in ("x0", "x1", "x2", "c0", "c1")}
    for name in ("c0", "c1"):
        if draw.random() < 0.5:
            cuts[name] = P()
    choices = [draw.randrange(6) for _ in range(8)]
    order = [draw.randrange(10**6) for _ in range(16)]

    def step(cuts):
        def run(x0, x1, x2):
            arrays, picks = [x0, x1, x2], iter(order)
            for at, choice in enumerate(choices):
                x, y = (arrays[next(picks) % len(arrays)] for _ in range(2))
                if choice < 2:
                    y = y if x.shape[1] == y.shape[0] else (y.T if x.shape[1] == y.shape[1] else x.T)
                    made = x @ y
                elif choice == 2:
                    made = jnp.tanh(x)
                elif choice == 3:
                    made = x.T
                elif choice == 4:
                    made = x - jnp.max(x, axis=1, keepdims=True)
                else:
                    made = x + y if x.shape == y.shape else x * 2
                if at == 3 and any(cuts["c0"]):
                    made = jax.lax.with_sharding_constraint(made, NamedSharding(MESH, cuts["c0"]))  # c0
                if at == 6 and any(cuts["c1"]):
                    made = jax.lax.with_sharding_constraint(made, NamedSharding(MESH, cuts["c1"]))  # c1
                arrays.append(made)
            return arrays[3:]

        return run

    shapes = [(draw.choice(SIZES), draw.choice(SIZES)) for _ in range(3)]
    return step, shapes, cuts


def laid(step, shapes, cuts):
    """The rows in the order of the program, by what they are made by."""
    args = [struct(shape, cuts[f"x{at}"]) for at, shape in enumerate(shapes)]
    return sorted(shardings(step(cuts), *args, compiler="cpu").rows, key=lambda row: row.number)


def named(by, lines):
    return by if by in ("x0", "x1", "x2") else lines[by.removeprefix("the constraint at ").split()[0]]


@pytest.mark.parametrize("seed", range(12))
def test_an_axis_is_there_as_long_as_its_origin_is(seed):
    check(seed)


def check(seed):
    step, shapes, cuts = a_program(seed)
    with open(__file__) as file:
        marked = {text.rstrip()[-2:]: f"test_shardings.py:{at + 1}" for at, text in enumerate(file) if "  # c" in text}
    lines = {line: name for name, line in marked.items()}
    rows = laid(step, shapes, cuts)
    origins = {named(one.by, lines) for row in rows for one in row.origins}
    found = 0
    for origin in sorted(origins):
        alone = laid(step, shapes, {name: spec if name == origin else P() for name, spec in cuts.items()})
        for row, again in zip(rows, alone, strict=True):
            assert (row.operation, row.shape) == (again.operation, again.shape)
            for one in row.origins:
                if named(one.by, lines) == origin:
                    found += 1
                    assert any(one.axis in (entry or ()) for entry in again.spec), (seed, row, again)
    return found

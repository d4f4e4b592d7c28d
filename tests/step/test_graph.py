"""A lowered step as operations: how often each runs, what it computes, and which
dimensions belong together.
"""

import jax
import jax.numpy as jnp
import pytest
from jax import P

from shardfx._step import program_of
from shardfx._step.lowered import lines_of, name_stacks


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


def program(step, *args, platform="tpu"):
    lowered = (
        jax.jit(step, keep_unused=True)
        .trace(*args)
        .lower(lowering_platforms=(platform,))
    )
    module = lowered.compiler_ir("stablehlo")
    assert module is not None
    return program_of(module)


def named(made, name):
    return [one for one in made.operations if one.name == name]


def groups(made, one):
    """The sizes of the factors of each dimension of the operands and results."""
    sizes = [
        [tuple(one.factors.sizes[f] for f in dim) for dim in dims]
        for dims in (*one.factors.ins, *one.factors.outs)
    ]
    assert len(sizes) == len(one.ins) + len(one.outs)
    return sizes


def test_products_and_reshapes_have_factors():
    (one,) = named(program(lambda x, w: x @ w, f32(8, 16), f32(16, 32)), "dot_general")
    (rows, summed), (also, columns) = one.factors.ins
    assert summed == also and one.factors.outs == ((rows, columns),)
    assert (
        one.factors.reduction == {summed[0]}
        and one.flops == 2 * 8 * 16 * 32
        and one.times == 1
    )
    made = program(lambda x: x.reshape(4, 3, 6, 16), f32(4, 288))
    (one,) = named(made, "reshape")
    assert groups(made, one) == [[(4,), (3, 6, 16)], [(4,), (3,), (6,), (16,)]]


def test_a_scan_runs_as_often_as_it_is_long():
    def step(w, x):
        return jax.lax.scan(lambda x, one: (jnp.tanh(x @ one), x), x, w)

    made = program(step, f32(7, 16, 16), f32(8, 16))
    assert {one.times for one in named(made, "dot_general")} == {7.0}
    (taken,) = named(made, "dynamic_slice")
    assert taken.ins[0] == made.arguments[0], (
        "what the loop does not change is one value inside and outside"
    )
    assert [dim for dim, _ in taken.counted] == [0]
    (stacked,) = named(made, "dynamic_update_slice")
    assert [dim for dim, _ in stacked.counted] == [0] and stacked.counted[0][
        1
    ] == taken.counted[0][1]
    assert {made.values[one.outs[0]].shape for one in named(made, "return")} == {
        (),
        (8, 16),
        (7, 8, 16),
    }
    assert not made.notes


def _nested(x):
    return jax.lax.fori_loop(
        2, 10, lambda i, y: jax.lax.fori_loop(0, 3, lambda j, z: jnp.sin(z), y) + i, x
    )


def _closing(x):
    closer = lambda state: (state[0] + 1, state[1] - 1, jnp.sin(state[2]))
    return jax.lax.while_loop(lambda state: state[0] < state[1], closer, (0, 10, x))[2]


@pytest.mark.parametrize(
    ("step", "args", "times"),
    [
        (_nested, (), 24.0),
        (
            lambda x, n: jax.lax.fori_loop(0, n, lambda _, y: jnp.sin(y), x),
            (jnp.int32(3),),
            None,
        ),
        (_closing, (), None),
    ],
)
def test_loops_count_as_often_as_they_run_if_known(step, args, times):
    made = program(step, f32(8), *args)
    assert {one.times for one in named(made, "sine")} == {times or 1.0}
    notes = (
        [] if times else ["the trips of a loop are not in the program: it counts once"]
    )
    assert [*made.notes] == notes


def test_branches_count_for_their_share():
    def step(x, at):
        return jax.lax.switch(at, [jnp.sin, jnp.cos, lambda x: x], x)

    made = program(step, f32(8), jnp.int32(0))
    assert [one.times for one in named(made, "sine")] == [pytest.approx(1 / 3)]
    assert len([one for one in named(made, "carry") if one.outs == made.results]) == 3


def test_what_nothing_reads_is_left_out_in_loops_too():
    def step(w, x):
        def body(carry, one):
            x, dead = carry
            return (jnp.tanh(x @ one), jnp.cos(dead @ one)), None

        (x, _), _ = jax.lax.scan(body, (x, x), w)
        return x, None

    made = program(step, f32(7, 16, 16), f32(8, 16))
    assert len(named(made, "dot_general")) == 1 and not named(made, "cosine")


def test_constants_and_masks_are_free():
    def step(x):
        mask = jnp.arange(64)[:, None] >= jnp.arange(64)
        return jnp.where(mask, x * 2, -jnp.inf)

    made = program(step, f32(64, 64))
    assert not [
        one
        for one in made.operations
        if all(made.values[value].free for value in one.ins)
    ]
    assert not made.values[made.results[0]].free


def negated_mean(x, w):
    return -jnp.mean(x @ w)


def clipped(x, w):
    y = x @ w
    return x * jnp.minimum(1.0, 1.0 / (jnp.sqrt(jnp.sum(y * y)) + 1e-6))


def scaled_in_a_loop(x, w):
    scale = jnp.exp(jnp.full(8, -jnp.mean(x @ w)))
    return jax.lax.scan(lambda c, s: (c * s, None), x, scale)[0]


@pytest.mark.parametrize("step", [negated_mean, clipped, scaled_in_a_loop])
def test_the_operations_before_a_computed_scalar_are_listed(step):
    """A scalar is free beside constants, but it is no constant."""
    made = program(step, f32(8, 16), f32(16, 32))
    assert len(named(made, "dot_general")) == 1
    assert len(named(made, "reduce")) == 1


def test_experts_in_groups_for_tpus():
    def step(rows, w, counts):
        return jax.value_and_grad(
            lambda w: jnp.sum(jax.lax.ragged_dot(rows, w, counts) ** 2)
        )(w)

    made = program(
        step, f32(64, 16), f32(8, 16, 32), jax.ShapeDtypeStruct((8,), "int32")
    )
    forward, backward = named(made, "ragged_dot")
    assert groups(made, forward) == [
        [(64,), (16,)],
        [(8,), (16,), (32,)],
        [(8,)],
        [(64,), (32,)],
    ]
    assert groups(made, backward) == [
        [(64,), (16,)],
        [(64,), (32,)],
        [(8,)],
        [(8,), (16,), (32,)],
    ]
    assert forward.flops == backward.flops == 2 * 64 * 16 * 32
    assert {forward.factors.sizes[f] for f in forward.factors.reduction} == {8, 16}
    assert {backward.factors.sizes[f] for f in backward.factors.reduction} == {64}


def test_a_convolution_counts_its_window():
    def step(x, k):
        return jax.lax.conv_general_dilated(x, k, (1, 1), "SAME")

    (one,) = named(program(step, f32(2, 4, 8, 8), f32(16, 4, 3, 3)), "convolution")
    assert one.flops == 2 * (2 * 16 * 8 * 8) * (4 * 3 * 3)


def test_a_shard_map_is_noted_and_its_work_is_that_of_all_shards():
    mesh = jax.sharding.AbstractMesh(
        (4,), ("a",), axis_types=(jax.sharding.AxisType.Auto,)
    )

    def step(x, w):
        return jax.shard_map(
            lambda x, w: x @ w, mesh=mesh, in_specs=(P("a"), P()), out_specs=P("a")
        )(x, w)

    made = program(step, f32(8, 16), f32(16, 32))
    (one,) = named(made, "dot_general")
    assert (
        one.flops * one.times == 2 * 8 * 16 * 32 and "`shard_map`" in [*made.notes][0]
    )


def test_lines_are_those_of_the_program():
    (one,) = named(program(lambda x: jax.jit(jnp.sin)(x), f32(8)), "sine")
    assert any(line.file.endswith("test_graph.py") for line in lines_of(one.location))
    stacks = name_stacks(one.location)
    assert stacks[0].endswith("sin") and any("jit" in stack for stack in stacks)

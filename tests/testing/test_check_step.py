"""Steps under their plans beside the same steps on one device: planted mistakes, and
right steps.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from shardfx.testing import check_step
from tests.testing.placed import cut, some
from tests.testing.planted import PLANTED, in_bfloat16, mesh_of


@pytest.fixture(scope="module")
def mesh():
    return mesh_of(jax.devices())


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_mistake_is_found_on_its_line(name, mesh):
    case = PLANTED[name]
    args = case.arrays(mesh)
    if [*PLANTED].index(name) % 4 == 0:
        args = list(map(in_bfloat16, args))
    right = check_step(lambda mesh: case.make(mesh, False), *args, mesh=mesh)
    assert right, str(right)
    wrong = check_step(
        lambda mesh: case.make(mesh, True), *case.arrays(mesh), mesh=mesh
    )
    assert not wrong
    lines = {frame.line for frame in wrong.lines}
    assert case.lines & lines, str(wrong)


def capacity(x, router):
    """A mixture of experts with a capacity: counts choose where a token goes."""
    weights = jax.nn.softmax(x @ router)
    choice = jax.nn.one_hot(lax.top_k(weights, 2)[1], router.shape[1])
    places = (
        jnp.cumsum(choice.reshape(-1, router.shape[1]), 0).reshape(choice.shape)
        * choice
        - choice
    )
    return jnp.einsum(
        "nke,nkec,nd->ecd",
        choice * (places < 6),
        jax.nn.one_hot(places.astype(jnp.int32), 6),
        x,
    )


def converged(a, _):
    def turn(carry):
        i, v, _ = carry
        y = a @ (a.T @ v)
        return (
            i + 1,
            y / jnp.linalg.norm(y),
            jnp.max(jnp.abs(y / jnp.linalg.norm(y) - v)),
        )

    start = 0, jnp.ones(len(a)) / len(a) ** 0.5, jnp.float32(1)
    return lax.while_loop(
        lambda carry: (carry[0] < 99) & (carry[2] > 1e-4), turn, start
    )[1]


def called_back(x, w):
    sines = jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
    return sines @ w


def quantised(x, w):
    return jnp.round(x @ w / jnp.max(jnp.abs(x @ w)) * 127).astype(jnp.int8)


def nearly_singular(x, w):
    return jnp.linalg.inv(w.T @ w + 1e-4 * jnp.eye(w.shape[1]))


def chaos(x, w):
    return lax.scan(
        lambda x, _: (3.99 * x * (1 - x), None), jax.nn.sigmoid(x @ w), None, length=40
    )[0]


def float16(x, w):
    return jax.grad(
        lambda w: jnp.sum((x.astype(w.dtype) @ w) ** 2).astype(jnp.float32)
    )(w.astype(jnp.float16))


def transform(x, w):
    return (
        jnp.abs(jnp.fft.fft(x, axis=-1)),
        jnp.sort(x, -1),
        jnp.argsort(x, -1),
    )


def switched(x, w):
    return lax.cond(
        x.mean() > 5, jnp.sin, jnp.cos, lax.switch(2, [jnp.abs, jnp.exp, jnp.sinh], x)
    )


def keys(x, w):
    return (
        jax.random.split(jax.random.key(1)),
        x * jax.random.bernoulli(jax.random.key(0), 0.5, x.shape),
    )


def sampled(x, w):
    return jax.random.categorical(jax.random.key(0, impl="rbg"), x @ w, -1)


def tied(x, w):
    return jnp.argmax(jnp.stack([x @ x.T, (x * 1.0) @ x.T + 1e-9]), 0)


RIGHT = {
    "capacity": capacity,
    "converged": converged,
    "called_back": called_back,
    "quantised": quantised,
    "nearly_singular": nearly_singular,
    "chaos": chaos,
    "float16": float16,
    "transform": transform,
    "switched": switched,
    "keys": keys,
    "sampled": sampled,
    "tied": tied,
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_step_under_a_plan_is_not_accused(name, mesh):
    check = check_step(
        RIGHT[name], cut(some(16, 8), "d", "t", mesh=mesh), np.asarray(some(8, 8))
    )
    assert check, str(check)
    assert all(output.allowed < 0.1 for output in check.outputs) or name in (
        "chaos",
        "nearly_singular",
        "tied",
    ), str(check)


def test_random_numbers_that_depend_on_the_layout_are_said(mesh):
    def dropped(key, x):
        with jax.threefry_partitionable(False):
            return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0)

    check = check_step(
        dropped, jax.random.key(0), cut(some(16, 16), "d", "t", mesh=mesh)
    )
    assert not check
    assert "`random_bits` at test_check_step.py:" in str(check)
    assert "random numbers here hang on the layout" in str(check)


def test_a_raw_key_that_is_split_is_a_key_in_the_reference(mesh):
    def dropped(raw_key, x):
        first, second = jax.random.split(raw_key)
        steps = jax.random.randint(first, x.shape, 0, 1000).astype(x.dtype)
        return jnp.where(jax.random.bernoulli(second, 0.5, x.shape), x * steps, 0)

    x = cut(some(16, 16), "d", "t", mesh=mesh)
    checked = check_step(jax.jit(dropped), jax.random.PRNGKey(0), x)
    assert checked, checked


def test_a_step_under_a_mesh_of_explicit_axes_that_is_set():
    mesh = jax.make_mesh((2, 4), ("d", "t"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        args = cut(some(16, 8), "d", mesh=mesh), cut(some(8, 8), "d", "t", mesh=mesh)
        assert check_step(
            lambda x, w: jnp.tanh(x @ jax.sharding.reshard(w, P(None, "t"))), *args
        )


def test_a_step_that_reads_its_explicit_mesh():
    mesh = jax.make_mesh((2, 4), ("d", "t"))

    def step(x, w):
        columns = NamedSharding(jax.typeof(x).sharding.mesh, P(None, "t"))
        return jnp.tanh(x @ jax.sharding.reshard(w, columns))

    args = cut(some(4, 6), "d", mesh=mesh), cut(some(6, 8), None, "d", mesh=mesh)
    # Arrays of one device have no such mesh in their types.
    with pytest.raises(ValueError, match="not found in mesh"):
        jax.eval_shape(step, *[jnp.asarray(np.asarray(x)) for x in args])
    checked = check_step(step, *args)
    assert checked, str(checked)


def test_a_mistake_that_bfloat16_hides_is_found_in_float32(mesh):
    @jax.jit
    def nearly(
        x,
    ):  # a constraint says nothing of numbers; the shard_map adds a thousandth
        perturbed = lambda x: (
            x * (1 + jnp.where(lax.axis_index("t") == 0, 0.0, 0.001).astype(x.dtype))
        )
        return jax.shard_map(
            perturbed, mesh=mesh, in_specs=P("d", "t"), out_specs=P("d", "t")
        )(x)

    array = jnp.ones((8, 8), jnp.bfloat16)
    x = jax.device_put(array, NamedSharding(mesh, P("d", "t")))
    check = check_step(nearly, x, reference=lambda x: x)
    assert not check
    expected = pytest.approx(0.001, rel=0.1)
    assert check.outputs[0].difference == expected


def test_the_story_says_what_differs_where_and_how_it_lies(mesh):
    case = PLANTED["sum_left_out_in_a_loop"]
    check = check_step(
        lambda mesh: case.make(mesh, True), *case.arrays(mesh), mesh=mesh
    )
    text = str(check)
    assert text.startswith(
        "the plan changes 1 of 1 output:\noutput  difference  rounding  at\n"
    )
    assert "the first equation that differs: `add` at planted.py:" in text
    assert "in turn 0 of its loop" in text
    assert "f32[4,6] on each device of d, t, which waits for the sum over t" in text
    assert "`sin` at planted.py:" in text
    assert "is a psum missing?" in text
    case = PLANTED["sum_left_out"]
    check = check_step(
        lambda mesh: case.make(mesh, True), *case.arrays(mesh), mesh=mesh
    )
    assert (
        "it waits for the sum over t, and leaves its shard_map as if it were whole"
        in str(check)
    )


def test_a_right_step_says_so_and_its_arguments_stay(mesh):
    values = jnp.arange(64.0).reshape(8, 8)
    x = jax.device_put(values, NamedSharding(mesh, P("d", "t")))
    step = jax.jit(lambda x: {"y": jnp.tanh(x) @ x, "sum": x.sum()}, donate_argnums=0)
    check = check_step(step, x)
    assert check
    assert not x.is_deleted()
    assert str(check) == "the plan changes none of 2 outputs by more than rounding does"
    assert [output.path for output in check.outputs] == ["sum", "y"]

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


def checked_case(case, args, wrong, mesh):
    """The check of a planted body, with its mistake or without it."""

    def make(mesh):
        return case.make(mesh, wrong)

    return check_step(make, *args, mesh=mesh)


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_mistake_is_found_on_its_line(name, mesh):
    case = PLANTED[name]
    args = case.arrays(mesh)
    if [*PLANTED].index(name) % 4 == 0:
        args = list(map(in_bfloat16, args))
    right = checked_case(case, args, wrong=False, mesh=mesh)
    assert right, str(right)
    wrong = checked_case(case, case.arrays(mesh), wrong=True, mesh=mesh)
    assert not wrong
    lines = {frame.line for frame in wrong.lines}
    assert case.lines & lines, str(wrong)


def capacity(x, router):
    """A mixture of experts with a capacity: counts choose where a token goes."""
    experts = router.shape[1]
    weights = jax.nn.softmax(x @ router)
    _, expert_numbers = lax.top_k(weights, 2)
    choice = jax.nn.one_hot(expert_numbers, experts)
    counts = jnp.cumsum(choice.reshape(-1, experts), 0)
    places = counts.reshape(choice.shape) * choice - choice
    has_room = places < 6
    slots = jax.nn.one_hot(places.astype(jnp.int32), 6)
    return jnp.einsum("nke,nkec,nd->ecd", choice * has_room, slots, x)


def converged(a, _):
    def goes_on(carry):
        i, _, distance = carry
        return (i < 99) & (distance > 1e-4)

    def turn(carry):
        i, v, _ = carry
        y = a @ (a.T @ v)
        direction = y / jnp.linalg.norm(y)
        distances = jnp.abs(direction - v)
        return i + 1, direction, jnp.max(distances)

    size = len(a)
    first_direction = jnp.ones(size) / size**0.5
    start = (0, first_direction, jnp.float32(1))
    _, direction, _ = lax.while_loop(goes_on, turn, start)
    return direction


def called_back(x, w):
    struct = jax.ShapeDtypeStruct(x.shape, x.dtype)
    sines = jax.pure_callback(np.sin, struct, x)
    return sines @ w


def quantised(x, w):
    product = x @ w
    largest = jnp.max(jnp.abs(product))
    scaled = product / largest * 127
    return jnp.round(scaled).astype(jnp.int8)


def nearly_singular(x, w):
    identity = jnp.eye(w.shape[1])
    return jnp.linalg.inv(w.T @ w + 1e-4 * identity)


def chaos(x, w):
    def turn(x, _):
        return 3.99 * x * (1 - x), None

    start = jax.nn.sigmoid(x @ w)
    result, _ = lax.scan(turn, start, None, length=40)
    return result


def float16(x, w):
    def loss(w):
        product = x.astype(w.dtype) @ w
        return jnp.sum(product**2).astype(jnp.float32)

    return jax.grad(loss)(w.astype(jnp.float16))


def transform(x, w):
    spectrum = jnp.fft.fft(x, axis=-1)
    return jnp.abs(spectrum), jnp.sort(x, -1), jnp.argsort(x, -1)


def switched(x, w):
    y = lax.switch(2, [jnp.abs, jnp.exp, jnp.sinh], x)
    return lax.cond(x.mean() > 5, jnp.sin, jnp.cos, y)


def keys(x, w):
    key = jax.random.key(0)
    mask = jax.random.bernoulli(key, 0.5, x.shape)
    other_key = jax.random.key(1)
    return jax.random.split(other_key), x * mask


def sampled(x, w):
    key = jax.random.key(0, impl="rbg")
    return jax.random.categorical(key, x @ w, -1)


def tied(x, w):
    product = x @ x.T
    nearly_equal = (x * 1.0) @ x.T + 1e-9
    pair = jnp.stack([product, nearly_equal])
    return jnp.argmax(pair, 0)


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


ILL_CONDITIONED = ("chaos", "nearly_singular", "tied")


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_step_under_a_plan_is_not_accused(name, mesh):
    x = cut(some(16, 8), "d", "t", mesh=mesh)
    w = np.asarray(some(8, 8))
    check = check_step(RIGHT[name], x, w)
    assert check, str(check)
    if name not in ILL_CONDITIONED:
        for output in check.outputs:
            assert output.allowed < 0.1, str(check)


def test_random_numbers_that_depend_on_the_layout_are_said(mesh):
    def dropped(key, x):
        with jax.threefry_partitionable(False):
            mask = jax.random.bernoulli(key, 0.5, x.shape)
            return jnp.where(mask, x, 0)

    x = cut(some(16, 16), "d", "t", mesh=mesh)
    check = check_step(dropped, jax.random.key(0), x)
    assert not check
    assert "`random_bits` at test_check_step.py:" in str(check)
    assert "random numbers here hang on the layout" in str(check)


def test_a_raw_key_that_is_split_is_a_key_in_the_reference(mesh):
    def dropped(raw_key, x):
        first, second = jax.random.split(raw_key)
        steps = jax.random.randint(first, x.shape, 0, 1000).astype(x.dtype)
        mask = jax.random.bernoulli(second, 0.5, x.shape)
        return jnp.where(mask, x * steps, 0)

    x = cut(some(16, 16), "d", "t", mesh=mesh)
    checked = check_step(jax.jit(dropped), jax.random.PRNGKey(0), x)
    assert checked, checked


def test_a_step_under_a_mesh_of_explicit_axes_that_is_set():
    mesh = jax.make_mesh((2, 4), ("d", "t"), axis_types=(AxisType.Explicit,) * 2)

    def step(x, w):
        columns = jax.sharding.reshard(w, P(None, "t"))
        return jnp.tanh(x @ columns)

    with jax.set_mesh(mesh):
        x = cut(some(16, 8), "d", mesh=mesh)
        w = cut(some(8, 8), "d", "t", mesh=mesh)
        assert check_step(step, x, w)


def test_a_step_that_reads_its_explicit_mesh():
    mesh = jax.make_mesh((2, 4), ("d", "t"))

    def step(x, w):
        mesh_of_type = jax.typeof(x).sharding.mesh
        sharding = NamedSharding(mesh_of_type, P(None, "t"))
        columns = jax.sharding.reshard(w, sharding)
        return jnp.tanh(x @ columns)

    x = cut(some(4, 6), "d", mesh=mesh)
    w = cut(some(6, 8), None, "d", mesh=mesh)
    # Arrays of one device have no such mesh in their types.
    arrays_of_one_device = [jnp.asarray(np.asarray(array)) for array in (x, w)]
    with pytest.raises(ValueError, match="not found in mesh"):
        jax.eval_shape(step, *arrays_of_one_device)
    checked = check_step(step, x, w)
    assert checked, str(checked)


def test_a_mistake_that_bfloat16_hides_is_found_in_float32(mesh):
    def body(x):
        is_first = lax.axis_index("t") == 0
        thousandth = jnp.where(is_first, 0.0, 0.001)
        return x * (1 + thousandth.astype(x.dtype))

    nearly_the_same = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=P("d", "t"),
        out_specs=P("d", "t"),
    )
    ones = jnp.ones((8, 8), jnp.bfloat16)
    x = cut(ones, "d", "t", mesh=mesh)
    check = check_step(jax.jit(nearly_the_same), x, reference=lambda x: x)
    assert not check
    expected = pytest.approx(0.001, rel=0.1)
    assert check.outputs[0].difference == expected


def test_the_story_says_what_differs_where_and_how_it_lies(mesh):
    case = PLANTED["sum_left_out_in_a_loop"]
    check = checked_case(case, case.arrays(mesh), wrong=True, mesh=mesh)
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
    check = checked_case(case, case.arrays(mesh), wrong=True, mesh=mesh)
    waits = "it waits for the sum over t, and leaves its shard_map as if it were whole"
    assert waits in str(check)


def test_a_right_step_says_so_and_its_arguments_stay(mesh):
    values = jnp.arange(64.0).reshape(8, 8)
    x = cut(values, "d", "t", mesh=mesh)

    def step(x):
        return {"y": jnp.tanh(x) @ x, "sum": x.sum()}

    check = check_step(jax.jit(step, donate_argnums=0), x)
    assert check
    assert not x.is_deleted()
    assert str(check) == "the plan changes none of 2 outputs by more than rounding does"
    assert [output.path for output in check.outputs] == ["sum", "y"]

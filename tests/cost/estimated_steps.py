"""Steps whose estimates are compared with compiled programs, and their arguments."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P

from shardfx import MeshSpec


SPEC = MeshSpec({"data": 2, "tensor": 4})


MESH = SPEC.abstract()


def struct(shape, *spec, dtype=jnp.float32, mesh=MESH):
    sharding = NamedSharding(mesh, P(*spec))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def constrained(x, *spec):
    sharding = NamedSharding(MESH, P(*spec))
    return lax.with_sharding_constraint(x, sharding)


def layers(x, w):
    def layer(x, w):
        return jnp.tanh(x @ w), None

    return lax.scan(layer, x, w)[0]


def over_another_mesh(x):
    other = AbstractMesh((8,), ("i",), axis_types=(AxisType.Auto,))

    def summed(x):
        return lax.psum(x, "i")

    mapped = jax.shard_map(summed, mesh=other, in_specs=P("i"), out_specs=P())
    return mapped(x)


def constrained_over_another_mesh(x):
    other = AbstractMesh((8,), ("i",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(other, P(None, "i"))
    spread = jnp.sin(x)
    placed = lax.with_sharding_constraint(spread, sharding)
    return placed.sum()


def convolved(x, k):
    dimension_numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(
        x, k, (1, 1), "SAME", dimension_numbers=dimension_numbers
    )


def a_histogram(x):
    histogram = jnp.histogram(x, 8, (0.0, 1.0))
    return histogram[0]


def its_gradient(x, w):
    def loss(w):
        return layers(x, w).sum()

    return jax.grad(loss)(w)


def gradients_that_a_loop_adds_up(w, xs):
    def add(total, x):
        def loss(w):
            return ((x @ w) ** 2).sum()

        gradient = jax.grad(loss)(w)
        return total + gradient, None

    total, _ = lax.scan(add, w * 0, xs)
    return total


def a_cache_cut_by_its_sequence(c, k, i):
    return lax.dynamic_update_slice(c, k, (0, i, 0))


def a_resize(x):
    shape = (4, 64, 64, 8)
    return jax.image.resize(x, shape, "bilinear")


def a_while_that_counts_to_ten(x):
    def turn(state):
        count, x = state
        return count + 1, x @ x

    def goes_on(state):
        return state[0] < 10

    _, x = lax.while_loop(goes_on, turn, (0, x))
    return x


def a_branch(x, p):
    def to_columns(x):
        return constrained(x, None, "data")

    def with_sum(x):
        return x + x.sum()

    return lax.cond(p, to_columns, with_sum, x)


def bfloat16_which_cpus_widen(x, w):
    def loss(w):
        return (x @ w).astype(jnp.float32).sum()

    return jax.grad(loss)(w)


def the_gradient_of_a_sum_over_another_mesh(x):
    def loss(x):
        return jnp.sum(over_another_mesh(x) ** 2)

    return jax.grad(loss)(x)


def keys(k, x):
    noise = jax.random.normal(k, (8,))
    return noise + x


def uneven_rows(x):
    rows = constrained(x * 2, "tensor")
    columns = x.T[:, :8]
    return rows @ columns


# What an estimate by rules of its own got wrong, or silently told to send nothing,
# beside the usual.
STEPS = {
    "a product": (jnp.dot, [((64, 32), "tensor"), ((32, 16), "tensor")]),
    "a transpose that is asked for": (
        lambda x: constrained(x.T, "data"),
        [((64, 32), "data")],
    ),
    "rows to columns": (lambda x: constrained(x, None, "data"), [((64, 32), "data")]),
    "a sum": (lambda x: x.sum(), [((64, 32), "data", "tensor")]),
    "a cumulative sum": (lambda x: jnp.cumsum(x, 0), [((64, 32), "data")]),
    "an associative scan": (
        lambda x: lax.associative_scan(jnp.add, x),
        [((64, 32), "data")],
    ),
    "a histogram": (a_histogram, [((64, 32), "data")]),
    "a sort": (lambda x: jnp.sort(x, 0), [((64, 32), "data")]),
    "the best": (lambda x: lax.top_k(x, 2)[0], [((64, 32), "data", "tensor")]),
    "a shift": (lambda x: jnp.roll(x, 1, 0), [((64, 32), "data")]),
    "a mirror": (lambda x: jnp.flip(x, 0), [((64, 32), "data")]),
    "tiles": (lambda x: jnp.tile(x, (2, 2)), [((64, 32), "data")]),
    "a Fourier transform": (lambda x: jnp.fft.fft(x, axis=1), [((64, 32), "data")]),
    "a scan over a cut dimension": (layers, [((256, 64),), ((8, 64, 64), "data")]),
    "its gradient": (
        its_gradient,
        [((256, 64), "data"), ((8, 64, 64), "data")],
    ),
    "gradients that a loop adds up": (
        gradients_that_a_loop_adds_up,
        [((64, 64), "data", "tensor"), ((4, 64, 64), None, "data")],
    ),
    "a map over a cut dimension": (
        lambda x: lax.map(jnp.sin, x, batch_size=8),
        [((64, 32), "data")],
    ),
    "a batch and a cut sequence that merge": (
        lambda x: jnp.sin(x.reshape(512, 16)),
        [((8, 64, 16), None, "tensor")],
    ),
    "a cut sequence behind a cut batch": (
        lambda x: jnp.sin(x.reshape(512, 16)),
        [((8, 64, 16), "data", "tensor")],
    ),
    "a cache cut by its sequence": (
        a_cache_cut_by_its_sequence,
        [((16, 128, 8), None, "tensor"), ((16, 1, 8),), ((), jnp.int32)],
    ),
    "a lookup of rows that others hold": (
        lambda t, i: t[i],
        [((512, 64), "tensor"), ((128,), jnp.int32, "data")],
    ),
    "a scatter": (
        lambda x, i: x.at[i].add(1.0),
        [((512, 64), "tensor"), ((128,), jnp.int32, "data")],
    ),
    "a convolution over cut rows of pixels": (
        convolved,
        [((4, 32, 32, 8), None, "data"), ((3, 3, 8, 16),)],
    ),
    "the gradient of pooling over cut rows": (
        jax.grad(
            lambda x: jnp.sum(
                lax.reduce_window(x, 0.0, lax.add, (1, 3, 3, 1), (1, 1, 1, 1), "SAME")
                ** 2
            )
        ),
        [((4, 32, 32, 8), None, "data")],
    ),
    "a resize": (
        a_resize,
        [((4, 32, 32, 8), None, "data")],
    ),
    "a `while` that counts to ten": (
        a_while_that_counts_to_ten,
        [((64, 64), "tensor")],
    ),
    "a branch": (
        a_branch,
        [((64, 32), "data"), ((), jnp.bool_)],
    ),
    "bfloat16, which CPUs widen": (
        bfloat16_which_cpus_widen,
        [((64, 32), jnp.bfloat16, "data"), ((32, 16), jnp.bfloat16, "data")],
    ),
    "a sum over another mesh": (over_another_mesh, [((64, 32), "data")]),
    "the gradient of a sum over another mesh": (
        the_gradient_of_a_sum_over_another_mesh,
        [((64, 32), "data")],
    ),
    "a constraint over another mesh": (
        constrained_over_another_mesh,
        [((64, 32), "data")],
    ),
    "keys": (
        keys,
        [((), jax.eval_shape(jax.random.key, 0).dtype), ((8,), "data")],
    ),
    "uneven rows": (
        uneven_rows,
        [((50257, 8),)],
    ),
    "nothing at all": (lambda a, b: (a.T, b.sum()), [((0, 4), "data"), ((7, 5),)]),
}


def structs(form):
    def one(shape, *rest):
        if rest and not isinstance(rest[0], str | None):
            dtype = rest[0]
        else:
            dtype = jnp.float32
        entries = rest if dtype is jnp.float32 else rest[1:]
        return struct(shape, *entries, dtype=dtype)

    arguments = []
    for each in form:
        arguments.append(one(*each))
    return arguments

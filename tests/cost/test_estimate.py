import functools as ft
import importlib

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P

from shardfx import MeshSpec, PathRules, filter_jit, plan, shard
from shardfx._step import step_of
from shardfx.cost import compile_for, estimate, traffic
from shardfx.errors import LeafTypeError, MeshError, PlanMismatchError, ProgramError


SPEC = MeshSpec({"data": 2, "tensor": 4})
MESH = SPEC.abstract()


def struct(shape, *spec, dtype=jnp.float32, mesh=MESH):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def constrained(x, *spec):
    return lax.with_sharding_constraint(x, NamedSharding(MESH, P(*spec)))


def listed(step, *args, **more):
    rows = estimate(step, *args, **more).rows
    return [(row.kind, row.axes, row.wire_bytes, row.calls) for row in rows]


def sums(made):
    """The bytes of each kind of collective along each tuple of mesh axes."""
    found = {}
    for row in made.rows:
        key = row.kind, row.axes
        found[key] = found.get(key, 0) + row.wire_bytes
    return found


# Counted by hand: a gather of n pieces brings (n - 1) / n of the result, a reduction
# twice that.
def test_a_product_gathers_a_weight_sharded_like_its_batch():
    x = struct((64, 32), "tensor")
    w = struct((32, 16), "tensor")
    for compiler in ("cpu", "gpu"):
        expected = [("all-gather", ("tensor",), 32 * 16 * 4 * 3 // 4, 1)]
        assert listed(jnp.dot, x, w, compiler=compiler) == expected
    x = struct((64, 32), None, "tensor")
    expected = [("all-reduce", ("tensor",), 64 * 16 * 4 * 3 // 2, 1)]
    assert listed(jnp.dot, x, w, compiler="cpu") == expected


def layers(x, w):
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]


def over_another_mesh(x):
    other = AbstractMesh((8,), ("i",), axis_types=(AxisType.Auto,))
    return jax.shard_map(
        lambda x: lax.psum(x, "i"), mesh=other, in_specs=P("i"), out_specs=P()
    )(x)


def constrained_over_another_mesh(x):
    other = AbstractMesh((8,), ("i",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(other, P(None, "i"))
    return lax.with_sharding_constraint(jnp.sin(x), sharding).sum()


def convolved(x, k):
    dimension_numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(
        x, k, (1, 1), "SAME", dimension_numbers=dimension_numbers
    )


def a_histogram(x):
    return jnp.histogram(x, 8, (0.0, 1.0))[0]


def its_gradient(x, w):
    return jax.grad(lambda w: layers(x, w).sum())(w)


def gradients_that_a_loop_adds_up(w, xs):
    def add(total, x):
        gradient = jax.grad(lambda w: ((x @ w) ** 2).sum())(w)
        return total + gradient, None

    total, _ = lax.scan(add, w * 0, xs)
    return total


def a_cache_cut_by_its_sequence(c, k, i):
    return lax.dynamic_update_slice(c, k, (0, i, 0))


def a_resize(x):
    return jax.image.resize(x, (4, 64, 64, 8), "bilinear")


def a_while_that_counts_to_ten(x):
    def turn(state):
        count, x = state
        return count + 1, x @ x

    _, x = lax.while_loop(lambda state: state[0] < 10, turn, (0, x))
    return x


def a_branch(x, p):
    return lax.cond(p, lambda x: constrained(x, None, "data"), lambda x: x + x.sum(), x)


def bfloat16_which_cpus_widen(x, w):
    return jax.grad(lambda w: (x @ w).astype(jnp.float32).sum())(w)


def the_gradient_of_a_sum_over_another_mesh(x):
    return jax.grad(lambda x: jnp.sum(over_another_mesh(x) ** 2))(x)


def keys(k, x):
    return jax.random.normal(k, (8,)) + x


def uneven_rows(x):
    return constrained(x * 2, "tensor") @ x.T[:, :8]


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
        return struct(shape, *(rest if dtype is jnp.float32 else rest[1:]), dtype=dtype)

    return [one(*each) for each in form]


@pytest.mark.parametrize("name", STEPS)
def test_an_estimate_is_what_the_cpu_s_compiler_makes(name):
    step, form = STEPS[name]
    args = structs(form)
    made = traffic(compile_for(step, *args, target="cpu"), SPEC)
    actual = sums(estimate(step, *args, compiler="cpu"))
    assert actual == sums(made)


def test_an_estimate_counts_loops_as_often_as_they_run():
    x = struct((64, 64), None, "tensor")
    w = struct((8, 64, 64), None, "tensor")
    estimated = estimate(lambda x, w: layers(x, w), x, w, compiler="cpu")
    (row,) = estimated.rows
    assert row.calls == 8
    asked = struct((), dtype=jnp.int32)

    def looped(x, count):
        turn = lambda _, x: constrained(x @ x, None, "tensor")
        return lax.fori_loop(0, count, turn, x)

    made = estimate(looped, x, asked)
    assert all(
        row.calls is None and "trips of a loop are not known" in row.note
        for row in made.rows
    )
    assert made.rows
    assert "trips of a loop are not known" in str(made)


def test_rows_name_lines_leaves_and_slices():
    mesh = MeshSpec({"fsdp": 8}, dcn={"fsdp": 2})
    w = jax.ShapeDtypeStruct((64, 256), jnp.bfloat16)
    x = jax.ShapeDtypeStruct((4096, 64), jnp.bfloat16)
    weights = plan({"mlp": {"up": w}}, mesh, paths=PathRules.parse(".*->fsdp"))
    data = plan(x, mesh, paths=PathRules.parse(".*->fsdp"))

    def step(w, x):
        def loss(w):
            y = (x @ w["mlp"]["up"]).astype(jnp.float32)
            return jnp.sum(y**2)

        gradients = jax.grad(loss)(w)
        return jax.tree.map(lambda a, b: a - b, w, gradients)

    jitted = filter_jit(step, in_shardings=(weights, data), out_shardings=weights)
    size = 64 * 256 * 2
    estimated = estimate(step, weights.structs, data.structs, mesh=mesh)
    for made in (
        estimated,
        estimate(jitted, {"mlp": {"up": w}}, x),
        estimate(jitted.trace({"mlp": {"up": w}}, x)),
    ):
        gather = next(row for row in made.rows if row.kind == "all-gather")
        assert gather.leaf == "mlp/up"
        assert gather.wire_bytes == size * 7 // 8
        assert gather.dcn_bytes == size // 8
        assert gather.source is not None
        assert gather.source.file == __file__
        assert "mlp/up" in str(made)
        assert made.devices == 8
    (change,) = (row for row in made.rows if row.kind != "all-gather")
    assert change.kind in ("reduce-scatter", "all-reduce")
    assert change.leaf == "mlp/up"


def test_results_without_a_plan_have_free_shardings():
    params = struct((256, 256), "data")
    ema = struct((256, 256), None, "data")
    rows = jax.jit(lambda w: w.T, out_shardings=params.sharding)
    assert listed(lambda w: w.T, params) == []
    expected = [("all-to-all", ("data",), 256 * 256 * 4 // 4, 1)]
    assert listed(rows, params) == expected

    def step(params, ema, x):
        new = params - jax.grad(lambda p: jnp.sum((x @ p) ** 2))(params)
        return new, 0.9 * ema + 0.1 * new

    out = (params.sharding, ema.sharding)
    x = struct((64, 256), "data")
    args = (params, ema, x)
    compiled = compile_for(jax.jit(step, out_shardings=out), *args, target="cpu")
    made = traffic(compiled, SPEC)
    estimated = estimate(jax.jit(step, out_shardings=out), *args, compiler="cpu")
    actual = sums(estimated)
    assert actual == sums(made)


def test_steps_that_are_jitted_in_every_way():
    model = eqx.filter_eval_shape(
        ft.partial(eqx.nn.MLP, 16, 16, 64, 2), key=jax.random.key(0)
    )
    models = plan(model, SPEC, paths=PathRules.parse("weight->tensor, bias->replicate"))
    x = struct((8, 16), "data")

    def apply(model, x, scale=2.0):
        return jax.vmap(model)(x) * scale

    given = eqx.combine(models.structs, model)
    plain = estimate(apply, given, x, compiler="cpu")
    assert plain.wire_bytes > 0
    forms = (
        eqx.filter_jit(apply),
        eqx.filter_jit(apply, donate="all"),
        filter_jit(apply),
        filter_jit(apply, in_shardings=(models, x.sharding)),
        eqx.filter_checkpoint(apply),
    )
    for step in forms:
        assert estimate(step, given, x, compiler="cpu").wire_bytes == plain.wire_bytes
    real = shard(
        eqx.nn.MLP(16, 16, 64, 2, key=jax.random.key(0)),
        models.on(SPEC.build(jax.devices())),
    )
    assert estimate(apply, real, x, compiler="cpu").wire_bytes == plain.wire_bytes
    dropped = jax.jit(lambda unused, x, name: x.sum(), static_argnums=2)
    estimated = estimate(dropped, struct((8,)), x, "a name")
    (row,) = estimated.rows
    assert row.kind == "all-reduce"
    # What is no array stays as it is.
    estimated = estimate(
        lambda x, name, n: x * n if name == "twice" else None, x, "twice", 2
    )
    rows = estimated.rows
    assert rows == ()
    estimated = estimate(lambda x, more: x + more, x, np.ones(16, np.float32))
    rows = estimated.rows
    assert rows == ()


def test_explicit_axes_are_read_off_the_types():
    mesh = AbstractMesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)
    x = struct((64, 32), "data", mesh=mesh)
    w = struct((32, 16), None, "tensor", mesh=mesh)
    with jax.sharding.use_abstract_mesh(mesh):
        made = estimate(
            lambda x, w: jax.sharding.reshard(x @ w, P("data")), x, w, compiler="cpu"
        )
    actual = [(row.kind, row.axes) for row in made.rows]
    assert actual == [("all-gather", ("tensor",))]


def test_the_same_step_under_another_mesh_is_not_traced_again():
    traced = []
    shapes = ((64, 32), (32, 16))
    step = lambda x, w: traced.append(1) or jnp.sin(x @ w).sum()
    made = step_of(step, [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes])
    for mesh, dims in (
        ({"a": 8}, [((), ("a",)), (("a",), ())]),
        ({"a": 2, "b": 4}, [(("a",), ()), ((), ("b",))]),
    ):
        spec = MeshSpec(mesh)
        text = made.partitioned("cpu", mesh=spec, arguments=dims)
        args = [
            struct(shape, *entries, mesh=spec.abstract())
            for shape, entries in zip(shapes, dims, strict=True)
        ]
        sent = traffic(compile_for(step, *args, target="cpu"), spec)
        rows = sent.rows
        expected = len(rows)
        assert text.count(" all-reduce(") == expected > 0
    # Once for the estimate, and once for each program that is compiled.
    assert len(traced) == 3


def test_what_cannot_be_estimated():
    made = plan(
        jax.ShapeDtypeStruct((8, 8), jnp.float32),
        SPEC,
        paths=PathRules.parse(".*->data"),
    )
    large = MeshSpec({"data": 3**9}).abstract()
    for error, message, step, *args in (
        (
            MeshError,
            "the step has no mesh",
            jnp.sin,
            jax.ShapeDtypeStruct((8,), jnp.float32),
        ),
        (
            PlanMismatchError,
            "argument 0 is a plan, .* pass `plan.structs`",
            jnp.sin,
            made,
        ),
        (
            TypeError,
            "missing 1 required positional argument: 'w'",
            lambda x, w: x @ w,
            struct((8, 8)),
        ),
        (LeafTypeError, "`step` must be a function, not int", 3, struct((8,))),
        (
            LeafTypeError,
            "traced already; pass it alone",
            jax.jit(jnp.sin).trace(struct((8,))),
            struct((8,)),
        ),
        (
            ProgramError,
            "the axes of data=19683 cannot be halved to fewer",
            jnp.sin,
            struct((8,), mesh=large),
        ),
    ):
        with pytest.raises(error, match=message):
            estimate(step, *args)
    with pytest.raises(
        MeshError,
        match="there is no compiler 'TPU'; `compiler` is one of tpu, gpu, cpu",
    ):
        estimate(jnp.sin, struct((8,)), compiler="TPU")


def training(mesh, constrain=False):
    def at(shape, *spec):
        sharding = NamedSharding(mesh, P(*spec))
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)

    def loss(w, x):
        hidden = jax.nn.relu(x @ w["up"])
        if constrain:
            hidden = lax.with_sharding_constraint(
                hidden, NamedSharding(mesh, P("fsdp", "tensor"))
            )
        return ((hidden @ w["down"]).astype(jnp.float32) ** 2).mean()

    w = {
        "up": at((4096, 8192), "fsdp", "tensor"),
        "down": at((8192, 4096), "tensor", "fsdp"),
    }
    out_shardings = jax.tree.map(lambda one: one.sharding, w)
    step = jax.jit(
        lambda w, x: jax.grad(loss)(w, x),
        out_shardings=out_shardings,
    )
    return step, w, at((65536, 4096), "fsdp")


@pytest.mark.parametrize("constrain", [False, True])
def test_traffic_of_large_meshes_is_extrapolated(constrain, monkeypatch):
    mesh = MeshSpec({"fsdp": 64, "tensor": 8})
    step, *args = training(mesh.abstract(), constrain)
    right = estimate(step, *args, compiler="gpu")
    for name in ("DIRECT", "LARGEST"):
        monkeypatch.setattr(importlib.import_module("shardfx.cost._estimate"), name, 64)
    found = estimate(step, *args, compiler="gpu")
    assert "extrapolated from fsdp=4,tensor=8" in str(found)
    assert found.devices == 512
    assert sums(found) == sums(right)
    group_sizes = sorted(row.group_size for row in found.rows)
    assert group_sizes == sorted(row.group_size for row in right.rows)
    mesh = MeshSpec({"fsdp": 4096, "tensor": 128})
    huge = estimate(*training(mesh.abstract()))
    assert huge.devices == 524288
    assert huge.wire_bytes > 0


def solve(x):
    return jnp.linalg.solve(x, x[..., :1])


LINALG = {
    "solve": solve,
    "eigh": lambda x: jnp.linalg.eigh(x)[1],
    "svd": lambda x: jnp.linalg.svd(x)[0],
    "qr": lambda x: jnp.linalg.qr(x)[0],
    "cholesky": jnp.linalg.cholesky,
}


@pytest.mark.parametrize("name", LINALG)
def test_linear_algebra_of_a_sharded_batch_gathers_nothing(name):
    mesh = SPEC.build(jax.devices())
    x = jnp.broadcast_to(jnp.eye(4), (16, 4, 4))
    x = jax.device_put(x, NamedSharding(mesh, P("data")))

    def step(x):
        return LINALG[name](x).sum()

    lowered = jax.jit(step).lower(x)
    sent = traffic(lowered.compile())
    compiled = sent.by("kind")
    for compiler in ("cpu", "gpu"):
        assert estimate(step, x, compiler=compiler).by("kind") == compiled
    assert compiled.keys() == {"all-reduce"}

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
from shardfx.cost import compile_for, estimate, traffic
from shardfx.cost._scatters import with_reduce_scatters
from shardfx.errors import LeafTypeError, MeshError, PlanMismatchError, ProgramError
from tests.cost.estimated_steps import SPEC, STEPS, constrained, layers, struct, structs
from tests.programs import parse_hlo, step_of


def listed(step, *args, **options):
    rows = estimate(step, *args, **options).rows
    return [(row.kind, row.axes, row.wire_bytes, row.calls) for row in rows]


def sums(sent):
    """The bytes of each kind of collective along each tuple of mesh axes."""
    bytes_by_kind = {}
    for row in sent.rows:
        key = (row.kind, row.axes)
        earlier_bytes = bytes_by_kind.get(key, 0)
        bytes_by_kind[key] = earlier_bytes + row.wire_bytes
    return bytes_by_kind


# Counted by hand: a gather of n pieces brings (n - 1) / n of the result, a reduction
# twice that.
def test_a_product_gathers_a_weight_sharded_like_its_batch():
    x = struct((64, 32), "tensor")
    w = struct((32, 16), "tensor")
    for compiler in ("cpu", "gpu"):
        expected_bytes = 32 * 16 * 4 * 3 // 4
        expected = [("all-gather", ("tensor",), expected_bytes, 1)]
        assert listed(jnp.dot, x, w, compiler=compiler) == expected
    x = struct((64, 32), None, "tensor")
    expected = [("all-reduce", ("tensor",), 64 * 16 * 4 * 3 // 2, 1)]
    assert listed(jnp.dot, x, w, compiler="cpu") == expected


def test_a_gpu_sends_shards_only_of_what_each_device_slices():
    x = struct((4, 32), None, "tensor")
    w = struct((32, 16), "tensor", None)
    index = jax.ShapeDtypeStruct((), "int32")
    whole_bytes = 4 * 16 * 4

    def sharded(x, w):
        return lax.with_sharding_constraint(x @ w, struct((4, 16), "tensor").sharding)

    expected = [("reduce-scatter", ("tensor",), whole_bytes * 3 // 4, 1)]
    assert listed(sharded, x, w, compiler="gpu") == expected

    # All devices take the same row. It has the size of a shard, and is none.
    def row(x, w, index):
        return lax.dynamic_index_in_dim(x @ w, index)

    expected = [("all-reduce", ("tensor",), whole_bytes * 3 // 2, 1)]
    assert listed(row, x, w, index, compiler="gpu") == expected


# `long` stands for a table of more than ten numbers, which XLA leaves out of the text.
SLICED = """HloModule m, num_partitions=4

%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}}

ENTRY %main (x: f32[4,8,2]) -> f32[1] {{
  %x = f32[4,8,2]{{2,1,0}} parameter(0)
  %sum = f32[4,8,2]{{2,1,0}} all-reduce(%x), channel_id=1, replica_groups={groups}, \
 use_global_device_ids=true, to_apply=%add
  %id = u32[] partition-id()
  %zero = s32[] constant(0)
  %two = s32[] constant(2)
  %most = s32[] constant(6)
  %number = s32[] convert(%id)
  %product = s32[] multiply(%number, %two)
  %clamped = s32[] clamp(%zero, %product, %most)
  %halves = s32[4]{{0}} constant({{0, 0, 2, 2}})
  %half_row = s32[1]{{0}} dynamic-slice(%halves, %id), dynamic_slice_sizes={{1}}
  %half = s32[] reshape(%half_row)
  %parities = s32[4]{{0}} constant({{0, 4, 0, 4}})
  %parity_row = s32[1]{{0}} dynamic-slice(%parities, %id), dynamic_slice_sizes={{1}}
  %parity = s32[] reshape(%parity_row)
  %long = s32[4]{{0}} constant({{...}})
  %left_out = s32[1]{{0}} dynamic-slice(%long, %id), dynamic_slice_sizes={{1}}
  %counts = u32[4]{{0}} iota(), iota_dimension=0
  %count = u32[1]{{0}} dynamic-slice(%counts, %id), dynamic_slice_sizes={{1}}
  %one = s32[1]{{0}} constant({{1}})
  %sums = s32[1]{{0}} add(%count, %one)
  ROOT %r = f32[{shape}]{{2,1,0}} dynamic-slice(%sum, {starts}), dynamic_slice_sizes={{{shape}}}
}}
"""


# The replica group of all devices.
ALL = "{{0,1,2,3}}"
# The shapes of slices, their starts, and the replica groups of the sum that they slice.
# XLA's pass demands the shard number `j` for the device at position `j` of a group.
SHARDS = [
    ("1,8,2", "%number, %zero, %zero", ALL),
    ("1,8,2", "%count, %zero, %zero", ALL),
    ("4,2,2", "%zero, %clamped, %zero", ALL),
    ("2,4,2", "%half, %parity, %zero", ALL),
    ("2,8,2", "%half, %zero, %zero", "{{0,2},{1,3}}"),
    ("1,8,2", "%left_out, %zero, %zero", ALL),
]
NO_SHARDS = [
    ("1,8,2", "%sums, %zero, %zero", ALL),
    ("1,8,2", "%zero, %zero, %zero", ALL),
    ("1,8,2", "%number, %zero, %zero", "{{0,2,1,3}}"),
    ("4,2,2", "%zero, %number, %zero", ALL),
    ("2,8,1", "%half, %zero, %parity", ALL),
    ("2,8,2", "%half, %zero, %zero", "{{0,1},{2,3}}"),
]


@pytest.mark.parametrize(("shape", "starts", "groups"), SHARDS + NO_SHARDS)
def test_the_start_of_a_slice_decides_whether_it_is_a_shard(shape, starts, groups):
    module = parse_hlo(SLICED.format(shape=shape, starts=starts, groups=groups))
    sent = with_reduce_scatters(module)
    opcodes = {instruction.opcode for instruction in sent.computations["main"].values()}
    kind = "reduce-scatter" if (shape, starts, groups) in SHARDS else "all-reduce"
    assert opcodes & {"all-reduce", "reduce-scatter"} == {kind}


@pytest.mark.parametrize("name", STEPS)
def test_an_estimate_is_what_the_cpu_s_compiler_makes(name):
    step, form = STEPS[name]
    args = structs(form)
    compiled = compile_for(step, *args, target="cpu")
    sent = traffic(compiled, SPEC)
    estimated = estimate(step, *args, compiler="cpu")
    actual = sums(estimated)
    expected = sums(sent)
    assert actual == expected


def test_an_estimate_counts_loops_as_often_as_they_run():
    x = struct((64, 64), None, "tensor")
    w = struct((8, 64, 64), None, "tensor")

    def step(x, w):
        return layers(x, w)

    estimated = estimate(step, x, w, compiler="cpu")
    (row,) = estimated.rows
    assert row.calls == 8
    count = struct((), dtype=jnp.int32)

    def looped(x, count):
        def turn(_, x):
            return constrained(x @ x, None, "tensor")

        return lax.fori_loop(0, count, turn, x)

    estimated_loop = estimate(looped, x, count)
    assert estimated_loop.rows
    for row in estimated_loop.rows:
        assert row.calls is None
        assert "trips of a loop are not known" in row.note
    assert "trips of a loop are not known" in str(estimated_loop)


def test_rows_name_lines_leaves_and_slices():
    mesh = MeshSpec({"fsdp": 8}, dcn={"fsdp": 2})
    w = jax.ShapeDtypeStruct((64, 256), jnp.bfloat16)
    x = jax.ShapeDtypeStruct((4096, 64), jnp.bfloat16)
    rules = PathRules.parse(".*->fsdp")
    tree = {"mlp": {"up": w}}
    weights = plan(tree, mesh, paths=rules)
    data = plan(x, mesh, paths=PathRules.parse(".*->fsdp"))

    def step(w, x):
        def loss(w):
            product = x @ w["mlp"]["up"]
            y = product.astype(jnp.float32)
            return jnp.sum(y**2)

        gradients = jax.grad(loss)(w)

        def subtracted(a, b):
            return a - b

        return jax.tree.map(subtracted, w, gradients)

    jitted = filter_jit(step, in_shardings=(weights, data), out_shardings=weights)
    size = 64 * 256 * 2
    estimated = estimate(step, weights.structs, data.structs, mesh=mesh)
    for sent in (
        estimated,
        estimate(jitted, {"mlp": {"up": w}}, x),
        estimate(jitted.trace({"mlp": {"up": w}}, x)),
    ):
        gather = next(row for row in sent.rows if row.kind == "all-gather")
        assert gather.leaf == "mlp/up"
        assert gather.wire_bytes == size * 7 // 8
        assert gather.dcn_bytes == size // 8
        assert gather.source is not None
        assert gather.source.file == __file__
        text = str(sent)
        assert "mlp/up" in text
        assert sent.devices == 8
    (reduction,) = [row for row in sent.rows if row.kind != "all-gather"]
    assert reduction.kind in ("reduce-scatter", "all-reduce")
    assert reduction.leaf == "mlp/up"


def test_results_without_a_plan_have_free_shardings():
    params = struct((256, 256), "data")
    ema = struct((256, 256), None, "data")

    def transposed(w):
        return w.T

    rows_sharding = params.sharding
    rows = jax.jit(transposed, out_shardings=rows_sharding)
    assert listed(lambda w: w.T, params) == []
    expected = [("all-to-all", ("data",), 256 * 256 * 4 // 4, 1)]
    assert listed(rows, params) == expected

    def step(params, ema, x):
        def loss(p):
            return jnp.sum((x @ p) ** 2)

        gradient = jax.grad(loss)
        new_params = params - gradient(params)
        kept_share = 0.9 * ema
        return new_params, kept_share + 0.1 * new_params

    out = (params.sharding, ema.sharding)
    x = struct((64, 256), "data")
    args = (params, ema, x)
    jitted = jax.jit(step, out_shardings=out)
    compiled = compile_for(jitted, *args, target="cpu")
    sent = traffic(compiled, SPEC)
    estimated = estimate(jax.jit(step, out_shardings=out), *args, compiler="cpu")
    actual = sums(estimated)
    assert actual == sums(sent)


def test_steps_that_are_jitted_in_every_way():
    make_model = ft.partial(eqx.nn.MLP, 16, 16, 64, 2)
    model = eqx.filter_eval_shape(make_model, key=jax.random.key(0))
    rules = PathRules.parse("weight->tensor, bias->replicate")
    models = plan(model, SPEC, paths=rules)
    x = struct((8, 16), "data")

    def apply(model, x, scale=2.0):
        outputs = jax.vmap(model)(x)
        return outputs * scale

    model_of_structs = eqx.combine(models.structs, model)
    plain = estimate(apply, model_of_structs, x, compiler="cpu")
    assert plain.wire_bytes > 0
    forms = (
        eqx.filter_jit(apply),
        eqx.filter_jit(apply, donate="all"),
        filter_jit(apply),
        filter_jit(apply, in_shardings=(models, x.sharding)),
        eqx.filter_checkpoint(apply),
    )
    for step in forms:
        estimated = estimate(step, model_of_structs, x, compiler="cpu")
        assert estimated.wire_bytes == plain.wire_bytes
    mlp = eqx.nn.MLP(16, 16, 64, 2, key=jax.random.key(0))
    mesh = SPEC.build(jax.devices())
    placed_models = models.on(mesh)
    real = shard(mlp, placed_models)
    assert estimate(apply, real, x, compiler="cpu").wire_bytes == plain.wire_bytes

    def summed(unused, x, name):
        return x.sum()

    dropped = jax.jit(summed, static_argnums=2)
    vector = struct((8,))
    estimated = estimate(dropped, vector, x, "a name")
    (row,) = estimated.rows
    assert row.kind == "all-reduce"

    # What is no array stays as it is.
    def scaled(x, name, n):
        return x * n if name == "twice" else None

    estimated = estimate(scaled, x, "twice", 2)
    rows = estimated.rows
    assert rows == ()

    def added(x, y):
        return x + y

    ones = np.ones(16, np.float32)
    estimated = estimate(added, x, ones)
    rows = estimated.rows
    assert rows == ()


def test_explicit_axes_are_read_off_the_types():
    kinds = (AxisType.Explicit,) * 2
    mesh = AbstractMesh((2, 4), ("data", "tensor"), axis_types=kinds)
    x = struct((64, 32), "data", mesh=mesh)
    w = struct((32, 16), None, "tensor", mesh=mesh)
    with jax.sharding.use_abstract_mesh(mesh):

        def step(x, w):
            return jax.sharding.reshard(x @ w, P("data"))

        estimated = estimate(step, x, w, compiler="cpu")
    actual = [(row.kind, row.axes) for row in estimated.rows]
    assert actual == [("all-gather", ("tensor",))]


def test_the_same_step_under_another_mesh_is_not_traced_again():
    traced = []
    shapes = ((64, 32), (32, 16))

    def step(x, w):
        return traced.append(1) or jnp.sin(x @ w).sum()

    structs_of_step = []
    for shape in shapes:
        structs_of_step.append(jax.ShapeDtypeStruct(shape, "float32"))
    traced_step = step_of(step, structs_of_step)
    for mesh, dims in (
        ({"a": 8}, [((), ("a",)), (("a",), ())]),
        ({"a": 2, "b": 4}, [(("a",), ()), ((), ("b",))]),
    ):
        spec = MeshSpec(mesh)
        text = traced_step.partitioned("cpu", mesh=spec, arguments=dims)
        args = []
        for shape, entries in zip(shapes, dims, strict=True):
            args.append(struct(shape, *entries, mesh=spec.abstract()))
        compiled = compile_for(step, *args, target="cpu")
        sent = traffic(compiled, spec)
        rows = sent.rows
        expected = len(rows)
        assert text.count(" all-reduce(") == expected > 0
    # Once for the estimate, and once for each program that is compiled.
    assert len(traced) == 3


def test_what_cannot_be_estimated():
    array = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    rules = PathRules.parse(".*->data")
    sharding_plan = plan(array, SPEC, paths=rules)
    large = MeshSpec({"data": 3**9}).abstract()
    many = MeshSpec(dict.fromkeys("abcdefgh", 4)).abstract()
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
            sharding_plan,
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
        (
            ProgramError,
            "cannot be halved to fewer; use fewer axes, since axes of 4 are not halved",
            jnp.sin,
            struct((8,), mesh=many),
        ),
    ):
        with pytest.raises(error, match=message):
            estimate(step, *args)
    vector = struct((8,))
    with pytest.raises(
        MeshError,
        match="there is no compiler 'TPU'; `compiler` is one of tpu, gpu, cpu",
    ):
        estimate(jnp.sin, vector, compiler="TPU")


def training(mesh, constrain=False):
    def at(shape, *spec):
        sharding = NamedSharding(mesh, P(*spec))
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)

    def loss(w, x):
        hidden = jax.nn.relu(x @ w["up"])
        if constrain:
            sharding = NamedSharding(mesh, P("fsdp", "tensor"))
            hidden = lax.with_sharding_constraint(hidden, sharding)
        lowered = hidden @ w["down"]
        wide = lowered.astype(jnp.float32)
        return (wide**2).mean()

    w = {
        "up": at((4096, 8192), "fsdp", "tensor"),
        "down": at((8192, 4096), "tensor", "fsdp"),
    }

    out_shardings = jax.tree.map(lambda leaf: leaf.sharding, w)

    def gradient(w, x):
        return jax.grad(loss)(w, x)

    step = jax.jit(gradient, out_shardings=out_shardings)
    x = at((65536, 4096), "fsdp")
    return step, w, x


@pytest.mark.parametrize("constrain", [False, True])
def test_traffic_of_large_meshes_is_extrapolated(constrain, monkeypatch):
    mesh = MeshSpec({"fsdp": 64, "tensor": 8})
    step, *args = training(mesh.abstract(), constrain)
    right = estimate(step, *args, compiler="gpu")
    for name in ("LARGEST_DIRECT_MESH", "LARGEST_SMALL_MESH"):
        monkeypatch.setattr(importlib.import_module("shardfx.cost._estimate"), name, 64)
    extrapolated = estimate(step, *args, compiler="gpu")
    text = str(extrapolated)
    assert "extrapolated from fsdp=4,tensor=8" in text
    assert extrapolated.devices == 512
    expected = sums(right)
    assert sums(extrapolated) == expected
    group_sizes = sorted(row.group_size for row in extrapolated.rows)
    assert group_sizes == sorted(row.group_size for row in right.rows)
    mesh = MeshSpec({"fsdp": 4096, "tensor": 128})
    step_and_args = training(mesh.abstract())
    huge = estimate(*step_and_args)
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
    identity = jnp.eye(4)
    x = jnp.broadcast_to(identity, (16, 4, 4))
    sharding = NamedSharding(mesh, P("data"))
    x = jax.device_put(x, sharding)

    def step(x):
        factors = LINALG[name](x)
        return factors.sum()

    lowered = jax.jit(step).lower(x)
    sent = traffic(lowered.compile())
    compiled = sent.by("kind")
    for compiler in ("cpu", "gpu"):
        estimated = estimate(step, x, compiler=compiler)
        assert estimated.by("kind") == compiled
    assert compiled.keys() == {"all-reduce"}

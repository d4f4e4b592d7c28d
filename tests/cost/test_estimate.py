import functools as ft
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P

from benchmarks._step_plans import LAYOUTS, Layout, planned
from benchmarks._steps import SMALL, Sizes, Way
from shardfx import MeshError, MeshSpec, PathRules, PlanMismatchError, estimate, filter_jit, plan, traffic
from shardfx._cost.estimate import Prepared


SPEC = MeshSpec({"data": 2, "tensor": 4})
MESH = SPEC.abstract()


def struct(shape, *spec, dtype=jnp.float32, mesh=MESH):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def constrained(x, *spec):
    return jax.lax.with_sharding_constraint(x, NamedSharding(MESH, P(*spec)))


def listed(step, *args, **more):
    return [(row.kind, row.axes, row.wire_bytes, row.calls) for row in estimate(step, *args, **more).rows]


# Counted by hand: a gather of n pieces brings (n - 1) / n of the result, a reduction twice that, a reduction that
# scatters (n - 1) results, an exchange (n - 1) / n.
def test_a_product_gathers_the_weight_that_is_cut_like_its_batch():
    x, w = struct((64, 32), "tensor"), struct((32, 16), "tensor")
    assert listed(jnp.dot, x, w) == [("all-gather", ("tensor",), 32 * 16 * 4 * 3 // 4, 1)]


def test_a_product_over_a_dimension_that_both_cut_is_added_up_once_it_is_needed():
    x, w = struct((64, 32), None, "tensor"), struct((32, 16), "tensor")
    size = 64 * 16 * 4
    assert listed(lambda x, w: constrained(x @ w), x, w) == [("all-reduce", ("tensor",), size * 3 // 2, 1)]
    assert listed(lambda x, w: constrained(x @ w, "tensor"), x, w) == [
        ("reduce-scatter", ("tensor",), size * 3 // 4, 1)
    ]
    assert listed(lambda x, w: constrained(x @ w, "tensor"), x, w, compiler="cpu") == [
        ("all-reduce", ("tensor",), size * 3 // 2, 1)
    ]
    assert listed(lambda x, w: constrained(x @ w + (2 * x) @ w), x, w) == [
        ("all-reduce", ("tensor",), size * 3 // 2, 1)
    ]
    twice = listed(lambda x, w: constrained(x @ w + (2 * x) @ w), x, w, compiler="cpu")
    assert sum(row[2] for row in twice) == 2 * size * 3 // 2
    assert listed(lambda x, w: jnp.sin(x @ w), x, w) == [("all-reduce", ("tensor",), size * 3 // 2, 1)]


@pytest.mark.parametrize(
    "step, spec, right",
    [
        (lambda x: constrained(x), ("data",), [("all-gather", ("data",), 4096 // 2, 1)]),
        (lambda x: constrained(x, "data", "tensor"), ("data",), []),
        (lambda x: constrained(x, None, "data"), ("data",), [("all-to-all", ("data",), 4096 // 4, 1)]),
        (lambda x: constrained(x.T, None, "data"), ("data",), []),
        (lambda x: constrained(x.reshape(-1), "data"), ("data",), []),
        (lambda x: constrained(x.reshape(4, 8, 32), "data"), ("data",), []),
        (lambda x: constrained(x.reshape(8, 4, 32), "data"), (None, "data"), [("all-to-all", ("data",), 1024, 1)]),
        (lambda x: x.sum(), ("data", "tensor"), [("all-reduce", ("data", "tensor"), 2 * 4 * 7 // 8, 1)]),
        (lambda x: x.sum(1), ("data",), []),
        (lambda x: x.max(0), ("data",), [("all-reduce", ("data",), 2 * 32 * 4 // 2, 1)]),
        (lambda x: jnp.cumsum(x, 0), ("data",), [("all-gather", ("data",), 4096 // 2, 1)]),
        (lambda x: jnp.cumsum(x, 1), ("data",), []),
        (lambda x: jnp.sort(x, 1), ("data",), []),
        (lambda x: jnp.sort(x, 0), ("data",), [("all-gather", ("data",), 4096 // 2, 1)]),
        (lambda x: jax.lax.top_k(x, 2)[0], ("data",), []),
        (lambda x: jnp.concatenate([x, x], 1), ("data",), []),
        (lambda x: x[:, :8], ("data",), []),
        (lambda x: x[:8], ("data",), [("collective-permute", ("data",), 8 * 32 * 4 // 2 // 2, 1)]),
        (lambda x: jnp.concatenate([x, x]), ("data",), [("all-to-all", ("data",), 2 * 64 * 32 * 4 // 2 // 2, 2)]),
        (lambda x: jnp.pad(x, ((0, 0), (1, 1))), ("data",), []),
        (lambda x: x + jnp.arange(32, dtype=x.dtype), ("data", "tensor"), []),
        (lambda x: jnp.where(jnp.tril(jnp.ones((32, 32), bool)), x, 0), ("data", "tensor"), []),
        (lambda x: x * jax.random.uniform(jax.random.key(0), (32, 32), x.dtype), ("data", "tensor"), []),
        (lambda x: jnp.linalg.qr(x[None])[1], (None, "data"), [("all-gather", ("data",), 4096 // 2, 1)]),
    ],
)
def test_one_operation(step, spec, right):
    x = struct((32, 32), *spec)
    assert listed(step, x, out=None) == right
    assert listed(jax.jit(step), x, out=None) == right


def test_an_axis_cuts_heads_and_the_queries_of_each():
    mesh = MeshSpec({"tensor": 16}).abstract()
    x = struct((4, 16, 8), None, "tensor", mesh=mesh)
    assert listed(lambda x: x.reshape(4, 8, 2, 8).reshape(4, 16, 8) * 2, x) == []


def test_loops_count_as_often_as_they_run():
    x, w = struct((64, 32), "tensor"), struct((6, 32, 32), None, "tensor")

    def step(x, w):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

    gather = 32 * 32 * 4 * 3 // 4
    assert listed(step, x, w) == [("all-gather", ("tensor",), 6 * gather, 6)]

    def nested(x, w):
        return jax.lax.scan(lambda x, _: (step(x, w), None), x, None, length=3)[0]

    assert listed(nested, x, w) == [("all-gather", ("tensor",), 18 * gather, 18)]

    def endless(x, w):
        return jax.lax.while_loop(lambda x: x.sum() > 0, lambda x: jnp.tanh(x @ w[0]), x)

    rows = estimate(endless, x, w).rows
    assert [(row.kind, row.calls, row.wire_bytes) for row in rows][0] == ("all-gather", None, gather)
    assert all("trips of a loop" in row.note for row in rows if row.calls is None)


def test_of_a_conditional_the_branch_counts_that_sends_more():
    x, w = struct((64, 32), "tensor"), struct((32, 32), "tensor")

    def step(x, w, flag):
        return jax.lax.cond(flag, lambda: jnp.tanh(x @ w), lambda: x + x.sum())

    rows = estimate(step, x, w, jax.ShapeDtypeStruct((), bool)).rows
    assert [(row.kind, row.calls) for row in rows] == [("all-gather", 1), ("all-reduce", 0)]
    assert rows[1].wire_bytes == 0 and "the one that sends most counts" in rows[1].note


def test_a_lookup_adds_up_rows_that_others_hold():
    table, at = struct((64, 32), "tensor"), struct((16,), "data", dtype=jnp.int32)
    assert listed(lambda t, i: constrained(t[i], "data"), table, at) == [
        ("all-reduce", ("tensor",), 2 * 16 * 32 * 4 // 2 * 3 // 4, 1)
    ]
    gradient = jax.grad(lambda t, i: jnp.sum(constrained(t[i], "data") ** 2))
    rows = listed(gradient, struct((64, 32)), at)
    assert rows == [("all-reduce", ("data",), 64 * 32 * 4, 1)]


def test_those_that_hold_rows_get_the_numbers_that_ask_for_them():
    mesh = MeshSpec({"a": 2, "b": 4}).abstract()
    table = struct((16, 8, 64), None, None, ("a", "b"), mesh=mesh)
    at = struct((16, 8, 1), "b", dtype=jnp.int32, mesh=mesh)
    rows = estimate(lambda t, i: jnp.take_along_axis(t, i, -1), table, at, compiler="cpu").rows
    found = {"all-gather": 0, "all-reduce": 0}
    for row in rows:
        found[row.kind] += row.wire_bytes
    # As it is compiled: the numbers are gathered, and what each device finds is added up; the table stays.
    assert found == {"all-gather": 16 * 8 * 4 * 3 // 4, "all-reduce": 2 * 16 * 8 * 4 * 7 // 8}


def test_a_convolution_shares_images_channels_and_rows_of_pixels():
    kernel = struct((3, 3, 8, 16))

    def conv(x, k):
        return jax.lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    assert listed(conv, struct((8, 32, 32, 8), "data"), kernel) == []
    # Channels that both cut are added up; those that the image alone has are gathered, as compilers do.
    image = struct((8, 32, 32, 8), None, None, None, "data")
    assert listed(conv, image, struct((3, 3, 8, 2), None, None, "data"))[0][0] == "all-reduce"
    assert listed(conv, image, struct((3, 3, 8, 2)))[0][0] == "all-gather"
    # Two rows of pixels more than a device has, from the one beside it.
    (margin,) = listed(conv, struct((8, 32, 32, 8), None, "data"), kernel)
    assert margin == ("collective-permute", ("data",), 2 * 8 * 32 * 8 * 4 // 2, 1)


@pytest.mark.parametrize(
    "image, kernel, out",
    [
        (P("b", None, None, "a"), P(None, None, "a", "c"), P("b", None, None, "c")),
        # The channels that both cut are added up; no slice of the result goes through a convolution.
        (P(None, None, None, "c"), P(), P("c")),
        (P("c", None, None, "b"), P(), P(("b", "c"))),
    ],
)
def test_a_convolution_is_carried_out_as_it_is_compiled(image, kernel, out):
    mesh = MeshSpec({"a": 2, "b": 2, "c": 2}).build(jax.devices())
    x, k = (
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
        for shape, spec in (((16, 8, 8, 32), image), ((3, 3, 32, 64), kernel))
    )
    end = NamedSharding(mesh, out)

    def conv(x, k):
        return jax.lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    compiled = traffic(jax.jit(conv, out_shardings=end).lower(x, k).compile(), mesh)
    assert Prepared(conv, (x, k)).under(None, end, "cpu").wire_bytes == compiled.wire_bytes


def test_windows_ask_their_neighbours_for_no_more_than_they_overlap():
    x = struct((8, 32, 32, 16), "data", "tensor")

    def pooled(window, step):
        return lambda x: jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, *window, 1), (1, *step, 1), "SAME")

    assert listed(pooled((2, 2), (2, 2)), x) == []
    assert listed(jax.grad(lambda x: jnp.sum(pooled((2, 2), (2, 2))(x) ** 2)), x) == []
    row = 4 * 32 * 16 * 4
    assert listed(pooled((3, 3), (2, 2)), x) == [("collective-permute", ("tensor",), row * 3 // 4, 1)]
    assert listed(pooled((3, 3), (1, 1)), x) == [("collective-permute", ("tensor",), 2 * row * 3 // 4, 1)]
    # Windows that steps do not divide, and those between elements, take all.
    assert [row[0] for row in listed(pooled((3, 3), (3, 3)), struct((8, 32, 32, 16), "data", "tensor"))] == [
        "all-gather"
    ]


def test_the_gradient_of_a_kernel_is_added_up_over_rows_of_pixels():
    x, kernel = struct((8, 32, 32, 8), None, "tensor"), struct((3, 3, 8, 16))

    def loss(k, x):
        return jnp.sum(
            jax.lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")) ** 2
        )

    rows = listed(lambda k, x: constrained(jax.grad(loss)(k, x)), kernel, x)
    assert {row[0] for row in rows} == {"collective-permute", "all-reduce"}
    assert ("all-reduce", ("tensor",), 2 * 3 * 3 * 8 * 16 * 4 * 3 // 4, 1) in rows


def test_elements_meet_where_that_is_cheapest_of_where_they_are_made_and_where_they_are_needed():
    mesh = MeshSpec({"a": 2, "b": 2, "c": 2}).abstract()
    ours = struct((16, 8, 64), ("a", "b"), "c", mesh=mesh)
    theirs = struct((16, 8, 64), None, None, ("a", "b", "c"), mesh=mesh)
    end = NamedSharding(mesh, P(None, None, ("a", "b", "c")))
    # No way is known from one to the other, so each device gets all of the first.
    sent = Prepared(lambda x, y: x * y, (ours, theirs)).under(None, end)
    assert sent.wire_bytes == 16 * 8 * 64 * 4 * 7 // 8


def test_a_result_that_is_asked_for_does_not_say_how_it_is_computed():
    mesh = MeshSpec({"a": 2, "b": 2, "c": 2}).abstract()
    x, w = struct((64, 128), mesh=mesh), struct((128, 256), None, "c", mesh=mesh)
    out = NamedSharding(mesh, P("b"))
    rows = Prepared(lambda x, w: x @ w, (x, w)).under(None, out).rows
    # Each device makes its columns, and gathers them; it does not gather the weight, which is larger.
    assert [(row.kind, row.axes, row.wire_bytes) for row in rows] == [("all-gather", ("c",), 32 * 256 * 4 // 2)]


def test_what_a_shard_map_sends_by_its_own_word():
    def body(x):
        total = jax.lax.psum(x, "tensor")
        gathered = jax.lax.all_gather(x, "tensor", tiled=True)
        scattered = jax.lax.psum_scatter(gathered, "tensor", tiled=True)
        passed = jax.lax.ppermute(scattered, "tensor", [(0, 1), (1, 2), (2, 3)])
        return total + passed + jax.lax.all_to_all(x, "tensor", 0, 0, tiled=True)

    step = jax.shard_map(body, mesh=MESH, in_specs=P("tensor"), out_specs=P("tensor"), check_vma=False)
    local = 8 * 32 * 4
    assert sorted(listed(step, struct((32, 32), "tensor"))) == [
        ("all-gather", ("tensor",), 3 * local, 1),
        ("all-reduce", ("tensor",), local * 3 // 2, 1),
        ("all-to-all", ("tensor",), local * 3 // 4, 1),
        ("collective-permute", ("tensor",), local * 3 // 4, 1),
        ("reduce-scatter", ("tensor",), 3 * local, 1),
    ]
    outside = listed(step, struct((32, 32), None, "tensor"))
    assert ("all-to-all", ("tensor",), 32 * 32 * 4 // 4 * 3 // 4, 1) in outside


def test_a_primitive_that_is_not_known_needs_all_and_says_so():
    primitive = Primitive("mystery")
    primitive.def_abstract_eval(lambda x: x)
    (row,) = estimate(lambda x: primitive.bind(x) * 2, struct((32, 32), "data")).rows
    assert (row.kind, row.wire_bytes) == ("all-gather", 32 * 32 * 4 // 2)
    assert "`mystery` is not known" in row.note and "mystery" in str(estimate(primitive.bind, struct((8,))))


def test_rows_name_lines_leaves_and_slices():
    mesh = MeshSpec({"fsdp": 8}, dcn={"fsdp": 2})
    w, x = jax.ShapeDtypeStruct((64, 256), jnp.bfloat16), jax.ShapeDtypeStruct((4096, 64), jnp.bfloat16)
    weights = plan({"mlp": {"up": w}}, mesh, paths=PathRules.parse(".*->fsdp"))
    data = plan(x, mesh, paths=PathRules.parse(".*->fsdp"))

    def step(w, x):
        gradients = jax.grad(lambda w: jnp.sum((x @ w["mlp"]["up"]).astype(jnp.float32) ** 2))(w)
        return jax.tree.map(lambda a, b: a - b, w, gradients)

    made = estimate(step, weights.structs, data.structs, plans=(weights, data))
    size = 64 * 256 * 2
    gather, scatter = made.rows
    assert (gather.kind, gather.leaf, gather.wire_bytes, gather.dtype) == (
        "all-gather",
        "mlp/up",
        size * 7 // 8,
        "bf16",
    )
    assert (scatter.kind, scatter.leaf, scatter.wire_bytes) == ("reduce-scatter", "mlp/up", size * 7 // 8)
    assert gather.dcn_bytes == scatter.dcn_bytes == size // 8
    assert gather.source is not None and gather.source.file == __file__
    assert gather.source.function.endswith("<lambda>")
    assert gather.dtype == "bf16"
    assert "mlp/up" in str(made) and made.devices == 8


def test_results_come_out_as_arguments_came_in_unless_it_is_said_otherwise():
    w = struct((64, 64), "data")
    assert listed(lambda w: w.T, w) == [("all-to-all", ("data",), 64 * 64 * 4 // 4, 1)]
    assert listed(lambda w: w.T, w, out=None) == []
    rows = NamedSharding(MESH, P(None, "data"))
    assert listed(lambda w: w * 2, w, out=rows)[0][0] == "all-to-all"


def test_modules_with_functions_and_steps_that_are_jitted_in_every_way():
    model = eqx.filter_eval_shape(ft.partial(eqx.nn.MLP, 16, 16, 64, 2), key=jax.random.key(0))
    models = plan(model, SPEC, paths=PathRules.parse("weight->tensor, bias->replicate"))
    x = struct((8, 16), "data")

    def apply(model, x, scale=2.0):
        return jax.vmap(model)(x) * scale

    given = eqx.combine(models.structs, model)
    plain = estimate(apply, given, x, plans=(models,))
    assert plain.wire_bytes > 0
    for step in (eqx.filter_jit(apply), filter_jit(apply), eqx.filter_checkpoint(apply)):
        assert estimate(step, given, x, plans=(models,)).wire_bytes == plain.wire_bytes


def test_explicit_axes_are_read_off_the_types():
    mesh = AbstractMesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)
    x, w = struct((64, 32), "data", mesh=mesh), struct((32, 16), None, "tensor", mesh=mesh)
    with jax.sharding.use_abstract_mesh(mesh):
        assert listed(lambda x, w: jax.sharding.reshard(x @ w, P("data")), x, w) == [
            ("all-gather", ("tensor",), 32 * 16 * 4 * 3 // 4, 1)
        ]


def test_odd_arrays():
    odd = struct((7, 5)), struct((0, 4), "data"), struct(())
    assert listed(lambda a, b, c: (a.sum() + b.sum() + c, a.reshape(5, 7), b.T), *odd, out=None)[0][2] <= 8
    assert estimate(lambda x: x, np.ones(3), plans=NamedSharding(MESH, P())).rows == ()
    key = jax.eval_shape(jax.random.key, 0)
    assert estimate(lambda k, x: jax.random.normal(k, (8,)) + x, key, struct((8,), "data")).wire_bytes == 0


def test_what_cannot_be_estimated():
    with pytest.raises(MeshError, match="an estimate needs a mesh"):
        estimate(lambda x: x, jax.ShapeDtypeStruct((8,), jnp.float32))
    other = MeshSpec({"data": 8}).abstract()
    with pytest.raises(MeshError, match="different meshes"):
        estimate(jnp.add, struct((8,)), struct((8,), mesh=other))
    with pytest.raises(PlanMismatchError, match="reads plans and NamedShardings"):
        estimate(jnp.sin, struct((8,)), plans=jax.sharding.SingleDeviceSharding(jax.devices()[0]))


@pytest.mark.parametrize("name, most", [("fsdp", 0.05), ("dp x tp", 0.01)])
def test_a_step_of_training_sends_what_is_estimated(name, most):
    sizes = (2, 4) if len(LAYOUTS[name].axes) == 2 else (8,)
    layout = Layout(dict(zip(LAYOUTS[name].axes, sizes, strict=True)), LAYOUTS[name].rules)
    made = planned(SMALL, Way(remat=True), layout, jax.devices())
    compiled = traffic(made.lowered().compile())
    estimated = estimate(made.step, *made.args, plans=made.plans, compiler="cpu")
    assert abs(estimated.wire_bytes / compiled.wire_bytes - 1) <= most


def test_many_scanned_layers_take_no_longer():
    seconds = {}
    for layers in (2, 126):
        sizes = Sizes(layers, 16384, 53248, 128, 8, 128, 128256, 256, 8192, dtype=jnp.bfloat16)
        made = planned(sizes, Way(remat=True), LAYOUTS["fsdp x tp"])
        begin = time.process_time()
        rows = estimate(made.step, *made.args, plans=made.plans)
        seconds[layers] = time.process_time() - begin
        gathers = [row for row in rows.rows if row.leaf == "layers/mlp/up" and row.kind == "all-gather"]
        assert sum(row.calls or 0 for row in gathers) == 2 * layers
    assert seconds[126] < 3 * seconds[2]


# Compiled for 16 devices of a CPU, in bytes that enter a device: what the partitioner makes of products and lookups.
MESH_16 = MeshSpec({"a": 2, "b": 2, "c": 4}).abstract()


def at_16(shape, *spec, dtype=jnp.float32):
    return struct(shape, *spec, dtype=dtype, mesh=MESH_16)


def made_16(step, *spec):
    return lambda *args: jax.lax.with_sharding_constraint(step(*args), NamedSharding(MESH_16, P(*spec)))


@pytest.mark.parametrize(
    "x, w, out, right",
    [
        # As many pieces on both sides: the smaller one changes places, and the products are added up.
        (
            (("a", "b"), None, "c"),
            (("a", "b"),),
            (("a", "b"),),
            {"collective-permute": 2**18 * 3 // 4, "all-reduce": 6 * 2**20},
        ),
        (("c", None, "a"), ("b",), ("c",), {"collective-permute": 2**18, "all-reduce": 4 * 2**20}),
        # The weight gives up what the rows have, for as many devices along which it is whole.
        (("a", None, "c"), ("a", "b"), ("a", None, "b"), {"collective-permute": 98304, "all-reduce": 6 * 2**20}),
        # Four pieces and two are gathered.
        ((None, "b", "c"), ("a",), (None, "b"), {"all-gather": 2 * 2**20}),
        # An axis that cuts both ways is given up by the operand that is smaller.
        (("c", None, "a"), ("c", "b"), ("c", None, "b"), {"all-gather": 2**19 + 3 * 2**17}),
    ],
)
def test_products_meet_as_the_partitioner_has_them_meet(x, w, out, right):
    step = made_16(lambda x, w: x @ w, *out)
    made = estimate(step, at_16((16, 256, 256), *x), at_16((256, 1024), *w), compiler="cpu")
    assert made.by("kind") == right


def test_a_cpu_gathers_all_that_the_best_are_chosen_from():
    mesh = SPEC.build(jax.devices())
    rows = NamedSharding(mesh, P("data", "tensor"))
    x = jax.ShapeDtypeStruct((16, 128, 64), jnp.float32, sharding=rows)

    def step(x):
        again = jax.lax.scan(lambda x, _: (x + jax.lax.top_k(jnp.sin(x), 1)[0], None), x, None, length=3)[0]
        return jax.lax.with_sharding_constraint(again, rows)

    made = estimate(step, x, compiler="cpu")
    assert estimate(step, x).rows == ()
    assert (
        made.by("kind")
        == traffic(jax.jit(step).lower(x).compile()).by("kind")
        == {"all-gather": 3 * 16 * 128 * 64 * 4 * 7 // 8}
    )


def test_a_gather_among_all_devices_and_one_among_some_are_sent_twice_by_a_cpu():
    mesh = MeshSpec({"x": 4, "y": 4}).abstract()
    x, w = struct((16, 256, 256), "x", None, "y", mesh=mesh), struct((256, 1024), "x", "y", mesh=mesh)
    dy = struct((16, 256, 1024), "x", None, "y", mesh=mesh)

    def step(x, w, dy):
        hidden = jax.lax.with_sharding_constraint(x @ w, NamedSharding(mesh, P("x", None, "y")))
        gradient = jnp.einsum("bsd,bsf->df", x, dy)
        return hidden, jax.lax.with_sharding_constraint(gradient, NamedSharding(mesh, P("x", "y")))

    def gathered(compiler):
        rows = estimate(step, x, w, dy, out=None, compiler=compiler).rows
        return sum(row.wire_bytes for row in rows if row.kind == "all-gather" and row.axes == ("y",))

    assert gathered("cpu") == 2 * gathered("tpu") == 2 * 2**20 * 3 // 4


def test_numbers_give_up_the_devices_that_cut_the_width_of_a_table():
    table, at = at_16((2048, 256), "c", ("a", "b")), at_16((16, 256), ("a", "b"), dtype=jnp.int32)
    step = made_16(lambda t, i: t[i], ("a", "b"), None, "c")
    made = estimate(step, table, at, compiler="cpu").by("kind")
    assert made["all-reduce"] == 2 * 2**20 * 3 // 4  # all rows, a quarter of the width
    assert made.keys() <= {"all-reduce", "all-to-all", "all-gather", "collective-permute"}


def test_what_is_gathered_for_the_same_layout_again_is_sent_once():
    x, w = struct((64, 32), "data"), struct((32, 16), "tensor")
    size = 32 * 16 * 4 * 3 // 4

    def step(x, w):
        body = jax.shard_map(jnp.dot, mesh=MESH, in_specs=(P("data"), P()), out_specs=P("data"))
        return body(x, w) + body(2 * x, w) + x @ constrained(w) + x @ constrained(w)

    assert sum(row[2] for row in listed(step, x, w)) == size


def relu_twice(params, x):
    (first, shift), (second, more) = params
    # A bias of `nn.Dense` is reshaped before it is added, that of a module under `vmap` is repeated.
    hidden = jax.nn.relu(x @ first + shift.reshape(1, -1))
    return jax.nn.relu(hidden @ second + jnp.broadcast_to(more, (x.shape[0], more.size)))


def test_biases_that_are_cut_over_the_data_axis_leave_the_batch_where_it_is():
    """Weights cut along their first dimension, and biases, all over the axis that cuts the batch."""
    mesh, devices = MeshSpec({"fsdp": 8}), jax.devices()[:8]
    params = [(jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((64,), jnp.float32))] * 2
    x = jax.ShapeDtypeStruct((512, 64), jnp.float32)
    plans = tuple(plan(tree, mesh, paths=PathRules.parse(".*->fsdp")) for tree in (params, x))

    def step(params, x):
        grads = jax.grad(lambda p: jnp.sum(relu_twice(p, x) ** 2))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    weights, biases = 2 * 64 * 64 * 4, 2 * 64 * 4
    found = estimate(step, params, x, plans=plans, compiler="cpu").wire_bytes
    # All is gathered once, and gradients are summed up whole.
    assert found == 3 * (weights + biases) * 7 // 8
    placed = tuple(one.on(mesh.build(devices)) for one in plans)
    program = filter_jit(step, in_shardings=placed, out_shardings=placed[0]).lower(params, x).compile()
    assert found == traffic(program, mesh).wire_bytes


def test_operations_of_products_are_shared_as_the_products_are():
    x, w = struct((64, 32), "data"), struct((32, 16), None, "tensor")
    made = jax.ShapeDtypeStruct((64, 32), jnp.float32), jax.ShapeDtypeStruct((32, 16), jnp.float32)
    cut = Prepared(jnp.dot, (x, w)).worked(None)[1]
    whole = Prepared(jnp.dot, (made[0], w)).worked(None)[1]
    assert (cut, whole) == (2 * 64 * 32 * 16 / 8, 2 * 64 * 32 * 16 / 4)
    image, kernel = struct((8, 16, 16, 4), "data"), struct((3, 3, 4, 32))
    conv = ft.partial(jax.lax.conv_general_dilated, window_strides=(1, 1), padding="SAME")
    numbers = ("NHWC", "HWIO", "NHWC")
    found = Prepared(lambda x, k: conv(x, k, dimension_numbers=numbers), (image, kernel)).worked(None)[1]
    assert found == 2 * 8 * 16 * 16 * 32 * 3 * 3 * 4 / 2
    # A loop counts as often as it runs, a branch for its share.
    scanned = Prepared(lambda x, w: jax.lax.scan(lambda c, _: (c, c @ w), x, length=5), (x, w)).worked(None)[1]
    assert scanned == 5 * cut
    either = Prepared(lambda x, w: jax.lax.cond(x.sum() > 0, lambda: x @ w, lambda: x[:, :16]), (x, w)).worked(None)[1]
    assert either == cut / 2


@pytest.mark.parametrize("axis", [0, 1])
def test_stacked_arrays_are_those_put_one_behind_the_other(axis):
    """`jnp.stack` and `jnp.unstack` are primitives of newer JAX; they cost what they are lowered to."""

    def stacked(w, x):
        rows = jnp.stack([x @ w, jnp.tanh(x @ w)], axis)
        return jnp.mean(sum(jnp.unstack(rows, axis=axis)) ** 2)

    def joined(w, x):
        rows = jnp.concatenate([jnp.expand_dims(row, axis) for row in (x @ w, jnp.tanh(x @ w))], axis)
        return jnp.mean(sum(jax.lax.index_in_dim(rows, at, axis, keepdims=False) for at in range(2)) ** 2)

    w, x = struct((64, 32)), struct((128, 64), "tensor")
    # The sum of the gradient, and nothing for the arrays between.
    wanted = [("all-reduce", ("tensor",), 2 * 64 * 32 * 4 * 3 // 4, 1)]
    assert listed(jax.grad(stacked), w, x) == listed(jax.grad(joined), w, x) == wanted

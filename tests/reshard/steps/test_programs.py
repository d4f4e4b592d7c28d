import contextlib
import functools as ft
import itertools as it
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax import lax
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec as P,
    SingleDeviceSharding,
)
from moves import carry_out, move_of, through_programs

from benchmarks._programs import lowered, planned, program_of, steps_program, wire_bytes
from shardfx import MeshSpec, reshard
from shardfx.errors import LeafTypeError, MeshError, MoveError, SpecError


DTYPES = (
    "bool",
    "int4",
    "uint4",
    "int8",
    "uint32",
    "float8_e4m3",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e3m4",
    "float8_e8m0fnu",
    "float4_e2m1fn",
    "bfloat16",
    "float16",
    "complex64",
)
KINDS = (AxisType.Auto, AxisType.Explicit)


def mesh(kind: AxisType = AxisType.Auto, order=None, **sizes: int) -> Mesh:
    devices = np.array(jax.devices())[: math.prod(sizes.values())]
    if order is not None:
        devices = devices[np.asarray(order)]
    grid = devices.reshape(tuple(sizes.values()))
    axis_types = (kind,) * len(sizes)
    return Mesh(grid, tuple(sizes), axis_types=axis_types)


def put(values: np.ndarray, sharding: NamedSharding) -> jax.Array:
    return jax.make_array_from_callback(
        values.shape, sharding, lambda index: values[index]
    )


def assert_lies(x: jax.Array, values: np.ndarray, sharding: NamedSharding):
    """Bitwise, shard by shard: what each device holds, and the label that the array
    carries.
    """
    assert x.sharding == sharding
    assert x.dtype == values.dtype
    for shard in x.addressable_shards:
        actual = np.asarray(shard.data).tobytes()
        assert actual == np.ascontiguousarray(values[shard.index]).tobytes()


def move(x, dst, src=None, donate=False):
    """Live or traced, by the programs that accelerators run."""
    return through_programs(x, dst, src=src, donate=donate)


def pair(kind: AxisType = AxisType.Auto) -> tuple[NamedSharding, NamedSharding]:
    """A move that needs several steps: XLA alone would replicate the array."""
    src = NamedSharding(mesh(kind, a=2, b=4), P("b", "a"))
    dst = NamedSharding(mesh(kind, c=4, d=2), P(None, ("d", "c")))
    return src, dst


VALUES = np.arange(16 * 32, dtype=np.float32).reshape(16, 32)


MESH_SIZES = [(8,), (2, 4), (4, 2), (2, 2, 2), (1, 8), (4, 1, 2)]


@st.composite
def shardings_of_rank(draw, rank):
    """A mesh over the eight devices, and a spec."""
    sizes = draw(st.sampled_from(MESH_SIZES))
    names = "abc"[: len(sizes)]
    dims = [[] for _ in range(rank)]
    for name in draw(st.permutations(names)):
        dim = draw(st.integers(0, rank))
        if dim < rank:
            dims[dim].append(name)
    order = None
    if draw(st.booleans()):
        order = draw(st.permutations(list(range(8))))
    kind = draw(st.sampled_from(KINDS))
    drawn_mesh = mesh(kind, order, **dict(zip(names, sizes, strict=True)))
    spec = P(*[tuple(axes) or None for axes in dims])
    return NamedSharding(drawn_mesh, spec)


def counts_of(sharding: NamedSharding) -> list[int]:
    """In how many parts each dimension is cut."""
    counts = []
    for entry in sharding.spec:
        if entry is None:
            axes = ()
        elif isinstance(entry, str):
            axes = (entry,)
        else:
            axes = entry
        counts.append(math.prod(sharding.mesh.shape[axis] for axis in axes))
    return counts


@st.composite
def moves(draw):
    """The shape of an array, a small multiple of what both shardings divide, and the
    shardings.
    """
    rank = draw(st.integers(0, 4))
    src = draw(shardings_of_rank(rank))
    dst = draw(shardings_of_rank(rank))
    shape = []
    for src_count, dst_count in zip(counts_of(src), counts_of(dst), strict=True):
        multiple = draw(st.sampled_from([0, 1, 1, 2]))
        shape.append(math.lcm(src_count, dst_count) * multiple)
    return tuple(shape), src, dst


@given(moves())
@settings(max_examples=40, deadline=None)
def test_a_live_array_gets_from_anywhere_to_anywhere(shape_and_shardings):
    shape, src, dst = shape_and_shardings
    rng = np.random.default_rng(0)
    values = rng.standard_normal(shape).astype(np.float32)
    x = put(values, src)
    assert_lies(move(x, dst), values, dst)
    assert_lies(x, values, src)


@pytest.mark.parametrize(
    "dtype, target",
    [
        *it.product(DTYPES, ["other"]),
        *it.product(("bfloat16", "int4", "float8_e5m2"), ["same", "permuted", "fewer"]),
    ],
)
def test_every_dtype_keeps_its_bits_also_in_the_finest_parts(dtype, target):
    src, dst = pair()
    if target == "same":
        dst = NamedSharding(src.mesh, P(None, ("b", "a")))
    if target == "permuted":
        permuted_mesh = mesh(order=[3, 1, 4, 0, 5, 2, 6, 7], c=4, d=2)
        dst = NamedSharding(permuted_mesh, P("d", "c"))
    if target == "fewer":
        dst = NamedSharding(mesh(c=2, d=2), P("d", "c"))
    values = any_bits(jnp.dtype(dtype))
    x = put(values, src)
    with pytest.raises(MoveError, match="is too little") as error:
        through_programs(x, dst, memory_limit_bytes=1)
    (least,) = re.findall(r"pass `memory_limit_bytes=(\d+)` or more", str(error.value))
    for limit in (None, int(least)):
        moved = through_programs(x, dst, memory_limit_bytes=limit)
        assert_lies(moved, values, dst)


def any_bits(dtype: np.dtype) -> np.ndarray:
    """Elements of all kinds, among them NaNs that arithmetic would replace by others."""
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (16, 32 * dtype.itemsize)).astype(np.uint8)
    if dtype.name in ("bool", "int4", "uint4", "float4_e2m1fn"):
        return (raw % 8).astype(dtype)
    return raw.view(dtype)


@pytest.mark.parametrize("dtype", [jnp.int2, jnp.uint2])
def test_two_bit_integers_are_refused(dtype):
    src, dst = pair()
    message = r"int2 cannot be moved.*corrupts memory.*astype\(jnp.int4\)"
    with pytest.raises(LeafTypeError, match=message):
        move_of((16, 32), jnp.dtype(dtype), src, dst)
    jitted = jax.jit(lambda x: move(x.astype(dtype), dst, src=src))
    struct = jax.ShapeDtypeStruct((16, 32), jnp.int8)
    with pytest.raises(LeafTypeError, match=message):
        jitted.lower(struct)


def concrete(sharding: NamedSharding) -> Mesh:
    assert isinstance(sharding.mesh, Mesh)
    return sharding.mesh


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_set", [False, True])
def test_traced_values_move_under_any_set_mesh(kind, is_set):
    src, dst = pair(kind)
    x = put(VALUES, src)
    rng = np.random.default_rng(0)
    weights = rng.standard_normal(VALUES.shape).astype(np.float32)
    placed_weights = put(weights, dst)

    def moved(x):
        return move(x, dst, src=src)

    def loss(x, weights):
        return jnp.sum(moved(x) * weights)

    def maybe_set(device_mesh):
        if is_set:
            return jax.set_mesh(device_mesh)
        return contextlib.nullcontext()

    other_mesh = mesh(kind, p=2, q=2, r=2)
    for around in (concrete(src), other_mesh):
        with maybe_set(around):
            y = jax.jit(moved, out_shardings=dst)(x)
        assert_lies(y, VALUES, dst)
    jitted_gradient = jax.jit(jax.grad(loss), out_shardings=src)
    with maybe_set(concrete(dst)):
        gradient = jitted_gradient(x, placed_weights)
    assert_lies(gradient, weights, src)


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_is_moved_back_by_the_planned_steps(kind):
    src, dst = pair(kind)

    def pull(x, y):
        _, pulled = jax.vjp(ft.partial(move, dst=dst, src=src), x)
        (cotangent,) = pulled(y)
        return cotangent

    x = jax.ShapeDtypeStruct(VALUES.shape, jnp.float32, sharding=src)
    y = jax.ShapeDtypeStruct(VALUES.shape, jnp.float32, sharding=dst)
    compiled = jax.jit(pull, out_shardings=src).lower(x, y).compile()
    text = compiled.as_text()
    assert text is not None
    way_back = planned(
        VALUES.shape,
        jnp.dtype("float32"),
        NamedSharding(mesh(c=4, d=2), dst.spec),
        NamedSharding(mesh(a=2, b=4), src.spec),
    )
    assert wire_bytes(text, 8) <= way_back.wire_bytes
    assert way_back.steps


@pytest.mark.parametrize("kind", KINDS)
def test_inside_checkpoint_scan_vmap_and_forward_mode(kind):
    m = mesh(kind, a=2, b=4)
    src = NamedSharding(m, P("b", "a"))
    dst = NamedSharding(m, P("a", "b"))
    x = put(VALUES, src)
    move_there = ft.partial(move, dst=dst, src=src)
    move_back = ft.partial(move, dst=src, src=dst)

    @jax.checkpoint
    def sine(x):
        moved = jnp.sin(move_there(x))
        return move_back(moved)

    def sum_of_scan(x):
        result, _ = lax.scan(lambda x, _: (sine(x), None), x, None, length=3)
        return jnp.sum(result)

    def plain_sum(x):
        return jnp.sum(jnp.sin(jnp.sin(jnp.sin(x))))

    def tangent_of(x):
        _, tangent = jax.jvp(move_there, (x,), (2 * x,))
        return tangent

    def moved_in_vmap(x):
        stack = jnp.stack([x, 2 * x])
        return jax.vmap(move_there)(stack)

    gradient = jax.jit(jax.grad(sum_of_scan))(x)
    expected = jax.jit(jax.grad(plain_sum))(VALUES)
    np.testing.assert_allclose(gradient, expected, rtol=1e-6)
    tangent = jax.jit(tangent_of, out_shardings=dst)(x)
    assert_lies(tangent, 2 * VALUES, dst)
    stacked = jax.jit(moved_in_vmap)(x)
    np.testing.assert_array_equal(stacked, np.stack([VALUES, 2 * VALUES]))


@pytest.mark.parametrize("kind", KINDS)
def test_src_is_ignored_outside_of_jit(kind):
    source = mesh(kind, a=2, b=2)
    target_mesh = mesh(kind, x=2, y=2)
    rows = NamedSharding(source, P("a"))
    columns = NamedSharding(source, P("b"))
    weights = jax.device_put(VALUES, columns)
    ones = np.ones_like(VALUES)
    placed_ones = jax.device_put(ones, rows)

    for target in (
        NamedSharding(target_mesh, P("x")),
        NamedSharding(target_mesh, P(None, ("y", "x"))),
        rows,
    ):
        move_out = ft.partial(move, dst=target, src=rows)
        moved, pull = jax.vjp(move_out, placed_ones)
        assert moved.sharding == target
        cotangents = [jax.device_put(VALUES, moved.sharding)]
        if kind == AxisType.Auto:
            # The cotangent comes in the sharding of the weights, which JAX lets
            # `multiply` keep under Auto axes.
            cotangents += [jnp.asarray(VALUES), weights]
        for cotangent in cotangents:
            (gradient,) = pull(cotangent)
            np.testing.assert_array_equal(gradient, VALUES)
            assert gradient.sharding.is_equivalent_to(rows, 2)
        stack = jnp.stack([placed_ones, 2 * placed_ones])
        stacked = jax.vmap(move_out)(stack)
        np.testing.assert_array_equal(stacked, np.stack([ones, 2 * ones]))
        if kind == AxisType.Auto:
            # The source is untrue.
            moved_weights, _ = jax.jvp(move_out, (weights,), (weights,))
            np.testing.assert_array_equal(moved_weights, VALUES)


def test_what_vmap_is_mapped_over_stays_sharded():
    for kind, names in ((AxisType.Auto, "a"), (AxisType.Explicit, None)):
        square = mesh(kind, a=2, b=2)
        src = NamedSharding(square, P(None, "b"))
        dst = NamedSharding(square, P("b"))
        numbers = np.arange(2 * 8 * 16, dtype=np.float32)
        values = numbers.reshape(2, 8, 16)
        x = jax.device_put(values, NamedSharding(square, P("a", None, "b")))
        fn = jax.vmap(ft.partial(move, dst=dst, src=src), spmd_axis_name=names)
        program = jax.jit(fn, out_shardings=NamedSharding(square, P("a", "b")))
        np.testing.assert_array_equal(program(x), values)
        # An all-to-all of half a shard each way; gathered over `a` it would be more
        # than all of the array.
        text = program.lower(x).compile().as_text()
        assert text is not None
        assert wire_bytes(text, 4) == values.nbytes // 4 // 2
    sharding = NamedSharding(square, P("a"))
    with pytest.raises(Exception, match="duplicate entries for `a`"):
        jax.jit(jax.vmap(ft.partial(move, dst=sharding), in_axes=0))(x)


@pytest.mark.parametrize("kind", KINDS)
def test_arrays_that_are_constants_inside_jit_move_too(kind):
    src = NamedSharding(mesh(kind, a=2, b=4), P("a", "b"))
    target_mesh = mesh(kind, c=2, d=2, e=2)
    dst = NamedSharding(target_mesh, P("e", ("d", "c")))
    x = jax.device_put(VALUES, src)
    constants = {
        "placed": jax.device_put(2 * VALUES, src),
        "elsewhere": jnp.asarray(3 * VALUES),
        "numpy": 4 * VALUES,
    }

    def moved(x):
        return reshard({"traced": x, **constants}, dst, src=src)

    arrays = jax.jit(moved, out_shardings=dst)(x)
    factors = {"traced": 1, "placed": 2, "elsewhere": 3, "numpy": 4}
    for name, factor in factors.items():
        assert arrays[name].sharding == dst
        np.testing.assert_array_equal(arrays[name], factor * VALUES)


def test_sums_that_are_due_are_left_to_jax():
    square = mesh(AxisType.Explicit, a=2, b=2)
    spec = P(None, None, unreduced=frozenset({"b"}))
    src = NamedSharding(square, spec)
    dst = NamedSharding(square, P(None, None))
    rows = jax.device_put(VALUES, NamedSharding(square, P(None, "b")))
    columns = jax.device_put(VALUES.T, NamedSharding(square, P("b", None)))

    def moved_product(x, y):
        product = jnp.einsum("ij,jk->ik", x, y, out_sharding=src)
        return move(product, dst)

    product = jax.jit(moved_product)(rows, columns)
    np.testing.assert_allclose(product, VALUES @ VALUES.T, rtol=1e-5)


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("layouts", [("", "b"), ("b", ""), ("b", "b")])
def test_reduced_axes_are_kept_and_differentiated_as_jax_does(layouts, cross):
    square = mesh(AxisType.Explicit, a=2, b=4)
    src_reduced, dst_reduced = map(frozenset, layouts)
    src = NamedSharding(square, P("a", None, reduced=src_reduced))
    dst = NamedSharding(square, P(None, "a", reduced=dst_reduced))
    if cross:
        other = mesh(AxisType.Explicit, c=2, b=4)
        dst = NamedSharding(other, P(None, "c", reduced=dst_reduced))
    rows = jax.device_put(VALUES, NamedSharding(square, P("a", None)))
    x = jax.sharding.reshard(rows, src)
    eager = reshard(x, dst)
    seen = []

    def moved(x):
        y = move(x, dst)
        seen.append(jax.typeof(y).sharding)
        return y

    assert_lies(jax.jit(moved)(x), VALUES, dst)
    assert seen == [NamedSharding(dst.mesh.abstract_mesh, dst.spec)]
    assert eager.sharding.spec == dst.spec  # pyright: ignore[reportAttributeAccessIssue]
    if cross:
        # JAX's own function does not move to another mesh.
        return
    due = NamedSharding(square, P(None, "a", unreduced=dst_reduced))
    tangents = jax.ShapeDtypeStruct(VALUES.shape, jnp.float32, sharding=due)
    expected_spec = P("a", None, unreduced=src_reduced)
    for function in (move, jax.sharding.reshard):

        def pull(x, y, function=function):
            _, pulled = jax.vjp(lambda x: function(x, dst), x)
            (cotangent,) = pulled(y)
            return cotangent

        with jax.set_mesh(square):
            cotangent = jax.eval_shape(pull, x, tangents)
        assert cotangent.sharding.spec == expected_spec


def test_the_gradient_of_a_reduced_array_is_the_sum_that_is_due():
    square = mesh(AxisType.Explicit, a=2, b=4)
    plain = NamedSharding(square, P("a", None))
    reduced = NamedSharding(square, P("a", None, reduced=frozenset({"b"})))
    rows = jax.device_put(VALUES, plain)
    x = jax.sharding.reshard(rows, reduced)
    dst = NamedSharding(square, P(None, "a"))

    def loss(x):
        return jnp.sum(move(x, dst) ** 2)

    def gradient(x):
        due = jax.grad(loss)(x)
        expected = P("a", None, unreduced=frozenset({"b"}))
        assert jax.typeof(due).sharding.spec == expected
        return jax.sharding.reshard(due, plain)

    with jax.set_mesh(square):
        np.testing.assert_array_equal(jax.jit(gradient)(x), 2 * VALUES)


@pytest.mark.parametrize(
    "types", [(AxisType.Auto, AxisType.Explicit), (AxisType.Explicit, AxisType.Auto)]
)
def test_mixed_axis_types_are_refused_inside_jit_alone(types):
    devices = np.array(jax.devices()).reshape(2, 4)
    mixed = Mesh(devices, ("x", "y"), axis_types=types)
    dst = NamedSharding(mixed, P("y", "x"))
    for kind in (AxisType.Explicit, AxisType.Auto):
        src = NamedSharding(mesh(kind, a=2, b=4), P("a", "b"))
        x = put(VALUES, src)
        jitted = jax.jit(ft.partial(move, dst=dst, src=src), out_shardings=dst)
        message = "of mixed axis types, .*reshard outside|Auto axes and the target's"
        with pytest.raises(SpecError, match=message):
            jitted(x)
        assert_lies(move(x, dst), VALUES, dst)


@pytest.mark.parametrize("kind", KINDS)
def test_meshes_without_devices_under_another_mesh(kind):
    around = mesh(kind, a=2, b=4)
    abstract_mesh = AbstractMesh((2, 4), ("x", "y"), axis_types=(kind,) * 2)
    target_mesh = AbstractMesh((8,), ("z",), axis_types=(kind,))
    src = NamedSharding(abstract_mesh, P("x", "y"))
    dst = NamedSharding(target_mesh, P(None, "z"))
    fn = jax.jit(lambda x, src: move(x, dst, src=src), static_argnums=1)
    x = put(VALUES, NamedSharding(around, P("a", "b")))
    with jax.set_mesh(around):
        named = NamedSharding(around.abstract_mesh, P("a", "b"))
        np.testing.assert_array_equal(fn(x, named), VALUES)
        if kind == AxisType.Explicit:  # the array's own type says where it lies
            np.testing.assert_array_equal(fn(x, src), VALUES)
        else:
            with pytest.raises(
                MeshError,
                match=(
                    r"without devices, and `jax.set_mesh` has set"
                    r" .*NamedSharding\(mesh, spec\)"
                ),
            ):
                fn(x, src)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn"])
@pytest.mark.parametrize("spec", [P(), P(None, "b"), P("a", "b"), None])
def test_what_is_compiled_sends_what_is_planned(dtype, spec):
    src, dst = pair()
    if spec is not None:
        dst = NamedSharding(src.mesh, spec)
    array_move = ((256, 256), jnp.dtype(dtype), src, dst)

    def sent_bytes(program):
        compiled = lowered(program, *array_move).compile()
        return wire_bytes(compiled.as_text(), 8)

    bytes_of_steps = sent_bytes(steps_program(*array_move))
    assert bytes_of_steps == planned(*array_move).wire_bytes
    # XLA's own program of the pair replicates the array.
    assert bytes_of_steps <= sent_bytes(lambda x: x)


def test_between_slices_the_planned_steps_cross_less_than_xla():
    m = mesh(slices=2, a=2, b=2)
    axes = {"slices": 2, "a": 2, "b": 2}
    mesh_spec = MeshSpec(axes, dcn={"slices": 2})
    src = NamedSharding(m, P("b", "a"))
    dst = NamedSharding(m, P("slices", "a"))
    shape = (256, 256)
    dtype = jnp.dtype("float32")
    planned_move = move_of(
        shape,
        dtype,
        src,
        dst,
        copies=False,
        meshes=(mesh_spec, mesh_spec),
    )
    plan = planned_move.plan
    assert plan is not None
    # The other half of a row's columns is in the own slice: nothing need cross.
    assert plan.wire_bytes == 256 * 256 * 4 // 4
    assert plan.dcn_bytes == 0

    def compiled_text(program):
        lowered_program = lowered(program, shape, dtype, src, dst)
        return lowered_program.compile().as_text()

    text_of_steps = compiled_text(program_of(plan, 2, src, dst))
    assert wire_bytes(text_of_steps, 8) == plan.wire_bytes
    assert wire_bytes(text_of_steps, 8, slices=2) == 0
    text_of_xla = compiled_text(lambda x: x)
    assert wire_bytes(text_of_xla, 8, slices=2) == 256 * 256 * 4 // 8
    values = np.arange(256 * 256, dtype=np.float32).reshape(shape)
    moved = carry_out(planned_move, put(values, src))
    assert_lies(moved, values, dst)


def test_errors_say_what_to_do():
    src, dst = pair()
    with pytest.raises(SpecError, match="pass `src=` with its sharding"):
        jax.jit(lambda x: move(x, dst))(put(VALUES, src))
    with pytest.raises(
        SpecError,
        match="leaf `w`: inside `jit` an array can only move to a NamedSharding",
    ):
        first_device = SingleDeviceSharding(jax.devices()[0])
        jax.jit(lambda x: move({"w": x}, first_device))(put(VALUES, src))
    order = [1, 0, 2, 3, 4, 5, 6, 7]
    device_mesh = mesh(order=order, c=4, d=2)
    permuted = NamedSharding(device_mesh, P("c"))
    with pytest.raises(MeshError, match="different orders.*reshard outside"):
        jax.jit(lambda x: move(x, permuted, src=src))(put(VALUES, src))
    _, typed = pair(AxisType.Explicit)
    with pytest.raises(
        SpecError, match=r"Auto axes and the target's mesh .* Explicit ones.*axis_types"
    ):
        jax.jit(lambda x: move(x, typed, src=src))(put(VALUES, src))
    sharding = NamedSharding(src.mesh, P("a"))
    with pytest.raises(
        SpecError,
        match=r"dim 1 .*\(16, 30\) does not divide into the 8 shards.*pad it to 32",
    ):
        jax.jit(lambda x: move(x, dst, src=src))(put(VALUES[:, :30], sharding))
    devices = np.array(jax.devices()[:4])
    few = NamedSharding(Mesh(devices, ("a",)), P("a"))
    with pytest.raises(MeshError, match="different orders"):
        jax.jit(lambda x: move(x, few, src=src))(put(VALUES, src))
    abstract_mesh = AbstractMesh((8,), ("a",))
    rows = NamedSharding(abstract_mesh, P("a"))
    columns = NamedSharding(abstract_mesh, P(None, "a"))
    with pytest.raises(
        MeshError, match="outside of `jit` .* has no devices .* give a jax Mesh"
    ):
        jax.grad(lambda x: move(x, columns, src=rows).sum())(put(VALUES, src))
    with pytest.raises(SpecError, match="inside `shard_map`.*outside"):
        moved_by_parts = jax.shard_map(
            lambda x: move(x, dst),
            mesh=src.mesh,
            in_specs=src.spec,
            out_specs=src.spec,
        )
        jax.jit(moved_by_parts)(put(VALUES, src))

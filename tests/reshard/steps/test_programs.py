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
)
DTYPES += (
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
    axis_types = (kind,) * len(sizes)
    return Mesh(
        devices.reshape(tuple(sizes.values())),
        tuple(sizes),
        axis_types=axis_types,
    )


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
    source = mesh(kind, a=2, b=4)
    target = mesh(kind, c=4, d=2)
    sharding = NamedSharding(target, P(None, ("d", "c")))
    return NamedSharding(source, P("b", "a")), sharding


VALUES = np.arange(16 * 32, dtype=np.float32).reshape(16, 32)


@st.composite
def ends(draw):
    """Two meshes over the eight devices, each with a spec of one rank, and the least
    shape that both divide.
    """
    rank = draw(st.integers(0, 4))
    rows = []
    for _ in range(2):
        sizes = draw(
            st.sampled_from([(8,), (2, 4), (4, 2), (2, 2, 2), (1, 8), (4, 1, 2)])
        )
        dims = [[] for _ in range(rank)]
        for axis in draw(st.permutations(list(range(len(sizes))))):
            dim = draw(st.integers(0, rank))
            if dim < rank:
                dims[dim].append("abc"[axis])
        if draw(st.booleans()):
            order = draw(st.permutations(list(range(8))))
        else:
            order = None
        rows.append((sizes, tuple(map(tuple, dims)), order))
    spare = draw(st.lists(st.sampled_from([0, 1, 1, 2]), min_size=rank, max_size=rank))
    return (
        rank,
        rows,
        spare,
    )


@given(ends(), st.sampled_from(KINDS), st.sampled_from(KINDS))
@settings(max_examples=40, deadline=None)
def test_a_live_array_gets_from_anywhere_to_anywhere(layouts, source_kind, target_kind):
    rank, result, spare = layouts
    shardings = []
    counts = []
    for (sizes, dims, order), kind in zip(
        result, (source_kind, target_kind), strict=True
    ):
        m = mesh(kind, order, **dict(zip("abc", sizes, strict=False)))
        spec = P(*[axes or None for axes in dims])
        shardings.append(NamedSharding(m, spec))
        axis_counts = [int(np.prod([m.shape[axis] for axis in axes])) for axes in dims]
        counts.append(axis_counts)
    shape = tuple(
        int(np.lcm(a, b)) * extra for a, b, extra in zip(*counts, spare, strict=True)
    )
    values = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    src, dst = shardings
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
        order = [3, 1, 4, 0, 5, 2, 6, 7]
        device_mesh = mesh(order=order, c=4, d=2)
        dst = NamedSharding(device_mesh, P("d", "c"))
    if target == "fewer":
        dst = NamedSharding(mesh(c=2, d=2), P("d", "c"))
    values = any_bits(jnp.dtype(dtype))
    x = put(values, src)
    with pytest.raises(MoveError, match="is too little") as error:
        through_programs(x, dst, memory_limit_bytes=1)
    (least,) = re.findall(r"pass `memory_limit_bytes=(\d+)` or more", str(error.value))
    for limit in (None, int(least)):
        assert_lies(through_programs(x, dst, memory_limit_bytes=limit), values, dst)


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
    struct = jax.ShapeDtypeStruct((16, 32), jnp.int8)
    with pytest.raises(LeafTypeError, match=message):
        jax.jit(lambda x: move(x.astype(dtype), dst, src=src)).lower(struct)


def concrete(sharding: NamedSharding) -> Mesh:
    assert isinstance(sharding.mesh, Mesh)
    return sharding.mesh


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_set", [False, True])
def test_traced_values_move_under_any_set_mesh(kind, is_set):
    src, dst = pair(kind)
    x = put(VALUES, src)
    weights = np.random.default_rng(0).standard_normal(VALUES.shape).astype(np.float32)
    there = put(weights, dst)

    def moved(x):
        return move(x, dst, src=src)

    def loss(x, there):
        return jnp.sum(moved(x) * there)

    device_mesh = mesh(kind, p=2, q=2, r=2)
    for around in (concrete(src), device_mesh):
        with jax.set_mesh(around) if is_set else contextlib.nullcontext():
            y = jax.jit(moved, out_shardings=dst)(x)
        assert_lies(y, VALUES, dst)
    with jax.set_mesh(concrete(dst)) if is_set else contextlib.nullcontext():
        gradient = jax.jit(jax.grad(loss), out_shardings=src)(x, there)
    assert_lies(gradient, weights, src)


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_is_moved_back_by_the_planned_steps(kind):
    src, dst = pair(kind)

    def pull(x, y):
        return jax.vjp(lambda x: move(x, dst, src=src), x)[1](y)[0]

    structs = (
        jax.ShapeDtypeStruct(VALUES.shape, jnp.float32, sharding=end)
        for end in (src, dst)
    )
    compiled = jax.jit(pull, out_shardings=src).lower(*structs).compile()
    text = compiled.as_text()
    assert text is not None
    sharding = NamedSharding(mesh(c=4, d=2), dst.spec)
    target_sharding = NamedSharding(mesh(a=2, b=4), src.spec)
    plan = planned(
        VALUES.shape,
        jnp.dtype("float32"),
        sharding,
        target_sharding,
    )
    assert wire_bytes(text, 8) <= plan.wire_bytes
    assert plan.steps


@pytest.mark.parametrize("kind", KINDS)
def test_inside_checkpoint_scan_vmap_and_forward_mode(kind):
    m = mesh(kind, a=2, b=4)
    src = NamedSharding(m, P("b", "a"))
    dst = NamedSharding(m, P("a", "b"))
    x = put(VALUES, src)
    there = ft.partial(move, dst=dst, src=src)
    back = ft.partial(move, dst=src, src=dst)

    def scanned(x):
        def body(x, _):
            return jax.checkpoint(lambda x: back(jnp.sin(there(x))))(x), None

        return lax.scan(body, x, None, length=3)[0]

    def plain(x):
        return jnp.sin(jnp.sin(jnp.sin(x)))

    def total(fn):
        return lambda x: jnp.sum(fn(x))

    right = jax.jit(jax.grad(total(plain)))(VALUES)
    gradient = jax.jit(jax.grad(total(scanned)))(x)
    np.testing.assert_allclose(gradient, right, rtol=1e-6)
    tangent = jax.jit(lambda x: jax.jvp(there, (x,), (2 * x,))[1], out_shardings=dst)(x)
    assert_lies(tangent, 2 * VALUES, dst)
    stacked = jax.jit(lambda x: jax.vmap(there)(jnp.stack([x, 2 * x])))(x)
    np.testing.assert_array_equal(stacked, np.stack([VALUES, 2 * VALUES]))


@pytest.mark.parametrize("kind", KINDS)
def test_src_is_ignored_outside_of_jit(kind):
    source = mesh(kind, a=2, b=2)
    there = mesh(kind, x=2, y=2)
    rows = NamedSharding(source, P("a"))
    columns = NamedSharding(source, P("b"))
    weights = jax.device_put(VALUES, columns)

    sharding = NamedSharding(there, P(None, ("y", "x")))
    for target in (
        NamedSharding(there, P("x")),
        sharding,
        rows,
    ):
        # The cotangent comes in the sharding of the weights, which JAX lets `multiply`
        # keep under Auto axes.
        move_out = lambda x, target=target: move(x, target, src=rows)
        ones = jax.device_put(np.ones_like(VALUES), rows)
        moved, back = jax.vjp(move_out, ones)
        placed = jax.device_put(VALUES, moved.sharding)
        cotangents = [placed, jnp.asarray(VALUES)]
        if kind == AxisType.Auto:
            cotangents += [weights]
        assert moved.sharding == target
        for cotangent in cotangents if kind == AxisType.Auto else cotangents[:1]:
            (gradient,) = back(cotangent)
            np.testing.assert_array_equal(gradient, VALUES)
            assert gradient.sharding.is_equivalent_to(rows, 2)
        stacked = jax.vmap(move_out)(jnp.stack([ones, 2 * ones]))
        ones = np.ones_like(VALUES)
        np.testing.assert_array_equal(stacked, np.stack([ones, 2 * ones]))
        if kind == AxisType.Auto:  # an untrue source
            np.testing.assert_array_equal(
                jax.jvp(move_out, (weights,), (weights,))[0], VALUES
            )


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
    source = mesh(kind, a=2, b=4)
    there = mesh(kind, c=2, d=2, e=2)
    src = NamedSharding(source, P("a", "b"))
    dst = NamedSharding(there, P("e", ("d", "c")))
    x = jax.device_put(VALUES, src)
    placed = jax.device_put(2 * VALUES, src)
    others = {
        "placed": placed,
        "elsewhere": jnp.asarray(3 * VALUES),
        "numpy": 4 * VALUES,
    }
    fn = lambda x: reshard({"traced": x, **others}, dst, src=src)
    moved = jax.jit(fn, out_shardings=dst)(x)
    for name, factor in (("traced", 1), ("placed", 2), ("elsewhere", 3), ("numpy", 4)):
        assert moved[name].sharding == dst
        np.testing.assert_array_equal(moved[name], factor * VALUES)


def test_sums_that_are_due_are_left_to_jax():
    square = mesh(AxisType.Explicit, a=2, b=2)
    spec = P(None, None, unreduced=frozenset({"b"}))
    src = NamedSharding(square, spec)
    dst = NamedSharding(square, P(None, None))
    rows = jax.device_put(VALUES, NamedSharding(square, P(None, "b")))
    columns = jax.device_put(VALUES.T, NamedSharding(square, P("b", None)))
    product = jax.jit(
        lambda x, y: move(jnp.einsum("ij,jk->ik", x, y, out_sharding=src), dst)
    )(rows, columns)
    np.testing.assert_allclose(product, VALUES @ VALUES.T, rtol=1e-5)


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("layouts", [("", "b"), ("b", ""), ("b", "b")])
def test_reduced_axes_are_kept_and_differentiated_as_jax_does(layouts, cross):
    square = mesh(AxisType.Explicit, a=2, b=4)
    other = mesh(AxisType.Explicit, c=2, b=4)
    reduced = [frozenset(end) for end in layouts]
    src = NamedSharding(square, P("a", None, reduced=reduced[0]))
    spec = P(None, "c" if cross else "a", reduced=reduced[1])
    dst = NamedSharding(other if cross else square, spec)
    tree = jax.device_put(VALUES, NamedSharding(square, P("a", None)))
    x = jax.sharding.reshard(tree, src)
    eager = reshard(x, dst)
    seen = []

    def moved(x):
        y = move(x, dst)
        seen.append(jax.typeof(y).sharding)
        return y

    assert_lies(jax.jit(moved)(x), VALUES, dst)
    assert seen == [NamedSharding(dst.mesh.abstract_mesh, dst.spec)]
    assert eager.sharding.spec == dst.spec  # pyright: ignore[reportAttributeAccessIssue]
    if cross:  # which JAX's own does not do
        return
    due = NamedSharding(square, P(None, "a", unreduced=reduced[1]))
    tangents = jax.ShapeDtypeStruct(VALUES.shape, jnp.float32, sharding=due)
    with jax.set_mesh(square):
        cases = (move, jax.sharding.reshard)
        pulled = [
            jax.eval_shape(
                lambda x, y, function=strategy: jax.vjp(lambda x: function(x, dst), x)[
                    1
                ](y)[0],
                x,
                tangents,
            )
            for strategy in cases
        ]
    assert (
        pulled[0].sharding.spec
        == pulled[1].sharding.spec
        == P("a", None, unreduced=reduced[0])
    )


def test_the_gradient_of_a_reduced_array_is_the_sum_that_is_due():
    square = mesh(AxisType.Explicit, a=2, b=4)
    plain = P("a", None)
    reduced = P("a", None, reduced=frozenset({"b"}))
    tree = jax.device_put(VALUES, NamedSharding(square, plain))
    x = jax.sharding.reshard(
        tree,
        NamedSharding(square, reduced),
    )
    dst = NamedSharding(square, P(None, "a"))

    def gradient(x):
        due = jax.grad(lambda x: jnp.sum(move(x, dst) ** 2))(x)
        expected = P("a", None, unreduced=frozenset({"b"}))
        assert jax.typeof(due).sharding.spec == expected
        return jax.sharding.reshard(due, NamedSharding(square, plain))

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
        with pytest.raises(
            SpecError,
            match="of mixed axis types, .*reshard outside|Auto axes and the target's",
        ):
            jax.jit(lambda x, src=src: move(x, dst, src=src), out_shardings=dst)(x)
        assert_lies(move(x, dst), VALUES, dst)


@pytest.mark.parametrize("kind", KINDS)
def test_meshes_without_devices_under_another_mesh(kind):
    around = mesh(kind, a=2, b=4)
    abstract_mesh = AbstractMesh((2, 4), ("x", "y"), axis_types=(kind,) * 2)
    there = AbstractMesh((8,), ("z",), axis_types=(kind,))
    src = NamedSharding(abstract_mesh, P("x", "y"))
    dst = NamedSharding(there, P(None, "z"))
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
    array = (
        (256, 256),
        jnp.dtype(dtype),
        src,
        dst if spec is None else NamedSharding(src.mesh, spec),
    )
    sent = [
        wire_bytes(lowered(fn, *array).compile().as_text(), 8)
        for fn in (steps_program(*array), lambda x: x)
    ]
    # XLA's own program of the pair replicates the array.
    assert sent[0] == planned(*array).wire_bytes <= sent[1]


def test_between_slices_the_planned_steps_cross_less_than_xla():
    m = mesh(slices=2, a=2, b=2)
    axes = {"slices": 2, "a": 2, "b": 2}
    mesh_spec = MeshSpec(axes, dcn={"slices": 2})
    src = NamedSharding(m, P("b", "a"))
    dst = NamedSharding(m, P("slices", "a"))
    chosen = move_of(
        (256, 256),
        jnp.dtype("float32"),
        src,
        dst,
        copies=False,
        meshes=(mesh_spec, mesh_spec),
    )
    plan = chosen.plan
    assert plan is not None
    # The other half of a row's columns is in the own slice: nothing need cross.
    assert plan.wire_bytes == 256 * 256 * 4 // 4
    assert plan.dcn_bytes == 0
    ours, theirs = (
        lowered(fn=fn, shape=(256, 256), dtype=jnp.dtype("float32"), src=src, dst=dst)
        .compile()
        .as_text()
        for fn in (program_of(plan, 2, src, dst), lambda x: x)
    )
    assert wire_bytes(ours, 8) == plan.wire_bytes
    assert wire_bytes(ours, 8, slices=2) == 0
    assert wire_bytes(theirs, 8, slices=2) == 256 * 256 * 4 // 8
    values = np.arange(256 * 256, dtype=np.float32).reshape(256, 256)
    assert_lies(carry_out(chosen, put(values, src)), values, dst)


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
    typed = pair(AxisType.Explicit)[1]
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
    cases = (P("a"), P(None, "a"))
    rows, columns = (NamedSharding(AbstractMesh((8,), ("a",)), spec) for spec in cases)
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

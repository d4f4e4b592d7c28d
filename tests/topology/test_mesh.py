"""MeshSpec: a value, its building from devices, and its splitting."""

import math

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _devices import chips
from hypothesis import given
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from shardfx import MeshSpec, topology
from shardfx.errors import MeshError


EXPLICIT = AxisType.Explicit


def ids(order):
    id_of = np.vectorize(lambda device: device.id)
    return id_of(order.devices)


# Four slices of four devices; eight of three slices.
SLICES = chips((2, 2, 1, 1), (2, 2, 1, 1), slices=4)
UNEVEN = [*SLICES[:6], *SLICES[8:10]]
SLICED = MeshSpec({"data": 8}, dcn={"data": 4})
T24 = MeshSpec({"data": 2, "t": 24}, dcn={"t": 8})
DATA_T = MeshSpec({"data": 2, "t": 16})


def test_a_mesh_is_a_value():
    axes = {"data": 2, "tensor": 4}
    mesh = MeshSpec(axes, axis_types={"tensor": EXPLICIT}, dcn={"data": 2})
    types = {"tensor": EXPLICIT, "data": AxisType.Auto}
    axes = [("data", 2), ("tensor", 4)]
    same = MeshSpec(axes, axis_types=types, dcn={"data": 2})
    assert mesh == same
    assert hash(mesh) == hash(same)
    leaves = jax.tree.leaves(mesh)
    assert not leaves
    assert mesh.axis_types == (AxisType.Auto, EXPLICIT)
    assert mesh.dcn_sizes == (2, 1)
    sizes_by_axis = dict(mesh.shape)
    assert sizes_by_axis == {"data": 2, "tensor": 4}
    assert mesh.size == 8
    axes = {"data": 8, "fsdp": -1, "tensor": 2}
    slices = MeshSpec(axes, dcn={"data": 4, "tensor": 2})
    assert str(slices) == "data=8(dcn=4),fsdp=-1,tensor=2(dcn=2)"
    parsed = MeshSpec.parse(str(slices))
    assert parsed == slices
    axes = {"tensor": 4, "data": 2}
    other_order = MeshSpec(axes)
    without_slices = MeshSpec({"data": 2, "tensor": 4})
    others = (
        other_order,
        without_slices,
    )
    assert mesh not in others
    axes = {"data": 2, "tensor": -1}
    unfilled = MeshSpec(axes)
    for shown in (unfilled, mesh):
        again = eval(repr(shown))
        assert again == shown


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: MeshSpec([("a", 1), ("a", 2)]),
            r"`a` occurs twice in \('a', 'a'\); give each axis one name",
        ),
        (
            lambda: MeshSpec({"a": 0}),
            "`a` has size 0; use a positive integer, or -1 for the rest",
        ),
        (lambda: MeshSpec({"": 2}), "named by a non-empty string, not ''"),
        (
            lambda: MeshSpec({"a": -1, "b": -1}),
            "mesh a=-1,b=-1 has two sizes of -1; at most one",
        ),
        (
            lambda: MeshSpec({"a": 4}, dcn={"a": 3}),
            "`a` of size 4 cannot span 3 slices; `dcn` must divide the size",
        ),
        (
            lambda: MeshSpec({"a": 4}, dcn={"b": 2}),
            r"`dcn` names mesh axis `b`, but the mesh has \('a',\)",
        ),
        (
            lambda: MeshSpec({"a": 4}, axis_types={"b": EXPLICIT}),
            "`axis_types` names mesh axis `b`",
        ),
        (
            lambda: MeshSpec({"a": 10**5000}),
            r"\('a',\) have more devices than JAX can number; use smaller sizes",
        ),
        (
            lambda: MeshSpec({"a": 2**16, "b": 2**16}),
            r"\('a', 'b'\) have more devices than JAX can number",
        ),
        (lambda: MeshSpec.parse("a=" + "9" * 5000), "9 is not of the form `name=size`"),
        (
            lambda: MeshSpec.parse("data=4,tensor"),
            "'tensor' is not of the form `name=size`",
        ),
        (lambda: MeshSpec.parse("data=4(dcn=2"), r"'data=4\(dcn=2' is not of the form"),
        (
            lambda: MeshSpec({"a": 4}).fit(8),
            r"a=4 has 4 devices, but there are 8; give one axis the size -1",
        ),
        (
            lambda: MeshSpec({"a": 4, "b": -1}).fit(6),
            "give 4, which does not divide 6 devices",
        ),
        (
            lambda: MeshSpec({"a": -1}).abstract(),
            r"axis of unknown size; call `.fit\(device_count\)` first",
        ),
        (lambda: MeshSpec({"a": 4}).axis_size("b"), "`axis_size` names mesh axis `b`"),
        (lambda: MeshSpec({"a": 4}).axis_size(("a", "a")), "an axis occurs twice"),
        (
            lambda: MeshSpec.of("data=4"),  # pyright: ignore
            "expected a MeshSpec, a jax Mesh or an AbstractMesh, not str",
        ),
        (
            lambda: MeshSpec({"data": 4}).build(jax.devices()),
            "has 4 devices, but there are 8",
        ),
        (
            lambda: MeshSpec({"data": 2}).build(jax.devices()[:1] * 2),
            "a device was given twice; pass each device once",
        ),
        (
            lambda: SLICED.order(SLICES[:8]),
            "over 4 slices, but .* are of 2; use `dcn` sizes whose product is 2",
        ),
        (
            lambda: MeshSpec({"a": 6}, dcn={"a": 2}).order(SLICES[:6]),
            r"the 6 devices are \[4, 2\] per slice",
        ),
        (
            lambda: MeshSpec({"a": 4, "b": 2}).order(UNEVEN),
            r"3 slices, and no axes of .*\(4, 2\).*dcn=\{\"data\": 3\}",
        ),
        (
            lambda: DATA_T.split("t", {"x": 3, "y": 4}),
            "have the product 12, and mesh axis `t` has size 16; give one part the size -1",
        ),
        (
            lambda: DATA_T.split("t", {"x": 3, "y": -1}),
            "give 3, which does not divide 16",
        ),
        (lambda: DATA_T.split("t", {"data": 4, "y": 4}), "`data` occurs twice"),
        (lambda: DATA_T.split("zz", {"x": 16}), "`split` names mesh axis `zz`"),
        (
            lambda: T24.split("t", {"x": 6, "y": 4}),
            "8 slices, which x=6,y=4 would cut; .* be a multiple of 8",
        ),
    ],
)
def test_a_mesh_refuses(make, message):
    with pytest.raises(MeshError, match=message):
        make()


def test_reading_filling_and_asking():
    expected = MeshSpec({"data": 4, "tensor": 2})
    parsed = MeshSpec.parse(" data = -1, tensor=2 ")
    assert parsed.fit(8) == expected
    mesh = MeshSpec({"data": 4, "tensor": 2})
    assert mesh.axis_size("data") == 4
    assert mesh.axis_size(("tensor", "data")) == 8
    assert mesh.axis_size(()) == 1
    assert MeshSpec.of(mesh) is mesh
    abstract = mesh.abstract()
    assert MeshSpec.of(abstract) == mesh
    spec = MeshSpec({"data": -1, "tensor": 2}, axis_types=EXPLICIT)
    mesh = spec.build(jax.devices())
    grid = np.array(jax.devices())
    devices = grid.reshape(4, 2)
    expected = Mesh(
        devices,
        ("data", "tensor"),
        axis_types=(EXPLICIT, EXPLICIT),
    )
    assert mesh == expected
    filled = spec.fit(8)
    assert MeshSpec.of(mesh) == filled


def test_other_devices_stay_in_the_order_given():
    backwards = jax.devices()[::-1]
    grid = np.array(backwards)
    values = grid.reshape(2, 4)
    mesh = MeshSpec({"data": 8})
    order = mesh.order(values)
    assert list(order.devices) == backwards
    assert order.method == "mesh_utils"
    assert order.reasons == ()
    assert order.mean_hops is None


@given(st.permutations(range(32)))
def test_the_order_of_tpus_does_not_depend_on_the_list(shuffled):
    devices = chips((4, 4, 2, 1), (2, 2, 1, 1), "TPU v5p")
    spec = MeshSpec({"data": 4, "tensor": 8})
    shuffled_devices = []
    for i in shuffled:
        shuffled_devices.append(devices[i])
    order = spec.order(shuffled_devices)
    actual = ids(order)
    expected = ids(spec.order(devices))
    assert (actual == expected).all()


@pytest.mark.parametrize(
    "sizes", [(64,), (16, 4), (4, 4, 4), (2, 8, 4), (32, 2), (2, 2, 2, 2, 2, 2)]
)
def test_a_built_mesh_is_a_permutation_that_says_what_it_changed(sizes):
    devices = chips((4, 4, 4, 1), (2, 2, 1, 1), "TPU v5p")
    mesh = MeshSpec((f"a{i}", size) for i, size in enumerate(sizes))
    order = mesh.order(devices)
    flat_ids = ids(order).ravel()
    actual = sorted(flat_ids)
    assert actual == list(range(64))
    assert order.devices.shape == sizes
    theirs = mesh_utils.create_device_mesh(
        sizes, devices, allow_split_physical_axes=True
    )
    changed = []
    for reason in order.reasons:
        if "walk their boxes" in reason:
            changed.append(reason)
    order_of_ids = list(order.devices.flat)
    expected = order_of_ids != list(theirs.flat)
    assert bool(changed) == expected
    expected = any("no products of whole" in why for why in order.reasons)
    assert ("physical axes split" in order.method) == expected


def test_slices_are_ordered_one_by_one():
    devices = chips((4, 4, 1, 1), (2, 2, 1, 1), "TPU v5 lite", slices=2)
    axes = {"replica": 2, "data": 8, "tensor": 2}
    spec = MeshSpec(axes, dcn={"replica": 2})
    order = spec.order(devices)
    assert order.method == "hybrid: mesh_utils, physical axes split"
    for piece in order.devices:
        slice_indices = set()
        for device in piece.flat:
            slice_indices.add(device.slice_index)
        assert len(slice_indices) == 1
    mesh = MeshSpec({"data": 8, "tensor": 2})
    alone = mesh.order(devices[:16])
    first = ids(order)[0]
    assert (first == ids(alone)).all()
    second = ids(order)[1]
    assert (second == ids(alone) + 16).all()


def test_an_axis_that_spans_slices_is_slowest_over_them():
    axes = {"data": 8, "tensor": 2}
    mesh = MeshSpec(axes, dcn={"data": 2, "tensor": 2})
    order = mesh.order(SLICES)
    slice_of = np.vectorize(lambda device: device.slice_index)
    piece = slice_of(order.devices)
    expected = [[0, 1]] * 4 + [[2, 3]] * 4
    assert piece.tolist() == expected
    other_mesh = MeshSpec({"data": 2, "fsdp": 8})
    without = other_mesh.order(SLICES)
    assert (
        without.reasons[0]
        == "the devices are of 4 slices and `dcn` spans one: axes span (2, 2) of them"
    )
    given = topology.device_order(SLICES, (2, 8), dcn_sizes=(1, 1))
    assert given.reasons == without.reasons


def test_processes_are_slices_where_devices_name_none():
    nodes = chips((4, 1, 1, 1), (2, 1, 1, 1), "NVIDIA H100")
    for device in nodes:
        device.platform = "gpu"
    axes = {"data": 2, "tensor": 2}
    mesh = MeshSpec(axes, dcn={"data": 2})
    order = mesh.order(nodes)
    expected = [[0, 1], [2, 3]]
    order_of_ids = ids(order)
    assert order_of_ids.tolist() == expected
    assert order.method == "hybrid: mesh_utils"
    axes = {"data": 4, "tensor": 2}
    mesh = MeshSpec(axes, dcn={"tensor": 2})
    order = mesh.order(jax.devices())
    expected = [[0, 4], [1, 5], [2, 6], [3, 7]]
    order_of_processes = ids(order)
    assert order_of_processes.tolist() == expected
    assert order.reasons == (
        "one process emulates 2 slices of 4 devices, in the order given",
    )


@pytest.mark.parametrize(
    ("devices", "sizes", "method", "reason"),
    [
        (chips((2, 2, 2, 2), (2, 2, 1, 2)), (4, 4), "torus", "one device per chip"),
        (
            chips((3, 3, 1, 1))[:4] + chips((3, 3, 1, 1))[5:],
            (8,),
            "as given",
            "none sits at (1, 1, 0, 0)",
        ),
        # `mesh_utils` loses the 2 in 14 when it factors it, and finds no place for an
        # axis of 4; JAX 0.12 does.
        (chips((2, 14, 1, 1), kind="TPU v5p"), (7, 4), "", "hysical"),
    ],
)
def test_a_torus_is_walked_where_jax_has_no_order(devices, sizes, method, reason):
    mesh = MeshSpec((f"a{position}", size) for position, size in enumerate(sizes))
    order = mesh.order(devices[::-1])
    assert order.method.startswith(method)
    assert reason in order.reasons[0]
    flat_ids = ids(order).ravel()
    actual = sorted(flat_ids)
    expected_ids = []
    for device in devices:
        expected_ids.append(device.id)
    assert actual == expected_ids
    if method == "as given":
        expected = [0, 1, 2, 3, 5, 6, 7, 8]
        order_of_ids = ids(order)
        assert order_of_ids.tolist() == expected
        assert order.mean_hops is None
    else:
        assert order.mean_hops is not None
        assert order.mean_hops[1] == 1.0


sizes = st.lists(st.integers(1, 4), min_size=1, max_size=3)


@given(sizes, sizes, st.integers(1, 4))
def test_splitting_gives_slices_to_the_slowest_parts(parts, others, slices):
    names = []
    for i in range(len(parts)):
        names.append(f"p{i}")
    tensor_size = math.prod(parts) * slices
    axes = {"a": math.prod(others), "t": tensor_size, "z": 2}
    mesh = MeshSpec(
        axes,
        dcn={"t": slices},
    )
    sizes_by_axis = dict(zip(names, parts, strict=True))
    parts_by_axis = {"s": slices} | sizes_by_axis
    split = mesh.split("t", parts_by_axis)
    assert split.axis_names == ("a", "s", *names, "z")
    split_size = split.axis_size(("s", *names))
    assert split_size == mesh.axis_size("t")
    ones = [1] * len(parts)
    expected = (1, slices, *ones, 1)
    assert split.dcn_sizes == expected
    kinds = (AxisType.Auto,) * len(split.axis_names)
    assert split.axis_types == kinds
    split_t24 = T24.split("t", {"x": 2, "y": 12})
    dcn_sizes = split_t24.dcn_sizes
    assert dcn_sizes == (1, 2, 4)


def test_arrays_of_a_split_mesh_mix_with_the_old_ones():
    spec = MeshSpec({"data": 2, "tensor": 4})
    mesh = spec.build(jax.devices())
    parts = spec.split("tensor", {"kv": 2, "rep": 2})
    finer = parts.build(mesh)
    values = jnp.arange(64.0).reshape(8, 8)
    a = jax.device_put(values, NamedSharding(mesh, P("data", "tensor")))
    values = jnp.arange(64.0).reshape(8, 8)
    sharding = NamedSharding(finer, P("data", ("kv", "rep")))
    b = jax.device_put(values, sharding)
    assert a.sharding.is_equivalent_to(b.sharding, 2)
    columns = NamedSharding(finer, P(None, "kv"))
    c = jax.device_put(jnp.ones((8, 2)), columns)
    out = jax.jit(lambda a, b, c: (a + b) @ c)(a, b, c)
    values = np.arange(64.0).reshape(8, 8)
    np.testing.assert_array_equal(out, (2 * values) @ np.ones((8, 2)))
    devices = chips((4, 4, 4, 1), (2, 2, 1, 1), "TPU v5p")
    torus = MeshSpec({"data": 4, "tensor": 16}).build(devices)
    parts = MeshSpec.of(torus).split("tensor", {"kv": 8, "rep": 2})
    split = parts.build(torus)
    assert split.devices.shape == (4, 8, 2)
    assert list(split.devices.flat) == list(torus.devices.flat)

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import (
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec as P,
    SingleDeviceSharding,
)

from shardfx import (
    AxisRules,
    Decision,
    MeshSpec,
    PathRules,
    constrain,
    gather,
    plan,
    shardings_of,
    specs_of,
)
from shardfx.errors import LeafTypeError, PlanMismatchError, RuleError, SpecError


U = P.UNCONSTRAINED
AXES = AxisRules(
    [("batch", "data"), ("mlp", "tensor"), ("heads", "tensor")], units={"heads": 4}
)


def mesh_of(*kinds):
    devices = np.array(jax.devices()).reshape(2, 4)
    return Mesh(devices, ("data", "tensor"), axis_types=kinds)


def plan_on(mesh):
    return plan(
        {"w": jnp.ones((8, 8))},
        mesh,
        paths=PathRules.parse("w->data.tensor"),
        axes=AXES,
    )


AUTO = mesh_of(AxisType.Auto, AxisType.Auto)
EXPLICIT = mesh_of(AxisType.Explicit, AxisType.Explicit)
MIXED = mesh_of(AxisType.Explicit, AxisType.Auto)
MESHES = pytest.mark.parametrize(
    "mesh", [AUTO, EXPLICIT, MIXED], ids=["auto", "explicit", "mixed"]
)
X = np.arange(64.0, dtype=np.float32).reshape(8, 8)


@MESHES
@pytest.mark.parametrize("ambient", [False, True])
@pytest.mark.parametrize(
    "spec", [P("data", "tensor"), P(), P(None, "data"), P(("data", "tensor"))]
)
def test_constrain_gives_the_same_layout_for_every_axis_type(mesh, ambient, spec):
    sharding_plan = plan_on(mesh)
    x = jax.device_put(X, NamedSharding(mesh, P("data")))

    with jax.set_mesh(mesh) if ambient else contextlib.nullcontext():
        both = (
            jax.jit(lambda x: constrain(x + 0, spec, sharding_plan))(x),
            constrain(x, spec, sharding_plan),
        )
    for result in both:
        assert result.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)
        assert np.array_equal(result, X)


@pytest.mark.parametrize(
    "names, message",
    [
        (
            ("bacth", None),
            (
                r"^`strict=True`, and \('bacth', None\) would not shard as asked: dim"
                r" 0: no rule covers "
            ),
        ),
        (
            ("mlp", "heads"),
            (
                r"dim 1: logical name `heads` \(`tensor` is used by `mlp` on dim 0\)"
                r" wanted mesh axes"
            ),
        ),
    ],
)
def test_strict_constrain_raises_for_a_name_without_an_axis(names, message):
    sharding_plan = plan_on(AUTO)
    x = jax.device_put(X, NamedSharding(AUTO, P()))
    asked = lambda x: constrain(
        x, names, sharding_plan, strict=True, unmatched="replicate"
    )
    everywhere = jax.shard_map(
        asked, mesh=AUTO, in_specs=P("data"), out_specs=P("data")
    )
    for function in (asked, everywhere):
        for run in (function, jax.jit(function)):
            with pytest.raises(SpecError, match=message):
                run(x)
    assert np.array_equal(constrain(x, names, sharding_plan, unmatched="replicate"), X)
    constrained = constrain(x, ("batch", None), sharding_plan, strict=True)
    assert constrained.sharding.spec == P("data")  # pyright: ignore[reportAttributeAccessIssue]


def test_constrain_leaves_unconstrained_dimensions_open():
    sharding_plan = plan_on(AUTO)
    x = jax.device_put(X, NamedSharding(AUTO, P(None, "tensor")))
    out = jax.jit(lambda x: constrain(x * 2, P("data", U), sharding_plan))(x)
    assert out.sharding.spec == P("data", "tensor")
    constrained = constrain(x, P("data", U), sharding_plan)
    assert np.array_equal(constrained, X)


def test_constrain_keeps_the_memory_kind():
    sharding_plan = plan_on(AUTO)
    x = jax.device_put(X, NamedSharding(AUTO, P(), memory_kind="pinned_host"))
    sharding = constrain(x, P("data"), sharding_plan).sharding
    assert sharding == NamedSharding(AUTO, P("data"), memory_kind="pinned_host")


@pytest.mark.parametrize(
    "manual, rest",
    [
        (("data",), P(None, "tensor")),
        (("tensor",), P("data")),
        (("data", "tensor"), P()),
    ],
)
@pytest.mark.parametrize("mesh", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_constrain_leaves_out_manual_axes_in_silence(mesh, manual, rest):
    sharding_plan = plan_on(mesh)
    manual_axes = {axis: axis for axis in manual}
    specs = P(manual_axes.get("data"), manual_axes.get("tensor"))
    x = jax.device_put(X, NamedSharding(mesh, specs))

    @jax.jit
    @jax.shard_map(
        mesh=mesh,
        in_specs=specs,
        out_specs=specs,
        axis_names=set(manual),
    )
    def double(x):
        x, decision = constrain(
            x * 2, ("batch", "mlp"), sharding_plan, strict=True, explain=True
        )
        assert decision == Decision(rest)
        return x

    assert np.array_equal(double(x), X * 2)


def test_errors_of_constrain():
    sharding_plan = plan_on(AUTO)
    with pytest.raises(
        LeafTypeError, match="takes one array, not dict; map it over a tree"
    ):
        constrain({"a": X}, P(), sharding_plan)  # pyright: ignore[reportArgumentType]
    with pytest.raises(RuleError, match="the plan has no `axes`"):
        constrain(X, ("batch", None), plan({"w": X}, AUTO, unmatched="replicate"))
    with pytest.raises(SpecError, match="has 3 entries"):
        constrain(X, P("data", None, "tensor"), sharding_plan)
    without = plan({"w": X}, MeshSpec.of(AUTO), unmatched="replicate")
    of_numpy = r"ndarray and shape \(8, 8\), lies on no"
    for x, text in (
        (jnp.asarray(X), "outside `jit`, an array can only be"),
        (X, of_numpy),
    ):
        with pytest.raises(PlanMismatchError, match=text):
            constrain(x, P("data"), without)
    other = Mesh(np.array(jax.devices()), ("z",))
    sharding = NamedSharding(other, P())
    with pytest.raises(
        PlanMismatchError,
        match="the array lies on a mesh z=8, but the plan is for data=2,tensor=4",
    ):
        jax.jit(lambda x: constrain(x, P("data"), sharding_plan))(
            jax.device_put(X, sharding)
        )


def test_reading_back():
    sharding = NamedSharding(AUTO, P(None, ("data",)))
    x = jax.device_put(X, sharding)
    struct = jax.ShapeDtypeStruct(
        (8,), jnp.float32, sharding=NamedSharding(AUTO, P("tensor"))
    )
    tree = {
        "x": x,
        "struct": struct,
        "one": jnp.ones(()),
        "np": X,
        "f": jnp.tanh,
    }
    expected = {
        "x": P(None, "data"),
        "struct": P("tensor"),
        "one": P(),
        "np": P(),
        "f": None,
    }
    assert specs_of(tree) == expected
    read = shardings_of(tree)
    assert isinstance(read["one"], SingleDeviceSharding)
    assert read["x"] == x.sharding
    assert read["struct"] == struct.sharding
    assert read["np"] is None
    assert read["f"] is None
    shardings = shardings_of({"p": P("data")}, AUTO)["p"]
    assert shardings == NamedSharding(AUTO, P("data"))
    with pytest.raises(
        LeafTypeError, match=r"array `x`, shape \(2,\), lies on SingleDeviceSharding"
    ):
        specs_of({"x": jnp.ones(2)})
    with pytest.raises(PlanMismatchError, match=r"holds the bare spec \w+\('data'"):
        shardings_of({"p": P("data")})


def test_reading_back_inside_jit_sees_explicit_types():
    seen = []
    sharding = NamedSharding(EXPLICIT, P("data"))
    jax.jit(lambda x: seen.append(specs_of({"x": x})))(jax.device_put(X, sharding))
    assert seen == [{"x": P("data")}]


def test_an_auto_axis_of_size_1_is_not_named_where_traced():
    kinds = (AxisType.Auto, AxisType.Auto)
    mesh = jax.make_mesh((2, 1), ("data", "model"), axis_types=kinds)
    x = jax.device_put(X, NamedSharding(mesh, P("data")))
    with pytest.raises(LeafTypeError, match=r"the Auto axes \('data',\): the compiler"):
        jax.jit(lambda x: specs_of({"x": x}))(x)


@pytest.mark.parametrize("read", [specs_of, shardings_of])
def test_reading_back_inside_jit_does_not_guess_auto_axes(read):
    x = jax.device_put(X, NamedSharding(AUTO, P("data")))
    with pytest.raises(
        LeafTypeError,
        match="array `x`, .* is traced on a mesh with the Auto axes \\('data'",
    ):
        jax.jit(lambda x: read({"x": x}))(x)
    # A program for one device has nothing to guess.
    jax.jit(lambda x: read({"x": x}) and x)(jnp.ones((4, 4)))


HEADS = AxisRules(
    [("batch", "data"), ("heads", "tensor"), ("embed", None)], units={"heads": 16}
)
APART = (None, "heads", None)


def plan_with(*sizes):
    # Neither the size of another name nor that of an array without names says anything
    # about heads.
    tree = {f"q{size}": jax.ShapeDtypeStruct((16, size), jnp.float32) for size in sizes}
    names = {**dict.fromkeys(tree, ("embed", "heads")), "plain": None}
    return plan(
        {**tree, "plain": jnp.ones((20, 40))},
        AUTO,
        names=names,
        axes=HEADS,
        unmatched="replicate",
    )


@pytest.mark.parametrize(
    "sizes, shape, cut",
    [
        ((128,), (2, 8, 16), True),  # smaller than a unit
        ((), (2, 8, 16), True),
        ((640,), (2, 20, 3), True),  # no multiple, and the plan's arrays are
        ((2048,), (2, 128, 16), True),  # as many as a fused array has heads
        ((256,), (2, 16, 16), True),
        ((128,), (2, 128, 16), True),  # 8 units of 16
        # As large as a fused array of two heads, which decides.
        (
            (32, 512),
            (2, 32, 16),
            False,
        ),
    ],
)
def test_heads_that_are_apart_may_have_the_name_of_fused_ones(sizes, shape, cut):
    sharding_plan = plan_with(*sizes)
    run = lambda x: constrain(x, APART, sharding_plan)
    x = jax.device_put(np.zeros(shape, np.float32), NamedSharding(AUTO, P()))
    for leaf in (
        sharding_plan.sharding(APART, shape),
        run(x).sharding,
        jax.jit(run)(x).sharding,
    ):
        assert leaf.spec == (P(None, "tensor") if cut else P())  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    "sizes, shape", [((), (2, 40, 16)), ((), (2, 16, 16)), ((128,), (2, 32, 16))]
)
def test_heads_of_which_nothing_says_whether_they_are_apart(sizes, shape):
    sharding_plan = plan_with(*sizes)
    text = (
        r"'heads', which is made of units of 16, and no array"
        r" .*`axes.extend\(\[\('heads_apart', axis\)\]\)`"
    )
    with pytest.raises(SpecError, match=text):
        constrain(np.zeros(shape, np.float32), APART, sharding_plan)
    with pytest.raises(SpecError, match=text):
        sharding_plan.sharding(APART, shape, strict=False)
    # The fix.
    axes = HEADS.extend([("heads_apart", "tensor")])
    named = plan({}, AUTO, axes=axes)
    spec = named.sharding((None, "heads_apart", None), shape).spec
    assert spec == P(None, "tensor")


def test_a_plan_cuts_a_cache_between_heads():
    for heads, spec in ((8, P(None, "tensor")), (6, P())):  # 4 does not divide 6
        sharding_plan = plan(np.zeros((2, heads, 16)), AUTO, names=APART, axes=HEADS)
        leaves = sharding_plan.leaves[0]
        actual = leaves.spec
        assert actual == spec


def test_what_the_mesh_of_bare_specs_cannot_be_is_named(as_users_run_it):
    mesh: Any = MeshSpec({"data": 8})
    tree = {"w": P("data")}
    with pytest.raises(PlanMismatchError, match="is a JAX mesh, not MeshSpec; write"):
        shardings_of(tree, mesh=mesh)
    # No bare spec needs it.
    shardings = shardings_of({"w": np.ones(4)}, mesh=mesh)
    assert shardings == {"w": None}
    with pytest.raises(PlanMismatchError, match="the mesh has no axis 'model'; it has"):
        shardings_of({"w": P("model")}, mesh=mesh.build(jax.devices()))


def test_a_deleted_array_is_named_by_gather():
    array = jnp.ones((4, 2))
    array.delete()
    with pytest.raises(LeafTypeError, match=r"`a/w`, float32\[4, 2\], was deleted"):
        gather({"a": {"w": array}})

"""What is no sharding, and shardings on several sets of devices, at the boundary of
`filter_jit`.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P, SingleDeviceSharding

import shardfx as sfx
from shardfx import AxisRules, MeshSpec, PathRules, filter_jit
from shardfx.errors import LeafTypeError, PlanMismatchError


AXES = AxisRules([("batch", "data"), ("mlp", "tensor")])
RULES = PathRules([("w", P("data", "tensor"))])
TREE = {"w": np.arange(32.0, dtype=np.float32).reshape(4, 8)}


@pytest.fixture(scope="module")
def plans():
    spec = MeshSpec({"data": 2, "tensor": 2})
    devices = np.array(jax.devices())
    plans = []
    for side in (devices[:4], devices[4:], devices[3::-1]):
        mesh = jax.sharding.Mesh(side.reshape(2, 2), spec.axis_names)
        plans.append(sfx.plan(TREE, mesh, paths=RULES, axes=AXES))
    return plans


def test_what_is_no_sharding_is_named(plans):
    plan = plans[0]
    text = (
        r"holds .*, of type \w+, which is no sharding; give a plan,"
        r" `plan.sharding\(names\)`"
    )
    parts = (plan.axes, plan.mesh, plan.jax_mesh, plan.leaves, plan.structs)
    for entry in (("batch", None), ["batch", ...], "batch", *parts):
        with pytest.raises(PlanMismatchError, match=f"`in_shardings` {text}"):
            filter_jit(lambda tree, x: x, in_shardings=(plan, entry))
        with pytest.raises(PlanMismatchError, match=f"`out_shardings` {text}"):
            filter_jit(lambda x: x, out_shardings={"y": entry})


def test_plans_on_several_meshes_are_named(plans):
    first_plan, second_plan, _ = plans
    text = (
        r"an entry of `{}` of .* is on devices \[4, 5, 6, 7\], and an entry of"
        r" `in_shardings` of .* is on devices "
        r"\[0, 1, 2, 3\]; .*give each a function of its own, and `reshard` between them"
    )
    with pytest.raises(PlanMismatchError, match=text.format("in_shardings")):
        filter_jit(lambda a, b: a["w"] + b["w"], in_shardings=(first_plan, second_plan))
    with pytest.raises(PlanMismatchError, match=text.format("out_shardings")):
        filter_jit(lambda a: a, in_shardings=(first_plan,), out_shardings=second_plan)
    inside = filter_jit(lambda a: sfx.shard(a, second_plan), in_shardings=(first_plan,))
    with pytest.raises(
        PlanMismatchError,
        match="use plans on one mesh inside one function.*JAX says: .*constraint",
    ):
        inside(TREE)


@pytest.mark.parametrize("other", [1, 2])
def test_an_array_on_other_devices_than_its_entry_is_not_moved(plans, other):
    """JAX moves one that would be cut alike at the first call; at the second the
    runtime fails, or crashes.
    """
    step = filter_jit(lambda tree: tree, in_shardings=(plans[0],))
    source = sfx.shard(TREE, plans[0])
    on_other_devices = sfx.shard(TREE, plans[other])
    for _ in range(2):
        with pytest.raises(
            PlanMismatchError,
            match=r"`w` of argument 0 .* lies by .* on devices \[(4|3)",
        ):
            step(on_other_devices)
        moved = step(source)
        assert np.array_equal(moved["w"], TREE["w"])
    # What is on no devices yet, or on none of its own choice, goes where the entry
    # says.
    for arguments in (TREE, {"w": jnp.asarray(TREE["w"])}):
        sharding = step(arguments)["w"].sharding
        assert sharding == plans[0].shardings["w"]


def test_an_array_that_lies_otherwise_than_its_entry_is_named(plans):
    sharding = NamedSharding(plans[0].jax_mesh, P("tensor"))
    other = jax.device_put(TREE["w"], sharding)
    step = filter_jit(lambda tree: tree, in_shardings=(plans[0],))
    with pytest.raises(
        PlanMismatchError,
        match=r"`w` of argument 0 .* lies by .*\('tensor',?\).*`in_shardings` is",
    ):
        step({"w": other})


def test_jax_moves_whole_arrays_to_an_entry_of_one_device(plans):
    first_device, other_device, *_ = jax.devices()
    first = SingleDeviceSharding(first_device)
    other = SingleDeviceSharding(other_device)
    run = filter_jit(lambda x: x + 1, in_shardings=(first,))
    mesh = plans[0].jax_mesh
    for sharding in (other, NamedSharding(mesh, P())):
        for _ in range(2):
            output = run(jax.device_put(TREE["w"], sharding))
            assert np.array_equal(output, TREE["w"] + 1)
    with pytest.raises(
        PlanMismatchError,
        match=r"lies by .* on devices \[0, 1, 2, 3\], but its entry .* on device \[0\]",
    ):
        run(jax.device_put(TREE["w"], NamedSharding(mesh, P("data"))))


def step(params, batch, *, rate=0.1, key):
    return params, batch, rate, key


MISFITS = [
    ((1,), {"key": 2}, "missing a required argument: 'batch'"),
    ((1, 2), {}, "missing a required .*argument: 'key'"),
    ((1, 2, 3), {"key": 2}, "too many positional arguments"),
    ((1, 2), {"key": 2, "kye": 3}, "got an unexpected keyword argument 'kye'"),
    ((1, 2), {"key": 2, "batch": 3}, "multiple values for argument 'batch'"),
]


@pytest.mark.parametrize("args, kwargs, text", MISFITS)
def test_a_call_that_does_not_fit_the_signature_is_told_with_it(args, kwargs, text):
    for call in (filter_jit(step), filter_jit(step).lower):
        with pytest.raises(
            TypeError, match=rf"^step\(params, batch, \*, rate=0.1, key\): {text}"
        ):
            call(*args, **kwargs)


def test_a_key_that_is_no_parameter_is_named(plans):
    with pytest.raises(
        PlanMismatchError,
        match=r"the entry .* for argument 0 of .* is no prefix of it: .*'c'",
    ):
        filter_jit(lambda a, b: a, in_shardings={"c": plans[0]})(TREE, TREE)
    in_shardings = {"a": plans[0], "bb": plans[0]}
    with pytest.raises(
        PlanMismatchError,
        match=r"`bb` is no parameter of .*<lambda>\(a, b\), .*; name parameters",
    ):
        filter_jit(lambda a, b: a, in_shardings=in_shardings)
    # One entry for all arguments may be a dict.
    shardings = {"w": plans[0].shardings["w"]}
    out = filter_jit(lambda a, b: b, in_shardings=shardings)(TREE, TREE)
    assert out["w"].sharding == shardings["w"]  # pyright: ignore[reportAttributeAccessIssue]


TAKE_SHARDINGS = [
    lambda entry: jax.jit(lambda tree: tree, out_shardings=entry)(TREE),
    lambda entry: jax.jit(lambda tree: tree, in_shardings=(entry,))(TREE),
    lambda entry: jax.device_put(TREE, entry),
    lambda entry: eqx.filter_shard(jax.tree.map(jnp.asarray, TREE), entry),
]


@pytest.mark.parametrize("take", TAKE_SHARDINGS)
def test_jax_takes_the_shardings_of_a_plan_and_not_the_plan(plans, take):
    """The texts are in docs/faq.md."""
    with pytest.raises(ValueError, match="write `plan.shardings`") as error:
        take(plans[0])
    texts = (
        "pytree structure error: different types at key path",
        "specification must be a tree prefix of the corres",
    )
    assert any(text in str(error.value) for text in texts)
    sharding = take(plans[0].shardings)["w"].sharding
    assert sharding == plans[0].shardings["w"]


@pytest.mark.parametrize("donate", [None, 1.5, [None], [1.5], [[0]], np.array(0.5)])
def test_what_is_no_name_and_no_position_is_not_donated(donate, as_users_run_it):
    with pytest.raises(ValueError, match="`donate` names .*no positional parameter"):
        sfx.filter_jit(lambda a, b: a @ b, donate=donate)


@pytest.mark.parametrize("position", [np.int64(0), np.array(0), jnp.array(0)])
def test_an_integer_of_numpy_or_jax_is_a_position_to_donate(position, as_users_run_it):
    x = jnp.ones((4, 4))
    sfx.filter_jit(lambda a, b: a + b, donate=position)(x, jnp.ones((4, 4)))
    assert x.is_deleted()


def test_a_function_without_known_parameters_is_refused(as_users_run_it):
    with pytest.raises(LeafTypeError, match="needs the parameters of `max`, which"):
        sfx.filter_jit(max)
    with pytest.raises(LeafTypeError, match="needs the parameters of `max`, which"):
        sfx.filter_jit(in_shardings=None)(max)
    with pytest.raises(LeafTypeError, match="takes a function, not int"):
        sfx.filter_jit(in_shardings=None)(5)  # pyright: ignore

"""`follow` against JAX itself, for every optimizer that the installed optax has."""

import inspect
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from shardfx import (
    MeshSpec,
    PathRules,
    ShardPlan,
    filter_jit,
    follow,
    plan,
    shard,
)
from tests.plan.followed_plans import HEADS, MESH, SIZES, SMALL_PLAN
from tests.specs import canonical
from tests.structs import struct


RULES = PathRules(
    [
        ("embed", P("tensor", ("data", "fsdp"))),
        ("up/weight", P("fsdp", "tensor")),
        ("down/weight", P("tensor", ("fsdp", "data"))),
        ("experts", P(None, "data", "tensor")),
        ("bias", P("tensor")),
        ("norm", P()),
    ]
)


def ones(shape: int | tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
    return np.ones(shape, dtype)


def params() -> dict[str, Any]:
    """Parameters of several dtypes, with a scalar and an odd size; some are large
    enough for Adafactor to factor.
    """
    return {
        "embed": ones((256, 128)),
        "layers": [
            {
                "up": {"weight": ones((128, 256)), "bias": ones(256)},
                "down": {
                    "weight": ones((256, 128), jnp.bfloat16),
                    "bias": ones(7),
                },
                "norm": ones(128),
            }
            for _ in range(2)
        ],
        "experts": ones((3, 8, 4)),
        "temperature": ones(()),
    }


def built(axis_type: AxisType) -> Mesh:
    grid = np.array(jax.devices())
    devices = grid.reshape(2, 2, 2)
    return Mesh(
        devices,
        tuple(SIZES),
        axis_types=(axis_type,) * 3,
    )


def MATRICES(tree):
    return jax.tree.map(lambda x: x.ndim > 1, tree)


def RANKS(tree):
    return jax.tree.map(lambda x: "matrix" if x.ndim > 1 else "vector", tree)


def MUON(tree):
    return jax.tree.map(
        lambda x: optax.contrib.MuonDimensionNumbers() if x.ndim == 2 else None, tree
    )


ARGUMENTS: dict[str, Any] = {
    **dict.fromkeys(
        ("inner", "tx", "optimizer", "base_optimizer", "fast_optimizer"),
        optax.adam(1e-3),
    ),
    **dict.fromkeys(("l2_norm_clip", "max_delta", "max_norm", "threshold"), 1.0),
    **dict.fromkeys(("clipping", "eta", "noise_multiplier", "step_size"), 0.1),
    **dict.fromkeys(("max_backtracking_steps", "max_linesearch_steps"), 3),
    **dict.fromkeys(("max_consecutive_errors", "sync_period"), 2),
    **{
        "learning_rate": 1e-3,
        "decay": 0.9,
        "gamma": 0.5,
        "slow_step_size": 0.5,
        "seed": 0,
        "measure_name": "grads",
    },
    "step_size_fn": lambda count: 0.1 / (1 + count),
    "f": lambda updates, params: updates,
    "measure": lambda updates, **_: updates,
    "should_transform_fn": lambda step, **_: step % 2 == 0,
    "key": jax.random.key(0),
    **{"mask": MATRICES, "freeze_mask": MATRICES, "adv_optimizer": optax.sgd(0.1)},
}
LABELS: dict[Hashable, Any] = {
    "matrix": optax.adam(1e-3),
    "vector": optax.sgd(0.1, momentum=0.9),
}

# Combinators whose arguments must fit together, and variants with more state than the
# default has.
COMPOSED: dict[str, Callable[[], Any]] = {
    "adafactor with momentum": lambda: optax.adafactor(1e-3, momentum=0.9),
    "adafactor, all factored": lambda: optax.adafactor(1e-3, min_dim_size_to_factor=2),
    "sgd with momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "chain": lambda: optax.chain(
        optax.clip_by_global_norm(1.0), optax.lion(1e-4), optax.ema(0.99)
    ),
    "multi_transform": lambda: optax.multi_transform(LABELS, RANKS),
    "MultiSteps": lambda: optax.MultiSteps(optax.adamw(1e-3), 4),
    "schedule": lambda: optax.adamw(
        optax.warmup_cosine_decay_schedule(0.0, 1e-3, 10, 100)
    ),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(
        learning_rate=1e-3
    ),
    "muon with chosen dimensions": lambda: optax.contrib.muon(
        1e-3, muon_weight_dimension_numbers=MUON
    ),
    "galore of low rank": lambda: optax.contrib.galore(1e-3, rank=4),
}


def discovered() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Every function of optax and optax.contrib that makes a gradient transformation."""
    for module in (optax, optax.contrib):
        for name, function in sorted(vars(module).items()):
            name = name if module is optax else f"contrib.{name}"
            if (
                "." not in name
                and name.startswith("_")
                or not inspect.isfunction(function)
                or name in COMPOSED
            ):
                continue
            signature = inspect.signature(function)
            if "Transformation" in str(signature.return_annotation):
                yield (
                    name,
                    lambda function=function, signature=signature: called(
                        function, signature
                    ),
                )


def called(function: Callable[..., Any], signature: inspect.Signature) -> Any:
    needed = []
    for parameter in signature.parameters.values():
        # A key is optional only because an integer may seed the noise instead.
        is_needed = parameter.default is parameter.empty or parameter.name == "key"
        is_named = parameter.kind in (
            parameter.POSITIONAL_OR_KEYWORD,
            parameter.KEYWORD_ONLY,
        )
        if is_needed and is_named:
            needed.append(parameter.name)
    names = set(needed)
    if unknown := sorted(names - set(ARGUMENTS)):
        pytest.skip(
            f"a newer optax: {function.__name__} needs {unknown}, which this test has"
            " no values for"
        )
    arguments = {}
    for name in needed:
        arguments[name] = ARGUMENTS[name]
    return function(**arguments)


OPTIMIZERS = dict(discovered()) | COMPOSED
# JAX cannot type a reshape of a sharded array to one dimension, so nothing but shapes
# can be followed.
UNTYPED = ("flatten",)


def test_all_that_optax_has_are_found():
    assert len(OPTIMIZERS) >= 92
    expected = {
        "adamw",
        "adafactor",
        "lion",
        "masked",
        "lbfgs",
        "sm3",
        "contrib.muon",
        "contrib.schedule_free",
    }
    names = set(OPTIMIZERS)
    assert expected <= names


@pytest.fixture(scope="module")
def params_plan() -> ShardPlan:
    return plan(params(), MESH, paths=RULES)


@pytest.fixture(scope="module")
def placed_params(params_plan: ShardPlan) -> Any:
    """The parameters on a mesh of Explicit axes, sharded as planned."""
    mesh = built(AxisType.Explicit)

    def put(x, spec):
        return jax.device_put(x, NamedSharding(mesh, spec))

    return jax.tree.map(put, params(), params_plan.specs)


@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_follow_gives_what_jax_gives(name, params_plan, placed_params):
    optimizer = OPTIMIZERS[name]()
    state_plan = follow(optimizer.init, params_plan)
    tree = jax.eval_shape(optimizer.init, params())
    structure = jax.tree.structure(state_plan.structs)
    expected_structure = jax.tree.structure(tree)
    assert structure == expected_structure
    actual = []
    for leaf in state_plan.leaves:
        actual.append((leaf.shape, leaf.dtype))
    leaves = jax.tree.leaves(tree)
    expected = []
    for x in leaves:
        expected.append((x.shape, x.dtype))
    assert actual == expected
    if name in UNTYPED:
        for leaf in state_plan.leaves:
            if leaf.spec == P():
                assert leaf.reasons
        return
    with jax.set_mesh(built(AxisType.Explicit)):
        init = jax.jit(optimizer.init)
        state = init(placed_params)
    planned = {}
    for leaf in params_plan.leaves:
        planned[leaf.path] = leaf
    arrays = jax.tree.leaves(state)
    for leaf, array in zip(state_plan.leaves, arrays, strict=True):
        arguments = canonical(array.sharding.spec)
        if arguments != P() or leaf.rule is None:
            assert leaf.spec == arguments, leaf
            continue
        # JAX replicates what does not depend on the parameters; the plan does better
        # where a path says so.
        by_length = sorted(planned, key=len, reverse=True)
        source = next(path for path in by_length if f"/{path}/" in f"/{leaf.path}/")
        if not leaf.path.endswith(
            source
        ):  # a statistic of one dimension, which nothing shards there
            assert leaf.spec == P()
            assert leaf.shape[0] in planned[source].shape
            continue
        # A history, as L-BFGS keeps it, counts its entries on the first dimensions.
        count = len(planned[source].shape)
        leading_count = len(leaf.shape) - count
        entries = (None,) * leading_count
        assert leaf.shape[len(entries) :] == planned[source].shape
        entries_of_source = planned[source].spec
        spec = P(*entries, *entries_of_source)
        expected = canonical(spec)
        assert leaf.spec == expected


TRAINED = {
    **dict.fromkeys(
        (
            "adamw",
            "adafactor with momentum",
            "lion",
            "sgd with momentum",
            "chain",
            "masked",
        )
    ),
    **dict.fromkeys(("multi_transform", "MultiSteps", "contrib.muon")),
    "adam": "data",
}


@pytest.mark.parametrize(("name", "over"), TRAINED.items())
def test_two_steps_under_the_plan_equal_two_steps_on_one_device(name, over):
    optimizer = OPTIMIZERS[name]()
    all_params = jax.tree.map(jnp.asarray, params())
    weights = {"embed": all_params["embed"], "up": all_params["layers"][0]["up"]}

    def cosines(x):
        return np.cos(np.arange(x.size, dtype=np.float32)).reshape(x.shape)

    grads = jax.tree.map(cosines, weights)
    bias_axis = "tensor" if over else "data"
    rules = PathRules(
        [
            ("embed", P("tensor", "fsdp")),
            *RULES.rules[1:2],
            ("bias", P(bias_axis)),
        ]
    )
    mesh = built(AxisType.Auto)
    sharding_plan = plan(weights, mesh, paths=rules)
    state_here = follow(optimizer.init, sharding_plan, over=over)

    def step(weights, state, grads):
        updates, state = optimizer.update(grads, state, weights)
        updated = optax.apply_updates(weights, updates)
        return updated, state

    entries = {
        "in_shardings": (sharding_plan, state_here, sharding_plan),
        "out_shardings": (sharding_plan, state_here),
    }
    sharded = filter_jit(step, **entries, donate=(0, 1))
    init = filter_jit(
        optimizer.init, in_shardings=(sharding_plan,), out_shardings=state_here
    )
    state = init(weights)
    placed = shard(weights, sharding_plan)
    there = (placed, state)
    state_alone = optimizer.init(weights)
    alone = (weights, state_alone)
    jitted = jax.jit(step)
    for _ in range(2):
        there = sharded(*there, grads)
        alone = jitted(*alone, grads)
    there_leaves = jax.tree.leaves(there)
    alone_leaves = jax.tree.leaves(alone)
    for item, two in zip(there_leaves, alone_leaves, strict=True):
        # Muon iterates in bfloat16 over matrices whose products are summed in another
        # order.
        tolerance = 2e-5 if name == "contrib.muon" else 1e-6
        assert np.allclose(item, two, rtol=1e-5, atol=tolerance)
    leaves = jax.tree.leaves(there[1])
    for leaf, array in zip(state_here.leaves, leaves, strict=True):
        shard_of_array = array.addressable_shards[0]
        assert shard_of_array.data.nbytes == leaf.bytes_per_device
    assert (
        not over
        or state_here["0/mu/embed"].bytes_per_device * 8
        == state_here["0/mu/embed"].bytes
    )


def test_other_arguments_and_other_plans(params_plan):
    array = jnp.ones((8, 128))
    rules = PathRules.parse("x->data")
    batch = plan({"x": array}, MESH, paths=rules)

    def make(weights, inputs, scale, extra):
        weight = weights["layers"][0]["up"]["weight"]
        hidden = inputs["x"] @ weight
        zeros = jnp.zeros((4, 4))
        return {
            "hidden": hidden * scale,
            "copy": weights["embed"],
            "extra": extra,
            "count": zeros,
        }

    memory_kinds = [("copy", "pinned_host")]
    state_plan = follow(
        make, params_plan, batch, 2.0, "text", memory_kinds=memory_kinds
    )
    assert state_plan["copy"].memory_kind == "pinned_host"
    assert state_plan["hidden"].memory_kind is None
    assert state_plan["hidden"].spec == P("data", "tensor")
    assert state_plan["copy"].spec == params_plan["embed"].spec
    assert state_plan["count"].spec == P()
    message = state_plan["count"].reasons[0].message
    assert "follows no planned one" in message
    assert state_plan.specs["extra"] is None


def test_the_reason_says_where_jax_follows_no_sharding():
    def squared(tree):
        return {"w": tree["a"]["w"], "square": tree["a"]["w"].T @ tree["a"]["w"]}

    state_plan = follow(
        squared,
        SMALL_PLAN,
    )
    (why,) = state_plan["square"].reasons
    message = str(why)
    assert (
        "JAX cannot follow shardings through `init`: ShardingTypeError: Contracting"
        " dimensions" in message
    )

    # Arrays by the paths of planned ones follow those all the same.
    def with_square(tree):
        return {**tree, "square": tree["a"]["w"].T @ tree["a"]["w"]}

    named = follow(with_square, SMALL_PLAN)
    assert named["a/w"].spec == SMALL_PLAN["a/w"].spec
    assert named["a/w"].reasons == ()
    with pytest.raises(KeyError, match="no such thing"):
        follow(lambda tree: tree["no such thing"], SMALL_PLAN)


def test_follow_works_alike_on_explicit_and_mixed_axes(params_plan):
    init = optax.adafactor(1e-3).init
    followed = follow(init, params_plan)
    for types in (AxisType.Explicit, {"data": AxisType.Explicit}):
        mesh = MeshSpec(SIZES, axis_types=types)
        sharding_plan = plan(params(), mesh, paths=RULES)
        again = optax.adafactor(1e-3).init
        state_plan = follow(again, sharding_plan)
        assert state_plan.specs == followed.specs
        assert state_plan.mesh == sharding_plan.mesh


def test_names_and_units_go_to_copies_and_histories():
    names = {"w": ("heads", "embed")}
    tree = {"w": struct(8, 8)}
    square = plan(tree, MESH, names=names, axes=HEADS)
    cases = (
        lambda tree: tree,
        lambda tree: {"w": tree["w"].T},
        lambda _: {"w": jnp.zeros((5, 3, 8, 8))},
    )
    copied, turned, history = (follow(make, square)["w"] for make in cases)
    assert copied.names == ("heads", "embed")
    assert copied.units == (4, 1)
    assert turned.spec == P("fsdp", "tensor")
    assert turned.names is None
    assert turned.units is None
    assert history.names == (None, None, "heads", "embed")
    assert history.units == (
        1,
        1,
        4,
        1,
    )
    assert history.spec == P(None, None, "tensor", "fsdp")

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from shardfx import AxisRules, MeshSpec, PathRules, filter_jit, plan, shard, specs_of
from shardfx.errors import PlanMismatchError


SPEC = MeshSpec({"data": 2, "fsdp": 2, "tensor": 2})
RULES = PathRules([("weight", P(None, "fsdp")), ("bias", ())])
AXES = AxisRules([("batch", "data")])
X = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)


class Net(eqx.Module):
    mlp: eqx.nn.MLP
    name: str

    def __init__(self, key):
        self.mlp = eqx.nn.MLP(16, 16, 32, 2, key=key)
        self.name = "net"

    def __call__(self, x):
        return self.mlp(x)


MESH = SPEC.build(jax.devices())
KEY = jax.random.key(0)
PARAMS = plan(eqx.filter_eval_shape(Net, KEY), MESH, paths=RULES)
BATCH = plan(
    {"x": X, "y": X},
    MESH,
    names={"x": ("batch", None), "y": ("batch", None)},
    axes=AXES,
)
DATA = NamedSharding(MESH, P("data"))


def test_a_model_is_initialised_sharded_without_a_full_copy():
    make = filter_jit(Net, out_shardings=PARAMS)
    compiled = make.lower(KEY).compile()
    model = make(KEY)
    weight = model.mlp.layers[1].weight
    assert weight.addressable_shards[0].data.shape == (32, 16)
    # A pointer per output.
    assert (
        compiled.memory_analysis().output_size_in_bytes <= PARAMS.bytes_per_device + 256
    )
    layers = Net(KEY).mlp.layers[1]
    assert np.array_equal(weight, layers.weight)


def test_it_is_a_decorator_of_functions_and_methods():
    traces = []

    class Scale(eqx.Module):
        by: jax.Array

        @filter_jit(donate="none")
        def apply(self, x):
            """Scales."""
            traces.append(x)
            return self.by * x

    for by in (2.0, 3.0):
        applied = Scale(jnp.array(by)).apply(X)
        assert np.array_equal(applied, by * X)
    assert len(traces) == 1
    assert Scale.apply.__doc__ == "Scales."


@pytest.mark.parametrize(
    "donate, gone",
    [
        ("all-except-first", [1]),
        ("b", [1]),
        (0, [0]),
        (("a", 1), [0, 1]),
        (True, [0, 1]),
        (False, []),
    ],
)
def test_donation(donate, gone):
    arrays = [jnp.ones((8, 16)), jnp.ones((8, 16))]
    filter_jit(lambda a, b: (a + 1, b + 1), donate=donate)(*arrays)
    positions = [
        position for position, array in enumerate(arrays) if array.is_deleted()
    ]
    assert positions == gone


@pytest.mark.parametrize("name", ["z", 2, -1, (True, False)])
def test_a_donated_argument_that_is_no_parameter_is_named(name):
    with pytest.raises(
        ValueError,
        match="`donate` names .*, which is no positional parameter \\(a, b\\)",
    ):
        filter_jit(lambda a, b: a, donate=name)


def test_an_array_that_is_gone():
    x = jax.device_put(X, DATA)
    step = filter_jit(
        lambda state, x: (state, x.sum()), in_shardings={"state": DATA}, donate="state"
    )
    state = {"b": x, "w": jnp.copy(x)}
    used = state
    state, _ = step(state, X)
    assert used["b"].is_deleted()
    assert step.lower(used, X)
    with pytest.raises(
        PlanMismatchError,
        match="`b` of argument 0 .* was deleted, or donated to an earlier call",
    ):
        step(used, X)
    with pytest.raises(PlanMismatchError, match="`w` of argument 0 .* was deleted"):
        step({"b": state["b"], "w": used["w"]}, X)
    with pytest.raises(
        PlanMismatchError, match="argument 0 of .*, float32\\[8, 16\\], was deleted"
    ):
        filter_jit(lambda x: x)(used["w"])


def test_an_array_that_is_donated_twice():
    x = jax.device_put(X, DATA)
    both = filter_jit(
        lambda state: jax.tree.map(lambda x: x + 1, state),
        in_shardings=(DATA,),
        donate="all",
    )
    with pytest.raises(
        PlanMismatchError,
        match="`ema` of argument 0 of .* and `params` of .* one array.* both are",
    ):
        both({"params": x, "ema": x})
    jitted = filter_jit(lambda a, *, c, b: (a + 1, b + 1, c), donate="a")
    with pytest.raises(
        PlanMismatchError,
        match="argument 0 of .* and argument `b` of .* one of them is donated",
    ):
        jitted(x, c=jnp.ones(3), b=x)
    with pytest.raises(PlanMismatchError, match="are one array"):
        jitted.lower(x, c=jnp.ones(3), b=x).compile()(x, c=jnp.ones(3), b=x)
    # What is copied on its way is donated as a copy, and what is not donated is as
    # often there as one likes.
    assert np.array_equal(both({"params": X, "ema": X})["ema"], X + 1)
    loose = jnp.asarray(X)
    params = both({"params": loose, "ema": loose})["params"]
    assert np.array_equal(params, X + 1)
    assert np.array_equal(filter_jit(lambda a, b: a + b)(x, x), 2 * X)
    assert not x.is_deleted()


def spec_at(function, where, *args, **kwargs):
    return specs_of(filter_jit(function, in_shardings=where)(*args, **kwargs))


def test_an_entry_reaches_its_argument_by_name_and_by_place():
    data = DATA
    cut = P("data")
    double = filter_jit(
        lambda x, scale=2.0, *, shift=0.0: x * scale + shift, in_shardings=(data,)
    )
    for out in (double(x=X), double(scale=2.0, x=X), double(X, shift=0.0)):
        assert specs_of(out) == cut
        assert np.array_equal(out, X * 2)
    actual = spec_at(lambda x, y: x + y, {"y": data}, y=X, x=np.zeros_like(X))
    assert actual == cut
    # One entry serves all arguments.
    actual = spec_at(lambda x, y: (x, y), data, X, X)
    assert actual == (cut, cut)
    actual = spec_at(lambda *xs: xs, data, X, X, X)
    assert actual == (cut,) * 3
    actual = spec_at(lambda *, b, c=None: (b, c), data, b=X, c=X)
    assert actual == (cut, cut)
    # Parameters that are keyword-only, or as many as there are arguments.
    actual = spec_at(lambda a, *, b: b, {"b": data}, 1, b=X)
    assert actual == cut
    actual = spec_at(lambda a, *args: args[1], {"args": data}, 1, X, X)
    assert actual == cut
    actual = spec_at(lambda **named: named["z"], {"z": data}, y=2, z=X)
    assert actual == cut
    actual = spec_at(lambda **named: named["z"], {"named": data}, z=X)
    assert actual == cut
    # An entry may go without an argument, as long as no array goes without an entry.
    actual = spec_at(lambda x, **_: x, {"x": data, "z": data}, X)
    assert actual == cut
    actual = spec_at(lambda *args: args[0], (data, data), X)
    assert actual == cut
    actual = spec_at(lambda a, *, b: (a, b), (data,), X, b=jnp.ones(3))
    assert actual == (cut, P())
    with pytest.raises(
        PlanMismatchError,
        match="argument `b` of .* is not the tree that its plan is for",
    ):
        filter_jit(lambda *, b: b, in_shardings={"b": BATCH})(b={"x": X})


def test_an_entry_that_misses_its_argument_is_an_error():
    data = {"x": X, "y": X}

    def decorated(*args, **kwargs):
        return args, kwargs

    def named(batch, **kwargs):
        return batch, kwargs

    cases = ({"batch": BATCH}, (BATCH,))
    by_name, by_place = (filter_jit(decorated, in_shardings=form) for form in cases)
    specs = specs_of(by_name(batch=data))[1]
    expected = specs_of(by_place(data))[0][0]["x"]
    assert specs["batch"]["x"] == expected == P("data")
    with pytest.raises(
        PlanMismatchError,
        match="entry for argument `batch` of .* lacks, and none for argument 0",
    ):
        by_name(data)
    with pytest.raises(
        PlanMismatchError,
        match="entry for argument 0 of .* lacks, and none for argument `batch`",
    ):
        by_place(batch=data)
    misspelt = filter_jit(named, in_shardings={"bacth": BATCH})
    for call in (misspelt, misspelt.lower):
        with pytest.raises(
            PlanMismatchError,
            match="entry for argument `bacth` of .* lacks, and none for argument 0",
        ):
            call(data)
    with pytest.raises(
        PlanMismatchError,
        match=r"2 entries, but there are 1 positional parameters \(a\); give one",
    ):
        filter_jit(lambda a: a, in_shardings=(BATCH, BATCH))


def test_arguments_of_another_dtype_or_shape_name_the_leaf():
    model = Net(KEY)
    traces = []
    run = filter_jit(
        lambda model, x: traces.append(x) or jax.vmap(model)(x),
        in_shardings=(PARAMS, None),
    )
    run(model, X)
    # JAX cannot cut 17 in two.
    for width, dtype in ((16, "bfloat16"), (17, "float32")):
        other = eqx.tree_at(
            lambda net: net.mlp.layers[0].weight, model, jnp.ones((32, width), dtype)
        )
        text = (
            r"argument 0 of `.*` is not the tree that its plan is for: leaf"
            rf" `mlp/layers/0/weight` is {dtype}"
            rf"\[32, {width}\], but the plan is for float32\[32, 16\]; plan the tree"
            r" that you use"
        )
        for call in (run, run.lower):
            with pytest.raises(PlanMismatchError, match=text):
                call(other, X)
    assert len(traces) == 1


def test_results_that_do_not_fit_name_the_leaf():
    with pytest.raises(
        PlanMismatchError,
        match=r"what `.*<lambda>` returns is not .*: leaf `y` is bfloat16\[8, 16\]",
    ):
        filter_jit(
            lambda x: {"x": x, "y": x.astype(jnp.bfloat16)}, out_shardings=BATCH
        )(X)
    with pytest.raises(
        PlanMismatchError,
        match=r"returns is not the tree that .* \(1 array more, 0 missing\): .* `z`",
    ):
        filter_jit(lambda x: {"x": x, "y": x, "z": x}, out_shardings=BATCH)(X)
    out_shardings = (None, {"a": BATCH})
    with pytest.raises(
        PlanMismatchError,
        match=r"`1/a` of what `.*` returns is not the tree .* has no `y`",
    ):
        filter_jit(lambda x: (x, {"a": {"x": x}}), out_shardings=out_shardings)(X)
    with pytest.raises(
        PlanMismatchError, match=r"what `.*<lambda>` returns is no prefix of it"
    ):
        filter_jit(lambda x: {"x": x}, out_shardings=(PARAMS, BATCH))(X)


def test_shardings_that_do_not_fit_name_the_leaf():
    text = (
        r"the sharding of argument 0 of `.*<lambda>` does not fit its leaf `a`,"
        r" float32\[3\]: the spec is "
        r"\w+\('data',\) on a mesh {'data': 2, 'fsdp': 2, 'tensor': 2}; `correct\(.*,"
        r" \(3,\), mesh\)` gives"
    )
    with pytest.raises(PlanMismatchError, match=text):
        filter_jit(lambda tree: tree, in_shardings=DATA)({"a": jnp.ones(3)})
    with pytest.raises(
        PlanMismatchError,
        match=r"the sharding of `b` of what .* does not fit it, float32\[\]",
    ):
        filter_jit(lambda x: {"b": x.sum()}, out_shardings={"b": DATA})(X)


def test_a_function_that_fails_fails_as_it_does():
    with pytest.raises(ZeroDivisionError):
        filter_jit(lambda model: 1 / 0, in_shardings=PARAMS)(Net(KEY))


def test_lowering_with_the_structs_of_a_plan():
    run = filter_jit(
        lambda model, data: jax.vmap(model)(data["x"]), in_shardings=(PARAMS, BATCH)
    )
    structs = eqx.combine(PARAMS.structs, eqx.filter_eval_shape(Net, KEY))
    model = Net(KEY)
    compiled = run.lower(structs, BATCH.structs).compile()
    out = compiled(shard(model, PARAMS), shard({"x": X, "y": X}, BATCH))
    assert np.allclose(out, jax.vmap(model)(X), rtol=1e-5, atol=1e-6)


def test_what_is_compiled_keeps_its_static_arguments():
    lowered = filter_jit(lambda x, scale: x * scale).lower(X, 2)
    compiled = lowered.compile()
    assert np.array_equal(compiled(X, 2), 2 * X)
    assert np.array_equal(compiled(x=X, scale=2), 2 * X)
    for static, shown in ((2.0, "2.0"), ((2, 2), "2, 2")):
        with pytest.raises(
            PlanMismatchError,
            match=rf"was compiled for other .*\(\[2\] then, \[{shown}\] now\); lower",
        ):
            compiled(X, static)


def test_a_plan_of_few_arrays_takes_the_rest_as_it_comes():
    few = PARAMS.select("bias")
    model = Net(KEY)
    layers = filter_jit(lambda model: model, in_shardings=few, out_shardings=few)(
        model
    ).mlp.layers
    first = layers[0]
    assert specs_of(first.bias) == P()
    weight = model.mlp.layers[0].weight
    assert np.array_equal(first.weight, weight)


def test_arrays_on_other_devices_are_named():
    mesh = MeshSpec({"data": 8}).build(jax.devices())
    x = jax.device_put(jnp.ones((8, 4)), NamedSharding(mesh, P("data")))
    step = filter_jit(lambda model, batch: model["w"] + batch["x"])
    with pytest.raises(
        PlanMismatchError,
        match=(
            r"`shard\(tree, plan\)`.*argument `w` of argument 0 of `.*` with shape .*"
            r" device ids \[0, 1, 2, .* and "
            r"argument `x` of argument 1 of `.*` with shape float32\[8,4\] and"
            r" (?:with )?device ids \[3\]"
        ),
    ) as error:
        step(
            {"w": x, "f": jnp.tanh},
            {"x": jax.device_put(jnp.ones((8, 4)), jax.devices()[3])},
        )
    assert "incompatible devices" in str(error.value.__cause__)


class Counter(eqx.Module):
    count: jax.Array

    def __call__(self, step: jax.Array) -> "Counter":
        return Counter(self.count + step)


def test_a_module_may_return_another_one_like_it():
    mesh = MeshSpec({"data": 8}).build(jax.devices()[:8])
    counter = Counter(jnp.zeros(8))
    planned = plan(counter, mesh, paths=PathRules([("count", P("data"))]))
    later = filter_jit(counter, out_shardings=planned)(jnp.ones(8))
    assert specs_of(later).count == P("data")
    assert (later.count == 1).all()

"""Steps on meshes with Explicit axes, as `jax.make_mesh` makes them: constrained,
named and searched like their plain forms.
"""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.sharding import AxisType, NamedSharding, reshard
from models import f32

import shardfx as sfx
from shardfx.auto import auto_axes, constrain_step, name_axes, search
from shardfx.auto._asked import without_shardings
from shardfx.errors import MeshError, SpecError


AXES = ("data", "tensor")
RULES = sfx.AxisRules([("batch", "data"), ("mlp", "tensor"), ("embed", "data")])


def loss(params, x):
    hidden = jax.nn.relu(x @ params["up"])
    return jnp.mean((x + hidden @ params["down"]) ** 2)


def descended(params, grads):
    return jax.tree.map(lambda param, grad: param - 0.1 * grad, params, grads)


def step(params, x):
    value, grads = jax.value_and_grad(loss)(params, x)
    return descended(params, grads), value


def typed_loss(params, x):
    up = reshard(params["up"], P(None, "tensor"))
    down = reshard(params["down"], P("tensor", None))
    hidden = jax.nn.relu(x @ up)
    out = jnp.matmul(hidden, down, out_sharding=P("data", None))
    return jnp.mean((x + out) ** 2)


def typed_step(params, x):
    value, grads = jax.value_and_grad(typed_loss)(params, x)
    return descended(params, grads), value


def arguments():
    rng = np.random.default_rng(0)
    up = rng.normal(size=(16, 64)) * 0.1
    down = rng.normal(size=(64, 16)) * 0.1
    x = rng.normal(size=(8, 16))
    params = {"up": jnp.asarray(up, "float32"), "down": jnp.asarray(down, "float32")}
    return params, jnp.asarray(x, "float32")


def mesh_of(kind):
    return jax.make_mesh((2, 2), AXES, axis_types=(kind, kind))


def planned(args, mesh):
    names = name_axes(step, *arguments()).names
    plans = []
    for arg, tree in zip(args, names, strict=True):
        plans.append(sfx.plan(arg, mesh, names=tree, axes=RULES))
    return tuple(plans)


def spec_of(array):
    return jax.typeof(array).sharding.spec


class Run(NamedTuple):
    """The results of a constrained step, the plan of the parameters, and the bytes that
    the step sends.
    """

    params: Any
    value: Any
    plan: sfx.ShardPlan
    wire_bytes: int


@pytest.fixture(scope="module")
def auto():
    """The constrained step on Auto axes."""
    return run(step, mesh_of(AxisType.Auto))


def run(step, mesh):
    args = arguments()
    plan, batch_plan = planned(args, mesh)
    placed = [sfx.shard(args[0], plan), sfx.shard(args[1], batch_plan)]
    constrained = constrain_step(step, mesh, RULES)
    replicated = NamedSharding(mesh, P())
    jitted = jax.jit(constrained, out_shardings=(plan.shardings, replicated))
    compiled = jitted.lower(*placed).compile()
    params, value = compiled(*placed)
    traffic = sfx.cost.traffic(compiled, mesh)
    return Run(params=params, value=value, plan=plan, wire_bytes=traffic.wire_bytes)


@pytest.mark.parametrize("form", [step, typed_step], ids=["plain", "typed"])
def test_a_constrained_step_is_that_of_auto_axes(form, auto):
    explicit = run(form, mesh_of(AxisType.Explicit))
    assert explicit.wire_bytes == auto.wire_bytes > 0
    assert not sfx.misplaced(explicit.params, explicit.plan)
    for name, array in explicit.params.items():
        assert spec_of(array) == explicit.plan[name].spec
        np.testing.assert_allclose(array, auto.params[name], rtol=1e-6)
    np.testing.assert_allclose(explicit.value, auto.value, rtol=1e-6)


def looked_up(params, x):
    return params["embed"][x.astype(int)]


def pooled(params, x):
    def add(a, b):
        return a + b + 1

    y = x @ params["embed"]
    return jax.lax.reduce_window(y, 0.0, add, (2, 2), (2, 2), "SAME")


def reduced(params, x):
    def add(a, b):
        return a + b + a * b

    y = x @ params["embed"]
    return jax.lax.reduce(y, 0.0, add, (1,))


@pytest.mark.parametrize("layer", [looked_up, pooled, reduced])
def test_functions_of_two_elements_have_no_shardings(layer):
    """XLA partitions a sum by the function that adds two elements, and knows it only
    without shardings: it would gather what a lookup's derivative adds to a table.
    """

    def loss(params, x):
        return jnp.mean(layer(params, x) ** 2)

    def step(params, x):
        if layer is looked_up:
            grads = jax.grad(loss)(params, x)
            return descended(params, grads)
        return params, loss(params, x)

    params = {"embed": jnp.ones((64, 32))}
    x = jnp.ones((16, 64))
    rules = sfx.AxisRules([("batch", "data")])
    bytes_by_kind = {}
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = mesh_of(kind)
        placed_params = jax.device_put(params, NamedSharding(mesh, P()))
        placed_x = jax.device_put(x, NamedSharding(mesh, P("data")))
        jitted = jax.jit(constrain_step(step, mesh, rules))
        lowered = jitted.lower(placed_params, placed_x)
        assert '"data"=1' not in lowered.as_text()
        traffic = sfx.cost.traffic(lowered.compile(), mesh)
        bytes_by_kind[kind] = traffic.wire_bytes
    assert bytes_by_kind[AxisType.Explicit] == bytes_by_kind[AxisType.Auto]


def test_results_are_typed_without_out_shardings():
    """The plain step has no type on these axes."""

    def step_and_hidden(params, x):
        stepped, value = step(params, x)
        return stepped, value, x @ params["up"]

    mesh = mesh_of(AxisType.Explicit)
    plan, batch_plan = planned(arguments(), mesh)
    structs = (plan.structs, batch_plan.structs)
    with pytest.raises(Exception, match="ambiguous"):
        jax.eval_shape(step, *structs)
    typed = constrain_step(step_and_hidden, mesh, RULES)
    params, value, hidden = jax.eval_shape(typed, *structs)
    for name, struct in params.items():
        assert struct.sharding.spec == plan[name].spec
    assert value.sharding.spec == P()
    assert hidden.sharding.spec == P("data", "tensor")


def test_a_typed_step_is_named_as_the_plain_one():
    args = arguments()
    with jax.set_mesh(mesh_of(AxisType.Explicit)):
        typed = name_axes(typed_step, *args)
    plain = name_axes(step, *args)
    assert typed.names == plain.names
    names = [axis.name for axis in typed.axes]
    assert names == [axis.name for axis in plain.axes]


def test_a_search_answers_alike_and_sees_the_donation():
    args = ({"up": f32(64, 256), "down": f32(256, 64)}, f32(64, 64))

    def found(step):
        jitted = jax.jit(step, donate_argnums=0)
        return search(jitted, *args, devices=2, chip="v5e", keep=5, effort="least")

    plain = found(step)
    with jax.set_mesh(mesh_of(AxisType.Explicit)):
        typed = found(typed_step)
    assert typed[0].donated == (0,)
    for candidate, other in zip(typed, plain, strict=True):
        assert candidate.mesh == other.mesh
        assert candidate.rules == other.rules
        assert candidate.seconds == pytest.approx(other.seconds, rel=1e-9)
        assert candidate.memory_bytes == other.memory_bytes


def test_constrain_follows_a_trace_for_one_device():
    mesh = mesh_of(AxisType.Explicit)
    rules = sfx.PathRules([("x", P())])
    plan = sfx.plan({"x": jnp.ones((8, 16))}, mesh, paths=rules)

    def constrained(x):
        sines = sfx.constrain(jnp.sin(x), P("data"), plan)
        return sines * 2

    ones = np.ones((3, 5), np.float32)
    with jax.set_mesh(mesh):
        result = sfx.testing.unsharded(constrained)(jnp.asarray(ones))
    np.testing.assert_allclose(result, np.sin(ones) * 2, rtol=1e-6)


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_a_function_on_auto_axes_is_typed_and_differentiated(kind):
    mesh = mesh_of(kind)
    params, x = arguments()
    plan, batch_plan = planned((params, x), mesh)

    def block(x, params, *, scale=1, name="block"):
        hidden = jax.nn.relu(x @ params["up"]) * scale
        return {"y": hidden @ params["down"], "hidden": hidden, "name": name}

    out = {"y": ("batch", None), "hidden": ("batch", "mlp"), "name": None}
    typed = auto_axes(block, plan, out=out)

    def value(params, x, block):
        result = block(x, params=params, scale=2)
        return jnp.sum(result["y"] ** 2)

    placed_params = sfx.shard(params, plan)
    placed_x = sfx.shard(x, batch_plan)
    jitted = sfx.filter_jit(typed)
    result = jitted(placed_x, placed_params, scale=2)
    assert result["name"] == "block"
    specs = sfx.specs_of(result)
    assert specs["y"] == P("data")
    assert specs["hidden"] == P("data", "tensor")
    gradient = jax.grad(lambda params, x: value(params, x, typed))
    jitted_gradient = jax.jit(gradient)
    grads = jitted_gradient(placed_params, placed_x)
    expected_grads = jax.grad(value)(params, x, block)
    for name, expected in expected_grads.items():
        np.testing.assert_allclose(grads[name], expected, rtol=1e-5, atol=1e-6)
        if kind == AxisType.Explicit:
            assert sfx.specs_of(grads)[name] == plan[name].spec


def test_specs_in_place_of_names_are_corrected_to_the_shape():
    mesh = mesh_of(AxisType.Explicit)
    params, x = arguments()
    plan, batch_plan = planned((params, x), mesh)
    typed = auto_axes(lambda x: (x, x[:3]), plan, out=P("data", "tensor"))
    jitted = jax.jit(typed)
    whole, odd = jitted(sfx.shard(x, batch_plan))
    assert spec_of(whole) == P("data", "tensor")
    assert spec_of(odd) == P(None, "tensor")


def test_names_of_results_are_checked():
    mesh = mesh_of(AxisType.Explicit)
    params, x = arguments()
    plan, batch_plan = planned((params, x), mesh)
    typed = auto_axes(lambda x: x, plan, out=("batch", None, None))
    placed_x = sfx.shard(x, batch_plan)
    with pytest.raises(SpecError, match="name the arrays one by one"):
        jax.jit(typed)(placed_x)


def test_specs_of_a_plan_are_the_specs_of_a_model_with_functions():
    mesh = mesh_of(AxisType.Explicit)
    mlp = eqx.nn.MLP(8, 4, 16, 1, key=jax.random.key(0))
    rules = sfx.PathRules([("weight$", sfx.fsdp("data")), ("bias$", P())])
    plan = sfx.plan(mlp, mesh, paths=rules)
    assert jax.tree.leaves(plan.specs).count(P("data")) == 1

    def doubled(mlp, x):
        arrays, functions = eqx.partition(mlp, eqx.is_array)
        twice = jax.tree.map(lambda array: array * 2, arrays)
        return eqx.combine(twice, functions), x.sum()

    typed = auto_axes(doubled, plan, out=(plan.specs, P()))
    placed_mlp = sfx.shard(mlp, plan)
    result, total = sfx.filter_jit(typed)(placed_mlp, jnp.ones((8, 4)))
    assert not sfx.misplaced(result, plan)
    assert result.activation is mlp.activation
    assert total == 32


def with_constants(params, x):
    """As diffrax, lineax and optimistix compute constants while they are traced."""
    with jax.ensure_compile_time_eval():
        scale = jnp.sort(jnp.array([2.0, 0.0, 1.0]))[2]
    return step(params, x * scale)


def test_constants_are_computed_while_a_step_is_traced():
    mesh = mesh_of(AxisType.Explicit)
    params, x = arguments()
    plan, batch_plan = planned((params, x), mesh)
    placed_params = sfx.shard(params, plan)
    placed_x = sfx.shard(x, batch_plan)
    _, expected = with_constants(params, x)
    for typed in (
        constrain_step(with_constants, mesh, RULES),
        auto_axes(with_constants, plan, out=(plan.specs, P())),
    ):
        jitted = sfx.filter_jit(typed)
        stepped, value = jitted(placed_params, placed_x)
        assert not sfx.misplaced(stepped, plan)
        np.testing.assert_allclose(value, expected, rtol=1e-6)
    with jax.set_mesh(mesh):
        on_one_device = sfx.testing.unsharded(with_constants)
        _, value = on_one_device(params, x)
        axes = name_axes(with_constants, params, x)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    assert axes["mlp"].size == 64


def with_compared_types(params, x):
    """As lineax compares the struct of a vector with that of an operator."""
    struct = jax.eval_shape(lambda x: x, x)
    expected = jax.ShapeDtypeStruct(struct.shape, struct.dtype)
    if struct != expected:
        raise ValueError("the structures do not match")
    return step(params, x)


@pytest.mark.parametrize("form", ["constrain_step", "auto_axes"])
def test_a_step_may_compare_structs(form):
    mesh = mesh_of(AxisType.Explicit)
    plan, batch_plan = planned(arguments(), mesh)
    structs = (plan.structs, batch_plan.structs)
    with pytest.raises(ValueError, match="do not match"):
        jax.eval_shape(with_compared_types, *structs)
    if form == "constrain_step":
        typed = constrain_step(with_compared_types, mesh, RULES)
    else:
        typed = auto_axes(with_compared_types, plan, out=(plan.specs, P()))
    params, value = jax.eval_shape(typed, *structs)
    assert sfx.specs_of(params) == plan.specs
    assert value.shape == ()


def test_errors_of_a_step_are_raised_as_they_are():
    mesh = mesh_of(AxisType.Explicit)
    plan, batch_plan = planned(arguments(), mesh)

    def failing(params, x):
        raise ValueError("a mistake of the step")

    for typed in (
        constrain_step(failing, mesh, RULES),
        auto_axes(failing, plan, out=P()),
    ):
        with pytest.raises(ValueError, match="a mistake of the step"):
            jax.eval_shape(typed, plan.structs, batch_plan.structs)


def typed_layers(params, x):
    def layer(x, w):
        up = reshard(w["up"], P(None, "tensor"))
        down = reshard(w["down"], P("tensor"))
        hidden = jax.nn.relu(x @ up)
        return jnp.matmul(hidden, down, out_sharding=P("data")), None

    rows = reshard(x, P("data"))
    y, _ = jax.lax.scan(layer, rows, params)
    return jnp.mean(y**2)


def layers(params, x):
    def layer(x, w):
        hidden = jax.nn.relu(x @ w["up"])
        return hidden @ w["down"], None

    y, _ = jax.lax.scan(layer, x, params)
    return jnp.mean(y**2)


def test_a_step_without_its_shardings_is_the_plain_program():
    """Neither weights that a loop reshards are stored again, nor calls inlined."""
    params, x = arguments()
    stacked = jax.tree.map(lambda w: jnp.stack([w, w, w]), params)
    mesh = mesh_of(AxisType.Explicit)
    gradient = jax.grad(typed_layers)
    with jax.set_mesh(mesh):
        plain = without_shardings(gradient, (stacked, x), mesh.abstract_mesh)
    typed_program = jax.make_jaxpr(plain.step)(*plain.args)
    expected_program = jax.make_jaxpr(jax.grad(layers))(stacked, x)
    typed_loops = loops_of(typed_program)
    assert typed_loops == loops_of(expected_program)
    assert typed_loops


class Loop(NamedTuple):
    """The types of what a loop returns, and the functions that it calls."""

    types: list[str]
    calls: list[str]


def loops_of(program):
    used = set(map(id, program.jaxpr.outvars))
    for equation in program.eqns:
        used.update(map(id, equation.invars))
    loops = []
    for equation in program.eqns:
        if equation.primitive.name != "scan":
            continue
        # From JAX 0.11 on, a loop keeps the results that nothing uses.
        is_exact = "num_carry" in equation.params
        loop = Loop(types=[], calls=[])
        for result in equation.outvars:
            if is_exact or id(result) in used:
                loop.types.append(str(result.aval))
        for inner in equation.params["jaxpr"].eqns:
            if "name" in inner.params:
                loop.calls.append(inner.params["name"])
        loops.append(loop)
    return loops


@pytest.mark.parametrize("sizes", [{"x": 2, "y": 2}, {"data": 1, "tensor": 4}])
def test_arguments_on_another_mesh_are_refused(sizes: dict[str, int]):
    """No axis of the rules was one of theirs, and nothing was constrained."""
    other_mesh = jax.make_mesh(
        tuple(sizes.values()),
        tuple(sizes),
        axis_types=(AxisType.Explicit, AxisType.Explicit),
    )
    args = jax.device_put(arguments(), NamedSharding(other_mesh, P()))
    constrained = constrain_step(step, mesh_of(AxisType.Explicit), RULES)
    jitted = jax.jit(constrained)
    with pytest.raises(MeshError, match="the rules find no axis 'data' of size 2"):
        jitted(*args)

"""JAX's errors on Explicit axes, as the FAQ lists them: each is raised, its text is in
the FAQ, and `auto_axes` or `constrain` mends it.
"""

import pathlib
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.sharding import NamedSharding

import shardfx as sfx


FAQ = pathlib.Path(__file__).parents[2] / "docs" / "faq.md"
NOTE = "this mesh has Explicit axes, `jax.make_mesh`'s default: `data`, `tensor`."
AUTO = jax.sharding.AxisType.Auto
RNG = np.random.default_rng(0)


class Case(NamedTuple):
    """A function of arrays with these shapes and specs, with a part of JAX's error."""

    function: Callable[..., Any]
    arrays: tuple
    error: str
    out: P


def array(*shape, spec=()):
    return jnp.asarray(RNG.normal(size=shape), jnp.float32), P(*spec)


def rows(spec: str | None = "data"):
    return jnp.arange(8) % 4, P(spec)


MLP = eqx.nn.MLP(8, 8, 16, 1, key=jax.random.key(0))
ARRAYS, STATIC = eqx.partition(MLP, eqx.is_array)


def in_vmap(weights, x):
    leaves = [weights[name] for name in sorted(weights)]
    model = eqx.combine(jax.tree.structure(ARRAYS).unflatten(leaves), STATIC)
    return jax.vmap(model)(x)


def weights():
    leaves = {str(n): leaf for n, leaf in enumerate(jax.tree.leaves(ARRAYS))}
    return leaves, jax.tree.map(lambda leaf: P("data"), leaves)


CASES = {
    "two dimensions over one axis": Case(
        function=lambda x, w: x @ w,
        arrays=(array(8, 16, spec=("data",)), array(16, 8, spec=(None, "data"))),
        error="produces an illegally sharded result",
        out=P("data"),
    ),
    "a contraction": Case(
        function=lambda x, w: x @ w,
        arrays=(array(8, 16, spec=(None, "tensor")), array(16, 8, spec=("tensor",))),
        error="Contracting dimensions are sharded and it is ambiguous",
        out=P("data"),
    ),
    "batch dimensions": Case(
        function=lambda x, w: jnp.einsum("bij,bjk->bik", x, w),
        arrays=(array(4, 8, 16, spec=("data",)), array(4, 16, 8, spec=("tensor",))),
        error="dot_general requires lhs batch dimensions and rhs batch dimensions to have",
        out=P("data"),
    ),
    "a model in vmap": Case(
        function=in_vmap,
        arrays=(weights(), array(8, 8, spec=("data",))),
        error="dot_general",
        out=P("data"),
    ),
    "a lookup over one axis": Case(
        function=lambda table, index: table[index],
        arrays=(array(16, 8, spec=("tensor", "data")), rows()),
        error="can map every mesh axis to at most one positional dimension",
        out=P("data"),
    ),
    "a lookup": Case(
        function=lambda table, index: table[index],
        arrays=(array(16, 8, spec=(None, "tensor")), rows()),
        error="to provide output PartitionSpec for the gather indexing",
        out=P("data"),
    ),
    "a reshape": Case(
        function=lambda x: x.reshape(4, -1),
        arrays=(array(4, 8, 4, spec=("data", None, "tensor")),),
        error="This reshape is not supported",
        out=P("data"),
    ),
    "a scatter": Case(
        function=lambda x, index, y: x.at[index].add(y),
        arrays=(array(16, 8, spec=("tensor",)), rows(), array(8, 8, spec=("data",))),
        error="to provide output PartitionSpec for the scatter update",
        out=P("tensor"),
    ),
    "a repeat": Case(
        function=lambda x, counts: jnp.repeat(x, counts, 0, total_repeat_length=12),
        arrays=(array(8, 4, spec=("data",)), rows(None)),
        error="Please pass sharding to `jnp.repeat` via `out_sharding` parameter",
        out=P("data"),
    ),
    "other axes": Case(
        function=lambda x, y: x + y,
        arrays=(array(8, 4, spec=("data",)), array(8, 4, spec=("tensor",))),
        error="got incompatible shardings for broadcasting",
        out=P("data"),
    ),
    "a concatenation": Case(
        function=lambda x, y: jnp.concatenate([x, y]),
        arrays=(array(8, 4, spec=("data",)), array(8, 4, spec=("tensor",))),
        error="All operands should have the same sharding",
        out=P("data"),
    ),
    "a sort": Case(
        function=lambda x: jnp.sort(x, axis=0),
        arrays=(array(8, 4, spec=("data",)),),
        error="must be unsharded over the sorting dimension",
        out=P("data"),
    ),
    "a running sum": Case(
        function=lambda x: jnp.cumsum(x, axis=0),
        arrays=(array(8, 4, spec=("data",)),),
        error="Input should be unsharded over the axis being reduced",
        out=P("data"),
    ),
    "a convolution": Case(
        function=lambda x, w: jax.lax.conv(x, w, (1, 1), "SAME"),
        arrays=(array(2, 4, 8, 8, spec=("data",)), array(8, 4, 3, 3, spec=("data",))),
        error="parameter of `conv_general_dilated`",
        out=P("data"),
    ),
}


def mesh_of(shape=(2, 2)):
    return jax.make_mesh(shape, ("data", "tensor"))


def plan_on(mesh):
    rules = sfx.PathRules([("", P())])
    return sfx.plan(jnp.ones((8,)), mesh, paths=rules)


@pytest.mark.parametrize("name", CASES)
def test_auto_axes_mends_it(name):
    case = CASES[name]
    mesh = mesh_of()

    def placed(value, spec):
        return jax.device_put(value, NamedSharding(mesh, spec))

    arguments = [jax.tree.map(placed, value, spec) for value, spec in case.arrays]
    assert case.error in FAQ.read_text()
    # JAX 0.9 does not look at the dimension of a running sum.
    if name != "a running sum" or jax.__version_info__ >= (0, 10):
        with pytest.raises(Exception, match=re.escape(case.error)) as raised:
            sfx.filter_jit(case.function).trace(*arguments)
        (note,) = notes_of(raised.value)
        assert note.startswith(NOTE)

    mended = sfx.auto.auto_axes(case.function, plan_on(mesh), out=case.out)
    result = jax.jit(mended)(*arguments)
    assert sfx.specs_of(result) == case.out
    expected = case.function(*[value for value, _ in case.arrays])
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)


def notes_of(error):
    """The notes of an error, without JAX's own note on its frames."""
    notes = vars(error).get("__notes__", ())
    return [note for note in notes if "JAX_TRACEBACK_FILTERING" not in note]


def test_a_note_of_filter_jit_is_of_types_on_explicit_axes_alone():
    mesh = mesh_of()
    rows = NamedSharding(mesh, P("data"))
    x = jax.device_put(jnp.ones((8, 16)), rows)
    columns = NamedSharding(mesh, P(None, "data"))
    w = jax.device_put(jnp.ones((16, 8)), columns)
    inner = sfx.filter_jit(jnp.matmul)
    outer = sfx.filter_jit(lambda x, w: inner(x, w))
    with pytest.raises(Exception, match="illegally sharded") as raised:
        outer(x, w)
    assert notes_of(raised.value) == [
        "this mesh has Explicit axes, `jax.make_mesh`'s default: `data`, `tensor`. JAX"
        " types the result of each operation there. Let the compiler choose instead:"
        " `shardfx.auto.constrain_step(step, mesh, rules)` for the whole step,"
        " `shardfx.auto.auto_axes(function, plan, out=names)` for the function that"
        " fails, or a mesh with Auto axes, `jax.make_mesh(shape, names,"
        " axis_types=(jax.sharding.AxisType.Auto,) * len(names))`."
    ]

    def failing(x):
        raise ValueError("no number")

    with pytest.raises(ValueError, match="no number") as raised:
        sfx.filter_jit(failing)(x)
    assert not notes_of(raised.value)

    auto = mesh.abstract_mesh.update_axis_types({"data": AUTO, "tensor": AUTO})
    struct = jax.ShapeDtypeStruct((8,), "float32", sharding=NamedSharding(auto, P()))
    constrained = sfx.filter_jit(lambda x: jax.sharding.reshard(x, P("data")))
    with jax.sharding.use_abstract_mesh(auto):
        with pytest.raises(ValueError, match="Auto") as raised:
            constrained.trace(struct)
    assert not notes_of(raised.value)


def test_axes_of_size_one_are_types_too():
    mesh = mesh_of((4, 1))
    by_data = NamedSharding(mesh, P("data"))
    x = jax.device_put(jnp.ones((8, 4)), by_data)
    by_tensor = NamedSharding(mesh, P("tensor"))
    y = jax.device_put(jnp.ones((8, 4)), by_tensor)
    with pytest.raises(Exception, match="got incompatible shardings"):
        jax.eval_shape(jnp.add, x, y)
    plan = plan_on(mesh)
    total = jax.jit(lambda x, y: x + sfx.constrain(y, P("data"), plan))(x, y)
    np.testing.assert_array_equal(total, np.full((8, 4), 2.0))


def test_a_scale_goes_into_shard_map_by_its_spec():
    mesh = mesh_of()
    specs = P("data", "tensor"), P("tensor")
    scaled = jax.shard_map(
        lambda x, scale: x * scale, mesh=mesh, in_specs=specs, out_specs=specs[0]
    )
    x = jax.device_put(jnp.ones((8, 4)), NamedSharding(mesh, specs[0]))
    scale = jax.device_put(jnp.arange(4.0), NamedSharding(mesh, P()))
    error = "does not match the specs of the input"
    assert error in FAQ.read_text()
    with pytest.raises(ValueError, match=error):
        jax.eval_shape(scaled, x, scale)
    plan = plan_on(mesh)
    result = jax.jit(lambda x, s: scaled(x, sfx.constrain(s, specs[1], plan)))(x, scale)
    expected = np.ones((8, 1)) * np.arange(4.0)
    np.testing.assert_array_equal(result, expected)


def test_a_carry_begins_with_the_type_that_it_keeps():
    mesh = mesh_of()
    plan = plan_on(mesh)
    sharding = NamedSharding(mesh, P("data"))

    def body(carry, _):
        return jnp.matmul(carry, jnp.eye(4), out_sharding=sharding), None

    def looped(x):
        return jax.lax.scan(body, x, length=2)[0]

    whole = NamedSharding(mesh, P())
    x = jax.device_put(jnp.ones((8, 4)), whole)
    error = "carry input and carry output must have equal types"
    assert error in FAQ.read_text()
    with pytest.raises(TypeError, match=error):
        jax.eval_shape(looped, x)
    result = jax.jit(lambda x: looped(sfx.constrain(x, P("data"), plan)))(x)
    np.testing.assert_array_equal(result, np.ones((8, 4)))
    error = "can only refer to Auto axes of the mesh"
    assert error in FAQ.read_text()
    with pytest.raises(ValueError, match=error):
        jax.eval_shape(lambda x: jax.lax.with_sharding_constraint(x, sharding), x)
    error = "Using PartitionSpec when you are not under a mesh context"
    assert error in FAQ.read_text()
    with pytest.raises(ValueError, match=error):
        jax.sharding.reshard(jnp.ones(8), P("data"))


def test_a_gradient_outside_of_jit_needs_the_mesh():
    mesh = jax.make_mesh((2, 2), ("data", "tensor"))
    plan = sfx.plan(jnp.ones(8), mesh, paths=sfx.PathRules([("", P("data"))]))
    loss = sfx.auto.auto_axes(lambda x: jnp.sum(x**2), plan, out=())
    x = sfx.shard(jnp.ones(8), plan)
    error = "Length of device assignment 1 is not equal to the size of the mesh"
    assert error in FAQ.read_text()
    with pytest.raises(ValueError, match=error):
        jax.grad(loss)(x)
    jitted = jax.jit(jax.grad(loss))(x)
    with jax.set_mesh(mesh):
        eager = jax.grad(loss)(x)
    np.testing.assert_array_equal(jitted, 2 * np.ones(8))
    np.testing.assert_array_equal(eager, jitted)


def test_every_row_of_the_faq_on_explicit_axes_has_a_test():
    """An error of the FAQ's table stands in a test, which raises it."""
    table = FAQ.read_text().partition("On [Explicit axes]")[2].partition("|---|")[2]
    rows = table.partition("\n\n")[0].splitlines()[1:]
    tests = (__file__, FAQ.parents[1] / "tests" / "step" / "test_solvers.py")
    tested = [case.error for case in CASES.values()]
    for path in tests:
        tested += re.findall(
            '(?:error = |match=)"(.+)"', pathlib.Path(path).read_text()
        )
    # A word or two, such as the name of an operation, tell no error.
    texts = [text for text in tested if len(text.split()) > 2]
    assert len(rows) >= 18
    for row in rows:
        errors = row.split("|")[1].split("; ")
        for error in errors:
            assert any(text in error for text in texts), error

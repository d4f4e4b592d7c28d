"""What to write so that JAX can type a step on Explicit axes."""

import jax
import jax.numpy as jnp
import pytest
from jax import P
from jax.sharding import AxisType, NamedSharding

import shardfx as sfx
from shardfx.errors import MeshError


def structs(mesh):
    def struct(*shape, spec):
        return jax.ShapeDtypeStruct(
            shape, "float32", sharding=NamedSharding(mesh, spec)
        )

    params = {
        "up": struct(3, 16, 32, spec=P(None, None, "tensor")),
        "down": struct(3, 32, 16, spec=P(None, "tensor")),
    }
    return params, struct(8, 16, spec=P("data"))


def mesh_of(kind):
    return jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(kind, kind))


def loss(params, x):
    def layer(x, layer_params):
        hidden = jax.nn.relu(x @ layer_params["up"])
        return x + hidden @ layer_params["down"], None

    return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)


def typed_loss(params, x):
    def layer(x, layer_params):
        hidden = jax.nn.relu(x @ layer_params["up"])
        out = jnp.matmul(hidden, layer_params["down"], out_sharding=P("data"))
        return x + out, None

    return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
@pytest.mark.parametrize("step", [loss, jax.grad(loss)], ids=["forward", "gradient"])
def test_each_line_says_what_to_write(step, kind):
    typed_lines = sfx.cost.typed(step, *structs(mesh_of(kind)))
    (row,) = typed_lines.rows
    assert row.primitive == "dot_general"
    assert row.spec == P("data")
    assert row.source is not None
    assert row.source.place.startswith("test_typed.py:")
    assert "out_sharding=P('data')" in row.text
    assert "Contracting dimensions are sharded" in row.error
    assert row.text in str(typed_lines)
    assert row.source.place in str(typed_lines)


def test_what_it_says_is_enough():
    """With the sharding that the row names, JAX types the step and its gradient."""
    mesh = mesh_of(AxisType.Explicit)
    args = structs(mesh)
    with jax.set_mesh(mesh), pytest.raises(Exception, match="ambiguous"):
        jax.eval_shape(jax.grad(loss), *args)
    with jax.set_mesh(mesh):
        grads = jax.eval_shape(jax.grad(typed_loss), *args)
    assert grads["up"].sharding.spec == P(None, None, "tensor")


def test_a_step_that_types_needs_nothing():
    typed_lines = sfx.cost.typed(
        lambda x: jnp.tanh(x) * 2, structs(mesh_of(AxisType.Auto))[1]
    )
    assert typed_lines.rows == ()
    assert str(typed_lines) == "JAX types every result of this step on Explicit axes"


def test_arguments_without_shardings_are_refused():
    with pytest.raises(MeshError, match="no argument of the step has a sharding"):
        sfx.cost.typed(lambda x: x, jax.ShapeDtypeStruct((3,), "float32"))


def test_a_gradient_that_joins_typed_and_untyped_values_is_typed():
    mesh = mesh_of(AxisType.Explicit)
    sharding = NamedSharding(mesh, P("data"))
    batch = jax.ShapeDtypeStruct((8, 4), "float32", sharding=sharding)
    weight = jax.ShapeDtypeStruct((4, 4), "float32", sharding=NamedSharding(mesh, P()))

    def contrastive(weight, x):
        logits = (x @ weight) @ x.T
        own = jnp.take_along_axis(logits, jnp.arange(8)[:, None], axis=1)
        return jnp.mean(jax.nn.logsumexp(logits, axis=1) - own[:, 0])

    forward = sfx.cost.typed(contrastive, weight, batch)
    gradient = sfx.cost.typed(jax.grad(contrastive), weight, batch)
    lines = [row.source for row in gradient.rows]
    assert {row.source for row in forward.rows} <= set(lines)


def test_a_carry_whose_type_changes_is_typed_before_the_loop():
    mesh = mesh_of(AxisType.Explicit)
    x = structs(mesh)[1]

    def summed(x):
        zeros = jnp.zeros(x.shape)
        return jax.lax.scan(lambda carry, _: (carry + x, None), zeros, length=3)[0]

    (row,) = sfx.cost.typed(summed, x).rows
    assert row.primitive == "scan"
    assert row.text == "jax.sharding.reshard(x, P('data')) of the carry before the loop"

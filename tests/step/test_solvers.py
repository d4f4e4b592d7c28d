"""Steps that solve differential and linear equations, by diffrax and lineax."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import shardfx as sfx


diffrax = pytest.importorskip("diffrax", reason="pip install '.[test-solvers]'")
lineax = pytest.importorskip("lineax", reason="pip install '.[test-solvers]'")

FAQ = pathlib.Path(__file__).parents[2] / "docs" / "faq.md"
MESH = sfx.MeshSpec({"data": 8}).build(jax.devices())
WEIGHTS = {"w": jnp.eye(4) * 0.5}
ROWS = NamedSharding(MESH, P("data"))
Y0 = jax.device_put(jax.random.normal(jax.random.key(0), (16, 4)), ROWS)


def solved(weights, y0):
    """A solve with checkpointed gradients and a check of its result, as a neural ODE
    has.
    """
    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(lambda t, y, w: jnp.tanh(w @ y)),
        diffrax.Euler(),
        t0=0.0,
        t1=1.0,
        dt0=0.5,
        y0=y0,
        args=weights["w"],
        max_steps=4,
    )
    return solution.ys[-1]


def regularised(weights, y0):
    """A linear solve whose gradient is another linear solve."""
    matrix = weights["w"] + jnp.outer(y0, y0) + jnp.eye(4)
    operator = lineax.MatrixLinearOperator(matrix)
    solver = lineax.AutoLinearSolver(well_posed=True)
    return lineax.linear_solve(operator, y0, solver).value


def by_conjugate_gradients(weights, y):
    """A solve whose operator is a function of the weights."""

    def applied(y):
        projected = weights["w"].T @ y
        return weights["w"] @ projected + y

    operator = lineax.FunctionLinearOperator(
        applied,
        jax.ShapeDtypeStruct((4,), jnp.float32),
        lineax.positive_semidefinite_tag,
    )
    solver = lineax.CG(rtol=1e-6, atol=1e-6)
    return lineax.linear_solve(operator, y, solver).value


def mean_square(solve, weights, y0):
    """Of the solutions for all rows of a batch."""
    solutions = jax.vmap(solve, (None, 0))(weights, y0)
    return jnp.mean(solutions**2)


def train(solve):
    def step(weights, y0):
        def loss(weights):
            return mean_square(solve, weights, y0)

        value, gradient = jax.value_and_grad(loss)(weights)
        updated = jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradient)
        return updated, value

    return step


def by_shard(solve):
    """The same step with the batch's shards in a `shard_map`."""

    def step(weights, y0):
        def body(weights, y0):
            return jax.vmap(solve, (None, 0))(weights, y0)

        in_specs = (P(), P("data"))
        mapped = jax.shard_map(
            body,
            mesh=MESH,
            in_specs=in_specs,
            out_specs=P("data"),
            check_vma=False,
        )
        return jnp.mean(mapped(weights, y0) ** 2)

    return step


def test_a_linear_solve_counts_what_its_compiled_program_sends():
    step = train(regularised)
    lowered = jax.jit(step).lower(WEIGHTS, Y0)
    compiled = sfx.cost.traffic(lowered.compile())
    estimate = sfx.cost.estimate(step, WEIGHTS, Y0, compiler="cpu")
    assert estimate.by("kind") == compiled.by("kind")
    # The gradient of the weights is reduced over the batch. The solver checks its
    # result by callbacks, which JAX meets only while it lowers the step.
    assert estimate.wire_bytes >= 2 * WEIGHTS["w"].nbytes * 7 // 8
    assert any(row.callback for row in estimate.rows)
    assert sfx.cost.fit(step, WEIGHTS, Y0, chip="v5e").fits


def test_a_differential_equation_is_estimated_and_solved():
    estimate = sfx.cost.estimate(train(solved), WEIGHTS, Y0)
    assert estimate.wire_bytes >= 2 * WEIGHTS["w"].nbytes * 7 // 8
    loss = jax.jit(by_shard(solved))(WEIGHTS, Y0)
    expected = mean_square(solved, WEIGHTS, Y0)
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)


def test_a_solve_is_checked_beside_one_device():
    check = sfx.testing.check_step(train(regularised), WEIGHTS, Y0)
    assert "changes none" in str(check)


def test_a_solve_runs_on_explicit_axes():
    """lineax compares the types of vectors, which have the mesh."""
    mesh = jax.make_mesh((8,), ("data",))
    plan = sfx.plan(WEIGHTS, mesh, paths=sfx.PathRules([("w", P())]))

    def value(weights, y0):
        return mean_square(by_conjugate_gradients, weights, y0)

    weights = sfx.shard(WEIGHTS, plan)
    y0 = jax.device_put(np.asarray(Y0), NamedSharding(mesh, P("data")))
    error = "structures do not match"
    assert error in FAQ.read_text()
    with pytest.raises(ValueError, match=error):
        jax.eval_shape(value, weights, y0)
    typed = sfx.auto.auto_axes(jax.grad(value), plan, out=plan.specs)
    gradient = jax.jit(typed)(weights, y0)
    assert not sfx.misplaced(gradient, plan)
    expected = jax.grad(value)(WEIGHTS, np.asarray(Y0))
    np.testing.assert_allclose(gradient["w"], expected["w"], rtol=1e-4, atol=1e-6)


def test_a_function_as_operator_runs_on_explicit_axes():
    """lineax has the function as a jaxpr in a parameter, and its constants as operands."""
    mesh = jax.make_mesh((8,), ("data",))
    rules = sfx.AxisRules([("batch", "data")])
    step = train(by_conjugate_gradients)
    plan = sfx.plan(WEIGHTS, mesh, paths=sfx.PathRules([("w", P())]))
    weights = sfx.shard(WEIGHTS, plan)
    y0 = jax.device_put(np.asarray(Y0), NamedSharding(mesh, P("data")))
    constrained = sfx.auto.constrain_step(step, mesh, rules)
    updated, loss = jax.jit(constrained)(weights, y0)
    expected, expected_loss = step(WEIGHTS, np.asarray(Y0))
    assert not sfx.misplaced(updated, plan)
    assert float(loss) == pytest.approx(float(expected_loss), rel=1e-5)
    np.testing.assert_allclose(updated["w"], expected["w"], rtol=1e-4, atol=1e-6)

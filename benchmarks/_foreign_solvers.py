"""Models of other libraries that solve equations or draw from distributions, each as
its users write it.
"""

# What is not installed here, and how libraries annotate themselves, is not ours.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportReturnType=false, reportArgumentType=false

import equinox as eqx
import jax
import jax.numpy as jnp

from ._foreign_base import BATCH, KEY, Model, random_normal


def diffrax_neural_ode() -> Model:
    import diffrax

    key = jax.random.key(KEY)
    field = eqx.nn.MLP(16, 16, 32, 2, activation=jnp.tanh, key=key)

    def loss(field, start: jax.Array, times: jax.Array) -> jax.Array:
        def solved(y: jax.Array) -> jax.Array:
            terms = diffrax.ODETerm(lambda t, y, args: field(y))
            controller = diffrax.PIDController(rtol=1e-3, atol=1e-4)
            solution = diffrax.diffeqsolve(
                terms,
                diffrax.Tsit5(),
                t0=0.0,
                t1=1.0,
                dt0=0.1,
                y0=y,
                saveat=diffrax.SaveAt(ts=times),
                stepsize_controller=controller,
            )
            return solution.ys

        target = jnp.sin(times)[:, None]
        return jnp.mean((jax.vmap(solved)(start) - target) ** 2)

    start = random_normal(BATCH, 16)
    times = jnp.linspace(0, 1, 6)
    return Model(field, loss, (start, times))


def diffrax_neural_sde() -> Model:
    import diffrax

    key = jax.random.key(KEY)
    field = eqx.nn.MLP(8, 8, 32, 1, key=key)

    def loss(field, start: jax.Array, keys: jax.Array) -> jax.Array:
        def solved(y: jax.Array, key: jax.Array) -> jax.Array:
            noise = diffrax.VirtualBrownianTree(0.0, 1.0, 1e-2, (8,), key)
            drift = diffrax.ODETerm(lambda t, y, args: field(y))
            diffusion = diffrax.ControlTerm(
                lambda t, y, args: 0.1 * jnp.eye(8) * jnp.cos(t), noise
            )
            terms = diffrax.MultiTerm(
                drift,
                diffusion,
            )
            solution = diffrax.diffeqsolve(
                terms,
                diffrax.Heun(),
                t0=0.0,
                t1=1.0,
                dt0=0.1,
                y0=y,
            )
            return solution.ys

        return jnp.mean(jax.vmap(solved)(start, keys) ** 2)

    keys = jax.random.split(jax.random.key(3), BATCH)
    return Model(field, loss, (random_normal(BATCH, 8), keys))


def lineax_ridge() -> Model:
    """Features whose ridge regression, a solve in the loss, fits the targets."""
    import lineax

    key = jax.random.key(KEY)
    features = eqx.nn.MLP(16, 8, 32, 1, key=key)

    def loss(features, x: jax.Array, y: jax.Array) -> jax.Array:
        z = jax.vmap(features)(x)
        gram = z.T @ z + 0.1 * jnp.eye(8)
        operator = lineax.MatrixLinearOperator(gram, lineax.positive_semidefinite_tag)
        solution = lineax.linear_solve(operator, z.T @ y, lineax.Cholesky())
        weights = solution.value
        return jnp.mean((z @ weights - y) ** 2)

    x = random_normal(32, 16)
    y = random_normal(32, seed=3)
    return Model(features, loss, (x, y))


def lineax_cg() -> Model:
    import lineax

    key = jax.random.key(KEY)
    layer = eqx.nn.Linear(16, 16, key=key)

    def loss(layer, x: jax.Array) -> jax.Array:
        def solved(x: jax.Array) -> jax.Array:
            def multiplied(y: jax.Array) -> jax.Array:
                return 2 * y + layer.weight.T @ (layer.weight @ y)

            struct = jax.ShapeDtypeStruct((16,), jnp.float32)
            operator = lineax.FunctionLinearOperator(
                multiplied,
                struct,
                lineax.positive_semidefinite_tag,
            )
            solver = lineax.CG(rtol=1e-5, atol=1e-5)
            return lineax.linear_solve(operator, layer(x), solver).value

        return jnp.mean((jax.vmap(solved)(x) - 1) ** 2)

    return Model(layer, loss, (random_normal(BATCH, 16),))


def optimistix_equilibrium() -> Model:
    """A deep equilibrium model: the fixed point of a layer."""
    import optimistix

    class Layer(eqx.Module):
        inner: eqx.nn.Linear
        outer: eqx.nn.Linear

        def __call__(self, z: jax.Array, x: jax.Array) -> jax.Array:
            return jnp.tanh(0.5 * self.inner(z) + self.outer(x))

    keys = jax.random.split(jax.random.key(KEY))
    hidden = eqx.nn.Linear(32, 32, key=keys[0])
    inputs = eqx.nn.Linear(16, 32, key=keys[1])
    layer = Layer(hidden, inputs)

    def loss(layer, x: jax.Array) -> jax.Array:
        def point(x: jax.Array) -> jax.Array:
            solver = optimistix.FixedPointIteration(rtol=1e-5, atol=1e-5)
            return optimistix.fixed_point(layer, solver, jnp.zeros(32), x).value

        return jnp.mean((jax.vmap(point)(x) - 0.5) ** 2)

    return Model(layer, loss, (random_normal(BATCH, 16),))


# probability


def flowjax_coupling() -> Model:
    from flowjax.distributions import Normal
    from flowjax.flows import coupling_flow

    key = jax.random.key(KEY)
    base = Normal(jnp.zeros(8))
    flow = coupling_flow(key, base_dist=base, flow_layers=3, nn_width=32)

    def loss(flow, x: jax.Array) -> jax.Array:
        import paramax

        return -jnp.mean(paramax.unwrap(flow).log_prob(x))

    return Model(flow, loss, (random_normal(32, 8),))


def flowjax_spline() -> Model:
    from flowjax.bijections import RationalQuadraticSpline
    from flowjax.distributions import Normal
    from flowjax.flows import masked_autoregressive_flow

    key = jax.random.key(KEY)
    spline = RationalQuadraticSpline(knots=4, interval=4)
    flow = masked_autoregressive_flow(
        key,
        base_dist=Normal(jnp.zeros(8)),
        transformer=spline,
        flow_layers=2,
        nn_width=32,
    )

    def loss(flow, x: jax.Array) -> jax.Array:
        import paramax

        return -jnp.mean(paramax.unwrap(flow).log_prob(x))

    return Model(flow, loss, (random_normal(32, 8),))


def distreqx_vae() -> Model:
    from distreqx.distributions import MultivariateNormalDiag

    keys = jax.random.split(jax.random.key(KEY))
    networks = {
        "encoder": eqx.nn.MLP(16, 8, 32, 1, key=keys[0]),
        "decoder": eqx.nn.MLP(4, 16, 32, 1, key=keys[1]),
    }

    def loss(networks, x: jax.Array, keys: jax.Array) -> jax.Array:
        def of_row(x: jax.Array, key: jax.Array) -> jax.Array:
            mean, scale = jnp.split(networks["encoder"](x), 2)
            posterior = MultivariateNormalDiag(mean, jax.nn.softplus(scale))
            prior = MultivariateNormalDiag(jnp.zeros(4), jnp.ones(4))
            z = posterior.sample(key)
            error = jnp.sum((networks["decoder"](z) - x) ** 2)
            return error + posterior.log_prob(z) - prior.log_prob(z)

        return jnp.mean(jax.vmap(of_row)(x, keys))

    rows = jax.random.split(jax.random.key(3), BATCH)
    return Model(networks, loss, (random_normal(BATCH, 16), rows))


def numpyro_svi() -> Model:
    import numpyro
    from numpyro.distributions import Normal
    from numpyro.infer import Trace_ELBO
    from numpyro.infer.autoguide import AutoNormal

    def model(x: jax.Array, y: jax.Array) -> None:
        weights_prior = Normal(0, 1).expand([16, 8]).to_event(2)
        weights = numpyro.sample("w", weights_prior)
        out_prior = Normal(0, 1).expand([8]).to_event(1)
        out = numpyro.sample("out", out_prior)
        with numpyro.plate("rows", x.shape[0]):
            predicted = jnp.tanh(x @ weights) @ out
            numpyro.sample("y", Normal(predicted, 0.1), obs=y)

    guide = AutoNormal(model)
    batch = random_normal(BATCH, 16), random_normal(BATCH, seed=3)
    seeded = numpyro.handlers.seed(guide, jax.random.key(KEY))
    trace = numpyro.handlers.trace(seeded).get_trace(*batch)
    params = {
        name: site["value"] for name, site in trace.items() if site["type"] == "param"
    }

    def loss(params, x: jax.Array, y: jax.Array) -> jax.Array:
        key = jax.random.key(KEY)
        return Trace_ELBO(4).loss(key, params, model, guide, x, y) / BATCH

    return Model(params, loss, batch)

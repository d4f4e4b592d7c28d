"""The gradient of a max-pool whose windows overlap along a cut dimension."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

from ._run import Case, Fault, emulate, main, normal


MESH = {"data": 2, "tensor": 4}
ROWS = P("data")


def gradient(spec):
    def step(mesh):
        sharding = NamedSharding(mesh, spec)

        def loss(x, weights):
            held = jax.lax.with_sharding_constraint(x, sharding)
            pooled = jax.lax.reduce_window(
                held, -jnp.inf, jax.lax.max, (3, 1), (1, 1), ((1, 1), (0, 0))
            )
            return jnp.sum(pooled * weights)

        return jax.grad(loss)

    return step


def cases() -> Fault:
    args = (normal(0, 6, 4), normal(1, 6, 4))
    specs = (ROWS, P())
    cut = gradient(P("data", "tensor"))
    whole = gradient(P(None, "tensor"))
    wrong = {
        "gradient": Case(
            step=cut,
            args=args,
            mesh=MESH,
            specs=specs,
            result=ROWS,
        )
    }
    held = {
        "windows that are whole": Case(
            step=whole,
            args=args,
            mesh=MESH,
            specs=specs,
            result=ROWS,
        )
    }
    return Fault(wrong, held)


if __name__ == "__main__":
    emulate()
    main(cases())

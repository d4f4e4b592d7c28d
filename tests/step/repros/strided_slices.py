"""The gradient of a strided slice along a cut dimension."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

from ._run import Case, Fault, emulate, main, normal


MESH = {"data": 4, "tensor": 2}
ROWS = P("data")


def gradient(mesh):
    def loss(x, weights):
        return jnp.sum(x[::2] * weights)

    return jax.grad(loss)


def mended(mesh):
    whole = NamedSharding(mesh, P())

    def loss(x, weights):
        every_row = jax.lax.with_sharding_constraint(x, whole)
        return jnp.sum(every_row[::2] * weights)

    return jax.grad(loss)


def cases() -> Fault:
    # With sixteen rows, each device returns three rows instead of four.
    args = (normal(0, 12, 8), normal(1, 6, 8))
    specs = (ROWS, P())
    wrong = {
        "gradient": Case(
            step=gradient,
            args=args,
            mesh=MESH,
            specs=specs,
            result=ROWS,
        )
    }
    held = {
        "a whole operand": Case(
            step=mended,
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

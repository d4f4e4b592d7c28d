"""A slice of a sum with a scatter, as the gradient of a concatenation and an update: the
result is cut along the slice.
"""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

from ._run import Case, Fault, emulate, main, normal


MESH = {"data": 4, "tensor": 2}
CUT = P(None, "tensor")


def summed(x):
    return x + jnp.zeros_like(x).at[:, :1].add(x[:, :1])


def sliced(x):
    return summed(x)[:, 6:]


def loss(x, y, weights):
    joined = jnp.concatenate([x, y], axis=1)
    elements = joined.at[:, :1].max(2.0) * weights
    return jnp.sum(elements)


def mended(mesh):
    whole = NamedSharding(mesh, P())

    def step(x):
        return jax.lax.with_sharding_constraint(summed(x), whole)[:, 6:]

    return step


def cases() -> Fault:
    x = normal(0, 4, 14, 2)
    array = normal(1, 4, 6, 2)
    parts = (array, normal(2, 4, 8, 2), x)
    specs = (P(), P(), P())
    wrong = {
        "forward": Case(
            step=lambda mesh: sliced,
            args=(x,),
            mesh=MESH,
            specs=(P(),),
            result=CUT,
        ),
        "gradient": Case(
            step=lambda mesh: jax.grad(loss, 1),
            args=parts,
            mesh=MESH,
            specs=specs,
            result=CUT,
        ),
    }
    held = {
        "a whole sum": Case(
            step=mended,
            args=(x,),
            mesh=MESH,
            specs=(P(),),
            result=CUT,
        )
    }
    return Fault(wrong, held)


if __name__ == "__main__":
    emulate()
    main(cases())

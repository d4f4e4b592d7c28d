"""A shift by one along a cut dimension, written with two `.at[...].set`
(jax-ml/jax#18434).
"""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

from ._run import Case, Fault, emulate, main, normal


MESH = {"data": 4}
ROWS = P("data")


def shifted(x):
    return x.at[:-1].set(x[1:]).at[-1].set(1.5)


def mended(x):
    values = jnp.arange(x.shape[0])[:, None]
    is_last = values == x.shape[0] - 1
    return jnp.where(is_last, 1.5, jnp.roll(x, -1, axis=0))


def row_set(mesh):
    rows = NamedSharding(mesh, P("data"))
    return lambda x: jax.lax.with_sharding_constraint(x, rows).at[9:10].set(2.0)


def loss(x):
    return jnp.sum(jnp.sin(shifted(x)))


def cases() -> Fault:
    args = (normal(0, 16, 16),)
    wrong = {
        "forward": Case(
            step=lambda mesh: shifted,
            args=args,
            mesh=MESH,
            specs=(ROWS,),
            result=ROWS,
        ),
        "gradient": Case(
            step=lambda mesh: jax.grad(loss),
            args=args,
            mesh=MESH,
            specs=(ROWS,),
            result=ROWS,
        ),
        "one row": Case(
            step=row_set,
            args=(normal(0, 12, 4),),
            mesh={"data": 2, "tensor": 4},
            specs=(P(),),
            result=P("tensor"),
        ),
    }
    held = {
        "`roll` and `where`": Case(
            step=lambda mesh: mended,
            args=args,
            mesh=MESH,
            specs=(ROWS,),
            result=ROWS,
        )
    }
    return Fault(wrong, held)


if __name__ == "__main__":
    emulate()
    main(cases())

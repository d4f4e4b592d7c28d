"""Residual blocks of one matrix each, on three mesh axes. The partitioner permutes the
residual for the second product, and adds it to that product in the wrong order.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

from ._run import Case, Fault, emulate, main, normal


MESH = {"data": 2, "fsdp": 2, "tensor": 2}
ROWS = P(("data", "fsdp"))


def block(x, w):
    return x + jnp.tanh(x @ w)


def twice(x, first, second):
    return block(block(x, first), second)


def loss(x, first, second):
    return jnp.sum(jnp.sin(twice(x, first, second)))


def scanned(x, stack):
    return jax.lax.scan(lambda x, w: (block(x, w), None), x, stack)[0]


def mended(mesh):
    rows = NamedSharding(mesh, ROWS)

    def held(x, w):
        return jax.lax.with_sharding_constraint(block(x, w), rows)

    return lambda x, first, second: held(held(x, first), second)


def cases() -> Fault:
    args = (normal(0, 16, 32), normal(1, 32, 32), normal(2, 32, 32))
    column = P("tensor", "fsdp")
    specs = (ROWS, column, column)
    stack = (args[0], np.stack(args[1:] * 2))
    wrong = {
        "forward": Case(
            step=lambda mesh: twice,
            args=args,
            mesh=MESH,
            specs=specs,
            result=ROWS,
        ),
        "gradient": Case(
            step=lambda mesh: jax.grad(loss, (1, 2)),
            args=args,
            mesh=MESH,
            specs=specs,
            result=column,
        ),
        "scanned": Case(
            step=lambda mesh: scanned,
            args=stack,
            mesh=MESH,
            specs=(ROWS, P(None, *column)),
            result=ROWS,
        ),
    }
    held = {
        "a row constraint on each block": Case(
            step=mended,
            args=args,
            mesh=MESH,
            specs=specs,
            result=ROWS,
        ),
        "both axes on one dimension": Case(
            step=lambda mesh: twice,
            args=args,
            mesh=MESH,
            specs=(ROWS, *[P(None, ("fsdp", "tensor"))] * 2),
            result=ROWS,
        ),
    }
    return Fault(wrong, held)


if __name__ == "__main__":
    emulate()
    main(cases())

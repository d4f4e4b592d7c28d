"""Two convolutions whose kernels are cut on both channel dimensions, the second with
stride 2, on three mesh axes.
"""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

from ._run import Case, Fault, emulate, main, normal


MESH = {"data": 2, "fsdp": 2, "tensor": 2}
ROWS = P(("data", "fsdp"))
CHANNELS = P("tensor", "fsdp")


def conv(x, w, stride):
    return jax.lax.conv_general_dilated(
        x,
        w,
        (stride, stride),
        [(1, 1)] * 2,
        dimension_numbers=("NCHW", "OIHW", "NCHW"),
    )


def loss(x, first, second, hold=lambda y: y):
    elements = jnp.cos(conv(hold(jnp.sin(conv(x, first, 1))), second, 2))
    return jnp.sum(elements)


def mended(mesh):
    rows = NamedSharding(mesh, ROWS)

    def held(x, first, second):
        hold = lambda y: jax.lax.with_sharding_constraint(y, rows)
        return loss(x, first, second, hold)

    return jax.grad(held, (1, 2))


def cases() -> Fault:
    array = normal(9, 8, 16, 8, 8)
    args = array, normal(1, 16, 16, 3, 3), normal(2, 32, 16, 3, 3)
    specs = (ROWS, CHANNELS, CHANNELS)
    grad = jax.grad(loss, (1, 2))
    array = normal(3, 24, 24, 8, 8)
    others = array, normal(4, 24, 24, 3, 3), normal(5, 48, 24, 3, 3)
    wrong = {
        "gradient": Case(
            step=lambda mesh: grad,
            args=args,
            mesh=MESH,
            specs=specs,
            result=CHANNELS,
        ),
        "gradient, other sizes": Case(
            step=lambda mesh: grad,
            args=others,
            mesh=MESH,
            specs=specs,
            result=CHANNELS,
        ),
    }
    channels = P(("fsdp", "tensor"))
    held = {
        "a row constraint between them": Case(
            step=mended,
            args=args,
            mesh=MESH,
            specs=specs,
            result=CHANNELS,
        ),
        "both axes on one dimension": Case(
            step=lambda mesh: grad,
            args=args,
            mesh=MESH,
            specs=(ROWS, channels, channels),
            result=channels,
        ),
    }
    return Fault(wrong, held)


if __name__ == "__main__":
    emulate()
    main(cases())

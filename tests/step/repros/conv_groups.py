"""The gradient of a grouped convolution's kernel, the batch over one mesh axis, while
another does not shard the input. Sums over the replicas are taken for sums over shards.
"""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

from ._run import Case, Fault, emulate, main, normal


MESH = {"a": 4, "b": 2}
ROWS = P("a")


def conv(x, w):
    return jax.lax.conv_general_dilated(
        x,
        w,
        (1, 1),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=x.shape[-1] // w.shape[-2],
    )


def causal(x, w):
    """A convolution over a sequence, each channel with its own kernel."""
    return jax.lax.conv_general_dilated(
        x,
        w,
        (1,),
        [(3, 0)],
        dimension_numbers=("NHC", "HIO", "NHC"),
        feature_group_count=x.shape[-1],
    )


def loss(x, w):
    return jnp.sum(jnp.sin(conv(x, w)))


def causal_loss(x, w):
    return jnp.sum(jnp.sin(causal(x, w)))


def held(spec):
    """The gradient with a constraint on the input of the convolution."""

    def step(mesh):
        sharding = NamedSharding(mesh, spec)

        def held_loss(x, w):
            return loss(jax.lax.with_sharding_constraint(x, sharding), w)

        return jax.grad(held_loss, 1)

    return step


def cases() -> Fault:
    image = normal(0, 16, 8, 8, 16)
    depthwise = normal(1, 3, 3, 1, 16)
    grouped = normal(2, 3, 3, 4, 16)
    sequence = normal(3, 16, 16, 8)
    taps = normal(4, 4, 1, 8)
    grad = jax.grad(loss, 1)
    wrong = {
        "gradient of a depthwise kernel": Case(
            step=lambda mesh: grad,
            args=(image, depthwise),
            mesh=MESH,
            specs=(ROWS, P()),
        ),
        "gradient of a kernel of four groups": Case(
            step=lambda mesh: grad,
            args=(image, grouped),
            mesh=MESH,
            specs=(ROWS, P()),
        ),
        "gradient of a causal convolution": Case(
            step=lambda mesh: jax.grad(causal_loss, 1),
            args=(sequence, taps),
            mesh=MESH,
            specs=(ROWS, P()),
        ),
    }
    mended = {
        "rows over every axis": Case(
            step=held(P(("a", "b"))),
            args=(image, depthwise),
            mesh=MESH,
            specs=(ROWS, P()),
        ),
        "channels over the other axis": Case(
            step=held(P("a", None, None, "b")),
            args=(image, depthwise),
            mesh=MESH,
            specs=(ROWS, P()),
        ),
    }
    return Fault(wrong, mended)


if __name__ == "__main__":
    emulate()
    main(cases())

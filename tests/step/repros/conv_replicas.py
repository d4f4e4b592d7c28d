"""A convolution over a dimension that is cut, while another mesh axis does not shard
its input. Sums over the replicas are taken for sums over shards.
"""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

from ._run import Case, Fault, emulate, main, normal


MESH = {"a": 4, "b": 2}
HEIGHT = P(None, None, "b")
ROWS = P("a")


def conv(x, w):
    return jax.lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NCHW", "OIHW", "NCHW")
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


def mended(mesh):
    rows = NamedSharding(mesh, ROWS)

    def held(x, w):
        return loss(jax.lax.with_sharding_constraint(x, rows), w)

    return jax.grad(held, (0, 1))


def cases() -> Fault:
    array = normal(0, 4, 8, 8, 8)
    image = array
    kernel = normal(1, 8, 8, 3, 3)
    array = normal(2, 4, 16, 8)
    sequence = array
    taps = normal(3, 4, 1, 8)
    grad = jax.grad(loss, (0, 1))
    wrong = {
        "gradient": Case(
            step=lambda mesh: grad,
            args=(image, kernel),
            mesh=MESH,
            specs=(HEIGHT, P()),
        ),
        "forward, the kernel cut": Case(
            step=lambda mesh: conv,
            args=(image, kernel),
            mesh=MESH,
            specs=(HEIGHT, P("a", "b")),
        ),
        "gradient of a causal convolution over a cut sequence": Case(
            step=lambda mesh: jax.grad(causal_loss, (0, 1)),
            args=(sequence, taps),
            mesh=MESH,
            specs=(P(None, "b"), P()),
        ),
    }
    held = {
        "the input constrained to rows": Case(
            step=mended,
            args=(image, kernel),
            mesh=MESH,
            specs=(HEIGHT, P()),
        ),
        "every mesh axis used": Case(
            step=lambda mesh: grad,
            args=(image, kernel),
            mesh=MESH,
            specs=(P("a", None, "b"), P()),
        ),
    }
    return Fault(wrong, held)


if __name__ == "__main__":
    emulate()
    main(cases())

"""`dynamic_slice`, alone or under `vmap`, with a start that has to be clamped, its
result cut along the slice.

The partitioner computes the first rightly: each device takes its part of the slice. A
pass behind it then makes one slice of the two, and clamps its start to the size of the
part.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from ._run import Case, Fault, emulate, main, normal


MESH = {"a": 2, "b": 2, "c": 2}
CUT = P(("a", "b"), "c")


def windows(x, starts):
    take = lambda x, start: jax.lax.dynamic_slice_in_dim(x, start, 8)
    return jax.vmap(take)(x, starts)


def mended(x, starts):
    return windows(x, jnp.clip(starts, 0, x.shape[1] - 8))


def window(x, starts):
    return jax.lax.dynamic_slice_in_dim(x, starts[1], 8, axis=1)


def mended_window(x, starts):
    return window(x, jnp.clip(starts, 0, x.shape[1] - 8))


def cases() -> Fault:
    # The last start of 16 - 8 is 8.
    values = np.array([0, 9, 3, 15])
    args = (normal(0, 4, 16), values)
    specs = (P(), P())

    def case(function):
        return Case(
            step=lambda mesh: function,
            args=args,
            mesh=MESH,
            specs=specs,
            result=CUT,
        )

    wrong = {"mapped": case(windows), "alone": case(window)}
    held = {
        "the starts clipped before": case(mended),
        "the start clipped before, alone": case(mended_window),
    }
    return Fault(wrong, held)


if __name__ == "__main__":
    emulate()
    main(cases())

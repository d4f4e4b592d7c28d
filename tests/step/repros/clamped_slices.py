"""`vmap` of `dynamic_slice` with a start that has to be clamped, its result cut along
the slice.
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


def cases() -> Fault:
    # The last start of 16 - 8 is 8.
    values = np.array([0, 9, 3, 15])
    args = (normal(0, 4, 16), values)
    specs = (P(), P())
    wrong = {
        "forward": Case(
            step=lambda mesh: windows, args=args, mesh=MESH, specs=specs, result=CUT
        )
    }
    held = {
        "the starts clipped before": Case(
            step=lambda mesh: mended, args=args, mesh=MESH, specs=specs, result=CUT
        )
    }
    return Fault(wrong, held)


if __name__ == "__main__":
    emulate()
    main(cases())

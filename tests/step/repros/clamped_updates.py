"""`dynamic_update_slice` of one row of a cut array, with a start that has to be clamped."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from ._run import Case, Fault, emulate, main, normal


MESH = {"data": 2, "tensor": 4}
ROWS = P("tensor")


def updated(x, row, start):
    return jax.lax.dynamic_update_slice(x, row, (start, 0))


def mended(x, row, start):
    return updated(x, row, jnp.clip(start, 0, x.shape[0] - 1))


def cases() -> Fault:
    # The last row of eight is row 7.
    args = (normal(0, 8, 2), normal(1, 1, 2), np.asarray(9, np.int32))
    specs = (ROWS, P(), P())
    wrong = {
        "forward": Case(
            step=lambda mesh: updated,
            args=args,
            mesh=MESH,
            specs=specs,
            result=ROWS,
        )
    }
    held = {
        "the start clipped before": Case(
            step=lambda mesh: mended,
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

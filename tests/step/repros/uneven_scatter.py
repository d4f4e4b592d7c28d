"""`.at[i].mul(u)` of a cut array, with indices that a constraint cuts unevenly."""

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

from ._run import Case, Fault, emulate, main, normal


MESH = {"a": 4, "b": 2}
ROWS = P("a")


def scaled(mesh):
    rows = NamedSharding(mesh, ROWS)

    def step(x, indices, updates):
        # Five indices over four devices.
        held = jax.lax.with_sharding_constraint(indices, rows)
        return x.at[held].mul(jax.lax.with_sharding_constraint(updates, rows))

    return step


def cases() -> Fault:
    specs = (ROWS, P(), P())
    x = normal(0, 16, 8)
    five = (x, np.arange(5), normal(1, 5, 8))
    eight = (x, np.arange(8), normal(1, 8, 8))
    wrong = {
        "forward": Case(
            step=scaled,
            args=five,
            mesh=MESH,
            specs=specs,
            result=ROWS,
        )
    }
    held = {
        "indices that divide": Case(
            step=scaled,
            args=eight,
            mesh=MESH,
            specs=specs,
            result=ROWS,
        )
    }
    return Fault(wrong, held)


if __name__ == "__main__":
    emulate()
    main(cases())

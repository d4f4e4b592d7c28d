"""One row written into an array that a constraint cuts just before, along the rows.

The partitioner computes it rightly: each device takes its part of the array, and drops
a row that is in another part. XLA then reads the row by a slice, and makes one slice of
it and of the slice before: devices without the row write a row of another part.
"""

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

from ._run import Case, Fault, emulate, main, normal


MESH = {"a": 2, "b": 2, "c": 2}
CUT = P("a")


def written(mesh):
    def function(x, index, row):
        x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, CUT))
        return x.at[index].set(row)

    return function


def cases() -> Fault:
    args = (normal(0, 16, 4), np.array([0], np.int32), normal(1, 1, 4))

    def case(spec):
        return Case(
            step=written,
            args=args,
            mesh=MESH,
            specs=(spec, P(), P()),
            result=CUT,
        )

    wrong = {"forward": case(P())}
    held = {"sharded from its start on": case(CUT)}
    return Fault(wrong, held)


if __name__ == "__main__":
    emulate()
    main(cases())

"""A mark on a traced array: it is meant for a mesh whose devices nobody has named yet.

JAX drops a constraint on an abstract mesh where the program turns out to run on one device. Whether it does is known
when the program is lowered, and not when it is traced; so the mark looks then, and leaves nothing in the program.
"""

import math
from typing import Any, NoReturn

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from .._ground.errors import PlanMismatchError


_meant_for = Primitive("meant_for")


def meant_for(x: jax.Array, sizes: tuple[tuple[str, int], ...]) -> jax.Array:
    """`x`, in a program that cannot be lowered for another number of devices than this mesh has.

    **Arguments:**

    - `x`: a traced array.
    - `sizes`: the name and the size of each axis of the mesh.
    """
    return _meant_for.bind(x, sizes=sizes)


def _lowered(ctx: Any, x: object, *, sizes: tuple[tuple[str, int], ...]) -> list[Any]:
    match ctx.module_context.axis_context:
        # Without devices, as in an export, and inside `shard_map` there is nothing to compare with.
        case object(num_devices=int(count)) if count != math.prod(size for _, size in sizes):
            _raise_for(ctx.avals_in[0], ",".join(f"{name}={size}" for name, size in sizes), count)
    return [x]


def _raise_for(aval: Any, mesh: str, count: int) -> NoReturn:
    raise PlanMismatchError(
        f"an array of shape {aval.shape} is constrained on a mesh {mesh} without devices, in a program for {count} "
        f"device{'' if count == 1 else 's'}, where that does nothing: no argument lies on the mesh. Use "
        "`plan.on(plan.mesh.build(jax.devices()))`, and place the arguments first; pass arrays that the function "
        "closes over as arguments."
    )


_meant_for.def_impl(lambda x, *, sizes: x)
_meant_for.def_abstract_eval(lambda x, *, sizes: x)
mlir.register_lowering(_meant_for, _lowered)
ad.deflinear2(_meant_for, lambda cotangent, x, *, sizes: [_meant_for.bind(cotangent, sizes=sizes)])
batching.defvectorized(_meant_for)

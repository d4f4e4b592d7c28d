"""Steps as XLA's partitioner leaves them for one device, and their texts as the package
reads them.
"""

from collections.abc import Callable, Sequence
from typing import Any

from shardfx import MeshSpec
from shardfx._step import parse_hlo as parse_hlo, step_of as step_of


def device_program(
    step: Callable[..., Any],
    args: Sequence[Any],
    platform: Any,
    mesh: MeshSpec,
    dims: Sequence[Any] | None = None,
):
    """The program of one device. `dims` has the mesh axes of each dimension of each
    argument; without it, all arguments are whole.
    """
    if dims is None:
        dims = [((),) * len(arg.shape) for arg in args]
    traced_step = step_of(step, args)
    _, results = traced_step.parameters
    text = traced_step.partitioned(
        platform,
        mesh=mesh,
        arguments=dims,
        results=[None] * len(results),
    )
    return parse_hlo(text)

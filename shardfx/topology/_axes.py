"""The checks of a mesh's axes, and what users write for what a mesh does not have."""

import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from .._ground.errors import MeshError


_MOST_DEVICES = 2**31 - 1  # JAX numbers devices in 32 bits
_BUILD = "`spec.build(jax.devices())`, which has devices"
# By an attribute that a MeshSpec lacks.
ATTRIBUTES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "devices": _BUILD,
        "_internal_device_list": _BUILD,
        "names": "`spec.axis_names`",
        "sizes": "`spec.axis_sizes`",
    }
)


def size_of_axis(spec: Any, name: str) -> str:
    """What to write for a mesh axis that was asked for as an attribute."""
    # A value that is being made has no fields yet.
    if name in vars(spec).get("axis_names", ()):
        return f"`spec.shape[{name!r}]`"
    return ""


def check_axes(
    axis_names: Sequence[Any],
    axis_sizes: Sequence[Any],
    dcn_sizes: Sequence[Any],
    mesh: object,
) -> None:
    """Raises `MeshError` for axes that no mesh can have: `dcn_sizes` has the number of
    slices that each axis spans, and one size may be -1. Messages show `mesh`.
    """
    repeated = [name for name in axis_names if axis_names.count(name) > 1]
    if repeated:
        raise MeshError(
            f"mesh axis `{repeated[0]}` occurs twice in {axis_names}; give"
            " each axis one name."
        )
    for name, size, slices in zip(axis_names, axis_sizes, dcn_sizes, strict=True):
        if not isinstance(name, str) or not name:
            raise MeshError(
                f"a mesh axis must be named by a non-empty string, not {name!r}."
            )
        if (
            isinstance(size, bool)
            or not isinstance(size, int | np.integer)
            or (size < 1 and size != -1)
        ):
            raise MeshError(
                f"mesh axis `{name}` has size {size!r}; use a positive integer, or"
                " -1 for the rest."
            )
        if (
            not isinstance(slices, int | np.integer)
            or slices < 1
            or (size != -1 and size % slices)
        ):
            raise MeshError(
                f"mesh axis `{name}` of size {size} cannot span {slices!r} slices;"
                " `dcn` must divide the size."
            )
    if math.prod(int(size) for size in axis_sizes if size != -1) > _MOST_DEVICES:
        raise MeshError(
            f"mesh axes {axis_names} have more devices than JAX can number;"
            " use smaller sizes."
        )
    if axis_sizes.count(-1) > 1:
        raise MeshError(
            f"mesh {mesh} has two sizes of -1; at most one can be filled from the"
            " device count."
        )


def require_known(names: Iterable[str], axis_names: tuple[str, ...], what: str) -> None:
    """Raises `MeshError` for a name that is not in `axis_names`. `what` is the argument
    that has the names.
    """
    for name in names:
        if name not in axis_names:
            raise MeshError(
                f"`{what}` names mesh axis `{name}`, but the mesh has {axis_names}; use"
                " one of those."
            )

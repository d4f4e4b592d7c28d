"""The axes of a mesh: read from text, checked, and divided between slices; and what users
write for what a mesh does not have.
"""

import math
import re
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


# `name=size`, and the number of slices that the axis spans. No axis has a size of more
# than ten digits.
_PART = re.compile(
    r"([^=:]*[^=:\s])\s*[=:]\s*(-?[0-9]{1,10})\s*(?:\(dcn=([0-9]{1,10})\))?"
)


def parsed_axes(text: object) -> tuple[list[tuple[str, int]], dict[str, int]]:
    """The names and sizes of the axes in a text such as "data=4,tensor=2", and by name
    the number of slices that each axis spans. Raises `MeshError` for anything else.
    """
    pairs = []
    dcn = {}
    if not isinstance(text, str):
        raise MeshError(
            f"`MeshSpec.parse({text!r:.60})` reads a text; of names and sizes write"
            f" `MeshSpec({text!r:.60})`."
        )
    for part in text.split(","):
        axis_and_size = _PART.fullmatch(part.strip())
        if axis_and_size is None:
            raise MeshError(
                f"mesh {text!r:.200}: {part.strip()!r:.80} is not of the form"
                ' `name=size`; write it as in "data=-1,fsdp=4,tensor=2", or'
                ' "data=8(dcn=2)" for an axis over two slices.'
            )
        name, size, slices = axis_and_size.groups(default="1")
        pairs.append((name, int(size)))
        dcn[name] = int(slices)
    return pairs, dcn


def slices_of_parts(axis: str, slices: int, parts: Any) -> list[int]:
    """The number of slices that each axis of the mesh `parts` spans. It replaces `axis`,
    which spans `slices`. Raises `MeshError` if a part would be cut between slices.
    """
    counts = []
    remaining_slices = slices
    for size in parts.axis_sizes:
        slice_count = math.gcd(size, remaining_slices)
        # A part can only be divided between slices if all remaining slices end within
        # it.
        if slice_count not in (size, remaining_slices):
            raise MeshError(
                f"mesh axis `{axis}` spans {slices} slices, which {parts} would cut; let"
                f" the first part be a multiple of {slices}."
            )
        counts.append(slice_count)
        remaining_slices //= slice_count
    return counts


def size_of_axis(spec: Any, name: str) -> str:
    """What to write for a mesh axis that was asked for as an attribute."""
    # A value that is being made has no fields yet.
    if name in vars(spec).get("axis_names", ()):
        return f"`spec.shape[{name!r}]`"
    return ""


def as_int(size: Any) -> Any:
    """An integer of NumPy as one of Python, which JSON can hold; any other value as it
    is.
    """
    return int(size) if isinstance(size, np.integer) else size


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

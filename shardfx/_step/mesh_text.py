"""Meshes in the text of programs: the sizes of their axes, the order of their devices,
and the sub-axes that a sharding or a collective names.
"""

import math
import re
from typing import NamedTuple

import numpy as np


_AXIS = re.compile(r"'([^']*)'=(\d+)")
_SUB_AXIS = re.compile(r"'([^']*)'(?::\((\d+)\)(\d+))?")
_IOTA = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?")


class SubAxis(NamedTuple):
    """A mesh axis, or a part of one.

    - `axis`: the name of the mesh axis.
    - `outer_size`: the product of the sizes of the sub-axes before it.
    - `size`: its own size; `None` if it is the whole axis.
    """

    axis: str
    outer_size: int
    size: int | None


def axis_sizes(text: str) -> dict[str, int]:
    """The sizes of the axes of a mesh by name, from a text such as `'x'=2,'y'=4`."""
    return {name: int(size) for name, size in _AXIS.findall(text)}


def sub_axes_in(text: str) -> list[SubAxis]:
    """The sub-axes in a text such as `'y','x':(1)2`: all of axis `y`, and the sub-axis
    of size 2 of axis `x` that comes after sub-axes of size 1.
    """
    sub_axes: list[SubAxis] = []
    for name, outer_size, size in _SUB_AXIS.findall(text):
        sub_axis = SubAxis(
            axis=name,
            outer_size=int(outer_size or 1),
            size=int(size) if size else None,
        )
        sub_axes.append(sub_axis)
    return sub_axes


def device_ids(text: str) -> np.ndarray:
    """The ids of devices in the order of a mesh, from a list of them or from a text
    such as `[4,2]T(1,0)`.
    """
    transposed = _IOTA.fullmatch(text)
    if transposed is None:
        return np.array(numbers_in(text))
    return transposed_iota(transposed[1], transposed[2]).ravel()


def transposed_iota(shape: str, order: str | None) -> np.ndarray:
    """The numbers from 0 on in an array of this shape, with its dimensions in this
    order: (0, 2), (1, 3) for the texts `2,2` and `1,0`. `None` is their own order.
    """
    sizes = numbers_in(shape)
    numbers = np.arange(math.prod(sizes)).reshape(sizes)
    return numbers.transpose(numbers_in(order)) if order else numbers


def numbers_in(text: str) -> tuple[int, ...]:
    """The numbers in a text such as `4,2`; none in an empty one."""
    return tuple(int(number) for number in text.split(",") if number)

"""The steps of a reshard over plain NumPy arrays: what every device holds, with no
device and no JAX.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from shardfx._reshard.steps.groups import (
    all_gather,
    all_to_all,
    join,
    kept_parts,
    split,
)
from shardfx._reshard.steps.layout import StepLayout
from shardfx._reshard.steps.paths import permutation
from shardfx._reshard.steps.redistribution import MoveStep


def pieces(array: np.ndarray, end: StepLayout, like: StepLayout) -> list[np.ndarray]:
    """What each device of `like`, in its mesh order, holds of `array` under `end`, by
    the definition.
    """
    alike = end.order is None or like.order is None
    if alike:
        order = range(end.size)
    else:
        order = end.order
    place = {device: index for index, device in enumerate(order or ())}
    boxes = []
    for device in range(end.size) if alike else like.order or ():
        coords = []
        rest = place[device]
        for size in reversed(end.sizes):
            coords.insert(0, rest % size)
            rest //= size
        cut = array
        for dim, axes in enumerate(end.dims):
            index = 0
            for axis in axes:
                index = index * end.sizes[axis] + coords[axis]
            width = array.shape[dim] // end.counts[dim]
            cut = np.take(cut, range(index * width, index * width + width), axis=dim)
        boxes.append(cut)
    return boxes


def simulate(
    array: np.ndarray, held: Sequence[np.ndarray], step: MoveStep, like: StepLayout
) -> list[Any]:
    """One step: what every device holds after it."""
    if step.kind == "slice":
        shape = step.target.shard_shape(array.shape)
        return [
            piece[
                tuple(
                    slice(start * size, start * size + size)
                    for start, size in zip(part, shape, strict=True)
                )
            ]
            for piece, part in zip(
                held, kept_parts(step.source, step.target, like), strict=True
            )
        ]
    if step.kind == "permute":
        return [held[who] for who in permutation(step.source, step.target, like)]
    out = list(held)
    if step.kind == "all_gather":
        exchange = all_gather(step.source, step.target, like)
        for group in exchange.groups:
            held_members = [held[member] for member in group]
            whole = join(np.stack(held_members), exchange)
            for member in group:
                out[member] = whole
        return out
    how = all_to_all(step.source, step.target, like)
    for group in how.groups:
        sent = [split(held[member], how) for member in group]
        for index, member in enumerate(group):
            out[member] = join(np.stack([parts[index] for parts in sent]), how)
    return out

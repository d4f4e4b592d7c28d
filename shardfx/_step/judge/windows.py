"""Windows of convolutions and of pooling, along one dimension.

Where the dimension is cut, a device's own rows come with rows of its neighbours, and
with zeros at the ends. Each position of the result has to read, at each tap of its
window, the same elements as some position of the whole result reads.
"""

import re
from typing import NamedTuple

import numpy as np

from ..hlo_text import Instruction
from .cuts import HOLE, Cut, Cuts
from .forms import attribute
from .verdict import Unjudged


class Window(NamedTuple):
    """The window of an operation along one dimension, in HLO's words. `low` and `high`
    are the padding at both ends.
    """

    size: int
    stride: int
    low: int
    high: int
    image_dilation: int
    kernel_dilation: int
    is_reversed: bool

    @property
    def is_trivial(self) -> bool:
        """Whether each position reads one element, that at its own index."""
        return self == Window(
            size=1,
            stride=1,
            low=0,
            high=0,
            image_dilation=1,
            kernel_dilation=1,
            is_reversed=False,
        )


def window_of(instruction: Instruction, rank: int) -> list[Window]:
    """The window of an instruction along each of `rank` dimensions, from the text of
    its attribute: `{size=3x3 pad=1_1x1_1}`.
    """
    text = attribute(instruction, "window")
    entries = dict(re.findall(r"(\w+)=([\w\-]+)", text))

    def numbers_of(name: str, default: int) -> list[int]:
        if name not in entries:
            return [default] * rank
        return [int(part) for part in entries[name].split("x")]

    paddings = [(0, 0)] * rank
    if "pad" in entries:
        pairs = [part.split("_") for part in entries["pad"].split("x")]
        paddings = [(int(low), int(high)) for low, high in pairs]
    columns = zip(
        numbers_of("size", 1),
        numbers_of("stride", 1),
        paddings,
        numbers_of("lhs_dilate", 1),
        numbers_of("rhs_dilate", 1),
        numbers_of("rhs_reversal", 0),
        strict=True,
    )
    return [
        Window(
            size=size,
            stride=stride,
            low=padding[0],
            high=padding[1],
            image_dilation=image_dilation,
            kernel_dilation=kernel_dilation,
            is_reversed=bool(reversal),
        )
        for size, stride, padding, image_dilation, kernel_dilation, reversal in columns
    ]


def windowed_cut(
    cuts: Cuts,
    held: tuple[np.ndarray, np.ndarray],
    windows: tuple[Window, Window],
    sizes: tuple[int, int],
    results: tuple[int, int],
) -> tuple[Cut, tuple[int, ...] | None]:
    """The cut of the result along one dimension, and the terms of the sum over taps
    that are cut; `None` if each device has all taps. A tap is a place in the window,
    with which an element of the kernel is multiplied.

    **Arguments:**

    - `held`: the indices that each device holds of the image and of the kernel, two
      arrays of shape (devices, positions).
    - `windows`: the windows of the device's operation and of the whole one.
    - `sizes`: the sizes of the whole image and of the whole kernel.
    - `results`: the sizes of the device's result and of the whole one.

    **Raises:**

    `Unjudged` if a device's result is no part of the whole one.
    """
    image, kernel = held
    local, whole = windows
    if local.is_reversed or whole.is_reversed:
        if local.is_reversed != whole.is_reversed:
            raise Unjudged("a window in another order")
        if not (kernel == np.arange(sizes[1])).all():
            raise Unjudged("a window in reverse order that is cut")
    if local.kernel_dilation != whole.kernel_dilation:
        raise Unjudged("a window with another dilation")
    if kernel.shape[1] != local.size:
        raise Unjudged("a window of another size")
    # In reverse order, a whole kernel's taps are those of the whole window too.
    taps = kernel
    elements = _read(image, local, results[0])
    is_kernel_whole = (taps != HOLE).all() and (taps == taps[:1]).all()
    if is_kernel_whole and local.size == whole.size:
        cut = _positions_that_read(
            cuts=cuts,
            elements=elements,
            taps=taps,
            window=whole,
            size=sizes[0],
            count=results[1],
        )
        return cut, None
    return _cut_kernel(
        cuts=cuts,
        elements=elements,
        taps=taps,
        window=whole,
        sizes=sizes,
        results=results,
    )


def _read(image: np.ndarray, window: Window, count: int) -> np.ndarray:
    """The element that each position of the result reads at each tap: an array of shape
    (devices, positions, taps). `HOLE` for padding and between dilated elements. `image`
    has the indices that each device holds of the image, and `count` is the number of
    positions.
    """
    places = (
        np.arange(count)[:, None] * window.stride
        + np.arange(window.size)[None, :] * window.kernel_dilation
        - window.low
    )
    is_element = (places >= 0) & (places % window.image_dilation == 0)
    image_positions = places // window.image_dilation
    is_element &= image_positions < image.shape[1]
    elements = image[:, np.clip(image_positions, 0, max(image.shape[1] - 1, 0))]
    return np.where(is_element[None], elements, HOLE)


def _expected(
    positions: np.ndarray,
    taps: np.ndarray,
    window: Window,
    size: int,
) -> np.ndarray:
    """The index in the whole image, of `size`, that each position of the whole result
    reads at each tap: the shape of `positions`, and a last dimension for the taps.
    `HOLE` for padding and between dilated elements.
    """
    places = (
        positions[..., None] * window.stride
        + taps * window.kernel_dilation
        - window.low
    )
    is_element = (places >= 0) & (places % window.image_dilation == 0)
    indices = places // window.image_dilation
    is_element &= indices < size
    return np.where(is_element, indices, HOLE)


def _positions_that_read(
    cuts: Cuts,
    elements: np.ndarray,
    taps: np.ndarray,
    window: Window,
    size: int,
    count: int,
) -> Cut:
    """The cut of a result whose positions read these elements, an array of shape
    (devices, positions, taps). For each, it is the position of the whole result, of
    `count`, that reads the same: found by the first element that it reads, and then
    compared at each tap. It is a hole if there is none. `taps` has the taps of each
    device, and `size` is that of the whole image.
    """
    devices, positions, _ = elements.shape
    indices = np.full((devices, positions), HOLE)
    has_any = (elements != HOLE).any(axis=2)
    first = np.argmax(elements != HOLE, axis=2)
    element = np.take_along_axis(elements, first[..., None], axis=2)[..., 0]
    tap = np.take_along_axis(
        np.broadcast_to(taps[:, None, :], elements.shape), first[..., None], axis=2
    )[..., 0]
    place = element * window.image_dilation + window.low - tap * window.kernel_dilation
    is_result = has_any & (place % window.stride == 0)
    indices[is_result] = (place // window.stride)[is_result]
    within = (indices >= 0) & (indices < count)
    expected = _expected(indices, taps[:, None, :], window, size)
    is_right = (expected == elements).all(axis=2) & within
    # A position that reads nothing lies between two that are known.
    indices[~is_right] = HOLE
    _fill_gaps(
        indices=indices,
        are_empty=~has_any,
        taps=taps,
        window=window,
        size=size,
        count=count,
    )
    return cuts.from_indices(indices)


def _fill_gaps(
    indices: np.ndarray,
    are_empty: np.ndarray,
    taps: np.ndarray,
    window: Window,
    size: int,
    count: int,
) -> None:
    """Sets the positions in `indices` that read nothing, as the mask `are_empty` says:
    those between two that are known, and all of a device that reads nothing at all, if
    the whole program has as many positions that do not. The other arguments are as in
    `_positions_that_read`.
    """
    for device in np.flatnonzero(are_empty.any(axis=1)).tolist():
        row = indices[device]
        known = np.flatnonzero(row != HOLE)
        if not len(known):
            # Nor does the whole program read anything there.
            whole_reads = _expected(np.arange(count), taps[device], window, size)
            unread = np.flatnonzero((whole_reads == HOLE).all(axis=1))
            if are_empty[device].all() and len(unread) == len(row):
                row[:] = unread
            continue
        shift = row[known[0]] - known[0]
        for place in np.flatnonzero(are_empty[device]).tolist():
            index = place + shift
            if 0 <= index < count:
                index_reads = _expected(np.array(index), taps[device], window, size)
                if (index_reads == HOLE).all():
                    row[place] = index


def _cut_kernel(
    cuts: Cuts,
    elements: np.ndarray,
    taps: np.ndarray,
    window: Window,
    sizes: tuple[int, int],
    results: tuple[int, int],
) -> tuple[Cut, tuple[int, ...]]:
    """The cut of the result, and the terms of a sum over taps that are cut, where each
    device has all positions of the result. The arguments are as in `windowed_cut` and
    `_positions_that_read`.
    """
    if results[0] != results[1]:
        raise Unjudged("a window and its result that are cut")
    positions = np.arange(results[1])
    expected = _expected(positions[None, :], taps[:, None, :], window, sizes[0])
    is_used = (taps != HOLE)[:, None, :] & (expected != HOLE)
    if (elements != expected)[is_used].any():
        raise Unjudged("a window over other elements than the whole one's")
    if (elements != HOLE)[(taps != HOLE)[:, None, :] & (expected == HOLE)].any():
        raise Unjudged("a window over other elements than the whole one's")
    terms = cuts.terms(cuts.from_indices(taps), sizes[1])
    if terms is None:
        raise Unjudged("a window that is not cut")
    return cuts.whole(results[1]), terms


def scattered_cut(
    cuts: Cuts,
    held: tuple[np.ndarray, np.ndarray],
    windows: tuple[Window, Window],
    sizes: tuple[int, int],
) -> Cut:
    """The cut of the result of a `select-and-scatter`, which adds an element of its
    source to the element of the image that each window selects. An element of the
    result is right if each window over it is there, and reads all that it reads in the
    whole program.

    **Arguments:**

    - `held`: the indices that each device holds of the image and of the source.
    - `windows`: the windows of the device's operation and of the whole one.
    - `sizes`: the sizes of the whole image and source.

    **Raises:**

    `Unjudged` if a device has a window twice.
    """
    image, source = held
    local, whole = windows
    if local.is_reversed or whole.is_reversed or local.size != whole.size:
        raise Unjudged("a window of another size, or in another order")
    taps = np.arange(whole.size)
    elements = _read(image, local, source.shape[1])
    expected = _expected(source, taps[None, None, :], whole, sizes[0])
    is_real = source != HOLE
    is_right = is_real & (elements == expected).all(axis=2)
    for row, are_real in zip(source, is_real, strict=True):
        real = row[are_real]
        if len(np.unique(real)) != len(real):
            raise Unjudged("a window that a device has twice")

    all_windows = np.arange(sizes[1])
    needed_counts = _covered(all_windows[None, :] >= 0, whole, sizes[0])[0]
    right_counts = _covered(is_right, local, image.shape[1])
    wrong_counts = _covered(is_real & ~is_right, local, image.shape[1])
    is_element = (image >= 0) & (image < sizes[0])
    needed_of_elements = needed_counts[np.where(is_element, image, 0)]
    is_whole = is_element & (wrong_counts == 0) & (right_counts == needed_of_elements)
    return cuts.from_indices(np.where(is_whole, image, HOLE))


def _covered(chosen: np.ndarray, window: Window, size: int) -> np.ndarray:
    """How many of the chosen windows, an array (devices, windows), are over each
    element of an image of `size`: an array (devices, elements).
    """
    counts = np.zeros((len(chosen), size), np.int64)
    for number in range(chosen.shape[1]):
        for tap in range(window.size):
            place = number * window.stride + tap * window.kernel_dilation - window.low
            if 0 <= place < size:
                counts[:, place] += chosen[:, number]
    return counts

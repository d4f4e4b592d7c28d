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


def known_size(size: int | None) -> int:
    """The size of a dimension of a value; raises `Unjudged` if it is not known."""
    if size is None:
        raise Unjudged("a dimension of unknown size")
    return size


class WindowedDim(NamedTuple):
    """A dimension along which an operation has a window, on one device or in the whole
    program: the window, and the sizes of the image, of the kernel and of the result
    along it. The gradient of a pool has the result of the pool as its source.
    """

    window: Window
    image_size: int
    kernel_size: int
    result_size: int


class WindowedCut(NamedTuple):
    """The cut of a result along one dimension, and the terms of the sum over taps that
    are cut; `None` if each device has all taps.
    """

    cut: Cut
    terms: tuple[int, ...] | None


def windowed_cut(
    cuts: Cuts,
    image_cut: Cut,
    kernel_cut: Cut,
    local: WindowedDim,
    whole: WindowedDim,
) -> WindowedCut:
    """The cut of the result along a dimension with a window, from those of the image
    and of the kernel. A tap is a place in the window, with which an element of the
    kernel is multiplied. `local` and `whole` are the dimension on one device and in the
    whole program. Raises `Unjudged` if a device's result is no part of the whole one.
    """
    image = cuts.indices(image_cut)
    kernel = cuts.indices(kernel_cut)
    _require_same_window(kernel, local, whole)
    # In reverse order, a whole kernel's taps are those of the whole window too.
    taps = kernel
    elements = _read(image, local.window, local.result_size)
    is_kernel_whole = (taps != HOLE).all() and (taps == taps[:1]).all()
    if is_kernel_whole and local.window.size == whole.window.size:
        positions = _positions_that_read(elements, taps, whole)
        return WindowedCut(cuts.from_indices(positions), None)
    terms = _terms_of_taps(cuts, elements, taps, whole)
    return WindowedCut(cuts.whole(whole.result_size), terms)


def _require_same_window(
    kernel: np.ndarray,
    local: WindowedDim,
    whole: WindowedDim,
) -> None:
    """Raises `Unjudged` if a window has another order or dilation on one device than in
    the whole program, or another size than the device's kernel. `kernel` has the
    indices that each device holds of the kernel.
    """
    if local.window.is_reversed or whole.window.is_reversed:
        if local.window.is_reversed != whole.window.is_reversed:
            raise Unjudged("a window in another order")
        if not (kernel == np.arange(whole.kernel_size)).all():
            raise Unjudged("a window in reverse order that is cut")
    if local.window.kernel_dilation != whole.window.kernel_dilation:
        raise Unjudged("a window with another dilation")
    if kernel.shape[1] != local.window.size:
        raise Unjudged("a window of another size")


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
    elements: np.ndarray,
    taps: np.ndarray,
    whole: WindowedDim,
) -> np.ndarray:
    """For each position of each device's result, the position of the whole result that
    reads the same elements: an array (devices, positions), with `HOLE` where there is
    none. `elements` are what the devices read, an array (devices, positions, taps), and
    `taps` has the taps of each device.
    """
    positions = _positions_by_first_element(elements, taps, whole.window)
    is_within = (positions >= 0) & (positions < whole.result_size)
    expected = _expected(positions, taps[:, None, :], whole.window, whole.image_size)
    is_right = (expected == elements).all(axis=2) & is_within
    positions = np.where(is_right, positions, HOLE)

    reads_nothing = (elements == HOLE).all(axis=2)
    for device in np.flatnonzero(reads_nothing.any(axis=1)).tolist():
        positions[device] = _with_gaps_filled(
            positions[device], reads_nothing[device], taps[device], whole
        )
    return positions


def _positions_by_first_element(
    elements: np.ndarray,
    taps: np.ndarray,
    window: Window,
) -> np.ndarray:
    """The positions of the whole result that read, at the first tap at which a device
    reads an element, the same element; `HOLE` where none does. Arguments and result are
    as in `_positions_that_read`, and `window` is that of the whole program.
    """
    is_element = elements != HOLE
    first = np.argmax(is_element, axis=2)[..., None]
    first_elements = np.take_along_axis(elements, first, axis=2)[..., 0]
    taps_by_position = np.broadcast_to(taps[:, None, :], elements.shape)
    first_taps = np.take_along_axis(taps_by_position, first, axis=2)[..., 0]

    places = first_elements * window.image_dilation + window.low
    places -= first_taps * window.kernel_dilation
    is_position = is_element.any(axis=2) & (places % window.stride == 0)
    return np.where(is_position, places // window.stride, HOLE)


def _with_gaps_filled(
    positions: np.ndarray,
    reads_nothing: np.ndarray,
    taps: np.ndarray,
    whole: WindowedDim,
) -> np.ndarray:
    """The positions of one device, where those that read nothing, as the mask
    `reads_nothing` says, are the neighbours of known ones; or all that read nothing in
    the whole program, if these are as many as the device's.
    """
    known = np.flatnonzero(positions != HOLE)
    if not len(known):
        unread = _unread_positions(np.arange(whole.result_size), taps, whole)
        is_all_unread = reads_nothing.all() and len(unread) == len(positions)
        return unread if is_all_unread else positions
    neighbours = np.arange(len(positions)) + positions[known[0]] - known[0]
    is_within = (neighbours >= 0) & (neighbours < whole.result_size)
    unread = _unread_positions(neighbours[reads_nothing & is_within], taps, whole)
    is_filled = reads_nothing & np.isin(neighbours, unread)
    return np.where(is_filled, neighbours, positions)


def _unread_positions(
    positions: np.ndarray,
    taps: np.ndarray,
    whole: WindowedDim,
) -> np.ndarray:
    """Those of the positions of the whole result that read nothing at these taps."""
    expected = _expected(positions, taps, whole.window, whole.image_size)
    return positions[(expected == HOLE).all(axis=1)]


def _terms_of_taps(
    cuts: Cuts,
    elements: np.ndarray,
    taps: np.ndarray,
    whole: WindowedDim,
) -> tuple[int, ...]:
    """The terms of a sum over taps that are cut, where each device has all positions of
    the result. `elements` and `taps` are as in `_positions_that_read`. Raises
    `Unjudged` if a device reads other elements than the whole program at its taps.
    """
    if elements.shape[1] != whole.result_size:
        raise Unjudged("a window and its result that are cut")
    positions = np.arange(whole.result_size)[None, :]
    expected = _expected(positions, taps[:, None, :], whole.window, whole.image_size)
    has_tap = (taps != HOLE)[:, None, :]
    is_used = has_tap & (expected != HOLE)
    if (elements != expected)[is_used].any():
        raise Unjudged("a window over other elements than the whole one's")
    if (elements != HOLE)[has_tap & (expected == HOLE)].any():
        raise Unjudged("a window over other elements than the whole one's")
    terms = cuts.terms(cuts.from_indices(taps), whole.kernel_size)
    if terms is None:
        raise Unjudged("a window that is not cut")
    return terms


def scattered_cut(
    cuts: Cuts,
    image_cut: Cut,
    source_cut: Cut,
    local: WindowedDim,
    whole: WindowedDim,
) -> Cut:
    """The cut of the result of a `select-and-scatter`, which adds an element of its
    source to the element of the image that each window selects. An element of the
    result is right if each window over it is there, and reads all that it reads in the
    whole program. `local` and `whole` are the dimension on one device and in the whole
    program. Raises `Unjudged` if a device has a window twice.
    """
    image = cuts.indices(image_cut)
    source = cuts.indices(source_cut)
    if (
        local.window.is_reversed
        or whole.window.is_reversed
        or local.window.size != whole.window.size
    ):
        raise Unjudged("a window of another size, or in another order")
    taps = np.arange(whole.window.size)
    elements = _read(image, local.window, local.result_size)
    expected = _expected(source, taps[None, None, :], whole.window, whole.image_size)
    is_real = source != HOLE
    is_right = is_real & (elements == expected).all(axis=2)
    for row, are_real in zip(source, is_real, strict=True):
        real = row[are_real]
        if len(np.unique(real)) != len(real):
            raise Unjudged("a window that a device has twice")

    all_windows = np.ones((1, whole.result_size), bool)
    needed_counts = _covered(all_windows, whole.window, whole.image_size)[0]
    right_counts = _covered(is_right, local.window, local.image_size)
    wrong_counts = _covered(is_real & ~is_right, local.window, local.image_size)
    is_element = (image >= 0) & (image < whole.image_size)
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

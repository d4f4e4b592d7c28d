"""What the devices hold of a value: the types of the judge."""

import dataclasses
import itertools
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple, TypeAlias

import numpy as np

from ..hlo_text import HloModule
from .cuts import Cut, Cuts
from .forms import View
from .values import Values
from .verdict import Unjudged, Wrong
from .whole_program import WholeProgram


# Known numbers are kept for arrays up to this size, devices included.
MOST_KNOWN = 2**20
NOWHERE = -1
# The number of a constant.
Number: TypeAlias = int | float


class Fills(NamedTuple):
    """The numbers in holes, where they differ: `number` in those along the dimensions
    `dims` of the value, and `other` in those that are along other dimensions alone.
    `number` is `None` if it is not known.
    """

    dims: frozenset[int]
    number: Number | None
    other: Number


class Axis(NamedTuple):
    """A dimension of the array of one device: what its positions hold, and the
    dimension of the value along which it lies. `dim` counts the dimensions of the
    value. The place of the axis in `Held.axes` counts those of the device's array.
    """

    dim: int
    cut: Cut


def cut_of(axis: Axis | None) -> Cut | None:
    """The cut of an axis; `None` if there is none."""
    return None if axis is None else axis.cut


def dim_of(axis: Axis | None) -> int | None:
    """The dimension of the value along which an axis lies; `None` if there is none."""
    return None if axis is None else axis.dim


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """What the devices hold of a value.

    On device `p`, the element at some position is the element of the value at the index
    that `axes` and `dropped_axes` say; or the sum of the terms that `p` has.

    - `root`: the number of the value; `NOWHERE` for numbers that only the program of
      one device has, such as the device's own.
    - `shape`: the shape of the array on one device.
    - `axes`: for each dimension of this array, an `Axis`; `None` if nothing changes
      along it.
    - `dropped_axes`: for dimensions of the value without an axis, the cut of size 1 at
      each device's index.
    - `terms`: `None` if each device has the whole sum. Else, for each term of an
      unfinished sum, the devices that have it, as a bit mask.
    - `reducer`: the operation that finishes the sum, such as "add" or "maximum".
    - `scale`: the array holds this many times the value.
    - `fill`: the number in holes, or the numbers; `None` if they are not known.
    - `known_numbers`: the elements themselves, if they follow from constants and from
      the device's number: an array (devices, 1 or size, ...).
    - `idiom`: an unfinished idiom of the partitioner.
    """

    root: int
    shape: tuple[int, ...]
    axes: tuple[Axis | None, ...]
    dropped_axes: tuple[Axis, ...] = ()
    terms: tuple[int, ...] | None = None
    reducer: str = "add"
    scale: Fraction | int = 1
    fill: Number | Fills | None = None
    known_numbers: np.ndarray | None = None
    idiom: object = None

    @property
    def layout(self) -> tuple[object, ...]:
        """All that an operation on it depends on, except the number of the value, as a
        key for `Memory`. It identifies known numbers by the id of their array, and
        cannot be used for idioms.
        """
        return (
            self.shape,
            self.axes,
            self.dropped_axes,
            self.terms,
            self.reducer,
            self.scale,
            self.fill,
            id(self.known_numbers),
        )

    def of_value(self, root: int) -> "Held":
        """The same elements of another value, whose number is `root`."""
        return Held(
            root=root,
            shape=self.shape,
            axes=self.axes,
            dropped_axes=self.dropped_axes,
            terms=self.terms,
            reducer=self.reducer,
            scale=self.scale,
            fill=self.fill,
            known_numbers=self.known_numbers,
            idiom=self.idiom,
        )

    def with_sums_of(self, operand: "Held") -> "Held":
        """The same elements, of which each device has the terms that it has of an
        operand's.
        """
        return dataclasses.replace(
            self,
            terms=operand.terms,
            reducer=operand.reducer,
            scale=operand.scale,
        )

    @property
    def has_holes(self) -> bool:
        """Whether positions of a device hold no element of the value."""
        axes = (*self.axes, *self.dropped_axes)
        return any(axis is not None and axis.cut.has_holes for axis in axes)

    @property
    def hole_dims(self) -> frozenset[int]:
        """The dimensions along which there are holes. They are dimensions of the value,
        `Axis.dim`, and no places in `axes`.
        """
        dims: list[int] = []
        for axis in (*self.axes, *self.dropped_axes):
            if axis is not None and axis.cut.has_holes:
                dims.append(axis.dim)
        return frozenset(dims)

    @property
    def fill_number(self) -> Number | None:
        """The number in all holes; `None` if it is not known, or not the same in
        all.
        """
        return None if isinstance(self.fill, Fills) else self.fill

    @property
    def is_finished(self) -> bool:
        """Whether each device has the whole sum, and has it once."""
        return self.terms is None and self.scale == 1

    @property
    def is_uniform(self) -> bool:
        """Whether its known numbers are the same on each device."""
        table = self.known_numbers
        return table is not None and bool((table == table[:1]).all())


class Faulty(NamedTuple):
    """A result that hangs on something wrong: the refutation's index in the record's
    `faults`.
    """

    fault_number: int


class Unknown(NamedTuple):
    """A result that is not judged: the cause's index in the record's `causes`."""

    cause_number: int


# What an instruction returns.
Result: TypeAlias = "Held | Faulty | Unknown | tuple[Result, ...]"


class Memory:
    """The results of rules, by what they depend on. Equal layers of a program lie
    alike, so most of their operations are judged once.
    """

    def __init__(self):
        self._results: dict[tuple[object, ...], Held] = {}
        # A layout identifies known numbers by their arrays, which have to stay.
        self._operands: list[Sequence[Held]] = []

    def result(self, key: tuple[object, ...]) -> Held | None:
        """What the rule returned for an equal operation on operands that lie alike;
        `None` for the first.
        """
        return self._results.get(key)

    def add(
        self,
        key: tuple[object, ...],
        operands: Sequence[Held],
        result: Held,
    ) -> None:
        """Keeps what a rule returned. `key` holds the operation and the layouts of its
        operands; the operands stay alive with it.
        """
        self._results[key] = result
        self._operands.append(operands)


class Context(NamedTuple):
    """What all rules need, and the memory of their results."""

    module: HloModule
    whole_program: WholeProgram
    cuts: Cuts
    memory: Memory

    @property
    def values(self) -> Values:
        return self.whole_program.values

    @property
    def devices(self) -> int:
        """The number of devices."""
        return self.cuts.devices

    @property
    def everywhere(self) -> int:
        """All devices, as a bit mask."""
        return (1 << self.cuts.devices) - 1


def view_of(held: Held) -> View:
    """The view of the value, as the whole program has it: a dimension of size 1 that
    holds the first element counts as one along which nothing changes. Raises `Unjudged`
    if some devices hold padding in the place of such a dimension, which the view lacks:
    they have no element of the value.
    """
    for axis in held.dropped_axes:
        # Another index than 0 is none of a dimension of size 1, and the whole program
        # has no view without a longer one.
        if axis.cut.has_holes and not (axis.cut.starts > 0).any():
            raise Unjudged("a reshape that drops a dimension of padding")
    dims: list[int | None] = []
    for axis in held.axes:
        if axis is not None and axis.cut.is_first_element:
            axis = None
        dims.append(dim_of(axis))
    return View(held.root, tuple(dims))


def permuted(operand: Held, order: Sequence[int]) -> Held:
    """The operand with its dimensions in another order: dimension `i` of the result is
    dimension `order[i]` of the operand.
    """
    known_numbers = operand.known_numbers
    if known_numbers is not None:
        known_numbers = known_numbers.transpose(0, *(1 + dim for dim in order))
    return dataclasses.replace(
        operand,
        shape=tuple(operand.shape[dim] for dim in order),
        axes=tuple(operand.axes[dim] for dim in order),
        known_numbers=known_numbers,
    )


def with_all_axes(context: Context, held: Held) -> Held:
    """The same with an axis for each dimension of the value that is cut: the cuts in
    `dropped_axes` become those of dimensions of size 1 in which nothing changes. Only
    the first rows of longer dimensions stay dropped. Raises `Unjudged` if a cut finds
    none that keeps the order of the value's dimensions.
    """
    sizes = context.values.nodes[held.root].shape if held.root >= 0 else ()
    dropped_axes: list[Axis] = []
    first_rows: list[Axis] = []
    for axis in held.dropped_axes:
        if axis.cut.starts.any():
            dropped_axes.append(axis)
        elif axis.dim < len(sizes) and sizes[axis.dim] != 1:
            first_rows.append(axis)
    axes = list(held.axes)
    for axis in sorted(dropped_axes, key=lambda axis: axis.dim):
        free_places: list[int] = []
        for place, other in enumerate(axes):
            is_cut = other is not None and bool(other.cut.starts.any())
            is_free = held.shape[place] == 1 and not is_cut
            if is_free and _keeps_order(axes, place, axis.dim):
                free_places.append(place)
        if not free_places:
            raise Unjudged("a reshape that drops a cut dimension")
        axes[free_places[0]] = axis
    return dataclasses.replace(held, axes=tuple(axes), dropped_axes=tuple(first_rows))


def _keeps_order(axes: Sequence[Axis | None], place: int, dim: int) -> bool:
    """Whether the axes of an array stay in the order of the value's dimensions, if
    dimension `place` of the array gets an axis along dimension `dim` of the value.
    """
    before = [axis.dim for axis in axes[:place] if axis is not None]
    after = [axis.dim for axis in axes[place + 1 :] if axis is not None]
    return all(earlier < dim for earlier in before) and all(
        later > dim for later in after
    )


def require_whole_scalar(held: Held, what: str) -> None:
    """Raises `Unjudged` unless each device has the value itself of a scalar on which
    `what`, such as a loop, hangs: no part of it, no other row, and no unfinished idiom.
    """
    is_other_row = any(axis.cut.starts.any() for axis in held.dropped_axes)
    if not held.is_finished or held.idiom is not None or is_other_row:
        raise Unjudged(f"{what} that hangs on something unfinished")


def require_finished(held: Held, what: str) -> None:
    """Raises `Wrong` for an operand that is an unfinished sum, where an operation needs
    the whole, and `Unjudged` for one that may be. `what` names the operation in the
    text: "pad".
    """
    if held.known_numbers is not None and not held.known_numbers.any():
        # A sum of zeros is zero, finished or not.
        return
    if held.terms is not None and len(held.terms) == 1:
        # The other devices have zeros, which may be padding of this value.
        raise Unjudged(f"{what} of a value on some devices, and of zeros on others")
    if held.terms is not None:
        raise Wrong(
            fault=f"{what} takes a sum that is not finished: the devices hold"
            f" {len(held.terms)} terms of it in parts",
            right=f"an all-reduce of the operand before {what}",
            mend="constrain the operand's sharding at this line",
        )
    if held.scale != 1:
        raise multiplied_fault(held.scale, what)


def multiplied_fault(scale: Fraction | int, what: str) -> Wrong:
    """The fault of a value that devices hold `scale` times, where the operation `what`
    takes it.
    """
    return Wrong(
        fault=f"{what} takes a value that is {scale} times what it should be",
        right="a reduction over the devices that hold different terms, and no others",
        mend="constrain the operand's sharding at this line",
    )


def term_devices(mask: int) -> list[int]:
    """The devices of a bit mask."""
    return [device for device in range(mask.bit_length()) if mask >> device & 1]


def product_of_terms(
    everywhere: int,
    *sums: tuple[int, ...] | None,
) -> tuple[int, ...] | None:
    """The terms of a product of sums. Each sum is given by its terms, as in
    `Held.terms`: for each term, the devices that have it, as a bit mask. Each pair of
    terms is a term of the product, and is on the devices that have both. `None` if each
    device has the whole product. Raises `Wrong` if no device has both of a pair.
    `everywhere` is the bit mask of all devices.
    """
    product = {everywhere}
    for terms in sums:
        if terms is not None:
            pairs = itertools.product(product, terms)
            product = {term & other for term, other in pairs}
    if 0 in product:
        raise Wrong(
            fault="it sums parts of a dimension on devices that hold only some terms of"
            " its operand: no device computes the other terms",
            right="an all-reduce of the operand before this operation",
            mend="constrain the operand's sharding at this line",
        )
    return None if product == {everywhere} else tuple(sorted(product))

"""Laws of layouts: between any two of one array the map makes what NumPy makes, there
and back.
"""

import itertools as it
import math
from typing import NamedTuple

import numpy as np
from hypothesis import Phase, assume, given, settings, strategies as st

from shardfx.presets import maps


class Form(NamedTuple):
    """How an array's axes lie in files.

    - `in_path`: the axes whose entries are files of their own.
    - `dims`: the axes of each dimension of a file's array.
    - `parted`: the axis whose parts are arrays of their own, or `None`.
    - `edge`: where the second part of `parted` begins.
    """

    in_path: list[str]
    dims: list[list[str]]
    parted: str | None
    edge: int

    @property
    def axes(self) -> list[str]:
        """All axes, in the order of the path and the dimensions."""
        return [*self.in_path, *it.chain.from_iterable(self.dims)]


@st.composite
def axis_sizes(draw):
    axes = "abcd"[: draw(st.integers(1, 4))]
    return {axis: draw(st.integers(1, 3)) for axis in axes}


@st.composite
def forms(draw, sizes, may_be_parted=True):
    axes = draw(st.permutations(sorted(sizes)))
    path_length = draw(st.integers(0, min(2, len(axes))))
    dims: list[list[str]] = []
    for axis in axes[path_length:]:
        if dims and draw(st.booleans()):
            dims[-1].append(axis)
        else:
            dims.append([axis])

    parted = None
    edge = 0
    if may_be_parted:
        alone = [dim[0] for dim in dims if len(dim) == 1 and sizes[dim[0]] > 1]
        parted = draw(st.sampled_from([None, *alone]))
    if parted is not None:
        edge = draw(st.integers(1, sizes[parted] - 1))
    return Form(axes[:path_length], dims, parted, edge)


def dim_text(dim):
    if len(dim) == 1:
        return dim[0]
    return f"({' '.join(dim)})"


def layout(form, sizes):
    """The form as a layout of `shardfx.presets.maps`."""
    path = ".".join(["w", *[f"{{{axis}}}" for axis in form.in_path]])
    dims = [dim_text(dim) for dim in form.dims]
    if form.parted is None:
        return maps.TreeLayout({path: "w: " + " ".join(dims)}, sizes=sizes)
    rows = {}
    for part in (f":{form.edge}", f"{form.edge}:"):
        ranges = {form.parted: f"{form.parted}[{part}]"}
        words = [ranges.get(dim, dim) for dim in dims]
        name = path + part.replace(":", "-")
        rows[name] = "w: " + " ".join(words)
    return maps.TreeLayout(rows, sizes=sizes)


def files(form, sizes, whole):
    """The arrays of a form, out of one that has its axes in alphabetical order."""
    positions = [sorted(sizes).index(axis) for axis in form.axes]
    turned = whole.transpose(positions)
    shape = [math.prod(sizes[axis] for axis in dim) for dim in form.dims]
    array_by_path = {}
    for numbers in it.product(*[range(sizes[axis]) for axis in form.in_path]):
        array = turned[numbers].reshape(shape)
        path = ".".join(["w", *map(str, numbers)])
        if form.parted is None:
            array_by_path[path] = array
            continue
        dim = form.dims.index([form.parted])
        first, second = np.split(array, [form.edge], axis=dim)
        array_by_path[f"{path}-{form.edge}"] = first
        array_by_path[f"{path}{form.edge}-"] = second
    return array_by_path


def numbered(sizes, first=0):
    """An array with these axes in alphabetical order, each element another number."""
    shape = [sizes[axis] for axis in sorted(sizes)]
    values = np.arange(first, first + math.prod(shape))
    return values.reshape(shape)


def assert_equal(actual, expected):
    assert actual.keys() == expected.keys()
    for path, array in expected.items():
        assert actual[path].shape == array.shape
        assert (actual[path] == array).all()


def lead_to_each_other(source_layout, target_layout, source, target):
    there = source_layout.to(target_layout).apply(source, like=target)
    assert_equal(there, target)
    back = target_layout.to(source_layout).apply(target, like=source)
    assert_equal(back, source)


def can_be_joined(form, other):
    """Whether parts in one form are put together in the other: along a dimension of
    their own, or in the path.
    """
    parted = form.parted
    return parted is None or parted in other.in_path or [parted] in other.dims


@settings(max_examples=15, deadline=None, phases=(Phase.generate,))
@given(st.data())
def test_any_two_layouts_of_an_array_lead_to_each_other(data):
    sizes = data.draw(axis_sizes())
    source_form = data.draw(forms(sizes))
    target_form = data.draw(forms(sizes))
    assume(can_be_joined(source_form, target_form))
    assume(can_be_joined(target_form, source_form))
    whole = numbered(sizes)
    source = files(source_form, sizes, whole)
    target = files(target_form, sizes, whole)
    source_layout = layout(source_form, sizes)
    target_layout = layout(target_form, sizes)
    lead_to_each_other(source_layout, target_layout, source, target)
    inverse = source_layout.to(target_layout).inverse()
    assert_equal(inverse.apply(target, like=source), source)


@settings(max_examples=15, deadline=None, phases=(Phase.generate,))
@given(st.data())
def test_axes_are_padded_and_cut_off_again(data):
    sizes = data.draw(axis_sizes())
    source_form = data.draw(forms(sizes, may_be_parted=False))
    target_form = data.draw(forms(sizes, may_be_parted=False))
    padded_sizes = {}
    for axis, size in sizes.items():
        # Of an axis that both have in their paths there is nothing to pad: the arrays
        # are not there.
        is_in_paths = axis in source_form.in_path and axis in target_form.in_path
        padding = 0 if is_in_paths else data.draw(st.integers(0, 2))
        padded_sizes[axis] = size + padding
    whole = numbered(sizes, first=1)
    widths = [(0, padded_sizes[axis] - sizes[axis]) for axis in sorted(sizes)]
    source = files(source_form, sizes, whole)
    target = files(target_form, padded_sizes, np.pad(whole, widths))
    source_layout = layout(source_form, sizes)
    target_layout = layout(target_form, padded_sizes)
    lead_to_each_other(source_layout, target_layout, source, target)


@settings(max_examples=15, deadline=None, phases=(Phase.generate,))
@given(st.data())
def test_a_repetition_is_there_so_many_times_and_taken_back(data):
    sizes = data.draw(axis_sizes())
    count = data.draw(st.integers(1, 3))
    repeated_sizes = {**sizes, "z": count}
    source_form = data.draw(forms(sizes, may_be_parted=False))
    target_form = data.draw(forms(repeated_sizes, may_be_parted=False))
    if "z" in target_form.in_path:
        in_path = [axis for axis in target_form.in_path if axis != "z"]
        dims = [*target_form.dims, ["z"]]
        target_form = target_form._replace(in_path=in_path, dims=dims)
    whole = numbered(sizes)
    source = files(source_form, sizes, whole)
    target = files(target_form, repeated_sizes, np.stack([whole] * count, axis=-1))
    source_layout = layout(source_form, sizes)
    target_layout = layout(target_form, repeated_sizes)
    lead_to_each_other(source_layout, target_layout, source, target)

"""Laws of layouts: between any two of one array the map makes what NumPy makes, there
and back.
"""

import itertools as it
import math

import numpy as np
from hypothesis import Phase, assume, given, settings, strategies as st

from shardfx.presets import maps


@st.composite
def sizes(draw):
    return {axis: draw(st.integers(1, 3)) for axis in "abcd"[: draw(st.integers(1, 4))]}


@st.composite
def forms(draw, axes, cuts=True):
    """Where the axes are: in the path, in which dimensions, and the parts of one axis
    that are arrays of their own.
    """
    order = draw(st.permutations(sorted(axes)))
    path = order[: draw(st.integers(0, min(2, len(order))))]
    rest = []
    for axis in order[len(path) :]:
        if rest and draw(st.booleans()):
            rest[-1].append(axis)
        else:
            rest.append([axis])
    alone = [group[0] for group in rest if len(group) == 1 and axes[group[0]] > 1]
    if cuts:
        cut = draw(st.sampled_from([None, *alone]))
    else:
        cut = None
    return path, rest, cut, draw(st.integers(1, max(1, axes[cut] - 1))) if cut else 0


def layout(form, axes):
    path, rest, cut, offset = form
    rows = {}
    for part in ("",) if cut is None else (f"[:{offset}]", f"[{offset}:]"):
        text = " ".join(
            f"({' '.join(group)})" if len(group) > 1 else group[0] for group in rest
        )
        name = ".".join(["w", *[f"{{{axis}}}" for axis in path]]) + part.strip(
            "[]"
        ).replace(":", "-")
        rows[name] = "w: " + " ".join(
            f"{word}{part}" if word == cut else word for word in text.split(" ")
        )
    return maps.TreeLayout(rows, sizes=axes)


def arrays(form, axes, whole):
    """The arrays of a layout, out of one that has its axes in alphabetical order."""
    path, rest, cut, offset = form
    array_by_path = {}
    order = [*path, *[axis for group in rest for axis in group]]
    turned = whole.transpose([sorted(axes).index(axis) for axis in order])
    for numbers in it.product(*[range(axes[axis]) for axis in path]):
        block = turned[numbers].reshape(
            [math.prod(axes[axis] for axis in group) for group in rest]
        )
        name = ".".join(["w", *map(str, numbers)])
        if cut is None:
            array_by_path[name] = block
            continue
        groups = [group[0] for group in rest]
        first, second = np.split(block, [offset], axis=groups.index(cut))
        array_by_path |= {f"{name}-{offset}": first, f"{name}{offset}-": second}
    return array_by_path


def equal(table, two):
    assert table.keys() == two.keys()
    for path in two:
        assert table[path].shape == two[path].shape
        assert (table[path] == two[path]).all()


def lead_to_each_other(form, two, source, target):
    applied = form.to(two).apply(source, like=target)
    equal(applied, target)
    applied = two.to(form).apply(target, like=source)
    equal(applied, source)


@settings(max_examples=15, deadline=None, phases=(Phase.generate,))
@given(st.data())
def test_any_two_layouts_of_an_array_lead_to_each_other(data):
    axes = data.draw(sizes())
    form = data.draw(forms(axes))
    two = data.draw(forms(axes))
    # What comes in parts is put together along a dimension of its own, or is in the
    # path.
    for cut, other in ((form[2], two), (two[2], form)):
        assume(cut is None or cut in other[0] or [cut] in other[1])
    values = np.arange(math.prod(axes.values()))
    whole = values.reshape([axes[axis] for axis in sorted(axes)])
    source = arrays(form, axes, whole)
    target = arrays(two, axes, whole)
    form = layout(form, axes)
    two = layout(two, axes)
    lead_to_each_other(form, two, source, target)
    applied = form.to(two).inverse().apply(target, like=source)
    equal(applied, source)


@settings(max_examples=15, deadline=None, phases=(Phase.generate,))
@given(st.data())
def test_axes_are_padded_and_cut_off_again(data):
    axes = data.draw(sizes())
    form = data.draw(forms(axes, cuts=False))
    two = data.draw(forms(axes, cuts=False))
    # Of an axis that both have in their paths there is nothing to pad: the arrays are
    # not there.
    size_by_axis = {
        axis: size
        for axis, size in axes.items()
        if axis not in form[0] or axis not in two[0]
    }
    sizes_by_axis = {
        axis: size + data.draw(st.integers(0, 2)) for axis, size in size_by_axis.items()
    }
    extra = axes | sizes_by_axis
    values = np.arange(1, 1 + math.prod(axes.values()))
    whole = values.reshape([axes[axis] for axis in sorted(axes)])
    padded = np.pad(whole, [(0, extra[axis] - axes[axis]) for axis in sorted(axes)])
    source = arrays(form, axes, whole)
    target = arrays(two, extra, padded)
    lead_to_each_other(layout(form, axes), layout(two, extra), source, target)


@settings(max_examples=15, deadline=None, phases=(Phase.generate,))
@given(st.data())
def test_a_repetition_is_there_so_many_times_and_taken_back(data):
    axes = data.draw(sizes())
    every = {**axes, "z": data.draw(st.integers(1, 3))}
    form = data.draw(forms(axes, cuts=False))
    two = data.draw(forms(every, cuts=False))
    if "z" in two[0]:
        two = ([axis for axis in two[0] if axis != "z"], [*two[1], ["z"]], None, 0)
    values = np.arange(math.prod(axes.values()))
    whole = values.reshape([axes[axis] for axis in sorted(axes)])
    source = arrays(form, axes, whole)
    target = arrays(two, every, np.stack([whole] * every["z"], axis=-1))
    lead_to_each_other(layout(form, axes), layout(two, every), source, target)

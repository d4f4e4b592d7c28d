"""Conditionals: their branches lie alike."""

from collections.abc import Sequence

from .held import Context, Held, Result, require_whole_scalar, view_of
from .joining import joined_cut
from .results import held_of
from .values import conditional_key
from .verdict import Unjudged


def branched(context: Context, branch_number: Held, leaves: Sequence[Result]) -> Result:
    """A result of a conditional. `leaves` is what each branch returns in its place, and
    `branch_number` is operand 0, which chooses a branch. If the result of a branch is
    wrong or not judged, so is this.
    """
    require_whole_scalar(branch_number, "a conditional")
    for leaf in leaves:
        if not isinstance(leaf, Held):
            return leaf
    branches = [leaf for leaf in leaves if isinstance(leaf, Held)]
    for branch in branches:
        if not branch.is_finished or branch.idiom is not None or branch.dropped_axes:
            raise Unjudged("a conditional whose branches are unfinished")
    branch_views = [view_of(branch) for branch in branches]
    key = conditional_key(view_of(branch_number), branch_views)
    value_numbers = context.values.with_key(key)
    if len(value_numbers) != 1:
        raise Unjudged("no conditional of the whole program has these results")
    shape = branches[0].shape
    array = context.values.nodes[value_numbers[0]].result
    assert array is not None
    cuts = []
    for place in range(len(shape)):
        axes = [branch.axes[place] for branch in branches]
        cuts.append(joined_cut(context, "conditional", place, axes))
    if any(
        cut is None and dim is not None
        for cut, dim in zip(cuts, array.view.dims, strict=True)
    ):
        raise Unjudged("a conditional whose branches are broadcasts")
    # A branch along which nothing changes holds all of its dimension.
    cuts_of_result = []
    for cut, size in zip(cuts, shape, strict=True):
        cuts_of_result.append(context.cuts.whole(size) if cut is None else cut)
    return held_of(array, shape, cuts_of_result)

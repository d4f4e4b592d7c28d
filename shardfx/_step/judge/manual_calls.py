"""Calls of the bodies of `shard_map`s."""

from collections.abc import Sequence

from ..hlo_text import Instruction, arrays_in
from . import manual
from .held import NOWHERE, Context, Held, Result, view_of
from .matching import expressed
from .results import held_of, required_view
from .shardings import axes_of
from .values import ManualCall, Shards
from .verdict import Unjudged


def called_manually(
    context: Context,
    instruction: Instruction,
    operands: Sequence[Result],
    name: str,
) -> "Result | None":
    """The results of the call of a `shard_map`'s body; `None` for other calls. Raises
    `Unjudged` if the whole program has no call of an equal body with the same shards:
    what a body computes are no values of the whole program.
    """
    bodies = context.values.manual_bodies
    calls = context.values.manual_calls
    if not bodies:
        return None
    is_manual = bodies.get(name.removesuffix(_PARTITIONED))
    if is_manual is False:
        raise Unjudged("the body of a `shard_map` that is manual in some axes only")
    expressions = manual.expressions(context.module, name)
    for call in calls:
        if call.expressions != expressions or len(call.operands) != len(operands):
            continue
        if all(map(_Taken(context).is_taken, operands, call.operands)):
            return _results(context, instruction, call)
    if is_manual:
        raise Unjudged("the body of a `shard_map` that is no body of the whole program")
    return None


# The end of the name that the partitioner gives a computation.
_PARTITIONED = "_spmd"


class _Taken:
    """Which shards a body takes."""

    def __init__(self, context: Context):
        self.context = context

    def is_taken(self, operand: Result, shards: Shards) -> bool:
        """Whether devices hold these shards."""
        if not isinstance(operand, Held):
            return False
        array = shards.array
        seen = expressed(self.context, operand, array)
        if seen is None or view_of(seen) != required_view(seen, array):
            return False
        if not seen.is_finished or seen.idiom is not None or seen.rest:
            return False
        try:
            cuts = axes_of(self.context.cuts, shards.sharding, array.shape, seen.shape)
        except Unjudged:
            return False
        for axis, dim, cut in zip(seen.axes, array.view.dims, cuts, strict=True):
            if axis is None:
                if dim is not None:
                    return False
            elif axis.cut is not cut:
                return False
        return True


def _results(context: Context, instruction: Instruction, call: ManualCall) -> Result:
    results: list[Result] = []
    for place, part in enumerate(arrays_in(instruction.result)):
        shape = part.shape
        shards = call.results.get(place)
        if shards is None:
            # The whole program does not read it.
            results.append(Held(NOWHERE, shape, (None,) * len(shape)))
            continue
        cuts = axes_of(context.cuts, shards.sharding, shards.array.shape, shape)
        results.append(held_of(shards.array, shape, cuts))
    return tuple(results) if instruction.result.startswith("(") else results[0]

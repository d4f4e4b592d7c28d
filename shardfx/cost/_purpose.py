"""The purpose of each array in a step's arguments: parameter, optimizer state, batch or
cache.

The purpose follows from the operations that read the array, not from the array's name.
"""

import collections
import math
from collections.abc import Iterator, Sequence, Set
from typing import NamedTuple

import jax

from .._step import ELEMENTWISE, MOVING, PIECES, VIEWS, Parameter, Step
from ._live.program import FlatProgram, Uses, reached


# Operations that compute an argument's new value from its old one. They include
# collectives: updated parameters are gathered if the optimizer's state is sharded
# further than the parameters.
_FOLLOWED = ELEMENTWISE | VIEWS | PIECES | MOVING


class ArgumentPurpose(NamedTuple):
    """One array of a step's arguments, and its purpose.

    - `argument`: the array's path, whole shape and sharding.
    - `dtype`: the array's dtype in HLO's notation.
    - `group`: the purpose: "parameters", "optimizer: mu" (one group for each moment),
      "KV cache", "batch" or "other".
    - `result`: the number of the step's result that is the array's new value; `None` if
      there is none.
    """

    argument: Parameter
    dtype: str
    group: str
    result: int | None


def purposes_of(step: Step, program: FlatProgram) -> tuple[ArgumentPurpose, ...]:
    """The arrays of a step's arguments, each with its purpose, in the order of the
    program's parameters.

    A result is the new value of an array if it is computed from the array, and both are
    at the same position in two subtrees of equal structure, shapes and dtypes. In a
    step with gradients, an array with a new value is a parameter if the forward pass
    reads it; otherwise it is optimizer state. In a step without gradients, it is a
    cache. An array without a new value is part of the batch if its first dimension has
    the batch's size. Otherwise it is a parameter if it has floats.
    """
    ours = step.arguments
    dtypes = [program.buffers[value].dtype for value in program.entry.carried]
    uses = Uses(program)
    entry = program.entry
    same = _replacing_results(step, program)
    back = {
        at: to
        for at, to in same.items()
        if _comes_from(entry.results[to], entry.carried[at], uses)
    }
    trains = any("transpose(" in op.instruction.op_name for op in uses.ops)
    groups: list[str] = []
    for at, value in enumerate(entry.carried):
        if at not in back:
            groups.append("")
        elif not trains:
            groups.append("KV cache" if ours[at].shape else "other")
        else:
            groups.append(
                "parameters" if _is_read_forward(value, uses) else "optimizer"
            )
    leading = _batch_size(ours, dtypes, groups)
    groups = moment_groups([one.path for one in ours], groups)
    found = []
    for at, (one, dtype, group) in enumerate(zip(ours, dtypes, groups, strict=True)):
        if not group:
            is_batch = bool(one.shape) and one.shape[0] == leading
            is_weight = bool(one.shape) and not _is_whole_number(dtype)
            group = "batch" if is_batch else "parameters" if is_weight else "other"
        found.append(ArgumentPurpose(one, dtype, group, back.get(at)))
    return tuple(found)


def _replacing_results(step: Step, program: FlatProgram) -> dict[int, int]:
    """For each array of the arguments, by its number, the number of the result that can
    be its new value. Both are at the same position in two subtrees of equal structure,
    shapes and dtypes, of the arguments and of the results.
    """
    dtypes = [buffer.dtype for buffer in program.buffers]
    results = jax.tree.leaves(step.traced.out_info)
    triples = zip(step.result_paths, results, program.entry.results, strict=True)
    made = [(path, (result.shape, dtypes[value])) for path, result, value in triples]
    given = [
        (one.path, (one.shape, dtypes[at]))
        for one, at in zip(step.arguments, program.entry.carried, strict=True)
    ]
    alike: dict[object, list[list[int]]] = collections.defaultdict(list)
    for kind, numbers in _subtrees(made):
        alike[kind].append(numbers)
    found: dict[int, int] = {}
    gone: set[int] = set()
    for kind, numbers in _subtrees(given):
        if found.keys().isdisjoint(numbers):
            other = next((one for one in alike[kind] if gone.isdisjoint(one)), ())
            found.update(zip(numbers, other, strict=False))
            gone.update(other)
    return found


def _subtrees(
    arrays: Sequence[tuple[str, object]],
) -> Iterator[tuple[object, list[int]]]:
    """Yields the structure of each subtree of a tree, and the numbers of its arrays,
    the larger subtrees first. `arrays` has the path of each array of the tree, and its
    shape and dtype.
    """
    parts = [path.split("/") for path, _ in arrays]
    for depth in range(max(map(len, parts), default=0) + 1):
        below: dict[tuple[str, ...], list[tuple[list[str], int]]] = {}
        for at, own in enumerate(parts):
            if len(own) >= depth:
                below.setdefault(tuple(own[:depth]), []).append((own[depth:], at))
        for found in map(sorted, below.values()):
            yield (
                tuple((*path, arrays[at][1]) for path, at in found),
                [at for _, at in found],
            )


def _comes_from(result: int, given: int, uses: Uses) -> bool:
    """Whether only elementwise operations, in-place updates, slices and resharding lead
    from value number `given`, an argument, to value number `result`.
    """

    def before(value: int) -> Sequence[int]:
        op = uses.maker.get(value)
        if op is None:
            return ()
        if op.opcode == "while":
            at = op.makes.index(value)
            return op.reads[at], op.bodies[0].results[at]
        if op.opcode in ("dynamic-update-slice", "scatter"):
            return op.reads[:2]
        return op.reads if op.opcode in _FOLLOWED else ()

    return given in reached([result], before)


def _is_read_forward(value: int, uses: Uses) -> bool:
    """Whether an operation of the forward pass reads value number `value`, a view of it,
    such as a transpose, or what a collective makes of it. An operation that neither
    moves values, nor is elementwise or a view, counts in every pass.
    """
    is_form = {*VIEWS, *MOVING, "convert"}

    def forms(value: int) -> Iterator[int]:
        for op, _, _ in uses.users.get(value, ()):
            yield from op.makes if op.opcode in is_form else ()

    readers = (
        op for one in reached([value], forms) for op, _, _ in uses.users.get(one, ())
    )
    return any(
        "jvp(" in op.instruction.op_name or op.opcode not in ELEMENTWISE | is_form
        for op in readers
    )


def _batch_size(
    ours: Sequence[Parameter], dtypes: Sequence[str], groups: Sequence[str]
) -> int | None:
    """The batch's size: the first dimension of the largest integer array that has no
    group yet. If there is no such array, it is the first dimension of the last array
    without a group. `None` if all arrays have a group. `ours`, `dtypes` and `groups`
    have an entry for each array of the arguments; "" is no group.
    """
    left = [
        (one, dtype)
        for one, dtype, group in zip(ours, dtypes, groups, strict=True)
        if not group and one.shape
    ]
    # A PRNG key has at most four words.
    whole = [
        one
        for one, dtype in left
        if _is_whole_number(dtype) and math.prod(one.shape) > 4
    ]
    if whole:
        return max(whole, key=lambda one: math.prod(one.shape)).shape[0]
    return left[-1][0].shape[0] if left else None


def _is_whole_number(dtype: str) -> bool:
    return dtype.startswith(("s", "u", "pred"))


def moment_groups(paths: Sequence[str], groups: Sequence[str]) -> list[str]:
    """The groups of a step's arrays, with one for each moment in the place of
    "optimizer".

    An array "state/mu/layers/up" is of the moment "mu" if a parameter has a path that
    ends in "layers/up". So are all arrays below "state/mu", also those whose parameters
    the step does not read. Such a parameter is an array of an argument that has
    parameters, if the moments are in another argument.
    """
    pairs = [*zip(paths, groups, strict=True)]
    of_parameters = {_argument(path) for path, group in pairs if group == "parameters"}
    states = [path for path, group in pairs if group == "optimizer"]
    whole = {
        path.partition("/")[2]
        for path, group in pairs
        if group == "parameters" and "/" in path
    }
    suffixes = {
        "/".join(parts[at:])
        for parts in (path.split("/") for path in whole)
        for at in range(len(parts))
    }
    of_moments = {_argument(path) for path in states if _moment_of(path, whole)}
    unread = of_parameters - of_moments if of_moments else set()
    moments = {
        path: _moment_of(path, whole) or _moment_of(path, suffixes)
        for path in states
        if _argument(path) not in unread
    }
    outer_moments = sorted({moment for moment in moments.values() if moment}, key=len)

    named = []
    for path, group in pairs:
        if group != "optimizer":
            named.append(group)
        elif path not in moments:
            named.append("parameters")
        else:
            inner = path.partition("/")[2]
            above = (text for text in outer_moments if inner.startswith(f"{text}/"))
            moment = next(above, moments[path])
            alone = path if whole and "/" not in path else "the rest"
            named.append(f"optimizer: {moment or alone}")
    return named


def _argument(path: str) -> str:
    return path.partition("/")[0]


def _moment_of(path: str, suffixes: Set[str]) -> str:
    """The moment to which the optimizer's array with this path belongs; "" if it is that
    of no parameter. `suffixes` has all ends of the parameters' paths.
    """
    parts = path.split("/")
    for at in range(1, len(parts)):
        if "/".join(parts[at:]) in suffixes:
            return "/".join(parts[1:at]) or parts[0]
    return ""

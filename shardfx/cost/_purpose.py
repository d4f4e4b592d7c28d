"""The purpose of each array in a step's arguments: parameter, optimizer state, batch or
cache.

The purpose follows from the operations that read the array, not from the array's name.
"""

import collections
import math
from collections.abc import Iterator, Sequence, Set
from typing import NamedTuple

import jax

from .._ground import opcodes
from .._step import MOVING, Parameter, Step
from ._live.program import FlatProgram, Uses, reached


# Operations that compute an argument's new value from its old one. They include
# collectives: updated parameters are gathered if the optimizer's state is sharded
# further than the parameters.
_FOLLOWED = opcodes.ELEMENTWISE | opcodes.VIEWS | opcodes.PIECES | MOVING


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

    In `program`, `entry.carried` and `entry.results` have the values (numbers) of the
    arguments and of the results.
    """
    arguments = step.arguments
    entry = program.entry
    dtypes = [program.buffers[value].dtype for value in entry.carried]
    uses = Uses(program)
    new_values = {}
    for argument, result in _replacing_results(step, program).items():
        if _comes_from(entry.results[result], entry.carried[argument], uses):
            new_values[argument] = result
    # JAX marks the operations of a backward pass so.
    has_gradients = any("transpose(" in op.instruction.op_name for op in uses.ops)

    # "" is no group yet.
    groups: list[str] = []
    for number, value in enumerate(entry.carried):
        if number not in new_values:
            group = ""
        elif not has_gradients:
            group = "KV cache" if arguments[number].shape else "other"
        elif _is_read_forward(value, uses):
            group = "parameters"
        else:
            group = "optimizer"
        groups.append(group)

    batch_size = _batch_size(arguments, dtypes, groups)
    groups = moment_groups([argument.path for argument in arguments], groups)
    purposes = []
    rows = zip(arguments, dtypes, groups, strict=True)
    for number, (argument, dtype, group) in enumerate(rows):
        purpose = ArgumentPurpose(
            argument=argument,
            dtype=dtype,
            group=group or _group_by_shape(argument, dtype, batch_size),
            result=new_values.get(number),
        )
        purposes.append(purpose)
    return tuple(purposes)


def _group_by_shape(argument: Parameter, dtype: str, batch_size: int | None) -> str:
    """The group of an array that has no new value among the results. `dtype` is in
    HLO's notation, and `batch_size` the number of rows of the batch.
    """
    if not argument.shape:
        return "other"
    if argument.shape[0] == batch_size:
        return "batch"
    if _is_whole_number(dtype):
        return "other"
    return "parameters"


class _TypedLeaf(NamedTuple):
    """An array of a tree: its path, and its shape and dtype."""

    path: str
    type: object


def _replacing_results(step: Step, program: FlatProgram) -> dict[int, int]:
    """For each array of the arguments, by its number, the number of the result that can
    be its new value. Both are at the same position in two subtrees of equal structure,
    shapes and dtypes, of the arguments and of the results.
    """
    dtypes = [buffer.dtype for buffer in program.buffers]
    leaves = jax.tree.leaves(step.traced.out_info)
    results = []
    outputs = zip(step.result_paths, leaves, program.entry.results, strict=True)
    for path, leaf, value in outputs:
        results.append(_TypedLeaf(path=path, type=(leaf.shape, dtypes[value])))
    arguments = []
    for argument, value in zip(step.arguments, program.entry.carried, strict=True):
        type_of_argument = (argument.shape, dtypes[value])
        arguments.append(_TypedLeaf(path=argument.path, type=type_of_argument))

    subtrees_of: dict[object, list[list[int]]] = collections.defaultdict(list)
    for structure, numbers in _subtrees(results):
        subtrees_of[structure].append(numbers)
    replacing: dict[int, int] = {}
    taken_results: set[int] = set()
    for structure, numbers in _subtrees(arguments):
        if not replacing.keys().isdisjoint(numbers):
            continue
        for subtree in subtrees_of[structure]:
            if taken_results.isdisjoint(subtree):
                replacing.update(zip(numbers, subtree, strict=True))
                taken_results.update(subtree)
                break
    return replacing


def _subtrees(arrays: Sequence[_TypedLeaf]) -> Iterator[tuple[object, list[int]]]:
    """Yields the structure of each subtree of a tree, and the numbers of its arrays,
    the larger subtrees first. The structure has, for each array, its path below the
    subtree and its type: (("w", type), ("b", type)) for "layer" of "layer/w".
    """
    paths = [array.path.split("/") for array in arrays]
    for depth in range(max(map(len, paths), default=0) + 1):
        subtrees: dict[tuple[str, ...], list[tuple[list[str], int]]] = {}
        for number, parts in enumerate(paths):
            if len(parts) >= depth:
                prefix = tuple(parts[:depth])
                subtrees.setdefault(prefix, []).append((parts[depth:], number))
        for subtree in subtrees.values():
            subtree.sort()
            structure = []
            numbers = []
            for parts, number in subtree:
                structure.append((*parts, arrays[number].type))
                numbers.append(number)
            yield tuple(structure), numbers


def _comes_from(result: int, argument: int, uses: Uses) -> bool:
    """Whether only elementwise operations, in-place updates, slices and resharding lead
    from value number `argument` to value number `result`.
    """

    def before(value: int) -> Sequence[int]:
        """The values of which a value may be the new state; none for other values."""
        op = uses.maker.get(value)
        if op is None:
            return ()
        if op.opcode == "while":
            number = op.makes.index(value)
            return op.reads[number], op.bodies[0].results[number]
        # The array that is updated stands first.
        if op.opcode in ("dynamic-update-slice", "scatter"):
            return op.reads[:2]
        if op.opcode in _FOLLOWED:
            return op.reads
        return ()

    return argument in reached([result], before)


def _is_read_forward(value: int, uses: Uses) -> bool:
    """Whether an operation of the forward pass reads value number `value`, a view or a
    piece of it, such as a transpose, or what a collective makes of it. An operation
    that neither moves values, nor is elementwise or a view, counts in every pass. JAX
    marks operations of the forward pass of a derivative with "jvp(".
    """
    form_opcodes = {*opcodes.VIEWS, *opcodes.PIECES, *MOVING, "convert"}

    def forms_of(value: int) -> Iterator[int]:
        for use in uses.reads_of(value):
            if use.op.opcode in form_opcodes:
                yield from use.op.makes

    for form in reached([value], forms_of):
        for use in uses.reads_of(form):
            is_forward = "jvp(" in use.op.instruction.op_name
            if is_forward or use.op.opcode not in opcodes.ELEMENTWISE | form_opcodes:
                return True
    return False


def _batch_size(
    arguments: Sequence[Parameter],
    dtypes: Sequence[str],
    groups: Sequence[str],
) -> int | None:
    """The batch's size: the first dimension of the largest integer array that has no
    group yet. If there is no such array, it is the first dimension of the last array
    without a group. `None` if all arrays have a group. `arguments`, `dtypes` and
    `groups` have an entry for each array of the arguments; "" is no group.
    """
    last = None
    largest = None
    for argument, dtype, group in zip(arguments, dtypes, groups, strict=True):
        if group or not argument.shape:
            continue
        last = argument
        size = math.prod(argument.shape)
        # A PRNG key has at most four words.
        if not _is_whole_number(dtype) or size <= 4:
            continue
        if largest is None or size > math.prod(largest.shape):
            largest = argument
    batch = last if largest is None else largest
    if batch is None:
        return None
    return batch.shape[0]


def _is_whole_number(dtype: str) -> bool:
    """Whether a dtype in HLO's notation is of integers or booleans: "s32", "pred"."""
    return dtype.startswith(("s", "u", "pred"))


def moment_groups(paths: Sequence[str], groups: Sequence[str]) -> list[str]:
    """The groups of a step's arrays, with one for each moment in the place of
    "optimizer".

    An array "state/mu/layers/up" is of the moment "mu" if a parameter has a path that
    ends in "layers/up". So are all arrays below "state/mu", also those whose parameters
    the step does not read. Such a parameter is an array of an argument that has
    parameters, if the moments are in another argument.

    `paths` and `groups` have an entry for each array of the arguments.
    """
    moments = _moments(paths, groups)
    # A moment may hold others: "mu" holds "mu/inner". The outer one counts.
    outer_moments = sorted(set(filter(None, moments.values())), key=len)
    has_nested_parameters = any(
        group == "parameters" and "/" in path
        for path, group in zip(paths, groups, strict=True)
    )
    named = []
    for path, group in zip(paths, groups, strict=True):
        if group != "optimizer":
            named.append(group)
            continue
        if path not in moments:
            named.append("parameters")
            continue
        _, _, path_in_argument = path.partition("/")
        moment = moments[path]
        for outer_moment in outer_moments:
            if path_in_argument.startswith(f"{outer_moment}/"):
                moment = outer_moment
                break
        if not moment:
            is_argument_alone = has_nested_parameters and "/" not in path
            moment = path if is_argument_alone else "the rest"
        named.append(f"optimizer: {moment}")
    return named


def _moments(paths: Sequence[str], groups: Sequence[str]) -> dict[str, str]:
    """The moment of each array of the optimizer, by its path; "" for an array of no
    parameter. Parameters that the step does not read are left out. `paths` and `groups`
    have an entry for each array of the arguments.
    """
    # The parameters' paths within their arguments, and all ends of these.
    inner_paths: set[str] = set()
    suffixes: set[str] = set()
    arguments_of_parameters: set[str] = set()
    states: list[str] = []
    for path, group in zip(paths, groups, strict=True):
        if group == "optimizer":
            states.append(path)
        if group != "parameters":
            continue
        argument, *parts = path.split("/")
        arguments_of_parameters.add(argument)
        if parts:
            inner_paths.add("/".join(parts))
        for start in range(len(parts)):
            suffixes.add("/".join(parts[start:]))

    arguments_of_moments: set[str] = set()
    for path in states:
        if _moment_of(path, inner_paths):
            arguments_of_moments.add(_argument(path))
    # The arguments whose arrays are parameters that the step does not read.
    unread_arguments: set[str] = set()
    if arguments_of_moments:
        unread_arguments = arguments_of_parameters - arguments_of_moments
    moments = {}
    for path in states:
        if _argument(path) not in unread_arguments:
            moments[path] = _moment_of(path, inner_paths) or _moment_of(path, suffixes)
    return moments


def _argument(path: str) -> str:
    """The name of the argument that holds the array at a path."""
    return path.partition("/")[0]


def _moment_of(path: str, suffixes: Set[str]) -> str:
    """The moment to which the optimizer's array with this path belongs; "" if it is that
    of no parameter. `suffixes` has all ends of the parameters' paths.
    """
    parts = path.split("/")
    for start in range(1, len(parts)):
        if "/".join(parts[start:]) in suffixes:
            return "/".join(parts[1:start]) or parts[0]
    return ""

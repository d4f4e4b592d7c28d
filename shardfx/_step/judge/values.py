"""The values of the whole program, before it is partitioned, numbered so that equal
expressions have equal numbers.

Views have no numbers of their own. A broadcast, a transpose, or a reshape that adds or
drops dimensions of size 1 is its operand, with a list that says which dimension of the
operand each dimension follows. So the partitioned program may broadcast a value to the
size of a shard, and the judge still knows whose elements it holds.
"""

import dataclasses
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from ..hlo_text import (
    ELEMENTWISE,
    HloModule,
    Instruction,
    arrays_in,
    index_of,
    parts_of,
    root_of,
)
from . import manual
from .forms import Form, View, form_of, nameless_text, sizes_of, squeezed
from .shardings import shardings_in


class Global(NamedTuple):
    """An array of the whole program: its view of a numbered value, and its shape."""

    view: View
    shape: tuple[int, ...]


# An array or a tuple of the whole program.
GlobalTree: TypeAlias = "Global | tuple[GlobalTree, ...]"


@dataclasses.dataclass(eq=False, slots=True)
class Node:
    """A numbered value.

    - `opcode`, `key`: the operation that makes it, and what identifies it.
    - `shape`: its shape.
    - `exact`: sizes that the key leaves out, since they are others on one device.
    - `operands`: the arrays that the operation takes in the whole program.
    - `instruction`: the first instruction of the whole program that makes it; `None`
      for a value of the partitioned program alone.
    - `result`: the whole result of this instruction.
    - `likeness`: a number that nodes have in common whose operations and sizes are
      equal.
    """

    opcode: str
    key: tuple[object, ...]
    shape: tuple[int | None, ...]
    exact: tuple[object, ...] = ()
    operands: tuple[Global, ...] = ()
    instruction: Instruction | None = None
    result: Global | None = None
    likeness: int = 0


# Operations that compilers apply to constants.
_FOLDED: Mapping[str, Callable[..., Any]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "divide": operator.truediv,
    "negate": operator.neg,
    "convert": float,
    "sqrt": math.sqrt,
}
# The relative errors of numbers that are rounded and printed, for floating-point dtypes.
ROUNDING = {"f64": 2**-45, "f32": 2**-20, "bf16": 2**-7, "f16": 2**-9}


# Constants that are multiplied into one.
_MOST_FACTORS = 4


class _Factor(NamedTuple):
    """A value and the constant by which it is multiplied."""

    number: int
    factor: float


class Loop(NamedTuple):
    """A loop of the whole program.

    - `number`: its place in the order of the program.
    - `instruction`: its `while`.
    - `initial`: the arrays with which it starts.
    - `carried`: the arrays at the start of a turn.
    - `ahead`: the arrays at the end of a turn.
    - `goes_on`: the condition of a further turn.
    - `results`: the arrays that it returns.
    """

    number: int
    instruction: Instruction
    initial: tuple[Global, ...]
    carried: tuple[Global, ...]
    ahead: tuple[Global, ...]
    goes_on: Global
    results: tuple[Global, ...]


class Shards(NamedTuple):
    """An array of which a `shard_map` takes or returns the shards of a sharding."""

    array: Global
    sharding: str


class ManualCall(NamedTuple):
    """The call of a `shard_map`'s body.

    - `expressions`: the results of the body.
    - `operands`: the arrays that it takes.
    - `results`: the arrays that it returns, by their place in its results.
    """

    expressions: tuple[str, ...]
    operands: tuple[Shards, ...]
    results: dict[int, Shards]


class _ManualResult(NamedTuple):
    """A result of the body of a `shard_map`: the number of its call, and its place."""

    call: int
    place: int


class ViewReshape(NamedTuple):
    """A reshape of the whole program that only views its operand otherwise."""

    source: View
    target: View


class Values:
    """All numbered values, and where to find them."""

    def __init__(self):
        self.nodes: list[Node] = []
        self._by_key: dict[tuple[object, ...], list[int]] = {}
        self._by_name: dict[tuple[str, str], dict[int, None]] = {}
        self._likenesses: dict[tuple[object, ...], int] = {}
        # The numbers of scalars that follow from constants, by value.
        self._scalars: dict[int, float] = {}
        self.loops: list[Loop] = []
        self.manual_calls: list[ManualCall] = []
        # The reshapes that only add or drop dimensions along which nothing changes, by
        # value, with their names.
        self.reshapes: dict[View, dict[ViewReshape, str]] = {}

    def number_of(self, node: Node, op_name: str = "") -> int:
        """The number of a value; new if no equal value of this shape is known."""
        numbers_of_key = self._by_key.setdefault(node.key, [])
        for number in numbers_of_key:
            other = self.nodes[number]
            if other.shape == node.shape and other.exact == node.exact:
                self._name(other, number, op_name)
                return number
        number = len(self.nodes)
        node.likeness = self._likeness_of(node)
        self.nodes.append(node)
        scalar = _folded(node, self._scalars) if not node.shape else None
        if scalar is not None:
            self._scalars[number] = scalar
        numbers_of_key.append(number)
        self._name(node, number, op_name)
        return number

    def _likeness_of(self, node: Node) -> int:
        text = "" if node.instruction is None else nameless_text(node.instruction)
        operands = tuple(
            (operand.view.dims, operand.shape) for operand in node.operands
        )
        key = (node.opcode, text, node.shape, operands)
        return self._likenesses.setdefault(key, len(self._likenesses))

    def _name(self, node: Node, number: int, op_name: str) -> None:
        if op_name:
            self._by_name.setdefault((node.opcode, op_name), {})[number] = None

    def scalar_like(self, dtype: str, scalar: float) -> int | None:
        """The value of the whole program that is this number up to rounding, where it
        computes a scalar from constants: compilers compute it themselves.
        """
        error = ROUNDING.get(dtype)
        if error is None:
            return None
        for number, factor in self._scalars.items():
            instruction = self.nodes[number].instruction
            if instruction is None or instruction.opcode == "constant":
                continue
            if arrays_in(instruction.result)[0].dtype != dtype:
                continue
            if math.isclose(factor, scalar, rel_tol=error):
                return number
        return None

    def factors_of(self, number: int) -> dict[int, float]:
        """For each value of which a value is a multiple by constants, the factor."""
        factors: dict[int, float] = {}
        total = 1.0
        for _ in range(_MOST_FACTORS):
            step = self._factor_of(self.nodes[number])
            if step is None:
                break
            total *= step.factor
            number = step.number
            factors[number] = total
        return factors

    def _factor_of(self, node: Node) -> "_Factor | None":
        if node.opcode not in ("multiply", "divide") or len(node.operands) != 2:
            return None
        first, second = node.operands
        factor = self._scalars.get(second.view.root)
        if factor is None and node.opcode == "multiply":
            first, second = second, first
            factor = self._scalars.get(second.view.root)
        # A transposed operand is another view of its value.
        if not factor or first.view.dims != tuple(range(len(node.shape))):
            return None
        if node.opcode == "divide":
            factor = 1 / factor
        return _Factor(number=first.view.root, factor=factor)

    def reshapes_of(self, view: View, op_name: str) -> list[ViewReshape]:
        """The reshapes of the whole program that only view this value, those of this
        name first.
        """
        names = self.reshapes.get(_unordered(view), {})
        return sorted(names, key=lambda reshape: names[reshape] != op_name)

    def with_key(self, key: tuple[object, ...]) -> list[int]:
        return self._by_key.get(key, [])

    def with_name(self, opcode: str, op_name: str) -> list[int]:
        """The values that operations of this kind and name make."""
        return list(self._by_name.get((opcode, op_name), ()))

    def is_named(self, number: int, op_name: str) -> bool:
        node = self.nodes[number]
        return number in self._by_name.get((node.opcode, op_name), ())


def scalar_constant(node: Node) -> float | None:
    """The number of a scalar constant of the whole program; `None` for others."""
    if node.opcode != "constant" or node.shape or node.instruction is None:
        return None
    text = node.instruction.inside.strip()
    try:
        return float({"true": "1", "false": "0"}.get(text, text))
    except ValueError:
        return None


def _folded(node: Node, scalars: Mapping[int, float]) -> float | None:
    """The number of a scalar that follows from constants; `None` for others."""
    if node.opcode == "constant":
        return scalar_constant(node)
    compute = _FOLDED.get(node.opcode)
    # Values of the partitioned program alone have no operands.
    if compute is None or not node.operands:
        return None
    numbers = [scalars.get(operand.view.root) for operand in node.operands]
    constants = [number for number in numbers if number is not None]
    if len(constants) != len(numbers):
        return None
    try:
        return float(compute(*constants))
    except (ArithmeticError, ValueError):
        return None


class WholeProgram(NamedTuple):
    """The whole program: its values, its arguments by number, and its results."""

    values: Values
    parameters: Mapping[int, Global]
    results: tuple[Global, ...]
    root: Instruction


def read_whole(module: HloModule) -> WholeProgram:
    """Numbers the values of a module before it is partitioned."""
    reader = _Reader(module)
    entry = module.computations[module.entry]
    parameters: dict[int, Global] = {}
    for instruction in entry.values():
        if instruction.opcode == "parameter" and not instruction.result.startswith("("):
            number = int(instruction.inside)
            parameters[number] = reader.named(("parameter", number), instruction)
    arguments = [parameters.get(number) for number in range(len(parameters))]
    result = reader.run(module.entry, arguments)
    results = tuple(_leaves(result))
    return WholeProgram(reader.values, parameters, results, root_of(entry))


def shape_of(result: str) -> tuple[int, ...]:
    arrays = arrays_in(result)
    return arrays[0].shape if arrays else ()


def _leaves(tree: GlobalTree) -> Iterator[Global]:
    if isinstance(tree, Global):
        yield tree
    else:
        for part in tree:
            yield from _leaves(part)


class _Reader:
    def __init__(self, module: HloModule):
        self.module = module
        self.values = Values()
        # What the bodies of `shard_map`s take and return, on one device.
        self.shards: dict[Global, Shards] = {}
        self.manual_results: dict[Global, _ManualResult] = {}

    def named(
        self,
        key: tuple[object, ...],
        instruction: Instruction,
        shape: tuple[int, ...] | None = None,
        operands: tuple[Global, ...] = (),
    ) -> Global:
        """The array of a value that is no expression of others."""
        shape = shape_of(instruction.result) if shape is None else shape
        dims = tuple(range(len(shape)))
        form = Form(key, dims, dims)
        return self.array(form, instruction, shape, operands)

    def array(
        self,
        form: Form,
        instruction: Instruction,
        shape: tuple[int, ...],
        operands: tuple[Global, ...],
    ) -> Global:
        sizes = tuple(shape[position] for position in form.kept)
        node = Node(
            opcode=instruction.opcode,
            key=form.key,
            shape=sizes,
            exact=_exact(instruction, operands),
            operands=operands,
            instruction=instruction,
        )
        number = self.values.number_of(node, instruction.op_name)
        array = Global(squeezed(View(number, form.dims), shape), shape)
        value_node = self.values.nodes[number]
        if value_node.result is None:
            value_node.result = array
        return array

    def run(self, name: str, arguments: "Sequence[GlobalTree | None]") -> GlobalTree:
        arrays: dict[str, GlobalTree] = {}
        for instruction in self.module.computations[name].values():
            if instruction.opcode == "parameter":
                argument = arguments[int(instruction.inside)]
                array = (
                    self.unread(instruction.result) if argument is None else argument
                )
            else:
                operands = [arrays[operand] for operand in instruction.operands]
                if manual.is_into_shards(instruction):
                    source = self.module.computations[name][instruction.operands[0]]
                    array = self.into_shards(instruction, operands[0], source)
                else:
                    array = self.made(instruction, operands)
            arrays[instruction.name] = array
            if instruction.is_root:
                return array
        raise AssertionError(f"computation {name} has no root")

    def unread(self, result: str) -> GlobalTree:
        """Tokens and tuples of them."""
        if result.startswith("("):
            return tuple(self.unread(part) for part in parts_of(result) if part)
        return Global(View(-1, ()), ())

    def made(
        self, instruction: Instruction, operands: Sequence[GlobalTree]
    ) -> GlobalTree:
        opcode = instruction.opcode
        if opcode == "tuple":
            return tuple(operands)
        if opcode == "get-tuple-element":
            whole = operands[0]
            number = index_of(instruction)
            assert number is not None
            if isinstance(whole, Global):
                return self.named(("element", whole.view, number), instruction)
            return whole[number]
        if opcode in ("opt-barrier", "optimization-barrier"):
            return operands[0] if len(operands) == 1 else tuple(operands)
        if opcode in ("call", "fusion", "map"):
            called = dict(instruction.called)
            name = called.get("calls") or called["to_apply"]
            manual_results = self.manual_call(instruction, operands, name)
            if manual_results is not None:
                return manual_results
            return self.run(name, operands)
        if manual.is_out_of_shards(instruction):
            array = self.out_of_shards(instruction, operands[0])
            if array is not None:
                return array
        if opcode == "while":
            return self.loop(instruction, operands[0])
        if opcode == "conditional":
            return self.conditional(instruction, operands)
        arrays = [array for operand in operands for array in _leaves(operand)]
        return self.operation(instruction, arrays)

    def operation(
        self, instruction: Instruction, operands: Sequence[Global]
    ) -> GlobalTree:
        shapes = [array.shape for array in arrays_in(instruction.result)]
        views = [operand.view for operand in operands]
        shape = shapes[0] if shapes else ()
        if instruction.opcode == "reshape":
            return self.reshape(instruction, operands[0], shape)
        form = form_of(instruction, views, shape, self.module)
        if isinstance(form, View):
            return Global(squeezed(form, shape), shape)
        if not instruction.result.startswith("("):
            return self.array(form, instruction, shape, tuple(operands))
        results = []
        for number, part in enumerate(shapes):
            rank = len(part)
            keyed = form._replace(
                key=(*form.key, number), dims=form.dims[:rank], kept=form.kept[:rank]
            )
            if rank > len(form.dims):
                # As random bits beside the state of their generator.
                every = tuple(range(rank))
                keyed = Form((*form.key, number, part), every, every)
            results.append(self.array(keyed, instruction, part, tuple(operands)))
        return tuple(results)

    def reshape(
        self, instruction: Instruction, operand: Global, shape: tuple[int, ...]
    ) -> Global:
        dims = reshaped_dims(operand.view.dims, operand.shape, shape)
        if dims is not None:
            view = View(operand.view.root, dims)
            self.values.reshapes.setdefault(_unordered(operand.view), {})[
                ViewReshape(operand.view, view)
            ] = instruction.op_name
            return Global(view, shape)
        key = ("reshape", operand.view.root, _without_none(operand.view.dims))
        positions = tuple(range(len(shape)))
        form = Form(key, _changing(operand, shape), positions)
        return self.array(form, instruction, shape, (operand,))

    def loop(self, instruction: Instruction, initial: GlobalTree) -> GlobalTree:
        called = dict(instruction.called)
        starts = tuple(_leaves(initial))
        number = len(self.values.loops)
        same = unchanged(self.module, called["body"], len(starts))
        carried = []
        for place, start in enumerate(starts):
            if place in same:
                carried.append(start)
            else:
                key = ("carried", number, place)
                carried.append(self.named(key, instruction, start.shape))
        # A loop inside the body has a later number.
        self.values.loops.append(
            Loop(number, instruction, starts, (), (), starts[0], ())
        )
        ahead = tuple(_leaves(self.run(called["body"], [tuple(carried)])))
        goes_on = self.run(called["condition"], [tuple(carried)])
        results = []
        for place, start in enumerate(starts):
            if place in same:
                results.append(start)
            else:
                key = ("result", number, place)
                results.append(self.named(key, instruction, start.shape))
        assert isinstance(goes_on, Global)
        self.values.loops[number] = Loop(
            number=number,
            instruction=instruction,
            initial=starts,
            carried=tuple(carried),
            ahead=ahead,
            goes_on=goes_on,
            results=tuple(results),
        )
        return tuple(results) if not isinstance(initial, Global) else results[0]

    # The bodies of `shard_map`s.

    def into_shards(
        self, instruction: Instruction, array: GlobalTree, source: Instruction
    ) -> Global:
        """The shards of an array, as a body takes them. `source` says its sharding."""
        assert isinstance(array, Global)
        (sharding,) = shardings_in(source.attributes) or ("",)
        key = ("manual shards", array.view, sharding)
        shard = self.named(key, instruction, operands=(array,))
        self.shards[shard] = Shards(array, sharding)
        return shard

    def manual_call(
        self, instruction: Instruction, operands: Sequence[GlobalTree], name: str
    ) -> "GlobalTree | None":
        """The results of the call of a body; `None` for other calls."""
        taken: list[Shards] = []
        for operand in operands:
            shards = self.shards.get(operand) if isinstance(operand, Global) else None
            if shards is None:
                return None
            taken.append(shards)
        if not taken:
            return None
        number = len(self.values.manual_calls)
        digests = manual.expressions(self.module, name)
        call = ManualCall(digests, tuple(taken), {})
        self.values.manual_calls.append(call)
        results: list[Global] = []
        for place, part in enumerate(arrays_in(instruction.result)):
            key = ("manual result", number, place)
            result = self.named(key, instruction, part.shape)
            self.manual_results[result] = _ManualResult(number, place)
            results.append(result)
        is_tuple = instruction.result.startswith("(")
        return tuple(results) if is_tuple else results[0]

    def out_of_shards(
        self, instruction: Instruction, shard: GlobalTree
    ) -> Global | None:
        """The array of the shards that a body returns; `None` if they are no result of
        one.
        """
        if not isinstance(shard, Global) or shard not in self.manual_results:
            return None
        result = self.manual_results[shard]
        (sharding,) = shardings_in(instruction.attributes) or ("",)
        key = ("manual array", result, sharding)
        array = self.named(key, instruction)
        results = self.values.manual_calls[result.call].results
        results.setdefault(result.place, Shards(array, sharding))
        return array

    def conditional(
        self, instruction: Instruction, operands: Sequence[GlobalTree]
    ) -> GlobalTree:
        chosen = operands[0]
        assert isinstance(chosen, Global)
        branches = [
            self.run(name, [operand])
            for (_, name), operand in zip(instruction.called, operands[1:], strict=True)
        ]
        each = [tuple(_leaves(branch)) for branch in branches]
        results = []
        for arrays in zip(*each, strict=True):
            key = conditional_key(chosen.view, [array.view for array in arrays])
            shape = arrays[0].shape
            results.append(self.named(key, instruction, shape, (chosen, *arrays)))
        if isinstance(branches[0], Global):
            return results[0]
        return tuple(results)


def _unordered(view: View) -> View:
    return View(view.root, _without_none(view.dims))


def _changing(operand: Global, shape: tuple[int, ...]) -> tuple[int | None, ...]:
    """The dimensions of a reshape's result along which it changes."""
    dims: list[int | None] = [None] * len(shape)
    for sources, targets in groups_of_reshape(operand.shape, shape):
        if any(operand.view.dims[source] is not None for source in sources):
            for target in targets:
                dims[target] = target
    return tuple(dims)


def _exact(instruction: Instruction, operands: Sequence[Global]) -> tuple[object, ...]:
    """The sizes that a key leaves out: those of windows and slices, and of dimensions
    along which an operand does not change.
    """
    if instruction.opcode in ELEMENTWISE:
        return ()
    sizes = tuple(
        size
        for operand in operands
        for dim, size in zip(operand.view.dims, operand.shape, strict=True)
        if dim is None and size != 1
    )
    return (sizes, *sizes_of(instruction))


def conditional_key(chosen: View, views: Sequence[View]) -> tuple[object, ...]:
    return ("conditional", chosen, *views)


def unchanged(module: HloModule, body: str, count: int) -> set[int]:
    """The places of a loop's state that each turn leaves as they are."""
    computation = module.computations[body]
    root = root_of(computation)
    if root.opcode != "tuple" or len(root.operands) != count:
        return set()
    same = set()
    for place, name in enumerate(root.operands):
        element = computation[name]
        if index_of(element) != place:
            continue
        if computation[element.operands[0]].opcode == "parameter":
            same.add(place)
    return same


def _without_none(dims: Sequence[int | None]) -> tuple[int, ...]:
    return tuple(dim for dim in dims if dim is not None)


def reshaped_dims(
    dims: Sequence[int | None], before: Sequence[int], after: Sequence[int]
) -> tuple[int | None, ...] | None:
    """The dimensions that a reshape's result follows, if it only adds and drops
    dimensions of size 1, or merges and splits dimensions along which nothing changes;
    else `None`.
    """
    followed: list[int | None] = [None] * len(after)
    for sources, targets in groups_of_reshape(before, after):
        if all(dims[source] is None for source in sources):
            continue
        if len(sources) != 1 or len(targets) != 1:
            return None
        followed[targets[0]] = dims[sources[0]]
    return tuple(followed)


def groups_of_reshape(
    before: Sequence[int], after: Sequence[int]
) -> list[tuple[list[int], list[int]]]:
    """The smallest groups of dimensions with equal products. A dimension of size 1 is a
    group of its own.
    """
    groups: list[tuple[list[int], list[int]]] = []
    groups += [([dim], []) for dim, size in enumerate(before) if size == 1]
    groups += [([], [dim]) for dim, size in enumerate(after) if size == 1]
    sources = [dim for dim, size in enumerate(before) if size != 1]
    targets = [dim for dim, size in enumerate(after) if size != 1]
    while sources and targets:
        group = ([sources.pop(0)], [targets.pop(0)])
        before_size, right = before[group[0][0]], after[group[1][0]]
        while before_size != right:
            if before_size < right:
                group[0].append(sources.pop(0))
                before_size *= before[group[0][-1]]
            else:
                group[1].append(targets.pop(0))
                right *= after[group[1][-1]]
        groups.append(group)
    return groups

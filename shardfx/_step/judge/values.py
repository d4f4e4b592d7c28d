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
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np

from ..._ground.opcodes import ELEMENTWISE
from ..hlo_text import (
    HloModule,
    Instruction,
    arrays_in,
    index_of,
    root_of,
)
from .forms import View, elementwise_key, nameless_text


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
    - `unkeyed_sizes`: sizes that the key leaves out, since they are others on one
      device.
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
    unkeyed_sizes: tuple[object, ...] = ()
    operands: tuple[Global, ...] = ()
    instruction: Instruction | None = None
    result: Global | None = None
    likeness: int = 0


# Operations whose results have the elements of their operands, and zeros.
MOVES = frozenset("slice pad concatenate reverse".split())
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
# Types to which known numbers are rounded, by HLO's names.
FLOAT_TYPES: Mapping[str, Any] = {
    "f64": np.float64,
    "f32": np.float32,
    "f16": np.float16,
    "bf16": jnp.dtype("bfloat16"),
}
# The relative errors of numbers that are rounded and printed, for floating-point dtypes.
ROUNDING = {"f64": 2**-45, "f32": 2**-20, "bf16": 2**-7, "f16": 2**-9}


# Constants that are multiplied into one.
_MOST_FACTORS = 4


class _Factor(NamedTuple):
    """The number of a value, and the constant by which it is multiplied."""

    value_number: int
    factor: float


class Loop(NamedTuple):
    """A loop of the whole program.

    - `number`: its place in the order of the program.
    - `instruction`: its `while`.
    - `initial`: the arrays with which it starts.
    - `carried`: the arrays at the start of a turn.
    - `after_turn`: the arrays at the end of a turn.
    - `goes_on`: the condition of a further turn.
    - `results`: the arrays that it returns.
    """

    number: int
    instruction: Instruction
    initial: tuple[Global, ...]
    carried: tuple[Global, ...]
    after_turn: tuple[Global, ...]
    goes_on: Global
    results: tuple[Global, ...]


class Shards(NamedTuple):
    """An array of which a `shard_map` takes or returns the shards of a sharding.
    `sharding_text` is the sharding as the HLO writes it.
    """

    array: Global
    sharding_text: str


class ManualCall(NamedTuple):
    """The call of a `shard_map`'s body.

    - `digests`: a digest of each result of the body, as `manual.result_digests` says.
    - `operands`: the arrays that it takes.
    - `results`: the arrays that it returns, by their place in its results.
    """

    digests: tuple[str, ...]
    operands: tuple[Shards, ...]
    results: dict[int, Shards]


class PartlyManual(NamedTuple):
    """An array outside of a `shard_map` that is manual in some axes only, and the part
    of it that each device's group has in its body.

    - `array`, `array_sharding`: the array, and how it lies.
    - `part_sharding`: how the part lies over the axes that are not manual.
    """

    array: Global
    array_sharding: str
    part_sharding: str


class PartlyManualCall(NamedTuple):
    """The call of the body of a `shard_map` that is manual in some axes only.

    - `operands`: the parts that the body takes, with what they are parts of.
    - `results`: the arrays that the body returns.
    """

    operands: "tuple[tuple[Global, PartlyManual], ...]"
    results: tuple[Global, ...]


class ViewReshape(NamedTuple):
    """A reshape of the whole program that only views its operand otherwise."""

    source: View
    target: View


class Values:
    """All numbered values, and where to find them."""

    def __init__(self):
        self.nodes: list[Node] = []
        # The numbers of values (their indices in `nodes`) by key.
        self._by_key: dict[tuple[object, ...], list[int]] = {}
        # The numbers by opcode and name of the operation, in order.
        self._by_name: dict[tuple[str, str], dict[int, None]] = {}
        # The same, by the number of a value of which the first operand has elements.
        self._by_source: dict[tuple[str, str], dict[int, list[int]]] = {}
        # What `sources_of` and `twins_of` return, by the number of the value.
        self._sources: dict[int, tuple[int, ...]] = {}
        self._twins: dict[int, Mapping[int, int]] = {}
        # The number of each operation with its sizes.
        self._likenesses: dict[tuple[object, ...], int] = {}
        # What the scalars are that follow from constants, by the number of the value.
        self._scalars: dict[int, float] = {}
        self.loops: list[Loop] = []
        self.manual_calls: list[ManualCall] = []
        # The names of the bodies of `shard_map`s whose axes are all manual.
        self.manual_bodies: set[str] = set()
        # The calls of the others, by the name of the body; and for each result of such
        # a body, the arrays outside of which it is a part.
        self.partly_manual_calls: dict[str, list[PartlyManualCall]] = {}
        self.partly_manual_results: dict[Global, set[PartlyManual]] = {}
        # For each value of such a body, by its number, the number of the part that each
        # device has.
        self.parts_by_value: dict[int, tuple[int, ...]] = {}
        # The reshapes that only add or drop dimensions along which nothing changes, by
        # value, with their names.
        self.reshapes: dict[View, dict[ViewReshape, str]] = {}

    def number_of(self, node: Node, op_name: str = "") -> int:
        """The number of a value; new if no equal value of this shape is known.
        `op_name` is the name of an operation that makes it, in the text of the whole
        program.
        """
        numbers_of_key = self._by_key.setdefault(node.key, [])
        for number in numbers_of_key:
            other = self.nodes[number]
            if other.shape == node.shape and other.unkeyed_sizes == node.unkeyed_sizes:
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
        if node.instruction is None:
            self._note_parts(node, number)
        return number

    def _note_parts(self, node: Node, number: int) -> None:
        """Notes which part each device has of a value of the partitioned program alone:
        that of a value of which it is made.
        """
        for view in node.key:
            if isinstance(view, View) and view.root in self.parts_by_value:
                self.parts_by_value[number] = self.parts_by_value[view.root]

    def _likeness_of(self, node: Node) -> int:
        """A number for the operation of a node with its sizes: equal for the nodes of
        equal layers, whatever values their operands are.
        """
        attributes = "" if node.instruction is None else nameless_text(node.instruction)
        operand_views = tuple(
            (operand.view.dims, operand.shape) for operand in node.operands
        )
        key = (node.opcode, attributes, node.shape, operand_views)
        return self._likenesses.setdefault(key, len(self._likenesses))

    def _name(self, node: Node, number: int, op_name: str) -> None:
        """Notes that an operation of this name makes a value."""
        if op_name:
            self._by_name.setdefault((node.opcode, op_name), {})[number] = None
            self._by_source.pop((node.opcode, op_name), None)

    def scalar_like(self, dtype: str, scalar: float) -> int | None:
        """The number of a value of the whole program that is computed from constants
        and is this scalar of the type `dtype`, up to rounding. `None` if there is none.
        Compilers compute such values themselves.
        """
        error = ROUNDING.get(dtype)
        if error is None:
            return None
        for number, value_scalar in self._scalars.items():
            instruction = self.nodes[number].instruction
            if instruction is None or instruction.opcode == "constant":
                continue
            if arrays_in(instruction.result)[0].dtype != dtype:
                continue
            if math.isclose(value_scalar, scalar, rel_tol=error):
                return number
        return None

    def factors_of(self, number: int) -> dict[int, float]:
        """The values of which a value is a multiple by constants: for the number of
        each, the factor. For `v = 2 * (3 * u)`, it is 2 for `3 * u` and 6 for `u`.
        """
        factors: dict[int, float] = {}
        product = 1.0
        for _ in range(_MOST_FACTORS):
            step = self._factor_of(self.nodes[number])
            if step is None:
                break
            product *= step.factor
            number = step.value_number
            factors[number] = product
        return factors

    def _factor_of(self, node: Node) -> "_Factor | None":
        """The value of which a node is a multiple by a constant, and the constant;
        `None` if it is none.
        """
        if node.opcode not in ("multiply", "divide") or len(node.operands) != 2:
            return None
        multiplied, constant = node.operands
        factor = self._scalars.get(constant.view.root)
        if factor is None and node.opcode == "multiply":
            constant, multiplied = node.operands
            factor = self._scalars.get(constant.view.root)
        # A transposed operand is another view of its value.
        if not factor or multiplied.view.dims != tuple(range(len(node.shape))):
            return None
        if node.opcode == "divide":
            factor = 1 / factor
        return _Factor(value_number=multiplied.view.root, factor=factor)

    def reshapes_of(self, view: View, op_name: str) -> list[ViewReshape]:
        """The reshapes of the whole program that only view this value, those of this
        name first.
        """
        names = self.reshapes.get(unordered(view), {})
        return sorted(names, key=lambda reshape: names[reshape] != op_name)

    def with_key(self, key: tuple[object, ...]) -> list[int]:
        """The numbers of the values with this key. They differ in sizes."""
        return self._by_key.get(key, [])

    def with_name(self, opcode: str, op_name: str) -> list[int]:
        """The numbers of the values that operations of this opcode and name make."""
        return list(self._by_name.get((opcode, op_name), ()))

    def with_name_of(self, opcode: str, op_name: str, source: int) -> list[int]:
        """The numbers of the values that operations of this opcode and name make, whose
        first operand has elements of the value with the number `source`. A program of
        many equal layers has many operations of one name.
        """
        key = (opcode, op_name)
        if key not in self._by_source:
            numbers_by_source: dict[int, list[int]] = {}
            for number in self._by_name.get(key, ()):
                for operand in self.nodes[number].operands[:1]:
                    for root in self.sources_of(operand.view.root):
                        numbers_by_source.setdefault(root, []).append(number)
            self._by_source[key] = numbers_by_source
        return self._by_source[key].get(source, [])

    def sources_of(self, number: int) -> tuple[int, ...]:
        """The numbers of the values whose elements a value has: those from which a
        slice, pad, concatenation or reverse takes them, and its twins. The value itself
        is the first.
        """
        sources = self._sources.get(number)
        if sources is None:
            node = self.nodes[number]
            source_numbers = {number: None}
            if node.opcode in MOVES:
                for operand in node.operands:
                    source_numbers |= dict.fromkeys(self.sources_of(operand.view.root))
            else:
                source_numbers |= dict.fromkeys(self.twins_of(number))
            sources = tuple(source_numbers)
            self._sources[number] = sources
        return sources

    def twins_of(self, number: int) -> Mapping[int, int]:
        """The twins of a value that an elementwise operation makes. If its operand
        `x[1:]` has elements of `x`, then `-x` is a twin of `-x[1:]`: the value has
        elements of its twin. Maps the number of each twin to the number of its own
        operand, here `x`. Other operands of the operation have to be scalars.
        """
        twins = self._twins.get(number)
        if twins is None:
            twins = self._twins_of_node(self.nodes[number])
            self._twins[number] = twins
        return twins

    def _twins_of_node(self, node: Node) -> dict[int, int]:
        """As `twins_of`, asked once for each value. A node's key holds its opcode and
        the views of its operands.
        """
        twins: dict[int, int] = {}
        if node.opcode not in ELEMENTWISE or not node.shape:
            return twins
        dims = tuple(range(len(node.shape)))
        # Where the key holds an operand that is no scalar.
        array_places = [
            place
            for place, part in enumerate(node.key)
            if isinstance(part, View) and any(dim is not None for dim in part.dims)
        ]
        if len(array_places) != 1:
            return twins
        (array_place,) = array_places
        view = node.key[array_place]
        assert isinstance(view, View)
        if view.dims != dims:
            return twins
        for source in self.sources_of(view.root)[1:]:
            # Without a longer dimension, the twin would be of one row of the source.
            if any(size != 1 for size in self.nodes[source].shape[len(dims) :]):
                continue
            twin_key = list(node.key)
            twin_key[array_place] = View(source, dims)
            for twin in self.with_key(elementwise_key(twin_key)):
                if len(self.nodes[twin].shape) == len(dims):
                    twins[twin] = source
        return twins

    def is_named(self, number: int, op_name: str) -> bool:
        """Whether an operation of this name makes a value."""
        node = self.nodes[number]
        return number in self._by_name.get((node.opcode, op_name), ())


def scalar_constant(node: Node) -> float | None:
    """The number of a scalar constant of the whole program; `None` for other values.
    True is 1.
    """
    if node.opcode != "constant" or node.shape or node.instruction is None:
        return None
    text = node.instruction.inside.strip()
    try:
        return float({"true": "1", "false": "0"}.get(text, text))
    except ValueError:
        return None


def _folded(node: Node, scalars: Mapping[int, float]) -> float | None:
    """The number of a scalar that follows from constants; `None` for others. `scalars`
    holds the numbers of those before it, by value.
    """
    if node.opcode == "constant":
        return scalar_constant(node)
    compute = _FOLDED.get(node.opcode)
    # Values of the partitioned program alone have no operands.
    if compute is None or not node.operands or node.instruction is None:
        return None
    operand_scalars = [scalars.get(operand.view.root) for operand in node.operands]
    constants = [number for number in operand_scalars if number is not None]
    if len(constants) != len(operand_scalars):
        return None
    dtype = arrays_in(node.instruction.result)[0].dtype
    if node.opcode == "divide" and dtype not in FLOAT_TYPES:
        # A quotient of integers is rounded to zero.
        return None
    try:
        return _of_dtype(compute(*constants), dtype)
    except (ArithmeticError, ValueError):
        return None


def _of_dtype(number: float, dtype: str) -> float | None:
    """A number as the type `dtype` has it: floats are rounded, and integers are without
    their fraction. `None` for an integer that wraps, and for other types.
    """
    float_type = FLOAT_TYPES.get(dtype)
    if float_type is not None:
        with np.errstate(over="ignore"):
            return float(np.asarray(number).astype(float_type))
    if not dtype.startswith(("s", "u")):
        return None
    integer = math.trunc(number)
    lowest = -(2 ** (int(dtype[1:]) - 1)) if dtype.startswith("s") else 0
    highest = 2 ** (int(dtype[1:]) - 1) - 1
    return float(integer) if lowest <= integer <= highest else None


def unordered(view: View) -> View:
    """A view without the dimensions along which nothing changes, to find reshapes that
    only add or drop such.
    """
    return View(view.root, without_none(view.dims))


def conditional_key(chosen: View, views: Sequence[View]) -> tuple[object, ...]:
    """The key of a result of a conditional, from the number that chooses and the
    results of the branches.
    """
    return ("conditional", chosen, *views)


def unchanged(module: HloModule, body: str, count: int) -> set[int]:
    """The places of a loop's state, of `count` arrays, that the computation `body`
    returns as it takes them.
    """
    computation = module.computations[body]
    root = root_of(computation)
    if root.opcode != "tuple" or len(root.operands) != count:
        return set()
    unchanged_places = set()
    for place, name in enumerate(root.operands):
        element = computation[name]
        if index_of(element) != place:
            continue
        if computation[element.operands[0]].opcode == "parameter":
            unchanged_places.add(place)
    return unchanged_places


def without_none(dims: Sequence[int | None]) -> tuple[int, ...]:
    """The dimensions that follow one of a value."""
    return tuple(dim for dim in dims if dim is not None)


def groups_of_reshape(
    before: Sequence[int],
    after: Sequence[int],
) -> list[tuple[list[int], list[int]]]:
    """The groups of dimensions that a reshape from the sizes `before` to the sizes
    `after` merges and splits: pairs of dimensions before and after it with equal
    products of sizes, as small as possible. A dimension of size 1 is a group of its
    own.

        (6, 4) -> (2, 3, 4): [([0], [0, 1]), ([1], [2])]
    """
    groups: list[tuple[list[int], list[int]]] = []
    groups += [([dim], []) for dim, size in enumerate(before) if size == 1]
    groups += [([], [dim]) for dim, size in enumerate(after) if size == 1]
    sources = [dim for dim, size in enumerate(before) if size != 1]
    targets = [dim for dim, size in enumerate(after) if size != 1]
    while sources and targets:
        source = sources.pop(0)
        target = targets.pop(0)
        merged = [source]
        split = [target]
        before_size = before[source]
        after_size = after[target]
        while before_size != after_size:
            if before_size < after_size:
                source = sources.pop(0)
                merged.append(source)
                before_size *= before[source]
            else:
                target = targets.pop(0)
                split.append(target)
                after_size *= after[target]
        groups.append((merged, split))
    return groups

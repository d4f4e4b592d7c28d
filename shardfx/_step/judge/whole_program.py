"""Reads the program of all devices, before it is partitioned: the number of each value,
with loops, branches and the bodies of `shard_map`.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from ..._ground.opcodes import ELEMENTWISE
from ..hlo_text import (
    HloModule,
    Instruction,
    arrays_in,
    index_of,
    parts_of,
    root_of,
)
from . import manual
from .forms import Form, View, form_of, sizes_of, squeezed
from .shardings import parts_of_devices, shardings_in
from .values import (
    Global,
    GlobalTree,
    Loop,
    ManualCall,
    Node,
    PartlyManual,
    PartlyManualCall,
    Shards,
    Values,
    ViewReshape,
    conditional_key,
    groups_of_reshape,
    unchanged,
    unordered,
    without_none,
)
from .verdict import Unjudged


# Operations whose operands do not say which arrays they return.
_OF_ANY_RESULT = ("custom-call", "rng-bit-generator")


class _ManualResult(NamedTuple):
    """A result of the body of a `shard_map`: the number of its call, and its place."""

    call: int
    place: int


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
            parameters[number] = reader.array_of_key(("parameter", number), instruction)
    arguments = [parameters.get(number) for number in range(len(parameters))]
    result = reader.run(module.entry, arguments)
    results = tuple(_leaves(result))
    return WholeProgram(
        values=reader.values,
        parameters=parameters,
        results=results,
        root=root_of(entry),
    )


def shape_of(result: str) -> tuple[int, ...]:
    """The shape of the first array in the text of a result; () if there is none."""
    arrays = arrays_in(result)
    return arrays[0].shape if arrays else ()


def _leaves(tree: GlobalTree) -> Iterator[Global]:
    """The arrays of a tree, from left to right."""
    if isinstance(tree, Global):
        yield tree
    else:
        for part in tree:
            yield from _leaves(part)


class _Reader:
    """Goes through the whole program once, and numbers its values."""

    def __init__(self, module: HloModule):
        self.module = module
        self.values = Values()
        # For what the body of a `shard_map` takes on one device, the array outside.
        self.outside_of_shard: dict[Global, Shards] = {}
        # The same for bodies that are manual in some axes only.
        self.outside_of_part: dict[Global, PartlyManual] = {}
        # Which result of which call an array of one device is.
        self.manual_results: dict[Global, _ManualResult] = {}

    def array_of_key(
        self,
        key: tuple[object, ...],
        instruction: Instruction,
        shape: tuple[int, ...] | None = None,
        operands: tuple[Global, ...] = (),
    ) -> Global:
        """The array of a value that is no expression of others, identified by `key`.
        Its shape is that of the instruction's result if `shape` is `None`.
        """
        shape = shape_of(instruction.result) if shape is None else shape
        dims = tuple(range(len(shape)))
        form = Form(key=key, dims=dims, kept=dims)
        return self.array_of_form(form, instruction, shape, operands)

    def array_of_form(
        self,
        form: Form,
        instruction: Instruction,
        shape: tuple[int, ...],
        operands: tuple[Global, ...],
    ) -> Global:
        """The array that an instruction makes of `operands`. Its value is found or made
        by the key of `form`, and has the dimensions `form.kept`. The value is noted
        with the sizes that the key leaves out.
        """
        kept_sizes = tuple(shape[position] for position in form.kept)
        node = Node(
            opcode=instruction.opcode,
            key=form.key,
            shape=kept_sizes,
            unkeyed_sizes=_unkeyed_sizes(instruction, operands),
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
        """The result of the computation `name` for these arguments; an argument of
        `None` is no array.
        """
        results: dict[str, GlobalTree] = {}
        for instruction in self.module.computations[name].values():
            if instruction.opcode == "parameter":
                argument = arguments[int(instruction.inside)]
                tree = self.unread(instruction.result) if argument is None else argument
            else:
                operands = [results[operand] for operand in instruction.operands]
                tree = self.between_shards(instruction, operands, name)
                if tree is None:
                    tree = self.result(instruction, operands)
            results[instruction.name] = tree
            if instruction.is_root:
                return tree
        raise AssertionError(f"computation {name} has no root")

    def unread(self, result: str) -> GlobalTree:
        """Stands for arguments that are no arrays: tokens and tuples of them."""
        if result.startswith("("):
            return tuple(self.unread(part) for part in parts_of(result) if part)
        return Global(View(-1, ()), ())

    def result(
        self,
        instruction: Instruction,
        operands: Sequence[GlobalTree],
    ) -> GlobalTree:
        """The result of an instruction, an array or a tuple."""
        opcode = instruction.opcode
        if opcode == "tuple":
            return tuple(operands)
        if opcode == "get-tuple-element":
            tuple_operand = operands[0]
            element_number = index_of(instruction)
            assert element_number is not None
            if isinstance(tuple_operand, Global):
                return self.array_of_key(
                    ("element", tuple_operand.view, element_number), instruction
                )
            return tuple_operand[element_number]
        if opcode in ("opt-barrier", "optimization-barrier"):
            return operands[0] if len(operands) == 1 else tuple(operands)
        if opcode in ("call", "fusion"):
            called_names = dict(instruction.called)
            body_name = called_names.get("calls") or called_names["to_apply"]
            manual_results = self.manual_call(instruction, operands, body_name)
            if manual_results is not None:
                return manual_results
            return self.run(body_name, operands)
        if manual.is_out_of_shards(instruction):
            array = self.out_of_shards(instruction, operands[0])
            if array is not None:
                return array
        if opcode == "while":
            return self.loop(instruction, operands[0])
        if opcode == "conditional":
            return self.conditional(instruction, operands)
        arrays: list[Global] = []
        for tree in operands:
            arrays += _leaves(tree)
        return self.operation(instruction, arrays)

    def operation(
        self,
        instruction: Instruction,
        operands: Sequence[Global],
    ) -> GlobalTree:
        """The result of an operation that is no call, as the form of its operands'
        views says.

        The form is that of the first result. Another result of a tuple has the same key
        with its own number, and the form's dimensions up to its own rank.
        """
        shapes = [array.shape for array in arrays_in(instruction.result)]
        views = [operand.view for operand in operands]
        shape = shapes[0] if shapes else ()
        if instruction.opcode == "reshape":
            return self.reshape(instruction, operands[0], shape)
        form = form_of(instruction, views, shape, self.module)
        if isinstance(form, View):
            return Global(squeezed(form, shape), shape)
        if not instruction.result.startswith("("):
            return self.array_of_form(form, instruction, shape, tuple(operands))
        results = []
        for result_number, result_shape in enumerate(shapes):
            rank = len(result_shape)
            result_form = form._replace(
                key=(*form.key, result_number),
                dims=form.dims[:rank],
                kept=form.kept[:rank],
            )
            if rank > len(form.dims):
                # As random bits beside the state of their generator. Such a result is
                # taken to change along all of its dimensions.
                all_dims = tuple(range(rank))
                result_form = Form(
                    key=(*form.key, result_number, result_shape),
                    dims=all_dims,
                    kept=all_dims,
                )
            results.append(
                self.array_of_form(
                    result_form, instruction, result_shape, tuple(operands)
                )
            )
        return tuple(results)

    def reshape(
        self,
        instruction: Instruction,
        operand: Global,
        shape: tuple[int, ...],
    ) -> Global:
        """The result of a reshape to `shape`: a view of its operand, or a value of its
        own if it merges or splits dimensions along which something changes.
        """
        dims = reshaped_dims(operand.view.dims, operand.shape, shape)
        if dims is not None:
            view = View(operand.view.root, dims)
            self.values.reshapes.setdefault(unordered(operand.view), {})[
                ViewReshape(operand.view, view)
            ] = instruction.op_name
            return Global(view, shape)
        key = ("reshape", operand.view.root, without_none(operand.view.dims))
        all_dims = tuple(range(len(shape)))
        form = Form(key=key, dims=_changing(operand, shape), kept=all_dims)
        return self.array_of_form(form, instruction, shape, (operand,))

    def loop(self, instruction: Instruction, initial: GlobalTree) -> GlobalTree:
        """The results of a loop, which is noted with what it carries. What each turn
        leaves as it is needs no value of its own. `initial` is what the loop starts
        with.
        """
        called = dict(instruction.called)
        initial_arrays = tuple(_leaves(initial))
        loop_number = len(self.values.loops)
        carried = self.loop_arrays("carried", loop_number, instruction, initial_arrays)
        # A loop inside the body has a later number.
        self.values.loops.append(
            Loop(
                number=loop_number,
                instruction=instruction,
                initial=initial_arrays,
                carried=(),
                after_turn=(),
                goes_on=initial_arrays[0],
                results=(),
            )
        )
        after_turn = tuple(_leaves(self.run(called["body"], [carried])))
        goes_on = self.run(called["condition"], [carried])
        results = self.loop_arrays("result", loop_number, instruction, initial_arrays)
        assert isinstance(goes_on, Global)
        self.values.loops[loop_number] = Loop(
            number=loop_number,
            instruction=instruction,
            initial=initial_arrays,
            carried=carried,
            after_turn=after_turn,
            goes_on=goes_on,
            results=results,
        )
        return results if not isinstance(initial, Global) else results[0]

    def loop_arrays(
        self,
        kind: Literal["carried", "result"],
        loop_number: int,
        instruction: Instruction,
        initial_arrays: tuple[Global, ...],
    ) -> tuple[Global, ...]:
        """The arrays that a loop carries, or that it returns: those with which it
        starts where no turn changes them, and values of their own elsewhere.
        """
        body = dict(instruction.called)["body"]
        unchanged_places = unchanged(self.module, body, len(initial_arrays))
        arrays: list[Global] = []
        for place, initial_array in enumerate(initial_arrays):
            if place in unchanged_places:
                arrays.append(initial_array)
            else:
                key = (kind, loop_number, place)
                arrays.append(self.array_of_key(key, instruction, initial_array.shape))
        return tuple(arrays)

    # The bodies of `shard_map`s.

    def between_shards(
        self,
        instruction: Instruction,
        operands: Sequence[GlobalTree],
        name: str,
    ) -> Global | None:
        """What an instruction of the computation `name` makes that takes an array into
        shards, or into or out of parts; `None` for others.
        """
        if instruction.opcode != "custom-call":
            return None
        source = self.module.computations[name][instruction.operands[0]]
        if manual.is_into_shards(instruction):
            return self.into_shards(instruction, operands[0], source)
        if manual.is_between_parts(instruction, source):
            return self.between_parts(instruction, operands[0], source)
        return None

    def into_shards(
        self,
        instruction: Instruction,
        array: GlobalTree,
        source: Instruction,
    ) -> Global:
        """The shards of an array, as a body takes them on one device. `source` makes
        the array and says its sharding.
        """
        assert isinstance(array, Global)
        (sharding,) = shardings_in(source.attributes) or ("",)
        key = ("manual shards", array.view, sharding)
        shard = self.array_of_key(key, instruction, operands=(array,))
        self.outside_of_shard[shard] = Shards(array, sharding)
        return shard

    def manual_call(
        self,
        instruction: Instruction,
        operands: Sequence[GlobalTree],
        name: str,
    ) -> "GlobalTree | None":
        """The results of the call of the computation `name`, if it is the body of a
        `shard_map`: each of its operands is a shard. `None` for other calls.
        """
        if any(operand in self.outside_of_part for operand in operands):
            return self.partly_manual_call(operands, name)
        operand_shards: list[Shards] = []
        for operand in operands:
            shards = (
                self.outside_of_shard.get(operand)
                if isinstance(operand, Global)
                else None
            )
            if shards is None:
                return None
            operand_shards.append(shards)
        if not operand_shards:
            return None
        self.values.manual_bodies.add(name)
        call_number = len(self.values.manual_calls)
        digests = manual.result_digests(self.module, name)
        call = ManualCall(digests=digests, operands=tuple(operand_shards), results={})
        self.values.manual_calls.append(call)
        results: list[Global] = []
        for result_number, result_array in enumerate(arrays_in(instruction.result)):
            key = ("manual result", call_number, result_number)
            result = self.array_of_key(key, instruction, result_array.shape)
            self.manual_results[result] = _ManualResult(call_number, result_number)
            results.append(result)
        is_tuple = instruction.result.startswith("(")
        return tuple(results) if is_tuple else results[0]

    def between_parts(
        self,
        instruction: Instruction,
        array: GlobalTree,
        source: Instruction,
    ) -> Global:
        """The part of `array` that a body takes which is manual in some axes only; or
        the array outside, where `array` is the part that a body returns. `source` makes
        `array` and says its sharding.
        """
        assert isinstance(array, Global)
        (sharding_before,) = shardings_in(source.attributes) or ("",)
        (sharding_after,) = shardings_in(instruction.attributes) or ("",)
        key = ("manual part", array.view, sharding_before, sharding_after)
        result = self.array_of_key(key, instruction, operands=(array,))
        if manual.is_out_of_shards(instruction):
            outside = PartlyManual(
                array=result,
                array_sharding=sharding_after,
                part_sharding=sharding_before,
            )
            results = self.values.partly_manual_results
            results.setdefault(array, set()).add(outside)
        else:
            self.outside_of_part[result] = PartlyManual(
                array=array,
                array_sharding=sharding_before,
                part_sharding=sharding_after,
            )
        return result

    def partly_manual_call(
        self,
        operands: Sequence[GlobalTree],
        name: str,
    ) -> GlobalTree:
        """The results of the call of the body `name`, which is manual in some axes
        only. Notes for each value in it which part each device has over these axes.
        """
        calls = self.values.partly_manual_calls.setdefault(name, [])
        first_number = len(self.values.nodes)
        results = self.run(name, operands)
        numbers_inside = [*range(first_number, len(self.values.nodes))]

        parts: list[tuple[Global, PartlyManual]] = []
        for operand in operands:
            if not isinstance(operand, Global) or operand not in self.outside_of_part:
                # Without a note, the judge does not follow the call.
                return results
            parts.append((operand, self.outside_of_part[operand]))
        part_of_device = self.part_of_device([outside for _, outside in parts])
        if part_of_device is None:
            return results
        numbers_inside += [part.view.root for part, _ in parts]
        self.values.parts_by_value.update(dict.fromkeys(numbers_inside, part_of_device))
        calls.append(PartlyManualCall(tuple(parts), tuple(_leaves(results))))
        return results

    def part_of_device(self, outside: Sequence[PartlyManual]) -> tuple[int, ...] | None:
        """The number of the part that each device has of the arrays that a body takes,
        over the axes that are not manual. `None` if it is not known, or not the same of
        all arrays.
        """
        parts_by_array: set[tuple[int, ...]] = set()
        for array in outside:
            try:
                parts = parts_of_devices(array.part_sharding, self.module.partitions)
            except Unjudged:
                return None
            parts_by_array.add(tuple(parts.tolist()))
        return parts_by_array.pop() if len(parts_by_array) == 1 else None

    def out_of_shards(
        self,
        instruction: Instruction,
        shard: GlobalTree,
    ) -> Global | None:
        """The array of the shards that a body returns; `None` if they are no result of
        one.
        """
        if not isinstance(shard, Global) or shard not in self.manual_results:
            return None
        result = self.manual_results[shard]
        (sharding,) = shardings_in(instruction.attributes) or ("",)
        key = ("manual array", result, sharding)
        array = self.array_of_key(key, instruction)
        results = self.values.manual_calls[result.call].results
        results.setdefault(result.place, Shards(array, sharding))
        return array

    def conditional(
        self,
        instruction: Instruction,
        operands: Sequence[GlobalTree],
    ) -> GlobalTree:
        """The results of a conditional, each a value of its own. Operand 0 is the
        number of the branch, and the others are what each branch takes.
        """
        branch_number = operands[0]
        assert isinstance(branch_number, Global)
        branches = [
            self.run(name, [operand])
            for (_, name), operand in zip(instruction.called, operands[1:], strict=True)
        ]
        arrays_by_branch = [tuple(_leaves(branch)) for branch in branches]
        results = []
        for arrays in zip(*arrays_by_branch, strict=True):
            key = conditional_key(branch_number.view, [array.view for array in arrays])
            shape = arrays[0].shape
            results.append(
                self.array_of_key(key, instruction, shape, (branch_number, *arrays))
            )
        if isinstance(branches[0], Global):
            return results[0]
        return tuple(results)


def _changing(operand: Global, shape: tuple[int, ...]) -> tuple[int | None, ...]:
    """For each dimension of a reshape's result, the dimension itself if the result
    changes along it, and else `None`. `shape` is that of the result.
    """
    dims: list[int | None] = [None] * len(shape)
    for sources, targets in groups_of_reshape(operand.shape, shape):
        if any(operand.view.dims[source] is not None for source in sources):
            for target in targets:
                dims[target] = target
    return tuple(dims)


def _unkeyed_sizes(
    instruction: Instruction,
    operands: Sequence[Global],
) -> tuple[object, ...]:
    """The sizes that a key leaves out: those of windows and slices, of dimensions along
    which an operand does not change, and of iotas.
    """
    if instruction.opcode in ELEMENTWISE:
        return ()
    sizes: list[int] = []
    for operand in operands:
        sizes += [size for size in operand.shape if size != 1]
    if instruction.opcode == "reshape":
        # The key does not say along which dimensions the operand repeats its elements.
        (operand,) = operands
        dims = zip(operand.view.dims, operand.shape, strict=True)
        repeated = tuple(dim is None for dim, size in dims if size != 1)
        return (tuple(sizes), repeated)
    if instruction.opcode in _OF_ANY_RESULT:
        return (tuple(sizes), arrays_in(instruction.result))
    return (tuple(sizes), *sizes_of(instruction))


def reshaped_dims(
    dims: Sequence[int | None],
    before: Sequence[int],
    after: Sequence[int],
) -> tuple[int | None, ...] | None:
    """For each dimension of a reshape's result, the dimension of the value that it
    follows: `dims` says so for the dimensions of the operand. `before` and `after` are
    the shapes. `None` unless the reshape only adds and drops dimensions of size 1, or
    merges and splits dimensions along which nothing changes.
    """
    followed: list[int | None] = [None] * len(after)
    for sources, targets in groups_of_reshape(before, after):
        if all(dims[source] is None for source in sources):
            continue
        if len(sources) != 1 or len(targets) != 1:
            return None
        followed[targets[0]] = dims[sources[0]]
    return tuple(followed)

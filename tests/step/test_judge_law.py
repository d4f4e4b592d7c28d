"""A law of the judge: devices that are said to return a result of the whole program have
its numbers. Random programs of two devices are computed by NumPy as they are written.
"""

import random
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest
from judging import whole_program_of

from shardfx._step.judge.held import Held
from shardfx._step.judge.judge import Judge
from shardfx._step.judge.results import leaves_of
from shardfx._step.judge.shardings import cuts_of
from shardfx._step.judge.verdict import Unjudged, Wrong
from tests.programs import parse_hlo


HEAD = """HloModule program, num_partitions=2

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

%largest (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] maximum(%a, %b)
}

ENTRY %main {
  %rows = s32[3,1] parameter(1), sharding={replicated}
  %lowest = f32[] constant(-inf)
"""
# The rows of a lookup; some are out of bounds.
ROWS = np.array([3, -1, 1])
LOOKUP = (
    "offset_dims={1}, collapsed_slice_dims={0}, start_index_map={0}, index_vector_dim=1"
)
GROUP = "channel_id=1, replica_groups={{0,1}}, use_global_device_ids=true"
REPLICATED = "replicated"
BY_ROWS = "devices=[2,1]<=[2]"
BY_COLUMNS = "devices=[1,2]<=[2]"
SHARDINGS = (REPLICATED, BY_ROWS, BY_COLUMNS)


def typed(shape) -> str:
    """The type of an array of one device, as HLO writes it."""
    sizes = ",".join(map(str, shape))
    return f"f32[{sizes}]"


class Program:
    """A program as text, and the arrays that it computes by name, each of shape
    (devices, ...).
    """

    def __init__(self, devices: int):
        self.devices = devices
        self.lines: list[str] = []
        self.arrays: dict[str, np.ndarray] = {}

    def add(self, text: str, array: np.ndarray, op_name: str = "") -> None:
        name = f"v{len(self.arrays)}"
        line = f"  %{name} = {typed(array.shape[1:])} {text}"
        if op_name:
            line += f', metadata={{op_name="{op_name}"}}'
        self.lines.append(line)
        self.arrays[name] = array

    def text(self) -> str:
        """The text, whose root is the tuple of all arrays."""
        types = ", ".join(typed(array.shape[1:]) for array in self.arrays.values())
        names = ", ".join(f"%{name}" for name in self.arrays)
        root = f"  ROOT %root = ({types}) tuple({names})"
        return HEAD + "\n".join([*self.lines, root, "}", ""])


class Operation(NamedTuple):
    """An operation to add: the program, and what was drawn."""

    program: Program
    rng: random.Random
    # Its operand, and another one for operations of two.
    name: str
    other: str
    op_name: str

    @property
    def array(self) -> np.ndarray:
        return self.program.arrays[self.name]

    @property
    def other_array(self) -> np.ndarray:
        return self.program.arrays[self.other]

    @property
    def shape(self) -> tuple[int, ...]:
        """The operand's shape on one device."""
        return self.array.shape[1:]

    @property
    def rank(self) -> int:
        return len(self.shape)

    def add(self, text: str, result: np.ndarray) -> None:
        self.program.add(text, result, self.op_name)


def add_negate(operation: Operation) -> None:
    operation.add(f"negate(%{operation.name})", -operation.array)


def add_add(operation: Operation) -> None:
    if operation.array.shape == operation.other_array.shape:
        text = f"add(%{operation.name}, %{operation.other})"
        operation.program.add(text, operation.array + operation.other_array)


def add_multiply(operation: Operation) -> None:
    is_small = np.abs(operation.array).max() < 1e6
    if is_small and operation.array.shape == operation.other_array.shape:
        text = f"multiply(%{operation.name}, %{operation.other})"
        operation.program.add(text, operation.array * operation.other_array)


def padded(array: np.ndarray, paddings, number: np.ndarray) -> np.ndarray:
    """The array with padding of a number; negative padding takes elements away."""
    widths = [(0, 0)]
    crops = [slice(None)]
    for low, high in paddings:
        widths.append((max(low, 0), max(high, 0)))
        stop = None
        if high < 0:
            stop = high
        crops.append(slice(max(-low, 0), stop))
    wide = np.pad(array, widths, constant_values=number.flat[0])
    return wide[tuple(crops)]


def add_pad(operation: Operation) -> None:
    if operation.rank != 2 or operation.array.size >= 64:
        return
    number = operation.rng.choice(["v1", "v2"])
    paddings = []
    for _ in range(2):
        paddings.append(operation.rng.choice([(0, 0), (0, 1), (1, 0), (-1, 1)]))
    widths = "x".join(f"{low}_{high}" for low, high in paddings)
    text = f"pad(%{operation.name}, %{number}), padding={widths}"
    numbers = operation.program.arrays[number]
    operation.add(text, padded(operation.array, paddings, numbers))


def add_slice(operation: Operation) -> None:
    if not operation.rank:
        return
    starts = [operation.rng.randrange(size) for size in operation.shape]
    slices = [slice(None)]
    bounds = []
    for start, size in zip(starts, operation.shape, strict=True):
        stop = operation.rng.randint(start + 1, size)
        slices.append(slice(start, stop))
        bounds.append(f"[{start}:{stop}]")
    text = f"slice(%{operation.name}), slice={{{', '.join(bounds)}}}"
    operation.add(text, operation.array[tuple(slices)])


def add_concatenate(operation: Operation) -> None:
    operands = [operation.array, operation.other_array]
    if operation.rank and operation.array.shape == operation.other_array.shape:
        names = f"%{operation.name}, %{operation.other}"
        text = f"concatenate({names}), dimensions={{0}}"
        operation.add(text, np.concatenate(operands, axis=1))


def add_transpose(operation: Operation) -> None:
    if operation.rank == 2:
        text = f"transpose(%{operation.name}), dimensions={{1,0}}"
        operation.add(text, operation.array.transpose(0, 2, 1))


def add_reverse(operation: Operation) -> None:
    if operation.rank:
        text = f"reverse(%{operation.name}), dimensions={{0}}"
        operation.add(text, operation.array[:, ::-1])


def add_gather(operation: Operation) -> None:
    if operation.rank == 2:
        height, width = operation.shape
        sizes = f"slice_sizes={{1,{width}}}"
        text = f"gather(%{operation.name}, %rows), {LOOKUP}, {sizes}"
        operation.add(text, operation.array[:, ROWS.clip(0, height - 1)])


def add_reshape(operation: Operation) -> None:
    if not operation.rank:
        return
    size = operation.array[0].size
    shapes: list[tuple[int, ...]] = [(size,)]
    for rows in (1, 2, 4, size):
        if size % rows == 0:
            shapes.append((rows, size // rows))
    shape = operation.rng.choice(shapes)
    result = operation.array.reshape(operation.program.devices, *shape)
    operation.add(f"reshape(%{operation.name})", result)


def add_reduce(operation: Operation) -> None:
    if operation.rank:
        text = f"reduce(%{operation.name}, %v1), dimensions={{0}}, to_apply=%sum"
        operation.add(text, operation.array.sum(axis=1))


def add_maximum(operation: Operation) -> None:
    if operation.rank:
        name = operation.name
        text = f"reduce(%{name}, %lowest), dimensions={{0}}, to_apply=%largest"
        operation.add(text, operation.array.max(axis=1))


LOCAL = (
    add_negate,
    add_add,
    add_multiply,
    add_pad,
    add_slice,
    add_concatenate,
    add_transpose,
    add_reverse,
    add_gather,
    add_reshape,
    add_reduce,
    add_maximum,
)


def add_local(program: Program, rng: random.Random, op_name: str) -> None:
    """Adds an operation on one device, if the arrays drawn for it fit."""
    names = [*program.arrays]
    name = rng.choice(names)
    other = rng.choice(names)
    add = rng.choice(LOCAL)
    operation = Operation(
        program=program, rng=rng, name=name, other=other, op_name=op_name
    )
    add(operation)


def add_all_reduce(program: Program, _: random.Random, name: str) -> None:
    total = program.arrays[name].sum(axis=0)
    text = f"all-reduce(%{name}), {GROUP}, to_apply=%sum"
    program.add(text, np.stack([total, total]))


def add_all_maximum(program: Program, _: random.Random, name: str) -> None:
    largest = program.arrays[name].max(axis=0)
    text = f"all-reduce(%{name}), {GROUP}, to_apply=%largest"
    program.add(text, np.stack([largest, largest]))


def add_reduce_scatter(program: Program, _: random.Random, name: str) -> None:
    array = program.arrays[name]
    if array.ndim > 1 and array.shape[1] % 2 == 0:
        halves = np.split(array.sum(axis=0), 2)
        text = f"reduce-scatter(%{name}), {GROUP}, dimensions={{0}}, to_apply=%sum"
        program.add(text, np.stack(halves))


def add_all_gather(program: Program, _: random.Random, name: str) -> None:
    array = program.arrays[name]
    if array.ndim > 1 and array.size < 64:
        gathered = np.concatenate([*array])
        text = f"all-gather(%{name}), {GROUP}, dimensions={{0}}"
        program.add(text, np.stack([gathered, gathered]))


def add_all_to_all(program: Program, _: random.Random, name: str) -> None:
    array = program.arrays[name]
    if array.ndim > 1 and array.shape[1] % 2 == 0:
        halves = np.split(array, 2, axis=1)
        result = np.stack([np.concatenate([*half]) for half in halves])
        program.add(f"all-to-all(%{name}), {GROUP}, dimensions={{0}}", result)


PERMUTES = ([(0, 1), (1, 0)], [(0, 1)], [(1, 0)], [(0, 0)])


def add_permute(program: Program, rng: random.Random, name: str) -> None:
    array = program.arrays[name]
    result = np.zeros_like(array)
    texts = []
    for sender, receiver in rng.choice(PERMUTES):
        result[receiver] = array[sender]
        texts.append(f"{{{sender},{receiver}}}")
    pairs = ",".join(texts)
    text = f"channel_id=1, source_target_pairs={{{pairs}}}"
    program.add(f"collective-permute(%{name}), {text}", result)


COLLECTIVES = (
    add_all_reduce,
    add_all_maximum,
    add_reduce_scatter,
    add_all_gather,
    add_all_to_all,
    add_permute,
)


def add_collective(program: Program, rng: random.Random) -> None:
    """Adds an exchange of both devices, if the array drawn for it fits."""
    name = rng.choice([*program.arrays])
    add = rng.choice(COLLECTIVES)
    add(program, rng, name)


def add_leaves(program: Program, argument: np.ndarray, sharding: str) -> None:
    """Adds the argument, which becomes `v0`, and the constants 0 and 5."""
    program.add(f"parameter(0), sharding={{{sharding}}}", argument)
    for number in (0, 5):
        numbers = np.full(program.devices, float(number))
        program.add(f"constant({number})", numbers)


def programs_of(rng: random.Random) -> tuple[Program, Program]:
    """A random whole program, and a random program of two devices with its argument."""
    sharding = rng.choice(SHARDINGS)
    numbers = rng.choices([-7, -3, -2, 2, 3, 5, 11], k=16)
    x = np.array(numbers, float).reshape(4, 4)
    shards_by_sharding = {
        REPLICATED: [x, x],
        BY_ROWS: np.split(x, 2, axis=0),
        BY_COLUMNS: np.split(x, 2, axis=1),
    }
    whole = Program(devices=1)
    add_leaves(whole, x[None], sharding)
    partitioned = Program(devices=2)
    shards = shards_by_sharding[sharding]
    add_leaves(partitioned, np.stack(shards), sharding)
    for number in range(5):
        add_local(whole, rng, f"n{number}")
    for _ in range(20):
        if rng.random() < 0.4:
            add_collective(partitioned, rng)
        else:
            add_local(partitioned, rng, f"n{rng.randrange(5)}")
    return whole, partitioned


class Proof(NamedTuple):
    """An array of the devices, the one of the whole program that the judge takes it
    for, and for each dimension the indices of that one on each device.
    """

    array: np.ndarray
    whole_array: np.ndarray
    indices: list[np.ndarray]


def proofs(whole: Program, partitioned: Program) -> Iterator[Proof]:
    """Yields each array of the devices that the judge takes for one of the whole
    program, under each sharding.
    """
    whole_program = whole_program_of(whole.text())
    judge = Judge(parse_hlo(partitioned.text()), whole_program)
    root = judge.run(judge.module.entry, judge.arguments())
    leaves = leaves_of(root)
    for leaf, array in zip(leaves, partitioned.arrays.values(), strict=True):
        if not isinstance(leaf, Held):
            continue
        results = judge.whole_program.results
        for result, whole_array in zip(results, whole.arrays.values(), strict=True):
            if array.ndim != whole_array.ndim:
                continue
            for sharding in SHARDINGS:
                if array.ndim != 3 and sharding != REPLICATED:
                    continue
                try:
                    judge.require_result(0, leaf, result, sharding)
                except (Unjudged, Wrong):
                    continue
                cuts = judge.context.cuts
                dim_cuts = cuts_of(cuts, sharding, result.shape, array.shape[1:])
                indices = [cuts.indices(cut) for cut in dim_cuts]
                yield Proof(array=array, whole_array=whole_array[0], indices=indices)


@pytest.mark.parametrize("seed", range(4))
def test_proved_results_have_the_numbers_of_the_whole_program(seed):
    rng = random.Random(seed)
    count = 0
    for _ in range(40):
        whole, partitioned = programs_of(rng)
        texts = f"{whole.text()}\n{partitioned.text()}"
        for proof in proofs(whole, partitioned):
            count += 1
            for device in range(2):
                places = [rows[device] for rows in proof.indices]
                if any((place < 0).any() for place in places):
                    # A shard with padding, which may be any.
                    continue
                expected = proof.whole_array
                if places:
                    expected = expected[np.ix_(*places)]
                shard = proof.array[device]
                np.testing.assert_array_equal(shard, expected, texts)
    assert count > 100

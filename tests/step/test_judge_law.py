"""A law of the judge: devices that are said to return a result of the whole program have
its numbers. Random programs of two devices are computed by NumPy as they are written.
"""

import random

import numpy as np
import pytest

from shardfx._step import parse_hlo
from shardfx._step.judge.held import Held
from shardfx._step.judge.judge import Judge
from shardfx._step.judge.results import leaves_of
from shardfx._step.judge.shardings import cuts_of
from shardfx._step.judge.verdict import Unjudged, Wrong
from shardfx._step.judge.whole_program import read_whole


HEAD = """HloModule program, num_partitions=2

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

ENTRY %main {
"""
GROUP = "channel_id=1, replica_groups={{0,1}}, use_global_device_ids=true"
SHARDINGS = ("replicated", "devices=[2,1]<=[2]", "devices=[1,2]<=[2]")


def typed(shape) -> str:
    return f"f32[{','.join(map(str, shape))}]"


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
        metadata = f', metadata={{op_name="{op_name}"}}' if op_name else ""
        self.lines.append(f"  %{name} = {typed(array.shape[1:])} {text}{metadata}")
        self.arrays[name] = array

    def text(self) -> str:
        """The text, whose root is the tuple of all arrays."""
        types = ", ".join(typed(array.shape[1:]) for array in self.arrays.values())
        names = ", ".join(f"%{name}" for name in self.arrays)
        root = f"  ROOT %root = ({types}) tuple({names})"
        return HEAD + "\n".join([*self.lines, root, "}", ""])


def padded(array: np.ndarray, paddings, number: np.ndarray) -> np.ndarray:
    widths = [(0, 0), *[(max(low, 0), max(high, 0)) for low, high in paddings]]
    wide = np.pad(array, widths, constant_values=number.flat[0])
    crops = [slice(-min(low, 0), min(high, 0) or None) for low, high in paddings]
    return wide[(slice(None), *crops)]


def add_local(program: Program, rng: random.Random, op_name: str) -> None:
    """Adds an operation on one device, if the arrays drawn for it fit."""
    arrays = program.arrays
    name, other = rng.choice([*arrays]), rng.choice([*arrays])
    array = arrays[name]
    rank = array.ndim - 1
    opcode = rng.choice(
        "negate add pad slice concatenate transpose reshape reduce".split()
    )
    if opcode == "negate":
        program.add(f"negate(%{name})", -array, op_name)
    elif opcode == "add" and array.shape == arrays[other].shape:
        program.add(f"add(%{name}, %{other})", array + arrays[other])
    elif opcode == "pad" and rank == 2 and array.size < 64:
        number = rng.choice(["v1", "v2"])
        paddings = [rng.choice([(0, 0), (0, 1), (1, 0), (-1, 1)]) for _ in range(2)]
        text = "x".join(f"{low}_{high}" for low, high in paddings)
        result = padded(array, paddings, arrays[number])
        program.add(f"pad(%{name}, %{number}), padding={text}", result, op_name)
    elif opcode == "slice" and rank:
        starts = [rng.randrange(size) for size in array.shape[1:]]
        bounds = [
            (start, rng.randint(start + 1, size))
            for start, size in zip(starts, array.shape[1:], strict=True)
        ]
        text = ", ".join(f"[{start}:{stop}]" for start, stop in bounds)
        slices = tuple(slice(*bound) for bound in bounds)
        result = array[(slice(None), *slices)]
        program.add(f"slice(%{name}), slice={{{text}}}", result, op_name)
    elif opcode == "concatenate" and rank and array.shape == arrays[other].shape:
        result = np.concatenate([array, arrays[other]], axis=1)
        text = f"concatenate(%{name}, %{other}), dimensions={{0}}"
        program.add(text, result, op_name)
    elif opcode == "transpose" and rank == 2:
        text = f"transpose(%{name}), dimensions={{1,0}}"
        program.add(text, array.transpose(0, 2, 1), op_name)
    elif opcode == "reshape" and rank:
        size = array[0].size
        shapes = [(size,), *[(d, size // d) for d in (1, 2, 4, size) if size % d == 0]]
        result = array.reshape(program.devices, *rng.choice(shapes))
        program.add(f"reshape(%{name})", result, op_name)
    elif opcode == "reduce" and rank:
        text = f"reduce(%{name}, %v1), dimensions={{0}}, to_apply=%sum"
        program.add(text, array.sum(axis=1), op_name)


def add_collective(program: Program, rng: random.Random) -> None:
    """Adds an exchange of both devices, if the array drawn for it fits."""
    name = rng.choice([*program.arrays])
    array = program.arrays[name]
    kind = rng.choice("all-reduce all-gather all-to-all collective-permute".split())
    if kind == "all-reduce":
        both = array.sum(axis=0)
        text = f"all-reduce(%{name}), {GROUP}, to_apply=%sum"
        program.add(text, np.stack([both, both]))
    elif kind == "collective-permute":
        pairs = rng.choice([[(0, 1), (1, 0)], [(0, 1)], [(1, 0)], [(0, 0)]])
        result = np.zeros_like(array)
        for source, target in pairs:
            result[target] = array[source]
        text = ",".join(f"{{{source},{target}}}" for source, target in pairs)
        text = f"channel_id=1, source_target_pairs={{{text}}}"
        program.add(f"collective-permute(%{name}), {text}", result)
    elif array.ndim > 1 and kind == "all-gather" and array.size < 64:
        both = np.concatenate([*array])
        text = f"all-gather(%{name}), {GROUP}, dimensions={{0}}"
        program.add(text, np.stack([both, both]))
    elif array.ndim > 1 and kind == "all-to-all" and array.shape[1] % 2 == 0:
        halves = np.split(array, 2, axis=1)
        result = np.stack([np.concatenate([*half]) for half in halves])
        program.add(f"all-to-all(%{name}), {GROUP}, dimensions={{0}}", result)


def programs_of(rng: random.Random) -> tuple[Program, Program]:
    """A random whole program, and a random program of two devices with its argument."""
    sharding = rng.choice(SHARDINGS)
    x = np.array(rng.choices([-7, -3, -2, 2, 3, 5, 11], k=16), float).reshape(4, 4)
    parts = {
        SHARDINGS[0]: np.stack([x, x]),
        SHARDINGS[1]: np.stack(np.split(x, 2, axis=0)),
        SHARDINGS[2]: np.stack(np.split(x, 2, axis=1)),
    }[sharding]
    whole, partitioned = Program(1), Program(2)
    for program, array in ((whole, x[None]), (partitioned, parts)):
        program.add(f"parameter(0), sharding={{{sharding}}}", array)
        for number in (0, 5):
            program.add(f"constant({number})", np.full(program.devices, float(number)))
    for number in range(5):
        add_local(whole, rng, f"n{number}")
    for _ in range(20):
        if rng.random() < 0.4:
            add_collective(partitioned, rng)
        else:
            add_local(partitioned, rng, f"n{rng.randrange(5)}")
    return whole, partitioned


def proofs(whole: Program, partitioned: Program):
    """Yields the arrays of devices, those of the whole program that the judge takes
    them for, and the indices that each device holds.
    """
    judge = Judge(parse_hlo(partitioned.text()), read_whole(parse_hlo(whole.text())))
    leaves = leaves_of(judge.run(judge.module.entry, judge.arguments()))
    for leaf, array in zip(leaves, partitioned.arrays.values(), strict=True):
        results = judge.whole_program.results
        for result, whole_array in zip(results, whole.arrays.values(), strict=True):
            if not isinstance(leaf, Held) or array.ndim != whole_array.ndim:
                continue
            for sharding in SHARDINGS if array.ndim == 3 else SHARDINGS[:1]:
                try:
                    judge.require_result(0, leaf, result, sharding)
                except (Unjudged, Wrong):
                    continue
                cuts = judge.context.cuts
                dim_cuts = cuts_of(cuts, sharding, result.shape, array.shape[1:])
                indices = [cuts.indices(cut) for cut in dim_cuts]
                yield array, whole_array[0], indices


@pytest.mark.parametrize("seed", range(4))
def test_proved_results_have_the_numbers_of_the_whole_program(seed):
    rng = random.Random(seed)
    count = 0
    for _ in range(40):
        whole, partitioned = programs_of(rng)
        for array, whole_array, indices in proofs(whole, partitioned):
            count += 1
            for device in range(2):
                places = [rows[device] for rows in indices]
                if any((place < 0).any() for place in places):
                    # A shard with padding, which may be any.
                    continue
                expected = whole_array[np.ix_(*places)] if places else whole_array
                message = f"{whole.text()}\n{partitioned.text()}"
                np.testing.assert_array_equal(array[device], expected, message)
    assert count > 100

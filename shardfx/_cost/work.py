"""What a compiled program computes: its products, and how long its compiler says that it takes."""

import dataclasses
import math
import re

from .hlo_text import HloModule, Instruction, parse_hlo
from .runs import runs_of


_SHAPE = re.compile(r"[a-z]\w*\[([\d,]*)\]")
_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_LABELS = re.compile(r"dim_labels=\w+_(\w+)->\w+")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


@dataclasses.dataclass(frozen=True)
class Work:
    """What one device computes in a step.

    **Arguments:**

    - `flops`: of its matrix products and convolutions, loops as often as they run.
    - `cycles`: of all its instructions by the compiler's own estimate, which TPU programs hold; else 0.
    """

    flops: float
    cycles: int


def work_of(text: str) -> Work:
    """Reads what a compiled program computes off its text."""
    module = parse_hlo(text)
    runs = runs_of(module)
    flops, cycles = 0.0, 0
    for name, computation in module.computations.items():
        count = sum(own.count for own in runs.get(name, ()))
        for instruction in computation.values() if count else ():
            flops += count * _flops(module, name, instruction)
            if found := _CYCLES.search(instruction.attributes):
                cycles += count * int(found[1])
    return Work(flops, cycles)


def _flops(module: HloModule, name: str, instruction: Instruction) -> float:
    if instruction.opcode == "dot":
        left = _dims(module, name, instruction.operands[0])
        found = _CONTRACTED.search(instruction.attributes)
        over = [left[int(dim)] for dim in found[1].split(",") if dim] if found else []
        return 2.0 * math.prod(_sides(instruction.result)) * math.prod(over)
    if instruction.opcode == "convolution" and (found := _LABELS.search(instruction.attributes)):
        kernel = _dims(module, name, instruction.operands[1])
        each = math.prod(kernel) / kernel[found[1].index("o")]
        return 2.0 * math.prod(_sides(instruction.result)) * each
    return 0.0


def _dims(module: HloModule, name: str, operand: str) -> list[int]:
    return _sides(module.computations[name][operand].result)


def _sides(result: str) -> list[int]:
    found = _SHAPE.match(result)
    return [int(size) for size in found[1].split(",") if size] if found else []

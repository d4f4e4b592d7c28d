"""The work of one device in a partitioned or compiled program: floating-point
operations, bytes to and from memory, and the compiler's count of cycles.
"""

import dataclasses
import math
import re
from collections.abc import Mapping

from .._ground import opcodes
from .._step import HloModule, Instruction, array_of, arrays_in, root_of
from ._runs import runs_of


# These operations read or write only a part of an operand: a part of the size of the
# result (`None`), or of the size of the operand with this number.
MOVED_OPERANDS = {"gather": None, "scatter": 2, "dynamic-update-slice": 1}
# The contracted dimensions of a product's operands, and the letters of a convolution's
# kernel dimensions, of which `o` is that of the outputs.
_CONTRACTED = re.compile(r"[lr]hs_contracting_dims=\{([\d,]*)\}")
_LABELS = re.compile(r"dim_labels=\w+_(\w+)->\w+")
_KERNEL = re.compile(
    r'custom_call_target="(tpu_custom_call|__gpu\$xla\.gpu\.triton|mosaic_gpu[\w.]*)"'
)
_TRIPS = "the trips of a loop are not known and count once"
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


@dataclasses.dataclass(frozen=True)
class DeviceWork:
    """The work of one device in a step.

    - `flops`: the floating-point operations of matrix products and convolutions, for
      all iterations of loops.
    - `bytes`: the bytes to and from memory of matrix products, reductions, sorts and
      gathers, and of the step's results. All other operations count as fused with
      these.
    - `cycles`: the cycles that the TPU's compiler estimates in the text of its
      programs; 0 for other programs.
    - `notes`: a text for each kind of inexact count: loops of unknown trip count, and
      custom kernels.
    """

    flops: float
    bytes: float
    cycles: int
    notes: tuple[str, ...] = ()


def work_of(module: HloModule) -> DeviceWork:
    """The work of one device in a partitioned or compiled program. That of a TPU's
    partitioned program is in its kernels (`_kernels.py`).
    """
    runs = runs_of(module)
    flops = 0.0
    moved_bytes = _elementwise_result_bytes(module)
    cycles = 0
    notes: dict[str, None] = {}
    for name, computation in module.computations.items():
        runs_of_computation = runs.get(name, ())
        count = sum(run.count for run in runs_of_computation)
        if any(run.unknown for run in runs_of_computation):
            notes[_TRIPS] = None
        if not count:
            continue
        for instruction in computation.values():
            flops += count * flops_of(computation, instruction)
            moved_bytes += count * _moved_bytes(computation, instruction)
            if match := _KERNEL.search(instruction.attributes):
                notes[f"the products of the kernel `{match[1]}` are not counted"] = None
            if match := _CYCLES.search(instruction.attributes):
                cycles += count * int(match[1])
    return DeviceWork(flops=flops, bytes=moved_bytes, cycles=cycles, notes=tuple(notes))


def _moved_bytes(
    computation: Mapping[str, Instruction],
    instruction: Instruction,
) -> float:
    """The bytes that one run of an instruction reads from memory and writes to memory.
    `computation` contains the instruction.
    """
    # These move a part of an operand: as much as the operand of this number, or as the
    # result (`None`).
    if instruction.opcode in MOVED_OPERANDS:
        operand_number = MOVED_OPERANDS[instruction.opcode]
        moved_part = instruction
        if operand_number is not None:
            moved_part = computation[instruction.operands[operand_number]]
        return 2.0 * _bytes(moved_part)
    if instruction.opcode not in opcodes.UNFUSED:
        return 0.0
    operand_bytes = (_bytes(computation[name]) for name in instruction.operands)
    return _bytes(instruction) + math.fsum(operand_bytes)


def _elementwise_result_bytes(module: HloModule) -> float:
    """The bytes to and from memory for those results of the program that elementwise
    operations compute. Each counts twice, for the write of the result and the read of
    an operand of equal size.
    """
    entry = module.computations[module.entry]
    root = root_of(entry)
    outputs = [root]
    if root.opcode == "tuple":
        outputs = [entry[name] for name in root.operands]
    sizes = []
    for output in outputs:
        if (
            output.opcode not in opcodes.WITHOUT_NEW_ARRAY
            and output.opcode not in opcodes.UNFUSED
        ):
            sizes.append(2.0 * _bytes(output))
    return math.fsum(sizes)


def flops_of(computation: Mapping[str, Instruction], instruction: Instruction) -> float:
    """The floating-point operations of one run of an instruction: two for each element
    of the result and each element that is summed for it; 0 if it is no product.
    """
    if instruction.opcode == "dot":
        summed_elements = _contracted_elements(computation, instruction)
        return 2.0 * math.prod(array_of(instruction).shape) * summed_elements
    labels = _LABELS.search(instruction.attributes)
    if instruction.opcode == "convolution" and labels is not None:
        kernel = array_of(computation[instruction.operands[1]]).shape
        summed_elements = math.prod(kernel) / kernel[labels[1].index("o")]
        return 2.0 * math.prod(array_of(instruction).shape) * summed_elements
    return 0.0


def _contracted_elements(
    computation: Mapping[str, Instruction],
    product: Instruction,
) -> int:
    """The number of elements that a matrix product sums for each element of its result.
    `product` is an instruction of `computation`, whose instructions are known by name.
    """
    # An operand can be a tuple of slices along the contracted dimension. The other
    # operand has the whole dimension.
    counts = []
    texts = _CONTRACTED.findall(product.attributes)
    for name, text in zip(product.operands, texts, strict=False):
        shape = array_of(computation[name]).shape
        dims = [int(dim) for dim in text.split(",") if dim]
        counts.append(math.prod(shape[dim] for dim in dims))
    return max(counts, default=1)


def _bytes(instruction: Instruction) -> float:
    return float(sum(array.bytes for array in arrays_in(instruction.result)))

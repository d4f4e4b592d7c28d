"""The work of one device in a partitioned or compiled program: floating-point
operations, bytes to and from memory, and the compiler's count of cycles.
"""

import dataclasses
import math
import re
from collections.abc import Mapping

from .._step import HloModule, Instruction, array_of, arrays_in, root_of
from ._runs import runs_of


# These operations read operands from memory and write results to memory. Elementwise
# operations are fused with them.
_HEAVY = frozenset(
    "dot convolution ragged-dot reduce reduce-window select-and-scatter sort fft"
    " custom-call".split()
)
# Loop-carried arrays up to this size stay in a TPU's vector memory: v5e and v6e have
# 128 MiB.
_ON_CHIP_BYTES = 2**25
_PASSED = ("convert", "copy", "bitcast", "transpose", "reshape")
_PRODUCTS = ("dot", "convolution", "ragged-dot")
# These operations read or write only a part of an operand: a part of the size of the
# result (`None`), or of the size of the operand with this number.
_IN_PLACE = {"gather": None, "scatter": 2, "dynamic-update-slice": 1}
# The results of these operations are no new arrays.
_NOT_MADE = frozenset(
    "parameter get-tuple-element dynamic-update-slice scatter while conditional".split()
)
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


def work_of(module: HloModule, *, tpu: bool = False) -> DeviceWork:
    """The work of one device in a partitioned or compiled program. If a TPU runs it
    (`tpu`), matrix products read float32 operands as bfloat16, and small loop-carried
    arrays, such as the weights of a recurrent cell, stay in on-chip memory.
    """
    runs = runs_of(module)
    flops, moved, cycles = 0.0, _written(module), 0
    notes: dict[str, None] = {}
    loops = [
        instruction.called
        for computation in module.computations.values()
        for instruction in computation.values()
        if instruction.opcode == "while"
    ]
    if tpu:
        bodies = {dict(called)["body"] for called in loops}
    else:
        bodies = set()
    for name, computation in module.computations.items():
        ways = runs.get(name, ())
        count = sum(run.count for run in ways)
        notes |= dict.fromkeys(_TRIPS for run in ways if run.unknown)
        for instruction in computation.values() if count else ():
            flops += count * _flops(module, name, instruction)
            moved += count * _moved(computation, instruction, tpu, name in bodies)
            if match := _KERNEL.search(instruction.attributes):
                notes[f"the products of the kernel `{match[1]}` are not counted"] = None
            if match := _CYCLES.search(instruction.attributes):
                cycles += count * int(match[1])
    return DeviceWork(flops, moved, cycles, tuple(notes))


def _moved(
    computation: Mapping[str, Instruction],
    instruction: Instruction,
    tpu: bool,
    in_loop: bool,
) -> float:
    """The bytes that one run of an instruction reads from memory and writes to memory.
    `computation` contains the instruction. `tpu` says whether a TPU runs it, and
    `in_loop` whether the computation is a loop's body on a TPU.
    """
    if instruction.opcode in _IN_PLACE:
        part = _IN_PLACE[instruction.opcode]
        return 2.0 * _bytes(
            instruction if part is None else computation[instruction.operands[part]]
        )
    if instruction.opcode not in _HEAVY:
        return 0.0
    is_narrow = tpu and instruction.opcode in _PRODUCTS
    read = [
        _bytes(computation[name])
        / (2 if is_narrow and computation[name].result.startswith("f32") else 1)
        for name in instruction.operands
        if not in_loop or not _is_on_chip(computation, computation[name])
    ]
    return sum(read, _bytes(instruction))


def _is_on_chip(
    computation: Mapping[str, Instruction], instruction: Instruction
) -> bool:
    """Whether the result of `one` is a loop-carried array small enough to stay in
    on-chip memory. `one` is an operand of an instruction of `computation`, the body of
    a loop.
    """
    size = _bytes(instruction)
    while instruction.opcode in _PASSED:
        instruction = computation[instruction.operands[0]]
    is_carried = (
        instruction.opcode == "get-tuple-element"
        and computation[instruction.operands[0]].opcode == "parameter"
    )
    return is_carried and size <= _ON_CHIP_BYTES


def _written(module: HloModule) -> float:
    """The bytes to and from memory for those results of the program that elementwise
    operations compute. Each counts twice, for the write of the result and the read of
    an operand of equal size.
    """
    entry = module.computations[module.entry]
    root = root_of(entry)
    if root.opcode == "tuple":
        outputs = [entry[name] for name in root.operands]
    else:
        outputs = [root]
    return math.fsum(
        2.0 * _bytes(output)
        for output in outputs
        if output.opcode not in _NOT_MADE | _HEAVY
    )


def _flops(module: HloModule, name: str, instruction: Instruction) -> float:
    if instruction.opcode == "dot":
        # An operand can be a tuple of slices along the contracted dimension. The other
        # operand has the whole dimension.
        contracted = zip(
            instruction.operands,
            _CONTRACTED.findall(instruction.attributes),
            strict=False,
        )
        sides = (
            (array_of(module.computations[name][operand]).shape, dims.split(","))
            for operand, dims in contracted
        )
        over = max(
            (
                math.prod(shape[int(dim)] for dim in dims if dim)
                for shape, dims in sides
            ),
            default=1,
        )
        return 2.0 * math.prod(array_of(instruction).shape) * over
    if instruction.opcode == "convolution" and (
        contracted := _LABELS.search(instruction.attributes)
    ):
        kernel = array_of(module.computations[name][instruction.operands[1]]).shape
        each = math.prod(kernel) / kernel[contracted[1].index("o")]
        return 2.0 * math.prod(array_of(instruction).shape) * each
    return 0.0


def _bytes(instruction: Instruction) -> float:
    return float(sum(array.bytes for array in arrays_in(instruction.result)))

"""The bodies of `shard_map`s: programs of one device that the partitioner leaves as they
are.

The whole program says which shards a body takes and returns. The partitioned program
computes the same results if it calls an equal body with the same shards. Bodies are
equal if their results are equal expressions of their parameters.

The partitioner does divide the body of a `shard_map` that is manual in some axes of its
mesh only. Each value of such a body is one for each part over these axes, and a device
has that of its own part. So a collective that the partitioner adds stays within the
devices of one part, and one of the body itself is an operation of the whole program.
"""

import hashlib
import re

from ..hlo_text import HloModule, Instruction, arrays_in, root_of
from .forms import options_of, text_of


_TARGET = re.compile(r'custom_call_target="SPMD(FullToShard|ShardToFull)Shape"')
_CALLED = re.compile(
    r"(to_apply|calls|body|condition|true_computation|false_computation)=%?[\w.\-]+"
    r"|branch_computations=\{[^{}]*\}"
)
# JAX 0.12 writes the mesh beside it.
_MESH = r"mesh\[[^\]]*\](?:,? ?device_ids=\([^()]*(?:\([^()]*\))?\))?, "
_MANUAL = rf"\{{(?:{_MESH})?manual\}}"
_IS_MANUAL = re.compile(rf", sharding={_MANUAL}(?:,|$)")
_IS_PARTLY_MANUAL = re.compile(r"last_tile_dims=\{[^{}]*manual|, manual=\{")
_IGNORED = re.compile(
    rf", channel_id=\d+|, sharding={_MANUAL}|, sharding=\{{(?:{_MANUAL}(?:, )?)+\}}"
)
_METADATA = re.compile(r", metadata=\{.*")


def is_into_shards(instruction: Instruction) -> bool:
    """Whether an instruction takes an array into shards, for a body whose axes are all
    manual.
    """
    is_manual = _IS_MANUAL.search(instruction.attributes) is not None
    return is_manual and _direction(instruction) == "FullToShard"


def is_between_parts(instruction: Instruction, source: Instruction) -> bool:
    """Whether an instruction takes an array into parts, or out of them, for a body that
    is manual in some axes of the mesh and not in others. `source` is the instruction of
    the array.
    """
    direction = _direction(instruction)
    if direction == "FullToShard":
        return _IS_MANUAL.search(instruction.attributes) is None
    is_of_part = _IS_PARTLY_MANUAL.search(source.attributes) is not None
    return direction == "ShardToFull" and is_of_part


def is_out_of_shards(instruction: Instruction) -> bool:
    """Whether an instruction makes an array of the shards that a body returns."""
    return _direction(instruction) == "ShardToFull"


def _direction(instruction: Instruction) -> str:
    """Whether an instruction goes into a body ("FullToShard") or out of it
    ("ShardToFull"); "" for others.
    """
    if instruction.opcode != "custom-call":
        return ""
    match = _TARGET.search(instruction.attributes)
    return "" if match is None else match[1]


def result_digests(module: HloModule, name: str) -> tuple[str, ...]:
    """A digest of each result of a computation, as an expression of its parameters."""
    digests = _digests(module, name)
    root = root_of(module.computations[name])
    if root.opcode == "tuple":
        return tuple(digests[operand] for operand in root.operands)
    return (digests[root.name],)


def _digests(module: HloModule, name: str) -> dict[str, str]:
    """For each instruction of the computation `name`, a digest of its result as an
    expression of the parameters.
    """
    digests: dict[str, str] = {}
    for instruction in module.computations[name].values():
        called_digests = [
            _computation_digest(module, callee) for _, callee in instruction.called
        ]
        operand_digests = [digests[operand] for operand in instruction.operands]
        types = [(array.dtype, array.shape) for array in arrays_in(instruction.result)]
        attributes = _CALLED.sub("", _IGNORED.sub("", text_of(instruction)))
        options: tuple[str, ...] = ()
        if instruction.opcode == "custom-call":
            attributes = _METADATA.sub("", attributes)
            options = options_of(instruction)
        inside = "" if instruction.operands else instruction.inside.strip()
        expression = (
            instruction.opcode,
            types,
            attributes,
            options,
            inside,
            operand_digests,
            called_digests,
        )
        digests[instruction.name] = hashlib.sha256(
            repr(expression).encode()
        ).hexdigest()
    return digests


def _computation_digest(module: HloModule, name: str) -> str:
    """A digest of what a computation returns."""
    root = root_of(module.computations[name])
    return _digests(module, name)[root.name]

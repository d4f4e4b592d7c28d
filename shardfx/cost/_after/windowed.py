"""Gathers before products, and sums after them, that TPUs send piece by piece beside the product's own pieces."""

import math
import re
from collections.abc import Mapping

from .._hlo_text import HloModule, Instruction
from .._hlo_types import array_of
from .graph import Computation, Details, in_each, users_of


# Operations for each byte, times the devices of a group, above which a product hides what is sent. By 16 programs for
# v5e in bfloat16 and float32 and in groups of 4, 8 and 16 it lies between 4,160 and 4,220: twice the chip's operations
# in a second for each byte of a link's.
_HIDDEN = 4190
_BYTES = {"bf16": 2, "f16": 2, "f32": 4}
_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
# What stands between a gather and the product that it is for.
_FORMS = ("reshape", "transpose", "bitcast", "copy")


def windowed(module: HloModule) -> HloModule:
    """The module with permutes in the place of gathers and sums that products hide."""
    details = Details(module)
    return in_each(module, lambda _, name, own: _windowed(own, details))


def _windowed(computation: Computation, details: Details) -> Computation:
    users = users_of(computation)
    made = dict(computation)
    for product in computation.values():
        if product.opcode != "dot":
            continue
        for operand in dict.fromkeys(product.operands):
            gather = _gather(computation, users, operand)
            if gather is not None and _is_hidden(computation, product, gather, details):
                made[gather.name] = _permutes(gather, _shard(computation, gather), details)
        reduction, part = _reduction(users, product)
        if reduction is not None and part is not None and _is_hidden(computation, product, reduction, details):
            if _is_whole_part(reduction, part, details):
                made[part.name] = _permutes(reduction, part.result, details)._replace(
                    name=part.name, is_root=part.is_root
                )
                del made[reduction.name]
    return made


def _gather(computation: Computation, users: Mapping[str, list[Instruction]], name: str) -> Instruction | None:
    """The gather that an operand of a product is, if nothing else uses it."""
    while name in computation and len(users[name]) == 1:
        own = computation[name]
        if own.opcode == "all-gather":
            return own
        if own.opcode not in _FORMS:
            return None
        name = own.operands[0]
    return None


def _reduction(
    users: Mapping[str, list[Instruction]], product: Instruction
) -> tuple[Instruction, Instruction] | tuple[None, None]:
    """The sum of a product over devices, and the part of it that each keeps, if there is no other use."""
    own = product
    while len(users[own.name]) == 1:
        (user,) = users[own.name]
        if own.opcode == "all-reduce":
            return (own, user) if user.opcode == "dynamic-slice" else (None, None)
        if user.opcode not in (*_FORMS, "all-reduce"):
            return None, None
        own = user
    return None, None


def _is_hidden(computation: Computation, product: Instruction, sent: Instruction, details: Details) -> bool:
    groups = details.groups(sent)
    dtype, shape = array_of(sent)
    size = groups[0].shape[1]
    if len(groups) != 1 or size <= 2 or dtype not in _BYTES:
        return False
    left, dims = array_of(computation[product.operands[0]]).shape, _CONTRACTED.search(product.attributes)
    added = math.prod(left[int(dim)] for dim in dims[1].split(",") if dim) if dims else 0
    operations = 2 * math.prod(array_of(product).shape) * added
    return operations * size > _HIDDEN * _BYTES[dtype] * math.prod(shape)


def _is_whole_part(reduction: Instruction, part: Instruction, details: Details) -> bool:
    size = details.groups(reduction)[0].shape[1]
    return math.prod(array_of(reduction).shape) == size * math.prod(array_of(part).shape)


def _shard(computation: Computation, gather: Instruction) -> str:
    return computation[gather.operands[0]].result


def _permutes(sent: Instruction, shard: str, details: Details) -> Instruction:
    """A ring of permutes: all shards and, where two go around in opposite directions, one more."""
    rows = details.groups(sent)[0].tolist()
    size = len(rows[0])
    count = size - 1 if sent.opcode == "all-gather" and size == 4 else size + 1
    pairs = ",".join(f"{{{row[at - 1]},{row[at]}}}" for row in rows for at in range(size))
    named = re.search(r", metadata=\{.*", sent.attributes)
    attributes = f", channel_id=1, source_target_pairs={{{pairs}}}{named[0] if named else ''}"
    return sent._replace(opcode="collective-permute", result=f"({', '.join([shard] * count)})", attributes=attributes)

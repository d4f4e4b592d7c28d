"""The passes that each platform's compiler runs after XLA's partitioner, and a function
that applies them to a module.

The passes were compared with programs of jaxlib 0.10.2 and of the libtpu that it pins.
"""

import dataclasses
import functools as ft
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ..._step import KINDS, HloModule, Instruction, Platform, array_of
from .merge import Computation, Rewritten, gathered_once, users_of
from .reductions import added_once, folded, scattered, summed_after, summed_parts


# A collective overlaps with a product if the product's operations per byte of the
# collective, times the devices of a replica group, exceed this. In 16 programs for v5e,
# in bfloat16 and float32, with groups of 4, 8 and 16 devices, the limit is between
# 4,160 and 4,220: twice the chip's operations per second divided by a link's bytes per
# second.
_HIDDEN = 4190
_BYTES = {"bf16": 2, "f16": 2, "f32": 4}
_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")


def windowed(known: Rewritten, computation: Computation) -> Computation:
    """A copy of `computation` with windowed einsums: rings of permutes that overlap
    with a matrix product. A ring replaces an all-gather of an operand or a
    reduce-scatter of the result, if that takes less time than the product.
    """
    users = users_of(computation)
    made = dict(computation)
    for product in [own for own in computation.values() if own.opcode == "dot"]:
        for name in dict.fromkeys(product.operands):
            gather = computation[name]
            if (
                gather.opcode == "all-gather"
                and len(users[name]) == 1
                and _is_hidden(known, computation, product, gather)
            ):
                made[name] = _permutes(
                    known, gather, computation[gather.operands[0]].result
                )
        reductions = [
            user for user in users[product.name] if user.opcode == "all-reduce"
        ]
        parts = [user for own in reductions for user in users[own.name]]
        if (
            len(users[product.name]) == len(parts) == 1
            and parts[0].opcode == "dynamic-slice"
        ):
            if _is_hidden(known, computation, product, reductions[0]):
                (part,) = parts
                ring = _permutes(known, reductions[0], part.result)
                made[part.name] = ring._replace(name=part.name, is_root=part.is_root)
                del made[reductions[0].name]
    return made


def _is_hidden(
    known: Rewritten, computation: Computation, product: Instruction, sent: Instruction
) -> bool:
    groups = known.groups(sent)
    dtype, shape = array_of(sent)
    size = groups[0].shape[1]
    if len(groups) != 1 or size <= 2 or dtype not in _BYTES:
        return False
    left, dims = (
        array_of(computation[product.operands[0]]).shape,
        _CONTRACTED.search(product.attributes),
    )
    added = (
        math.prod(left[int(dim)] for dim in dims[1].split(",") if dim) if dims else 0
    )
    operations = 2 * math.prod(array_of(product).shape) * added
    return operations * size > _HIDDEN * _BYTES[dtype] * math.prod(shape)


def _permutes(known: Rewritten, sent: Instruction, shard: str) -> Instruction:
    """The permutes that replace the collective `sent`, as a single
    `collective-permute`. It has a result of the HLO type `shard` for each permute. In a
    replica group of n devices, XLA makes two rings of opposite directions, with n + 1
    permutes in total. Only an all-gather over 4 devices has one ring, of 3 permutes.
    """
    rows = known.groups(sent)[0].tolist()
    size = len(rows[0])
    count = size - 1 if sent.opcode == "all-gather" and size == 4 else size + 1
    pairs = ",".join(
        f"{{{row[at - 1]},{row[at]}}}" for row in rows for at in range(size)
    )
    named = re.search(r", metadata=\{.*", sent.attributes)
    attributes = (
        f", channel_id=1, source_target_pairs={{{pairs}}}{named[0] if named else ''}"
    )
    return sent._replace(
        opcode="collective-permute",
        result=f"({', '.join([shard] * count)})",
        attributes=attributes,
    )


def narrowed(known: Rewritten, computation: Computation) -> Computation:
    """A copy of `computation` in which collectives send bfloat16 instead of float32, if
    only matrix products at the default precision read the results.
    """
    narrow = {name: own for name, own in computation.items() if id(own) in known.narrow}
    return computation | {
        name: own._replace(result=own.result.replace("f32[", "bf16["))
        for name, own in narrow.items()
    }


class Pass(NamedTuple):
    """A pass of a compiler over a partitioned program.

    - `name`: XLA's name for the pass.
    - `apply`: takes a module and one of its computations, and returns the computation
      as the pass leaves it.
    - `link`: the file of XLA that `apply` imitates.
    - `unsure`: the fraction of a changed collective's bytes that the compiler may send
      by another collective; 0 if no
        compiled program was found to differ.
    """

    name: str
    apply: Callable[[Rewritten, Computation], Computation]
    link: str
    unsure: float = 0.0


_TPU = (
    Pass(
        "schedule-aware-collective-cse",
        gathered_once,
        "xla/service/spmd/schedule_aware_collective_ops_cse.cc",
    ),
    Pass("windowed einsum", windowed, "xla/service/spmd/dot_handler.cc"),
    Pass("all-reduce-folder", folded, "xla/service/all_reduce_folder.cc"),
    Pass(
        "while-loop-all-reduce-code-motion",
        summed_after,
        "xla/service/while_loop_all_reduce_code_motion.cc",
    ),
    Pass("all-reduce-reassociate", added_once, "xla/service/all_reduce_reassociate.cc"),
    Pass(
        "tpu-all-reduce-scatter-fusion",
        ft.partial(scattered, is_tpu=True),
        "libtpu",
        unsure=1.0,
    ),
    Pass("all_gather_decomposer", summed_parts, "xla/service/all_gather_decomposer.cc"),
    Pass("bfloat16-propagation", narrowed, "xla/service/bfloat16_propagation.cc"),
)
# The passes that changed the compiled programs in `tests/data/hlo`.
_GPU = (
    Pass(
        "reduce-scatter-creator",
        ft.partial(scattered, is_tpu=False),
        "xla/service/reduce_scatter_creator.cc",
        unsure=1.0,
    ),
)
# XLA itself finishes programs for CPUs, so they have no passes here.
PASSES: Mapping[Platform, tuple[Pass, ...]] = {"tpu": _TPU, "gpu": _GPU, "cpu": ()}

# The paths of JAX's operations whose collectives the TPU's compiler chooses by rules
# that no pass here imitates.
_UNSURE = {
    re.compile(
        r"\b(sort|argsort|top_k|approx_top_k|argmax|argmin|cumsum|cumlogsumexp|cumprod|cummax|cummin)\b"
    ): (
        "the TPU's partitioner divides sorts, the largest values and sums along a"
        " dimension itself."
    ),
    re.compile(
        r"_roll_|\b(roll|rev)\b"
    ): "the TPU's partitioner rolls and reverses in another way.",
    re.compile(
        r"\bscatter-add\b"
    ): "the TPU's compiler adds to what is scattered before it partitions.",
}


def as_compiled(
    module: HloModule, platform: Platform, *, without: Sequence[str] = ()
) -> HloModule:
    """The module of one device after the passes of the platform's compiler, except
    those named in `without`.

    Each collective lists the passes that changed it, and the fraction of its bytes that
    the compiler may send in another way. For TPUs, the module must be partitioned
    without common subexpression elimination (`xla_disable_hlo_passes="cse"`), since
    this elimination merges more all-gathers than the TPU's compiler.
    """
    for one in PASSES[platform]:
        if one.name not in without:
            known = Rewritten(
                dataclasses.replace(module, computations=dict(module.computations))
            )
            made = known.module.computations
            for name in module.computations:
                made[name] = one.apply(known, made[name])
            module = _map_collectives(known.module, ft.partial(_marked, module, one))
    return _map_collectives(module, _unsure) if platform == "tpu" else module


def _map_collectives(
    module: HloModule, mark: Callable[[str, Instruction], Instruction]
) -> HloModule:
    """A copy of the module with `mark(name, collective)` in place of each collective of
    each computation `name`.
    """
    marked = {
        name: (
            own
            | {
                key: mark(name, made)
                for key, made in own.items()
                if made.opcode in KINDS
            }
        )
        for name, own in module.computations.items()
    }
    return dataclasses.replace(module, computations=marked)


def _marked(before: HloModule, one: Pass, name: str, own: Instruction) -> Instruction:
    """The collective `own` of the computation `name`, with the name of the pass `one`
    if the pass made or changed it. `before` is the module before the pass.
    """
    old = before.computations.get(name, {}).get(own.name)
    if old is not None and old[1:3] == own[1:3] and old.attributes == own.attributes:
        return own
    return own._replace(
        passes=(*own.passes, one.name), unsure=max(own.unsure, one.unsure)
    )


def _unsure(name: str, own: Instruction) -> Instruction:
    """The collective `own` of the computation `name`. If `_UNSURE` has its JAX
    operation, such as a sort or a roll, all bytes of the collective are marked as
    unsure.
    """
    why = next(
        (why for operations, why in _UNSURE.items() if operations.search(own.op_name)),
        None,
    )
    return own if why is None else own._replace(unsure=1.0, note=why)

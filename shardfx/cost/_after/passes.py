"""The passes that each platform's compiler runs after XLA's partitioner, and a module as these passes leave it."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ..._step import Platform
from .._collective import KINDS
from .._hlo_text import HloModule, Instruction, array_of
from .._live.narrow import narrow_values
from .._live.program import Uses, program_of
from .merge import (
    Computation,
    Details,
    carried,
    gathered_once,
    in_each,
    index_of,
    inlined,
    loops_of,
    renamed,
    root_of,
    users_of,
    with_operands,
    without_dead,
    without_equals,
)
from .reductions import added_once, always_scattered, folded, scattered, summed_parts


# If a product has more operations per byte, times the devices of a group, than this, it hides its communication. In 16
# programs for v5e, in bfloat16 and float32 and groups of 4, 8 and 16, the limit lies between 4,160 and 4,220. That is
# twice the quotient of the chip's operations per second and a link's bytes per second.
_HIDDEN = 4190
_BYTES = {"bf16": 2, "f16": 2, "f32": 4}
_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
# The operations that may stand between a gather and the product that reads it.
_MOVES = ("reshape", "transpose", "bitcast", "copy")


def windowed(module: HloModule) -> HloModule:
    """The module where each all-gather and reduce-scatter that a product can hide is a ring of permutes."""
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
    """The all-gather that an operand of a product comes from; `None` if it has other users."""
    while name in computation and len(users[name]) == 1:
        own = computation[name]
        if own.opcode == "all-gather":
            return own
        if own.opcode not in _MOVES:
            return None
        name = own.operands[0]
    return None


def _reduction(
    users: Mapping[str, list[Instruction]], product: Instruction
) -> tuple[Instruction, Instruction] | tuple[None, None]:
    """The all-reduce of a product and the slice of it that each device keeps; `None` twice if either has
    other users.
    """
    own = product
    while len(users[own.name]) == 1:
        (user,) = users[own.name]
        if own.opcode == "all-reduce":
            return (own, user) if user.opcode == "dynamic-slice" else (None, None)
        if user.opcode not in (*_MOVES, "all-reduce"):
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
    """A ring of permutes in the place of a collective. It sends all shards, and one more where two rings run in
    opposite directions.
    """
    rows = details.groups(sent)[0].tolist()
    size = len(rows[0])
    count = size - 1 if sent.opcode == "all-gather" and size == 4 else size + 1
    pairs = ",".join(f"{{{row[at - 1]},{row[at]}}}" for row in rows for at in range(size))
    named = re.search(r", metadata=\{.*", sent.attributes)
    attributes = f", channel_id=1, source_target_pairs={{{pairs}}}{named[0] if named else ''}"
    return sent._replace(opcode="collective-permute", result=f"({', '.join([shard] * count)})", attributes=attributes)


def summed_after(module: HloModule) -> HloModule:
    """The module where an all-reduce that a loop only accumulates is made once, of the accumulated sum,
    after the loop.
    """
    return in_each(module, _with_sums_after)


# Operations that only change the shape of a sum.
_FORMS = ("bitcast", "convert", "reshape", "transpose", "copy")


def _with_sums_after(module: HloModule, name: str, computation: Computation) -> Computation:
    for loop, body_name, body in loops_of(module, computation):
        found = {own.name: _buffers(body, own) for own in body.values() if own.opcode == "all-reduce"}
        moved = {name: indices for name, indices in found.items() if indices}
        read = users_of(computation)[loop.name]
        if not moved or loop.is_root or any(own.opcode != "get-tuple-element" for own in read):
            continue
        names = {name: body[name].operands[0] for name in moved}
        inner = {key: renamed(own, names) for key, own in body.items() if key not in moved}
        module.computations[body_name] = inner
        computation = _after(computation, loop, {at: body[name] for name, found in moved.items() for at in found}, body)
    return computation


def _after(computation: Computation, loop: Instruction, sums: dict[int, Instruction], body: Computation) -> Computation:
    outer: Computation = {}
    names: dict[str, str] = {}
    for name, own in computation.items():
        outer[name] = renamed(own, names)
        index = index_of(own)
        if index is not None and own.operands[0] == loop.name and index in sums:
            reduction = sums[index]
            shape = own.result.partition("[")[2]
            names[name] = f"{reduction.name}.after.{name}"
            outer[name] = own._replace(is_root=False)
            outer[names[name]] = with_operands(reduction, (name,))._replace(
                name=names[name], result=f"{reduction.result.partition('[')[0]}[{shape}", is_root=own.is_root
            )
    return outer


def _buffers(body: Computation, reduction: Instruction) -> tuple[int, ...]:
    """The indices of the loop-carried elements to which an all-reduce is added; none if anything else reads the
    all-reduce.
    """
    users, given, last = users_of(body), carried(body), root_of(body)
    found: list[int] = []
    waiting = [reduction.name] if len(reduction.operands) == 1 else []
    while waiting:
        value = waiting.pop()
        for user in users[value]:
            if user.opcode in _FORMS:
                waiting.append(user.name)
                continue
            other = [own for own in user.operands if own != value]
            if user.opcode != "add" or len(other) != 1:
                return ()
            index = _origin(body, other[0], given)
            if index is None or not _is_only_added(users, given, last, user, index):
                return ()
            found.append(index)
    return tuple(found)


def _origin(body: Computation, value: str, given: dict[str, int]) -> int | None:
    """The index of the loop-carried element that a value is a reshape or slice of; `None` if it is computed."""
    while value not in given:
        own = body[value]
        if own.opcode not in (*_FORMS, "dynamic-slice"):
            return None
        value = own.operands[0]
    return given[value]


def _is_only_added(
    users: dict[str, list[Instruction]], given: dict[str, int], last: Instruction, add: Instruction, index: int
) -> bool:
    """Whether only this addition reads a loop-carried element, and the loop carries the addition's result
    in its place.
    """
    waiting, ends = [add.name], False
    while waiting:
        value = waiting.pop()
        for user in users[value]:
            if user.name == last.name:
                ends = last.operands[index] == value and last.operands.count(value) == 1
                if not ends:
                    return False
            elif user.opcode in (*_FORMS, "dynamic-update-slice"):
                waiting.append(user.name)
            else:
                return False
    waiting = [name for name, at in given.items() if at == index]
    while waiting:
        for user in users[waiting.pop()]:
            if user.opcode in (*_FORMS, "dynamic-slice"):
                waiting.append(user.name)
            elif user.name != add.name and user.opcode != "dynamic-update-slice":
                return False
    return ends


def narrowed(module: HloModule) -> HloModule:
    """The module where collectives send float32 as bfloat16 if only products at the default precision read
    the result.
    """
    program = program_of(module)
    values = narrow_values(program)
    # An instruction in a computation with several callers is several operations.
    sent = [op for op in Uses(program).ops if op.opcode in KINDS]
    narrow = {id(op.instruction) for op in sent if values.issuperset(op.makes)}
    narrow -= {id(op.instruction) for op in sent if not values.issuperset(op.makes)}

    def kept(one: Instruction) -> Instruction:
        return one._replace(result=one.result.replace("f32[", "bf16[")) if id(one) in narrow else one

    return in_each(module, lambda _, name, own: {key: kept(one) for key, one in own.items()})


class Pass(NamedTuple):
    """A pass of a compiler over a partitioned program.

    **Arguments:**

    - `name`: XLA's name for it.
    - `apply`: returns a module as it is after the pass.
    - `link`: the file of XLA that it stands for.
    - `version`: the version of the compiler whose programs it was checked against.
    - `unsure`: the share of what it changes that the compiler may send otherwise, where it was found to differ.
    """

    name: str
    apply: Callable[[HloModule], HloModule]
    link: str
    version: str
    unsure: float = 0.0


class Doubt(NamedTuple):
    """Operations whose collectives the compiler chooses by rules that no pass here imitates.

    **Arguments:**

    - `operations`: matches the path of JAX's operations that a collective came from.
    - `why`: a sentence about the compiler's choice.
    """

    operations: re.Pattern[str]
    why: str


_READ, _LIBTPU = "jaxlib 0.10.2", "the libtpu that jaxlib 0.10.2 pins"
_CSE = "xla/service/spmd/schedule_aware_collective_ops_cse.cc"

_TPU = (
    Pass("call-inliner", inlined, "xla/service/call_inliner.cc", _LIBTPU),
    Pass("cse", without_equals, "xla/service/hlo_cse.cc", _LIBTPU),
    Pass("schedule-aware-collective-cse", gathered_once, _CSE, _LIBTPU),
    Pass("windowed einsum", windowed, "xla/service/spmd/dot_handler.cc", _LIBTPU),
    Pass("all-reduce-folder", folded, "xla/service/all_reduce_folder.cc", _LIBTPU),
    Pass(
        "while-loop-all-reduce-code-motion", summed_after, "xla/service/while_loop_all_reduce_code_motion.cc", _LIBTPU
    ),
    Pass("all-reduce-reassociate", added_once, "xla/service/all_reduce_reassociate.cc", _LIBTPU),
    Pass("dce", without_dead, "xla/hlo/transforms/simplifiers/hlo_dce.cc", _LIBTPU),
    Pass("tpu-all-reduce-scatter-fusion", scattered, "libtpu", _LIBTPU, unsure=1.0),
    Pass("all_gather_decomposer", summed_parts, "xla/service/all_gather_decomposer.cc", _LIBTPU),
    Pass("bfloat16-propagation", narrowed, "xla/service/bfloat16_propagation.cc", _LIBTPU),
)
# Found in the compiled programs in `tests/data/hlo`.
_GPU = (
    Pass("dce", without_dead, "xla/hlo/transforms/simplifiers/hlo_dce.cc", _READ),
    Pass("reduce-scatter-creator", always_scattered, "xla/service/reduce_scatter_creator.cc", _READ, unsure=1.0),
)
# XLA itself finishes programs for CPUs, so they have no passes here.
PASSES: Mapping[Platform, tuple[Pass, ...]] = {"tpu": _TPU, "gpu": _GPU, "cpu": ()}

_DOUBTS = (
    Doubt(
        re.compile(r"\b(sort|argsort|top_k|approx_top_k|argmax|argmin|cumsum|cumlogsumexp|cumprod|cummax|cummin)\b"),
        "the TPU's partitioner divides sorts, the largest values and sums along a dimension itself.",
    ),
    Doubt(re.compile(r"_roll_|\b(roll|rev)\b"), "the TPU's partitioner rolls and reverses in another way."),
    Doubt(re.compile(r"\bscatter-add\b"), "the TPU's compiler adds to what is scattered before it partitions."),
)


def as_compiled(module: HloModule, platform: Platform, *, without: Sequence[str] = ()) -> HloModule:
    """The program that a platform's compiler makes of a partitioned program, as far as its collectives go.

    **Arguments:**

    - `module`: the module of one device, as XLA's partitioner leaves it. For TPUs, without the common subexpression
        elimination after the partitioner (`xla_disable_hlo_passes="cse"`), since the TPU's compiler merges fewer
        gathers.
    - `platform`: the platform whose compiler finishes it.
    - `without`: names of passes to leave out.

    **Returns:**

    The module after all passes of the platform. Each collective names the passes that made it, and the share of its
    bytes that the compiler may send otherwise.
    """
    for one in PASSES[platform]:
        if one.name not in without:
            module = _marked(module, one.apply(module), one)
    return _doubted(module) if platform == "tpu" else module


def _marked(before: HloModule, after: HloModule, one: Pass) -> HloModule:
    """The module where each collective that a pass made or changed carries the pass's name."""

    def mark(old: Instruction | None, own: Instruction) -> Instruction:
        if old is not None and old[1:3] == own[1:3] and old.attributes == own.attributes:
            return own
        return own._replace(passes=(*own.passes, one.name), unsure=max(own.unsure, one.unsure))

    def marked(name: str, own: Computation) -> Computation:
        old = before.computations.get(name, {})
        found = [key for key, made in own.items() if made.opcode in KINDS and made is not old.get(key)]
        return own | {key: mark(old.get(key), own[key]) for key in found} if found else own

    return in_each(after, lambda _, name, own: marked(name, own))


def _doubted(module: HloModule) -> HloModule:
    """The module where each collective that comes from an operation in `_DOUBTS` is marked as unsure."""

    def mark(own: Instruction) -> Instruction:
        if own.opcode not in KINDS:
            return own
        found = next((doubt for doubt in _DOUBTS if doubt.operations.search(own.op_name)), None)
        return own if found is None else own._replace(unsure=1.0, note=found.why)

    return in_each(module, lambda _, name, own: {key: mark(made) for key, made in own.items()})

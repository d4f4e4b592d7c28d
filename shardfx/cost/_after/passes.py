"""The passes of each platform's compiler behind XLA's partitioner, and a module as they leave it."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ..._step import Platform
from .._collective import KINDS
from .._hlo_text import HloModule, Instruction
from .._live.narrow import narrow_values
from .._live.program import Uses, program_of
from .graph import Computation, in_each
from .loops import summed_after
from .merge import gathered_once, inlined, without_dead, without_equals
from .reductions import added_once, always_scattered, folded, scattered, summed_parts
from .windowed import windowed


def narrowed(module: HloModule) -> HloModule:
    """The module with float32 sent as bfloat16 where nothing but products at the default precision reads it."""
    program = program_of(module)
    values = narrow_values(program)
    # An instruction that runs in several places is several operations.
    sent = [op for op in Uses(program).ops if op.opcode in KINDS]
    narrow = {id(op.instruction) for op in sent if values.issuperset(op.makes)}
    narrow -= {id(op.instruction) for op in sent if not values.issuperset(op.makes)}

    def kept(one: Instruction) -> Instruction:
        return one._replace(result=one.result.replace("f32[", "bf16[")) if id(one) in narrow else one

    return in_each(module, lambda _, name, own: {key: kept(one) for key, one in own.items()})


class Pass(NamedTuple):
    """A pass of a compiler over a partitioned program.

    **Arguments:**

    - `name`: as XLA calls it.
    - `apply`: returns a module as it is after the pass.
    - `link`: the file of XLA that it stands for.
    - `version`: of the compiler whose programs it was checked against.
    - `unsure`: the share of what it changes that the compiler may send otherwise, where it was found to differ.
    """

    name: str
    apply: Callable[[HloModule], HloModule]
    link: str
    version: str
    unsure: float = 0.0


class Doubt(NamedTuple):
    """Operations that a compiler sends for in a way of its own, which no pass stands for.

    **Arguments:**

    - `operations`: matches the path of JAX's operations that a collective came from.
    - `why`: what the compiler does.
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
# As the compiled programs in `tests/data/hlo` show it.
_GPU = (
    Pass("dce", without_dead, "xla/hlo/transforms/simplifiers/hlo_dce.cc", _READ),
    Pass("reduce-scatter-creator", always_scattered, "xla/service/reduce_scatter_creator.cc", _READ, unsure=1.0),
)
# XLA itself finishes programs for CPUs.
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
    """The program that a platform's compiler makes of a partitioned one, as far as it sends something.

    **Arguments:**

    - `module`: of one device, as XLA's partitioner leaves it. For TPUs without the common subexpression elimination
        behind the partitioner (`xla_disable_hlo_passes="cse"`), as the TPU's compiler merges fewer gathers.
    - `platform`: whose compiler finishes it.
    - `without`: names of passes to leave out.

    **Returns:**

    The module after all passes of the platform. Each collective names the passes that made it, and says how much of it
    the compiler may send otherwise.
    """
    for one in PASSES[platform]:
        if one.name not in without:
            module = _marked(module, one.apply(module), one)
    return _doubted(module) if platform == "tpu" else module


def _marked(before: HloModule, after: HloModule, one: Pass) -> HloModule:
    """The module with the name of a pass on the collectives that it made or changed."""

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
    """The module with all of a collective in doubt that comes from operations which no pass stands for."""

    def mark(own: Instruction) -> Instruction:
        if own.opcode not in KINDS:
            return own
        found = next((doubt for doubt in _DOUBTS if doubt.operations.search(own.op_name)), None)
        return own if found is None else own._replace(unsure=1.0, note=found.why)

    return in_each(module, lambda _, name, own: {key: mark(made) for key, made in own.items()})

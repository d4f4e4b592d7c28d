"""The passes of each platform's compiler, and a module as they leave it."""

from collections.abc import Mapping, Sequence
from typing import Literal

from .._collective import KINDS
from .._hlo_text import HloModule, Instruction
from .cpu import PASSES as CPU
from .gpu import PASSES as GPU
from .graph import Computation, in_each
from .one_pass import Doubt, Pass
from .tpu import DOUBTS, PASSES as TPU


Platform = Literal["tpu", "gpu", "cpu"]
PASSES: Mapping[Platform, tuple[Pass, ...]] = {"tpu": TPU, "gpu": GPU, "cpu": CPU}


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
    return _doubted(module, DOUBTS) if platform == "tpu" else module


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


def _doubted(module: HloModule, doubts: Sequence[Doubt]) -> HloModule:
    """The module with all of a collective in doubt that comes from operations which no pass stands for."""

    def mark(own: Instruction) -> Instruction:
        if own.opcode not in KINDS:
            return own
        found = next((doubt for doubt in doubts if doubt.operations.search(own.op_name)), None)
        return own if found is None else own._replace(unsure=1.0, note=found.why)

    return in_each(module, lambda _, name, own: {key: mark(made) for key, made in own.items()})

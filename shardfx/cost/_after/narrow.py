"""The element types in which compilers send: bfloat16 before a TPU's products, and float32 for bfloat16 on CPUs."""

from .._collective import KINDS
from .._hlo_text import HloModule, Instruction
from .._live.narrow import narrow_values
from .._live.program import Uses, program_of
from .graph import in_each


def widened(module: HloModule) -> HloModule:
    """The module with bfloat16 sent as float32."""
    return in_each(module, lambda _, name, own: {key: _as(one, "bf16", "f32") for key, one in own.items()})


def narrowed(module: HloModule) -> HloModule:
    """The module with float32 sent as bfloat16 where nothing but products at the default precision reads it."""
    program = program_of(module)
    values = narrow_values(program)
    # An instruction that runs in several places is several operations.
    sent = [op for op in Uses(program).ops if op.opcode in KINDS]
    narrow = {id(op.instruction) for op in sent if values.issuperset(op.makes)}
    narrow -= {id(op.instruction) for op in sent if not values.issuperset(op.makes)}

    def kept(one: Instruction) -> Instruction:
        return _as(one, "f32", "bf16") if id(one) in narrow else one

    return in_each(module, lambda _, name, own: {key: kept(one) for key, one in own.items()})


def _as(own: Instruction, before: str, after: str) -> Instruction:
    if own.opcode not in KINDS or f"{before}[" not in own.result:
        return own
    return own._replace(result=own.result.replace(f"{before}[", f"{after}["))

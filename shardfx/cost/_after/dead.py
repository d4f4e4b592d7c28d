"""What is computed, or sent, and never used."""

from .._hlo_text import HloModule, Instruction
from .graph import Computation, in_each, root_of


# These act on something else than their results.
_ACTS = frozenset(
    "parameter send send-done recv recv-done infeed outfeed custom-call rng-get-and-update-state after-all "
    "conditional while call".split()
)


def without_dead(module: HloModule) -> HloModule:
    """The module without instructions whose results nothing needs."""
    return in_each(module, lambda _, name, own: _living(own))


def _living(computation: Computation) -> Computation:
    kept = {root_of(computation).name} | {own.name for own in computation.values() if _acts(own)}
    waiting = [*kept]
    while waiting:
        for operand in computation[waiting.pop()].operands:
            if operand in computation and operand not in kept:
                kept.add(operand)
                waiting.append(operand)
    return {name: own for name, own in computation.items() if name in kept}


def _acts(instruction: Instruction) -> bool:
    return instruction.opcode in _ACTS

"""A step whose memory is counted: partitioned once for its own shardings, and again for others."""

import dataclasses
import functools as ft
from collections.abc import Sequence
from typing import Any

from .. import chips
from .._step import Dims, Module, Platform, Step
from ._after import as_compiled
from ._hlo_text import HloModule, parse_hlo
from ._hlo_types import Array
from ._live import Held, held
from ._live.buffers import bytes_of
from ._live.program import OpenedProgram, program_of
from ._purpose import Taken, taken
from ._shardings import StepShardings, shardings_of


@dataclasses.dataclass(frozen=True, eq=False)
class Counted:
    """A step for a chip.

    **Arguments:**

    - `step`: the step, traced once.
    - `chip`: whose compiler and tiles count.
    - `function`: what was traced; `None` where it came traced.
    """

    step: Step
    chip: chips.Chip
    function: Any = None

    @property
    def platform(self) -> Platform:
        """Whose lowering is partitioned."""
        return "tpu" if self.chip.torus_dims > 0 else "gpu"

    @ft.cached_property
    def module(self) -> HloModule:
        """The program of one device."""
        return as_compiled(parse_hlo(self.step.partitioned(self.platform)), self.platform)

    @ft.cached_property
    def held(self) -> Held:
        """What one device holds."""
        return self.of(self.module)

    @ft.cached_property
    def shardings(self) -> StepShardings:
        """How every array lies, and where that comes from."""
        return shardings_of(self.step, self.platform)

    @ft.cached_property
    def _program(self) -> OpenedProgram:
        return program_of(self.module)

    @ft.cached_property
    def taken(self) -> tuple[Taken, ...]:
        """What the step takes, and what for."""
        return taken(self.step, self._program)

    @ft.cached_property
    def shards(self) -> tuple[tuple[int, ...], ...]:
        """The shape of each argument on one device."""
        return tuple(self._program.buffers[value].shape for value in self._program.entry.carried)

    def host_bytes(self, at: int) -> int:
        """What an argument takes of a device's share of host memory."""
        return bytes_of(Array(self.taken[at].dtype, self.shards[at]), self.chip.tile)

    def of_group(self, kind: str) -> tuple[int, ...]:
        """The numbers of the arguments of a group, "optimizer" for all its parts."""
        return tuple(at for at, one in enumerate(self.taken) if one.group.partition(":")[0] == kind)

    def of(self, module: HloModule, *, donated: Sequence[bool] | None = None, recomputes: bool = False) -> Held:
        """What one device holds while it runs the step's program, or another form of it."""
        ours = self.step.arguments
        donated = [one.donated for one in ours] if donated is None else donated
        on_host = [one.on_host for one in ours]
        is_tpu = self.platform == "tpu"
        given = {"tile": self.chip.tile, "tpu": is_tpu, "recomputes": recomputes}
        away = [one.on_host for one in self.step.parameters[1]]
        return held(module, donated=donated, on_host=on_host, results_on_host=away, **given)

    def written_as(self, module: Module) -> Held:
        """What one device holds where the step is another StableHLO module of the same arguments and results."""
        text = self.step.partitioned(self.platform, module=module)
        return self.of(as_compiled(parse_hlo(text), self.platform))

    def under(self, arguments: Sequence[Dims | None]) -> Held:
        """What one device holds where arguments lie otherwise; a result that one comes back as lies as it does."""
        results = [one.dims for one in self.step.parameters[1]]
        for one, dims in zip(self.taken, arguments, strict=True):
            if one.result is not None and results[one.result] is not None and dims is not None:
                results[one.result] = dims
        text = self.step.partitioned(self.platform, arguments=arguments, results=results)
        return self.of(as_compiled(parse_hlo(text), self.platform))

"""What the stages of ZeRO, with and without offload, would hold on each device: from plans alone."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from .. import chips
from .._ground.text import bytes_text, table
from .._plan import ShardPlan, follow
from .arguments import arguments_of
from .changes import held_bytes


@dataclasses.dataclass(frozen=True)
class ZeroRow:
    """Bytes of one combination on one device.

    **Arguments:**

    - `stage`: 0: nothing is cut further; 1: the optimizer's state; 2: the gradients too; 3: the parameters too.
    - `offload`: whether the optimizer's state lies in host memory.
    - `parameters`, `gradients`, `optimizer`: in the chip's memory.
    - `host_bytes`: in the host's.
    - `fits`: whether they fit together; activations are not counted.
    """

    stage: int
    offload: bool
    parameters: int
    gradients: int
    optimizer: int
    host_bytes: int
    fits: bool

    @property
    def bytes(self) -> int:
        """All that is in the chip's memory."""
        return self.parameters + self.gradients + self.optimizer


@dataclasses.dataclass(frozen=True)
class ZeroTable:
    """The stages of ZeRO with and without offload; made by [`shardfx.zero_table`][]. `str(...)` is a table."""

    rows: tuple[ZeroRow, ...]
    chip: chips.Chip

    def __str__(self) -> str:
        header = ("stage", "parameters", "gradients", "optimizer", "all", "host", "fits")
        cells = [
            (
                f"{f'ZeRO-{row.stage}' if row.stage else 'none'}{', offload' if row.offload else ''}",
                *map(bytes_text, (row.parameters, row.gradients, row.optimizer, row.bytes, row.host_bytes)),
                "yes" if row.fits else "no",
            )
            for row in self.rows
        ]
        usable = bytes_text(self.chip.usable_hbm_bytes_per_device)
        return "\n".join(
            [
                *table([header, *cells], right=set(header[1:-1])),
                f"Bytes per device; {self.chip.name} has {usable} for a program. Activations are not counted.",
            ]
        )


def zero_table(
    params: ShardPlan,
    init: Callable[..., Any],
    *,
    over: str | Iterable[str] = "data",
    chip: str | chips.Chip = "v5p",
) -> ZeroTable:
    """What the stages of ZeRO hold on each device, with and without the optimizer's state in host memory.

    **Arguments:**

    - `params`: the plan of the parameters before anything is cut over `over`.
    - `init`: what makes the optimizer's state of them, as in [`shardfx.follow`][].
    - `over`: the mesh axes over which ZeRO cuts.
    - `chip`: its name, or a [`shardfx.chips.Chip`][].

    **Returns:**

    A [`shardfx.ZeroTable`][]: stages 0 to 3, each without and with offload. Gradients have the parameters' dtypes.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import optax
        from shardfx import MeshSpec, PathRules, plan, zero_table

        w = {"w": jax.ShapeDtypeStruct((8192, 8192), jnp.float32)}
        whole = plan(w, MeshSpec({"data": 8}), paths=PathRules.parse(".*->replicate"))
        none, _, first, *_ = zero_table(whole, optax.adam(1e-3).init, chip="v5e").rows
        assert first.optimizer < none.optimizer / 7 and first.parameters == none.parameters
        ```
    """
    chip = chips.find(chip)
    axes = (over,) if isinstance(over, str) else tuple(over)
    cut = follow(_same, params, over=axes)
    rows = []
    for stage in range(4):
        ours = _bytes(cut if stage == 3 else params, chip)
        grads = _bytes(cut if stage >= 2 else params, chip)
        state = _bytes(follow(init, params, over=axes if stage else None), chip)
        for offload in (False, True):
            here, host = (0, state) if offload else (state, 0)
            fits = ours + grads + here <= chip.usable_hbm_bytes_per_device
            rows.append(ZeroRow(stage, offload, ours, grads, here, host, fits))
    return ZeroTable(tuple(rows), chip)


def _same(tree: Any) -> Any:
    return tree


def _bytes(plan: ShardPlan, chip: chips.Chip) -> int:
    given = arguments_of({"params": plan})
    return sum(held_bytes(leaf, given, chip) for leaf in given.leaves)

"""What one accelerator can hold, compute and send."""

import dataclasses
import re
from typing import Any

import jax.numpy as jnp

from .._ground.errors import ChipError


@dataclasses.dataclass(frozen=True)
class Chip:
    """What one accelerator can hold, compute and send.

    It is plain data: make your own, or `dataclasses.replace(chips.find("h100"), name="my h100", ...)`.

    **Arguments:**

    - `name`: such as "v5p".
    - `hbm_bytes`: nominal memory.
    - `usable_hbm_bytes`: what a program may fill; the rest the runtime keeps.
    - `hbm_bytes_per_second`: between memory and cores.
    - `flops_per_second`: pairs of a dtype's name and the peak of products in it; dense, without sparsity.
    - `link_bytes_per_second`: of one link, one way. Where a switch joins the chips: of all links of a chip, one way.
    - `torus_dims`: how many dimensions the network has, with two links in each; 0 where a switch joins the chips.
    - `island_chips`: how many chips that network joins at most.
    - `dcn_bytes_per_second`: a chip's share of its host's network, one way.
    - `devices_per_chip`: how many devices JAX shows for it.
    - `host_bytes`, `host_bytes_per_second`: a chip's share of its host's memory, and how fast it reads that; `None`
        where no source says.
    - `tile`: rows and columns of what it pads the last two dimensions of an array to; `None` where it pads nothing.
    - `kinds`: JAX's names for it (`device.device_kind`).
    - `sources`: pairs of a field and where its value is from, "*" for all fields that are not named. "secondary" is
        a source that is not the vendor's; "sources differ" names the other value.
    """

    name: str
    hbm_bytes: int
    usable_hbm_bytes: int
    hbm_bytes_per_second: float | int
    flops_per_second: tuple[tuple[str, float | int], ...]
    link_bytes_per_second: float | int
    torus_dims: int
    island_chips: int
    dcn_bytes_per_second: float | int
    devices_per_chip: int = 1
    host_bytes: int | None = None
    host_bytes_per_second: float | int | None = None
    tile: tuple[int, int] | None = None
    kinds: tuple[str, ...] = ()
    sources: tuple[tuple[str, str], ...] = ()

    def __post_init__(self):
        wrong = [
            name
            for name in ("hbm_bytes", "usable_hbm_bytes", "hbm_bytes_per_second", "island_chips", "devices_per_chip")
            if not getattr(self, name) > 0
        ]
        if wrong:
            raise ChipError(f"chip {self.name!r}: `{wrong[0]}` must be more than 0, not {getattr(self, wrong[0])}.")
        if self.usable_hbm_bytes > self.hbm_bytes:
            raise ChipError(
                f"chip {self.name!r}: {self.usable_hbm_bytes} usable bytes are more than it has ({self.hbm_bytes}); "
                "set `usable_hbm_bytes` to what is left beside the runtime."
            )

    @property
    def links(self) -> int:
        """How many links leave a chip; 1 where a switch joins the chips."""
        return 2 * self.torus_dims or 1

    @property
    def usable_hbm_bytes_per_device(self) -> int:
        """What a program may fill on one device of JAX's."""
        return self.usable_hbm_bytes // self.devices_per_chip

    def flops(self, dtype: object = "bfloat16") -> float | int:
        """Products and sums of one chip in a second, at their peak.

        **Arguments:**

        - `dtype`: of the operands. float16 counts as bfloat16, every kind of fp8 as "float8", of fp4 as "float4".

        **Raises:**

        `ChipError` for a dtype in which no peak is known.

        !!! Example

            ```python
            from shardfx import chips

            assert chips.find("v5p").flops("bfloat16") == 459e12
            ```
        """
        name = _dtype_name(dtype)
        known = dict(self.flops_per_second)
        if name not in known:
            raise ChipError(
                f"chip {self.name!r}: no peak is known for {name}; there are {', '.join(known)}. Add one with "
                f'`dataclasses.replace(chip, flops_per_second=(*chip.flops_per_second, ("{name}", ...)))`.'
            )
        return known[name]

    def source(self, field: str) -> str:
        """Where the value of a field is from; "" where nobody said. What `sources` names "*" is for all others."""
        told = dict(self.sources)
        return told.get(field, told.get("*", ""))


def _dtype_name(dtype: Any) -> str:
    name = dtype if isinstance(dtype, str) and dtype in ("float8", "float4") else jnp.dtype(dtype).name
    name = "bfloat16" if name == "float16" else name
    return re.sub(r"^float([48])_.*", r"float\1", name)


def gib(count: float | int) -> int:
    """So many GiB in bytes."""
    return int(count * 2**30)


def peaks(**teraflops: int) -> tuple[tuple[str, float | int], ...]:
    """Peaks by the names of dtypes."""
    return tuple((name, 1e12 * count) for name, count in teraflops.items())

"""From a name to a chip, and all of them as a table."""

import difflib
import re

from .._ground.errors import ChipError
from .._ground.text import bytes_text, table as _aligned
from ._chip import Chip
from ._gpus import GPUS
from ._tpus import TPUS


CHIPS: tuple[Chip, ...] = TPUS + GPUS
"""All chips that are known, TPUs first, from the oldest."""

# Names that people write, beside JAX's own.
_ALIASES = {
    "v5e": ("v5litepod", "v5lite", "v5 lite"),
    "v6e": ("v6lite", "trillium"),
    "v7x": ("v7", "7x", "tpu7x", "ironwood"),
    "a100": ("a100-80", "a100-80gb"),
    "a100-40": ("a100-40gb",),
    "h100": ("h100-80", "h100-sxm"),
    "h200": ("h200 141gb hbm3e", "h200-sxm"),  # as XLA's description of one says, for compiling without it
    "mi300x": ("instinct mi300x",),
}


def find(name: str | Chip) -> Chip:
    """The chip of a name.

    **Arguments:**

    - `name`: "v5p", "TPU v5 lite" (as JAX says it), "tpu:v5e:4x4" (a topology), "NVIDIA H200", "h100". A Chip is
        returned as it is, so that functions can take either.

    **Returns:**

    A [`shardfx.chips.Chip`][].

    **Raises:**

    `ChipError` for a name that is not known, with near ones.

    !!! Example

        ```python
        from shardfx import chips

        chip = chips.find("tpu:v5e:4x4")
        assert chip is chips.find("TPU v5 lite")
        assert chip.usable_hbm_bytes == int(15.75 * 2**30)  # of 16
        ```
    """
    if isinstance(name, Chip):
        return name
    known = {_plain(alias): chip for chip in CHIPS for alias in (chip.name, *chip.kinds, *_ALIASES.get(chip.name, ()))}
    asked = _plain(name)
    if asked not in known:
        near = difflib.get_close_matches(asked, known, n=3, cutoff=0.5)
        meant = f"did you mean {' or '.join(dict.fromkeys(known[one].name for one in near))}? " if near else ""
        raise ChipError(
            f"there is no chip {name!r:.80}; {meant}There are {', '.join(chip.name for chip in CHIPS)}. "
            "Make your own with `shardfx.chips.Chip(...)`."
        )
    return known[asked]


def table(chips: tuple[Chip, ...] | None = None) -> str:
    """The chips as a table for a person.

    **Arguments:**

    - `chips`: which; all if not given.

    **Returns:**

    A line per chip. Memory is usable and nominal, per chip; links count one way.

    !!! Example

        ```python
        from shardfx import chips

        assert "v5p" in chips.table() and "31.2 of 32.0 GiB" in chips.table()
        ```
    """
    header = ("chip", "memory", "HBM", "bf16", "links", "dcn", "devices", "island")
    rows = [_cells(chip) for chip in (CHIPS if chips is None else chips)]
    return "\n".join(_aligned([header, *rows], right=set(header[1:])))


def _cells(chip: Chip) -> tuple[str, ...]:
    nominal, usable = bytes_text(chip.hbm_bytes), bytes_text(chip.usable_hbm_bytes)
    bf16 = dict(chip.flops_per_second).get("bfloat16")
    return (
        chip.name,
        f"{usable.split()[0]} of {nominal}",
        f"{chip.hbm_bytes_per_second / 1e12:.2f} TB/s",
        "-" if bf16 is None else f"{bf16 / 1e12:,.0f} TFLOP/s",
        f"{chip.links} x {chip.link_bytes_per_second / 1e9:.0f} GB/s",
        f"{chip.dcn_bytes_per_second / 1e9:.2f} GB/s",
        str(chip.devices_per_chip),
        f"{chip.island_chips:,}",
    )


def _plain(name: str) -> str:
    """A name without its case, its vendor and its topology: "tpu:v5e:4x4" is "v5e", "NVIDIA H200" is "h200"."""
    told = re.sub(r"^(tpu|nvidia|amd)[\s:]+", "", name.strip().lower())
    return re.sub(r"[\s_-]+", " ", told.split(":")[0]).strip()

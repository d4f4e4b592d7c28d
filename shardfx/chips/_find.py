"""Functions that find chips and slices by their names, and a table of all chips."""

import difflib
import math
import re
from collections.abc import Iterable
from typing import NamedTuple

from .._ground.errors import ChipError, MeshError
from .._ground.misuse import called
from .._ground.text import bytes_text, plural, table as _aligned
from ._chip import Chip, near_cube
from ._tpus import GPUS, TPUS


CHIPS: tuple[Chip, ...] = TPUS + GPUS
"""All known chips. TPUs come first, from the oldest to the newest."""

# Names that users write, in addition to the values of `device.device_kind`.
_ALIASES = {
    "v5e": ("v5litepod", "v5lite", "v5 lite"),
    "v6e": ("v6lite", "trillium"),
    "v7x": ("v7", "7x", "tpu7x", "ironwood"),
    "a100": ("a100-80", "a100-80gb"),
    "a100-40": ("a100-40gb",),
    "h100": ("h100-80", "h100-sxm"),
    # The name in XLA's description of a chip, for compiling without it.
    "h200": (
        "h200 141gb hbm3e",
        "h200-sxm",
    ),
    "mi300x": ("instinct mi300x",),
}


# Names of slices of these chips have the number of cores, two per chip; other names
# have the number of chips.
_NAMED_BY_CORES = ("v2", "v3", "v4", "v5p")
_SLICE_NAME = re.compile(r"((?:\w+:)?[\w ]+):([1-9]\d{0,8}(?:x[1-9]\d{0,8})*)")
# The number of slices at the end of a name, as in "tpu:v5p:4x4x4*2".
_SLICE_COUNT = re.compile(r"\*[1-9]\d{0,8}$")
_CLOUD_NAME = re.compile(r"(?:tpu:)?(v\d\w*)-([1-9]\d{0,8})")


class Slice(NamedTuple):
    """A slice: its chip, and the number of chips along each dimension of its torus. A
    switch has one dimension.
    """

    __module__ = "shardfx.chips"

    chip: Chip
    extents: tuple[int, ...]

    @property
    def chips(self) -> int:
        """The number of chips in the slice."""
        return math.prod(self.extents)

    @property
    def devices(self) -> int:
        """The number of JAX devices in the slice."""
        return self.chips * self.chip.devices_per_chip

    @property
    def name(self) -> str:
        """The name of the slice, such as `tpu:v5e:4x4` or `h100:8`."""
        prefix = ""
        if self.chip.torus_dims:
            prefix = "tpu:"
        extents_text = "x".join(map(str, self.extents))
        return f"{prefix}{self.chip.name}:{extents_text}"


def _checked(parsed: Slice, text: str) -> Slice:
    """The slice `parsed` of the name `text`, unchanged. Raises `MeshError` for another
    number of dimensions than the chip's network has, and for more chips than a pod.
    """
    chip = parsed.chip
    dims = parsed.chip.torus_dims or 1
    extents = parsed.extents
    if len(extents) != dims:
        raise MeshError(
            f"slice {text!r:.60}: {chip.name} has {plural(dims, 'dimension')}, as in"
            f" {'x'.join('4' * dims)}, and this has {len(extents)}."
        )
    # The most chips along a dimension. A pod of two dimensions is a square; one of
    # three may have more chips along one dimension than along another.
    longest = math.isqrt(chip.island_chips) if dims == 2 else chip.island_chips
    if chip.torus_dims and (parsed.chips > chip.island_chips or max(extents) > longest):
        pod = f"{chip.island_chips:,} chips"
        if dims == 2:
            pod = f"{longest}x{longest}"
        raise MeshError(
            f"slice {text!r:.60} has {parsed.chips:,} chips, and a pod of {chip.name} is"
            f" {pod}; take several slices, as "
            f'`"{Slice(chip, near_cube(min(64, chip.island_chips), dims)).name}*2"`.'
        )
    return parsed


@called('find("v5e")')
def find(name: str | Chip) -> Chip:
    """The chip with a name such as "v5p", "TPU v5 lite" or "h100".

    **Arguments:**

    - `name`: the name of a chip ("v5p", "h100"), a value of `device.device_kind` ("TPU
      v5 lite", "NVIDIA H200"), or the name of a slice or of several ("tpu:v5e:4x4",
      "v5e-16", "gpu:h100:8*2"). A [`shardfx.chips.Chip`][] is returned unchanged.

    **Returns:**

    A [`shardfx.chips.Chip`][].

    **Raises:**

    `ChipError` for an unknown name; the message lists similar names. `MeshError` for a
    slice that does not exist.

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
    if not isinstance(name, str):
        raise ChipError(
            f'a chip is named by a text, not {name!r:.80}: write `chip="v5e"`, or the'
            ' slice `"v5e-8"` for eight of them.'
        )
    # Of several slices, "v5e:4x4*2", the name of one.
    one_slice = _SLICE_COUNT.sub("", name)
    if _CLOUD_NAME.fullmatch(one_slice) or _SLICE_NAME.fullmatch(one_slice):
        return parse_slice(one_slice).chip
    chips_by_name = {}
    for chip in CHIPS:
        for alias in (chip.name, *chip.kinds, *_ALIASES.get(chip.name, ())):
            chips_by_name[_plain(alias)] = chip
    plain_name = _plain(name)
    if plain_name in ("tpu", "gpu"):
        raise ChipError(
            f"{name!r} does not say which chip, and how many: write a slice, as"
            ' `"tpu:v5e:4x4"` or `"gpu:h100:8"`.'
        )
    if plain_name not in chips_by_name:
        near = difflib.get_close_matches(plain_name, chips_by_name, n=3, cutoff=0.5)
        near_chips = dict.fromkeys([chips_by_name[alias].name for alias in near])
        suggestion = ". "
        if near_chips:
            suggestion = f"; did you mean {' or '.join(near_chips)}? "
        raise ChipError(
            f"there is no chip {name!r:.80}{suggestion}There are"
            f" {', '.join(chip.name for chip in CHIPS)}. Make your own with"
            " `shardfx.chips.Chip(...)`."
        )
    return chips_by_name[plain_name]


def parse_slice(text: str) -> Slice:
    """Parses the name of a slice, such as "tpu:v5p:8x8x8" or "v5e-8", into its chip and
    extents.

    **Arguments:**

    - `text`: the chip's name and the number of chips along each dimension ("v5e:4x4");
      or a cloud provider's name of the slice, with the number of chips ("v5e-8") or of
      cores ("v4-32").

    **Returns:**

    A [`shardfx.chips.Slice`][].

    **Raises:**

    `MeshError` for text that is no name of a slice, and for a slice with more chips
    than a pod, or with more or fewer dimensions than the chip's network. `ChipError`
    for an unknown chip.

    !!! Example

        ```python
        from shardfx import chips

        assert chips.parse_slice("tpu:v5p:4x4x8").devices == 128
        assert chips.parse_slice("v4-32").extents == (2, 2, 4)
        ```
    """
    if not isinstance(text, str):
        raise MeshError(
            f"a slice is named by a text, not {text!r:.80}: write `tpu:v5p:4x4x4`, or"
            " as clouds do, `v5e-16`."
        )
    if (match := _CLOUD_NAME.fullmatch(text)) is not None:
        chip = find(match[1])
        chip_count = int(match[2])
        if chip.name in _NAMED_BY_CORES:
            core_count = chip_count
            if core_count % 2:
                raise MeshError(
                    f"slice {text!r}: {chip.name} has 2 cores a chip, and {core_count}"
                    " cores are no whole chips."
                )
            chip_count = core_count // 2
        extents = near_cube(chip_count, chip.torus_dims or 1)
        return _checked(Slice(chip, extents), text)
    if (match := _SLICE_NAME.fullmatch(text)) is None:
        raise MeshError(
            f"{text!r:.80} is no slice; write it as `tpu:v5p:4x4x4`, or as clouds do:"
            " `v5e-16` has 16 chips."
        )
    extents = tuple(map(int, match[2].split("x")))
    return _checked(Slice(find(match[1]), extents), text)


def table(
    chips: Chip | str | Iterable[Chip | str] | None = None,
    *,
    width: int | None = None,
) -> str:
    """A text table of chips, with their memory, bandwidth and arithmetic.

    **Arguments:**

    - `chips`: the chips to list, or their names; all by default.
    - `width`: the largest length of a line. If the table is wider, columns are left
      out, starting with the last.

    **Returns:**

    A table with one line per chip: usable and nominal memory per chip, and the
    bandwidth of links in one direction.

    !!! Example

        ```python
        from shardfx import chips

        assert "v5p" in chips.table() and "31.2 of 32.0 GiB" in chips.table()
        ```
    """
    header = ("chip", "memory", "HBM", "bf16", "links", "dcn", "devices", "island")
    rows: list[tuple[str, ...]] = [header]
    for chip in _listed(chips):
        memory = (
            f"{bytes_text(chip.usable_hbm_bytes).split()[0]} of"
            f" {bytes_text(chip.hbm_bytes)}"
        )
        bf16 = dict(chip.flops_per_second).get("bfloat16")
        speeds = (
            f"{chip.hbm_bytes_per_second / 1e12:.2f} TB/s",
            f"{bf16 / 1e12:,.0f} TFLOP/s" if bf16 else "-",
        )
        links = f"{chip.links} x {chip.link_bytes_per_second / 1e9:.0f} GB/s"
        dcn = f"{chip.dcn_bytes_per_second / 1e9:.2f} GB/s"
        rows.append(
            (
                chip.name,
                memory,
                *speeds,
                links,
                dcn,
                str(chip.devices_per_chip),
                f"{chip.island_chips:,}",
            )
        )
    # These columns are left out first, in this order, where the table is too wide.
    spare = ("island", "devices", "dcn", "links")
    return "\n".join(_aligned(rows, right=set(header[1:]), width=width, spare=spare))


def _listed(chips: Chip | str | Iterable[Chip | str] | None) -> tuple[Chip, ...]:
    """The chips that are given by themselves or by their names; all for `None`."""
    if chips is None:
        return CHIPS
    if isinstance(chips, Chip | str) or not isinstance(chips, Iterable):
        chips = (chips,)
    return tuple(map(find, chips))


def _plain(name: str) -> str:
    """A chip's name in lower case without vendor and extents: "tpu:v5e:4x4" is "v5e",
    "NVIDIA H200" is "h200".
    """
    bare = re.sub(r"^(tpu|gpu|nvidia|amd)[\s:]+", "", name.strip().lower())
    return re.sub(r"[\s_-]+", " ", bare.split(":")[0]).strip()

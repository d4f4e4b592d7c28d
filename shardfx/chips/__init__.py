"""Accelerators as data: memory, arithmetic and links of each, with the source of every
number, and the links that a collective uses.

The room may import `_ground`, and from `topology` the function that says which
dimensions of a slice are rings. It never uses a device. All values are per chip, as
vendors publish them. JAX shows one chip of TPU v2, v3 and v7x as two devices;
`Chip.devices_per_chip` is this number.
"""

from ._chip import Chip as Chip
from ._find import (
    CHIPS as CHIPS,
    Slice as Slice,
    find as find,
    parse_slice as parse_slice,
    table as table,
)

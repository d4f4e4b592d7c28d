"""Accelerators as data: memory, arithmetic and links of each, with the source of every number.

It may import the ground, and from `topology` which dimensions of a slice are rings. It never uses a device. Values are
per chip, as vendors publish them; if JAX shows a chip as several devices (two cores of a TPU v2, v3 or 7x),
`devices_per_chip` has the number.
"""

from ._chip import Chip as Chip
from ._find import CHIPS as CHIPS, Slice as Slice, find as find, parse_slice as parse_slice, table as table

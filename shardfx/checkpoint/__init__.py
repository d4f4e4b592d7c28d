"""Checkpoints, read and written shard by shard: safetensors, Orbax, zarr, eformer, T5X.

This room may import `_plan` and the rooms below it. It never trusts a file: sizes and
names are checked before the bytes of an array are read.
"""

from ._entry import (
    ArrayEntry as ArrayEntry,
    FileArray as FileArray,
    ListedArray as ListedArray,
    StoreArray as StoreArray,
)
from ._formats import read_index as read_index, structs as structs
from ._index import Index as Index
from ._left_over import LeftOver as LeftOver, left_over as left_over
from ._load import load as load
from ._manager import Manager as Manager
from ._plan_reads import (
    ProcessReads as ProcessReads,
    ReadPlan as ReadPlan,
    plan_reads as plan_reads,
)
from ._save import save as save
from ._saved_plan import saved_plan as saved_plan

"""Checkpoints, read and written shard by shard: safetensors, Orbax, zarr, eformer.

It may import `_plan` and what is below it. It never trusts a file: sizes, names and claims are checked before a byte is
read or an array is made.
"""

from ._entry import (
    ArrayEntry as ArrayEntry,
    FileArray as FileArray,
    ListedArray as ListedArray,
    StoreArray as StoreArray,
)
from ._index import Index as Index, read_index as read_index, structs as structs
from ._load import load as load
from ._manager import Manager as Manager
from ._reads import ProcessReads as ProcessReads, ReadPlan as ReadPlan, plan_reads as plan_reads
from ._save import save as save, saved_plan as saved_plan
from ._staging import LeftOver as LeftOver, left_over as left_over

"""The part of an array, a batch or a mesh that each process owns, as integers.

It may import `_plan` and the rooms below `_plan`. It never moves an array between
processes; `global_batch` makes one array of the parts that the processes have.
"""

from ._batch import global_batch as global_batch
from ._chunk import (
    DataLayout as DataLayout,
    LocalChunk as LocalChunk,
    data_layout as data_layout,
    local_chunk as local_chunk,
    owned as owned,
    replica_id as replica_id,
    shard_id as shard_id,
)
from ._grid import (
    HostGrid as HostGrid,
    grid_of as grid_of,
    regular_grid as regular_grid,
)
from ._same import assert_same_plan as assert_same_plan

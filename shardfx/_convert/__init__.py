"""Maps from the leaves of one tree to the leaves of another, and the strided copies that carry them out.

The folder may import the ground values. The folder never touches a file or a device, and never chooses a sharding: the
folders that read, write and move arrays call it for pieces, and carry the pieces out.

The terms of this folder: a map makes the leaves of its target from the leaves of its source. A piece is a strided copy:
a nested loop that copies elements of one source array to one target array. A factor is one of these loops. A box is a
rectangular part of an array: a start and a stop for each dimension. A path pattern is a path with placeholders, such as
`{i}` in `layers/{i}/weight`.
"""

from .apply import StridedCopy, gathered, is_dense, scattered, strided_copy, transposed
from .binding import structs_of, tree_structs
from .evaluate import cast, leaf_made
from .expression import From
from .patterns import near_names, pattern, sum_of
from .pieces import (
    NOWHERE,
    Arithmetic,
    Factor,
    Made,
    Piece,
    Scale,
    Struct,
    Value,
    along,
    changed,
    dense,
    dtypes_of,
    extended,
    from_start,
    hull,
    is_only,
    names_of,
    once,
    rows,
    shifted,
    simplified,
    swapped,
    within,
)
from .tree_map import TreeMap, bound, bound_before
from .values import (
    Read,
    StridedBox,
    as_bits,
    box_view,
    chunks,
    constant,
    fill,
    scale_box,
    source_view,
    strided_boxes,
    strides_of,
    target_view,
    write,
)

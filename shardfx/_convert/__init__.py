"""Maps from the leaves of one tree to the leaves of another, and the strided copies
that carry them out.

The folder may import the ground values. The folder never touches a file or a device,
and never chooses a sharding: the folders that read, write and move arrays call it for
pieces, and carry the pieces out.

A map makes the leaves of its target from the leaves of its source. The docstring of
`pieces.py` explains pieces, and that of `patterns.py` path patterns.
"""

from .alike import rows_of_alike
from .apply import StridedCopy, gathered, is_dense, scattered, strided_copy, transposed
from .binding import structs_of, tree_structs
from .columns import AlikeParts, AlikePieces, in_columns, in_parts, read_paths
from .expression import From, NamedSizes
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
    changed,
    dense,
    dtypes_of,
    extended,
    from_start,
    hull,
    is_only,
    iterations,
    names_of,
    once,
    shifted,
    simplified,
    swapped,
    whole,
    within,
)
from .routes import (
    NO_NUMBERS,
    NumberCopies,
    copied_from,
    number_copies,
    number_paths,
    target_leaves,
)
from .shape_operations import cast, leaf_made
from .tree_map import TreeMap, bound, check_map, with_sizes, without_rest
from .values import (
    Read,
    StridedBox,
    as_bits,
    box_view,
    chunks,
    constant,
    fill,
    offset_of,
    scale_box,
    source_view,
    strided_boxes,
    strides_of,
    target_view,
    write,
)

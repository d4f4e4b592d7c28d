"""`TreeMap`: how the leaves of one tree are made of another tree's leaves, as a value, and the same as pieces of
arrays.

It may import the ground values. It never touches a file or a device, and never chooses a sharding: the rooms that read,
write and move arrays ask it for pieces and carry them out.
"""

from .applied import PieceForm, form_of, is_dense, ordered, put, taken
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
    Landing,
    Read,
    as_bits,
    chunks,
    constant,
    fill,
    landings,
    scale_box,
    seen,
    source_view,
    strides_of,
    target_view,
    write,
)

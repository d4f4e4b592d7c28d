"""How the leaves of one tree are made of another's: `TreeMap`, a value, and its form as pieces of arrays.

It may import the ground values. It never touches a file or a device, and it never says where an array shall lie: what
reads, writes and moves asks it for pieces, and carries them out.
"""

from .binding import near_names as near_names, structs_of as structs_of, tree_structs as tree_structs
from .expression import From as From
from .pieces import Made as Made, Piece as Piece, Struct as Struct
from .tree_map import TreeMap as TreeMap, bound as bound, bound_before as bound_before

"""Arrays assembled from shards of other arrays: on other devices, or as another tree's arrays.

It may import the ground values, `_convert`, and its siblings in this room. It never makes a whole array unless a
sharding asks for one.

A *piece* (`_convert.Piece`) is a part of an array that equals a part of another array. A *cut* is the part of a piece
that one device takes from one shard. An *assembly* is the plan for one array: its cuts, and the way to carry them out.
`exchange` and `carry` do so by programs over the devices of both sides, `host` by NumPy copies in this process.
"""

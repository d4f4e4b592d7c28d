"""Arrays assembled from shards of other arrays: on other devices, or as another tree's
arrays.

It may import `_ground`, `_convert`, and its siblings in this room. It never makes a
whole array unless a sharding asks for one.

The *target* is the array to assemble, and its *sources* are the arrays that are read. A
*piece* (`_convert.Piece`) is a part of the target that equals a part of a source.
`shard_parts` divides pieces into parts of single shards, each with the device that
sends it and the device that receives it. `assembly` makes the plan for one array.
`relay` lets what several devices of a TPU slice need from other slices enter it once.
`run` assembles the array by programs on the devices, which `exchange` and `programs`
make, and `host` by NumPy copies in this process, which `copies` lists.
"""

"""Arrays assembled from shards of other arrays: on other devices, or as another tree's arrays.

It may import the ground values, `_convert`, and its siblings in this room. It never makes a whole array unless a
sharding asks for one. `cuts` is integers only; `exchange` and `host` are the two ways to carry out cuts.
"""

"""Moves to another tree: arrays that are put together from parts of others, on the devices of a plan.

It may import the ground values, `_convert`, and its siblings in this room. It never makes a whole array of either tree
where no plan asks for one. `cuts` is integers only; `copies` and `exchange` are the two ways to carry them out.
"""

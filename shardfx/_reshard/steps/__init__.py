"""Moves between shardings over the same devices: a short path of collectives, found by search and compiled by XLA.

It may import the ground values and `small_floats`. It never reads a plan: shardings come in, and arrays go out.
`layout`, `factors`, `lower_bound`, `path` and `search` are integers only; `program`, `live` and `primitive` are JAX.
"""

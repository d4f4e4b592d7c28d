"""Moves between shardings over the same devices: a short path of collectives, found by search and compiled by XLA.

It may import the ground values. It never reads a plan: shardings come in, and arrays go out. `ends`, `program` and
`in_parts` are JAX; the rest is integers only. `search` begins with a page on the search for paths and its terms.
"""

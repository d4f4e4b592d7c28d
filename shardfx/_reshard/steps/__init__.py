"""Moves between shardings over the same devices: a short path of collectives, found by search and compiled by XLA.

It may import the ground values. It never reads a plan: shardings come in, and arrays go out.
`ends`, `program` and `in_parts` are JAX; all else is integers only. `search` begins with a page on how paths
are found and with the words that are used.
"""

"""Moves between shardings over the same devices: a short path of collectives, found by search and compiled by XLA.

This folder may import `_ground`. It never reads a plan: it takes shardings and returns arrays.
`program`, `in_parts` and the end of `redistribute` use JAX arrays; the other files compute with integers. The
docstring of `search` explains how paths are found and defines the terms.
"""

"""Moves between shardings over the same devices: a short path of collectives, found by
search and compiled by XLA.

This folder may import `_ground`, `chips`, and `shardings` beside it. It never reads a
plan: it takes shardings and returns arrays. `programs`, `chunks` and `groups` take
arrays; the other files compute with integers. The docstring of `layout` defines the
terms, and the docstring of `search` explains how paths are found. Where a torus
connects the devices, `times` says which path is the fastest.
"""

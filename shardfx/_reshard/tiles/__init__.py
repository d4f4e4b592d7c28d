"""Moves to other devices, where no one program runs: each receiver takes its tiles from the shards that have them.

It may import the ground values and `small_floats`. It never reads a plan: shardings come in, and arrays go out.
`tile_map` is integers only; `host_copies`, `device_copies` and `rounds` are the three ways to carry a tile map out.
"""

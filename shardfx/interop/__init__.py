"""The conventions of other libraries, one file per library. Each is imported by its own name, such as
`shardfx.interop.flax`.

It may import plans, presets, and the rooms below them. It never imports a library before a function needs it.
"""

"""The conventions of other libraries, one file per library. Each is imported by its own name, such as
`shardfx.interop.flax`.

It may import the plans, the presets, and what is below them. It never imports the library that it stands for before a
function that needs it is called.
"""

"""Other libraries' conventions, one file per library; each is imported by its own name, `shardfx.interop.flax`.

It may import the presets, the rules and the ground values. It never imports the library that it stands for before a
function that needs it is called.
"""

"""The sharding conventions of other libraries. Each library has a module, such as
`shardfx.interop.flax`, that users import by its name.

It may import plans, presets, and the rooms below them. It never imports a library
before a function needs it.
"""

"""What XLA's partitioner computes wrongly: a bank of layers and random programs under
random layouts, beside one device; what fails made small and grouped by cause; and what
`shardfx.testing.verify` says of all of them, and of mutated programs.
"""

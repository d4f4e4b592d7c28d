"""A program for each fault of `shardfx/_step/faults`, in plain JAX.

`python -m tests.step.repros.residual_order` prints how far each case is from one
device, and exits with 1 if one is wrong. `python -m tests.step.repros` runs all.
"""

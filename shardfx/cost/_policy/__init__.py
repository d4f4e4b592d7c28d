"""The choice of what the backward pass of a loss keeps, computes again or offloads.

`regions.py` divides a traced loss into the stretches that are checkpointed alone,
`work.py` and `recomputation.py` say what their values cost, `choice.py` chooses with
the compiler as the judge, and `policy.py` has the result and applies it.

The folder may import what its room may, and never runs a loss.
"""

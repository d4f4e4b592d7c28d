"""The choice of what the backward pass of a loss keeps, computes again or offloads.

`regions.py` divides a traced loss into the stretches that are checkpointed alone,
`work.py` and `recomputation.py` say what the values of a stretch cost, `choice.py`
chooses with `fit` as the judge, and `policy.py` has the result and applies it.
"""

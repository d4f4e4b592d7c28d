"""The shapes of published models by name, and rules for them: `tree("llama3-405b")`, `rules_for(..., "fsdp_tp")`.

It may import the rules, the ground values and the rules of its room. It never allocates: every leaf is a
ShapeDtypeStruct. A model is one row of numbers in `table.txt`. The rows of its family in `presets.maps` give the tree
and the rules (`_named.py`).
"""

from ._named import config as config, names as names, rules_for as rules_for, strategies as strategies, tree as tree

"""The shapes of published models by name, and rules for them: `tree("llama3-405b")`, `rules_for(..., "fsdp_tp")`.

It may import the rules, the ground values and the rules of its room. It never allocates: every leaf is a
ShapeDtypeStruct. A model is one row of numbers in `_table.py`; a family is one function that makes the tree from
them (`_decoders.py`, `_llama4.py`, `_others.py`), and one that makes the rules (`_rules.py`).
"""

from ._named import config as config, names as names, tree as tree
from ._rules import rules_for as rules_for, strategies as strategies

"""The shapes of published models by name, and rules for them: `tree("llama3-405b")`,
`rules_for(..., "fsdp_tp")`.

It may import `_rules`, `_ground`, `_convert` and the rest of `presets`. It never
allocates: every leaf is a ShapeDtypeStruct. A model is one row of numbers in
`table.txt`. `_named.py` makes its tree and its rules from that row and from the rows of
the model's family in `presets.maps`.
"""

from ._named import (
    config as config,
    names as names,
    rules_for as rules_for,
    strategies as strategies,
    tree as tree,
)

"""eformer: what its partition constraints read off specs."""

from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from .._ground.errors import SpecError
from .._ground.spec import entries_of, entry_axes


def axis_names_of(specs: Any) -> tuple[str, ...]:
    """The mesh axes that a tree of specs uses, each once, in the order of first appearance.

    **Arguments:**

    - `specs`: a tree whose leaves are PartitionSpecs or NamedShardings; `None` has no axes.

    **Returns:**

    A tuple of mesh axis names: the same on every process, whatever PYTHONHASHSEED is.

    **Raises:**

    `SpecError` for any other leaf, and for an entry of a spec that is none.

    !!! Example

        ```python
        from jax.sharding import PartitionSpec as P
        from shardfx.interop.eformer import axis_names_of

        assert axis_names_of({"a": P("data"), "b": P(None, ("tensor", "data"))}) == (
            "data",
            "tensor",
        )
        ```
    """
    return tuple(dict.fromkeys(_axes_in(specs)))


def _axes_in(specs: Any) -> Iterator[str]:
    for leaf in jax.tree.leaves(specs):
        spec = leaf.spec if isinstance(leaf, NamedSharding) else leaf
        if not isinstance(spec, PartitionSpec):
            raise SpecError(f"a tree of specs holds {leaf!r}, which is neither a PartitionSpec nor a NamedSharding.")
        for entry in entries_of(spec):
            yield from entry_axes(entry)

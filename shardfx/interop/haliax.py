"""The axis names that haliax's arrays carry as names for `plan`."""

from typing import Any

import jax
from jaxtyping import PyTree

from .._plan import is_named_array


def names_of(tree: PyTree, *, default: tuple[object, ...] | None = None) -> PyTree:
    """The names of the axes of haliax's `NamedArray`s, as a tree for `plan(tree, mesh,
    names=...)`. A haliax axis mapping is AxisRules by
    [`shardfx.interop.levanter.rules_of`][].

    **Arguments:**

    - `tree`: haliax modules, or any tree with `NamedArray`s, of arrays or of structs as
      from `equinox.filter_eval_shape`.
    - `default`: the value for arrays without names: `()` replicates them, `None` leaves
      them to path rules.

    **Returns:**

    `tree` with a tuple of names in place of each `NamedArray`, and `default` in place
    of each other leaf.

    !!! Example

        ```python
        import jax.numpy as jnp
        from shardfx import plan
        from shardfx.interop import haliax, levanter


        def planned(module, mesh, mapping):
            names = haliax.names_of(module, default=())
            return plan(module, mesh, names=names, axes=levanter.rules_of(mapping))


        assert haliax.names_of({"scale": jnp.ones(8)}, default=()) == {"scale": ()}
        ```
    """

    def names(node: Any) -> tuple[object, ...] | None:
        if is_named_array(type(node)):
            return tuple(axis.name for axis in node.axes)
        return default

    return jax.tree.map(names, tree, is_leaf=lambda node: is_named_array(type(node)))

"""`field`: declares the logical names of the arrays in a field of an Equinox module."""

import difflib
from collections.abc import Iterable
from typing import Any

import equinox as eqx

from .._ground.errors import SpecError
from .._ground.tree import METADATA


def field(
    *others: object,
    names: tuple[object, ...] | None = None,
    stacked: tuple[object, ...] = (),
    **kwargs: Any,
) -> Any:
    """Returns `equinox.field(...)` for an attribute whose arrays have logical names.

    **Arguments:**

    - `names`: the logical names of the attribute's dimensions, one for each, as in
      [`shardfx.resolve`][]. `...` stands for all dimensions without a name, which are
      not sharded; `()` means that no dimension is sharded. If the attribute is itself a
      tree, the names apply to each array in it that declares no names of its own.
    - `stacked`: names of the leading dimensions that `jax.vmap` adds where layers are
      stacked. They are prepended to the names of every array below this attribute.
      Without them, an array with a stacked dimension is an error.
    - `kwargs`: passed on to `equinox.field`.

    **Returns:**

    A dataclass field. [`shardfx.plan`][] reads the names if its argument `axes` is
    given.

    **Raises:**

    `SpecError` for a string where a tuple of names is expected.

    !!! Example

        ```python
        import equinox as eqx
        import jax
        import shardfx
        from jax.sharding import PartitionSpec as P
        from shardfx import AxisRules, MeshSpec

        class Dense(eqx.Module):
            weight: jax.Array = shardfx.field(names=("mlp", "embed"))
            bias: jax.Array = shardfx.field(names=("mlp",))

        class Model(eqx.Module):
            layers: Dense = shardfx.field(stacked=("layers",))

        model = Model(Dense(jax.numpy.ones((12, 64, 16)), jax.numpy.ones((12, 64))))
        rules = AxisRules([("mlp", "tensor"), ("embed", "fsdp"), ("layers", None)])
        made = shardfx.plan(model, MeshSpec({"fsdp": 2, "tensor": 4}), axes=rules)
        assert made["layers/weight"].spec == P(None, "tensor", "fsdp")
        ```
    """
    if others:
        raise SpecError(
            f"`field` takes the names by their argument: `field(names={others!r})`."
        )
    if not isinstance(stacked, Iterable):
        raise SpecError(
            f"`field(stacked={stacked!r:.40})`: give a tuple of names, such as"
            ' `stacked=("layers",)`, or leave it out.'
        )
    for what, value in (("names", names), ("stacked", stacked)):
        if isinstance(value, str):
            raise SpecError(
                f"`field({what}={value!r})`: give a tuple, `{what}=({value!r},)`; a"
                " string is one name."
            )
    for name in difflib.get_close_matches("names", kwargs, n=1):
        raise SpecError(f"`field` has no argument `{name}`; write `field(names=...)`.")
    metadata = {**kwargs.pop("metadata", {}), METADATA: (names, tuple(stacked))}
    return eqx.field(metadata=metadata, **kwargs)

"""Flax's sharding metadata as names for `plan`, and Flax's rules as AxisRules with the
same meaning.
"""

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx
from flax.core import meta
from flax.linen.spmd import LogicallyPartitioned
from flax.nnx.bridge import NNXMeta
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from .._ground.errors import SpecError
from .._ground.spec import entries_of
from .._rules import AxisRules, RulesLike
from ..topology import MeshSpec


AnyRules = AxisRules | RulesLike | None


def names_of(tree: PyTree, *, default: tuple[object, ...] | None = None) -> PyTree:
    """The logical names of the arrays in Flax's boxes and variables, as a tree for
    `plan(tree, mesh, names=...)`.

    **Arguments:**

    - `tree`: linen variables with `nn.Partitioned` or `nn.LogicallyPartitioned` boxes
      (from `jax.eval_shape` or with arrays), or with the boxes that
      `nnx.bridge.to_linen` makes, or an `nnx.State`.
    - `default`: the value for arrays without names: `()` replicates them, `None` leaves
      them to path rules.

    **Returns:**

    `tree` with a tuple of names, or `default`, in place of each box, variable and plain
    array. As `names=`, it fits both `plan(tree, ...)` and `plan(unboxed(tree), ...)`;
    see [`shardfx.interop.flax.unboxed`][].

    !!! Example

        ```python
        import flax.linen as nn
        import jax
        from jax.sharding import PartitionSpec as P
        from shardfx import AxisRules, MeshSpec, plan
        from shardfx.interop import flax as interop

        init = nn.with_logical_partitioning(nn.initializers.zeros, ("embed", "mlp"))
        layer = nn.Dense(64, kernel_init=init)
        boxed = jax.eval_shape(layer.init, jax.random.key(0), jax.numpy.ones((2, 16)))
        rules = AxisRules([("embed", "fsdp"), ("mlp", "tensor")])
        mesh, names = MeshSpec({"fsdp": 4, "tensor": 2}), interop.names_of(boxed, default=())
        made = plan(interop.unboxed(boxed), mesh, names=names, axes=rules)
        assert made["params/kernel"].spec == P("fsdp", "tensor")
        ```
    """

    def names(node: object) -> tuple[object, ...] | None:
        out_sharding = _metadata(node).get("out_sharding")
        if out_sharding is None:
            return default
        return _names(out_sharding)

    return jax.tree.map(names, tree, is_leaf=_is_box)


def unboxed(tree: PyTree) -> PyTree:
    """The tree with plain arrays in place of Flax's boxes and variables. No sharding
    constraint is applied.

    **Arguments:**

    - `tree`: linen variables with Flax's boxes, from `jax.eval_shape` or with arrays,
      or an `nnx.State`.

    **Returns:**

    The same tree with arrays (or ShapeDtypeStructs) in place of boxes and variables.

    !!! Example

        ```python
        import flax.linen as nn
        import jax.numpy as jnp
        from shardfx.interop.flax import unboxed

        boxed = {"kernel": nn.Partitioned(jnp.ones((4, 8)), ("embed", "mlp"))}
        assert unboxed(boxed)["kernel"].shape == (4, 8)
        ```
    """

    def value(node: object) -> object:
        if isinstance(node, nnx.Variable):
            return node.get_raw_value()
        if isinstance(node, meta.Partitioned):
            return node.value
        if isinstance(node, meta.AxisMetadata):
            return node.unbox()
        return node

    return jax.tree.map(value, tree, is_leaf=_is_box)


def rules_of(tree: PyTree) -> AxisRules:
    """The merged rules of all boxes and variables (their `rules=` or
    `sharding_rules=`).

    **Arguments:**

    - `tree`: linen variables with Flax's boxes, from `jax.eval_shape` or with arrays,
      or an `nnx.State`.

    **Returns:**

    AxisRules; use [`shardfx.interop.flax.composite_rules`][] to join them with the
    rules of the whole model.

    **Raises:**

    `RuleError` if the rules of two variables contradict each other, since a name has
    one meaning in a plan. Plan the variables separately, and join the plans.

    !!! Example

        ```python
        import flax.linen as nn
        import jax.numpy as jnp
        from shardfx.interop.flax import rules_of

        own = (("embed", "fsdp"), ("mlp", "tensor"))
        box = nn.LogicallyPartitioned(jnp.ones((4, 8)), ("embed", "mlp"), rules=own)
        assert rules_of({"kernel": box}).rules == own
        ```
    """
    merged = AxisRules()
    for node in jax.tree.leaves(tree, is_leaf=_is_box):
        merged = composite_rules(merged, _metadata(node).get("sharding_rules"))
    return merged


def core_rules(rules: AnyRules, mesh: MeshSpec | Mesh | AbstractMesh) -> AxisRules:
    """AxisRules with the meaning of `flax.core.spmd` and nnx: the last rule of a name
    applies, and a name without a rule is a mesh axis.

    **Arguments:**

    - `rules`: pairs, a mapping, or AxisRules; `None` for no rules.
    - `mesh`: the mesh whose axes may be used as names.

    **Returns:**

    AxisRules for `plan(..., axes=...)`. Rules that map a mesh axis to itself come
    first: in an array with the mesh axis as a name, no other name gets it.
    `resolve(names, AxisRules.last_wins(rules), unmatched="keep")` does the same without
    a mesh.

    !!! Example

        ```python
        from jax.sharding import PartitionSpec as P
        from shardfx import MeshSpec, resolve
        from shardfx.interop import flax as interop

        rules = interop.core_rules([("embed", "x"), ("embed", "y")], MeshSpec({"x": 2, "y": 4}))
        assert resolve(("x", "embed"), rules).spec == P("x", "y")
        ```
    """
    axis_rules = _as_rules(rules)
    # In a dict, the last rule of a name overwrites the others.
    modes = {mode: dict(mode_rules) for mode, mode_rules in axis_rules.modes}
    last_rules = AxisRules(
        dict(axis_rules.rules),
        modes=modes,
        units=axis_rules.units,
        aliases=axis_rules.aliases,
        mesh_axes=axis_rules.mesh_axes,
    )
    return last_rules.prepend(
        [
            (axis, axis)
            for axis in MeshSpec.of(mesh).axis_names
            if axis not in last_rules.names
        ]
    )


def composite_rules(rule1: AnyRules, rule2: AnyRules) -> AxisRules:
    """The rules of two rule sets, as `flax.core.spmd.composite_rules` joins them. A
    name may keep several rules.

    **Arguments:**

    - `rule1`, `rule2`: pairs, a mapping, AxisRules, or `None`.

    **Returns:**

    AxisRules with the rules of `rule1`, then the rules that only `rule2` has.

    **Raises:**

    `RuleError` if both have rules for a name and they contradict each other; see
    [`shardfx.AxisRules.merge`][].

    !!! Example

        ```python
        from shardfx.interop.flax import composite_rules

        rules = composite_rules([("embed", "fsdp")], [("embed", "fsdp"), ("mlp", "tensor")])
        assert rules.rules == (("embed", "fsdp"), ("mlp", "tensor"))
        ```
    """
    return _as_rules(rule1).merge(_as_rules(rule2))


def add_axis(names: tuple[object, ...], index: int, name: object) -> tuple[object, ...]:
    """The names of an array after a dimension is added, as by `nn.scan` and `nn.vmap`.

    **Arguments:**

    - `names`: the names before. If there are fewer than `index`, the dimensions between
      are `None`.
    - `index`: the index of the new dimension. Negative numbers count from the end of
      the result, so -1 is the last.
    - `name`: the name of the new dimension, or `None`.

    **Returns:**

    The names with the new dimension.

    !!! Example

        ```python
        from shardfx.interop.flax import add_axis, remove_axis

        stacked = add_axis(("embed", "mlp"), 0, "layers")
        assert stacked == ("layers", "embed", "mlp")
        assert remove_axis(stacked, 0, "layers") == ("embed", "mlp")
        ```
    """
    position = index
    if index < 0:
        position += len(names) + 1
    if position < 0:
        raise SpecError(
            f"`add_axis({names}, {index}, {name!r})`: index {index} lies before the"
            " first dimension."
        )
    padded = (*names, *[None] * (position - len(names)))
    return (*padded[:position], name, *padded[position:])


def remove_axis(
    names: tuple[object, ...],
    index: int,
    name: object,
) -> tuple[object, ...]:
    """The names of an array after a dimension is removed: the inverse of `add_axis`.

    **Arguments:**

    - `names`: the names before.
    - `index`: the index of the removed dimension. Negative numbers count from the end.
    - `name`: the name that the dimension must have.

    **Returns:**

    The names without the dimension. If the last name is removed, `None` entries before
    it are removed too, since `add_axis` may have added them.

    **Raises:**

    `SpecError` if the dimension does not exist or has another name.

    !!! Example

        ```python
        from shardfx.interop.flax import add_axis, remove_axis

        assert remove_axis(("layers", "embed", "mlp"), 0, "layers") == ("embed", "mlp")
        assert remove_axis(add_axis(("embed",), 2, "layers"), 2, "layers") == ("embed",)
        ```
    """
    if not -len(names) <= index < len(names) or names[index] != name:
        raise SpecError(
            f"`remove_axis({names}, {index}, {name!r})`: dim {index} has no such name; "
            "remove the axis with the index and the name that it was added with."
        )
    position = index % len(names)
    remaining = (*names[:position], *names[position + 1 :])
    while position == len(remaining) and remaining and remaining[-1] is None:
        remaining = remaining[:-1]
        position = position - 1
    return remaining


def _is_box(node: object) -> bool:
    return isinstance(node, meta.AxisMetadata | nnx.Variable)


def _metadata(node: object) -> Mapping[str, Any]:
    """The metadata of a Flax variable or box, by nnx's names, such as "out_sharding";
    empty for other nodes.
    """
    if isinstance(node, nnx.Variable):
        return node.get_metadata()
    if isinstance(node, meta.Partitioned):
        metadata: dict[str, Any] = {"out_sharding": node.names}
        metadata["sharding_rules"] = None
        if isinstance(node, LogicallyPartitioned):
            metadata["sharding_rules"] = node.rules
        return metadata
    if isinstance(node, NNXMeta):
        return node.metadata
    return {}


def _names(sharding: object) -> tuple[object, ...]:
    """The names of an array from the sharding of a Flax variable: a tuple of names, a
    PartitionSpec or a NamedSharding. Raises `SpecError` for anything else.
    """
    entries = sharding
    if isinstance(entries, NamedSharding):
        entries = entries.spec
    if isinstance(entries, PartitionSpec):
        # In JAX a PartitionSpec does not have to cover the last dimensions.
        entries = (*entries_of(entries), ...)
    if not isinstance(entries, tuple | list):
        raise SpecError(
            f"the sharding {sharding!r} of a flax variable has no names; give it a"
            " tuple of names."
        )
    names = []
    for entry in entries:
        if isinstance(entry, list):
            entry = tuple(entry)
        names.append(entry)
    return tuple(names)


def _as_rules(rules: AnyRules) -> AxisRules:
    """Rules in any form as AxisRules; `None` is no rules."""
    return rules if isinstance(rules, AxisRules) else AxisRules(rules or ())

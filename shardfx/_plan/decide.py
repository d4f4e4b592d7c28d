"""Decides how one array is sharded: its request is corrected to the mesh and the shape,
and then extended by strategies.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax.sharding import AbstractMesh, Mesh, PartitionSpec, Sharding

from .._ground.errors import SpecError, whole_number
from .._ground.misuse import called
from .._ground.reason import Code, Decision, Reason
from .._rules import checked_bytes
from ..topology import MeshSpec
from .extending import apply_strategy
from .fitting import Axes, Leaf, axes_of, corrected, leaf_of
from .leaf import Row
from .requests import Request, units_for


def row_of(
    request: Request,
    shape: tuple[int, ...],
    dtype: object,
    mesh: Axes,
    memory_kind: str | None,
) -> Row:
    """Returns the plan of an array: the spec of `request` without axes that do not fit
    the array or the `mesh`, plus the axes that the request's strategies add.
    `memory_kind` is the array's memory; `None` for the device's default.
    """
    names = request.names
    units = units_for(request, shape)
    leaf = leaf_of(shape, dtype, units)
    decision = corrected(request.spec, leaf, mesh)
    reasons = list(request.reasons)
    for why in decision.reasons:
        if names and units:
            why = _with_advice(why, leaf)
        reasons.append(why)
    strategies = []
    for strategy in request.strategies:
        min_bytes = max(strategy.min_bytes, mesh.min_bytes)
        strategies.append(dataclasses.replace(strategy, min_bytes=min_bytes))
    for strategy in strategies:
        decision = apply_strategy(decision.spec, leaf, mesh, strategy)
        reasons += decision.reasons
    return Row(
        shape=shape,
        dtype=dtype,
        names=names,
        requested=request.spec,
        spec=decision.spec,
        rule=request.rule,
        reasons=tuple(reasons),
        memory_kind=memory_kind,
        units=units,
        strategies=tuple(strategies),
        stacked=request.stacked,
    )


def _with_advice(why: Reason, leaf: Leaf) -> Reason:
    """Returns the reason `why`. If it says that a unit keeps a dimension unsharded, but
    the size of the dimension may be a number of units, such as 8 heads, its message
    gets advice.
    """
    if why.code is not Code.unit or why.dim is None:
        return why
    size = leaf.shape[why.dim]
    unit = leaf.units[why.dim]
    # A later dimension of the unit's size, as in `(heads, head_dim)`, hints at heads
    # with a dimension of their own.
    if size % unit or unit not in leaf.shape[why.dim + 1 :]:
        return why
    doubt = f", or, if these are {size} units already, a name without a unit"
    return dataclasses.replace(why, message=why.message + doubt)


def sizes_of_shape(shape: Any) -> tuple[int, ...]:
    """The sizes in `shape`, an argument of a user, as Python ints. Raises `SpecError`
    if it is no sequence of sizes from 0 on.
    """
    is_of_sizes = isinstance(shape, Iterable) and not isinstance(shape, str | Mapping)
    if not is_of_sizes:
        fix = f"write `({shape!r},)` for an array of rank 1"
        if isinstance(shape, str | Mapping):
            fix = "pass `x.shape`"
        raise SpecError(
            f"`shape` has a size for each dimension, and this is {shape!r}; {fix}."
        )
    sizes: list[int] = []
    for size in shape:
        number = whole_number(size)
        if number is None:
            raise SpecError(
                f"`shape` has a size for each dimension, and {tuple(shape)!r:.80} holds"
                f" {size!r:.40}, which is none; pass `x.shape`."
            )
        sizes.append(number)
    if any(size < 0 for size in sizes):
        raise SpecError(
            f"`shape` has a size for each dimension, and {tuple(sizes)} holds a negative"
            " number; pass `x.shape`."
        )
    return tuple(sizes)


@called("correct(spec, shape, mesh)")
def correct(
    spec: object,
    shape: Sequence[int],
    mesh: MeshSpec | Mesh | AbstractMesh,
    *,
    units: Sequence[int] | None = None,
    min_bytes: int = 0,
    dtype: object = None,
    strict: bool = False,
) -> Decision:
    """Makes a PartitionSpec valid for an array on a mesh, and drops as few mesh axes as
    possible.

    For each dimension in order, it drops the axes that the mesh lacks and the axes that
    an earlier dimension uses. Axes of size 1 stay. Of the other axes it keeps the
    subset with the largest product that divides the dimension; of several such subsets,
    the one whose axes come first. The function is idempotent.

    **Arguments:**

    - `spec`: the requested PartitionSpec. Dimensions beyond its end are not sharded.
      Extra entries must be `None`.
    - `shape`: the shape of the array.
    - `mesh`: any mesh; only its axis names, sizes and types are read.
    - `units`: one int per dimension: a dimension of `n * unit` elements is sharded only
      between units, such as the heads of an attention layer. `None` allows any split.
    - `min_bytes`: arrays of fewer bytes are replicated. Needs `dtype`.
    - `dtype`: the dtype of the array; `None` is enough without `min_bytes`.
    - `strict`: raise if any axis would be dropped.

    **Returns:**

    A [`shardfx.Decision`][]: a spec that JAX accepts for this shape on this mesh, and
    the reasons why axes were dropped. UNCONSTRAINED dimensions stay if the mesh has an
    Auto axis; only [`shardfx.constrain`][] accepts them.

    **Raises:**

    `SpecError` if the spec does not fit the rank, and under `strict` if anything would
    be dropped; `RuleError` for `min_bytes` that is no number.

    !!! Example

        ```python
        from jax.sharding import PartitionSpec as P
        from shardfx import MeshSpec, correct

        mesh = MeshSpec({"data": 2, "tensor": 4})
        decision = correct(P(("data", "tensor"), "pipe"), (4, 16), mesh)
        assert decision.spec == P("tensor")
        # dim 0: size 4 is not divisible by `data` (2) x `tensor` (4); ...
        print(decision.reasons[0])
        ```
    """
    if not isinstance(spec, PartitionSpec):
        fix = f"write `P({spec!r})`, or use `resolve`"
        if isinstance(spec, Sharding):
            fix = "write `sharding.spec`"
        elif isinstance(shape, PartitionSpec):
            fix = "write `correct(spec, shape, mesh)`, the spec first"
        raise SpecError(f"expected a PartitionSpec, not {spec!r}; {fix}.")
    min_bytes = checked_bytes("min_bytes", min_bytes)
    if min_bytes and dtype is None:
        raise SpecError("`min_bytes` needs the array's dtype: pass `dtype=`.")
    if units is not None and not isinstance(units, Iterable):
        raise SpecError(
            "`units` must hold one positive int for each dimension, not"
            f" {units!r}; write `({units!r},)` for an array of rank 1."
        )
    leaf_units = None if units is None else tuple(units)
    leaf = leaf_of(sizes_of_shape(shape), dtype, leaf_units)
    if len(leaf.units) != len(leaf.shape) or min(leaf.units, default=1) < 1:
        raise SpecError(
            "`units` must hold one positive int for each dimension of shape"
            f" {leaf.shape}, not {leaf.units}; use 1 where any cut will do."
        )
    mesh = MeshSpec.of(mesh)
    decision = corrected(spec, leaf, axes_of(mesh, min_bytes))
    if strict and decision.reasons:
        raise SpecError(
            f"{spec} for shape {leaf.shape} on mesh {mesh}:"
            f" {'; '.join(map(str, decision.reasons))}"
        )
    return decision

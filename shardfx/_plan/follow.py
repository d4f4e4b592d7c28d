import itertools
from collections.abc import Callable, Iterable
from typing import Any

import equinox as eqx
import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from .._errors import LeafTypeError
from .._reason import Code, reason
from .._rules.path_rules import PathRules, compiled, first_match
from .._spec import canonical, entries_of, pinned, trimmed
from .._text import between_numbers
from .._tree import flatten
from .content import Content
from .correct import correct
from .leaf import LeafPlan, leaf_plan, memory_kind_pairs
from .shard_plan import ShardPlan, check_plan


def follow(
    init: Callable[..., Any],
    plan: ShardPlan,
    *args: Any,
    memory_kinds: Iterable[tuple[str, str]] | None = None,
) -> ShardPlan:
    """The plan of what `init` makes from a planned tree: `follow(optimizer.init, params_plan)`.

    `init` is evaluated over shapes that carry the plan's shardings on an abstract mesh with Explicit axes, so that
    JAX itself says how each array it makes is sharded: moments, factored statistics, accumulators of any kind. Where
    that says nothing, an array whose path ends in the path of a planned one of the same shape is sharded like it.

    **Arguments:**

    - `init`: a function of a tree with the plan's arrays, and of `args`. It is traced, never run. At leaves of the
        tree that are no arrays it gets an opaque object, or `None` if it fails with that, as optimizers do.
    - `plan`: the plan of that tree.
    - `args`: what else `init` takes; a [`shardfx.ShardPlan`][] among them stands for its tree.
    - `memory_kinds`: as in [`shardfx.plan`][]: pairs of a regex and the memory kind of the arrays it matches.

    **Returns:**

    The plan of what `init` returns, leaves that are no arrays passed over as in [`shardfx.plan`][]. The `rule` of each
    leaf says what it follows; an array that follows nothing is replicated, with a reason.

    !!! Example

        ```python
        import jax.numpy as jnp
        import optax
        from jax.sharding import PartitionSpec as P
        from shardfx import MeshSpec, PathRules, follow, plan

        params = {"w": jnp.ones((256, 512))}
        params_plan = plan(params, MeshSpec({"fsdp": 4, "tensor": 2}), paths=PathRules.parse("w->fsdp.tensor"))
        opt_plan = follow(optax.adafactor(1e-3).init, params_plan)
        assert opt_plan["0/v_row/w"].spec == P("fsdp") and opt_plan["0/v_col/w"].spec == P("tensor")
        ```
    """
    if not callable(init):
        raise LeafTypeError(f"`init` must be a function, not {type(init).__name__}; pass `optimizer.init`.")
    check_plan("plan", plan)
    made = _evaluated(init, plan, args)
    flat = flatten(made)
    kinds = memory_kind_pairs(memory_kinds)
    patterns = compiled(PathRules((regex, ()) for regex, _ in kinds))
    rows, index = [], []
    for leaf, path, shaped in zip(flat.leaves, flat.paths, flat.is_array, strict=True):
        index.append(len(rows) if shaped else -1)
        if shaped:
            kind = first_match(path, patterns)
            rows.append(_row(path, leaf, plan, None if kind is None else kinds[kind][1]))
    content = plan.content
    columns = (rows, index, tuple(flat.paths), flat.treedef)
    return ShardPlan(Content(content.mesh, content.jax_mesh, content.axes, content.mode, *columns))


def _evaluated(init: Callable[..., Any], plan: ShardPlan, args: tuple[Any, ...]) -> Any:
    mesh = plan.mesh.abstract()
    explicit = AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=(AxisType.Explicit,) * len(mesh.axis_names))
    given = (plan, *args)
    # A state that holds the tree itself has its other leaves too, activation functions for one; but an optimizer's
    # `init` takes arrays alone. Which of them `init` is shows when it meets a leaf that is no array.
    has_others = any(isinstance(arg, ShardPlan) and -1 in arg.content.index for arg in given)
    others = (_NoArray(), None) if has_others else (None,)
    # Not every `init` can be typed on an Explicit mesh (an ambiguous contraction, a foreign callback): then its shapes
    # alone decide.
    *attempts, last = itertools.product((explicit, None), others)
    for abstract, other in attempts:
        try:
            return _shapes(init, given, abstract, other)
        except Exception:  # JAX's sharding type error is not public; what is really wrong is raised again below.
            continue
    return _shapes(init, given, *last)


class _NoArray:
    """Stands for a leaf of the planned tree that is no array: the plan knows where it is, not what."""

    def __repr__(self) -> str:
        return "a leaf that is no array"


def _shapes(init: Callable[..., Any], given: tuple[Any, ...], mesh: AbstractMesh | None, other: Any) -> Any:
    structs = [_structs(arg, mesh, other) for arg in given]
    if mesh is None:
        return eqx.filter_eval_shape(init, *structs)
    # JAX 0.11 takes the mesh of arrays that `init` makes from the context.
    with jax.sharding.use_abstract_mesh(mesh):
        return eqx.filter_eval_shape(init, *structs)


def _structs(arg: Any, mesh: AbstractMesh | None, other: Any) -> Any:
    if not isinstance(arg, ShardPlan):
        return arg
    return arg.content.tree([_struct(row, mesh) for row in arg.content.rows], other)


def _struct(row: LeafPlan, mesh: AbstractMesh | None) -> jax.ShapeDtypeStruct:
    sharding = None if mesh is None else NamedSharding(mesh, pinned(row.spec))
    return jax.ShapeDtypeStruct(row.shape, row.dtype, sharding=sharding)


def _row(path: str, leaf: Any, plan: ShardPlan, memory_kind: str | None) -> LeafPlan:
    shape = tuple(leaf.shape)
    fields = {"shape": shape, "dtype": leaf.dtype, "memory_kind": memory_kind, "strategies": ()}
    replicated = {
        "spec": PartitionSpec(),
        "requested": PartitionSpec(),
        "names": None,
        "units": None,
        "rule": None,
    }
    if not shape:
        return leaf_plan(plan.mesh.shape, **fields, **replicated, reasons=(reason(Code.scalar, None),))
    source, kept = _source(path, shape, plan)
    names, units = (None, None) if source is None else (_kept(source.names, kept), _kept(source.units, kept))
    namesake = None if source is None else trimmed(_kept(entries_of(pinned(source.spec)), kept) or ())
    if isinstance(leaf.sharding, NamedSharding) and entries_of(canonical(leaf.sharding.spec)):
        rule, spec = "the sharding that `init` gives it", canonical(leaf.sharding.spec)
        if spec != namesake:
            # A transposed array of the same shape, for one: its dimensions are not those of its namesake.
            names, units = None, None
    elif source is not None and namesake is not None:
        # The array's own path has the numbers; without them here, repeated layers are planned alike, as one row.
        rule, spec = f"path and shape of `{'*'.join(between_numbers(source.path))}`", namesake
    else:
        why = reason(Code.unmatched, None, what="the array (it follows no planned one)")
        return leaf_plan(plan.mesh.shape, **fields, **replicated, reasons=(why,))
    found = correct(spec, shape, plan.mesh)
    return leaf_plan(
        plan.mesh.shape,
        **fields,
        names=names,
        units=units,
        requested=spec,
        spec=found.spec,
        rule=rule,
        reasons=found.reasons,
    )


def _source(path: str, shape: tuple[int, ...], plan: ShardPlan) -> tuple[LeafPlan | None, tuple[int, ...]]:
    """The planned array whose path is the longest end of `path`, if it has this shape or one way to reduce to it.

    The second value says which of its dimensions the array has: all, or the ones that a factored statistic keeps.
    """
    planned = plan.content.by_path
    parts = path.split("/")
    for start in range(len(parts) + 1):
        leaf = planned.get("/".join(parts[start:]))
        if leaf is not None:
            dims = range(len(leaf.shape))
            kept = [dims for dims in itertools.combinations(dims, len(shape)) if _at(leaf.shape, dims) == shape]
            if len(kept) == 1:
                return leaf, kept[0]
    return None, ()


def _at(values: tuple[Any, ...], dims: tuple[int, ...]) -> tuple[Any, ...]:
    return tuple(values[dim] for dim in dims)


def _kept(values: tuple[Any, ...] | None, dims: tuple[int, ...]) -> tuple[Any, ...] | None:
    """The entries for `dims` of a tuple that may be shorter than the rank."""
    return None if values is None else tuple(values[dim] if dim < len(values) else None for dim in dims)

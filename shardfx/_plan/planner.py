"""The function `plan`. For each array it matches a rule, resolves logical names, and
corrects the spec to the shape.
"""

import dataclasses
import functools as ft
import operator
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import PyTree

from .._ground.errors import LeafTypeError, RuleError, SpecError
from .._ground.misuse import called
from .._ground.reason import (
    Code,
    Decision,
    nothing_to_shard,
    reason_for,
    refined_reasons,
)
from .._ground.spec import DType, dtype_named, shard_counts
from .._ground.tree import Flat, flatten
from .._rules import (
    AxisRules,
    Matcher,
    PathRules,
    check_mode,
    check_rules,
    checked_bytes,
)
from ..topology import MeshSpec
from .complaints import (
    Draft,
    check_policy,
    raise_absent,
    raise_empty,
    raise_errors,
    raise_misspelled,
    raise_repeated,
    raise_strict,
    raise_unknown,
    raise_unmatched,
    raise_unused,
)
from .content import NO_ARRAY, Content
from .decide import row_of
from .fitting import Axes, axes_of, corrected, leaf_of
from .leaf import (
    PathTree,
    Row,
    canonical_dtype,
    kinds_matcher,
    memory_kind_at,
)
from .matching import with_numbers
from .names import names_of_leaves, raise_module, raise_tied
from .replanning import refined
from .requests import NOTHING, Request, request_of_names, request_of_target
from .shard_plan import ShardPlan
from .tree_type import Tree


@called(
    "plan(tree, mesh, paths=rules)",
    rules="`paths=` for PathRules, or `axes=` for AxisRules",
    specs="`paths=PathRules([...])`",
)
def plan(
    tree: Tree,
    mesh: MeshSpec | Mesh | AbstractMesh,
    *others: object,
    paths: PathRules | None = None,
    names: PyTree = None,
    axes: AxisRules | None = None,
    mode: str | None = None,
    min_bytes: int = 0,
    memory_kinds: Iterable[tuple[str, str]] | None = None,
    unmatched: Literal["raise", "replicate"] = "raise",
    unused: Literal["raise", "allow"] = "raise",
    strict: bool = False,
    refine: bool = False,
) -> ShardPlan[Tree]:
    """Plans how every array of a tree is sharded on a mesh. Nothing is allocated, and
    no device is needed.

    **Arguments:**

    - `tree`: any tree of arrays or `jax.ShapeDtypeStruct`s. Other leaves, such as
      functions of modules, are skipped.
    - `mesh`: a MeshSpec, a jax Mesh, or an AbstractMesh. A plan for a jax Mesh also
      holds its devices.
    - `paths`: rules that map a leaf's path to its sharding. They are not applied to a
      leaf that has logical names.
    - `names`: a tree, or prefix of one, of logical names. Each leaf is a tuple with one
      entry per dimension as in [`shardfx.resolve`][], or `None`. `...` stands for all
      dimensions that have no name; these are not sharded. Where `names`, or a leaf of
      it, is `None`, the plan reads the names that modules declare with
      [`shardfx.field`][], if `axes` is given.
    - `axes`: rules that map logical names to mesh axes.
    - `mode`: the mode of `axes` in which names are resolved; `None` for the rules
      without a mode.
    - `min_bytes`: arrays of fewer bytes in total are replicated.
    - `memory_kinds`: pairs of a regex and a memory kind, such as
      `("opt/.*mu", "pinned_host")`. An array gets the memory kind of the first pair
      whose regex matches its path.
    - `unmatched`: "raise" makes three things an error: an array that neither names nor
      a path rule covers, a logical name without a rule in `axes`, and a mesh axis of a
      rule that the mesh lacks, unless `AxisRules(..., mesh_axes=...)` or
      `PathRules(..., mesh_axes=...)` declares it. "replicate" replicates such
      dimensions, with a reason.
    - `unused`: "raise" makes a tree without arrays an error, and each rule of `paths`
      or pair of `memory_kinds` that applies to no array: no path matches it, or earlier
      rules match all of its paths. A last rule that matches every path is exempt, and a
      rule whose target is [`shardfx.optional`][]. "allow" accepts all of these.
    - `strict`: raise if an axis of a rule's sharding would be dropped because it does
      not fit. [`shardfx.constrain`][] with this plan does the same. With `refine`, an
      array that uses only some sub-axes of a mesh axis still counts as one that does
      not fit.
    - `refine`: split a mesh axis into sub-axes if a dimension can use only some of its
      size. For example, 8 kv heads on `tensor=16` become sharded 8 ways over
      `tensor_0=8` and replicated over `tensor_1=2`. The plan's mesh and rules then name
      the sub-axes, and so must a PartitionSpec for [`shardfx.constrain`][]:
      `("tensor_0", "tensor_1")` instead of `"tensor"`. The order of the devices and the
      layout of all other arrays stay the same.

    **Returns:**

    A [`shardfx.ShardPlan`][].

    **Raises:**

    `UnmatchedError` with all the arrays that no rule covers, largest first, or with the
    logical names that have no rule; `RuleError` for rules that cannot be applied or
    never apply, for a mode that `axes` lack, and for two arrays with one path;
    `SpecError` with all the arrays whose spec or names do not fit their rank;
    `LeafTypeError` for a tree without arrays.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        from jax.sharding import PartitionSpec as P
        from shardfx import MeshSpec, PathRules, fsdp, plan

        tree = {
            "embed": jax.ShapeDtypeStruct((50257, 768), jnp.float32),
            "head": jnp.ones((768, 8)),
        }
        rules = PathRules([("embed", P("tensor", "fsdp")), (".*", fsdp("fsdp"))])
        made = plan(tree, MeshSpec({"fsdp": 4, "tensor": 2}), paths=rules)
        assert made["embed"].spec == P(None, "fsdp")
        # dim 0: size 50257 is not divisible by `tensor` (2); ...
        print(made["embed"].reasons[0])
        ```
    """
    check_policy("plan", "unmatched", unmatched, "replicate")
    check_policy("plan", "unused", unused, "allow")
    _refuse_plan(tree)
    min_bytes = checked_bytes("min_bytes", min_bytes)
    if others:
        word = "axes" if isinstance(others[0], AxisRules) else "paths"
        raise RuleError(
            f"`plan(tree, mesh, rules)`: say what the rules are about, by"
            f" `plan(tree, mesh, {word}=rules)`: `paths=` takes PathRules, and `axes=`"
            " AxisRules."
        )
    check_rules(paths, axes)
    check_mode(axes, mode)
    flat = flatten(tree)
    if unused == "raise":
        raise_empty(tree, flat, paths)
    raise_repeated(flat)
    raise_tied(tree, flat)
    raise_module(tree)
    leaf_names = names_of_leaves(names, tree, flat, axes)
    draft = drafted(
        flat=flat,
        leaf_names=leaf_names,
        mesh=mesh,
        paths=paths,
        axes=axes,
        mode=mode,
        min_bytes=min_bytes,
        kinds=kinds_matcher(memory_kinds),
    )
    raise_errors(draft.errors)
    if unmatched == "raise":
        raise_unmatched(draft)
        raise_unknown(draft)
        raise_absent(draft)
        raise_misspelled(draft)
    if unused == "raise":
        raise_unused(
            what="rule", rules=draft.paths, flat=flat, decided=leaf_names, by=NAMES
        )
        raise_unused("`memory_kinds` entry", draft.kinds, flat)
    jax_mesh = mesh if isinstance(mesh, Mesh) else None
    path_tree = PathTree(flat.paths, flat.treedef)
    index = with_numbers(draft.row_indices, flat)
    content = Content(
        mesh=draft.mesh,
        jax_mesh=jax_mesh,
        axes=axes,
        mode=mode,
        rows=draft.rows,
        index=index,
        path_tree=path_tree,
        strict=strict,
    )
    if refine:
        content = _refined(content, min_bytes)
    if strict:
        _require_as_asked(content, draft)
    return ShardPlan(content)


def _refuse_plan(tree: object) -> None:
    """Raises `LeafTypeError` if the argument `tree` of `plan` is a plan."""
    if isinstance(tree, ShardPlan):
        raise LeafTypeError(
            "the tree is a plan already: plan the model's own tree, or `plan.structs` on"
            " another mesh or by other rules; `plan.replace(path, spec)` changes one"
            " array."
        )


def _require_as_asked(content: Content, draft: Draft) -> None:
    """Raises `SpecError` if an array is not sharded as its rule requests. `content` may
    be on a mesh with split axes, `draft` is not.
    """
    advice = ""
    if content.mesh != draft.mesh:
        advice = (
            f". `refine=True` has split the mesh into {content.mesh}. If they may be"
            " replicated over the rest, plan on that mesh, made with `MeshSpec.split`,"
            " by rules that name the parts; or leave `strict` out"
        )
    arrays = [(path, content.rows[i]) for path, i in content.paths_and_rows if i >= 0]
    raise_strict(arrays, advice)


def _refined(content: Content, min_bytes: int) -> Content:
    """The plan on a mesh with split axes, whose reasons do not advise to split them."""
    content = refined(content, min_bytes)
    rows = []
    for row in content.rows:
        rows.append(row._replace(reasons=refined_reasons(row.reasons)))
    return content.replaced(rows=rows)


# The text of error messages for logical names, which have priority over path rules.
NAMES = "the names of the leaves"


def drafted(
    flat: Flat,
    leaf_names: Sequence[object],
    mesh: MeshSpec | Mesh | AbstractMesh,
    paths: PathRules | None,
    axes: AxisRules | None,
    mode: str | None,
    min_bytes: int,
    kinds: Matcher,
) -> Draft:
    """Plans each array of a tree, and collects the errors of the leaves that cannot be
    planned instead of raising them.

    `leaf_names` has the logical names of each leaf, or `None`; the path rules `paths`
    are for the others. The rules `axes` resolve names in the mode `mode`; `None` for
    the rules without a mode. Arrays of fewer than `min_bytes` bytes are replicated. The
    targets of the path rules `kinds` are memory kinds.
    """
    mesh_spec = (
        mesh.require_sizes() if isinstance(mesh, MeshSpec) else MeshSpec.of(mesh)
    )
    by_path = Matcher(paths)
    planner = _Planner(
        mesh=axes_of(mesh_spec, min_bytes),
        axes=axes,
        mode=mode,
        paths=by_path,
        kinds=kinds,
    )
    # The index in `planner.rows` of the plan of the leaves with a key.
    row_index_by_key: dict[object, int] = {None: NO_ARRAY}
    row_indices = []
    errors = []
    # Paths with 0 for every digit, unless a rule distinguishes digits: layers share keys.
    paths_of_leaves = flat.templates
    if by_path.needs_paths or kinds.needs_paths:
        paths_of_leaves = flat.paths
    for key in _keys(paths_of_leaves, flat, leaf_names):
        row_index = row_index_by_key.get(key)
        if row_index is None:
            position = len(row_indices)
            try:
                row_index = planner.row_index(
                    flat.paths[position],
                    flat.leaves[position],
                    leaf_names[position],
                    flat.stacked[position],
                )
            except (SpecError, RuleError, LeafTypeError) as error:
                # As `Draft.row_indices` marks an array with an error.
                row_index = -2 - len(errors)
                errors.append((flat.paths[position], error))
            row_index_by_key[key] = row_index
        row_indices.append(row_index)
    declared = by_path.declared
    if axes is not None:
        declared = (*declared, *axes.mesh_axes)
    return Draft(
        flat=flat,
        mesh=mesh_spec,
        paths=by_path,
        kinds=kinds,
        axes=axes,
        declared=declared,
        row_indices=row_indices,
        rows=planner.rows,
        errors=errors,
    )


class _Even(NamedTuple):
    """The spec, with its reasons, of arrays whose sizes the mesh axes divide; and for
    each dimension, the number that must divide its size for this, such as 8 for a mesh
    axis of size 8.
    """

    decision: Decision
    divisors: tuple[int, ...]


class _SharedRequest:
    """A request for all arrays of one rank with the same rule or names.

    The mesh axes that do not divide a shape must be dropped from the request. But its
    axes divide most shapes, and for these the spec is computed only once. Without this,
    planning a tree of 10,000 shapes takes 1.7 times as long.
    """

    def __init__(self, request: Request, rank: int, mesh: Axes):
        self.request = request
        self.rank = rank
        self.mesh = mesh
        # Whether nothing but the divisibility of sizes decides about an array.
        self.by_size_alone = not (mesh.min_bytes or request.strategies)

    @ft.cached_property
    def even(self) -> _Even:
        """The decision for arrays whose sizes the mesh axes divide. Its `divisors` have
        for each dimension the number of shards times the unit, the elements that no
        shard may split.
        """
        # Every number divides a size of 0, so correction drops no axis as indivisible.
        leaf = leaf_of((0,) * self.rank, None, self.request.units)
        decision = corrected(self.request.spec, leaf, self.mesh)
        shards = shard_counts(decision.spec, self.rank, self.mesh.sizes)
        divisors = tuple(map(operator.mul, shards, leaf.units))
        return _Even(decision=decision, divisors=divisors)

    def row(
        self,
        shape: tuple[int, ...],
        dtype: object,
        memory_kind: str | None,
    ) -> Row:
        """Returns the plan of an array of this shape, dtype and memory (`None` for the
        device's default). It is computed anew where a mesh axis may not divide a size,
        or where more than this decides, such as `min_bytes`.
        """
        request = self.request
        # The remainders are those of the sizes by their divisors.
        if not self.by_size_alone or any(map(operator.mod, shape, self.even.divisors)):
            return row_of(
                request=request,
                shape=shape,
                dtype=dtype,
                mesh=self.mesh,
                memory_kind=memory_kind,
            )
        decision = self.even.decision
        reasons = request.reasons + decision.reasons
        return Row(
            shape=shape,
            dtype=dtype,
            names=request.names,
            requested=request.spec,
            spec=decision.spec,
            rule=request.rule,
            reasons=reasons,
            memory_kind=memory_kind,
            units=request.units,
            strategies=(),
            stacked=request.stacked,
        )


@dataclasses.dataclass
class _Planner:
    """The arguments of one call of `plan`, and the requests and plans of the arrays
    that it has planned so far.

    `paths` and `kinds` are rules from paths to shardings, and to memory kinds.
    `shared_requests` has the requests by rule or names. `row_indices` has the indices
    of the plans in `rows`, by rule or names, memory kind, shape and dtype.
    """

    mesh: Axes
    axes: AxisRules | None
    mode: str | None
    paths: Matcher
    kinds: Matcher
    shared_requests: dict[Any, _SharedRequest] = dataclasses.field(default_factory=dict)
    row_indices: dict[Any, int] = dataclasses.field(default_factory=dict)
    rows: list[Row] = dataclasses.field(default_factory=list)

    def row_index(self, path: str, leaf: Any, names: object, stacked: int) -> int:
        """Returns the index in `rows` of the plan of the array `leaf` at `path`.

        The array is planned unless an earlier array has the same rule or names, shape,
        dtype and memory kind. `names` are its logical names; `None` for path rules. The
        first `stacked` dimensions of `leaf` index stacked layers.
        """
        # The indices of the first rule for its memory kind, and for its sharding.
        kind_rule = self.kinds.first(path)
        rule = self.paths.first(path) if names is None else None
        shape = tuple(leaf.shape)
        dtype = _dtype(leaf)
        # A target that is a function may give each array another spec.
        is_function = rule is not None and self.paths.has_function[rule]
        called_with = (path, shape, dtype) if is_function else None
        request_key = (rule, names, len(shape), stacked, called_with)
        row_key = (request_key, kind_rule, shape, dtype)
        row_index = self.row_indices.get(row_key)
        if row_index is not None:
            return row_index

        memory_kind = memory_kind_at(self.kinds, kind_rule)
        shared = self.shared_requests.get(request_key)
        if shared is None:
            request = self.request(
                path=path, leaf=leaf, names=names, rule=rule, stacked=stacked
            )
            request = request._replace(stacked=stacked)
            row = row_of(
                request=request,
                shape=shape,
                dtype=dtype,
                mesh=self.mesh,
                memory_kind=memory_kind,
            )
            new_shared = _SharedRequest(request, len(shape), self.mesh)
            self.shared_requests[request_key] = new_shared
        else:
            row = shared.row(shape, dtype, memory_kind)
        self.row_indices[row_key] = len(self.rows)
        self.rows.append(row)
        return self.row_indices[row_key]

    def request(
        self,
        path: str,
        leaf: Any,
        names: Any,
        rule: int | None,
        stacked: int,
    ) -> Request:
        """Returns the sharding that is requested for the array `leaf` at `path`: by its
        logical `names`, else by the path rule with the index `rule`. If both are
        `None`, it is replicated, with a reason. The first `stacked` dimensions index
        stacked layers.
        """
        if names is not None:
            return request_of_names(
                names=names,
                shape=tuple(leaf.shape),
                rule="names",
                axes=self.axes,
                mode=self.mode,
            )
        rule_text = None if rule is None else self.paths.text(rule)
        if not leaf.shape:
            return NOTHING._replace(rule=rule_text, reasons=(nothing_to_shard(()),))
        if rule is None or rule_text is None:
            reason = reason_for(Code.unmatched, None, what="the array")
            return NOTHING._replace(reasons=(reason,))
        _, target = self.paths.rules[rule]
        return request_of_target(
            target=target,
            path=path,
            leaf=leaf,
            rule=rule_text,
            axes=self.axes,
            mode=self.mode,
            stacked=stacked,
        )


def _keys(
    paths: Sequence[str],
    flat: Flat,
    leaf_names: Sequence[object],
) -> Iterable[Any]:
    """Returns for each leaf a key with everything that its plan depends on; `None` for
    a leaf that is no array.

    Leaves with equal keys are planned once. `paths` has the paths of the leaves, with
    every digit replaced by 0 if no rule can distinguish digits. `flat.stacked` has how
    many first dimensions of a leaf index stacked layers.
    """
    if all(flat.is_array):
        shapes = [leaf.shape for leaf in flat.leaves]
        dtypes = [leaf.dtype for leaf in flat.leaves]
        return zip(paths, shapes, dtypes, leaf_names, flat.stacked, strict=True)
    keys = []
    for path, leaf, names, stacked, is_array in zip(
        paths, flat.leaves, leaf_names, flat.stacked, flat.is_array, strict=True
    ):
        key = None
        if is_array:
            key = (path, leaf.shape, leaf.dtype, names, stacked)
        keys.append(key)
    return keys


def _dtype(leaf: Any) -> DType:
    """Returns the dtype that the array has once JAX has put it on a device."""
    if not isinstance(leaf, np.ndarray | np.generic):
        return leaf.dtype
    # JAX has no texts, no dates and no long doubles.
    if dtype_named(leaf.dtype.name) is None:
        raise LeafTypeError(
            f"a NumPy array of dtype {leaf.dtype} cannot be put on a device; take it"
            " out of the tree."
        )
    return canonical_dtype(leaf.dtype)

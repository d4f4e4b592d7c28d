"""`follow`: plans a tree that a function makes from planned arrays, such as an
optimizer's state, gradients, statistics, adapters or scales.
"""

import dataclasses
import functools as ft
import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

from jax.sharding import NamedSharding, PartitionSpec

from .._ground.errors import LeafTypeError, RuleError, SpecError
from .._ground.misuse import called
from .._ground.reason import Code, nothing_to_shard, reason_for
from .._ground.spec import (
    array_bytes,
    canonical,
    entries_of,
)
from .._ground.tree import Flat, flatten, is_number
from .._rules import AxisRules, Matcher, PathRules, Strategy, check_rules, fsdp, near
from .aligning import Dims, correspondences
from .bases import (
    adapters_by_base,
    agreed,
    at_dims,
    base_path,
    matcher_of_bases,
    request_from_base,
    spec_at,
    starred,
    unaligned,
)
from .complaints import (
    Draft,
    check_policy,
    raise_absent,
    raise_errors,
    raise_repeated,
    raise_strict,
    raise_unknown,
    raise_unused,
)
from .content import NO_ARRAY, NUMBER
from .decide import row_of
from .extending import shard_over
from .fitting import Axes, axes_of
from .leaf import (
    LeafPlan,
    PathTree,
    Row,
    kinds_matcher,
    memory_kind_at,
)
from .requests import NOTHING, Request, request_of_target
from .shard_plan import ShardPlan, check_plan
from .state_evaluation import ConstantPaths, Number, evaluated
from .tree_type import Tree


@called("follow(optimizer.init, plan)")
def follow(
    init: Callable[..., Tree],
    plan: ShardPlan,
    *args: Any,
    over: str | Iterable[str] | Strategy | None = None,
    paths: PathRules | None = None,
    axes: AxisRules | None = None,
    memory_kinds: Iterable[tuple[str, str]] | None = None,
    adapters: Iterable[tuple[str, str]] = (),
    scales: Iterable[tuple[str, str]] = (),
    unused: Literal["raise", "allow"] = "raise",
) -> ShardPlan[Tree]:
    """Returns the plan of the tree that `init` makes from a planned tree:
    `follow(optimizer.init, params_plan)`.

    `follow` evaluates `init` over shapes that have the plan's shardings on an abstract
    mesh with Explicit axes. So JAX itself propagates the sharding of each result:
    moments, factored statistics, accumulators of any sort.

    Where JAX gives no sharding, `follow` looks for a planned array whose path is
    contained in the path of the result, at its end or before other names
    (`param_states/<path>/m`). The result is sharded like that array if it has the same
    shape, some of its dimensions, or more leading dimensions, such as a history; these
    are not sharded. Dimensions that may be several ones of that array, which have equal
    sizes, are not sharded where they would be so differently, with a reason. Path rules
    shard other arrays.

    **Arguments:**

    - `init`: a function of a tree with the plan's arrays, and of `args`. It is traced,
      never run. Leaves of the tree that are not arrays are opaque objects, or `None` if
      `init` fails with these, as optimizers do.
    - `plan`: the plan of that tree.
    - `args`: the other arguments of `init`. For a [`shardfx.ShardPlan`][] among them,
      `init` gets the tree of the plan.
    - `over`: mesh axes that shard every array further than the array that it follows,
      on dimensions that they divide, as in ZeRO. With `fsdp("data", min_bytes=...)`,
      small arrays are not sharded further.
    - `paths`: rules for arrays that follow no planned array. To change the sharding of
      an array that follows one, use [`shardfx.ShardPlan.replace`][].
    - `axes`: rules for the logical names in `paths`; `None` for the rules of the plan.
      The result's `axes` are those of the plan, if it has any, as are the names of
      the arrays that follow others.
    - `memory_kinds`: pairs of a regex and a memory kind. The first pair that matches an
      array's path counts.
    - `adapters`: pairs of a regex and its replacement, as in `re.sub`, that turn the
      path of an adapter into the path of its base array: `("lora_[ab]$", "weight")`.
      The dimension of the rank, which both adapters of a base share, is not sharded.
      The others are the first or the last of the base, and are sharded as these.
    - `scales`: pairs like those of `adapters`, for the scales of quantised arrays. A
      scale has all dimensions of its base, the first or the last. A dimension has one
      element for each block of the base's elements. It is sharded as in the base if
      each device holds whole blocks.
    - `unused`: "raise" makes each item of `paths`, `memory_kinds`, `adapters` and
      `scales` that applies to no array an error; "allow" accepts it.

    **Returns:**

    The plan of the tree that `init` returns. The `rule` of each leaf names the array
    that it follows. An array that follows none and has no rule is replicated, with a
    reason.

    **Raises:**

    Any error of `init`; `RuleError`, `SpecError` and `UnmatchedError` for rules, as
    [`shardfx.plan`][] does; `RuleError` for other `axes` than the plan's without
    `paths`. Under a plan made with `strict=True`, also a `SpecError` that lists all
    arrays of more than one element that follow no planned array and have no rule, or
    whose rule does not fit. Axes of `over` that do not fit are never an error.

    !!! Example

        ```python
        import jax.numpy as jnp
        import optax
        from jax.sharding import PartitionSpec as P
        from shardfx import MeshSpec, PathRules, follow, plan

        params = {"w": jnp.ones((256, 512))}
        mesh = MeshSpec({"data": 2, "fsdp": 4, "tensor": 2})
        params_plan = plan(params, mesh, paths=PathRules.parse("w->fsdp.tensor"))
        opt_plan = follow(optax.adafactor(1e-3).init, params_plan)
        assert opt_plan["0/v_row/w"].spec == P("fsdp") and opt_plan["0/v_col/w"].spec == P(
            "tensor"
        )
        ```
    """
    if not callable(init):
        raise LeafTypeError(
            f"`init` must be a function, not {type(init).__name__}; pass"
            " `optimizer.init`."
        )
    check_plan("plan", plan)
    check_policy("follow", "unused", unused, "allow")
    check_rules(paths, axes)
    _require_paths(paths, axes, plan)
    kinds = kinds_matcher(memory_kinds)
    axis_rules = plan.axes if axes is None else axes
    by_path = Matcher(paths)
    pairs = {"adapters": adapters, "scales": scales}
    bases = {what: matcher_of_bases(what, items) for what, items in pairs.items()}
    state, why_not_propagated = evaluated(init, plan, args)
    flat = flatten(state)
    raise_repeated(flat)
    follower = _Follower(
        plan=plan,
        mesh=axes_of(plan.mesh),
        paths=by_path,
        bases=bases,
        axes=axis_rules,
        over=_axes_over(over, plan),
        why_not_propagated=why_not_propagated,
        adapters=adapters_by_base(bases["adapters"], flat),
        constants=ConstantPaths(
            init=init,
            args=(plan, *args),
            flat=flat,
        ),
    )
    rows, index = _planned(follower, flat, kinds)
    raise_errors(follower.errors)
    draft = Draft(
        flat=flat,
        mesh=plan.mesh,
        paths=by_path,
        kinds=kinds,
        axes=axis_rules,
        declared=_declared_axes(by_path, axis_rules),
        row_indices=index,
        rows=rows,
        errors=[],
    )
    raise_unknown(draft)
    # The plan's own rules were checked for its mesh.
    raise_absent(draft._replace(axes=axes))
    if unused == "raise":
        _raise_unused(follower, flat, kinds)
    if plan.strict:
        fix = "Give rules for them, `follow(..., paths=PathRules([(regex, target)]))`; "
        raise_strict(follower.strict, f'. {fix}`(".*", replicate)` may be the last')
    content = plan.content
    kept_axes = axes if content.axes is None else content.axes
    path_tree = PathTree(flat.paths, flat.treedef)
    return ShardPlan(
        content.replaced(axes=kept_axes, rows=rows, index=index, path_tree=path_tree)
    )


def _require_paths(
    paths: PathRules | None,
    axes: AxisRules | None,
    plan: ShardPlan,
) -> None:
    """Raises `RuleError` if the argument `axes` of `follow` would have no effect: the
    plan has other rules, and there are no `paths` whose names these resolve.
    """
    if paths is None and axes is not None and plan.axes not in (None, axes):
        raise RuleError(
            "`follow(..., axes=...)` resolves the logical names in `paths`, which are not"
            " given: pass `paths=PathRules([...])`, or leave `axes` out. The arrays that"
            " follow others have the plan's own `axes`."
        )


def _planned(
    follower: "_Follower",
    flat: Flat,
    kinds: Matcher,
) -> tuple[list[Row], list[int]]:
    """Returns the plans of the arrays in `flat`, the result of `init`, and for each
    leaf the index of its plan, `NUMBER` or `NO_ARRAY`.

    `follower` plans an array by the planned one that it follows, or by a rule. `kinds`
    has regexes and the memory kinds of the arrays with such paths.
    """
    rows = []
    index = []
    for leaf, path, is_array, stacked in zip(
        flat.leaves, flat.paths, flat.is_array, flat.stacked, strict=True
    ):
        if is_array:
            memory_kind = memory_kind_at(kinds, kinds.first(path))
            index.append(len(rows))
            rows.append(follower.row(path, leaf, memory_kind, stacked))
        elif isinstance(leaf, Number) or is_number(leaf):
            index.append(NUMBER)
        else:
            index.append(NO_ARRAY)
    return rows, index


def _declared_axes(paths: Matcher, axes: AxisRules | None) -> tuple[str, ...]:
    """Returns the mesh axes that path rules and axis rules declare with `mesh_axes=`."""
    if axes is None:
        return paths.declared
    return (*paths.declared, *axes.mesh_axes)


def _raise_unused(follower: "_Follower", flat: Flat, kinds: Matcher) -> None:
    """Raises `RuleError` if a rule shards no array of `flat`, the result of `init`."""
    # `None` for the leaves that follow no planned array: path rules are for these.
    followed: list[str | None] = list(flat.paths)
    for position, path in enumerate(flat.paths):
        if path in follower.paths_of_others:
            followed[position] = None
    raise_unused(
        what="rule",
        rules=follower.paths,
        flat=flat,
        decided=followed,
        by="what they follow",
    )
    for what, matcher in {**follower.bases, "memory_kinds": kinds}.items():
        raise_unused(f"`{what}` entry", matcher, flat)


def _axes_over(over: Any, plan: ShardPlan) -> Strategy | None:
    """Returns the argument `over` of `follow` as a strategy; `None` if it is `None`.
    Raises `RuleError` for a mesh axis that neither the plan's mesh has nor its rules
    declare.
    """
    if over is None:
        return None
    strategy = over if isinstance(over, Strategy) else fsdp(over)
    axis_names = plan.mesh.axis_names
    if plan.axes is not None:
        axis_names += plan.axes.mesh_axes
    for axis in strategy.axes:
        if axis not in axis_names:
            raise RuleError(
                f"`over` names mesh axis {axis!r}, but the plan's mesh is"
                f" {plan.mesh}{near(axis, axis_names)}; use its axes."
            )
    return strategy


@dataclasses.dataclass
class _Follower:
    """The arguments of one call of `follow`, and the errors of the arrays that it has
    planned.

    - `bases`: for "adapters" and "scales", the regexes and replacements that make the
      path of the base array.
    - `why_not_propagated`: why JAX cannot propagate shardings through `init`, as text;
      "" if it can.
    - `adapters`: the shapes of the adapters of each base, by the base's path.
    - `constants`: the paths of the constants that `init` returns.
    - `paths_of_others`: the paths of arrays that follow no planned array.
    - `errors`: pairs of an array's path and the error for it.
    - `strict`: if the plan is strict, the path and the plan of each array, to be
      checked. These plans lack the axes of `over`, because these may be dropped even
      under `strict`.
    """

    plan: ShardPlan
    mesh: Axes
    paths: Matcher
    bases: dict[str, Matcher]
    axes: AxisRules | None
    over: Strategy | None
    why_not_propagated: str
    adapters: dict[str, list[tuple[int, ...]]]
    constants: ConstantPaths
    paths_of_others: dict[str, None] = dataclasses.field(default_factory=dict)
    errors: list[tuple[str, Any]] = dataclasses.field(default_factory=list)
    strict: list[tuple[str, Row]] = dataclasses.field(default_factory=list)

    def row(
        self,
        path: str,
        leaf: Any,
        memory_kind: str | None,
        stacked: int,
    ) -> Row:
        """Returns the plan of the array `leaf`, a struct at `path` in the result of
        `init`, in the memory `memory_kind`; `None` for the device's default. The first
        `stacked` dimensions index stacked layers.

        An error of its rule is added to `errors`, and the array is replicated. Under a
        strict plan, the plan without the axes of `over` is added to `strict`.
        """
        shape = tuple(leaf.shape)
        row_for = ft.partial(
            row_of,
            shape=shape,
            dtype=leaf.dtype,
            mesh=self.mesh,
            memory_kind=memory_kind,
        )
        try:
            request = self.request(path, leaf, stacked)._replace(stacked=stacked)
            # Axes of `over` may be dropped also under `strict`: it checks the rest.
            if self.plan.strict and math.prod(shape) > 1:
                self.strict.append((path, row_for(request=request)))
            if shape and self.over is not None:
                request = shard_over(
                    request=request,
                    shape=shape,
                    dtype=leaf.dtype,
                    mesh=self.plan.mesh,
                    over=self.over,
                )
            return row_for(request=request)
        except (SpecError, RuleError) as error:
            self.errors.append((path, error))
            return row_for(request=NOTHING)

    def request(self, path: str, leaf: Any, stacked: int) -> Request:
        """Returns the sharding that is requested for the array `leaf` at `path`: as an
        adapter or scale of its base, by the sharding that JAX propagated or the planned
        array that it follows, or by a path rule, which shards none of the first
        `stacked` dimensions by a strategy. Otherwise it is replicated, with a reason.

        Arrays that follow no planned array are added to `paths_of_others`. Raises
        `RuleError` and `SpecError` for rules that cannot be applied.
        """
        shape = tuple(leaf.shape)
        for what, matcher in self.bases.items():
            rule_index = matcher.first(path)
            if rule_index is not None and shape:
                entry = f"{what}[{rule_index}]"
                base = self.base(entry, matcher, rule_index, path)
                partners = None if what == "scales" else self.partners(base.path, shape)
                return request_from_base(entry, base, shape, partners)
        if not shape:
            # Marks the rule as used, also one for scalars alone.
            self.paths.first(path)
            return NOTHING._replace(reasons=(nothing_to_shard(shape),))
        request = _request_from_source(path, leaf, self.plan)
        if request is not None:
            return request
        self.paths_of_others[path] = None
        rule_index = self.paths.first(path)
        if rule_index is not None:
            _, target = self.paths.rules[rule_index]
            rule = self.paths.text(rule_index)
            return request_of_target(
                target=target,
                path=path,
                leaf=leaf,
                rule=rule,
                axes=self.axes,
                mode=self.plan.mode,
                stacked=stacked,
            )
        if math.prod(shape) <= 1:
            return NOTHING._replace(reasons=(nothing_to_shard(shape),))
        if self.is_constant(path, leaf):
            reason = reason_for(Code.scalar, None, what="a constant of `init`")
            return NOTHING._replace(reasons=(reason,))
        # The axes of `over` are added next: the array has a request.
        if self.over is not None:
            return NOTHING
        why = ""
        if self.why_not_propagated:
            why = (
                " by its path, and JAX cannot follow shardings through `init`:"
                f" {self.why_not_propagated}"
            )
        what = (
            f"the array (it follows no planned one{why}; rules for such arrays go into"
            " `follow(..., paths=...)`)"
        )
        return NOTHING._replace(reasons=(reason_for(Code.unmatched, None, what=what),))

    def base(
        self,
        entry: str,
        matcher: Matcher,
        rule_index: int,
        path: str,
    ) -> LeafPlan:
        """Returns the planned array to which the array at `path` belongs by the rule
        of `matcher` with the index `rule_index`. `entry` names the rule in messages.
        """
        planned = self.plan.content.by_path
        path_of_base = base_path(matcher, rule_index, path)
        base = planned.get(path_of_base)
        if base is None:
            raise RuleError(
                f"`{entry}` makes `{path_of_base}` of this path, and the plan has no such"
                f" array{near(path_of_base, list(planned))}; give the path of the base"
                " array."
            )
        return base

    def partners(self, base_path: str, shape: tuple[int, ...]) -> tuple[Any, ...]:
        """Returns the shapes of the other adapters of a base, one of which has the
        shape `shape` itself.
        """
        others = [*self.adapters[base_path]]
        others.remove(shape)
        return tuple(others)

    def is_constant(self, path: str, leaf: Any) -> bool:
        """Whether `init` returns the same few values for all arrays, such as the
        coefficients of Muon.
        """
        size = array_bytes(tuple(leaf.shape), leaf.dtype)
        return size <= _FEW_BYTES and path in self.constants.paths


# A constant of fewer bytes has nothing to shard; a larger one may need a rule.
_FEW_BYTES = 1024


def _request_from_source(path: str, leaf: Any, plan: ShardPlan) -> Request | None:
    """Returns the request of `leaf`, the struct at `path` in the result of `init`: the
    sharding that JAX propagated.

    If JAX propagated none, it is the sharding of the planned array that the struct
    follows by its path. If it follows none, the result is `None`.
    """
    shape = tuple(leaf.shape)
    source, choices = _source(path, shape, plan)
    specs = [] if source is None else [spec_at(source, dims) for dims in choices]
    propagated_spec = PartitionSpec()
    if isinstance(leaf.sharding, NamedSharding):
        propagated_spec = canonical(leaf.sharding.spec)
    is_propagated = bool(entries_of(propagated_spec))
    if is_propagated:
        spec = propagated_spec
        rule = "the sharding that `init` gives it"
    elif source is not None:
        spec = specs[0]
        rule = f"path and shape of `{starred(source.path)}`"
    else:
        return None
    if source is None:
        return Request(spec=spec, rule=rule)
    if not is_propagated and len(set(specs)) > 1:
        spec = agreed(specs, len(shape))
        why = unaligned(source, shape, choices, spec)
        return Request(spec=spec, rule=rule, reasons=(why,))
    # The array may be transposed: then its dimensions do not correspond to those of
    # the array in its path.
    names = {at_dims(source.names, dims) for dims in choices}
    units = {at_dims(source.units, dims, 1) for dims in choices}
    if set(specs) == {spec} and len(names) == len(units) == 1:
        return Request(names=names.pop(), spec=spec, rule=rule, units=units.pop())
    return Request(spec=spec, rule=rule)


def _source(
    path: str,
    shape: tuple[int, ...],
    plan: ShardPlan,
) -> tuple[LeafPlan | None, list[Dims]]:
    """Returns the planned array that an array with this path and shape follows, and
    the ways in which its dimensions may correspond to those of `shape`. If there is
    none, the result is `(None, [])`.

    It is the array whose path is the longest suffix of `path`. If there is none, it is
    an array whose path is inside of `path`: the one that ends last, and of several such
    ones the longest. Its shape must correspond to `shape`; arrays for which it does so
    in one way come first.
    """
    planned = plan.content.by_path
    parts = path.split("/")
    doubtful: tuple[LeafPlan | None, list[Dims]] = None, []
    for stop in range(len(parts), 0, -1):
        # Only a suffix may be empty: the path of a tree that is one array.
        last_start = stop if stop == len(parts) else stop - 1
        for start in range(last_start + 1):
            leaf = planned.get("/".join(parts[start:stop]))
            choices = [] if leaf is None else correspondences(leaf.shape, shape)
            if len(choices) == 1:
                return leaf, choices
            if choices and doubtful[0] is None:
                doubtful = leaf, choices
    return doubtful

"""`follow`: plans a tree made from planned arrays, such as an optimizer's state, gradients, statistics, adapters or
scales.
"""

import contextlib
import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from .._ground.errors import LeafTypeError, RuleError, SpecError
from .._ground.reason import Code, reason
from .._ground.spec import canonical, entries_of, pinned, trimmed
from .._ground.text import between_numbers
from .._ground.tree import flatten
from .._rules import AxisRules, Fsdp, PathRules, check_axis_rules, check_path_rules, fsdp, near
from .complaints import raise_absent, raise_errors, raise_loose, raise_repeated, raise_unknown, raise_unused
from .correction import Axes, axes_of
from .decide import Draft, Matcher, Request, further, matcher_of_kinds, row_of
from .leaf import LeafPlan, Row, Skeleton, memory_kind_pairs
from .shard_plan import ShardPlan, check_plan


def follow(
    init: Callable[..., Any],
    plan: ShardPlan,
    *args: Any,
    over: str | Iterable[str] | Fsdp | None = None,
    paths: PathRules | None = None,
    axes: AxisRules | None = None,
    memory_kinds: Iterable[tuple[str, str]] | None = None,
    adapters: Iterable[tuple[str, str]] = (),
    scales: Iterable[tuple[str, str]] = (),
    unused: Literal["raise", "allow"] = "raise",
) -> ShardPlan:
    """Returns the plan of the tree that `init` makes from a planned tree: `follow(optimizer.init, params_plan)`.

    `follow` evaluates `init` over shapes that have the plan's shardings on an abstract mesh with Explicit axes. So JAX
    itself propagates the sharding of each result: moments, factored statistics, accumulators of any kind.

    Where JAX gives no sharding, `follow` looks for a planned array whose path is contained in the path of the result,
    at its end or before further names (`param_states/<path>/m`). The result is sharded like that array if it has the
    same shape, some of its dimensions, or further leading dimensions (a history), which are not sharded. Rules by path
    decide about all other arrays.

    **Arguments:**

    - `init`: a function of a tree with the plan's arrays, and of `args`. It is traced, never run. At leaves of the
        tree that are not arrays it gets an opaque object, or `None` if it fails with that object, as optimizers do.
    - `plan`: the plan of that tree.
    - `args`: the further arguments of `init`. A [`shardfx.ShardPlan`][] among them stands for its tree.
    - `over`: mesh axes over which every array is sharded in addition to the axes of the array that it follows, on
        whichever dimension has room, as in ZeRO. `fsdp("data", min_bytes=...)` does so except for small arrays.
    - `paths`: rules for arrays that follow no planned array. To change the sharding of an array that follows one, use
        [`shardfx.ShardPlan.replace`][].
    - `axes`: rules for the logical names in `paths`; `None` for the rules of the plan.
    - `memory_kinds`: as in [`shardfx.plan`][]: pairs of a regex and the memory kind of the arrays it matches.
    - `adapters`: pairs of a regex and its replacement, as in `re.sub`, that turn the path of an adapter into the path
        of its base array: `("lora_[ab]$", "weight")`. Each dimension that the adapter shares with its base is sharded
        as in the base. The rank is not sharded.
    - `scales`: the same for the scales of quantised arrays. A dimension that counts blocks of the base's elements is
        sharded as in the base if each device holds whole blocks.
    - `unused`: as in [`shardfx.plan`][], for `paths`, `memory_kinds`, `adapters` and `scales`.

    **Returns:**

    The plan of the tree that `init` returns. As in [`shardfx.plan`][], leaves that are not arrays are skipped. The
    `rule` of each leaf names the array that it follows. An array that follows none and has no rule is replicated, with
    a reason.

    **Raises:**

    Any error of `init`; `RuleError`, `SpecError` and `UnmatchedError` for rules, as [`shardfx.plan`][] does. Under a
    plan made with `strict=True`, also a `SpecError` that lists all arrays of more than one element that follow no
    planned array and have no rule, or whose rule does not fit. Axes of `over` that do not fit are never an error.

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
        raise LeafTypeError(f"`init` must be a function, not {type(init).__name__}; pass `optimizer.init`.")
    check_plan("plan", plan)
    if paths is not None:
        check_path_rules("paths", paths)
    if axes is not None:
        check_axis_rules("axes", axes)
    kinds = matcher_of_kinds(memory_kind_pairs(memory_kinds))
    made, refused = _evaluated(init, plan, args)
    flat = flatten(made)
    raise_repeated(flat)
    pairs = [*_besides("adapters", adapters), *_besides("scales", scales)]
    by_path, known = Matcher(PathRules(()) if paths is None else paths), plan.axes if axes is None else axes
    follower = _Follower(plan, axes_of(plan.mesh), by_path, known, _axes_over(over, plan), refused, pairs)
    rows, index = [], []
    for leaf, path, shaped in zip(flat.leaves, flat.paths, flat.is_array, strict=True):
        index.append(len(rows) if shaped else -1)
        if shaped:
            kind = kinds.first(path)
            rows.append(follower.row(path, leaf, None if kind is None else kinds.rules[kind][1][0]))
    raise_errors(follower.errors)
    declared = by_path.declared + (() if known is None else known.axes)
    found = Draft(flat, plan.mesh, by_path, kinds, declared, index, rows, [])
    raise_unknown(found, known)
    raise_absent(found, axes)
    if unused == "raise":
        followed = [None if path in follower.open else path for path in flat.paths]
        raise_unused("rule", by_path, flat, followed, "what they follow")
        for one in pairs:
            if one not in follower.used_pairs:
                raise RuleError(f"`{one.kind}[{one.number}]`: {one.pattern.pattern!r} matches no path of what is made.")
        raise_unused("`memory_kinds` entry", kinds, flat)
    if plan.strict:
        raise_loose(follower.loose)
    content = plan.content
    resolving = axes if content.axes is None else content.axes
    skeleton = Skeleton(flat.paths, flat.treedef)
    return ShardPlan(content.replaced(axes=resolving, rows=rows, index=index, skeleton=skeleton))


def _axes_over(over: Any, plan: ShardPlan) -> Fsdp | None:
    if over is None:
        return None
    given = over if isinstance(over, Fsdp) else fsdp(over)
    known = (*plan.mesh.axis_names, *(() if plan.axes is None else plan.axes.axes))
    for axis in given.axes:
        if axis not in known:
            raise RuleError(
                f"`over` names mesh axis {axis!r}, but the plan's mesh is {plan.mesh}{near(axis, known)}; use its axes."
            )
    return given


def _evaluated(init: Callable[..., object], plan: ShardPlan, args: tuple[object, ...]) -> tuple[Any, str]:
    """Returns the result of `init` as structs; and, if JAX could not give these shardings, its error as text,
    else "".
    """
    mesh = plan.mesh.abstract()
    explicit = AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=(AxisType.Explicit,) * len(mesh.axis_names))
    given = (plan, *args)
    # A state that holds the planned tree also holds its leaves that are not arrays, such as activation functions. But
    # an optimizer's `init` accepts only arrays. So `init` is tried with placeholders for these leaves, then with
    # `None`.
    has_others = any(isinstance(arg, ShardPlan) and -1 in arg.content.index for arg in given)
    others = (_NoArray(), None) if has_others else (None,)
    # JAX cannot give shardings to every `init` on an Explicit mesh (an ambiguous contraction, a foreign callback). Then
    # only paths and shapes decide.
    *attempts, last = itertools.product((explicit, None), others)
    refused = ""
    for abstract, other in attempts:
        try:
            return _shapes(init, given, abstract, other), "" if abstract is explicit else refused
        except Exception as error:  # JAX's sharding error is not public; the last attempt raises any other error again.
            refused = f"{type(error).__name__}: {_first_sentence(str(error))}" if abstract is explicit else refused
    return _shapes(init, given, *last), refused


def _first_sentence(text: str) -> str:
    """Returns the first sentence of a message, on one line and without its full stop."""
    return text.strip().split("\n")[0].split(". ")[0].rstrip(".")[:160]


class _NoArray:
    """A placeholder for a leaf of the planned tree that is not an array, since a plan does not hold its value."""

    def __repr__(self) -> str:
        return "a leaf that is no array"


def _shapes(init: Callable[..., object], given: tuple[object, ...], mesh: AbstractMesh | None, other: object) -> PyTree:
    structs = [_structs(arg, mesh, other) for arg in given]
    # JAX 0.11 takes the mesh of arrays that `init` makes from the context.
    with contextlib.nullcontext() if mesh is None else jax.sharding.use_abstract_mesh(mesh):
        if all(isinstance(leaf, jax.ShapeDtypeStruct | jax.Array) for leaf in jax.tree.leaves(structs)):
            # `jax.eval_shape` caches its results, Equinox's does not. But it refuses results with leaves that are not
            # arrays, and turns Python numbers into weakly typed arrays. Equinox's handles both cases.
            with contextlib.suppress(TypeError):
                made = jax.eval_shape(init, *structs)
                if not any(leaf.weak_type for leaf in jax.tree.leaves(made)):
                    return made
        return eqx.filter_eval_shape(init, *structs)


def _structs(arg: object, mesh: AbstractMesh | None, other: object) -> PyTree:
    if not isinstance(arg, ShardPlan):
        return arg
    return arg.content.tree([_struct(row, mesh) for row in arg.content.rows], other)


def _struct(row: Row, mesh: AbstractMesh | None) -> jax.ShapeDtypeStruct:
    sharding = None if mesh is None else NamedSharding(mesh, pinned(row.spec))
    return jax.ShapeDtypeStruct(row.shape, row.dtype, sharding=sharding)


class _Beside(NamedTuple):
    """A pair of regex and replacement that turns the path of an adapter or a scale into the path of its base array.

    **Arguments:**

    - `kind`: "adapters" share some dimensions with their base, "scales" hold a number per block of its elements.
    - `number`: the index of the pair among the pairs of its kind.
    - `pattern`, `base`: the regex and the replacement of `re.sub`, applied to the path.
    """

    kind: Literal["adapters", "scales"]
    number: int
    pattern: re.Pattern[str]
    base: str


def _besides(kind: Literal["adapters", "scales"], pairs: Iterable[tuple[str, str]]) -> list[_Beside]:
    """Returns the pairs of regex and replacement in the argument `kind` of `follow`; raises for an invalid one."""
    found = []
    for number, pair in enumerate(pairs):
        if isinstance(pair, str) or len(pair) != 2:
            raise RuleError(f'`{kind}[{number}]` is {pair!r}; give pairs, as in `{kind}=[("lora_[ab]$", "weight")]`.')
        try:
            found.append(_Beside(kind, number, re.compile(pair[0]), pair[1]))
        except re.error as error:
            raise RuleError(f"`{kind}[{number}]`: {pair[0]!r} is no regex: {error}.") from error
    return found


@dataclasses.dataclass
class _Follower:
    """The arguments of one call of `follow`, and the errors and arrays without a rule that it has found so far.

    **Arguments:**

    - `open`: the paths of arrays that follow no planned array.
    - `loose`: the path, the shape and the reason of each array that a strict plan refuses.
    """

    plan: ShardPlan
    mesh: Axes
    paths: Matcher
    axes: AxisRules | None
    over: Fsdp | None
    refused: str
    pairs: Sequence[_Beside]
    used_pairs: dict[_Beside, None] = dataclasses.field(default_factory=dict)
    open: dict[str, None] = dataclasses.field(default_factory=dict)
    errors: list[tuple[str, Any]] = dataclasses.field(default_factory=list)
    loose: list[tuple[str, tuple[int, ...], str]] = dataclasses.field(default_factory=list)

    def row(self, path: str, leaf: Any, memory_kind: str | None) -> Row:
        shape = tuple(leaf.shape)
        try:
            request = self.request(path, leaf)
            if self.plan.strict and math.prod(shape) > 1:
                asked = row_of(request, shape, leaf.dtype, self.mesh, memory_kind)
                self.loose += [(path, shape, str(why)) for why in asked.reasons]
            if shape and self.over is not None:
                request = further(request, shape, leaf.dtype, self.plan.mesh, self.over)
            return row_of(request, shape, leaf.dtype, self.mesh, memory_kind)
        except (SpecError, RuleError) as error:
            self.errors.append((path, error))
            return row_of(_NOTHING, shape, leaf.dtype, self.mesh, memory_kind)

    def request(self, path: str, leaf: Any) -> Request:
        shape = tuple(leaf.shape)
        if not shape:
            return _NOTHING._replace(reasons=(reason(Code.scalar, None),))
        based = _base_of(path, shape, self.plan, self.pairs)
        if based is not None:
            pair, base, dims = based
            self.used_pairs[pair] = None
            rule = f"{pair.kind}[{pair.number}] of `{'*'.join(between_numbers(base.path))}`"
            spec = trimmed(_kept(entries_of(pinned(base.spec)), dims, None) or ())
            return Request(None, spec, rule, None, (), ())
        found = _followed(path, leaf, self.plan)
        if found is not None:
            return found
        self.open[path] = None
        number = self.paths.first(path)
        if number is not None:
            return self.paths.request(number, path, leaf, self.axes, self.plan.mode)
        if self.over is not None:
            return _NOTHING
        why = f" by its path, and JAX cannot follow shardings through `init`: {self.refused}" if self.refused else ""
        what = f"the array (it follows no planned one{why}; rules for such arrays go into `follow(..., paths=...)`)"
        return _NOTHING._replace(reasons=(reason(Code.unmatched, None, what=what),))


_NOTHING = Request(None, PartitionSpec(), None, None, (), ())


def _followed(path: str, leaf: Any, plan: ShardPlan) -> Request | None:
    """Returns the request of an array from JAX's propagated sharding or from the planned array in its path; `None` if
    it has neither.
    """
    source, kept = _source(path, tuple(leaf.shape), plan)
    names, units = (None, None) if source is None else (_kept(source.names, kept, None), _kept(source.units, kept, 1))
    namesake = None if source is None else trimmed(_kept(entries_of(pinned(source.spec)), kept, None) or ())
    if isinstance(leaf.sharding, NamedSharding) and entries_of(canonical(leaf.sharding.spec)):
        spec = canonical(leaf.sharding.spec)
        if spec != namesake:
            # The array may be transposed: then its dimensions do not correspond to those of the array in its path.
            names, units = None, None
        return Request(names, spec, "the sharding that `init` gives it", units, (), ())
    if source is None or namesake is None:
        return None
    # Numbers in the path are replaced by `*`, so that repeated layers share one row.
    rule = f"path and shape of `{'*'.join(between_numbers(source.path))}`"
    return Request(names, namesake, rule, units, (), ())


def _source(path: str, shape: tuple[int, ...], plan: ShardPlan) -> tuple[LeafPlan | None, tuple[int | None, ...]]:
    """Returns the planned array whose path is the longest suffix of `path`, else the longest run of path segments
    inside it, if its shape fits.

    The second value holds for each dimension of `shape` the corresponding dimension of the planned array. It is `None`
    for a leading dimension that only the result has, such as the length of a history.
    """
    planned = plan.content.by_path
    parts = path.split("/")
    for stop in range(len(parts), 0, -1):
        # Only an end may be empty: the path of a tree that is one array.
        for start in range(stop if stop < len(parts) else stop + 1):
            leaf = planned.get("/".join(parts[start:stop]))
            kept = None if leaf is None else corresponding(leaf.shape, shape)
            if kept is not None:
                return leaf, kept
    return None, ()


def corresponding(planned: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int | None, ...] | None:
    """Returns the dimension of a planned array that each dimension of `shape` corresponds to; `None` if ambiguous or
    impossible.
    """
    more = len(shape) - len(planned)
    if more > 0:
        return (*[None] * more, *range(len(planned))) if planned and shape[more:] == planned else None
    kept = [dims for dims in itertools.combinations(range(len(planned)), len(shape)) if _at(planned, dims) == shape]
    return kept[0] if len(kept) == 1 else None


def _at(values: tuple[object, ...], dims: tuple[int, ...]) -> tuple[Any, ...]:
    return tuple(values[dim] for dim in dims)


def _kept(values: tuple[object, ...] | None, dims: tuple[int | None, ...], other: object) -> tuple[Any, ...] | None:
    """Returns `values[dim]` for each of `dims`, with `other` where `dim` is `None` or beyond the end of `values`."""
    if values is None:
        return None
    return tuple(other if dim is None or dim >= len(values) else values[dim] for dim in dims)


def _base_of(
    path: str, shape: tuple[int, ...], plan: ShardPlan, pairs: Sequence[_Beside]
) -> tuple[_Beside, LeafPlan, tuple[int | None, ...]] | None:
    """Returns the base array of the adapter or scale at `path`, with the base's dimension for each dimension of the
    array, or `None` there.
    """
    one = next((one for one in pairs if one.pattern.search(path)), None)
    if one is None:
        return None
    name, planned = one.pattern.sub(one.base, path), plan.content.by_path
    base = planned.get(name)
    if base is None:
        raise RuleError(
            f"`{one.kind}[{one.number}]` makes `{name}` of this path, and the plan has no such array"
            f"{near(name, list(planned))}; give the path of the base array."
        )
    return one, base, _base_dims(base.shape, shape, one.kind == "scales")


def _base_dims(base: tuple[int, ...], shape: tuple[int, ...], in_blocks: bool) -> tuple[int | None, ...]:
    """Returns, for each dimension of an adapter or scale, the base's dimension with the same index from the front or
    the back, if the sizes fit.
    """
    taken: list[int | None] = []
    for dim, size in enumerate(shape):
        places = (dim, dim - len(shape) + len(base))
        fits = [at for at in places if 0 <= at < len(base) and at not in taken and _fits(base[at], size, in_blocks)]
        taken.append(fits[0] if fits else None)
    return tuple(taken)


def _fits(base: int, size: int, in_blocks: bool) -> bool:
    return base == size or (in_blocks and size > 1 and base % size == 0)

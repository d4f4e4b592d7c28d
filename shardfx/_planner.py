"""Match, then resolve, then correct, per leaf: here and nowhere else."""

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from ._axis_rules import check_axis_rules
from ._complaints import raise_cut, raise_errors, raise_unmatched, raise_unused
from ._content import Content, LeafPlan, canonical_dtype, leaf_plan, memory_kind_pairs
from ._correct import corrected, spread
from ._errors import LeafTypeError, RuleError, SpecError
from ._mesh import MeshSpec
from ._names import names_of_leaves
from ._paths import PathRules, Pipeline, Replicate, check_path_rules, compiled, first_match, is_callable, is_digit_blind
from ._plan import ShardPlan
from ._reason import Code, Reason, reason, refined_reasons
from ._refine import Wish, refined_mesh, renamed, renamed_axes, renamed_entry, wishes
from ._rules import AxisRules, check_rank, resolve, units_of
from ._spec import Atomic, array_bytes
from ._tree import Flat, flatten


_NO_RULES = PathRules(())


def plan(
    tree: Any,
    mesh: MeshSpec | Mesh | AbstractMesh,
    *,
    paths: PathRules | None = None,
    names: Any = None,
    axes: AxisRules | None = None,
    mode: str | None = None,
    min_bytes: int = 0,
    memory_kinds: Iterable[tuple[str, str]] | None = None,
    unmatched: Literal["raise", "replicate"] = "raise",
    strict: bool = False,
    refine: bool = False,
) -> ShardPlan:
    """Plans how every array of a tree is sharded on a mesh. Nothing is allocated, and no device is needed.

    **Arguments:**

    - `tree`: any tree of arrays or `jax.ShapeDtypeStruct`s. Other leaves, such as the functions in an Equinox
        module, are passed over.
    - `mesh`: a MeshSpec, or a jax Mesh (whose devices the plan then has), or an AbstractMesh.
    - `paths`: rules from a leaf's path to its sharding.
    - `names`: a tree, or prefix of one, of logical names: at each leaf a tuple with one entry per dimension as in
        [`shardfx.resolve`][], or `None`. Without it, the names that modules declare with [`shardfx.field`][] are used
        if `axes` is given. A leaf that has names does not ask `paths`.
    - `axes`: rules from logical names to mesh axes.
    - `mode`: the mode in which `axes` are read.
    - `min_bytes`: arrays of fewer bytes are replicated.
    - `memory_kinds`: pairs of a regex and a memory kind, as `("opt/.*mu", "pinned_host")`; the first that matches an
        array's path holds.
    - `unmatched`: "raise": an array that neither names nor a path rule covers is an error, and so is a regex that no
        path matches. "replicate": it is replicated, with a reason.
    - `strict`: raise where a rule's sharding would have been cut down to fit. With `refine`, an array that takes only
        some parts of an axis is still cut down.
    - `refine`: split mesh axes of which a dimension takes only part: 8 kv heads on `tensor=16` become sharded 8 ways
        over `tensor_0=8` and replicated over `tensor_1=2`. The plan's mesh and rules then name the parts, devices
        stay in place, and all other arrays keep their layout. A PartitionSpec that [`shardfx.constrain`][] gets with
        the plan must name the parts too: `("tensor_0", "tensor_1")` is what `"tensor"` was.

    **Returns:**

    A [`shardfx.ShardPlan`][].

    **Raises:**

    `UnmatchedError` with all the arrays that no rule covers, largest first; `RuleError` for rules that cannot be
    applied; `SpecError` with all the arrays whose spec or names do not fit their rank.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        from jax.sharding import PartitionSpec as P
        from shardfx import MeshSpec, PathRules, fsdp, plan

        tree = {"embed": jax.ShapeDtypeStruct((50257, 768), jnp.float32), "head": jnp.ones((768, 8))}
        rules = PathRules([("embed", P("tensor", "fsdp")), (".*", fsdp("fsdp"))])
        made = plan(tree, MeshSpec({"fsdp": 4, "tensor": 2}), paths=rules)
        assert made["embed"].spec == P(None, "fsdp")
        print(made["embed"].reasons[0])  # dim 0: size 50257 is not divisible by `tensor` (2); ...
        ```
    """
    if unmatched not in ("raise", "replicate"):
        raise RuleError(f'`unmatched={unmatched!r}` is no policy of `plan`; use "raise" or "replicate".')
    if paths is not None:
        check_path_rules("paths", paths)
    if axes is not None:
        check_axis_rules("axes", axes)
    mesh_spec = MeshSpec.of(mesh).filled()
    flat = flatten(tree)
    given = names_of_leaves(names, tree, flat, axes)
    kinds = memory_kind_pairs(memory_kinds)
    kind_rules = PathRules((regex, ()) for regex, _ in kinds) if kinds else _NO_RULES
    planner = _Planner(mesh_spec, _NO_RULES if paths is None else paths, axes, mode, min_bytes, kinds, kind_rules)
    index, rows = planner.columns(flat, given)
    if unmatched == "raise":
        raise_unmatched(flat, index, rows, planner.rules)
        raise_unused("rule", planner.patterns, planner.used_paths, flat)
        raise_unused("`memory_kinds` entry", planner.kind_patterns, planner.used_kinds, flat)
    jax_mesh = mesh if isinstance(mesh, Mesh) else None
    made = ShardPlan(Content(mesh_spec, jax_mesh, axes, mode, rows, index, tuple(flat.paths), flat.treedef))
    if refine:
        content = _refined(made, min_bytes).content
        rows = [dataclasses.replace(row, reasons=refined_reasons(row.reasons)) for row in content.rows]
        made = ShardPlan(content.replaced(rows=rows))
    if strict:
        raise_cut(flat, made.content.index, made.content.rows, None if made.mesh == mesh_spec else made.mesh)
    return made


def replanned(made: ShardPlan, mesh: MeshSpec | Mesh | AbstractMesh) -> ShardPlan:
    """The plan of the same leaves by the same rules on another mesh; see `shardfx.replan`."""
    spec = MeshSpec.of(mesh).filled()
    sizes, has_auto = spec.shape, AxisType.Auto in spec.axis_types
    rows = []
    for row in made.content.rows:
        small = row.requested != row.spec == PartitionSpec() and any(why.code is Code.small for why in row.reasons)
        if small:  # on one mesh, and so on every other
            rows.append(row)
            continue
        first = _first_reasons(row, made)
        request = _Request(row.names, row.requested, row.rule, row.units, row.strategies, first)
        rows.append(_decided(request, row.shape, row.dtype, sizes, has_auto, 0, row.memory_kind))
    jax_mesh = mesh if isinstance(mesh, Mesh) else None
    return ShardPlan(made.content.replaced(mesh=spec, jax_mesh=jax_mesh, rows=rows))


def _refined(made: ShardPlan, min_bytes: int) -> ShardPlan:
    """The plan on a mesh whose axes are split where arrays could take part of one."""
    counts = collections.Counter(made.content.index)
    asked: dict[Wish, int] = {}
    wishing = []
    for number, row in enumerate(made.content.rows):
        steps = [step.axes for step in row.strategies]
        small = any(why.code is Code.small for why in row.reasons)
        found = () if small else wishes(row.requested, row.spec, row.shape, row.units, steps, made.mesh.shape)
        wishing.append(bool(found))
        for wish in found:
            saved = row.bytes_per_device * (wish.part - 1) // wish.part * counts[number]
            asked[wish] = asked.get(wish, 0) + saved
    mesh, parts = refined_mesh(made.mesh, asked)
    if not parts:
        return made
    pairs = zip(made.content.rows, wishing, strict=True)
    rows = [_refined_row(row, made, mesh, parts, min_bytes, wished) for row, wished in pairs]
    jax_mesh = None if made.jax_mesh is None else mesh.build(made.jax_mesh)
    axes = None if made.axes is None else _renamed_rules(made.axes, parts)
    return ShardPlan(made.content.replaced(mesh=mesh, jax_mesh=jax_mesh, axes=axes, rows=rows))


def _refined_row(
    row: LeafPlan, made: ShardPlan, mesh: MeshSpec, parts: dict[str, tuple[str, ...]], min_bytes: int, wished: bool
) -> LeafPlan:
    steps = tuple(dataclasses.replace(step, axes=renamed_axes(step.axes, parts)) for step in row.strategies)
    requested, first = renamed(row.requested, parts), _first_reasons(row, made)
    request = _Request(row.names, requested, row.rule, row.units, steps, first)
    has_auto = AxisType.Auto in mesh.axis_types
    again = _decided(request, row.shape, row.dtype, mesh.shape, has_auto, min_bytes, row.memory_kind)
    same = renamed(row.spec, parts)
    # Only an array that asked for a part of an axis may change its layout.
    if wished or again.spec == same:
        return again
    return dataclasses.replace(row, spec=same, requested=requested, strategies=steps)


def _renamed_rules(axes: AxisRules, parts: dict[str, tuple[str, ...]]) -> AxisRules:
    def by_part(rules: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
        return [(name, renamed_entry(target, parts)) for name, target in rules]

    modes = {mode: by_part(rules) for mode, rules in axes.modes}
    return AxisRules(by_part(axes.rules), modes=modes, units=axes.units, aliases=axes.aliases)


class _Request(NamedTuple):
    """What a rule asks for a leaf, before the mesh and the shape have their say."""

    names: tuple[Any, ...] | None
    spec: PartitionSpec
    rule: str | None
    units: tuple[int, ...] | None
    strategies: tuple[Any, ...]
    reasons: tuple[Reason, ...]


class _Planner:
    """The rules of one call of `plan`, and what it has decided so far."""

    def __init__(
        self,
        mesh: MeshSpec,
        paths: PathRules,
        axes: AxisRules | None,
        mode: str | None,
        min_bytes: int,
        kinds: tuple[tuple[str, str], ...],
        kind_rules: PathRules,
    ):
        self.sizes, self.has_auto = mesh.shape, AxisType.Auto in mesh.axis_types
        self.rules, self.axes, self.mode, self.min_bytes, self.kinds = paths.rules, axes, mode, min_bytes, kinds
        self.patterns, self.kind_patterns = compiled(paths), compiled(kind_rules)
        # Paths that differ only in digits may share a row where no regex can tell the digits apart.
        self.digits_matter = not (is_digit_blind(paths) and is_digit_blind(kind_rules))
        self.called = any(is_callable(target) for _, target in paths.rules)
        self.used_paths: dict[int, None] = {}
        self.used_kinds: dict[int, None] = {}
        self.decided: dict[Any, LeafPlan] = {}

    def columns(self, flat: Flat, given: Sequence[Any]) -> tuple[list[int], list[LeafPlan]]:
        """For each leaf the number of its row, and the rows. Leaves that are planned alike share one."""
        keys = flat.paths if self.digits_matter or self.called else flat.templates
        alike = _alike(keys, flat, given)
        numbers: dict[Any, int] = {None: -1}
        index, rows, errors = [], [], []
        for kind in alike:
            number = numbers.get(kind)
            if number is None:
                number, at = len(numbers) - 1, len(index)
                numbers[kind] = number
                try:
                    rows.append(self.row(flat.paths[at], flat.leaves[at], given[at]))
                except (SpecError, RuleError, LeafTypeError) as error:
                    errors.append((flat.paths[at], error))
            index.append(number)
        raise_errors(errors)
        return index, rows

    def row(self, path: str, leaf: Any, names: Any) -> LeafPlan:
        kind = first_match(path, self.kind_patterns)
        number = first_match(path, self.patterns) if names is None else None
        if kind is not None:
            self.used_kinds[kind] = None
        if number is not None:
            self.used_paths[number] = None
        called = number is not None and is_callable(self.rules[number][1])
        key = (number, kind, names, leaf.shape, leaf.dtype, path if called else None)
        found = self.decided.get(key)
        if found is None:
            shape, dtype = tuple(leaf.shape), _dtype(leaf)
            request = self.request(path, leaf, names, number)
            memory_kind = None if kind is None else self.kinds[kind][1]
            found = _decided(request, shape, dtype, self.sizes, self.has_auto, self.min_bytes, memory_kind)
            self.decided[key] = found
        return found

    def request(self, path: str, leaf: Any, names: Any, number: int | None) -> _Request:
        if names is not None:
            return self.named(names, len(leaf.shape), "names", None, ())
        if not leaf.shape:
            rule = None if number is None else _rule_text(number, self.rules)
            return _Request(None, PartitionSpec(), rule, None, (), (reason(Code.scalar, None),))
        if number is None:
            return _Request(None, PartitionSpec(), None, None, (), (reason(Code.unmatched, None, what="the array"),))
        target = self.rules[number][1]
        first, *strategies = target.steps if isinstance(target, Pipeline) else (target,)
        rule = _rule_text(number, self.rules)
        if is_callable(target):
            first = _called(first, path, leaf, rule)
        units = None
        if isinstance(first, Atomic):
            first, units = first.target, first.units
        if isinstance(first, tuple):
            return self.named(first, len(leaf.shape), rule, units, tuple(strategies))
        if isinstance(first, Replicate):
            first = PartitionSpec()
        elif not isinstance(first, PartitionSpec):
            strategies, first = [first, *strategies], PartitionSpec()
        return _Request(None, first, rule, _padded(units, len(leaf.shape)), tuple(strategies), ())

    def named(
        self, names: Any, rank: int, rule: str, units: tuple[int, ...] | None, strategies: tuple[Any, ...]
    ) -> _Request:
        if self.axes is None and all(name is None for name in names):
            return _Request(None, PartitionSpec(), rule, _padded(units, rank), strategies, ())
        if self.axes is None:
            raise RuleError(
                f"the names {names} need rules that say which mesh axes they use; pass `axes=AxisRules([...])`."
            )
        names = tuple(names)
        check_rank(names, rank)
        found = resolve(names, self.axes, mode=self.mode)
        units = _padded(units_of(names[:rank], self.axes) if units is None else units, rank)
        return _Request(names, found.spec, rule, units, strategies, found.reasons)


def _decided(
    request: _Request,
    shape: tuple[int, ...],
    dtype: Any,
    sizes: Mapping[str, int],
    has_auto: bool,
    min_bytes: int,
    memory_kind: str | None,
) -> LeafPlan:
    nbytes = array_bytes(shape, dtype)
    found = corrected(request.spec, shape, sizes, has_auto, request.units, nbytes, min_bytes)
    reasons = (*request.reasons, *found.reasons)
    asked = request.strategies
    strategies = tuple(dataclasses.replace(step, min_bytes=max(step.min_bytes, min_bytes)) for step in asked)
    for step in strategies:
        found = spread(found.spec, shape, sizes, step.axes, request.units, nbytes, step.min_bytes)
        reasons += found.reasons
    return leaf_plan(
        sizes,
        spec=found.spec,
        shape=shape,
        dtype=dtype,
        names=request.names,
        requested=request.spec,
        rule=request.rule,
        reasons=reasons,
        memory_kind=memory_kind,
        units=request.units,
        strategies=strategies,
    )


def _first_reasons(row: LeafPlan, made: ShardPlan) -> tuple[Reason, ...]:
    """The reasons of a row that came from its rule, not from the mesh it was corrected for."""
    if row.names is not None and made.axes is not None:
        return resolve(row.names, made.axes, mode=made.mode).reasons
    return tuple(why for why in row.reasons if why.code in (Code.scalar, Code.unmatched))


def _alike(keys: Sequence[str], flat: Flat, given: Sequence[Any]) -> Iterable[Any]:
    """For each array what decides how it is planned; `None` for what is no array."""
    if all(flat.is_array):
        shapes, dtypes = [leaf.shape for leaf in flat.leaves], [leaf.dtype for leaf in flat.leaves]
        return zip(keys, shapes, dtypes, given, strict=True)
    columns = zip(keys, flat.leaves, given, flat.is_array, strict=True)
    return [(key, leaf.shape, leaf.dtype, names) if shaped else None for key, leaf, names, shaped in columns]


def _dtype(leaf: Any) -> Any:
    """The dtype that the array has on a device."""
    if not isinstance(leaf, np.ndarray | np.generic):
        return leaf.dtype
    if not jnp.issubdtype(leaf.dtype, np.number) and leaf.dtype != bool:
        raise LeafTypeError(f"a NumPy array of dtype {leaf.dtype} cannot be put on a device; take it out of the tree.")
    return canonical_dtype(leaf.dtype)


def _called(function: Any, path: str, leaf: Any, rule: str) -> Any:
    result = function(path, leaf)
    if not isinstance(result, PartitionSpec):
        raise RuleError(f"{rule} is a callable that returned {result!r}; it must return a PartitionSpec.")
    return result


def _rule_text(number: int, rules: Sequence[Any]) -> str:
    return f"paths[{number}] {rules[number][0]}"


def _padded(units: tuple[int, ...] | None, rank: int) -> tuple[int, ...] | None:
    if units is None:
        return None
    if any(unit > 1 for unit in units[rank:]):
        raise SpecError(f"the units {units} are for rank {len(units)}, and the array has rank {rank}.")
    return (*units[:rank], *[1] * (rank - len(units)))

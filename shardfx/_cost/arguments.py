"""What a step takes, in one form: structs with shardings, whether plans, structs or a joined plan were given."""

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
from jax.sharding import NamedSharding

from .._ground.errors import LeafTypeError, PlanMismatchError
from .._ground.tree import flatten
from .._plan import LeafPlan, ShardPlan, follow
from ..topology._mesh import MeshSpec


# The plans of what a step takes: one, one for each argument, or one for each by name.
Plans = ShardPlan | Mapping[str, Any] | Sequence[Any]

_GROUPS = (
    ("KV cache", r"kv|cache|kv_?cache|past.*"),
    ("parameters", r"params?|parameters|model|weights?|variables|master(_params)?"),
    ("optimizer", r"opt|opt_?state|optim(izer)?(_?state)?|state|moments?|momentum|adam\w*"),
    ("batch", r"batch|data|tokens?|inputs?|x|y|xs|ys|targets?|labels?|images?|text|example|mask"),
)
_STATE = re.compile(r"params?|parameters|model|variables")


class Leaf(NamedTuple):
    """One array that a step takes.

    **Arguments:**

    - `path`: with the name of its argument before it.
    - `struct`: its shape, dtype and sharding.
    - `plan`: how it is planned, where a plan says so.
    - `group`: what it is for: "parameters", "optimizer: 0/mu", "batch", "KV cache", or the argument's name.
    - `argument`: the number of its tree.
    """

    path: str
    struct: jax.ShapeDtypeStruct
    plan: LeafPlan | None
    group: str
    argument: int

    @property
    def on_host(self) -> bool:
        """Whether it lies in a host's memory."""
        kind = getattr(self.struct.sharding, "memory_kind", None)
        return kind is not None and kind != "device"


class Arguments(NamedTuple):
    """What a step takes.

    **Arguments:**

    - `trees`: one for each argument, of structs with shardings; what is no array is as it was given.
    - `names`: of the arguments.
    - `plans`: the plan of each, `None` where there is none.
    - `leaves`: the arrays of all of them, in the order in which the step gets them.
    - `mesh`: of the plans.
    - `by`: how the step gets the trees: by "position", by "name", or one "tree", a dict of what it takes by name.
    """

    trees: tuple[Any, ...]
    names: tuple[str, ...]
    plans: tuple[ShardPlan | None, ...]
    leaves: tuple[Leaf, ...]
    mesh: MeshSpec
    by: Literal["position", "name", "tree"] = "position"

    @property
    def sizes(self) -> dict[str, int]:
        """Of the mesh axes."""
        return dict(zip(self.mesh.axis_names, self.mesh.axis_sizes, strict=True))

    def call(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """The step as a function of the trees."""
        if self.by == "tree":
            return lambda tree: step(**tree)
        if self.by == "name":
            return lambda *trees: step(**dict(zip(self.names, trees, strict=True)))
        return step

    def of_group(self, kind: str) -> tuple[Leaf, ...]:
        """The arrays of a group, "optimizer" for all parts of that."""
        return tuple(leaf for leaf in self.leaves if leaf.group == kind or leaf.group.startswith(f"{kind}: "))

    def over(self, kind: str, axes: Sequence[str]) -> "Arguments":
        """The same, with the arrays of a group sharded over further axes, on whichever dimension has room."""
        widened = [None if plan is None else follow(_same, plan, over=tuple(axes)) for plan in self.plans]
        shardings: dict[int, Any] = {}
        for tree, plan in zip(self.trees, widened, strict=True):
            if plan is not None:
                structs = [leaf for leaf in flatten(plan.structs).leaves if isinstance(leaf, jax.ShapeDtypeStruct)]
                own = [leaf for leaf in _arrays(tree)]
                shardings |= {id(a): b.sharding for a, b in zip(own, structs, strict=True)}
        chosen = {id(leaf.struct) for leaf in self.of_group(kind)}
        return self.with_structs(
            lambda one: (
                _struct(one.shape, one.dtype, shardings[id(one)]) if id(one) in chosen and id(one) in shardings else one
            )
        )

    def with_structs(self, change: Callable[[jax.ShapeDtypeStruct], jax.ShapeDtypeStruct]) -> "Arguments":
        """The same with other structs."""
        changed = {id(leaf.struct): change(leaf.struct) for leaf in self.leaves}
        trees = tuple(jax.tree.map(lambda leaf: changed.get(id(leaf), leaf), tree) for tree in self.trees)
        leaves = tuple(leaf._replace(struct=changed[id(leaf.struct)]) for leaf in self.leaves)
        return self._replace(trees=trees, leaves=leaves)


def arguments_of(
    plans: Any,
    args: Sequence[Any] | None = None,
    step: Callable[..., Any] | None = None,
    groups: Sequence[tuple[str, str]] = (),
) -> Arguments:
    """What a step takes, from its plans and, where they are not enough, trees of structs.

    **Arguments:**

    - `plans`: a plan for each argument, in order or by name; or one joined plan. A tree of structs or shardings may
        stand in the place of a plan.
    - `args`: trees of arrays or structs, one for each argument; those of the plans if not given.
    - `step`: names the arguments, where `plans` does not.
    - `groups`: pairs of a regex, searched in the paths of arrays, and the group that they belong to.
    """
    names, entries = _by_argument(plans, step, args)
    meshes = [mesh for entry in entries for mesh in _meshes(entry)]
    if not meshes:
        raise PlanMismatchError(
            "none of the plans says which mesh it is for; pass what `shardfx.plan(tree, mesh, ...)` returns."
        )
    if len({(mesh.axis_names, mesh.axis_sizes) for mesh in meshes}) > 1:
        raise PlanMismatchError(f"the plans are for different meshes: {', '.join(dict.fromkeys(map(str, meshes)))}.")
    given = [None] * len(entries) if args is None else list(args)
    trees = tuple(_structs(entry, tree) for entry, tree in zip(entries, given, strict=True))
    owners = tuple(entry if isinstance(entry, ShardPlan) else None for entry in entries)
    leaves = _grouped(names, trees, owners, groups)
    mesh = next((one for one in meshes if math.prod(one.dcn_sizes) > 1), meshes[0])
    return Arguments(trees, names, owners, leaves, mesh, _by(plans, trees, _parameters(step)))


def _by(plans: Any, trees: tuple[Any, ...], wanted: tuple[str, ...]) -> Literal["position", "name", "tree"]:
    if isinstance(plans, ShardPlan):
        tree = trees[0]
        return "tree" if len(wanted) > 1 and isinstance(tree, dict) and set(tree) <= set(wanted) else "position"
    return "name" if isinstance(plans, Mapping) and wanted and set(plans) <= set(wanted) else "position"


def _same(tree: Any) -> Any:
    return tree


def _by_argument(plans: Any, step: Any, args: Sequence[Any] | None) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """The names of the arguments and what is said of each."""
    wanted = _parameters(step)
    if isinstance(plans, Mapping):
        names, entries = tuple(map(str, plans)), tuple(plans.values())
    elif isinstance(plans, ShardPlan):
        names, entries = (wanted[0] if len(wanted) == 1 else "",), (plans,)
    elif isinstance(plans, Sequence) and not isinstance(plans, str):
        entries = tuple(plans)
        names = tuple(wanted[at] if at < len(wanted) else f"argument {at}" for at in range(len(entries)))
    else:
        raise LeafTypeError(
            f"`plans` must be a plan, a sequence of plans, or plans by name, not {type(plans).__name__}; pass what "
            "`shardfx.plan(tree, mesh, ...)` returns for each argument of the step."
        )
    if args is not None and len(args) != len(entries):
        raise PlanMismatchError(
            f"there are {len(entries)} plans ({', '.join(names)}) and {len(args)} arguments in `args`; give one for "
            "each."
        )
    return names, entries


def _parameters(step: Any) -> tuple[str, ...]:
    if not callable(step):
        return ()
    try:
        signature = inspect.signature(step)
    except (TypeError, ValueError):
        return ()
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return tuple(name for name, one in signature.parameters.items() if one.kind not in kinds)


def _meshes(entry: Any) -> list[MeshSpec]:
    if isinstance(entry, ShardPlan):
        return [entry.mesh if entry.jax_mesh is None else MeshSpec.of(entry.jax_mesh)]
    shardings = [getattr(leaf, "sharding", leaf) for leaf in jax.tree.leaves(entry)]
    return [MeshSpec.of(one.mesh) for one in shardings if isinstance(one, NamedSharding) and not one.mesh.empty]


def _structs(entry: Any, tree: Any) -> Any:
    """A tree of structs with shardings, from a plan, from shardings, or from structs that have them."""
    if isinstance(entry, ShardPlan):
        planned = entry.structs
        if tree is None:
            return jax.tree.map(_copied, planned)
        ours = _arrays(planned)
        theirs = _arrays(tree)
        if [(leaf.shape, leaf.dtype) for leaf in ours] != [(leaf.shape, leaf.dtype) for leaf in theirs]:
            raise PlanMismatchError(
                f"an argument has {len(theirs)} arrays, and the plan for it {len(ours)}, or their shapes and dtypes "
                "differ; pass the tree that was planned."
            )
        iterator = iter(ours)
        return jax.tree.map(lambda leaf: _copied(next(iterator)) if _is_array(leaf) else leaf, tree)
    if tree is None:
        return jax.tree.map(lambda leaf: _copied(leaf) if _is_array(leaf) else leaf, entry)
    if isinstance(entry, NamedSharding):
        return jax.tree.map(lambda leaf: _struct(leaf.shape, leaf.dtype, entry) if _is_array(leaf) else leaf, tree)
    if entry is None:
        return jax.tree.map(lambda leaf: _copied(leaf) if _is_array(leaf) else leaf, tree)
    return jax.tree.map(
        lambda leaf, one: _struct(leaf.shape, leaf.dtype, getattr(one, "sharding", one)) if _is_array(leaf) else leaf,
        tree,
        entry,
    )


def _is_array(leaf: Any) -> bool:
    return flatten([leaf]).is_array == [True]


def _arrays(tree: Any) -> list[Any]:
    flat = flatten(tree)
    return [leaf for leaf, is_array in zip(flat.leaves, flat.is_array, strict=True) if is_array]


def _copied(leaf: Any) -> jax.ShapeDtypeStruct:
    """A struct of its own: leaves are told apart by identity."""
    sharding = getattr(leaf, "sharding", None)
    return _struct(leaf.shape, leaf.dtype, sharding if isinstance(sharding, NamedSharding) else None)


def _struct(shape: tuple[int, ...], dtype: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _grouped(
    names: tuple[str, ...],
    trees: tuple[Any, ...],
    owners: tuple[ShardPlan | None, ...],
    groups: Sequence[tuple[str, str]],
) -> tuple[Leaf, ...]:
    found: list[tuple[str, str, Any, Any, int]] = []
    for at, (name, tree, owner) in enumerate(zip(names, trees, owners, strict=True)):
        flat = flatten(tree)
        arrays = [(path, leaf) for path, leaf, yes in zip(flat.paths, flat.leaves, flat.is_array, strict=True) if yes]
        planned = [None] * len(arrays) if owner is None else owner.leaves
        # A tree that holds parameters under that name holds a whole state.
        joined = any(_STATE.fullmatch(path.partition("/")[0]) for path, _ in arrays)
        for (path, leaf), plan in zip(arrays, planned, strict=True):
            top, _, rest = path.partition("/")
            own, below = (top, rest) if joined else (name, path)
            found.append((own, below, leaf, plan, at))
    # Where nothing has a known name there is one thing that is planned: parameters.
    known = {own: _kind(own) for own, *_ in found}
    if not any(known.values()) and len(known) == 1:
        known = dict.fromkeys(known, "parameters")
    ours = {below for own, below, *_ in found if known[own] == "parameters"}
    patterns = [(re.compile(regex), group) for regex, group in groups]
    leaves = []
    for own, below, leaf, plan, at in found:
        path = "/".join(part for part in (own, below) if part)
        group = known[own] or own
        if group == "optimizer":
            group = _moment(below, ours)
        group = next((named for pattern, named in patterns if pattern.search(path)), group)
        leaves.append(Leaf(path, leaf, plan, group, at))
    return tuple(leaves)


def _kind(name: str) -> str:
    return next((group for group, regex in _GROUPS if re.fullmatch(regex, name)), "")


def _moment(path: str, parameters: set[str]) -> str:
    """The group of an array of the optimizer: what stands before the path of a parameter names the moment."""
    parts = path.split("/")
    for at in range(1, len(parts)):
        if "/".join(parts[at:]) in parameters:
            return f"optimizer: {'/'.join(parts[:at])}"
    return "optimizer: the rest"

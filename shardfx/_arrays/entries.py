"""What `in_shardings` and `out_shardings` say: of each parameter, and of each leaf of a tree."""

import difflib
import inspect
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from .._ground.errors import PlanMismatchError
from .._ground.reason import Decision
from .._ground.tree import flatten
from .._plan.content import aligned, rows_of
from .._plan.leaf import LeafPlan
from .._plan.shard_plan import ShardPlan
from .._rules.axis_rules import AxisRules
from .._rules.path_rules import PathRules
from .._rules.resolve import names_text
from ..topology._mesh import MeshSpec


Donate = Literal["all", "all-except-first", "warn", "warn-except-first", "none"] | int | str | Sequence[int | str]
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _is_entry(node: Any) -> bool:
    return node is None or isinstance(node, ShardPlan)


# What is given in the place of a sharding by mistake. JAX knows further entries, layouts for one.
_NO_ENTRIES = (str, int, float, MeshSpec, AxisRules, PathRules, LeafPlan, Decision)
_NO_ENTRIES += (Mesh, AbstractMesh, jax.Device, jax.Array, np.ndarray, jax.ShapeDtypeStruct)


def checked(form: Any, what: str) -> Any:
    """The form itself, if every entry of it says on which devices arrays are to lie; `what` is its name."""
    for entry in jax.tree.leaves(form, is_leaf=lambda node: _is_entry(node) or _is_mistaken(node)):
        if isinstance(entry, PartitionSpec):
            raise PlanMismatchError(
                f"`{what}` holds the bare spec {entry}; say which mesh it is for: "
                f"`NamedSharding(plan.jax_mesh, {entry})`."
            )
        if isinstance(entry, str | tuple | list):
            names = (entry,) if isinstance(entry, str) else tuple(entry)
            raise PlanMismatchError(
                f"`{what}` holds logical names, {entry!r}, which do not say of which mesh; a plan resolves them: "
                f"`plan.sharding({names_text(names)})`."
            )
        if isinstance(entry, _NO_ENTRIES):
            raise PlanMismatchError(
                f"`{what}` holds a value of type {type(entry).__name__}, which is no sharding; give a plan, "
                "`plan.sharding(names)`, a `Sharding`, a tree of these, or `None` to take an array as it comes."
            )
        if isinstance(entry, ShardPlan) and entry.jax_mesh is None:
            raise PlanMismatchError(
                f"the plan is for the mesh {entry.mesh} and has no devices, so arrays cannot be placed by it; use "
                "`plan.on(plan.mesh.build(jax.devices()))`."
            )
    return form


def _is_mistaken(node: Any) -> bool:
    if isinstance(node, tuple | list):
        has_names = any(isinstance(one, str) for one in node)
        return has_names and all(one is None or one is ... or isinstance(one, str) for one in node)
    return isinstance(node, _NO_ENTRIES)


def key_of(sharding: Any) -> Any:
    """What is the same for equal shardings. JAX takes other entries too, layouts for one, or says what is wrong."""
    return sharding if isinstance(sharding, Sharding) else None if sharding is None else id(sharding)


def shardings_in(form: Any) -> Iterator[Any]:
    """All that a form may give an array, `None` for "as it comes" first."""
    yield None
    for entry in jax.tree.leaves(form, is_leaf=_is_entry):
        yield from entry.content.row_shardings if isinstance(entry, ShardPlan) else (entry,)


def spread(form: Any, tree: Any, what: str, *, shapes: bool = True) -> list[Any]:
    """The sharding of each leaf of a tree, `None` where JAX is to take an array as it comes.

    **Arguments:**

    - `form`: a plan, a sharding, or a tree of them that is a prefix of `tree`.
    - `what`: the tree's name in messages.
    - `shapes`: whether shapes and dtypes are compared; if not, only where the arrays are in the tree.

    **Raises:**

    `PlanMismatchError` that names the leaf that does not fit.
    """
    entries, structure = jax.tree_util.tree_flatten_with_path(form, is_leaf=_is_entry)
    try:
        parts = structure.flatten_up_to(tree)
    except ValueError as error:
        raise PlanMismatchError(
            f"the entry of `in_shardings` or `out_shardings` for {what} is no prefix of it: {error}"
        ) from error
    found: list[Any] = []
    for (path, entry), part in zip(entries, parts, strict=True):
        place = jax.tree_util.keystr(path, simple=True, separator="/")
        found += _below(entry, part, f"`{place}` of {what}" if place else what, shapes)
    return found


def _below(entry: Any, part: Any, what: str, shapes: bool) -> list[Any]:
    if isinstance(entry, ShardPlan):
        flat = flatten(part)
        try:
            index = (rows_of if shapes else aligned)(entry.content, flat)
        except PlanMismatchError as error:
            raise PlanMismatchError(f"{what} is not the tree that its plan is for: {error}") from error
        table = [*entry.content.row_shardings, None]
        return [table[i] for i in index]
    if shapes and isinstance(entry, NamedSharding):
        flat = flatten(part)
        for path, leaf, shaped in zip(flat.paths, flat.leaves, flat.is_array, strict=True):
            if shaped and not _fits(entry, leaf.shape):
                leaf_name = f"its leaf `{path}`" if path else "it"
                raise PlanMismatchError(
                    f"the sharding of {what} does not fit {leaf_name}, {leaf.dtype}{list(leaf.shape)}: the spec "
                    f"is {entry.spec} on a mesh {dict(entry.mesh.shape)}; "
                    f"`correct({entry.spec}, {tuple(leaf.shape)}, mesh)` gives one that fits."
                )
    return [entry] * len(jax.tree.leaves(part))


def _fits(sharding: NamedSharding, shape: tuple[int, ...]) -> bool:
    if len(sharding.spec) > len(shape):
        return False
    try:
        sharding.shard_shape(shape)
    except ValueError:
        return False
    return True


class Entries(NamedTuple):
    """What `in_shardings` says of each parameter, and of what `*args` and `**kwargs` take."""

    positional: tuple[Any, ...]
    more: Any
    keywords: dict[str, Any]
    others: Any

    def of(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[tuple[str, Any, Any]]:
        """For each argument of a call its name in messages, the argument, and its entry."""
        entries = [*self.positional[: len(args)], *[self.more] * (len(args) - len(self.positional))]
        found = [(f"{at}", arg, entry) for at, (arg, entry) in enumerate(zip(args, entries, strict=True))]
        keywords = kwargs.items()
        return found + [(f"`{name}`", arg, self.keywords.get(name, self.others)) for name, arg in keywords]

    def untaken(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[str]:
        """The entries whose argument a call lacks, which happens to functions with `*args` or `**kwargs` alone."""
        places = [str(at) for at, entry in enumerate(self.positional) if at >= len(args) and entry is not None]
        names = [name for name, entry in self.keywords.items() if name not in kwargs and entry is not None]
        return places + [f"`{name}`" for name in names]

    def all(self) -> list[Any]:
        return [*self.positional, self.more, *self.keywords.values(), self.others]


def by_parameter(in_shardings: Any, signature: inspect.Signature) -> Entries:
    parameters = signature.parameters.values()
    positional, keywords = _positional(signature), [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    more = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), None)
    others = next((p.name for p in parameters if p.kind is p.VAR_KEYWORD), None)
    if isinstance(in_shardings, dict) and (others is not None or set(in_shardings) <= set(signature.parameters)):
        rest = {name: entry for name, entry in in_shardings.items() if name not in (*positional, more, others)}
        given = tuple(in_shardings.get(name) for name in positional)
        return Entries(given, in_shardings.get(more), rest, in_shardings.get(others))
    if isinstance(in_shardings, dict) and not set(signature.parameters).isdisjoint(in_shardings):
        unknown = next(name for name in in_shardings if name not in signature.parameters)
        near = difflib.get_close_matches(str(unknown), list(signature.parameters), n=1)
        raise PlanMismatchError(
            f"`in_shardings` names {unknown!r}, which is no parameter ({', '.join(signature.parameters)})"
            + (f"; did you mean {near[0]!r}?" if near else "; name parameters, or give a tuple, one entry for each.")
        )
    if isinstance(in_shardings, tuple | list):
        if len(in_shardings) > len(positional) and more is None:
            raise PlanMismatchError(
                f"`in_shardings` has {len(in_shardings)} entries, but there are {len(positional)} positional "
                f"parameters ({', '.join(positional)}); give one for each, or name parameters in a dict."
            )
        missing = len(positional) - len(in_shardings)
        return Entries((*in_shardings, *[None] * missing), None, {}, None)
    return Entries((in_shardings,) * len(positional), in_shardings, dict.fromkeys(keywords, in_shardings), in_shardings)


def _positional(signature: inspect.Signature) -> list[str]:
    return [parameter.name for parameter in signature.parameters.values() if parameter.kind in _POSITIONAL]


def counts_as_given(signature: inspect.Signature) -> range:
    """With how many positional arguments, and no others, there is nothing to bind and no default to add."""
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    if inspect.Parameter.KEYWORD_ONLY in kinds:
        return range(0)
    least = len(_positional(signature))
    return range(least, sys.maxsize if inspect.Parameter.VAR_POSITIONAL in kinds else least + 1)


class Donated(NamedTuple):
    """Whose buffers may be reused: those of the arguments at these positions, or at all but these."""

    positions: frozenset[int]
    all_but: bool = False

    @property
    def some(self) -> bool:
        return self.all_but or bool(self.positions)

    def __contains__(self, position: object) -> bool:
        """Whether the argument at a position is donated; `None` stands for keyword arguments."""
        return (position in self.positions) is not self.all_but


def donated(donate: Any, signature: inspect.Signature) -> Donated:
    if donate == "none":
        return Donated(frozenset())
    if donate in ("all", "all-except-first", "warn", "warn-except-first"):
        return Donated(frozenset({0} if donate.endswith("-except-first") else ()), all_but=True)
    names = _positional(signature)
    variadic = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in signature.parameters.values())
    chosen = (donate,) if isinstance(donate, str | int) else tuple(donate)
    for one in chosen:
        if one not in names if isinstance(one, str) else one < 0 or (one >= len(names) and not variadic):
            raise ValueError(
                f"`donate` names {one!r}, which is no positional parameter ({', '.join(names)}); use those, their "
                'positions, "all", "all-except-first" or "none".'
            )
    return Donated(frozenset(names.index(one) if isinstance(one, str) else one for one in chosen))


def lacks(form: Any, tree: Any) -> list[str]:
    """Paths at which a plan was made for leaves that are no arrays, and where the tree has `None`."""
    entries, structure = jax.tree.flatten(form, is_leaf=_is_entry)
    pairs = zip(entries, structure.flatten_up_to(tree), strict=True)
    plans = [(entry.content, set(flatten(part).paths)) for entry, part in pairs if isinstance(entry, ShardPlan)]
    return [path for content, present in plans for path, i in content.numbered if i < 0 and path not in present]

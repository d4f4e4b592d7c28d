"""The arguments `in_shardings`, `out_shardings` and `donate`: the entry of each parameter and of each leaf."""

import inspect
import itertools as it
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from .._ground.errors import PlanMismatchError
from .._ground.reason import Decision
from .._ground.tree import flatten
from .._plan import LeafPlan, ShardPlan, aligned, rows_of
from .._rules import AxisRules, PathRules
from ..topology import MeshSpec


Donate = (
    bool | Literal["all", "all-except-first", "warn", "warn-except-first", "none"] | int | str | Sequence[int | str]
)
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
# Values that are passed by mistake instead of a sharding. JAX accepts other entries too, such as layouts.
_NO_ENTRIES = (str, int, float, MeshSpec, AxisRules, PathRules, LeafPlan, Decision)
_NO_ENTRIES += (Mesh, AbstractMesh, jax.Device, jax.Array, np.ndarray, jax.ShapeDtypeStruct)


def _is_entry(node: object) -> bool:
    return node is None or isinstance(node, ShardPlan)


def checked(form: object, what: str) -> Any:
    """Returns `form`, the argument named `what`, after a check. Raises if an entry is a bare PartitionSpec, or no
    sharding at all.
    """
    for entry in jax.tree.leaves(form, is_leaf=lambda node: _is_entry(node) or _is_mistaken(node)):
        if isinstance(entry, PartitionSpec):
            raise PlanMismatchError(
                f"`{what}` holds the bare spec {entry}; say which mesh it is for: "
                f"`NamedSharding(plan.jax_mesh, {entry})`."
            )
        if _is_mistaken(entry):
            raise PlanMismatchError(
                f"`{what}` holds {' '.join(repr(entry).split()):.80}, of type {type(entry).__name__}, which is no "
                "sharding; give a plan, `plan.sharding(names)`, a `Sharding`, a tree of these, or `None` to take an "
                "array as it comes."
            )
    return form


def _is_mistaken(node: object) -> bool:
    """Whether an entry is a value that is passed by mistake, such as a tuple of logical names."""
    if not isinstance(node, tuple | list):
        return isinstance(node, _NO_ENTRIES)
    return {str} <= set(map(type, node)) <= {str, type(None), type(...)}


def key_of(sharding: object) -> Any:
    """A key that equal shardings share. Other entries, such as layouts, are their own keys."""
    return sharding if sharding is None or isinstance(sharding, Sharding) else id(sharding)


def shardings_in(form: object) -> dict[Any, Any]:
    """The distinct shardings in an argument such as `in_shardings`, by their keys. `None` comes first."""
    found = {None: None}
    for entry in jax.tree.leaves(form, is_leaf=_is_entry):
        shardings = entry.content.row_shardings if isinstance(entry, ShardPlan) else (entry,)
        found |= {key_of(one): one for one in shardings}
    return found


def spread(form: object, tree: object, what: str, *, shapes: bool = True) -> list[Any]:
    """The sharding of each leaf of a tree; `None` for a leaf that keeps its own.

    **Arguments:**

    - `form`: a plan, a sharding, or a tree of them that is a prefix of `tree`.
    - `what`: the tree's name in messages.
    - `shapes`: whether shapes and dtypes are compared; if not, only where the arrays are in the tree.

    **Raises:**

    `PlanMismatchError`, with the leaf that does not fit.
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


def _below(entry: object, part: object, what: str, shapes: bool) -> list[Any]:
    if isinstance(entry, ShardPlan):
        try:
            index = (rows_of if shapes else aligned)(entry.content, flatten(part))
        except PlanMismatchError as error:
            raise PlanMismatchError(f"{what} is not the tree that its plan is for: {error}") from error
        table = [*entry.content.row_shardings, None]
        return [table[i] for i in index]
    if shapes and isinstance(entry, NamedSharding):
        flat = flatten(part)
        for path, leaf in it.compress(zip(flat.paths, flat.leaves, strict=True), flat.is_array):
            try:
                entry.check_compatible_aval(leaf.shape)
                entry.shard_shape(leaf.shape)
            except ValueError as error:
                leaf_name = f"its leaf `{path}`" if path else "it"
                raise PlanMismatchError(
                    f"the sharding of {what} does not fit {leaf_name}, {leaf.dtype}{list(leaf.shape)}: the spec "
                    f"is {entry.spec} on a mesh {dict(entry.mesh.shape)}; "
                    f"`correct({entry.spec}, {tuple(leaf.shape)}, mesh)` gives one that fits."
                ) from error
    return [entry] * len(jax.tree.leaves(part))


class Entries(NamedTuple):
    """The value of `in_shardings`: an entry for each positional or named parameter, for `*args` and for `**kwargs`."""

    known: dict[int | str, Any]
    more: Any = None
    others: Any = None

    @property
    def forms(self) -> list[Any]:
        """The entries of all parameters, as one list."""
        return [*self.known.values(), self.more, self.others]

    def of(self, args: Sequence[object], kwargs: dict[str, object]) -> list[tuple[str, Any, Any]]:
        """For each argument of a call: its name in messages, the argument, and its entry. Keywords are in
        sorted order.
        """
        found = [(f"{at}", arg, self.known.get(at, self.more)) for at, arg in enumerate(args)]
        return found + [(f"`{key}`", kwargs[key], self.known.get(key, self.others)) for key in sorted(kwargs)]


def by_parameter(in_shardings: object, signature: inspect.Signature, name: str = "the step") -> Entries:
    names, known = positional_names(signature), list(signature.parameters)
    more, others = _variadic(signature, "VAR_POSITIONAL"), _variadic(signature, "VAR_KEYWORD")
    if isinstance(in_shardings, dict):
        unknown = [key for key in in_shardings if key not in known and others is None]
        if len(unknown) == len(in_shardings) > 0:
            # One entry for all arguments, which is a dict.
            return Entries({}, in_shardings, in_shardings)
        if unknown:
            raise PlanMismatchError(
                f"`{unknown[0]}` is no parameter of {name}({', '.join(known)}), which `in_shardings` names; name "
                "parameters, or give a tuple, one entry for each."
            )
        keys = [key for key in dict.fromkeys([*known, *in_shardings]) if key not in (more, others)]
        table = {names.index(key) if key in names else key: in_shardings.get(key) for key in keys}
        return Entries(table, in_shardings.get(more), in_shardings.get(others))
    if isinstance(in_shardings, tuple | list):
        if len(in_shardings) > len(names) and more is None:
            raise PlanMismatchError(
                f"`in_shardings` has {len(in_shardings)} entries, but there are {len(names)} positional "
                f"parameters ({', '.join(names)}); give one for each, or name parameters in a dict."
            )
        return Entries(dict(enumerate(in_shardings)))
    return Entries({}, in_shardings, in_shardings)


def positional_names(signature: inspect.Signature) -> list[str]:
    return [parameter.name for parameter in signature.parameters.values() if parameter.kind in _POSITIONAL]


def parameter_names(signature: inspect.Signature, args: Sequence[object], kwargs: dict[str, object]) -> list[str]:
    """The name of each argument of a call: "params", or "xs/0" for `*xs`. Keywords are in sorted order."""
    names = positional_names(signature)
    more = [f"{_variadic(signature, 'VAR_POSITIONAL')}/{at}" for at in range(len(args) - len(names))]
    return [*names[: len(args)], *more, *sorted(kwargs)]


def arity(signature: inspect.Signature) -> int | None:
    """The number of positional arguments with which a call needs no `Signature.bind`; `None` if every call needs it."""
    count = len(positional_names(signature))
    return count if count == len(signature.parameters) else None


def _variadic(signature: inspect.Signature, kind: str) -> str | None:
    return next((one.name for one in signature.parameters.values() if one.kind.name == kind), None)


class Donated(NamedTuple):
    """The positions of the donated arguments, or of the arguments that are not donated."""

    positions: frozenset[int]
    all_but: bool = False

    def __contains__(self, position: object) -> bool:
        """Whether the argument at a position is donated; `None` stands for keyword arguments."""
        return (position in self.positions) is not self.all_but


def donated(donate: Any, signature: inspect.Signature) -> Donated:
    if isinstance(donate, bool) or donate in ("none", "all", "all-except-first", "warn", "warn-except-first"):
        first = isinstance(donate, str) and donate.endswith("-except-first")
        return Donated(frozenset({0} if first else ()), all_but=donate not in (False, "none"))
    names, variadic = positional_names(signature), _variadic(signature, "VAR_POSITIONAL") is not None
    chosen = (donate,) if isinstance(donate, str | int) else tuple(donate)
    for one in chosen:
        known = isinstance(one, int) and not isinstance(one, bool) and 0 <= one and (variadic or one < len(names))
        if one not in names and not known:
            raise ValueError(
                f"`donate` names {one!r}, which is no positional parameter ({', '.join(names)}); use those, their "
                'positions, True or "all", "all-except-first", False or "none".'
            )
    return Donated(frozenset(names.index(one) if isinstance(one, str) else one for one in chosen))


def bound(name: str, signature: inspect.Signature, args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]]:
    """The arguments of a call as the function receives them: keyword arguments become positional where they can, and
    defaults are filled in.

    **Raises:**

    `TypeError` if a call does not fit the signature.
    """
    try:
        found = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{name}{signature}: {error}") from None
    found.apply_defaults()
    return found.args, found.kwargs

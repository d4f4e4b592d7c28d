"""Reads the arguments `in_shardings`, `out_shardings` and `donate` of `filter_jit`: the
entry of each argument, and the sharding of each array.

An entry is a plan, a sharding, `None`, or a tree of these. The key of an argument is
its position, or its name if the function takes it by name only. In a table by key, the
type `int` stands for any position, as in `*args`, and the type `str` for any name, as
in `**kwargs`.
"""

import contextlib
import inspect
import itertools as it
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from .._ground.errors import LeafTypeError, PlanMismatchError, whole_number
from .._ground.reason import Decision
from .._ground.tree import flatten
from .._plan import LeafPlan, ShardPlan, aligned, at_leaves, correct, rows_of
from .._rules import AxisRules, PathRules
from ..topology import MeshSpec


Donate = (
    bool
    | Literal["all", "all-except-first", "warn", "warn-except-first", "none"]
    | int
    | str
    | Sequence[int | str]
)
# A value for each argument, by its key: its position or its name; `int` for all of
# `*args`, `str` for all of `**kwargs`.
Table: TypeAlias = dict[Any, Any]
# The key of each parameter's argument, by the parameter's name.
Keys: TypeAlias = dict[Any, Any]
# Values that are passed by mistake instead of a sharding. JAX accepts other entries
# too, such as layouts.
_NO_ENTRIES = (
    str,
    int,
    float,
    MeshSpec,
    AxisRules,
    PathRules,
    LeafPlan,
    Decision,
    PartitionSpec,
)
_NO_ENTRIES += (
    Mesh,
    AbstractMesh,
    jax.Device,
    jax.Array,
    np.ndarray,
    jax.ShapeDtypeStruct,
)


def _is_entry(node: object) -> bool:
    """Whether `node` is `None` or a plan, which JAX would take for inner nodes of a
    tree.
    """
    return node is None or isinstance(node, ShardPlan)


def _is_no_entry(node: object) -> bool:
    """Whether `node`, a value in `in_shardings` or `out_shardings`, is a mistake, such
    as a tuple of logical names.
    """
    if not isinstance(node, tuple | list):
        return isinstance(node, _NO_ENTRIES)
    return {str} <= set(map(type, node)) <= {str, type(None), type(...)}


def shardings_in(argument: object, what: str) -> list[Any]:
    """A list of `None` and each distinct sharding in `argument`, the value of
    `in_shardings` or of `out_shardings`. The shardings in a plan count too.

    `what` is the name of the argument. Raises `PlanMismatchError` if it holds a value
    that is no sharding, such as a PartitionSpec, which has no mesh.
    """
    # The keys are the shardings; a dict keeps their order.
    shardings = {None: None}
    for entry in jax.tree.leaves(
        argument, is_leaf=lambda node: _is_entry(node) or _is_no_entry(node)
    ):
        if _is_no_entry(entry):
            raise PlanMismatchError(
                f"`{what}` holds {' '.join(repr(entry).split()):.80}, of type"
                f" {type(entry).__name__}, which is no sharding; give a plan,"
                " `plan.sharding(names)`, `NamedSharding(plan.jax_mesh, spec)`, a tree"
                " of these, or `None` to take an array as it comes."
            )
        shardings_of_entry = [entry]
        if isinstance(entry, ShardPlan):
            shardings_of_entry = entry.content.row_shardings
        shardings |= dict.fromkeys(shardings_of_entry)
    return list(shardings)


def spread(
    entry_tree: object,
    tree: object,
    what: str,
    *,
    compare_shapes: bool = True,
) -> list[Any]:
    """The sharding that `entry_tree` gives to each leaf of `tree`; `None` for a leaf to
    which it gives none.

    Raises `PlanMismatchError` if `entry_tree` is no prefix of `tree`, or if an array
    does not fit its plan or sharding.

    **Arguments:**

    - `entry_tree`: a plan, a sharding, `None`, or a tree of these that is a prefix of
      `tree`.
    - `what`: the tree's name in messages.
    - `compare_shapes`: whether the shapes and dtypes of arrays are compared with those
      in the plans. Paths always are.
    """
    entries_with_paths, structure = jax.tree_util.tree_flatten_with_path(
        entry_tree, is_leaf=_is_entry
    )
    try:
        parts = structure.flatten_up_to(tree)
    except ValueError as error:
        # JAX's text ends with the whole tree.
        difference = str(error)
        if len(difference) > 120:
            difference = f"{difference[:120]}..."
        raise PlanMismatchError(
            f"the entry of `in_shardings` or `out_shardings` for {what} is no prefix of"
            f" it: {difference} Give a tuple one entry for each of its parts,"
            " with `None` for a part that is to be taken as it comes."
        ) from error
    shardings: list[Any] = []
    for (path, entry), part in zip(entries_with_paths, parts, strict=True):
        path_text = jax.tree_util.keystr(path, simple=True, separator="/")
        subject = what
        if path_text:
            subject = f"`{path_text}` of {what}"
        shardings += _shardings_of_part(entry, part, subject, compare_shapes)
    return shardings


def _shardings_of_part(
    entry: object,
    part: object,
    what: str,
    compare_shapes: bool,
) -> list[Any]:
    """The sharding that one entry gives to each leaf of `part`, the part of a tree that
    the entry is for; `None` for a leaf to which it gives none.

    `what` is the name of the part in messages. Raises `PlanMismatchError` if the paths
    of arrays differ from those of a plan, or, with `compare_shapes`, if their shapes do
    not fit.
    """
    if isinstance(entry, ShardPlan):
        try:
            flat = flatten(part)
            # For each leaf, the number of its row in the plan.
            if compare_shapes:
                row_numbers = rows_of(entry.content, flat)
            else:
                row_numbers = aligned(entry.content, flat)
        except PlanMismatchError as error:
            raise PlanMismatchError(
                f"{what} is not the tree that its plan is for: {error}"
            ) from error
        return at_leaves(entry.content.row_shardings, row_numbers)
    if compare_shapes and isinstance(entry, NamedSharding):
        flat = flatten(part)
        for path, leaf in it.compress(
            zip(flat.paths, flat.leaves, strict=True), flat.is_array
        ):
            try:
                entry.check_compatible_aval(leaf.shape)
                entry.shard_shape(leaf.shape)
            except ValueError as error:
                leaf_name = "it"
                if path:
                    leaf_name = f"its leaf `{path}`"
                raise PlanMismatchError(
                    f"the sharding of {what} does not fit {leaf_name},"
                    f" {leaf.dtype}{list(leaf.shape)}: the spec is {entry.spec} on a"
                    f" mesh {dict(entry.mesh.shape)}; `correct({entry.spec},"
                    f" {tuple(leaf.shape)}, mesh)` gives one that fits."
                    f"{_indivisible_text(entry, leaf.shape)}"
                ) from error
    return [entry] * len(jax.tree.leaves(part))


def _indivisible_text(sharding: NamedSharding, shape: tuple[int, ...]) -> str:
    """The end of a message: why the spec of a sharding does not fit `shape`, and what
    to change; empty for a spec with more entries than dimensions.
    """
    if len(sharding.spec) > len(shape):
        return ""
    reasons = correct(sharding.spec, shape, sharding.mesh).reasons
    return "".join(f" {reason}." for reason in reasons)


def refuse_what_is_planned(fn: Any, plan: ShardPlan, error: Exception) -> None:
    """Raises `LeafTypeError` if `fn`, whose call raised `error`, is the tree of `plan`,
    the plan of its results. A module may also return another one like it.
    """
    with contextlib.suppress(PlanMismatchError):
        spread(plan, fn, "", compare_shapes=False)
        raise LeafTypeError(
            f"`filter_jit` was given a {type(fn).__name__}, the tree that the plan in"
            " `out_shardings` is for, and called it; pass the function that makes it:"
            " `filter_jit(make, out_shardings=plan)(key)`."
        ) from error


def parameter_keys(signature: inspect.Signature) -> Keys:
    """The key of the argument of each parameter, by the parameter's name. The keys are
    a position; a name, if the parameter is given by name only; `int` for `*args`; `str`
    for `**kwargs`.
    """
    kinds = {inspect.Parameter.VAR_POSITIONAL: int, inspect.Parameter.VAR_KEYWORD: str}
    keys: Keys = {}
    for position, parameter in enumerate(signature.parameters.values()):
        if parameter.kind is parameter.KEYWORD_ONLY:
            keys[parameter.name] = parameter.name
        else:
            keys[parameter.name] = kinds.get(parameter.kind, position)
    return keys


def at_key(table: Table, key: object) -> Any:
    """The value for one argument: that of its own key, else that for any position or
    any name, else `None`.
    """
    return table.get(key, table.get(type(key)))


def _positional(keys: Keys) -> list[str]:
    """The names of the parameters that are given by position."""
    return [name for name, key in keys.items() if isinstance(key, int)]


class Argument(NamedTuple):
    """One argument of a call.

    **Arguments:**

    - `key`: the position of the argument, or its name if it is given by name only;
      `None` for the arrays that the function itself holds.
    - `name`: the parameter's name, or "xs/0" for the first argument of `*xs`.
    - `tree`: the value of the argument.
    """

    key: int | str | None
    name: str
    tree: Any


def arguments(
    keys: Keys,
    args: Sequence[object],
    kwargs: dict[str, object],
) -> list[Argument]:
    """The arguments of a call: those by position, then those by name in sorted order.
    `keys` has the key of the argument of each parameter.
    """
    names = _positional(keys)
    variadic = next((name for name, key in keys.items() if key is int), "")
    names += [f"{variadic}/{number}" for number in range(len(args) - len(names))]
    by_position = list(map(Argument, it.count(), names, args))
    by_name = [
        Argument(key=name, name=name, tree=kwargs[name]) for name in sorted(kwargs)
    ]
    return by_position + by_name


def entries_by_key(in_shardings: object, keys: Keys, fn_name: str) -> Table:
    """The entry of `in_shardings` for each argument, by the argument's key: its position
    or its name; `int` for all of `*args`, `str` for all of `**kwargs`.

    `in_shardings` is a tuple by position, a dict by parameter name, or one entry for
    all arguments. `keys` has the key of the argument of each parameter, by the
    parameter's name. `fn_name` is the function's name in messages.
    Raises `PlanMismatchError` for an entry whose parameter the function does not have.
    """
    if isinstance(in_shardings, dict):
        unknown_names = [
            name
            for name in in_shardings
            if name not in keys and str not in keys.values()
        ]
        if not unknown_names:
            # A parameter that the dict does not name has the entry `None`.
            entry_by_name = dict.fromkeys(keys) | in_shardings
            return {
                keys.get(name, name): entry for name, entry in entry_by_name.items()
            }
        # A dict without any parameter's name is one entry for all arguments.
        if len(unknown_names) < len(in_shardings):
            raise PlanMismatchError(
                f"`{unknown_names[0]}` is no parameter of {fn_name}({', '.join(keys)}), which"
                " `in_shardings` names; name parameters, or give a tuple, one entry"
                " for each."
            )
    elif isinstance(in_shardings, tuple | list):
        names = _positional(keys)
        if len(in_shardings) > len(names) and int not in keys.values():
            raise PlanMismatchError(
                f"`in_shardings` has {len(in_shardings)} entries, but there are"
                f" {len(names)} positional parameters ({', '.join(names)}); give one"
                " for each, or name parameters in a dict."
            )
        return dict(enumerate(in_shardings))
    return {int: in_shardings, str: in_shardings}


def _listed(donate: object) -> tuple[Any, ...]:
    """The names and positions in the argument `donate` of `filter_jit`, with Python's
    ints for those of NumPy. A value that is no iterable is the only entry.
    """
    entries: Iterable[object] = (donate,)
    if isinstance(donate, Iterable) and not isinstance(donate, str):
        try:
            entries = tuple(donate)
        except TypeError:
            # An array without dimensions has the method of iterables, and refuses.
            entries = (donate,)
    listed = []
    for entry in entries:
        position = whole_number(entry)
        listed.append(entry if position is None else position)
    return tuple(listed)


def donated_by_key(donate: Any, keys: Keys) -> Table:
    """A table that says for each argument, by its key, whether it is donated. An
    argument that the table lacks is not donated.

    The key is a position; a name for an argument that is given by name only; `int` for
    all others by position and `str` for all others by name. `donate` is the argument of
    `filter_jit`, and `keys` has the key of each parameter. Raises `ValueError` for a
    name or a position that no positional parameter has.
    """
    if isinstance(donate, bool) or donate in (
        "none",
        "all",
        "all-except-first",
        "warn",
        "warn-except-first",
    ):
        is_every_donated = donate not in (False, "none")
        exceptions = {}
        if isinstance(donate, str) and donate.endswith("-except-first"):
            exceptions = {0: False}
        return {int: is_every_donated, str: is_every_donated} | exceptions
    names = _positional(keys)
    is_variadic = int in keys.values()
    names_or_positions = _listed(donate)
    for key in names_or_positions:
        is_position = (
            isinstance(key, int)
            and not isinstance(key, bool)
            and 0 <= key
            and (is_variadic or key < len(names))
        )
        if key not in names and not is_position:
            raise ValueError(
                f"`donate` names {key!r}, which is no positional parameter"
                f' ({", ".join(names)}); use those, their positions, True or "all",'
                ' "all-except-first", False or "none".'
            )
    return {keys.get(key, key): True for key in names_or_positions}


def shown_key(key: int | str) -> str:
    """The text of an argument for messages: its position, or its name in backticks."""
    if isinstance(key, str):
        return f"`{key}`"
    return f"{key}"

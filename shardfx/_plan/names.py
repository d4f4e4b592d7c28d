"""Finds the logical names of each leaf of a tree: from the argument `names`, which may
be a prefix of the tree, or from the fields of modules.
"""

import functools as ft
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.tree_util as jtu
from jax.sharding import PartitionSpec
from jaxtyping import PyTree

from .._ground.errors import LeafTypeError, RuleError, SpecError
from .._ground.spec import UNCONSTRAINED, entries_of
from .._ground.tree import Flat, TreeDef, flatten, leaves_at
from .._rules import Atomic, AxisRules, names_text


if TYPE_CHECKING:
    # Equinox tells type checkers that `equinox.field` is a field specifier. They
    # recognise it only by that name.
    from equinox import field as field
else:
    from .declared import field as field


def _is_names(node: Any) -> bool:
    """Whether `node`, a part of the argument `names`, holds the names of one array, not
    a container of such names.
    """
    if node is None or isinstance(node, PartitionSpec):
        return True
    return type(node) in (tuple, list) and all(map(_is_name, node))


def _is_name(entry: object) -> bool:
    """Whether `entry` may stand for one dimension in the names of an array: a name,
    with or without a unit (`Atomic`), a tuple of names, `None`, UNCONSTRAINED or `...`.
    """
    if isinstance(entry, tuple | list) and not isinstance(entry, PartitionSpec):
        return bool(entry) and all(isinstance(name, str | Atomic) for name in entry)
    if entry is None or entry is UNCONSTRAINED or entry is ...:
        return True
    return isinstance(entry, str | Atomic)


def _require_one_rank(names: object, column: Sequence[object], flat: Flat) -> None:
    """Raises `SpecError` if the argument `names` is a tuple for one array, and the tree
    has arrays of other ranks. `column` has the names of each leaf; those that are
    `names` itself are checked.
    """
    if not isinstance(names, tuple) or not names:
        return
    rows = zip(column, flat.leaves, flat.paths, flat.is_array, strict=True)
    for names_of_leaf, leaf, path, is_array in rows:
        # A tuple with names for each array of a tuple is no name of one array.
        if names_of_leaf is not names or not is_array or ... in names:
            continue
        if len(leaf.shape) != len(names):
            shown = names_text(names)
            raise SpecError(
                f"`names={shown}` are for each array of the tree, and leaf `{path}` has"
                f" shape {tuple(leaf.shape)}; name the arrays one by one, as in"
                f" `names={{'w': {shown}, ...}}`, or by path, `paths=PathRules([('w',"
                f" {shown})])`."
            )


def names_of_leaves(
    names: object,
    tree: object,
    flat: Flat,
    axes: AxisRules | None,
) -> Sequence[Any]:
    """Returns the logical names of each leaf of `tree`, `None` for a leaf without
    names: from the argument `names`; or, where that is `None` and there are `axes`,
    from the fields of modules. `flat` has the leaves of the tree. Raises `RuleError`
    and `SpecError` for names that do not fit the tree.
    """
    if names is None and axes is None:
        return [None] * len(flat.leaves)
    if names is None:
        raise_unread(tree, flat)
        return flat.names
    column = _broadcast(names, tree, ())
    _require_one_rank(names, column, flat)
    for entry, path, is_array in zip(column, flat.paths, flat.is_array, strict=True):
        if is_array and not _is_names(entry):
            form = f": `({entry!r},)`" if isinstance(entry, str) else ""
            raise RuleError(
                f"leaf `{path}`: `names` holds {entry!r}; use a tuple with one name per"
                f" dimension{form}, or `None`."
            )
    leaf_names = []
    columns = zip(column, flat.is_array, flat.names, strict=True)
    for entry, is_array, declared in columns:
        names_of_leaf = _hashable(entry) if is_array else None
        if names_of_leaf is None and axes is not None:
            names_of_leaf = declared
        leaf_names.append(names_of_leaf)
    return leaf_names


def renamed(
    tree: object,
    changes: Mapping[str, object],
    *,
    names: object = None,
) -> PyTree:
    """Replaces some logical names of a tree's arrays, such as the names that another
    library's modules declare.

    **Arguments:**

    - `tree`: the tree of arrays.
    - `changes`: a dict from the path of an array, or a regex that is searched in each
      path, to new names: a tuple as in [`shardfx.plan`][], or `None` so that path rules
      shard the array.
    - `names`: the names as [`shardfx.plan`][] takes them; `None` for the names that
      modules declare.

    **Returns:**

    A tree of the names of each array, for `plan(..., names=...)`; `None` for an array
    without names.

    **Raises:**

    `UnknownPathError` for a key that matches no array; `RuleError` for a regex that
    does not compile, for names that are no prefix of the tree, and for `None` if a
    module declares names.

    !!! Example

        ```python
        import jax.numpy as jnp
        from shardfx.auto import renamed

        tree = {"wi": jnp.ones((8, 32)), "wo": jnp.ones((32, 8))}
        names = {"wi": ("embed", "mlp"), "wo": ("embed", "mlp")}
        found = renamed(tree, {"wo": ("mlp", "embed")}, names=names)
        assert found == {"wi": ("embed", "mlp"), "wo": ("mlp", "embed")}
        ```
    """
    flat = flatten(tree)
    column = list(flat.names)
    if names is not None:
        column = list(names_of_leaves(names, tree, flat, None))
    if not isinstance(changes, Mapping):
        raise RuleError(
            f"`renamed` takes a dict from paths to names, not {changes!r:.80}; write"
            ' `renamed(tree, {"wo": ("mlp", "embed")})`.'
        )
    for where, new_names in changes.items():
        if not _is_names(new_names):
            raise RuleError(
                f"`renamed`: {where!r} gets {new_names!r}; use a tuple with one name per"
                " dimension, or `None`."
            )
        head = f"`renamed({where!r}: ...)`: no array of the tree"
        for position in leaves_at(where, flat.paths, flat.is_array, head):
            if new_names is None and flat.names[position] is not None:
                raise RuleError(
                    f"`renamed`: {where!r} gets None, which leaves `{flat.paths[position]}`"
                    f" the names {names_text(flat.names[position])} that its module declares;"
                    " use `()` if it is whole."
                )
            column[position] = _hashable(new_names)
    return jax.tree.unflatten(flat.treedef, column)


def _broadcast(names: Any, node: Any, keys: tuple[Any, ...]) -> list[Any]:
    """Returns the names of each leaf below `node`, which is at the path `keys`. `names`
    is the part of the argument `names` for this node. Names at an inner node apply to
    all its leaves.
    """
    parts = jtu.default_registry.flatten_one_level_with_keys(node)
    # Pairs of a key and a child; `None` for a leaf.
    children = None if parts is None else list(parts[0])
    # The part of `names` for each child; `None` if `names` is no such node.
    names_of_children = None
    if children is not None and type(names) is type(node):
        names_of_children = _in_order_of([key for key, _ in children], names)
    # Names are tuples, too. Where the tree itself has a tuple or list, a tuple with
    # names for each child has priority.
    if _is_names(names) and (
        names_of_children is None or not all(map(_is_names, names_of_children))
    ):
        return [names] * len(jax.tree.leaves(node))
    if children is None:
        return [names]
    if names_of_children is None:
        where = jtu.keystr(keys, simple=True, separator="/")
        where_text = f"at `{where}`" if where else "at its root"
        raise RuleError(
            "`names` is no prefix of the tree:"
            f" {where_text} it has {_text(names)}, and"
            f" the tree has {_text(node)}. At each array it must have a tuple of"
            " logical names, or `None` for a whole subtree without names. By path,"
            " names go into rules: `paths=PathRules([(regex, names)])`."
        )
    pairs = zip(names_of_children, children, strict=True)
    leaf_names = []
    for names_of_child, (key, child) in pairs:
        leaf_names += _broadcast(names_of_child, child, (*keys, key))
    return leaf_names


def _in_order_of(keys: list[Any], names: Any) -> list[Any] | None:
    """Returns the children of `names`, a node of a tree, in the order of `keys`; `None`
    if it has other keys.
    """
    pairs = list(jtu.default_registry.flatten_one_level_with_keys(names)[0])
    # JAX gives all fields of a NamedTuple the key of the first one.
    if keys == [key for key, _ in pairs]:
        return [inner for _, inner in pairs]
    # An OrderedDict of the same keys may have them in another order.
    by_key = dict(pairs)
    if by_key.keys() == set(keys):
        return [by_key[key] for key in keys]
    return None


def _text(node: object) -> str:
    """Describes a node for an error message: its names, or its type and keys, without
    the values below it.
    """
    if _is_names(node):
        return f"the names {names_text(node)}"
    text = f"a {type(node).__name__}"
    parts = jtu.default_registry.flatten_one_level_with_keys(node)
    if parts is None:
        return text
    keys = [repr(jtu.keystr((key,), simple=True)) for key, _ in parts[0]]
    if not keys:
        return text
    return f"{text} with the keys {', '.join(keys[:8])}"


def _hashable(node: Any) -> Any:
    """Returns the names of one array, a PartitionSpec, tuple or list, as a tuple of
    hashable entries; anything else, such as `None`, as it is. A PartitionSpec gets
    `...` at its end.
    """
    if isinstance(node, PartitionSpec):
        # In JAX, a spec may have fewer entries than the array has dimensions.
        return (*entries_of(node), ...)
    if type(node) not in (tuple, list):
        return node
    entries = []
    for entry in node:
        if isinstance(entry, list):
            entry = tuple(entry)
        entries.append(entry)
    return tuple(entries)


def raise_module(tree: object) -> None:
    """Raises `LeafTypeError` if the tree is a module of nnx, or a dict, list or tuple
    of them: nnx's functions take the shardings of a state.
    """
    parts: list[object] = [tree]
    if isinstance(tree, dict):
        parts += tree.values()
    elif isinstance(tree, list | tuple):
        parts += tree
    for kind in map(type, parts):
        if _is_module(kind):
            raise LeafTypeError(
                f"the tree is a module of nnx, {kind.__name__}, and `nnx.jit` and"
                " `nnx.StateSharding` take the shardings of its state: plan"
                " `nnx.state(module)`, and write `nnx.jit(make,"
                " out_shardings=nnx.StateSharding(plan.shardings))`."
            )


@ft.lru_cache(maxsize=1024)
def _is_module(cls: type) -> bool:
    """Whether a class is a module or optimizer of nnx, or derives from one."""
    homes = ("flax.nnx.module", "flax.nnx.pytreelib", "flax.nnx.object")
    return any(base.__module__ in homes for base in cls.__mro__)


def raise_tied(tree: object, flat: Flat) -> None:
    """Raises `RuleError` if an nnx module holds one variable under two paths: training
    would make both differ.
    """
    first: dict[int, str] = {}
    for path, kind, box in _boxes(tree, flat):
        # Layers may share scalars, such as the counter of a random stream.
        if kind == "Variable" and any(leaf.shape for leaf in jax.tree.leaves(box)):
            other = first.setdefault(id(box), path)
            if other != path:
                raise RuleError(
                    f"`{other}` and `{path}` are one variable of an nnx module. A plan"
                    " is for a tree, in which they would be two arrays, no longer"
                    " tied: plan `nnx.state(module)`, which holds it once, and put"
                    " what comes back into the module with `nnx.update(module,"
                    " state)`."
                )


def raise_unread(tree: object, flat: Flat) -> None:
    """Raises `RuleError` if Flax variables or boxes have logical names, which a plan
    without `names` does not read.
    """
    named = []
    for path, kind, box in _boxes(tree, flat):
        if kind == "Partitioned":
            names = box.names
        elif kind == "Variable":
            names = box.get_metadata().get("out_sharding")
        elif kind == "NNXMeta":
            names = box.metadata.get("out_sharding")
        else:
            names = None
        if names is not None:
            named.append((path, names))
    # A `NamedArray` has one child, with the key 0.
    is_possible = _ends_a_path("0", flat.paths)
    if is_possible and has_named_arrays(flat.treedef):
        raise RuleError(
            "arrays of the tree carry the names of their axes, as `NamedArray`s of"
            " haliax, and only the names that `sfx.field` declares are read here. Pass"
            " `names=shardfx.interop.haliax.names_of(tree)`; or"
            " `names=jax.tree.map(lambda _: None, tree)`, if rules by path are to"
            " decide."
        )
    for path, names in named[:1]:
        raise RuleError(
            f"`{path}` carries the names {names_text(names)} of Flax, as do"
            f" {len(named)} of {sum(flat.is_array)} arrays, and only the names that"
            " `sfx.field` declares are read here. Pass"
            " `names=shardfx.interop.flax.names_of(tree)`; or"
            " `names=jax.tree.map(lambda _: None, tree)`, if rules by path are to"
            " decide."
        )


def has_named_arrays(treedef: TreeDef) -> bool:
    """Whether a tree with this structure has arrays of haliax with named axes."""
    data = treedef.node_data()
    if data is None:
        return False
    cls, _ = data
    return is_named_array(cls) or any(map(has_named_arrays, treedef.children()))


@ft.lru_cache(maxsize=1024)
def is_named_array(cls: type) -> bool:
    """Whether a class is haliax's array with named axes."""
    homes = [base.__module__ for base in cls.__mro__ if base.__name__ == "NamedArray"]
    return any(home.startswith("haliax.") for home in homes)


def _ends_a_path(ending: str, paths: Sequence[str]) -> bool:
    """Whether some path has this ending. One search in all paths as one text takes a
    fifth of the time of a search in each.
    """
    return f"{ending}\n" in "\n".join([*paths, ""])


def _boxes(tree: object, flat: Flat) -> list[tuple[str, str, Any]]:
    """Returns the path, the class and the value of each Flax box. Flax wraps an array
    in a box to add metadata.
    """
    # A Flax box (`Partitioned`, `Variable`) holds its array in the field `value`. Most
    # trees have no such path.
    if not _ends_a_path("value", flat.paths):
        return []
    keyed, _ = jtu.tree_flatten_with_path(
        tree, is_leaf=lambda node: _box_class(type(node)) is not None
    )
    boxes = []
    for path, node in keyed:
        kind = _box_class(type(node))
        if kind is not None:
            boxes.append((jtu.keystr(path, simple=True, separator="/"), kind, node))
    return boxes


@ft.lru_cache(maxsize=1024)
def _box_class(cls: type) -> str | None:
    """Returns which Flax box ("Variable", "Partitioned", "NNXMeta") a class is or
    derives from; `None` if none.
    """
    for base in cls.__mro__:
        is_box = base.__name__ in ("Variable", "Partitioned", "NNXMeta")
        if is_box and base.__module__.startswith("flax."):
            return base.__name__
    return None

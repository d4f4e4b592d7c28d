"""Flattens a tree into columns: for each leaf its path, and the logical names that
modules declare for it.

The columns depend only on the tree's structure. They are built once per distinct
subtree, because real models repeat the same layer or expert hundreds of times. The
columns of the last few structures are cached, because a model is planned, placed, saved
and loaded with one structure.
"""

import collections
import dataclasses
import difflib
import functools as ft
import itertools
import re
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, TypeAlias

import equinox as eqx
import jax
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer
from jax.sharding import PartitionSpec, Sharding
from jaxtyping import PyTree

from .errors import LeafTypeError, RuleError, UnknownPathError, of_argument


_ARRAYS = (jax.Array, Tracer, np.ndarray, np.generic, jax.ShapeDtypeStruct)
METADATA = "shardfx"
# `.name`, `['key']`, `["key"]`, `[0]` and `[<flat index 0>]`, as `jax.tree_util.keystr`
# writes them.
_MARKER = re.compile(
    r"""\.(\w+)|\['(.*?)'\]|\["(.*?)"\]|\[(?:<flat index )?(.*?)>?\]"""
)
_ZEROS = str.maketrans("123456789", "000000000")

# JAX exports its `PyTreeDef` as a value, which no checker takes for a type.
TreeDef: TypeAlias = Any


class Flat(NamedTuple):
    """A flattened tree: columns with one entry per leaf, in JAX's order.

    `templates` has the paths with every digit replaced by 0. `names` has the logical
    names that a module declares for a leaf, or `None`. `stacked` has the number of
    leading dimensions that a module declares as stacked layers.
    """

    leaves: list[Any]
    treedef: TreeDef
    paths: tuple[str, ...]
    templates: tuple[str, ...]
    names: tuple[Any, ...]
    stacked: tuple[int, ...]
    is_array: list[bool]


class _Columns(NamedTuple):
    """The columns of a subtree. Paths are relative to it, and templates are paths with
    every digit replaced by 0.

    `names` has the logical names that a module declares for a leaf, or `None`.
    `stacked` has the number of leading dimensions that a module declares as stacked
    layers.
    """

    paths: list[str]
    templates: list[str]
    names: list[Any]
    stacked: list[int]


def flatten(tree: PyTree, *, allow_specs: bool = False) -> Flat:
    """Flattens a tree into columns with one entry per leaf. Raises `LeafTypeError` if a
    leaf is a PartitionSpec or a sharding, unless `allow_specs`.
    """
    leaves, treedef = jax.tree.flatten(tree)
    paths, templates, names, stacked = _columns_of(treedef)
    leaf_types = set(map(type, leaves))
    is_array_by_type = {leaf_type: is_array_type(leaf_type) for leaf_type in leaf_types}
    is_array = [True] * len(leaves)
    if not all(is_array_by_type.values()):
        if not allow_specs:
            _refuse_specs(leaves, paths)
        is_array = [is_array_by_type[type(leaf)] for leaf in leaves]
    return Flat(
        leaves=leaves,
        treedef=treedef,
        paths=paths,
        templates=templates,
        names=names,
        stacked=stacked,
        is_array=is_array,
    )


def tree_paths(treedef: TreeDef) -> tuple[str, ...]:
    """The paths of the leaves of a tree with this structure."""
    return _columns_of(treedef)[0]


def leaves_at(
    where: str,
    paths: Sequence[str],
    is_array: Sequence[bool],
    head: str,
) -> list[int]:
    """The index of the array with the path `where`, or the indices of all arrays whose
    paths match `where` as a regex.

    `paths` and `is_array` have an entry for each leaf of the tree. Raises
    `UnknownPathError` if there is no such array, with a message that begins with
    `head`, and `RuleError` if the regex does not compile.
    """
    array_positions = list(itertools.compress(range(len(paths)), is_array))
    positions = [position for position in array_positions if paths[position] == where]
    if positions:
        return positions
    try:
        pattern = re.compile(where)
    except re.error as error:
        raise RuleError(
            f"{where!r} is the path of no array, and no regex that compiles: {error}"
        ) from error
    positions = [
        position for position in array_positions if pattern.search(paths[position])
    ]
    if not positions:
        near = near_paths(where, [paths[position] for position in array_positions])
        raise UnknownPathError(
            f"{head} has this path, or one that the regex matches{near}"
        )
    return positions


def near_paths(path: str, paths: Collection[str]) -> str:
    """The end of an error message: "; did you mean `a/w`?" if a path in `paths` is
    similar to `path`, else ".".
    """
    near = difflib.get_close_matches(path, paths, n=3, cutoff=0.5)
    if not near:
        near = [candidate for candidate in paths if path in candidate][:3]
    if not near:
        return "."
    suggestions = [f"`{candidate}`" for candidate in near]
    return f"; did you mean {' or '.join(suggestions)}?"


@ft.lru_cache(maxsize=1024)
def is_array_type(kind: type) -> bool:
    """Whether values of this type are arrays, tracers or ShapeDtypeStructs."""
    return issubclass(kind, _ARRAYS)


def is_number(leaf: object) -> bool:
    """Whether a leaf is a Python number of a built-in type; an enumeration member is
    not.
    """
    return type(leaf) in (bool, int, float, complex)


def _refuse_specs(leaves: list[Any], paths: tuple[str, ...]) -> None:
    """Raises `LeafTypeError` for the first leaf that is a PartitionSpec or a sharding."""
    for leaf, path in zip(leaves, paths, strict=True):
        if isinstance(leaf, PartitionSpec | Sharding):
            raise of_argument(
                LeafTypeError(
                    f"leaf `{path}` is {leaf!r}, but a plan is made from arrays or"
                    " ShapeDtypeStructs; pass the model's own tree, and the specs as"
                    " `paths=PathRules([...])`."
                )
            )


def _columns_of(treedef: TreeDef) -> tuple[Any, Any, Any, Any]:
    """Four columns of a tree with this structure. Each one has an entry for each leaf.

    They are the paths, the paths with every digit replaced by 0, the logical names that
    modules declare, and the numbers of leading dimensions that modules declare as
    stacked layers.
    """
    try:
        tree = _remembered(treedef)
        if tree.text is not None and tree.text != (text := str(treedef)):
            tree = _remembered_with_text(treedef, text)
        return tree.columns
    except ValueError:
        # Treedefs cannot be compared if a static field of a module is a NumPy array,
        # for example.
        return _as_tuples(_walked(treedef, None).columns)


class _Walked(NamedTuple):
    """The columns of a tree, and whether all trees with an equal treedef have the same.

    They have if all keys of dicts are texts. The keys 1, True and 1.0 are equal, and
    their texts differ.
    """

    columns: _Columns
    is_told_by_treedef: bool


# The trees that were walked before; `None` where treedefs cannot be compared.
_Seen: TypeAlias = dict[TreeDef, _Walked] | None


def _walked(treedef: TreeDef, seen: _Seen, slash: str = "") -> _Walked:
    """The columns of a tree. `seen` and `slash` are those of `_append`."""
    columns = _Columns(
        paths=[],
        templates=[],
        names=[],
        stacked=[],
    )
    is_told_by_treedef = _append(
        treedef=treedef, prefix="", template="", out=columns, seen=seen, slash=slash
    )
    return _Walked(columns, is_told_by_treedef)


class _Remembered(NamedTuple):
    """The four columns of a tree. `text` is that of its treedef, which shows the types
    of keys; `None` if all trees with an equal treedef have the same columns.
    """

    columns: tuple[Any, Any, Any, Any]
    text: str | None


@ft.lru_cache(maxsize=8)
def _remembered(treedef: TreeDef) -> _Remembered:
    """The columns of a tree, walked once for equal treedefs."""
    columns, is_told_by_treedef = _walked(treedef, {})
    text = None
    if not is_told_by_treedef:
        text = str(treedef)
    return _Remembered(_as_tuples(columns), text)


@ft.lru_cache(maxsize=8)
def _remembered_with_text(treedef: TreeDef, text: str) -> _Remembered:
    """The columns of a tree, walked once for equal treedefs with the same text."""
    return _Remembered(_as_tuples(_walked(treedef, {}).columns), text)


def _as_tuples(columns: _Columns) -> tuple[Any, Any, Any, Any]:
    paths, templates, names, stacked = map(tuple, columns)
    return paths, templates, names, stacked


def _walked_below(treedef: TreeDef, seen: _Seen) -> _Walked:
    """The columns of a subtree, from `seen` if they are there. Each path begins with
    "/".
    """
    if seen is not None and treedef in seen:
        return seen[treedef]
    walked = _walked(treedef, seen, "/")
    if seen is not None and walked.is_told_by_treedef:
        seen[treedef] = walked
    return walked


def _append(
    treedef: TreeDef,
    prefix: str,
    template: str,
    out: _Columns,
    seen: _Seen,
    slash: str,
) -> bool:
    """Appends the columns of the leaves below `treedef` to `out`. Returns whether all
    trees with an equal treedef have the same columns.

    `prefix` is the path of `treedef`, and `template` is this path with every digit
    replaced by 0. `slash` follows both: it is "/", or "" at the root of a tree. `seen`
    has the columns of the subtrees that occurred before; `None` if no two are compared.
    """
    # The type of the node, with its static data.
    data = treedef.node_data()
    if data is None:
        # `treedef` is one leaf.
        out.paths.append(prefix)
        out.templates.append(template)
        out.names.append(None)
        out.stacked.append(0)
        return True
    declared = _declared(data[0])
    children = treedef.children()
    # A subtree that occurs once is walked with its full prefix, so that each of its
    # paths is built once. A repeated subtree, such as a layer or an expert, is walked
    # once, and its columns are copied under each prefix. Hashing a treedef is the slow
    # step: it is done once per child.
    subtree_numbers = _subtree_numbers(children, seen)
    occurrences = collections.Counter(subtree_numbers)
    keys, is_told_by_treedef = _keys(treedef, data, len(children))
    # The two dicts have the numbers of subtrees as keys.
    columns_by_subtree: dict[int, _Columns] = {}
    templates_by_prefix: dict[tuple[str, int], list[str]] = {}
    for key, child, subtree_number in zip(keys, children, subtree_numbers, strict=True):
        if not child.num_leaves:
            continue
        child_path = prefix + slash + key
        child_template = template + slash + key.translate(_ZEROS)
        if occurrences[subtree_number] == 1 and key not in declared:
            is_told_by_treedef &= _append(
                treedef=child,
                prefix=child_path,
                template=child_template,
                out=out,
                seen=seen,
                slash="/",
            )
            continue
        child_columns = columns_by_subtree.get(subtree_number)
        if child_columns is None:
            walked = _walked_below(child, seen)
            child_columns = walked.columns
            if walked.is_told_by_treedef:
                columns_by_subtree[subtree_number] = child_columns
            else:
                # Equal subtrees may have other paths: each of them is walked.
                subtree_number = -1 - len(out.paths)
                is_told_by_treedef = False
        out.paths.extend(map(child_path.__add__, child_columns.paths))
        # All paths that differ only in digits have one template string, which Python
        # hashes once.
        child_templates = templates_by_prefix.get((child_template, subtree_number))
        if child_templates is None:
            child_templates = list(map(child_template.__add__, child_columns.templates))
            templates_by_prefix[child_template, subtree_number] = child_templates
        out.templates.extend(child_templates)
        _append_names(out, declared.get(key), child_columns)
    return is_told_by_treedef


def _append_names(
    out: _Columns,
    declaration: tuple[Any, tuple[Any, ...]] | None,
    columns: _Columns,
) -> None:
    """Appends the names and stacked dimensions of a subtree's leaves to `out`.
    `declaration` is the pair that `_declared` has for the attribute that holds the
    subtree; `None` if it has none.
    """
    if declaration is None:
        out.names.extend(columns.names)
        out.stacked.extend(columns.stacked)
    else:
        out.names.extend(_declared_names(declaration, columns.names))
        _, stacked_names = declaration
        out.stacked.extend(map(len(stacked_names).__add__, columns.stacked))


def _subtree_numbers(children: Sequence[TreeDef], seen: _Seen) -> Sequence[int]:
    """A number for each subtree of a node. Equal subtrees have the same, unless `seen`
    is `None`.
    """
    if seen is None:
        return range(len(children))
    number_by_subtree: dict[TreeDef, int] = {}
    numbers: list[int] = []
    for child in children:
        number = number_by_subtree.setdefault(child, len(number_by_subtree))
        numbers.append(number)
    return numbers


def _declared_names(
    declaration: tuple[Any, tuple[Any, ...]],
    inner_names: list[Any],
) -> list[Any]:
    """The logical names of the leaves of an attribute: the stacked names that its
    dataclass declares, then the names of the leaf itself.

    `declaration` is the pair that `_declared` has for the attribute: the logical names,
    and the names of the stacked dimensions. `inner_names` has for each leaf the names
    that modules inside declare, or `None`. The first names go to leaves that have none.
    """
    own_names, stacked_names = declaration
    leaf_names = []
    for names in inner_names:
        if names is None:
            names = own_names
        if stacked_names and names is not None:
            # `()` means that no dimension is sharded. After stacked names, `...` means
            # the same for the other dimensions.
            names = (*stacked_names, *(names or (...,)))
        leaf_names.append(names)
    return leaf_names


@ft.lru_cache(maxsize=1024)
def _declared(cls: type) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """The logical names that the dataclass `cls` declares for its attributes, by the
    attribute's name.

    A value is a pair: the logical names, and the names of the leading dimensions along
    which layers are stacked.
    """
    if not dataclasses.is_dataclass(cls):
        return {}
    declared = {}
    for field in dataclasses.fields(cls):
        if METADATA in field.metadata:
            declared[field.name] = field.metadata[METADATA]
    return declared


def _keys(
    treedef: TreeDef,
    data: tuple[type, Any],
    count: int,
) -> tuple[list[str], bool]:
    """The keys of the `count` children of a node, each as one segment of a path, and
    whether equal keys have the same texts: those of dicts that are texts have.

    `data` is the type of the node with its static data, which JAX keeps to make the
    node again: for a dict its keys in order, for a State the markers of its entries.
    """
    node_type, static_data = data
    if node_type is dict:
        keys = list(map(_key_text, static_data))
        return keys, all(isinstance(key, str) for key in static_data)
    if node_type is list or node_type is tuple:
        return list(map(str, range(count))), True
    if node_type is eqx.nn.State:
        return list(map(_state_key, static_data, range(count))), True
    # Only an instance knows the keys of its children. JAX demands that unflattening
    # accepts any leaves.
    node = jax.tree.unflatten(treedef, range(treedef.num_leaves))
    keyed, _ = jtu.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    keys = []
    have_texts_alone = True
    for (entry, *_), _ in keyed:
        if isinstance(entry, jtu.DictKey):
            keys.append(_key_text(entry.key))
            have_texts_alone &= isinstance(entry.key, str)
        else:
            keys.append(jtu.keystr((entry,), simple=True))
    return keys, have_texts_alone


def _key_text(key: object) -> str:
    """A key of a dict as one segment of a path. A text is itself, also a member of an
    enumeration that is a text, since it is equal to this text.
    """
    if isinstance(key, str):
        return str.__str__(key)
    return str(key)


def _state_key(marker: object, index: int) -> str:
    """The key of one entry of an `eqx.nn.State`: the path of the entry in the model,
    such as "norms.0.batch_counter".

    `marker` is the class and path that `eqx.nn.make_with_state` stores with the entry,
    "Model.norms[0].batch_counter". The key is one segment of a path, so it contains no
    "/". In a State made by hand the marker may be no text; the key is then `index`.
    """
    if not isinstance(marker, str):
        return str(index)
    keys = map("".join, _MARKER.findall(marker))
    key = ".".join(keys) or marker
    return key.replace("/", ".")

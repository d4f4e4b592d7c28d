"""The parts of a plan: `LeafPlan` is the plan of one array, `Row` the plan that equal
arrays share, and `PathTree` the structure of the tree without its arrays.
"""

import dataclasses
import functools as ft
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from .._ground.errors import PlanMismatchError, RuleError
from .._ground.misuse import lacking, refused
from .._ground.reason import Reason
from .._ground.spec import DType, array_bytes, shard_shape, without_unconstrained
from .._ground.text import array_text, printable
from .._rules import Matcher, PathRules, Units


# Of XLA; only the device itself knows which it has.
MEMORY_KINDS = (
    "device",
    "pinned_host",
    "unpinned_host",
)


@dataclasses.dataclass(frozen=True)
class LeafPlan:
    """How one array of a tree is sharded, and why.

    **Arguments:**

    - `path`, `shape`, `dtype`: the path, such as `layers/0/attn/q_proj/weight`, and the
      whole array's shape and dtype.
    - `names`: its logical names if they request the sharding, else `None`.
    - `requested`, `spec`: the spec that the rule requests, and the spec that the array
      gets, in canonical form.
    - `rule`: the path rule by index and regex, `names`, or the array that it follows;
      `None` if no rule covers it.
    - `reasons`: why `spec` differs from `requested`; see [`shardfx.Reason`][].
    - `memory_kind`: the memory that holds the shards; `None` for the device's default
      memory.
    - `units`: per dimension, the number of elements that no shard may split (a head's
      width); `None` if all are 1.
    - `strategies`: the strategies, such as `fsdp(...)`, that added mesh axes after the
      rule's spec.
    - `stacked`: the number of leading dimensions that `field(stacked=...)` declares as
      stacked layers. No strategy shards them.
    - `bytes`, `bytes_per_device`: the bytes of the whole array, and of one shard.
    """

    __module__ = "shardfx"

    path: str
    shape: tuple[int, ...]
    dtype: DType
    names: tuple[Any, ...] | None
    requested: PartitionSpec
    spec: PartitionSpec
    rule: str | None
    reasons: tuple[Reason, ...]
    memory_kind: str | None
    units: tuple[int, ...] | None
    strategies: tuple[Any, ...]
    stacked: int
    bytes: int
    bytes_per_device: int

    if not TYPE_CHECKING:
        __getitem__ = refused("leaf[{}]", "an attribute, such as `leaf.spec`")
        # Without this, `__getitem__` would make it iterable.
        __iter__ = None
        __getattr__ = lacking(
            {
                "sharding": "`leaf.spec`; `plan.shardings` is the tree of shardings",
                "size": "`math.prod(leaf.shape)`",
            }
        )

    def __repr__(self) -> str:
        """The plan on one line: shape, spec, rule, memory, bytes and reasons."""
        parts = [
            array_text(self.dtype, self.shape),
            str(self.spec),
            f"by {self.rule or 'no rule'}",
        ]
        if self.memory_kind is not None:
            parts.append(f"in {self.memory_kind}")
        parts.append(f"{self.bytes_per_device} of {self.bytes} bytes per device")
        parts += map(str, self.reasons)
        return f"LeafPlan({printable(self.path)}: {printable('; '.join(parts))})"


class Row(NamedTuple):
    """The plan that equal arrays share: the fields of their LeafPlans, except for the
    path and the bytes.

    `rule` is the rule that matched, as text; `requested` is the spec that it requests,
    and `spec` the corrected one. The first `stacked` dimensions index stacked layers.
    """

    shape: tuple[int, ...]
    dtype: DType
    names: tuple[Any, ...] | None
    requested: PartitionSpec
    spec: PartitionSpec
    rule: str | None
    reasons: tuple[Reason, ...]
    memory_kind: str | None
    units: Units | None
    strategies: tuple[Any, ...]
    stacked: int

    def byte_counts(self, sizes: Mapping[str, int]) -> tuple[int, int]:
        """Returns the bytes of the whole array and of one shard, on a mesh with these
        axis sizes.
        """
        shard = shard_shape(self.shape, without_unconstrained(self.spec), sizes)
        return array_bytes(self.shape, self.dtype), array_bytes(shard, self.dtype)


def kinds_matcher(memory_kinds: Iterable[tuple[str, str]] | None) -> Matcher:
    """Returns path rules from pairs of a regex and a memory kind of XLA. A target is a
    tuple with the memory kind.
    """
    pairs = kinds_pairs(memory_kinds)
    for regex, kind in pairs:
        if kind not in MEMORY_KINDS:
            raise RuleError(
                f"`memory_kinds` maps {regex!r} to {kind!r}; a memory kind is one of"
                f" {', '.join(MEMORY_KINDS)}."
            )
    return Matcher(PathRules((regex, (kind,)) for regex, kind in pairs))


def kinds_pairs(
    memory_kinds: Iterable[tuple[str, str]] | None,
) -> tuple[tuple[str, str], ...]:
    """The pairs of the argument `memory_kinds`. Raises `RuleError` for what are none."""
    form = '`memory_kinds` takes pairs, `[("opt/.*mu", "pinned_host")]`'
    if isinstance(memory_kinds, str):
        raise RuleError(f"{form}; for all arrays write `[('.*', {memory_kinds!r})]`.")
    if isinstance(memory_kinds, Mapping):
        raise RuleError(f"{form}, and not a mapping: pass `memory_kinds.items()`.")
    if memory_kinds is None:
        return ()
    if not isinstance(memory_kinds, Iterable):
        raise RuleError(f"{form}, and not {memory_kinds!r:.80}.")
    pairs = tuple(memory_kinds)
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise RuleError(f"{form}, and not {pair!r:.80}.")
    return pairs


def memory_kind_at(kinds: Matcher, rule_index: int | None) -> str | None:
    """Returns the memory kind of the rule with the index `rule_index` of `kinds`, the
    result of `kinds_matcher`; `None` for no rule.
    """
    if rule_index is None:
        return None
    _, (kind,) = kinds.rules[rule_index]
    return kind


@ft.lru_cache(maxsize=4096)
def named_sharding(
    mesh: Mesh | AbstractMesh,
    spec: PartitionSpec,
    memory_kind: str | None,
) -> NamedSharding:
    """Returns the NamedSharding of a planned array. It is cached: building it takes
    longer than planning the array.
    """
    kind = NamedSharding if isinstance(mesh, Mesh) else _WithoutDevices
    return kind(mesh, without_unconstrained(spec), memory_kind=memory_kind)


class _WithoutDevices(NamedSharding):
    """A NamedSharding of a plan without devices, equal to one of JAX's. What JAX asks
    first where arrays are placed raises an error that says how the plan gets devices.
    """

    @property
    def device_set(self) -> NoReturn:
        raise _no_devices()

    @property
    def _device_assignment(self) -> NoReturn:
        raise _no_devices()

    @property
    def is_fully_addressable(self) -> NoReturn:
        raise _no_devices()

    @property
    def addressable_devices(self) -> NoReturn:
        raise _no_devices()


def _no_devices() -> PlanMismatchError:
    return PlanMismatchError(
        "the plan has no devices, so its shardings place no array; take those of"
        " `plan.on(plan.mesh.build(jax.devices()))`."
    )


def canonical_dtype(dtype: DType) -> DType:
    """Returns the dtype of a NumPy array of `dtype` on a device, such as float32 for
    float64 unless x64 is enabled.
    """
    if jax.numpy.issubdtype(dtype, jax.dtypes.extended):
        return dtype
    return jax.dtypes.canonicalize_dtype(dtype)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class PathTree:
    """The structure of a planned tree with the path of each leaf, without the arrays.

    `order` has for each leaf of `treedef` its index in `paths`; `None` means 0, 1, and
    so on. A plan read from JSON may have another order, because JAX sorts dict keys.
    Its `treedef` has dicts in the place of modules, and `structure` is the JSON value
    with the modules' class names; `None` for a plan of a given tree.
    """

    paths: tuple[str, ...]
    treedef: Any
    order: Sequence[int] | None = None
    structure: Any = None

    @ft.cached_property
    def encoded(self) -> object:
        """The structure as a JSON value, with the names of the modules' classes."""
        if self.structure is not None:
            return self.structure
        try:
            return _encode_structure(self.treedef, {}).value
        except ValueError:
            # Treedefs cannot be compared if a static field of a module is a NumPy
            # array, for example.
            return _encode_structure(self.treedef, None).value

    @property
    def indices(self) -> PyTree:
        """The tree with a number at each leaf: 0, 1, and so on, in the order of
        `jax.tree.leaves`.
        """
        return jax.tree.unflatten(self.treedef, range(self.treedef.num_leaves))

    def in_order(self, values: Sequence[object]) -> Sequence[Any]:
        """Reorders `values`, one per leaf, from the order of `paths` to the order of
        the tree.
        """
        if self.order is None:
            return values
        return [values[i] for i in self.order]

    def filled(self, values: Sequence[object]) -> PyTree:
        """Returns the tree with `values` at its leaves. `values` has the order of
        `paths`.
        """
        return jax.tree.unflatten(self.treedef, self.in_order(values))


class _Encoded(NamedTuple):
    """The JSON value of a treedef, and whether equal treedefs have the same: the keys 1
    and True of dicts are equal, and have two.
    """

    value: object
    is_told_by_treedef: bool


_LEAF = _Encoded("leaf", True)
_EMPTY = _Encoded(None, True)


def _encode_structure(treedef: Any, seen: dict[object, _Encoded] | None) -> _Encoded:
    """Encodes a treedef as a JSON value: dicts, lists and tuples as such, other nodes
    by the name of their class. `seen` maps treedefs of subtrees to their JSON values,
    so that equal subtrees share one value; `None` if no two are compared.
    """
    # A node's class and its metadata, which are the keys of a dict; `None` for a leaf.
    data = treedef.node_data()
    if data is None:
        if treedef.num_leaves:
            return _LEAF
        return _EMPTY
    # Layers and experts repeat: equal subtrees share one value.
    if seen is not None and treedef in seen:
        return seen[treedef]

    kind, metadata = data
    is_told_by_treedef = True
    children = []
    for child in treedef.children():
        encoded_child = _encode_structure(child, seen)
        children.append(encoded_child.value)
        is_told_by_treedef &= encoded_child.is_told_by_treedef
    value: object = None
    if kind is dict:
        is_told_by_treedef &= all(isinstance(key, str) for key in metadata)
        keys = map(_encode_key, metadata)
        members = [list(member) for member in zip(keys, children, strict=True)]
        value = {"dict": members}
    elif kind is list or kind is tuple:
        value = {kind.__name__: children}
    elif kind is not type(None):
        value = {
            "node": f"{kind.__module__}.{kind.__qualname__}",
            "children": children,
        }
    encoded = _Encoded(value, is_told_by_treedef)
    if seen is not None and is_told_by_treedef:
        seen[treedef] = encoded
    return encoded


def _encode_key(key: object) -> object:
    """A key of a dict as a JSON value: a string as itself, another key with the name of
    its type.
    """
    if isinstance(key, str):
        return key
    return {type(key).__name__: repr(key)}


def decode_structure(data: object, paths: list[str]) -> PyTree:
    """Rebuilds the tree from `data`, its JSON value, with the index in `paths` at each
    leaf. Nodes of other types than dict, list and tuple, such as modules, become dicts,
    with keys from `paths`, the paths of the leaves.
    """
    return _StructureReader(paths).tree(data, "")


@dataclasses.dataclass
class _StructureReader:
    """Rebuilds a tree from its JSON value. `index` counts the leaves that are rebuilt.
    The prefixes of paths are those of the leaves below a node, up to its children.
    """

    paths: list[str]
    index: int = 0

    def tree(self, data: Any, prefix: str) -> Any:
        """The part of the tree whose JSON value is `data`."""
        if data is None:
            return None
        if data == "leaf":
            self.index += 1
            return self.index - 1
        (kind, parts), *_ = data.items()
        if kind in ("list", "tuple"):
            items = []
            for position, part in enumerate(parts):
                items.append(self.tree(part, f"{prefix}{position}/"))
            if kind == "tuple":
                return tuple(items)
            return items
        if kind == "dict":
            named: dict[object, Any] = {}
            keys = _decode_keys([encoded_key for encoded_key, _ in parts])
            for key, (_, part) in zip(keys, parts, strict=True):
                named[key] = self.tree(part, f"{prefix}{key}/")
            return named
        return self.node(data["children"], prefix)

    def node(self, children: Sequence[Any], prefix: str) -> dict[str, Any]:
        """The children of a node of another type, by their names in the leaves' paths."""
        named: dict[str, Any] = {}
        first = self.index
        for position, part in enumerate(children):
            start = self.index
            # The attribute under which the node holds its next leaf, from the leaf's
            # path.
            path = self.paths[start] if start < len(self.paths) else ""
            name = str(position)
            if path.startswith(prefix):
                name = path.removeprefix(prefix)
            if part != "leaf":
                name = name.split("/")[0]
            child = self.tree(part, f"{prefix}{name}/")
            # No path contains the name of an attribute without leaves.
            if self.index == start:
                continue
            # Keys of a mapping may have slashes, and the same text before them.
            if name in named:
                self.index = first
                return self.node_of_slashes(children, prefix)
            named[name] = child
        return named

    def node_of_slashes(self, children: Sequence[Any], prefix: str) -> dict[str, Any]:
        """The children of a node, each by what the paths of its leaves have in common."""
        named: dict[str, Any] = {}
        for part in children:
            count = _leaf_count(part)
            if not count:
                continue
            paths = self.paths[self.index : self.index + count]
            name = _common_key(paths, prefix, part == "leaf")
            while name in named:
                name += "'"
            named[name] = self.tree(part, f"{prefix}{name}/")
        return named


def _leaf_count(data: Any) -> int:
    """The number of leaves in the JSON value of a tree's structure."""
    if data is None:
        return 0
    if data == "leaf":
        return 1
    if "dict" in data:
        return sum(_leaf_count(part) for _, part in data["dict"])
    for kind in ("list", "tuple", "children"):
        if kind in data:
            return sum(map(_leaf_count, data[kind]))
    return 0


def _common_key(paths: Sequence[str], prefix: str, is_leaf: bool) -> str:
    """What the paths of the leaves below one child of a node have in common behind
    `prefix`. A child that is a leaf has all of its path, and a child with one leaf all
    but the leaf's own key.
    """
    parts = [path.removeprefix(prefix).split("/") for path in paths]
    if len(parts) == 1:
        (keys,) = parts
        return "/".join(keys if is_leaf else keys[:-1]) or keys[0]
    common: list[str] = []
    for column in zip(*parts, strict=False):
        if len(set(column)) > 1:
            break
        common.append(column[0])
    return "/".join(common) or parts[0][0]


def _decode_keys(encoded_keys: list[Any]) -> list[Any]:
    """The keys of a dict that `_encode_key` encoded."""
    types = set(map(type, encoded_keys))
    if types == {str}:
        return encoded_keys
    keys = list(map(_decode_key, encoded_keys))
    # JAX sorts the keys, and cannot compare a text with a number.
    if len({isinstance(key, str) for key in keys}) > 1:
        keys = list(map(str, keys))
    return keys


def _decode_key(key: Any) -> Any:
    """The key of a dict that `_encode_key` encoded. Keys of other types than `str` and
    `int` become their text.
    """
    if isinstance(key, str):
        return key
    ((kind, text),) = key.items()
    if kind == "int":
        return int(text)
    return text

"""What a plan says of one array, and the row that arrays which are planned alike share."""

import dataclasses
import functools as ft
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from .._ground.errors import RuleError
from .._ground.reason import Reason
from .._ground.spec import array_bytes, pinned, shard_shape
from .._ground.text import array_text, printable


# The kinds of memory that XLA has; which of them a device has, only the device knows.
MEMORY_KINDS = ("device", "pinned_host", "unpinned_host")


@dataclasses.dataclass(frozen=True)
class LeafPlan:
    """How one array of a tree is placed, and why.

    **Arguments:**

    - `path`: where it is in the tree, as `layers/0/attn/q_proj/weight`.
    - `shape`, `dtype`: of the whole array.
    - `names`: its logical names, if names decided.
    - `requested`: the spec that the rule asked for.
    - `spec`: the spec that it gets, in canonical form.
    - `rule`: what decided: a path rule by index and regex, `names`, or what it follows; `None` where nothing did.
    - `reasons`: why `spec` is not `requested`; see [`shardfx.Reason`][].
    - `memory_kind`: `None` for the device's default memory.
    - `units`: per dimension, how many elements may not be cut apart; `None` where any cut will do.
    - `strategies`: the `fsdp(...)` steps that refined `requested`.
    - `bytes`, `bytes_per_device`: of the whole array, and of one shard.
    """

    __module__ = "shardfx"

    path: str
    shape: tuple[int, ...]
    dtype: Any
    names: tuple[Any, ...] | None
    requested: PartitionSpec
    spec: PartitionSpec
    rule: str | None
    reasons: tuple[Reason, ...]
    memory_kind: str | None
    units: tuple[int, ...] | None
    strategies: tuple[Any, ...]
    bytes: int
    bytes_per_device: int

    def __repr__(self) -> str:
        told = [array_text(self.dtype, self.shape), str(self.spec), f"by {self.rule or 'no rule'}"]
        told += [] if self.memory_kind is None else [f"in {self.memory_kind}"]
        told += [f"{self.bytes_per_device} of {self.bytes} bytes per device", *map(str, self.reasons)]
        return f"LeafPlan({printable(self.path)}: {printable('; '.join(told))})"


class Row(NamedTuple):
    """How arrays that are planned alike are placed, and why: the fields of their LeafPlans, but for path and bytes."""

    shape: tuple[int, ...]
    dtype: Any
    names: tuple[Any, ...] | None
    requested: PartitionSpec
    spec: PartitionSpec
    rule: str | None
    reasons: tuple[Reason, ...]
    memory_kind: str | None
    units: tuple[int, ...] | None
    strategies: tuple[Any, ...]

    def byte_counts(self, sizes: Mapping[str, int]) -> tuple[int, int]:
        """The bytes of the whole array, and of one shard on a mesh of axis `sizes`."""
        shard = shard_shape(self.shape, pinned(self.spec), sizes)
        return array_bytes(self.shape, self.dtype), array_bytes(shard, self.dtype)


def memory_kind_pairs(given: Iterable[tuple[str, str]] | None) -> tuple[tuple[str, str], ...]:
    """The pairs of a regex and a memory kind, each of a kind that exists."""
    pairs = tuple(given or ())
    for regex, kind in pairs:
        if kind not in MEMORY_KINDS:
            raise RuleError(
                f"`memory_kinds` maps {regex!r} to {kind!r}; a memory kind is one of {', '.join(MEMORY_KINDS)}."
            )
    return pairs


@ft.lru_cache(maxsize=4096)
def named_sharding(mesh: Mesh | AbstractMesh, spec: PartitionSpec, memory_kind: str | None) -> NamedSharding:
    """The sharding that JAX gets for a planned array; making one costs more than planning the array."""
    return NamedSharding(mesh, pinned(spec), memory_kind=memory_kind)


def canonical_dtype(dtype: Any) -> Any:
    """The dtype that JAX gives to a NumPy array of `dtype`."""
    if jax.numpy.issubdtype(dtype, jax.dtypes.extended):
        return dtype
    return jax.dtypes.canonicalize_dtype(dtype)

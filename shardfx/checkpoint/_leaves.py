"""What of a tree `save` writes: each array under its path, keys as their bits, and Python's numbers."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .._ground.errors import CheckpointError, LeafTypeError
from .._ground.text import printable
from .._ground.tree import flatten
from .._plan.content import rows_of
from .._plan.planner import plan
from .._plan.shard_plan import ShardPlan
from .._rules.path_rules import PathRules
from ..topology._mesh import MeshSpec
from . import _keys as prng, _numbers as numbers, _safetensors as safetensors


@dataclasses.dataclass(frozen=True)
class Leaves:
    """What is written.

    **Arguments:**

    - `arrays`: path and value of each; of PRNG keys, their bits.
    - `kinds`: the dtypes, by path, that safetensors has no name for.
    - `numbers`: Python's numbers, by path.
    """

    arrays: Sequence[tuple[str, Any]]
    kinds: Mapping[str, str]
    numbers: Mapping[str, Any]


def plan_of_arrays(tree: Any) -> ShardPlan | None:
    """The plan that says how the arrays of a tree lie; `None` where they lie on no mesh, or on several."""
    flat = flatten(tree)
    known = {
        path: leaf.sharding
        for path, leaf in zip(flat.paths, flat.leaves, strict=True)
        if isinstance(leaf, jax.Array) and isinstance(leaf.sharding, NamedSharding)
    }
    meshes = list(dict.fromkeys(sharding.mesh for sharding in known.values()))
    if len(meshes) != 1 or not isinstance(meshes[0], Mesh):
        return None

    def spec(path: str, leaf: Any) -> PartitionSpec:
        return known[path].spec if path in known else PartitionSpec()

    return plan(tree, meshes[0], paths=PathRules([(".*", spec)]))


def plan_of_nothing(tree: Any) -> ShardPlan:
    """A plan that says which leaves of a tree are arrays, and nothing about where they lie."""
    return plan(tree, MeshSpec({"device": 1}), paths=PathRules([(".*", PartitionSpec())]), unused="allow")


def leaves_to_save(tree: Any, plan: ShardPlan) -> Leaves:
    """The leaves of the planned tree that a checkpoint keeps; an error for one that it could not give back."""
    flat = flatten(tree)
    index = rows_of(plan.content, flat)
    found = [
        (path, leaf, plan.content.rows[i])
        for path, leaf, i in zip(flat.paths, flat.leaves, index, strict=True)
        if i >= 0
    ]
    kept = {path: leaf for path, leaf in zip(flat.paths, flat.leaves, strict=True) if numbers.is_number(leaf)}
    for path, leaf, row in found:
        _check_leaf(path, leaf, row.dtype)
    twice = [path for path, *_ in found if path in kept]
    if twice:
        raise CheckpointError(
            f"two leaves have the path `{printable(twice[0])}`; a checkpoint needs one name for each array."
        )
    arrays = [(path, jax.random.key_data(leaf) if prng.is_key(leaf.dtype) else leaf) for path, leaf, _ in found]
    kinds = {path: _kind(leaf.dtype) for path, leaf, _ in found if leaf.dtype not in safetensors.NAMES}
    return Leaves(arrays, kinds, kept)


def _kind(dtype: Any) -> str:
    return prng.key_name(dtype) if prng.is_key(dtype) else np.dtype(dtype).name


def _check_leaf(path: str, leaf: Any, planned: Any) -> None:
    name = printable(path)
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
        raise LeafTypeError(f"leaf `{name}` is a {type(leaf).__name__}, which holds no values to save.")
    if path == safetensors.METADATA:
        raise CheckpointError(
            f"a leaf cannot be saved as `{path}`: safetensors keeps what it says about a file under this name, and "
            "nothing could read the file. Rename it, or put it into a dict."
        )
    if any(0xD800 <= ord(char) <= 0xDFFF for char in path):
        raise CheckpointError(f"leaf `{name}`: its path holds half of a character, which no file can; rename it.")
    if prng.is_key(leaf.dtype):
        return
    if safetensors.stored_name(leaf.dtype) is None:
        raise LeafTypeError(f"leaf `{name}` is {leaf.dtype}, which safetensors cannot hold; cast it before saving.")
    if leaf.dtype != planned:
        raise LeafTypeError(
            f"leaf `{name}` is {leaf.dtype} in NumPy and {planned} in the plan, which was made without 64-bit dtypes, "
            f"so `load` could not give it back under this plan. Save `leaf.astype({str(planned)!r})` if its values "
            'fit, or plan after `jax.config.update("jax_enable_x64", True)`.'
        )

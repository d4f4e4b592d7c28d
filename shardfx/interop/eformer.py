"""eformer's functions: shardings for a checkpoint, moving trees to shardings, and the
mesh axes in specs.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.tree_util as jtu
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import PyTree

from .._ground.errors import (
    CheckpointError,
    LeafTypeError,
    MeshError,
    PlanMismatchError,
    SpecError,
    check_type,
)
from .._ground.spec import canonical, entries_of, entry_axes
from .._ground.text import quoted
from .._ground.tree import tree_paths
from .._plan import correct
from ..topology import MeshSpec


AnyMesh = MeshSpec | Mesh | AbstractMesh | None


def shardings(
    index: Any,
    mesh: AnyMesh,
    *,
    default: object = None,
    prefix: str | None = None,
) -> dict[str, PyTree]:
    """A sharding for every array of a checkpoint. Only the headers of its files are
    read.

    **Arguments:**

    - `index`: an Index from [`shardfx.checkpoint.read_index`][].
    - `mesh`: the mesh for the arrays. If it is `None`, an array's sharding is `None`
      unless `default` gives a Sharding.
    - `default`: the sharding of each array. `None` replicates it. A Sharding is used as
      it is. A PartitionSpec loses entries beyond the array's rank and is corrected to
      its shape, as [`shardfx.correct`][] does. A function takes a
      `checkpoint.ArrayEntry` and returns a Sharding, a PartitionSpec or `None`.
    - `prefix`: selects the arrays below `prefix/`, with paths relative to it. In an
      eformer index of version 2, it selects the arrays that are listed under this
      prefix.

    **Returns:**

    Nested dicts, one level for each "/" in a path, with a Sharding (or `None`) for each
    array.

    **Raises:**

    `CheckpointError` for a prefix that the checkpoint lacks, if the path of one array
    is a prefix of another's, or for a PartitionSpec with entries for an array of
    unknown shape; `MeshError` for a PartitionSpec without a mesh; `SpecError`, with the
    array's path, if a Sharding does not fit an array; `LeafTypeError` for a default of
    another type.

    !!! Example

        ```python
        import tempfile
        import jax
        import numpy as np
        from jax.sharding import PartitionSpec as P
        from safetensors.numpy import save_file
        from shardfx import MeshSpec, checkpoint
        from shardfx.interop import eformer

        directory = tempfile.mkdtemp()
        arrays = {"model/w": np.ones((8, 8)), "step": np.ones(())}
        save_file(arrays, f"{directory}/model.safetensors")
        mesh = MeshSpec({"dp": 2, "tp": 4}).build(jax.devices())
        index = checkpoint.read_index(directory)
        tree = eformer.shardings(index, mesh, default=P("dp", "tp"))
        assert tree["model"]["w"].spec == P("dp", "tp") and tree["step"].spec == P()
        ```
    """
    return jax.tree.map(
        lambda entry: _resolved(
            requested=default,
            array=entry,
            path=entry.path,
            mesh=mesh,
            is_corrected=True,
        ),
        index.tree(prefix),
    )


def _resolved(
    requested: Any,
    array: Any,
    path: str,
    mesh: AnyMesh,
    is_corrected: bool,
) -> Sharding | None:
    """The sharding of an array for `requested`: a Sharding, a PartitionSpec, a function
    that returns one, or `None`, which replicates.

    `mesh` is for a PartitionSpec and for `None`. `is_corrected` says whether a
    PartitionSpec is corrected to the array's shape, as by [`shardfx.correct`][]. Errors
    name the array by its `path`.
    """
    is_sharding = isinstance(requested, PartitionSpec | Sharding)
    if callable(requested) and not is_sharding:
        requested = requested(array)
    if requested is None and mesh is None:
        return None
    sharding = requested
    if requested is None or isinstance(requested, PartitionSpec):
        spec = PartitionSpec() if requested is None else requested
        if mesh is None:
            raise MeshError(
                "PartitionSpecs cut arrays over a mesh, but there is none; pass"
                " `mesh=`."
            )
        if is_corrected and array.shape is not None:
            entries = entries_of(spec)[: len(array.shape)]
            spec = correct(PartitionSpec(*entries), array.shape, mesh).spec
        elif is_corrected and entries_of(spec):
            raise CheckpointError(
                f"the checkpoint does not say the shape of {quoted(path)}, so {spec}"
                " cannot be corrected to it; give a function as `default`, or a"
                " Sharding."
            )
        if isinstance(mesh, MeshSpec):
            mesh = mesh.abstract()
        sharding = NamedSharding(mesh, spec)
    if not isinstance(sharding, Sharding):
        raise LeafTypeError(
            f"leaf `{path}`: {type(sharding).__name__} is no sharding; give a Sharding, a"
            " PartitionSpec with a mesh, `None`, or a function from the array to one"
            " of these. Rules decide by `shardfx.plan(checkpoint.structs(index), mesh,"
            " paths=rules).shardings`."
        )
    if array.shape is None:
        return sharding
    try:
        if isinstance(sharding, NamedSharding):
            entries = entries_of(canonical(sharding.spec))
            if len(entries) > len(array.shape):
                raise ValueError(
                    f"{sharding.spec} has more entries than the array has dimensions"
                )
        sharding.shard_shape(array.shape)
    except ValueError as error:
        raise SpecError(
            f"leaf `{path}`, shape {array.shape}: {sharding} does not fit:"
            f" {str(error).splitlines()[0]}; give a spec that divides it, such as the"
            " one that `shardfx.correct(spec, shape, mesh)` returns."
        ) from error
    return sharding


def apply(tree: PyTree, shardings: PyTree, *, mesh: Mesh | None = None) -> PyTree:
    """Moves the arrays of a tree to the shardings in another tree. All errors are
    raised before any array moves.

    **Arguments:**

    - `tree`: arrays; leaves of other types come back as they are.
    - `shardings`: a tree of the same structure, or a prefix of it. A leaf of a prefix
      applies to all leaves below it. Each leaf is a Sharding; a PartitionSpec on
      `mesh`; a function from the array to one of these; or `None`, which replicates the
      array over `mesh`, or puts it on the default device if `mesh` is not given.
    - `mesh`: the mesh for PartitionSpecs and `None`.

    **Returns:**

    The tree with its arrays moved.

    **Raises:**

    `PlanMismatchError` with all differences of the structures; `SpecError`, with the
    leaf's path, if a sharding does not fit a leaf; `LeafTypeError` for a leaf of
    `shardings` of another type.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        from jax.sharding import PartitionSpec as P
        from shardfx import MeshSpec
        from shardfx.interop import eformer

        mesh = MeshSpec({"dp": 2, "tp": 4}).build(jax.devices())
        tree = {"w": jnp.ones((8, 8)), "norm": {"scale": jnp.ones(8), "bias": jnp.ones(8)}}
        placed = eformer.apply(tree, {"w": P("dp", "tp"), "norm": None}, mesh=mesh)
        assert placed["w"].sharding.spec == P("dp", "tp")
        ```
    """
    try:
        shardings_of_leaves = jax.tree.broadcast(
            shardings, tree, is_leaf=lambda node: node is None
        )
    except ValueError as error:
        lines = "\n  ".join(map(str, structure_diff(shardings, tree)))
        raise PlanMismatchError(
            "the shardings are no prefix of the tree (left: the shardings, right: the"
            f" tree):\n  {lines}\nGive one sharding for each leaf, or for a branch of"
            " them."
        ) from error
    leaves, treedef = jax.tree.flatten(tree)
    requested_shardings = treedef.flatten_up_to(shardings_of_leaves)
    rows = zip(leaves, tree_paths(treedef), requested_shardings, strict=True)
    # By the numbers of the leaves that are arrays.
    arrays: dict[int, Any] = {}
    targets: dict[int, Sharding | None] = {}
    for number, (leaf, path, requested) in enumerate(rows):
        if isinstance(leaf, jax.Array | np.ndarray | np.generic):
            arrays[number] = leaf
            targets[number] = _resolved(
                requested=requested,
                array=leaf,
                path=path,
                mesh=mesh,
                is_corrected=False,
            )

    moved = jax.device_put(list(arrays.values()), list(targets.values()))
    for number, array in zip(arrays, moved, strict=True):
        leaves[number] = array
    return jax.tree.unflatten(treedef, leaves)


@dataclasses.dataclass(frozen=True)
class Difference:
    """A path at which the structures of two trees differ.

    **Arguments:**

    - `path`: the path, such as `layers/0/weight`; empty at the root.
    - `left`, `right`: a text that describes each tree's node at the path; "nothing" if
      the tree has no such node.
    """

    path: str
    left: str
    right: str

    def __str__(self) -> str:
        return f"`{self.path}`: {self.left} in the left tree, {self.right} in the right"


def structure_diff(a: PyTree, b: PyTree) -> tuple[Difference, ...]:
    """All differences between the structures of two trees. The values of leaves are
    ignored.

    `None`, PartitionSpecs and Shardings are leaves, so a tree of shardings has the
    structure of its tree of arrays.

    **Arguments:**

    - `a`, `b`: the trees, left and right.

    **Returns:**

    The differences in the order of `a`, then the leaves that only `b` has. The tuple is
    empty if the structures are equal.

    !!! Example

        ```python
        from shardfx.interop import eformer

        assert eformer.structure_diff({"a": None}, {"a": 1.0}) == ()
        for difference in eformer.structure_diff({"a": 1, "b": 2}, {"a": [1, 2]}):
            print(difference)
        ```
        ```text
        `a`: a leaf in the left tree, list in the right
        `b`: a leaf in the left tree, nothing in the right
        ```
    """
    return tuple(_differences(a, b, ""))


def _differences(a: PyTree, b: PyTree, path: str) -> Iterator[Difference]:
    """Yields the differences of the structures of two trees, both at `path`. Below
    nodes of different types there are none.
    """
    node_a = _node(a)
    node_b = _node(b)
    if node_a.kind is not node_b.kind:
        yield Difference(
            path=path,
            left=node_a.name,
            right=node_b.name,
        )
        return
    differ_below = False
    for key in dict.fromkeys([*node_a.children, *node_b.children]):
        child_path = f"{path}/{key}" if path else key
        if key in node_a.children and key in node_b.children:
            child_a = node_a.children[key]
            child_b = node_b.children[key]
            below = list(_differences(child_a, child_b, child_path))
        else:
            name_a = _child_name(node_a, key)
            name_b = _child_name(node_b, key)
            below = [
                Difference(
                    path=child_path,
                    left=name_a,
                    right=name_b,
                )
            ]
        differ_below = differ_below or bool(below)
        yield from below
    if not differ_below and node_a.data != node_b.data:
        yield Difference(
            path=path,
            left=_with_data(node_a),
            right=_with_data(node_b),
        )


def _child_name(node: Any, key: object) -> str:
    """The type of a node's child in words; "nothing" if there is no such child."""
    if key not in node.children:
        return "nothing"
    return _node(node.children[key]).name


def _with_data(node: Any) -> str:
    """A node in words, with its static data."""
    return f"{node.name} with {node.data!r:.100}"


class _Node(NamedTuple):
    """A node of a tree: its type (`None` for a leaf), its static data, and its children
    by key.
    """

    kind: type | None
    data: object
    children: dict[str, PyTree]

    @property
    def name(self) -> str:
        if self.kind is None:
            return "a leaf"
        return self.kind.__name__


def _node(tree: PyTree) -> _Node:
    """The root node of a tree: its type, its static data, such as the keys of a dict,
    and its children by key. `None` counts as a leaf; a leaf has no type.
    """
    children, treedef = jtu.tree_flatten_with_path(
        tree, is_leaf=lambda node: node is not tree
    )
    data = treedef.node_data()
    # `None` is a leaf here, and a node without children in JAX.
    if tree is None or data is None:
        return _Node(kind=None, data=None, children={})
    kind, static_data = data
    child_by_key = {jtu.keystr(key, simple=True): child for key, child in children}
    return _Node(kind=kind, data=static_data, children=child_by_key)


def replicate(tree: PyTree, mesh: Mesh) -> PyTree:
    """The tree with every array replicated on all devices of a mesh. Nothing is
    compiled.

    **Arguments:**

    - `tree`: jax and numpy arrays; leaves of other types come back as they are.
    - `mesh`: the mesh of the devices.

    **Returns:**

    The tree with replicated arrays.

    !!! Example

        ```python
        import jax
        import numpy as np
        from shardfx import MeshSpec
        from shardfx.interop import eformer

        mesh = MeshSpec({"dp": 8}).build(jax.devices())
        tree = eformer.replicate({"w": np.ones((4, 4)), "step": 3}, mesh)
        assert tree["w"].sharding.is_fully_replicated and tree["step"] == 3
        ```
    """
    check_type(
        what="mesh",
        value=mesh,
        expected=Mesh,
        error=MeshError,
        fix="make one of devices with `spec.build(jax.devices())`",
    )
    return apply(tree, NamedSharding(mesh, PartitionSpec()))


def axis_names_of(specs: PyTree) -> tuple[str, ...]:
    """The mesh axes in a tree of specs, each once, in the order of first appearance.

    **Arguments:**

    - `specs`: a tree whose leaves are PartitionSpecs or NamedShardings; `None` has no
      axes.

    **Returns:**

    A tuple of mesh axis names, which is equal on all processes.

    **Raises:**

    `SpecError` for any other leaf, and for an invalid entry of a spec.

    !!! Example

        ```python
        from jax.sharding import PartitionSpec as P
        from shardfx.interop.eformer import axis_names_of

        specs = {"a": P("data"), "b": P(None, ("tensor", "data"))}
        assert axis_names_of(specs) == ("data", "tensor")
        ```
    """
    axes: dict[str, None] = {}
    for leaf in jax.tree.leaves(specs):
        spec = leaf
        if isinstance(leaf, NamedSharding):
            spec = leaf.spec
        if not isinstance(spec, PartitionSpec):
            raise SpecError(
                f"a tree of specs holds {leaf!r}, which is neither a PartitionSpec nor"
                " a NamedSharding."
            )
        for entry in entries_of(spec):
            axes |= dict.fromkeys(entry_axes(entry))
    return tuple(axes)

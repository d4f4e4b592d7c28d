"""The field's ways to reshard a tree, each as a function from a tree in its source
shardings to one in `dst`.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec


Move = Callable[[Any], Any]


def whole_jit(src: Any, dst: Any) -> Move:
    """One program for the whole tree: the identity with `out_shardings`."""
    return jax.jit(lambda tree: tree, in_shardings=(src,), out_shardings=dst)


def jit_per_leaf(dst: Any) -> Move:
    """The identity for each leaf; leaves with one target share a function."""
    targets, treedef = jax.tree.flatten(dst)
    jitted = {target: jax.jit(lambda x: x, out_shardings=target) for target in targets}
    jitted_functions = [jitted[target] for target in targets]
    functions = jax.tree.unflatten(treedef, jitted_functions)
    return leaf_by_leaf(functions)


def device_put(dst: Any) -> Move:
    """`jax.device_put` of the whole tree."""
    return lambda tree: jax.device_put(tree, dst)


def eformer(dst: Any) -> Move:
    """eformer's shard functions."""
    from eformer.escale import make_shard_and_gather_fns

    # An empty spec leaves an array where it is; one that says of a dimension that
    # nothing cuts it does not.
    specs = jax.tree.map(
        lambda spec: spec if spec else PartitionSpec(None),
        _specs(dst),
        is_leaf=_is_spec,
    )
    return leaf_by_leaf(make_shard_and_gather_fns(specs, _mesh(dst))[0])


def scalax(dst: Any) -> Move:
    """scalax's shard functions."""
    from scalax.sharding import MeshShardingHelper

    mesh = _mesh(dst)
    if mesh.devices.ravel().tolist() != jax.devices():
        raise ValueError(
            f"scalax lays its mesh over all {len(jax.devices())} devices, and cannot be"
            " given others"
        )
    helper = MeshShardingHelper(tuple(mesh.devices.shape), mesh.axis_names)
    return leaf_by_leaf(helper.make_shard_and_gather_fns(dst, _specs(dst))[0])


def leaf_by_leaf(functions: Any) -> Move:
    """Waits for each leaf: hundreds of collectives under way at once make the CPU's
    runtime abort.
    """
    return lambda tree: jax.tree.map(
        lambda function, x: jax.block_until_ready(function(x)), functions, tree
    )


def _specs(dst: Any) -> Any:
    return jax.tree.map(lambda target: target.spec, dst)


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def _mesh(dst: Any) -> Mesh:
    mesh = jax.tree.leaves(dst)[0].mesh
    assert isinstance(mesh, Mesh)
    return mesh

"""Newton and Schulz on whole matrices that are cut: each on one owner, beside what XLA
makes of them as written.
"""

import functools as ft
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardfx import MeshSpec, PathRules, ShardPlan, fsdp, map_matrices, plan, shard
from shardfx.cost import traffic

from ._case import Case, Entry, Finding, Floor, Limit, Race, Rival, Value


_OURS = "shardfx.map_matrices"
_WRITTEN = "jax.jit, as written"
_LAYERS = 8
_MEMORY = "temporary memory over two stacks' shards and one matrix"


def cases(devices: Sequence[Any], scale: int) -> list[Entry]:
    """A race of one update, and what each device receives; sizes are divided by
    `scale`.
    """
    tree = _tree(scale)
    mesh = MeshSpec({"fsdp": len(devices)}).build(devices)
    rules = PathRules([(".*", fsdp("fsdp"))])
    planned = plan(tree, mesh, paths=rules, unused="allow")
    name = f"Newton-Schulz of {3 * _LAYERS} matrices, fsdp={len(devices)}"
    limits = (
        Limit("received over the parameters", at_most=0.36),
        Limit(_MEMORY, at_most=1.05),
    )
    race = Case(
        name,
        ft.partial(_race, tree, planned),
        limits=(Limit(f"speedup.{_WRITTEN}", at_least=3),),
    )
    sent = Finding(f"bytes of {name}", ft.partial(_sent, planned), limits)
    return [
        race,
        sent,
    ]


def orthogonal(matrix: jax.Array) -> jax.Array:
    """Five steps of Newton and Schulz, as Muon takes them."""
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / (jnp.linalg.norm(x) + 1e-8)

    def turned(_, x: jax.Array) -> jax.Array:
        product = x @ x.T
        return 3.4445 * x + (-4.775 * product + 2.0315 * product @ product) @ x

    x = jax.lax.fori_loop(0, 5, turned, x)
    return x.T if is_tall else x


def _tree(scale: int) -> dict[str, jax.Array]:
    shapes = {"q": (256, 256), "k": (256, 256), "up": (256, 1024)}
    keys = jax.random.split(jax.random.key(0), 3 * _LAYERS)
    sizes = [
        (f"{layer}/{name}", shape)
        for layer, (name, shape) in itertools.product(range(_LAYERS), shapes.items())
    ]
    return {
        name: jax.random.normal(key, (rows // scale, columns // scale))
        for key, (name, (rows, columns)) in zip(keys, sizes, strict=True)
    }


def _programs(planned: ShardPlan) -> dict[str, Any]:
    functions: dict[str, Callable[[Any], Any]] = {
        _OURS: map_matrices(orthogonal, planned),
        _WRITTEN: ft.partial(jax.tree.map, orthogonal),
    }
    layout = planned.shardings
    return {
        name: jax.jit(function, in_shardings=(layout,), out_shardings=layout)
        for name, function in functions.items()
    }


def _race(tree: Any, planned: ShardPlan) -> Race:
    programs = _programs(planned)
    placed = shard(tree, planned)
    expected = jax.tree.map(orthogonal, tree)

    def check(_, result) -> None:
        jax.tree.map(
            ft.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5),
            result,
            expected,
        )

    rivals = tuple(
        Rival(name, lambda name=name: programs[name], check)
        for name in (_OURS, _WRITTEN)
    )
    floor = Floor(
        "the products of matrices that lie on their owners",
        _products(tree, planned),
    )
    return Race(
        rivals=rivals,
        fresh=lambda: placed,
        floor=floor,
        facts={"matrices": len(tree)},
        also=time.process_time,
    )


def _products(
    tree: Mapping[str, jax.Array], planned: ShardPlan
) -> Callable[[Any], Any]:
    """The same products of matrices that already lie on their owners."""
    mesh = planned.jax_mesh
    assert mesh is not None
    shapes = dict.fromkeys(matrix.shape for matrix in tree.values())
    stacks = [
        jnp.stack([matrix for matrix in tree.values() if matrix.shape == shape])
        for shape in shapes
    ]
    dealt = PartitionSpec("fsdp")
    placed = jax.device_put(stacks, NamedSharding(mesh, dealt))
    each = ft.partial(jax.tree.map, ft.partial(jax.lax.map, orthogonal))
    dealt_out = jax.shard_map(
        each,
        mesh=mesh,
        in_specs=(dealt,),
        out_specs=dealt,
        check_vma=False,
    )
    run = jax.jit(dealt_out)
    return lambda _: run(placed)


def _sent(planned: ShardPlan) -> dict[str, Value]:
    whole = sum(leaf.bytes for leaf in planned.leaves)
    compiled = {
        name: program.lower(planned.structs).compile()
        for name, program in _programs(planned).items()
    }
    sent = {
        name: traffic(program).wire_bytes / whole for name, program in compiled.items()
    }
    matrix = max(leaf.bytes for leaf in planned.leaves)
    stacks = [
        math.prod(program.unit) * program.units_per_owner * len(program.owned) * 4
        for program in map_matrices(orthogonal, planned).exchanges
    ]
    temp_size_in_bytes = compiled[_OURS].memory_analysis().temp_size_in_bytes
    return {
        "received over the parameters": sent[_OURS],
        f"received over the parameters, {_WRITTEN}": sent[_WRITTEN],
        _MEMORY: (temp_size_in_bytes / (2 * max(stacks) + matrix)),
    }

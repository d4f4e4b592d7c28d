"""Llama 3 8B under its own names, small enough to fit, from a plan to train with to
plans to serve with.
"""

import functools as ft
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from shardfx import plan
from shardfx._reshard.mover import reshard
from shardfx.presets import hf, models

from . import _peers
from ._case import Case, Entry, Race, Rival, memcpy
from ._pairs import placed
from ._runner import Options
from ._shapes import Tree


# Mesh axes of the target, and by how much every width of the model is divided.
TARGETS = (({"tensor": 8}, 8), ({"data": 2, "tensor": 4}, 16))
QUICK_TARGETS = (({"tensor": 8}, 32),)


def state_cases(options: Options) -> list[Entry]:
    """One case per target; eight devices are needed."""
    entries: list[Entry] = []
    for axes, divisor in QUICK_TARGETS if options.quick else TARGETS:
        what = "" if options.quick else " with Adam's moments"
        target = " x ".join(f"{axis}={size}" for axis, size in axes.items())
        name = f"Llama 3 8B{what}, widths / {divisor}, fsdp=8 to {target}"
        entries.append(Case(name, ft.partial(_race, options, axes, divisor)))
    return entries


def _race(options: Options, axes: dict[str, int], divisor: int) -> Race:
    shapes = _shapes(divisor, moments=not options.quick)
    rules = hf.llama(head_dim=128 // divisor)
    devices = np.array(options.devices[:8])
    mesh = Mesh(devices, ("fsdp",))
    sharding_plan = plan(shapes, mesh, paths=rules)
    src = sharding_plan.shardings
    mesh = Mesh(devices.reshape(tuple(axes.values())), tuple(axes))
    expected = plan(shapes, mesh, paths=rules)
    dst = expected.shardings
    values = _values(shapes)
    right = equals(values, dst)
    byte_count = sum(x.nbytes for x in jax.tree.leaves(values))
    if options.flags.scalax:
        scalax = ft.partial(_peers.scalax, dst)
    else:
        scalax = _left_out
    rivals = (
        Rival("shardfx", lambda: lambda tree: reshard(tree, expected), right),
        Rival("jax.jit", lambda: _peers.whole_jit(src, dst), right),
        Rival("jax.jit per leaf", lambda: _peers.jit_per_leaf(dst), right),
        Rival("jax.device_put", lambda: _peers.device_put(dst), right),
        Rival(
            name="eformer",
            make=lambda: _peers.eformer(dst),
            check=right,
            needs=("eformer",),
        ),
        Rival(name="scalax", make=scalax, check=right, needs=("scalax",)),
    )
    return Race(
        rivals=rivals,
        fresh=lambda: jax.block_until_ready(jax.tree.map(placed, values, src)),
        byte_count=byte_count,
        floor=memcpy(byte_count),
        facts={
            "leaves": len(jax.tree.leaves(values)),
            "distinct moves": len(
                {(x.shape, x.dtype, a, b) for x, a, b in _zip(values, src, dst)}
            ),
            "mebibytes": byte_count >> 20,
        },
    )


def _left_out() -> _peers.Move:
    raise ValueError(
        "it compiles a program for every leaf, which takes minutes; `--scalax` runs it"
    )


def _shapes(divisor: int, *, moments: bool) -> Tree:
    """Parameters in bfloat16, and Adam's two moments in float32."""
    widths = ("embed", "head_dim", "hidden", "vocab")
    published = models.config("llama3-8b")
    params = models.tree(
        "llama3-8b", **{name: published[name] // divisor for name in widths}
    )
    if not moments:
        return params
    moment = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), params)
    return {"params": params, "adam": {"mu": moment, "nu": moment}}


def _values(shapes: Tree) -> Tree:
    """Random bytes under the shapes, without NaN: the exponents' highest bit is never
    set.
    """
    rng = np.random.default_rng(0)

    def of(shape: jax.ShapeDtypeStruct) -> np.ndarray:
        kind = np.dtype(f"u{shape.dtype.itemsize}")
        return (rng.integers(0, np.iinfo(kind).max // 4, shape.shape, kind)).view(
            shape.dtype
        )

    return jax.tree.map(of, shapes)


def equals(values: Any, dst: Any) -> Callable[[Any, Any], None]:
    """A check of every leaf: that it lies in `dst`, and that every shard is what NumPy
    cuts out.
    """

    def check(_, result) -> None:
        for x, y, target in _zip(values, result, dst):
            assert y.sharding.is_equivalent_to(target, y.ndim), (
                f"{y.sharding} instead of {target}"
            )
            for shard in y.addressable_shards:
                np.testing.assert_array_equal(np.asarray(shard.data), x[shard.index])

    return check


def _zip(*trees: Any) -> Any:
    return zip(*map(jax.tree.leaves, trees), strict=True)

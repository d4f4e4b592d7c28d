"""Trees of every make: planned, placed, gathered, stored and joined without a case for any of them."""

import collections
import dataclasses
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, struct
from flax.core import FrozenDict
from jax.sharding import SingleDeviceSharding

from shardfx import MeshSpec, PathRules, ShardPlan, filter_jit, follow, fsdp, gather, plan, shard


Pair = collections.namedtuple("Pair", "x y")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Registered:
    w: Any
    width: int = dataclasses.field(metadata={"static": True}, default=3)


@struct.dataclass
class Struct:
    w: Any
    function: Any = struct.field(pytree_node=False, default=None)


@jax.tree_util.register_pytree_node_class
class WithoutKeys(list):
    def tree_flatten(self):
        return tuple(self), None

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(children)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.linear, self.norm = nnx.Linear(8, 16, rngs=rngs), nnx.BatchNorm(16, rngs=rngs)


def small_types() -> dict[str, jax.Array]:
    names = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int4", "uint4", "int8", "bool", "complex64")
    return {name: jnp.ones((8, 8), name) for name in names}


OPTIMIZER = optax.chain(optax.adam(1e-3), optax.masked(optax.adam(1e-3), {"w": True, "b": False}))
W = np.arange(128, dtype=np.float32).reshape(8, 16)
# A function for each, since making one runs JAX; and some paths that its leaves must have.
TREES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "namedtuple": (lambda: Pair(W, [W, Pair(W, None)]), ("x", "y/0", "y/1/x")),
    "registered dataclass": (lambda: {"d": Registered(W), "e": [Registered(W, 5)]}, ("d/w", "e/0/w")),
    "flax dataclass": (lambda: {"d": Struct(W, print)}, ("d/w",)),
    "node without keys": (lambda: WithoutKeys([W, {"b": W}]), ("0", "1/b")),
    "FrozenDict": (lambda: FrozenDict({"params": {"Dense_0": {"kernel": W}}}), ("params/Dense_0/kernel",)),
    "OrderedDict": (lambda: collections.OrderedDict([("z", W), ("a", W)]), ("z", "a")),
    "defaultdict": (lambda: collections.defaultdict(list, {"z": W, "a": [W]}), ("a/0", "z")),
    "integer keys": (lambda: {0: W, 10: W, 2: {1: W}}, ("0", "2/1", "10")),
    "keys of tuples": (lambda: {(0, "a"): W, (1, "b"): W}, ("(0, 'a')", "(1, 'b')")),
    "boolean keys": (lambda: {True: W, False: W}, ("False", "True")),
    "keys with slashes": (lambda: {"a/b": W, "a": {"c": W}}, ("a/b", "a/c")),
    "odd keys": (lambda: {"a\nb": W, "": W, "é": W}, ("", "a\nb", "é")),
    "nnx module": (lambda: Net(nnx.Rngs(0)), ("linear/kernel/value", "norm/scale/value")),
    "nnx state": (lambda: nnx.state(Net(nnx.Rngs(0)), nnx.Param), ("linear/kernel/value", "norm/scale/value")),
    "nnx pure dict": (lambda: nnx.to_pure_dict(nnx.state(Net(nnx.Rngs(0)), nnx.Param)), ("linear/kernel",)),
    "linen": (lambda: nn.Dense(16).init(jax.random.key(0), jnp.ones((2, 8))), ("params/kernel", "params/bias")),
    "Equinox": (lambda: eqx.nn.MLP(4, 4, 8, 2, key=jax.random.key(0)), ("layers/0/weight", "layers/2/bias")),
    "Equinox state": (lambda: eqx.nn.make_with_state(eqx.nn.BatchNorm)(8, "b", mode="ema")[1], ()),
    "optax state": (lambda: OPTIMIZER.init({"w": W, "b": W[0]}), ("0/0/count", "0/0/mu/w", "1/inner_state/0/mu/w")),
    "Partial": (lambda: jax.tree_util.Partial(np.add, W), ()),
    "functions, None and strings": (lambda: {"f": jax.nn.relu, "n": None, "s": "text", "w": W, "p": 3}, ("w",)),
    "one array": (lambda: W, ("",)),
    "nothing": (lambda: {}, ()),
    "None": (lambda: None, ()),
    "keys": (lambda: {"many": jax.random.split(jax.random.key(0), 8), "one": jax.random.key(1)}, ("many", "one")),
    "small types": (small_types, ("int4", "float8_e5m2")),
    "empty dimensions": (lambda: {"a": np.ones((0, 8)), "b": np.ones((8, 0)), "c": np.ones(0)}, ("a", "b", "c")),
    "NumPy of 64 bits": (lambda: {"i": np.arange(8), "f": np.ones(8), "s": np.float64(3.5)}, ("i", "f", "s")),
}


is_array = lambda leaf: isinstance(leaf, jax.Array | np.ndarray | np.generic)


def same(one: Any, two: Any) -> bool:
    if not is_array(two):
        return one is two
    if jnp.issubdtype(two.dtype, jax.dtypes.prng_key):
        # NumPy cannot hold them.
        return isinstance(one.sharding, SingleDeviceSharding) and bool(jnp.all(one == two))
    return isinstance(one, np.ndarray) and np.array_equal(one, two)


@pytest.mark.parametrize("name", TREES)
def test_it_is_planned_placed_gathered_stored_and_joined(name):
    make, paths = TREES[name]
    tree = make()
    mesh = MeshSpec({"data": 2, "tensor": 4}).build(jax.devices())
    made = plan(tree, mesh, paths=PathRules([(".*", fsdp(("data", "tensor")))]), unmatched="replicate", unused="allow")
    assert set(paths) <= {leaf.path for leaf in made.leaves}
    assert len(made.leaves) == len([leaf for leaf in jax.tree.leaves(tree) if is_array(leaf)])

    placed = shard(tree, made)
    back = gather(placed)
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    assert all(map(same, jax.tree.leaves(back), jax.tree.leaves(tree)))
    held = [leaf for leaf in jax.tree.leaves(placed) if eqx.is_array(leaf)]
    assert all(x.sharding == s for x, s in zip(held, jax.tree.leaves(made.shardings), strict=True))

    through = filter_jit(lambda tree: tree, in_shardings=(made,), out_shardings=made)(placed)
    assert jax.tree.structure(through) == jax.tree.structure(tree)

    text = made.to_json()
    assert ShardPlan.from_json(text).on(mesh) == made
    like = ShardPlan.from_json(text, like=tree).on(mesh)
    assert like == made and jax.tree.structure(like.specs) == jax.tree.structure(made.specs)

    joined = ShardPlan.join(a=made, b=made)
    assert joined.bytes_total == 2 * made.bytes_total
    assert jax.tree.structure(joined.specs) == jax.tree.structure({"a": made.specs, "b": made.specs})
    assert [leaf.spec for leaf in follow(lambda tree: tree, made).leaves] == [leaf.spec for leaf in made.leaves]

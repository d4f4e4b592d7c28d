"""Trees of many node types are planned, placed, gathered, stored and joined, with the
names that they declare.
"""

import collections
import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx, struct
from flax.core import FrozenDict
from jax.sharding import PartitionSpec as P, SingleDeviceSharding

import shardfx as sfx
from shardfx import (
    AxisRules,
    MeshSpec,
    PathRules,
    ShardPlan,
    field,
    filter_jit,
    follow,
    fsdp,
    gather,
    map_matrices,
    plan,
    shard,
)
from shardfx.auto import renamed
from shardfx.errors import LeafTypeError, RuleError, UnmatchedError
from shardfx.interop import flax as interop


Pair = collections.namedtuple("Pair", "x y")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Registered:
    w: Any
    width: int = dataclasses.field(metadata={"static": True}, default=3)


@jax.tree_util.register_pytree_node_class
class WithoutKeys(list):
    def tree_flatten(self):
        return tuple(self), None

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(children)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(8, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)


def small_types() -> dict[str, jax.Array]:
    names = (
        "bfloat16",
        "float16",
        "float8_e4m3fn",
        "float8_e5m2",
        "int4",
        "uint4",
        "int8",
        "bool",
        "complex64",
    )
    return {name: jnp.ones((8, 8), name) for name in names}


OPTIMIZER = optax.chain(
    optax.adam(1e-3), optax.masked(optax.adam(1e-3), {"w": True, "b": False})
)
W = np.arange(128, dtype=np.float32).reshape(8, 16)


def registered_dataclass():
    return {"d": Registered(W), "e": [Registered(W, 5)]}


def frozendict():
    return FrozenDict({"params": {"Dense_0": {"kernel": W}}})


def ordereddict():
    return collections.OrderedDict([("z", W), ("a", W)])


def defaultdict():
    return collections.defaultdict(list, {"z": W, "a": [W]})


def keys_with_slashes():
    layer = collections.OrderedDict(w=W, b=W[0])
    return collections.OrderedDict(
        {"net/~/a": layer, "net/~/b": layer, "net/c": W, "head/w": FrozenDict(w=W)}
    )


def keys_of_tuples():
    return {(0, "a"): W, (1, "b"): W}


def nnx_parameters():
    return nnx.state(Net(nnx.Rngs(0)), nnx.Param)


def linen():
    return nn.Dense(16).init(jax.random.key(0), jnp.ones((2, 8)))


def equinox():
    return eqx.nn.MLP(4, 4, 8, 2, key=jax.random.key(0))


def equinox_state():
    return eqx.nn.make_with_state(eqx.nn.BatchNorm)(8, "b", mode="ema")[1]


def optax_state():
    return OPTIMIZER.init({"w": W, "b": W[0]})


def keys():
    return {
        "many": jax.random.split(jax.random.key(0), 8),
        "one": jax.random.key(1),
    }


def empty_dimensions():
    return {"a": np.ones((0, 8)), "b": np.ones((8, 0)), "c": np.ones(0)}


def numpy_of_64_bits():
    return {"i": np.arange(8), "f": np.ones(8), "s": np.float64(3.5)}


# A function for each, since making one runs JAX; and some paths that its leaves must
# have.
TREES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "namedtuple": (lambda: Pair(W, [W, Pair(W, None)]), ("x", "y/0", "y/1/x")),
    "registered dataclass": (
        registered_dataclass,
        ("d/w", "e/0/w"),
    ),
    "node without keys": (lambda: WithoutKeys([W, {"b": W}]), ("0", "1/b")),
    "FrozenDict": (
        frozendict,
        ("params/Dense_0/kernel",),
    ),
    "OrderedDict": (ordereddict, ("z", "a")),
    "defaultdict": (
        defaultdict,
        ("a/0", "z"),
    ),
    "keys with slashes": (keys_with_slashes, ("net/~/a/w", "net/c", "head/w/w")),
    "keys of tuples": (keys_of_tuples, ("(0, 'a')", "(1, 'b')")),
    "keys of several types": (
        lambda: {True: W, 2: W, np.int64(3): W},
        ("True", "2", "3"),
    ),
    "odd keys": (lambda: {"a\nb": W, "": W, "é": W}, ("", "a\nb", "é")),
    "nnx state": (
        lambda: nnx.state(Net(nnx.Rngs(0))),
        ("linear/kernel/value", "norm/scale/value"),
    ),
    "nnx parameters": (
        nnx_parameters,
        ("linear/kernel/value", "norm/scale/value"),
    ),
    "linen": (
        linen,
        ("params/kernel", "params/bias"),
    ),
    "Equinox": (
        equinox,
        ("layers/0/weight", "layers/2/bias"),
    ),
    "Equinox state": (
        equinox_state,
        (),
    ),
    "optax state": (
        optax_state,
        ("0/0/count", "0/0/mu/w", "1/inner_state/0/mu/w"),
    ),
    "Partial": (lambda: jax.tree_util.Partial(np.add, W), ()),
    "one array": (lambda: W, ("",)),
    "nothing": (lambda: {}, ()),
    "None": (lambda: None, ()),
    "keys": (
        keys,
        ("many", "one"),
    ),
    "small types": (small_types, ("int4", "float8_e5m2")),
    "empty dimensions": (
        empty_dimensions,
        ("a", "b", "c"),
    ),
    "NumPy of 64 bits": (
        numpy_of_64_bits,
        ("i", "f", "s"),
    ),
}


is_array = lambda leaf: isinstance(leaf, jax.Array | np.ndarray | np.generic)


def same(array: Any, two: Any) -> bool:
    if not is_array(two):
        return array is two
    if jnp.issubdtype(two.dtype, jax.dtypes.prng_key):
        # NumPy cannot hold them.
        return isinstance(array.sharding, SingleDeviceSharding) and bool(
            jnp.all(array == two)
        )
    return isinstance(array, np.ndarray) and np.array_equal(array, two)


@pytest.mark.parametrize("name", TREES)
def test_it_is_planned_placed_gathered_stored_and_joined(name):
    make, paths = TREES[name]
    tree = make()
    axes = {"data": 2, "tensor": 4}
    mesh = MeshSpec(axes).build(jax.devices())
    rules = PathRules([(".*", fsdp(("data", "tensor")))])
    sharding_plan = plan(
        tree,
        mesh,
        paths=rules,
        unmatched="replicate",
        unused="allow",
    )
    assert set(paths) <= {leaf.path for leaf in sharding_plan.leaves}
    leaves = [leaf for leaf in jax.tree.leaves(tree) if is_array(leaf)]
    expected = len(leaves)
    assert len(sharding_plan.leaves) == expected

    placed = shard(tree, sharding_plan)
    back = gather(placed)
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    assert all(map(same, jax.tree.leaves(back), jax.tree.leaves(tree)))
    held = [leaf for leaf in jax.tree.leaves(placed) if eqx.is_array(leaf)]
    leaves = jax.tree.leaves(sharding_plan.shardings)
    for x, s in zip(held, leaves, strict=True):
        assert x.sharding == s

    through = filter_jit(
        lambda tree: tree, in_shardings=(sharding_plan,), out_shardings=sharding_plan
    )(placed)
    assert jax.tree.structure(through) == jax.tree.structure(tree)

    text = sharding_plan.to_json()
    assert ShardPlan.from_json(text).on(mesh) == sharding_plan
    like = ShardPlan.from_json(text, like=tree).on(mesh)
    assert like == sharding_plan
    structure = jax.tree.structure(like.specs)
    assert structure == jax.tree.structure(sharding_plan.specs)

    joined = ShardPlan.join(a=sharding_plan, b=sharding_plan)
    assert joined.bytes_total == 2 * sharding_plan.bytes_total
    expected = jax.tree.structure({"a": sharding_plan.specs, "b": sharding_plan.specs})
    assert jax.tree.structure(joined.specs) == expected
    leaves = follow(lambda tree: tree, sharding_plan).leaves
    specs = [leaf.spec for leaf in leaves]
    assert specs == [leaf.spec for leaf in sharding_plan.leaves]


class Reversed(eqx.Module):
    """A module whose fields have another order than the sorted keys of a dict."""

    z: jax.Array
    a: jax.Array
    fn: object = jnp.tanh


def test_keys_with_slashes_come_back_from_json():
    mesh = MeshSpec({"data": 2})
    rules = PathRules([(".*", fsdp("data"))])
    sharding_plan = plan(keys_with_slashes(), mesh, paths=rules)
    read = ShardPlan.from_json(sharding_plan.to_json()).specs
    assert list(read) == ["head/w", "net/c", "net/~/a", "net/~/b"]
    assert read["net/~/b"] == {"w": P(None, "data"), "b": P("data")}


def test_a_module_read_as_a_dict_fits_its_own_plan():
    module = Reversed(jnp.ones((8, 4)), jnp.ones((4, 4)))
    rules = PathRules([("z", P("fsdp")), ("a", P("tensor"))])
    mesh = MESH.build(jax.devices())
    written = plan(module, mesh, paths=rules).to_json()
    read = ShardPlan.from_json(written).on(mesh)

    arrays: dict[str, Any] = {"z": module.z, "a": module.a}
    for tree in (arrays, {**arrays, "fn": None}, module):
        placed = shard(tree, read)
        specs = [x.sharding.spec for x in jax.tree.leaves(placed) if eqx.is_array(x)]
        assert sorted(map(str, specs)) == sorted(map(str, (P("fsdp"), P("tensor"))))
    assert shard(arrays, read)["z"].sharding.spec == P("fsdp")
    through = filter_jit(lambda tree: tree, in_shardings=(read,), out_shardings=read)
    assert through(arrays)["a"].sharding.spec == P("tensor")

    negated = map_matrices(lambda matrix: -matrix, read, where={"a": None})
    result = negated(shard(arrays, read))
    assert result["z"].tolist() == (-module.z).tolist()
    assert result["a"].tolist() == module.a.tolist()


# --- names that classes declare, and names that are given beside them


MESH = MeshSpec({"fsdp": 2, "tensor": 4})
AXES = AxisRules([("embed", "fsdp"), ("mlp", "tensor")])
REST = PathRules([(".*", sfx.replicate)])


class Linear(eqx.Module):
    w: jax.Array = field(names=("embed", "mlp"))


class Lora(eqx.Module):
    base: Linear
    a: jax.Array


LORA = Lora(Linear(jnp.ones((16, 32))), jnp.ones((16, 4)))


def test_names_in_an_ordered_dict_belong_to_their_keys():
    ordered = collections.OrderedDict
    tree = ordered([("up", jnp.ones((16, 16))), ("down", jnp.ones((16, 16)))])
    names = ordered([("down", ("mlp", "embed")), ("up", ("embed", "mlp"))])
    sharding_plan = plan(tree, MESH, names=names, axes=AXES)
    assert sharding_plan["up"].spec == P("fsdp", "tensor")
    assert sharding_plan["down"].spec == P("tensor", "fsdp")
    with pytest.raises(RuleError, match="no prefix of the tree.*'dwon', 'up'"):
        plan(tree, MESH, names=ordered([("dwon", None), ("up", None)]), axes=AXES)


@pytest.mark.parametrize("rules", [None, REST])
def test_none_leaves_arrays_the_names_that_they_declare(rules):
    names: Any = Lora(None, ("embed", None))  # pyright: ignore
    sharding_plan = plan(LORA, MESH, names=names, axes=AXES, paths=rules)
    assert sharding_plan["base/w"].spec == P("fsdp", "tensor")
    assert sharding_plan["base/w"].rule == "names"
    nowhere: Any = Lora(Linear(None), (None, None))  # pyright: ignore
    itself = plan(LORA, MESH, names=nowhere, axes=AXES, paths=rules)
    assert itself["base/w"].spec == P("fsdp", "tensor")
    assert itself["a"].spec == P()


def test_declared_names_cannot_be_renamed_to_none_and_need_rules():
    with pytest.raises(
        RuleError,
        match=r"gets None, which leaves `base/w` the names \('embed', 'mlp'\)",
    ):
        renamed(LORA, {"base": None})
    assert renamed(LORA, {"a": None, "base": ()}) == Lora(Linear(()), None)  # pyright: ignore
    with pytest.raises(
        UnmatchedError,
        match="(?s)names that fields of the tree declare need `axes=.*`w`: float32",
    ):
        plan(LORA.base, MESH)


class Tied(nnx.Module):
    def __init__(self):
        init = nnx.with_partitioning(
            nnx.initializers.ones, ("mlp", "embed"), eager_sharding=False
        )
        self.embed = nnx.Embed(32, 16, embedding_init=init, rngs=nnx.Rngs(0))
        self.head = self.embed.embedding


def test_names_of_flax_are_not_passed_over():
    state = nnx.state(nnx.eval_shape(Tied))
    with pytest.raises(
        RuleError,
        match=(
            r"`embed/embedding` carries the names \('mlp', 'embed'\) of Flax, .* 1 of 1"
        ),
    ):
        plan(state, MESH, axes=AXES, paths=REST)
    none = jax.tree.map(lambda _: None, state)
    cases: list[tuple[dict[str, Any], P]] = [
        ({"names": interop.names_of(state), "axes": AXES}, P("tensor", "fsdp")),
        ({"names": none, "axes": AXES, "paths": REST}, P()),
        ({"paths": REST}, P()),
    ]
    for keywords, spec in cases:
        assert plan(state, MESH, **keywords)["embed/embedding/value"].spec == spec
    boxed = {"kernel": nn.LogicallyPartitioned(jnp.ones((16, 32)), ("embed", "mlp"))}
    with pytest.raises(RuleError, match="`kernel` carries the names"):
        plan(boxed, MESH, axes=AXES, paths=REST)


def test_a_variable_that_is_tied_is_no_tree():
    with pytest.raises(
        RuleError,
        match="`embed/embedding` and `head` are one variable .* plan `nnx.state",
    ):
        plan(Tied(), MESH, paths=REST)


def test_a_module_of_nnx_is_planned_by_its_state():
    net = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(net, optax.sgd(1e-3), wrt=nnx.Param)
    for tree, name in ((net, "Net"), ([optimizer], "Optimizer"), ({"m": net}, "Net")):
        message = f"a module of nnx, {name}, .* plan `nnx.state\\(module\\)`"
        with pytest.raises(LeafTypeError, match=message):
            plan(tree, MESH, paths=REST)


class Inner(struct.PyTreeNode):
    scale: jax.Array
    weight: jax.Array = field(names=("mlp", "embed"))
    width: int = struct.field(pytree_node=False, default=32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Outer:
    blocks: list[Inner] = field(stacked=("layers",))
    head: dict[str, jax.Array] = field(names=("embed", "vocab"), default_factory=dict)
    plain: jax.Array | None = None


def test_declared_names_reach_the_arrays_below_a_dataclass():
    inner = Inner(weight=jnp.ones((3, 4, 6)), scale=jnp.ones((3, 4)))
    tree = Outer([inner, inner], {"a": jnp.ones((5, 7))}, jnp.ones(2))
    rules = [
        ("layers", None),
        ("mlp", "tensor"),
        ("embed", "fsdp"),
        ("vocab", "tensor"),
    ]
    axes = AxisRules(rules)
    mesh = MeshSpec({"fsdp": 2, "tensor": 2})
    sharding_plan = plan(tree, mesh, axes=axes, unmatched="replicate")
    expected = {
        **{f"blocks/{i}/weight": ("layers", "mlp", "embed") for i in (0, 1)},
        **{
            "blocks/0/scale": None,
            "blocks/1/scale": None,
            "head/a": ("embed", "vocab"),
            "plain": None,
        },
    }
    assert {leaf.path: leaf.names for leaf in sharding_plan.leaves} == expected
    assert sharding_plan["blocks/0/weight"].spec == P(None, "tensor", "fsdp")
    assert sharding_plan["blocks/0/weight"].rule == "names"

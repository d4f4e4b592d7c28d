"""Names that classes declare, and names that are given beside them: none is lost, and none changes places."""

import collections
import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn, nnx, struct
from jax.sharding import PartitionSpec as P

import shardfx as sfx
from shardfx import AxisRules, MeshSpec, PathRules, field, plan
from shardfx.auto import renamed
from shardfx.errors import PlanMismatchError, RuleError, UnmatchedError
from shardfx.interop import flax as interop


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
    made = plan(tree, MESH, names=names, axes=AXES)
    assert (made["up"].spec, made["down"].spec) == (P("fsdp", "tensor"), P("tensor", "fsdp"))
    with pytest.raises(RuleError, match="no prefix of the tree.*'dwon', 'up'"):
        plan(tree, MESH, names=ordered([("dwon", None), ("up", None)]), axes=AXES)


class Flax(struct.PyTreeNode):
    w: jax.Array = field(names=("embed", "mlp"))
    width: int = struct.field(pytree_node=False, default=32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Plain:
    layers: Flax = field(stacked=(None,))
    b: jax.Array = field(names=("mlp",))


def test_every_dataclass_declares_names():
    tree = Plain(Flax(jnp.ones((3, 16, 32))), jnp.ones(32))
    made = plan(tree, MESH, axes=AXES, paths=REST)
    assert (made["layers/w"].spec, made["b"].spec) == (P(None, "fsdp", "tensor"), P("tensor"))


@pytest.mark.parametrize("rules", [None, REST])
def test_none_leaves_arrays_the_names_that_they_declare(rules):
    made = plan(LORA, MESH, names=Lora(None, ("embed", None)), axes=AXES, paths=rules)  # pyright: ignore
    assert made["base/w"].spec == P("fsdp", "tensor") and made["base/w"].rule == "names"
    itself = plan(LORA, MESH, names=Lora(Linear(None), (None, None)), axes=AXES, paths=rules)  # pyright: ignore
    assert itself["base/w"].spec == P("fsdp", "tensor") and itself["a"].spec == P()


def test_declared_names_cannot_be_renamed_to_none_and_need_rules():
    with pytest.raises(RuleError, match=r"gets None, which leaves `base/w` the names \('embed', 'mlp'\)"):
        renamed(LORA, {"base": None})
    assert renamed(LORA, {"a": None, "base": ()}) == Lora(Linear(()), None)  # pyright: ignore
    with pytest.raises(UnmatchedError, match="(?s)names that fields of the tree declare need `axes=.*`w`: float32"):
        plan(LORA.base, MESH)


class Tied(nnx.Module):
    def __init__(self):
        init = nnx.with_partitioning(nnx.initializers.ones, ("mlp", "embed"), eager_sharding=False)
        self.embed = nnx.Embed(32, 16, embedding_init=init, rngs=nnx.Rngs(0))
        self.head = self.embed.embedding


def test_names_of_flax_are_not_passed_over():
    state = nnx.state(nnx.eval_shape(Tied))
    with pytest.raises(RuleError, match=r"`embed/embedding` carries the names \('mlp', 'embed'\) of Flax, .* 1 of 1"):
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
    module = Tied()
    with pytest.raises(RuleError, match="`embed/embedding` and `head` are one variable .* plan `nnx.state"):
        plan(module, MESH, paths=REST)
    mesh = MESH.build(jax.devices())
    made = plan(nnx.state(module), mesh, paths=REST)
    with pytest.raises(PlanMismatchError, match="the plan has no `head/value`"):
        sfx.shard(module, made)
    step = sfx.filter_jit(lambda tree: tree, in_shardings=(plan({"a": jnp.ones(8)}, mesh, paths=REST),))
    with pytest.raises(PlanMismatchError, match="the plan has no `b`. Plan"):
        step({"a": jnp.ones(8), "b": jnp.zeros(8)})

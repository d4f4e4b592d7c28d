"""A step on one GPU, and the order of GPUs that JAX's devices describe as one node or as two."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardfx as sfx
from shardfx import MeshSpec
from shardfx.errors import MeshError


@dataclasses.dataclass(frozen=True)
class Gpu:
    id: int
    process_index: int = 0
    slice_index: int = 0
    platform: str = "gpu"
    device_kind: str = "NVIDIA H200"


ONE = MeshSpec({"data": 1, "tensor": 1})


def step(model, x):
    return jax.vmap(model)(x).sum()


def test_nodes_are_what_their_slice_says_and_not_the_processes():
    spec = MeshSpec({"data": 2, "tensor": 4})
    assert spec.order([Gpu(at, process_index=at) for at in range(8)]).reasons == ()
    nodes = [Gpu(at, process_index=at, slice_index=at // 4) for at in range(8)]
    for asked in (spec, MeshSpec({"data": 2, "tensor": 4}, dcn={"data": 2})):
        order = asked.order(nodes[::-1])
        assert [{gpu.slice_index for gpu in row} for row in order.devices] in ([{0}, {1}], [{1}, {0}])
    # Emulation is for CPUs: it is no advice for a GPU.
    with pytest.raises(MeshError, match="give one axis the size -1 to let it take the rest.$"):
        spec.order([Gpu(0)])


def test_a_step_on_one_gpu_from_plan_to_program():
    model = eqx.nn.MLP(64, 64, 128, 2, key=jax.random.key(0))
    x = jax.ShapeDtypeStruct((8, 64), jnp.float32)
    plans = [sfx.plan(model, ONE, unmatched="replicate"), sfx.plan(x, ONE, paths=sfx.PathRules([(".*", P("data"))]))]
    here = ONE.build(jax.devices()[:1])
    compiled = sfx.filter_jit(step, in_shardings=tuple(one.on(here) for one in plans)).lower(model, x).compile()
    made = sfx.cost.traffic(compiled)
    assert made.rows == () and str(made).startswith("no traffic: ")
    assert sfx.cost.seconds(made, "h200", ONE).seconds == 0
    ours = (eqx.combine(plans[0].structs, model), plans[1].structs)  # a model that holds functions
    assert sfx.cost.estimate(step, *ours).wire_bytes == 0
    fit = sfx.cost.fit(step, *ours, chip="NVIDIA H200")
    assert fit.fits and "h200" in str(fit)
    assert sfx.cost.fit(compiled, chip="h200").fits
    with pytest.raises(MeshError, match="one device needs no plan: `search` chooses how several share the work"):
        sfx.auto.search(step, model, x, devices=[Gpu(0)])

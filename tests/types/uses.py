"""One use of each public function. Nothing runs: `tests/types/check.py` has type
checkers read it.
"""

from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.sharding import Mesh

import shardfx as sfx
from shardfx import (
    auto,
    checkpoint,
    chips,
    cost,
    hosts,
    presets,
    sync,
    testing,
    topology,
)
from shardfx.interop import (
    eformer,
    flax,
    haliax,
    huggingface,
    keras,
    levanter,
    maxtext,
    t5x,
    tpu,
)
from shardfx.presets import maps, models


Tree = dict[str, jax.Array]


class Layer(eqx.Module):
    weight: jax.Array = sfx.field(names=("embed", "mlp"))


def step(params: Tree, x: jax.Array) -> Tree:
    return {name: leaf + x.sum() for name, leaf in params.items()}


def loss(params: Tree, x: jax.Array) -> jax.Array:
    return x.sum() + params["w"].sum()


def plans(tree: Tree, mesh: sfx.MeshSpec) -> sfx.ShardPlan:
    axes = sfx.AxisRules([("mlp", "tensor"), ("embed", None)])
    spec = sfx.correct(sfx.resolve(("mlp", None), axes).spec, (8, 8), mesh).spec
    paths = sfx.PathRules([("bias", sfx.replicate), ("wq", sfx.atomic(spec, (128, 1)))])
    paths = paths.extend([(".*", sfx.optional(sfx.fsdp("fsdp")))])
    sfx.match(tree, paths)
    plan = sfx.plan(tree, mesh, paths=paths, axes=axes, mode=None)
    text: str = sfx.report(plan, width=88) + sfx.html_report(
        plan, findings=sfx.lint(tree, mesh, paths=paths)
    )
    print(
        text,
        sfx.explain(plan, "wq"),
        sfx.diff(plan, sfx.follow(lambda params: params, plan)),
    )
    return plan


def arrays(tree: Tree, plan: sfx.ShardPlan, x: jax.Array) -> Tree:
    placed = sfx.shard(tree, plan)
    print(
        sfx.misplaced(placed, plan),
        sfx.specs_of(placed),
        sfx.shardings_of(placed),
        sfx.gather(placed),
    )
    jitted = sfx.filter_jit(
        step,
        in_shardings=(plan, None),
        donate=(0,),
        check=lambda traced: len(traced.arrays) == 1,
    )
    moved = sfx.reshard(
        jitted(placed, sfx.constrain(x, ("batch",), plan)),
        plan,
        memory_limit_bytes=1 << 20,
    )
    print(
        sfx.plan_reshard(
            plan, plan, map=sfx.TreeMap({"a": sfx.From("b").transpose(1, 0)})
        ).wire_bytes
    )
    sfx.map_matrices(lambda matrix: matrix, plan)(moved)
    sfx.clear_caches()
    return moved


def costs(plan: sfx.ShardPlan, tree: Tree, x: jax.Array) -> float:
    estimated = cost.estimate(step, tree, x)
    compiled = cost.compile_for(step, tree, x, target="tpu:v5e:4x4")
    sent = cost.traffic(compiled, plan.mesh)
    print(
        cost.compare(estimated, compiled),
        cost.fit(step, tree, x, chip=chips.find("v5p")),
        chips.table(),
    )
    lines = cost.shardings(step, tree, x)
    testing.assert_same_traffic_text(sent, testing.traffic_text(estimated))
    testing.assert_same_shardings_text(lines, testing.shardings_text(lines))
    testing.assert_same_plan_text(plan, testing.plan_text(plan))
    testing.assert_collectives(sent, none=("all-gather",))
    print(testing.check_step(step, tree, x))
    verdict = testing.verify(step, tree, x, compiler="gpu")
    print(testing.verify(step, tree, x, compiled=compiled).program)
    plain = testing.unsharded(step)
    policy: cost.Policy = cost.policy(
        loss,
        tree,
        x,
        chip="v5e",
        leave_bytes=2**30,
        argnums=(0,),
        offload=False,
    )
    value: jax.Array = policy.apply(loss)(tree, x)
    again = cost.Policy.from_json(policy.to_json())
    choices = [(row.line, row.choice, row.bytes) for row in policy.rows]
    print(value, choices, [change.after for change in policy.diff(again)])
    print(cost.typed(step, tree, x).rows)
    plain(tree, x)
    for refutation in verdict.refutations:
        print(refutation.operation, refutation.source, refutation.mend)
    for cause in verdict.unjudged:
        print(cause.reason, cause.bytes)
    return cost.seconds(sent, chips.parse_slice("v5e-16").chip).seconds


def searched(
    plan: sfx.ShardPlan, tree: Tree, x: jax.Array, mesh: Mesh
) -> auto.Candidate:
    names = auto.name_axes(step, tree, x)
    auto.renamed(tree, {"wq": ("embed", "mlp")}, names=names)
    print(plan.replan(mesh))
    best, *_ = auto.search(step, tree, x, devices="tpu:v5e:2x4", limits=auto.Limits())
    auto.constrain_step(step, best.mesh, best.rules)
    auto.auto_axes(step, best.plans[0], out=("batch", None))
    default: auto.AutoPlan = auto.plan(tree, "tpu:v5e:2x4", names=names.names[0])
    print(default.why, default.code(), default.batch, default.rules)
    return best


def files(plan: sfx.ShardPlan, tree: Tree) -> Tree:
    checkpoint.save("path", tree, plan)
    checkpoint.save("gs://bucket/step-1", tree, plan, timeout_seconds=30.0)
    checkpoint.Manager({"driver": "s3", "bucket": "bucket"}, timeout_seconds=30.0)
    checkpoint.load("s3://bucket/step-1", plan, read_limit_bytes=2**30)
    index = checkpoint.read_index("path")
    print(
        checkpoint.plan_reads(index, plan),
        checkpoint.left_over("path"),
        checkpoint.saved_plan("path"),
    )
    return checkpoint.load(index, checkpoint.structs(index))


def transfers(plan: sfx.ShardPlan, tree: Tree, channel: sync.Channel) -> object:
    planned = sync.plan_transfer(plan, plan, memory_limit_bytes=1 << 20)
    transfer = sync.TransferPlan.from_json(planned.to_json())
    sync.send(transfer, tree, channel, 1, sender=0, receiver=0)
    received, revision = sync.receive(transfer, plan, {0: channel}, receiver=0)
    print(revision)
    return received


def processes(mesh: Mesh, plan: sfx.ShardPlan, x: jax.Array) -> int:
    grid = hosts.grid_of(mesh)
    hosts.regular_grid(plan.mesh, {"data": 2})
    hosts.assert_same_plan(plan)
    print(
        hosts.local_chunk((8,), plan["wq"].spec, grid, 0).slices,
        hosts.owned((8,), x.sharding, 0),
    )
    hosts.global_batch(x, plan, wait_seconds=60)
    layout = hosts.data_layout(8, "data", grid, 0)
    return (
        layout.shard_id
        + hosts.shard_id("data", grid, 0)
        + hosts.replica_id("data", grid, 0)
    )


def hardware(devices: list[Any]) -> np.ndarray:
    box = topology.bounds(devices)
    print(
        topology.coords(devices[0], 8),
        topology.slices(devices),
        topology.feasible_submeshes(8, box),
    )
    print(
        topology.default_submesh("TPU v4", 8, box),
        topology.hybrid_shape(8, 4, 2),
        topology.ring_path(box),
    )
    order = topology.device_order(devices, (2, 4))
    places = topology.torus_order(box, (2, 4), topology.wraps("TPU v4", box))
    print(
        order.devices,
        topology.mean_hops(places, 1, box),
        topology.submesh_order(box, box, box),
    )
    tpu.mesh_of(
        "tpu:v5e:4x4", sfx.MeshSpec({"data": len(tpu.devices_of("tpu:v5e:4x4"))})
    )
    return topology.positions(devices)


def tables(config: dict[str, Any]) -> list[sfx.PathRules]:
    print(
        models.names(),
        models.strategies("llama3-8b"),
        models.tree("llama3-8b"),
        models.config("llama3-8b"),
    )
    layout = maps.hugging_face(config)
    for target in (
        maps.stacked(config),
        maps.maxtext(config),
        maps.engine(config, shards=8),
    ):
        print(layout.to(target))
    print(
        presets.t5x(),
        presets.eformer(),
        presets.infer_mode((8, 1), 1),
        presets.gpt2(),
        presets.deepseek_v3(),
    )
    families = [
        presets.bert,
        presets.gemma,
        presets.llama,
        presets.mistral,
        presets.mixtral,
        presets.qwen2,
    ]
    families += [presets.qwen3, presets.qwen3_moe, presets.starcoder2, presets.t5]
    families += [presets.gemma3n, presets.glm4_moe, presets.olmo2, presets.phi3]
    families += [presets.gpt_oss, presets.llama4, presets.qwen3_next]
    return [
        models.rules_for("llama3-8b", "fsdp"),
        *(family(head_dim=64) for family in families),
    ]


def others(
    tree: Tree, mesh: sfx.MeshSpec, devices: Mesh, config: dict[str, Any]
) -> None:
    flax.composite_rules(flax.rules_of(tree), flax.core_rules({"mlp": "tensor"}, mesh))
    flax.add_axis(flax.remove_axis(("layers", "mlp"), 0, "layers"), 0, "layers")
    print(
        flax.names_of(tree),
        flax.unboxed(tree),
        huggingface.rules_of(huggingface.plans_of(config)),
    )
    print(
        keras.rules_of({"dense": (None, "model")}), levanter.rules_of({"mlp": "model"})
    )
    print(
        haliax.names_of({}),
        levanter.mappings_of({}),
        maxtext.rules_of(config),
        t5x.partitioning_of("text"),
    )
    eformer.apply(
        eformer.replicate(tree, devices),
        eformer.shardings(checkpoint.read_index("path"), mesh),
    )
    print(eformer.structure_diff(tree, tree), eformer.axis_names_of(sfx.specs_of(tree)))

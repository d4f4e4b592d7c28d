"""The trees of the suite `convert`: a checkpoint's, a trainer's, an engine's, and the maps
between them.
"""

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec as P

import shardfx
from shardfx import (
    From,
    PathRules,
    ShardPlan,
    TreeMap,
    plan,
)

from ._runner import Options


# Of 1 GiB a run takes seconds, and its input another one: within five minutes there is
# no time for nine of each.
MOST_SECONDS = 30.0


WIDTH = 1024
HEADS = 16
KEYS = 4
SIZE = 64
FEED = 2816
VOCABULARY = 16384
SHARDS = 8
LARGE = "benchmarks._jobs:of_a_large_llama"
LARGE_ENDS = {"devices": (2048, 256), "processes": (512, 32)}
# Bytes of one layer and of the embedding, in bfloat16.
LAYER_BYTES = 2 * WIDTH * (2 * HEADS * SIZE + 2 * KEYS * SIZE + 3 * FEED + 1)
EMBEDDING_BYTES = 2 * WIDTH * VOCABULARY
HUGGING_FACE = TreeMap(
    {
        "embed": "model.embed_tokens.weight",
        **{
            f"layers/{name}": From(f"model.layers.{{i}}.{path}.weight").T.stack("i")
            for name, path in (
                ("q", "self_attn.q_proj"),
                ("k", "self_attn.k_proj"),
                ("v", "self_attn.v_proj"),
                ("o", "self_attn.o_proj"),
                ("gate", "mlp.gate_proj"),
                ("up", "mlp.up_proj"),
                ("down", "mlp.down_proj"),
            )
        },
        "layers/norm": From("model.layers.{i}.input_layernorm.weight").stack("i"),
    }
)
ENGINE = TreeMap(
    {
        "model.layers.{i}.qkv": From.concat(
            [
                From("layers/q").at("i").T,
                From("layers/k").at("i").T.repeat(SHARDS // KEYS, unit=SIZE),
                From("layers/v").at("i").T.repeat(SHARDS // KEYS, unit=SIZE),
            ],
            shards=SHARDS,
        ),
        "model.layers.{i}.o": From("layers/o").at("i").T,
        "model.layers.{i}.gate_up": From.concat(
            [From("layers/gate").at("i").T, From("layers/up").at("i").T], shards=SHARDS
        ),
        "model.layers.{i}.down": From("layers/down").at("i").T,
        "model.layers.{i}.norm": From("layers/norm").at("i"),
        "model.embed": "embed",
    }
)


def leaf_count(options: Options) -> int:
    """Nine per layer, and three; Llama 405B has 126 layers."""
    return 9 * (15 if options.quick else 126) + 3


def layer_count(mebibytes: int) -> int:
    return max(1, (mebibytes * 2**20 - EMBEDDING_BYTES) // LAYER_BYTES)


def trainer_shapes(layers: int) -> dict[str, tuple[int, ...]]:
    return {
        "embed": (VOCABULARY, WIDTH),
        "layers/q": (layers, WIDTH, HEADS * SIZE),
        "layers/k": (layers, WIDTH, KEYS * SIZE),
        "layers/v": (layers, WIDTH, KEYS * SIZE),
        "layers/o": (layers, HEADS * SIZE, WIDTH),
        "layers/gate": (layers, WIDTH, FEED),
        "layers/up": (layers, WIDTH, FEED),
        "layers/down": (layers, FEED, WIDTH),
        "layers/norm": (layers, WIDTH),
    }


def trainer_structs(layers: int) -> dict[str, jax.ShapeDtypeStruct]:
    return {
        path: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        for path, shape in trainer_shapes(layers).items()
    }


def trainer_plan(layers: int, devices: list[Any]) -> ShardPlan:
    grid = np.array(devices).reshape(2, -1)
    mesh = Mesh(grid, ("fsdp", "tensor"))
    rules = PathRules(
        [
            ("embed", P("fsdp", "tensor")),
            ("norm", P()),
            ("(o|down)$", P(None, "tensor", "fsdp")),
            ("layers", P(None, "fsdp", "tensor")),
        ]
    )
    return plan(trainer_structs(layers), mesh, paths=rules)


def engine_plan(layers: int, devices: list[Any]) -> ShardPlan:
    mesh = Mesh(np.array(devices), ("tensor",))
    structs = jax.eval_shape(ENGINE.apply, trainer_structs(layers))
    rules = PathRules(
        [("norm", P()), ("(o|down)$", P(None, "tensor")), (".*", P("tensor"))]
    )
    return plan(structs, mesh, paths=rules)


def filled_tree(planned: ShardPlan) -> dict[str, jax.Array]:
    """Numbers that tell where they are, made where they lie."""
    shardings = planned.shardings
    return {
        path: _filling(leaf.shape, shardings[path])(np.uint32(seed))
        for seed, (path, leaf) in enumerate(planned.structs.items())
    }


@ft.lru_cache(maxsize=64)
def _filling(shape: tuple[int, ...], sharding: Any) -> Any:
    def fill(seed: jax.Array) -> jax.Array:
        flat = jax.lax.iota(jnp.uint32, int(np.prod(shape)))
        return (
            ((flat * np.uint32(2654435761) + seed) >> 24)
            .astype(jnp.bfloat16)
            .reshape(shape)
        )

    return jax.jit(fill, out_shardings=sharding)


def small_weights(
    leaves: int, devices: list[Any]
) -> tuple[dict[str, jax.Array], ShardPlan]:
    """The leaves of a large Llama, of few bytes: what counts is what each costs."""
    layers = (leaves - 3) // 9
    width = 32
    heads = 32
    feed = 48
    shapes = {"embed": (64, width), "head": (64, width), "norm": (width,)}
    for name, rows, columns in (
        ("q", width, heads),
        ("k", width, 16),
        ("v", width, 16),
        ("o", heads, width),
    ):
        shapes[name] = (layers, rows, columns)
    shapes |= {
        "gate": (layers, width, feed),
        "up": (layers, width, feed),
        "down": (layers, feed, width),
    }
    shapes |= {"norm1": (layers, width), "norm2": (layers, width)}
    arrays = {
        path: np.random.default_rng(seed).normal(size=shape).astype(jnp.bfloat16)
        for seed, (path, shape) in enumerate(shapes.items())
    }
    grid = np.array(devices).reshape(2, -1)
    theirs = Mesh(grid, ("fsdp", "tensor"))
    down = ("^(o|down)$", P(None, "tensor", "fsdp"))
    rules = [
        ("norm", P()),
        ("embed|head", P("tensor", "fsdp")),
        down,
        (".*", P(None, "fsdp", "tensor")),
    ]
    source = plan(arrays, theirs, paths=PathRules(rules))
    rules = [("norm", P()), ("(o|down)$", P(None, "tensor")), (".*", P("tensor"))]
    structs_by_path = {
        path: jax.ShapeDtypeStruct(x.shape, x.dtype) for path, x in arrays.items()
    }
    structs = jax.eval_shape(
        LLAMA.apply,
        structs_by_path,
    )
    mesh = Mesh(np.array(devices), ("tensor",))
    return shardfx.shard(arrays, source), plan(structs, mesh, paths=PathRules(rules))


LLAMA = TreeMap(
    {
        **{name: name for name in ("embed", "head", "norm")},
        **{
            f"layers.{{i}}.{name}": From(name).at("i").T
            for name in ("q", "o", "gate", "up", "down")
        },
        **{
            f"layers.{{i}}.{name}": From(name).at("i").T.repeat(2, unit=4)
            for name in ("k", "v")
        },
        **{f"layers.{{i}}.{name}": From(name).at("i") for name in ("norm1", "norm2")},
    }
)

"""The suite `convert`: a checkpoint of another layout, and a trainer's tree for an
engine.
"""

import argparse
import atexit
import dataclasses
import functools as ft
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import shardfx
from shardfx import (
    From,
    PathRules,
    ShardPlan,
    TreeMap,
    checkpoint,
    plan,
    plan_reshard,
    reshard,
)
from shardfx._ground.tree import flatten
from shardfx._reshard.mover import map_move, resharded
from shardfx._reshard.pieces.exchange import program

from ._case import Case, Entry, Finding, Limit, Race, Rival, Value
from ._jobs import between
from ._machine import fresh_process, peak_resident_bytes, reset_peak, resident_bytes
from ._runner import Options


# Of 1 GiB a run takes seconds, and its input another one: within five minutes there is
# no time for nine of each.
_MOST_SECONDS = 30.0
SUMMARY = (
    "Trees that differ: a Hugging Face layout into a stacked tree, and a trainer's"
    " weights for an engine."
)
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


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--mebibytes", type=int, default=None, help="size of the weights"
    )


def cases(options: Options) -> list[Entry]:
    size = options.flags.mebibytes or (64 if options.quick else 1024)
    loading = (
        Limit("speedup.load without a map", at_least=0.7),
        Limit("speedup.load_file, numpy, device_put", at_least=1.0),
    )
    lean = (Limit("peak_over_tensors.shardfx", at_most=1.1),)
    counts = (
        Limit("wire_over_lower_bound", at_most=1.05),
        Limit("programs", at_most=12),
    )
    times = (
        Limit("speedup.jax.jit, out_shardings", at_least=1.5),
        Limit("speedup.jit per leaf, device_put", at_least=1.0),
    )
    # Where others use the machine, processor time tells more; of `device_put` threads
    # that spin count too.
    both = (
        *times,
        *[
            dataclasses.replace(limit, value=f"processor_{limit.value}")
            for limit in times
        ],
    )
    again = (Limit("first_over_second", at_least=5.0),)
    # A round has 4 MiB, or one larger row of at most 16 MiB.
    beside = Limit("mebibytes_beside_both_states", at_most=17.0)
    plain = (
        Limit("sync_over_stream", at_least=0.8),
        Limit("processor_over_stream", at_most=1.6),
        beside,
    )
    strided = (
        Limit("sync_over_stream", at_least=0.65),
        Limit("processor_over_stream", at_most=2.2),
        beside,
    )
    plans = (
        Limit("plan_seconds", at_most=5.0),
        Limit("host_seconds", at_most=0.5),
        Limit("peak_gigabytes", at_most=4.0),
    )
    room = (Limit("temporary_over_largest_shard", at_most=1.0),)
    return [
        Case(
            f"{size} MiB, Hugging Face to stacked",
            ft.partial(_load, size, options),
            _full(options, loading),
        ),
        Finding(
            f"{size} MiB, Hugging Face to stacked, memory",
            ft.partial(_memory, size, options),
            _full(options, lean),
        ),
        Case(
            f"{size} MiB, trainer to engine, same devices",
            ft.partial(_sync, size, options, False),
            both,
        ),
        Case(
            f"{size} MiB, trainer to engine, other devices",
            ft.partial(_sync, size, options, True),
            times[1:],
        ),
        Finding(
            f"{_leaf_count(options):,} leaves, trainer to engine, programs",
            ft.partial(_counts, options),
            counts,
        ),
        Finding(
            f"{size} MiB, trainer to engine, memory of programs",
            ft.partial(_room, size, options),
            room,
        ),
        Finding(
            f"{size} MiB, trainer to engine, memory between devices",
            ft.partial(_apart, size, options),
            room,
        ),
        Finding("the second sync over the first", ft.partial(_again, options), again),
        Finding(
            f"{size} MiB in 1,100 arrays, between two processes, plain pieces",
            ft.partial(between, 1100, size, "plain"),
            _full(options, plain),
        ),
        Finding(
            f"{size} MiB in 1,100 arrays, between two processes, strided pieces",
            ft.partial(between, 1100, size, "strided"),
            _full(options, strided),
        ),
        Finding(
            f"{size} MiB in 1,100 arrays, between two processes, encrypted",
            ft.partial(between, 1100, size, "plain", True),
        ),
        Finding(
            "405B, planned from 2,048 to 256 devices",
            ft.partial(fresh_process, LARGE, LARGE_ENDS),
            plans,
        ),
    ]


def _leaf_count(options: Options) -> int:
    """Nine per layer, and three; Llama 405B has 126 layers."""
    return 9 * (15 if options.quick else 126) + 3


def _full(options: Options, limits: tuple[Limit, ...]) -> tuple[Limit, ...]:
    """Limits on loading are for the full size: of small files, starting up weighs more
    than reading.
    """
    return () if options.quick else limits


def _layers(mebibytes: int) -> int:
    return max(1, (mebibytes * 2**20 - EMBEDDING_BYTES) // LAYER_BYTES)


def _shapes(layers: int) -> dict[str, tuple[int, ...]]:
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


def _structs(layers: int) -> dict[str, jax.ShapeDtypeStruct]:
    return {
        path: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        for path, shape in _shapes(layers).items()
    }


def _trainer(layers: int, devices: list[Any]) -> ShardPlan:
    mesh = Mesh(np.array(devices).reshape(2, -1), ("fsdp", "tensor"))
    rules = PathRules(
        [
            ("embed", P("fsdp", "tensor")),
            ("norm", P()),
            ("(o|down)$", P(None, "tensor", "fsdp")),
            ("layers", P(None, "fsdp", "tensor")),
        ]
    )
    return plan(_structs(layers), mesh, paths=rules)


def _engine(layers: int, devices: list[Any]) -> ShardPlan:
    mesh = Mesh(np.array(devices), ("tensor",))
    structs = jax.eval_shape(ENGINE.apply, _structs(layers))
    rules = PathRules(
        [("norm", P()), ("(o|down)$", P(None, "tensor")), (".*", P("tensor"))]
    )
    return plan(structs, mesh, paths=rules)


def _filled(planned: ShardPlan) -> dict[str, jax.Array]:
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


@ft.lru_cache(maxsize=2)
def _folder(mebibytes: int) -> Path:
    """A folder with a checkpoint of Hugging Face's layout."""
    from safetensors.numpy import save_file

    folder = Path(tempfile.mkdtemp(prefix="shardfx-convert-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    structs = _structs(_layers(mebibytes))
    random = np.random.default_rng(0)
    arrays = {}
    for path, rule in HUGGING_FACE.steps[0].rules:
        leaf, *_ = _leaves(rule)
        shape = structs[path].shape
        stored_shape = shape if "{i}" not in leaf else shape[:0:-1]
        for i in range(shape[0] if "{i}" in leaf else 1):
            numbers = random.integers(0, 2**14, stored_shape, np.uint16).view(
                jnp.bfloat16
            )
            arrays[leaf.replace("{i}", str(i))] = numbers
    save_file(arrays, folder / "model.safetensors")
    return folder


def _leaves(rule: From) -> list[str]:
    return (
        [rule.path]
        if rule.op == "leaf"
        else [path for part in rule.of for path in _leaves(part)]
    )


def _by_hand(file: Path, shardings: Any) -> Any:
    """What people write: whole weights in NumPy, stacked and transposed, then placed."""
    from safetensors.numpy import load_file

    return jax.device_put(HUGGING_FACE.apply(load_file(file)), shardings)


def _as_it_is(file: Path, devices: list[Any]) -> ShardPlan:
    """The same bytes, in the file's own layout, cut as the weights of a model are."""
    structs = checkpoint.structs(checkpoint.read_index(file))
    mesh = Mesh(np.array(devices).reshape(2, -1), ("fsdp", "tensor"))
    return plan(
        structs, mesh, paths=PathRules([("norm", P()), (".*", P("tensor", "fsdp"))])
    )


def _load(mebibytes: int, options: Options) -> Race:
    file = _folder(mebibytes) / "model.safetensors"
    trainer = _trainer(_layers(mebibytes), options.devices)
    plain_plan = _as_it_is(file, options.devices)

    def check(_: Any, result: Any) -> None:
        for path, array in _by_hand(file, trainer.shardings).items():
            assert result[path].sharding == trainer.shardings[path], path
            assert np.asarray(result[path]).tobytes() == np.asarray(array).tobytes(), (
                path
            )

    return Race(
        rivals=(
            Rival(
                "shardfx",
                make=lambda: lambda _: checkpoint.load(file, trainer, HUGGING_FACE),
                check=check,
            ),
            Rival(
                "load without a map",
                make=lambda: lambda _: checkpoint.load(file, plain_plan),
            ),
            Rival(
                "load_file, numpy, device_put",
                make=lambda: lambda _: _by_hand(file, trainer.shardings),
            ),
        ),
        fresh=lambda: None,
        byte_count=trainer.bytes_total,
        clear_caches=False,
        also=time.process_time,
        most_seconds=_MOST_SECONDS,
    )


LOADERS: dict[str, Callable[[Path, ShardPlan], Any]] = {
    "shardfx": lambda file, planned: checkpoint.load(file, planned, HUGGING_FACE),
    "load_file, numpy, device_put": lambda file, planned: _by_hand(
        file, planned.shardings
    ),
}


def _memory(mebibytes: int, options: Options) -> Mapping[str, Value]:
    file = _folder(mebibytes) / "model.safetensors"
    values = {}
    for name in LOADERS:
        arguments = {
            "file": str(file),
            "mebibytes": mebibytes,
            "name": name,
            "devices": len(options.devices),
        }
        for key, value in fresh_process(
            "benchmarks.convert:memory_of", arguments
        ).items():
            values[f"{key}.{name}"] = value
    return values


def memory_of(file: str, mebibytes: int, name: str, devices: int) -> dict[str, float]:
    """In a process of its own: the most memory that a load takes, and what stays, over
    the bytes that stay.
    """
    jax.config.update("jax_num_cpu_devices", devices)
    trainer = _trainer(_layers(mebibytes), jax.devices())
    with tempfile.TemporaryDirectory() as folder:
        from safetensors.numpy import save_file

        save_file({"w": np.ones((8, 8), np.float32)}, Path(folder, "small.safetensors"))
        checkpoint.load(
            folder,
            plan(
                {"w": np.ones((8, 8), np.float32)},
                jax.make_mesh((1,), ("x",)),
                paths=REPLICATED,
            ),
        )
    held = sum(leaf.bytes_per_device for leaf in trainer.leaves) * devices
    reset_peak()
    before = resident_bytes()
    result = jax.block_until_ready(LOADERS[name](Path(file), trainer))
    peak = peak_resident_bytes() - before
    resident = resident_bytes() - before
    del result
    return {"peak_over_tensors": peak / held, "resident_over_tensors": resident / held}


REPLICATED = PathRules([(".*", P())])


def _sync(mebibytes: int, options: Options, elsewhere: bool) -> Race:
    layers = _layers(mebibytes)
    half = len(options.devices) // 2
    source_devices, there = (
        (options.devices[:half], options.devices[half:])
        if elsewhere
        else (options.devices,) * 2
    )
    source = _trainer(layers, source_devices)
    target = _engine(layers, there)
    shardings = target.shardings

    # All trees hold the same numbers, so that one answer is right for all rivals.
    expected: dict[str, np.ndarray] = {}

    def check(tree: Any, result: Any) -> None:
        if not expected:
            expected.update(
                ENGINE.apply({path: np.asarray(leaf) for path, leaf in tree.items()})
            )
        for path, array in expected.items():
            assert result[path].sharding == shardings[path], path
            assert np.array_equal(
                np.asarray(result[path]).view(np.uint16), array.view(np.uint16)
            ), path

    def whole() -> Callable[[Any], Any]:
        return jax.jit(
            lambda tree: ENGINE.apply(tree, target.structs), out_shardings=shardings
        )

    rivals = [
        Rival(
            "shardfx",
            make=lambda: lambda tree: reshard(tree, target, map=ENGINE),
            check=check,
        ),
        Rival(
            "shardfx, programs",
            make=lambda: ft.partial(resharded, dst=target, map=ENGINE, copies=False),
            check=check,
        ),
        Rival(
            "jit per leaf, device_put",
            make=lambda: ft.partial(_leaf_by_leaf, layers, shardings),
            check=check,
        ),
    ]
    if not elsewhere:
        rivals.append(Rival("jax.jit, out_shardings", make=whole, check=check))
    return Race(
        rivals=tuple(rivals),
        # A move measured twice on one source would find copies that JAX keeps on the
        # host.
        fresh=lambda: jax.block_until_ready(_filled(source)),
        byte_count=target.bytes_total,
        facts={"leaves": len(target.leaves), "devices": len(options.devices)},
        clear_caches=False,
        also=time.process_time,
        most_seconds=_MOST_SECONDS,
    )


@jax.jit
def _qkv(q: jax.Array, k: jax.Array, v: jax.Array, i: int) -> jax.Array:
    def key(x: jax.Array) -> jax.Array:
        return jnp.repeat(x[i].T.reshape(KEYS, SIZE, WIDTH), SHARDS // KEYS, 0).reshape(
            SHARDS, -1, WIDTH
        )

    return jnp.concatenate(
        [q[i].T.reshape(SHARDS, -1, WIDTH), key(k), key(v)], 1
    ).reshape(-1, WIDTH)


@jax.jit
def _gate_up(gate: jax.Array, up: jax.Array, i: int) -> jax.Array:
    parts = [x[i].T.reshape(SHARDS, -1, WIDTH) for x in (gate, up)]
    return jnp.concatenate(parts, 1).reshape(-1, WIDTH)


@jax.jit
def _turned(x: jax.Array, i: int) -> jax.Array:
    return x[i].T


@jax.jit
def _layer(x: jax.Array, i: int) -> jax.Array:
    return x[i]


def _leaf_by_leaf(layers: int, shardings: Any, tree: Any) -> Any:
    """What people write: a compiled function per kind of weight, and `device_put` of
    what it gives.
    """
    arrays_by_path = {
        "model.embed": jax.device_put(tree["embed"], shardings["model.embed"])
    }
    w = {name.removeprefix("layers/"): leaf for name, leaf in tree.items()}
    for i in range(layers):
        layer = {
            "qkv": _qkv(w["q"], w["k"], w["v"], i),
            "o": _turned(w["o"], i),
            "gate_up": _gate_up(w["gate"], w["up"], i),
            "down": _turned(w["down"], i),
            "norm": _layer(w["norm"], i),
        }
        for name, leaf in layer.items():
            path = f"model.layers.{i}.{name}"
            arrays_by_path[path] = jax.device_put(leaf, shardings[path])
    return arrays_by_path


def _small(leaves: int, devices: list[Any]) -> tuple[dict[str, jax.Array], ShardPlan]:
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
    theirs = Mesh(np.array(devices).reshape(2, -1), ("fsdp", "tensor"))
    down = ("^(o|down)$", P(None, "tensor", "fsdp"))
    rules = [
        ("norm", P()),
        ("embed|head", P("tensor", "fsdp")),
        down,
        (".*", P(None, "fsdp", "tensor")),
    ]
    source = plan(arrays, theirs, paths=PathRules(rules))
    rules = [("norm", P()), ("(o|down)$", P(None, "tensor")), (".*", P("tensor"))]
    structs = jax.eval_shape(
        LLAMA.apply,
        {path: jax.ShapeDtypeStruct(x.shape, x.dtype) for path, x in arrays.items()},
    )
    return shardfx.shard(arrays, source), plan(
        structs, Mesh(np.array(devices), ("tensor",)), paths=PathRules(rules)
    )


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


def _counts(options: Options) -> Mapping[str, Value]:
    tree, target = _small(_leaf_count(options), options.devices)
    shardfx.clear_caches()
    moved = resharded(tree, target, map=LLAMA, copies=False)
    expected = LLAMA.apply({path: np.asarray(leaf) for path, leaf in tree.items()})
    assert all(
        np.asarray(moved[path]).tobytes() == array.tobytes()
        for path, array in expected.items()
    )
    programs = program.cache_info().currsize
    layers = 2
    source = _trainer(layers, options.devices)
    target = _engine(layers, options.devices)
    works = map_move(flatten(_filled(source)), target, ENGINE, False).plans
    wire_bytes = sum(
        work.assembly.parts.wire_bytes for work in works if work.assembly is not None
    )
    bound = _lower_bound(source, target, layers)
    return {
        "leaves": len(moved),
        "programs": programs,
        "wire_over_lower_bound": wire_bytes / bound,
    }


def _lower_bound(source: ShardPlan, target: ShardPlan, layers: int) -> int:
    """The bytes that each device of the target lacks, counted with the numbers of rows
    and columns.
    """
    total = 0
    for path, struct in target.structs.items():
        if "embed" in path:
            continue
        layer = int(path.split(".")[2])
        rows = _origins(path, layer)
        for device, index in struct.sharding.devices_indices_map(struct.shape).items():
            ranges = [
                np.arange(size)[part]
                for size, part in zip(struct.shape, index, strict=True)
            ]
            total += _lacking(rows, ranges, device, source)
    return 2 * total


def _origins(path: str, layer: int) -> list[tuple[str, int]]:
    """Per row of a target which array of the source it is of, and which column there."""
    name = path.rsplit(".", 1)[1]
    if name in ("o", "down"):
        return [(f"layers/{name}", row) for row in range(WIDTH)]
    if name == "norm":
        return [("layers/norm", row) for row in range(WIDTH)]
    if name == "gate_up":
        step = FEED // SHARDS
        return [
            (f"layers/{part}", s * step + r)
            for s in range(SHARDS)
            for part in ("gate", "up")
            for r in range(step)
        ]
    step = HEADS * SIZE // SHARDS
    times = SHARDS // KEYS
    origins = []
    for s in range(SHARDS):
        origins += [("layers/q", s * step + r) for r in range(step)]
        origins += [
            (f"layers/{part}", s // times * SIZE + r)
            for part in ("k", "v")
            for r in range(SIZE)
        ]
    return origins


def _lacking(
    rows: list[tuple[str, int]],
    resident: list[np.ndarray],
    device: Any,
    source: ShardPlan,
) -> int:
    expected: dict[str, set[int]] = {}
    for row in resident[0]:
        name, column = rows[int(row)]
        expected.setdefault(name, set()).add(column)
    count = 0
    for name, columns in expected.items():
        struct = source.structs[name]
        index = struct.sharding.devices_indices_map(struct.shape)[device]
        held = [
            set(np.arange(size)[part].tolist())
            for size, part in zip(struct.shape, index, strict=True)
        ]
        if len(struct.shape) == 2:
            count += len(columns - held[1])
            continue
        others = set(resident[1].tolist())
        count += len(columns) * len(others) - len(columns & held[2]) * len(
            others & held[1]
        )
    return count


def _room(mebibytes: int, options: Options) -> Mapping[str, Value]:
    """What the programs allocate beside their arguments and results, by XLA's own
    account.
    """
    source = _trainer(2, options.devices)
    target = _engine(2, options.devices)
    tree = _filled(source)
    works = map_move(flatten(tree), target, ENGINE, False).plans
    largest = max(leaf.bytes_per_device for leaf in target.leaves)
    most = 0
    for work in [
        work.assembly
        for work in works
        if work.assembly is not None and work.assembly.method == "programs"
    ]:
        for step in work.exchanges(None):
            sources = tuple(work.source_shapes[key] for key in step.keys)
            run = program(
                work.devices, step.rounds, sources, (work.shard_shape, work.dtype), True
            )
            where = NamedSharding(
                Mesh(np.array(work.devices), ("device",)), P("device")
            )
            count = len(work.devices)
            structs = [
                jax.ShapeDtypeStruct(
                    step.places.shape, step.places.dtype, sharding=where
                )
            ] + [
                jax.ShapeDtypeStruct(
                    (count * block[0], *block[1:]), dtype, sharding=where
                )
                for block, dtype in sources
            ]
            most = max(
                most, run.lower(*structs).compile().memory_analysis().temp_size_in_bytes
            )
    return {
        "temporary_bytes": most,
        "largest_shard": largest,
        "temporary_over_largest_shard": most / largest,
    }


def _apart(mebibytes: int, options: Options) -> Mapping[str, Value]:
    """What programs between other devices take of each beside its shards, as it is
    planned.
    """
    layers = _layers(mebibytes)
    half = len(options.devices) // 2
    source = _trainer(layers, options.devices[:half])
    target = _engine(layers, options.devices[half:])
    move = plan_reshard(source, target, map=ENGINE)
    pieces = [leaf for leaf in move.leaves if leaf.how == "pieces"]
    # The devices of a CPU share one memory, and the plan is of that.
    most = max(
        leaf.peak_bytes - leaf.source_bytes - leaf.target_bytes for leaf in pieces
    ) // len(options.devices)
    largest = max(leaf.bytes_per_device for leaf in target.leaves)
    return {
        "temporary_bytes": most,
        "largest_shard": largest,
        "temporary_over_largest_shard": most / largest,
    }


def _again(options: Options) -> Mapping[str, Value]:
    tree, target = _small(_leaf_count(options), options.devices)
    firsts = []
    seconds = []
    for _ in range(3):
        shardfx.clear_caches()
        jax.clear_caches()
        taken = []
        for _ in range(3):
            begin = time.perf_counter()
            jax.block_until_ready(reshard(tree, target, map=LLAMA))
            taken.append(time.perf_counter() - begin)
        firsts.append(taken[0])
        seconds.append(statistics.median(taken[1:]))
    first = statistics.median(firsts)
    second = statistics.median(seconds)
    return {
        "first_seconds": first,
        "second_seconds": second,
        "first_over_second": first / second,
    }

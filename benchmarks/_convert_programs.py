"""The suite `convert`: how many programs carry a move out, and what they allocate."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import shardfx
from shardfx import (
    ShardPlan,
    plan_reshard,
)
from shardfx._ground.tree import flatten
from shardfx._reshard.mover import map_move, resharded
from shardfx._reshard.pieces.exchange import program
from shardfx._reshard.pieces.shard_part import Block

from . import _convert_trees as trees
from ._case import Value
from ._convert_trees import ENGINE, FEED, HEADS, KEYS, LLAMA, SHARDS, SIZE, WIDTH
from ._runner import Options


def program_counts(options: Options) -> Mapping[str, Value]:
    tree, target = trees.small_weights(trees.leaf_count(options), options.devices)
    shardfx.clear_caches()
    moved = resharded(tree, target, map=LLAMA, copies=False)
    leaves_by_path = {path: np.asarray(leaf) for path, leaf in tree.items()}
    expected = LLAMA.apply(leaves_by_path)
    for path, array in expected.items():
        actual = np.asarray(moved[path]).tobytes()
        assert actual == array.tobytes()
    programs = program.cache_info().currsize
    layers = 2
    source = trees.trainer_plan(layers, options.devices)
    target = trees.engine_plan(layers, options.devices)
    works = map_move(flatten(trees.filled_tree(source)), target, ENGINE, False).plans
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
        origins = []
        for shard in range(SHARDS):
            for part in ("gate", "up"):
                origins += _rows_from(part, shard * step, step)
        return origins
    step = HEADS * SIZE // SHARDS
    times = SHARDS // KEYS
    origins = []
    for shard in range(SHARDS):
        origins += _rows_from("q", shard * step, step)
        for part in ("k", "v"):
            origins += _rows_from(part, shard // times * SIZE, SIZE)
    return origins


def _rows_from(part: str, start: int, count: int) -> list[tuple[str, int]]:
    return [(f"layers/{part}", row) for row in range(start, start + count)]


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


def memory_of_programs(mebibytes: int, options: Options) -> Mapping[str, Value]:
    """What the programs allocate beside their arguments and results, by XLA's own
    account.
    """
    source = trees.trainer_plan(2, options.devices)
    target = trees.engine_plan(2, options.devices)
    tree = trees.filled_tree(source)
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
            shard = Block(work.shard_shape, work.dtype)
            run = program(
                devices=work.devices,
                rounds=step.rounds,
                sources=sources,
                target=shard,
                makes_shards=True,
            )
            mesh = Mesh(np.array(work.devices), ("device",))
            where = NamedSharding(mesh, P("device"))
            count = len(work.devices)
            struct = jax.ShapeDtypeStruct(
                step.places.shape, step.places.dtype, sharding=where
            )
            structs = [struct] + [
                jax.ShapeDtypeStruct(
                    (count * block[0], *block[1:]), dtype, sharding=where
                )
                for block, dtype in sources
            ]
            memory = run.lower(*structs).compile().memory_analysis()
            temp_size_in_bytes = memory.temp_size_in_bytes
            most = max(most, temp_size_in_bytes)
    return {
        "temporary_bytes": most,
        "largest_shard": largest,
        "temporary_over_largest_shard": most / largest,
    }


def memory_between_devices(mebibytes: int, options: Options) -> Mapping[str, Value]:
    """What programs between other devices take of each beside its shards, as it is
    planned.
    """
    layers = trees.layer_count(mebibytes)
    half = len(options.devices) // 2
    source = trees.trainer_plan(layers, options.devices[:half])
    target = trees.engine_plan(layers, options.devices[half:])
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

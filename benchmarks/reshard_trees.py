"""Moving whole states: many leaves, other device sets, memory limits, host memory."""

import argparse
import functools as ft
import gc
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from shardfx._reshard.mover import reshard, resharded

from ._case import Case, Entry, Finding, Floor, Limit, Race, Rival, Skip, Value, memcpy
from ._machine import fresh_process, peak_resident_bytes, reset_peak, resident_bytes
from ._runner import Options


SUMMARY = (
    "whole states: 1,137 leaves, other device sets and orders, memory limits, host"
    " memory"
)

# Shapes of one layer of Llama 3.1 405B, every dimension divided by 128.
LAYER = (
    (128, 128),
    (8, 128),
    (8, 128),
    (128, 128),
    (416, 128),
    (416, 128),
    (128, 416),
    (128,),
    (128,),
)
DEVICE_SETS = {
    "8 rows to 4 columns": (P("x"), (7, 6, 5, 4), P(None, "x")),
    "8 columns to 4 rows": (P(None, "x"), (7, 6, 5, 4), P("x")),
    "8 rows to 6 rows": (P("x"), (0, 1, 2, 3, 4, 5), P("x")),
    "8 rows to 8 rows in another order": (P("x"), (7, 6, 5, 4, 3, 2, 1, 0), P("x")),
    "8 rows to 2 replicas": (P("x"), (3, 1), P()),
}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--scalax",
        action="store_true",
        help="race scalax too, which compiles a program per leaf",
    )


def cases(options: Options) -> list[Entry]:
    count = len(options.devices)
    if count < 8:
        skip = Skip(
            "moves between device sets",
            f"they need 8 devices, and there are {count}",
        )
        mebibytes = 64 if options.quick else 512
        return [
            skip,
            *offloads(options, mebibytes),
        ]
    size = 96 if options.quick else 768
    fast = (Limit("speedup.jax.device_put", at_least=2.0),)
    return [
        Case(
            "1,137 leaves, fsdp to fsdp x tensor",
            ft.partial(_many_leaves, options, (2, 4), None),
            (
                Limit("cold_seconds.shardfx", at_most=1.0),
                Limit("speedup.best", at_least=1.0),
            ),
        ),
        *(
            []
            if options.quick
            else [
                Case(
                    "1,137 leaves, 8 devices to 6",
                    ft.partial(_many_leaves, options, (2, 3), (0, 1, 2, 3, 4, 5)),
                )
            ]
        ),
        Case(
            "1,137 leaves in place",
            ft.partial(_in_place, options),
            (Limit("seconds.shardfx", at_most=0.005),),
        ),
        *(
            []
            if options.quick
            else [
                Case("5,000 leaves of 256 bytes", ft.partial(_small_leaves, options)),
                *many_arrays(options),
            ]
        ),
        *[
            Case(f"{name}, {size} MiB", ft.partial(_between, options, name, size), fast)
            for name in _chosen(options)
        ],
        *([] if options.devices[0].platform != "cpu" else _memory(options)),
        *offloads(options, 64 if options.quick else 512),
    ]


def _model(dtype: Any = np.float32) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    layers = {
        str(i): [rng.random(shape, np.float32).astype(dtype) for shape in LAYER]
        for i in range(126)
    }
    embeddings = {name: np.ones((1000, 128), dtype) for name in ("embed", "head")}
    return {"layers": layers, **embeddings, "norm": np.ones(128, dtype)}


def _many_leaves(
    options: Options, sizes: tuple[int, int], order: tuple[int, ...] | None
) -> Race:
    devices = np.array(options.devices[:8])
    if order is None:
        target = devices
    else:
        target = devices[list(order)]
    source = Mesh(devices, ("fsdp",))
    mesh = Mesh(target.reshape(sizes), ("fsdp", "tensor"))
    values = _model()
    src = jax.tree.map(lambda x: NamedSharding(source, P("fsdp")), values)
    dst = jax.tree.map(lambda x: NamedSharding(mesh, _spec(x.shape, mesh)), values)
    moves = {
        (x.shape, a, b)
        for x, a, b in zip(*map(jax.tree.leaves, (values, src, dst)), strict=True)
    }
    jitted = lambda: jax.jit(lambda x: x, in_shardings=(src,), out_shardings=dst)
    rivals = [
        Rival("shardfx", lambda: lambda x: reshard(x, dst), _equal(values)),
        Rival(
            "jax.device_put", lambda: lambda x: jax.device_put(x, dst), _equal(values)
        ),
    ]
    if order is None:
        rivals.append(Rival("one jax.jit", jitted, _equal(values)))
        rivals.append(
            Rival(
                name="eformer",
                make=lambda: _eformer(dst),
                check=_equal(values),
                needs=("eformer",),
            )
        )
        if options.flags.scalax:
            rivals.append(
                Rival(
                    name="scalax",
                    make=lambda: _scalax(values, dst),
                    check=_equal(values),
                    needs=("scalax",),
                )
            )
    return Race(
        rivals=tuple(rivals),
        fresh=lambda: jax.block_until_ready(_placed(values, src)),
        byte_count=_bytes(values),
        floor=memcpy(_bytes(values)),
        facts={
            "leaves": len(jax.tree.leaves(values)),
            "moves": len(moves),
            "mebibytes": _bytes(values) >> 20,
        },
    )


def _spec(shape: tuple[int, ...], mesh: Mesh) -> P:
    if len(shape) == 2:
        entries = ("tensor", "fsdp")
    else:
        entries = (None,)
    spec: list[str | None] = []
    for axis, size in zip(entries, shape, strict=True):
        is_sharded = axis is not None and size % mesh.shape[axis] == 0
        spec.append(axis if is_sharded else None)
    return P(*spec)


def _in_place(options: Options) -> Race:
    values = _model()
    mesh = Mesh(np.array(options.devices[:8]), ("fsdp",))
    sharding = NamedSharding(mesh, P("fsdp"))
    there = _placed(values, jax.tree.map(lambda _: sharding, values))
    dst = jax.tree.map(lambda _: sharding, values)

    def untouched(arrays: Any, result: Any) -> None:
        assert all(
            a is b for a, b in zip(*map(jax.tree.leaves, (arrays, result)), strict=True)
        )

    return Race(
        rivals=(
            Rival("shardfx", lambda: lambda x: reshard(x, dst), untouched),
            Rival(
                "jax.device_put",
                lambda: lambda x: jax.device_put(x, dst),
                _equal(values),
            ),
        ),
        fresh=lambda: there,
        number=5,
    )


def _small_leaves(options: Options) -> Race:
    devices = np.array(options.devices[:8])
    src = NamedSharding(Mesh(devices, ("x",)), P("x"))
    mesh = Mesh(devices[[6, 4, 2, 0]], ("x",))
    dst = NamedSharding(mesh, P("x"))
    values = [np.full(64, i, np.float32) for i in range(5000)]
    return Race(
        rivals=(
            Rival("shardfx", lambda: lambda x: reshard(x, dst), _equal(values)),
            Rival(
                "jax.device_put",
                lambda: lambda x: jax.device_put(x, [dst] * len(x)),
                _equal(values),
            ),
        ),
        fresh=lambda: jax.block_until_ready(_placed(values, [src] * len(values))),
    )


def many_arrays(options: Options) -> list[Entry]:
    """Thousands of small arrays of one kind, from fresh sources and from the same ones
    again, whose copies on the host `jax.device_put` keeps.
    """
    kinds = (("1,100 arrays of 256 KiB", 1100, 256), ("20,000 of 256 bytes", 20_000, 8))
    sources = (("fresh sources", True), ("the same sources again", False))
    least = {(256, True): 2.0, (8, True): 1.25}
    cases: list[Entry] = []
    for name, count, width in kinds:
        for text, is_fresh in sources:
            at_least = least.get((width, is_fresh), 1 / 1.5)
            cases.append(
                Case(
                    f"{name}, {text}",
                    ft.partial(_of_one_kind, options, count, width, is_fresh),
                    (Limit("speedup.jax.device_put", at_least=at_least),),
                )
            )
    return cases


def _of_one_kind(options: Options, count: int, width: int, is_fresh: bool) -> Race:
    mesh = Mesh(np.array(options.devices[:8]), ("x",))
    src = NamedSharding(mesh, P("x"))
    dst = NamedSharding(mesh, P(None, "x"))
    values = [np.full((width, width), i, np.float32) for i in range(count)]

    def placed() -> Any:
        return jax.block_until_ready(_placed(values, [src] * count))

    same = None if is_fresh else placed()
    return Race(
        rivals=(
            Rival("shardfx", lambda: lambda x: reshard(x, dst), _equal(values)),
            Rival(
                "jax.device_put",
                lambda: lambda x: jax.device_put(x, [dst] * count),
                _equal(values),
            ),
        ),
        fresh=placed if same is None else lambda: same,
    )


def _ends(name: str, devices: list[Any]) -> tuple[NamedSharding, NamedSharding]:
    ours, order, theirs = DEVICE_SETS[name]
    source_mesh = Mesh(np.array(devices[:8]), ("x",))
    source = NamedSharding(source_mesh, ours)
    target_mesh = Mesh(np.array(devices)[list(order)], ("x",))
    return source, NamedSharding(target_mesh, theirs)


def _between(options: Options, name: str, mebibytes: int) -> Race:
    src, dst = _ends(name, options.devices)
    make, values = _whole(mebibytes, src)
    return Race(
        rivals=(
            Rival("shardfx", lambda: lambda x: reshard(x, dst), _equal(values)),
            Rival(
                "shardfx, donated", lambda: lambda x: reshard(x, dst, donate=True), None
            ),
            Rival(
                "jax.device_put",
                lambda: lambda x: jax.device_put(x, dst),
                _equal(values),
            ),
        ),
        fresh=make,
        byte_count=values.nbytes,
        floor=memcpy(values.nbytes),
    )


def _whole(
    mebibytes: int, sharding: NamedSharding
) -> tuple[Callable[[], jax.Array], np.ndarray]:
    """A new array on every call, made on the devices, and its values; both dimensions
    divide by 2, 3 and 8.
    """
    rows = 96 * max(1, math.isqrt(mebibytes * 2**18) // 96)
    shape = (rows, 96 * (mebibytes * 2**18 // rows // 96))
    values = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    make = jax.jit(
        lambda: jnp.arange(math.prod(shape), dtype=jnp.int32).reshape(shape),
        out_shardings=sharding,
    )
    return lambda: jax.block_until_ready(make()), values


def _memory(options: Options) -> list[Entry]:
    count = 512 if options.quick else 1536
    names = _chosen(options)
    plain = tuple(Limit(f"peak_over_target.{name}", at_most=1.1) for name in names)
    given_up = tuple(Limit(f"peak_over_target.{name}", at_most=0.3) for name in names)
    limited = (Limit("beyond_over_limit", at_most=1.1),)
    entries: list[Entry] = [
        Finding(
            f"peak memory between device sets, {count} MiB",
            ft.partial(_peaks, names, count, "shardfx"),
            plain,
        ),
        Finding(
            f"peak memory between device sets, {count} MiB, donated",
            ft.partial(_peaks, names, count, "donated"),
            given_up,
        ),
        Finding(
            "a tree of four times the memory limit",
            ft.partial(_limited, options, "copies"),
            limited,
        ),
        Finding(
            "the same through programs",
            ft.partial(_limited, options, "programs"),
            limited,
        ),
    ]
    rival = Finding(
        f"peak memory of jax.device_put, {count} MiB",
        ft.partial(_peaks, names, count, "jax.device_put"),
    )
    if options.quick:
        return entries
    return [*entries, rival]


def _chosen(options: Options) -> list[str]:
    return list(DEVICE_SETS)[: 2 if options.quick else None]


def _peaks(names: list[str], mebibytes: int, how: str) -> Mapping[str, Value]:
    values: dict[str, Value] = {}
    for name in names:
        value = {"name": name, "mebibytes": mebibytes, "how": how}
        values[f"peak_over_target.{name}"] = fresh_process(
            "benchmarks.reshard_trees:peak_of", value
        )
    return values


def peak_of(name: str, mebibytes: int, how: str) -> float:
    """In a process of its own: the most memory that a move takes beside its source,
    over the target's bytes.
    """
    jax.config.update("jax_num_cpu_devices", 8)
    move: Callable[[Any, Any], Any] = {
        "shardfx": reshard,
        "donated": ft.partial(reshard, donate=True),
        "jax.device_put": jax.device_put,
    }[how]
    src, dst = _ends(name, jax.devices())
    small = jax.device_put(np.zeros((96, 96), np.int32), src)
    jax.block_until_ready(move(small, dst))
    make, values = _whole(mebibytes, src)
    byte_count = values.nbytes
    del values
    x = make()
    gc.collect()
    reset_peak()
    before = resident_bytes()
    jax.block_until_ready(move(x, dst))
    return (peak_resident_bytes() - before) / byte_count


def _limited(options: Options, how: str) -> Mapping[str, Value]:
    value = {"limit_mebibytes": 64 if options.quick else 256, "how": how}
    return fresh_process("benchmarks.reshard_trees:beyond_limit", value)


def beyond_limit(limit_mebibytes: int, how: str) -> dict[str, float]:
    """In a process of its own: what a move under a limit takes beside source and
    target, over the limit.
    """
    jax.config.update("jax_num_cpu_devices", 8)
    devices = np.array(jax.devices())
    limit = limit_mebibytes << 20
    src = NamedSharding(Mesh(devices, ("x",)), P("x"))
    mesh = Mesh(devices.reshape(2, 4), ("x", "y"))
    dst = NamedSharding(mesh, P("y", "x"))
    # Half of the tree in one leaf, the other half in eight; twice, so that the second
    # time compiles nothing.
    columns = 4 * limit // 2 // 4 // 4096
    shapes = {"large": (4096, columns)} | {
        f"small{i}": (512, columns) for i in range(8)
    }
    make = jax.jit(
        lambda: {
            name: jnp.arange(math.prod(shape), dtype=jnp.float32).reshape(shape)
            for name, shape in shapes.items()
        },
        out_shardings=src,
    )
    # Programs are what accelerators run, where the CPU would copy between the shards in
    # its memory.
    move = ft.partial(resharded, memory_limit_bytes=limit, copies=how == "copies")
    first = jax.block_until_ready(move(jax.block_until_ready(make()), dst))
    del first
    tree = jax.block_until_ready(make())
    gc.collect()
    reset_peak()
    before = resident_bytes()
    begin = time.perf_counter()
    moved = jax.block_until_ready(move(tree, dst))
    seconds = time.perf_counter() - begin
    beyond = peak_resident_bytes() - before - _bytes(tree)
    del moved
    return {
        "beyond_over_limit": max(0, beyond) / limit,
        "tree_over_limit": _bytes(tree) / limit,
        "seconds": seconds,
    }


def offloads(options: Options, mebibytes: int) -> list[Entry]:
    """To pinned host memory and back, against one copy of one array of as many bytes
    where there are two memories.
    """
    accelerated = options.devices[0].platform != "cpu"
    if accelerated:
        bound = (Limit("floor_ratio.shardfx", at_most=1 / 0.9),)
    else:
        bound = ()
    return [
        Case(
            f"{mebibytes} MiB of Adam's state, {direction}",
            ft.partial(_offload, options, mebibytes, direction),
            bound,
        )
        for direction in ("device to pinned_host", "pinned_host to device")
    ]


def _offload(options: Options, mebibytes: int, direction: str) -> Race:
    mesh = Mesh(np.array(options.devices), ("x",))
    layouts = [
        NamedSharding(mesh, P("x"), memory_kind=kind)
        for kind in direction.split(" to ")
    ]
    values = [
        np.random.default_rng(i).random((mebibytes << 14,), np.float32)
        for i in range(16)
    ]
    tree = jax.block_until_ready(_placed(values, [layouts[0]] * len(values)))
    if options.devices[0].platform == "cpu":
        floor = memcpy(_bytes(values))
    else:
        values_of_all = np.ones(_bytes(values) // 4, np.float32)
        whole = jax.block_until_ready(_placed(values_of_all, layouts[0]))
        floor = Floor(
            "one copy of one array",
            lambda _: jax.block_until_ready(jax.device_put(whole, layouts[1])),
        )
    return Race(
        rivals=(
            Rival("shardfx", lambda: lambda x: reshard(x, layouts[1]), _equal(values)),
            Rival(
                "jax.device_put",
                lambda: lambda x: jax.device_put(x, [layouts[1]] * len(x)),
                _equal(values),
            ),
        ),
        fresh=lambda: tree,
        byte_count=_bytes(values),
        floor=floor,
    )


def _placed(values: Any, shardings: Any) -> Any:
    """A tree that has never been read: each shard is a new copy."""
    return jax.tree.map(
        lambda x, to: jax.make_array_from_callback(
            x.shape, to, lambda index: x[index].copy()
        ),
        values,
        shardings,
    )


def _equal(values: Any) -> Callable[[Any, Any], None]:
    def check(_: Any, result: Any) -> None:
        for x, y in zip(*map(jax.tree.leaves, (values, result)), strict=True):
            for shard in y.addressable_shards:
                np.testing.assert_array_equal(np.asarray(shard.data), x[shard.index])

    return check


def _leaf_by_leaf(shard_fns: Any, tree: Any) -> Any:
    """Waits for each leaf: a thousand collectives under way at once make the CPU's
    runtime abort.
    """
    return jax.tree.map(lambda fn, x: jax.block_until_ready(fn(x)), shard_fns, tree)


def _eformer(dst: Any) -> Callable[[Any], Any]:
    from eformer.escale import make_shard_and_gather_fns

    leaves = jax.tree.leaves(dst)
    specs = jax.tree.map(lambda to: to.spec, dst)
    shard_fns, _ = make_shard_and_gather_fns(specs, leaves[0].mesh)
    return lambda tree: _leaf_by_leaf(shard_fns, tree)


def _scalax(values: Any, dst: Any) -> Callable[[Any], Any]:
    from scalax.sharding import MeshShardingHelper

    mesh = jax.tree.leaves(dst)[0].mesh
    helper = MeshShardingHelper(tuple(mesh.devices.shape), mesh.axis_names)
    specs = jax.tree.map(lambda to: to.spec, dst)
    shard_fns, _ = helper.make_shard_and_gather_fns(values, specs)
    return lambda tree: _leaf_by_leaf(shard_fns, tree)


def _bytes(tree: Any) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))

"""Planning the shardings of whole models: 1,137 and 47,705 leaves, 12 rules over
logical axes.
"""

import argparse
import functools as ft
import gc
import itertools as it
import re
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.sharding import Mesh, PartitionSpec

import shardfx as sfx

from . import _shapes as shapes
from ._case import Case, Entry, Finding, Floor, Limit, Race, Rival, Value
from ._machine import fresh_process
from ._runner import Options


SUMMARY = (
    "regex rules to logical axes to corrected NamedShardings; seconds of processor time"
)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--leaves", type=int, default=100_000, help="leaves of the largest tree"
    )


def cases(options: Options) -> list[Entry]:
    llama = shapes.LLAMA_RULES
    deepseek = shapes.DEEPSEEK_RULES
    race = ft.partial(_race, devices=options.devices)
    if options.quick:
        largest = 10_000
    else:
        largest = options.flags.leaves
    fastest = Limit("speedup.best", at_least=1.0)
    return [
        Case(
            "Llama 3.1 405B, 1,137 leaves",
            ft.partial(race, shapes.llama_405b, llama),
            (Limit("floor_ratio.shardfx", at_most=2.5), fastest),
        ),
        Case(
            "DeepSeek-V3, 47,705 leaves",
            ft.partial(race, shapes.deepseek_v3, deepseek),
            (Limit("floor_ratio.shardfx", at_most=1.5), fastest),
        ),
        Case(
            "10,000 leaves, no two paths alike",
            ft.partial(race, _all_different, llama),
            (fastest,),
        ),
        *(
            []
            if options.quick
            else [
                Case(
                    "10,000 leaves, no two shapes alike",
                    ft.partial(race, _shapes_too, llama),
                )
            ]
        ),
        *_planning(options),
        Finding(
            f"cost per leaf from 1,000 to {largest:,} leaves",
            ft.partial(_flatness, largest, options),
            (Limit("largest over smallest", at_most=1.25),),
        ),
        *_costs_of_use(options),
    ]


def _costs_of_use(options: Options) -> list[Entry]:
    """What importing costs, holding a plan, and calling with one."""
    return [
        Finding(
            "import shardfx after import equinox",
            _import_seconds,
            (Limit("seconds", at_most=0.1),),
        ),
        Finding(
            "memory held by the DeepSeek-V3 plan",
            lambda: fresh_process("benchmarks.plan:held"),
            (
                Limit("MB with shardings", at_most=30),
                Limit("MB with digest", at_most=30),
            ),
        ),
        Finding(
            "a 47,705-leaf plan as an argument of a jitted function",
            ft.partial(_argument, 500 if options.quick else 3000),
            (
                Limit("added us per call", at_most=5),
                Limit("added us per call, read from JSON", at_most=5),
            ),
        ),
        Finding(
            "calls with 38 arrays through filter_jit",
            ft.partial(_calls, options.devices, 1000 if options.quick else 3000),
            (
                Limit("added us per call", at_most=12),
                Limit("added us per call, a planned dict", at_most=12),
                Limit("over equinox.filter_jit, modules", at_most=1.0),
            ),
        ),
    ]


def _planning(options: Options) -> list[Entry]:
    """Cold, hot and after a collection, side by side, each tree in a process of its
    own.
    """
    trees = (
        ("llama", "Llama 3.1 405B, 1,137 leaves", 2.0),
        ("deepseek", "DeepSeek-V3, 47,705 leaves", 0.6),
        ("distinct", "10,000 leaves, no two shapes alike", 6.0),
    )
    entries: list[Entry] = [
        Finding(
            f"planning beside tree_flatten_with_path: {name}",
            ft.partial(
                fresh_process,
                "benchmarks._planning:times",
                {"tree": tree, "repeats": options.repeats},
            ),
            (Limit("hot, x flatten", at_most=most),),
        )
        for tree, name, most in trees
    ]
    follow = ft.partial(
        fresh_process, "benchmarks._planning:follow", {"repeats": options.repeats}
    )
    limits = (Limit("hot, x eval_shape", at_most=10),)
    return [
        *entries,
        Finding("follow of AdamW beside jax.eval_shape: 1,137 leaves", follow, limits),
    ]


def planner(rules: Any, mesh: Any) -> Callable[[Any], sfx.ShardPlan]:
    """The work that is timed: match, resolve, correct, and make every NamedSharding."""
    paths = sfx.PathRules(rules)
    axes = sfx.AxisRules(shapes.AXES)

    def run(tree) -> sfx.ShardPlan:
        plan = sfx.plan(tree, mesh, paths=paths, axes=axes)
        assert plan.shardings is not None
        return plan

    return run


def mesh_of(devices: list[Any]) -> Mesh:
    """`fsdp` x `tensor`, as square as the devices allow."""
    count = len(devices)
    tensor = max(t for t in (1, 2, 4, 8) if count % t == 0 and t * t <= 2 * count)
    grid = np.array(devices).reshape(count // tensor, tensor)
    return Mesh(grid, ("fsdp", "tensor"))


def _race(make: Callable[[], Any], rules: tuple, devices: list[Any]) -> Race:
    mesh = mesh_of(devices)
    specs = [
        (pattern, sfx.resolve(names, sfx.AxisRules(shapes.AXES)).spec)
        for pattern, names in rules
    ]
    logical_rules = [(pattern, PartitionSpec(*names)) for pattern, names in rules]
    logical = _by_first_match(make(), logical_rules)
    expected = jax.tree.leaves(_by_first_match(make(), specs))

    def right(_, result) -> None:
        if isinstance(result, sfx.ShardPlan):
            tree = result.shardings
        else:
            tree = result
        specs = [getattr(leaf, "spec", leaf) for leaf in jax.tree.leaves(tree)]
        wrong = [
            (a, b)
            for a, b in zip(specs, expected, strict=True)
            if _trimmed(a) != _trimmed(b)
        ]
        assert not wrong, f"{len(wrong)} leaves differ, the first: {wrong[0]}"

    rivals = (
        Rival("shardfx", lambda: planner(rules, mesh), right),
        Rival(
            name="eformer (matching only)",
            make=lambda: _eformer(specs),
            check=right,
            needs=("eformer",),
        ),
        Rival(
            name="scalax",
            make=lambda: _scalax(specs, mesh),
            check=right,
            needs=("scalax",),
        ),
        Rival(
            name="flax (no matching)",
            make=lambda: _flax(logical, mesh),
            check=right,
            needs=("flax",),
        ),
        Rival(
            name="big_vision",
            make=lambda: _big_vision(rules, mesh),
            check=None,
            needs=("big_vision",),
        ),
    )
    return Race(
        rivals=rivals,
        fresh=make,
        floor=Floor("tree_flatten_with_path", jtu.tree_flatten_with_path),
        facts={"leaves": len(expected)},
        block=False,
        clock=time.thread_time,
    )


def _eformer(specs: list) -> Callable[[Any], Any]:
    from eformer.escale import match_partition_rules

    return lambda tree: match_partition_rules(specs, tree)


def _scalax(specs: list, mesh: Mesh) -> Callable[[Any], Any]:
    from scalax.sharding import MeshShardingHelper, TreePathShardingRule

    helper = MeshShardingHelper(tuple(mesh.devices.shape), mesh.axis_names)
    return lambda tree: helper.match_sharding_rule(TreePathShardingRule(*specs), tree)


def _flax(logical: Any, mesh: Mesh) -> Callable[[Any], Any]:
    from flax.linen.spmd import logical_to_mesh_sharding

    return lambda _: logical_to_mesh_sharding(logical, mesh, shapes.AXES)


def _big_vision(rules: tuple, mesh: Mesh) -> Callable[[Any], Any]:
    from big_vision import sharding  # pyright: ignore[reportMissingImports]

    strategy = [(f".*{pattern}", 'fsdp(axis="fsdp")') for pattern, _ in rules]
    return lambda tree: sharding.infer_sharding(tree, strategy, mesh)


def _by_first_match(tree: Any, rules: list[tuple[str, PartitionSpec]]) -> Any:
    """The plainest possible matcher: every path against every pattern."""

    def match(path: tuple, _) -> PartitionSpec:
        name = "/".join(str(key.key) for key in path)
        return next(spec for pattern, spec in rules if re.search(pattern, name))

    return jtu.tree_map_with_path(match, tree)


def _trimmed(spec: PartitionSpec) -> tuple:
    entries = tuple(spec)
    while entries and entries[-1] is None:
        entries = entries[:-1]
    return entries


def _all_different(widen: int = 0) -> Any:
    """A flat tree whose paths share nothing that could be remembered: no digits, no
    repeated subtree.
    """
    words = [
        "".join(chr(97 + (i // 26**k) % 26) for k in range(4)) for i in range(10_000)
    ]
    tree = {}
    for i, word in enumerate(words):
        pattern, names = shapes.LLAMA_RULES[i % 12]
        path = f"{word}/{pattern.removesuffix('/weight$')}"
        shape = tuple(1024 + 8 * i * widen for _ in names)
        tree[path] = {"weight": jax.ShapeDtypeStruct(shape, jnp.bfloat16)}
    return tree


def _shapes_too() -> Any:
    """As `_all_different`, and every shape is different too."""
    return _all_different(1)


def _flatness(largest: int, options: Options) -> dict[str, Value]:
    mesh = mesh_of(options.devices)
    sizes = [size for size in (1_000, 10_000, 100_000) if size <= largest]
    values: dict[str, Value] = {}
    per_leaf: list[float] = []
    planned = planner(shapes.LLAMA_RULES, mesh)
    for size in sizes:
        tree = shapes.llama_405b(layers=round(size / 9))
        leaves = len(jax.tree.leaves(tree))
        ours = _median(lambda tree=tree: planned(tree), options.repeats)
        floor = _median(
            lambda tree=tree: jtu.tree_flatten_with_path(tree), options.repeats
        )
        per_leaf.append(ours / leaves)
        values[f"ns per leaf at {size:,}"] = 1e9 * ours / leaves
        values[f"x floor at {size:,}"] = ours / floor
    return values | {"largest over smallest": per_leaf[-1] / per_leaf[0]}


def _median(run: Callable[[], Any], repeats: int) -> float:
    run()
    times = []
    for _ in range(repeats):
        gc.collect()
        gc.freeze()
        begin = time.thread_time()
        result = run()
        times.append(time.thread_time() - begin)
        gc.unfreeze()
        del result
    return statistics.median(times)


def _import_seconds() -> dict[str, Value]:
    """The least of ten processes: as installed, with compiled files, and from source."""

    def times(number: int, write: bool) -> list[tuple[float, float]]:
        value = {
            "first": "equinox",
            "then": "shardfx",
            "bytecode": folder,
            "write": write,
        }
        return [
            fresh_process("benchmarks._imports:seconds_to_import", value)
            for _ in range(number)
        ]

    with tempfile.TemporaryDirectory() as folder:
        source = [then for _, then in times(3, False)]
        first, seconds = zip(*times(11, True)[1:], strict=True)
    return {
        "seconds": min(seconds),
        "of the import of equinox": min(seconds) / min(first),
        "seconds from source": min(source),
    }


def held() -> dict[str, float]:
    """What a plan keeps alive beside the tree it was made for; run in a process of its
    own.
    """
    mesh = sfx.MeshSpec({"fsdp": 16, "tensor": 8})
    planned = planner(shapes.DEEPSEEK_RULES, mesh)
    planned(shapes.deepseek_v3())
    tree = shapes.deepseek_v3()
    gc.collect()
    tracemalloc.start()
    plan = planned(tree)
    with_shardings = _traced_megabytes()
    json_bytes = len(plan.to_json())
    assert len(plan.digest) == 64
    with_digest = _traced_megabytes()
    assert len(plan.leaves) == 47_705
    return {
        "MB with shardings": with_shardings,
        "MB with digest": with_digest,
        "MB with every LeafPlan": _traced_megabytes(),
        "MB of JSON": json_bytes / 1e6,
    }


def _traced_megabytes() -> float:
    gc.collect()
    return tracemalloc.get_traced_memory()[0] / 1e6


def _argument(number: int) -> dict[str, Value]:
    mesh = sfx.MeshSpec({"fsdp": 16, "tensor": 8})
    plan = planner(shapes.DEEPSEEK_RULES, mesh)(shapes.deepseek_v3())
    again = sfx.ShardPlan.from_json(plan.to_json(), like=shapes.deepseek_v3())
    assert again == plan
    assert again is not plan
    traces = []

    @jax.jit
    def plain(x: jax.Array) -> jax.Array:
        return x + 1

    @jax.jit
    def with_plan(x: jax.Array, plan: sfx.ShardPlan) -> jax.Array:
        traces.append(plan)
        return x + 1

    x = jnp.zeros(())
    calls = {
        "none": lambda: plain(x),
        "same": lambda: with_plan(x, plan),
        "read": lambda: with_plan(x, again),
    }
    times = _alternating(calls, number)
    assert len(traces) == 1, (
        f"{len(traces)} traces: the plan read from JSON compiled again"
    )
    return {
        "us per call without": min(times["none"]),
        "added us per call": _added(times["same"], times["none"]),
        "added us per call, read from JSON": _added(times["read"], times["none"]),
        "compilations": len(traces),
    }


class _Layer(eqx.Module):
    norm: eqx.nn.LayerNorm
    linear: eqx.nn.Linear


def _calls(devices: list[Any], number: int) -> dict[str, Value]:
    """A call that computes next to nothing: the way in, with sharded arrays.

    `jax.jit` gets the arrays as a flat list, so that it takes no tree apart; a module
    is taken apart in Python, which takes a multiple of all else, so that its flattening
    stands beside the calls.
    """
    mesh = mesh_of(devices)
    keys = jax.random.split(jax.random.key(0), 9)
    model = [
        *[_Layer(eqx.nn.LayerNorm(8), eqx.nn.Linear(8, 8, key=key)) for key in keys],
        eqx.nn.LayerNorm(8),
    ]
    flat = jax.tree.leaves(eqx.filter(model, eqx.is_array))
    named = {f"layer_{number}": array for number, array in enumerate(flat)}
    plans = [
        sfx.plan(tree, mesh, paths=sfx.PathRules.parse(".*->replicate"))
        for tree in (flat, named, model)
    ]
    flat, named, model = (
        sfx.shard(tree, plan)
        for tree, plan in zip((flat, named, model), plans, strict=True)
    )

    def first(tree) -> jax.Array:
        return jax.tree.leaves(tree)[0] + 1

    in_shardings = (plans[0].shardings,)
    plain = jax.jit(first, in_shardings=in_shardings)
    ours = [sfx.filter_jit(first, in_shardings=(plan,)) for plan in plans]
    equinox = eqx.filter_jit(first)
    calls = {
        "plain": lambda: plain(flat),
        "flat": lambda: ours[0](flat),
        "named": lambda: ours[1](named),
        "model": lambda: ours[2](model),
        "equinox": lambda: equinox(flat),
        "equinox model": lambda: equinox(model),
        "flatten": lambda: jax.tree.flatten(model),
    }
    times = _alternating(calls, number)
    calls_by_name = {name: calls[name] for name in ("plain", "flat")}
    wall = _alternating(calls_by_name, number, time.perf_counter)
    added = {name: _added(taken, times["plain"]) for name, taken in times.items()}
    typical = {name: statistics.median(taken) for name, taken in times.items()}
    return {
        "arrays": len(flat),
        "us per call of jax.jit": min(times["plain"]),
        "us per call of jax.jit, median": typical["plain"],
        "added us per call": added["flat"],
        "added us per call, medians": typical["flat"] - typical["plain"],
        "added us per call, by wall clock": _added(wall["flat"], wall["plain"]),
        "added us per call, a planned dict": added["named"],
        "added us per call, modules": added["model"],
        "us to flatten the modules": min(times["flatten"]),
        "added us per call, modules, beyond flattening": (
            added["model"] - min(times["flatten"])
        ),
        "added us per call, equinox.filter_jit": added["equinox"],
        "added us per call, equinox.filter_jit, modules": added["equinox model"],
        "over equinox.filter_jit, modules": (
            min(times["model"]) / min(times["equinox model"])
        ),
    }


def _alternating(
    calls: dict[str, Callable[[], Any]],
    number: int,
    clock: Callable[[], float] = time.thread_time,
) -> dict[str, list[float]]:
    """Microseconds that `number` calls of each take, one of each in turn: of the
    calling thread's processor time.

    Only the call is timed: what it returns is waited for and freed outside. Calls in a
    row would fill the queues of the devices, and each would then wait for all before
    it: on emulated devices that takes longer than all else. Their threads also push the
    caller's code out of the processor's caches, so that the same instructions take up
    to three times as long. How often they do is a matter of load; the least of many
    calls has none of it.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(-3, number):
        for name in it.islice(
            it.cycle(calls), turn % len(calls), turn % len(calls) + len(calls)
        ):
            begin = clock()
            result = calls[name]()
            taken = clock() - begin
            jax.block_until_ready(result)
            del result
            if turn >= 0:
                times[name].append(1e6 * taken)
    return times


def _added(times: list[float], less: list[float]) -> float:
    """What calls take more than others that were made in turn with them: the quickest
    of 200 each, and of all such differences the median, since one call that happened to
    be quick would decide over a single one.
    """
    starts = range(0, len(times), 200)
    return statistics.median(
        [
            min(times[start : start + 200]) - min(less[start : start + 200])
            for start in starts
        ]
    )

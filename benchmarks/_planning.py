"""What planning costs cold, hot and after a collection, beside the flatten of the tree;
a process for each tree.
"""

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.tree_util as jtu
import optax

import shardfx as sfx

from . import _shapes as shapes, plan as suite


_TREES: dict[str, tuple[Callable[[], Any], tuple]] = {
    "llama": (shapes.llama_405b, shapes.LLAMA_RULES),
    "deepseek": (shapes.deepseek_v3, shapes.DEEPSEEK_RULES),
    "distinct": (suite._shapes_too, shapes.LLAMA_RULES),
}
_BATCH_SECONDS = 0.1


def times(tree: str, repeats: int) -> dict[str, float]:
    """Milliseconds by wall clock, and ratios to `tree_flatten_with_path`.

    - cold: the first call in the process; the rules and the mesh are there, and JAX has
      started.
    - hot: the same tree again and again, as many calls in a row as take a tenth of a
      second, and the collector on: each
        pays for what its garbage makes the collector do.
    - after a collection: a fresh tree, all older objects frozen, one call.
    """
    make, rules = _TREES[tree]
    calls = {
        "plan": suite.planner(rules, _mesh()),
        "flatten": jtu.tree_flatten_with_path,
    }
    seconds_by_name: dict[str, float] = {}
    cold = {name: _seconds(call, make()) for name, call in calls.items()}
    seconds_by_name |= _beside("cold", cold)
    seconds_by_name |= _hot(calls, make(), repeats)
    seconds_by_name |= _beside("after a collection", _collected(calls, make, repeats))
    return seconds_by_name


def follow(repeats: int) -> dict[str, float]:
    """`follow` of AdamW over Llama's 1,137 leaves, beside one `jax.eval_shape` of the
    same `init`.
    """
    init = optax.adamw(1e-3).init
    plan = suite.planner(shapes.LLAMA_RULES, _mesh())(shapes.llama_405b())
    # The first time both trace `init`; from then on JAX remembers its shapes.
    calls = {
        "follow": lambda _: sfx.follow(init, plan),
        "eval_shape": lambda tree: jax.eval_shape(init, tree),
    }
    cold = {name: _seconds(call, shapes.llama_405b()) for name, call in calls.items()}
    return _beside("cold", cold) | _hot(calls, shapes.llama_405b(), repeats)


def _mesh() -> Any:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    return suite.mesh_of(jax.devices())


def _hot(
    calls: dict[str, Callable[[Any], Any]], tree: Any, repeats: int
) -> dict[str, float]:
    number = {
        name: max(1, round(_BATCH_SECONDS / _seconds(call, tree)))
        for name, call in calls.items()
    }
    wall: dict[str, list[float]] = {name: [] for name in calls}
    processor: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            begin = time.perf_counter()
            begin_processor = time.thread_time()
            for _ in range(number[name]):
                call(tree)
            wall[name].append((time.perf_counter() - begin) / number[name])
            processor[name].append(
                (time.thread_time() - begin_processor) / number[name]
            )
    seconds = {name: statistics.median(taken) for name, taken in processor.items()}
    ratio = _ratio(seconds)
    seconds = {name: statistics.median(taken) for name, taken in wall.items()}
    return _beside("hot", seconds) | {f"hot, x {list(calls)[1]}, processor time": ratio}


def _collected(
    calls: dict[str, Callable[[Any], Any]], make: Callable[[], Any], repeats: int
) -> dict[str, float]:
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats):
        for name, call in sorted(calls.items(), reverse=bool(repeat % 2)):
            tree = make()
            gc.collect()
            gc.freeze()
            taken[name].append(_seconds(call, tree))
            gc.unfreeze()
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def _seconds(call: Callable[[Any], Any], tree: Any) -> float:
    begin = time.perf_counter()
    result = call(tree)
    seconds = time.perf_counter() - begin
    del result
    return seconds


def _beside(what: str, seconds: dict[str, float]) -> dict[str, float]:
    """Milliseconds of each, and how many times the second the first takes."""
    return {f"{what}, {name} ms": 1e3 * taken for name, taken in seconds.items()} | {
        f"{what}, x {list(seconds)[1]}": _ratio(seconds)
    }


def _ratio(seconds: dict[str, float]) -> float:
    ours, least = seconds.values()
    return ours / least

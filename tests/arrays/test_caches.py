"""The package's caches can be cleared: plans, meshes, devices and compiled programs."""

import functools as ft
import gc
import sys
import weakref

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import shardfx
from shardfx import checkpoint


def caches():
    """The names of the modules' caches that hold something."""
    kind = type(ft.lru_cache(len))
    modules = [name for name in sys.modules if name.startswith("shardfx.")]
    names = []
    for module in modules:
        for name, value in vars(sys.modules[module]).items():
            if isinstance(value, kind) and value.cache_info().currsize:
                names.append(f"{module}.{name}")
    return names


def test_cleared_caches_hold_no_plan_and_no_program(tmp_path):
    devices = np.array(jax.devices()).reshape(2, 4)
    mesh = Mesh(devices, ("a", "b"))
    x = jax.device_put(jnp.ones((16, 32)), NamedSharding(mesh, P("a", "b")))
    rules = shardfx.PathRules([("x", P("b", "a"))])
    plan = shardfx.plan({"x": x}, mesh, paths=rules)
    for limit in (None, 2000):
        shardfx.reshard({"x": x}, plan, memory_limit_bytes=limit)
    checkpoint.save(tmp_path / "saved", {"x": x}, plan)
    checkpoint.load(tmp_path / "saved", plan)
    rooms = ("_reshard", "_plan", "checkpoint")
    for room in rooms:
        assert any(name.startswith(f"shardfx.{room}.") for name in caches())
    gone = weakref.ref(plan.content)
    del plan
    shardfx.clear_caches()
    gc.collect()
    assert not caches()
    assert gone() is None
    # What was cleared is made again.
    rules = shardfx.PathRules([("x", P("a"))])
    again = shardfx.plan({"x": x}, mesh, paths=rules)
    moved = shardfx.reshard({"x": x}, again)["x"]
    np.testing.assert_array_equal(moved, x)

"""What the package remembers can be forgotten: plans, meshes, devices and compiled programs."""

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
from shardfx._reshard.move import move_of, program_of
from shardfx._reshard.mover import resharded


def sizes() -> dict[str, int]:
    """How much each cache of the modules that are loaded holds."""
    kind = type(ft.lru_cache(len))
    return {
        f"{module}.{name}": thing.cache_info().currsize
        for module in [name for name in sys.modules if name.startswith("shardfx.")]
        for name, thing in vars(sys.modules[module]).items()
        if isinstance(thing, kind)
    }


def test_cleared_caches_hold_no_device_and_no_program(tmp_path):
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
    x = jax.device_put(jnp.ones((16, 32)), NamedSharding(mesh, P("a", "b")))
    ends = NamedSharding(mesh, P("b", "a")), NamedSharding(Mesh(mesh.devices[0], ("a",)), P("a"))
    moves = []
    for dst in ends:
        resharded(x, dst, copies=False, memory_limit_bytes=1 << 20)
        resharded(x, dst, copies=False, memory_limit_bytes=2000)
        moves.append(weakref.ref(move_of(x.shape, x.dtype, x.sharding, dst, (), False)))
    program = weakref.ref(program_of(moves[0](), False, None))
    made = shardfx.plan({"x": x}, mesh, paths=shardfx.PathRules([("x", P("a"))]))
    checkpoint.save(tmp_path / "saved", {"x": x}, made)
    checkpoint.load(tmp_path / "saved", made)
    held = [name for name, size in sizes().items() if size]
    for name in ("_reshard.move.move_of", "_reshard.move.program_of", "_plan.leaf.named_sharding"):
        assert f"shardfx.{name}" in held
    assert any(name.startswith("shardfx.checkpoint.") for name in held)

    shardfx.clear_caches()
    gc.collect()
    assert not any(sizes().values())
    assert [one() for one in moves] == [None, None] and program() is None
    # And all is found again.
    np.testing.assert_array_equal(resharded(x, ends[0], copies=False), x)

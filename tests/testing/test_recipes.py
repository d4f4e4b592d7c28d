"""The page of recipes runs, and its steps compute under their plans what they compute
on one device.
"""

import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import shardfx as sfx
from tests.house.test_docs import blocks, run


# Those that train and serve; the rest only makes arrays.
STEPS = ("mixed_step", "accumulated", "decode")
PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"


def test_no_recipe_is_accused(monkeypatch: pytest.MonkeyPatch):
    filter_jit = sfx.filter_jit
    checked = []

    def checking(fn, **how) -> Callable[..., Any]:
        jitted = filter_jit(fn, **how)
        is_new = [fn.__name__ in STEPS]

        def called(*args):
            if is_new.pop() if is_new else False:
                check = sfx.testing.check_step(jitted, *args)
                assert check, f"{fn}: {check}"
                checked.append(fn)
            return jitted(*args)

        called.lower = jitted.lower  # pyright: ignore[reportFunctionMemberAccess]
        return called

    monkeypatch.setattr(sfx, "filter_jit", checking)
    run(blocks(PAGE.read_text()), str(PAGE))
    assert [fn.__name__ for fn in checked] == [*STEPS]


# What stands on the page, and what stands there on meshes of `jax.make_mesh`.
ON_EXPLICIT_AXES = {
    'mesh = sfx.MeshSpec({"data": 2, "fsdp": 2, "tensor": 2}).build(jax.devices())\n': (
        'mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"))\n'
    ),
    'eight = sfx.MeshSpec({"fsdp": 8}).build(jax.devices())\n': (
        'eight = jax.make_mesh((8,), ("fsdp",))\n'
    ),
    'servers = sfx.MeshSpec({"replica": 2, "tensor": 4}).build(jax.devices())\n': (
        'servers = jax.make_mesh((2, 4), ("replica", "tensor"))\n'
    ),
}
# Code of the page, with the line that goes ahead of it: the function on Auto axes.
AHEAD = {
    'rows = plan.sharding(("batch", None, None))\n': (
        "loss = sfx.auto.auto_axes(loss, plan, out=())\n"
    ),
    "for update in (as_written, mapped):\n": (
        "as_written = sfx.auto.auto_axes(as_written, cut, out=cut.specs)\n"
    ),
    "step = sfx.filter_jit(\n    decode,\n": (
        "decode_out = (tokens.spec, cache_plan.specs)\n"
        "decode = sfx.auto.auto_axes(decode, serving, out=decode_out)\n"
    ),
    "whole = forward(read, prompt)\n": (
        "forward = sfx.auto.auto_axes(forward, serving, out=tokens.spec)\n"
    ),
}
# Arrays of each section that trains or serves.
COMPARED = (
    "params",
    "grads",
    "trained",
    "state",
    "run",
    "weights",
    "momentum",
    "live",
    "read",
    "cache",
    "out",
)


def test_recipes_compute_alike_on_explicit_axes():
    """All blocks up to those that are written for Explicit axes, Muon, serving and the
    KV cache among them.
    """
    text = PAGE.read_text().split("\n## Under Explicit axes")[0]
    explicit = text
    for code, other in ON_EXPLICIT_AXES.items():
        assert explicit.count(code) == 1, code
        explicit = explicit.replace(code, other)
    for code, line in AHEAD.items():
        assert explicit.count(code) == 1, code
        explicit = explicit.replace(code, line + code)
    on_auto, on_explicit = map(names_of, (text, explicit))
    for name in ("params", "weights", "read", "cache"):
        array, *_ = jax.tree.leaves(on_explicit[name])
        assert array.sharding.mesh.axis_types[0] == AxisType.Explicit, name

    compared = 0
    for name in COMPARED:
        pairs = zip(
            jax.tree.leaves(on_auto[name]),
            jax.tree.leaves(on_explicit[name]),
            strict=True,
        )
        for array, typed in pairs:
            if not isinstance(array, jax.Array):
                continue
            compared += 1
            assert sfx.specs_of(array) == sfx.specs_of(typed), name
            if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
                array, typed = map(jax.random.key_data, (array, typed))
            left, right = (np.asarray(x, np.float32) for x in (array, typed))
            np.testing.assert_allclose(left, right, rtol=2e-2, atol=1e-3, err_msg=name)
    assert compared > 60


def names_of(text: str) -> dict[str, Any]:
    """The names that the blocks of a page define."""
    namespace: dict[str, Any] = {"__name__": "example"}
    for block in blocks(text):
        with contextlib.redirect_stdout(io.StringIO()):
            exec(block.code, namespace)
    return namespace

"""The page of recipes runs, and its steps compute under their plans what they compute
on one device.
"""

import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
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

    def checking(fn: Any, **how: Any) -> Callable[..., Any]:
        jitted = filter_jit(fn, **how)
        is_new = [fn.__name__ in STEPS]

        def called(*args: Any) -> Any:
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


MESH = 'mesh = sfx.MeshSpec({"data": 2, "fsdp": 2, "tensor": 2}).build(jax.devices())\n'
EXPLICIT = 'mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"))\n'
BATCH = 'rows = plan.sharding(("batch", None, None))\n'
ON_AUTO_AXES = "loss = sfx.auto.auto_axes(loss, plan, out=())\n"


def test_recipes_of_training_compute_alike_on_explicit_axes():
    """The blocks up to those on other meshes, with a mesh as `jax.make_mesh` makes it,
    and the loss by `auto_axes`.
    """
    text = PAGE.read_text().split("\n## Muon")[0]
    assert MESH in text
    assert BATCH in text
    explicit = text.replace(MESH, EXPLICIT).replace(BATCH, ON_AUTO_AXES + BATCH)
    on_auto, on_explicit = map(names_of, (text, explicit))
    mesh = on_explicit["grads"]["up"].sharding.mesh
    assert mesh.axis_types[0] == AxisType.Explicit
    compared = 0
    for name in ("params", "grads", "trained", "state"):
        pairs = zip(
            jax.tree.leaves(on_auto[name]),
            jax.tree.leaves(on_explicit[name]),
            strict=True,
        )
        for array, typed in pairs:
            if not isinstance(array, jax.Array):
                continue
            compared += 1
            assert sfx.specs_of(array) == sfx.specs_of(typed)
            left, right = (np.asarray(x, np.float32) for x in (array, typed))
            np.testing.assert_allclose(left, right, rtol=2e-2, atol=1e-5)
    assert compared > 20


def names_of(text: str) -> dict[str, Any]:
    """The names that the blocks of a page define."""
    namespace: dict[str, Any] = {"__name__": "example"}
    for block in blocks(text):
        with contextlib.redirect_stdout(io.StringIO()):
            exec(block.code, namespace)
    return namespace

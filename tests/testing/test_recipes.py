"""The page of recipes runs, and its steps compute under their plans what they compute
on one device.
"""

import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import shardfx as sfx
from tests.house.test_docs import blocks, run


# Those that train and serve; the rest only makes arrays.
STEPS = ("mixed_step", "accumulated", "decode")
PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"
EXPLICIT_SECTION = "\n## Under Explicit axes"


class Value(NamedTuple):
    """An array that a block made: the name that it is part of, its spec and elements."""

    name: str
    spec: P
    elements: np.ndarray


class CheckedPage(NamedTuple):
    """The page as it was run: the steps that were checked, and the arrays ahead of the
    section on Explicit axes.
    """

    steps: list[str]
    values: list[Value]


def checked_page() -> CheckedPage:
    """Runs the page. The first call of each step is checked beside one device."""
    filter_jit = sfx.filter_jit
    steps = []

    def checking(fn, **options) -> Callable[..., Any]:
        jitted = filter_jit(fn, **options)
        is_checked = fn.__name__ not in STEPS

        def called(*args):
            nonlocal is_checked
            if not is_checked:
                is_checked = True
                check = sfx.testing.check_step(jitted, *args)
                assert check, f"{fn}: {check}"
                steps.append(fn.__name__)
            return jitted(*args)

        called.lower = jitted.lower  # pyright: ignore[reportFunctionMemberAccess]
        return called

    text = PAGE.read_text()
    line = text.partition(EXPLICIT_SECTION)[0].count("\n")
    examples = blocks(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sfx, "filter_jit", checking)
        ahead = [block for block in examples if block.line < line]
        namespace = run(ahead, str(PAGE))
        values = values_of(namespace)
        run(examples[len(ahead) :], str(PAGE), namespace)
    return CheckedPage(steps, values)


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


def values_of(namespace: dict[str, Any]) -> list[Value]:
    """The arrays of what the sections train or serve."""
    values = []
    for name in COMPARED:
        for leaf in jax.tree.leaves(namespace[name]):
            if not isinstance(leaf, jax.Array):
                continue
            spec = sfx.specs_of(leaf)
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                leaf = jax.random.key_data(leaf)
            values.append(Value(name, spec, np.asarray(leaf, np.float32)))
    return values


def test_recipes_are_right_and_compute_alike_on_explicit_axes():
    """All blocks up to those that are written for Explicit axes, Muon, serving and the
    KV cache among them. It is one test, since the page takes long to run.
    """
    page = checked_page()
    assert page.steps == [*STEPS]

    explicit = PAGE.read_text().split(EXPLICIT_SECTION)[0]
    for code, other in ON_EXPLICIT_AXES.items():
        assert explicit.count(code) == 1, code
        explicit = explicit.replace(code, other)
    for code, line in AHEAD.items():
        assert explicit.count(code) == 1, code
        explicit = explicit.replace(code, line + code)
    namespace = names_of(explicit)
    for name in ("params", "weights", "read", "cache"):
        array, *_ = jax.tree.leaves(namespace[name])
        assert array.sharding.mesh.axis_types[0] == AxisType.Explicit, name

    assert len(page.values) > 60
    for value, typed in zip(page.values, values_of(namespace), strict=True):
        assert (value.name, value.spec) == (typed.name, typed.spec)
        np.testing.assert_allclose(
            value.elements, typed.elements, rtol=2e-2, atol=1e-3, err_msg=value.name
        )


def names_of(text: str) -> dict[str, Any]:
    """The names that the blocks of a page define."""
    namespace: dict[str, Any] = {"__name__": "example"}
    for block in blocks(text):
        with contextlib.redirect_stdout(io.StringIO()):
            exec(block.code, namespace)
    return namespace

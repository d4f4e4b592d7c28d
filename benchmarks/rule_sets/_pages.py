"""The cases of the pages: their rule sets, read from their own code, over models that
their readers train.
"""

import contextlib
import functools as ft
import importlib.util
import io
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import shardfx as sfx

from ._case import MESHES, ROWS, Case, Model, by_paths, struct


_DOCS = Path(__file__).parents[2] / "docs"
_FENCE = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
_WIDTH = 48
_HIDDEN = 96
_DEPTH = 2
_LENGTH = 4


def cases() -> Iterator[Case]:
    page = _namespace("choosing.md")
    rules: dict[str, Callable[..., sfx.ShardPlan]] = {
        "choosing: specs by path": by_paths(page["by_spec"]),
        "choosing: names, train": by_paths(page["paths"], axes=page["train"]),
        "choosing: names, serve": by_paths(page["paths"], axes=page["serve"]),
        "choosing: both without names": by_paths(page["without_names"]),
        "choosing: optional": by_paths(page["rules"]),
    }
    for name, planned in rules.items():
        # Names are for the two dimensions of products.
        models = _PRODUCTS if "names, " in name else _PRODUCTS | _CONVOLUTIONS
        for model, make in models.items():
            for mesh in MESHES:
                yield Case(name, model, mesh, make, planned)
    for mesh in MESHES:
        planned = ft.partial(_stacked_plan, page)
        make = ft.partial(_stacked, page["Stack"], page["Mlp"])
        yield Case("choosing: names in the module", "scanned", mesh, make, planned)
    if importlib.util.find_spec("flax") is None:
        return  # which the page of recipes needs
    recipes = _namespace("recipes.md", "## Mixed precision")
    for mesh in MESHES:
        planned = ft.partial(sfx.plan, names=recipes["NAMES"], axes=recipes["axes"])
        make = ft.partial(_recipe, recipes)
        yield Case("recipes", "the page's model", mesh, make, planned)


def _namespace(name: str, before: str = "") -> Mapping[str, Any]:
    """The names that the blocks of a page define, up to a heading."""
    text = (_DOCS / name).read_text()
    if before:
        text = text.partition(before)[0]
    names: dict[str, Any] = {"__name__": name}
    for fence in _FENCE.finditer(text):
        with contextlib.redirect_stdout(io.StringIO()):
            exec(textwrap.dedent(fence[1]), names)
    return names


def _mlp(x: jax.Array, p: Mapping[str, jax.Array]) -> jax.Array:
    return x + jnp.tanh(x @ p["wi"].T) @ p["wo"].T


def _square(x: jax.Array, p: Mapping[str, jax.Array]) -> jax.Array:
    return x + jnp.tanh(x @ p["wi"].T)


def _gated(x: jax.Array, p: Mapping[str, jax.Array]) -> jax.Array:
    normed = x * p["norm"]
    return x + (jax.nn.silu(normed @ p["wi_0"].T) * (normed @ p["wi_1"].T)) @ p["wo"].T


def _conv(x: jax.Array, w: jax.Array, stride: int = 1) -> jax.Array:
    numbers = ("NCHW", "OIHW", "NCHW")
    return jax.lax.conv_general_dilated(
        x, w, (stride, stride), [(1, 1)] * 2, dimension_numbers=numbers
    )


def _plain(*widths: int) -> Model:
    """Products one after another, without a residual."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for p in params["blocks"]:
            x = jax.nn.relu(x @ p["wi"].T)
        return jnp.mean(jnp.sin(x))

    pairs = zip(widths[1:], widths, strict=False)
    blocks = [{"wi": struct(*pair)} for pair in pairs]
    return Model(loss, {"blocks": blocks}, struct(ROWS, widths[0]))


def _residual(block: Any, shapes: Mapping[str, tuple[int, ...]], length: int) -> Model:
    """Residual blocks on rows, or with `length` on sequences. Those of one matrix are
    held.
    """

    def loss(params: Any, x: jax.Array, hold: Any = lambda x: x) -> jax.Array:
        for p in params["blocks"]:
            x = hold(block(x, p))
        return jnp.mean(jnp.sin(x))

    structs = {name: struct(*shape) for name, shape in shapes.items()}
    if length:
        inner = (length, _WIDTH)
    else:
        inner = (_WIDTH,)
    params = {"blocks": [structs] * _DEPTH}
    return Model(loss, params, struct(ROWS, *inner), is_held=len(structs) == 1)


def _convolutions(stride: int, *, is_residual: bool) -> Model:
    def loss(params: Any, x: jax.Array, hold: Any) -> jax.Array:
        first, second = (p["wi"] for p in params["blocks"])
        y = jnp.sin(_conv(x, first))
        y = hold(x + y if is_residual else y)
        return jnp.mean(jnp.cos(_conv(y, second, stride)))

    blocks = [{"wi": struct(24, 24, 3, 3)}, {"wi": struct(48, 24, 3, 3)}]
    return Model(loss, {"blocks": blocks}, struct(ROWS, 24, 8, 8), is_held=True)


_PAIR = {"wi": (_HIDDEN, _WIDTH), "wo": (_WIDTH, _HIDDEN)}
_GATED = {
    "norm": (_WIDTH,),
    "wi_0": (_HIDDEN, _WIDTH),
    "wi_1": (_HIDDEN, _WIDTH),
    "wo": (_WIDTH, _HIDDEN),
}
_PRODUCTS: dict[str, Callable[[], Model]] = {
    "plain products": ft.partial(_plain, 48, 48, 48, 48),
    "residual, one square weight a block": ft.partial(
        _residual, _square, {"wi": (_WIDTH, _WIDTH)}, 0
    ),
    "residual, square, sequences": ft.partial(
        _residual, _square, {"wi": (_WIDTH, _WIDTH)}, _LENGTH
    ),
    "residual, column then row": ft.partial(_residual, _mlp, _PAIR, 0),
    "residual, column then row, sequences": ft.partial(_residual, _mlp, _PAIR, _LENGTH),
    "residual, gated, sequences": ft.partial(_residual, _gated, _GATED, _LENGTH),
}
_CONVOLUTIONS: dict[str, Callable[[], Model]] = {
    "two convolutions": ft.partial(_convolutions, 2, is_residual=False),
    "residual convolutions": ft.partial(_convolutions, 1, is_residual=True),
}


def _stacked(stack: Any, mlp: Any) -> Model:
    """The page's own module, scanned."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
            return x + jnp.tanh(x @ p.wi.T) @ p.wo.T, None

        return jnp.mean(jnp.sin(jax.lax.scan(layer, x, params.layers)[0]))

    layers = mlp(struct(4, _HIDDEN, _WIDTH), struct(4, _WIDTH, _HIDDEN))
    return Model(loss, stack(layers), struct(ROWS, _WIDTH))


def _stacked_plan(
    page: Mapping[str, Any], params: Any, mesh: sfx.MeshSpec
) -> sfx.ShardPlan:
    axes = page["train"].extend([("layers", None)])
    return sfx.plan(params, mesh, axes=axes)


def _recipe(page: Mapping[str, Any]) -> Model:
    return Model(page["loss"], page["structs"], struct(ROWS, 8, page["EMBED"]))

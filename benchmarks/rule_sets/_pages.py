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

import equinox as eqx
import jax
import jax.numpy as jnp

import shardfx as sfx

from ._case import MESHES, ROWS, Case, Model, by_paths, struct, tokens


_ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
_WIDTH = 48
_HIDDEN = 96
_DEPTH = 2
_LENGTH = 4


def cases() -> Iterator[Case]:
    page = _namespace("docs/choosing.md")
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
                yield Case(
                    rules=name, model=model, mesh=mesh, make=make, planned=planned
                )
    for mesh in MESHES:
        planned = ft.partial(_stacked_plan, page)
        make = ft.partial(_stacked, page["Stack"], page["Mlp"])
        yield Case(
            rules="choosing: names in the module",
            model="scanned",
            mesh=mesh,
            make=make,
            planned=planned,
        )
    if importlib.util.find_spec("flax") is None:
        return  # which the page of recipes needs
    yield from _readme()
    yield from _tour()
    recipes = _namespace("docs/recipes.md", "## Mixed precision")
    for mesh in MESHES:
        planned = ft.partial(sfx.plan, names=recipes["NAMES"], axes=recipes["axes"])
        make = ft.partial(_recipe, recipes)
        yield Case(
            rules="recipes",
            model="the page's model",
            mesh=mesh,
            make=make,
            planned=planned,
        )


def _readme() -> Iterator[Case]:
    """The rules, the model and the loss of the README's training block."""
    page = _namespace("README.md", "## Reasons")
    planned = by_paths(page["rules"], axes=page["axes"])
    for mesh in MESHES:
        make = ft.partial(_of_readme, page["shapes"])
        yield Case(
            rules="README",
            model="the page's model",
            mesh=mesh,
            make=make,
            planned=planned,
        )


def _of_readme(shapes: Any) -> Model:
    params, static = eqx.partition(shapes, _is_struct)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        model = eqx.combine(params, static)
        return jnp.mean((jax.vmap(model)(x) - x) ** 2)

    return Model(loss, params, struct(ROWS, 64))


def _is_struct(leaf: object) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def _tour() -> Iterator[Case]:
    """The rules and the model of the tour, with its loss."""
    page = dict(_namespace("docs/tour.md", "## Plan"))
    text = (_ROOT / "docs/tour.md").read_text()
    _, _, behind = text.partition("def attend(")
    loss_text, _, _ = behind.partition("def step(")
    exec("def attend(" + loss_text, page)
    planned = by_paths(page["paths"], axes=page["axes"])
    for mesh in MESHES:
        make = ft.partial(_of_tour, page)
        yield Case(
            rules="tour",
            model="the page's model",
            mesh=mesh,
            make=make,
            planned=planned,
        )


def _of_tour(page: dict[str, Any]) -> Model:
    def loss(params: Any, tokens: jax.Array, plan: sfx.ShardPlan | None) -> jax.Array:
        # The names that the page's loss reads.
        page["plan"] = plan
        page["sfx"] = sfx if plan is not None else _Unconstrained
        return page["loss_of"](params, tokens)

    return Model(loss, page["shapes"], tokens(ROWS, 33), is_planned=True)


class _Unconstrained:
    """In place of shardfx, for a loss on one device."""

    @staticmethod
    def constrain(x: jax.Array, *_: Any) -> jax.Array:
        return x


def _namespace(name: str, before: str = "") -> Mapping[str, Any]:
    """The names that the blocks of a page define, up to a heading."""
    text = (_ROOT / name).read_text()
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

"""What `fit` suggests, each made and compiled: the saving that it computes against the compiler's own."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from shardfx import AxisRules, Fit, MeshSpec, chips, compile_for, fit, follow, plan

from ._case import Entry, Finding, Limit, Value
from ._runner import Options


LAYERS, WIDTH, HIDDEN, BATCH = 8, 64, 256, 512
MESH = MeshSpec({"data": 4, "tensor": 2})
# As on the page "What does my plan cost?": 1.5 MiB for a program, and no tiles, as on the CPU that compiles.
CHIP = dataclasses.replace(chips.find("h100"), name="tiny", usable_hbm_bytes=3 * 2**19)
_NAMES = {"up": ("layers", "embed", "mlp"), "down": ("layers", "mlp", "embed")}
_AXES = AxisRules([("batch", "data"), ("mlp", "tensor"), ("embed", None), ("layers", None)])
_ADAM = optax.adam(1e-3)
# By words of the suggestion: what makes the change.
_MADE: dict[str, dict[str, Any]] = {
    "donate": {"donate": ("params", "opt")},
    "ZeRO-1": {"over": "data"},
    "ZeRO-3": {"over": "data", "cut": True},
    "bfloat16": {"narrow": True},
    "half the batch": {"batch": BATCH // 2},
    "recompute": {"remat": True},
}


def on_eight(options: Options) -> list[Entry]:
    """The cases that compile for eight emulated devices."""
    names = ("off_percent, worst", "saving_off_percent_of_peak, worst")
    limits = tuple(Limit(name, at_most=15) for name in names)
    return [Finding("suggestions, each compiled on the CPU", suggestions, limits)]


def suggestions() -> dict[str, Value]:
    """Each change: what it saves as computed, and as compiled."""
    step, plans, donate = changed()
    found = fit(plans, step=step, chip=CHIP)
    before = peak(step, plans, donate)
    values: dict[str, Value] = {"compiled_kib": before // 1024, "estimated_kib": found.peak_bytes // 1024}
    worst, off = abs(100 * (found.peak_bytes / before - 1)), 0.0
    for words, change in _MADE.items():
        (told,) = [one for one in found.changes if words in one.what]
        after = peak(*changed(**change))
        values |= {f"{words}, saves_kib": told.saves_bytes // 1024, f"{words}, compiled_kib": (before - after) // 1024}
        worst = max(worst, abs(100 * (told.peak_bytes / after - 1)))
        off = max(off, 100 * abs(told.saves_bytes - (before - after)) / before)
    last = _last(found)
    return {
        **values,
        "all at once, estimated_kib": last[0] // 1024,
        "all at once, compiled_kib": last[1] // 1024,
        "off_percent, worst": round(worst, 1),
        "saving_off_percent_of_peak, worst": round(off, 1),
    }


def _last(found: Fit) -> tuple[int, int]:
    """The three changes of the page together: the estimate and the compiler's count."""
    step, plans, donate = changed(donate=("params", "opt"), over="data", remat=True)
    made = fit(plans, step=step, chip=CHIP, donate=donate)
    assert made.fits and not found.fits
    return made.peak_bytes, peak(step, plans, donate)


def peak(step: Callable[..., Any], plans: dict[str, Any], donate: Any) -> int:
    """What the compiler counts: arguments, results that take memory of their own, and temporaries."""
    memory = compile_for(step, plans, "cpu", out_shardings=(plans["params"], plans["opt"]), donate=donate).memory
    sums = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return sums + memory.temp_size_in_bytes


def changed(
    *,
    donate: Any = "none",
    over: str | None = None,
    cut: bool = False,
    narrow: bool = False,
    batch: int = BATCH,
    remat: bool = False,
) -> tuple[Callable[..., Any], dict[str, Any], Any]:
    """A step, its plans and what it donates.

    **Arguments:**

    - `over`, `cut`: an axis over which the optimizer's state is cut, and whether the parameters are too.
    - `narrow`: whether moments are kept in bfloat16.
    - `remat`: whether layers are computed again in the backward pass.
    """
    structs = {
        "up": jax.ShapeDtypeStruct((LAYERS, WIDTH, HIDDEN), jnp.float32),
        "down": jax.ShapeDtypeStruct((LAYERS, HIDDEN, WIDTH), jnp.float32),
    }
    params = plan(structs, MESH, names=_NAMES, axes=_AXES)
    params = follow(lambda tree: tree, params, over=over) if cut else params
    optimizer = _narrowed(_ADAM) if narrow else _ADAM
    x = plan(jax.ShapeDtypeStruct((batch, WIDTH), jnp.float32), MESH, names=("batch", None), axes=_AXES)
    plans = {"params": params, "opt": follow(optimizer.init, params, over=over), "batch": x}

    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        return x + jnp.tanh(x @ w["up"]) @ w["down"], None

    def loss(params: Any, batch: jax.Array) -> jax.Array:
        return jnp.mean(jax.lax.scan(jax.checkpoint(layer) if remat else layer, batch, params)[0] ** 2)

    def step(params: Any, opt: Any, batch: jax.Array) -> tuple[Any, Any]:
        updates, opt = optimizer.update(jax.grad(loss)(params, batch), opt)
        return optax.apply_updates(params, updates), opt

    return step, plans, donate


def _narrowed(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Its moments in bfloat16 between steps."""

    def cast(state: Any, dtype: Any) -> Any:
        return jax.tree.map(lambda moment: moment.astype(dtype) if moment.ndim else moment, state)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, state = optimizer.update(updates, cast(state, jnp.float32), params)
        return updates, cast(state, jnp.bfloat16)

    return optax.GradientTransformation(lambda params: cast(optimizer.init(params), jnp.bfloat16), update)

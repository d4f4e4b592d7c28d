"""What `fit` suggests, each made and compiled: the saving that it computes against the
compiler's own.
"""

import dataclasses
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import optax

from shardfx import AxisRules, MeshSpec, chips, filter_jit, follow, plan
from shardfx.cost import Fit, compile_for, fit

from ._case import Entry, Finding, Limit, Value
from ._runner import Options


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How large the step is, and the mesh that it is for."""

    layers: int
    width: int
    hidden: int
    batch: int
    mesh: MeshSpec


MESH = MeshSpec({"data": 4, "tensor": 2})
SMALL = Sizes(
    layers=8,
    width=64,
    hidden=256,
    batch=512,
    mesh=MESH,
)
# Large enough that a TPU's on-chip memory holds little of it.
LARGE = Sizes(
    layers=8,
    width=2048,
    hidden=8192,
    batch=65536,
    mesh=MeshSpec({"data": 8, "tensor": 2}),
)
# As on the page "What does my plan cost?": 1.5 MiB for a program, and no tiles, as on
# the CPU that compiles.
CHIP = dataclasses.replace(chips.find("h100"), name="tiny", usable_hbm_bytes=3 * 2**19)
_NAMES = {"up": ("layers", "embed", "mlp"), "down": ("layers", "mlp", "embed")}
_AXES = AxisRules(
    [("batch", "data"), ("mlp", "tensor"), ("embed", None), ("layers", None)]
)
_ADAM = optax.adam(1e-3)
# By words of the suggestion: what makes the change.
_MADE: dict[str, dict[str, Any]] = {
    "donate": {"donate": ("params", "opt")},
    "ZeRO-1": {"over": "data"},
    "ZeRO-3": {"over": "data", "cut": True},
    "bfloat16": {"narrow": True},
    "half the batch": {"halved": True},
    "recompute": {"remat": True},
}
_WITH: dict[str, dict[str, Any]] = {"as it is": {}, **_MADE}
_AWAY = "host memory"


def on_eight(options: Options) -> list[Entry]:
    """The cases that compile for eight emulated devices."""
    names = ("off_percent, worst", "saving_off_percent_of_peak, worst")
    limits = tuple(Limit(name, at_most=15) for name in names)
    return [Finding("suggestions, each compiled on the CPU", suggestions, limits)]


def suggestions() -> dict[str, Value]:
    """Each change: what it saves as computed, and as compiled."""
    step, *args = changed()
    found = fit(step, *args, chip=CHIP)
    before = peak(step, *args)
    values: dict[str, Value] = {
        "compiled_kib": before // 1024,
        "estimated_kib": found.peak_bytes // 1024,
    }
    worst = abs(100 * (found.peak_bytes / before - 1))
    off = 0.0
    for words, change in _MADE.items():
        told = _told(found, words)
        after = peak(*changed(**change))
        values |= {
            f"{words}, saves_kib": told.saves_bytes // 1024,
            f"{words}, compiled_kib": (before - after) // 1024,
        }
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
    step, *args = changed(donate=("params", "opt"), over="data", remat=True)
    made = fit(step, *args, chip=CHIP)
    assert made.fits
    assert not found.fits
    return made.peak_bytes, peak(step, *args)


def on_v5e() -> dict[str, Value]:
    """Each change of a larger step: what `fit` says that is then needed, and the HBM
    that libtpu assigns to the changed step.
    """
    found = fit(*changed(sizes=LARGE), chip="v5e")
    counted = {words: hbm_of_changed(words) for words in (*_WITH, _AWAY)}
    errors = {}
    for words, compiled in counted.items():
        if words == "as it is":
            estimated = found.peak_bytes
        else:
            estimated = _told(found, words).peak_bytes
        errors[words] = 100 * (estimated / compiled - 1)
    return {
        **{
            f"{words}, libtpu_megabytes": round(compiled / 1e6)
            for words, compiled in counted.items()
        },
        **{
            f"{words}, error_percent": round(error, 1)
            for words, error in errors.items()
        },
        # Moments in host memory are told apart: how much of them libtpu fetches ahead
        # is not estimated.
        "off_percent, worst": round(
            max(abs(error) for words, error in errors.items() if words != _AWAY), 1
        ),
    }


def hbm_of_changed(words: str) -> int:
    """The bytes of HBM that libtpu assigns to the larger step with a change."""
    if words == _AWAY:
        made = _offloaded()
    else:
        made = changed(**_WITH[words], sizes=LARGE)
    found = fit(*made, chip="v5e")
    assert found.basis == "compiled", "install libtpu: pip install 'shardfx[aot]'"
    return found.peak_bytes


def _offloaded() -> tuple[Any, ...]:
    """The larger step with its moments in host memory, as the suggestion says."""
    jitted, params, opt, batch = changed(sizes=LARGE)
    step = inspect.unwrap(jitted)

    def moved(params, opt, batch: jax.Array):
        placed = jax.device_put(opt, jax.memory.Space.Device)
        new, opt = step(params, placed, batch)
        return new, jax.device_put(opt, jax.memory.Space.Host)

    host = jax.tree.map(on_host, opt)
    shardings = jax.tree.map(lambda one: one.sharding, (params, host))
    return jax.jit(moved, out_shardings=shardings), params, host, batch


def on_host(struct: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """The same array in host memory."""
    sharding: Any = struct.sharding
    return jax.ShapeDtypeStruct(
        struct.shape, struct.dtype, sharding=sharding.with_memory_kind("pinned_host")
    )


def _told(found: Fit, words: str) -> Any:
    (told,) = [one for one in found.changes if words in one.what]
    return told


def peak(step: Any, *args: Any, target: str = "cpu") -> int:
    """What the compiler counts: arguments, results that take memory of their own, and
    temporaries.
    """
    return compile_for(step, *args, target=target).memory.needed_bytes


def changed(
    *,
    donate: Any = "none",
    over: str | None = None,
    cut: bool = False,
    narrow: bool = False,
    halved: bool = False,
    remat: bool = False,
    sizes: Sizes = SMALL,
) -> tuple[Any, ...]:
    """A jitted step, and its parameters, state and batch as structs.

    **Arguments:**

    - `over`, `cut`: an axis over which the optimizer's state is cut, and whether the
      parameters are too.
    - `narrow`: whether moments are kept in bfloat16.
    - `halved`: whether the batch is half as large.
    - `remat`: whether layers are computed again in the backward pass.
    """
    struct = jax.ShapeDtypeStruct(
        (sizes.layers, sizes.width, sizes.hidden), jnp.float32
    )
    down = jax.ShapeDtypeStruct((sizes.layers, sizes.hidden, sizes.width), jnp.float32)
    structs = {
        "up": struct,
        "down": down,
    }
    params = plan(structs, sizes.mesh, names=_NAMES, axes=_AXES)
    if cut:
        params = follow(lambda tree: tree, params, over=over)
    optimizer = _narrowed(_ADAM) if narrow else _ADAM
    rows = jax.ShapeDtypeStruct(
        (sizes.batch // (2 if halved else 1), sizes.width), jnp.float32
    )
    x = plan(rows, sizes.mesh, names=("batch", None), axes=_AXES)
    opt = follow(optimizer.init, params, over=over)

    def layer(x: jax.Array, w) -> tuple[jax.Array, None]:
        return x + jnp.tanh(x @ w["up"]) @ w["down"], None

    def loss(params, batch: jax.Array) -> jax.Array:
        return jnp.mean(
            jax.lax.scan(jax.checkpoint(layer) if remat else layer, batch, params)[0]
            ** 2
        )

    def step(params, opt, batch: jax.Array):
        updates, opt = optimizer.update(jax.grad(loss)(params, batch), opt)
        return optax.apply_updates(params, updates), opt

    jitted = filter_jit(step, out_shardings=(params, opt), donate=donate)
    return jitted, params.structs, opt.structs, x.structs


def _narrowed(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Its moments in bfloat16 between steps."""

    def cast(state, dtype):
        return jax.tree.map(
            lambda moment: moment.astype(dtype) if moment.ndim else moment, state
        )

    def update(updates, state, params=None):
        updates, state = optimizer.update(updates, cast(state, jnp.float32), params)
        return updates, cast(state, jnp.bfloat16)

    return optax.GradientTransformation(
        lambda params: cast(optimizer.init(params), jnp.bfloat16), update
    )

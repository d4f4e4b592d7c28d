"""Candidates after a closer look: by the estimate of each operation, or by the compiled program."""

from collections.abc import Iterable, Sequence
from typing import Any

import equinox as eqx
import jax

from .._arrays import filter_jit
from .._cost import Traffic, traffic
from .._cost.estimate import Prepared
from .._ground.errors import MeshError
from .._plan import ShardPlan
from .candidate import Candidate, Check
from .core import CostModel


def estimated(step: Prepared, made: Candidate, overlap: float) -> Check:
    """The candidate by the estimate of every operation; see [`shardfx.estimate`][]."""
    return _check("estimate", step.under(made.plans), None, made, overlap)


def compiled(step: Any, args: Sequence[Any], made: Candidate, devices: Sequence[Any], overlap: float) -> Check:
    """The candidate by its program, compiled for these devices. Nothing is run."""
    mesh = made.plans[0].mesh.build(devices)
    plans = tuple(plan.on(mesh) for plan in made.plans)
    lowered = filter_jit(step, in_shardings=plans, out_shardings=_as_they_came(step, args, plans)).lower(*args)
    program = lowered.compile()
    memory = program.memory_analysis()
    bytes_held = None
    if memory is not None:
        outputs = max(0, memory.output_size_in_bytes - memory.argument_size_in_bytes)
        # A training step gives its state's memory to the new state.
        bytes_held = memory.argument_size_in_bytes + memory.temp_size_in_bytes + outputs
    return _check("compile", traffic(program, mesh), bytes_held, made, overlap)


def devices_for(verify: Any, count: int) -> tuple[Any, ...]:
    """The devices to compile for."""
    if verify != "compile":
        given = tuple(verify)
        if len(given) != count:
            raise MeshError(f"`verify` has {len(given)} devices, but the search is for {count}; give as many.")
        return given
    known = jax.devices()
    if len(known) < count:
        raise MeshError(
            f'`verify="compile"` needs {count} devices, and there are {len(known)}; emulate them with '
            f'`jax.config.update("jax_num_cpu_devices", {count})` before JAX is used, or give those of a slice: '
            '`verify=shardfx.interop.tpu.devices_of("tpu:v5e:4x4")`.'
        )
    return tuple(known[:count])


def _as_they_came(step: Any, args: Sequence[Any], plans: Sequence[ShardPlan]) -> Any:
    """The plans of the results: those that have the structure and shapes of an argument leave as it came."""
    made = eqx.filter_eval_shape(step, *args)
    shapes = [_shapes(arg) for arg in args]

    def of(result: Any) -> Any:
        found = _shapes(result)
        return plans[shapes.index(found)] if found in shapes else None

    if (whole := of(made)) is not None:
        return whole
    return tuple(map(of, made)) if isinstance(made, tuple) else None


def _shapes(tree: Any) -> Any:
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, [
        (leaf.shape, leaf.dtype) for leaf in leaves if eqx.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)
    ]


def _check(by: str, found: Traffic, memory_bytes: int | None, made: Candidate, overlap: float) -> Check:
    by_axes: dict[tuple[str, ...], float] = {}
    for row in found.rows:
        by_axes[row.axes] = by_axes.get(row.axes, 0.0) + row.wire_bytes
    scale = found.wire_bytes / made.wire_bytes if made.wire_bytes else 1.0
    exposed, hidden = made.exposed_seconds * scale, made.hidden_seconds * scale
    seconds = made.compute_seconds + exposed + max(0.0, hidden - overlap * made.compute_seconds)
    return Check(by, float(found.wire_bytes), memory_bytes, seconds, tuple(by_axes.items()))


def fit_chip(measurements: Iterable[tuple[Candidate, float | int]], model: CostModel | None = None) -> CostModel:
    """Fits what a search assumes about a machine to steps that were measured on it.

    The computation and the sending of every candidate are scaled, each by one factor, so that the sum is closest to
    what was measured, in ratios.

    **Arguments:**

    - `measurements`: pairs of a [`shardfx.Candidate`][] and the seconds that its step took; two at least.
    - `model`: what the candidates were estimated with; what [`shardfx.search`][] takes by itself if not given.

    **Returns:**

    A [`shardfx.CostModel`][] for `search(..., model=...)`.

    **Raises:**

    `MeshError` for fewer than two measurements, or times that are not above 0.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import shardfx

        def step(p, x):
            grads = jax.grad(lambda p: jnp.mean((x @ p) ** 2))(p)
            return p - 0.1 * grads

        struct = jax.ShapeDtypeStruct
        args = struct((1024, 1024), "float32"), struct((4096, 1024), "float32")
        found = shardfx.search(step, *args, devices=8, chip="v5e")
        measured = [(one, 2 * one.seconds) for one in found]  # your own times here
        model = shardfx.fit_chip(measured)
        again = shardfx.search(step, *args, devices=8, chip="v5e", model=model)
        assert again[0].seconds > found[0].seconds
        ```
    """
    model = CostModel() if model is None else model
    pairs = [(made, float(seconds)) for made, seconds in measurements]
    if len(pairs) < 2 or any(not seconds > 0 for _, seconds in pairs):
        raise MeshError(
            f"`fit_chip` got {len(pairs)} measurements; it needs at least two, each a candidate and seconds above 0."
        )
    fits = [_scales(pairs, overlap / 4) + (overlap / 4,) for overlap in range(5)]
    _, compute, network, overlap = min(fits)
    return CostModel(
        compute=model.compute / compute,
        memory=model.memory / compute,
        network=model.network / network,
        overlap=overlap,
        call_seconds=model.call_seconds * network,
    )


def _scales(pairs: Sequence[tuple[Candidate, float]], overlap: float) -> tuple[float, float, float]:
    """The error, and by what computation and sending are multiplied: least squares of ratios, both kept above 0."""
    rows = [
        (
            made.compute_seconds / seconds,
            (made.exposed_seconds + max(0.0, made.hidden_seconds - overlap * made.compute_seconds)) / seconds,
        )
        for made, seconds in pairs
    ]
    aa, ab, bb = (sum(x[i] * x[j] for x in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = sum(x for x, _ in rows), sum(y for _, y in rows)
    ground = aa * bb - ab * ab
    least = 1e-3
    if ground > 1e-9 * aa * bb:
        x, y = (a * bb - b * ab) / ground, (b * aa - a * ab) / ground
    else:
        x = y = (a + b) / (aa + 2 * ab + bb)
    if x <= 0 or y <= 0:
        # One of them explains nothing here: it stays small, and the other takes all.
        x, y = (a / aa, least) if y <= 0 else (least, b / bb)
    error = sum((x * p + y * q - 1) ** 2 for p, q in rows)
    return error, x, y

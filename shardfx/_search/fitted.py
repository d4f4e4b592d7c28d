"""What a search assumes about a machine, fitted to steps that were measured on it."""

from collections.abc import Iterable, Sequence

from .._ground.errors import MeshError
from .candidate import Candidate
from .core import CostModel


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

"""Time against memory, and devices against time, for several batches and numbers of devices."""

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
from jaxtyping import PyTree

from .. import chips
from .._ground.errors import MeshError, RuleError
from .._ground.text import bytes_text, first_lines, html_text, table
from ._asked import asked_for
from ._candidate import Candidate, ms
from ._name_axes import name_axes
from ._search import candidates_of, opened
from ._space import Limits


# The smallest number of the core's best candidates that are partitioned.
_KEPT = 12
_NO_LIMITS = Limits()


@dataclasses.dataclass(frozen=True)
class FrontierPoint:
    """A candidate that no other candidate for its devices and batch beats in both time and memory."""

    batch: int
    candidate: Candidate

    @property
    def devices(self) -> int:
        """The number of devices of the candidate's mesh."""
        return self.candidate.mesh.size

    @property
    def per_second(self) -> float:
        """Examples per second."""
        return self.batch / self.candidate.seconds


@dataclasses.dataclass(frozen=True)
class Frontier:
    """The points that [`shardfx.auto.frontier`][] found, by devices, batch and seconds. `str(...)` is a table."""

    points: tuple[FrontierPoint, ...]

    def of(self, devices: int, batch: int) -> tuple[FrontierPoint, ...]:
        """The points for these devices and this batch: the fastest first, each next one slower with less memory."""
        return tuple(point for point in self.points if (point.devices, point.batch) == (devices, batch))

    def fastest(self) -> tuple[FrontierPoint, ...]:
        """The fastest point that fits, for each number of devices and batch that has one."""
        found: dict[tuple[int, int], FrontierPoint] = {}
        for point in self.points:
            if point.candidate.fits:
                found.setdefault((point.devices, point.batch), point)
        return tuple(found.values())

    def __str__(self) -> str:
        rows = [("devices", "batch", "a step", "examples/s", "a device", "fits", "mesh")]
        rows += [
            (
                str(point.devices),
                str(point.batch),
                ms(point.candidate.seconds),
                f"{point.per_second:.4g}",
                bytes_text(point.candidate.memory_bytes),
                "yes" if point.candidate.fits else "no",
                point.candidate.title,
            )
            for point in self.points
        ]
        return "\n".join(table(rows, right={"devices", "batch", "a step", "examples/s", "a device"}))

    __repr__ = first_lines
    _repr_html_ = html_text


def frontier(
    step: Callable[..., object],
    *args: PyTree,
    devices: Sequence[int | str],
    chip: str | chips.Chip | None = None,
    slices: int = 1,
    batches: Sequence[int] = (),
    limits: Limits = _NO_LIMITS,
) -> Frontier:
    """The time and memory of a step's best candidates, for several numbers of devices and sizes of the batch.

    Each batch size and number of devices is searched as by [`shardfx.auto.search`][]. A point is a candidate that no
    other partitioned candidate beats in both quantities.

    **Arguments:**

    - `step`, `args`: as of `search`.
    - `devices`: numbers, or slices as "tpu:v5e:4x4".
    - `chip`, `slices`, `limits`: as of `search`. What takes more memory than there is stays, and is marked.
    - `batches`: sizes of the dimension that [`shardfx.auto.name_axes`][] calls "batch"; the step is traced for each. By
        default the one that the arguments have.

    **Returns:**

    A [`shardfx.auto.Frontier`][].

    **Raises:**

    `RuleError` for batch sizes if no argument has a dimension with the name of the batch; `MeshError` for no devices,
    or for devices that cannot be read.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import shardfx

        def loss(params, x):
            return jnp.mean((x + jax.nn.relu(x @ params["up"]) @ params["down"]) ** 2)

        def step(params, x):
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params, x))

        struct = jax.ShapeDtypeStruct
        up, down = struct((1024, 8192), "bfloat16"), struct((8192, 1024), "bfloat16")
        params, x = {"up": up, "down": down}, struct((4096, 1024), "bfloat16")
        drawn = shardfx.auto.frontier(
            step, params, x, devices=("tpu:v5e:2x2", "tpu:v5e:4x4"), batches=(65536,)
        )
        print(drawn)
        few, many = drawn.of(4, 65536)[0], drawn.of(16, 65536)[0]
        assert many.candidate.seconds < few.candidate.seconds
        ```
    """
    asked = [asked_for(one, chip, slices) for one in devices]
    if not asked:
        raise MeshError("`devices` is empty; give numbers or slices, as `devices=(8, 16, 32)`.")
    points: list[FrontierPoint] = []
    names = name_axes(step, *args).names if batches else ()
    for these in asked:
        for given in [_resized(args, names, size) for size in batches] or [args]:
            space, pricer = opened(step, given, these, limits, (), lambda _: None)
            found, _ = candidates_of(space, pricer, _KEPT, lambda _: None)
            size = next((group.size for group in space.classes.live() if group.name == "batch"), 0)
            least = math.inf
            for one in sorted(found, key=lambda one: (one.seconds, one.memory_bytes)):
                points += [FrontierPoint(size, one)] if one.memory_bytes < least else []
                least = min(least, one.memory_bytes)
    return Frontier(tuple(sorted(points, key=lambda point: (point.devices, point.batch, point.candidate.seconds))))


def _resized(args: Sequence[PyTree], names: Sequence[PyTree], size: int) -> list[PyTree]:
    """The arguments with a batch of another size."""
    found = False

    def resized(leaf: object, called: tuple[object, ...] | None) -> object:
        nonlocal found
        if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) or called is None or "batch" not in called:
            return leaf
        found = True
        shape = (size if name == "batch" else old for name, old in zip(called, leaf.shape, strict=True))
        return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype)

    made = [jax.tree.map(resized, arg, called) for arg, called in zip(args, names, strict=True)]
    if not found:
        raise RuleError('`batches` needs a dimension called "batch", and `name_axes` finds none; leave `batches` out.')
    return made

"""Time against memory, and devices against time, for several batches and numbers of devices at once."""

import dataclasses
import functools as ft
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .. import chips
from .._ground.errors import MeshError, RuleError
from .._ground.text import bytes_text, table
from .._ground.tree import flatten
from .._rules.axis_rules import AxisRules
from ..topology._mesh import MeshSpec
from .asked import asked_for
from .candidate import ms
from .core import CostModel, Found, Numbers, costs, machine_of, shares_of
from .layouts import Role
from .limits import Limits
from .search import Searched
from .terms import padded
from .written import mesh_and_rules


# Meshes of up to so many axes are looked at, so many sets of roles at once.
_AXES, _BLOCK = 3, 512
_NO_LIMITS, _USUAL = Limits(), CostModel()


@dataclasses.dataclass(frozen=True)
class FrontierPoint:
    """One mesh that no other beats in both time and memory, for so many devices and such a batch.

    `seconds` are of one step, `memory_bytes` per device, and `fits` says whether a device has as much.
    """

    devices: int
    batch: int
    seconds: float
    memory_bytes: int
    fits: bool
    title: str
    mesh: MeshSpec
    rules: AxisRules

    @property
    def per_second(self) -> float:
        """Examples in a second."""
        return self.batch / self.seconds


@dataclasses.dataclass(frozen=True)
class Frontier:
    """What [`shardfx.frontier`][] found: points by devices, batch and seconds. Printed, it is a table."""

    points: tuple[FrontierPoint, ...]

    def of(self, devices: int, batch: int) -> tuple[FrontierPoint, ...]:
        """Time against memory: the fastest first, each next one slower and smaller."""
        return tuple(point for point in self.points if (point.devices, point.batch) == (devices, batch))

    def fastest(self) -> tuple[FrontierPoint, ...]:
        """Devices against time: the fastest that fits, for all devices and batches that have one."""
        found: dict[tuple[int, int], FrontierPoint] = {}
        for point in self.points:
            if point.fits:
                found.setdefault((point.devices, point.batch), point)
        return tuple(found.values())

    def __str__(self) -> str:
        rows = [("devices", "batch", "a step", "examples/s", "a device", "fits", "mesh")]
        rows += [
            (
                str(point.devices),
                str(point.batch),
                ms(point.seconds),
                f"{point.per_second:.4g}",
                bytes_text(point.memory_bytes),
                "yes" if point.fits else "no",
                point.title,
            )
            for point in self.points
        ]
        return "\n".join(table(rows, right={"devices", "batch", "a step", "examples/s", "a device"}))


def frontier(
    step: Any,
    *args: Any,
    devices: Sequence[int | str],
    chip: str | chips.Chip | None = None,
    slices: int = 1,
    batches: Sequence[int] = (),
    limits: Limits = _NO_LIMITS,
    model: CostModel = _USUAL,
) -> Frontier:
    """Draws what a step costs in time and in memory, for several numbers of devices and sizes of the batch.

    The step is laid out under all roles worth a look, as by [`shardfx.search`][], and the compiled function that
    prices meshes is mapped over batches and devices. All meshes of up to three axes are priced.

    **Arguments:**

    - `step`, `args`: as of `search`.
    - `devices`: numbers, or slices as "tpu:v5e:4x4".
    - `chip`, `slices`, `limits`, `model`: as of `search`. What takes more memory than there is stays, and is marked.
    - `batches`: sizes of the dimension that [`shardfx.name_axes`][] calls "batch"; the step is traced for each. By
        default the one that the arguments have.

    **Returns:**

    A [`shardfx.Frontier`][].

    **Raises:**

    `RuleError` for batches if no argument has a dimension of that name; `MeshError` for no devices, or ones that
    cannot be read.

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
        drawn = shardfx.frontier(
            step, params, x, devices=("tpu:v5e:2x2", "tpu:v5e:4x4"), batches=(4096, 65536)
        )
        print(drawn)
        few, many = drawn.of(4, 65536)[0], drawn.of(16, 65536)[0]
        assert many.seconds < few.seconds
        ```
    """
    asked = [asked_for(one, chip, slices) for one in devices]
    if not asked:
        raise MeshError("`devices` is empty; give numbers or slices, as `devices=(8, 16, 32)`.")
    counts, kind = [one.total for one in asked], asked[0].chip
    base = Searched(step, args, math.lcm(*counts), limits)
    made = [base if size is None else _resized(base, step, args, size, limits) for size in (batches or (None,))]
    sizes = [_batch_of(one) for one in made]
    tables = [_shares(one.total, one.slices) for one in asked]
    limit = kind.usable_hbm_bytes // kind.devices_per_chip - limits.free_bytes
    machines = [machine_of(kind, count, model, base.dtype(), math.inf) for count in counts]
    arrays = _stacked([padded(one.terms) for one in made])
    points: list[FrontierPoint] = []
    best = _best(base, arrays, machines, tables)
    for (row, batch), (column, count) in itertools.product(enumerate(sizes), enumerate(counts)):
        for found in best[row][column]:
            point = _point(made[row], found, count, batch, limit)
            if point is not None:
                points.append(point)
    return Frontier(tuple(sorted(points, key=lambda point: (point.devices, point.batch, point.seconds))))


def _point(made: Searched, found: Found, count: int, batch: int, limit: int) -> FrontierPoint | None:
    built = mesh_and_rules(made.made, found, made.classes)
    if built is None or not made.limits.has_axes(built[0]) or not made.agrees(found, *built):
        return None
    mesh, rules, axes = built
    cuts = dict(zip(axes, (made.made[role] for role in found.roles), strict=True))
    names = {axis: [made.classes.groups[n].name for n in one.role.order if n in one.used] for axis, one in cuts.items()}
    title = ", ".join(f"{axis}={size} ({', '.join(names[axis])})" for axis, size in mesh.shape.items())
    memory = math.ceil(found.memory_bytes)
    return FrontierPoint(count, batch, found.seconds, memory, memory <= limit, title, mesh, rules)


def _batch_of(made: Searched) -> int:
    """How large the batch is; 0 where nothing is called so."""
    return next((group.size for group in made.classes.live() if group.name == "batch"), 0)


def _resized(base: Searched, step: Any, args: Sequence[Any], size: int, limits: Limits) -> Searched:
    """The step for a batch of another size, under the same roles in the same order."""
    places = {
        (*base.classes.traced.places[place.argument], place.dim)
        for group in base.classes.live()
        for place in group.places
        if group.name == "batch" and place.of == 1
    }
    if not places:
        known = ", ".join(group.name for group in base.classes.live())
        raise RuleError(f'`batches` needs a dimension called "batch", and the step has {known}; leave `batches` out.')
    changed = []
    for which, arg in enumerate(args):
        flat = flatten(arg)
        leaves = [
            jax.ShapeDtypeStruct(
                tuple(size if (which, leaf, dim) in places else old for dim, old in enumerate(value.shape)), value.dtype
            )
            if is_array
            else value
            for leaf, (value, is_array) in enumerate(zip(flat.leaves, flat.is_array, strict=True))
        ]
        changed.append(jax.tree.unflatten(flat.treedef, leaves))
    other = Searched(step, changed, base.devices, limits)
    numbers = {group.name: number for number, group in enumerate(other.classes.groups) if group.roots}
    called = [[base.classes.groups[number].name for number in one.role.order] for one in base.made]
    roles = [
        Role(tuple(numbers[name] for name in names if name in numbers), one.role.behind)
        for names, one in zip(called, base.made, strict=True)
    ]
    other.made = [other.layouts.under(role) for role in roles]
    other.terms = other.limited(limits)
    return other


def _stacked(made: Sequence[dict[str, np.ndarray]]) -> dict[str, Array]:
    """The arrays of all batches, filled up with zeros to one shape."""
    found = {}
    for name in made[0]:
        shape = tuple(max(sides) for sides in zip(*(one[name].shape for one in made), strict=True))
        filled = [
            np.pad(
                one[name],
                [(0, most - side) for most, side in zip(shape, one[name].shape, strict=True)],
                # Classes that a batch lacks have one element, which is cut once.
                constant_values=1 if name in ("sizes", "least") else 0,
            )
            for one in made
        ]
        found[name] = jnp.asarray(np.stack(filled))
    return found


def _shares(count: int, slices: int) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    return {number: shares_of(count, number, slices) for number in range(1, _AXES + 1)}


@ft.partial(jax.jit, static_argnames=("islands",))
def _of_all(
    arrays: dict[str, Array], machines: dict[str, Array], sets: Array, sizes: Array, spans: Array, *, islands: bool
) -> Float[Array, "batches counts two block shares"]:
    """Seconds and memory for each batch and number of devices, infinite where the mesh does not divide the step."""

    def priced(arrays: dict[str, Array], machine: dict[str, Array], sizes: Array, spans: Array) -> Array:
        score, _, _, _, _, memory, _ = costs(arrays, machine, sets, sizes, spans, islands=islands)
        return jnp.stack([score, memory])

    return jax.vmap(lambda one: jax.vmap(lambda m, s, b: priced(one, m, s, b))(machines, sizes, spans))(arrays)


def _best(
    base: Searched, arrays: dict[str, Array], machines: Sequence[Numbers], tables: Sequence[Any]
) -> list[list[list[Found]]]:
    """For each batch and number of devices what nothing else beats in both time and memory."""
    together = {name: jnp.stack([machine[name] for machine in machines]) for name in machines[0]}
    islands = bool(np.isfinite(np.asarray(together["island"])).all())
    batches, nothing = len(arrays["calls"]), len(base.made)
    kept: list[list[list[Found]]] = [[[] for _ in machines] for _ in range(batches)]
    for number in range(1, _AXES + 1):
        most = max(len(table[number][0]) for table in tables)
        if not most:
            continue
        filled = [_padded(table[number], most, number) for table in tables]
        sizes, spans = (jnp.asarray(np.stack([one[at] for one in filled])) for at in (0, 1))
        for sets, real in _sets(number, nothing):
            priced = np.asarray(_of_all(arrays, together, sets, sizes, spans, islands=islands))
            for row, column in itertools.product(range(batches), range(len(machines))):
                seconds, memory = priced[row, column]
                if len(tables[column][number][0]):
                    news = _undominated(seconds[:real], memory[:real], sets, tables[column][number])
                    kept[row][column] = _merged([*kept[row][column], *news])
    return kept


def _padded(table: tuple[np.ndarray, np.ndarray], most: int, number: int) -> tuple[np.ndarray, np.ndarray]:
    """With rows of ones where there are fewer: they are not read."""
    sizes, spans = table
    lacking = most - len(sizes)
    return (
        np.concatenate([sizes, np.ones((lacking, number), np.int32)]),
        np.concatenate([spans, np.ones((lacking, number), np.int32)]),
    )


def _sets(number: int, nothing: int) -> Iterator[tuple[np.ndarray, int]]:
    """All sets of so many roles, in blocks of one shape, and how many of a block are real."""
    every = itertools.combinations(range(nothing), number)
    while rows := list(itertools.islice(every, _BLOCK)):
        made = np.full((_BLOCK, number), nothing, np.int32)
        made[: len(rows)] = rows
        yield made, len(rows)


def _undominated(
    seconds: np.ndarray, memory: np.ndarray, sets: np.ndarray, table: tuple[np.ndarray, np.ndarray]
) -> Iterable[Found]:
    """What nothing else of a block beats in both."""
    sizes, spans = table
    seconds, memory = seconds[:, : len(sizes)], memory[:, : len(sizes)]
    order = np.argsort(seconds, axis=None, kind="stable")
    order = order[np.isfinite(seconds.ravel()[order])]
    held = memory.ravel()[order]
    better = held < np.concatenate([[np.inf], np.minimum.accumulate(held)[:-1]]) if len(held) else held > 0
    for place in order[better]:
        row, share = np.unravel_index(place, seconds.shape)
        yield Found(
            tuple(map(int, sets[row])),
            tuple(map(int, sizes[share])),
            tuple(map(int, spans[share])),
            float(seconds[row, share]),
            0.0,
            0.0,
            0.0,
            float(memory[row, share]),
        )


def _merged(found: Sequence[Found]) -> list[Found]:
    kept: list[Found] = []
    for one in sorted(found, key=lambda made: (made.seconds, made.memory_bytes)):
        if not kept or one.memory_bytes < kept[-1].memory_bytes:
            kept.append(one)
    return kept

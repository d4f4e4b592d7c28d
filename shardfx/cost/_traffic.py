"""The bytes that a compiled step sends, a row for each collective, with the line of the program that causes it."""

import dataclasses
import functools as ft
import re
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from .._ground.errors import LeafTypeError, ProgramError
from .._step import own_line
from ..topology import MeshSpec
from ._collective import Collective, channel_of, collective_of
from ._hlo_text import HloModule, Instruction, parse_hlo
from ._origin import Origins, path_of
from ._runs import Runs, runs_of
from ._traffic_rows import Traffic, TrafficRow, largest_first
from ._where import Where, is_transfer, slices_of, transfer_of


# The note of the rows in a branch that sends less than another branch.
IDLE = "one branch of a conditional runs: the one that sends most counts, the others are listed with 0 calls."
# The note of the rows of an exchange whose pieces differ in size.
RAGGED = "a ragged exchange sends what its sizes say when it runs: all that it has room for counts, in equal parts."
# The computation in which a TPU sums and keeps a shard of the sum.
_SCATTERS = "all-reduce-scatter"
# The fusion in which a TPU's collective begins; other fusions name the collective again.
_BEGINS = "async-collective-start"
_PRODUCT = re.compile(r"dot_general|conv_general|ragged_dot|einsum")


@runtime_checkable
class _Lowered(Protocol):
    """A lowered step of `jax.jit` or `filter_jit`."""

    def compile(self) -> object: ...


@runtime_checkable
class _Compiled(Protocol):
    """A compiled step of `jax.jit` or `filter_jit`."""

    input_shardings: Any

    def as_text(self) -> str | None: ...


@runtime_checkable
class _NamedArrays(Protocol):
    """A program of `filter_jit`, which knows the path of each array with its argument's name in front."""

    argument_paths: dict[str, str]


@runtime_checkable
class _OnDevices(Protocol):
    """A program of `compile_for`, which knows the ids of the devices that it is compiled for."""

    device_ids: tuple[int, ...]


def traffic(compiled: object, mesh: MeshSpec | Mesh | AbstractMesh | None = None) -> Traffic:
    """The bytes that a compiled step sends: a row for each collective, with the line of your program that causes it.

    A collective in a loop counts once per iteration, an asynchronous collective counts once, and an unknown collective
    is an error, so that nothing is left out silently.

    **Arguments:**

    - `compiled`: `filter_jit(...).lower(...).compile()`, or what `jax.jit` gives; a lowered program, which is compiled
        first; or the text of an optimized HLO module. From CPUs, GPUs and TPUs.
    - `mesh`: the mesh whose axes are named in the rows; read from the program's shardings if it has them. A MeshSpec
        with `dcn`, or a Mesh of devices in several slices, also says what crosses slices.

    **Returns:**

    A [`shardfx.cost.Traffic`][].

    **Raises:**

    `ProgramError`, with the line, for a collective or text that cannot be read; `MeshError` for a mesh of another size
    than the program's; `LeafTypeError` for an object that is no program.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        from shardfx import MeshSpec
        from shardfx.cost import traffic

        mesh = MeshSpec({"data": 8}).build(jax.devices())
        rows = jax.NamedSharding(mesh, jax.P("data"))
        whole = jax.NamedSharding(mesh, jax.P())
        x = jax.ShapeDtypeStruct((64, 16), jnp.float32, sharding=rows)
        compiled = jax.jit(jnp.sin, out_shardings=whole).lower(x).compile()
        (row,) = traffic(compiled).rows
        assert (row.kind, row.axes, row.wire_bytes) == ("all-gather", ("data",), 7 * 8 * 16 * 4)
        ```
    """
    program = _program(compiled)
    mesh = program.mesh if mesh is None else mesh
    return largest_first(read(parse_hlo(program.text), mesh, program.paths, program.ids))


def read(
    module: HloModule,
    mesh: MeshSpec | Mesh | AbstractMesh | None,
    paths: Mapping[str, str],
    ids: tuple[int, ...] = (),
) -> Traffic:
    """The traffic of a compiled or partitioned module, with its rows in program order.

    **Arguments:**

    - `module`: the program.
    - `mesh`: the mesh whose axes are named in the rows.
    - `paths`: the paths of its arguments, by their names in the text.
    - `ids`: the ids of the devices, in the order of the mesh, if they are known.
    """
    runs = runs_of(module)
    slices = max(
        [slices_of(module), *[own.slice + 1 for ways in runs.values() for own in ways if own.slice is not None]]
    )
    spec = None if mesh is None else MeshSpec.of(mesh)
    # In some texts the first line does not say it.
    devices = spec.size if spec is not None and module.partitions == 1 else module.partitions
    where = Where(spec, mesh, devices, slices, ids)
    found = _ModuleReader(module, runs, where, devices, paths).rows()
    return Traffic(tuple(one.row for one in found), where.devices, where.names)


class _ProgramText(NamedTuple):
    """A program's text, the mesh of its arguments, the arguments' paths by their names in the text, and its devices'
    ids.
    """

    text: str
    mesh: Mesh | AbstractMesh | None = None
    paths: Mapping[str, str] = {}
    ids: tuple[int, ...] = ()


def _program(compiled: object) -> _ProgramText:
    if isinstance(compiled, str):
        return _ProgramText(compiled)
    if isinstance(compiled, _Lowered):
        return _program(compiled.compile())
    if not isinstance(compiled, _Compiled):
        raise LeafTypeError(
            f"`traffic` takes a compiled program, not {type(compiled).__name__}; pass "
            "`filter_jit(step, ...).lower(...).compile()`."
        )
    text = compiled.as_text()
    if not text:
        raise ProgramError("the compiler of this platform does not give the text of its programs.")
    shardings = jax.tree.leaves(compiled.input_shardings)
    meshes = [s.mesh for s in shardings if isinstance(s, NamedSharding) and not s.mesh.empty]
    named = compiled.argument_paths if isinstance(compiled, _NamedArrays) else {}
    paths = {name: path.partition("/")[2] or path for name, path in named.items()}
    ids = compiled.device_ids if isinstance(compiled, _OnDevices) else ()
    return _ProgramText(text, next(iter(meshes), None), paths, ids)


@dataclasses.dataclass(frozen=True)
class _Found:
    """A row, with how often its computation runs."""

    row: TrafficRow
    runs: Runs


class _ModuleReader:
    """Reads the collectives of one module into rows."""

    def __init__(
        self,
        module: HloModule,
        runs: Mapping[str, tuple[Runs, ...]],
        where: Where,
        devices: int,
        paths: Mapping[str, str],
    ):
        self.module, self.runs, self.where, self.devices, self.paths = module, runs, where, devices, paths

    @ft.cached_property
    def origins(self) -> Origins:
        """The walks from values to arguments and updates."""
        return Origins(self.module)

    def rows(self) -> list[_Found]:
        """A row for each collective."""
        fusions = {
            target: instruction.name
            for name in self.runs
            for instruction in self.module.computations[name].values()
            if instruction.opcode == "fusion"
            for _, target in instruction.called
        }
        groups: dict[object, list[_Found]] = {}
        begun: set[object] = set()
        for name, instruction, runs in self.instructions():
            row = self.row(name, instruction, runs)
            if row is None:
                continue
            fusion, channel = fusions.get(name), channel_of(instruction)
            # A TPU's program names a collective again in each fusion that runs beside it. On other platforms each name
            # is one collective, whatever its channel, since all collectives of a `shard_map` may share one.
            key = (id(instruction), runs) if fusion is None or channel is None else (row.kind, channel)
            is_first = fusion is not None and fusion.startswith(_BEGINS)
            if is_first and key not in begun:
                groups[key] = []
            begun |= {key} if is_first else set()
            if is_first or key not in begun:
                groups.setdefault(key, []).append(_Found(row, runs))
        found = [one for key, group in groups.items() for one in (group if key in begun else _outermost(group))]
        return _of_costly_branches(found)

    def instructions(self) -> Iterator[tuple[str, Instruction, Runs]]:
        """The instructions that run, each with its computation's name, once for every way in which the
        computation runs.
        """
        for name, ways in self.runs.items():
            for instruction in self.module.computations[name].values():
                for runs in ways:
                    yield name, instruction, runs

    def row(self, name: str, instruction: Instruction, runs: Runs) -> TrafficRow | None:
        if is_transfer(instruction):
            return self.counted(instruction, transfer_of(instruction, self.where), runs)
        collective = collective_of(instruction, self.devices)
        if collective is None:
            return None
        collective = collective._replace(groups=self.where.lifted(collective.groups, runs.slice))
        if name.startswith(_SCATTERS):
            parts = tuple(part / collective.group_size for part in collective.parts)
            collective = collective._replace(kind="reduce-scatter", parts=parts)
        return self.counted(instruction, collective, runs)

    def counted(self, instruction: Instruction, collective: Collective, runs: Runs) -> TrafficRow:
        kind = self.replaced(instruction, collective)
        wire = runs.count * collective.wire_bytes(self.where.apart)
        shares = self.shares(instruction, collective, round(wire))
        stack = self.origins.frames(instruction)
        return TrafficRow(
            kind=kind,
            wire_bytes=round(wire),
            dcn_bytes=round(runs.count * collective.wire_bytes(self.where.slices)),
            calls=None if runs.unknown else runs.count,
            dtype=collective.dtype,
            group_size=collective.group_size,
            axes=self.where.axes(collective),
            source=own_line(stack),
            stack=stack,
            leaf=", ".join(dict.fromkeys(leaf for leaf, _ in shares if leaf)) or None,
            shares=shares,
            windowed=kind != collective.kind,
            note=_note(kind, runs) or instruction.note,
            passes=instruction.passes,
            unsure_bytes=round(wire * Fraction(instruction.unsure)),
            arrays=tuple(map(str, collective.arrays)),
            phase=instruction.phase,
        )

    def replaced(self, instruction: Instruction, collective: Collective) -> str:
        """The kind of a collective. A permute in a windowed product has the kind of the collective that the window
        replaces.

        The TPU's compiler replaces a gather before a product by permutes of one factor, and a reduction after a product
        by permutes of the partial sum.
        """
        is_ring = collective.kind == "collective-permute" and len(collective.groups[0]) == self.where.devices
        if not is_ring or not _PRODUCT.search(instruction.op_name):
            return collective.kind  # a permute that leaves out a device only changes the order of devices
        return "reduce-scatter" if self.origins.is_sum_of_products(instruction) else "all-gather"

    def shares(
        self, instruction: Instruction, collective: Collective, wire_bytes: int
    ) -> tuple[tuple[str | None, int], ...]:
        """The bytes of each leaf: the weight that a collective gathers, or the weights whose gradients it reduces."""
        find = self.origins.updated if collective.kind in ("all-reduce", "reduce-scatter") else self.origins.gathered
        parts = collective.parts
        is_whole = len(parts) == 1 and instruction.opcode != "recv"
        leaves = [find(instruction, None if is_whole else at) for at in range(len(parts))]
        sums: dict[str | None, int] = {}
        whole = collective.bytes
        for leaf, part in zip(leaves, parts, strict=True):
            path = self.path(leaf)
            sums[path] = sums.get(path, 0) + round(wire_bytes * part / whole if whole else 0)
        return tuple(sums.items())

    def path(self, argument: str | None) -> str | None:
        """The path of an argument, from its name in the program."""
        return None if argument is None else self.paths.get(argument) or path_of(argument)


def _note(kind: str, runs: Runs) -> str:
    if runs.unknown:
        return f"the trips of a loop are not known and count once: {runs.unknown[0]:.160}"
    return RAGGED if kind == "ragged-all-to-all" else ""


def _outermost(group: list[_Found]) -> list[_Found]:
    """The fusion that runs least often, among those that name one collective. The others are in loops beside it."""
    return [min(group, key=lambda one: one.runs.count)]


def _of_costly_branches(found: list[_Found]) -> list[_Found]:
    """The rows, with only the branch of each conditional that sends most, since one branch runs and it is not known
    which.
    """
    labels = dict.fromkeys(label for one in found for label, _ in one.runs.branch)
    # Inner conditionals come first, so that the counted branches of an outer one are complete.
    for label in sorted(labels, key=lambda label: -_depth(found, label)):
        sums: dict[int, int] = {}
        for one in found:
            if (number := dict(one.runs.branch).get(label)) is not None:
                sums[number] = sums.get(number, 0) + one.row.wire_bytes
        chosen = max(sums, key=lambda number: sums[number])
        found = [
            one if dict(one.runs.branch).get(label, chosen) == chosen else dataclasses.replace(one, row=_idle(one.row))
            for one in found
        ]
    return found


def _depth(found: list[_Found], label: str) -> int:
    return max(at for one in found for at, (name, _) in enumerate(one.runs.branch) if name == label)


def _idle(row: TrafficRow) -> TrafficRow:
    shares = tuple((leaf, 0) for leaf, _ in row.shares)
    return dataclasses.replace(row, calls=0, wire_bytes=0, dcn_bytes=0, unsure_bytes=0, shares=shares, note=IDLE)

"""The bytes that a compiled step sends: a row for each collective, with the source line
that causes it.
"""

import dataclasses
import functools as ft
import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from .._arrays import Compiled, Lowered
from .._ground import opcodes
from .._ground.errors import LeafTypeError, ProgramError
from .._ground.misuse import called
from .._ground.text import together
from .._step import (
    Collective,
    DevicePositions,
    HloModule,
    Instruction,
    channel_of,
    collective_of,
    is_transfer,
    own_line,
    parse_hlo,
    slices_of,
    transfer_of,
)
from ..topology import MeshSpec
from ._compile_for import CompiledFor
from ._origin import Origins, path_of
from ._runs import Runs, runs_of
from ._traffic_rows import Traffic, TrafficRow, largest_first


# The note in the rows of a branch that sends less than another branch of the same
# conditional.
IDLE = (
    "one branch of a conditional runs: the one that sends most counts, the others are"
    " listed with 0 calls."
)
# The note in the rows of an all-to-all whose shards differ in size.
RAGGED = (
    "a ragged exchange sends what its sizes say when it runs: all that it has room for"
    " counts, in equal parts."
)
# The name of a computation in which a TPU performs an all-reduce and slices its result:
# a reduce-scatter.
_SCATTERS = "all-reduce-scatter"
# The name of the fusion that starts a TPU's collective. Other fusions contain the
# collective's instruction again.
_STARTS = "async-collective-start"
_PRODUCT = re.compile(r"dot_general|conv_general|ragged_dot|einsum")


@runtime_checkable
class _FlaxLowered(Protocol):
    """A lowered function of `flax.nnx.jit`, around JAX's."""

    lowered: jax.stages.Lowered
    jit_wrapped: object


@runtime_checkable
class _FlaxCompiled(Protocol):
    """A compiled function of `flax.nnx.jit`, around JAX's."""

    compiled: jax.stages.Compiled
    jit_wrapped: object


@called("traffic(compiled)")
def traffic(
    compiled: object,
    mesh: MeshSpec | Mesh | AbstractMesh | None = None,
) -> Traffic:
    """The bytes that a compiled step sends: a row for each collective, with the line of
    your program that causes it.

    A collective in a loop counts once per iteration. An asynchronous collective counts
    once. A collective of an unknown kind raises an error, so no collective is left out
    of the total.

    **Arguments:**

    - `compiled`: a compiled program of `jax.jit`, `filter_jit`, `flax.nnx.jit` or
      [`shardfx.cost.compile_for`][]; a lowered program, which is compiled first; or the
      text of an optimized HLO module. It may be for CPUs, GPUs or TPUs.
    - `mesh`: the mesh whose axes the rows name; by default the mesh of the program's
      shardings, if it has any. With a MeshSpec that has `dcn`, or a Mesh of devices in
      several slices, the rows also count the bytes between slices.

    **Returns:**

    A [`shardfx.cost.Traffic`][].

    **Raises:**

    `ProgramError` for text or a collective that cannot be read, with the line of HLO;
    `MeshError` for a mesh that has more or fewer devices than the program;
    `LeafTypeError` for an object that is no program.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        from jax.sharding import PartitionSpec as P
        from shardfx import MeshSpec
        from shardfx.cost import traffic

        mesh = MeshSpec({"data": 8}).build(jax.devices())
        rows = jax.NamedSharding(mesh, P("data"))
        whole = jax.NamedSharding(mesh, P())
        x = jax.ShapeDtypeStruct((64, 16), jnp.float32, sharding=rows)
        compiled = jax.jit(jnp.sin, out_shardings=whole).lower(x).compile()
        (row,) = traffic(compiled).rows
        assert (row.kind, row.axes, row.wire_bytes) == ("all-gather", ("data",), 7 * 8 * 16 * 4)
        ```
    """
    if isinstance(compiled, _FlaxLowered):
        compiled = compiled.lowered
    if isinstance(compiled, _FlaxCompiled):
        compiled = compiled.compiled
    if isinstance(compiled, Lowered | jax.stages.Lowered):
        compiled = compiled.compile()
    if isinstance(compiled, str):
        return largest_first(read(parse_hlo(compiled), mesh, {}))
    if not isinstance(compiled, Compiled | CompiledFor | jax.stages.Compiled):
        raise LeafTypeError(
            f"`traffic` takes a compiled program, not {type(compiled).__name__}; pass "
            "`filter_jit(step, ...).lower(...).compile()`."
        )
    if not (text := compiled.as_text()):
        raise ProgramError(
            "the compiler of this platform does not give the text of its programs."
        )
    if mesh is None:
        mesh = _mesh_of(jax.tree.leaves(compiled.input_shardings))
    paths: dict[str, str] = {}
    if not isinstance(compiled, jax.stages.Compiled):
        for name, path in compiled.argument_paths.items():
            _, _, path_in_argument = path.partition("/")
            paths[name] = path_in_argument or path
    ids = compiled.device_ids if isinstance(compiled, CompiledFor) else ()
    return largest_first(read(parse_hlo(text), mesh, paths, ids))


def _mesh_of(shardings: Sequence[object]) -> Mesh | AbstractMesh | None:
    """The first mesh of some shardings."""
    for sharding in shardings:
        if isinstance(sharding, NamedSharding) and not sharding.mesh.empty:
            return sharding.mesh
    return None


def read(
    module: HloModule,
    mesh: MeshSpec | Mesh | AbstractMesh | None,
    paths: Mapping[str, str],
    ids: tuple[int, ...] = (),
) -> Traffic:
    """The traffic of a compiled or partitioned HLO module, with the rows in the order
    of the program.

    **Arguments:**

    - `module`, `mesh`: the module, and the mesh whose axes the rows name; `None` if it
      is not known.
    - `paths`: the path of each argument of the module, by the argument's name in the
      text.
    - `ids`: the ids of the devices in the order of the mesh; empty if they are not
      known.
    """
    runs = runs_of(module)
    slices = slices_of(module)
    # A run counts its slice from 0.
    for run in itertools.chain.from_iterable(runs.values()):
        if run.slice is not None:
            stop = max(slices.stop, slices.start + run.slice + 1)
            slices = range(slices.start, stop)
    positions = DevicePositions(
        mesh=mesh, slice_devices=module.partitions, slices=slices, ids=ids
    )
    reader = _ModuleReader(
        module=module,
        positions=positions,
        paths=paths,
    )
    collectives = _with_costliest_branches(reader.collectives(runs))
    return Traffic(
        rows=tuple(collective.row for collective in collectives),
        devices=positions.device_count,
        axes=positions.axis_names,
    )


class _Candidate(NamedTuple):
    """The traffic row of one instruction of a collective. A TPU's program can have
    several instructions for one collective.

    - `row`: the traffic row.
    - `runs`: how often the instruction's computation runs.
    - `key`: a value that is equal for the instructions of one collective.
    - `is_start`: whether the instruction starts the collective.
    """

    row: TrafficRow
    runs: Runs
    key: object
    is_start: bool


@dataclasses.dataclass
class _ModuleReader:
    """Makes traffic rows of the collectives of one HLO module. `paths` has the path of
    each argument, by its name.
    """

    module: HloModule
    positions: DevicePositions
    paths: Mapping[str, str]

    @ft.cached_property
    def origins(self) -> Origins:
        return Origins(self.module)

    def collectives(self, runs: Mapping[str, tuple[Runs, ...]]) -> list[_Candidate]:
        """The rows of the module's collectives. A collective in several branches or
        loops has a row for each. `runs` has how often each computation runs, by its
        name, from `runs_of`. A candidate is a row, with a `key` that is equal for
        instructions of one collective.
        """
        # The name of the fusion that runs each computation.
        fusion_of_computation: dict[str, str] = {}
        for name in runs:
            for instruction in self.module.computations[name].values():
                if instruction.opcode == "fusion":
                    for _, target in instruction.called:
                        fusion_of_computation[target] = instruction.name

        candidates: list[_Candidate] = []
        for name, runs_of_computation in runs.items():
            fusion = fusion_of_computation.get(name)
            for instruction in self.module.computations[name].values():
                for run in runs_of_computation:
                    try:
                        row = self.row(name, instruction, run)
                    except ProgramError as error:
                        text = f"{instruction.text:.300}"
                        raise ProgramError(f"{error}: {text}") from None
                    if row is not None:
                        candidates.append(_found(row, run, instruction, fusion))
        chosen: list[_Candidate] = []
        for alike in together(candidates, lambda candidate: candidate.key).values():
            # If no fusion starts the collective, it belongs to the fusion that runs
            # least often: the other fusions are in loops that run at the same time.
            starts = [candidate for candidate in alike if candidate.is_start]
            chosen += starts or [min(alike, key=lambda candidate: candidate.runs.count)]
        return chosen

    def row(self, name: str, instruction: Instruction, runs: Runs) -> TrafficRow | None:
        """The traffic row of an instruction; `None` if it is no collective. `name` is
        the computation that contains it, and `runs` is how often that computation runs.

        `collective.wire_bytes` counts the bytes between devices of different numbers:
        all bytes for `device_numbers`, those between slices for `slice_numbers`.
        """
        collective = self.collective(name, instruction, runs)
        if collective is None:
            return None
        kind = self.kind_of(instruction, collective)
        note = RAGGED if kind == "ragged-all-to-all" else ""
        if runs.unknown:
            loop = f"{runs.unknown[0]:.160}"
            note = f"the trips of a loop are not known and count once: {loop}"
        wire_bytes = round(
            runs.count * collective.wire_bytes(self.positions.device_numbers)
        )
        dcn_bytes = round(
            runs.count * collective.wire_bytes(self.positions.slice_numbers)
        )
        shares = self.shares(instruction, collective, wire_bytes)
        stack = self.origins.frames(instruction)
        pairs: list[tuple[int, int]] = []
        if kind == "collective-permute":
            for group in collective.groups:
                pairs += [(int(ends[0]), int(ends[-1])) for ends in group]
        return TrafficRow(
            kind=kind,
            wire_bytes=wire_bytes,
            dcn_bytes=dcn_bytes,
            calls=None if runs.unknown else runs.count,
            dtype=collective.dtype,
            group_size=collective.group_size,
            axes=self.positions.axes(collective),
            source=own_line(stack),
            stack=stack,
            leaf=", ".join(filter(None, shares)) or None,
            shares=tuple(shares.items()),
            windowed=kind != collective.kind,
            note=note,
            arrays=tuple(map(str, collective.arrays)),
            phase=instruction.phase,
            callback=self.origins.callback(instruction),
            pairs=tuple(pairs),
        )

    def collective(
        self,
        name: str,
        instruction: Instruction,
        runs: Runs,
    ) -> Collective | None:
        """The collective of an instruction of the computation `name`, with the groups as
        positions in the mesh; `None` if it starts no collective. A computation whose
        name begins with `_SCATTERS` is the reduce-scatter of a TPU, written as an
        all-reduce.
        """
        if is_transfer(instruction):
            return transfer_of(instruction, self.positions)
        collective = collective_of(instruction, self.positions.slice_devices)
        if collective is None:
            return None
        groups = self.positions.in_mesh(collective.groups, runs.slice)
        collective = collective._replace(groups=groups)
        if name.startswith(_SCATTERS):
            parts = [part / collective.group_size for part in collective.parts]
            collective = collective._replace(kind="reduce-scatter", parts=tuple(parts))
        return collective

    def kind_of(self, instruction: Instruction, collective: Collective) -> str:
        """The kind of a collective. A permute of a windowed einsum has the kind of the
        collective that it replaces. In a windowed einsum, a loop of permutes and
        partial matrix products replaces an all-gather before the product, or a
        reduce-scatter after it. XLA makes it: `EmitWindowedDotGeneral` in
        xla/service/spmd/dot_handler.cc.
        """
        is_ring = (
            collective.kind == "collective-permute"
            and len(collective.groups[0]) == self.positions.device_count
        )
        if not is_ring or not _PRODUCT.search(instruction.op_name):
            # The permutes of a windowed einsum have all devices.
            return collective.kind
        if self.origins.is_sum_of_products(instruction):
            return "reduce-scatter"
        return "all-gather"

    def shares(
        self,
        instruction: Instruction,
        collective: Collective,
        wire_bytes: int,
    ) -> dict[str | None, int]:
        """The `wire_bytes` of a collective, divided among the parameters that it
        gathers, or whose gradients it reduces, by the parameter's path. The key `None`
        has the bytes of other arrays. `collective.parts` has the bytes of each array.
        """
        argument_of = self.origins.gathered
        if collective.kind in opcodes.SUMS:
            argument_of = self.origins.updated
        shares: dict[str | None, int] = {}
        for element, part in enumerate(collective.parts):
            path = argument = argument_of(instruction, element)
            if argument:
                path = self.paths.get(argument) or path_of(argument)
            nbytes = 0
            if part:
                nbytes = round(wire_bytes * part / collective.bytes)
            shares[path] = shares.get(path, 0) + nbytes
        return shares


def _found(
    row: TrafficRow,
    runs: Runs,
    instruction: Instruction,
    fusion: str | None,
) -> _Candidate:
    """The row of an instruction, with what tells whether others are the same
    collective. `fusion` is the name of the fusion that contains it; `None` without one.
    `runs` has the loops and branches around the instruction.
    """
    # A TPU's program repeats a collective in each fusion that runs at the same time. On
    # other platforms each instruction is one collective, and all collectives of a
    # `shard_map` may have one channel.
    key: object = (id(instruction), runs)
    channel = channel_of(instruction)
    if fusion is not None and channel is not None:
        key = (row.kind, channel)
    is_start = fusion is not None and fusion.startswith(_STARTS)
    return _Candidate(row=row, runs=runs, key=key, is_start=is_start)


def _with_costliest_branches(collectives: list[_Candidate]) -> list[_Candidate]:
    """The rows, with zero bytes in each branch of a conditional that sends less than
    another branch of it. Only one branch runs, and the program does not say which. The
    `branch` of a row's runs has a pair for each conditional around it, outermost first:
    the conditional's name and the number of the branch.
    """
    depths = [len(collective.runs.branch) for collective in collectives]
    # Inner conditionals come first, since the bytes of an outer branch depend on them.
    for depth in reversed(range(max(depths, default=0))):
        # For each conditional, the bytes of each of its branches.
        sums: dict[str, Counter[int]] = {}
        for collective in collectives:
            # At most one: the conditional at this depth around the collective.
            for label, number in collective.runs.branch[depth : depth + 1]:
                sums.setdefault(label, Counter())[number] += collective.row.wire_bytes
        costliest: dict[str, int] = {}
        for label, bytes_of_branches in sums.items():
            costliest[label] = max(bytes_of_branches, key=bytes_of_branches.__getitem__)
        counted: list[_Candidate] = []
        for collective in collectives:
            for label, number in collective.runs.branch[depth : depth + 1]:
                if number != costliest[label]:
                    row = _without_bytes(collective.row)
                    collective = collective._replace(row=row)
            counted.append(collective)
        collectives = counted
    return collectives


def _without_bytes(row: TrafficRow) -> TrafficRow:
    """The row of a collective in a branch that does not count."""
    shares = tuple((leaf, 0) for leaf, _ in row.shares)
    return dataclasses.replace(
        row,
        calls=0,
        wire_bytes=0,
        dcn_bytes=0,
        shares=shares,
        note=IDLE,
    )

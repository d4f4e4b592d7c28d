"""Ahead-of-time compilation of a step for devices that are not present."""

import contextlib
import dataclasses
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from .. import chips
from .._ground.errors import ChipError, MeshError, OutOfMemoryError, ProgramError
from .._ground.misuse import called
from .._step import Platform, Step, TpuTexts, parse_hlo, step_of, target_named
from ..topology import MeshSpec
from ._libtpu import memory_in
from ._memory import Memory


# The platform for which a step is lowered, for each platform name of JAX's devices.
_PLATFORMS: Mapping[str, Platform] = {
    "tpu": "tpu",
    "gpu": "gpu",
    "cuda": "gpu",
    "cpu": "cpu",
}
# The errors of the TPU's compiler if arguments and temporaries together are too large,
# and if temporaries alone are.
_FULL = (
    re.compile(r"Used ([\d.]+[KMGT]?) of ([\d.]+[KMGT]?) hbm"),
    re.compile(
        r"total memory required for [\w ]+ \(([\d.]+[KMGT]?)\) exceeds available \w+"
        r" \(([\d.]+[KMGT]?)\)"
    ),
)


@dataclasses.dataclass(frozen=True)
class MemoryAnalysis:
    """The compiler's count of a program's memory on one device. The fields have the
    names of JAX's memory analysis.

    `peak_memory_in_bytes` is 0 if the compiler does not report it. On a TPU,
    `temp_size_in_bytes` includes temporaries that reuse the memory of arguments and
    results, so the sum of all sizes is larger than the peak.
    """

    __module__ = "shardfx.cost"

    argument_size_in_bytes: int
    output_size_in_bytes: int
    alias_size_in_bytes: int
    temp_size_in_bytes: int
    generated_code_size_in_bytes: int
    peak_memory_in_bytes: int = 0

    @property
    def needed_bytes(self) -> int:
        """The peak memory of the program. If it is not reported, the bytes of
        arguments, results and temporaries.
        """
        return self.peak_memory_in_bytes or (
            self.argument_size_in_bytes
            + self.output_size_in_bytes
            - self.alias_size_in_bytes
            + self.temp_size_in_bytes
        )


# The sizes that every version of JAX has.
_COUNTED_FIELDS = [
    field.name
    for field in dataclasses.fields(MemoryAnalysis)
    if field.default is dataclasses.MISSING
]
# Sizes that JAX's own analysis has, beside those of `MemoryAnalysis`.
_FIELDS_OF_PEAK = (
    "peak_memory_in_bytes",
    "host_argument_size_in_bytes",
    "host_output_size_in_bytes",
    "host_temp_size_in_bytes",
    "host_alias_size_in_bytes",
)


def memory_of(compiled: Any) -> MemoryAnalysis:
    """The memory analysis of a step that JAX or `compile_for` compiled."""
    analysis = compiled.memory_analysis()
    if isinstance(analysis, MemoryAnalysis):
        return analysis
    devices: list[Any] = []
    for sharding in jax.tree.leaves(compiled.input_shardings):
        devices += sharding.device_set
    names = (*_COUNTED_FIELDS, *_FIELDS_OF_PEAK)
    sizes = {name: int(getattr(analysis, name, 0)) for name in names}
    if any(device.platform == "tpu" for device in devices):
        return _tpu_memory_analysis(sizes)
    # The peak of CPU compilers leaves out temporaries.
    return MemoryAnalysis(**{name: sizes[name] for name in _COUNTED_FIELDS})


def _tpu_memory_analysis(sizes: Mapping[str, int]) -> MemoryAnalysis:
    """libtpu's memory analysis, from its sizes by JAX's names. The memory analysis of
    JAX 0.9 has no peak.
    """
    peak = sizes.get("peak_memory_in_bytes", 0)
    if peak:  # includes arrays in host memory
        peak -= sizes["host_argument_size_in_bytes"]
        peak -= sizes["host_output_size_in_bytes"]
        peak -= sizes["host_temp_size_in_bytes"]
        peak += sizes["host_alias_size_in_bytes"]
    counted = {name: sizes[name] for name in _COUNTED_FIELDS}
    return MemoryAnalysis(**counted, peak_memory_in_bytes=peak)


@dataclasses.dataclass(frozen=True)
class CompiledFor:
    """A step compiled for devices that are not present; returned by
    [`shardfx.cost.compile_for`][].

    It cannot run. It is plain data, so `pickle` can store it in a file.

    **Arguments:**

    - `text`: the text of the optimized HLO module.
    - `memory`: the compiler's count of memory on one device.
    - `mesh`: the mesh of the step, with its slices.
    - `argument_paths`: the path of each array of the arguments, such as "params/w", by
      its name in the text.
    - `target`, `chip`: the name of the target, such as "tpu:v5e:4x4", and its chip;
      `None` if that is not known.
    - `seconds`: the time that compilation took.
    - `device_ids`: the ids of the target's devices in the order of the mesh.
    - `assigned`: the memory in HBM as libtpu assigned it, by array; `None` for other
      targets than the name of a TPU slice.
    """

    __module__ = "shardfx.cost"

    text: str
    memory: MemoryAnalysis
    mesh: MeshSpec
    argument_paths: dict[str, str]
    target: str
    chip: chips.Chip | None
    seconds: float
    device_ids: tuple[int, ...] = ()
    assigned: Memory | None = dataclasses.field(default=None, repr=False)

    @property
    def input_shardings(self) -> tuple[NamedSharding]:
        """A replicated sharding on the step's mesh, for code that reads the mesh of a
        compiled step.
        """
        return (NamedSharding(self.mesh.abstract(), jax.P()),)

    def as_text(self) -> str:
        """The text of the optimized HLO module."""
        return self.text

    def memory_analysis(self) -> MemoryAnalysis:
        """The compiler's count of the step's memory on one device."""
        return self.memory


@called(
    "compile_for(step, *args, target=target)",
    chip='`target="tpu:v5p:4x4x4"`',
    compiler='`target="tpu:v5p:4x4x4"`',
    devices="`target=`, a mesh or a list of devices",
)
def compile_for(
    step: object,
    *args: object,
    target: str | Mesh | Sequence[object] = "tpu:v5e:4x4",
    mesh: MeshSpec | None = None,
) -> CompiledFor:
    """Compiles a step for devices that are not present.

    [`shardfx.cost.traffic`][] and [`shardfx.cost.fit`][] accept the result. For TPUs,
    the compiler is the TPU's own from the libtpu wheel, which runs on any machine:
    `pip install "shardfx[aot]"`. A model of many layers takes minutes to compile. To
    see the traffic of one layer, compile a `scan` over the layers, or a model of two
    layers.

    **Arguments:**

    - `step`, `args`: the step and its arguments, as in [`shardfx.cost.estimate`][]. A
      plan that the step closes over must have no devices ([`shardfx.ShardPlan.off`][])
      or the devices of the target.
    - `target`: the name of a TPU slice, such as "tpu:v5p:4x4x4"; "cpu" for this
      machine's (emulated) CPU devices; or devices, or a Mesh of devices.
    - `mesh`: the arguments' mesh as a MeshSpec with `dcn`, if the mesh spans several
      slices.

    **Returns:**

    A [`shardfx.cost.CompiledFor`][].

    **Raises:**

    `MeshError` for a target that is unknown or has too few devices, or if its compiler
    is not installed (the message has the command to install it); `OutOfMemoryError` if
    the compiler reports that the program needs more memory than a device has; JAX's own
    errors for a step that cannot be lowered or compiled.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        from shardfx import MeshSpec, PathRules, plan
        from shardfx.cost import compile_for, traffic

        mesh = MeshSpec({"data": 8})
        x = jax.ShapeDtypeStruct((64, 16), jnp.float32)
        batch = plan(x, mesh, paths=PathRules.parse(".*->data"))
        made = compile_for(lambda batch: jnp.sum(batch), batch.structs, target="cpu")
        assert traffic(made).by("kind") == {"all-reduce": 7}
        ```
    """
    traced = step_of(step, args, mesh)
    if isinstance(target, str) and target.partition(":")[0] != "cpu":
        return _compiled_by_libtpu(traced, target)
    target_mesh, name = _mesh_of(target, traced.mesh)
    devices = tuple(target_mesh.devices.flat)
    if devices[0].platform == "tpu":
        _raise_at_callbacks(traced)
    lowered = traced.lowered(_PLATFORMS.get(devices[0].platform, "cpu"))
    start = time.perf_counter()
    # By default, JAX compiles a program that was lowered without devices for the
    # default platform.
    lowered._lowering.compile_args["backend"] = devices[0].client
    program = compiled(lowered, devices)
    seconds = time.perf_counter() - start
    paths = {
        parameter.name: traced.path(parameter.name)
        for parameter in traced.parameters[0]
    }
    ids = tuple(int(device.id) for device in devices)
    chip = None
    with contextlib.suppress(ChipError):
        chip = chips.find(devices[0].device_kind)
    return CompiledFor(
        text=program.as_text(),
        memory=memory_of(program),
        mesh=traced.mesh,
        argument_paths=paths,
        target=name,
        chip=chip,
        seconds=seconds,
        device_ids=ids,
    )


def _compiled_by_libtpu(step: Step, name: str) -> CompiledFor:
    """The step compiled for a TPU slice, in libtpu's own process."""
    _raise_at_callbacks(step)
    chip = chips.find(name)
    target = target_named(name, step.mesh)
    start = time.perf_counter()
    answer = step.tpu_compiled(target.slices, target.order)
    seconds = time.perf_counter() - start
    arguments, _ = step.parameters
    if isinstance(answer, TpuTexts):
        memory = _assigned(answer, len(arguments))
        raise _out_of_memory(answer.out_of_memory, memory.peak_bytes)
    return CompiledFor(
        text=answer.text,
        memory=_tpu_memory_analysis(answer.sizes),
        mesh=step.mesh,
        argument_paths={
            argument.name: step.path(argument.name) for argument in arguments
        },
        target=name,
        chip=chip,
        seconds=seconds,
        device_ids=target.order,
        assigned=_assigned(answer.texts, len(arguments)),
    )


def _assigned(texts: TpuTexts, argument_count: int) -> Memory:
    """The memory of one device in HBM, as libtpu assigned it."""
    return memory_in(texts, parse_hlo(texts.scheduled), argument_count)


def _raise_at_callbacks(step: Step) -> None:
    """Raises `ProgramError` for a step that calls back to Python."""
    if step.callbacks:
        raise ProgramError(
            f"{step.callbacks[0]} calls back to Python, which libtpu compiles only for"
            " the devices of its own process; compile the step without it, or see what"
            " it gathers by `shardfx.cost.estimate(step, *args)`."
        )


def _out_of_memory(text: str, needed_bytes: int | None = None) -> OutOfMemoryError:
    """The error for a program that does not fit, from its compiler's own text. Its
    `needed_bytes` are as given, or else as the text says.
    """
    sizes = "more than there is"
    limit_bytes = None
    for form in _FULL:
        match = form.search(text)
        if match is not None:
            needed_text, limit_text = match.groups()
            sizes = f"{needed_text} of {limit_text}"
            limit_bytes = _bytes_of(limit_text)
            if needed_bytes is None:
                needed_bytes = _bytes_of(needed_text)
            break
    return OutOfMemoryError(
        f"the program does not fit a device: its compiler needs {sizes}."
        " `shardfx.cost.fit(step, *args, chip=...)` says what takes the memory, and"
        " which single change would make it fit.",
        needed_bytes,
        limit_bytes,
    )


def compiled(lowered: Any, devices: Sequence[Any] = ()) -> Any:
    """Compiles a lowered program for `devices`, or for those of its shardings if there
    are none. Raises `OutOfMemoryError` if it needs more memory than a device has.
    """
    try:
        if devices:
            return lowered.compile(device_assignment=tuple(devices))
        return lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        text = str(error)
        if not text.startswith("RESOURCE_EXHAUSTED"):
            raise
        raise _out_of_memory(text) from error


def _bytes_of(text: str) -> int:
    """The bytes of a size in XLA's notation, such as "16.18G"."""
    number = text.rstrip("KMGT")
    thousands = " KMGT".index(text[len(number) :] or " ")
    return int(float(number) * 1024**thousands)


def _mesh_of(target: str | Mesh | Sequence[object], spec: MeshSpec) -> tuple[Mesh, str]:
    """The mesh of a target's devices, and the name of their kind. A target that is text
    is "cpu". `spec` is the mesh of the step's arguments, which is built of these
    devices.
    """
    if isinstance(target, Mesh):
        return target, target.devices.flat[0].device_kind
    devices: list[Any] = []
    if isinstance(target, str):
        devices += jax.devices("cpu")[: spec.size]
    elif isinstance(target, Iterable):
        devices += target
    platforms = [getattr(device, "platform", None) for device in devices]
    if not isinstance(target, Iterable) or None in platforms:
        raise MeshError(
            f"`target={target!r:.80}` is neither a slice, a mesh nor devices; write"
            ' `target="tpu:v5e:2x4"`, `target="cpu"`, or `target=jax.devices()`.'
        )
    return spec.build(devices), devices[0].device_kind

"""Compiling a step ahead of time for a topology whose devices are not present."""

import contextlib
import dataclasses
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from .. import chips
from .._ground.errors import ChipError, MeshError, OutOfMemoryError
from .._step import Platform, step_of
from ..interop import tpu
from ..topology import MeshSpec


# The lowering function for each platform, by the name that JAX gives the platform.
_PLATFORMS: Mapping[str, Platform] = {"tpu": "tpu", "gpu": "gpu", "cuda": "gpu", "cpu": "cpu"}
# The TPU compiler's errors if arguments and temporaries together are too large, and if temporaries alone are.
_FULL = (
    re.compile(r"Used ([\d.]+[KMGT]?) of ([\d.]+[KMGT]?) hbm"),
    re.compile(r"total memory required for [\w ]+ \(([\d.]+[KMGT]?)\) exceeds available \w+ \(([\d.]+[KMGT]?)\)"),
)


@dataclasses.dataclass(frozen=True)
class MemoryAnalysis:
    """The compiler's count of a program's memory on one device, under the names that JAX gives them.

    `peak_memory_in_bytes` is the whole need of the program; it is 0 if the compiler does not report it, since the
    numbers of CPU compilers leave out temporaries. A TPU compiler also counts temporaries that share memory with
    arguments and results, so that arguments, temporaries and results add up to more than the program needs.
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
        """The bytes that the program needs at its worst moment, as far as the compiler reports them."""
        return self.peak_memory_in_bytes or (
            self.argument_size_in_bytes + self.output_size_in_bytes - self.alias_size_in_bytes + self.temp_size_in_bytes
        )


_COUNTED = [one for one in dataclasses.fields(MemoryAnalysis) if one.default is dataclasses.MISSING]


def memory_of(compiled: Any) -> MemoryAnalysis:
    """The memory analysis of a compiled step, whether JAX or `compile_for` compiled it."""
    found = compiled.memory_analysis()
    if isinstance(found, MemoryAnalysis):
        return found
    devices = [device for one in jax.tree.leaves(compiled.input_shardings) for device in one.device_set]
    sizes = {one.name: int(getattr(found, one.name)) for one in _COUNTED}
    # JAX 0.9 does not pass the peak on.
    peak = int(getattr(found, "peak_memory_in_bytes", 0)) if any(one.platform == "tpu" for one in devices) else 0
    if peak:  # the compiler counts arrays in host memory with it
        peak -= found.host_argument_size_in_bytes + found.host_output_size_in_bytes + found.host_temp_size_in_bytes
        peak += found.host_alias_size_in_bytes
    return MemoryAnalysis(**sizes, peak_memory_in_bytes=peak)


@dataclasses.dataclass(frozen=True)
class CompiledFor:
    """A step compiled for a topology; made by [`shardfx.cost.compile_for`][].

    [`shardfx.cost.traffic`][] and [`shardfx.cost.fit`][] read it like a program that JAX compiled. It cannot run. It is
    plain data, so `pickle` can store it in a file.

    **Arguments:**

    - `text`: the text of the optimized program.
    - `memory`: the compiler's count.
    - `mesh`: the mesh, with its slices.
    - `argument_paths`: the path of each array, with its argument's name in front, by its name in the text.
    - `target`: the target that it was compiled for.
    - `chip`: the chip of the target; `None` if it is not known.
    - `seconds`: seconds that the compiler took.
    - `device_ids`: the ids of the devices that it was compiled for, in the order of the mesh.
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

    @property
    def input_shardings(self) -> tuple[NamedSharding]:
        """One sharding on the program's mesh, so that code which reads the mesh from a compiled step's shardings finds
        it.
        """
        return (NamedSharding(self.mesh.abstract(), jax.P()),)

    def as_text(self) -> str:
        """The text of the optimized program."""
        return self.text

    def memory_analysis(self) -> MemoryAnalysis:
        """The compiler's count of memory on one device."""
        return self.memory


def compile_for(
    step: object,
    *args: object,
    target: str | Mesh | Sequence[object] = "tpu:v5e:4x4",
    mesh: MeshSpec | None = None,
) -> CompiledFor:
    """Compiles a step for a topology whose devices are not present, for [`shardfx.cost.traffic`][] and
    [`shardfx.cost.fit`][] to read.

    The TPU's own compiler runs, from the libtpu wheel, on any machine: `pip install "shardfx[aot]"`. A model of many
    different layers takes minutes. To see what a layer sends, a `scan` over layers, or two layers instead of eighty, is
    enough.

    **Arguments:**

    - `step`, `args`: as in [`shardfx.cost.estimate`][]. A plan that the step closes over must have no devices
        ([`shardfx.ShardPlan.off`][]) or the devices of the target.
    - `target`: a TPU topology such as "tpu:v5p:4x4x4"; "cpu" for this machine's (emulated) CPU devices; or devices, or
        a Mesh of them.
    - `mesh`: the mesh of the arguments with its slices, which the arguments' shardings do not hold.

    **Returns:**

    A [`shardfx.cost.CompiledFor`][].

    **Raises:**

    `MeshError` for a target that is unknown or has too few devices, or whose compiler is not installed (the message
    says what to install); `OutOfMemoryError` if the compiler reports that the program needs more memory than a device
    has; JAX's own errors for a step that it cannot lower or compile.

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
    made = step_of(step, args, mesh)
    on, name = _mesh_of(target, made.mesh)
    devices, chip = tuple(on.devices.flat), None
    lowered = made.lowered(_PLATFORMS.get(devices[0].platform, "cpu"))
    start = time.perf_counter()
    # JAX compiles a program that was lowered without devices with the default platform's client, even if it is for
    # other devices.
    lowered._lowering.compile_args["backend"] = devices[0].client
    program = compiled(lowered, devices)
    seconds = time.perf_counter() - start
    paths = {one.name: made.path(one.name) for one in made.parameters[0]}
    ids = tuple(int(device.id) for device in devices)
    with contextlib.suppress(ChipError):
        chip = chips.find(devices[0].device_kind)
    return CompiledFor(program.as_text(), memory_of(program), made.mesh, paths, name, chip, seconds, ids)


def compiled(lowered: Any, devices: Sequence[Any]) -> Any:
    """The compiled program; raises `OutOfMemoryError` if it needs more memory than a device has."""
    try:
        return lowered.compile(device_assignment=tuple(devices))
    except jax.errors.JaxRuntimeError as error:
        text = str(error)
        if not text.startswith("RESOURCE_EXHAUSTED"):
            raise
        sizes = next((one.groups() for form in _FULL if (one := form.search(text))), ())
        needed, limit = map(_bytes_of, sizes) if sizes else (None, None)
        raise OutOfMemoryError(
            f"the program does not fit a device: its compiler needs {' of '.join(sizes) or 'more than there is'}. "
            "`shardfx.cost.fit(step, *args, chip=...)` says what takes the memory, and which single change would make "
            "it fit.",
            needed,
            limit,
        ) from error


def _bytes_of(text: str) -> int:
    """The bytes of a size as XLA writes it, such as "16.18G"."""
    return int(float(text.rstrip("KMGT")) * 2 ** (10 * max(0, " KMGT".find(text[-1]))))


def _mesh_of(target: str | Mesh | Sequence[object], spec: MeshSpec) -> tuple[Mesh, str]:
    if isinstance(target, Mesh):
        return target, target.devices.flat[0].device_kind
    if isinstance(target, str) and target.partition(":")[0] != "cpu":
        return tpu.mesh_of(target, spec), target
    if not isinstance(target, Iterable):
        raise MeshError(
            f'`target={target!r:.80}` is neither a slice, a mesh nor devices; write `target="tpu:v5e:2x4"`, '
            '`target="cpu"`, or `target=jax.devices()`.'
        )
    devices: list[Any] = jax.devices("cpu")[: spec.size] if isinstance(target, str) else list(target)
    return spec.build(devices), devices[0].device_kind

"""What a step should send, from XLA's own partitioner: nothing is compiled to the end."""

from collections.abc import Sequence

from jax.sharding import AbstractMesh, Mesh

from .._ground.errors import MeshError, ProgramError
from .._step import MOST_DEVICES, Platform, Step, step_of
from ..topology import MeshSpec
from ._after import as_compiled
from ._hlo_text import parse_hlo
from ._shrunk import carried_on
from ._traffic import read
from ._traffic_rows import Traffic, largest_first


# Larger meshes are read on smaller ones: XLA takes 3 s for 8,192 devices, and 0.1 s for some hundred.
DIRECT, LARGEST = 2048, 512
# What it does depends on how large the parts are, and sends as many bytes.
SIZED = ("windowed einsum",)
# It scatters sums of whole tiles: where the parts of a smaller mesh are no larger, no sum is taken as scattered.
TILED = "tpu-all-reduce-scatter-fusion"
COMPILERS: tuple[Platform, ...] = ("tpu", "gpu", "cpu")


def estimate(
    step: object, *args: object, compiler: Platform | str = "tpu", mesh: MeshSpec | Mesh | AbstractMesh | None = None
) -> Traffic:
    """What a step should send, row by row, without compiling it and without its devices.

    The step is traced and lowered for a platform, and XLA's own partitioner makes the program of one device. That text
    is read as [`shardfx.cost.traffic`][] reads a compiled program. What the platform's compiler does to it afterwards,
    such as moving a reduction out of a loop, is applied as far as compiled programs show it. [`shardfx.cost.compare`][]
    says where an estimate and a compiled program differ.

    **Arguments:**

    - `step`: a function of trees; or what `jax.jit`, `equinox.filter_jit` or [`shardfx.filter_jit`][] returned, whose
        shardings and donation count; or what its `.trace` returned, alone.
    - `args`: its arguments: arrays or structs, as `plan.structs`. What is no array stays as it is. Their shardings say
        how they lie. Results are free where nothing says how they lie, as in JAX.
    - `compiler`: "tpu", "gpu" or "cpu".
    - `mesh`: whose axes the rows name; that of the arguments if not given. A MeshSpec with `dcn` also says what crosses
        slices.

    **Returns:**

    A [`shardfx.cost.Traffic`][].

    **Raises:**

    `MeshError` where nothing has a mesh; `PlanMismatchError` for a plan in the place of an argument; `ProgramError`
    where XLA cannot partition the step; what `step` raises when it is traced.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        from shardfx import MeshSpec, PathRules, plan
        from shardfx.cost import estimate

        mesh = MeshSpec({"fsdp": 8})  # no devices
        w = jax.ShapeDtypeStruct((64, 256), jnp.float32)
        x = jax.ShapeDtypeStruct((4096, 64), jnp.float32)
        w, x = (plan(a, mesh, paths=PathRules.parse(".*->fsdp")).structs for a in (w, x))
        (row,) = estimate(lambda w, x: x @ w, w, x, compiler="cpu").rows
        assert (row.kind, row.axes) == ("all-gather", ("fsdp",))
        assert row.wire_bytes == 64 * 256 * 4 * 7 // 8
        ```
    """
    platform = platform_of(compiler)
    return estimated(step_of(step, args, mesh), platform)


def platform_of(compiler: Platform | str) -> Platform:
    """The platform of a compiler's name; `MeshError` for another name."""
    found: Platform | None = next((one for one in COMPILERS if one == compiler), None)
    if found is None:
        raise MeshError(f"there is no compiler {compiler!r:.60}; `compiler` is one of {', '.join(COMPILERS)}.")
    return found


def estimated(step: Step, compiler: Platform) -> Traffic:
    """The same for a step that is traced already."""
    if step.mesh.size > DIRECT:
        for without in (SIZED, (*SIZED, TILED)):
            try:
                return carried_on(step.mesh, LARGEST, lambda mesh: _read(step, compiler, mesh, without).rows)  # noqa: B023
            except ProgramError:
                if without != SIZED and step.mesh.size > MOST_DEVICES:
                    raise
    return largest_first(_read(step, compiler, step.jax_mesh))


def _read(step: Step, compiler: Platform, mesh: MeshSpec | Mesh | AbstractMesh, without: Sequence[str] = ()) -> Traffic:
    """The rows in the order of the program, where some of the compiler's passes are left out."""
    module = parse_hlo(step.partitioned(compiler, mesh=MeshSpec.of(mesh)))
    return read(as_compiled(module, compiler, without=without), mesh, step.leaves)

"""A step and its arguments, traced once, to be partitioned for any platform, mesh and
shardings.
"""

import dataclasses
import functools as ft
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
from jax.extend.mlir import ir
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from .._ground.errors import (
    MeshError,
    ProgramError,
)
from .._ground.tree import flatten
from ..topology import MeshSpec
from .callbacks import callbacks_in, lower
from .libtpu import (
    TpuCompiled,
    TpuDumps,
    TpuProgram,
    TpuSlice,
    TpuTexts,
    recent_tpu_dumps,
    tpu_compiled,
    tpu_partitioned,
)
from .lowered import (
    Dims,
    Module,
    Parameter,
    bytecode,
    mesh_of_arguments,
    meshes,
    parameters,
    resharded,
)
from .partitioner import Programs, partitioned, programs, propagated


Platform = Literal["tpu", "gpu", "cpu"]
# The platforms, by JAX's names for lowering.
_PLATFORMS: Mapping[Platform, str] = {"tpu": "tpu", "gpu": "cuda", "cpu": "cpu"}
# A part of JAX's error.
_NEEDS_DEVICES = "require devices to be present during lowering"
COMPILERS: tuple[Platform, ...] = ("tpu", "gpu", "cpu")


class _StepDims(NamedTuple):
    """The mesh axes of the dimensions of each argument and of each result; `None` where
    the compiler may choose them.
    """

    arguments: Sequence[Dims | None]
    results: Sequence[Dims | None]


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """A step that is traced once, to be partitioned for any platform, mesh and
    shardings; made by `step_of`.

    - `traced`: the result of `jax.jit(f).trace(...)`.
    - `args`: the arguments of the step.
    - `paths`: the path of each array, by its name in the text of programs; empty if
      paths follow from JAX's names.
    - `given_mesh`: the mesh that the caller passed, or the mesh of the caller's plans;
      `None` without either.
    - `named_results`: the path of each result; empty if paths follow from the tree that
      JAX's trace returns.
    """

    traced: Any
    args: tuple[object, ...]
    paths: Mapping[str, str]
    given_mesh: MeshSpec | Mesh | AbstractMesh | None
    named_results: tuple[str, ...] = ()

    @ft.cached_property
    def result_paths(self) -> tuple[str, ...]:
        """The path of each array that the step returns, within the step's results."""
        if self.named_results:
            return self.named_results
        info = flatten(self.traced.out_info)
        pairs = zip(info.paths, info.is_array, strict=True)
        return tuple(path for path, is_array in pairs if is_array)

    @ft.cached_property
    def mesh(self) -> MeshSpec:
        return MeshSpec.of(self.jax_mesh)

    @ft.cached_property
    def jax_mesh(self) -> MeshSpec | Mesh | AbstractMesh:
        """The mesh that the caller passed, or that of the arguments. Only a Mesh shows
        the slice of each device.
        """
        mesh = self._mesh_of_arrays
        if mesh is None:
            raise MeshError(
                "the step has no mesh: none of its arguments has a sharding; pass"
                " structs with shardings, as `plan.structs` are, or a step by"
                " `jax.jit(step, in_shardings=plan.shardings)`."
            )
        return mesh

    @ft.cached_property
    def _mesh_of_arrays(self) -> MeshSpec | Mesh | AbstractMesh | None:
        """The mesh that the caller passed, or that of the first argument or result with
        a sharding; `None` if there is none.
        """
        if self.given_mesh is not None:
            return self.given_mesh
        for leaf in jax.tree.leaves(self.args):
            sharding = sharding_of(leaf)
            if sharding is not None:
                return sharding.mesh
        module = self.module(self._any_platform)
        name = mesh_of_arguments(module)
        return None if name is None else MeshSpec(meshes(module)[name])

    @property
    def is_without_mesh(self) -> bool:
        """Whether no mesh is named: not by the caller, the arguments or the results,
        and not within the step.
        """
        if self._mesh_of_arrays is not None:
            return False
        return not any(meshes(self.module(self._any_platform)).values())

    @property
    def on_one_device(self) -> "Step":
        """The step, which names no mesh, on a mesh of one device. What JAX lowered it
        to stays.
        """
        step = dataclasses.replace(self, given_mesh=MeshSpec({"device": 1}))
        step._lowered.update(self._lowered)
        return step

    def lowered(self, platform: Platform) -> Any:
        """The step as JAX lowers it for a platform; cached."""
        if platform not in self._lowered:
            try:
                self._lowered[platform] = lower(self.traced, _PLATFORMS[platform])
            except (ValueError, NotImplementedError) as error:
                where = (
                    "only for devices of this process, such as a `custom_partitioning`,"
                    " whose Python code partitions it"
                )
                if isinstance(error, NotImplementedError):
                    where = f"for other platforms only ({error})"
                elif _NEEDS_DEVICES not in str(error):
                    raise
                raise ProgramError(
                    f"the step has an operation that JAX lowers {where}; for CPUs pass"
                    ' `compiler="cpu"`, or compile the step for devices, and read that:'
                    " `compiled = jax.jit(step).lower(*args).compile()`, then"
                    " `shardfx.cost.traffic(compiled)` and `shardfx.cost.fit(compiled,"
                    " chip=...)`."
                ) from error
        return self._lowered[platform]

    @ft.cached_property
    def callbacks(self) -> tuple[str, ...]:
        """The step's callbacks to Python, each with its source line."""
        return callbacks_in(self.traced.jaxpr)

    def module(self, platform: Platform) -> Module:
        return self.lowered(platform).compiler_ir("stablehlo")

    @ft.cached_property
    def arguments(self) -> tuple[Parameter, ...]:
        """The arrays that the program takes, in the order of its parameters. If the
        user jitted the function, JAX drops the arguments that no operation reads.
        """
        return tuple(
            parameter._replace(path=self.path(parameter.name))
            for parameter in self.parameters[0]
        )

    @ft.cached_property
    def parameters(self) -> tuple[tuple[Parameter, ...], tuple[Parameter, ...]]:
        """The arrays that the program takes and the arrays that it returns. They are
        the same for each platform.
        """
        return parameters(self.module(self._any_platform))

    @property
    def _any_platform(self) -> Platform:
        """A platform for which the step was lowered before. If there is none, "tpu", or
        "cpu" for a step with an operation that TPUs lack.
        """
        for platform in self._lowered:
            return platform
        return self.platform_with_operations("tpu")

    def platform_with_operations(self, platform: Platform) -> Platform:
        """`platform`, or "cpu" for a step with an operation that `platform` lacks."""
        try:
            self.lowered(platform)
        except ProgramError:
            return "cpu"
        return platform

    @ft.cached_property
    def _lowered(self) -> dict[Platform, Any]:
        return {}

    def path(self, name: str) -> str:
        """The path of an array, such as `params/w`, from its name in the program."""
        return self.paths.get(name) or _path_of(name)

    @ft.cached_property
    def leaves(self) -> dict[str, str]:
        """The path of each array within its argument, by its name in the program. An
        argument that is one array has its own name as path.
        """
        paths = {
            parameter.name: self.path(parameter.name)
            for parameter in self.parameters[0]
        }
        return {name: path.partition("/")[2] or path for name, path in paths.items()}

    def partitioned(
        self,
        platform: Platform,
        *,
        mesh: MeshSpec | None = None,
        arguments: Sequence[Dims | None] | None = None,
        results: Sequence[Dims | None] | None = None,
        module: Module | None = None,
    ) -> str:
        """The HLO text of one device's program after XLA's partitioner; for CPUs, after
        all passes of the compiler.

        **Arguments:**

        - `platform`: the platform for which the step is lowered.
        - `mesh`, `arguments`, `results`: another mesh, and other shardings of
          `Step.arguments` and of the results. The step is not traced or lowered again.
        - `module`: a StableHLO module for this platform, to use instead of the step's
          own.

        **Raises:**

        `ProgramError` if XLA refuses the program, or if the step constrains its arrays
        over another mesh than `mesh`; `MeshError` for more than 8,192 devices.
        """
        mesh = self.mesh if mesh is None else mesh
        module_bytes = self._bytecode_for(
            platform=platform,
            mesh=mesh,
            arguments=arguments,
            results=results,
            module=module,
        )
        return partitioned(module_bytes, mesh.size, finished=platform == "cpu")

    def programs(
        self,
        platform: Platform,
        *,
        mesh: MeshSpec | None = None,
        arguments: Sequence[Dims | None] | None = None,
        results: Sequence[Dims | None] | None = None,
    ) -> Programs:
        """The step's program before and after XLA's partitioner. The arguments and
        errors are those of `Step.partitioned`.
        """
        mesh = self.mesh if mesh is None else mesh
        module_bytes = self._bytecode_for(
            platform=platform,
            mesh=mesh,
            arguments=arguments,
            results=results,
            module=None,
        )
        return programs(module_bytes, mesh.size)

    def tpu_dumps(
        self,
        slices: TpuSlice,
        order: Sequence[int],
        *,
        arguments: Sequence[Dims | None] | None = None,
        results: Sequence[Dims | None] | None = None,
        module: Module | None = None,
    ) -> TpuDumps:
        """What libtpu dumps of the step's program for slices that are not there, with
        the ids of their devices in the order of the mesh. The other arguments are those
        of `Step.partitioned`. The first access to a text raises `ProgramError` with
        libtpu's own message if it cannot compile the step.
        """
        module_bytes = self._bytecode_for(
            platform="tpu",
            mesh=self.mesh,
            arguments=arguments,
            results=results,
            module=module,
        )
        program = self._tpu_program(module_bytes, arguments, results)
        return recent_tpu_dumps(program, slices, tuple(order))

    def tpu_compiled(
        self,
        slices: TpuSlice,
        order: Sequence[int],
    ) -> TpuCompiled | TpuTexts:
        """The step's program compiled by libtpu; what libtpu dumped, of a step that
        does not fit. The arguments and errors are those of `Step.tpu_dumps`.
        """
        module_bytes = self._bytecode_for(
            platform="tpu", mesh=self.mesh, arguments=None, results=None, module=None
        )
        return tpu_compiled(self._tpu_program(module_bytes, None, None), slices, order)

    def tpu_partitioned(
        self,
        slices: TpuSlice,
        order: Sequence[int],
        *,
        mesh: MeshSpec | None = None,
        arguments: Sequence[Dims | None] | None = None,
        results: Sequence[Dims | None] | None = None,
    ) -> str:
        """The HLO text of one device's program as libtpu's own partitioner leaves it,
        with all numbers of its constants. `mesh` is another mesh, as in
        `Step.partitioned`; the other arguments and the errors are those of
        `Step.tpu_dumps`.
        """
        mesh = self.mesh if mesh is None else mesh
        module_bytes = self._bytecode_for(
            platform="tpu", mesh=mesh, arguments=arguments, results=results, module=None
        )
        program = self._tpu_program(module_bytes, arguments, results)
        return tpu_partitioned(program, slices, order)

    def _tpu_program(
        self,
        module_bytes: bytes,
        arguments: Sequence[Dims | None] | None,
        results: Sequence[Dims | None] | None,
    ) -> TpuProgram:
        """What libtpu is asked to compile: the module's bytecode, with what it may
        choose and the options of the step. `None` for `arguments` or `results` stands
        for the step's own.
        """
        dims = self._dims_or_own(arguments, results)
        return TpuProgram(
            module=module_bytes,
            free_arguments=tuple(array_dims is None for array_dims in dims.arguments),
            free_results=tuple(array_dims is None for array_dims in dims.results),
            options=tuple(self.lowered("tpu")._lowering._compiler_options_kvs),
        )

    def _dims_or_own(
        self,
        arguments: Sequence[Dims | None] | None = None,
        results: Sequence[Dims | None] | None = None,
    ) -> _StepDims:
        """The shardings of arguments and results; the step's own for `None`."""
        taken, returned = self.parameters
        if arguments is None:
            arguments = [parameter.dims for parameter in taken]
        if results is None:
            results = [parameter.dims for parameter in returned]
        return _StepDims(arguments, results)

    def _bytecode_for(
        self,
        platform: Platform,
        mesh: MeshSpec,
        arguments: Sequence[Dims | None] | None,
        results: Sequence[Dims | None] | None,
        module: Module | None,
    ) -> bytes:
        """The bytecode of the step for these shardings, as XLA's partitioner takes it."""
        module = self.module(platform) if module is None else module
        has_own_dims = arguments is None and results is None
        if has_own_dims and dict(mesh.shape) == dict(self.mesh.shape):
            return bytecode(module)
        dims = self._dims_or_own(arguments, results)
        return resharded(module, dict(mesh.shape), dims.arguments, dims.results)

    def propagated(self, platform: Platform, *, module: Any = None) -> Any:
        """The step's StableHLO module after Shardy's propagation, with the sharding of
        each array and the origins of its mesh axes. `module` replaces the step's own
        module.
        """
        module = self.module(platform) if module is None else module
        dims = self._dims_or_own()
        text = propagated(
            bytecode(module), dict(self.mesh.shape), dims.arguments, dims.results
        )
        with module.context:
            return ir.Module.parse(text)


def platform_of(compiler: Platform | str) -> Platform:
    """The platform with the name `compiler`; "tpu" for the name of a slice, such as
    "tpu:v5p:4x4x4". Raises `MeshError` for an unknown name.
    """
    name = str(compiler).partition(":")[0]
    for platform in COMPILERS:
        if platform == name:
            return platform
    raise MeshError(
        f"there is no compiler {compiler!r:.60}; `compiler` is one of"
        f" {', '.join(COMPILERS)}."
    )


def sharding_of(leaf: object) -> NamedSharding | None:
    """The sharding of an array or struct on a mesh; `None` of anything else."""
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return None
    sharding = leaf.sharding
    if not isinstance(sharding, NamedSharding) or sharding.mesh.empty:
        return None
    return sharding


def _path_of(name: str) -> str:
    """The path of an array from JAX's name for it: `params['layers'][0].w` is
    `params/layers/0/w`.
    """
    return re.sub(r"['\"]?\]", "", re.sub(r"\[['\"]?|\.", "/", name))

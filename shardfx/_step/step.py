"""A step and its arguments, traced once, to be partitioned for any platform, mesh and
shardings.
"""

import dataclasses
import functools as ft
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.extend.mlir import ir
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from .._ground.errors import (
    LeafTypeError,
    MeshError,
    PlanMismatchError,
    ProgramError,
)
from .._ground.purity import (
    WatchedArguments,
    leaves_arrays,
    may_be_updated,
    raise_if_left,
    raise_if_updated,
)
from .._ground.tree import flatten
from .._plan import ShardPlan
from ..topology import MeshSpec
from .callbacks import callbacks_in, lower
from .libtpu import (
    TpuCompiled,
    TpuProgram,
    TpuSlice,
    TpuTexts,
    tpu_compiled,
    tpu_partitioned,
    tpu_texts,
)
from .lowered import (
    Dims,
    Module,
    Parameter,
    bytecode,
    mesh_of_arguments,
    meshes,
    opened,
    parameters,
    resharded,
)
from .partitioner import Programs, partitioned, programs, propagated


Platform = Literal["tpu", "gpu", "cpu"]
# The platforms, by JAX's names for lowering.
_PLATFORMS: Mapping[Platform, str] = {"tpu": "tpu", "gpu": "cuda", "cpu": "cpu"}
# The name of an array that a function of `flax.nnx.jit` takes, as "model.states[0][1]".
_OF_MODULE = re.compile(r"(\w+)\.states\[")
# A part of JAX's error.
_NEEDS_DEVICES = "require devices to be present during lowering"
COMPILERS: tuple[Platform, ...] = ("tpu", "gpu", "cpu")


@runtime_checkable
class _JaxTraced(Protocol):
    """The traced step that the `trace` method of a function from `jax.jit` or
    `shardfx.filter_jit` returns.
    """

    jaxpr: Any

    def lower(self, *, lowering_platforms: object) -> Any: ...


@runtime_checkable
class _FlaxTraced(Protocol):
    """The traced step that `trace` of a function from `flax.nnx.jit` returns. `traced`
    is JAX's traced step, which takes and returns the state of modules.
    """

    traced: Any
    jit_wrapped: Any


@runtime_checkable
class JaxJitted(Protocol):
    """The jitted function that `jax.jit` and `shardfx.filter_jit` return."""

    def trace(self, *args: object) -> Any: ...


@runtime_checkable
class EquinoxJitted(Protocol):
    """The jitted function that `equinox.filter_jit` returns. Its own `lower` takes no
    `jax.ShapeDtypeStruct`. `donate_first` says whether it donates its first argument,
    and `donate_rest` whether it donates the others.
    """

    __wrapped__: Any
    donate_first: bool
    donate_rest: bool


@runtime_checkable
class _NamedTrace(Protocol):
    """The traced step that `trace` of a function from `shardfx.filter_jit` returns.
    `arrays` has the name and the path of each array, `results` the path of each result,
    `traced` is JAX's traced step, and `mesh` is the mesh of the plans in its shardings,
    if it has any.
    """

    traced: Any
    arrays: tuple[Any, ...]
    results: tuple[Any, ...]
    mesh: MeshSpec | None


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
            if (sharding := _sharding_of(leaf)) is not None:
                return sharding.mesh
        module = self.module(self._any)
        name = mesh_of_arguments(module)
        return None if name is None else MeshSpec(meshes(module)[name])

    @property
    def is_without_mesh(self) -> bool:
        """Whether no mesh is named: not by the caller, the arguments or the results,
        and not within the step.
        """
        if self._mesh_of_arrays is not None:
            return False
        return not any(meshes(self.module(self._any)).values())

    def lowered(self, platform: Platform) -> Any:
        """The step as JAX lowers it for a platform; cached."""
        if platform not in self._lowered:
            try:
                self._lowered[platform] = lower(self.traced, _PLATFORMS[platform])
            except ValueError as error:
                if _NEEDS_DEVICES not in str(error):
                    raise
                raise ProgramError(
                    "the step has an operation that JAX lowers only for devices of this"
                    " process, such as a `custom_partitioning`, whose Python code"
                    " partitions it; compile the step for devices, and read that:"
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
        return parameters(self.module(self._any))

    @property
    def _any(self) -> Platform:
        """A platform for which the step was lowered before; "tpu" if there is none."""
        for platform in self._lowered:
            return platform
        return "tpu"

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
          `Step.arguments` and of the results. The
            step is not traced or lowered again.
        - `module`: a StableHLO module for this platform, to use instead of the step's
          own.

        **Raises:**

        `ProgramError` if XLA refuses the program, or if the step constrains its arrays
        over another mesh than `mesh`; `MeshError` for more than 8,192 devices.
        """
        mesh = self.mesh if mesh is None else mesh
        text = self._bytecode(platform, mesh, arguments, results, module)
        return partitioned(text, mesh.size, finished=platform == "cpu")

    def programs(
        self,
        platform: Platform,
        *,
        mesh: MeshSpec | None = None,
        arguments: Sequence[Dims | None] | None = None,
        results: Sequence[Dims | None] | None = None,
        module: Module | None = None,
    ) -> Programs:
        """The step's program before and after XLA's partitioner. The arguments and
        errors are those of `Step.partitioned`.
        """
        mesh = self.mesh if mesh is None else mesh
        text = self._bytecode(platform, mesh, arguments, results, module)
        return programs(text, mesh.size)

    def tpu_texts(
        self,
        slices: TpuSlice,
        order: Sequence[int],
        *,
        arguments: Sequence[Dims | None] | None = None,
        results: Sequence[Dims | None] | None = None,
        module: Module | None = None,
    ) -> TpuTexts:
        """What libtpu dumps of the step's program for slices that are not there, with
        the ids of their devices in the order of the mesh. The other arguments are those
        of `Step.partitioned`. Raises `ProgramError` with libtpu's own message if it
        cannot compile the step.
        """
        text = self._bytecode("tpu", self.mesh, arguments, results, module)
        return tpu_texts(self._tpu_program(text, arguments, results), slices, order)

    def tpu_compiled(
        self, slices: TpuSlice, order: Sequence[int]
    ) -> TpuCompiled | TpuTexts:
        """The step's program compiled by libtpu; what libtpu dumped, of a step that
        does not fit. The arguments and errors are those of `Step.tpu_texts`.
        """
        text = self._bytecode("tpu", self.mesh, None, None, None)
        return tpu_compiled(self._tpu_program(text, None, None), slices, order)

    def tpu_partitioned(self, slices: TpuSlice, order: Sequence[int]) -> str:
        """The HLO text of one device's program as libtpu's own partitioner leaves it,
        with all numbers of its constants. The arguments and errors are those of
        `Step.tpu_texts`.
        """
        text = self._bytecode("tpu", self.mesh, None, None, None)
        return tpu_partitioned(self._tpu_program(text, None, None), slices, order)

    def _tpu_program(
        self,
        text: bytes,
        arguments: Sequence[Dims | None] | None,
        results: Sequence[Dims | None] | None,
    ) -> TpuProgram:
        taken, results_of_step = self.parameters
        if arguments is None:
            arguments = [parameter.dims for parameter in taken]
        if results is None:
            results = [parameter.dims for parameter in results_of_step]
        return TpuProgram(
            module=text,
            free_arguments=tuple(dims is None for dims in arguments),
            free_results=tuple(dims is None for dims in results),
            options=tuple(self.lowered("tpu")._lowering._compiler_options_kvs),
        )

    def _bytecode(
        self,
        platform: Platform,
        mesh: MeshSpec,
        arguments: Sequence[Dims | None] | None,
        results: Sequence[Dims | None] | None,
        module: Module | None,
    ) -> bytes:
        """The bytecode of the step for these shardings, as XLA's partitioner takes it."""
        module = self.module(platform) if module is None else module
        if (
            arguments is None
            and results is None
            and dict(mesh.shape) == dict(self.mesh.shape)
        ):
            text = bytecode(module)
        else:
            taken, outputs = self.parameters
            arguments = (
                [parameter.dims for parameter in taken]
                if arguments is None
                else arguments
            )
            results = (
                [parameter.dims for parameter in outputs]
                if results is None
                else results
            )
            text = resharded(module, dict(mesh.shape), arguments, results)
        return text

    def propagated(self, platform: Platform, *, module: Any = None) -> Any:
        """The step's StableHLO module after Shardy's propagation, with the sharding of
        each array and the origins of its mesh axes. `module` replaces the step's own
        module.
        """
        module = self.module(platform) if module is None else module
        taken, outputs = (
            [parameter.dims for parameter in arrays] for arrays in self.parameters
        )
        with module.context:
            return ir.Module.parse(
                propagated(bytecode(module), dict(self.mesh.shape), taken, outputs)
            )


def step_of(
    step: object,
    args: Sequence[object],
    mesh: MeshSpec | Mesh | AbstractMesh | None = None,
) -> Step:
    """A traced step, from a function and its arguments or from a step that is traced
    already.

    **Arguments:**

    - `step`: a function; or the result of `jax.jit`, `equinox.filter_jit` or
      `filter_jit`, with its shardings and
        donation; or the result of its `.trace`, without `args`.
    - `args`: arrays or structs in any trees. Leaves that are not arrays become
      constants of the program.
    - `mesh`: the mesh of the step. It has the number of slices along each axis, which
      no argument's sharding has.

    **Raises:**

    `LeafTypeError` for a step that is no function; `PlanMismatchError` for a plan that
    is passed as an argument of the step; any error that `step` raises when it is
    traced.
    """
    for number, arg in enumerate(args):
        if any(map(_is_plan, jax.tree.leaves(arg, is_leaf=_is_plan))):
            raise PlanMismatchError(
                f"argument {number} is a plan, and a step takes arrays or structs; pass"
                " `plan.structs`, whose shardings are the plan's, or `filter_jit(step,"
                " in_shardings=plans)` with the arguments."
            )
    mesh = _mesh_of_devices(args) if mesh is None else mesh
    args = jax.tree.map(_without_devices, tuple(args))
    if isinstance(step, _FlaxTraced):
        step = step.traced
    if isinstance(step, _JaxTraced):
        if args:
            raise LeafTypeError(
                "`step` is traced already; pass it alone, without arguments."
            )
        return _named(step, (), mesh)
    function: Any = step
    if not callable(step):
        raise LeafTypeError(
            f"`step` must be a function, not {type(step).__name__}; pass the function"
            " that is jitted."
        )
    if isinstance(step, EquinoxJitted):
        return _traced(
            step.__wrapped__, args, mesh, (step.donate_first, step.donate_rest)
        )
    if isinstance(step, JaxJitted):
        traced = step.trace(*args)
        if isinstance(traced, _FlaxTraced):
            return _with_module_paths(traced.traced, tuple(args), mesh)
        inner = inspect.unwrap(function)
        if may_be_updated(args) or leaves_arrays(inner):
            # JAX has traced the function without a look at what it does beside.
            _traced(inner, args, mesh)
        if isinstance(traced, _JaxTraced):
            return _named(traced, tuple(args), mesh)
    return _traced(function, args, mesh)


def unwrapped(step: Any) -> Any:
    """The function that a jitted step jits, whose shardings do not count then."""
    return inspect.unwrap(
        step, stop=lambda function: not isinstance(function, JaxJitted)
    )


def is_traced(step: object) -> bool:
    """Whether a step is what `.trace` of a jitted function returned."""
    return isinstance(step, _JaxTraced | _FlaxTraced)


def platform_of(compiler: Platform | str) -> Platform:
    """The platform with the name `compiler`; "tpu" for the name of a slice, such as
    "tpu:v5p:4x4x4". Raises `MeshError` for an unknown name.
    """
    name = compiler.partition(":")[0]
    platform: Platform | None = next(
        (known_platform for known_platform in COMPILERS if known_platform == name), None
    )
    if platform is None:
        raise MeshError(
            f"there is no compiler {compiler!r:.60}; `compiler` is one of"
            f" {', '.join(COMPILERS)}."
        )
    return platform


def _mesh_of_devices(args: Sequence[object]) -> Mesh | None:
    """The mesh of the first array whose mesh has devices; `None` if there is no such
    array.
    """
    meshes = (
        sharding.mesh
        for leaf in jax.tree.leaves(args)
        if (sharding := _sharding_of(leaf)) is not None
    )
    return next((mesh for mesh in meshes if isinstance(mesh, Mesh)), None)


def _sharding_of(leaf: object) -> NamedSharding | None:
    sharding = (
        leaf.sharding if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) else None
    )
    return (
        sharding
        if isinstance(sharding, NamedSharding) and not sharding.mesh.empty
        else None
    )


def _without_devices(leaf: Any) -> object:
    """The `jax.ShapeDtypeStruct` of an array on the abstract mesh of its sharding, so
    that lowering needs no device.
    """
    sharding = _sharding_of(leaf)
    if sharding is None or not isinstance(sharding.mesh, Mesh):
        return leaf
    abstract = NamedSharding(
        sharding.mesh.abstract_mesh, sharding.spec, memory_kind=sharding.memory_kind
    )
    # Typed PRNG keys have no weak type.
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
    return jax.ShapeDtypeStruct(
        leaf.shape,
        leaf.dtype,
        sharding=abstract,
        weak_type=False if is_key else leaf.weak_type,
    )


def _named(traced: Any, args: tuple[object, ...], mesh: Any) -> Step:
    if isinstance(traced, _NamedTrace):
        return Step(
            traced=traced.traced,
            args=args,
            paths={array.name: array.path for array in traced.arrays},
            given_mesh=traced.mesh if mesh is None else mesh,
            named_results=tuple(result.path for result in traced.results),
        )
    return Step(traced, args, {}, mesh)


def _with_module_paths(traced: Any, args: tuple[object, ...], mesh: Any) -> Step:
    """The step of a function of `flax.nnx.jit`. It takes the arrays of each module as
    one list, which are named by their paths in the module.
    """
    names = opened(traced.jaxpr)[0].debug_info.arg_names
    lists: dict[str, list[str]] = {}
    for name in names:
        if match := _OF_MODULE.match(name):
            lists.setdefault(match[1], []).append(name)
    words = dict.fromkeys(re.split(r"[.\[]", name)[0] for name in names)
    paths: dict[str, str] = {}
    for word, arg in zip(words, args, strict=False):
        flat = flatten(arg)
        of_arrays = [
            path
            for path, is_array in zip(flat.paths, flat.is_array, strict=True)
            if is_array
        ]
        listed = lists.get(word, [])
        if len(listed) == len(of_arrays):
            paths |= {
                name: f"{word}/{path}"
                for name, path in zip(listed, of_arrays, strict=True)
            }
    return Step(traced, args, paths, mesh)


def _traced(
    fn: Callable[..., object],
    args: Sequence[object],
    mesh: Any,
    donated: tuple[bool, bool] = (False, False),
) -> Step:
    """Traces `fn`. Leaves that are not arrays become constants of the program, as in
    `equinox.filter_jit`. `donated` says whether the first argument is donated, and
    whether the others are.
    """
    flats = [flatten(arg) for arg in args]
    words = argument_names(fn, len(args))
    leaves = [
        (leaf, f"{word}/{path}" if path else word, donated[min(number, 1)])
        for number, (flat, word) in enumerate(zip(flats, words, strict=True))
        for leaf, path, is_array in zip(
            flat.leaves, flat.paths, flat.is_array, strict=True
        )
        if is_array
    ]

    def run(*arrays: object) -> object:
        rest = iter(arrays)
        trees = []
        for flat in flats:
            pairs = zip(flat.leaves, flat.is_array, strict=True)
            leaves = [next(rest) if is_array else leaf for leaf, is_array in pairs]
            trees.append(jax.tree.unflatten(flat.treedef, leaves))
        watched = WatchedArguments(trees)
        result = fn(*trees)
        raise_if_updated(run.__name__, words, watched, result)
        raise_if_left(fn, result)
        return jax.tree.map(lambda leaf: leaf if _is_array(leaf) else None, result)

    run.__name__ = run.__qualname__ = getattr(fn, "__name__", type(fn).__name__)
    gone = tuple(number for number, (_, _, is_gone) in enumerate(leaves) if is_gone)
    traced = jax.jit(run, keep_unused=True, donate_argnums=gone).trace(
        *(leaf for leaf, _, _ in leaves)
    )
    return Step(
        traced,
        tuple(args),
        {f"arrays[{number}]": path for number, (_, path, _) in enumerate(leaves)},
        mesh,
    )


def _is_plan(node: object) -> bool:
    return isinstance(node, ShardPlan)


def _is_array(leaf: object) -> bool:
    return flatten([leaf]).is_array == [True]


def argument_names(fn: Callable[..., object], count: int) -> list[str]:
    """The parameter names of the function's first `count` arguments."""
    try:
        names = [
            name
            for name, parameter in inspect.signature(fn).parameters.items()
            if parameter.kind
            in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ]
    except (TypeError, ValueError):
        names = []
    return [
        names[number] if number < len(names) else f"args[{number}]"
        for number in range(count)
    ]


def _path_of(name: str) -> str:
    """The path of an array from JAX's name for it: `params['layers'][0].w` is
    `params/layers/0/w`.
    """
    return re.sub(r"['\"]?\]", "", re.sub(r"\[['\"]?|\.", "/", name))

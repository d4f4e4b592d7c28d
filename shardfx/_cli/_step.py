"""A training step by the name that a command line gives it, and its program for CPU devices that are emulated."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax

from shardfx import MeshSpec, ShardPlan, Traffic, compile_for, estimate

from ._load import attribute, check_arguments
from ._usage import UsageError, calling


# JAX starts a thread for each emulated device.
MOST_DEVICES = 512


class Step(NamedTuple):
    """A step, its arguments as structs, and how they lie: plans, or `None` where the structs say it."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    plans: tuple[ShardPlan | None, ...]
    mesh: MeshSpec

    @property
    def laid_out(self) -> tuple[Any, ...]:
        """For each argument its plan, or the structs that say how it lies."""
        return tuple(plan or arg for plan, arg in zip(self.plans, self.args, strict=True))


def load_step(name: str, kwargs: Mapping[str, Any] | None, mesh: MeshSpec | None) -> Step:
    """The step that a function of the user's returns, and how its arguments lie.

    **Arguments:**

    - `name`: `MODULE:FUNCTION`. It returns the step and a tuple of its arguments: plans, trees of structs with
        shardings, or values that are no arrays.
    - `kwargs`: arguments for the function.
    - `mesh`: its argument `mesh`, if it has one.

    **Raises:**

    `UsageError` if there is no such function, it fails, or it returns something else.
    """
    function, args = _made(name, kwargs, mesh)
    plans = tuple(arg if isinstance(arg, ShardPlan) else None for arg in args)
    structs = tuple(arg.structs if isinstance(arg, ShardPlan) else arg for arg in args)
    return Step(function, structs, plans, _mesh_of(name, structs))


def load_bare_step(name: str, kwargs: Mapping[str, Any] | None) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The step that a function of the user's returns, and its arguments without any sharding.

    **Arguments:**

    - `name`, `kwargs`: as in `load_step`; the function takes no mesh.

    **Raises:**

    As `load_step`.
    """
    function, args = _made(name, kwargs, None)
    return function, jax.tree.map(_bare, tuple(arg.structs if isinstance(arg, ShardPlan) else arg for arg in args))


def _made(name: str, kwargs: Mapping[str, Any] | None, mesh: MeshSpec | None) -> tuple[Any, tuple[Any, ...]]:
    """What the function returns, checked."""
    found = attribute(name)
    if not callable(found):
        raise UsageError(f"`{name}` is {found!r:.60}; name a function that returns a step and its arguments")
    parameters = inspect.signature(found).parameters
    given = dict(kwargs or {})
    check_arguments(name, parameters.values(), given)
    if "mesh" in parameters and mesh is not None:
        given["mesh"] = mesh
    if "mesh" in parameters and "mesh" not in given and parameters["mesh"].default is inspect.Parameter.empty:
        raise UsageError(f"`{name}` takes a `mesh`; give one, as in --mesh data=2,fsdp=4")
    if "mesh" not in parameters and mesh is not None:
        raise UsageError(f"`{name}` takes no `mesh`, so its plans have their own; leave out --mesh")
    made = calling(f"`{name}`", lambda: found(**given))
    if not (isinstance(made, tuple) and len(made) == 2 and callable(made[0]) and isinstance(made[1], tuple)):
        form = "a step and a tuple of its arguments, as in `return train_step, (params_plan, batch_plan)`"
        raise UsageError(f"`{name}` must return {form}, not {made!r:.60}")
    return made


def _bare(leaf: Any) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf


def estimated(step: Step, compiler: Literal["cpu", "gpu", "tpu"] = "tpu") -> Traffic:
    """What the step should send, without compiling it."""
    what = "estimating the step's traffic"
    return calling(what, lambda: estimate(step.function, *step.args, plans=step.plans, compiler=compiler))


def compiled(
    step: Step,
    target: str | None = None,
    cache: str | None = None,
    tell: Callable[[str], None] | None = None,
    donate: Any = "none",
) -> Any:
    """The step's program: for a TPU slice that is not here, or for as many emulated CPU devices as its mesh has.

    **Arguments:**

    - `step`: the step.
    - `target`: such as "tpu:v5e:4x4"; `None` for CPU devices.
    - `cache`: a directory that keeps programs.
    - `tell`: is told how long it has been compiling.
    - `donate`: as in `shardfx.compile_for`.

    **Raises:**

    `UsageError` where JAX has started with fewer devices, the step does not compile, or nothing can compile for it.
    """
    if target is None:
        emulate(step.mesh.size, f"the mesh {step.mesh} has")
    if "lower" in dir(step.function):
        if target is not None:
            raise UsageError("--target needs a step that is not jitted; return the function itself")
        return calling("compiling the step", lambda: _lowered(step).compile())
    out, where = _outputs(step), target or "cpu"
    given = {"args": step.args, "out_shardings": out, "cache": cache, "progress": tell, "donate": donate}
    return calling("compiling the step", lambda: compile_for(step.function, step.laid_out, where, **given))


def emulate(count: int, what: str = "the target has") -> None:
    """Has JAX start with so many CPU devices.

    **Raises:**

    `UsageError` where they are too many, or JAX has started with fewer.
    """
    if count > MOST_DEVICES:
        hint = f"at most {MOST_DEVICES} can be emulated; `shardfx traffic --how estimate` needs none"
        raise UsageError(f"{what} {count:,} devices; {hint}")
    try:
        # Read when JAX starts a backend, which nothing may have done yet.
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        pass
    if len(jax.devices()) < count:
        raise UsageError(f"JAX has started with {len(jax.devices())} devices, and {what} {count}")


def _lowered(step: Step) -> Any:
    """A step that is jitted already, for this machine's devices."""
    mesh = step.mesh.build(jax.devices()[: step.mesh.size])
    function: Any = step.function
    return function.lower(*jax.tree.map(lambda leaf: _on(leaf, mesh), step.args))


def _mesh_of(name: str, structs: Any) -> MeshSpec:
    found = {
        MeshSpec.of(leaf.sharding.mesh): None
        for leaf in jax.tree.leaves(structs)
        if isinstance(leaf, jax.ShapeDtypeStruct) and isinstance(leaf.sharding, jax.NamedSharding)
    }
    if len(found) != 1:
        meshes = f"several meshes, {' and '.join(map(str, found))}" if found else "no mesh"
        raise UsageError(f"the arguments of `{name}` are on {meshes}; make their plans on one")
    return next(iter(found))


def _on(leaf: Any, mesh: jax.sharding.Mesh) -> Any:
    if not isinstance(leaf, jax.ShapeDtypeStruct) or not isinstance(leaf.sharding, jax.NamedSharding):
        return leaf
    sharding = jax.NamedSharding(mesh, leaf.sharding.spec, memory_kind=leaf.sharding.memory_kind)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _outputs(step: Step) -> Any:
    """For each result that looks like an argument, as updated parameters do, the plan of that argument."""
    made = calling("tracing the step", lambda: eqx.filter_eval_shape(step.function, *step.args))
    results = made if isinstance(made, tuple) else (made,)
    plans = tuple(_like(result, step) for result in results)
    return plans if isinstance(made, tuple) else plans[0]


def _like(result: Any, step: Step) -> ShardPlan | None:
    for arg, plan in zip(step.args, step.plans, strict=True):
        if jax.tree.leaves(arg) and _shapes(arg) == _shapes(result):
            return plan
    return None


def _shapes(tree: Any) -> Any:
    leaves, treedef = jax.tree.flatten(eqx.filter(tree, _is_array))
    return treedef, [(leaf.shape, leaf.dtype) for leaf in leaves]


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct) or eqx.is_array(leaf)

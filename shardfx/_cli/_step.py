"""A training step by the name that a command line gives it, and its program for CPU devices that are emulated."""

import functools as ft
import inspect
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax

from shardfx import MeshSpec, chips
from shardfx.cost import Traffic, compile_for, estimate

from ._load import attribute, check_arguments
from ._usage import UsageError, calling
from ._words import literals


# JAX starts a thread for each emulated device.
MOST_DEVICES = 512


class LoadedStep(NamedTuple):
    """A step, its arguments as structs with shardings, and the mesh that they lie on."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    mesh: MeshSpec


def load_step(name: str, kwargs: str | None, mesh: MeshSpec | str | None) -> LoadedStep:
    """The step that a function of the user's returns, and its arguments.

    **Arguments:**

    - `name`: `MODULE:FUNCTION`. It returns the step and a tuple of its arguments: trees of structs with shardings, as
        `plan.structs`, or values that are no arrays.
    - `kwargs`: arguments for the function, as `literals` reads them.
    - `mesh`: its argument `mesh`, if it has one; text is read.

    **Raises:**

    `UsageError` if there is no such function, it fails, or it returns something else.
    """
    if isinstance(mesh, str):
        mesh = calling("reading --mesh", ft.partial(MeshSpec.parse, mesh))
    function, args = _made(name, kwargs, mesh)
    return LoadedStep(function, args, _mesh_of(name, args) if mesh is None else mesh)


def load_bare_step(name: str, kwargs: str | None) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The step that a function of the user's returns, and its arguments without any sharding.

    **Arguments:**

    - `name`, `kwargs`: as in `load_step`; the function takes no mesh.

    **Raises:**

    As `load_step`.
    """
    function, args = _made(name, kwargs, None)
    return function, jax.tree.map(_bare, args)


def _made(name: str, kwargs: str | None, mesh: MeshSpec | None) -> tuple[Any, tuple[Any, ...]]:
    """What the function returns, checked."""
    found = attribute(name)
    if not callable(found):
        raise UsageError(f"`{name}` is {found!r:.60}; name a function that returns a step and its arguments")
    parameters = inspect.signature(found).parameters
    given = literals(kwargs, "kwargs")
    check_arguments(name, parameters.values(), given)
    if "mesh" in parameters and mesh is not None:
        given["mesh"] = mesh
    if "mesh" in parameters and "mesh" not in given and parameters["mesh"].default is inspect.Parameter.empty:
        raise UsageError(f"`{name}` takes a `mesh`; give one, as in --mesh data=2,fsdp=4")
    if "mesh" not in parameters and mesh is not None:
        raise UsageError(f"`{name}` takes no `mesh`, so its plans have their own; leave out --mesh")
    made = calling(f"`{name}`", lambda: found(**given))
    if not (isinstance(made, tuple) and len(made) == 2 and callable(made[0]) and isinstance(made[1], tuple)):
        form = "a step and a tuple of its arguments, as in `return train_step, (params_plan.structs, batch)`"
        raise UsageError(f"`{name}` must return {form}, not {made!r:.60}")
    return made


def _bare(leaf: object) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf


def chip_of(name: str) -> chips.Chip:
    """The chip that --chip names."""
    return calling("reading --chip", ft.partial(chips.find, name))


def estimated(step: LoadedStep, compiler: Literal["cpu", "gpu", "tpu"] = "tpu") -> Traffic:
    """What the step should send, without compiling it."""
    given = {"compiler": compiler, "mesh": step.mesh}
    return calling("estimating the step's traffic", lambda: estimate(step.function, *step.args, **given))


def compiled(step: LoadedStep, target: str | None = None) -> Any:
    """The step's program: for a TPU slice that is not here, or for as many emulated CPU devices as its mesh has.

    **Arguments:**

    - `step`: the step.
    - `target`: such as "tpu:v5e:4x4"; `None` for CPU devices.

    **Raises:**

    `UsageError` where JAX has started with fewer devices, the step does not compile, or nothing can compile for it.
    """
    if target is None:
        emulate(step.mesh.size, f"the mesh {step.mesh} has")
    given = {"target": target or "cpu", "mesh": step.mesh}
    return calling("compiling the step", lambda: compile_for(step.function, *step.args, **given))


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


def _mesh_of(name: str, structs: object) -> MeshSpec:
    found = {
        MeshSpec.of(leaf.sharding.mesh): None
        for leaf in jax.tree.leaves(structs)
        if isinstance(leaf, jax.ShapeDtypeStruct) and isinstance(leaf.sharding, jax.NamedSharding)
    }
    if len(found) != 1:
        meshes = f"several meshes, {' and '.join(map(str, found))}" if found else "no mesh"
        raise UsageError(f"the arguments of `{name}` are on {meshes}; plan them on one")
    return next(iter(found))

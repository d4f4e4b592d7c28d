"""A note on an error of JAX's about types on Explicit axes: what the mesh has, and the
calls that mend the step.
"""

import contextlib
import re
from collections.abc import Sequence
from typing import Any

import jax


# JAX does not export the classes of these errors.
_TYPE_ERRORS = ("ShardingTypeError", "DuplicateSpecError")
# The errors of JAX's that have no class of their own name a sharding, a spec, or a type
# such as `float32[8@data,4]`.
_SHARDING = re.compile(r"[Ss]harding|PartitionSpec|in_specs|\w\[[^\]]*@")


def explicit_axes_noted(arrays: Sequence[Any]) -> contextlib.ExitStack:
    """A context manager that adds a note to JAX's errors about shardings in types, if
    one of `arrays`, the arguments of a traced function, is on a mesh with Explicit
    axes.
    """

    def note(_kind: object, error: BaseException | None, _trace: object) -> None:
        """Adds the note to an error that leaves the context, if it is about types."""
        if error is None or not is_about_types(error):
            return
        meshes = [jax.typeof(array).sharding.mesh for array in arrays]
        axes = next((mesh.explicit_axes for mesh in meshes if mesh.explicit_axes), None)
        if axes is None:
            return
        text = _note(axes)
        # A function of `filter_jit` inside this one may have added it.
        if text not in vars(error).get("__notes__", ()):
            error.add_note(text)

    stack = contextlib.ExitStack()
    stack.push(note)
    return stack


def is_about_types(error: BaseException) -> bool:
    """Whether an error of JAX's is about shardings in types."""
    kind = type(error)
    if kind.__name__ in _TYPE_ERRORS:
        return True
    # Not of a subclass: errors of this package say what mends them.
    return kind in (TypeError, ValueError) and bool(_SHARDING.search(str(error)))


def _note(axes: Sequence[str]) -> str:
    """The text of the note for a mesh with the Explicit axes `axes`."""
    names = ", ".join(f"`{axis}`" for axis in axes)
    return (
        f"this mesh has Explicit axes, `jax.make_mesh`'s default: {names}. JAX types the"
        " result of each operation there. Let the compiler choose instead:"
        " `shardfx.auto.constrain_step(step, mesh, rules)` for the whole step,"
        " `shardfx.auto.auto_axes(function, plan, out=names)` for the function that"
        " fails, or a mesh with Auto axes, `jax.make_mesh(shape, names,"
        " axis_types=(jax.sharding.AxisType.Auto,) * len(names))`."
    )

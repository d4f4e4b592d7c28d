"""Proves that XLA's partitioned program of a step computes what the step says."""

from typing import Any, TypeAlias

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec as P

from .._arrays import Compiled
from .._ground.errors import LeafTypeError, ProgramError
from .._ground.misuse import called
from .._ground.spec import canonical
from .._step import (
    Parameter,
    Platform,
    Step,
    Verdict,
    judged,
    judged_text,
    platform_of,
    step_of,
    target_named,
)
from ..cost import CompiledFor
from ..topology import MeshSpec


# A program that a compiler finished, or its text.
FinishedProgram: TypeAlias = (
    jax.stages.Compiled | Compiled[..., Any] | CompiledFor | str
)


@called(
    "verify(step, *args)",
    chip='`compiler="tpu"`',
    target="`compiled=`, what `cost.compile_for(step, *args, target=target)` returns",
)
def verify(
    step: Any,
    *args: object,
    compiler: Platform | str = "tpu",
    compiled: FinishedProgram | None = None,
    mesh: MeshSpec | Mesh | AbstractMesh | None = None,
) -> Verdict:
    """Proves that the program which XLA partitions for a step's devices computes what
    the step says, or names the operation that does not. It runs nothing, and needs no
    devices.

    XLA's partitioner makes the program of one device from the step. `verify` reads both
    programs, and follows for each value which part of it each device holds, and which
    terms of a sum. A sum of two arrays that lie differently is wrong, for example, and
    so is an all-reduce over devices that hold the same terms.

    **Arguments:**

    - `step`, `args`: the step and its arguments, as in [`shardfx.cost.estimate`][].
    - `compiler`: the platform for which the step is lowered: "tpu", "gpu" or "cpu". A
      step with an operation that the platform lacks is lowered for CPUs. The
      name of a TPU slice, such as "tpu:v5e:2x4", asks libtpu, which partitions in its
      own way, and the program is its own. That needs `pip install "shardfx[aot]"`.
    - `compiled`: a program that a compiler finished for this step and these arguments,
      to be read instead: what `jax.jit(step).lower(*args).compile()` or
      [`shardfx.cost.compile_for`][] returned, or its text. The text of JAX 0.12 lacks
      how arguments lie, and is not judged; the program is.
    - `mesh`: the mesh of the step; by default the mesh of the arguments.

    **Returns:**

    A [`shardfx.testing.Verdict`][], false if the program is wrong. Its `outcome` is
    "proved" if each result is right in each part, "refuted" with what is wrong and what
    mends it, and "not judged" if it has operations that `verify` cannot follow. Then
    [`shardfx.testing.check_step`][] compares numbers. Not judged are callbacks,
    kernels, an update of several rows at an index of a dimension that is cut, or of one
    where the index may be out of bounds, and random bits that depend on the layout,
    among others; `unjudged` names them. As the `check` of [`shardfx.filter_jit`][], it
    refuses a program that is refuted, and one that is not judged runs with an
    [`shardfx.errors.UnjudgedWarning`][]. The body of a `shard_map` is what you wrote;
    what it takes and returns is judged, and where some axes of its mesh are not manual,
    how XLA divides it.

    The verdict is about the program that `program` names. By default that is XLA's
    partitioned program, which later passes of all compilers change. A finished program
    has operations of its compiler that no rule follows; those are not judged. Nor are
    arguments and results that lie otherwise than the step's.

    **Raises:**

    `MeshError` if no argument or plan has a mesh, or if it has more than 8,192 devices;
    `ProgramError` if XLA cannot partition the step, and for `compiled` beside a slice
    in `compiler`; any error of the step's code during tracing.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import shardfx as sfx

        mesh = sfx.MeshSpec({"data": 2, "fsdp": 2, "tensor": 2})  # no devices
        shapes = {"x": (16, 32), "w": (32, 32)}
        arrays = {k: jax.ShapeDtypeStruct(v, jnp.float32) for k, v in shapes.items()}
        rules = sfx.PathRules.parse("x->data+fsdp, w->tensor.fsdp")
        plan = sfx.plan(arrays, mesh, paths=rules)

        def block(x, w):
            return x + jnp.tanh(x @ w)

        def step(arrays):
            x, w = arrays["x"], arrays["w"]
            return block(block(x, w), w)

        verdict = sfx.testing.verify(step, plan.structs)
        assert verdict.outcome == "refuted"  # a fault of XLA
        assert "block" in str(verdict)
        ```
    """
    platform = platform_of(compiler)
    if compiled is not None and compiler != platform:
        raise ProgramError(
            f"`compiler={compiler!r:.40}` asks libtpu for its program, and `compiled` is"
            " a finished one; leave one of them out."
        )
    traced = step_of(step, args, mesh)
    programs = traced.programs(traced.platform_with_operations(platform))
    if compiled is not None:
        return judged_text(
            programs.whole,
            _program_text(compiled),
            program="the finished program",
            is_sharded_as_step=_is_sharded_as_step(compiled, traced),
        )
    if compiler == platform:
        return judged(programs)
    target = target_named(compiler, traced.mesh)
    text = traced.tpu_partitioned(target.slices, target.order)
    name = f"libtpu's partitioned program for {target.slices.name}"
    return judged_text(programs.whole, text, name)


def _is_sharded_as_step(compiled: FinishedProgram, step: Step) -> list[bool] | None:
    """Whether the arguments of a finished program lie as the step's, for each of them;
    `None` if the program does not say.
    """
    if isinstance(compiled, str | CompiledFor):
        return None
    shardings = jax.tree.leaves(compiled.input_shardings)
    if len(shardings) != len(step.arguments):
        return None
    meshes = {
        sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding)
    }
    if len(meshes) > 1:
        return None
    return [
        _is_sharding_of_argument(sharding, argument, step.mesh)
        for sharding, argument in zip(shardings, step.arguments, strict=True)
    ]


def _is_sharding_of_argument(
    sharding: object,
    argument: Parameter,
    mesh: MeshSpec,
) -> bool:
    """Whether a sharding on a mesh of these axes is that of a step's argument, whose
    `dims` has the mesh axes of each dimension.
    """
    if not isinstance(sharding, NamedSharding) or argument.dims is None:
        return False
    if tuple(sharding.mesh.shape.items()) != tuple(mesh.shape.items()):
        return False
    dims = P(*[axes or None for axes in argument.dims])
    return canonical(sharding.spec) == canonical(dims)


def _program_text(compiled: FinishedProgram) -> str:
    """The HLO text of a finished program. Raises `LeafTypeError` for another value, and
    `ProgramError` if its platform gives no text.
    """
    if isinstance(compiled, str):
        return compiled
    if not isinstance(compiled, Compiled | CompiledFor | jax.stages.Compiled):
        raise LeafTypeError(
            f"`compiled` is a compiled program or its text, not"
            f" {type(compiled).__name__}; pass `jax.jit(step).lower(*args).compile()`."
        )
    text = compiled.as_text()
    if not text:
        raise ProgramError(
            "the compiler of this platform does not give the text of its programs; call"
            " `verify(step, *args)` without `compiled`."
        )
    return text

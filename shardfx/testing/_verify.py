"""Proves that XLA's partitioned program of a step computes what the step says."""

from typing import Any

from jax.sharding import AbstractMesh, Mesh

from .._step import Platform, Verdict, judged, platform_of, step_of
from ..topology import MeshSpec


def verify(
    step: Any,
    *args: object,
    compiler: Platform | str = "tpu",
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
    - `compiler`: the platform for which the step is lowered: "tpu", "gpu" or "cpu".
    - `mesh`: the mesh of the step; by default the mesh of the arguments.

    **Returns:**

    A [`shardfx.testing.Verdict`][], false if the program is wrong. Its `outcome` is
    "proved" if each result is right in each part, "refuted" with what is wrong and what
    mends it, and "not judged" if it has operations that `verify` cannot follow. Then
    [`shardfx.testing.check_step`][] compares numbers. Not judged are a `shard_map`,
    callbacks, kernels, an argmax or an update over a dimension that is cut, and random
    bits that depend on the layout, among others; `unjudged` names them. The verdict is about XLA's
    partitioned program. The compiler of a TPU partitions by itself, and later passes of
    all compilers change the program.

    **Raises:**

    `MeshError` if no argument or plan has a mesh, or if it has more than 8,192 devices;
    `ProgramError` if XLA cannot partition the step; any error of the step's code during
    tracing.

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
    made = step_of(step, args, mesh)
    return judged(made.programs(platform))

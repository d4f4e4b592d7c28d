"""A function of a model that runs on Auto axes within a step for Explicit axes."""

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, PartitionSpec
from jaxtyping import PyTree

from .._arrays import constrain
from .._ground.misuse import called
from .._ground.tree import is_array_type
from .._plan import ShardPlan, check_plan, correct, plan as plan_of
from .._step import (
    array_leaves,
    explicit_mesh,
    may_be_of_mesh,
    on_auto_axes,
    plain_step,
)


@called("auto_axes(function, plan, out=names)")
def auto_axes(
    function: Callable[..., PyTree],
    plan: ShardPlan,
    *,
    out: PyTree,
) -> Callable[..., PyTree]:
    """The function, to call on arrays with Explicit axes in their types: inside of it
    the axes are Auto, and its results are typed.

    JAX derives the sharding of each result from its operands on Explicit axes, and
    raises an error where they leave it open. A function that knows nothing of shardings
    runs on Auto axes instead, where the compiler chooses the shardings of intermediate
    values. As `jax.sharding.auto_axes`, with shardings from a plan. Derivatives go
    through it. A function that fails on Auto axes too, as the solvers of diffrax and
    lineax do, which compute constants and compare types while they are traced, is
    traced without a mesh, and so without constraints of its own.

    **Arguments:**

    - `function`: a function of any trees, such as one block of a model.
    - `plan`: a plan with the mesh, and with the rules from logical names to mesh axes
      (`axes`), as for [`shardfx.constrain`][].
    - `out`: the logical names of each array in the result, as for
      [`shardfx.plan`][]: one tuple for all arrays, or a tree of tuples. Or
      PartitionSpecs in their places.

    **Returns:**

    A function of the same arguments. On Auto axes it constrains the results of
    `function`.

    **Raises:**

    `RuleError` and `UnmatchedError` for names without rules, `SpecError` for a number
    of names that is not the number of dimensions.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import shardfx as sfx

        mesh = jax.make_mesh((4, 2), ("data", "tensor"))
        axes = sfx.AxisRules([("batch", "data"), ("embed", "data"), ("mlp", "tensor")])
        w = jnp.ones((16, 32))
        plan = sfx.plan(w, mesh, names=("embed", "mlp"), axes=axes)

        def block(x, w):  # on Explicit axes, `x @ w` would be an error
            return jax.nn.relu(x @ w)

        block = sfx.auto.auto_axes(block, plan, out=("batch", "mlp"))
        x = jax.device_put(jnp.ones((8, 16)), jax.NamedSharding(mesh, jax.P("data")))
        y = jax.jit(block)(x, sfx.shard(w, plan))
        assert jax.typeof(y).sharding.spec == jax.P("data", "tensor")
        ```
    """
    check_plan("plan", plan)

    @ft.wraps(function)
    def called(*args: PyTree, **kwargs: PyTree) -> PyTree:
        # JAX's own `auto_axes` takes arrays by position only
        # (https://github.com/jax-ml/jax/issues/33226).
        leaves, structure = jax.tree.flatten((args, kwargs))
        mesh = explicit_mesh(leaves)
        results: list[PyTree] = []

        def run(arrays: Sequence[Any]) -> list[Any]:
            remaining = iter(arrays)
            filled = []
            for leaf in leaves:
                is_array = is_array_type(type(leaf))
                filled.append(next(remaining) if is_array else leaf)
            inner_args, inner_kwargs = structure.unflatten(filled)
            results.append(function(*inner_args, **inner_kwargs))
            return array_leaves(results[-1])

        def run_plain(mesh: AbstractMesh, arrays: Sequence[Any]) -> list[Any]:
            plain = plain_step(function, (args, kwargs), mesh, alone=False)
            outs = plain.run(arrays)
            results.append(plain.result(outs))
            return outs

        def specs_of(_arrays: Sequence[Any]) -> list[PartitionSpec]:
            return _specs(results[-1], plan, out)

        arrays = array_leaves(leaves)
        if mesh is None:
            sharded_arrays = run(arrays)
            typed = [
                constrain(array, spec, plan)
                for array, spec in zip(sharded_arrays, specs_of(()), strict=True)
            ]
        else:
            try:
                typed = on_auto_axes(run, arrays, mesh, specs_of)
            except (AssertionError, TypeError, ValueError) as error:
                if not may_be_of_mesh(error):
                    raise
                plain = ft.partial(run_plain, mesh)
                typed = on_auto_axes(plain, arrays, mesh, specs_of)
        remaining = iter(typed)
        return jax.tree.map(
            lambda leaf: next(remaining) if is_array_type(type(leaf)) else leaf,
            results[-1],
        )

    return called


def _specs(result: PyTree, plan: ShardPlan, out: PyTree) -> list[PartitionSpec]:
    """The spec of each array in a result, of which `out` says the names or the specs."""
    structs = jax.tree.map(_struct, result)
    if any(isinstance(leaf, PartitionSpec) for leaf in jax.tree.leaves(out)):
        # `plan.specs` has None in place of what is no array.
        arrays = jax.tree.map(_array_struct, structs)
        broadcast = jax.tree.broadcast(out, arrays)
        specs = jax.tree.leaves(broadcast)
        shapes = []
        for struct in jax.tree.leaves(arrays):
            shapes.append(struct.shape)
        return [
            correct(spec, shape, plan.mesh).spec
            for spec, shape in zip(specs, shapes, strict=True)
        ]
    named = plan_of(
        structs,
        plan.mesh,
        names=out,
        axes=plan.axes,
        mode=plan.mode,
        unused="allow",
        strict=plan.strict,
    )
    return [leaf.spec for leaf in named.leaves]


def _struct(leaf: Any) -> Any:
    if not is_array_type(type(leaf)):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def _array_struct(leaf: Any) -> jax.ShapeDtypeStruct | None:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    return None

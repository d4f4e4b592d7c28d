"""A function of a model that runs on Auto axes within a step for Explicit axes."""

import functools as ft
from collections.abc import Callable

import equinox as eqx
import jax
import jax.extend.core as jex
from jax.sharding import PartitionSpec
from jaxtyping import PyTree

from .._arrays import constrain
from .._ground.errors import LeafTypeError
from .._ground.misuse import called
from .._ground.tree import is_array_type
from .._plan import ShardPlan, check_plan, correct, plan as plan_of
from .._step import (
    array_leaves,
    auto_twin,
    explicit_mesh,
    on_auto_axes,
    over,
    plain_step,
    structs_like,
    traced,
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

    `LeafTypeError` for what is no function; `RuleError` and `UnmatchedError` for names
    without rules; `SpecError` for a number of names that is not the number of
    dimensions.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import shardfx as sfx
        from jax.sharding import PartitionSpec as P

        mesh = jax.make_mesh((4, 2), ("data", "tensor"))
        axes = sfx.AxisRules([("batch", "data"), ("embed", "data"), ("mlp", "tensor")])
        w = jnp.ones((16, 32))
        plan = sfx.plan(w, mesh, names=("embed", "mlp"), axes=axes)

        def block(x, w):  # on Explicit axes, `x @ w` would be an error
            return jax.nn.relu(x @ w)

        block = sfx.auto.auto_axes(block, plan, out=("batch", "mlp"))
        x = jax.device_put(jnp.ones((8, 16)), jax.NamedSharding(mesh, P("data")))
        y = jax.jit(block)(x, sfx.shard(w, plan))
        assert jax.typeof(y).sharding.spec == P("data", "tensor")
        ```
    """
    if not callable(function):
        raise LeafTypeError(
            f"`function` must be a function, not {type(function).__name__}; pass"
            " `auto_axes(function, plan, out=names)`."
        )
    check_plan("plan", plan)

    @ft.wraps(function)
    def function_on_auto_axes(*args: PyTree, **kwargs: PyTree) -> PyTree:
        # JAX's own `auto_axes` takes arrays by position only
        # (https://github.com/jax-ml/jax/issues/33226).
        mesh = explicit_mesh((args, kwargs))
        if mesh is None:
            # All axes are Auto already.
            arrays, rest = eqx.partition(function(*args, **kwargs), _is_array)
            constrained = ft.partial(constrain, plan=plan)
            specs = _result_specs(arrays, plan, out)
            return eqx.combine(jax.tree.map(constrained, arrays, specs), rest)

        try:
            with over(auto_twin(mesh)):
                trace = traced(function, (args, kwargs), typed=False)
            run = jex.jaxpr_as_fun(trace.closed)
        # JAX's errors for a function that fails on Auto axes too.
        except (AssertionError, TypeError, ValueError):
            trace = plain_step(function, (args, kwargs), mesh, alone=False)
            run = trace.run
        specs = jax.tree.leaves(_result_specs(trace.out, plan, out))
        results = on_auto_axes(run, mesh, specs)(*array_leaves((args, kwargs)))
        return trace.result(results)

    return function_on_auto_axes


def _is_array(leaf: object) -> bool:
    return is_array_type(type(leaf))


def _result_specs(arrays: PyTree, plan: ShardPlan, out: PyTree) -> PyTree:
    """The spec of each array in the tree `arrays`, the result of a function.

    `out` has their logical names or their specs: one for all arrays, or a tree. Names
    are resolved by the rules of the plan, and specs are corrected to the shapes.
    """
    if any(isinstance(leaf, PartitionSpec) for leaf in jax.tree.leaves(out)):
        # `plan.specs` has None in place of what is no array.
        specs = jax.tree.broadcast(out, arrays)
        return jax.tree.map(
            lambda spec, array: correct(spec, array.shape, plan.mesh).spec,
            specs,
            arrays,
        )
    named = plan_of(
        structs_like(arrays, typed=False),
        plan.mesh,
        names=out,
        axes=plan.axes,
        mode=plan.mode,
        unused="allow",
        strict=plan.strict,
    )
    return named.specs

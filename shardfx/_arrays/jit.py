"""`filter_jit`: compiles a function under plans."""

import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, overload

from .._ground.errors import LeafTypeError
from .._ground.misuse import called
from .checked import Check
from .entries import Donate
from .jitted import Jitted


P = ParamSpec("P")
R = TypeVar("R")
# The arguments of `jax.jit` that `filter_jit` lacks, and what stands for each.
_DONATE = "write `donate=`, with the names or positions of the arguments"
_STATIC = "what is no array is static by itself; write the function without it"
_OTHER_ARGUMENTS = {
    "donate_argnums": _DONATE,
    "donate_argnames": _DONATE,
    "static_argnums": _STATIC,
    "static_argnames": _STATIC,
}
_ARGUMENTS = "it has `in_shardings`, `out_shardings`, `donate` and `check`"


@overload
def filter_jit(
    fn: Callable[P, R],
    *,
    in_shardings: Any = None,
    out_shardings: Any = None,
    donate: Donate = "none",
    check: Check | None = None,
) -> "Jitted[P, R]": ...


@overload
def filter_jit(
    *,
    in_shardings: Any = None,
    out_shardings: Any = None,
    donate: Donate = "none",
    check: Check | None = None,
) -> "Callable[[Callable[P, R]], Jitted[P, R]]": ...


@called("filter_jit(step, in_shardings=(plan, None))")
def filter_jit(
    fn: Callable[..., object] | None = None,
    *,
    in_shardings: object = None,
    out_shardings: object = None,
    donate: Donate = "none",
    check: Check | None = None,
    **others: object,
) -> Any:
    """Compiles a function of any trees under plans: arrays are traced and sharded, and
    all other values are static.

    **Arguments:**

    - `fn`: a function of any trees. Without `fn`, a decorator is returned.
    - `in_shardings`: the shardings of the arguments: a tuple with an entry for each
      positional parameter (the last entries may be left out), a dict by parameter name,
      or one entry for all parameters. An entry is a [`shardfx.ShardPlan`][], a
      `Sharding`, a tree of these or a prefix of such a tree, or `None`, which leaves
      the sharding to JAX.
    - `out_shardings`: such an entry for the results of `fn`.
    - `donate`: the arguments whose buffers the program may reuse: True or "all", False
      or "none", "all-except-first", or the positions or names of parameters. JAX warns
      if a donated buffer fits no output. Equinox's "warn" and "warn-except-first" mean
      "all" and "all-except-first" here.
    - `check`: a function that is called with what `.trace` returns, once for each
      program, before the program first runs, such as `shardfx.testing.verify`. If it
      raises, or returns something false other than `None`, nothing runs. If what it
      returns has a text `caution`, as the verdict about a program that is not judged as
      a whole, the program runs with an [`shardfx.errors.UnjudgedWarning`][]. A function
      that is called inside another traced function is not checked: its operations
      belong to the program of that function.

    **Returns:**

    A function with the signature of `fn`. Keyword arguments are bound to positions, so
    that they are sharded too. Its `.trace(...)` and `.lower(...)` take arguments or
    ShapeDtypeStructs, and return the stages that `jax.jit` returns. `.compile()` of a
    lowered function returns a function with the signature of `fn` again, for the same
    static arguments. The tree `plan.structs` has no functions. To lower for a module
    that holds some, pass `equinox.combine(plan.structs, model)`.

    Functions whose plans have no devices can be traced and lowered:
    `.trace(plan.structs).lower(lowering_platforms=("tpu",))`. The result of `.trace`
    lists the arrays that the function takes and returns, with their paths and
    shardings.

    Static arguments are compared by value and by type: 1, 1.0 and True give three
    programs. Where the tree of a plan had functions, an argument may have `None`, as
    after `equinox.partition`.

    **Raises:**

    - `PlanMismatchError` from `filter_jit` itself: for a PartitionSpec, which has no
      mesh (`jax.set_mesh` is not used), and for shardings on different sets of devices.
    - `PlanMismatchError` at tracing: if the arguments or results differ from the trees
      of their plans in paths, shapes or dtypes, or if an argument has another sharding
      than its entry.
    - `PlanMismatchError` at a call: if a plan has no devices; if an array was deleted;
      if a donated array is given twice; or if an argument with an entry is missing
      while an argument with arrays has no entry. If the function donates nothing, only
      the first array of each sharding is checked for deletion.
    - `LeafTypeError` for a static argument that cannot be hashed.
    - JAX's errors of `fn`. Those about types on Explicit axes have a note with the
      calls that mend them.
    - `RefusedError` if `check` returns something false other than `None`. The error
      has its text.

    !!! Example

        ```python
        import equinox as eqx
        import jax
        import jax.numpy as jnp
        from shardfx import MeshSpec, PathRules, filter_jit, plan


        def make(key):
            return eqx.nn.MLP(16, 16, 64, 2, key=key)  # holds functions and None


        mesh = MeshSpec({"data": 2, "tensor": 4}).build(jax.devices())
        structs = eqx.filter_eval_shape(make, jax.random.key(0))
        params_plan = plan(
            structs, mesh, paths=PathRules.parse("weight->tensor, bias->replicate")
        )

        # No device ever holds all of it
        model = filter_jit(make, out_shardings=params_plan)(jax.random.key(0))
        apply = filter_jit(
            lambda model, x: jax.vmap(model)(x), in_shardings=(params_plan, None)
        )
        assert apply(model, jnp.ones((8, 16))).shape == (8, 16)
        ```
    """
    for name in others:
        fix = _OTHER_ARGUMENTS.get(name, _ARGUMENTS)
        raise TypeError(f"`filter_jit` has no argument `{name}`; {fix}.")
    if check is not None and not callable(check):
        raise LeafTypeError(
            f"`check` takes a function, not {check!r:.40}; pass the function itself:"
            " `check=shardfx.testing.verify`."
        )

    def decorator(fn: Callable[..., object]) -> Jitted[..., object]:
        """The function `fn`, compiled under the arguments of `filter_jit`."""
        _require_signature(fn)
        return Jitted(
            fn,
            in_shardings=in_shardings,
            out_shardings=out_shardings,
            donate=donate,
            check=check,
        )

    return decorator if fn is None else decorator(fn)


def _require_signature(fn: Callable[..., object]) -> None:
    """Raises `LeafTypeError` for what is no function, and if Python does not know the
    parameters of a function, as of some builtins.
    """
    if not callable(fn):
        raise LeafTypeError(
            f"`filter_jit` takes a function, not {type(fn).__name__}; pass the function"
            " that is to be compiled: `filter_jit(step, in_shardings=(plan, None))`."
        )
    try:
        inspect.signature(fn)
    except ValueError as error:
        name = getattr(fn, "__name__", type(fn).__name__)
        raise LeafTypeError(
            f"`filter_jit` needs the parameters of `{name}`, which Python does not know"
            f" ({error}); write a function that calls it: `lambda x: {name}(x)`."
        ) from error

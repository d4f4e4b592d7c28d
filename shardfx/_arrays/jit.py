"""`filter_jit`: a function compiled under plans, as one `jax.jit` for each structure of its arguments."""

import dataclasses
import functools as ft
import inspect
import itertools as it
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, Generic, NamedTuple, ParamSpec, TypeVar, overload

import jax
import numpy as np

from .._ground.errors import LeafTypeError, PlanMismatchError
from .._ground.tree import tree_paths
from .._plan import ShardPlan
from ..topology import MeshSpec
from .entries import (
    Donate,
    arity,
    bound,
    by_parameter,
    checked,
    donated,
    key_of,
    parameter_names,
    shardings_in,
    spread,
)
from .given import (
    Given,
    are_traced,
    is_abstract,
    is_placed,
    is_traced,
    raise_apart,
    raise_apart_from_entry,
    raise_elsewhere,
    raise_gone_or_shared,
    struct_of,
    without_devices,
)
from .partition import FunctionArrays, Parted, Rest, Static, joined, node_data
from .stages import Lowered, Traced, TracedArray


P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")

# The number of argument structures that one function remembers, each with its `jax.jit`. JAX caches the programs.
_FORMS = 128
_ARRAY = jax.ShapeDtypeStruct((), np.float32)


@overload
def filter_jit(
    fn: Callable[P, R], *, in_shardings: Any = None, out_shardings: Any = None, donate: Donate = "none"
) -> "Jitted[P, R]": ...


@overload
def filter_jit(
    *, in_shardings: Any = None, out_shardings: Any = None, donate: Donate = "none"
) -> "Callable[[Callable[P, R]], Jitted[P, R]]": ...


def filter_jit(
    fn: Callable[..., object] | None = None,
    *,
    in_shardings: object = None,
    out_shardings: object = None,
    donate: Donate = "none",
) -> Any:
    """`equinox.filter_jit` with shardings: arrays are traced and placed, everything else in the arguments is static.

    **Arguments:**

    - `fn`: a function of any trees. Without it, a decorator is returned.
    - `in_shardings`: the shardings of the arguments: a tuple with an entry per positional parameter (the last ones may
        be left out), a dict by parameter name, or one entry for all. An entry is a [`shardfx.ShardPlan`][], a
        `Sharding`, a tree or a prefix of one of these, or `None` where JAX is to take an argument as it comes.
    - `out_shardings`: the same for what `fn` returns.
    - `donate`: the arguments whose buffers may be reused: True or "all", False or "none", "all-except-first", or the
        positions or names of parameters. JAX warns where a donated buffer fits no output; "warn" and
        "warn-except-first", which Equinox tells apart by that, are the same here.

    **Returns:**

    A function with the signature of `fn`. Keyword arguments are bound to their positions, so that they are sharded too.
    Its `.trace(...)` and `.lower(...)` take arguments or ShapeDtypeStructs, and return what those of `jax.jit` return;
    `.compile()` of a lowered one returns a function with the signature of `fn` again, for the same static arguments.
    A plan has no functions: for a module with functions, lower with `equinox.combine(plan.structs, model)`.

    Plans without devices can be traced and lowered: `.trace(plan.structs).lower(lowering_platforms=("tpu",))`. The
    result of `.trace` lists the arguments and results of the function, with their paths and shardings.

    Static arguments are compared by value and by type: 1, 1.0 and True are three programs. A tree may have `None`
    instead of the functions that were planned with it, as `equinox.partition` leaves it.

    **Raises:**

    `PlanMismatchError` at once for a bare PartitionSpec, which has no mesh (`jax.set_mesh` is not used), and for
    shardings on several sets of devices. At tracing, if arguments or results are not the trees of their plans, in
    paths, shapes or dtypes. At a call, if a plan has no devices; if `*args` or `**kwargs` are bound in another way than
    the entries say; if an array was deleted (if the function donates, all arrays are checked, otherwise the first of
    each entry); or if a donated array is given twice.
    `LeafTypeError` for a static argument that cannot be hashed.

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
    made = ft.partial(Jitted, in_shardings=in_shardings, out_shardings=out_shardings, donate=donate)
    return made if fn is None else made(fn)


@dataclasses.dataclass(eq=False)
class _Form:
    """One structure of the function and its arguments, and the `jax.jit` for it.

    **Arguments:**

    - `run`: the jitted function. It takes the static parts and then every array.
    - `statics`: the positions of the leaves that are no arrays.
    - `has_data`: whether equal structures may differ in the data that their nodes hold.
    - `watched`: the first array of each sharding in `in_shardings`. JAX does not look at its devices where it was
        placed before.
    - `alive`: the arrays whose buffers may be gone: all if an array is donated, else the watched ones.
    - `donates`: whether an array is donated.
    - `static`, `shardings`: the static parts, and the shardings of the watched arrays, of the last call.
    """

    run: Any
    statics: list[int]
    has_data: bool
    watched: list[int]
    alive: list[int]
    donates: bool
    static: Static | None = None
    shardings: list[Any] | None = None


class _Call(NamedTuple):
    """The function and the arguments of a call, its form, its static parts, and its arrays."""

    tree: tuple[Any, Any, Any]
    form: _Form
    static: Static
    arrays: Sequence[Any]


class Jitted(Generic[P, R]):
    """The function that [`shardfx.filter_jit`][] returns, with the signature of the function that was given.

    The static argument of each `jax.jit` is everything that is not traced. The results come out as one list for each
    sharding in `out_shardings`, since these are known before any result is; or as the function returns them if they are
    only arrays and `out_shardings` is not given.
    """

    def __init__(self, fn: Callable[P, R], in_shardings: object, out_shardings: object, donate: Donate):
        self._fn, self._signature = FunctionArrays(fn), inspect.signature(fn)
        self._plain: Callable[..., R] = fn
        self._name = getattr(fn, "__qualname__", type(fn).__name__)
        self._short_name = getattr(fn, "__name__", type(fn).__name__)
        self._in = by_parameter(checked(in_shardings, "in_shardings"), self._signature, self._name)
        self._out = checked(out_shardings, "out_shardings")
        self._donated = donated(donate, self._signature)
        self._arity = arity(self._signature)
        self._results = shardings_in(self._out)
        places = [
            (f"an entry of `{what}` of `{self._name}` is on", sharding)
            for what, form in (("in_shardings", self._in.forms), ("out_shardings", self._out))
            for sharding in shardings_in(form).values()
        ]
        raise_apart(places)
        self._is_abstract = any(is_abstract(sharding) for _, sharding in places)
        self._form = ft.lru_cache(maxsize=_FORMS)(self._form_of)
        ft.update_wrapper(self, fn, updated=())

    @overload
    def __get__(self, instance: None, owner: Any = None) -> "Jitted[P, R]": ...

    @overload
    def __get__(self: "Jitted[Concatenate[Any, Q], R]", instance: object, owner: Any = None) -> Callable[Q, R]: ...

    def __get__(self, instance: Any, owner: object = None) -> Any:
        return self if instance is None else ft.partial(self, instance)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if self._is_abstract:
            raise PlanMismatchError(
                f"`{self._name}` was called, and a plan or sharding of its `in_shardings` or `out_shardings` has no "
                "devices. It can be traced and lowered; to call it use `plan.on(plan.mesh.build(jax.devices()))`."
            )
        call = self._bound(args, kwargs, runs=True)
        try:
            out = call.form.run(call.static, *call.arrays)
        except (TypeError, ValueError, AttributeError) as error:
            self._explain(error, call)
            raise
        return out.joined() if type(out) is Parted else out

    def lower(self, *args: object, **kwargs: object) -> Lowered[P, R]:
        """Traces and lowers the function for arguments, or structs, of these shapes."""
        return self.trace(*args, **kwargs).lower()

    def trace(self, *args: object, **kwargs: object) -> Traced[P, R]:
        """Traces the function for arguments, or structs, of these shapes. The plans need no devices."""
        call = self._bound(args, kwargs, runs=False)
        given = self._arrays(call)
        arrays = [*map(without_devices, call.arrays)] if self._is_abstract else call.arrays
        try:
            if self._is_abstract:
                raise_elsewhere(given, None)
            traced = call.form.run.trace(call.static, *arrays)
        except (TypeError, ValueError, AttributeError) as error:
            self._explain(error, call)
            raise
        taken = tuple(
            TracedArray(one.path, struct_of(leaf, one.wanted), one.is_donated, one.argument, f"arrays[{at}]")
            for at, (one, leaf) in enumerate(zip(given, arrays, strict=True))
        )
        # The mesh of the first plan.
        plans = jax.tree.leaves([self._in.forms, self._out], is_leaf=lambda node: isinstance(node, ShardPlan))
        mesh: MeshSpec | None = next((one.mesh for one in plans if isinstance(one, ShardPlan)), None)
        return Traced(ft.partial(self._run_compiled, call.static), traced, taken, self._returned(traced.out_info), mesh)

    def _run_compiled(self, static: Static, compiled: jax.stages.Compiled, args: object, kwargs: object) -> Any:
        call = self._bound(args, kwargs, runs=True)
        if call.static != static:
            raise PlanMismatchError(
                f"`{self._name}` was compiled for other arguments: they differ in their structure, or in what is no "
                f"array ({static.values!r:.60} then, {call.static.values!r:.60} now); lower it with what you call "
                "it with."
            )
        out = compiled(*call.arrays)
        return out.joined() if type(out) is Parted else out

    def _bound(self, args: Any, kwargs: Any, *, runs: bool) -> _Call:
        if kwargs or len(args) != self._arity:
            args, kwargs = bound(self._name, self._signature, args, kwargs)
        # A function without arrays need not be flattened at each call.
        tree = self._fn if self._fn.paths else None, args, kwargs
        leaves, treedef = jax.tree.flatten(tree)
        is_array = are_traced(tuple(map(type, leaves)))
        form = self._form(treedef, is_array)
        arrays = [*it.compress(leaves, is_array)] if form.statics else leaves
        call = _Call(tree, form, self._static(form, treedef, is_array, leaves), arrays)
        shardings = [one.sharding for at in form.watched if is_placed(type(one := arrays[at]))]
        if shardings != form.shardings:
            raise_apart_from_entry(self._arrays(call))
            form.shardings = shardings
        alive = [one for at in form.alive if is_placed(type(one := arrays[at]))] if runs else []
        if True in [one.is_deleted() for one in alive] or (form.donates and len({*map(id, alive)}) < len(alive)):
            given = self._arrays(call)
            raise_gone_or_shared(given[at] for at in form.alive)
        return call

    def _form_of(self, treedef: Any, is_array: tuple[bool, ...]) -> _Form:
        tree = jax.tree.unflatten(treedef, [_ARRAY if one else object() for one in is_array])
        self._check_taken(*tree[1:])
        given = [one for one in self._given(*tree) if one.leaf is _ARRAY]
        gone = [at for at, one in enumerate(given) if one.is_donated]

        def traced(static: Static, *arrays: object) -> Any:
            return self._traced(static, arrays)

        # The name that profiles show.
        traced.__name__ = traced.__qualname__ = self._short_name
        run = jax.jit(
            traced,
            static_argnums=0,
            in_shardings=tuple(one.wanted for one in given),
            out_shardings=Parted([*self._results.values()], None) if len(self._results) > 1 else None,
            donate_argnums=[1 + at for at in gone],
        )
        firsts = [*{key_of(one.wanted): at for at, one in reversed([*enumerate(given)])}.values()]
        return _Form(
            run,
            statics=[at for at, one in enumerate(is_array) if not one],
            has_data=any(type(one).__eq__ is not object.__eq__ for one in node_data(treedef)),
            watched=firsts,
            alive=[*range(len(given))] if gone else firsts,
            donates=bool(gone),
        )

    def _static(self, form: _Form, treedef: Any, is_array: tuple[bool, ...], leaves: list[Any]) -> Static:
        values = [leaves[at] for at in form.statics]
        parts = values + node_data(treedef) if form.has_data else values
        last = form.static
        if last is not None and len(parts) == len(last.parts) and all(map(operator.is_, parts, last.parts)):
            return last
        try:
            form.static = Static(treedef, is_array, values, parts)
        except TypeError as error:
            raise LeafTypeError(
                f"an argument of `{self._name}` holds a value that is no array and cannot be hashed ({error}), so it "
                "can be neither traced nor static; make it an array or something hashable."
            ) from error
        return form.static

    def _traced(self, static: Static, arrays: tuple[object, ...]) -> Any:
        fn, args, kwargs = joined(static.treedef, static.is_array, (static.values, arrays))
        self._given(fn, args, kwargs, shapes=True)
        out = (self._plain if fn is None else fn)(*args, **kwargs)
        leaves, treedef = jax.tree.flatten(out)
        lists: dict[object, list[Any]] = {"statics": [], **{key: [] for key in self._results}}
        numbers, order = {key: at for at, key in enumerate(lists)}, []
        for leaf, sharding in zip(leaves, spread(self._out, out, f"what `{self._name}` returns"), strict=True):
            key = key_of(sharding) if _is_array(leaf) else "statics"
            lists[key].append(leaf)
            order.append(numbers[key])
        statics = lists.pop("statics")
        return out if len(lists) == 1 and not statics else Parted([*lists.values()], Rest(treedef, order, statics))

    def _given(self, fn: Any, args: Any, kwargs: Any, *, shapes: bool = False) -> list[Given]:
        """The function's arrays and all leaves of its arguments; raises if they do not match their plans, with `shapes`
        also in shape and dtype.
        """
        rows: list[tuple[int, str, str, Any, Any, bool]] = []
        names = parameter_names(self._signature, args, kwargs)
        for at, (name, (which, arg, entry)) in enumerate(zip(names, self._in.of(args, kwargs), strict=True)):
            is_donated = (at if at < len(args) else None) in self._donated
            rows.append((at, name, f"argument {which} of `{self._name}`", arg, entry, is_donated))
        found = [
            Given(f"`{path}` of `{self._name}`", f"{self._name}/{path}", leaf, None, False, None)
            for path, leaf in zip(self._fn.paths, [*filter(_is_array, jax.tree.leaves(fn))], strict=True)
        ]
        for argument, name, what, tree, entry, is_donated in rows:
            leaves, treedef = jax.tree.flatten(tree)
            wanted = spread(entry, tree, what, shapes=shapes)
            for path, leaf, sharding in zip(tree_paths(treedef), leaves, wanted, strict=True):
                text = f"`{path}` of {what}" if path else what
                found.append(Given(text, f"{name}/{path}" if path else name, leaf, sharding, is_donated, argument))
        return found

    def _arrays(self, call: _Call, *, shapes: bool = False) -> list[Given]:
        return [one for one in self._given(*call.tree, shapes=shapes) if _is_array(one.leaf)]

    def _check_taken(self, args: Any, kwargs: Any) -> None:
        """Raises if a parameter with an entry gets no argument, while an argument has no entry: the entry's name is
        then probably wrong.
        """
        taken = {*range(len(args)), *kwargs}
        missing = [key for key, entry in self._in.known.items() if entry is not None and key not in taken]
        given = self._in.of(args, kwargs) if missing else ()
        bare = [which for which, arg, entry in given if entry is None and _ARRAY in jax.tree.leaves(arg)]
        if bare:
            which = f"{missing[0]}" if isinstance(missing[0], int) else f"`{missing[0]}`"
            raise PlanMismatchError(
                f"`in_shardings` has an entry for argument {which} of `{self._name}{self._signature}`, which this "
                f"call lacks, and none for argument {bare[0]}, which it has. Pass arguments by position for a tuple, "
                "by name for a dict, or name them in the signature, which `functools.wraps` keeps for decorators."
            )

    def _explain(self, error: Exception, call: _Call) -> None:
        """Raises an error about the arguments if they explain the given error."""
        if isinstance(error, PlanMismatchError):
            return
        try:
            arrays = self._arrays(call, shapes=True)
        except PlanMismatchError as mismatch:
            raise mismatch from error
        if "incompatible devices" in str(error):
            text = re.sub(r"arrays\[(\d+)\] of [^ ]*", lambda found: arrays[int(found[1])].name, f"{error}")
            raise PlanMismatchError(
                f"`{self._name}` runs on one set of devices in one order. Place its arguments, `shard(tree, plan)`; "
                f"use plans on one mesh inside one function, and `reshard` between functions. JAX says: {text}"
            ) from error
        raise_elsewhere(arrays, error)

    def _returned(self, out: Any) -> tuple[TracedArray, ...]:
        """The path and struct of each array that the function returns, in the order of the compiled program's
        results.
        """
        if type(out) is not Parted:
            pairs = zip(tree_paths(jax.tree.structure(out)), jax.tree.leaves(out), strict=True)
            return tuple(TracedArray(path, struct_of(leaf)) for path, leaf in pairs)
        found = []
        for number, (leaves, sharding) in enumerate(zip(out.lists, self._results.values(), strict=True), 1):
            paths = it.compress(tree_paths(out.rest.treedef), [at == number for at in out.rest.order])
            found += [TracedArray(path, struct_of(leaf, sharding)) for path, leaf in zip(paths, leaves, strict=True)]
        return tuple(found)


def _is_array(leaf: object) -> bool:
    return is_traced(type(leaf))

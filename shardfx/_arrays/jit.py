"""Compiling a function under plans: `filter_jit`, which is one `jax.jit` with one static argument."""

import dataclasses
import functools as ft
import inspect
import itertools as it
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Concatenate, Generic, NamedTuple, ParamSpec, TypeVar, overload

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Sharding

from .._ground.errors import LeafTypeError, PlanMismatchError
from .._ground.tree import flatten, tree_paths
from .devices import Place, in_order, lies_elsewhere, raise_apart
from .donation import Given, raise_deleted, raise_shared
from .entries import (
    Donate,
    by_parameter,
    checked,
    counts_as_given,
    donated,
    key_of,
    lacks,
    shardings_in,
    spread,
)
from .layout import Layout
from .shallow import form_of, leaves_in
from .static import Static, is_traced


P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")

# Structures of arguments that one function remembers. Its programs are in the cache of `jax.jit`.
_LAYOUTS = 128
_ARRAY = jax.ShapeDtypeStruct((), np.float32)
# How JAX begins where arguments lie on devices of which no program could use all.
_OTHER_DEVICES = "Received incompatible devices"
# And where they lie otherwise than `in_shardings` says.
_OTHER_LAYOUT = "Sharding passed to jit does not match"


@overload
def filter_jit(
    fn: Callable[P, R], *, in_shardings: Any = None, out_shardings: Any = None, donate: Donate = "none"
) -> "Jitted[P, R]": ...


@overload
def filter_jit(
    fn: None = None, *, in_shardings: Any = None, out_shardings: Any = None, donate: Donate = "none"
) -> "Decorator": ...


def filter_jit(
    fn: Callable[..., Any] | None = None,
    *,
    in_shardings: Any = None,
    out_shardings: Any = None,
    donate: Donate = "none",
) -> Any:
    """`equinox.filter_jit` with shardings: arrays are traced and placed, everything else in the arguments is static.

    **Arguments:**

    - `fn`: a function of any trees. Without it, a decorator is returned.
    - `in_shardings`: how the arguments are sharded: a tuple with an entry per positional parameter (the last ones may
        be left out), a dict by parameter name, or one entry for all. An entry is a [`shardfx.ShardPlan`][], a
        `Sharding`, a tree or a prefix of one of these, or `None` where JAX is to take an argument as it comes.
    - `out_shardings`: the same for what `fn` returns.
    - `donate`: whose buffers may be reused: "all", "all-except-first", "none", or the positions or names of
        parameters. JAX warns where a donated buffer fits no output; "warn" and "warn-except-first", which Equinox
        tells apart by that, are the same here.

    **Returns:**

    A function with the signature of `fn`. Keyword arguments are bound to their positions, so that they are sharded
    as well. Its `.lower(...)` takes arguments, or ShapeDtypeStructs in their place, and gives what `jax.jit`'s does;
    `.compile()` of that gives a function with the signature of `fn` again, for the same static arguments. For a
    module with functions, lower with `equinox.combine(plan.structs, model)`: `plan.structs` alone has none.

    Static arguments are told apart by value and by type: 1, 1.0 and True are three programs. A tree may have `None`
    in the place of the functions that were planned with it, as `equinox.partition` leaves it.

    **Raises:**

    `PlanMismatchError` at once if a plan has no devices, or a bare PartitionSpec is given, which says nothing of the
    mesh: `jax.set_mesh` is not asked. When it is traced, if arguments or results are not the trees that their plans
    are for, in paths, shapes or dtypes. When it is called, if `*args` or `**kwargs` take what entries are about in
    another way than the entries say; if an array is gone (of a function that donates all arrays are looked at, of
    others the first of each entry); or if one that is donated is given twice. `LeafTypeError` for a static argument
    that cannot be hashed.

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
    given = Decorator(in_shardings, out_shardings, donate)
    return given if fn is None else given(fn)


class Decorator(NamedTuple):
    """A `filter_jit` that waits for its function."""

    in_shardings: Any
    out_shardings: Any
    donate: Donate

    def __call__(self, fn: Callable[P, R]) -> "Jitted[P, R]":
        return Jitted(fn, self.in_shardings, self.out_shardings, self.donate)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class _Rest:
    """What a function returns beside arrays, and the order in which its leaves are: statics, then lists of arrays."""

    treedef: Any
    statics: list[Any]
    order: list[int]


class _Parted(NamedTuple):
    """What a function returns that is not arrays alone, or whose arrays `out_shardings` is about."""

    lists: Any
    rest: Any

    def joined(self) -> Any:
        leaves = [*self.rest.statics, *it.chain.from_iterable(self.lists)]
        return self.rest.treedef.unflatten([leaves[at] for at in self.rest.order])


class Jitted(Generic[P, R]):
    """What [`shardfx.filter_jit`][] returns: a function with the signature of the one that it was given.

    It is one `jax.jit`, whose static argument is all that is not traced. The arrays go in as lists, one for each
    sharding that `in_shardings` has: those are known before any argument is. The results come out likewise, or as the
    function returns them, if they are arrays alone and `out_shardings` says nothing.
    """

    def __init__(self, fn: Callable[P, R], in_shardings: Any, out_shardings: Any, donate: Donate):
        self._signature = inspect.signature(fn)
        self._in, self._out = (
            by_parameter(checked(in_shardings, "in_shardings"), self._signature),
            checked(out_shardings, "out_shardings"),
        )
        self._donated = donated(donate, self._signature)
        self._counts = counts_as_given(self._signature)
        self._name = getattr(fn, "__qualname__", type(fn).__name__)
        # The function may be a module with arrays, which are traced as well.
        self._fn_leaves, self._fn_treedef = jax.tree.flatten(fn)
        self._fn_arrays = [leaf for leaf in self._fn_leaves if is_traced(type(leaf))]
        self._layout = ft.lru_cache(maxsize=_LAYOUTS)(self._layout_of)
        self._last: Layout | None = None
        self._run = self._jitted(getattr(fn, "__name__", type(fn).__name__))
        ft.update_wrapper(self, fn, updated=())

    def _jitted(self, name: str) -> Any:
        wanted = {key_of(one): one for entry in self._in.all() for one in shardings_in(entry)}
        results = {key_of(one): one for one in shardings_in(self._out)}
        self._slots = list(it.product(wanted, (False, True) if self._donated.some else (False,)))
        self._out_slots = list(results)
        self._wanted = [wanted[key] for key, _ in self._slots]
        self._seen: list[Any] = [None] * len(self._slots)

        def traced(static: Static, fn_arrays: list[Any], *lists: Sequence[Any]) -> Any:
            return self._traced(static, fn_arrays, lists)

        # What profiles and the names of programs show.
        traced.__name__ = traced.__qualname__ = name
        return jax.jit(
            traced,
            static_argnums=0,
            in_shardings=(None, *[wanted[key] for key, _ in self._slots]),
            out_shardings=_Parted(tuple(results.values()), None) if len(results) > 1 else None,
            donate_argnums=[2 + at for at, (_, donated) in enumerate(self._slots) if donated],
        )

    @overload
    def __get__(self, instance: None, owner: Any = None) -> "Jitted[P, R]": ...

    @overload
    def __get__(self: "Jitted[Concatenate[Any, Q], R]", instance: object, owner: Any = None) -> Callable[Q, R]: ...

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else ft.partial(self, instance)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        arguments, static, lists = self._bound(args, kwargs, runs=True)
        try:
            out = self._run(static, self._fn_arrays, *lists)
        except (TypeError, ValueError, AttributeError) as error:
            self._explain(error, *arguments)
            raise
        return out.joined() if type(out) is _Parted else out

    def lower(self, *args: Any, **kwargs: Any) -> "Lowered[P, R]":
        """Traces and lowers the function for arguments, or structs, of these shapes."""
        arguments, static, lists = self._bound(args, kwargs, runs=False)
        try:
            return Lowered(self, static, self._run.lower(static, self._fn_arrays, *lists))
        except (TypeError, ValueError, AttributeError) as error:
            self._explain(error, *arguments)
            raise

    def _bound(self, args: Any, kwargs: Any, *, runs: bool) -> tuple[Any, Static, Sequence[Sequence[Any]]]:
        # Most calls are like the one before: to compare with it is cheaper than to flatten, or to hash.
        layout, leaves = self._last, None
        if layout is not None and layout.form is not None and not kwargs:
            leaves = leaves_in(args, layout.form)
        if layout is not None and leaves is not None and tuple(map(type, leaves)) == layout.given:
            arguments, treedef = (args, kwargs), layout.treedef
        else:
            arguments = self._given(args, kwargs)
            leaves, treedef = jax.tree.flatten(arguments)
            layout = self._last = self._layout_for(treedef, leaves, arguments)
        for slot, at in layout.watched:
            if leaves[at].sharding is not self._seen[slot]:
                self._check_devices([(self._wanted[slot], [at])], leaves, arguments)
                self._seen[slot] = leaves[at].sharding
        if runs:
            if True in [leaves[at].is_deleted() for at in layout.placed]:
                raise_deleted(self._arrays_given(layout, leaves, arguments))
            if layout.donates and len({id(leaves[at]) for at in layout.placed}) < len(layout.placed):
                raise_shared(self._arrays_given(layout, leaves, arguments))
        return arguments, layout.alone or self._static(treedef, layout, leaves), layout.lists(leaves)

    def _given(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if not kwargs and len(args) in self._counts:
            return args, kwargs
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.args, bound.kwargs

    def _layout_for(self, treedef: Any, leaves: list[Any], arguments: Any) -> Layout:
        kinds, layout = tuple(map(type, leaves)), self._last
        if layout is not None and kinds == layout.given and treedef == layout.treedef:
            return layout
        layout = self._layout(treedef, kinds)
        if not layout.is_checked:
            self._check_devices(zip(self._wanted, layout.groups, strict=True), leaves, arguments)
            layout.is_checked = True
        return layout

    def _static(self, treedef: Any, layout: Layout, leaves: list[Any]) -> Static:
        values = tuple([leaves[at] for at in layout.statics])
        try:
            return layout.recent.static(treedef, layout, values)
        except TypeError as error:
            found = next((value for value in values if not _is_hashable(value)), None)
            if found is None:
                raise
            raise LeafTypeError(
                f"an argument of `{self._name}` holds {type(found).__name__} {found!r:.60}, which is no array and "
                "cannot be hashed, so it can be neither traced nor static; make it an array or something hashable."
            ) from error

    def _layout_of(self, treedef: Any, kinds: tuple[type, ...]) -> Layout:
        leaves = [_ARRAY if is_traced(kind) else object() for kind in kinds]
        args, kwargs = jax.tree.unflatten(treedef, leaves)
        numbers = {slot: number for number, slot in enumerate(self._slots)}
        groups: list[list[int]] = [[] for _ in numbers]
        at = 0
        self._check_taken(args, kwargs)
        for position, (which, arg, entry) in enumerate(self._in.of(args, kwargs)):
            is_donated = (position if position < len(args) else None) in self._donated
            for sharding in spread(entry, arg, self._argument(which), shapes=False):
                if leaves[at] is _ARRAY:
                    groups[numbers[key_of(sharding), is_donated]].append(at)
                at += 1
        with_entry = [slot for slot, one in enumerate(self._wanted) if one is not None]
        gone = [slot for slot, (_, is_donated) in enumerate(self._slots) if is_donated]
        return Layout(treedef, kinds, groups, with_entry, gone, None if kwargs else form_of(args))

    def _argument(self, which: str) -> str:
        return f"argument {which} of `{self._name}`"

    def _check_taken(self, args: Any, kwargs: Any) -> None:
        """Raises where the call lacks an argument that has an entry, and has another that has none."""
        untaken = self._in.untaken(args, kwargs)
        given = self._in.of(args, kwargs) if untaken else ()
        bare = [which for which, arg, entry in given if entry is None and _ARRAY in jax.tree.leaves(arg)]
        if bare:
            raise PlanMismatchError(
                f"`in_shardings` has an entry for argument {untaken[0]} of `{self._name}{self._signature}`, which this "
                f"call lacks, and none for argument {bare[0]}, which it has. Pass arguments by position for a tuple, "
                "by name for a dict, or name them in the signature, which `functools.wraps` keeps for decorators."
            )

    def _check(self, args: Any, kwargs: Any) -> None:
        """Raises unless the arguments have the shapes and dtypes that are planned for them."""
        for which, arg, entry in self._in.of(args, kwargs):
            if entry is not None:
                spread(entry, arg, self._argument(which))

    def _explain(self, error: Exception, args: Any, kwargs: Any) -> None:
        """Raises what is wrong with the arguments, if it is that; else notes on the error what they lack."""
        if isinstance(error, PlanMismatchError):
            return
        try:
            self._check(args, kwargs)
        except PlanMismatchError as mismatch:
            raise mismatch from error
        if str(error).startswith(_OTHER_DEVICES):
            raise_apart(self._places(args, kwargs), error)
            raise PlanMismatchError(
                f"`{self._name}` runs on some devices, and a `constrain` or `shard` inside it is for others; use plans "
                f"on one mesh inside one function, and `reshard` between functions. JAX says: {error}"
            ) from error
        if str(error).startswith(_OTHER_LAYOUT):
            self._explain_layout(error, args, kwargs)
        for which, arg, entry in self._in.of(args, kwargs):
            for path in lacks(entry, arg)[:1]:
                error.add_note(
                    f"{self._argument(which)} lacks `{path}`, which is no array and was there when its plan was made; "
                    "`equinox.combine(arrays, model)` puts what is no array back."
                )

    def _explain_layout(self, error: Exception, args: Any, kwargs: Any) -> None:
        """Raises which array does not lie as its entry says."""
        for which, arg, entry in self._in.of(args, kwargs):
            flat = flatten(arg)
            wanted = spread(entry, arg, self._argument(which))
            for path, leaf, sharding in zip(flat.paths, flat.leaves, wanted, strict=True):
                if isinstance(leaf, jax.Array) and leaf.committed and isinstance(sharding, Sharding):
                    if not leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
                        name = f"`{path}` of {self._argument(which)}" if path else self._argument(which)
                        raise PlanMismatchError(
                            f"{name}, {leaf.dtype}{list(leaf.shape)}, lies by {leaf.sharding}, but its entry of "
                            f"`in_shardings` is {sharding}. Move it first: `shard(tree, plan)`, or `reshard(tree, "
                            "plan)`; or leave the entry out, to take the argument as it comes."
                        ) from error

    def _places(self, args: Any, kwargs: Any) -> Iterator[Place]:
        """Where the arrays of a call lie, and where they, and the results, are to lie."""
        for which, arg, entry in self._in.of(args, kwargs):
            flat = flatten(arg)
            for path, leaf in zip(flat.paths, flat.leaves, strict=True):
                if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.committed:
                    name = f"`{path}` of {self._argument(which)}" if path else self._argument(which)
                    yield Place(f"{name}, {leaf.dtype}{list(leaf.shape)}, lies on", in_order(leaf.sharding))
            yield from _entry_places(f"the entry of `in_shardings` for {self._argument(which)} is on", entry)
        yield from _entry_places(f"an entry of `out_shardings` of `{self._name}` is on", self._out)

    def _arrays_given(self, layout: Layout, leaves: list[Any], arguments: Any) -> Iterator[Given]:
        """The arrays of a call that are looked at before it runs."""
        slots = {at: slot for slot, group in enumerate(layout.groups) for at in group}
        names = [
            f"`{path}` of {self._argument(which)}" if path else self._argument(which)
            for which, arg, _ in self._in.of(arguments[0], dict(sorted(arguments[1].items())))
            for path in tree_paths(jax.tree.structure(arg))
        ]
        for at in layout.placed:
            yield Given(names[at], leaves[at], self._wanted[slots[at]], self._slots[slots[at]][1])

    def _check_devices(self, groups: Iterable[tuple[Any, list[int]]], leaves: list[Any], arguments: Any) -> None:
        """Raises where an array lies on other devices than its entry says."""
        if any(lies_elsewhere(leaves[at], wanted) for wanted, group in groups if wanted is not None for at in group):
            raise_apart(self._places(*arguments), None)

    def _traced(self, static: Static, fn_arrays: list[Any], lists: tuple[Sequence[Any], ...]) -> Any:
        args, kwargs = static.layout.joined(static, lists)
        self._check(args, kwargs)
        given = iter(fn_arrays)
        fn_leaves = [next(given) if is_traced(type(leaf)) else leaf for leaf in self._fn_leaves]
        out = jax.tree.unflatten(self._fn_treedef, fn_leaves)(*args, **kwargs)
        leaves, treedef = jax.tree.flatten(out)
        groups: dict[Any, list[int]] = {key: [] for key in self._out_slots}
        statics: list[int] = []
        for at, sharding in enumerate(spread(self._out, out, f"what `{self._name}` returns")):
            (groups[key_of(sharding)] if is_traced(type(leaves[at])) else statics).append(at)
        if len(groups) == 1 and not statics:
            return out
        order = np.argsort(np.array([*statics, *it.chain.from_iterable(groups.values())], np.int64)).tolist()
        lists = tuple([[leaves[at] for at in group] for group in groups.values()])
        return _Parted(lists, _Rest(treedef, [leaves[at] for at in statics], order))


def _entry_places(what: str, entry: Any) -> Iterator[Place]:
    for sharding in shardings_in(entry):
        if isinstance(sharding, Sharding) and (devices := in_order(sharding)):
            yield Place(what, devices)


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


class Lowered(Generic[P, R]):
    """A function that is lowered for arguments of some shapes."""

    def __init__(self, jitted: Jitted[P, R], static: Static, lowered: Any):
        self._jitted, self._static, self.lowered = jitted, static, lowered

    def as_text(self, dialect: str | None = None) -> str:
        return self.lowered.as_text(dialect)

    def compile(self, compiler_options: dict[str, Any] | None = None) -> "Compiled[P, R]":
        return Compiled(self._jitted, self._static, self.lowered.compile(compiler_options))


class Compiled(Generic[P, R]):
    """A function that is compiled for arguments of some shapes, and for the static ones that it was lowered with."""

    def __init__(self, jitted: Jitted[P, R], static: Static, compiled: Any):
        self._jitted, self._static, self.compiled = jitted, static, compiled

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        _, static, lists = self._jitted._bound(args, kwargs, runs=True)
        if static != self._static:
            raise PlanMismatchError(
                f"`{self._jitted._name}` was compiled for other arguments: they differ in their structure, or in what "
                f"is no array ({_difference(self._static, static)}); lower it with what you call it with."
            )
        out = self.compiled(self._jitted._fn_arrays, *lists)
        return out.joined() if type(out) is _Parted else out

    @property
    def input_shardings(self) -> Any:
        """How the arrays come in, as the program has them."""
        return self.compiled.input_shardings

    @property
    def argument_paths(self) -> dict[str, str]:
        """The path of each array within its argument, by the name that the array has in the program's text."""
        paths = [path.split("/", 2)[-1] for path in tree_paths(self._static.treedef)]
        groups = self._static.layout.groups
        return {f"lists[{n}][{i}]": paths[at] for n, group in enumerate(groups) for i, at in enumerate(group)}

    def as_text(self) -> str:
        return self.compiled.as_text()

    def memory_analysis(self) -> Any:
        return self.compiled.memory_analysis()

    def cost_analysis(self) -> Any:
        return self.compiled.cost_analysis()


def _difference(lowered: Static, given: Static) -> str:
    if lowered.treedef != given.treedef:
        return f"{lowered.treedef.num_leaves} leaves then, {given.treedef.num_leaves} now"
    pairs = zip(lowered.values, given.values, strict=False)
    then, now = next((pair for pair in pairs if type(pair[0]) is not type(pair[1]) or pair[0] != pair[1]), ("", ""))
    return f"{then!r:.60} then, {now!r:.60} now"

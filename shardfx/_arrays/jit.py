"""`filter_jit`: a function compiled under plans, as one `jax.jit` with one static argument."""

import dataclasses
import functools as ft
import inspect
import itertools as it
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Concatenate, Generic, NamedTuple, ParamSpec, TypeVar, overload

import jax
import numpy as np

from .._ground.errors import LeafTypeError, PlanMismatchError
from .._ground.tree import tree_paths
from .._plan import ShardPlan
from ..topology import MeshSpec
from .entries import (
    Donate,
    Donated,
    bound,
    by_parameter,
    checked,
    counts_as_given,
    donated,
    key_of,
    lacks,
    parameter_names,
    shardings_in,
    spread,
)
from .given import (
    Given,
    Parted,
    Rest,
    Static,
    is_abstract,
    is_placed,
    is_traced,
    joined,
    lies_apart,
    needs_marks,
    node_data,
    raise_apart,
    raise_elsewhere,
    raise_gone_or_shared,
    struct_of,
    taking,
    without_devices,
)
from .stages import Lowered, Traced, TracedArray


P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")

# The number of argument structures that one function remembers. Its programs are in the cache of `jax.jit`.
_FORMS = 128
_ARRAY = jax.ShapeDtypeStruct((), np.float32)
_NOTHING = Donated(frozenset())


@overload
def filter_jit(
    fn: Callable[P, R], *, in_shardings: Any = None, out_shardings: Any = None, donate: Donate = "none"
) -> "Jitted[P, R]": ...


@overload
def filter_jit(
    fn: None = None, *, in_shardings: Any = None, out_shardings: Any = None, donate: Donate = "none"
) -> "Decorator": ...


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
    For a module with functions, lower with `equinox.combine(plan.structs, model)`, since `plan.structs` alone has none.

    Plans without devices can be traced and lowered: `.trace(plan.structs).lower(lowering_platforms=("tpu",))`. The
    result of `.trace` lists the arguments and results of the function, with their paths and shardings.

    Static arguments are compared by value and by type: 1, 1.0 and True are three programs. A tree may have `None`
    instead of the functions that were planned with it, as `equinox.partition` leaves it.

    **Raises:**

    `PlanMismatchError` at once for a bare PartitionSpec, which has no mesh: `jax.set_mesh` is not used. At tracing, if
    arguments or results are not the trees of their plans, in paths, shapes or dtypes. At a call, if a plan has no
    devices; if `*args` or `**kwargs` are bound in another way than the entries say; if an array was deleted (if the
    function donates, all arrays are checked, otherwise the first of each entry); or if a donated array is given twice.
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
    given = Decorator(in_shardings, out_shardings, donate)
    return given if fn is None else given(fn)


@dataclasses.dataclass(frozen=True)
class Decorator:
    """A `filter_jit` that waits for its function, so that a type checker knows the function's signature."""

    in_shardings: Any
    out_shardings: Any
    donate: Donate

    def __call__(self, fn: Callable[P, R]) -> "Jitted[P, R]":
        return Jitted(fn, self.in_shardings, self.out_shardings, self.donate)


@dataclasses.dataclass(eq=False)
class _Form:
    """The positions of a call's arrays among all its leaves, for one structure of the arguments.

    **Arguments:**

    - `groups`: the positions of the arrays of each list that the program takes.
    - `takes`: for each of them what takes these arrays out of all leaves.
    - `statics`: the positions of all other leaves.
    - `has_data`: whether equal structures may differ in what their nodes hold.
    - `watched`: the first array of each entry. JAX does not look at its devices where it was placed before.
    - `alive`: the arrays whose buffers may be gone. Where none is donated these are the first of each list: what is
        donated is gone as a whole.
    - `donates`: whether an array is donated.
    - `static`, `shardings`: the static argument and the shardings of the last call.
    """

    groups: list[list[int]]
    takes: list[Callable[[list[Any]], Sequence[Any]]]
    statics: list[int]
    has_data: bool
    watched: list[int]
    alive: list[int]
    donates: bool
    static: Static | None = None
    shardings: list[Any] | None = None


class _Call(NamedTuple):
    """The arguments of a call, and the program's arguments made of them."""

    args: Any
    kwargs: Any
    static: Static
    lists: list[Sequence[Any]]


class Jitted(Generic[P, R]):
    """The function that [`shardfx.filter_jit`][] returns, with the signature of the function that was given.

    It is one `jax.jit`. Its static argument is everything that is not traced. The arrays go in as lists, one for each
    sharding in `in_shardings`, since these are known before any argument is. The results come out likewise, or as the
    function returns them if they are only arrays and `out_shardings` is not given.
    """

    def __init__(self, fn: Callable[P, R], in_shardings: object, out_shardings: object, donate: Donate):
        self._signature = inspect.signature(fn)
        self._name = getattr(fn, "__qualname__", type(fn).__name__)
        self._in = by_parameter(checked(in_shardings, "in_shardings"), self._signature, self._name)
        self._out = checked(out_shardings, "out_shardings")
        self._donated = donated(donate, self._signature)
        self._counts = counts_as_given(self._signature)
        # The function may be a module with arrays, which are traced too.
        self._fn_leaves, self._fn_treedef = jax.tree.flatten(fn)
        self._fn_arrays = [leaf for leaf in self._fn_leaves if is_traced(type(leaf))]
        wanted = shardings_in(self._in.forms)
        # The key of a sharding, and whether its arrays are donated: there is one list of arrays for each.
        self._slots = [*it.product(wanted, (False, True) if self._donated != _NOTHING else (False,))]
        self._wanted = [wanted[key] for key, _ in self._slots]
        self._results = shardings_in(self._out)
        self._is_abstract = any(map(is_abstract, [*self._wanted, *self._results.values()]))
        self._form = ft.lru_cache(maxsize=_FORMS)(self._form_of)
        self._run = self._jitted(getattr(fn, "__name__", type(fn).__name__))
        ft.update_wrapper(self, fn, updated=())

    def _jitted(self, name: str) -> Any:
        def traced(static: Static, fn_arrays: list[Any], *lists: Sequence[object]) -> Any:
            return self._traced(static, fn_arrays, lists)

        # The name that profiles show.
        traced.__name__ = traced.__qualname__ = name
        return jax.jit(
            traced,
            static_argnums=0,
            in_shardings=(None, *self._wanted),
            out_shardings=Parted([*self._results.values()], None) if len(self._results) > 1 else None,
            donate_argnums=[2 + at for at, (_, is_donated) in enumerate(self._slots) if is_donated],
        )

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
            out = self._run(call.static, self._fn_arrays, *call.lists)
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
        lists = [[without_devices(leaf) for leaf in own] for own in call.lists] if self._is_abstract else call.lists
        try:
            if self._is_abstract:
                raise_elsewhere(self._arrays(call), None)
            traced = self._run.trace(call.static, self._fn_arrays, *lists)
        except (TypeError, ValueError, AttributeError) as error:
            self._explain(error, call)
            raise
        arrays = (*self._own_arrays(), *self._taken(call, lists))
        results = tuple(self._returned(traced.out_info))
        return Traced(ft.partial(self._run_compiled, call.static), traced, arrays, results, self._mesh())

    def _mesh(self) -> MeshSpec | None:
        """The mesh of the first plan."""
        plans = jax.tree.leaves([self._in.forms, self._out], is_leaf=lambda node: isinstance(node, ShardPlan))
        return next((one.mesh for one in plans if isinstance(one, ShardPlan)), None)

    def _run_compiled(self, static: Static, compiled: jax.stages.Compiled, args: object, kwargs: object) -> Any:
        call = self._bound(args, kwargs, runs=True)
        if call.static != static:
            raise PlanMismatchError(
                f"`{self._name}` was compiled for other arguments: they differ in their structure, or in what "
                f"is no array ({static.difference(call.static)}); lower it with what you call it with."
            )
        out = compiled(self._fn_arrays, *call.lists)
        return out.joined() if type(out) is Parted else out

    def _bound(self, args: Any, kwargs: Any, *, runs: bool) -> _Call:
        if kwargs or len(args) not in self._counts:
            args, kwargs = bound(self, self._name, self._signature, args, kwargs)
        leaves, treedef = jax.tree.flatten((args, kwargs))
        form = self._form(treedef, tuple(map(type, leaves)))
        call = _Call(args, kwargs, self._static(form, treedef, leaves), [take(leaves) for take in form.takes])
        shardings = [leaves[at].sharding for at in form.watched]
        if shardings != form.shardings:
            if any(lies_apart(one.leaf, one.wanted) for one in self._arrays(call)):
                raise_apart(self._places(call), None)
            form.shardings = shardings
        alive = [leaves[at] for at in form.alive] if runs else []
        if True in [leaf.is_deleted() for leaf in alive] or (form.donates and len({*map(id, alive)}) < len(alive)):
            given = self._given(args, kwargs)
            raise_gone_or_shared(given[at] for at in form.alive)
        return call

    def _form_of(self, treedef: object, kinds: tuple[type, ...]) -> _Form:
        args, kwargs = jax.tree.unflatten(treedef, [_ARRAY if is_traced(kind) else object() for kind in kinds])
        self._check_taken(args, kwargs)
        groups = {slot: [] for slot in self._slots}
        for at, one in enumerate(self._given(args, kwargs)):
            if one.leaf is _ARRAY:
                groups[key_of(one.wanted), one.is_donated].append(at)
        placed = {slot: [at for at in group if is_placed(kinds[at])] for slot, group in groups.items()}
        donates = any(group for (_, is_donated), group in placed.items() if is_donated)
        return _Form(
            groups=[*groups.values()],
            takes=[taking(group) for group in groups.values()],
            statics=[at for at, kind in enumerate(kinds) if not is_traced(kind)],
            has_data=needs_marks(treedef),
            watched=[group[0] for (key, _), group in placed.items() if group and key is not None],
            alive=[at for group in placed.values() for at in (group if donates else group[:1])],
            donates=donates,
        )

    def _static(self, form: _Form, treedef: object, leaves: list[Any]) -> Static:
        values = [leaves[at] for at in form.statics]
        data = node_data(treedef) if form.has_data else []
        last = form.static
        if last is not None and last.holds([*values, *data]):
            return last
        try:
            static = form.static = Static([form.statics, *form.groups], treedef, values, data)
        except TypeError as error:
            found = next((value for value in values if not _is_hashable(value)), None)
            raise LeafTypeError(
                f"an argument of `{self._name}` holds {type(found).__name__} {found!r:.60}, which is no array and "
                "cannot be hashed, so it can be neither traced nor static; make it an array or something hashable."
            ) from error
        return static

    def _traced(self, static: Static, fn_arrays: list[Any], lists: tuple[Sequence[object], ...]) -> Any:
        args, kwargs = joined(static.treedef, static.positions, (static.values, *lists))
        self._given(args, kwargs, shapes=True)
        arrays = iter(fn_arrays)
        fn_leaves = [next(arrays) if is_traced(type(leaf)) else leaf for leaf in self._fn_leaves]
        out = jax.tree.unflatten(self._fn_treedef, fn_leaves)(*args, **kwargs)
        leaves, treedef = jax.tree.flatten(out)
        groups: dict[object, list[int]] = {"statics": [], **{key: [] for key in self._results}}
        for at, sharding in enumerate(spread(self._out, out, f"what `{self._name}` returns")):
            groups[key_of(sharding) if is_traced(type(leaves[at])) else "statics"].append(at)
        if len(self._results) == 1 and not groups["statics"]:
            return out
        statics, *found = [[leaves[at] for at in group] for group in groups.values()]
        return Parted(found, Rest(treedef, [*groups.values()], statics))

    def _given(self, args: Any, kwargs: Any, *, shapes: bool = False) -> list[Given]:
        """All leaves of the arguments; raises if they do not match their plans, with `shapes` also in shape
        and dtype.
        """
        names = parameter_names(self._signature, args, kwargs)
        found: list[Given] = []
        for at, (which, arg, entry) in enumerate(self._in.of(args, kwargs)):
            what = f"argument {which} of `{self._name}`"
            leaves, treedef = jax.tree.flatten(arg)
            wanted = spread(entry, arg, what, shapes=shapes, hint=self._in.hint)
            is_donated = (at if at < len(args) else None) in self._donated
            for path, leaf, sharding in zip(tree_paths(treedef), leaves, wanted, strict=True):
                name = f"`{path}` of {what}" if path else what
                found.append(Given(name, _under(names[at], path), leaf, sharding, is_donated, at))
        return found

    def _arrays(self, call: _Call, *, shapes: bool = False) -> list[Given]:
        given = self._given(call.args, call.kwargs, shapes=shapes)
        return [one for one in given if is_traced(type(one.leaf))]

    def _check_taken(self, args: Any, kwargs: Any) -> None:
        """Raises if the call lacks an argument that has an entry, and has another one that has none."""
        untaken = self._in.untaken(args, kwargs)
        given = self._in.of(args, kwargs) if untaken else ()
        bare = [which for which, arg, entry in given if entry is None and _ARRAY in jax.tree.leaves(arg)]
        if bare:
            raise PlanMismatchError(
                f"`in_shardings` has an entry for argument {untaken[0]} of `{self._name}{self._signature}`, which this "
                f"call lacks, and none for argument {bare[0]}, which it has. Pass arguments by position for a tuple, "
                "by name for a dict, or name them in the signature, which `functools.wraps` keeps for decorators."
            )

    def _explain(self, error: Exception, call: _Call) -> None:
        """Raises an error about the arguments if they explain the given error; else adds a note about missing ones."""
        if isinstance(error, PlanMismatchError):
            return
        try:
            arrays = self._arrays(call, shapes=True)
        except PlanMismatchError as mismatch:
            raise mismatch from error
        raise_apart(self._places(call), error)
        if "incompatible devices" in str(error):
            raise PlanMismatchError(
                f"`{self._name}` runs on some devices, and a `constrain` or `shard` inside it is for others; use plans "
                f"on one mesh inside one function, and `reshard` between functions. JAX says: {error}"
            ) from error
        raise_elsewhere(arrays, error)
        for which, arg, entry in self._in.of(call.args, call.kwargs):
            for path in it.islice(lacks(entry, arg), 1):
                error.add_note(
                    f"argument {which} of `{self._name}` lacks `{path}`, which is no array and was there when its plan "
                    "was made; `equinox.combine(arrays, model)` puts what is no array back."
                )

    def _places(self, call: _Call) -> Iterator[tuple[str, Any]]:
        """The shardings of a call's arrays, of its entries, and of its results, each with a text for messages."""
        for one in self._arrays(call):
            if is_placed(type(one.leaf)) and one.leaf.committed:
                yield f"{one.text} lies on", one.leaf.sharding
        for which, _, entry in self._in.of(call.args, call.kwargs):
            for sharding in shardings_in(entry).values():
                yield f"the entry of `in_shardings` for argument {which} of `{self._name}` is on", sharding
        for sharding in self._results.values():
            yield f"an entry of `out_shardings` of `{self._name}` is on", sharding

    def _own_arrays(self) -> Iterator[TracedArray]:
        """The arrays in the function itself, such as a module's parameters."""
        pairs = zip(tree_paths(self._fn_treedef), self._fn_leaves, strict=True)
        for at, (path, leaf) in enumerate([pair for pair in pairs if is_traced(type(pair[1]))]):
            yield TracedArray(_under(self._name, path), struct_of(leaf), name=f"fn_arrays[{at}]")

    def _taken(self, call: _Call, lists: Sequence[Sequence[object]]) -> Iterator[TracedArray]:
        """The arrays of the arguments, in the order of the program's parameters."""
        given = self._given(call.args, call.kwargs)
        for n, (group, leaves) in enumerate(zip(call.static.positions[1:], lists, strict=True)):
            for i, (at, leaf) in enumerate(zip(group, leaves, strict=True)):
                one, name = given[at], f"lists[{n}][{i}]"
                yield TracedArray(one.path, struct_of(leaf, one.wanted), one.is_donated, one.argument, name)

    def _returned(self, out: object) -> list[TracedArray]:
        """The arrays of the results, in the order of the program's results."""
        if type(out) is not Parted:
            pairs = zip(tree_paths(jax.tree.structure(out)), jax.tree.leaves(out), strict=True)
            return [TracedArray(path, struct_of(leaf)) for path, leaf in pairs]
        paths, found = tree_paths(out.rest.treedef), zip(out.rest.positions[1:], out.lists, strict=True)
        return [
            TracedArray(paths[at], struct_of(leaf, sharding))
            for (group, leaves), sharding in zip(found, self._results.values(), strict=True)
            for at, leaf in zip(group, leaves, strict=True)
        ]


def _under(name: str, path: str) -> str:
    return f"{name}/{path}" if path else name


def _is_hashable(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True

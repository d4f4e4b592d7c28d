"""`filter_jit`: compiles a function under plans, with one `jax.jit` for each list of
its arguments' shardings.
"""

import contextlib
import dataclasses
import functools as ft
import inspect
import itertools as it
import operator
import re
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

import equinox as eqx
import jax
import numpy as np

from .._ground.errors import LeafTypeError, PlanMismatchError
from .._ground.purity import WatchedArguments, raise_if_updated
from .._ground.tree import is_array_type, tree_paths
from .._plan import ShardPlan
from ..topology import MeshSpec
from .checked import Check, CheckedPrograms
from .entries import (
    Donate,
    arguments,
    at_key,
    donated_by_key,
    entries_by_key,
    parameter_keys,
    shardings_in,
    spread,
)
from .explicit_notes import explicit_axes_noted
from .given import (
    Given,
    check_given,
    is_abstract,
    is_placed,
    raise_apart,
    struct_of,
    without_devices,
)
from .partition import Parted, Static, node_data
from .stages import Lowered, Traced, TracedArray


P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")

# The number of argument structures that one function remembers. JAX caches the
# programs.
_FORMS = 128
_ARRAY = jax.ShapeDtypeStruct((), np.float32)


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
      positional parameter (the last
        entries may be left out), a dict by parameter name, or one entry for all
        parameters. An entry is a [`shardfx.ShardPlan`][], a `Sharding`, a tree of these
        or a prefix of such a tree, or `None`, which leaves the sharding to JAX.
    - `out_shardings`: such an entry for the results of `fn`.
    - `donate`: the arguments whose buffers the program may reuse: True or "all", False
      or "none", "all-except-first",
        or the positions or names of parameters. JAX warns if a donated buffer fits no
        output. Equinox's "warn" and "warn-except-first" mean "all" and
        "all-except-first" here.
    - `check`: a function that is called with what `.trace` returns, once for each
      program, before the program first runs, such as `shardfx.testing.verify`. If it
        raises, or returns something false other than `None`, nothing runs. A function
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
      mesh (`jax.set_mesh` is not used),
        and for shardings on different sets of devices.
    - `PlanMismatchError` at tracing: if the arguments or results differ from the trees
      of their plans in paths, shapes
        or dtypes, or if an argument has another sharding than its entry.
    - `PlanMismatchError` at a call: if a plan has no devices; if an array was deleted;
      if a donated array is given
        twice; or if an argument with an entry is missing while an argument with arrays
        has no entry. If the function donates nothing, only the first array of each
        sharding is checked for deletion.
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
    decorator = ft.partial(
        Jitted,
        in_shardings=in_shardings,
        out_shardings=out_shardings,
        donate=donate,
        check=check,
    )
    return decorator if fn is None else decorator(fn)


@dataclasses.dataclass(eq=False)
class _Form:
    """What one structure of arguments needs: its `jax.jit`, and the arrays to check at
    each call.

    **Arguments:**

    - `treedef`, `kinds`: the structure of the function and its arguments, and the type
      of each leaf.
    - `run`: the jitted function. It takes a static argument (all values that are no
      arrays) and then every array.
    - `is_array`: for each leaf of the function and its arguments, whether it is an
      array.
    - `statics`: the positions of the leaves that are no arrays.
    - `has_data`: whether structures that are equal may hold different static data, such
      as fields 1 and True.
    - `watched`: the positions, among the arrays, of the first array of each sharding in
      `in_shardings`. They are
        checked because JAX does not compare the devices of an array with the same
        sharding as an earlier one.
    - `is_donating`: whether an array is donated.
    - `alive`: the positions of the arrays to check for deletion: all if one is donated,
      else `watched`.
    - `last`: the static values of the last call, and its static argument; one tuple, so
      that threads do not mix them.
    - `shardings`: the shardings that the arrays of `watched` had at the last call.
    """

    treedef: Any
    kinds: tuple[type, ...]
    run: Any
    is_array: tuple[bool, ...]
    statics: list[int]
    has_data: bool
    watched: list[int]
    is_donating: bool
    alive: list[int]
    last: tuple[Sequence[Any], Static | None] = ((), None)
    shardings: list[Any] | None = None


class Jitted(Generic[P, R]):
    """The function that [`shardfx.filter_jit`][] returns, with the signature of `fn`.

    There is one `jax.jit` for each list of the arguments' shardings. Its static
    argument holds the structure of the arguments and all values that are not traced.
    The jitted function returns a list of arrays for each sharding in `out_shardings`,
    because the structure of the results is not known before tracing. If there are no
    `out_shardings` and all results are arrays, it returns the tree of results.
    """

    def __init__(
        self,
        fn: Callable[P, R],
        in_shardings: object,
        out_shardings: object,
        donate: Donate,
        check: Check | None = None,
    ):
        self._fn: Callable[..., R] = fn
        self._signature = inspect.signature(fn)
        arrays, self._rest = eqx.partition(fn, _is_array)
        # A function without arrays need not be flattened at each call.
        self._arrays = arrays if jax.tree.leaves(arrays) else None
        self._name = getattr(fn, "__qualname__", type(fn).__name__)
        forms = {"in_shardings": in_shardings, "out_shardings": out_shardings}
        shardings = {what: shardings_in(form, what) for what, form in forms.items()}
        raise_apart(self._name, shardings)
        self._results = shardings["out_shardings"]
        self._is_abstract = any(map(is_abstract, it.chain(*shardings.values())))
        self._keys = parameter_keys(self._signature)
        self._in = entries_by_key(in_shardings, self._keys, self._name)
        self._out = out_shardings
        self._donated = donated_by_key(donate, self._keys)
        # With this number of positional arguments a call needs no `Signature.bind`.
        self._arity = (
            len(self._keys)
            if [*self._keys.values()] == [*range(len(self._keys))]
            else None
        )
        self._form = ft.lru_cache(_FORMS)(self._form_of)
        self._jit = ft.lru_cache(_FORMS)(self._jit_of)
        self._last: _Form | None = None
        self._checked = None if check is None else CheckedPrograms(check, self._name)
        # JAX keeps the static argument of each program, and finds a program faster if
        # equal ones are one object.
        self._statics: weakref.WeakValueDictionary[Any, Static] = (
            weakref.WeakValueDictionary()
        )
        ft.update_wrapper(self, fn, updated=())

    @overload
    def __get__(self, instance: None, owner: Any = None) -> "Jitted[P, R]": ...

    @overload
    def __get__(
        self: "Jitted[Concatenate[Any, Q], R]", instance: object, owner: Any = None
    ) -> Callable[Q, R]: ...

    def __get__(self, instance: Any, owner: object = None) -> Any:
        return self if instance is None else ft.partial(self, instance)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if self._is_abstract:
            raise PlanMismatchError(
                f"`{self._name}` was called, and a plan or sharding of its"
                " `in_shardings` or `out_shardings` has no devices. It can be traced"
                " and lowered; to call it use"
                " `plan.on(plan.mesh.build(jax.devices()))`."
            )
        run, static, arrays = self._ready(args, kwargs)
        if self._checked is not None:
            self._checked.before_run(
                static, arrays, lambda: self.trace(*args, **kwargs)
            )
        try:
            out = run(static, *arrays)
        except (TypeError, ValueError, AttributeError) as error:
            if not isinstance(error, PlanMismatchError):
                self._explain(error, static, arrays)
            raise
        return out.rest.tree(*out.lists) if type(out) is Parted else out

    def lower(self, *args: object, **kwargs: object) -> Lowered[P, R]:
        """Traces and lowers the function for arguments or ShapeDtypeStructs."""
        return self.trace(*args, **kwargs).lower()

    def trace(self, *args: object, **kwargs: object) -> Traced[P, R]:
        """Traces the function for arguments or ShapeDtypeStructs. The plans need no
        devices.
        """
        form, static, arrays = self._bound(args, kwargs)
        taken = self._given(
            *static.tree(
                map(without_devices if self._is_abstract else struct_of, arrays)
            )
        )
        traced = form.run.trace(static, *[array.array for array in taken])
        traced_arrays = tuple(
            TracedArray(
                array.path,
                struct_of(array.array, array.wanted),
                array.is_donated,
                array.argument,
                f"arrays[{position}]",
            )
            for position, array in enumerate(taken)
        )
        # The mesh of the first plan.
        plans = jax.tree.leaves(
            [[*self._in.values()], self._out],
            is_leaf=lambda node: isinstance(node, ShardPlan),
        )
        mesh: MeshSpec | None = next(
            (array.mesh for array in plans if isinstance(array, ShardPlan)), None
        )
        return Traced(
            ft.partial(self._run_compiled, static),
            traced,
            traced_arrays,
            self._returned(traced.out_info),
            mesh,
        )

    def _run_compiled(
        self,
        lowered: Static,
        compiled: jax.stages.Compiled,
        args: Any,
        kwargs: Any,
    ) -> Any:
        _, static, arrays = self._ready(args, kwargs)
        if static != lowered:
            raise PlanMismatchError(
                f"`{self._name}` was compiled for other arguments: they differ in their"
                f" structure, or in what is no array ({lowered.values!r:.60} then,"
                f" {static.values!r:.60} now); lower it with what you call it with."
            )
        if self._checked is not None:
            self._checked.before_run(
                static, arrays, lambda: self.trace(*args, **kwargs)
            )
        out = compiled(*arrays)
        return out.rest.tree(*out.lists) if type(out) is Parted else out

    def _bound(self, args: Any, kwargs: Any) -> tuple[_Form, Static, Sequence[Any]]:
        """The `_Form` for the structure of a call, its static argument (all that is no
        array), and its arrays.
        """
        if kwargs or len(args) != self._arity:
            try:
                binding = self._signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{self._name}{self._signature}: {error}") from None
            binding.apply_defaults()
            args = binding.args
            kwargs = binding.kwargs
        leaves, treedef = jax.tree.flatten((self._arrays, args, kwargs))
        form = self._last
        kinds = tuple(map(type, leaves))
        if form is None or kinds != form.kinds or treedef != form.treedef:
            self._last = form = self._form(treedef, kinds)
        values = [leaves[position] for position in form.statics]
        parts = values + node_data(treedef) if form.has_data else values
        parts_of_last, static = form.last
        if (
            static is None
            or len(parts) != len(parts_of_last)
            or not all(map(operator.is_, parts, parts_of_last))
        ):
            static = self._interned(Static(treedef, form.is_array, values), parts)
            form.last = parts, static
        return form, static, [*it.compress(leaves, form.is_array)] if values else leaves

    def _ready(self, args: Any, kwargs: Any) -> tuple[Any, Static, Sequence[Any]]:
        """The jitted function for a call, and what to pass to it: the static argument
        and the arrays.

        Raises `PlanMismatchError` if an array was deleted, is misplaced, or is passed
        twice and donated.
        """
        form, static, arrays = self._bound(args, kwargs)
        alive = [arrays[position] for position in form.alive]
        shardings = [arrays[position].sharding for position in form.watched]
        is_twice = form.is_donating and len({*map(id, alive)}) < len(alive)
        if (
            is_twice
            or shardings != form.shardings
            or True in [array.is_deleted() for array in alive]
        ):
            self._given(*static.tree(arrays))
            form.shardings = shardings
        return form.run, static, arrays

    def _form_of(self, treedef: Any, kinds: tuple[type, ...]) -> _Form:
        is_array = tuple(map(is_array_type, kinds))
        tree = Static(treedef, is_array, it.repeat("")).tree(it.repeat(_ARRAY))
        taken = self._given(*tree, shapes=False)
        self._check_taken(*tree[1:])
        placed = [
            position
            for position, kind in enumerate(it.compress(kinds, is_array))
            if is_placed(kind)
        ]
        watched = [
            *{
                taken[position].wanted: position for position in reversed(placed)
            }.values()
        ]
        donated = tuple(one.is_donated for one in taken)
        return _Form(
            treedef,
            kinds,
            self._jit(tuple(one.wanted for one in taken), donated),
            is_array,
            statics=[position for position, one in enumerate(is_array) if not one],
            has_data=any(
                type(one).__eq__ is not object.__eq__ for one in node_data(treedef)
            ),
            watched=watched,
            is_donating=any(donated),
            alive=placed if any(donated) else watched,
        )

    def _jit_of(self, shardings: tuple[Any, ...], donated: tuple[bool, ...]) -> Any:
        """The jitted function for arrays with these shardings. `donated` says whether
        each array is donated.
        """

        def traced(static: Static, *arrays: object) -> Any:
            return self._traced(static, arrays)

        # The name that profiles show.
        traced.__name__ = traced.__qualname__ = self._fn_name
        return jax.jit(
            traced,
            static_argnums=0,
            in_shardings=shardings,
            out_shardings=(
                Parted(self._results, None) if len(self._results) > 1 else None
            ),
            donate_argnums=[*it.compress(it.count(1), donated)],
        )

    @property
    def _fn_name(self) -> str:
        return getattr(self._fn, "__name__", type(self._fn).__name__)

    def _interned(self, static: Static, parts: Sequence[Any]) -> Static:
        """The static argument of an earlier call that equals `static`; `static` if
        there is none.

        `parts` has the values in `static` and the static data of its structure, such as
        static fields of modules. Raises `LeafTypeError` if one of them cannot be
        hashed.
        """
        try:
            return self._statics.setdefault(static.key(parts), static)
        except TypeError as error:
            raise LeafTypeError(
                f"an argument of `{self._name}` holds a value that is no array and"
                f" cannot be hashed ({error}), so it can be neither traced nor static;"
                " make it an array or something hashable."
            ) from error

    def _traced(self, static: Static, arrays: Sequence[Any]) -> Any:
        fn, args, kwargs = static.tree(arrays)
        self._given(fn, args, kwargs)
        run = self._fn if fn is None else eqx.combine(fn, self._rest)
        words = {key: word for word, key in self._keys.items()}
        watched = WatchedArguments([*args, *kwargs.values()])
        with explicit_axes_noted(arrays):
            out = run(*args, **kwargs)
        names = [words.get(number, f"args[{number}]") for number in range(len(args))]
        raise_if_updated(self._fn_name, [*names, *kwargs], watched, out)
        leaves, treedef = jax.tree.flatten(out)
        numbers = {
            key: position for position, key in enumerate(["statics", *self._results])
        }
        order = [
            numbers[sharding if _is_array(leaf) else "statics"]
            for leaf, sharding in zip(
                leaves,
                spread(self._out, out, f"what `{self._name}` returns"),
                strict=True,
            )
        ]
        statics, *lists = [
            [*it.compress(leaves, [position == number for position in order])]
            for number in numbers.values()
        ]
        return (
            out
            if len(lists) == 1 and not statics
            else Parted(lists, Static(treedef, order, statics))
        )

    def _given(
        self, fn: Any, args: Any, kwargs: Any, *, shapes: bool = True
    ) -> list[Given]:
        """A description of each array that the function or its arguments hold.

        `fn` has the arrays of the function itself. Raises `PlanMismatchError` if the
        paths of arrays differ from those in the plans, if `shapes` is True and their
        shapes or dtypes differ, or if an array was deleted, has another sharding than
        its entry, or is passed twice and donated.
        """
        taken = []
        trees = [(None, self._name, fn), *arguments(self._keys, args, kwargs)]
        for argument, (key, name, tree) in enumerate(trees, -1):
            what = (
                f"`{name}`"
                if key is None
                else f"argument {_shown(key)} of `{self._name}`"
            )
            leaves, treedef = jax.tree.flatten(tree)
            try:
                shardings = spread(at_key(self._in, key), tree, what, shapes=shapes)
            except PlanMismatchError as error:
                raise PlanMismatchError(
                    f"{error}{self._fitting(key, tree, shapes)}"
                ) from error
            for path, leaf, sharding in zip(
                tree_paths(treedef), leaves, shardings, strict=True
            ):
                if _is_array(leaf):
                    text, path = (
                        (f"`{path}` of {what}", f"{name}/{path}")
                        if path
                        else (what, name)
                    )
                    is_donated = bool(at_key(self._donated, key))
                    taken.append(
                        Given(
                            text,
                            path,
                            leaf,
                            sharding,
                            is_donated,
                            None if key is None else argument,
                        )
                    )
        check_given(taken)
        return taken

    def _fitting(self, key: object, tree: object, shapes: bool) -> str:
        """The end of a message about an argument that does not fit its plan: the
        argument whose plan it fits, if there is one.
        """
        for other, entry in self._in.items():
            if other == key or not isinstance(entry, ShardPlan):
                continue
            with contextlib.suppress(PlanMismatchError):
                spread(entry, tree, "", shapes=shapes)
                return f" The plan of argument {_shown(other)} fits this argument."
        return ""

    def _check_taken(self, args: Any, kwargs: Any) -> None:
        """Raises `PlanMismatchError` if a parameter with an entry of `in_shardings`
        gets no argument while an argument with arrays has no entry. Then `in_shardings`
        probably names the wrong parameter.

        `args` and `kwargs` are the arguments of a call, with `_ARRAY` in the place of
        each array.
        """
        tree_by_key = {
            key: tree for key, _, tree in arguments(self._keys, args, kwargs)
        }
        missing = [
            key
            for key in self._in
            if self._in[key] is not None and key not in (int, str, *tree_by_key)
        ]
        bare = [
            key
            for key in tree_by_key
            if at_key(self._in, key) is None
            and _ARRAY in jax.tree.leaves(tree_by_key[key])
        ]
        if missing and bare:
            raise PlanMismatchError(
                f"`in_shardings` has an entry for argument {_shown(missing[0])} of"
                f" `{self._name}{self._signature}`, which this call lacks, and none for"
                f" argument {_shown(bare[0])}, which it has. Pass arguments by position"
                " for a tuple, by name for a dict, or name them in the signature,"
                " which `functools.wraps` keeps for decorators."
            )

    def _explain(self, error: Exception, static: Static, arrays: Sequence[Any]) -> None:
        """Raises `PlanMismatchError` if the arguments of a call caused `error`, which
        the program raised.

        `static` and `arrays` are the static argument and the arrays of that call.
        """
        taken = self._given(*static.tree(arrays))
        if "incompatible devices" in str(error):
            text = re.sub(
                r"arrays\[(\d+)\] of [^ ]*",
                lambda match: taken[int(match[1])].name,
                f"{error}",
            )
            raise PlanMismatchError(
                f"`{self._name}` runs on one set of devices in one order. Place its"
                " arguments, `shard(tree, plan)`; use plans on one mesh inside one"
                f" function, and `reshard` between functions. JAX says: {text}"
            ) from error

    def _returned(self, out: Any) -> tuple[TracedArray, ...]:
        """The arrays that the function returns, in the order of the program's results.

        `out` is what the traced program returns, with ShapeDtypeStructs for arrays.
        """
        if type(out) is not Parted:
            pairs = zip(
                tree_paths(jax.tree.structure(out)), jax.tree.leaves(out), strict=True
            )
            return tuple(TracedArray(path, struct_of(leaf)) for path, leaf in pairs)
        returned = []
        for number, (leaves, sharding) in enumerate(
            zip(out.lists, self._results, strict=True), 1
        ):
            paths = it.compress(
                tree_paths(out.rest.treedef),
                [position == number for position in out.rest.order],
            )
            returned += [
                TracedArray(path, struct_of(leaf, sharding))
                for path, leaf in zip(paths, leaves, strict=True)
            ]
        return tuple(returned)


def _is_array(leaf: object) -> bool:
    return is_array_type(type(leaf))


def _shown(key: int | str) -> str:
    """The text of an argument for messages: its position, or its name in backticks."""
    return f"`{key}`" if isinstance(key, str) else f"{key}"

"""The function that `filter_jit` returns, with one `jax.jit` for each list of its
arguments' shardings.
"""

import contextlib
import dataclasses
import functools as ft
import inspect
import itertools as it
import operator
import re
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
    Argument,
    Donate,
    arguments,
    at_key,
    donated_by_key,
    entries_by_key,
    parameter_keys,
    refuse_what_is_planned,
    shardings_in,
    shown_key,
    spread,
)
from .explicit_notes import explicit_axes_noted
from .form import Form
from .given import (
    Given,
    check_given,
    is_abstract,
    is_placed,
    raise_if_donated_twice,
    raise_unless_same_devices,
    struct_of,
    without_devices,
)
from .partition import Parted, Static, is_compared_by_value, node_data
from .stages import Lowered, Traced, TracedArray, TracedCall


P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
# The number of argument structures that one function remembers. JAX caches the
# programs.
_FORMS = 128
_ARRAY = jax.ShapeDtypeStruct((), np.float32)
# JAX's errors for a function where it takes an array.
_GOT_FUNCTION = re.compile(r"got <class '[\w.]*(custom_jvp|function|PjitFunction)'>")


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
        # What is read of the arguments of `filter_jit` once, before any call.
        self._fn: Callable[..., R] = fn
        self._signature = inspect.signature(fn)
        # `fn` may be a module that holds arrays. One without need not be flattened at
        # each call.
        fn_arrays, self._fn_without_arrays = eqx.partition(fn, _is_array)
        self._fn_arrays = fn_arrays if jax.tree.leaves(fn_arrays) else None
        self._name = getattr(fn, "__qualname__", type(fn).__name__)
        # `None` and the distinct shardings of each argument of `filter_jit`.
        entries = {"in_shardings": in_shardings, "out_shardings": out_shardings}
        shardings = {what: shardings_in(entry, what) for what, entry in entries.items()}
        raise_unless_same_devices(self._name, shardings)
        self._result_shardings = shardings["out_shardings"]
        self._is_abstract = any(map(is_abstract, it.chain(*shardings.values())))
        # By parameter name; the key of an argument is its position or its name.
        self._keys = parameter_keys(self._signature)
        self._entries_in = entries_by_key(in_shardings, self._keys, self._name)
        self._entry_out = out_shardings
        self._donated = donated_by_key(donate, self._keys)
        # With this number of positional arguments a call needs no `Signature.bind`.
        self._bare_arity: int | None = None
        if list(self._keys.values()) == list(range(len(self._keys))):
            self._bare_arity = len(self._keys)
        self._cached_form = ft.lru_cache(_FORMS)(self._form_of)
        self._form_of_last_call: Form | None = None
        self._cached_jit = ft.lru_cache(_FORMS)(self._jit_of)
        self._checked = None if check is None else CheckedPrograms(check, self._name)
        ft.update_wrapper(self, fn, updated=())

    @overload
    def __get__(self, instance: None, owner: Any = None) -> "Jitted[P, R]": ...

    @overload
    def __get__(
        self: "Jitted[Concatenate[Any, Q], R]",
        instance: object,
        owner: Any = None,
    ) -> Callable[Q, R]: ...

    def __get__(self, instance: Any, owner: object = None) -> Any:
        if instance is None:
            return self
        return ft.partial(self, instance)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if self._is_abstract:
            raise PlanMismatchError(
                f"`{self._name}` was called, and a plan or sharding of its"
                " `in_shardings` or `out_shardings` has no devices. It can be traced"
                " and lowered; to call it use"
                " `plan.on(plan.mesh.build(jax.devices()))`."
            )
        # `static` has all that is no array in the arguments.
        run, static, arrays = self._ready(args, kwargs)
        if self._checked is not None:
            self._checked.before_run(
                static, arrays, lambda: self.trace(*args, **kwargs)
            )
        try:
            out = run(static, *arrays)
        except (TypeError, ValueError, AttributeError) as error:
            if self._fn_arrays is not None and isinstance(self._entry_out, ShardPlan):
                refuse_what_is_planned(self._fn, self._entry_out, error)
            if not isinstance(error, PlanMismatchError):
                self._raise_for_arguments(error, static, arrays)
            raise
        except jax.errors.JaxRuntimeError as error:
            raise_if_donated_twice(self._name, arrays, error)
            raise
        if type(out) is Parted:
            return out.rest.tree(*out.lists)
        return out

    def lower(self, *args: object, **kwargs: object) -> Lowered[P, R]:
        """Traces and lowers the function for arguments or ShapeDtypeStructs."""
        return self.trace(*args, **kwargs).lower()

    def trace(self, *args: object, **kwargs: object) -> Traced[P, R]:
        """Traces the function for arguments or ShapeDtypeStructs. The plans need no
        devices.
        """
        form, static, arrays = self._bound(args, kwargs)
        struct_without_values = struct_of
        if self._is_abstract:
            struct_without_values = without_devices
        fn, args, kwargs = static.tree(map(struct_without_values, arrays))
        given_arrays = self._given(fn, args, kwargs)
        traced = form.run.trace(static, *[entry.array for entry in given_arrays])
        traced_arrays = []
        for position, entry in enumerate(given_arrays):
            traced_array = TracedArray(
                path=entry.path,
                struct=struct_of(entry.array, entry.expected),
                is_donated=entry.is_donated,
                argument=entry.argument,
                name=f"arrays[{position}]",
            )
            traced_arrays.append(traced_array)
        return Traced(
            _call=ft.partial(self._run_compiled, static),
            traced=traced,
            arrays=tuple(traced_arrays),
            results=self._returned(traced.out_info),
            mesh=self._first_mesh(),
            traced_call=TracedCall(function=self, args=tuple(args), kwargs=kwargs),
        )

    def _first_mesh(self) -> MeshSpec | None:
        """The mesh of the first plan of the arguments and results."""
        entries = [list(self._entries_in.values()), self._entry_out]
        is_plan = lambda node: isinstance(node, ShardPlan)
        for leaf in jax.tree.leaves(entries, is_leaf=is_plan):
            if is_plan(leaf):
                return leaf.mesh
        return None

    def _run_compiled(
        self,
        compiled_static: Static,
        compiled: jax.stages.Compiled,
        args: Any,
        kwargs: Any,
    ) -> Any:
        """Calls `compiled`, the program of this function for the static argument
        `compiled_static`, with the arguments of a call. Raises `PlanMismatchError` if
        the call has another static argument.
        """
        _, static, arrays = self._ready(args, kwargs)
        if static != compiled_static:
            raise PlanMismatchError(
                f"`{self._name}` was compiled for other arguments: they differ in their"
                " structure, or in what is no array"
                f" ({compiled_static.values!r:.60} then,"
                f" {static.values!r:.60} now); lower it with what you call it with."
            )
        if self._checked is not None:
            self._checked.before_run(
                static, arrays, lambda: self.trace(*args, **kwargs)
            )
        out = compiled(*arrays)
        if type(out) is Parted:
            return out.rest.tree(*out.lists)
        return out

    def _bound(self, args: Any, kwargs: Any) -> tuple[Form, Static, Sequence[Any]]:
        """The `Form` for the structure of a call, its static argument (all that is no
        array), and its arrays.
        """
        if kwargs or len(args) != self._bare_arity:
            try:
                binding = self._signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{self._name}{self._signature}: {error}") from None
            binding.apply_defaults()
            args = binding.args
            kwargs = binding.kwargs
        leaves, treedef = jax.tree.flatten((self._fn_arrays, args, kwargs))
        leaf_types = tuple(map(type, leaves))
        # For 38 arrays, to compare with the last call takes 1 us less than the hash of
        # the structure.
        form = self._form_of_last_call
        if form is None or leaf_types != form.leaf_types or treedef != form.treedef:
            form = self._cached_form(treedef, leaf_types)
            self._form_of_last_call = form
        values = [leaves[position] for position in form.static_positions]
        # All that is static in the call: the values, and the nodes' static data.
        parts = values
        if form.compares_data:
            parts = values + node_data(treedef)
        # The static argument of the last call serves again if nothing static differs.
        parts_of_last, static = form.last
        if (
            static is None
            or len(parts) != len(parts_of_last)
            or not all(map(operator.is_, parts, parts_of_last))
        ):
            static = self._static(treedef, form.is_array, values, parts)
            form.last = (parts, static)
        arrays = leaves
        if values:
            arrays = list(it.compress(leaves, form.is_array))
        return form, static, arrays

    def _ready(self, args: Any, kwargs: Any) -> tuple[Any, Static, Sequence[Any]]:
        """The jitted function for a call, and what to pass to it: the static argument
        and the arrays.

        Raises `PlanMismatchError` if an array was deleted, is misplaced, or is passed
        twice and donated.
        """
        form, static, arrays = self._bound(args, kwargs)
        checked_arrays = [arrays[position] for position in form.checked_for_deletion]
        shardings = [arrays[position].sharding for position in form.first_of_shardings]
        distinct_ids = set(map(id, checked_arrays))
        is_given_twice = form.is_donating and len(distinct_ids) < len(checked_arrays)
        are_deleted = [array.is_deleted() for array in checked_arrays]
        if is_given_twice or shardings != form.shardings or True in are_deleted:
            # The full check, which raises with the path of the array.
            self._given(*static.tree(arrays))
            form.shardings = shardings
        return form.run, static, arrays

    def _form_of(self, treedef: Any, leaf_types: tuple[type, ...]) -> Form:
        """What a structure of the function's arrays and its arguments needs. `treedef`
        is the structure, and `leaf_types` has the type of each leaf.

        Raises `PlanMismatchError` if the structure does not fit the plans of
        `in_shardings`.
        """
        is_array = tuple(map(is_array_type, leaf_types))
        # The trees with `_ARRAY` in place of each array, and "" in place of all else.
        without_values = Static(
            treedef=treedef,
            order=is_array,
            values=it.repeat(""),
        )
        fn, args, kwargs = without_values.tree(it.repeat(_ARRAY))
        given_arrays = self._given(fn, args, kwargs, compare_shapes=False)
        self._raise_if_entries_miss(args, kwargs)
        array_types = it.compress(leaf_types, is_array)
        # These positions, and those below, count arrays alone.
        placed = [
            position for position, kind in enumerate(array_types) if is_placed(kind)
        ]
        # The first position of each sharding.
        position_by_sharding = {
            given_arrays[position].expected: position for position in reversed(placed)
        }
        first_of_shardings = list(position_by_sharding.values())
        shardings = tuple(entry.expected for entry in given_arrays)
        donated = tuple(entry.is_donated for entry in given_arrays)
        return Form(
            treedef=treedef,
            leaf_types=leaf_types,
            run=self._cached_jit(shardings, donated),
            is_array=is_array,
            static_positions=[
                position for position, yes in enumerate(is_array) if not yes
            ],
            compares_data=any(map(is_compared_by_value, node_data(treedef))),
            first_of_shardings=first_of_shardings,
            is_donating=any(donated),
            checked_for_deletion=placed if any(donated) else first_of_shardings,
        )

    def _jit_of(self, shardings: tuple[Any, ...], donated: tuple[bool, ...]) -> Any:
        """The jitted function for arrays with these shardings. `donated` says whether
        each array is donated.
        """

        def traced(static: Static, *arrays: object) -> Any:
            return self._traced(static, arrays)

        # The name that profiles show.
        traced.__name__ = traced.__qualname__ = self._fn_name
        out_shardings = None
        if len(self._result_shardings) > 1:
            out_shardings = Parted(self._result_shardings, None)
        return jax.jit(
            traced,
            static_argnums=0,
            in_shardings=shardings,
            out_shardings=out_shardings,
            donate_argnums=list(it.compress(it.count(1), donated)),
        )

    @property
    def _fn_name(self) -> str:
        return getattr(self._fn, "__name__", type(self._fn).__name__)

    def _static(
        self,
        treedef: Any,
        is_array: Sequence[bool],
        values: Sequence[Any],
        parts: Sequence[Any],
    ) -> Static:
        """The static argument for a structure and its values that are no arrays.

        `parts` has the values and the static data of the structure, such as static
        fields of modules. Raises `LeafTypeError` if one of them cannot be hashed.
        """
        static = Static(
            treedef=treedef,
            order=is_array,
            values=values,
        )
        key = static.key_of(parts)
        try:
            hash(key)
        except TypeError as error:
            raise LeafTypeError(
                f"an argument of `{self._name}` holds a value that is no array and"
                f" cannot be hashed ({error}), so it can be neither traced nor static;"
                " make it an array or something hashable."
            ) from error
        return dataclasses.replace(static, key=key)

    def _traced(self, static: Static, arrays: Sequence[Any]) -> Any:
        """The results of the function, as `jax.jit` traces it. `static` has the
        structure of the arguments and all values that are no arrays.
        """
        fn, args, kwargs = static.tree(arrays)
        self._given(fn, args, kwargs)
        run = self._fn if fn is None else eqx.combine(fn, self._fn_without_arrays)
        name_by_key = {key: name for name, key in self._keys.items()}
        watched = WatchedArguments([*args, *kwargs.values()])
        with explicit_axes_noted(arrays):
            out = run(*args, **kwargs)
        names = [
            name_by_key.get(number, f"args[{number}]") for number in range(len(args))
        ]
        raise_if_updated(self._fn_name, [*names, *kwargs], watched, out)
        return self._parted(out)

    def _parted(self, out: Any) -> Any:
        """The results of the function with a list of arrays for each sharding; `out`
        itself if all of them are arrays and there is one list.
        """
        leaves, treedef = jax.tree.flatten(out)
        shardings = spread(self._entry_out, out, f"what `{self._name}` returns")
        values: list[Any] = []
        lists: list[list[Any]] = [[] for _ in self._result_shardings]
        # For each leaf, the number of its list; 0 for what is no array.
        order = []
        for leaf, sharding in zip(leaves, shardings, strict=True):
            if _is_array(leaf):
                number = self._result_shardings.index(sharding)
                lists[number].append(leaf)
                order.append(number + 1)
            else:
                values.append(leaf)
                order.append(0)
        if len(lists) == 1 and not values:
            return out
        rest = Static(
            treedef=treedef,
            order=order,
            values=values,
        )
        return Parted(lists, rest)

    def _given(
        self,
        fn: Any,
        args: Any,
        kwargs: Any,
        *,
        compare_shapes: bool = True,
    ) -> list[Given]:
        """A description of each array that the function or its arguments hold.

        `fn` has the arrays of the function itself. Raises `PlanMismatchError` if the
        paths of arrays differ from those in the plans, if `compare_shapes` is True and
        their shapes or dtypes differ, or if an array was deleted, has another sharding
        than its entry, or is passed twice and donated.
        """
        given_arrays = []
        function_itself = Argument(key=None, name=self._name, tree=fn)
        trees = [function_itself, *arguments(self._keys, args, kwargs)]
        # The function itself has no key, and comes before the argument of number 0.
        for number, (key, name, tree) in enumerate(trees, -1):
            what = f"`{name}`"
            if key is not None:
                what = f"argument {shown_key(key)} of `{self._name}`"
            leaves, treedef = jax.tree.flatten(tree)
            try:
                shardings = spread(
                    at_key(self._entries_in, key),
                    tree,
                    what,
                    compare_shapes=compare_shapes,
                )
            except PlanMismatchError as error:
                hint = self._hint_of_fitting_plan(key, tree, compare_shapes)
                hint += self._hint_of_names(key)
                is_for_all = isinstance(self._entries_in.get(int), ShardPlan)
                if is_for_all and len(self._keys) > 1:
                    hint += (
                        " One plan is for all arguments: give a tuple, one entry for"
                        " each."
                    )
                raise PlanMismatchError(f"{error}{hint}") from error
            is_donated = bool(at_key(self._donated, key))
            for path, leaf, sharding in zip(
                tree_paths(treedef), leaves, shardings, strict=True
            ):
                if not _is_array(leaf):
                    continue
                entry = Given(
                    name=f"`{path}` of {what}" if path else what,
                    path=f"{name}/{path}" if path else name,
                    array=leaf,
                    expected=sharding,
                    is_donated=is_donated,
                    argument=None if key is None else number,
                )
                given_arrays.append(entry)
        check_given(given_arrays)
        return given_arrays

    def _hint_of_names(self, key: object) -> str:
        """The end of a message about the argument `key`, whose entry of `in_shardings`
        is a dict that may be meant to name parameters.
        """
        entry = at_key(self._entries_in, key)
        if not isinstance(entry, dict) or entry.keys() & self._keys.keys():
            return ""
        first = next(iter(self._keys), "model")
        return (
            f" To name parameters, write those of {self._name}({', '.join(self._keys)}):"
            f" `in_shardings={{{first!r}: plan}}`."
        )

    def _hint_of_fitting_plan(
        self,
        key: object,
        tree: object,
        compare_shapes: bool,
    ) -> str:
        """The end of a message about the argument `key`, whose value `tree` does not
        fit its plan: the argument whose plan it fits, if there is one.
        """
        for other, entry in self._entries_in.items():
            if other == key or not isinstance(entry, ShardPlan):
                continue
            with contextlib.suppress(PlanMismatchError):
                spread(entry, tree, "", compare_shapes=compare_shapes)
                return f" The plan of argument {shown_key(other)} fits this argument."
        return ""

    def _raise_if_entries_miss(self, args: Any, kwargs: Any) -> None:
        """Raises `PlanMismatchError` if a parameter with an entry of `in_shardings`
        gets no argument while an argument with arrays has no entry. Then `in_shardings`
        probably names the wrong parameter.

        `args` and `kwargs` are the arguments of a call, with `_ARRAY` in the place of
        each array.
        """
        tree_by_key = {
            argument.key: argument.tree
            for argument in arguments(self._keys, args, kwargs)
        }
        without_argument = []
        for key, entry in self._entries_in.items():
            # `int` and `str` are the keys of `*args` and `**kwargs`.
            if entry is not None and key not in (int, str, *tree_by_key):
                without_argument.append(key)
        without_entry = []
        for key, tree in tree_by_key.items():
            has_arrays = _ARRAY in jax.tree.leaves(tree)
            if has_arrays and at_key(self._entries_in, key) is None:
                without_entry.append(key)
        if without_argument and without_entry:
            raise PlanMismatchError(
                "`in_shardings` has an entry for argument"
                f" {shown_key(without_argument[0])} of"
                f" `{self._name}{self._signature}`, which this call lacks, and none for"
                f" argument {shown_key(without_entry[0])}, which it has. Pass arguments by"
                " position for a tuple, by name for a dict, or name them in the signature,"
                " which `functools.wraps` keeps for decorators."
            )

    def _raise_for_arguments(
        self,
        error: Exception,
        static: Static,
        arrays: Sequence[Any],
    ) -> None:
        """Raises `PlanMismatchError` if the arguments of a call caused `error`, which
        the program raised. Adds a note to `error` if functions are among them.

        `static` and `arrays` are the static argument and the arrays of that call.
        """
        given_arrays = self._given(*static.tree(arrays))
        if _GOT_FUNCTION.search(str(error)):
            error.add_note(
                f"An argument of `{self._name}` holds functions, which are no arrays:"
                " pass `eqx.filter(tree, eqx.is_array)`."
            )
        if "incompatible devices" in str(error):
            text = re.sub(
                r"arrays\[(\d+)\] of [^ ]*",
                lambda match: given_arrays[int(match[1])].name,
                str(error),
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
        returned = []
        if type(out) is not Parted:
            paths = tree_paths(jax.tree.structure(out))
            for path, leaf in zip(paths, jax.tree.leaves(out), strict=True):
                returned.append(TracedArray(path, struct_of(leaf)))
            return tuple(returned)
        all_paths = tree_paths(out.rest.treedef)
        lists = zip(out.lists, self._result_shardings, strict=True)
        for list_number, (leaves, sharding) in enumerate(lists, 1):
            # `order` has the number of the list of each leaf.
            is_in_list = [number == list_number for number in out.rest.order]
            paths = it.compress(all_paths, is_in_list)
            for path, leaf in zip(paths, leaves, strict=True):
                returned.append(TracedArray(path, struct_of(leaf, sharding)))
        return tuple(returned)


def _is_array(leaf: object) -> bool:
    return is_array_type(type(leaf))

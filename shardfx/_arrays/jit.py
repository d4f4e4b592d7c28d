import difflib
import functools as ft
import inspect
import itertools as it
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import PartitionSpec

from .._errors import LeafTypeError, PlanMismatchError
from .._plan.shard_plan import ShardPlan


Donate = Literal["all", "all-except-first", "warn", "warn-except-first", "none"] | int | str | Sequence[int | str]


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
    `.compile()` of that gives a function with the signature of `fn` again.

    **Raises:**

    `PlanMismatchError` if a plan has no devices, an argument is not the tree that its plan is for, or a bare
    PartitionSpec is given, which says nothing of the mesh: `jax.set_mesh` is not asked.

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
    if fn is None:
        return lambda fn: filter_jit(fn, in_shardings=in_shardings, out_shardings=out_shardings, donate=donate)
    return _Jitted(fn, in_shardings, out_shardings, donate)


class _Static(eqx.Module):
    """What is not traced of a tree, as a tree without leaves."""

    treedef: Any = eqx.field(static=True)
    leaves: tuple[Any, ...] = eqx.field(static=True)

    def joined(self, arrays: list[Any]) -> Any:
        given = iter(arrays)
        return jax.tree.unflatten(self.treedef, [next(given) if leaf is _ARRAY else leaf for leaf in self.leaves])


class _Array:
    """Stands for a traced array among static leaves."""

    def __repr__(self) -> str:
        return "<array>"


_ARRAY = _Array()
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@ft.lru_cache(maxsize=256)
def _is_traced(kind: type) -> bool:
    return issubclass(kind, (jax.Array, Tracer, np.ndarray, np.generic, jax.ShapeDtypeStruct))


class _Program(NamedTuple):
    """A jitted function of lists of arrays, one list for each argument: for one structure of all arguments."""

    run: Any
    ends: tuple[int, ...]

    def lists(self, arrays: list[Any]) -> list[list[Any]]:
        return [arrays[start:end] for start, end in zip((0, *self.ends), self.ends, strict=False)]


class _Jitted:
    def __init__(self, fn: Callable[..., Any], in_shardings: Any, out_shardings: Any, donate: Donate):
        self._fn, self._out, self._donate = fn, _resolved(out_shardings), donate
        self._signature = inspect.signature(fn)
        self._in = _by_parameter(in_shardings, self._signature)
        kinds = [parameter.kind for parameter in self._signature.parameters.values()]
        self._positional = len(kinds) if all(kind in _POSITIONAL for kind in kinds) else -1
        # One jitted function for each structure of the arguments: jit wants a sharding for every array.
        self._program = ft.lru_cache(maxsize=None)(self._program_for)
        ft.update_wrapper(self, fn, updated=())

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else ft.partial(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        program, lists = self._bound(args, kwargs)
        return _joined(*program.run(*lists))

    def lower(self, *args: Any, **kwargs: Any) -> "_Lowered":
        """Traces and lowers the function for arguments, or structs, of these shapes."""
        program, lists = self._bound(args, kwargs)
        return _Lowered(self, program.run.lower(*lists))

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[_Program, list[list[Any]]]:
        if kwargs or len(args) != self._positional:
            bound = self._signature.bind(*args, **kwargs)
            bound.apply_defaults()
            args, kwargs = bound.args, bound.kwargs
        leaves, treedef = jax.tree.flatten((self._fn, *args, kwargs))
        traced = [_is_traced(type(leaf)) for leaf in leaves]
        rest = tuple([_ARRAY if is_array else leaf for leaf, is_array in zip(leaves, traced, strict=True)])
        try:
            program = self._program(treedef, rest)
        except TypeError as error:
            found = next((leaf for leaf in rest if type(leaf).__hash__ is None), None)
            if found is None:
                raise
            raise LeafTypeError(
                f"an argument of `{self._name()}` holds {type(found).__name__} {found!r:.60}, which is no array and "
                "cannot be hashed, so it can be neither traced nor static; make it an array or something hashable."
            ) from error
        return program, program.lists([leaf for leaf, is_array in zip(leaves, traced, strict=True) if is_array])

    def _name(self) -> str:
        return getattr(self._fn, "__qualname__", type(self._fn).__name__)

    def _program_for(self, treedef: Any, rest: tuple[Any, ...]) -> _Program:
        static = _Static(treedef, rest)
        _, *args, kwargs = static.joined([_ARRAY] * len(rest))
        positional, keywords = self._in.of(len(args), tuple(kwargs))
        pairs = [(str(at), arg, given) for at, (arg, given) in enumerate(zip(args, positional, strict=True))]
        pairs += [(f"`{name}`", kwargs[name], given) for name, given in keywords.items()]
        # The function itself comes first: it may be a module with arrays.
        whole = [[None] * _count(self._fn_leaves(treedef, rest)), *[self._placed(*pair) for pair in pairs[: len(args)]]]
        whole.append([one for pair in pairs[len(args) :] for one in self._placed(*pair)])
        run = jax.jit(
            ft.partial(_run, static),
            in_shardings=tuple(whole),
            out_shardings=(self._out, None),
            donate_argnums=_donated(self._donate, self._signature, len(args)),
        )
        return _Program(run, tuple(it.accumulate(len(shardings) for shardings in whole)))

    def _fn_leaves(self, treedef: Any, rest: tuple[Any, ...]) -> tuple[Any, ...]:
        return rest[: treedef.children()[0].num_leaves]

    def _placed(self, which: str, arg: Any, given: Any) -> list[Any]:
        """The sharding of each array of an argument, `None` where JAX is to take it as it comes."""
        arrays = jax.tree.map(lambda leaf: leaf if leaf is _ARRAY else None, arg)
        shardings = _resolved(given)
        if isinstance(given, ShardPlan) and jax.tree.structure(arrays) != jax.tree.structure(shardings):
            raise PlanMismatchError(
                f"argument {which} of `{self._name()}` is not the tree that its plan is for "
                f"({_difference(arrays, shardings)}); plan the tree that you pass."
            )
        placed: list[Any] = []

        def place(sharding: Any, below: Any) -> None:
            placed.extend([sharding] * len(jax.tree.leaves(below)))

        try:
            jax.tree.map(place, shardings, arrays, is_leaf=lambda node: node is None)
        except ValueError as error:
            raise PlanMismatchError(
                f"the entry of `in_shardings` for argument {which} of `{self._name()}` is no prefix of it: {error}"
            ) from error
        return placed


def _count(leaves: tuple[Any, ...]) -> int:
    return sum(leaf is _ARRAY for leaf in leaves)


def _run(static: _Static, *lists: list[Any]) -> tuple[Any, _Static]:
    fn, *args, kwargs = static.joined([array for arrays in lists for array in arrays])
    leaves, treedef = jax.tree.flatten(fn(*args, **kwargs))
    traced = [_is_traced(type(leaf)) for leaf in leaves]
    pairs = list(zip(leaves, traced, strict=True))
    out = jax.tree.unflatten(treedef, [leaf if is_array else None for leaf, is_array in pairs])
    return out, _Static(treedef, tuple([_ARRAY if is_array else leaf for leaf, is_array in pairs]))


def _joined(out: Any, rest: _Static) -> Any:
    return rest.joined(jax.tree.leaves(out))


class _Lowered:
    def __init__(self, jitted: _Jitted, lowered: Any):
        self._jitted, self.lowered = jitted, lowered

    def as_text(self, dialect: str | None = None) -> str:
        return self.lowered.as_text(dialect)

    def compile(self, compiler_options: dict[str, Any] | None = None) -> "_Compiled":
        return _Compiled(self._jitted, self.lowered.compile(compiler_options))


class _Compiled:
    def __init__(self, jitted: _Jitted, compiled: Any):
        self._jitted, self.compiled = jitted, compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        _, lists = self._jitted._bound(args, kwargs)
        return _joined(*self.compiled(*lists))

    def as_text(self) -> str:
        return self.compiled.as_text()

    def memory_analysis(self) -> Any:
        return self.compiled.memory_analysis()

    def cost_analysis(self) -> Any:
        return self.compiled.cost_analysis()


def _is_plan(node: Any) -> bool:
    return isinstance(node, ShardPlan)


def _resolved(entry: Any) -> Any:
    """A tree of plans and shardings as one of shardings."""
    return jax.tree.map(_shardings, entry, is_leaf=_is_plan)


def _shardings(given: Any) -> Any:
    """The shardings of a plan; other entries as they are, if they say on which mesh."""
    if isinstance(given, PartitionSpec):
        raise PlanMismatchError(
            f"`in_shardings` or `out_shardings` holds the bare spec {given}; say which mesh it is for: "
            f"`NamedSharding(plan.jax_mesh, {given})`."
        )
    if not isinstance(given, ShardPlan):
        return given
    if given.jax_mesh is None:
        raise PlanMismatchError(
            f"the plan is for the mesh {given.mesh} and has no devices, so arrays cannot be placed by it; use "
            "`plan.on(plan.mesh.build(jax.devices()))`."
        )
    return given.shardings


class _Entries(NamedTuple):
    """What `in_shardings` says of each parameter, and of what `*args` and `**kwargs` take."""

    positional: tuple[Any, ...]
    more: Any
    keywords: dict[str, Any]
    others: Any

    def of(self, count: int, names: tuple[str, ...]) -> tuple[list[Any], dict[str, Any]]:
        """The entries of a call with `count` positional arguments and the keywords `names`."""
        positional = [*self.positional[:count], *[self.more] * (count - len(self.positional))]
        return positional, {name: self.keywords.get(name, self.others) for name in names}


def _by_parameter(in_shardings: Any, signature: inspect.Signature) -> _Entries:
    parameters = signature.parameters.values()
    positional, keywords = _positional(signature), [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    more = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), None)
    others = next((p.name for p in parameters if p.kind is p.VAR_KEYWORD), None)
    if isinstance(in_shardings, dict) and (others is not None or set(in_shardings) <= set(signature.parameters)):
        rest = {name: entry for name, entry in in_shardings.items() if name not in (*positional, more, others)}
        given = tuple(in_shardings.get(name) for name in positional)
        return _Entries(given, in_shardings.get(more), rest, in_shardings.get(others))
    if isinstance(in_shardings, dict) and not set(signature.parameters).isdisjoint(in_shardings):
        unknown = next(name for name in in_shardings if name not in signature.parameters)
        near = difflib.get_close_matches(str(unknown), list(signature.parameters), n=1)
        raise PlanMismatchError(
            f"`in_shardings` names {unknown!r}, which is no parameter ({', '.join(signature.parameters)})"
            + (f"; did you mean {near[0]!r}?" if near else "; name parameters, or give a tuple, one entry for each.")
        )
    if isinstance(in_shardings, tuple | list):
        if len(in_shardings) > len(positional) and more is None:
            raise PlanMismatchError(
                f"`in_shardings` has {len(in_shardings)} entries, but there are {len(positional)} positional "
                f"parameters ({', '.join(positional)}); give one for each, or name parameters in a dict."
            )
        return _Entries(tuple(in_shardings), None, {}, None)
    return _Entries(
        (in_shardings,) * len(positional), in_shardings, dict.fromkeys(keywords, in_shardings), in_shardings
    )


def _positional(signature: inspect.Signature) -> list[str]:
    return [parameter.name for parameter in signature.parameters.values() if parameter.kind in _POSITIONAL]


def _donated(donate: Any, signature: inspect.Signature, count: int) -> tuple[int, ...]:
    if donate == "none":
        return ()
    if donate in ("all", "all-except-first", "warn", "warn-except-first"):
        return tuple(range(2 if donate.endswith("-except-first") else 1, count + 2))
    names = _positional(signature)
    variadic = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in signature.parameters.values())
    chosen = (donate,) if isinstance(donate, str | int) else tuple(donate)
    for one in chosen:
        if one not in names if isinstance(one, str) else one < 0 or (one >= len(names) and not variadic):
            raise ValueError(
                f"`donate` names {one!r}, which is no positional parameter ({', '.join(names)}); use those, their "
                'positions, "all", "all-except-first" or "none".'
            )
    positions = [names.index(one) if isinstance(one, str) else one for one in chosen]
    return tuple(1 + position for position in positions if position < count)


def _difference(arrays: Any, shardings: Any) -> str:
    here = {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(arrays)}
    there = {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(shardings)}
    extra, missing = sorted(here - there), sorted(there - here)
    if extra:
        return f"the plan has no array at `{extra[0]}`"
    return f"it has no array at `{missing[0]}`" if missing else "its nodes differ in their static fields"

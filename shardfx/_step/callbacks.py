"""A traced step whose callbacks to Python can be lowered without devices.

JAX lowers `jax.debug.print`, `jax.pure_callback` and the like only for the devices of
its own process, since the program holds a pointer to the callback. Here each of them
becomes a custom call with the same operands, results, effects and sharding as JAX's
lowering for CPUs has (`_callback_op_sharding` in `jax/_src/callback.py`, as of JAX
0.10.2), and with no pointer. So XLA gathers for it what it gathers for the callback.
"""

import copy
import functools as ft
from collections.abc import Iterable, Mapping, Set
from types import MappingProxyType
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np
from jax._src.interpreters.mlir import LoweringParameters
from jax.experimental import io_callback
from jax.extend.mlir import ir
from jax.interpreters import mlir

from .._ground.errors import ProgramError
from .jaxprs import equations_in, opened
from .lowered import (
    CALLS_BACK,
    CALLS_BACK_BY_SHARD,
    frames_of,
    is_library,
    place_text,
)


# The names under which users know the callbacks, by the names of JAX's primitives.
# `jax.debug.breakpoint` and `equinox.error_if` are made of them.
CALLBACKS: Mapping[str, str] = MappingProxyType(
    {
        "debug_print": "jax.debug.print",
        "debug_callback": "jax.debug.callback",
        "pure_callback": "jax.pure_callback",
        "io_callback": "jax.experimental.io_callback",
    }
)
_JAXPRS = (jex.ClosedJaxpr, jex.Jaxpr)
# A primitive that shows the user a sharding, and computes nothing.
_INSPECTION = "inspect_sharding"
_ON_ONE_DEVICE = "<mesh<[], device_ids=[0]>, []>"
# JAX's classes of the effects of callbacks in order.
_IN_ORDER = ("OrderedIOEffect", "OrderedDebugEffect")
# The version of XLA's foreign function interface.
_API_VERSION = 4


def without_callbacks(traced: Any) -> Any:
    """A traced step with a stand-in for each callback at any depth: in loops, branches,
    `shard_map`, derivatives and other functions of `jax.jit`. A step without callbacks
    is returned unchanged.
    """
    replaced = _Replacer().jaxpr(traced.jaxpr)
    if replaced is traced.jaxpr:
        return traced
    # JAX has no public way to lower another jaxpr with the shardings and the donation
    # of a traced function. All versions from 0.9 on hold them in this dict.
    changed = copy.copy(traced)
    changed._params = {**traced._params, "jaxpr": replaced}
    changed._lojax = None
    return changed


def lower(traced: Any, platform: str) -> Any:
    """Lowers a traced step for a platform, without its devices, with a stand-in for
    each callback to Python.

    Primitives of Equinox, as in the solvers of lineax and diffrax, hold their callbacks
    in a function that is traced while JAX lowers them. So JAX's rules for callbacks are
    replaced too.
    """
    rules: Any = _rules()
    parameters = LoweringParameters(override_lowering_rules=rules)
    return without_callbacks(traced).lower(
        lowering_platforms=(platform,),
        _private_parameters=parameters,
    )


@ft.lru_cache(maxsize=1)
def _rules() -> tuple[tuple[Any, Any], ...]:
    """Pairs of JAX's primitives of callbacks and the lowering rules of stand-ins."""

    def calls(x: jax.Array) -> None:
        jax.debug.print("{}", x)
        jax.debug.callback(lambda x: None, x)
        jax.pure_callback(lambda x: x, x, x)
        io_callback(lambda x: None, None, x)

    scalar = jax.ShapeDtypeStruct((), np.float32)
    primitives = {
        equation.primitive.name: equation.primitive
        for equation in jax.make_jaxpr(calls)(scalar).eqns
    }
    return tuple((primitives[name], _rule(name)) for name in primitives)


def _rule(name: str) -> Any:
    """The lowering rule of the stand-in for the callback `name`, in place of JAX's
    rule.
    """

    def lowered(ctx: Any, *operands: Any, **params: Any) -> Any:
        if len(ctx.tokens_in):
            # The order of callbacks moves nothing.
            ctx.set_tokens_out(ctx.tokens_in)
        return _lowered(
            ctx,
            *operands,
            by_shard=bool(params.get("partitioned", False)),
            has_side_effect=name != "pure_callback",
            for_one_device=False,
            place=f"`{CALLBACKS[name]}`",
        )

    return lowered


def callbacks_in(jaxpr: Any) -> tuple[str, ...]:
    """The callbacks in a jaxpr at any depth, each with its source line:
    "train.py:41 loss: `jax.debug.print`".
    """
    texts: dict[str, None] = {}
    for equation in equations_in(jaxpr):
        if equation.primitive.name in CALLBACKS:
            texts[_callback_text(equation)] = None
    return tuple(texts)


class _Replacer:
    """Replaces the callbacks in a jaxpr, and in the jaxprs that it contains. A jaxpr
    that two equations share is replaced once, so that JAX lowers it once.

    Callbacks in order pass a token from one to the next, which the program would take
    and return. The stand-ins have no order, as it moves no array.
    """

    def __init__(self):
        # By the identity of a jaxpr; the jaxpr is held so that no other gets its id.
        self.replaced: dict[int, tuple[Any, Any]] = {}

    def jaxpr(self, given: Any) -> Any:
        """The jaxpr `given` with its callbacks replaced, which is made once."""
        if id(given) not in self.replaced:
            self.replaced[id(given)] = given, self.made_anew(given)
        return self.replaced[id(given)][1]

    def made_anew(self, given: Any) -> Any:
        """The jaxpr `given` with its callbacks replaced; `given` itself if it has none."""
        jaxpr, consts = opened(given)
        equations = []
        for equation in jaxpr.eqns:
            if equation.primitive.name != _INSPECTION:
                equations.append(self.equation(equation))
        if _are_same(equations, jaxpr.eqns):
            return given
        effects = _without_order(jaxpr.effects)
        changed = jaxpr.replace(eqns=equations, effects=effects)
        # From JAX 0.12 on, a jaxpr is its own closed jaxpr.
        is_open = given is jaxpr
        return changed if is_open else jex.ClosedJaxpr(changed, consts)

    def equation(self, equation: jex.JaxprEqn) -> jex.JaxprEqn:
        """An equation with its callbacks replaced, or itself if it has none."""
        name = equation.primitive.name
        effects = _without_order(equation.effects)
        if name in CALLBACKS:
            is_debug = name.startswith("debug_")
            params = {
                "by_shard": bool(equation.params.get("partitioned", False)),
                "has_side_effect": name != "pure_callback",
                "for_one_device": is_debug and effects != equation.effects,
                "place": _callback_text(equation),
            }
            return equation.replace(
                primitive=_STAND_INS[name],
                params=params,
                effects=effects,
            )
        changed_params = {}
        for key, param in equation.params.items():
            rewritten = self.rewritten_param(param)
            if rewritten is not param:
                changed_params[key] = rewritten
        if not changed_params:
            return equation
        params = {**equation.params, **changed_params}
        return equation.replace(params=params, effects=effects)

    def rewritten_param(self, param: Any) -> Any:
        """A parameter of an equation with the callbacks in its jaxprs replaced."""
        if isinstance(param, _JAXPRS):
            return self.jaxpr(param)
        if not isinstance(param, tuple) or not param:
            return param
        parts = [self.rewritten_param(part) for part in param]
        if _are_same(parts, param):
            return param
        # The programs of a linear solve are a NamedTuple.
        return tuple(parts) if type(param) is tuple else type(param)(*parts)


def _are_same(values: Any, others: Any) -> bool:
    """Whether two sequences hold the same objects in the same order."""
    return len(values) == len(others) and all(
        value is other for value, other in zip(values, others, strict=True)
    )


def _without_order(effects: Set[Any]) -> Set[Any]:
    """Effects with a callback's plain effect in place of those of callbacks in order."""
    in_order = {effect for effect in effects if type(effect).__name__ in _IN_ORDER}
    return effects - in_order | _plain_effects() if in_order else effects


@ft.lru_cache(maxsize=1)
def _plain_effects() -> Set[Any]:
    """The effects of a callback without an order."""
    return jax.make_jaxpr(lambda: jax.debug.callback(lambda: None))().effects


def _callback_text(equation: jex.JaxprEqn) -> str:
    """The user's own source line of a callback, and the callback's name."""
    frames = frames_of(equation)
    frame_of_user = next((frame for frame in frames if not is_library(frame)), None)
    return f"{place_text(frame_of_user)}: `{CALLBACKS[equation.primitive.name]}`"


def _lowered(
    ctx: Any,
    *operands: Any,
    by_shard: bool,
    has_side_effect: bool,
    for_one_device: bool,
    place: str,
) -> Any:
    """Lowers a stand-in to a custom call. `ctx` is JAX's context of the lowering."""
    match ctx.module_context.axis_context:
        # The program of a `jit` for a known number of devices.
        case object(num_devices=int(count)) if for_one_device and count > 1:
            raise ProgramError(
                f"{place} with `ordered=True` runs on one device only, and the step on"
                f" {count}: JAX does not take it; leave `ordered=True` out."
            )
        # The body of a `shard_map`.
        case object(manual_axes=frozenset(manual), mesh=mesh):
            shared = [axis for axis in mesh.axis_names if axis not in manual]
            if shared and ctx.avals_out:
                raise ProgramError(
                    f"{place} returns arrays inside a `shard_map` over"
                    f" {sorted(manual)}, and JAX takes that only if all axes of the"
                    f" mesh are manual: {shared} are not; write `shard_map(...,"
                    " axis_names={*mesh.axis_names})`, or call back outside."
                )
            if shared:
                params = {
                    "by_shard": by_shard,
                    "has_side_effect": has_side_effect,
                    "for_one_device": for_one_device,
                    "place": place,
                }
                return _on_first(ctx, shared, operands, params)
            shardings = [
                f"<mesh<[]>, [{', '.join(['{}'] * len(aval.shape))}]>"
                for aval in ctx.avals_out
            ]
            shardings = shardings or ["<mesh<[]>, []>"]
        case _:
            shardings = [_ON_ONE_DEVICE] * max(1, len(ctx.avals_out))
    # JAX's number of the callback in its list. XLA calls nothing here.
    index = ir.IntegerAttr.get(ir.IntegerType.get_unsigned(64), 0)
    result_types = list(map(_type_of, ctx.avals_out))
    target = CALLS_BACK_BY_SHARD if by_shard else CALLS_BACK
    call = ir.Operation.create(
        "stablehlo.custom_call",
        results=result_types,
        operands=list(operands),
        attributes={
            "call_target_name": ir.StringAttr.get(target),
            "has_side_effect": ir.BoolAttr.get(has_side_effect),
            "backend_config": ir.DictAttr.get({"index": index}),
            "api_version": ir.IntegerAttr.get(
                ir.IntegerType.get_signless(32), _API_VERSION
            ),
            "operand_layouts": _row_major(operand.type for operand in operands),
            "result_layouts": _row_major(result_types),
            "sdy.sharding": ir.Attribute.parse(
                f"#sdy.sharding_per_value<[{', '.join(shardings)}]>"
            ),
        },
    )
    return list(call.results)


def _type_of(aval: Any) -> ir.Type:
    return ir.RankedTensorType.get(aval.shape, mlir.dtype_to_ir_type(aval.dtype))


def _row_major(types: Iterable[ir.Type]) -> ir.ArrayAttr:
    """The layouts of arrays in memory: a callback sees NumPy's order."""
    layouts = []
    for kind in types:
        rank = ir.RankedTensorType(kind).rank
        order: Any = np.arange(rank - 1, -1, -1)
        layouts.append(ir.DenseIntElementsAttr.get(order, type=ir.IndexType.get()))
    return ir.ArrayAttr.get(layouts)


def _on_first(
    ctx: Any,
    axes: list[str],
    operands: Any,
    params: Mapping[str, object],
) -> Any:
    """Lowers a stand-in within a `shard_map` that leaves the mesh axes `axes` to the
    compiler: their first devices call back, as `_debug_callback_partial_auto` in
    `jax/_src/debugging.py` does.
    """
    stand_in = _STAND_INS["debug_callback"]

    def run(*arrays: Any) -> list[Any]:
        def call() -> list[Any]:
            return stand_in.bind(*arrays, **params)

        def call_on_first() -> list[Any]:
            is_first = jax.lax.axis_index(tuple(axes)) == 0
            return jax.lax.cond(is_first, call, lambda: [])

        return jax.shard_map(call_on_first, in_specs=(), out_specs=[])()

    return mlir.lower_fun(run)(ctx, *operands)


def _stand_in(name: str) -> Any:
    """A primitive that is lowered to a custom call, and named as the callback is: XLA's
    programs have the name.
    """
    primitive = jex.Primitive(name)
    primitive.multiple_results = True
    # Without results, as for the callbacks that are bound here while JAX lowers.
    primitive.def_abstract_eval(lambda *_, **__: [])
    # JAX lowers what it caches once, with the source line of the first.
    mlir.register_lowering(primitive, _lowered, cacheable=False)
    return primitive


_STAND_INS = {name: _stand_in(name) for name in CALLBACKS}

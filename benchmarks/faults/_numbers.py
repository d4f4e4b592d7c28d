"""Runs a case on emulated devices and compares its numbers with one device in float64.

How far rounding may take a result is measured, not guessed. Three errors are taken of
each result, all against float64: that of one device in the program's own dtype, that of
a float64 run whose arguments are moved by half a unit in the last place of that dtype
(so an ill-conditioned program gets room), and one rounding of the largest element. A
result is wrong where it is further off than eight times their sum: sums over devices
have another order, but not other terms.

A result within four roundings of that of one device is right by this rule whatever the
reference is, so float64 is only asked for the others.
"""

import dataclasses
import functools as ft
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from ._data import MESHES, Case, Layout, Program, Spec, axes_of
from ._draws import apply, float_places, shapes_between
from ._values import arguments


ROUNDINGS = 8
WIDE = {"float32": "float64", "bfloat16": "float64", "complex64": "complex128"}


@dataclasses.dataclass(frozen=True)
class Expected:
    """One result on one device.

    **Arguments:**

    - `reference`: the numbers in float64.
    - `alone`: those of one device in the program's own dtype.
    - `allowed`: the largest difference from the reference that rounding explains.
    - `is_stable`: whether rounding leaves the result alone, if it holds integers.
    """

    reference: np.ndarray
    alone: np.ndarray
    allowed: float
    is_stable: bool


class Prepared:
    """A program's arguments, and its results on one device.

    **Arguments:**

    - `arguments`: the arrays that it takes.
    - `alone`: its results in its own dtype.
    """

    def __init__(self, program: Program):
        self.program = program
        self.arguments = arguments(program, shapes_between(program)[-1])
        function = jax.jit(function_of(program, None))
        self.alone = _arrays(function(*self.arguments))

    def is_close(self, results: list[np.ndarray]) -> bool:
        """Whether all results are within four roundings of those of one device."""
        epsilon = 4 * _epsilon(self.program.dtype)
        for result, alone in zip(results, self.alone, strict=True):
            if result.shape != alone.shape:
                return False
            exact = alone.dtype.kind not in "fc"
            scale = 0.0 if exact else epsilon * _magnitude(alone)
            if _largest(result, alone) > scale:
                return False
        return True

    @ft.cached_property
    def expected(self) -> list[Expected]:
        """The results in float64, and what rounding allows."""
        dtype = self.program.dtype
        with jax.enable_x64(True):
            wide = [_widened(array, dtype) for array in self.arguments]
            moved = [_moved(array, dtype, n) for n, array in enumerate(wide)]
            function = jax.jit(function_of(self.program, None))
            reference = _arrays(function(*wide))
            perturbed = _arrays(function(*moved))
        return [
            _expected(*results, dtype)
            for results in zip(self.alone, reference, perturbed, strict=True)
        ]


def _expected(
    alone: np.ndarray, reference: np.ndarray, perturbed: np.ndarray, dtype: str
) -> Expected:
    if reference.dtype.kind not in "fc":
        is_stable = bool(np.all(alone == reference) and np.all(alone == perturbed))
        return Expected(
            reference=reference, alone=alone, allowed=0.0, is_stable=is_stable
        )
    errors = (
        _largest(alone, reference),
        _largest(perturbed, reference),
        _epsilon(dtype) * _magnitude(reference),
    )
    allowed = ROUNDINGS * sum(errors)
    return Expected(
        reference=reference,
        alone=alone,
        allowed=allowed,
        is_stable=np.isfinite(allowed).item(),
    )


def compare(results: list[np.ndarray], expected: list[Expected]) -> dict[str, Any]:
    """How the results compare: the outcome, and the largest difference over what
    rounding allows.
    """
    worst: dict[str, Any] = {"outcome": "right", "error": 0.0}
    is_compared = False
    for place, (result, expectation) in enumerate(zip(results, expected, strict=True)):
        if result.shape != expectation.reference.shape:
            return {"outcome": "wrong", "error": float("inf"), "result": place}
        if not expectation.is_stable:
            continue
        is_compared = True
        difference = _largest(result, expectation.reference)
        same_kind = np.isfinite(result) == np.isfinite(expectation.alone)
        if difference <= expectation.allowed and np.all(same_kind):
            continue
        scale = max(_magnitude(expectation.reference), 1e-30)
        error = difference / scale if np.all(same_kind) else float("inf")
        if error >= worst["error"]:
            worst = {
                "outcome": "wrong",
                "error": float(f"{error:.3g}"),
                "allowed": float(f"{expectation.allowed / scale:.3g}"),
                "result": place,
            }
    if not is_compared:
        return {"outcome": "unstable"}
    return worst


def outcome(case: Case, ready: Prepared, step: Any = None) -> dict[str, Any]:
    """Runs the case on its mesh. An error of JAX or XLA is an outcome of its own. `step`
    is its function, if that is traced already.
    """
    try:
        function = sharded(case) if step is None else step
        results = _arrays(function(*ready.arguments))
    except Exception as error:  # XLA's errors have many types
        return {"outcome": "error", "message": f"{type(error).__name__}: {error}"[:800]}
    if ready.is_close(results):
        return {"outcome": "right", "error": 0.0}
    return compare(results, ready.expected)


def sharded(case: Case) -> Any:
    """The jitted function of the case on its mesh."""
    mesh = mesh_of(case.layout.mesh)
    place = ft.partial(sharding, mesh)
    inputs = tuple(place(spec) for spec in case.layout.arguments)
    function = function_of(case.program, case.layout)
    results = case.layout.results
    if results is None:
        return jax.jit(function, in_shardings=inputs)
    outputs = tuple(place(spec) for spec in results)
    if not case.program.gradient:
        return jax.jit(function, in_shardings=inputs, out_shardings=outputs[0])
    return jax.jit(function, in_shardings=inputs, out_shardings=outputs)


@ft.lru_cache
def mesh_of(name: str) -> Mesh:
    """The mesh of this name over the first devices."""
    count = int(np.prod(MESHES[name]))
    devices = np.array(jax.devices()[:count]).reshape(MESHES[name])
    return Mesh(devices, tuple(axes_of(name)))


def sharding(mesh: Mesh, spec: Spec) -> NamedSharding:
    """The sharding of a spec in letters."""
    entries = [tuple(entry) or None for entry in spec]
    return NamedSharding(mesh, P(*entries))


def function_of(program: Program, layout: Layout | None) -> Callable[..., Any]:
    """The program as a function of its arguments, with the layout's constraints."""
    mesh = None if layout is None else mesh_of(layout.mesh)

    def constrain(array: Any, spec: Spec | None) -> Any:
        if mesh is None or spec is None:
            return array
        return lax.with_sharding_constraint(array, sharding(mesh, spec))

    def forward(*arrays: Any) -> Any:
        remaining = list(arrays)
        if layout is not None:
            for place, spec in enumerate(layout.constraints):
                remaining[place] = constrain(remaining[place], spec)
        x = remaining.pop(0)
        for place, op in enumerate(program.operations):
            others = [remaining.pop(0) for _ in op.operands]
            x = apply(op, [x, *others], mesh)
            x = constrain(x, None if layout is None else layout.between[place])
        return x

    def gradient(*arrays_and_cotangent: Any) -> Any:
        *arrays, cotangent = arrays_and_cotangent
        places = float_places(program)

        def loss(*floats: Any) -> Any:
            filled = list(arrays)
            for place, array in zip(places, floats, strict=True):
                filled[place] = array
            return jnp.sum(forward(*filled).astype(cotangent.dtype) * cotangent)

        floats = [arrays[place] for place in places]
        return jax.grad(loss, tuple(range(len(floats))))(*floats)

    return gradient if program.gradient else forward


def _arrays(results: Any) -> list[np.ndarray]:
    arrays = []
    for leaf in jax.tree.leaves(results):
        array = np.asarray(leaf)
        if array.dtype == jnp.bfloat16:
            array = array.astype(np.float32)
        arrays.append(array)
    return arrays


def _widened(array: np.ndarray, dtype: str) -> np.ndarray:
    if np.issubdtype(array.dtype, np.integer):
        return array
    return array.astype(WIDE[dtype])


def _moved(array: np.ndarray, dtype: str, number: int) -> np.ndarray:
    """The array with each element moved by half a unit in the last place."""
    if np.issubdtype(array.dtype, np.integer):
        return array
    draws = np.random.default_rng(number)
    signs = draws.choice((-1.0, 1.0), array.shape)
    return array * (1 + _epsilon(dtype) / 2 * signs)


def _epsilon(dtype: str) -> float:
    return float(jnp.finfo("float32" if dtype in ("complex64", "int32") else dtype).eps)


def _magnitude(array: np.ndarray) -> float:
    """The largest absolute value of a finite element."""
    finite = np.abs(_wide(array)[np.isfinite(array)])
    return float(np.max(finite)) if finite.size else 0.0


def _largest(first: np.ndarray, second: np.ndarray) -> float:
    """The largest difference between finite elements. Elements that are not finite
    count where the two are not alike.
    """
    if not first.size:
        return 0.0
    if first.dtype.kind not in "fc":
        return float(np.max(np.abs(first.astype(np.int64) - second.astype(np.int64))))
    first = _wide(first)
    second = _wide(second)
    is_finite = np.isfinite(first) & np.isfinite(second)
    alike = (first == second) | (np.isnan(first) & np.isnan(second))
    if not np.all(alike[~is_finite]):
        return float("inf")
    differences = np.abs(first[is_finite] - second[is_finite])
    return float(np.max(differences)) if differences.size else 0.0


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)

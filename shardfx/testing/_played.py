"""A step as a function of arrays alone, and programs that evaluate it equation by
equation.
"""

import contextlib
import functools as ft
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.extend.core as jex
import numpy as np

from .._ground.keys import raw
from .._ground.purity import WatchedArguments
from .._ground.tree import flatten
from .._step import (
    compiler_options_of,
    is_jitted,
    mistakes_noted,
    with_copied_arrays,
    without_compiler_options,
    without_mesh,
)
from ._rounding import COARSE_UNITS, NARROW, noise_of
from ._tape import Tape


# Programs that run only a few times need not be fast.
_QUICKLY: dict[str, Any] = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
# The seeds of the roundings up and down.
_SEEDS = (1, 2, 3)


class Traced(NamedTuple):
    """A step as a function `run` of arrays only, with its jaxpr `closed`, its arguments
    `arrays`, and the `paths` of the arrays in its result. `run` has the
    `compiler_options` with which the step was jitted, and `closed` has none.
    """

    run: Callable[..., Any]
    closed: jex.ClosedJaxpr
    arrays: list[Any]
    paths: list[str]
    compiler_options: Mapping[str, Any]


def traced_step(step: Callable[..., object], args: Sequence[object]) -> Traced:
    """The step `step`, traced as a function of the arrays in `args`. Leaves that are no
    arrays are constants of it.
    """
    arrays, static = eqx.partition(args, eqx.is_array)
    leaves, args_structure = jax.tree.flatten(arrays)
    result_paths: list[str] = []

    def run(function: Callable[..., object], *leaves: jax.Array) -> list[Any]:
        """The arrays in the result of `function`, which is the step, and those that it
        changes in place.
        """
        combined = eqx.combine(args_structure.unflatten(leaves), static)
        watched = WatchedArguments(combined)
        with mistakes_noted():
            result = function(*combined)
        # What it changes in modules of nnx is a result too.
        updates = watched.updated(result)
        if updates:
            result = (result, updates)
        flat = flatten(result)
        result_paths.clear()
        results = []
        for path, leaf, is_array in zip(
            flat.paths, flat.leaves, flat.is_array, strict=True
        ):
            if is_array:
                result_paths.append(path)
                results.append(raw(leaf))
        return results

    traceable_step = without_compiler_options(step)
    closed = jax.make_jaxpr(ft.partial(run, traceable_step))(*leaves)

    def run_once(*leaves: jax.Array) -> list[Any]:
        """Runs a jitted step as it was jitted, on copies: it may donate arguments."""
        return run(with_copied_arrays(step), *map(jax.numpy.copy, leaves))

    # A step that is not jitted is compiled at least cost.
    fast_run = jax.jit(ft.partial(run, step), compiler_options=_QUICKLY)
    return Traced(
        run=run_once if is_jitted(step) else fast_run,
        closed=closed,
        arrays=leaves,
        paths=result_paths,
        compiler_options=compiler_options_of(step),
    )


class Played:
    """A compiled program that evaluates the jaxpr of the step `traced` equation by
    equation.

    With `alone`, it runs on one device without shardings. `wide` is the dtype to which
    narrower floats are cast. The program returns the step's results, and with
    `with_values` also the result of every equation. A program in float64 on one device
    can round results; `rounding` is the kind of rounding. If it is `None`, each call
    chooses. With `reorders_sums`, a rounded sum also has the error of another order of
    its summands, which takes a third longer to compile.
    """

    def __init__(
        self,
        traced: Traced,
        *,
        alone: bool,
        wide: object = None,
        with_values: bool = False,
        rounding: int | None = NARROW,
        reorders_sums: bool = False,
    ):
        """Compiles the program. `traced` is the step, and `alone`, `wide`,
        `with_values`, `rounding` and `reorders_sums` are those of the class.
        """
        self.arrays = traced.arrays
        # The numbers of the step's results, in `Tape.records`.
        self.result_numbers: list[int] = []
        self.tape = Tape(alone=alone, wide=wide, reorders_sums=reorders_sums)
        tape = self.tape
        is_wide = wide == np.float64
        is_rounded = is_wide and alone

        def run(arrays: list[Any], noise: Any) -> Any:
            """The step's results for `arrays`, and those of its equations by number.
            `noise` has the kind of rounding, the odd number that `__call__` makes of
            the seed, and the units in the last place by which results are rounded.
            """
            tape.records.clear()
            tape.bodies.clear()
            tape.values = {}
            tape.noise = None
            if is_rounded:
                kind, odd, units = noise
                if rounding is not None:
                    kind = rounding
                tape.noise = noise_of(kind, odd, units)
            args = list(map(tape.widened, arrays))
            closed = traced.closed
            outs, self.result_numbers[:] = tape.run(
                closed.jaxpr, closed.consts, args, tape.new_numbers(arrays)
            )
            if not with_values:
                return outs, {}
            return outs, tape.values

        # A reference runs without a mesh.
        mesh_context = without_mesh() if alone else contextlib.nullcontext()
        noise = _noise_args(NARROW, seed=0, units=0.0)
        with jax.enable_x64(is_wide), mesh_context:
            lowered = jax.jit(run).lower(self.arrays, noise)
            self.compiled = lowered.compile(_QUICKLY)

    def __call__(
        self,
        seed: int = 0,
        units: float = 0.0,
        kind: int = NARROW,
    ) -> tuple[list[np.ndarray], dict[int, Any]]:
        """The results of the step, and the results of its equations by their numbers in
        `Tape.records`.

        `seed` decides which numbers are rounded up; `units` and `kind` are those of
        `Noise`. A program with a `rounding` needs no `kind`.
        """
        noise = _noise_args(kind, seed, units)
        outs, values = self.compiled(self.arrays, noise)
        return list(map(np.asarray, outs)), values

    def rounded_results(self, kind: int = NARROW) -> list[list[np.ndarray]]:
        """The results of the step, rounded, for each seed."""
        return [self(seed, 1.0, kind)[0] for seed in _SEEDS]

    def coarse_results(self, kind: int = NARROW) -> list[list[np.ndarray]]:
        """The results of the step, coarsely rounded, for each seed."""
        return [self(seed, COARSE_UNITS, kind)[0] for seed in _SEEDS]

    def rounded_values(self, kind: int = NARROW) -> list[dict[int, Any]]:
        """The results of the equations, rounded, for each seed: first by one unit, then
        coarsely.
        """
        values_by_seed = []
        for units in (1.0, COARSE_UNITS):
            for seed in _SEEDS:
                _, values = self(seed, units, kind)
                values_by_seed.append(values)
        return values_by_seed


class ReferencePrograms:
    """The programs of a reference in float64 on one device: without rounding, and with
    more and more of it. Each is compiled when it is first needed, because the first
    rounding explains most differences.
    """

    def __init__(self, traced: Traced, has_narrow_floats: bool):
        """`traced` is the reference. `has_narrow_floats` is whether the step has floats
        of less than 32 bits, and so is compared in float64 too.
        """
        self.traced = traced
        self.has_narrow_floats = has_narrow_floats
        # Whether the program that reorders sums has the results of equations, too. They
        # are needed if the step is wrong, and take memory if it is not.
        self.keeps_values = False
        # By the kind of rounding, by whether sums are reordered, and by whether the
        # programs have the results of equations.
        self._programs: dict[tuple[int | None, bool, bool], Played] = {}

    def program(self, kind: int, *, reorders_sums: bool) -> Played:
        """The program that rounds in this way."""
        # One program for both kinds costs less than two, if both are needed.
        rounding = None if self.has_narrow_floats else kind
        with_values = reorders_sums and self.keeps_values
        key = (rounding, reorders_sums, with_values)
        if key not in self._programs:
            self._programs[key] = Played(
                self.traced,
                alone=True,
                wide=np.float64,
                with_values=with_values,
                rounding=rounding,
                reorders_sums=reorders_sums,
            )
        return self._programs[key]

    def exact_results(self) -> list[np.ndarray]:
        """The results without rounding."""
        results, _ = self.program(NARROW, reorders_sums=False)()
        return results

    def roundings(self, kind: int) -> list[Callable[[], list[list[np.ndarray]]]]:
        """Functions that return results with rounding, the least rounding first."""

        def rounded_results(*, reorders_sums: bool) -> list[list[np.ndarray]]:
            program = self.program(kind, reorders_sums=reorders_sums)
            return program.rounded_results(kind)

        def coarse_results() -> list[list[np.ndarray]]:
            return self.program(kind, reorders_sums=True).coarse_results(kind)

        def results_in_own_dtypes() -> list[list[np.ndarray]]:
            results, _ = Played(self.traced, alone=True)()
            return [results]

        roundings: list[Callable[[], list[list[np.ndarray]]]] = []
        roundings.append(ft.partial(rounded_results, reorders_sums=False))
        if kind == NARROW:
            roundings.append(results_in_own_dtypes)
        roundings.append(ft.partial(rounded_results, reorders_sums=True))
        roundings.append(coarse_results)
        return roundings


def _noise_args(
    kind: int,
    seed: int,
    units: float,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The rounding as arguments of a program, whose dtypes do not depend on x64."""
    odd = np.array(2 * seed + 1, np.uint32)
    return np.array(kind, np.int32), odd, np.array(units, np.float32)

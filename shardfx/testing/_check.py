"""Compares the results of a step under its plan with the results on one device."""

import contextlib
import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.extend.core as jex
import numpy as np
from jax.sharding import Mesh, NamedSharding

from .._ground.errors import MeshError, ProgramError
from .._ground.purity import WatchedArguments
from .._ground.text import array_text, plural, spec_text, table
from .._ground.tree import flatten
from .._step import (
    EquinoxJitted,
    Frame,
    JaxJitted,
    Refutation,
    judged,
    place_text,
    platform_of,
    step_of,
    without_mesh,
)
from ..cost import traffic
from ._args import made, shrunk
from ._blame import (
    MERGED,
    Blame,
    Compared,
    Fault,
    aligned,
    allowed,
    compared,
    differences,
    suspects,
)
from ._tape import Record, Tape


@dataclasses.dataclass(frozen=True)
class CheckedOutput:
    """One array that a step returns, compared with the reference.

    **Arguments:**

    - `path`: the path of the array in the step's result.
    - `difference`: the largest difference between the plan and the reference in
      float64. `at` is its index.
    - `allowed`: the largest difference that rounding explains.
    """

    __module__ = "shardfx.testing"

    path: str
    difference: float
    at: tuple[int, ...]
    allowed: float

    @property
    def is_right(self) -> bool:
        """Whether rounding explains the difference."""
        return self.difference <= self.allowed


@dataclasses.dataclass(frozen=True)
class CheckedStep:
    """The comparison of a step with its reference by [`shardfx.testing.check_step`][].
    It is true if rounding explains all differences, and `refutations` is empty.

    **Arguments:**

    - `outputs`: the arrays that the step returns.
    - `is_finite`: whether all numbers of the reference are finite. NaN equals only NaN,
      and an infinity only itself.
    - `lines`: the source lines of the first equation that differs, and of the equations
      that make its operands.
    - `story`: sentences about the first equation that differs.
    - `refutations`: what [`shardfx.testing.verify`][] says is wrong.
    """

    __module__ = "shardfx.testing"

    outputs: tuple[CheckedOutput, ...]
    is_finite: bool = True
    lines: tuple[Frame, ...] = ()
    story: tuple[str, ...] = ()
    refutations: tuple[Refutation, ...] = ()

    def __bool__(self) -> bool:
        return not self.refutations and all(one.is_right for one in self.outputs)

    def __str__(self) -> str:
        refuted = [
            f"XLA's partitioner computes this step wrongly: {refutation}"
            for refutation in self.refutations
        ]
        return "\n".join([*refuted, self._compared_text()])

    def _compared_text(self) -> str:
        """What the numbers say."""
        wrong = [one for one in self.outputs if not one.is_right]
        if not wrong:
            return (
                f"the plan changes none of {plural(len(self.outputs), 'output')} by"
                " more than rounding does"
            )
        rows = [("output", "difference", "rounding", "at")]
        rows += [
            (
                one.path or "-",
                f"{one.difference:.1e}",
                f"{one.allowed:.1e}",
                str([*one.at]),
            )
            for one in wrong
        ]
        head = (
            f"the plan changes {len(wrong)} of {plural(len(self.outputs), 'output')}:"
        )
        return "\n".join(
            [head, *table(rows, right={"difference", "rounding"}), "", *self.story]
        )

    __repr__ = __str__


# Programs that run only a few times need not be fast.
_QUICKLY: dict[str, Any] = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
# The seeds of the roundings up and down.
_SEEDS = (1, 2, 3)
_RANDOM = (
    "random_bits",
    "threefry2x32",
    "rng_bit_generator",
    "rng_uniform",
    "random_gamma",
)


def check_step(
    step: Callable[..., Any],
    *args: object,
    reference: Callable[..., Any] | None = None,
    mesh: Mesh | None = None,
    shrink: bool = False,
) -> CheckedStep:
    """Runs a step under its plan and on one device, and names the first equation whose
    results differ.

    [`shardfx.testing.verify`][] reads the partitioned program first, unless there is a
    `reference` or a `mesh`, or the step has a `shard_map`. If it refutes the program,
    the step is wrong. If it proves the program, numbers are compared all the same,
    because later passes of a compiler can break a program that is partitioned rightly,
    as in [openxla/xla#49122](https://github.com/openxla/xla/issues/49122).

    The reference is the same step without shardings on one device, in its own dtypes
    and in float64. To find the effect of rounding, the reference also runs in float64
    with every result rounded to the step's dtypes, and its outputs are compared with
    those without rounding. A step with narrower floats also runs in float32 under its
    plan, since rounding to float32 hides fewer differences.

    **Arguments:**

    - `step`: a function, also one that `jax.jit`, `equinox.filter_jit` or
      [`shardfx.filter_jit`][] returned. With
        `mesh`, a function of a mesh that returns the step.
    - `args`: arrays with their planned shardings, or `jax.ShapeDtypeStruct`s such as
      `plan.structs`, for which random
        arrays are made. No argument is donated. Emulated devices suffice, because XLA
        partitions for them as for real ones.
    - `reference`: a function of the same arguments with right results. A step with a
      `shard_map` over several devices
        cannot run on one device, and needs `reference` or `mesh`.
    - `mesh`: the mesh of the plan. The reference is then the step for a mesh of one
      device with the same axes.
    - `shrink`: whether to reduce all sizes first, as far as the shardings of `args`
      divide them in the same way. A size
        that the step fixes does not change.

    **Returns:**

    A [`shardfx.testing.CheckedStep`][], true if rounding explains all differences and
    nothing is refuted.
    `print` shows the outputs that differ; the first equation that is wrong although its
    inputs are right, with its source line, sharding and loop iteration; the collectives
    at these lines; and suspicious code in a `shard_map` under `check_vma=False`.

    **Raises:**

    `ProgramError` for a `shard_map` over several devices without `reference` and
    `mesh`. `MeshError` for structs on more devices than there are. Errors of the step
    are raised unchanged, as JAX's error for a donated array.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import shardfx as sfx

        mesh = sfx.MeshSpec({"data": 8}).build(jax.devices())
        x = jax.device_put(jnp.ones((64, 16)), jax.NamedSharding(mesh, jax.P("data")))
        assert sfx.testing.check_step(lambda x: jnp.tanh(x.T @ x), x)
        ```
    """
    if mesh is not None:
        ones = np.array([mesh.devices.flat[0]]).reshape([1] * mesh.devices.ndim)
        step, reference = (
            step(mesh),
            step(Mesh(ones, mesh.axis_names, axis_types=mesh.axis_types)),
        )
    given = shrunk(step, args) if shrink else args
    refutations: tuple[Refutation, ...] = ()
    if reference is None and mesh is None:
        refutations = _refutations(step, given)
    checked = _compared(step, made(given, mild=False), reference, mesh)
    has_structs = any(
        isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(given)
    )
    if has_structs and not checked.is_finite:
        checked = _compared(step, made(given, mild=True), reference, mesh)
    if not refutations:
        return checked
    lines = [one.source for one in refutations if one.source is not None]
    return dataclasses.replace(
        checked, refutations=refutations, lines=(*lines, *checked.lines)
    )


def _refutations(step: Any, args: Sequence[object]) -> tuple[Refutation, ...]:
    """What `verify` says is wrong with a step; nothing if there is nothing to read: no
    mesh, or a program that XLA refuses, whose error its run raises. Nor if the step has
    a `shard_map`: the program may be right, and the step lack a sum.
    """
    try:
        known = step_of(step, args)
        if known.is_without_mesh or "shard_map" in str(known.traced.jaxpr):
            return ()
        programs = known.programs(platform_of(jax.default_backend()))
    except (MeshError, ProgramError):
        return ()
    return judged(programs).refutations


def _compared(
    step: Any, args: Sequence[Any], reference: Any, mesh: Mesh | None
) -> CheckedStep:
    """The comparison that `check_step` returns, for `args` without ShapeDtypeStructs.

    `reference` is a function with right results; `None` for `step` itself. `mesh` is
    the mesh of the plan, if known.
    """
    ours = _traced(step, args)
    devices = {
        device
        for one in ours.arrays
        if isinstance(one, jax.Array)
        for device in one.devices()
    }
    device = (
        mesh.devices.flat[0]
        if mesh is not None
        else min(devices or jax.devices(), key=lambda one: one.id)
    )

    def on_one(leaf: object) -> object:
        """A copy of an array on one device, made through the host. A direct copy would
        keep Explicit axes in its type.
        """
        if not isinstance(leaf, jax.Array):
            return leaf
        made = jax.device_put(np.asarray(_data(leaf)), device)
        is_key = jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return (
            jax.random.wrap_key_data(made, impl=jax.random.key_impl(leaf))
            if is_key
            else made
        )

    if reference is None:
        # The step is not traced anew: one that reads the Explicit mesh of its arguments
        # cannot be traced for arrays of one device.
        theirs = ours._replace(arrays=[on_one(array) for array in ours.arrays])
    else:
        theirs = _traced(reference, jax.tree.map(on_one, args))
    exactly = _Played(theirs, alone=True, wide=np.float64)
    exact = exactly()[0]

    def outputs(
        made: Sequence[np.ndarray], others: Sequence[Sequence[np.ndarray]]
    ) -> list[CheckedOutput]:
        """The comparison of the step's outputs `made` with the reference in float64.

        `others` are outputs of the reference with rounding. They show which differences
        rounding explains.
        """
        found: list[CheckedOutput] = []
        for path, one, whole, *rounded in zip(
            ours.paths, made, exact, *others, strict=True
        ):
            apart = differences(one, whole)
            place = (
                tuple(map(int, np.unravel_index(int(apart.argmax()), apart.shape)))
                if apart.size
                else ()
            )
            found.append(
                CheckedOutput(
                    path,
                    float(apart.max(initial=0.0)),
                    place,
                    allowed(whole, rounded, one.dtype),
                )
            )
        return found

    made = [*map(np.asarray, ours.run(*[jax.numpy.copy(one) for one in ours.arrays]))]
    rounded = [exactly(1, seed)[0] for seed in _SEEDS]
    found = outputs(made, rounded)
    if not all(one.is_right for one in found):
        found = outputs(made, [*rounded, _Played(theirs, alone=True)()[0]])
    is_narrow = re.search(r"\b(b?f16|f8_\w+)\[", str(ours.closed)) is not None
    wide = np.float32 if is_narrow and all(one.is_right for one in found) else None
    if wide:
        # An error that bfloat16 hides shows in float32.
        found = outputs(
            _Played(ours, alone=False, wide=wide)()[0],
            [exactly(2, seed)[0] for seed in _SEEDS],
        )
    is_finite = all(np.isfinite(one).all() for one in exact if one.dtype.kind in "fc")
    checked = CheckedStep(tuple(found), is_finite)
    return checked if checked else _blamed(ours, theirs, checked, wide)


class _Traced(NamedTuple):
    """A step as a function `run` of arrays only, with its jaxpr `closed`, its arguments
    `arrays`, and the `paths` of the arrays in its result.
    """

    run: Callable[..., Any]
    closed: jex.ClosedJaxpr
    arrays: list[Any]
    paths: list[str]


def _traced(step: Callable[..., object], args: Sequence[object]) -> _Traced:
    arrays, rest = eqx.partition(args, eqx.is_array)
    leaves, structure = jax.tree.flatten(arrays)
    paths: list[str] = []

    def run(*leaves: jax.Array) -> list[Any]:
        combined = eqx.combine(structure.unflatten(leaves), rest)
        watched = WatchedArguments(combined)
        result = step(*combined)
        # What it changes in modules of nnx is a result too.
        updates = watched.updated(result)
        out = flatten((result, updates) if updates else result)
        paths[:] = [
            path for path, yes in zip(out.paths, out.is_array, strict=True) if yes
        ]
        return [
            _data(leaf)
            for leaf, yes in zip(out.leaves, out.is_array, strict=True)
            if yes
        ]

    closed = jax.make_jaxpr(run)(*leaves)
    is_jitted = isinstance(step, JaxJitted | EquinoxJitted)
    return _Traced(
        run if is_jitted else jax.jit(run, compiler_options=_QUICKLY),
        closed,
        leaves,
        paths,
    )


def _data(leaf: Any) -> Any:
    """`leaf` itself; for an array of PRNG keys its key data."""
    return (
        jax.random.key_data(leaf)
        if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        else leaf
    )


class _Played:
    """A compiled program that evaluates the jaxpr of the step `traced` equation by
    equation.

    With `alone`, it runs on one device without shardings. `wide` is the dtype to which
    narrower floats are cast. The program returns the step's results, and with `keeps`
    also the result of every equation.
    """

    def __init__(
        self, traced: _Traced, *, alone: bool, wide: object = None, keeps: bool = False
    ):
        self.arrays, self.ids = traced.arrays, list[int]()
        tape = self.tape = Tape(alone=alone, wide=wide)

        def run(arrays: list[Any], noise: Any) -> Any:
            tape.records.clear()
            tape.bodies.clear()
            tape.values, (kind, odd) = {}, noise
            is_rounded = wide == np.float64
            tape.noise = (
                (kind, odd.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))
                if is_rounded
                else None
            )
            closed, args = traced.closed, [*map(tape.widened, arrays)]
            outs, self.ids[:] = tape.run(
                closed.jaxpr, closed.consts, args, tape.unknown(arrays)
            )
            return outs, tape.values if keeps else {}

        # A reference runs without a mesh.
        context = without_mesh() if alone else contextlib.nullcontext()
        noise = np.array(0, np.int32), np.array(0, np.uint32)
        with jax.enable_x64(wide == np.float64), context:
            self.compiled = jax.jit(run).lower(self.arrays, noise).compile(_QUICKLY)

    def __call__(
        self, kind: int = 0, seed: int = 0
    ) -> tuple[list[np.ndarray], dict[int, Any]]:
        """The results of the step, and the results of its equations by their numbers in
        `Tape.records`.

        `kind` is 0 for no rounding, 1 for rounding to the step's dtypes, and 2 for
        rounding to the wider of those and float32. `seed` decides which numbers are
        rounded up. Only a program in float64 rounds.
        """
        odd = np.array(2 * seed + 1, np.uint32)
        outs, values = self.compiled(self.arrays, (np.array(kind, np.int32), odd))
        return [*map(np.asarray, outs)], values


def _blamed(
    ours: _Traced, theirs: _Traced, found: CheckedStep, wide: object
) -> CheckedStep:
    """The comparison `found` of the step `ours` with the reference `theirs`, with the
    first wrong equation added.

    `wide` is the dtype to which narrower floats of the step were cast for the
    comparison, or `None`.
    """
    try:
        played = _Played(ours, alone=False, wide=wide, keeps=True)
    except jax.errors.JaxRuntimeError as error:
        story = (
            "no equation is named: XLA refuses the step where every value is kept:"
            f" {error!s:.200}"
        )
        return dataclasses.replace(found, story=(story,))
    exactly = _Played(theirs, alone=True, wide=np.float64, keeps=True)
    arrays, exact = played()[1], exactly()[1]
    rounded = [exactly(2 if wide else 1, seed)[1] for seed in _SEEDS]
    records, others = played.tape.records, exactly.tape.records
    rows: dict[int, Compared] = {}
    for one, other in aligned(records, others).items():
        if one in arrays and other in exact:
            made, whole = np.asarray(arrays[one]), np.asarray(exact[other])
            most = allowed(whole, [run[other] for run in rounded], made.dtype)
            rows[one] = compared(records[one], made, others[other], whole, most)
    wrong = [
        number
        for number, one in zip(played.ids, found.outputs, strict=True)
        if not one.is_right
    ]
    fault = Blame(records, rows).fault(wrong)
    lines, story = (
        ((), ()) if fault is None else _told(records, rows, fault, played, arrays)
    )
    return dataclasses.replace(
        found, lines=lines, story=(*story, *suspects(played.tape))
    )


def _told(
    records: Sequence[Record],
    rows: Mapping[int, Compared],
    fault: Fault,
    ours: _Played,
    arrays: Mapping[int, Any],
) -> tuple[tuple[Frame, ...], list[str]]:
    """The source lines of the first wrong equation and of the `fault.sources`, and
    sentences that describe them.

    `rows` has the comparisons of the equations `records` with the reference, and
    `arrays` their results, by number. `ours` is the compiled step; the last sentences
    name its collectives at these source lines.
    """
    record, one = records[fault.number], rows.get(fault.number, Compared(False))
    story = [
        f"the first equation that differs: {_equation(record, fault.number, arrays)}"
    ]
    if one.is_same:
        waits = " and ".join(
            f"the {role} over {axis}"
            for axis, role in one.roles.items()
            if role in MERGED
        )
        story += [
            f"    it waits for {waits}, and leaves its shard_map as if it were whole"
        ]
    elif math.isfinite(one.difference):
        story += [
            f"    by up to {one.difference:.1e}, of numbers up to {one.scale:.1e}, at"
            f" {[*one.at]}"
        ]
    story += [f"    in turn {fault.turn} of its loop"] if fault.turn is not None else []
    for at in fault.sources:
        waits = (
            [
                f"{role} over {axis}"
                for axis, role in rows[at].roles.items()
                if role in MERGED
            ]
            if at in rows
            else []
        )
        why = f", which waits for the {' and the '.join(waits)}" if waits else ""
        story.append(
            f"it takes what comes from {_equation(records[at], at, arrays)}{why}"
        )
    places = [*fault.sources, fault.number]
    if any(records[at].primitive in _RANDOM for at in places):
        story.append(
            "random numbers here hang on the layout: make them outside of shard_map,"
            " with threefry keys, and with `jax_threefry_partitionable` on"
        )
    lines = tuple(dict.fromkeys(frame for at in places for frame in records[at].frames))
    near = {(frame.file, frame.line) for frame in lines}
    sent = [
        row
        for row in traffic(ours.compiled).rows
        if row.source and (row.source.file, row.source.line) in near
    ]
    kinds = dict.fromkeys(
        f"{row.kind} over {' x '.join(row.axes) or '-'} at {place_text(row.source)}"
        for row in sent
    )
    return lines, [*story, *(f"the plan sends there: {kind}" for kind in kinds)]


def _equation(record: Record, number: int, arrays: Mapping[int, Any]) -> str:
    """The text of an equation with its source line, and with the sharding of its result
    if `arrays` has the result under `number`.
    """
    told = f"`{record.primitive}` at {place_text(next(iter(record.frames), None))}"
    if number not in arrays:
        return told
    made, inside = (
        arrays[number],
        [one for one in record.leading if not isinstance(one, int)],
    )
    text = array_text(record.dtype, made.shape[len(record.leading) :])
    if inside:
        axes = ", ".join(name for own in inside for name, _ in own)
        return f"{told}: {text} on each device of {axes}"
    spec = made.sharding.spec if isinstance(made.sharding, NamedSharding) else ()
    return f"{told}: {text} {spec_text([*spec][len(record.leading) :])}"

"""Compares the results of a step under its plan with the results on one device."""

import dataclasses
import functools as ft
import itertools as it
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from .._ground.errors import MeshError, ProgramError
from .._ground.keys import as_keys, raw
from .._ground.misuse import called
from .._ground.spec import DType
from .._ground.text import array_text, plural, table
from .._step import (
    Frame,
    Refutation,
    equations_in,
    judged,
    platform_of,
    step_of,
)
from ._args import shrunk, with_arrays
from ._blame import (
    Blame,
    Compared,
    allowed,
    compared,
    differences,
    index_of_largest,
    matched_equations,
)
from ._played import Played, ReferencePrograms, Traced, traced_step
from ._rounding import NARROW, WIDE, last_place_dtype
from ._story import story_of
from ._suspects import suspects


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
        return not self.refutations and all(output.is_right for output in self.outputs)

    def __str__(self) -> str:
        refuted = [
            f"XLA's partitioner computes this step wrongly: {refutation}"
            for refutation in self.refutations
        ]
        return "\n".join([*refuted, self._compared_text()])

    def _compared_text(self) -> str:
        """What the numbers say."""
        outputs = plural(len(self.outputs), "output")
        wrong = [output for output in self.outputs if not output.is_right]
        if not wrong:
            return f"the plan changes none of {outputs} by more than rounding does"
        rows = [("output", "difference", "rounding", "at")]
        for output in wrong:
            row = (
                output.path or "-",
                f"{output.difference:.1e}",
                f"{output.allowed:.1e}",
                str(list(output.at)),
            )
            rows.append(row)
        head = f"the plan changes {len(wrong)} of {outputs}:"
        lines = table(rows, right={"difference", "rounding"})
        return "\n".join([head, *lines, "", *self.story])

    __repr__ = __str__


# The part of an output's largest number that rounding may hide.
_HIDDEN = 1e-3
# How many times larger than what rounding explains a difference is that more rounding
# hardly ever explains.
_FAR = 100
_FROM_DTYPES = "nothing: the allowed difference is the step's own rounding"


@called(
    "check_step(step, *args)",
    rtol=_FROM_DTYPES,
    atol=_FROM_DTYPES,
    compiler="`verify(step, *args, compiler=...)`",
    chip="`verify(step, *args, compiler=...)`",
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
    those without rounding. The error of a sum is that of the sum of its summands'
    absolute values, since devices add up in another order. Where rounding may hide an
    error, as with floats of 16 bits, the step also runs in float64 under its plan.

    A step that was jitted with `compiler_options` runs under them. The reference runs
    without them, and so does the search for the first equation that differs.

    **Arguments:**

    - `step`: a function, also one that `jax.jit`, `equinox.filter_jit` or
      [`shardfx.filter_jit`][] returned. With `mesh`, a function of a mesh that returns
      the step.
    - `args`: arrays with their planned shardings, or `jax.ShapeDtypeStruct`s such as
      `plan.structs`, for which random arrays are made. No argument is donated. Emulated
      devices suffice, because XLA partitions for them as for real ones.
    - `reference`: a function of the same arguments with right results, in a tree of
      the same paths and shapes; floats may have another width. A step with a
      `shard_map` over several devices cannot run on one device, and needs `reference`
      or `mesh`.
    - `mesh`: the mesh of the plan. The reference is then the step for a mesh of one
      device with the same axes.
    - `shrink`: whether to reduce all sizes first, as far as the shardings of `args`
      divide them in the same way. A size that the step fixes does not change.

    **Returns:**

    A [`shardfx.testing.CheckedStep`][], true if rounding explains all differences and
    nothing is refuted. `print` shows the outputs that differ; the first equation that
    is wrong although its inputs are right, with its source line, sharding and loop
    iteration; the collectives at these lines; and suspicious code in a `shard_map`
    under `check_vma=False`.

    **Raises:**

    `ProgramError` for a `shard_map` over several devices without `reference` and
    `mesh`, for both together, and for a reference that returns other paths, shapes or
    kinds of dtypes.
    `MeshError` for structs on more devices than there are. Errors of the step are
    raised unchanged, as JAX's error for a donated array.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import shardfx as sfx
        from jax.sharding import PartitionSpec as P

        mesh = sfx.MeshSpec({"data": 8}).build(jax.devices())
        x = jax.device_put(jnp.ones((64, 16)), jax.NamedSharding(mesh, P("data")))
        assert sfx.testing.check_step(lambda x: jnp.tanh(x.T @ x), x)
        ```
    """
    if mesh is not None and reference is not None:
        raise ProgramError(
            "`check_step` is given a `reference` and a `mesh`, and compares with one"
            " step: with `mesh=`, the step on a mesh of one device. Leave one of them"
            " out."
        )
    if mesh is not None:
        make_step = step
        step = make_step(mesh)
        reference = make_step(_of_one_device(mesh))
    step_args = shrunk(step, args) if shrink else args
    refutations: tuple[Refutation, ...] = ()
    if reference is None and mesh is None:
        refutations = _refutations_of(step, step_args)
    arrays = with_arrays(step_args, mild=False)
    checked = _checked_step(step, arrays, reference, mesh)
    leaves = jax.tree.leaves(step_args)
    has_structs = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    if has_structs and not checked.is_finite:
        arrays = with_arrays(step_args, mild=True)
        checked = _checked_step(step, arrays, reference, mesh)
    if not refutations:
        return checked
    sources = [refutation.source for refutation in refutations]
    refuted_lines = [source for source in sources if source is not None]
    return dataclasses.replace(
        checked,
        refutations=refutations,
        lines=(*refuted_lines, *checked.lines),
    )


def _refutations_of(step: Any, args: Sequence[object]) -> tuple[Refutation, ...]:
    """What `verify` says is wrong with a step; nothing if there is nothing to read: no
    mesh, or a program that XLA refuses, whose error its run raises.

    Nothing for a step with a `shard_map` either: if the step lacks a sum, `verify` may
    refute a program that does what the step says.
    """
    try:
        traced = step_of(step, args)
        if traced.is_without_mesh or _has_shard_map(traced.traced.jaxpr):
            return ()
        programs = traced.programs(platform_of(jax.default_backend()))
    except (MeshError, ProgramError):
        return ()
    return judged(programs).refutations


def _has_shard_map(jaxpr: object) -> bool:
    """Whether a jaxpr has a `shard_map` at any depth."""
    names = {equation.primitive.name for equation in equations_in(jaxpr)}
    return "shard_map" in names


def _checked_step(
    step: Any,
    args: Sequence[Any],
    reference: Any,
    mesh: Mesh | None,
) -> CheckedStep:
    """The comparison that `check_step` returns, for `args` without ShapeDtypeStructs.

    `reference` is a function with right results; `None` for `step` itself. `mesh` is
    the mesh of the plan, if known. In the code, "ours" is the step under its plan, and
    "theirs" is the reference.
    """
    ours = traced_step(step, args)
    device = _first_device(ours.arrays) if mesh is None else mesh.devices.flat[0]
    on_one_device = ft.partial(_copied_to, device)
    if reference is None:
        # The step is not traced anew: one that reads the Explicit mesh of its arguments
        # cannot be traced for arrays of one device.
        theirs = ours._replace(arrays=list(map(on_one_device, ours.arrays)))
    else:
        copies = jax.tree.map(on_one_device, args)
        if mesh is not None:
            copies = jax.tree.map(
                ft.partial(_typed_as, _of_one_device(mesh)), copies, args
            )
        theirs = traced_step(reference, copies)
        theirs = theirs._replace(arrays=list(map(on_one_device, theirs.arrays)))
        _require_comparable(ours, theirs)
    reference_programs = ReferencePrograms(theirs, _has_narrow_floats(ours))
    exact_results = reference_programs.exact_results()
    dtypes = [array.dtype for array in ours.closed.out_avals]
    checked_outputs = ft.partial(_checked_outputs, ours.paths, dtypes, exact_results)

    results = ours.run(*ours.arrays)
    results = list(map(np.asarray, results))
    outputs, is_coarse = _explained(
        checked_outputs, results, reference_programs, NARROW
    )
    wide = None
    hides_much = is_coarse or _hide_much(outputs, exact_results)
    if _are_right(outputs) and (hides_much or reference_programs.has_narrow_floats):
        # An error that rounding hides in the step's dtypes shows in float64.
        wide = np.float64
        in_float64, _ = Played(ours, alone=False, wide=wide)()
        outputs, _ = _explained(checked_outputs, in_float64, reference_programs, WIDE)

    floats = [array for array in exact_results if array.dtype.kind in "fc"]
    checked = CheckedStep(
        outputs=tuple(outputs),
        is_finite=all(np.isfinite(array).all() for array in floats),
    )
    if checked:
        return checked
    return _with_fault(ours, reference_programs, checked, wide)


def _explained(
    checked_outputs: Callable[..., list[CheckedOutput]],
    results: Sequence[np.ndarray],
    reference_programs: ReferencePrograms,
    kind: int,
) -> tuple[list[CheckedOutput], bool]:
    """The comparison of a step's `results` with the reference, with the least rounding
    of this kind that explains the differences, and whether it takes all of it.

    `checked_outputs` compares `results`, given results of the reference with rounding.
    """
    roundings = reference_programs.roundings(kind)
    rounded_results: list[list[np.ndarray]] = []
    outputs: list[CheckedOutput] = []
    for rounding in roundings[:-1]:
        rounded_results += rounding()
        outputs = checked_outputs(results, rounded_results)
        if _are_right(outputs):
            return outputs, False
        if any(output.difference > _FAR * output.allowed for output in outputs):
            # The step is most likely wrong.
            reference_programs.keeps_values = True
    rounded_results += roundings[-1]()
    return checked_outputs(results, rounded_results), True


def _has_narrow_floats(traced: Traced) -> bool:
    """Whether a step has floats of less than 32 bits."""
    return re.search(r"\b(b?f16|f8_\w+)\[", str(traced.closed)) is not None


def _require_comparable(ours: Traced, theirs: Traced) -> None:
    """Raises `ProgramError` if the step `ours` and the reference `theirs` do not return
    arrays of equal paths, shapes and kinds of dtypes, such as floating-point ones.
    """
    for our_path, their_path in it.zip_longest(ours.paths, theirs.paths):
        if our_path != their_path:
            raise ProgramError(
                f"the step returns {plural(len(ours.paths), 'array')}, and the"
                f" reference {len(theirs.paths)}; {_output_text(our_path)} of the step"
                f" is {_output_text(their_path)} of the reference. Return the same tree"
                " from both."
            )
    rows = zip(ours.paths, ours.closed.out_avals, theirs.closed.out_avals, strict=True)
    for path, array, reference in rows:
        is_same_kind = _kind_of(array.dtype) == _kind_of(reference.dtype)
        if array.shape == reference.shape and is_same_kind:
            continue
        ours_text = array_text(array.dtype, array.shape)
        theirs_text = array_text(reference.dtype, reference.shape)
        raise ProgramError(
            f"{_output_text(path)} is {ours_text} in the step, and {theirs_text} in the"
            " reference; return equal shapes, and the same kind of dtype, from both."
        )


def _output_text(path: str | None) -> str:
    """The output at `path`, for messages. The path is "" if the result is one array,
    and `None` if there is no such output.
    """
    if path is None:
        return "no output"
    return f"output `{path}`" if path else "the output"


def _kind_of(dtype: Any) -> object:
    """What the numbers of a dtype are: bools, integers, or real or complex numbers of
    floating point. Any other dtype is its own kind.
    """
    for kind in (np.bool_, np.integer, np.floating, np.complexfloating):
        if jax.numpy.issubdtype(dtype, kind):
            return kind
    return dtype


def _first_device(arrays: Sequence[Any]) -> Any:
    """The device of the lowest number among those of several arrays."""
    devices: set[Any] = set()
    for array in arrays:
        if isinstance(array, jax.Array):
            devices |= array.devices()
    return min(devices or jax.devices(), key=lambda device: device.id)


def _of_one_device(mesh: Mesh) -> Mesh:
    """A mesh of the first device of `mesh`, with the same axes."""
    sizes = [1] * mesh.devices.ndim
    first_device = np.array([mesh.devices.flat[0]]).reshape(sizes)
    return Mesh(first_device, mesh.axis_names, axis_types=mesh.axis_types)


def _typed_as(mesh: Mesh, copy: object, array: object) -> object:
    """`copy`, with the spec of `array` over `mesh` in its type if the axes are
    Explicit. A `shard_map` compares it with its `in_specs`.
    """
    if not isinstance(array, jax.Array) or not mesh.abstract_mesh.explicit_axes:
        return copy
    sharding = array.sharding
    if not isinstance(sharding, NamedSharding):
        return copy
    if sharding.mesh.axis_names != mesh.axis_names:
        return copy
    return jax.device_put(copy, NamedSharding(mesh, sharding.spec))


def _copied_to(device: Any, leaf: object) -> object:
    """A copy of an array on one device, made through the host. A direct copy would keep
    Explicit axes in its type.
    """
    if not isinstance(leaf, jax.Array):
        return leaf
    copy = jax.device_put(np.asarray(raw(leaf)), device)
    return as_keys(copy, leaf)


def _checked_outputs(
    paths: Sequence[str],
    dtypes: Sequence[DType],
    exact: Sequence[np.ndarray],
    results: Sequence[np.ndarray],
    rounded_results: Sequence[Sequence[np.ndarray]],
) -> list[CheckedOutput]:
    """The comparison of a step's `results` with `exact`, those of the reference in
    float64. `dtypes` are those of the step.

    `rounded_results` are results of the reference with rounding. They show which
    differences rounding explains.
    """
    outputs: list[CheckedOutput] = []
    rows = zip(paths, dtypes, results, exact, *rounded_results, strict=True)
    for path, dtype, result, exact_result, *rounded in rows:
        dtype_of_places = last_place_dtype(dtype, result.dtype)
        distances = differences(result, exact_result)
        output = CheckedOutput(
            path=path,
            difference=float(distances.max(initial=0.0)),
            at=index_of_largest(distances),
            allowed=allowed(exact_result, rounded, dtype_of_places),
        )
        outputs.append(output)
    return outputs


def _are_right(outputs: Sequence[CheckedOutput]) -> bool:
    return all(output.is_right for output in outputs)


def _hide_much(
    outputs: Sequence[CheckedOutput],
    exact: Sequence[np.ndarray],
) -> bool:
    """Whether rounding may hide more than a thousandth of an output's numbers."""
    for output, exact_result in zip(outputs, exact, strict=True):
        finite = np.abs(exact_result[np.isfinite(exact_result)])
        largest = float(finite.max(initial=0))
        if output.allowed > max(_HIDDEN * largest, _HIDDEN**2):
            return True
    return False


def _with_fault(
    ours: Traced,
    reference_programs: ReferencePrograms,
    checked: CheckedStep,
    wide: object,
) -> CheckedStep:
    """The comparison `checked` of the step `ours` with its reference, with the first
    wrong equation added.

    `wide` is the dtype to which narrower floats of the step were cast for the
    comparison, or `None`.
    """
    try:
        played = Played(ours, alone=False, wide=wide, with_values=True)
    except jax.errors.JaxRuntimeError as error:
        refusal = (
            "no equation is named: XLA refuses the step where every value is kept:"
            f" {error!s:.200}"
        )
        return dataclasses.replace(checked, story=(refusal,))
    reference_programs.keeps_values = True
    kind = WIDE if wide else NARROW
    exact_program = reference_programs.program(kind, reorders_sums=True)
    results, values = played()
    comparisons = _comparisons(played, values, exact_program, kind)
    records = played.tape.records

    wrong = []
    for number, output in zip(played.result_numbers, checked.outputs, strict=True):
        if not output.is_right:
            wrong.append(number)
    fault = Blame(records, comparisons).fault(wrong)
    lines: tuple[Frame, ...] = ()
    story: list[str] = []
    if fault is not None:
        lines, story = story_of(
            records=records,
            comparisons=comparisons,
            fault=fault,
            played=played,
            values=values,
        )
    elif ours.compiler_options:
        exact_results, _ = exact_program()
        rounded_results = exact_program.rounded_results(kind)
        # The program that was played has no options.
        outputs = _checked_outputs(
            paths=ours.paths,
            dtypes=[array.dtype for array in ours.closed.out_avals],
            exact=exact_results,
            results=results,
            rounded_results=rounded_results,
        )
        if _are_right(outputs):
            story.append(
                "no equation differs without the step's `compiler_options`,"
                f" {dict(ours.compiler_options)}: leave them out"
            )
    return dataclasses.replace(
        checked,
        lines=lines,
        story=(*story, *suspects(played.tape)),
    )


def _comparisons(
    played: Played,
    values: Mapping[int, Any],
    exact_program: Played,
    kind: int,
) -> dict[int, Compared]:
    """The comparisons of the results `values` of the step's equations with those of the
    reference's equations, by the numbers of the step's. `played` and `exact_program`
    are the programs of the step and of the reference, which rounds in this `kind`.
    """
    _, exact_values = exact_program()
    # For each seed, the results of the equations by number.
    rounded_values = exact_program.rounded_values(kind)
    records = played.tape.records
    exact_records = exact_program.tape.records
    comparisons: dict[int, Compared] = {}
    for number, exact_number in matched_equations(records, exact_records).items():
        if number not in values or exact_number not in exact_values:
            continue
        value = np.asarray(values[number])
        exact_value = np.asarray(exact_values[exact_number])
        rounded = [values_of_seed[exact_number] for values_of_seed in rounded_values]
        dtype = last_place_dtype(records[number].dtype, value.dtype)
        comparisons[number] = compared(
            record=records[number],
            value=value,
            whole_record=exact_records[exact_number],
            whole=exact_value,
            allowed_difference=allowed(exact_value, rounded, dtype),
        )
    return comparisons

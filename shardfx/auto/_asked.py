"""The input of a search: the devices, and a traced step with its arguments."""

import contextlib
import dataclasses
import functools as ft
import itertools
import re
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.extend.core as jex
import numpy as np
from jax.sharding import AbstractMesh
from jaxtyping import PyTree

from .. import chips, topology
from .._arrays import filter_jit
from .._ground.errors import (
    LeafTypeError,
    MeshError,
    PlanMismatchError,
    RuleError,
    of_argument,
    whole_number,
)
from .._ground.tree import Flat, flatten
from .._step import (
    Platform,
    Step,
    argument_names,
    opened,
    over_ones,
    program_of,
    step_of,
    unsharded,
    unwrapped,
    without_mesh,
)
from ..chips._chip import extents_of
from ._program import Tied


# The numbers of the CPU devices that JAX emulates on one machine, for comparison only:
# all bandwidths are low, and a collective is a function call in which threads wait for
# each other.
EMULATED = chips.Chip(
    name="cpu",
    hbm_bytes=2**34,
    usable_hbm_bytes=2**34,
    hbm_bytes_per_second=2e9,
    flops_per_second=(("bfloat16", 8e9), ("float32", 8e9)),
    link_bytes_per_second=1e9,
    torus_dims=0,
    island_chips=2**20,
    dcn_bytes_per_second=1e9,
    sources=(("*", "an estimate for a machine of two cores"),),
)


class SearchOptions(NamedTuple):
    """The devices of a search: `total` devices of the kind `chip`, in `slices` slices.

    - `target`, `targets`: the two parts of the text by which the caller names slices:
      "tpu:v5e:2x4" and 3 for "tpu:v5e:2x4*3". `target` is `None` if no text names a
      slice, and `targets` is 1 if no text says a number.
    - `extents`: the number of chips of one slice along each dimension of its torus.
    """

    total: int
    chip: chips.Chip
    target: str | None = None
    slices: int = 1
    targets: int = 1
    extents: tuple[int, ...] = ()


def search_options(
    devices: object,
    chip: str | chips.Chip | None,
    slices: int | None = None,
) -> SearchOptions:
    """The devices of a search. `devices` is their number, a slice such as
    "tpu:v5e:2x4", emulated CPU devices such as "cpu:8", or JAX's devices. `chip` is
    their kind; `None` if `devices` shows it. `slices` is the number of slices; `None`
    if `devices` says it, or for one slice. Raises `MeshError` for other values, and for
    another number than that of a text.

    Of the result, `total` and `slices` are the numbers of devices and slices, `target`
    and `targets` the two parts of a text such as "tpu:v5e:2x4*3", and `extents` the
    chips along each dimension of one slice.
    """
    if slices is not None and (whole_number(slices) or 0) < 1:
        raise MeshError(
            f"`slices={slices!r:.40}` is no number of slices, 1 or more; leave it out for"
            " one slice, or write `slices=2`."
        )
    # "tpu:v5e:2x4*3" is three times the devices "tpu:v5e:2x4".
    repeated = devices
    repetitions = 1
    match = None
    if isinstance(devices, str):
        match = re.fullmatch(r"(.*)\*([1-9]\d*)", devices)
    if match is not None:
        repeated = match[1]
        repetitions = int(match[2])
    if match is not None and slices not in (None, repetitions):
        raise MeshError(
            f"`devices={devices!r}` has {repetitions} slices, and `slices={slices}`;"
            " leave `slices` out."
        )
    options = _unrepeated_options(repeated, chip)
    total = options.total * repetitions
    slice_count = max(repetitions, options.slices)
    if slices is not None:
        slice_count = slices
    if total % slice_count:
        raise MeshError(
            f"`slices={slice_count}` does not divide {total} devices; each slice has"
            " equally many."
        )
    extents = ()
    # Else the text is about several slices, and its extents are not those of one.
    if repetitions == slice_count:
        extents = options.extents
    if not extents:
        extents = extents_of(options.chip, total // slice_count)
    return options._replace(
        total=total,
        slices=slice_count,
        targets=repetitions,
        extents=extents,
    )


def _unrepeated_options(
    devices: object,
    chip: str | chips.Chip | None,
) -> SearchOptions:
    """The number of devices, their kind, and the name of the slice. `devices` is a
    number, a text such as "cpu:8" or "tpu:v5e:2x4" without a "*3", or JAX's devices.
    Only the text of a slice gives the fields `target` and `extents`, and only JAX's
    devices may be in several `slices`. `chip` is the kind; `None` if `devices` shows it.
    Raises `MeshError` for other values.
    """
    if isinstance(chip, str) and chip.lower() == "cpu":
        chip = EMULATED
    if isinstance(devices, str):
        return _options_of_text(devices, chip)
    count = whole_number(devices) or 0
    if count > 0:
        if chip is None:
            raise MeshError(
                f"`devices={devices}` does not say which chip; add one, as"
                ' `chip="v5e"`.'
            )
        return SearchOptions(total=count, chip=chips.find(chip))
    listed: list[Any] = []
    if isinstance(devices, Sequence):
        listed += devices
    platforms = [getattr(device, "platform", None) for device in listed]
    if not platforms or platforms[0] is None:
        raise MeshError(
            f"`devices={devices!r:.80}` is neither a number, a slice nor devices; write"
            ' `devices=8, chip="v5e"`, `devices="tpu:v5e:2x4"`, or'
            " `devices=jax.devices()`."
        )
    if chip is not None:
        kind = chip
    elif platforms[0] == "cpu":
        kind = EMULATED
    else:
        kind = listed[0].device_kind
    return SearchOptions(
        total=len(listed),
        chip=chips.find(kind),
        slices=_equal_slices(listed),
    )


def _equal_slices(devices: Sequence[Any]) -> int:
    """The number of slices of JAX's devices. Slices of unequal numbers of devices count
    as one: no axis of a mesh could span them.
    """
    slices = topology.slices(devices)
    sizes = {len(indices) for indices in slices}
    return len(slices) if len(sizes) == 1 else 1


def _options_of_text(devices: str, chip: str | chips.Chip | None) -> SearchOptions:
    """As `_unrepeated_options`, for a text such as "cpu:8" or "tpu:v5e:2x4"."""
    if emulated := re.fullmatch(r"cpu:([1-9]\d*)", devices):
        kind = EMULATED if chip is None else chips.find(chip)
        return SearchOptions(total=int(emulated[1]), chip=kind)
    hardware = chips.parse_slice(devices)
    kind = hardware.chip if chip is None else chips.find(chip)
    return SearchOptions(
        total=hardware.chips * kind.devices_per_chip,
        chip=kind,
        target=hardware.name,
        extents=hardware.extents,
    )


def require_options(keep: object, closely: object, verify: object) -> None:
    """Raises `RuleError` unless `keep` and `closely` are positive and `verify` is
    "compile", "run" or `None`.
    """
    are_counts = _is_count(keep) and _is_count(closely)
    if not are_counts or verify not in (None, "compile", "run"):
        raise RuleError(
            f"`keep={keep!r:.40}` and `closely={closely!r:.40}` must be numbers of"
            " candidates, 1 or more, and "
            f'`verify={verify!r:.40}` must be "compile", "run" or None; write `keep=5,'
            ' closely=12, verify="compile"`. '
            "The devices to compile for are those of `devices`."
        )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def require_arrays(args: Sequence[PyTree]) -> None:
    """Raises `LeafTypeError` if none of `args`, the arguments of a step, has an array."""
    for leaf in jax.tree.leaves(args):
        if eqx.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct):
            return
    kinds_of_args = (type(arg).__name__ for arg in args)
    kinds = ", ".join(kinds_of_args) or "nothing"
    raise LeafTypeError(
        f"the arguments of the step hold no arrays ({kinds}); pass arrays, or structs"
        " of them: `jax.ShapeDtypeStruct((64, 128), jnp.float32)`, or"
        " `eqx.filter_eval_shape(make, key)` for a model."
    )


_SELF_EXPLANATORY = (LeafTypeError, PlanMismatchError)


def noted(args: Sequence[PyTree]) -> contextlib.ExitStack:
    """A context manager that adds the shapes of `args`, a step's arguments, as a note
    to errors raised inside it.
    """

    def note(_kind: object, error: BaseException | None, _trace: object) -> None:
        """Adds the note to an error; as the `__exit__` of a context manager."""
        # Errors about an argument's kind say what to pass in its place.
        if error is None or isinstance(error, _SELF_EXPLANATORY):
            return
        shapes = []
        for arg in args:
            text = eqx.tree_pformat(arg, width=10**6, struct_as_array=True)
            shapes.append(text[:300])
        error.add_note(
            "`search` traced the step with arguments of these shapes, without"
            f" running it: {'; '.join(shapes)}"
        )

    stack = contextlib.ExitStack()
    stack.push(note)
    return stack


# The platforms for which a step is lowered, the first that can: names must not depend
# on the chip. Kernels for GPUs lower only for GPUs.
_PLATFORMS: tuple[Platform, ...] = ("tpu", "gpu", "cpu")


class StepArray(NamedTuple):
    """An array of rank `rank` that a step takes, in its argument number `which`.

    `path` is the name of the argument and the path within, such as
    `model/layers/mlp/gate`. `names` are the logical names that the field of an Equinox
    module declares, else `None`.
    """

    which: int
    path: str
    names: Any
    rank: int


@dataclasses.dataclass(frozen=True, slots=True)
class TracedStep:
    """A step, traced without shardings, with its arguments.

    - `tied`: the lowered program, with the equivalence classes of its dimensions.
    - `flats`, `structs`, `words`: for each argument, its leaves with their paths, the
      argument as a tree of `jax.ShapeDtypeStruct`s, and its name.
    - `step`: the step as JAX traced it.
    - `arrays`: all arrays of the arguments, in the order of the program's arguments.
    """

    tied: Tied
    flats: tuple[Flat, ...]
    words: tuple[str, ...]
    arrays: tuple[StepArray, ...]
    structs: tuple[PyTree, ...]
    step: Step

    @property
    def out(self) -> PyTree:
        """The step's result as a tree of `jax.ShapeDtypeStruct`s, with `None` for
        leaves that are no arrays.
        """
        return self.step.traced.out_info


def trace(step: Callable[..., object], *args: PyTree) -> TracedStep:
    """Traces and lowers the step for the shapes of its arguments, without running it.

    For each argument, `flats` has its leaves with their paths, and `words` its name.
    The notes of the lowered program count the operations that are not understood.
    """
    if not callable(step):
        raise of_argument(
            LeafTypeError(
                f"`step` must be a function, not {type(step).__name__}; pass the function"
                " that is jitted."
            )
        )
    flats = tuple(map(flatten, args))
    structs = structs_of(args)
    # The shardings of a jitted step would be constraints inside of it, so the function
    # that it jits is traced.
    inner = unwrapped(step)
    run = ft.update_wrapper(lambda *args: inner(*args), inner, updated=())
    traced_step = step_of(run, structs)
    words = tuple(argument_names(step, len(args)))
    arrays: list[StepArray] = []
    word_and_flats = zip(words, flats, strict=True)
    for which, (word, flat) in enumerate(word_and_flats):
        arrays += _step_arrays(which, word, flat)
    program = program_of(_lowered_module(traced_step))
    if count := _primitive_count(traced_step.traced.jaxpr, "custom_partitioning"):
        program.notes[
            "a `custom_partitioning` shards as its own rule says, and is read as what"
            " it computes"
        ] = count
    return TracedStep(
        tied=Tied(program),
        flats=flats,
        words=words,
        arrays=tuple(arrays),
        structs=structs,
        step=traced_step,
    )


def _step_arrays(which: int, word: str, flat: Flat) -> Iterator[StepArray]:
    """Yields the arrays of the argument at position `which`, whose name is `word`, and
    whose leaves are those of `flat`. `flat.names` has the logical names that a field of
    an Equinox module declares for each leaf, or `None`.
    """
    rows = zip(flat.leaves, flat.paths, flat.names, flat.is_array, strict=True)
    for leaf, path, names, is_array in rows:
        if is_array:
            name = f"{word}/{path}" if path else word
            yield StepArray(
                which=which,
                path=name,
                names=names,
                rank=np.ndim(leaf),
            )


def _primitive_count(jaxpr: jex.Jaxpr | jex.ClosedJaxpr, name: str) -> int:
    """The number of equations of the primitive `name` in a jaxpr and in the jaxprs of
    its calls and loops.
    """
    inner, _ = opened(jaxpr)
    count = 0
    for equation in inner.eqns:
        count += equation.primitive.name == name
        for param in equation.params.values():
            values = param if isinstance(param, tuple) else (param,)
            for value in values:
                if isinstance(value, jex.ClosedJaxpr | jex.Jaxpr):
                    count += _primitive_count(value, name)
    return count


def _lowered_module(step: Step) -> Any:
    """The step's StableHLO module, for the first of `_PLATFORMS` that can lower it."""
    for platform in _PLATFORMS[:-1]:
        try:
            return step.module(platform)
        # JAX's errors for an operation that has no lowering for a platform. The error
        # of the last platform is raised.
        except (NotImplementedError, ValueError):
            continue
    return step.module(_PLATFORMS[-1])


def structs_of(args: tuple[PyTree, ...]) -> tuple[PyTree, ...]:
    """The arguments of a step with each array replaced by its `jax.ShapeDtypeStruct`,
    without sharding.
    """
    flats = list(map(flatten, args))
    arrays = []
    for flat in flats:
        arrays += itertools.compress(flat.leaves, flat.is_array)
    arrays_in_order = iter(jax.eval_shape(lambda leaves: leaves, arrays))

    def struct(leaf: object, is_array: bool) -> object:
        """The next struct for an array, and any other leaf unchanged."""
        if is_array:
            array = next(arrays_in_order)
            return jax.ShapeDtypeStruct(array.shape, array.dtype)
        return leaf

    trees = []
    for flat in flats:
        leaves = map(struct, flat.leaves, flat.is_array)
        trees.append(jax.tree.unflatten(flat.treedef, leaves))
    return tuple(trees)


def results_of(
    args: Sequence[PyTree],
    results: PyTree,
) -> tuple[tuple[int | None, int], ...]:
    """Pairs each result of a step with an argument that has the same structure, shapes
    and dtypes, if there is one. The result gets the shardings of this argument. No two
    results get one argument.

    `results` is all that the step returns. If it is a tuple that equals no argument in
    these respects, each element is a result, else `results` is the only one. Returns for
    each the index of its argument or `None`, and its number of arrays.
    """
    kinds = list(map(_kind_of, args))
    if _kind_of(results) in kinds or not isinstance(results, tuple):
        results = (results,)
    pairs: list[tuple[int | None, int]] = []
    paired: set[int | None] = set()
    for result in results:
        kind = _kind_of(result)
        free = [
            which
            for which, other in enumerate(kinds)
            if other == kind and which not in paired
        ]
        which = None
        if free and kind.arrays:
            which = free[0]
        paired.add(which)
        pairs.append((which, len(kind.arrays)))
    return tuple(pairs)


class _Kind(NamedTuple):
    """What an argument and a result may have in common: the structure, and the shapes
    and the dtypes of the arrays.
    """

    structure: object
    arrays: list[tuple[tuple[int, ...], str]]


def _kind_of(tree: PyTree) -> _Kind:
    """The structure of a tree of `jax.ShapeDtypeStruct`s, with their shapes and dtypes.
    Leaves that are no structs do not count.
    """
    structs = eqx.filter(tree, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    leaves, structure = jax.tree.flatten(structs)
    arrays = [(leaf.shape, str(leaf.dtype)) for leaf in leaves]
    return _Kind(structure=structure, arrays=arrays)


def donated_numbers(
    step: Callable[..., object],
    args: Sequence[PyTree],
) -> tuple[int, ...]:
    """The numbers of the arguments that the step donates, in whole or in part. A jitted
    step says by the paths of arrays what it donates, and a plain function donates
    nothing.
    """
    if isinstance(step, types.FunctionType):
        return ()
    donated_paths = []
    for argument in step_of(step, args).arguments:
        if argument.donated:
            donated_paths.append(argument.path.split("/"))
    numbers = []
    for number, word in enumerate(argument_names(step, len(args))):
        # The arrays of an argument have paths below its name: `params/w`. One without a
        # name of its own is called `args[0]`, and its path is `args/0`.
        prefix = word.replace("[", "/").replace("]", "").split("/")
        if any(path[: len(prefix)] == prefix for path in donated_paths):
            numbers.append(number)
    return tuple(numbers)


class SearchedStep(NamedTuple):
    """A step as a search takes it: without shardings, and outside of any mesh."""

    step: Callable[..., object]
    args: tuple[PyTree, ...]


def without_shardings(
    step: Callable[..., object],
    args: Sequence[PyTree],
    mesh: AbstractMesh,
) -> SearchedStep:
    """A step that is written for the Explicit axes of `mesh`, without its shardings,
    and structs of its arguments. It donates what `step` donates.
    """
    structs = structs_of(tuple(args))
    plain = unsharded(step, mesh=mesh)
    donated = _donated_on(step, structs, mesh)
    if donated:
        plain = filter_jit(plain, donate=donated)
    return SearchedStep(plain, structs)


def _donated_on(
    step: Callable[..., object],
    args: Sequence[PyTree],
    mesh: AbstractMesh,
) -> tuple[int, ...]:
    """As `donated_numbers`, for a step that is written for the Explicit axes of `mesh`,
    or was jitted with shardings over its devices.
    """
    with without_mesh():
        try:
            return donated_numbers(step, args)
        # The step names axes, and needs a mesh of the context.
        except (AssertionError, TypeError, ValueError):
            with over_ones(mesh):
                return donated_numbers(step, args)

"""`plan`, which plans a tree for devices without rules: the bytes of the training state
decide.
"""

import collections
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh
from jaxtyping import PyTree

from .. import chips
from .._ground.errors import LeafTypeError, MeshError, OutOfMemoryError, RuleError
from .._ground.misuse import called
from .._ground.spec import array_bytes
from .._ground.text import bytes_text, plural
from .._ground.tree import Flat, flatten
from .._plan import ShardPlan, Tree, follow, names_of_leaves, plan as plan_by_rules
from .._rules import AxisRules, PathRules
from ..topology import MeshSpec
from ._asked import SearchOptions, search_options
from ._auto_plan import AutoPlan
from ._choices import FSDP_AXES, TENSOR, Choice, choices_for, choices_on, divisors
from ._shape_rules import Step, Steps, shape_rules
from ._tensor_size import COMFORTABLE, BatchSize, StepEstimate, batch_size
from ._whole import NamedShape, whole_dims


@runtime_checkable
class _Optimizer(Protocol):
    """An optimizer with the interface of optax."""

    def init(self, params: Any) -> Any: ...


# The part that the state may take on the devices that an error proposes.
_PROPOSED = 7 / 8
# Smaller arrays are replicated: a device waits longer for a collective than it saves.
_SMALL_BYTES = 2**16
# The largest number of devices that an error proposes.
_MOST_DEVICES = 2**18
# The memory that is assumed where nothing names a chip: the smallest of those that
# train today.
_ASSUMED = "v5e"
_EXPLICIT = (
    "Its axes are Explicit, `jax.make_mesh`'s default, where JAX types the result of"
    " each operation: call a step that knows nothing of shardings as"
    " `shardfx.auto.auto_axes(step, plan, out=...)`."
)
_DATA_AXES = ("data", "dp", "ddp", "batch", "replica")


class _Hardware(NamedTuple):
    """The devices of a plan.

    `mesh` is the caller's mesh, and `None` where the plan chooses one; `jax_devices` are
    its devices, if there are any. `is_assumed` says that nothing named the chip.
    """

    options: SearchOptions
    mesh: MeshSpec | None
    jax_devices: Mesh | Sequence[Any] | None
    is_assumed: bool


class _Priced(NamedTuple):
    """A plan with the bytes of the training state: of all devices, each array counted
    once, and of one device. With `is_tight`, they leave activations too little.
    """

    choice: Choice
    plan: ShardPlan
    rules: PathRules
    total_bytes: int
    state_bytes: int
    is_tight: bool = False


@called("plan(tree, devices)")
def plan(
    tree: Tree,
    devices: int | str | Sequence[object] | MeshSpec | Mesh | AbstractMesh,
    *,
    optimizer: Callable[..., object] | _Optimizer | None = None,
    names: PyTree = None,
    chip: str | chips.Chip | None = None,
    batch: PyTree = None,
) -> AutoPlan[Tree]:
    """Plans how a model is sharded for training, without rules.

    The bytes of parameters, gradients and optimizer state decide. If they take at most
    half of a device's memory, every device holds all of them (data parallelism). Else
    they are sharded over as few devices as possible (FSDP): neighbours in the inner
    network, each array in its largest dimension that divides. Heads, experts and stacked
    layers are not cut, and small arrays are replicated. Nothing is allocated.

    With a batch, there may be an axis `tensor` of neighbours that have the same rows. It
    shards weights between heads or experts, else in their largest dimension (tensor
    parallelism); weights with heads that do not divide only if the state does not fit
    otherwise. Its size is the one with the least estimate of a step's seconds, by the
    bytes of gradients and activations, among those with which the state fits. The state
    may then take more of the memory.

    [`shardfx.auto.search`][] prices the step itself, and so knows more.

    **Arguments:**

    - `tree`: the model: any tree of arrays or `jax.ShapeDtypeStruct`s.
    - `devices`: JAX's devices, `jax.devices()`; a slice, as "tpu:v5e:4x4",
      "gpu:h100:8", or two of them, as "tpu:v5e:4x4*2"; a number of devices; or a mesh
      whose axes are `data` and `fsdp`, or one of them.
    - `optimizer`: the optimizer, as `optax.adamw(1e-3)`, or its `init`. Without it, the
      two moments of Adam are assumed.
    - `names`: the logical names of dimensions, as [`shardfx.plan`][] takes them; `None`
      for those that modules declare. They say which dimensions are heads, experts or
      layers.
    - `chip`: the kind of the devices, where `devices` does not show it; see
      [`shardfx.chips.find`][]. By default the memory of a v5e is assumed.
    - `batch`: the arguments of a step beside the state: arrays or structs, whose first
      dimensions are rows. Without it, each device is assumed to have rows, and there is
      no tensor parallelism.

    **Returns:**

    An [`shardfx.auto.AutoPlan`][]: a plan, on the devices if they are JAX's, with
    `why` and `code()`.

    **Raises:**

    `LeafTypeError` for a tree or a batch without arrays; `MeshError` for devices that
    cannot be read, for a mesh with other axes, and for rows that do not divide over a
    mesh that is given or over slices; `OutOfMemoryError` if the state does not fit on
    all devices, with the number that it needs; `RuleError` for an optimizer that is
    none.

    !!! Example

        ```python
        import jax
        import shardfx

        tree = {"up": jax.ShapeDtypeStruct((16384, 65536), "float32")}
        made = shardfx.auto.plan(tree, "tpu:v5e:4x4")
        print(made.why)
        print(made.code())
        assert made["up"].spec == jax.P(None, "fsdp")
        ```
    """
    flat = flatten(tree)
    if not any(flat.is_array):
        raise LeafTypeError(
            f"the tree, {type(tree).__name__}, holds no arrays; pass arrays, or structs"
            " of them: `equinox.filter_eval_shape(make, key)` for a model. It comes"
            " first: `plan(tree, devices)`."
        )
    hardware = _hardware(devices, chip)
    pricing = _Pricing(tree, flat, names, _init_of(optimizer))
    limit = hardware.options.chip.usable_hbm_bytes_per_device
    size = None if batch is None else batch_size(batch)
    priced = _fastest_that_fits(hardware, pricing, size)
    if priced.state_bytes > limit:
        raise _too_small(hardware, pricing, priced)
    chosen = priced.plan
    if hardware.jax_devices is not None:
        jax_mesh = priced.choice.mesh.build(hardware.jax_devices)
        chosen = chosen.on(jax_mesh)
    why = _why(hardware, pricing, priced, size)
    return AutoPlan(content=chosen.content, why=why, rules=priced.rules)


def _fastest_that_fits(
    hardware: _Hardware,
    pricing: "_Pricing",
    size: BatchSize | None,
) -> _Priced:
    """The plan for the size of an axis `tensor` with which a step is fastest, among the
    sizes with which the state fits; if there is none, the plan with the least state.
    """
    limit = hardware.options.chip.usable_hbm_bytes_per_device
    if size is None:
        trials = map(pricing.priced, _choices(hardware, tensor=1))
        return _first_that_fits(trials, COMFORTABLE * limit)
    estimate = pricing.estimate(hardware.options, size.tokens)
    too_large: list[_Priced] = []
    for tensor in _tensor_sizes(hardware, size.rows, estimate):
        trials = map(pricing.priced, _choices(hardware, tensor))
        priced = _first_that_fits(trials, estimate.comfortable_bytes(tensor))
        if priced.state_bytes <= limit:
            return priced
        too_large.append(priced)
    return min(too_large, key=lambda priced: priced.state_bytes)


def _first_that_fits(
    trials: Iterator[_Priced],
    comfortable_bytes: float,
) -> _Priced:
    """The first plan that leaves enough memory for activations; if none does, the one
    that leaves most.
    """
    best = next(trials)
    for trial in itertools.chain([best], trials):
        if trial.state_bytes <= comfortable_bytes:
            return trial
        if trial.state_bytes < best.state_bytes:
            best = trial
    return best._replace(is_tight=True)


def _init_of(optimizer: Any) -> Callable[..., Any] | None:
    """The function that makes an optimizer's state; `None` for Adam's."""
    if optimizer is None or callable(optimizer):
        return optimizer
    if isinstance(optimizer, _Optimizer):
        return optimizer.init
    raise RuleError(
        f"`optimizer={optimizer!r:.80}` has no `init`; pass an optimizer of optax, as"
        " `optimizer=optax.adamw(1e-3)`, or a function that makes its state."
    )


def _hardware(devices: Any, chip: str | chips.Chip | None) -> _Hardware:
    """Reads the arguments `devices` and `chip`."""
    if isinstance(devices, Mesh) and chip is None:
        options = search_options(list(devices.devices.flat), None)
        return _Hardware(
            options=options,
            mesh=_data_or_fsdp_mesh(devices),
            jax_devices=devices,
            is_assumed=False,
        )
    if isinstance(devices, MeshSpec | Mesh | AbstractMesh):
        mesh = _data_or_fsdp_mesh(devices)
        options = search_options(mesh.size, chip or _ASSUMED)
        jax_devices = devices if isinstance(devices, Mesh) else None
        return _Hardware(
            options=options,
            mesh=mesh,
            jax_devices=jax_devices,
            is_assumed=chip is None,
        )
    if isinstance(devices, int) and chip is None:
        return _Hardware(
            options=search_options(devices, _ASSUMED),
            mesh=None,
            jax_devices=None,
            is_assumed=True,
        )
    options = search_options(devices, chip)
    jax_devices = None if isinstance(devices, int | str) else devices
    return _Hardware(
        options=options,
        mesh=None,
        jax_devices=jax_devices,
        is_assumed=False,
    )


def _data_or_fsdp_mesh(mesh: MeshSpec | Mesh | AbstractMesh) -> MeshSpec:
    """The mesh without its devices. Raises `MeshError` for a size of -1, and for an
    axis that is neither for data parallelism nor for FSDP.
    """
    spec = MeshSpec.of(mesh).require_sizes()
    for axis, size in spec.shape.items():
        if size > 1 and axis not in (*_DATA_AXES, *FSDP_AXES):
            raise MeshError(
                f"mesh {spec}: `auto.plan` does not know what axis `{axis}` is for. It"
                " shards over `data` and `fsdp`: pass"
                f' `MeshSpec({{"data": 1, "fsdp": {spec.size}}})`, or only the devices.'
                " For other axes write rules, `shardfx.plan(tree, mesh, paths=...)`, or"
                " let `shardfx.auto.search` choose by a step."
            )
    return spec


def _tensor_sizes(
    hardware: _Hardware,
    rows: int,
    estimate: StepEstimate,
) -> list[int]:
    """The sizes of an axis `tensor`, within a slice, that leave each of the remaining
    devices equally many rows; first the size with which a step is fastest. Raises
    `MeshError` if there is none.
    """
    mesh = hardware.mesh
    if mesh is not None:
        if rows % mesh.size == 0:
            return [1]
        raise MeshError(
            f"the {plural(rows, 'row')} of `batch` do not divide over the"
            f" {plural(mesh.size, 'device')} of mesh {mesh}; pass a multiple of"
            f" {mesh.size} rows, or the devices in place of the mesh, and the plan has"
            " an axis `tensor` for the others."
        )
    total = hardware.options.total
    slices = hardware.options.slices
    sizes = [size for size in divisors(total // slices) if rows % (total // size) == 0]
    if not sizes:
        raise MeshError(
            f"the {plural(rows, 'row')} of `batch` do not divide over"
            f" {plural(slices, 'slice')}, and each has rows; pass a multiple of"
            f" {slices}."
        )
    return sorted(sizes, key=estimate.seconds)


def _choices(hardware: _Hardware, tensor: int) -> Iterator[Choice]:
    """The meshes and strategies to try. `tensor` devices have the same rows."""
    if hardware.mesh is not None:
        return choices_on(hardware.mesh)
    options = hardware.options
    return choices_for(options.total, options.slices, tensor)


class _Pricing:
    """Plans a tree for one choice after another, and counts the bytes of the state."""

    def __init__(
        self,
        tree: PyTree,
        flat: Flat,
        names: PyTree,
        init: Callable[..., Any] | None,
    ):
        self.tree = tree
        self.init = init
        leaf_names = flat.names
        if names is not None:
            leaf_names = names_of_leaves(names, tree, flat, AxisRules([]))
        self.leaves: list[object] = []
        self.arrays: list[NamedShape] = []
        for leaf, path, declared, stacked, is_array in zip(
            flat.leaves,
            flat.paths,
            leaf_names,
            flat.stacked,
            flat.is_array,
            strict=True,
        ):
            if is_array:
                self.leaves.append(leaf)
                shape = tuple(jnp.shape(leaf))
                named_shape = NamedShape(
                    path=path,
                    shape=shape,
                    names=declared,
                    stacked=stacked,
                )
                self.arrays.append(named_shape)
        self.whole_dims = whole_dims(self.arrays)
        self.rules: dict[object, PathRules] = {}

    def priced(self, choice: Choice) -> _Priced:
        """The plan of a choice, with its bytes."""
        rules = self._rules(choice)
        planned = plan_by_rules(self.tree, choice.mesh, paths=rules)
        totals = [0, 0]
        for total in (0, 1):
            held = _bytes(planned, total, trained=False)
            trained = _bytes(planned, total, trained=True)
            totals[total] = held + trained + 2 * trained * (self.init is None)
        if self.init is not None:
            state = follow(self.init, planned)
            totals[0] += state.bytes_total
            totals[1] += state.bytes_per_device
        return _Priced(
            choice=choice,
            plan=planned,
            rules=rules,
            total_bytes=totals[0],
            state_bytes=totals[1],
        )

    def _rules(self, choice: Choice) -> PathRules:
        """The rules of a choice. They are found once for equal steps."""
        usual = (Step(choice.axes),) if choice.axes else ()
        steps = self._steps(choice)
        key = (usual, tuple(steps))
        if key not in self.rules:
            paths = [array.path for array in self.arrays]
            self.rules[key] = shape_rules(paths, steps, usual, _SMALL_BYTES)
        return self.rules[key]

    def _steps(self, choice: Choice) -> list[Steps]:
        """The steps that shard each array."""
        mesh = choice.mesh
        tensor = mesh.axis_size(TENSOR) if TENSOR in choice.axes else 1
        shards = math.prod(map(mesh.axis_size, choice.fsdp))
        gathered_axes = choice.axes if choice.gathers_all else choice.fsdp
        dims_of_gathered = self._dims_of_fsdp(
            math.prod(map(mesh.axis_size, gathered_axes))
        )
        dims_of_fsdp = self._dims_of_fsdp(shards)
        dims_of_tensor = _alike(self.leaves, self.whole_dims.of_tensor(tensor))
        dims_of_both = _alike(self.leaves, self.whole_dims.of_tensor(tensor * shards))
        steps: list[Steps] = []
        for array, by_fsdp, by_tensor, by_both, gathered in zip(
            self.arrays,
            dims_of_fsdp,
            dims_of_tensor,
            dims_of_both,
            dims_of_gathered,
            strict=True,
        ):
            fsdp = (Step(choice.fsdp, by_fsdp),) if choice.fsdp else ()
            if TENSOR not in choice.axes or len(by_tensor) == len(array.shape):
                whole = (Step(gathered_axes, gathered),) if gathered_axes else ()
                steps.append(whole)
            elif by_tensor == by_both:
                # XLA gathers weights where both axes shard one dimension. Where FSDP
                # shards the other one, it may shard the activations of all layers.
                steps.append((Step(choice.axes, by_tensor),))
            else:
                steps.append((Step((TENSOR,), by_tensor), *fsdp))
        return steps

    def _dims_of_fsdp(self, shards: int) -> list[tuple[int, ...]]:
        """For each array, the dimensions that FSDP over `shards` devices leaves whole."""
        whole_heads = self.whole_dims.whole_heads(shards)
        return _alike(self.leaves, self.whole_dims.of_arrays(whole_heads))

    def estimate(self, hardware: SearchOptions, tokens: int) -> StepEstimate:
        """What an estimate of a step with so many tokens needs."""
        sizes = []
        for leaf, array in zip(self.leaves, self.arrays, strict=True):
            size = array_bytes(array.shape, jnp.result_type(leaf))
            sizes.append(size if size >= _SMALL_BYTES else 0)
        replicated = self.priced(Choice(MeshSpec({"data": 1}), ()))
        return StepEstimate(
            tokens=tokens,
            whole_dims=self.whole_dims,
            array_bytes=sizes,
            state_bytes=replicated.total_bytes,
            hardware=hardware,
        )

    @property
    def what(self) -> str:
        """The parts of the state as text, with the optimizer if it is assumed."""
        if self.init is not None:
            return "parameters, gradients and optimizer state"
        return (
            "parameters, gradients and the two moments of Adam (assumed: pass"
            " `optimizer=` for another)"
        )


def _alike(
    leaves: Sequence[Any],
    dims: Sequence[tuple[int, ...]],
) -> list[tuple[int, ...]]:
    """The dimensions that are not sharded, for each leaf. Leaves that are one array have
    the same.
    """
    together: dict[int, set[int]] = {}
    for leaf, whole in zip(leaves, dims, strict=True):
        together.setdefault(id(leaf), set()).update(whole)
    return [tuple(sorted(together[id(leaf)])) for leaf in leaves]


def _bytes(planned: ShardPlan, which: int, *, trained: bool) -> int:
    """The bytes of a plan's arrays: in total if `which` is 0, else on one device. With
    `trained`, only those of arrays that have gradients.
    """
    content = planned.content
    array_numbers = (number for number in content.index if number >= 0)
    counts = collections.Counter(array_numbers)
    return sum(
        count * content.byte_counts[number][which]
        for number, count in counts.items()
        if not trained or jnp.issubdtype(content.rows[number].dtype, jnp.inexact)
    )


def _why(
    hardware: _Hardware,
    pricing: _Pricing,
    priced: _Priced,
    size: BatchSize | None,
) -> str:
    """The reason for a plan as text: the bytes, the mesh, and what is assumed."""
    chip = hardware.options.chip
    limit = chip.usable_hbm_bytes_per_device
    mesh = priced.choice.mesh
    axes = priced.choice.axes
    is_sharded = bool(priced.choice.fsdp)
    kinds = []
    if is_sharded:
        kinds.append("FSDP")
    elif TENSOR not in axes or len(mesh.axis_names) > 1:
        kinds.append("data parallel")
    if TENSOR in axes:
        kinds.append("tensor parallel")
    assumed = ", assumed: pass `chip=` for another" if hardware.is_assumed else ""
    sentences = [
        f"{bytes_text(priced.total_bytes)} of state on {plural(mesh.size, 'device')} of"
        f" {bytes_text(limit)} ({chip.name}{assumed}): {str(mesh).replace(',', ', ')}"
        f" ({', '.join(kinds)}), {bytes_text(priced.state_bytes)} a device.",
        f"The state is {pricing.what}.",
    ]
    if priced.is_tight:
        sentences.append(
            f"Only {bytes_text(limit - priced.state_bytes)} are left for activations:"
            " ask `shardfx.cost.fit` with the step."
        )
    elif not axes:
        sentences.append(
            "It leaves room for activations, so each device holds all of it."
        )
    elif is_sharded and hardware.mesh is None:
        sentences.append(
            "Over fewer devices, it would leave too little of each for activations."
        )
    if TENSOR in axes:
        sentences.append(
            "`tensor` shards weights in place of rows, for few rows or tokens."
        )
    if size is not None and len(size.rows_of_arrays) > 1:
        counts = " and ".join(map(str, size.rows_of_arrays))
        sentences.append(
            f"The arrays of `batch` have {counts} rows, so {size.rows} divide over"
            " devices: leave out what has no rows."
        )
    if hardware.mesh is not None:
        sentences.append("The mesh was given.")
        mesh_axes = hardware.mesh.axis_types
    else:
        mesh_axes = ()
    if AxisType.Explicit in mesh_axes:
        sentences.append(_EXPLICIT)
    return " ".join(sentences)


def _too_small(
    hardware: _Hardware,
    pricing: _Pricing,
    priced: _Priced,
) -> OutOfMemoryError:
    """The error for a state that does not fit, with the least number of chips."""
    options = hardware.options
    chip = options.chip
    limit = chip.usable_hbm_bytes_per_device
    text = (
        f"{bytes_text(priced.total_bytes)} of {pricing.what} take"
        f" {bytes_text(priced.state_bytes)} on each of"
        f" {plural(priced.choice.mesh.size, 'device')} ({priced.choice.mesh}), and a"
        f" {chip.name} has {bytes_text(limit)}"
    )
    size = chip.devices_per_chip
    while size <= _MOST_DEVICES:
        if size > options.total or hardware.mesh is not None:
            fsdp_mesh = MeshSpec({"fsdp": size})
            larger = pricing.priced(Choice(fsdp_mesh, ("fsdp",)))
            if larger.state_bytes <= _PROPOSED * limit:
                chips_text = plural(size // chip.devices_per_chip, "chip")
                return OutOfMemoryError(
                    f"{text}. Sharded over all devices it fits on {chips_text}: pass"
                    f' `devices={size}, chip="{chip.name}"`.',
                    priced.state_bytes,
                    limit,
                )
        size *= 2
    largest = max(priced.plan.leaves, key=lambda leaf: leaf.bytes_per_device)
    return OutOfMemoryError(
        f"{text}. More devices do not help: `{largest.path}`, shape {largest.shape}, has"
        " no dimension that they divide; pad it, or use a chip with more memory.",
        priced.state_bytes,
        limit,
    )

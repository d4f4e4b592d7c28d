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
from .._ground.errors import (
    LeafTypeError,
    MeshError,
    OutOfMemoryError,
    RuleError,
    whole_number,
)
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
from ._whole import ShardableArray, note_whole_dims


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
    """A plan with the bytes of the training state: `total_bytes` of all devices, each
    array counted once, and `state_bytes` of one device. With `is_tight`, they leave
    activations too little.
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
    batch_dim: int = 0,
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
    - `batch`: the arguments of a step beside the state: arrays or structs with rows.
      Without it, each device is assumed to have rows, and there is no tensor
      parallelism.
    - `batch_dim`: the dimension of their rows: 1 where a loop in the step runs over the
      first one, as over time. The estimate does not count that such a loop may reduce
      gradients in each of its iterations.

    **Returns:**

    An [`shardfx.auto.AutoPlan`][]: a plan, on the devices if they are JAX's, with
    `why` and `code()`.

    **Raises:**

    `LeafTypeError` for a tree or a batch without arrays; `MeshError` for devices that
    cannot be read, for a mesh with other axes, and for rows that do not divide over a
    mesh that is given or over slices; `OutOfMemoryError` if the state does not fit on
    all devices, with the number that it needs; `RuleError` for an optimizer that is
    none, and for a `batch_dim` that is no number of a dimension.

    !!! Example

        ```python
        import jax
        import shardfx
        from jax.sharding import PartitionSpec as P

        tree = {"up": jax.ShapeDtypeStruct((16384, 65536), "float32")}
        made = shardfx.auto.plan(tree, "tpu:v5e:4x4")
        print(made.why)
        print(made.code())
        assert made["up"].spec == P(None, "fsdp")
        ```
    """
    flat = flatten(tree)
    if not any(flat.is_array):
        raise LeafTypeError(
            f"the tree, {type(tree).__name__}, holds no arrays; pass arrays, or structs"
            " of them: `equinox.filter_eval_shape(make, key)` for a model. It comes"
            " first: `plan(tree, devices)`."
        )
    _require_dim(batch_dim)
    hardware = _hardware(devices, chip)
    pricing = _Pricing(tree, flat, names, _init_of(optimizer))
    limit = hardware.options.chip.usable_hbm_bytes_per_device
    size = None if batch is None else batch_size(batch, batch_dim)
    priced = _fastest_that_fits(hardware, pricing, size)
    if priced.state_bytes > limit:
        raise _too_small(hardware, pricing, priced)
    chosen = priced.plan
    if hardware.jax_devices is not None:
        jax_mesh = priced.choice.mesh.build(hardware.jax_devices)
        chosen = chosen.on(jax_mesh)
    why = _why(hardware, pricing, priced, size)
    return AutoPlan(
        content=chosen.content,
        why=why,
        rules=priced.rules,
        batch_dim=batch_dim,
    )


def _fastest_that_fits(
    hardware: _Hardware,
    pricing: "_Pricing",
    size: BatchSize | None,
) -> _Priced:
    """The plan for the size of an axis `tensor` with which a step is fastest, among the
    sizes with which the state fits; if there is none, the plan with the least state.
    `pricing` plans a choice of a mesh and counts its bytes; `size` has the rows and
    tokens of the batch.
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


def _require_dim(batch_dim: object) -> None:
    """Raises `RuleError` unless `batch_dim` is the number of a dimension."""
    # A bool is an int in Python.
    is_bool = isinstance(batch_dim, bool)
    if isinstance(batch_dim, int) and not is_bool and batch_dim >= 0:
        return
    raise RuleError(
        f"`batch_dim={batch_dim!r:.40}` is no number of a dimension from the front, 0 or"
        " more; write `batch_dim=1` where time or microbatches come before the rows."
    )


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
    if (device_count := whole_number(devices)) is not None:
        devices = device_count
    jax_devices = devices
    if isinstance(devices, int | str | MeshSpec | AbstractMesh):
        jax_devices = None
    mesh = None
    # A number, a text or JAX's devices.
    searched = devices
    if isinstance(devices, MeshSpec | Mesh | AbstractMesh):
        mesh = _data_or_fsdp_mesh(devices)
        searched = mesh.size
    if isinstance(devices, Mesh):
        searched = list(devices.devices.flat)
    is_assumed = chip is None and isinstance(searched, int)
    return _Hardware(
        options=search_options(searched, _ASSUMED if is_assumed else chip),
        mesh=mesh,
        jax_devices=jax_devices,
        is_assumed=is_assumed,
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
    `MeshError` if there is none. `rows` is the number of rows of the batch.
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
    return choices_for(options.total, options.slices, tensor, options.chip)


class _Pricing:
    """Plans a tree for one choice after another, and counts the bytes of the state.

    - `leaves`, `arrays`: the arrays of the tree, and what must not be sharded of them.
    - `init_optimizer`: the function that makes the optimizer's state; `None` if the
      state is assumed to be Adam's two moments.
    - `rules`: the rules made so far, by the steps of the arrays.
    """

    def __init__(
        self,
        tree: PyTree,
        flat: Flat,
        names: PyTree,
        init_optimizer: Callable[..., Any] | None,
    ):
        """`flat` are the leaves of `tree`, and `names` the logical names of its arrays
        if the caller gives any. `flat.stacked` has the number of leading dimensions
        that modules declare as stacked layers, for each leaf.
        """
        self.tree = tree
        self.init_optimizer = init_optimizer
        leaf_names = flat.names
        if names is not None:
            leaf_names = names_of_leaves(names, tree, flat, AxisRules([]))
        self.leaves = list(itertools.compress(flat.leaves, flat.is_array))
        self.arrays: list[ShardableArray] = []
        columns = zip(flat.leaves, flat.paths, leaf_names, flat.stacked, strict=True)
        for leaf, path, names_of_leaf, stacked in itertools.compress(
            columns, flat.is_array
        ):
            array = ShardableArray(
                path=path,
                shape=tuple(jnp.shape(leaf)),
                names=names_of_leaf,
                stacked=stacked,
            )
            self.arrays.append(array)
        note_whole_dims(self.arrays)
        self.rules: dict[tuple[Steps, tuple[Steps, ...]], PathRules] = {}

    def priced(self, choice: Choice) -> _Priced:
        """The plan of a choice, with its bytes."""
        rules = self._rules(choice)
        planned = plan_by_rules(self.tree, choice.mesh, paths=rules)
        # Parameters and gradients, and the moments of Adam if they are assumed.
        copies = 4 if self.init_optimizer is None else 2
        state = _bytes_of(planned, copies)
        total_bytes = state.total
        device_bytes = state.of_device
        if self.init_optimizer is not None:
            moments = follow(self.init_optimizer, planned)
            total_bytes += moments.bytes_total
            device_bytes += moments.bytes_per_device
        return _Priced(
            choice=choice,
            plan=planned,
            rules=rules,
            total_bytes=total_bytes,
            state_bytes=device_bytes,
        )

    def _rules(self, choice: Choice) -> PathRules:
        """The rules of a choice. They are found once for equal steps: tuples of mesh
        axes that shard an array, one after the other. Most arrays have the `usual` ones.
        """
        usual = (Step(choice.axes),) if choice.axes else ()
        steps = self._steps(choice)
        key = (usual, tuple(steps))
        if key not in self.rules:
            paths = [array.path for array in self.arrays]
            self.rules[key] = shape_rules(paths, steps, usual, _SMALL_BYTES)
        return self.rules[key]

    def _steps(self, choice: Choice) -> list[Steps]:
        """The steps that shard each array: by FSDP, by tensor parallelism, or by both.
        A step shards an array over its axes, in the largest dimension that is none of
        its `skip_dims`.
        """
        mesh = choice.mesh
        tensor = mesh.axis_size(TENSOR) if TENSOR in choice.axes else 1
        shards = math.prod(map(mesh.axis_size, choice.fsdp))
        gathered_axes = choice.axes if choice.gathers_all else choice.fsdp
        gathered_shards = math.prod(map(mesh.axis_size, gathered_axes))
        by_fsdp = self._whole_dims(ShardableArray.whole_by_fsdp, shards)
        by_tensor = self._whole_dims(ShardableArray.whole_by_tensor, tensor)
        by_both = self._whole_dims(ShardableArray.whole_by_tensor, tensor * shards)
        gathered = self._whole_dims(ShardableArray.whole_by_fsdp, gathered_shards)
        steps: list[Steps] = []
        for number, array in enumerate(self.arrays):
            # Tensor parallelism leaves these dimensions whole, perhaps all.
            skip_dims = by_tensor[number]
            if TENSOR not in choice.axes or len(skip_dims) == len(array.shape):
                array_steps = (Step(gathered_axes, gathered[number]),)
            elif skip_dims == by_both[number]:
                # XLA gathers weights where both axes shard one dimension. Where FSDP
                # shards the other one, it may shard the activations of all layers.
                array_steps = (Step(choice.axes, skip_dims),)
            else:
                array_steps = (
                    Step((TENSOR,), skip_dims),
                    Step(choice.fsdp, by_fsdp[number]),
                )
            steps.append(tuple(step for step in array_steps if step.axes))
        return steps

    def _whole_dims(
        self,
        whole_by: Callable[[ShardableArray, int], set[int]],
        shards: int,
    ) -> list[tuple[int, ...]]:
        """For each array, the dimensions that `shards` devices must not shard, by the
        method `whole_by`. Leaves that are one array have the same.
        """
        together: dict[int, set[int]] = {}
        for leaf, array in zip(self.leaves, self.arrays, strict=True):
            dims = together.setdefault(id(leaf), set())
            dims.update(whole_by(array, shards))
        return [tuple(sorted(together[id(leaf)])) for leaf in self.leaves]

    def estimate(self, hardware: SearchOptions, tokens: int) -> StepEstimate:
        """What an estimate of a step with so many tokens needs."""
        sizes = []
        for leaf, array in zip(self.leaves, self.arrays, strict=True):
            size = array_bytes(array.shape, jnp.result_type(leaf))
            sizes.append(size if size >= _SMALL_BYTES else 0)
        replicated = self.priced(Choice(MeshSpec({"data": 1}), ()))
        return StepEstimate(
            tokens=tokens,
            arrays=self.arrays,
            array_bytes=sizes,
            state_bytes=replicated.total_bytes,
            hardware=hardware,
        )

    @property
    def what(self) -> str:
        """The parts of the state as text, with the optimizer if it is assumed."""
        if self.init_optimizer is not None:
            return "parameters, gradients and optimizer state"
        return (
            "parameters, gradients and the two moments of Adam (assumed: pass"
            " `optimizer=` for another)"
        )


class _Bytes(NamedTuple):
    """Bytes on all devices, each array counted once, and on one device."""

    total: int
    of_device: int


def _bytes_of(planned: ShardPlan, copies: int) -> _Bytes:
    """The bytes of a plan's arrays. Those that have gradients count `copies` times."""
    content = planned.content
    total = 0
    of_device = 0
    # Each distinct array, with the number of leaves that are planned as it is.
    for number, count in collections.Counter(content.index).items():
        if number < 0:  # leaves that are no arrays
            continue
        has_gradient = jnp.issubdtype(content.rows[number].dtype, jnp.inexact)
        times = count * copies if has_gradient else count
        array_bytes, shard_bytes = content.byte_counts[number]
        total += times * array_bytes
        of_device += times * shard_bytes
    return _Bytes(total=total, of_device=of_device)


def _why(
    hardware: _Hardware,
    pricing: _Pricing,
    priced: _Priced,
    size: BatchSize | None,
) -> str:
    """The reason for a plan as text: the bytes, the mesh, and what is assumed. `size`
    has the rows of the batch, if there is one.
    """
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
        if AxisType.Explicit in hardware.mesh.axis_types:
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
        f" {plural(priced.choice.mesh.size, 'device')} ({priced.choice.mesh}), and each"
        f" has {bytes_text(limit)} on {chip.name}"
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

"""Makes a memory policy: `fit` decides what has to be computed again."""

import dataclasses
import functools as ft
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jaxtyping import PyTree

from ... import chips
from ..._arrays import filter_jit
from ..._ground.errors import (
    ChipError,
    LeafTypeError,
    OutOfMemoryError,
    RuleError,
    whole_number,
)
from ..._ground.misuse import called
from ..._ground.spec import array_bytes
from ..._ground.text import bytes_text
from ..._step import (
    Step,
    array_leaves,
    frames_of,
    own_line,
    place_text,
    step_of,
)
from ...topology import MeshSpec
from .._counted import StepOnChip
from .._shardings import shardings_of
from .choice import Costs, Point, Trial, chosen, with_offloads
from .policy import Choice, Policy, PolicyRow, checkpointed
from .recomputation import recomputation_of
from .regions import DividedLoss, Placed, Region, ValueKey, divided
from .work import total, work_of


# libtpu takes at most so much more than the foreseen bytes for 18 of the 19 steps above
# 0.5 GiB in benchmarks/results/foreseen-v5e.json.
_MARGIN = 0.18


_BUDGET = "the memory of `chip=`, less `leave_bytes=`"


@called(
    "policy(loss, *args)",
    compiler='`chip="v5p"`',
    target='`chip="v5p"`',
    budget_bytes=_BUDGET,
    limit_bytes=_BUDGET,
    memory_limit_bytes=_BUDGET,
)
def policy(
    loss: Callable[..., Any],
    *args: PyTree,
    chip: str | chips.Chip = "v5p",
    leave_bytes: int = 0,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    offload: bool = False,
    mesh: MeshSpec | Mesh | AbstractMesh | None = None,
) -> Policy:
    """What a loss keeps for its backward pass so that the program of its gradient fits
    a chip, with the least that is computed again.

    JAX differentiates each layer of the loss: the body of each scan, each of equal
    unrolled blocks, and what is between them. Its values are kept until the program
    fits. The value goes first whose bytes are computed again in the least time. Equal
    layers share one choice. Whether a program fits is the count of `fit`: libtpu's own
    where it is installed.

    **Arguments:**

    - `loss`: the function that is differentiated, not the step. Parts of it in a
      `jax.checkpoint` of yours stay as they are.
    - `args`: its arguments, arrays or structs in any trees. Their shardings say what
      one device has, as in [`shardfx.cost.fit`][].
    - `chip`: the chip's name, or a [`shardfx.chips.Chip`][].
    - `leave_bytes`: bytes of one device to leave free, such as for the optimizer's
      state.
    - `argnums`, `has_aux`: as in `jax.grad`. Arrays of integers and leaves that are no
      arrays are not differentiated.
    - `offload`: whether values may go to the host's memory, where the link to the host
      is as fast as the layer that computes them.
    - `mesh`: the mesh of the loss; by default the mesh of its arguments.

    **Returns:**

    A [`shardfx.cost.Policy`][]. Its method `apply` makes the loss that keeps what the
    policy says.

    **Raises:**

    `LeafTypeError` for a function that is no loss, such as a step, and for `argnums`
    that it lacks; `RuleError` for `leave_bytes` that is no number;
    `OutOfMemoryError` if no choice fits, with the least memory that one takes;
    `ChipError` for an unknown chip, or one whose link to the host is not known with
    `offload`; the errors of [`shardfx.cost.estimate`][].

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import shardfx as sfx

        def loss(params, x):
            def layer(x, w):
                return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None

            return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)

        shapes = {"up": (16, 512, 2048), "down": (16, 2048, 512)}
        params = {k: jax.ShapeDtypeStruct(v, jnp.float32) for k, v in shapes.items()}
        x = jax.ShapeDtypeStruct((1024, 512), jnp.float32)
        policy = sfx.cost.policy(loss, params, x, chip="h100", leave_bytes=78 * 2**30)
        print(policy)
        step = jax.grad(policy.apply(loss))
        ```
    """
    chip = chips.find(chip)
    if offload and not chip.host_bytes_per_second:
        raise ChipError(
            f"chip {chip.name!r}: the bandwidth of the link to the host is not known;"
            " pass `dataclasses.replace(chip, host_bytes_per_second=...)`, or"
            " `offload=False`."
        )
    if not callable(loss):
        raise LeafTypeError(
            f"`policy` takes the loss, a function, not {type(loss).__name__}; pass"
            " `policy(loss, *args)`."
        )
    numbers = _argument_numbers(argnums, len(args))
    left_bytes = _whole_bytes(leave_bytes)
    search = PolicySearch(
        loss=loss,
        args=args,
        chip=chip,
        argnums=numbers,
        has_aux=has_aux,
        mesh=mesh,
    )
    if not any(search.active):
        raise LeafTypeError(
            f"`argnums={argnums}`: there is no floating-point array in these arguments;"
            " pass the numbers of those that `jax.grad` differentiates."
        )
    _require_loss(search.divided.out, has_aux)
    budget_bytes = chip.usable_hbm_bytes_per_device - left_bytes
    trial_of_point = ft.partial(search.trial_of, budget_bytes)
    trial = chosen(
        search.costs,
        budget_bytes,
        search.argument_bytes,
        trial_of_point,
    )
    if not trial.fits:
        raise OutOfMemoryError(
            f"the gradient of the loss needs {bytes_text(trial.peak_bytes)} on one"
            f" device of {chip.name} with everything computed again, and"
            f" {bytes_text(budget_bytes)} are allowed"
            f" (usable {bytes_text(chip.usable_hbm_bytes_per_device)}, leave_bytes="
            f"{left_bytes}). Pass a smaller `leave_bytes`, a smaller batch, or"
            " arguments that are sharded over more devices.",
            needed_bytes=trial.peak_bytes,
            limit_bytes=budget_bytes,
        )
    if offload:
        point = with_offloads(search.costs, trial.point)
        # What is foreseen counts values on the host as if they were on the device.
        offloading = trial._replace(point=point)
        if point.offloaded and trial.is_counted:
            offloading = trial_of_point(point)
        if offloading.fits:
            trial = offloading
    return search.policy_of(trial, budget_bytes)


def _argument_numbers(argnums: object, count: int) -> tuple[int, ...]:
    """The numbers, from 0, of the arguments that `argnums` names: a number, or several,
    which may be negative. Raises `LeafTypeError` for others than those of `count`
    arguments.
    """
    given = tuple(argnums) if isinstance(argnums, tuple | list) else (argnums,)
    numbers = []
    for number in map(whole_number, given):
        if number is None or not -count <= number < count:
            raise LeafTypeError(
                f"`argnums={given!r:.80}`: the loss has {count} arguments here, numbered"
                " from 0."
            )
        numbers.append(number % count)
    return tuple(numbers)


def _whole_bytes(leave_bytes: object) -> int:
    """The bytes to leave free as an integer. Raises `RuleError` for what is no number."""
    nbytes = whole_number(leave_bytes)
    if nbytes is None and isinstance(leave_bytes, float) and math.isfinite(leave_bytes):
        nbytes = int(leave_bytes)
    if nbytes is None:
        raise RuleError(
            f"`leave_bytes={leave_bytes!r:.40}` is no number of bytes; write"
            " `leave_bytes=2 * 2**30`."
        )
    return nbytes


def _require_loss(result: Any, has_aux: bool) -> None:
    """Raises `LeafTypeError` unless `result`, the structs of what a function returns, is
    that of a loss: one number, or a pair of one and anything else with `has_aux`.
    """
    value = result
    if has_aux and isinstance(result, tuple) and len(result) == 2:
        value = result[0]
    if isinstance(value, jax.ShapeDtypeStruct) and value.shape == ():
        return
    # Keyword names of the struct would be noise in a message.
    text = eqx.tree_pformat(result, width=10**6, struct_as_array=True)
    raise LeafTypeError(
        "`policy` takes the loss, which returns one number, and this function returns"
        f" {text:.200}; pass the function that `jax.grad` differentiates in the step:"
        " `policy(loss, params, batch)`, and `jax.grad(policy.apply(loss))` in the step."
        " If it returns an array, reduce it: `jnp.mean(loss(...))`; if a number and"
        " something else, pass `has_aux=True`."
    )


@dataclasses.dataclass(frozen=True, eq=False)
class PolicySearch:
    """The arguments of `policy`, and what follows from them: the loss divided into
    regions, their costs, and the gradient under any choices.
    """

    loss: Callable[..., Any]
    args: tuple[PyTree, ...]
    chip: chips.Chip
    argnums: tuple[int, ...] = (0,)
    has_aux: bool = False
    mesh: MeshSpec | Mesh | AbstractMesh | None = None

    @ft.cached_property
    def divided(self) -> DividedLoss:
        return divided(self.loss, (self.args, {}))

    @property
    def active(self) -> list[bool]:
        """Whether each array of the arguments is differentiated."""
        active: list[bool] = []
        for number, arg in enumerate(self.args):
            is_varied = number in self.argnums
            active += [is_varied and _is_float(leaf) for leaf in array_leaves(arg)]
        return active

    @ft.cached_property
    def placed(self) -> tuple[Placed, ...]:
        """The different regions of the loss. Equal ones are counted together."""
        placed_by_kind: dict[object, Placed] = {}
        for placed in self.divided.program.placed(self.active):
            types = tuple(str(var.aval) for var in placed.region.invars)
            # Equal layers have equal values, types and differentiated inputs.
            layer_kind = (*placed.region.all_keys, types, placed.active)
            if layer_kind in placed_by_kind:
                run_count = placed_by_kind[layer_kind].run_count + placed.run_count
                placed = placed._replace(run_count=run_count)
            placed_by_kind[layer_kind] = placed
        return tuple(placed_by_kind.values())

    @ft.cached_property
    def costs(self) -> Costs:
        """The costs of keeping values in the regions of the loss, in bytes of one
        device.
        """

        def bytes_of(key: ValueKey, aval: Any) -> int:
            # The type says how Explicit axes shard a value.
            shard_shape = aval.sharding.shard_shape(aval.shape)
            typed = array_bytes(shard_shape, aval.dtype)
            return self.shard_bytes.get((key.line, key.shape, key.dtype), typed)

        regions = [recomputation_of(placed, bytes_of) for placed in self.placed]
        return Costs(
            recomputations=tuple(regions),
            chip=self.chip,
            devices=self.plain_step.mesh.size,
        )

    @ft.cached_property
    def plain_step(self) -> Step:
        """The gradient as it is without a policy."""
        step = self._step_on(self.mesh, ft.partial(checkpointed, {}))
        if step.is_without_mesh:
            return step.on_one_device
        return step

    @ft.cached_property
    def shard_bytes(self) -> dict[tuple[str, tuple[int, ...], str], int]:
        """The bytes of one device's shard of each value, by its line, shape and dtype;
        empty on one device, and without values whose line is not known.
        """
        if self.plain_step.mesh.size == 1:
            return {}
        platform = "tpu" if self.chip.torus_dims else "gpu"
        rows = shardings_of(self.plain_step, platform).rows
        # The forward pass computes the values that are kept, so its rows come last and
        # replace those of the backward pass.
        forward_last = sorted(rows, key=lambda row: row.phase == "forward")
        shard_bytes = {}
        for row in forward_last:
            if row.source is not None:
                value = (row.source.place, row.shape, str(row.dtype))
                shard_bytes[value] = row.bytes_per_device
        return shard_bytes

    @property
    def argument_bytes(self) -> int:
        """The bytes of the arguments and as many gradients on one device."""
        size = 0
        for leaf in array_leaves(self.args):
            sharding = _sharding_of(leaf)
            shape = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
            size += array_bytes(shape, leaf.dtype)
        return 2 * size

    def step(self, choices: Mapping[ValueKey, Choice]) -> Step:
        """The gradient of the loss under the choices."""
        return self.step_with(ft.partial(checkpointed, choices))

    def step_with(self, region_function: Callable[[Region], Any]) -> Step:
        """The gradient of the loss whose regions are evaluated by `region_function`."""
        # To find that a step names no mesh, JAX lowers it. No policy adds one.
        return self._step_on(self.plain_step.given_mesh, region_function)

    def _step_on(
        self,
        mesh: MeshSpec | Mesh | AbstractMesh | None,
        region_function: Callable[[Region], Any],
    ) -> Step:
        """The gradient of `step_with`. Without a `mesh` it is that of the arguments, of
        the results, or of the loss.
        """
        argnums = tuple(itertools.compress(itertools.count(), self.active))

        def loss(*arrays: Any) -> Any:
            return self.divided.result(arrays, region_function)

        def gradient(*args: PyTree) -> Any:
            differentiated = jax.value_and_grad(loss, argnums, self.has_aux)
            return differentiated(*array_leaves(args))

        leaves = itertools.compress(array_leaves(self.args), self.active)
        shardings = tuple(map(_sharding_of, leaves))
        step = gradient
        if any(shardings):
            # Gradients lie as their parameters do.
            step = filter_jit(gradient, out_shardings=(None, shardings))
        return step_of(step, self.args, mesh)

    def trial_of(self, budget_bytes: float, point: Point) -> Trial:
        """The memory of the gradient under a point's choices, and whether it fits
        `budget_bytes`. Bytes that are foreseen count with a margin.
        """
        memory = StepOnChip(self.step(self.choices_of(point)), self.chip).memory
        needed_bytes = memory.peak_bytes
        if not memory.is_counted:
            needed_bytes *= 1 + _MARGIN
        return Trial(
            point=point,
            peak_bytes=int(needed_bytes),
            fits=needed_bytes <= budget_bytes and not memory.out_of_memory,
            is_counted=memory.is_counted,
        )

    def choices_of(self, point: Point) -> dict[ValueKey, Choice]:
        """The choices of a point: for the values that it keeps, and for those that are
        kept without a policy.
        """
        kept_before = self.costs.point(self.costs.keys).kept
        choices: dict[ValueKey, Choice] = {}
        for placed in self.placed:
            for key in placed.region.all_keys:
                if key in point.offloaded:
                    choices[key] = "offload"
                elif key in point.kept:
                    choices[key] = "keep"
                elif key in kept_before:
                    choices[key] = "recompute"
        return choices

    def policy_of(self, trial: Trial, budget_bytes: int) -> Policy:
        """The policy of a trial's choices, with what the other choice for each value
        would cost. A value is of several layers if regions of equal keys have it.
        """
        point = trial.point
        rows = []
        choices = self.choices_of(point)
        for key, choice in choices.items():
            layer_count = 0
            for placed in self.placed:
                if key in placed.region.all_keys:
                    layer_count += placed.run_count
            other_point = self.costs.point(point.kept ^ {key})
            flops = abs(other_point.work.flops - point.work.flops)
            row = PolicyRow(
                **key._asdict(),
                choice=choice,
                bytes=self.costs.bytes_of(key),
                layers=layer_count,
                flops=flops / layer_count,
            )
            rows.append(row)
        # JAX computes some values again without a policy, too. That is no choice.
        recomputed_flops = point.work.flops
        if "recompute" not in choices.values():
            recomputed_flops = 0.0
        program = self.divided.program
        forward = total(map(work_of, program.jaxpr.eqns))
        return Policy(
            rows=tuple(rows),
            chip=self.chip.name,
            budget_bytes=budget_bytes,
            peak_bytes=trial.peak_bytes,
            is_counted=trial.is_counted,
            flops=forward.flops,
            recomputed_flops=recomputed_flops,
            notes=tuple(map(_note, program.left_alone())),
        )


def _note(equation: jex.JaxprEqn) -> str:
    """A sentence about a part of the loss that no region contains."""
    place = place_text(own_line(frames_of(equation)))
    return (
        f"the {equation.primitive.name} at {place} stays as it is: the policy names no"
        " values in it."
    )


def _is_float(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def _sharding_of(leaf: Any) -> NamedSharding | None:
    """An array's sharding on a mesh without devices; `None` if it has no mesh."""
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return None
    return NamedSharding(sharding.mesh.abstract_mesh, sharding.spec)

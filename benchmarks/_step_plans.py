"""The plans of the cost study, each a mesh and rules, and a step under one of them."""

import dataclasses
import functools as ft
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardfx import AxisRules, MeshSpec, ShardPlan, filter_jit, follow, plan

from ._steps import (
    BATCH_NAMES,
    Sizes,
    Way,
    batch,
    optimizer_state,
    parameter_names,
    parameters,
    train_step,
)


# Names of dimensions that most plans leave whole; what a plan says comes before.
_WHOLE = (
    "layers norm embed heads kv_heads head_dim hidden vocab batch sequence inner keys"
    " width expert expert_batch"
).split()
_TENSOR = {
    "heads": "tensor",
    "kv_heads": "tensor",
    "hidden": "tensor",
    "vocab": "tensor",
}


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh of 16 devices, and which of its axes cut what."""

    axes: Mapping[str, int]
    rules: Mapping[str, str | tuple[str, ...]]
    experts: bool = False

    @property
    def mesh(self) -> MeshSpec:
        """The mesh, without devices."""
        return MeshSpec(self.axes)

    @property
    def axis_rules(self) -> AxisRules:
        """The rules for all names."""
        return AxisRules(
            [
                *self.rules.items(),
                *((name, None) for name in _WHOLE if name not in self.rules),
            ]
        )


LAYOUTS: dict[str, Layout] = {
    "dp": Layout({"data": 16}, {"batch": "data"}),
    "fsdp": Layout({"fsdp": 16}, {"batch": "fsdp", "embed": "fsdp"}),
    "tp": Layout({"tensor": 16}, _TENSOR),
    "dp x tp": Layout({"data": 2, "tensor": 8}, {"batch": "data", **_TENSOR}),
    "fsdp x tp": Layout(
        {"fsdp": 4, "tensor": 4}, {"batch": "fsdp", "embed": "fsdp", **_TENSOR}
    ),
    "tp + sp": Layout(
        {"data": 2, "tensor": 8}, {"batch": "data", "sequence": "tensor", **_TENSOR}
    ),
    "fsdp x tp + sp": Layout(
        {"fsdp": 4, "tensor": 4},
        {
            "batch": "fsdp",
            "embed": "fsdp",
            "sequence": "tensor",
            **_TENSOR,
        },
    ),
    # Weights are cut over both axes: the devices of one sequence hold no copies either.
    "fsdp x context": Layout(
        {"fsdp": 4, "context": 4},
        {
            "batch": "fsdp",
            "embed": ("fsdp", "context"),
            "sequence": "context",
            "inner": "context",
        },
    ),
    "2d": Layout(
        {"x": 4, "y": 4},
        {
            "batch": "x",
            "width": "y",
            "embed": "x",
            "heads": "y",
            "kv_heads": "y",
            "hidden": "y",
            "vocab": "y",
        },
    ),
    "experts": Layout(
        {"expert": 16}, {"batch": "expert", "expert": "expert"}, experts=True
    ),
    "experts x fsdp": Layout(
        {"fsdp": 4, "expert": 4},
        {
            "batch": ("fsdp", "expert"),
            "expert": "expert",
            "expert_batch": "fsdp",
            "embed": "fsdp",
        },
        experts=True,
    ),
}


@dataclasses.dataclass(frozen=True)
class Planned:
    """A step, its arguments as structs with shardings, and their plans: parameters,
    optimizer state, batch.
    """

    step: Callable[..., Any]
    args: tuple[Any, Any, Any]
    plans: tuple[ShardPlan, ShardPlan, ShardPlan]

    @property
    def jitted(self) -> Any:
        """The step under its plans; parameters and state leave it as they came."""
        out_shardings = (*self.plans[:2], None)
        return filter_jit(
            self.step, in_shardings=self.plans, out_shardings=out_shardings
        )

    def lowered(self) -> Any:
        """The step lowered for the devices of its plans."""
        return self.jitted.lower(*self.args)


def planned(
    sizes: Sizes, strategy: Way, layout: Layout, devices: Sequence[Any] | None = None
) -> Planned:
    """A step under a plan.

    **Arguments:**

    - `sizes`, `way`: of the model, and how its step is written.
    - `layout`: one of `LAYOUTS`, or another.
    - `devices`: what the plans are for; without them they say what they say and nothing
      can be compiled.
    """
    if devices is None:
        mesh = layout.mesh
    else:
        mesh = layout.mesh.build(devices)
    shapes = parameters(sizes, strategy)
    rules = layout.axis_rules
    names = parameter_names(sizes, strategy)
    ours = plan(shapes, mesh, names=names, axes=rules, unused="allow")
    state = follow(ft.partial(optimizer_state, strategy=strategy), ours)
    data = plan(batch(sizes), mesh, names=BATCH_NAMES, axes=rules, unused="allow")
    plans = (ours, state, data)
    args = (ours.structs, state.structs, data.structs)
    return Planned(
        train_step(sizes, strategy, ours),
        args,
        plans,
    )


# What an axis may cut at once of the activations and of the weights beside them.
_ROLES = (
    ("batch",),
    ("sequence",),
    ("sequence", "inner"),
    ("heads", "kv_heads"),
    ("hidden",),
    ("vocab",),
    ("heads", "kv_heads", "hidden", "vocab"),
    ("width",),
)


def random_layout(seed: int) -> Layout:
    """Three axes, each with an assignment that is drawn; half of them also cut the
    other dimension of weights.
    """
    draw = random.Random(seed)
    rules: dict[str, tuple[str, ...]] = {}
    for axis in ("a", "b", "c"):
        names = draw.choice(_ROLES)
        for name in (*names, *(("embed",) if draw.random() < 0.5 else ())):
            rules[name] = (*rules.get(name, ()), axis)
    return Layout({"a": 2, "b": 2, "c": 4}, rules)

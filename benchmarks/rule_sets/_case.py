"""A case of the sweep: a rule set that ships, a model and a mesh."""

import functools as ft
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import shardfx as sfx
from shardfx._ground.spec import entry_axes
from shardfx._step import Dims, Programs, Step, step_of


# Rows, fully sharded and tensor parallel, as far as the mesh has them.
MESHES = {
    "2x2x2": (2, 2, 2),
    "2x2x1": (2, 2, 1),
    "4x2": (1, 4, 2),
    "2x4": (1, 2, 4),
    "3x2": (1, 3, 2),
}
# Divides by the devices of every mesh along which rows are sharded.
ROWS = 24
Loss = Callable[..., jax.Array]


class Model(NamedTuple):
    """The loss of a model, and structs of its parameters and of its batch.

    If `is_held`, the loss takes a third argument: a function that constrains the result
    of a block to rows, as the page on choosing rules advises. If `is_planned`, that is
    the plan by which it constrains its arrays itself; `None` on one device.
    """

    loss: Loss
    params: Any
    batch: jax.ShapeDtypeStruct
    is_held: bool = False
    is_planned: bool = False

    def held_by(
        self,
        hold: Callable[[jax.Array], jax.Array],
        plan: sfx.ShardPlan | None = None,
    ) -> Loss:
        """The loss, with its blocks constrained by `hold` or by `plan`, if it constrains
        them.
        """
        if self.is_held:
            return lambda params, batch: self.loss(params, batch, hold)
        if self.is_planned:
            return lambda params, batch: self.loss(params, batch, plan)
        return self.loss


class Case(NamedTuple):
    """A rule set, a model, a mesh, and a function that makes the plan of the model's
    parameters on that mesh.

    `axes` are the names of the mesh axes; the batch is sharded over all but the last.
    """

    rules: str
    model: str
    mesh: str
    make: Callable[[], Model]
    planned: Callable[[Any, sfx.MeshSpec], sfx.ShardPlan]
    axes: tuple[str, ...] = ("data", "fsdp", "tensor")

    @property
    def name(self) -> str:
        return f"{self.rules} | {self.model} | {self.mesh}"

    @property
    def sizes(self) -> dict[str, int]:
        sizes = MESHES[self.mesh]
        return dict(zip(self.axes, sizes[-len(self.axes) :], strict=True))

    def programs(self) -> Programs:
        """The program of the step before and after XLA's partitioner, as
        `shardfx.testing.verify` reads both.

        A model that constrains no array is traced and lowered once for all of its rule
        sets and meshes, which is most of the work.
        """
        model = self.make()
        if model.is_held or model.is_planned:
            step, args = self.step()
            return step_of(step, args).programs("tpu")
        spec = sfx.MeshSpec(self.sizes)
        plan = self.planned(model.params, spec)
        params = [_dims(leaf.spec, leaf.shape) for leaf in plan.leaves]
        rows = [_dims(jax.P(self.axes[:-1]), model.batch.shape)]
        loss: list[Dims] = [()]
        return _traced(self.make).programs(
            "tpu",
            mesh=spec,
            arguments=params + rows,
            results=loss + params,
        )

    def step(self) -> tuple[Any, tuple[Any, ...]]:
        """The jitted step, loss and gradient, and its arguments as structs."""
        model = self.make()
        spec = sfx.MeshSpec(self.sizes)
        mesh = spec.build(jax.devices()[: spec.size])
        plan = self.planned(model.params, spec).on(mesh)
        rows = jax.NamedSharding(mesh, jax.P(self.axes[:-1]))
        batch = jax.ShapeDtypeStruct(
            model.batch.shape, model.batch.dtype, sharding=rows
        )
        whole = jax.NamedSharding(mesh, jax.P())
        hold = lambda x: jax.lax.with_sharding_constraint(x, rows)
        step = jax.jit(
            jax.value_and_grad(model.held_by(hold, plan)),
            out_shardings=(whole, plan.shardings),
        )
        return step, (plan.structs, batch)


def _dims(spec: jax.P, shape: tuple[int, ...]) -> Dims:
    """The mesh axes of each dimension of an array."""
    axes = tuple(map(entry_axes, spec))
    return axes + ((),) * (len(shape) - len(axes))


@ft.lru_cache(maxsize=1)
def _traced(make: Callable[[], Model]) -> Step:
    """The step of a model, loss and gradient, without shardings."""
    model = make()
    step = jax.jit(jax.value_and_grad(model.loss), keep_unused=True)
    return step_of(step, (model.params, model.batch))


def struct(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def tokens(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def by_paths(rules: sfx.PathRules, **how: Any) -> Callable[..., sfx.ShardPlan]:
    """Plans parameters by path rules. A model need not have all paths of the rules."""
    return ft.partial(sfx.plan, paths=rules, unused="allow", **how)

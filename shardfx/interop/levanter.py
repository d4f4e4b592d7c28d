"""The axis mappings of haliax and Levanter as AxisRules."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from .._ground.spec import axes_of_entries
from .._rules import AxisRules, Target
from ._mappings import check_mapping


class Mappings(NamedTuple):
    """The two axis mappings of a Levanter trainer. An axis mapping has one or several
    mesh axes for each logical axis.

    **Arguments:**

    - `parameter`: the mapping for parameters and optimizer states between steps.
    - `compute`: the mapping for parameters and activations during a step.
    """

    parameter: AxisRules
    compute: AxisRules


def rules_of(mapping: Mapping[str, Target]) -> AxisRules:
    """A haliax axis mapping as AxisRules. Logical axes that are not in the mapping are
    replicated.

    **Arguments:**

    - `mapping`: a mapping from the name of a logical axis to one or several mesh axes.

    **Returns:**

    [`shardfx.AxisRules`][]. If two dimensions of an array have the same mesh axis, the
    dimension whose name is first in the mapping gets it, and the plan has a reason for
    the other. In haliax this is an error, as in a plan with `strict=True`.

    **Raises:**

    `RuleError` for a value of another type.

    !!! Example

        ```python
        from jax.sharding import PartitionSpec as P
        from shardfx import resolve
        from shardfx.interop import levanter

        rules = levanter.rules_of({"embed": "data", "mlp": "model"})
        assert resolve(("embed", "mlp"), rules).spec == P("data", "model")
        ```
    """
    check_mapping("mapping", mapping, 'rules_of({"embed": "data"})')
    targets = {}
    for name, target in mapping.items():
        if isinstance(target, list):
            target = tuple(target)
        targets[name] = target
    axes = dict.fromkeys(axes_of_entries(targets.values()))
    return AxisRules(targets, mesh_axes=axes)


def mappings_of(
    trainer: Mapping[str, Any],
    *,
    data: str | tuple[str, ...] = "data",
    batch: str | tuple[str, ...] = ("replica", "data"),
    model: str = "model",
) -> Mappings:
    """The parameter and compute mappings of a Levanter trainer's configuration.

    **Arguments:**

    - `trainer`: fields of `TrainerConfig`, as in the `trainer:` part of a YAML file:
      `batch_axis`, `fsdp_axis`, `tensor_parallel_axes`, `axis_resources`,
      `parameter_axis_resources`.
    - `data`, `batch`, `model`: the mesh axes that Levanter uses for FSDP, batches and
      tensor parallelism.

    **Returns:**

    A `Mappings`. Its parameter mapping shards the logical axes in `fsdp_axis`, by
    default "embed", over `data`.

    !!! Example

        ```python
        from jax.sharding import PartitionSpec as P
        from shardfx import resolve
        from shardfx.interop import levanter

        both = levanter.mappings_of({"tensor_parallel_axes": ["mlp", "heads"]})
        assert resolve(("embed", "mlp"), both.parameter).spec == P("data", "model")
        assert resolve(("embed", "mlp"), both.compute).spec == P(None, "model")
        ```
    """
    check_mapping("trainer", trainer, 'mappings_of({"tensor_parallel_axes": ["mlp"]})')
    compute: dict[str, Target] = dict(trainer.get("axis_resources") or {})
    compute |= dict.fromkeys(_names(trainer.get("tensor_parallel_axes")), model)
    batch_axis = trainer.get("batch_axis", "batch")
    if batch_axis is not None:
        compute[batch_axis] = batch
    parameter = compute | dict(trainer.get("parameter_axis_resources") or {})
    parameter |= dict.fromkeys(_names(trainer.get("fsdp_axis", "embed")), data)
    return Mappings(rules_of(parameter), rules_of(compute))


def _names(value: str | Iterable[str] | None) -> tuple[str, ...]:
    """The logical axes in a field of a trainer: one, several or none."""
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,) if value else ()
    return tuple(value)

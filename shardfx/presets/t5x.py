"""T5X's standard logical axis rules as AxisRules."""

from collections.abc import Iterable
from typing import Any

from .._ground.errors import RuleError
from .._rules.axis_rules import AxisRules


_SHARDED = (("vocab", "model"), ("mlp", "model"), ("heads", "model"), ("kv", None), ("joined_kv", "model"))
_REPLICATED = ("relpos_buckets", "abspos_buckets", "length", "layers", "stack", "mlp_activations")
# What `embed` may use, by how many dimensions of activations and of parameters are sharded.
_EMBED = {(1, 1): (None,), (2, 1): ("model",), (1, 2): ("data",), (2, 2): ("model", "data")}


def t5x(
    activation_dims: int = 1, parameter_dims: int = 1, additional_rules: Iterable[Any] | AxisRules = ()
) -> AxisRules:
    """The rules of `t5x.partitioning.standard_logical_axis_rules`, for mesh axes "data" and "model".

    **Arguments:**

    - `activation_dims`: 1 shards activations by batch alone, 2 by `embed` too.
    - `parameter_dims`: 1 shards parameters over "model", 2 over "data" too, as FSDP and ZeRO-3 do.
    - `additional_rules`: pairs, or AxisRules, that come last. Standard rules have priority over them; use
        `.prepend(...)` on the result to override one.

    **Returns:**

    AxisRules, with 13 rules (14 for 2 and 2) and the additional ones.

    **Raises:**

    `RuleError` for other numbers of dimensions.

    !!! Example

        ```python
        from jax.sharding import PartitionSpec as P
        from shardfx import resolve
        from shardfx.presets import t5x

        rules = t5x(activation_dims=2, parameter_dims=2)
        assert resolve(("batch", "length", "embed"), rules).spec == P("data", None, "model")
        assert resolve(("embed", "mlp"), rules).spec == P("data", "model")
        ```
    """
    if (activation_dims, parameter_dims) not in _EMBED:
        raise RuleError(
            f"`t5x(activation_dims={activation_dims!r}, parameter_dims={parameter_dims!r})`: T5X shards one or "
            "two dimensions of each; use 1 or 2."
        )
    embed = [("embed", target) for target in _EMBED[activation_dims, parameter_dims]]
    # T5X puts a replicated `embed` behind `vocab`. The place cannot matter, but the lists stay the same.
    rest = [_SHARDED[0], *embed, *_SHARDED[1:]] if embed == [("embed", None)] else [*_SHARDED, *embed]
    added = additional_rules if isinstance(additional_rules, AxisRules) else AxisRules(additional_rules)
    standard = AxisRules([("batch", "data"), *rest, *((name, None) for name in _REPLICATED)], axes=("data", "model"))
    return standard.extend(added.rules, modes=added.modes, axes=added.axes)

"""MaxText's rule files: `mesh_axes` and `logical_axis_rules`, as AxisRules."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from .._ground.errors import RuleError
from .._ground.spec import entry_axes
from .._rules import AxisRules, Rule
from ._mappings import check_mapping


class MeshAndRules(NamedTuple):
    """The mesh axes and the rules of a MaxText rule file.

    **Arguments:**

    - `mesh_axes`: the names of the mesh axes, in order.
    - `rules`: the rules. As in MaxText, mesh axes that they name and that the mesh
      lacks are ignored.
    """

    mesh_axes: tuple[str, ...]
    rules: AxisRules


def rules_of(config: Mapping[str, Any], base: Iterable[object] = ()) -> MeshAndRules:
    """The mesh axes and the rules of a MaxText configuration, with the same meaning as
    in MaxText.

    MaxText resolves names like Flax. Rules are tried in order, and a rule whose mesh
    axes are in use is skipped. A rule with an empty list or `None` replicates the
    dimension.

    **Arguments:**

    - `config`: the content of a rule file, as `yaml.safe_load` gives it.
    - `base`: the `logical_axis_rules` of the base configuration. The rules of `config`
      replace the base's rules for the same names, and follow its other rules. A custom
      mesh and rule file has no base.

    **Returns:**

    A `MeshAndRules`.

    **Raises:**

    `RuleError` if `logical_axis_rules` is missing, and for an entry that is no rule.

    !!! Example

        ```python
        from jax.sharding import PartitionSpec as P
        from shardfx import resolve
        from shardfx.interop import maxtext

        rules = [["embed", ["fsdp"]], ["mlp", ["tensor"]]]
        read = maxtext.rules_of({"mesh_axes": ["fsdp", "tensor"], "logical_axis_rules": rules})
        assert read.mesh_axes == ("fsdp", "tensor")
        assert resolve(("embed", "mlp"), read.rules).spec == P("fsdp", "tensor")
        ```
    """
    check_mapping("config", config, "rules_of(yaml.safe_load(text))")
    listed_rules = config.get("logical_axis_rules")
    if not isinstance(listed_rules, list | tuple):
        raise RuleError(
            "the configuration has no list of `logical_axis_rules`; it has"
            f" {list(config)[:20]}."
        )
    rules = [_rule(number, rule) for number, rule in enumerate(listed_rules)]
    replaced = {name for name, _ in rules}
    merged: list[Rule] = []
    for number, base_rule in enumerate(base or ()):
        name, target = _rule(number, base_rule)
        if name not in replaced:
            merged.append((name, target))
    merged += rules
    mesh_axes = tuple(config.get("mesh_axes") or ())
    # The rules may name axes that the mesh lacks.
    all_axes = dict.fromkeys(mesh_axes)
    for _, target in merged:
        all_axes |= dict.fromkeys(entry_axes(target))
    return MeshAndRules(mesh_axes, AxisRules(merged, mesh_axes=list(all_axes)))


def _rule(number: int, rule: object) -> Rule:
    """A rule of MaxText, [name, mesh axes], as a pair. Raises `RuleError`, with its
    index `number`, for anything else.
    """
    if not (
        isinstance(rule, list | tuple) and len(rule) == 2 and isinstance(rule[0], str)
    ):
        raise RuleError(
            f"`logical_axis_rules[{number}]` is {rule!r:.80}; a rule is [name, mesh"
            " axes]."
        )
    name, target = rule
    if isinstance(target, list):
        target = tuple(target)
    return name, target

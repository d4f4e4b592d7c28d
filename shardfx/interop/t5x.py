"""The partitioning of a T5X gin file as AxisRules, and back. Neither gin nor T5X is needed."""

import ast
import re
from typing import Any, NamedTuple

from .._ground.errors import RuleError
from .._ground.spec import UNCONSTRAINED
from .._rules.axis_rules import AxisRules, check_axis_rules
from ..presets.t5x import t5x


class Partitioning(NamedTuple):
    """What a gin file says of partitioning.

    **Arguments:**

    - `rules`: the logical axis rules; T5X's standard ones where the file has none.
    - `num_partitions`: the size of the mesh axis "model"; `None` where the file does not say it.
    - `model_parallel_submesh`: the same as four sizes; `None` likewise.
    """

    rules: AxisRules
    num_partitions: int | None
    model_parallel_submesh: tuple[int, ...] | None


_STANDARD = "standard_logical_axis_rules"
# A binding begins a line, `a.B.c = value`, or is indented below `a.B:`.
_BINDING = re.compile(r"^(?P<indent>[ \t]*)(?P<name>[\w./@]+)[ \t]*=[ \t]*", re.MULTILINE)
_BLOCK = re.compile(r"^(?P<name>[\w./]+):[ \t]*(?:#.*)?$", re.MULTILINE)


def partitioning_of(text: str) -> Partitioning:
    """The partitioning of a gin file: its logical axis rules, and the size of its mesh.

    **Arguments:**

    - `text`: the gin file. Its includes are not read: give their texts before it, as one text.

    **Returns:**

    A `Partitioning`. Where a parameter is bound twice, the last binding counts.

    **Raises:**

    `RuleError` for rules that are neither a list of pairs nor `@partitioning.standard_logical_axis_rules()`.

    !!! Example

        ```python
        from jax.sharding import PartitionSpec as P
        from shardfx import resolve
        from shardfx.interop import t5x

        read = t5x.partitioning_of(
            "partitioning.PjitPartitioner.num_partitions = 4\\n"
            "partitioning.PjitPartitioner.logical_axis_rules = "
            "[('batch', 'data'), ('mlp', 'model')]\\n"
        )
        assert read.num_partitions == 4
        assert resolve(("batch", "mlp"), read.rules).spec == P("data", "model")
        ```
    """
    bound = _bindings(text)
    given = bound.get("PjitPartitioner.logical_axis_rules", f"@{_STANDARD}()")
    counts = {name: _literal(bound, f"{_STANDARD}.{name}_partitioning_dims", 1) for name in ("activation", "parameter")}
    more = _literal(bound, f"{_STANDARD}.additional_rules", None) or ()
    if re.fullmatch(rf"@(?:[\w.]+\.)?{_STANDARD}\(\)", given):
        rules = t5x(counts["activation"], counts["parameter"], more)
    else:
        listed = _literal(bound, "PjitPartitioner.logical_axis_rules", None)
        rules = AxisRules(listed or (), axes=("data", "model"))
    submesh = _literal(bound, "PjitPartitioner.model_parallel_submesh", None)
    partitions = _literal(bound, "PjitPartitioner.num_partitions", None)
    return Partitioning(rules, partitions, None if submesh is None else tuple(submesh))


def gin_of(rules: AxisRules, num_partitions: int) -> str:
    """The lines of a gin file that give T5X these rules.

    **Arguments:**

    - `rules`: the rules.
    - `num_partitions`: the size of the mesh axis "model".

    **Returns:**

    Bindings of `partitioning.PjitPartitioner`.

    **Raises:**

    `RuleError` that names the rule, unit, alias or mode that T5X cannot say.
    """
    check_axis_rules("rules", rules)
    for what, given in (("modes", rules.modes), ("units", rules.units), ("aliases", rules.aliases)):
        if given:
            raise RuleError(f"the rules have `{what}` ({given[0][0]!r}), which a gin file of T5X cannot say.")
    for number, (name, target) in enumerate(rules.rules):
        if target is UNCONSTRAINED or isinstance(target, tuple):
            raise RuleError(
                f"rule {number} ({name!r}, {target!r}): T5X gives a name one mesh axis or `None`; write one axis."
            )
    lines = [f"    ({name!r}, {target!r})," for name, target in rules.rules]
    return "\n".join(
        [
            "partitioning.PjitPartitioner:",
            f"  num_partitions = {num_partitions}",
            "  logical_axis_rules = [",
            *lines,
            "  ]",
            "",
        ]
    )


def _bindings(text: str) -> dict[str, str]:
    """The text of each value that is bound, by the last two parts of its name."""
    text = re.sub(r"(?m)#.*$", "", text)
    blocks = [(found.start(), found["name"]) for found in _BLOCK.finditer(text)]
    found: dict[str, str] = {}
    for binding in _BINDING.finditer(text):
        name = binding["name"]
        if binding["indent"]:
            above = [block for start, block in blocks if start < binding.start()]
            name = f"{above[-1]}.{name}" if above else name
        key = ".".join(name.rpartition("/")[2].split(".")[-2:])
        found[key] = _value_text(text[binding.end() :])
    return found


def _value_text(text: str) -> str:
    """The first value of `text`: up to the end of the line on which all its brackets are closed."""
    depth, at = 0, 0
    for at, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if char == "\n" and depth <= 0:
            return text[:at].strip()
    return text[: at + 1].strip()


def _literal(bound: dict[str, str], name: str, default: Any) -> Any:
    if name not in bound:
        return default
    try:
        return ast.literal_eval(bound[name])
    except (ValueError, SyntaxError) as error:
        raise RuleError(
            f"`{name}` is bound to `{bound[name]:.80}`, which is no constant; give the rules themselves: "
            "`AxisRules([...])`, or `presets.t5x(...)`."
        ) from error

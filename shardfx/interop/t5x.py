"""The partitioning in a T5X gin file as AxisRules. Neither gin nor T5X is needed."""

import ast
import re
from typing import Any, NamedTuple

from .._ground.errors import RuleError
from .._rules import AxisRules
from ..presets import t5x


class Partitioning(NamedTuple):
    """The logical axis rules and the mesh sizes of a T5X gin file. Sizes that the file
    lacks are `None`.

    **Arguments:**

    - `rules`: the logical axis rules of the file, or else the standard rules of its
      partitioner.
    - `num_partitions`: the size of the mesh axis "model".
    - `model_parallel_submesh`: the box of devices along "model": its sizes (x, y, z,
      cores) in the TPU's topology.
    - `num_experts`: for a mixture of experts, the largest size of the mesh axis
      "expert".
    """

    rules: AxisRules
    num_partitions: int | None
    model_parallel_submesh: tuple[int, ...] | None
    num_experts: int | None = None


_STANDARD = "standard_logical_axis_rules"
_PLAIN = "PjitPartitioner"
_MOE = "MoePjitPartitioner"
# The rules that `t5x.contrib.moe.partitioning.standard_logical_axis_rules` adds to the
# standard rules.
_EXPERTS = (
    ("expert", "expert"),
    ("expert_mlp", "model"),
    ("expert_replicas", "data"),
    ("unmodeled", None),
)
# The text of each value that a gin file binds, by the last two parts of its name:
# "PjitPartitioner.num_partitions".
Bindings = dict[str, str]
# A binding begins a line, `a.B.c = value`, or is indented below `a.B:`.
_BINDING = re.compile(
    r"^(?P<indent>[ \t]*)(?P<name>[\w./@]+)[ \t]*=[ \t]*", re.MULTILINE
)
_BLOCK = re.compile(r"^(?P<name>[\w./]+):[ \t]*(?:#.*)?$", re.MULTILINE)


def partitioning_of(text: str) -> Partitioning:
    """The partitioning of a gin file: its logical axis rules, and the size of its mesh.

    The file may configure `PjitPartitioner`, or `MoePjitPartitioner` of
    `t5x.contrib.moe`, whose mesh axes are data, expert and model.

    **Arguments:**

    - `text`: the content of the gin file. Its includes are not read, so put their
      contents in front of it.

    **Returns:**

    A `Partitioning`. If a parameter is bound twice, the last binding counts.

    **Raises:**

    `RuleError` if the text has no partitioner of T5X, and for rules that are neither a
    list of pairs nor `@partitioning.standard_logical_axis_rules()`.

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
    kind = _partitioner(bound)
    rules_text = bound.get(f"{kind}.logical_axis_rules", "None")
    standard = re.fullmatch(rf"@(?P<module>(?:[\w.]+\.)?){_STANDARD}\(\)", rules_text)
    if standard is None and rules_text != "None":
        axes = ("data", "model")
        if kind == _MOE:
            axes = ("data", "expert", "model")
        rows = _literal(bound, f"{kind}.logical_axis_rules", None) or ()
        rules = AxisRules(rows, mesh_axes=axes)
    else:
        # Both modules have a function of this name; a file imports the one for experts
        # with its partitioner.
        are_of_moe = standard is None or f"{standard['module']}{_MOE}" in text
        rules = _standard_rules(bound, has_experts=kind == _MOE and are_of_moe)
    submesh = _value_of(bound, f"{kind}.model_parallel_submesh")
    if submesh is not None:
        submesh = tuple(submesh)
    experts = _value_of(bound, f"{kind}.num_expert_partitions", f"{kind}.num_experts")
    return Partitioning(
        rules=rules,
        num_partitions=_value_of(bound, f"{kind}.num_partitions"),
        model_parallel_submesh=submesh,
        num_experts=experts,
    )


def _partitioner(bound: Bindings) -> str:
    """The name of the partitioner class in a gin file: the one passed to a script, else
    one whose parameters are bound.

    Raises `RuleError` if there is none, or if it is not one of T5X's.
    """
    values = [value for name, value in bound.items() if name.endswith(".partitioner")]
    configured: list[str] = []
    for name in bound:
        owner = name.partition(".")[0]
        if owner.endswith("Partitioner"):
            configured.append(owner)
    passed: list[str] = []
    for value in values[-1:]:
        match = re.fullmatch(r"@(?:[\w.]+\.)?(?P<name>\w+)\(\)", value)
        if match is not None:
            passed.append(match["name"])
    kinds = list(dict.fromkeys(passed or configured))
    if not kinds:
        raise RuleError(
            "the text binds no partitioner, and does not say how arrays are sharded."
            " Includes are not read: give their texts before it. T5X's standard rules"
            " are `presets.t5x()`."
        )
    for kind in kinds:
        if kind not in (_PLAIN, _MOE):
            raise RuleError(
                f"`{kind}` is none of T5X's partitioners ({_PLAIN}, {_MOE}); give its"
                " rules: `AxisRules([...])`."
            )
    return _MOE if _MOE in kinds else _PLAIN


def _standard_rules(bound: Bindings, *, has_experts: bool) -> AxisRules:
    """T5X's standard rules with the arguments that the gin file binds, with those for
    experts if `has_experts`.
    """
    activation_dims, parameter_dims = (
        _literal(bound, f"{_STANDARD}.{name}_partitioning_dims", 1)
        for name in ("activation", "parameter")
    )
    additional_rules = _literal(bound, f"{_STANDARD}.additional_rules", None) or ()
    if not has_experts:
        return t5x(activation_dims, parameter_dims, additional_rules)
    rules = t5x(activation_dims, parameter_dims, [*_EXPERTS, *additional_rules])
    # The batch is sharded over experts too.
    pairs = []
    for name, target in rules.rules:
        if name == "batch":
            target = ("expert", "data")
        pairs.append((name, target))
    return AxisRules(pairs, mesh_axes=("data", "expert", "model"))


def _value_of(bound: Bindings, *names: str) -> Any:
    """The value of the first of `names` that the gin file binds; `None` if it binds
    none of them.
    """
    values = (_literal(bound, name, None, open_is_none=True) for name in names)
    return next((value for value in values if value is not None), None)


def _bindings(text: str) -> Bindings:
    """The text of each value that a gin file binds, by the last two parts of its name.
    A name that is bound twice has the last value.
    """
    if not isinstance(text, str):
        raise RuleError(
            f"`partitioning_of` reads the text of a gin file, not {text!r:.60}; write"
            " `partitioning_of(path.read_text())`."
        )
    text = re.sub(r"(?m)#.*$", "", text)
    blocks = [(block.start(), block["name"]) for block in _BLOCK.finditer(text)]
    bindings: Bindings = {}
    for binding in _BINDING.finditer(text):
        name = binding["name"]
        if binding["indent"]:
            # The block to which the binding belongs is the last one before it.
            blocks_before = []
            for start, block in blocks:
                if start < binding.start():
                    blocks_before.append(block)
            if blocks_before:
                name = f"{blocks_before[-1]}.{name}"
        key = ".".join(name.rpartition("/")[2].split(".")[-2:])
        bindings[key] = _value_text(text[binding.end() :])
    return bindings


def _value_text(text: str) -> str:
    """The value at the start of `text`. It ends with the first line after which all
    brackets are closed.
    """
    depth = 0
    position = 0
    for position, char in enumerate(text):
        if char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        if char == "\n" and depth <= 0:
            return text[:position].strip()
    return text[: position + 1].strip()


def _literal(
    bound: Bindings,
    name: str,
    default: object,
    *,
    open_is_none: bool = False,
) -> Any:
    """The constant that the gin file binds a name to, directly or through a macro
    (`%NAME`); `default` for a name without a value.

    `bound` has the text of each value by its name. Raises `RuleError` for a value that
    is no constant, such as a macro without a value. With `open_is_none`, the result for
    such a macro is `default`.
    """
    value = bound.get(name)
    # A macro that leads back to itself has no value, and is no constant.
    macros: list[str] = []
    while value is not None and value[:1] == "%" and value[1:] not in macros:
        macro = value[1:]
        if macro not in bound and not open_is_none:
            break
        macros.append(macro)
        value = bound.get(macro)
    if value is None:
        return default
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError) as error:
        raise RuleError(
            f"`{name}` is bound to `{bound[name]:.80}`, which is no constant; give the"
            " rules themselves: `AxisRules([...])`, or `presets.t5x(...)`."
        ) from error

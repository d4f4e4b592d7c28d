"""A memory policy: what a loss keeps for its backward pass, as data, and its use."""

import collections
import dataclasses
import functools as ft
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import jax
from jaxtyping import PyTree

from ..._ground.errors import (
    LeafTypeError,
    PlanFormatError,
    PlanMismatchError,
    check_type,
)
from ..._ground.text import (
    array_text,
    bytes_text,
    first_lines,
    html_text,
    plural,
    printable,
    table,
)
from ..._step import array_leaves
from .regions import Placed, Region, ValueKey, divided


Choice = Literal["keep", "recompute", "offload"]
_Result = TypeVar("_Result")
_VERSION = 1
_NUMBERS = {"bytes/device", "layers", "in all", "FLOPs"}


@dataclasses.dataclass(frozen=True)
class PolicyRow:
    """A value that the backward pass of a loss reads, in each of equal layers.

    **Arguments:**

    - `line`, `function`: the source line that computes the value, "train.py:41", and
      the function in which it is.
    - `operation`: the name of JAX's primitive, such as "dot_general".
    - `shape`, `dtype`: those of the whole array in one layer.
    - `number`: the position among the values of a layer with the same line, operation,
      shape and dtype.
    - `choice`: "keep", "recompute" or "offload".
    - `bytes`: the bytes in one layer on one device.
    - `layers`: the number of layers that share the choice: blocks, and iterations of
      scans.
    - `flops`: the floating-point operations that computing the value again takes in one
      layer, on all devices together, if the other choices stay.
    """

    __module__ = "shardfx.cost"

    line: str
    function: str
    operation: str
    shape: tuple[int, ...]
    dtype: str
    number: int
    choice: Choice
    bytes: int
    layers: int
    flops: float

    @property
    def key(self) -> ValueKey:
        """The identity of the value: the row without choice and costs."""
        return ValueKey(
            line=self.line,
            function=self.function,
            operation=self.operation,
            shape=self.shape,
            dtype=self.dtype,
            number=self.number,
        )

    def __str__(self) -> str:
        return f"{self.key.name} of {self.function}"


class PolicyChange(NamedTuple):
    """A value of which two policies differ: its row in each, `None` in one that lacks
    it.
    """

    __module__ = "shardfx.cost"

    before: PolicyRow | None
    after: PolicyRow | None

    @property
    def choices(self) -> tuple[str, str]:
        """The choice in each policy; "-" for one that lacks the value."""
        before, after = (getattr(row, "choice", "-") for row in self)
        return before, after

    def __str__(self) -> str:
        before, after = self.choices
        return f"{self.after or self.before}: {before} -> {after}"


@dataclasses.dataclass(frozen=True)
class Policy:
    """What a loss keeps for its backward pass, computes again, or offloads to the host;
    returned by [`shardfx.cost.policy`][]. `str(...)` is a table.

    **Arguments:**

    - `rows`: a row for each value, in the order of the program.
    - `chip`: the name of the chip.
    - `budget_bytes`: the bytes of one device that the gradient's program may fill.
    - `peak_bytes`: the bytes that it fills under the policy.
    - `is_counted`: whether the compiler counted `peak_bytes`. If not, it is foreseen.
    - `flops`: the floating-point operations of the forward pass, on all devices
      together.
    - `recomputed_flops`: those that the backward pass computes again.
    - `notes`: what the policy leaves as it is.
    """

    __module__ = "shardfx.cost"

    rows: tuple[PolicyRow, ...]
    chip: str
    budget_bytes: int
    peak_bytes: int
    is_counted: bool
    flops: float
    recomputed_flops: float
    notes: tuple[str, ...] = ()

    def apply(self, loss: Callable[..., _Result]) -> Callable[..., _Result]:
        """The same function, whose derivative keeps what the policy says.

        Values are named with `checkpoint_name`, inside of `jax.checkpoint` around each
        block and each body of a scan. A region in which all is kept stays as it is.

        **Arguments:**

        - `loss`: the function for which the policy was made.

        **Returns:**

        A function of the same arguments, to differentiate, `jit` and so on. Arrays in
        its arguments have the shapes for which the policy was made. It is traced where
        it is called.

        **Raises:**

        The function raises `PlanMismatchError` if the loss lacks values of the policy,
        such as after an edit or for another batch size.
        """

        @ft.wraps(loss)
        def under_policy(*args: PyTree, **kwargs: PyTree) -> _Result:
            traced = divided(loss, (args, kwargs))
            self._raise_if_missing(traced.program.placed())
            arrays = array_leaves((args, kwargs))
            return traced.result(arrays, ft.partial(checkpointed, self._choices))

        return under_policy

    def _raise_if_missing(self, regions: Iterable[Placed]) -> None:
        """Raises an error if the regions lack a value of the policy."""
        keys: set[ValueKey] = set()
        for placed in regions:
            keys.update(placed.region.all_keys)
        missing = [row for row in self.rows if row.key not in keys]
        if not missing:
            return
        listed = "\n".join(f"  {row}" for row in missing)
        raise PlanMismatchError(
            f"the loss lacks {plural(len(missing), 'value')} of"
            f" {len(self.rows)} in the policy:\n{listed}\nIts lines or shapes have"
            " changed since. Make the policy again:"
            f' policy = sfx.cost.policy(loss, *args, chip="{self.chip}").'
        )

    @ft.cached_property
    def _choices(self) -> Mapping[ValueKey, Choice]:
        return {row.key: row.choice for row in self.rows}

    def diff(self, other: "Policy") -> tuple[PolicyChange, ...]:
        """The values of which two policies differ in choice, or that only one has.

        **Arguments:**

        - `other`: another policy, such as one for a larger budget.
        """
        check_type(
            what="other",
            value=other,
            expected=Policy,
            error=LeafTypeError,
            fix="give what `cost.policy(loss, *args)` returns",
        )
        before = {row.key: row for row in self.rows}
        after = {row.key: row for row in other.rows}
        changes = (
            PolicyChange(before.get(key), after.get(key)) for key in {**before, **after}
        )
        return tuple(change for change in changes if len(set(change.choices)) == 2)

    def to_json(self) -> str:
        """The policy as JSON text."""
        return json.dumps({"version": _VERSION, **dataclasses.asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Policy":
        """The policy that `to_json` wrote.

        **Arguments:**

        - `text`: the JSON text.

        **Raises:**

        `PlanFormatError` for text that is no policy, or of another version.
        """
        try:
            fields = json.loads(text)
            if not isinstance(fields, dict):
                raise ValueError(f"it holds a {type(fields).__name__}, not an object")
            version = fields.pop("version")
            if version != _VERSION:
                raise ValueError(f"version {version!r}, not {_VERSION}")
            _check_types(fields, _POLICY_TYPES)
            rows = []
            for row in fields.pop("rows"):
                _check_types(row, _ROW_TYPES)
                rows.append(PolicyRow(**{**row, "shape": tuple(row["shape"])}))
            notes = tuple(fields.pop("notes"))
            policy = cls(rows=tuple(rows), notes=notes, **fields)
        except (
            ValueError,
            TypeError,
            KeyError,
            AttributeError,
            RecursionError,
        ) as error:
            raise PlanFormatError(
                f"this text is no policy ({error}); make it again with"
                " `sfx.cost.policy(...)`, and write it with `policy.to_json()`."
            ) from error
        return policy

    def __str__(self) -> str:
        header = (
            "choice",
            "bytes/device",
            "layers",
            "in all",
            "FLOPs",
            "array",
            "line",
        )
        lines = table([header, *map(_cells, self.rows)], right=_NUMBERS)
        how = "counted by the compiler" if self.is_counted else "foreseen"
        share = self.recomputed_flops / max(self.flops, 1.0)
        lines.append(
            f"{bytes_text(self.peak_bytes)} of {bytes_text(self.budget_bytes)} on"
            f" {self.chip}, {how}; {share:.0%} of the forward pass is computed again."
        )
        return "\n".join([*lines, *map(printable, self.notes)])

    __repr__ = first_lines

    _repr_html_ = html_text


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return value >= 0


def _is_list_of(is_valid: Callable[[object], bool], value: object) -> bool:
    return isinstance(value, list) and all(map(is_valid, value))


# For each field of a policy, and of a row, whether JSON's value has its type.
_Types = dict[str, Callable[[object], bool]]
_POLICY_TYPES: _Types = {
    "rows": ft.partial(_is_list_of, lambda row: isinstance(row, dict)),
    "chip": _is_text,
    "budget_bytes": _is_count,
    "peak_bytes": _is_count,
    "is_counted": lambda value: isinstance(value, bool),
    "flops": _is_number,
    "recomputed_flops": _is_number,
    "notes": ft.partial(_is_list_of, _is_text),
}
_ROW_TYPES: _Types = {
    "line": _is_text,
    "function": _is_text,
    "operation": _is_text,
    "shape": ft.partial(_is_list_of, _is_count),
    "dtype": _is_text,
    "number": _is_count,
    "choice": lambda value: value in get_args(Choice),
    "bytes": _is_count,
    "layers": _is_count,
    "flops": _is_number,
}


def _check_types(fields: dict[str, object], types: _Types) -> None:
    """Raises `TypeError` for a field of a policy or row that is of another type, and
    `KeyError` for one that is missing.
    """
    for name, has_type in types.items():
        if not has_type(fields[name]):
            raise TypeError(f"`{name}` is {fields[name]!r:.100}")


def _cells(row: PolicyRow) -> tuple[str, ...]:
    """The cells of a value's row in the table."""
    return (
        row.choice,
        bytes_text(row.bytes),
        f"{row.layers:,}",
        bytes_text(row.bytes * row.layers),
        f"{row.flops:.3g}",
        f"{row.operation} {array_text(row.dtype, row.shape)}",
        f"{row.line} {row.function}",
    )


def checkpointed(
    choices: Mapping[ValueKey, Choice],
    region: Region,
) -> Callable[..., list[Any]]:
    """The function of a region's inputs that keeps what `choices` say.

    A region without a value that is computed again or offloaded is as it was. Only
    values that are kept or offloaded get a name. `choices` has the choice of each
    value, by its key.
    """
    names: dict[Choice | None, list[str]] = collections.defaultdict(list)
    for key in region.all_keys:
        names[choices.get(key)].append(key.name)
    saved = {*names["keep"], *names["offload"]}
    if not names["recompute"] and not names["offload"]:
        return lambda *arrays: region.named(arrays, lambda _key: False)

    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=names["keep"],
        names_which_can_be_offloaded=names["offload"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def run(*arrays: Any) -> list[Any]:
        return region.named(arrays, lambda key: key.name in saved)

    # A loop's iterations cannot be merged with those of another loop.
    return jax.checkpoint(run, policy=policy, prevent_cse=not region.is_body)

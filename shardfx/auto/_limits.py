"""The limits that a user sets to the candidates of a search."""

import dataclasses
import numbers
from collections.abc import Callable

from .._ground.errors import RuleError, whole_number
from .._rules import AxisRules


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits for the candidates of [`shardfx.auto.search`][].

    **Arguments:**

    - `never`: logical names that no mesh axis shards.
    - `always`: logical names that some mesh axis must shard.
    - `least`: pairs of a logical name and the smallest number of its shards, such as
      `(("batch", 8),)`.
    - `free_bytes`: bytes of a device's memory that must stay free.
    - `axes`: mesh axes that must exist, by the names that a search gives them ("data",
      "fsdp", "tensor", "context", "expert"): a name, or a pair of a name and a size.
    - `rules`: rules whose mesh axes are kept as they are, so that only their sizes are
      chosen.

    !!! Example

        ```python
        from shardfx.auto import Limits

        Limits(never=("vocab",), least=(("batch", 4),), free_bytes=2**30)
        ```
    """

    __module__ = "shardfx.auto"

    never: tuple[str, ...] = ()
    always: tuple[str, ...] = ()
    least: tuple[tuple[str, int], ...] = ()
    free_bytes: int = 0
    axes: tuple[str | tuple[str, int], ...] = ()
    rules: AxisRules | None = None

    def __post_init__(self):
        """Raises `RuleError` for limits that are of a wrong type, contradict each other,
        or say nothing.
        """
        _require_entries("never", self.never, _is_name, 'names, `never=("batch",)`')
        _require_entries("always", self.always, _is_name, 'names, `always=("batch",)`')
        _require_entries(
            "least",
            self.least,
            _is_pair,
            'pairs of a name and a number, `least=(("batch", 8),)`',
        )
        _require_entries(
            "axes",
            self.axes,
            lambda axis: _is_name(axis) or _is_pair(axis),
            'names, or of pairs of a name and a size, `axes=("data",)`',
        )
        if isinstance(self.free_bytes, bool) or not isinstance(
            self.free_bytes, numbers.Real
        ):
            raise RuleError(
                f"`free_bytes={self.free_bytes!r:.40}` is no number of bytes; write"
                " `free_bytes=2**30`."
            )
        wanted = {*self.always, *(name for name, _ in self.least)}
        both = sorted(wanted.intersection(self.never))
        if both:
            raise RuleError(
                f"`limits` wants {both[0]!r} sharded, and `never` forbids it; take it"
                " out of one of them."
            )
        for name, shards in self.least:
            if shards < 1:
                raise RuleError(
                    f"`least` wants {shards} shards of {name!r}; give 1 or more."
                )
        if self.free_bytes < 0:
            raise RuleError(
                f"`free_bytes` is {self.free_bytes}; 0 leaves all memory to the step."
            )
        for name, size in self.wanted_axes:
            if size is not None and size < 2:
                raise RuleError(
                    f"`axes` wants {name!r} of size {size}; give 2 or more."
                )

    @property
    def wanted_axes(self) -> tuple[tuple[str, int | None], ...]:
        """Pairs of a mesh axis that must exist and its size; the size is `None` where
        `axes` gives none.
        """
        pairs = []
        for axis in self.axes:
            pairs.append((axis, None) if isinstance(axis, str) else axis)
        return tuple(pairs)


def _is_name(entry: object) -> bool:
    return isinstance(entry, str)


def _is_pair(entry: object) -> bool:
    """Whether an entry is a pair of a name and an integer."""
    if not isinstance(entry, tuple | list) or len(entry) != 2:
        return False
    name, number = entry
    return _is_name(name) and whole_number(number) is not None


def _require_entries(
    field: str,
    entries: object,
    is_valid: Callable[[object], bool],
    example: str,
) -> None:
    """Raises `RuleError` unless the limit `field` is a tuple of valid entries. A text is
    none: its entries would be letters. `example` ends the sentence.
    """
    if not isinstance(entries, tuple | list) or not all(map(is_valid, entries)):
        what, _, code = example.partition(", `")
        raise RuleError(
            f"`{field}={entries!r:.80}` must be a tuple of {what}; write `{code}."
        )

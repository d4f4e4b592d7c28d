"""The limits that a user sets to the candidates of a search."""

import dataclasses
import numbers
from collections.abc import Callable, Iterable
from typing import Any

from .._ground.errors import RuleError, whole_number
from .._rules import AxisRules


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits for the candidates of [`shardfx.auto.search`][].

    Any collection will do where a tuple is written, such as a list or a set.

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
        examples = {
            "never": 'names, `never=("batch",)`',
            "always": 'names, `always=("batch",)`',
            "least": 'pairs of a name and a number, `least=(("batch", 8),)`',
            "axes": 'names, or of pairs of a name and a size, `axes=("data",)`',
        }
        readers = {
            "never": _name,
            "always": _name,
            "least": _counted,
            "axes": _axis,
        }
        for field, example in examples.items():
            entries = _entries(field, getattr(self, field), readers[field], example)
            object.__setattr__(self, field, entries)
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


def _name(entry: object) -> str | None:
    """The logical name `entry`; `None` if it is no text."""
    return entry if isinstance(entry, str) else None


def _counted(entry: object) -> tuple[str, int] | None:
    """The pair `entry` of a name and an integer; `None` if it is something else. The
    integer may be a whole float, such as 8.0.
    """
    if not isinstance(entry, tuple | list) or len(entry) != 2:
        return None
    name, number = entry
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    count = whole_number(number)
    if not isinstance(name, str) or count is None:
        return None
    return (name, count)


def _axis(entry: object) -> str | tuple[str, int] | None:
    """The mesh axis `entry`, a name or a pair of a name and a size; `None` if it is
    neither. A pair with the size `None` is the name alone.
    """
    if isinstance(entry, tuple | list) and len(entry) == 2 and entry[1] is None:
        return _name(entry[0])
    return _name(entry) or _counted(entry)


def _entries(
    field: str,
    given: Any,
    reader: Callable[[object], object],
    example: str,
) -> tuple[Any, ...]:
    """The entries of the limit `field` as `reader` returns them, those of a set in the
    order of their texts. Raises `RuleError` if `given` is no collection, or if `reader`
    returns `None` for an entry. A text is no collection: its entries would be letters.
    `example` ends the error's sentence.
    """
    is_collection = isinstance(given, Iterable) and not isinstance(given, str)
    entries = tuple(map(reader, given)) if is_collection else ()
    if not is_collection or None in entries:
        what, _, code = example.partition(", `")
        raise RuleError(
            f"`{field}={given!r:.80}` must be a tuple of {what}; write `{code}."
        )
    if isinstance(given, set | frozenset):
        return tuple(sorted(entries, key=str))
    return entries

"""The limits that a user sets to the candidates of a search."""

import dataclasses

from .._ground.errors import RuleError
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
        """Raises `RuleError` for limits that contradict each other or say nothing."""
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

"""What a search must keep to."""

import dataclasses

from .._ground.errors import RuleError
from .._rules.axis_rules import AxisRules, near
from .classes import Classes


@dataclasses.dataclass(frozen=True)
class Limits:
    """What the candidates of [`shardfx.search`][] must keep to.

    **Arguments:**

    - `never`: logical names that no mesh axis cuts.
    - `always`: logical names that some mesh axis must cut.
    - `least`: pairs of a logical name and into how many pieces it must be cut at least, as `(("batch", 8),)`.
    - `free_bytes`: how much of a device's memory must stay free.
    - `most_axes`: how many mesh axes there may be, 4 at most.
    - `rules`: rules whose mesh axes are kept as they are, so that only their sizes are chosen.

    !!! Example

        ```python
        from shardfx import Limits

        Limits(never=("vocab",), least=(("batch", 4),), free_bytes=2**30)
        ```
    """

    never: tuple[str, ...] = ()
    always: tuple[str, ...] = ()
    least: tuple[tuple[str, int], ...] = ()
    free_bytes: int = 0
    most_axes: int = 4
    rules: AxisRules | None = None

    def __post_init__(self):
        if not 1 <= self.most_axes <= 4:
            raise RuleError(f"`most_axes` is {self.most_axes}; a search can choose meshes of 1 to 4 axes.")


def numbers_of(names: tuple[str, ...], classes: Classes) -> dict[str, int]:
    """The number of the group of each name; an unknown one is an error with near names."""
    known = {group.name: number for number, group in enumerate(classes.groups) if group.roots}
    for name in names:
        if name not in known:
            raise RuleError(
                f"`limits` names {name!r}, which no dimension of the step's arguments has{near(name, tuple(known))}; "
                f"there are {', '.join(sorted(known))}. `name_axes(step, ...)` shows where each is."
            )
    return {name: known[name] for name in names}

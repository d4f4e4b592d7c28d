"""The limits that a user sets for a search."""

import dataclasses
from collections.abc import Callable, Iterator

from .._ground.errors import RuleError
from .._rules import AxisRules, near
from ._classes import Classes


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits for the candidates of [`shardfx.auto.search`][].

    **Arguments:**

    - `never`: logical names that no mesh axis cuts.
    - `always`: logical names that some mesh axis must cut.
    - `least`: pairs of a logical name and into how many pieces it must be cut at least, as `(("batch", 8),)`.
    - `free_bytes`: bytes of a device's memory that must stay free.
    - `axes`: mesh axes that must exist, by the names that a search gives them ("data", "fsdp", "tensor", "context",
        "expert"): a name, or a pair of a name and a size.
    - `rules`: rules whose mesh axes are kept as they are, so that only their sizes are chosen.

    !!! Example

        ```python
        from shardfx.auto import Limits

        Limits(never=("vocab",), least=(("batch", 4),), free_bytes=2**30)
        ```
    """

    never: tuple[str, ...] = ()
    always: tuple[str, ...] = ()
    least: tuple[tuple[str, int], ...] = ()
    free_bytes: int = 0
    axes: tuple[str | tuple[str, int], ...] = ()
    rules: AxisRules | None = None

    def __post_init__(self):
        both = sorted({*self.never} & {*self.always, *(name for name, _ in self.least)})
        if both:
            raise RuleError(f"`limits` wants {both[0]!r} cut, and `never` forbids it; take it out of one of them.")
        for name, pieces in self.least:
            if pieces < 1:
                raise RuleError(f"`least` wants {name!r} in {pieces} pieces; the fewest that there can be are 1.")
        if self.free_bytes < 0:
            raise RuleError(f"`free_bytes` is {self.free_bytes}; 0 leaves all memory to the step.")
        if len(self.axes) > 4:
            raise RuleError(f"`axes` wants {len(self.axes)} mesh axes; a search can choose meshes of 1 to 4.")
        for name, size in self.wanted_axes:
            if size is not None and size < 2:
                raise RuleError(
                    f"`axes` wants {name!r} of size {size}; an axis that shares something out has 2 or more."
                )

    @property
    def wanted_axes(self) -> tuple[tuple[str, int | None], ...]:
        """The mesh axes that must exist, each with its size, or `None` if any size will do."""
        return tuple((one, None) if isinstance(one, str) else one for one in self.axes)


def blocking(limits: Limits, can: Callable[[Limits], bool]) -> str:
    """The limit that leaves no candidate, in words. `can` says whether a mesh exists within other limits."""
    singly = [text for text, other in _loosened(limits) if can(other)]
    if singly:
        return f"without `{'`, or without `'.join(singly)}` there is one"
    if can(Limits()):
        return f"all of the limits together leave none: {', '.join(text for text, _ in _loosened(limits))}"
    return "pad one, or use another number of devices"


def _loosened(limits: Limits) -> Iterator[tuple[str, Limits]]:
    """Each limit in words, with the limits that are left without it."""
    for field in dataclasses.fields(limits):
        value, usual = getattr(limits, field.name), field.default
        if isinstance(value, tuple):
            for one in value:
                left = tuple(other for other in value if other != one)
                yield f"{field.name}={one!r}", dataclasses.replace(limits, **{field.name: left})
        elif value != usual:
            text = field.name if isinstance(value, AxisRules) else f"{field.name}={value!r}"
            yield text, dataclasses.replace(limits, **{field.name: usual})


def numbers_of(names: tuple[str, ...], classes: Classes) -> dict[str, int]:
    """The group number of each name; raises for an unknown name, with near names."""
    known = {group.name: number for number, group in enumerate(classes.groups) if group.roots}
    for name in names:
        if name not in known:
            raise RuleError(
                f"`limits` names {name!r}, which no dimension of the step's arguments has{near(name, tuple(known))}; "
                f"there are {', '.join(sorted(known))}. `name_axes(step, ...)` shows where each is."
            )
    return {name: known[name] for name in names}

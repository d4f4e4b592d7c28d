"""What a search must keep to."""

import dataclasses
import functools as ft
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from .._ground.errors import RuleError
from .._rules.axis_rules import AxisRules, near
from ..topology._mesh import MeshSpec
from ._classes import Classes


@dataclasses.dataclass(frozen=True)
class Limits:
    """What the candidates of [`shardfx.auto.search`][] must keep to.

    **Arguments:**

    - `never`: logical names that no mesh axis cuts.
    - `always`: logical names that some mesh axis must cut.
    - `least`: pairs of a logical name and into how many pieces it must be cut at least, as `(("batch", 8),)`.
    - `free_bytes`: how much of a device's memory must stay free.
    - `axes`: mesh axes that must exist, by the names that a search gives them ("data", "fsdp", "tensor", "context",
        "expert"): a name, or a pair of a name and a size.
    - `most_axes`: how many mesh axes there may be, 4 at most.
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
    most_axes: int = 4
    rules: AxisRules | None = None

    def __post_init__(self):
        if not 1 <= self.most_axes <= 4:
            raise RuleError(f"`most_axes` is {self.most_axes}; a search can choose meshes of 1 to 4 axes.")
        both = sorted({*self.never} & {*self.always, *(name for name, _ in self.least)})
        if both:
            raise RuleError(f"`limits` wants {both[0]!r} cut, and `never` forbids it; take it out of one of them.")
        for name, pieces in self.least:
            if pieces < 1:
                raise RuleError(f"`least` wants {name!r} in {pieces} pieces; the fewest that there can be are 1.")
        if self.free_bytes < 0:
            raise RuleError(f"`free_bytes` is {self.free_bytes}; 0 leaves all memory to the step.")
        if len(self.axes) > self.most_axes:
            raise RuleError(f"`axes` wants {len(self.axes)} mesh axes, and `most_axes` allows {self.most_axes}.")
        for name, size in self.wanted_axes:
            if size is not None and size < 2:
                raise RuleError(
                    f"`axes` wants {name!r} of size {size}; an axis that shares something out has 2 or more."
                )

    @property
    def wanted_axes(self) -> tuple[tuple[str, int | None], ...]:
        """The mesh axes that must exist, each with its size or `None`."""
        return tuple((one, None) if isinstance(one, str) else one for one in self.axes)

    def has_axes(self, mesh: MeshSpec) -> bool:
        """Whether a mesh has the axes that must exist."""
        sizes = mesh.shape
        return all(name in sizes and size in (None, sizes[name]) for name, size in self.wanted_axes)


def named_assignments(limits: Limits, called: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Which assignments an axis that must exist can have, and its size.

    **Arguments:**

    - `limits`: what must hold.
    - `called`: the name of a mesh axis for each assignment.
    """
    named = np.zeros((len(limits.axes), len(called)), bool)
    for row, (name, _) in enumerate(limits.wanted_axes):
        named[row] = [name == one for one in called]
        if not named[row].any():
            known = tuple(dict.fromkeys(called))
            raise RuleError(
                f"`limits` wants a mesh axis {name!r}, and no assignment of this step is called so{near(name, known)}; "
                f"there are {', '.join(sorted(known))}."
            )
    return named, np.array([size or 0 for _, size in limits.wanted_axes], np.int32)


def blocking(limits: Limits, can: Callable[[Limits], bool]) -> str:
    """Which of the limits leaves nothing, in words: without it there would be a mesh.

    **Arguments:**

    - `limits`: what must hold.
    - `can`: whether there is a mesh within other limits.
    """
    singly = [text for text, other in _loosened(limits) if can(other)]
    if singly:
        return f"without `{'`, or without `'.join(singly)}` there is one"
    if can(Limits()):
        return f"all of the limits together leave none: {', '.join(text for text, _ in _loosened(limits))}"
    return "pad one, or use another number of devices"


def _loosened(limits: Limits) -> Iterator[tuple[str, Limits]]:
    """Each limit in words, and the limits without it."""
    change = ft.partial(dataclasses.replace, limits)
    for name in limits.never:
        yield f"never={name!r}", change(never=tuple(other for other in limits.never if other != name))
    for name in limits.always:
        yield f"always={name!r}", change(always=tuple(other for other in limits.always if other != name))
    for name, pieces in limits.least:
        yield f"least={name!r} in {pieces}", change(least=tuple(pair for pair in limits.least if pair[0] != name))
    for one in limits.axes:
        yield f"axes={one!r}", change(axes=tuple(other for other in limits.axes if other != one))
    if limits.most_axes < 4:
        yield f"most_axes={limits.most_axes}", change(most_axes=4)
    if limits.rules is not None:
        yield "rules", change(rules=None)
    if limits.free_bytes:
        yield f"free_bytes={limits.free_bytes}", change(free_bytes=0)


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

"""Reasons and decisions. A `Reason` says why an array is sharded over fewer mesh axes
than requested, and a `Decision` is a PartitionSpec with its reasons.
"""

import dataclasses
import enum
import math

from jax.sharding import PartitionSpec


# Advice that the reasons of a refined plan leave out.
_REFINE = ", or split the mesh axis (`refine=True`)"


class Code(enum.Enum):
    """The possible causes for a dimension that is not sharded as requested.

    The value of a code is the template of a [`shardfx.Reason`][]'s message: values
    replace its `{...}`, and it ends with advice to the user.
    """

    __module__ = "shardfx"

    unmatched = (
        "no rule covers {what}, so it is replicated; add a rule for it (target `None`"
        " if that is what you want)"
    )
    blocked = (
        "{what} wanted mesh axes that a dimension with priority already uses; add a"
        " later rule with another target as a fallback, or move its rule up"
    )
    absent = (
        "the mesh has no {what}; add the axis to the mesh, or drop it from the rule"
    )
    duplicate = (
        "{what} is already used by an earlier dimension; map one of the two to another"
        " axis"
    )
    indivisible = (
        "size {size} is not divisible by {what}; {pad}use axes whose product divides"
        " {whole}"
    )
    unit = (
        "{size} elements are {units} of {unit}, and {what} would cut inside a unit; "
        "use axes whose product divides {count}" + _REFINE
    )
    small = (
        "the array has {size} bytes, fewer than the {limit} asked for; lower"
        " `min_bytes` to shard it"
    )
    skipped = (
        "`{strategy}` may shard no dimension of the array, since it skips {dims}"
        " (`skip_dims`, stacked layers, or a name that is replicated); put a rule with the"
        " target `replicate` before it if the array is to be whole"
    )
    unaligned = (
        "{what}; give the array a spec of its own with `plan.replace(path, spec)`"
    )
    reordered = (
        "{what} shard the dimension in the order {order}, since JAX puts Explicit axes"
        " before Auto axes inside `jit`; write them so, or give all axes of the mesh"
        " one type"
    )
    large = (
        "{size} bytes of the array stay on each device, more than the {limit} asked for;"
        " add mesh axes to the strategy, or raise `max_bytes`"
    )
    scalar = "{what} has nothing to shard; no rule is needed"

    def __repr__(self) -> str:
        return str(self)  # without the template

    @property
    def is_expected(self) -> bool:
        """Whether nothing is lost: no rule could shard such an array."""
        return self is Code.scalar

    @property
    def is_about_size(self) -> bool:
        """Whether the size of a dimension is the cause: it is not divisible by the
        mesh axes, in elements or in units.
        """
        return self in (Code.indivisible, Code.unit)

    @property
    def is_cut(self) -> bool:
        """Whether the array is sharded less than its rule requests, for a cause that
        the rule does not ask for itself, as `min_bytes` and `skip_dims` do.
        """
        return self.is_about_size or self is Code.duplicate

    @property
    def is_of_request(self) -> bool:
        """Whether the request itself has the cause, so that it is the same on every
        mesh.
        """
        return self in (Code.scalar, Code.unmatched, Code.unaligned)


@dataclasses.dataclass(frozen=True)
class Reason:
    """Why one dimension of an array is sharded over fewer mesh axes than requested.

    **Arguments:**

    - `code`: the cause, one of the codes of [`shardfx.Code`][].
    - `dim`: the dimension that is not sharded as requested, or `None` for the array as
      a whole.
    - `axes`: the mesh axes (or logical names) that were requested and dropped, in
      order.
    - `message`: the cause as a sentence, with the actual values and advice to the user.
    """

    __module__ = "shardfx"

    code: Code
    dim: int | None
    axes: tuple[str, ...]
    message: str

    def __str__(self) -> str:
        if self.dim is None:
            return self.message
        return f"dim {self.dim}: {self.message}"


@dataclasses.dataclass(frozen=True)
class Decision:
    """A PartitionSpec, with every reason why it differs from the requested spec.

    **Arguments:**

    - `spec`: the spec in canonical form: no trailing `None`, no one-element tuples.
    - `reasons`: the reasons in the order of the dimensions; empty if the spec is the
      requested one.
    """

    __module__ = "shardfx"

    spec: PartitionSpec
    reasons: tuple[Reason, ...] = ()


def reason_for(
    code: Code,
    dim: int | None,
    axes: tuple[str, ...] = (),
    **values: object,
) -> Reason:
    """The reason whose message is the template of `code` with `values` in place of its
    `{...}`. Templates see `values` alone, and not `dim` or `axes`.

    `dim` is the dimension that is not sharded as requested, or `None` for the whole
    array. `axes` are the mesh axes or logical names that were requested and dropped.
    """
    return Reason(code=code, dim=dim, axes=axes, message=code.value.format(**values))


def nothing_to_shard(shape: tuple[int, ...]) -> Reason:
    """The reason of an array of at most one element, which no mesh axis could shard."""
    if math.prod(shape):
        what = "an array of one element"
    else:
        what = "an array without elements"
    if not shape:
        what = "an array of rank 0"
    return reason_for(Code.scalar, None, what=what)


def refined_reasons(reasons: tuple[Reason, ...]) -> tuple[Reason, ...]:
    """The reasons, without the advice to split a mesh axis in their messages."""
    refined = []
    for why in reasons:
        message = why.message.removesuffix(_REFINE)
        refined.append(dataclasses.replace(why, message=message))
    return tuple(refined)

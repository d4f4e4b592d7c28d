"""The reasons why an array is sharded over fewer mesh axes than requested, and a spec with its reasons."""

import dataclasses
import enum

from jax.sharding import PartitionSpec


# The one next step that a refined plan cannot take again: see `refined_reasons`.
_REFINE = ", or split the mesh axis (`refine=True`)"


class Code(enum.Enum):
    """The kind of a reason why a dimension is not sharded as requested.

    The value is the message that a person reads; it ends in what to do next. `{...}` are filled in by the
    [`shardfx.Reason`][] that carries the code.
    """

    __module__ = "shardfx"

    unmatched = "no rule covers {what}, so it is replicated; add a rule for it (target `None` if that is what you want)"
    blocked = (
        "{what} wanted mesh axes that a dimension with priority already uses; add a later rule with another "
        "target as a fallback, or move its rule up"
    )
    absent = "the mesh has no {what}; add the axis to the mesh, or drop it from the rule"
    duplicate = "{what} is already used by an earlier dimension; map one of the two to another axis"
    indivisible = "size {size} is not divisible by {what}; {pad}use axes whose product divides {whole}"
    unit = (
        "{size} elements are {units} of {unit}, and {what} would cut inside a unit; "
        "use axes whose product divides {count}" + _REFINE
    )
    small = "the array has {size} bytes, fewer than the {limit} asked for; lower `min_bytes` to shard it"
    rank = "{what}; give one entry per dimension, at most"
    scalar = "an array of rank 0 has nothing to shard; no rule is needed"

    def __repr__(self) -> str:
        return str(self)  # not the sentence with its blanks


@dataclasses.dataclass(frozen=True)
class Reason:
    """Why one dimension of an array is sharded over fewer mesh axes than requested.

    **Arguments:**

    - `code`: a code of the closed vocabulary of reasons, see [`shardfx.Code`][].
    - `dim`: the dimension that is not sharded as requested, or `None` for the array as a whole.
    - `axes`: the mesh axes (or logical names) that were requested and dropped, in order.
    - `message`: the sentence for a person, with the actual values and a next step.
    """

    __module__ = "shardfx"

    code: Code
    dim: int | None
    axes: tuple[str, ...]
    message: str

    def __str__(self) -> str:
        return self.message if self.dim is None else f"dim {self.dim}: {self.message}"


@dataclasses.dataclass(frozen=True)
class Decision:
    """A PartitionSpec, with every reason why it differs from the requested spec.

    **Arguments:**

    - `spec`: the spec in canonical form: no trailing `None`, no one-element tuples.
    - `reasons`: in order of dimension; empty if the spec is the requested one.
    """

    __module__ = "shardfx"

    spec: PartitionSpec
    reasons: tuple[Reason, ...] = ()


def reason_for(code: Code, dim: int | None, axes: tuple[str, ...] = (), **values: object) -> Reason:
    """A [`shardfx.Reason`][] with the message of its code, filled in with `values`."""
    return Reason(code, dim, axes, code.value.format(**values))


def refined_reasons(reasons: tuple[Reason, ...]) -> tuple[Reason, ...]:
    """The reasons with the advice to split a mesh axis (`refine=True`) removed from their messages."""
    return tuple(dataclasses.replace(why, message=why.message.removesuffix(_REFINE)) for why in reasons)

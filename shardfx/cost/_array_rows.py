"""The arrays of a step: how each lies, and which mesh axes it could have had."""

import dataclasses

from jax.sharding import PartitionSpec

from .._ground.spec import DType, entries_of
from .._ground.text import array_text
from .._step import Frame, Phase, place_text


@dataclasses.dataclass(frozen=True)
class Origin:
    """The origin of one mesh axis in the sharding of an array.

    **Arguments:**

    - `axis`: the mesh axis. A sub-axis has Shardy's notation, "fsdp:(1)2".
    - `by`: the argument, result or constraint whose sharding has the axis:
      "params/layers/up", "the constraint at train.py:41".
    - `chain`: the lines of your program over which the axis propagated, from the origin
      to the array.
    """

    __module__ = "shardfx.cost"

    axis: str
    by: str
    chain: tuple[Frame, ...]


@dataclasses.dataclass(frozen=True)
class MissedAxis:
    """A mesh axis that could shard a dimension of an array and does not.

    **Arguments:**

    - `axis`, `dim`: the mesh axis, and the number of the dimension.
    - `by`: the argument, result or constraint whose sharding has the axis on this
      dimension.
    - `first`: the argument, result or constraint from which the axis shards another
      dimension instead; "" if the axis shards no dimension.
    - `line`: the line of your program that computes the array to constrain, where the
      axis stopped propagating.
    - `shape`, `dtype`, `spec`: the shape and dtype of this array, and its spec with the
      axis added.
    """

    __module__ = "shardfx.cost"

    axis: str
    dim: int
    by: str
    first: str
    line: Frame | None
    shape: tuple[int, ...]
    dtype: DType
    spec: PartitionSpec

    @property
    def change(self) -> str:
        """The sharding constraint that shards the array over the mesh axis, as code."""
        return f"constrain(x, P{entries_of(self.spec)!r}, plan)"

    @property
    def where(self) -> str:
        """The text of the array to constrain, with the line of your program that
        computes it.
        """
        return f"{array_text(self.dtype, self.shape)} of {place_text(self.line)}"

    def __str__(self) -> str:
        reason = f"{self.first} took it first" if self.first else "it did not propagate"
        return (
            f"{self.axis} could shard dimension {self.dim}: {self.by} has it there, and"
            f" {reason}. Constrain the {self.where}: {self.change}"
        )


@dataclasses.dataclass(frozen=True)
class ArrayRow:
    """One array of a step, and its sharding.

    **Arguments:**

    - `source`: the innermost line of your own program that computes the array; `None`
      if it is not known.
    - `operation`: StableHLO's name of the operation that computes the array, such as
      "dot_general".
    - `phase`: "forward", "backward" or "recomputed"; "" if JAX does not name the pass.
    - `loop`: the line of the innermost loop that computes the array in each iteration;
      `None` outside of loops.
    - `shape`, `dtype`, `spec`: the shape of the whole array, its dtype, and its
      PartitionSpec.
    - `bytes_per_device`: the bytes of one device's shard.
    - `origins`: the origin of each mesh axis in `spec`.
    - `number`: the number of the array in the step.
    """

    __module__ = "shardfx.cost"

    source: Frame | None
    operation: str
    phase: Phase
    loop: Frame | None
    shape: tuple[int, ...]
    dtype: DType
    spec: PartitionSpec
    bytes_per_device: int
    origins: tuple[Origin, ...]
    number: int = dataclasses.field(repr=False)

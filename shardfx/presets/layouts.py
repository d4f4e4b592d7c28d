"""eformer's `DynamicShardingAxes` as data: the logical names of each kind of array, and
how its shape determines the mode.
"""

import dataclasses
from typing import Final

from .._ground.errors import RuleError, SpecError
from . import tokens


@dataclasses.dataclass(frozen=True)
class Layout:
    """The logical names of one kind of array, and the dimension whose size
    distinguishes decoding from training.

    **Arguments:**

    - `axes`: for each dimension a logical name, a tuple of logical names, or `None`.
    - `mode_dim`: the dimension that [`shardfx.presets.infer_mode`][] reads; `None` if
      the mode is always "train".

    !!! Example

        ```python
        from jax.sharding import PartitionSpec as P
        from shardfx import presets, resolve
        from shardfx.presets.tokens import BATCH, EMBED, LENGTH

        layout = presets.Layout((BATCH, LENGTH, EMBED), mode_dim=1)
        mode = presets.infer_mode((8, 1024, 512), layout.mode_dim)
        spec = resolve(layout.axes, presets.eformer(), mode=mode).spec
        assert mode == "train" and spec == P(("fsdp", "dp"), "sp", "tp")
        ```
    """

    axes: tuple[str | tuple[str, ...] | None, ...]
    mode_dim: int | None = None


def infer_mode(shape: tuple[int, ...] | None, dim: int | None) -> str:
    """Returns the mode of an array from its shape: "decode" if dimension `dim` has size
    1, else "train".

    **Arguments:**

    - `shape`: the array's shape; it may be `None` if `dim` is `None`.
    - `dim`: the `mode_dim` of a [`shardfx.presets.Layout`][]. Negative numbers count
      from the end. `None` gives "train".

    **Returns:**

    "decode" or "train".

    **Raises:**

    `RuleError` if `shape` is missing or `dim` is a bool; `SpecError` if the shape has
    no such dimension.

    !!! Example

        ```python
        from jax.sharding import PartitionSpec as P
        from shardfx import resolve
        from shardfx.presets import eformer, infer_mode
        from shardfx.presets.layouts import HiddenStateSharding

        mode = infer_mode((8, 1, 512), HiddenStateSharding.mode_dim)
        assert mode == "decode"
        spec = resolve(HiddenStateSharding.axes, eformer(), mode=mode).spec
        assert spec == P(("fsdp", "dp"), None, "tp")
        ```
    """
    if dim is None:
        return tokens.MODE_TRAIN
    if isinstance(dim, bool):
        raise RuleError(
            f"`infer_mode({shape}, {dim})`: the dimension is an int, not a bool; use"
            f" {int(dim)}."
        )
    if shape is None:
        raise RuleError(
            f"`infer_mode(None, {dim})`: the mode depends on the size of dim {dim};"
            " pass the shape."
        )
    if not -len(shape) <= dim < len(shape):
        raise SpecError(
            f"`infer_mode({shape}, {dim})`: the shape has no dim {dim}; use one below"
            f" {len(shape)}."
        )
    if shape[dim] == 1:
        return tokens.MODE_DECODE
    return tokens.MODE_TRAIN


# eformer's subclasses of DynamicShardingAxes, under eformer's names.
HiddenStateSharding: Final = Layout(
    (tokens.BATCH, tokens.QUERY_LENGTH, tokens.EMBED), mode_dim=1
)
AttnQSharding: Final = Layout(
    (tokens.BATCH, tokens.QUERY_LENGTH, tokens.HEAD, tokens.HEAD_DIM), mode_dim=1
)
AttnKVSharding: Final = Layout(
    (tokens.BATCH, tokens.KV_LENGTH, tokens.KV_HEAD, tokens.KV_HEAD_DIM), mode_dim=1
)
RowWise: Final = Layout((tokens.TP, (tokens.FSDP, tokens.SP)))
SRowWise: Final = Layout((tokens.TP,))
ColumnWise: Final = Layout(((tokens.FSDP, tokens.SP), tokens.TP))
SColumnWise: Final = Layout(((tokens.FSDP, tokens.SP),))
Replicated: Final = Layout((tokens.EMPTY,))
ExpertColumnWise: Final = Layout((tokens.EP, tokens.FSDP, tokens.TP))
ExpertRowWise: Final = Layout((tokens.EP, tokens.TP, tokens.FSDP))
ExpertColumnWiseAlt: Final = Layout((tokens.EP, (tokens.FSDP, tokens.SP), tokens.TP))
ExpertRowWiseAlt: Final = Layout((tokens.EP, tokens.TP, (tokens.FSDP, tokens.SP)))
UnifiedExpertColumnWise: Final = Layout(
    ((tokens.FSDP, tokens.SP, tokens.EP), tokens.EMPTY, tokens.TP)
)
UnifiedExpertRowWise: Final = Layout(
    ((tokens.FSDP, tokens.SP, tokens.EP), tokens.TP, tokens.EMPTY)
)
ExpertActivations: Final = Layout((tokens.DP, tokens.SP, tokens.EP, tokens.TP))
ExpertActivationsAlt: Final = Layout((tokens.DP, tokens.SP, (tokens.TP, tokens.FSDP)))
ExpertTensorParallel: Final = Layout((tokens.TP, tokens.EMPTY, tokens.EMPTY))

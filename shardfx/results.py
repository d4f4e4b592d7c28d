"""The types of what functions return: explanations, findings, differences, moves."""

from ._arrays import Misplaced as Misplaced, MisplacedArray as MisplacedArray
from ._reshard import (
    LeafMove as LeafMove,
    MappedMatrices as MappedMatrices,
    MoveStep as MoveStep,
    ReshardPlan as ReshardPlan,
    StepLayout as StepLayout,
)
from ._see import (
    Attempt as Attempt,
    AxisMove as AxisMove,
    Diff as Diff,
    DimExplanation as DimExplanation,
    Explanation as Explanation,
    Finding as Finding,
    Findings as Findings,
    LeafDiff as LeafDiff,
)

"""The errors that shardfx raises, and its warnings: each error is a `ValueError`, a `TypeError` or a
`RuntimeError` with a name of its own.
"""

from ._ground.errors import (
    CheckpointError as CheckpointError,
    ChipError as ChipError,
    LeafTypeError as LeafTypeError,
    MapError as MapError,
    MeshError as MeshError,
    MoveError as MoveError,
    OutOfMemoryError as OutOfMemoryError,
    PlanFormatError as PlanFormatError,
    PlanMismatchError as PlanMismatchError,
    ProgramError as ProgramError,
    RefusedError as RefusedError,
    RuleError as RuleError,
    SpecError as SpecError,
    SyncError as SyncError,
    UnjudgedWarning as UnjudgedWarning,
    UnknownPathError as UnknownPathError,
    UnmatchedError as UnmatchedError,
    WrongNumbersWarning as WrongNumbersWarning,
)

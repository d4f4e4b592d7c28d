"""What the judge says of a program: `Verdict`, its refutations, and what it could not
judge.
"""

import dataclasses
from typing import Literal

from ..._ground.text import plural
from ..lowered import Frame, place_text


Outcome = Literal["proved", "refuted", "not judged"]
# The largest number of causes in a printed verdict.
_MOST_PRINTED = 8


class Unjudged(Exception):
    """The reason for which an operation cannot be judged. The judge catches it."""


class Wrong(Exception):
    """The fault of an operation whose operands cannot belong together. The judge
    catches it.

    - `fault`: what the devices hold.
    - `right`: what would be right.
    - `mend`: what mends it in the user's code.
    """

    def __init__(self, fault: str, right: str, mend: str):
        super().__init__(fault)
        self.fault = fault
        self.right = right
        self.mend = mend


@dataclasses.dataclass(frozen=True)
class Refutation:
    """An operation of a partitioned program that computes something wrong.

    **Arguments:**

    - `operation`: the name and the opcode of the operation, such as "%add.8 (add)".
    - `source`: the source line of the step from which it comes; `None` if the program
      does not say.
    - `fault`: what its devices hold.
    - `right`: what would be right.
    - `mend`: what mends it.
    - `caller`: the line of the step itself that leads to `source`; `None` if it is
      `source`, or if the program does not say.
    - `first_traced`: the line of the first call of the operation's function, where JAX
      uses again what it traced for that call, in another program perhaps. `source` is
      the line of the present call then.
    """

    __module__ = "shardfx.testing"

    operation: str
    source: Frame | None
    fault: str
    right: str
    mend: str
    caller: Frame | None = None
    first_traced: Frame | None = None

    def __str__(self) -> str:
        place = _place(self)
        return (
            f"{self.operation} at {place}: {self.fault}\n"
            f"    right would be: {self.right}\n"
            f"    {self.mend}"
        )


@dataclasses.dataclass(frozen=True)
class UnjudgedOperation:
    """An operation that the rules cannot follow.

    **Arguments:**

    - `operation`: the name and the opcode of the operation.
    - `source`: the source line of the step from which it comes; `None` if the program
      does not say.
    - `reason`: why it is not judged.
    - `bytes`: the bytes of the results, on one device, of this operation and of all
      operations that are not judged because of it.
    - `caller`, `first_traced`: as in a [`shardfx.testing.Refutation`][].
    """

    __module__ = "shardfx.testing"

    operation: str
    source: Frame | None
    reason: str
    bytes: int
    caller: Frame | None = None
    first_traced: Frame | None = None

    def __str__(self) -> str:
        return (
            f"{self.operation} at {_place(self)}: {self.reason}"
            f" ({self.bytes:,} bytes hang on it)"
        )


def _place(operation: Refutation | UnjudgedOperation) -> str:
    """The lines of an operation as text."""
    text = place_text(operation.source)
    if operation.caller is not None:
        text += f", called from {place_text(operation.caller)}"
    if operation.first_traced is not None:
        text += f", first traced at {place_text(operation.first_traced)}"
    return text


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What [`shardfx.testing.verify`][] says of a program. It is false if the program is
    refuted.

    **Arguments:**

    - `outcome`: "proved", "refuted" or "not judged".
    - `refutations`: the operations that compute something wrong.
    - `unjudged`: the operations that the rules cannot follow, those with most bytes
      first. Operations that only read their results are not listed.
    - `operations`, `judged_operations`: the number of operations of the program, and of
      those that are judged.
    - `bytes`, `judged_bytes`: the bytes of their results on one device.
    - `program`: the program that was read, such as "XLA's partitioned program".
    """

    __module__ = "shardfx.testing"

    outcome: Outcome
    refutations: tuple[Refutation, ...] = ()
    unjudged: tuple[UnjudgedOperation, ...] = ()
    operations: int = 0
    judged_operations: int = 0
    bytes: int = 0
    judged_bytes: int = 0
    program: str = "XLA's partitioned program"

    def __bool__(self) -> bool:
        return self.outcome != "refuted"

    @property
    def caution(self) -> str:
        """What is not judged of the program, and what to do about it; "" if it is proved
        or refuted. [`shardfx.filter_jit`][] warns with it.
        """
        if self.outcome != "not judged":
            return ""
        operations = self.operations - self.judged_operations
        unjudged_bytes = self.bytes - self.judged_bytes
        text = (
            f"{operations:,} of its {plural(self.operations, 'operation')} are not"
            f" judged, with {unjudged_bytes:,} of {self.bytes:,} bytes of results on one"
            " device."
        )
        if self.unjudged:
            text += f" Most hang on {self.unjudged[0]}."
        return (
            f"{text} XLA may compute them wrongly: compare numbers with"
            " `print(shardfx.testing.check_step(step, *args))`, once."
        )

    def __str__(self) -> str:
        count = plural(self.operations, "operation")
        share = f"{self.judged_operations:,} of {count} are judged"
        lines = [f"{self.outcome}: {self.program}; {share}"]
        lines += [str(refutation) for refutation in self.refutations]
        lines += [str(operation) for operation in self.unjudged[:_MOST_PRINTED]]
        if len(self.unjudged) > _MOST_PRINTED:
            lines.append(
                f"and {len(self.unjudged) - _MOST_PRINTED} causes with fewer bytes"
            )
        return "\n".join(lines)

    __repr__ = __str__

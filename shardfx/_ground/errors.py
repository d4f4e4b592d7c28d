"""Every error class that the package defines, and the checks of an argument's type."""

import math
import operator
from typing import SupportsFloat, SupportsIndex


class MeshError(ValueError):
    """A mesh, or an axis of one, that is invalid or does not fit its devices or
    processes.
    """


class RuleError(ValueError):
    """A rule, or a set of rules, that is malformed, cyclic or contradictory, or a mode
    for which no rules exist.

    A mode is a name, such as "train" or "decode", for further rules that come before
    the others.
    """


class SpecError(ValueError):
    """A PartitionSpec, or logical names, that do not fit the array or the mesh."""


class UnmatchedError(ValueError):
    """Leaves that no rule covers, or a logical name that has no rule although it needs
    one.
    """


class PlanMismatchError(ValueError):
    """A plan used with a tree, a mesh or another process's plan that does not match it."""


class PlanFormatError(ValueError):
    """A plan's JSON that is truncated, of another version, or edited into something
    invalid.
    """


class UnknownPathError(ValueError, LookupError):
    """A path that no array of the plan has."""


class LeafTypeError(TypeError):
    """A leaf of a type that the function cannot plan, move or read, or an argument of a
    wrong type.
    """


class ProgramError(ValueError):
    """A compiled program that cannot be read, because its text is truncated or has an
    unknown collective; or a step that lacks a program, or whose program lacks a part of
    what the step does.
    """


class RefusedError(ValueError):
    """A program that the function `check` of [`shardfx.filter_jit`][] refused, before
    it ran.
    """


class WrongNumbersWarning(UserWarning):
    """A step whose partitioned program, as XLA makes it, computes wrong numbers.

    Its text has the operation, the source line, and what mends it.
    """


class UnjudgedWarning(UserWarning):
    """A program that the `check` of [`shardfx.filter_jit`][] passed, and could not judge
    as a whole.

    Its text says how much is not judged, and how to compare its numbers.
    """


class OutOfMemoryError(ProgramError):
    """A program that its compiler refuses because it needs more memory than a device
    has.

    `needed_bytes` and `limit_bytes` are bytes per device, read from the compiler's
    message; `None` if the message lacks the number. `needed_bytes` may count
    temporaries only.
    """

    def __init__(
        self,
        message: str,
        needed_bytes: int | None = None,
        limit_bytes: int | None = None,
    ):
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.limit_bytes = limit_bytes


class ChipError(ValueError, LookupError):
    """An unknown accelerator, or one without a value that the function needs, such as a
    bandwidth.
    """


class CheckpointError(ValueError):
    """A checkpoint that is damaged, hostile or incomplete, or that lacks an array of
    the plan.
    """


class MapError(ValueError):
    """A map between trees that is malformed, or that does not fit its trees."""


class MoveError(RuntimeError):
    """A move of a tree that failed before all arrays had arrived, or that needs more
    memory than the limit allows.

    `moved` holds the arrays that arrived, by path.
    """

    def __init__(self, message: str, moved: dict | None = None):
        super().__init__(message)
        self.moved = dict(moved or {})


class SyncError(RuntimeError):
    """A transfer between jobs that stopped or was refused. The receiver keeps all of
    its previous weights.
    """


# Tracebacks then show the public name of a class, such as `shardfx.errors.MeshError`.
for _value in tuple(globals().values()):
    if isinstance(_value, type) and _value.__module__ == __name__:
        _value.__module__ = "shardfx.errors"


def check_type(
    what: str,
    value: object,
    expected: type,
    error: type[Exception],
    fix: str,
) -> None:
    """Raises `error` unless `value`, the argument named `what`, is an instance of
    `expected`.

    The message ends with `fix`, advice to the user. If that has no code, a public
    function adds how it is called (`misuse.called`).
    """
    if not isinstance(value, expected):
        message = (
            f"`{what}` must be of type {expected.__name__}, not {type(value).__name__};"
            f" {fix}."
        )
        # A fix in code needs no other.
        raise error(message) if "`" in fix else of_argument(error(message))


def whole_number(value: object) -> int | None:
    """An integer of Python, NumPy or JAX as a Python int, which JSON can hold; `None`
    for any other value, and for a bool.
    """
    # Python takes 5 us to see that a value has a method, and a shape has many sizes.
    if type(value) is int:
        return value
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        return None
    try:
        return operator.index(value)
    except TypeError:
        # Every array has the method, and those of other dtypes and sizes refuse.
        return None


_MOST_BYTES = 2**63 - 1


def number_of_bytes(value: object) -> int | None:
    """A number of Python, NumPy or JAX as an int, which JSON can hold: a fraction of a
    byte counts as one byte, and infinity as more than an array has. `None` for what is
    no number.
    """
    whole = whole_number(value)
    if whole is not None:
        return whole
    if not isinstance(value, SupportsFloat):
        return None
    try:
        number = float(value)
    except TypeError:
        # Every array has the method, and those of several elements refuse.
        return None
    if math.isnan(number):
        return None
    return math.ceil(max(min(number, _MOST_BYTES), -1))


def bytes_or_none(what: str, value: object) -> int | None:
    """The argument named `what`, a number of bytes or `None`, as an int. Raises
    `LeafTypeError` for a value of another type.
    """
    if value is None:
        return None
    number = number_of_bytes(value)
    if number is None:
        raise LeafTypeError(
            f"`{what}` is a number of bytes, not {value!r:.80}; write `2**30` for 1 GiB."
        )
    return number


def of_argument(error: Exception) -> Exception:
    """`error`, marked as one of a wrong argument, to which a public function adds how it
    is called.
    """
    vars(error)["is_of_argument"] = True
    return error

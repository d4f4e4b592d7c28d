"""The arguments of the operations of a map: what each operation takes, checked when an
expression is made.
"""

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from .._ground.errors import MapError
from .._ground.spec import DType, dtype_named
from .patterns import sum_of


# For each operation the number of its operands, or `None` for any number, and the kind
# of each other argument. The name of an argument is before its kind, if the argument is
# passed by name. The last argument may be repeated or left out if it has a star, and
# left out if it has a question mark.
SIGNATURES: Final[Mapping[str, tuple[int | None, str]]] = MappingProxyType(
    {
        "leaf": (0, "path"),
        "constant": (0, "number sizes dtype"),
        "transpose": (1, "int*"),
        "reshape": (1, "int*"),
        "split": (1, "int int*"),
        "merge": (1, "int int"),
        "stack": (1, "name dim:int count:count?"),
        "stacked": (None, "dim:int"),
        "concat": (None, "dim:int shards:int"),
        "at": (1, "index dim:int"),
        "slice": (1, "int end dim:int"),
        "repeat": (1, "int dim:int unit:int"),
        "pad_to": (1, "int dim:int value:number"),
        "cast": (1, "dtype"),
        "scale": (2, "block*"),
        "times": (1, "factor"),
        "plus": (1, "finite"),
    }
)


def _operations_with(kinds: Iterable[str]) -> frozenset[str]:
    """The operations with an argument of one of these kinds."""
    operations = set()
    for op, (_, words) in SIGNATURES.items():
        if any(kind in words for kind in kinds):
            operations.add(op)
    return frozenset(operations)


# Their numbers may be floats and bools; those of other operations are ints.
OPERATIONS_WITH_NUMBER: Final = _operations_with(["number", "finite", "factor"])


def arguments_of(op: str, argument_count: int) -> list[tuple[str, str]]:
    """The name and the kind of each argument of the operation `op`, if it is called
    with `argument_count` arguments.

    A positional argument has the name "". The kind is a key of `_KINDS`, which checks
    the argument. In a signature such as "int dim:int value:number", a word is a kind
    with or without a name; the last one may end in "*", so that it is repeated as often
    as there are arguments, or in "?", so that it may be left out.
    """
    words = SIGNATURES[op][1].split()
    last = words[-1]
    repeat_count = argument_count - len(words) + 1
    if last.endswith("*"):
        repeated_words = [last[:-1]] * repeat_count
        words = [*words[:-1], *repeated_words]
    elif last.endswith("?"):
        words[-1] = last[:-1]
        if repeat_count <= 0:
            words.pop()
    arguments = []
    for word in words:
        name, _, kind = word.rpartition(":")
        arguments.append((name, kind))
    return arguments


def checked_arguments(
    op: str,
    operand_count: int,
    args: Sequence[object],
) -> tuple[Any, ...]:
    """The arguments of the operation `op` as plain Python values; `operand_count` is
    the number of its operands.

    Raises `MapError` for arguments that the operation cannot take.
    """
    signature_count = SIGNATURES[op][0]
    if signature_count is not None and operand_count != signature_count:
        raise MapError(
            f"`{op}` takes {signature_count} expressions, not {operand_count}."
        )
    words = arguments_of(op, len(args))
    if len(words) != len(args):
        raise MapError(
            f"`{op}` takes {len(words)} arguments, not {len(args)}:"
            f" {tuple(args)!r:.80}."
        )

    values = []
    for (_, kind), argument in zip(words, args, strict=True):
        description, convert = _KINDS[kind]
        value = convert(argument)
        is_open_end = kind == "end" and argument is None
        if value is None and not is_open_end:
            fix = ""
            if isinstance(argument, tuple) and kind == "int":
                fix = f" Write `{op}{argument!r:.80}`, without a tuple."
            raise MapError(f"`{op}` takes {description}, not {argument!r:.80}.{fix}")
        values.append(value)
    return tuple(values)


def _number(value: Any) -> int | float | None:
    """A number as a Python value; `None` for an integer that is too large for a float,
    and for any other value.
    """
    number = value.item() if isinstance(value, np.generic) else value
    if isinstance(number, bool):
        return number
    if isinstance(number, float):
        return float(number)
    # Python raises for larger integers where a float is needed.
    if isinstance(number, int) and abs(number) < 2**1023:
        return int(number)
    return None


def _finite(value: object) -> float | None:
    """A finite number as a float; `None` for any other value, and for a bool."""
    number = _number(value)
    is_bool = isinstance(number, bool)
    if number is None or is_bool or not math.isfinite(number):
        return None
    return float(number)


def _factor(value: object) -> float | None:
    """A finite number that is not 0 as a float, since a factor of 0 has no inverse;
    `None` for any other value.
    """
    # A factor of 0 has no inverse.
    return _finite(value) or None


def _int(value: object, least: int | float = -math.inf) -> int | None:
    """A whole number from `least` on as a Python int; `None` for any other value."""
    # A bool is an int in Python, but no size.
    if isinstance(value, bool | np.bool_):
        return None
    if not isinstance(value, int | np.integer) or value < least:
        return None
    # NumPy's integers become Python's, since JSON cannot hold them.
    return operator.index(value)


def _count(value: object) -> int | None:
    return _int(value, least=0)


def _block(value: object) -> int | None:
    return _int(value, least=1)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _name(value: Any) -> str | None:
    return _text(value) if str(value).isidentifier() else None


def _index(value: object) -> int | str | None:
    """The index of `at`: a whole number, or the text of a sum of placeholders. `None`
    for any other value.
    """
    if isinstance(value, str) and sum_of(value):
        return value
    return _int(value)


def _sizes(value: object) -> tuple[Any, ...] | None:
    """A list or tuple of sizes as a tuple; `None` for any other value."""
    if not isinstance(value, tuple | list):
        return None
    sizes = tuple(map(_count, value))
    return None if None in sizes else sizes


def _dtype(value: Any) -> str | None:
    """The name of a dtype of JAX; `None` for any other value."""
    # NumPy takes None for float64.
    if value is None:
        return None
    try:
        name = jnp.dtype(value).name
    except (TypeError, ValueError, SyntaxError):  # NumPy evaluates parts of a text
        return None
    return None if dtype_named(name) is None else name


# For each kind of argument a description of valid values, and a function that converts
# one. It returns `None` for other values.
_KINDS: Final[Mapping[str, tuple[str, Callable[[Any], Any]]]] = MappingProxyType(
    {
        "path": ("the path of a leaf", _text),
        "name": ("the name of a placeholder", _name),
        "index": ("a whole number, or a sum of placeholders, as '6*i+2'", _index),
        "number": ("a number", _number),
        "finite": ("a finite number", _finite),
        "factor": ("a finite number that is not 0", _factor),
        "sizes": ("the sizes of an array", _sizes),
        "dtype": ("a dtype", _dtype),
        "int": ("a whole number", _int),
        "count": ("a whole number that is not negative", _count),
        "block": ("the size of a block, 1 or more", _block),
        "end": ("a whole number or None", _int),
    }
)


def check_number(value: Any, dtype: DType, what: str) -> None:
    """Raises `MapError`, with a text that begins with `what`, if an array of dtype
    `dtype` cannot hold `value`.
    """
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        raise MapError(
            f"{what}: PRNG keys cannot be made of a number; stack or concat keys"
            " instead."
        )
    if jnp.issubdtype(dtype, jnp.bool_):
        low = 0
        high = 1
    elif jnp.issubdtype(dtype, jnp.integer):
        low = int(jnp.iinfo(dtype).min)
        high = int(jnp.iinfo(dtype).max)
    else:
        return
    if not (low <= value <= high and int(value) == value):
        raise MapError(
            f"{what}: {value!r} is no whole number from {low} to {high}, as an"
            f" array of {dtype} holds."
        )

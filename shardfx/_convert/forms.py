"""What the arguments of each operation may be: checked when an expression is made, by hand or out of JSON."""

import math
import operator
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from .._ground.errors import MapError
from .._ground.spec import DType
from .patterns import sum_of


# Per operation how many parts it takes, if that is fixed, and a word for each argument, behind its name where it is
# given by name; the last may come often or not at all where a star follows, and may be left out where a question mark
# does.
FORMS: Final[Mapping[str, tuple[int | None, str]]] = MappingProxyType(
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
_WORDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "path": "the path of a leaf",
        "number": "a number",
        "finite": "a finite number",
        "factor": "a finite number that is not 0",
        "sizes": "the sizes of an array",
        "dtype": "a dtype",
        "int": "a whole number",
        "count": "a whole number that is not negative",
        "block": "the size of a block, 1 or more",
        "end": "a whole number or None",
        "name": "the name of what stands in braces",
        "index": "a whole number, or what stands in braces, as in '6*i+2'",
    }
)


def arguments_of(op: str, count: int) -> list[tuple[str, str]]:
    """The name and the word of each argument of an operation that is given so many; the name is empty for most."""
    words = FORMS[op][1].split()
    last = words[-1]
    if last.endswith("*"):
        words = [*words[:-1], *[last[:-1]] * (count - len(words) + 1)]
    elif last.endswith("?"):
        words = [*words[:-1], *[last[:-1]] * (count - len(words) + 1 > 0)]
    return [(word.partition(":")[0] if ":" in word else "", word.rpartition(":")[2]) for word in words]


def checked(op: str, parts: int, args: Sequence[object]) -> tuple[Any, ...]:
    """The arguments of an operation, as plain Python values.

    **Raises:**

    `MapError` for what the operation cannot take.
    """
    count, words = FORMS[op][0], arguments_of(op, len(args))
    if count is not None and parts != count:
        raise MapError(f"`{op}` takes {count} expressions, not {parts}.")
    if len(words) != len(args):
        raise MapError(f"`{op}` takes {len(words)} arguments, not {len(args)}: {tuple(args)!r:.80}.")
    return tuple(_plain(op, word, value) for (_, word), value in zip(words, args, strict=True))


def _plain(op: str, word: str, value: object) -> Any:
    found = _read(word, value)
    if found is None and not (word == "end" and value is None):
        raise MapError(f"`{op}` takes {_WORDS[word]}, not {value!r:.80}.")
    return found


def _read(word: str, value: Any) -> Any:
    """A value as this word has it; `None` for what is none."""
    match word:
        case "path":
            return value if isinstance(value, str) else None
        case "name":
            return value if isinstance(value, str) and value.isidentifier() else None
        case "index" if isinstance(value, str):
            sum_of(value)
            return value
        case "number":
            number = value.item() if isinstance(value, np.generic) else value
            return number if isinstance(number, int | float | bool) else None
        case "finite" | "factor":
            number = value.item() if isinstance(value, np.generic) else value
            is_one = isinstance(number, int | float) and not isinstance(number, bool) and math.isfinite(number)
            return float(number) if is_one and (number or word == "finite") else None
        case "dtype":
            return _dtype(value)
        case "sizes":
            sizes = [_int(size) for size in value] if isinstance(value, tuple | list) else [None]
            return None if any(size is None or size < 0 for size in sizes) else tuple(sizes)
    number = _int(value)
    least = {"count": 0, "block": 1}.get(word)
    return None if number is not None and least is not None and number < least else number


def _int(value: object) -> int | None:
    # Of NumPy's too, which JSON cannot hold. A bool is an int to Python, but no size.
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        return None
    return operator.index(value)


def _dtype(value: Any) -> str | None:
    try:
        # NumPy takes None for float64.
        return None if value is None else jnp.dtype(value).name
    except TypeError:
        return None


def check_number(value: Any, dtype: DType, what: str) -> None:
    """Raises where an array of a dtype cannot hold a number."""
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        raise MapError(f"{what}: PRNG keys cannot be made of a number; stack or concat keys instead.")
    if jnp.issubdtype(dtype, jnp.bool_) and value not in (0, 1):
        raise MapError(f"{what}: {value!r} is neither 0 nor 1, as an array of {dtype} holds.")
    if jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        if value != value or value in (float("inf"), float("-inf")) or int(value) != value:
            raise MapError(f"{what}: {value!r} is no whole number, as an array of {dtype} holds.")
        if not int(info.min) <= value <= int(info.max):
            raise MapError(f"{what}: {value!r} does not fit into {dtype}, from {info.min} to {info.max}.")

"""Expressions of a map: operations on leaves of the source, as immutable values, and
the rules that use them.
"""

import dataclasses
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._ground.errors import MapError
from .._ground.misuse import refused
from .._ground.spec import DType, dtype_named
from .patterns import pattern, sum_of


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


def arguments_of(op: str, argument_count: int) -> list[tuple[str, str]]:
    """The name and the kind of each argument of the operation `op`, if it is called
    with `argument_count` arguments.

    A positional argument has the name "". The kind is a key of `_KINDS`, which checks
    the argument.
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


def checked(op: str, operand_count: int, args: Sequence[object]) -> tuple[Any, ...]:
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
    if isinstance(number, float):
        return number
    # Python raises for larger integers where a float is needed.
    if isinstance(number, int) and abs(number) < 2**1023:
        return number
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


def _int(value: object, least: float = -math.inf) -> int | None:
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


# The default of an argument that is passed by name.
_DEFAULTS = {"dim": 0, "count": None, "shards": 1, "unit": 1, "value": 0}


@dataclasses.dataclass(frozen=True, init=False)
class From:
    """An expression of a [`shardfx.TreeMap`][]: a leaf of the source, and operations
    that make a leaf of the target.

    Each method returns a new expression. Negative dimensions count from the end. `op`
    is the name of the operation, "leaf" for a leaf alone; `of` has its operands, and
    `args` its other arguments.

    **Arguments:**

    - `path`: the path of the leaf, such as `model.layers.{i}.mlp.up_proj.weight`. `{i}`
      is a placeholder. It has the value that it has in the target's path, or the values
      that `stack` gives it. A placeholder may contain a sum: `{6*i+2}`.

    !!! Example

        ```python
        from shardfx import From

        query = From("model.layers.{i}.self_attn.q_proj.weight")
        # torch keeps [out, in]; a model that scans has one array for all layers.
        assert str(query.T.stack("i")) == f"From('{query.path}').T.stack('i')"
        ```
    """

    __module__ = "shardfx"

    op: str
    of: tuple["From", ...]
    args: tuple[Any, ...]

    if not TYPE_CHECKING:
        __getitem__ = refused(
            "expression[{}]", "`.at({})` for one index, or `.slice(start, stop)`"
        )
        # Without this, `__getitem__` would make it iterable.
        __iter__ = None

    def __init__(self, path: str):
        if not isinstance(path, str):
            raise MapError(
                f"`From` takes the path of a leaf, not {path!r:.80}; give"
                " `From('layers/{i}/weight')`."
            )
        _set_fields(self, "leaf", (), (path,))

    @property
    def path(self) -> str:
        """The path of the leaf, with its placeholders. Raises `MapError` for an
        expression with operations.
        """
        if self.op != "leaf":
            raise MapError(f"{self} is made of leaves, and has no path of its own.")
        return self.args[0]

    @staticmethod
    def constant(
        value: float | int | bool,
        shape: Sequence[int],
        dtype: object,
    ) -> "From":
        """An array filled with one number, without any leaf of the source."""
        return _operation("constant", (), (value, tuple(shape), dtype))

    @staticmethod
    def concat(parts: Sequence["From"], *, dim: int = 0, shards: int = 1) -> "From":
        """The arrays of several expressions, concatenated along a dimension.

        **Arguments:**

        - `parts`: the expressions, such as query, key and value.
        - `dim`: the dimension.
        - `shards`: the number of equal chunks of each array, which are interleaved.
          With 2, query, key and value become `[q0 k0 v0 q1 k1 v1]`: sharded over 2
          devices, each device has its own chunks of all three.
        """
        return _operation("concat", tuple(parts), (dim, shards))

    @staticmethod
    def stacked(parts: Sequence["From"], *, dim: int = 0) -> "From":
        """The arrays of several expressions, which have one shape, stacked along a new
        dimension.

        `stack` is shorter for leaves whose paths differ only in a number.
        """
        return _operation("stacked", tuple(parts), (dim,))

    @property
    def T(self) -> "From":  # noqa: N802
        """The array with its dimensions in reverse order, such as `[in, out]` for
        torch's `[out, in]`.
        """
        return _operation("transpose", (self,), ())

    def transpose(self, *order: int) -> "From":
        """The array with its dimensions in another order, as in `numpy.transpose`.

        `order` has the old dimension of each new one. Without it the order is reversed.
        """
        return _operation("transpose", (self,), order)

    def reshape(self, *sizes: int) -> "From":
        """The array with another shape and the same elements in row-major order; one
        size may be -1.
        """
        return _operation("reshape", (self,), sizes)

    def split(self, dim: int, *sizes: int) -> "From":
        """The array with dimension `dim` split into several of these sizes; one size
        may be -1.

        `split(0, -1, 128)` makes heads of width 128.
        """
        return _operation("split", (self,), (dim, *sizes))

    def merge(self, dim: int, count: int = 2) -> "From":
        """The array with `count` dimensions, from dimension `dim` on, merged into one."""
        return _operation("merge", (self,), (dim, count))

    def stack(self, over: str, *, dim: int = 0, count: int | None = None) -> "From":
        """The arrays for the values 0, 1, 2, ... of a placeholder, stacked along a new
        dimension.

        `over` is the placeholder's name, such as "i" for `{i}` in the path. The stack
        has `count` arrays. Without a count, it ends before the first value for which
        the source has no leaf.
        """
        args = (over, dim) if count is None else (over, dim, count)
        return _operation("stack", (self,), args)

    def at(self, index: int | str, *, dim: int = 0) -> "From":
        """The entry at one index of a dimension, without this dimension.

        The index is a number, or a sum of placeholders such as `{i}`. For a target's
        path with the layer `{i}`, the index `"i"` takes each layer out of a stacked
        array, and `"6*i+2"` takes every sixth layer.
        """
        return _operation("at", (self,), (index, dim))

    def slice(self, start: int, stop: int | None, *, dim: int = 0) -> "From":
        """The entries from `start` to `stop` along a dimension, as in Python. `None` is
        the end.
        """
        return _operation("slice", (self,), (start, stop, dim))

    def repeat(self, count: int, *, dim: int = 0, unit: int = 1) -> "From":
        """The array with each block of `unit` entries along a dimension repeated
        `count` times.

        With 2, [a, b] becomes [a, a, b, b]. Key heads are repeated if there are more
        devices than heads.
        """
        return _operation("repeat", (self,), (count, dim, unit))

    def pad_to(self, size: int, *, dim: int = 0, value: float | int = 0) -> "From":
        """The array with a dimension padded at its end to size `size`, with `value`."""
        return _operation("pad_to", (self,), (size, dim, value))

    def cast(self, dtype: object) -> "From":
        """The array cast to another dtype, as by JAX's `astype` on every platform.

        From floating-point numbers to integers, fractions are cut off, and numbers out
        of range become the smallest or the largest integer.
        """
        return _operation("cast", (self,), (dtype,))

    def times(self, number: float | int) -> "From":
        """The array multiplied by a number in float32 and rounded to its dtype.

        An inverse map divides and rounds again; powers of two are exact in both
        directions. Use it for weights that include a scale: `times(width**-0.5)` for a
        query projection divided by the square root of the head width.
        """
        return _operation("times", (self,), (number,))

    def plus(self, number: float | int) -> "From":
        """The array plus a number, computed in float32 and rounded to its dtype.

        An inverse map subtracts and rounds again. Use it for norm weights that are
        stored minus one, as in Gemma.
        """
        return _operation("plus", (self,), (number,))

    def scale(self, by: "From | str", *, block: Sequence[int]) -> "From":
        """The array multiplied in float32 by one scale for each block of its elements,
        as quantised weights have.

        This expression and `by` must be leaves without operations. Apply other
        operations to the result.

        **Arguments:**

        - `by`: a leaf with one scale per block, or its path.
        - `block`: the size of a block along each dimension, such as `(128, 128)`.
        """
        scales = From(by) if isinstance(by, str) else by
        if self.op != "leaf" or scales.op != "leaf":
            raise MapError(
                f"{self} cannot be scaled by {scales}: scale leaves as they are stored,"
                " and do the rest after."
            )
        return _operation("scale", (self, scales), tuple(block))

    def __str__(self) -> str:
        return _code_of(self)

    __repr__ = __str__


def _set_fields(
    expression: From,
    op: str,
    of: tuple[From, ...],
    args: tuple[object, ...],
) -> None:
    """Sets the fields of a frozen expression, which is new."""
    for name, value in (("op", op), ("of", of), ("args", args)):
        object.__setattr__(expression, name, value)


def _operation(op: str, of: tuple[From, ...], args: tuple[object, ...]) -> From:
    """The expression of an operation on the operands `of`, with its arguments checked."""
    for part in of:
        if not isinstance(part, From):
            raise MapError(
                f"`{op}` takes `From` values, not {part!r:.80}; write"
                f" `From({part!r:.80})`."
            )
    expression = object.__new__(From)
    new_args = checked(op, len(of), args)
    _set_fields(expression, op, of, new_args)
    return expression


def _code_of(expression: From) -> str:
    """The Python code that makes an expression."""
    op = expression.op
    if op == "leaf":
        return f"From({expression.path!r})"
    if op == "constant":
        return f"From.constant({', '.join(map(repr, expression.args))})"
    operands = [_code_of(operand) for operand in expression.of]
    if op == "scale":
        weights, scales = operands
        return f"{weights}.scale({scales}, block={expression.args!r})"
    if op == "transpose" and not expression.args:
        return f"{operands[0]}.T"

    arguments = _code_of_arguments(expression)
    if op in ("concat", "stacked"):
        parts = f"[{', '.join(operands)}]"
        return f"From.{op}({', '.join([parts, *arguments])})"
    return f"{operands[0]}.{op}({', '.join(arguments)})"


def _code_of_arguments(expression: From) -> list[str]:
    """The arguments of an operation as Python code, without those that are defaults."""
    words = arguments_of(expression.op, len(expression.args))
    arguments = []
    for (name, _), value in zip(words, expression.args, strict=True):
        if not name:
            arguments.append(repr(value))
        elif value != _DEFAULTS[name]:
            arguments.append(f"{name}={value!r}")
    return arguments


def to_data(expression: From) -> list[Any]:
    """An expression as nested lists that JSON can hold."""
    operands = [to_data(operand) for operand in expression.of]
    return [expression.op, _with_lists(expression.args), operands]


def from_data(data: object) -> From:
    """The expression from the nested lists of `to_data`. Raises `MapError` for other
    data.
    """
    match data:
        case [str() as name, list() as args, list() as of] if name in SIGNATURES:
            operands = tuple(map(from_data, of))
            return _operation(name, operands, _with_tuples(args))
    raise MapError(
        f"{data!r:.80} is no expression of a TreeMap; write maps with"
        " `TreeMap.to_json`."
    )


def _with_lists(value: object) -> Any:
    """A value with lists in the place of tuples."""
    if not isinstance(value, tuple):
        return value
    return [_with_lists(member) for member in value]


def _with_tuples(value: object) -> Any:
    """A value with tuples in the place of lists."""
    if not isinstance(value, list):
        return value
    return tuple(map(_with_tuples, value))


def leaves_of(expression: From) -> list[str]:
    """The paths of the leaves that an expression reads, in order, with their
    placeholders.
    """
    if expression.op == "leaf":
        return [expression.path]
    paths = []
    for operand in expression.of:
        paths += leaves_of(operand)
    return paths


def counted_leaf(stack: From) -> str | None:
    """The first path in a `stack` expression that has the placeholder over which it
    iterates, or `None`.

    For `From("layers/{i}/w").stack("i")`: `layers/{i}/w`.
    """
    placeholder = stack.args[0]
    for path in leaves_of(stack.of[0]):
        if placeholder in pattern(path).names:
            return path
    return None


class NamedSizes(NamedTuple):
    """The shape that a layout gives to the leaves with paths of one pattern.

    - `path`: the path pattern.
    - `sizes`: the size of each dimension; `None` if the layout does not say it.
    - `axes`: the name of each dimension, such as `vocab` or `heads dim`.
    - `counts`: pairs of a placeholder of the path and the number of its values.
    """

    path: str
    sizes: tuple[int | None, ...]
    axes: tuple[str, ...]
    counts: tuple[tuple[str, int], ...] = ()


@dataclasses.dataclass(frozen=True)
class Rules:
    """The rules of one step of a `TreeMap`. A map has several steps if it is composed
    of others.

    A path pattern is a path with placeholders, such as `{i}` in `layers/{i}/weight`.

    **Arguments:**

    - `rules`: pairs of a path pattern of the target, and the expression that makes the
      leaves with such paths.
    - `drop`: path patterns of leaves that are left out on purpose. The source must have
      them.
    - `casts`: whether results are cast to the dtypes of the target.
    - `rest`: path patterns of leaves that are not used. The source need not have them.
    - `inverted`: whether the step goes the other way. The rules are still as they were
      written, with a target that they make of a source. But the step makes their source
      from their target.
    - `source_sizes`, `target_sizes`: the shapes that leaves of the source and of the
      target must have.
    """

    rules: tuple[tuple[str, From], ...]
    drop: tuple[str, ...] = ()
    casts: bool = False
    inverted: bool = False
    rest: tuple[str, ...] = ()
    source_sizes: tuple[NamedSizes, ...] = ()
    target_sizes: tuple[NamedSizes, ...] = ()

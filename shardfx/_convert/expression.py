"""Expressions of a map: operations on leaves of the source, as immutable values, and
the rules that use them.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from .._ground.errors import MapError
from .._ground.misuse import refused
from .arguments import (
    OPERATIONS_WITH_NUMBER,
    SIGNATURES,
    arguments_of,
    checked_arguments,
)
from .patterns import pattern


# The default of an argument that is passed by name.
_DEFAULTS = {"dim": 0, "count": None, "shards": 1, "unit": 1, "value": 0}


@dataclasses.dataclass(frozen=True, init=False, eq=False)
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

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, From):
            return NotImplemented
        return _key_of(self) == _key_of(other)

    def __hash__(self) -> int:
        return hash(_key_of(self))

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
        if not isinstance(shape, Iterable):
            raise MapError(
                f"`From.constant` takes a shape, not {shape!r:.40}; write"
                f" `({shape!r:.40},)` for an array of rank 1."
            )
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
        return _operation("concat", _several("concat", parts), (dim, shards))

    @staticmethod
    def stacked(parts: Sequence["From"], *, dim: int = 0) -> "From":
        """The arrays of several expressions, which have one shape, stacked along a new
        dimension.

        `stack` is shorter for leaves whose paths differ only in a number.
        """
        return _operation("stacked", _several("stacked", parts), (dim,))

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
        scales = by if isinstance(by, From) else From(by)
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
    """Sets the fields of a frozen expression, which is new: the operation, its operands
    `of`, and its other arguments.
    """
    for name, value in (("op", op), ("of", of), ("args", args)):
        object.__setattr__(expression, name, value)


def _key_of(expression: From) -> tuple[object, ...]:
    """The fields by which expressions are compared. It has the text of arguments with a
    number: 0.0 and -0.0 are equal as numbers, as are 1, 1.0 and True, and a NaN is not
    equal to another one.
    """
    args: object = expression.args
    if expression.op in OPERATIONS_WITH_NUMBER:
        args = repr(args)
    return expression.op, args, expression.of


def _several(op: str, parts: object) -> tuple[Any, ...]:
    """The operands of `concat` or `stacked` as a tuple."""
    if not isinstance(parts, Iterable) or isinstance(parts, str):
        raise MapError(
            f"`From.{op}` takes several expressions, not {parts!r:.80}; write"
            f' `From.{op}([From("q"), From("k")])`.'
        )
    return tuple(parts)


def _operation(op: str, of: tuple[From, ...], args: tuple[object, ...]) -> From:
    """The expression of an operation on the operands `of`, with its arguments checked."""
    for part in of:
        if not isinstance(part, From):
            raise MapError(
                f"`{op}` takes `From` values, not {part!r:.80}; write"
                f" `From({part!r:.80})`."
            )
    expression = object.__new__(From)
    new_args = checked_arguments(op, len(of), args)
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
        # 0.0, -0.0 and False are equal to the default 0.
        elif repr(value) != repr(_DEFAULTS[name]):
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

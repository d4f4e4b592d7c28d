"""Instructions without operands: constants, iotas and the device's own number."""

import dataclasses
import re

import numpy as np

from ..hlo_text import Instruction, arrays_in
from .forms import numbers
from .held import MOST_KNOWN, NOWHERE, Context, Held
from .joining import form_in, limits_of
from .matching import held_result, node_for
from .verdict import Unjudged


_INTEGER = re.compile(r"-?\d+|true|false")


def source(context: Context, instruction: Instruction) -> Held:
    """What each device holds of the result of an instruction without operands. Its
    numbers are `known_numbers`, where there are few: an array of shape (devices, 1 or
    size, ...).
    """
    array = arrays_in(instruction.result)[0]
    shape = array.shape
    devices = context.devices
    if instruction.opcode == "partition-id":
        return Held(root=NOWHERE, shape=(), axes=(), known_numbers=np.arange(devices))
    if instruction.opcode == "replica-id":
        return Held(
            root=NOWHERE, shape=(), axes=(), known_numbers=np.zeros(devices, np.int64)
        )
    if instruction.opcode == "iota":
        cuts = [context.cuts.whole(size) for size in shape]
        held = held_result(context, instruction, [], cuts)
        (changing_dim,) = numbers(instruction, "iota_dimension")
        sizes = [1] * (1 + len(shape))
        sizes[1 + changing_dim] = shape[changing_dim]
        table = None
        _, highest = limits_of(array.dtype)
        # A longer iota wraps.
        is_exact = array.dtype[0] in "su" and shape[changing_dim] - 1 <= highest
        if shape[changing_dim] * devices <= MOST_KNOWN and is_exact:
            along_numbers = np.arange(shape[changing_dim]).reshape(sizes)
            table = np.broadcast_to(along_numbers, (devices, *sizes[1:]))
        return dataclasses.replace(held, known_numbers=table)
    return _constant(context, instruction, shape, array.dtype)


def without_row_of_iota(context: Context, held: Held) -> Held:
    """The same, where a row of an iota that has lost its dimension is no element of it:
    the whole program has an iota of size 1 as the same value. What remains is a known
    number. Raises `Unjudged` if it is not known.
    """
    is_row = any(axis.cut.starts.any() for axis in held.dropped_axes)
    if not is_row or held.root < 0 or context.values.nodes[held.root].key[0] != "iota":
        return held
    if held.known_numbers is None:
        raise Unjudged("a row of an iota without its dimension")
    axes = (None,) * len(held.shape)
    return Held(
        root=NOWHERE, shape=held.shape, axes=axes, known_numbers=held.known_numbers
    )


def _constant(
    context: Context,
    instruction: Instruction,
    shape: tuple[int, ...],
    dtype: str,
) -> Held:
    """What each device holds of a constant. A scalar that the whole program computes
    from constants is that value.
    """
    form = form_in(context, instruction, [], shape)
    cuts = [context.cuts.whole(size) for size in shape]
    values = known_constant(instruction, shape, dtype)
    value_number = None
    if (
        values is not None
        and not shape
        and node_for(context, form, instruction) is None
    ):
        value_number = context.values.scalar_like(dtype, float(values))
    held = held_result(context, instruction, [], cuts, value_number=value_number)
    if values is None:
        return held
    table = np.broadcast_to(values, (context.devices, *values.shape))
    return dataclasses.replace(held, known_numbers=table)


def known_constant(
    instruction: Instruction,
    shape: tuple[int, ...],
    dtype: str,
) -> np.ndarray | None:
    """The numbers of a constant that is a scalar or a table of integers; `None` for
    others, and for tables that are long or not written out.
    """
    text = instruction.inside.strip()
    if not shape:
        if dtype.startswith("c"):
            return None
        if dtype == "pred" or dtype[0] in "su":
            return np.array(_integer(text))
        return np.array(float(text))
    size = int(np.prod(shape))
    if dtype[0] not in "sup" or "..." in text or size > 2**14:
        return None
    integers = [_integer(digits) for digits in _INTEGER.findall(text)]
    return np.array(integers).reshape(shape) if len(integers) == size else None


def _integer(text: str) -> int:
    """The number of an integer or a predicate in the text of a constant."""
    if text in ("true", "false"):
        return int(text == "true")
    return int(text)

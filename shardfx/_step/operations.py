"""A lowered step as a flat list of operations over numbered values, each with the factors of its dimensions."""

import dataclasses
import functools as ft
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.mlir import ir

from .._ground.spec import bits


# The factors of each dimension of each array, the slowest first.
FactorDims = tuple[tuple[tuple[int, ...], ...], ...]


class Factors(NamedTuple):
    """Which dimensions of an operation belong together: Shardy's sharding rule of it.

    Dimensions with one factor are walked together, so that they are sharded alike. A dimension of several factors is a
    reshape of theirs. `sizes` are those of the factors; a dimension that a slice shortens has less than its factors.
    `reduction` are factors that are summed over, or looked up in: a result of a part of one is unreduced.
    `replicated` are those that the operation needs whole, or whose shards must be moved.
    """

    sizes: tuple[int, ...]
    ins: FactorDims
    outs: FactorDims
    reduction: frozenset[int] = frozenset()
    replicated: frozenset[int] = frozenset()


class Laid(NamedTuple):
    """How an array lies: the mesh axes of each dimension, and by axis what it comes from, as Shardy writes both.

    A part of an axis is written "fsdp:(1)2": here two shards of one that is larger.
    """

    dims: tuple[tuple[str, ...], ...]
    origins: Mapping[str, str]


@dataclasses.dataclass(frozen=True, slots=True)
class StepValue:
    """One array of the step. One that is made of constants alone is free: it is moved and kept nowhere.

    `laid` is known in a module that was propagated.
    """

    shape: tuple[int, ...]
    dtype: Any
    free: bool = False
    laid: Laid | None = None

    @property
    def bytes(self) -> float:
        """What the whole array takes in memory."""
        return float(math.prod(self.shape)) * bits(self.dtype) / 8


@dataclasses.dataclass(frozen=True, slots=True)
class Operation:
    """One operation, which runs `times` times: its operands and results, its factors, and what it computes.

    `name` is StableHLO's. Four names are this graph's own: "carry" hands an array to a loop or out of a branch,
    "return" hands what one iteration made, beside what it was given, to the next, "use" says that a loop reads an array
    until it ends, and "opaque" is one that nothing is known of. `counted` are the dimensions of its first operand that
    the counter of a loop walks through, each with a number of the loop.
    """

    name: str
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    factors: Factors
    times: float
    # In products and convolutions, of one run.
    flops: float
    # Where it stands in the program, and the calls around it, from the innermost: locations of MLIR.
    location: tuple[ir.Location, ...]
    counted: tuple[tuple[int, int], ...] = ()
    # Of a convolution: which dimensions of its operands are windows and channels.
    windows: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """A whole step. `notes` say what was not understood, with how often."""

    values: list[StepValue]
    operations: list[Operation]
    arguments: tuple[int, ...]
    results: tuple[int, ...]
    notes: dict[str, int]


_COMPLEX = {"complex<f32>": "complex64", "complex<f64>": "complex128"}


@ft.lru_cache(maxsize=128)
def dtype_of(name: str) -> Any:
    """The dtype of an element type, as "bf16" or "ui8" or "f8E4M3FN"."""
    if name == "i1":
        return jnp.dtype("bool")
    if name in _COMPLEX:
        return jnp.dtype(_COMPLEX[name])
    if found := re.fullmatch(r"(u?)i(\d+)", name):
        return jnp.dtype(f"{found[1]}int{found[2]}")
    if found := re.fullmatch(r"f(\d+)(E.*)", name):
        return jnp.dtype(f"float{found[1]}_{found[2].lower()}")
    return jnp.dtype({"bf": "bfloat", "f": "float"}[name.rstrip("0123456789")] + name.lstrip("bf"))

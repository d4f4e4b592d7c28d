"""A step and its arguments as a lowered program, with the paths of the arguments."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np
from jaxtyping import PyTree

from .._ground.errors import LeafTypeError
from .._ground.tree import Flat, flatten
from .._step import Jitted, Platform, Step, argument_names, program_of, step_of
from ._program import Tied, tied


# What a step is lowered for: its names shall not depend on the chip. Kernels for GPUs lower for these alone.
_PLATFORMS: tuple[Platform, ...] = ("tpu", "gpu", "cpu")


@dataclasses.dataclass(frozen=True, slots=True)
class TracedStep:
    """A step's program, and the leaves of its arguments."""

    tied: Tied
    flats: tuple[Flat, ...]
    words: tuple[str, ...]
    # For each argument of the program: which argument of the step it is in, and which leaf of that.
    places: tuple[tuple[int, int], ...]
    # The structs of all arguments, as the step took them.
    structs: tuple[PyTree, ...]
    step: Step

    @property
    def out(self) -> PyTree:
        """What the step returns, with structs for its arrays and `None` for the rest."""
        return self.step.traced.out_info

    def rank(self, argument: int) -> int:
        """How many dimensions an argument of the program has, as the step takes it."""
        which, leaf = self.places[argument]
        return len(np.shape(self.flats[which].leaves[leaf]))

    def path(self, argument: int) -> str:
        """How messages call an argument of the program: `model/layers/mlp/gate`."""
        which, leaf = self.places[argument]
        inner = self.flats[which].paths[leaf]
        return f"{self.words[which]}/{inner}" if inner else self.words[which]


def trace(step: Callable[..., object], *args: PyTree) -> TracedStep:
    """Traces and lowers the step over the shapes of its arguments; nothing is run."""
    if not callable(step):
        raise LeafTypeError(f"`step` must be a function, not {type(step).__name__}; pass the function that is jitted.")
    flats = tuple(map(flatten, args))
    structs = structs_of(args)
    # As a plain function, a step of any form takes all arrays in their order. What a jitted one says of where they lie
    # would be constraints in it.
    inner = inspect.unwrap(step, stop=lambda one: not isinstance(one, Jitted))
    made = step_of(lambda *args: inner(*args), structs)
    places = tuple(
        (which, leaf) for which, flat in enumerate(flats) for leaf, shaped in enumerate(flat.is_array) if shaped
    )
    words = tuple(argument_names(step, len(args)))
    program = program_of(_module(made))
    if count := _count(made.traced.jaxpr, "custom_partitioning"):
        program.notes["a `custom_partitioning` shards as its own rule says, and is read as what it computes"] = count
    return TracedStep(tied(program), flats, words, places, structs, made)


def _count(jaxpr: Any, name: str) -> int:
    """How many equations of a primitive there are, in calls and loops too; for one device some lower to nothing."""
    inner = jaxpr.jaxpr if isinstance(jaxpr, jex.ClosedJaxpr) else jaxpr
    found = sum(equation.primitive.name == name for equation in inner.eqns)
    held = (one for equation in inner.eqns for param in equation.params.values() for one in _several(param))
    return found + sum(_count(one, name) for one in held if isinstance(one, jex.ClosedJaxpr | jex.Jaxpr))


def _several(param: object) -> tuple[object, ...]:
    return param if isinstance(param, tuple) else (param,)


def _module(step: Step) -> Any:
    for platform in _PLATFORMS[:-1]:
        try:
            return step.module(platform)
        # JAX's errors where an operation has no lowering for a platform. The last platform's error is raised.
        except (NotImplementedError, ValueError):
            continue
    return step.module(_PLATFORMS[-1])


def structs_of(args: tuple[PyTree, ...]) -> tuple[PyTree, ...]:
    """The arguments with structs in the place of arrays, without shardings."""
    flats = list(map(flatten, args))
    arrays = [leaf for flat in flats for leaf, shaped in zip(flat.leaves, flat.is_array, strict=True) if shaped]
    made = iter(jax.eval_shape(lambda leaves: leaves, arrays))

    def struct(leaf: object, shaped: bool) -> object:
        return jax.ShapeDtypeStruct((one := next(made)).shape, one.dtype) if shaped else leaf

    return tuple(jax.tree.unflatten(flat.treedef, map(struct, flat.leaves, flat.is_array)) for flat in flats)

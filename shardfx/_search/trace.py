"""A step and its arguments as a program, with the paths of the arguments."""

import dataclasses
import inspect
from typing import Any

import equinox as eqx
import jax

from .._cost.nested import without_dead
from .._ground.errors import LeafTypeError
from .._ground.tree import Flat, flatten
from .program import Program, program_of


@dataclasses.dataclass(frozen=True, slots=True)
class Traced:
    """A step's program, and the leaves of its arguments."""

    program: Program
    flats: tuple[Flat, ...]
    words: tuple[str, ...]
    # For each argument of the program: which argument of the step it is in, and which leaf of that.
    places: tuple[tuple[int, int], ...]
    # The structs of all arguments, as the step took them.
    structs: tuple[Any, ...]
    closed: Any
    # What the step returns, with structs for its arrays, and the rest.
    out: Any

    def result(self, arrays: list[Any]) -> Any:
        """What the step returns, of its program's results."""
        structs, rest = self.out
        return eqx.combine(jax.tree.unflatten(jax.tree.structure(structs), arrays), rest)

    def path(self, argument: int) -> str:
        """How messages call an argument of the program: `model/layers/mlp/gate`."""
        which, leaf = self.places[argument]
        inner = self.flats[which].paths[leaf]
        return f"{self.words[which]}/{inner}" if inner else self.words[which]


def trace(step: Any, *args: Any) -> Traced:
    """Traces the step over the shapes of its arguments; nothing is run."""
    if not callable(step):
        raise LeafTypeError(f"`step` must be a function, not {type(step).__name__}; pass the function that is jitted.")
    flats = tuple(map(flatten, args))
    structs = tuple(map(_struct_tree, flats))
    made, *out = eqx.filter_make_jaxpr(step)(*structs)
    closed = without_dead(made)
    places = tuple(
        (which, leaf) for which, flat in enumerate(flats) for leaf, shaped in enumerate(flat.is_array) if shaped
    )
    return Traced(program_of(closed), flats, _words(step, len(args)), places, structs, closed, tuple(out))


def _struct_tree(flat: Flat) -> Any:
    leaves = [_struct(leaf) if shaped else leaf for leaf, shaped in zip(flat.leaves, flat.is_array, strict=True)]
    return jax.tree.unflatten(flat.treedef, leaves)


def _struct(leaf: Any) -> jax.ShapeDtypeStruct:
    made = jax.eval_shape(lambda x: x, leaf)
    return jax.ShapeDtypeStruct(made.shape, made.dtype)


def _words(step: Any, count: int) -> tuple[str, ...]:
    """What the step itself calls its arguments."""
    try:
        known = [
            name
            for name, parameter in inspect.signature(step).parameters.items()
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ]
    except (TypeError, ValueError):
        known = []
    return tuple(known[i] if i < len(known) else f"args[{i}]" for i in range(count))

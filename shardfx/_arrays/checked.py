"""The programs of a function of `filter_jit` that its `check` has passed.

A program is checked before it first runs. Which program a call runs follows from its
static argument and from the type and the sharding of each array.
"""

import operator
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import jax
import numpy as np
from jax.core import Tracer

from .._ground.errors import RefusedError, UnjudgedWarning
from .._ground.purity import is_tracing
from .given import is_placed
from .stages import Traced


Check: TypeAlias = Callable[[Traced[..., Any]], object]


@runtime_checkable
class Cautious(Protocol):
    """What a check returns that may pass a program it did not judge as a whole."""

    @property
    def caution(self) -> str:
        """What is not judged, and what to do about it; "" if all is judged."""
        ...


class CheckedPrograms:
    """The programs that `check` passed, of the function with the name `name`."""

    def __init__(self, check: Check, name: str):
        self._check = check
        self._name = name
        self._passed_keys: set[tuple[Any, ...]] = set()
        # The key of the program that the last call ran. Steps of a training loop get
        # the same objects.
        self._last_key: tuple[Any, ...] = ()

    def before_run(
        self,
        static: Any,
        arrays: Sequence[Any],
        trace: Callable[[], Traced[..., Any]],
    ) -> None:
        """Calls `check` with what `trace` returns if the program of these arguments did
        not pass before.

        `static` is the static argument of the jitted function, and `arrays` its arrays:
        they decide which program runs. Raises `RefusedError` if `check` returns
        something false. Warns for the caller of the function that calls this one if it
        returns a caution. A call inside another traced function runs no program of its
        own, and is not checked.
        """
        array_types = {*map(type, arrays)}
        if any(issubclass(array_type, Tracer) for array_type in array_types):
            return
        if all(map(is_placed, array_types)):
            avals = [array.aval for array in arrays]
            shardings = [array.sharding for array in arrays]
        else:
            avals_and_shardings = map(_aval_and_sharding, arrays)
            avals, shardings = map(list, zip(*avals_and_shardings, strict=True))
        # Equal keys mean one program. Comparing identities costs less than hashing.
        program_key = (static, *avals, *shardings)
        last_key = self._last_key
        if len(program_key) == len(last_key) and all(
            map(operator.is_, program_key, last_key)
        ):
            return
        if program_key not in self._passed_keys:
            if is_tracing():
                return
            verdict = self._check(trace())
            if verdict is not None and not verdict:
                raise RefusedError(
                    f"`check` refused the program of `{self._name}`, and nothing ran."
                    f" It says:\n{verdict}"
                )
            if isinstance(verdict, Cautious) and verdict.caution:
                text = f"the program of `{self._name}` runs, and {verdict.caution}"
                warnings.warn(text, UnjudgedWarning, stacklevel=3)
            self._passed_keys.add(program_key)
        self._last_key = program_key


def _aval_and_sharding(array: Any) -> tuple[Any, Any]:
    """The abstract value (shape and dtype) and the sharding of an array; NumPy arrays
    have no sharding.
    """
    if isinstance(array, jax.Array):
        return array.aval, array.sharding
    return jax.typeof(np.asarray(array)), None

"""A report of a fault: where it stands, what it did, and the test that holds it."""

import contextlib
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Report(NamedTuple):
    """A reported fault as it was tried.

    `tries` raises unless the answer is right, or is a clear error, which sets
    `is_error`. `test` is the test that holds the same and its variants.
    """

    source: str
    name: str
    tries: Callable[[pathlib.Path], object]
    test: str


def listing(reports: list[Report]):
    """The decorator that adds a function to `reports`."""

    def reported(source: str, test: str):
        def listed(tries: Callable[[pathlib.Path], object]):
            name = tries.__name__.replace("_", " ")
            reports.append(Report(source=source, name=name, tries=tries, test=test))
            return tries

        return listed

    return reported


errors_seen: list[str] = []


@contextlib.contextmanager
def fails(error: Any, text: str) -> Iterator[None]:
    """Passes if the block raises `error` with `text` in its message."""
    try:
        yield
    except error as raised:
        notes = getattr(raised, "__notes__", [])
        message = "\n".join([str(raised), *notes])
        assert text in message, f"{text!r} is not in {message!r}"
        errors_seen.append(message)
        return
    raise AssertionError(f"nothing was raised, expected {text!r}")


def struct(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)

"""The sharding conventions of other libraries. Each library has a module, such as
`shardfx.interop.flax`, which loads when it is first named.

It may import plans, presets, and the rooms below them. It never imports a library
before a function needs it.
"""

import importlib as _importlib
import typing as _typing


if _typing.TYPE_CHECKING:
    from . import (
        eformer as eformer,
        flax as flax,
        haliax as haliax,
        huggingface as huggingface,
        keras as keras,
        levanter as levanter,
        maxtext as maxtext,
        t5x as t5x,
        tpu as tpu,
    )


_LATE = (
    *("eformer", "flax", "haliax", "huggingface", "keras", "levanter", "maxtext"),
    *("t5x", "tpu"),
)


def __getattr__(name: str) -> _typing.Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _importlib.import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return [*_LATE]

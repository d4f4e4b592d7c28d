"""Types whose names in errors of JAX say what to write instead."""

import dataclasses
from typing import ClassVar, dataclass_transform

import equinox as eqx


@dataclass_transform(field_specifiers=(dataclasses.field, eqx.field))
class ToldType(type(eqx.Module)):
    """The type of a class that JAX does not take where users pass its values. An error
    of JAX shows the class, and so says what to write.

    `_told` of the class is the text.
    """

    _told: ClassVar[str] = ""

    def __repr__(cls) -> str:
        return f"<class '{cls.__module__}.{cls.__qualname__}', {cls._told}>"

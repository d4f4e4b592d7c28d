"""Results as what JSON has: the same fields that Python shows, under the same names."""

import dataclasses
import enum
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec

from .._ground.spec import UNCONSTRAINED, entries_of


def as_json(value: Any) -> str:
    """A result as JSON; all beyond ASCII is escaped, halves of characters too."""
    return json.dumps(data_of(value), indent=2)


def data_of(value: Any) -> Any:
    """A result of the library as dicts, lists, strings, numbers and `None`.

    A record becomes a dict of its fields, a PartitionSpec a list with an entry for each dimension, a dtype its name.
    """
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if value is UNCONSTRAINED:
        return "unconstrained"
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, PartitionSpec):
        return [data_of(entry) for entry in entries_of(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: data_of(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): data_of(held) for key, held in value.items()}
    if isinstance(value, tuple) and "_fields" in dir(value):
        return {name: data_of(getattr(value, name)) for name in value._fields}  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(value, tuple | list):
        return [data_of(held) for held in value]
    return value.item() if isinstance(value, np.generic) else str(value)

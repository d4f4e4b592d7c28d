"""The check of what other libraries keep in a mapping, or in a config that is read like
one.
"""

from typing import Any, Protocol, runtime_checkable

from .._ground.errors import RuleError


@runtime_checkable
class _WithItems(Protocol):
    """A mapping, or a config such as `ml_collections.ConfigDict` that is none."""

    def get(self, key: str, /) -> Any: ...

    def items(self) -> Any: ...


def check_mapping(what: str, value: object, form: str) -> None:
    """Raises `RuleError` unless `value`, the argument named `what`, is read by key.
    `form` is a right call, for the message.
    """
    if not isinstance(value, _WithItems) or isinstance(value, type):
        raise RuleError(
            f"`{what}` is a mapping, not {type(value).__name__}; write it as in `{form}`."
        )

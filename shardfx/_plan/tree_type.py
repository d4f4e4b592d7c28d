"""The type variable for the type of a planned tree."""

from typing import TYPE_CHECKING, Any, TypeVar


if TYPE_CHECKING:
    from typing_extensions import TypeVar as _TypeVar

    # `ShardPlan` alone means `ShardPlan[Any]`, under strict checkers too.
    Tree = _TypeVar("Tree", default=Any)
    """The type of the planned tree."""
else:
    Tree = TypeVar("Tree")

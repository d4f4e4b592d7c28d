"""Kinds of words: numbers, and the names that a shell can complete."""

import difflib
from typing import Any

import click
from click.shell_completion import CompletionItem

from shardfx import presets

from ._load import rule_set_names
from ._values import whole_number


class Whole(click.ParamType):
    """A whole number of at most 18 digits; Python converts no text of thousands."""

    name = "N"

    def __init__(self, *, positive: bool = False):
        self.positive = positive

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        number = value if isinstance(value, int) else whole_number(value)
        if number is None or (self.positive and not number):
            what = "positive integer" if self.positive else "whole number"
            self.fail(f"{value!r:.60} is no {what} of at most 18 digits", param, ctx)
        return number


class ModelName(click.ParamType):
    """A model: a shell completes the names of published ones, and files."""

    name = "model"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [*_starting(presets.models.names(), incomplete), CompletionItem(incomplete, type="file")]


class RulesName(click.ParamType):
    """Rules: a shell completes strategies and ready sets."""

    name = "rules"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return _starting((*presets.models.strategies(), *rule_set_names()), incomplete)


def _starting(names: tuple[str, ...], incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


def near(name: str, known: tuple[str, ...]) -> str:
    """ "; did you mean 'x' or 'y'?", or "" where nothing is like it."""
    found = difflib.get_close_matches(name.lower(), known, n=3)
    return f"; did you mean {' or '.join(map(repr, found))}?" if found else ""

"""Parses arguments of a command line: numbers, keyword arguments, TPU slices. Also suggests similar known names."""

import ast
import difflib
import inspect
import itertools
import types
from typing import Any, NamedTuple

import click

from shardfx import AxisRules, MeshSpec, PathRules, chips, presets
from shardfx.errors import ChipError, MeshError

from .._ground.text import printable
from ._usage import UsageError


def literals(text: str | None, flag: str) -> dict[str, Any]:
    """Parses `depth=4, name="x"`: keyword arguments whose values are Python literals.

    **Arguments:**

    - `text`: the text as between the brackets of a call; `None` for no arguments.
    - `flag`: the flag that had this text, for messages.

    **Returns:**

    The values by name.

    **Raises:**

    `UsageError` with the part of the text that is not a keyword argument or not a literal.
    """
    if text is None:
        return {}
    form = f"--{flag} {text!r:.200} is not of the form NAME=VALUE, ..., as in --{flag} 'depth=4, name=\"small\"'"
    try:
        call = ast.parse(f"call({text}\n)", mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UsageError(form) from error
    # A closing bracket in the text could end the call early: then the expression is not a single call.
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
        raise UsageError(form)
    found: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg is None or keyword.arg in found:
            raise UsageError(form)
        try:
            found[keyword.arg] = ast.literal_eval(keyword.value)
        except (ValueError, TypeError, RecursionError) as error:
            name, value = keyword.arg, keyword.value
            what = "no literal (a number, a string in quotes, a bool, None, or a tuple of them)"
            hint = f"; write a string as {name}={value.id!r}" if isinstance(value, ast.Name) else ""
            raise UsageError(f"--{flag}: {name}={ast.unparse(value):.60} is {what}{hint}") from error
    return found


def whole_number(text: str) -> int | None:
    """Returns the number in `text`; `None` if it is not decimal or has more than 18 digits."""
    return int(text) if text.isdecimal() and len(text) <= 18 else None


class Whole(click.ParamType):
    """A click parameter type: a whole number of at most 18 digits, since Python refuses to convert very long texts."""

    name = "N"

    def __init__(self, *, positive: bool = False):
        self.positive = positive

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        number = value if isinstance(value, int) else whole_number(value)
        if number is None or (self.positive and not number):
            what = "positive integer" if self.positive else "whole number"
            self.fail(f"{value!r:.60} is no {what} of at most 18 digits", param, ctx)
        return number


def near(name: str, known: tuple[str, ...], cutoff: float = 0.6) -> str:
    """Returns "; did you mean 'x' or 'y'?" with the known names most similar to `name`, or "" if none is similar."""
    lower = {one.lower(): one for one in known}
    found = [lower[one] for one in difflib.get_close_matches(name.lower(), lower, n=3, cutoff=cutoff)]
    return f"; did you mean {' or '.join(map(repr, found))}?" if found else ""


def rule_set_names() -> tuple[str, ...]:
    """Returns the names of the rule sets in `shardfx.presets`, the functions that return PathRules or AxisRules."""
    made = {
        name: inspect.signature(one).return_annotation for name, one in vars(presets).items() if inspect.isfunction(one)
    }
    return tuple(name for name in sorted(made) if made[name] in (PathRules, AxisRules))


class NamedSlice(NamedTuple):
    """A TPU slice: its name, and a stand-in for each of its devices with the attributes that JAX's devices have."""

    name: str
    devices: tuple[types.SimpleNamespace, ...]


def parse_slice(text: str) -> NamedSlice:
    """Returns the TPU slice that a text such as "tpu:v5p:8x8x8" describes.

    **Arguments:**

    - `text`: a slice in the form of [`shardfx.chips.parse_slice`][].

    **Returns:**

    The slice.

    **Raises:**

    `UsageError` that names the wrong part of the text and the valid values.
    """
    try:
        made = chips.parse_slice(text)
    except (MeshError, ChipError) as error:
        raise UsageError(f"--target: {error}") from error
    if not made.chip.torus_dims:
        raise UsageError(f"--target {text!r:.60}: a switch joins its chips, so there is no order to choose")
    places = itertools.product(*[range(size) for size in reversed(made.extents)], range(made.chip.devices_per_chip))
    devices = tuple(
        types.SimpleNamespace(
            id=number,
            process_index=0,
            platform="tpu",
            device_kind=made.chip.kinds[0],
            coords=(*reversed(place[:-1]), 0)[:3] if made.chip.torus_dims < 3 else (*reversed(place[:-1]),),
            core_on_chip=place[-1],
            slice_index=0,
        )
        for number, place in enumerate(places)
    )
    return NamedSlice(made.name, devices)


def order_text(target: NamedSlice, mesh: MeshSpec) -> str:
    """Returns lines about the order in which the mesh takes the slice's devices, and the mean hops between neighbours
    on each axis.
    """
    order = mesh.order(target.devices)
    hops = zip(mesh.axis_names, order.mean_hops or (), strict=False)
    told = ", ".join(f"{name} {mean:.2f}" for name, mean in hops)
    first = f"On {target.name}: {len(target.devices):,} devices, ordered by {order.method}; mean hops: {told}."
    return "\n".join(map(printable, [first, *order.reasons]))

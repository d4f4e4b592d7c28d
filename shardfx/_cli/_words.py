"""Parses arguments of a command line: keyword arguments and TPU slices. Also suggests similar known names."""

import ast
import difflib
import inspect
import itertools
import types
from typing import Any

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

    `UsageError` with the text, if it has another form.
    """
    try:
        call = ast.parse(f"call({text or ''}\n)", mode="eval").body
        # A closing bracket in the text could end the call early: then the expression is not a single call.
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and not call.args:
            found = {one.arg: ast.literal_eval(one.value) for one in call.keywords if one.arg is not None}
            if len(found) == len(call.keywords):
                return found
        cause = None
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        cause = error
    form = f"NAME=VALUE, ..., with numbers, strings in quotes, bools or None, as in --{flag} 'depth=4, name=\"small\"'"
    raise UsageError(f"--{flag} {text!r:.200} is not of the form {form}") from cause


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


def parse_slice(text: str) -> chips.Slice:
    """Returns the TPU slice that a text such as "tpu:v5p:8x8x8" describes, in the form of
    [`shardfx.chips.parse_slice`][]; raises a `UsageError` that names the wrong part of another text.
    """
    try:
        made = chips.parse_slice(text)
    except (MeshError, ChipError) as error:
        raise UsageError(f"--target: {error}") from error
    if not made.chip.torus_dims:
        raise UsageError(f"--target {text!r:.60}: a switch joins its chips, so there is no order to choose")
    return made


def order_text(target: chips.Slice, mesh: MeshSpec) -> str:
    """Returns lines about the order in which the mesh takes the slice's devices, and the mean hops between neighbours
    on each axis.
    """
    places = itertools.product(*map(range, reversed(target.extents)), range(target.chip.devices_per_chip))
    # Stand-ins with the attributes of JAX's devices, whose coordinates have three dimensions.
    devices = [
        types.SimpleNamespace(
            id=number,
            process_index=0,
            platform="tpu",
            device_kind=target.chip.kinds[0],
            coords=(*reversed(place), 0)[:3],
            core_on_chip=core,
            slice_index=0,
        )
        for number, (*place, core) in enumerate(places)
    ]
    order = mesh.order(devices)
    hops = zip(mesh.axis_names, order.mean_hops or (), strict=False)
    told = ", ".join(f"{name} {mean:.2f}" for name, mean in hops)
    first = f"On {target.name}: {target.devices:,} devices, ordered by {order.method}; mean hops: {told}."
    return "\n".join(map(printable, [first, *order.reasons]))

"""Assignments with sizes as a mesh and rules, and as code to be committed."""

import itertools
from collections.abc import Sequence
from typing import Any

from .._rules.axis_rules import AxisRules
from ..topology._mesh import MeshSpec
from ._classes import Classes
from ._core import Found
from ._layouts import Layout


_HEADS = ("heads", "kv_heads", "query_groups", "mlp", "hidden", "gates", "vocab")


def axis_names(layouts: Sequence[Layout], found: Found, classes: Classes) -> tuple[str, ...]:
    """What the mesh axes are called: after what they cut, as engineers do."""
    taken: dict[str, int] = {}
    names = []
    for assignment in found.assignments:
        layout = layouts[assignment]
        order = [number for number in layout.assignment.order if number in layout.used]
        called = [classes.groups[number].name for number in order]
        name = axis_name(called)
        taken[name] = taken.get(name, 0) + 1
        names.append(name if taken[name] == 1 else f"{name}_{taken[name]}")
    return tuple(names)


def axis_name(called: list[str]) -> str:
    """What a mesh axis is called that cuts these names; the second of a name gets a number."""
    first = called[0] if called else "rest"
    if first == "batch":
        return "data" if len(called) == 1 else "fsdp"
    if first == "experts":
        return "expert"
    if first == "sequence":
        return "context"
    if first in _HEADS or any(name in _HEADS for name in called):
        return "tensor"
    return f"{first}_axis"


def outside_in(names: Sequence[str], found: Found) -> list[int]:
    """In which order the axes stand in the mesh: what spans slices first, then data; tensor stands innermost."""
    ranks = {"data": 0, "fsdp": 1, "context": 2, "expert": 3, "tensor": 5}
    return sorted(
        range(len(names)),
        key=lambda at: (-found.slices[at], ranks.get(names[at].split("_")[0], 4), at),
    )


def mesh_and_rules(
    layouts: Sequence[Layout], found: Found, classes: Classes
) -> tuple[MeshSpec, AxisRules, tuple[str, ...]] | None:
    """The mesh, the rules, and the axis of each assignment; `None` where these want names in orders that contradict."""
    axes = axis_names(layouts, found, classes)
    order = outside_in(axes, found)
    mesh = MeshSpec(
        {axes[at]: found.sizes[at] for at in order},
        dcn={axes[at]: found.slices[at] for at in order if found.slices[at] > 1} or None,
    )
    assignments = [
        [n for n in layouts[assignment].assignment.order if n in layouts[assignment].used]
        for assignment in found.assignments
    ]
    ranked = _in_order(assignments)
    if ranked is None:
        return None
    entries: list[tuple[str, object]] = []
    for number in ranked:
        # What an axis cuts as its last resort it gives up first, so it stands innermost.
        wanted = [
            axes[at]
            for at in sorted(order, key=lambda at: _place(assignments[at], number))
            if number in assignments[at]
        ]
        first = all(assignment[0] == number for assignment in assignments if number in assignment)
        for count in range(len(wanted), 0, -1):
            entries += [
                (classes.groups[number].name, some[0] if count == 1 else some)
                for some in itertools.combinations(wanted, count)
            ]
            if first:
                break
    known = {name for name, _ in entries}
    others = sorted({group.name for group in classes.live()} - known)
    return mesh, AxisRules([*entries, *((name, None) for name in others)], axes=mesh.axis_names), axes


def _place(assignment: Sequence[int], number: int) -> int:
    return assignment.index(number) if number in assignment else len(assignment)


def _in_order(orders: list[list[int]]) -> list[int] | None:
    """One order that holds all of these; `None` if they contradict each other."""
    left, found = [list(order) for order in orders], []
    while any(left):
        heads = [order[0] for order in left if order]
        free = [head for head in heads if not any(head in order[1:] for order in left)]
        if not free:
            return None
        found.append(free[0])
        left = [[number for number in order if number != free[0]] for order in left]
    return found


def code_of(one: Any, head: Sequence[str]) -> str:
    """A Python file with the mesh, the rules, and what makes the plans and the jitted step.

    **Arguments:**

    - `one`: the candidate that is written.
    - `head`: lines of a comment above them.
    """
    mesh, over = one.mesh, _text(tuple(one.state_over))
    used = ["AxisRules", "MeshSpec", "filter_jit", *(["follow"] if one.state_over else []), "plan"]
    chosen = [*(["constrain_step"] if one.constrained else []), "name_axes"]
    sizes = ", ".join(f'"{name}": {size}' for name, size in mesh.shape.items())
    spans = {name: span for name, span in zip(mesh.axis_names, mesh.dcn_sizes, strict=True) if span > 1}
    dcn = f", dcn={_dict(spans)}" if spans else ""
    lines = [f"from shardfx import {', '.join(used)}", f"from shardfx.auto import {', '.join(chosen)}", "", ""]
    lines += [f"# {line}" for line in head]
    lines += [f"MESH = MeshSpec({{{sizes}}}{dcn})", "RULES = AxisRules(", "    ["]
    lines += [f"        ({_text(name)}, {_text(target)})," for name, target in one.rules.rules]
    lines += ["    ],", f"    axes={_text(tuple(mesh.axis_names))},", ")"]
    lines += ["", "", *_PLANS]
    lines += [
        f"    plans[{which}] = follow(lambda state: state, plans[{which}], over={over})"
        for which in (one.states if one.state_over else ())
    ]
    lines += ["    return tuple(plans)", "", "", *_jitted(one), ""]
    return "\n".join(lines)


def _jitted(one: Any) -> list[str]:
    """The function that makes the jitted step."""
    given = ["in_shardings=tuple(plans)"]
    outs = ["None" if which is None else f"plans[{which}]" for which in one.results]
    if any(which is not None for which in one.results):
        several = ", ".join(outs)
        given.append(f"out_shardings={f'({several})' if len(outs) > 1 else several}")
    if one.donated:
        given.append(f"donate={_text(one.donated)}")
    lines = [
        "def jitted(step, plans):",
        '    """The step as it was searched. To call it, put the plans of `plans_of` on devices: `plan.on(mesh)`."""',
    ]
    lines += ["    step = constrain_step(step, plans[0].jax_mesh or MESH, RULES)"] if one.constrained else []
    return [*lines, f"    return filter_jit(step, {', '.join(given)})"]


_PLANS = (
    "def plans_of(step, *args):",
    '    """A plan for each argument of the step: arrays, or structs of them."""',
    "    names = name_axes(step, *args).names",
    "    pairs = zip(args, names, strict=True)",
    '    plans = [plan(arg, MESH, names=tree, axes=RULES, unused="allow") for arg, tree in pairs]',
)


def _dict(spans: dict[str, int]) -> str:
    return "{" + ", ".join(f'"{name}": {span}' for name, span in spans.items()) + "}"


def _text(value: object) -> str:
    if isinstance(value, tuple):
        inner = ", ".join(map(_text, value))
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    return f'"{value}"' if isinstance(value, str) else repr(value)

"""Assignments with sizes as a mesh and rules, and as code to be committed."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from .._rules import AxisRules
from ..topology import MeshSpec
from ._core import Found


_HEADS = frozenset("heads kv_heads query_groups mlp hidden vocab".split())
# In which order axes stand in the mesh: tensor stands innermost, others before it.
_RANKS = {"data": 0, "fsdp": 1, "context": 2, "expert": 3, "tensor": 5}


def axis_name(cut: Sequence[str]) -> str:
    """What a mesh axis is called that cuts these names, the first first."""
    if cut[0] == "batch":
        return "data" if len(cut) == 1 else "fsdp"
    if cut[0] in ("experts", "sequence"):
        return {"experts": "expert", "sequence": "context"}[cut[0]]
    return f"{cut[0]}_axis" if _HEADS.isdisjoint(cut) else "tensor"


def mesh_and_rules(
    orders: Sequence[Sequence[str]], found: Found, known: Iterable[str]
) -> tuple[MeshSpec, AxisRules, tuple[str, ...]] | None:
    """The mesh, the rules, and the axis of each assignment; `None` where these want names in orders that contradict.

    **Arguments:**

    - `orders`: the names that each assignment cuts, the first first.
    - `found`: the sizes of the axes.
    - `known`: all names of the step.
    """
    called = [axis_name(order) for order in orders]
    counts = [called[: at + 1].count(name) for at, name in enumerate(called)]
    axes = tuple(name if count == 1 else f"{name}_{count}" for name, count in zip(called, counts, strict=True))
    inner = sorted(range(len(axes)), key=lambda at: (-found.slices[at], _RANKS.get(called[at], 4), at))
    mesh = MeshSpec(
        {axes[at]: found.sizes[at] for at in inner},
        dcn={axes[at]: found.slices[at] for at in inner if found.slices[at] > 1} or None,
    )
    ranked = _in_order(orders)
    if ranked is None:
        return None
    entries: list[tuple[str, object]] = []
    for name in ranked:
        # What an axis cuts as its last resort it gives up first, so it stands innermost.
        having = sorted((at for at in inner if name in orders[at]), key=lambda at: orders[at].index(name))
        least = len(having) if all(orders[at][0] == name for at in having) else 1
        for count in range(len(having), least - 1, -1):
            some = itertools.combinations([axes[at] for at in having], count)
            entries += [(name, one[0] if count == 1 else one) for one in some]
    entries += [(name, None) for name in sorted({*known}.difference(ranked))]
    return mesh, AxisRules(entries, axes=mesh.axis_names), axes


def _in_order(orders: Sequence[Sequence[str]]) -> list[str] | None:
    """One order that holds all of these; `None` if they contradict each other."""
    left, found = [list(order) for order in orders], list[str]()
    while any(left):
        heads = [order[0] for order in left if order]
        free = [head for head in heads if not any(head in order[1:] for order in left)]
        if not free:
            return None
        found.append(free[0])
        left = [[name for name in order if name != free[0]] for order in left]
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

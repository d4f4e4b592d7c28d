"""Shows plans as text: `report` as a table, `differences` as a line for each difference
between two plans.
"""

import dataclasses
import re
from collections.abc import Iterator
from typing import NamedTuple

from .._ground.errors import LeafTypeError, of_argument
from .._ground.misuse import called
from .._ground.text import Shown, table, wrapped
from .facts import NUMBERS, facts_of
from .leaf import LeafPlan
from .shard_plan import ShardPlan, check_plan


def differences(a: ShardPlan, b: ShardPlan) -> tuple[str, ...]:
    """Returns a line for each difference between two plans; empty exactly if their
    digests are equal. A line is such as "leaf `w`: spec is P('data',) in one, P() in
    the other". The leaves have the order of `a`.
    """
    if a.digest == b.digest:
        return ()
    lines = [*plan_lines(a, b)]
    for path, before, after, fields in pairs(a, b):
        if before is None or after is None:
            which = "one" if after is None else "the other"
            lines.append(f"leaf `{path}` is only in {which} plan")
        for name in fields:
            lines.append(
                f"leaf `{path}`: {name} is {vars(before)[name]} in one,"
                f" {vars(after)[name]} in the other"
            )
    # Equal arrays in trees of other nodes, such as a module and a dict.
    return tuple(lines) or (OTHER_TREES,)


OTHER_TREES = (
    "the trees are built of other containers, or their leaves are in another order"
)


def plan_lines(a: ShardPlan, b: ShardPlan) -> tuple[str, ...]:
    """Returns a line for each property of the whole plan that differs: the mesh,
    `axes`, their mode, or `strict`.
    """
    nouns = {"mesh": "the mesh", "mode": "the mode", "axes": "axes", "strict": "strict"}
    lines = []
    for name, noun in nouns.items():
        before = vars(a.content)[name]
        after = vars(b.content)[name]
        if before != after:
            lines.append(f"{noun} is {before} in one plan, {after} in the other")
    return tuple(lines)


class Pair(NamedTuple):
    """An array in two plans: its LeafPlan in each, `None` if the plan lacks the array,
    and the fields that differ.
    """

    path: str
    before: LeafPlan | None
    after: LeafPlan | None
    fields: tuple[str, ...]


def pairs(a: ShardPlan, b: ShardPlan) -> Iterator[Pair]:
    """Yields a `Pair` for each array of either plan: first those of `a` in order, then
    those that only `b` has.
    """
    leaves_of_b = b.content.by_path
    leaves_of_a = a.content.by_path
    names = [field.name for field in dataclasses.fields(LeafPlan)]
    for leaf in a.leaves:
        other = leaves_of_b.get(leaf.path)
        different: list[str] = []
        if other is not None and leaf != other:
            for name in names:
                if vars(leaf)[name] != vars(other)[name]:
                    different.append(name)
        yield Pair(path=leaf.path, before=leaf, after=other, fields=tuple(different))
    for path, leaf in leaves_of_b.items():
        if path not in leaves_of_a:
            yield Pair(path=path, before=None, after=leaf, fields=())


def check_width(width: object) -> None:
    """Raises `LeafTypeError` unless `width` is a number of characters or `None`."""
    if width is None:
        return
    if not isinstance(width, int) or isinstance(width, bool) or width < 1:
        raise of_argument(
            LeafTypeError(f"`width={width!r:.60}` is no number of characters.")
        )


@called("report(plan, width=80)")
def report(plan: ShardPlan, *, width: int | None = None) -> str:
    """Returns the plan as a table: for each array its shape, spec, bytes per device,
    and the reasons for the spec.

    **Arguments:**

    - `plan`: the plan.
    - `width`: the maximum width of a line, in characters. If the table is wider, the
      rules are shortened, and the common beginning of paths becomes a heading. `None`
      is no limit.

    **Returns:**

    A `str` that a notebook shows as `print` would. The table has one line for each
    array, or for all equal arrays of repeated layers. Below it are each reason once,
    the totals, and the largest arrays that every device holds whole.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        from shardfx import MeshSpec, PathRules, plan, report

        layer = {"wi": jax.ShapeDtypeStruct((1024, 4096), jnp.bfloat16), "bias": jnp.ones(4099)}
        rules = PathRules.parse("wi->fsdp.tensor, bias->tensor")
        mesh = MeshSpec({"fsdp": 4, "tensor": 2})
        print(report(plan({"layers": [layer] * 24}, mesh, paths=rules), width=88))
        ```

        ```text
        path                 arrays  shape            spec         bytes/device  why
        layers/{0..23}/bias      24  f32[4099]        -               384.3 KiB  [1] paths[1]
        layers/{0..23}/wi        24  bf16[1024,4096]  fsdp,tensor      24.0 MiB  paths[0]
        ...
        ```
    """
    check_plan("plan", plan)
    check_width(width)
    rows, paragraphs = facts_of(plan.content)
    texts = ["\n".join(_table(rows, width))]
    for paragraph in paragraphs:
        texts.append(wrapped(paragraph, width))
    return Shown("\n\n".join(texts))


# Regexes of the parts of the last column, "why", that a narrower and narrower table
# shows: all; the marks of reasons, the rule's number and the memory kind; the marks and
# the memory kind.
_NARROWER_REASONS = (
    r".+",
    r"^(?:\[\d+\])*|paths\[\d+\]|in \w+$",
    r"^(?:\[\d+\])*|in \w+$",
)


# The least number of characters of the last column that are worth showing.
_LEAST_REASON_WIDTH = 16


def _with_cut_reasons(rows: list[tuple[str, ...]], width: int) -> list[str]:
    """Returns the lines of the table of a plan in `width` characters, with the end of
    each text of the last column cut off that does not fit; nothing if less than
    `_LEAST_REASON_WIDTH` characters are left for it. `rows` has the texts of each row's
    cells, the header first.
    """
    others = table([(*row[:-1], "") for row in rows], right=NUMBERS)
    room = width - max(len(line.rstrip()) for line in others) - 2
    if room < _LEAST_REASON_WIDTH:
        return []
    cut_rows = []
    for *cells, reasons in rows:
        if len(reasons) > room:
            reasons = f"{reasons[: room - 3]}..."
        cut_rows.append((*cells, reasons))
    lines = table(cut_rows, right=NUMBERS)
    if max(map(len, lines)) <= width:
        return lines
    return []


def _table(rows: list[tuple[str, ...]], width: int | None) -> list[str]:
    """Returns the lines of the table of a plan, whose header is `rows[0]`, in at most
    `width` characters if possible.

    If they are wider, the last column (the rule and the reasons) is shortened and then
    dropped. After that, the column with the number of arrays is dropped.
    """
    shown = rows
    # First the reasons are cut off at their ends, then whole parts of them are left out.
    if width is not None and (cut := _with_cut_reasons(rows, width)):
        return cut
    # Each regex finds fewer parts of the last column's text than the one before it.
    for regex_of_parts in _NARROWER_REASONS:
        shown = [rows[0]]
        for *cells, reasons in rows[1:]:
            parts = re.findall(regex_of_parts, reasons)
            shown.append((*cells, " ".join(filter(None, parts))))
        lines = table(shown, right=NUMBERS)
        if width is None or max(map(len, lines)) <= width:
            return lines
    # The names of the columns that `table` may drop.
    spare = ("arrays",) if any(row[-1] for row in shown[1:]) else ("why", "arrays")
    return table(shown, right=NUMBERS, width=width, spare=spare)

"""Makes the table and the paragraphs of a plan's report, which other files show as text
and as HTML.
"""

import re
from collections.abc import Iterable, Mapping

from jax.sharding import AxisType

from .._ground.reason import Code, Reason
from .._ground.spec import entries_of
from .._ground.text import (
    array_text,
    bytes_text,
    entry_text,
    html_table,
    plural,
    printable,
    spec_text,
)
from ..topology import MeshSpec
from .content import Content, Group


_SHOWN_REPLICATED = 5
_HEADER = ("path", "arrays", "shape", "spec", "bytes/device", "why")
NUMBERS = ("arrays", "bytes/device")


def facts_of(content: Content) -> tuple[list[tuple[str, ...]], list[str]]:
    """Returns the report of a plan: the rows of a table, the header first, and
    paragraphs.

    The paragraphs have each reason once, the totals, and the largest replicated arrays.
    No text contains control characters, which a terminal would interpret.
    """
    groups = content.groups
    dims_by_message: dict[str, set[int | None]] = {}
    for group in groups:
        for why in group.row.reasons:
            dims_by_message.setdefault(why.message, set()).add(why.dim)

    note_numbers: dict[str, int] = {}
    table: list[tuple[str, ...]] = [_HEADER]
    for group in groups:
        table.append(
            tuple(map(printable, _cells(group, note_numbers, dims_by_message)))
        )
    if all(len(group.paths) == 1 for group in groups):
        table = [_without_count(cells) for cells in table]

    reasons = "\n".join(
        [printable(f"[{number}] {text}.") for text, number in note_numbers.items()]
    )
    paragraphs = [
        reasons,
        printable(_totals(content)),
        printable(_replicated(groups)),
        printable(_explicit_axes(content.mesh)),
    ]
    return table, list(filter(None, paragraphs))


def _without_count(cells: tuple[str, ...]) -> tuple[str, ...]:
    """A row of the table without the cell of the column `arrays`."""
    count = _HEADER.index("arrays")
    return cells[:count] + cells[count + 1 :]


def html_of(content: Content) -> str:
    """Returns the report of a plan as an HTML table with the reasons and totals below
    it; all text is escaped.
    """
    table, paragraphs = facts_of(content)
    return html_table(table, right=NUMBERS, below="\n".join(paragraphs).splitlines())


def _cells(
    group: Group,
    note_numbers: dict[str, int],
    dims_by_message: Mapping[str, set[int | None]],
) -> tuple[str, ...]:
    """Returns the texts of the table's row for a group of arrays, one for each column
    of `_HEADER`.

    `note_numbers` maps the text of each reason to its number, which stands in the last
    cell as a mark such as "[1]"; new texts are added to it. `dims_by_message` has for
    the message of each reason the dimensions to which it applies.
    """
    row = group.row
    # A reason that is expected explains nothing, and a table of optimizer states would
    # show it often.
    reasons = [why for why in row.reasons if not why.code.is_expected]
    marks: dict[str, None] = {}
    for reason in reasons:
        text = _note(reason, len(dims_by_message[reason.message]) > 1)
        number = note_numbers.setdefault(text, len(note_numbers) + 1)
        marks[f"[{number}]"] = None
    why = row.rule or "-"
    if marks:
        why = f"{''.join(marks)} {row.rule or ''}"
    if row.names is not None:
        why += f" ({', '.join(map(entry_text, row.names))})"
    if row.memory_kind is not None:
        why += f" in {row.memory_kind}"
    array = array_text(row.dtype, row.shape)
    spec = spec_text(entries_of(row.spec))
    return (
        group.where,
        str(len(group.paths)),
        array,
        spec,
        bytes_text(group.bytes_per_device),
        why.strip(),
    )


_LIMIT = re.compile(r"fewer than the (\d+) asked for")


def _note(why: Reason, is_of_several_dims: bool) -> str:
    """Returns the text below the table for `why`, the reason why an array is not
    sharded as requested. Arrays with the same cause get the same text. The text names
    the dimension, unless the reason applies to several.
    """
    limit = _LIMIT.search(why.message) if why.code is Code.small else None
    if limit is not None:
        return (
            f"arrays of fewer than {limit[1]} bytes stay whole; lower `min_bytes` to"
            " shard them"
        )
    if is_of_several_dims or why.code is Code.absent:
        return why.message
    return str(why)


def _totals(content: Content) -> str:
    """The sentence with the number of arrays, their bytes, the mesh and the bytes per
    device. "1.00 x an even split" means that no array is replicated.
    """
    mesh = content.mesh
    total_bytes, shard_bytes = content.total_bytes
    kinds = ""
    if AxisType.Explicit in mesh.axis_types:
        names = dict.fromkeys(kind.name for kind in mesh.axis_types)
        kinds = f", {'/'.join(names)} axes"
    if total_bytes:
        even = f"{shard_bytes * mesh.size / total_bytes:.2f} x an even split"
    else:
        even = "nothing to hold"
    arrays = sum(row >= 0 for row in content.index)
    return (
        f"{plural(arrays, 'array')}, {bytes_text(total_bytes)},"
        f" on mesh {mesh} ({mesh.size:,} devices{kinds}): {bytes_text(shard_bytes)} per"
        f" device, {even}."
    )


def _replicated(groups: Iterable[Group]) -> str:
    """The sentence with the largest arrays that every device holds whole; "" if there
    are none. Each of `groups` has arrays of repeated layers that are planned alike.
    """
    replicated = [group for group in groups if _is_replicated(group)]
    replicated.sort(key=lambda group: -group.bytes)
    total_bytes = sum(group.bytes for group in replicated)
    if not total_bytes:
        return ""
    texts = []
    for group in replicated[:_SHOWN_REPLICATED]:
        texts.append(f"{group.where} ({bytes_text(group.bytes)})")
    if len(replicated) > _SHOWN_REPLICATED:
        texts.append(f"{len(replicated) - _SHOWN_REPLICATED} more")
    return f"Replicated, {bytes_text(total_bytes)} on every device: {', '.join(texts)}."


def _explicit_axes(mesh: MeshSpec) -> str:
    """What a step that knows nothing of shardings needs on a mesh with Explicit axes;
    "" for other meshes.
    """
    axes = [
        f"`{name}`"
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind is AxisType.Explicit
    ]
    if not axes:
        return ""
    return (
        f"Explicit axes, as `jax.make_mesh` makes them: {', '.join(axes)}. JAX raises"
        " `ShardingTypeError` there for a step that leaves the sharding of a result open:"
        " jit `shardfx.auto.constrain_step(step, mesh, rules)`, or plan on Auto axes,"
        f" `MeshSpec({dict(mesh.shape)!r}).build(jax.devices())`."
    )


def _is_replicated(group: Group) -> bool:
    """Whether the arrays of a group are whole on every device. Scalars do not count."""
    return bool(group.row.shape) and not entries_of(group.row.spec)

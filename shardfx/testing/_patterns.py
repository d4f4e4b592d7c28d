"""`assert_collectives`: patterns of collectives that a step must not have."""

import difflib
import re
from collections.abc import Mapping, Sequence

from .._ground.text import bytes_text, plural
from .._step import KINDS
from ..cost import Traffic, TrafficRow
from ._texts import check_traffic, traffic_line, traffic_row_text


_PHASES = ("forward", "backward", "recomputed")
_PATTERN = re.compile(
    rf"(?:(?P<phase>{'|'.join(_PHASES)}) )?(?P<kind>{'|'.join(KINDS)}|any)"
    r"(?: over (?P<axes>[^ ]+))?(?: of (?P<leaf>[^ ]+))?(?: at (?P<place>[^ ]+))?"
)


def assert_collectives(
    traffic: Traffic,
    *,
    none: Sequence[str] = (),
    at_most: Mapping[str, int | str] | None = None,
) -> None:
    """Raises if a step has collectives that it must not have.

    A pattern is the kind of a collective, or `any`. It may also have the pass, the mesh
    axes, the parameter and the place, in this order:
    `backward all-gather over fsdp+tensor of layers/.*/up at model.py:12`. The pass is
    forward, backward or recomputed. The collective must run over all mesh axes in the
    pattern, and may run over more. The parameter is a regex that is searched in the
    parameter's path. The place is a file, a file and a line, or a function.

    **Arguments:**

    - `traffic`: the traffic from [`shardfx.cost.traffic`][] or
      [`shardfx.cost.estimate`][].
    - `none`: patterns of collectives that the step must not have.
    - `at_most`: limits by pattern: the number of calls in a step, or the bytes that may
      enter a device, as a text such as `"1.5 MiB"`.

    **Raises:**

    `AssertionError` with the collectives that are not allowed. `ValueError` for a
    pattern that cannot be parsed, or with a mesh axis that the mesh lacks; and for one
    with a mesh axis if the mesh of the traffic is not known.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import shardfx as sfx
        from jax.sharding import PartitionSpec as P

        mesh = sfx.MeshSpec({"data": 8}).build(jax.devices())
        rows = jax.NamedSharding(mesh, P("data"))
        x = jax.ShapeDtypeStruct((64, 16), jnp.float32, sharding=rows)
        traffic = sfx.cost.traffic(jax.jit(jnp.sum).lower(x))
        limits = {"all-reduce over data": 1}
        sfx.testing.assert_collectives(traffic, none=["all-gather"], at_most=limits)
        ```
    """
    check_traffic(traffic)
    limits: list[tuple[str, int | str]] = [(pattern, 0) for pattern in none]
    limits += (at_most or {}).items()
    lines: list[str] = []
    for pattern, limit in limits:
        # A pattern that cannot be parsed is an error, whatever the step has.
        parsed_pattern = _parsed_pattern(pattern, traffic)
        rows = []
        for row in traffic.rows:
            if row.calls != 0 and _matches(row, parsed_pattern):
                rows.append(row)
        excess = _excess_text(rows, limit)
        if excess:
            lines.append(f"`{pattern}`: {excess}")
            for row in rows:
                lines.append(f"    {traffic_line(traffic_row_text(row), [row], True)}")
    if lines:
        head = "the step has collectives that it must not have."
        raise AssertionError("\n".join([head, *lines]))


def _parsed_pattern(pattern: str, traffic: Traffic) -> re.Match[str]:
    """The match of a pattern of collectives, with the groups of `_PATTERN`. Raises
    `ValueError` for a pattern that cannot be parsed, or with a mesh axis that the mesh
    lacks.
    """
    match = _PATTERN.fullmatch(pattern)
    if match is None:
        raise ValueError(
            f"`{pattern}` is no pattern of collectives: write"
            " `[forward|backward|recomputed] KIND [over AXIS+AXIS] [of LEAF] [at"
            f" PLACE]`, where KIND is any, {', '.join(KINDS)}."
        )
    for axis in _axes_of(match):
        # The rows of a step whose mesh is not known name no axes, so nothing matches.
        if traffic.rows and not traffic.axes:
            raise ValueError(
                f"`{pattern}` names the axis {axis!r}, and the axes of the traffic are"
                " not known; write `traffic(compiled, mesh)`."
            )
        if traffic.axes and axis not in traffic.axes:
            near = ""
            for similar in difflib.get_close_matches(axis, traffic.axes, n=1):
                near = f" (did you mean {similar!r}?)"
            raise ValueError(
                f"`{pattern}` names the axis {axis!r}, and the mesh has"
                f" {', '.join(traffic.axes)}{near}. No collective runs over an axis that"
                " the mesh lacks: leave the pattern out, or write one of these axes."
            )
    try:
        re.compile(match["leaf"] or "")
    except re.error as error:
        raise ValueError(
            f"`{pattern}` names the parameter {match['leaf']!r}, which is no regex:"
            f" {error}; put a backslash before characters that stand for themselves."
        ) from error
    return match


def _axes_of(pattern: re.Match[str]) -> list[str]:
    """The mesh axes in a pattern."""
    return [axis for axis in (pattern["axes"] or "").split("+") if axis]


def _matches(row: TrafficRow, pattern: re.Match[str]) -> bool:
    """Whether a collective is one of those that a parsed pattern describes."""
    if pattern["kind"] not in ("any", row.kind):
        return False
    # A row without a gradient is forward.
    if pattern["phase"] not in (None, row.phase or "forward"):
        return False
    if not set(_axes_of(pattern)) <= set(row.axes):
        return False
    leaf = pattern["leaf"]
    if leaf is not None and re.search(leaf, row.leaf or "") is None:
        return False
    # A pattern without a place matches every place.
    places: set[str | None] = {None}
    for frame in row.stack:
        file, _, _ = frame.place.partition(":")
        places.update((frame.place, file, frame.function))
    return pattern["place"] in places


def _excess_text(rows: Sequence[TrafficRow], limit: int | str) -> str:
    """A text that says by how much collectives exceed a limit; "" if they do not. The
    limit is a number of calls, or of bytes as text, such as "1.5 MiB".
    """
    if isinstance(limit, str):
        match = re.fullmatch(r"(\d[\d,]*\.?\d*|\.\d+) ?([KMGT]i)?B", limit)
        if match is None:
            raise ValueError(
                f"`{limit}` is no number of bytes; write it as '512 B' or '1.5 MiB'."
            )
        prefix = (match[2] or " ")[0]
        most_bytes = float(match[1].replace(",", "")) * 1024 ** " KMGT".index(prefix)
        sent_bytes = sum(row.wire_bytes for row in rows)
        if sent_bytes > most_bytes:
            return f"{bytes_text(sent_bytes)}, more than {limit}"
        return ""
    if any(row.calls is None for row in rows):
        return f"runs in a loop whose turns are not known, more than {limit} may be"
    calls = sum(row.calls or 0 for row in rows)
    if calls > limit:
        return f"{plural(calls, 'call')}, more than {limit or 'none'}"
    return ""

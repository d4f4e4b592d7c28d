"""The texts of plans, and of the collectives and shardings of steps, for golden files."""

import difflib
import linecache
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jax.sharding import AxisType

from .._ground.spec import entries_of, unreduced_kind
from .._ground.text import (
    array_text,
    between_numbers,
    bytes_text,
    joined_exactly,
    plural,
    printable,
    spec_text,
)
from .._plan import Row, ShardPlan, check_plan
from .._step import KINDS, place_text
from ..cost import Frame, StepShardings, Traffic, TrafficRow


_PLAN_FORMAT = "# shardfx plan text 1"


def plan_text(plan: ShardPlan) -> str:
    """The text of a plan for golden files: the sharding of each array, and the mesh
    axes that were dropped.

    Two plans have the same text if their meshes have the same text, and if every array
    has the same path, shape, dtype, spec, memory kind and dropped mesh axes. The text
    does not name the rules that matched, so rules can be rewritten without a change of
    the text.

    **Arguments:**

    - `plan`: the plan.

    **Returns:**

    The text, which ends in a newline. Arrays whose paths differ only in numbers are one
    line. A change of one array changes one line and the totals.

    !!! Example

        ```python
        import jax
        from shardfx import MeshSpec, PathRules, plan
        from shardfx.testing import plan_text

        layer = {"w": jax.ShapeDtypeStruct((64, 128), "float32")}
        mesh = MeshSpec({"fsdp": 4, "tensor": 2})
        made = plan({"layers": [layer] * 24}, mesh, paths=PathRules.parse("w->fsdp.tensor"))
        print(plan_text(made))
        ```

        ```text
        # shardfx plan text 1
        mesh fsdp=4,tensor=2
        24 arrays, 786,432 bytes, 98,304 per device

        layers/{0..23}/w: 24 x f32[64,128] fsdp,tensor
        ```
    """
    check_plan("plan", plan)
    content = plan.content
    total, each = content.total_bytes
    mesh = content.mesh
    slices = [
        f"slices {name}={count}"
        for name, count in zip(mesh.axis_names, mesh.dcn_sizes, strict=True)
        if count > 1
    ]
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    explicit = [
        f"{name}={kind.name}" for name, kind in kinds if kind is not AxisType.Auto
    ]
    sizes = ",".join(f"{name}={size}" for name, size in mesh.shape.items())
    lines = [_PLAN_FORMAT, printable(" ".join(["mesh", sizes, *slices, *explicit]))]
    lines += [f"mode {plan.mode}"] if plan.mode is not None else []
    lines += [f"{plural(len(plan), 'array')}, {total:,} bytes, {each:,} per device", ""]
    groups: dict[tuple[Any, ...], list[str]] = {}
    texts = [_row_text(row) for row in content.rows]
    for path, number in content.numbered:
        if number >= 0:
            groups.setdefault((between_numbers(path), texts[number]), []).append(path)
    for (_, text), paths in groups.items():
        for path, count in joined_exactly(paths):
            lines.append(
                printable(f"{path}: {f'{count} x ' if count > 1 else ''}{text}")
            )
    return "\n".join([*lines, ""])


def assert_same_plan_text(
    plan: ShardPlan, expected: str | os.PathLike[str], *, update: bool = False
) -> None:
    """Raises unless the text of a plan is the expected one, for tests with a golden
    file.

    **Arguments:**

    - `plan`: the plan.
    - `expected`: a text of several lines from [`shardfx.testing.plan_text`][], or the
      path of a file with such a text.
    - `update`: whether to write the plan's text into the file instead. In pytest, an
      option of your own can set it.

    **Raises:**

    `AssertionError` with the lines that differ and how to accept the new plan; also if
    the file does not exist.

    !!! Example

        ```python
        import tempfile
        from pathlib import Path

        import jax.numpy as jnp
        from shardfx import MeshSpec, PathRules, plan
        from shardfx.testing import assert_same_plan_text

        tree = {"w": jnp.ones((8, 4))}
        made = plan(tree, MeshSpec({"data": 2}), paths=PathRules.parse("w->data"))
        with tempfile.TemporaryDirectory() as folder:
            golden = Path(folder) / "plan.txt"
            assert_same_plan_text(made, golden, update=True)
            assert_same_plan_text(made, golden)
        ```
    """
    assert_same_text("plan", plan_text(plan), expected, update=update)


def assert_same_text(
    kind: str, text: str, expected: str | os.PathLike[str], *, update: bool
) -> None:
    """Raises unless `text` is the expected one, or writes it into the file `expected`
    if `update`.

    `kind` is "plan", "traffic" or "shardings", for messages.
    """
    is_text = isinstance(expected, str) and "\n" in expected
    if update:
        if is_text:
            raise ValueError(
                "`update=True` writes a file, and `expected` is a text; give the path"
                " of the file."
            )
        Path(expected).write_text(text, encoding="utf-8")
        return
    where = "the expected text" if is_text else str(expected)
    writes = f"`assert_same_{kind}_text({kind}, {where!r}, update=True)`"
    if not is_text and not Path(expected).exists():
        raise AssertionError(
            f"there is no file {where} with the text of a {kind} yet; write it with"
            f" {writes}, look at it, and commit it."
        )
    was = str(expected) if is_text else Path(expected).read_text(encoding="utf-8")
    if was != text:
        lines = difflib.unified_diff(
            was.splitlines(),
            text.splitlines(),
            where,
            f"the {kind} now",
            n=1,
            lineterm="",
        )
        accept = (
            f"replace the text with `{kind}_text({kind})`"
            if is_text
            else f"run {writes}"
        )
        head = f"the {kind} is not that of {where}.\nTo accept the new one, {accept}.\n"
        raise AssertionError("\n".join([head, *lines]))


def _row_text(row: Row) -> str:
    text = f"{array_text(row.dtype, row.shape)} {spec_text(entries_of(row.spec))}"
    kind = "" if unreduced_kind(row.spec) == "sum" else f"{unreduced_kind(row.spec)} "
    text += (
        f" unreduced {kind}{','.join(sorted(row.spec.unreduced))}"
        if row.spec.unreduced
        else ""
    )
    text += f" reduced {','.join(sorted(row.spec.reduced))}" if row.spec.reduced else ""
    text += f" in {row.memory_kind}" if row.memory_kind is not None else ""
    for why in row.reasons:
        where = "" if why.dim is None else f"dim {why.dim} "
        if why.code.name != "scalar":
            text += f" ({where}{why.code.name}{': ' if why.axes else ''}{', '.join(why.axes)})"
    return text


_TRAFFIC_FORMAT = "# shardfx traffic text 1"
_PHASES = ("forward", "backward", "recomputed")
_PATTERN = re.compile(
    rf"(?:(?P<phase>{'|'.join(_PHASES)}) )?(?P<kind>{'|'.join(KINDS)}|any)"
    r"(?: over (?P<axes>[^ ]+))?(?: of (?P<leaf>[^ ]+))?(?: at (?P<place>[^ ]+))?"
)


def traffic_text(traffic: Traffic, *, sizes: bool = False) -> str:
    """The text of a step's collectives for golden files.

    A line has the kind of a collective, the mesh axes, the number of runs, the pass if
    it is backward or recomputed, the shapes on one device, the parameter, and the
    source line. The text of the source line is used instead of its number, which
    changes with every line above it.

    **Arguments:**

    - `traffic`: the traffic from [`shardfx.cost.traffic`][] or
      [`shardfx.cost.estimate`][].
    - `sizes`: whether to include the bytes that enter a device.

    **Returns:**

    The text, which ends in a newline. Collectives that differ only in the numbers of
    their parameters' paths are one line.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import shardfx as sfx

        mesh = sfx.MeshSpec({"data": 8}).build(jax.devices())
        rows = jax.NamedSharding(mesh, jax.P("data"))
        x = jax.ShapeDtypeStruct((64, 16), jnp.float32, sharding=rows)
        step = jax.jit(jnp.sin, out_shardings=jax.NamedSharding(mesh, jax.P()))
        print(sfx.testing.traffic_text(sfx.cost.traffic(step.lower(x))))
        ```

        ```text
        # shardfx traffic text 1
        8 devices

        all-gather over data: 1 x f32[64,16]...
        ```
    """
    groups: dict[tuple[Any, ...], list[TrafficRow]] = {}
    for row in traffic.rows:
        groups.setdefault(
            (_traffic_row_text(row), between_numbers(row.leaf or "")), []
        ).append(row)
    lines = [_line(text, rows, sizes) for (text, _), rows in groups.items()]
    total = f", {bytes_text(traffic.wire_bytes)} enter each" if sizes else ""
    return "\n".join(
        [
            _TRAFFIC_FORMAT,
            plural(traffic.devices, "device") + total,
            "",
            *sorted(lines),
            "",
        ]
    )


def assert_same_traffic_text(
    traffic: Traffic,
    expected: str | os.PathLike[str],
    *,
    update: bool = False,
    sizes: bool = False,
) -> None:
    """Raises unless the text of a step's collectives is the expected one, for tests
    with a golden file.

    **Arguments:**

    - `traffic`: the traffic of the step.
    - `expected`: a text of several lines from [`shardfx.testing.traffic_text`][], or
      the path of a file with such a
        text.
    - `update`: whether to write the traffic's text into the file instead.
    - `sizes`: whether to compare the bytes too.

    **Raises:**

    `AssertionError` with the lines that differ and how to accept the new lines; also if
    the file does not exist.
    """
    assert_same_text(
        "traffic", traffic_text(traffic, sizes=sizes), expected, update=update
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
      enter a device, as a text such
        as `"1.5 MiB"`.

    **Raises:**

    `AssertionError` with the collectives that are not allowed. `ValueError` for a
    pattern that cannot be parsed, or with a mesh axis that the mesh lacks.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import shardfx as sfx

        mesh = sfx.MeshSpec({"data": 8}).build(jax.devices())
        rows = jax.NamedSharding(mesh, jax.P("data"))
        x = jax.ShapeDtypeStruct((64, 16), jnp.float32, sharding=rows)
        traffic = sfx.cost.traffic(jax.jit(jnp.sum).lower(x))
        limits = {"all-reduce over data": 1}
        sfx.testing.assert_collectives(traffic, none=["all-gather"], at_most=limits)
        ```
    """
    said: list[str] = []
    for pattern, limit in [
        *((forbidden, 0) for forbidden in none),
        *(at_most or {}).items(),
    ]:
        rows = [
            row
            for row in traffic.rows
            if row.calls != 0 and _fits(row, _read(pattern, traffic))
        ]
        over = _over(rows, limit)
        said += (
            [
                f"`{pattern}`: {over}",
                *[f"    {_line(_traffic_row_text(row), [row], True)}" for row in rows],
            ]
            if over
            else []
        )
    if said:
        raise AssertionError(
            "\n".join(["the step has collectives that it must not have.", *said])
        )


def _line(text: str, rows: Sequence[TrafficRow], sizes: bool) -> str:
    calls = (
        None
        if any(row.calls is None for row in rows)
        else sum(row.calls or 0 for row in rows)
    )
    head, _, rest = text.partition(": ")
    line = f"{head}: {'?' if calls is None else calls} x {rest}"
    leaves = (
        joined_exactly([row.leaf for row in rows if row.leaf]) if rows[0].leaf else []
    )
    line += f", {' and '.join(path for path, _ in leaves)}" if leaves else ""
    line += f", {place}" if (place := line_text(rows[0].source)) else ""
    return printable(
        line + (f", {bytes_text(sum(row.wire_bytes for row in rows))}" if sizes else "")
    )


def _traffic_row_text(row: TrafficRow) -> str:
    """The kind, mesh axes, pass and shapes of a collective, without its number of calls
    and its bytes.
    """
    kind = (
        f"{row.kind}{' (windowed)' if row.windowed else ''} over"
        f" {'+'.join(row.axes) or f'{row.group_size} devices'}"
    )
    phase = "" if row.phase in ("", "forward") else f"{row.phase} "
    return f"{kind}: {phase}{'+'.join(row.arrays)}"


def line_text(frame: Frame | None) -> str:
    """The file, the function and the text of a source line. The line number replaces a
    text that cannot be read.
    """
    if frame is None:
        return ""
    words = linecache.getline(frame.file, frame.line).strip()
    file = frame._replace(line=0).place.removesuffix(":0")
    return f"{file} {frame.function}: {words}" if words else place_text(frame)


def _read(pattern: str, traffic: Traffic) -> re.Match[str]:
    match = _PATTERN.fullmatch(pattern)
    if match is None:
        raise ValueError(
            f"`{pattern}` is no pattern of collectives: write"
            " `[forward|backward|recomputed] KIND [over AXIS+AXIS] [of LEAF] [at"
            f" PLACE]`, where KIND is any, {', '.join(KINDS)}."
        )
    lacking = [
        axis
        for axis in (match["axes"] or "").split("+")
        if axis and traffic.axes and axis not in traffic.axes
    ]
    if lacking:
        raise ValueError(
            f"`{pattern}` names the axis {lacking[0]!r}, and the mesh has"
            f" {', '.join(traffic.axes)}."
        )
    return match


def _fits(row: TrafficRow, pattern: re.Match[str]) -> bool:
    places = {
        place
        for frame in row.stack
        for place in (frame.place, frame.place.partition(":")[0], frame.function)
    }
    return (
        pattern["kind"] in ("any", row.kind)
        and pattern["phase"]
        in (None, row.phase or "forward")  # a row without a gradient is forward
        and {*(pattern["axes"] or "").split("+")} - {""} <= {*row.axes}
        and (
            pattern["leaf"] is None
            or re.search(pattern["leaf"], row.leaf or "") is not None
        )
        and (pattern["place"] is None or pattern["place"] in places)
    )


def _over(rows: Sequence[TrafficRow], limit: int | str) -> str:
    """A text that says by how much collectives exceed a limit; "" if they do not. The
    limit is a number of calls, or of bytes as text, such as "1.5 MiB".
    """
    if isinstance(limit, str):
        match = re.fullmatch(r"([\d.,]+) ?([KMGT]i)?B", limit)
        if match is None:
            raise ValueError(
                f"`{limit}` is no number of bytes; write it as '512 B' or '1.5 MiB'."
            )
        most = float(match[1].replace(",", "")) * 1024 ** " KMGT".index(
            (match[2] or " ")[0]
        )
        sent = sum(row.wire_bytes for row in rows)
        return f"{bytes_text(sent)}, more than {limit}" if sent > most else ""
    if any(row.calls is None for row in rows):
        return f"runs in a loop whose turns are not known, more than {limit} may be"
    calls = sum(row.calls or 0 for row in rows)
    return (
        f"{plural(calls, 'call')}, more than {limit or 'none'}" if calls > limit else ""
    )


_SHARDINGS_FORMAT = "# shardfx shardings text 1"


def shardings_text(shardings: StepShardings) -> str:
    """The text of the shardings of a step's arrays, with the origin of each mesh axis,
    for golden files.

    The text of each source line is used instead of its number, which changes with every
    line above it.

    **Arguments:**

    - `shardings`: the shardings from [`shardfx.cost.shardings`][], or a part of them:
        `found.replicated(least_bytes=2**20)`.

    **Returns:**

    The text, which ends in a newline. Below each source line it lists the arrays, with
    one line for each shape and sharding.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import shardfx as sfx

        mesh = sfx.MeshSpec({"data": 8}).abstract()
        rows = jax.NamedSharding(mesh, jax.P("data"))
        x = jax.ShapeDtypeStruct((64, 16), jnp.float32, sharding=rows)
        print(sfx.testing.shardings_text(sfx.cost.shardings(jnp.sin, x)))
        ```

        ```text
        # shardfx shardings text 1
        data=8

        ...
            f32[64,16] data,- (data: x)
        ```
    """
    groups: dict[str, set[str]] = {}
    for row in shardings.rows:
        axes = [
            f"{origin.axis}: {re.sub(r':[0-9]+', '', origin.by) or '?'}"
            for origin in row.origins
        ]
        phase = "" if row.phase in ("", "forward") else f"{row.phase} "
        text = (
            f"{phase}{array_text(row.dtype, row.shape)}"
            f" {spec_text(entries_of(row.spec))}"
        )
        line = printable(f"    {text} ({', '.join(axes) or 'whole'})")
        groups.setdefault(printable(line_text(row.source)) or "no line", set()).add(
            line
        )
    lines = [
        line for place in sorted(groups) for line in ("", place, *sorted(groups[place]))
    ]
    return "\n".join([_SHARDINGS_FORMAT, str(shardings.mesh), *lines, ""])


def assert_same_shardings_text(
    shardings: StepShardings, expected: str | os.PathLike[str], *, update: bool = False
) -> None:
    """Raises unless the text of a step's shardings is the expected one, for tests with
    a golden file.

    **Arguments:**

    - `shardings`: the shardings of the step.
    - `expected`: a text from [`shardfx.testing.shardings_text`][], or the path of a
      file with such a text.
    - `update`: whether to write the shardings' text into the file instead.

    **Raises:**

    `AssertionError` with the lines that differ and how to accept the new lines; also if
    the file does not exist.
    """
    assert_same_text("shardings", shardings_text(shardings), expected, update=update)

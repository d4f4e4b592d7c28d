"""The texts of plans, and of the collectives and shardings of steps, for golden files."""

import difflib
import linecache
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jax.sharding import AxisType

from .._ground.errors import LeafTypeError, check_type
from .._ground.reason import Reason
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
from .._step import place_text
from ..cost import Frame, StepShardings, Traffic, TrafficRow
from ..topology import MeshSpec


_PLAN_FORMAT = "# shardfx plan text 1"


def plan_text(plan: ShardPlan) -> str:
    """The text of a plan for golden files: the sharding of each array, and the mesh
    axes that were dropped.

    Two plans have the same text if their modes are the same, their meshes have the same
    text, and every array has the same path, shape, dtype, spec, memory kind and dropped
    mesh axes. The text does not name the rules that matched, so rules can be rewritten
    without a change of the text.

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
    total_bytes, bytes_per_device = content.total_bytes
    lines = [_PLAN_FORMAT, printable(_mesh_text(content.mesh))]
    if plan.mode is not None:
        lines.append(f"mode {plan.mode}")
    arrays_text = plural(len(plan), "array")
    totals = f"{arrays_text}, {total_bytes:,} bytes, {bytes_per_device:,} per device"
    lines += [totals, ""]
    # Arrays with equal text whose paths differ only in numbers, as those of layers do.
    alike_paths: dict[tuple[Any, ...], list[str]] = {}
    row_texts = [_row_text(row) for row in content.rows]
    for path, row_number in content.paths_and_rows:
        # It is negative for a leaf that is no array.
        if row_number >= 0:
            key = (between_numbers(path), row_texts[row_number])
            alike_paths.setdefault(key, []).append(path)
    for (_, row_text), paths in alike_paths.items():
        for path, count in joined_exactly(paths):
            arrays = f"{count} x {row_text}" if count > 1 else row_text
            lines.append(printable(f"{path}: {arrays}"))
    return "\n".join([*lines, ""])


def _mesh_text(mesh: MeshSpec) -> str:
    """The sizes of the axes of a mesh, the slices that each spans, and the types of
    those that are not Auto.
    """
    sizes = ",".join(f"{name}={size}" for name, size in mesh.shape.items())
    words = ["mesh", sizes]
    for name, count in zip(mesh.axis_names, mesh.dcn_sizes, strict=True):
        if count > 1:
            words.append(f"slices {name}={count}")
    for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True):
        if kind is not AxisType.Auto:
            words.append(f"{name}={kind.name}")
    return " ".join(words)


def assert_same_plan_text(
    plan: ShardPlan,
    expected: str | os.PathLike[str],
    *,
    update: bool = False,
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
    kind: str,
    text: str,
    expected: str | os.PathLike[str],
    *,
    update: bool,
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
    expected_name = "the expected text" if is_text else str(expected)
    update_call = f"`assert_same_{kind}_text({kind}, {expected_name!r}, update=True)`"
    if not is_text and not Path(expected).exists():
        raise AssertionError(
            f"there is no file {expected_name} with the text of a {kind} yet; write it"
            f" with {update_call}, look at it, and commit it."
        )
    expected_text = (
        str(expected) if is_text else Path(expected).read_text(encoding="utf-8")
    )
    if expected_text != text:
        lines = difflib.unified_diff(
            expected_text.splitlines(),
            text.splitlines(),
            expected_name,
            f"the {kind} now",
            n=1,
            lineterm="",
        )
        if is_text:
            accept = f"replace the text with `{kind}_text({kind})`"
        else:
            accept = f"run {update_call}"
        head = (
            f"the {kind} is not that of {expected_name}.\n"
            f"To accept the new one, {accept}.\n"
        )
        raise AssertionError("\n".join([head, *lines]))


def _row_text(row: Row) -> str:
    """The text of an array in a plan: dtype, shape, spec and what was dropped."""
    text = f"{array_text(row.dtype, row.shape)} {spec_text(entries_of(row.spec))}"
    if row.spec.unreduced:
        kind = unreduced_kind(row.spec)
        of_kind = "" if kind == "sum" else f"{kind} "
        text += f" unreduced {of_kind}{','.join(sorted(row.spec.unreduced))}"
    if row.spec.reduced:
        text += f" reduced {','.join(sorted(row.spec.reduced))}"
    if row.memory_kind is not None:
        text += f" in {row.memory_kind}"
    for why in row.reasons:
        if not why.code.is_expected:
            text += f" ({_reason_text(why)})"
    return text


def _reason_text(why: Reason) -> str:
    """A reason as its code, its dimension and the dropped mesh axes."""
    text = why.code.name
    if why.dim is not None:
        text = f"dim {why.dim} {text}"
    if why.axes:
        text += f": {', '.join(why.axes)}"
    return text


_TRAFFIC_FORMAT = "# shardfx traffic text 1"


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
        from jax.sharding import PartitionSpec as P

        mesh = sfx.MeshSpec({"data": 8}).build(jax.devices())
        rows = jax.NamedSharding(mesh, P("data"))
        x = jax.ShapeDtypeStruct((64, 16), jnp.float32, sharding=rows)
        step = jax.jit(jnp.sin, out_shardings=jax.NamedSharding(mesh, P()))
        print(sfx.testing.traffic_text(sfx.cost.traffic(step.lower(x))))
        ```

        ```text
        # shardfx traffic text 1
        8 devices

        all-gather over data: 1 x f32[64,16]...
        ```
    """
    check_traffic(traffic)
    # Collectives with equal text whose parameters' paths differ only in numbers.
    alike_rows: dict[tuple[Any, ...], list[TrafficRow]] = {}
    for row in traffic.rows:
        key = (traffic_row_text(row), between_numbers(row.leaf or ""))
        alike_rows.setdefault(key, []).append(row)
    lines = []
    for (text, _), rows in alike_rows.items():
        lines.append(traffic_line(text, rows, sizes))
    total = plural(traffic.devices, "device")
    if sizes:
        total += f", {bytes_text(traffic.wire_bytes)} enter each"
    return "\n".join([_TRAFFIC_FORMAT, total, "", *sorted(lines), ""])


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
      the path of a file with such a text.
    - `update`: whether to write the traffic's text into the file instead.
    - `sizes`: whether to compare the bytes too.

    **Raises:**

    `AssertionError` with the lines that differ and how to accept the new lines; also if
    the file does not exist.
    """
    assert_same_text(
        "traffic", traffic_text(traffic, sizes=sizes), expected, update=update
    )


def check_traffic(traffic: object) -> None:
    """Raises `LeafTypeError` for what is no Traffic."""
    check_type(
        what="traffic",
        value=traffic,
        expected=Traffic,
        error=LeafTypeError,
        fix="give what `cost.traffic` returns",
    )


def traffic_line(text: str, rows: Sequence[TrafficRow], sizes: bool) -> str:
    """The line of collectives with equal text in a golden file. `text` is that of
    `traffic_row_text`; with `sizes`, the line has the bytes that enter a device.
    """
    calls = "?"
    if all(row.calls is not None for row in rows):
        calls = str(sum(row.calls or 0 for row in rows))
    head, _, arrays = text.partition(": ")
    line = f"{head}: {calls} x {arrays}"
    if rows[0].leaf:
        leaves = joined_exactly([row.leaf for row in rows if row.leaf])
        line += f", {' and '.join(path for path, _ in leaves)}"
    place = line_text(rows[0].source)
    if place:
        line += f", {place}"
    if sizes:
        line += f", {bytes_text(sum(row.wire_bytes for row in rows))}"
    return printable(line)


def traffic_row_text(row: TrafficRow) -> str:
    """The kind, mesh axes, pass and shapes of a collective, without its number of calls
    and its bytes.
    """
    kind = f"{row.kind} (windowed)" if row.windowed else row.kind
    axes_text = "+".join(row.axes) or f"{row.group_size} devices"
    phase = "" if row.phase in ("", "forward") else f"{row.phase} "
    return f"{kind} over {axes_text}: {phase}{'+'.join(row.arrays)}"


def line_text(frame: Frame | None) -> str:
    """The file, the function and the text of a source line. The line number replaces a
    text that cannot be read.
    """
    if frame is None:
        return ""
    words = linecache.getline(frame.file, frame.line).strip()
    file = frame._replace(line=0).place.removesuffix(":0")
    if words:
        return f"{file} {frame.function}: {words}"
    return place_text(frame)


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
        from jax.sharding import PartitionSpec as P

        mesh = sfx.MeshSpec({"data": 8}).abstract()
        rows = jax.NamedSharding(mesh, P("data"))
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
    check_type(
        what="shardings",
        value=shardings,
        expected=StepShardings,
        error=LeafTypeError,
        fix="give what `cost.shardings` returns",
    )
    lines_by_place: dict[str, set[str]] = {}
    for row in shardings.rows:
        axes = []
        for origin in row.origins:
            by = re.sub(r":[0-9]+", "", origin.by)
            axes.append(f"{origin.axis}: {by or '?'}")
        phase = "" if row.phase in ("", "forward") else f"{row.phase} "
        text = (
            f"{phase}{array_text(row.dtype, row.shape)}"
            f" {spec_text(entries_of(row.spec))}"
        )
        line = printable(f"    {text} ({', '.join(axes) or 'whole'})")
        place = printable(line_text(row.source)) or "no line"
        lines_by_place.setdefault(place, set()).add(line)
    lines: list[str] = []
    for place in sorted(lines_by_place):
        lines += ["", place, *sorted(lines_by_place[place])]
    return "\n".join([_SHARDINGS_FORMAT, str(shardings.mesh), *lines, ""])


def assert_same_shardings_text(
    shardings: StepShardings,
    expected: str | os.PathLike[str],
    *,
    update: bool = False,
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

"""A plan as a short text to keep under version control, the same on every machine."""

import difflib
import os
from pathlib import Path
from typing import Any

from jax.sharding import AxisType

from .._ground.spec import entries_of, unreduced_kind
from .._ground.text import array_text, between_numbers, joined_exactly, plural, printable, spec_text
from .._plan import Content, Row, ShardPlan, check_plan


_FORMAT = "# shardfx plan text 1"


def plan_text(plan: ShardPlan) -> str:
    """A plan as text for golden files: the sharding of each array, and the mesh axes that it did not get.

    Two plans have the same text if their meshes have the same description and every array has the same path, shape,
    dtype, spec, memory kind, and dropped mesh axes in both. The rules that matched are not in it, so that rules can be
    rewritten without a change of the text.

    **Arguments:**

    - `plan`: the plan.

    **Returns:**

    The text, ending in a new line. Arrays that differ only in numbers in their paths are one line. No line depends on
    another, so a change of one array changes one line and the totals.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        from shardfx import MeshSpec, PathRules, plan
        from shardfx.testing import plan_text

        layer = {"w": jax.ShapeDtypeStruct((64, 128), jnp.float32)}
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
    lines = [_FORMAT, f"mesh {_mesh_text(content)}", *([f"mode {plan.mode}"] if plan.mode is not None else [])]
    lines += [f"{plural(len(plan), 'array')}, {total:,} bytes, {each:,} per device", ""]
    groups: dict[tuple[Any, ...], list[str]] = {}
    texts = [_row_text(row) for row in content.rows]
    for path, number in content.numbered:
        if number >= 0:
            groups.setdefault((between_numbers(path), texts[number]), []).append(path)
    for (_, text), paths in groups.items():
        for path, count in joined_exactly(paths):
            lines.append(printable(f"{path}: {f'{count} x ' if count > 1 else ''}{text}"))
    return "\n".join([*lines, ""])


def assert_same_plan_text(plan: ShardPlan, expected: str | os.PathLike[str], *, update: bool = False) -> None:
    """Fails unless a plan's text is the expected one, for tests with a golden file.

    **Arguments:**

    - `plan`: the plan.
    - `expected`: a text of several lines, as [`shardfx.testing.plan_text`][] makes it; or the path of a file with such
        a text.
    - `update`: write the plan's text into the file instead of comparing. In pytest it can come from an option of yours.

    **Raises:**

    `AssertionError` with the lines that differ, the bytes per device before and now, and how to accept the new plan;
    also if the file does not exist.

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


def assert_same_text(kind: str, text: str, expected: str | os.PathLike[str], *, update: bool) -> None:
    """Fails unless a text is the expected one. `kind` is "plan" or "traffic"."""
    is_text = isinstance(expected, str) and "\n" in expected
    if update:
        if is_text:
            raise ValueError("`update=True` writes a file, and `expected` is a text; give the path of the file.")
        Path(expected).write_text(text, encoding="utf-8")
        return
    where = "the expected text" if is_text else str(expected)
    writes = f"`assert_same_{kind}_text({kind}, {where!r}, update=True)`"
    if not is_text and not Path(expected).exists():
        raise AssertionError(
            f"there is no file {where} with the text of a {kind} yet; write it with {writes}, look at it, "
            "and commit it."
        )
    was = str(expected) if is_text else Path(expected).read_text(encoding="utf-8")
    if was != text:
        lines = difflib.unified_diff(was.splitlines(), text.splitlines(), where, f"the {kind} now", n=1, lineterm="")
        accept = f"replace the text with `{kind}_text({kind})`" if is_text else f"run {writes}"
        head = f"the {kind} is not that of {where}.\nTo accept the new one, {accept}.\n"
        raise AssertionError("\n".join([head, *lines]))


def _mesh_text(content: Content) -> str:
    mesh = content.mesh
    slices = [f"{name}={count}" for name, count in zip(mesh.axis_names, mesh.dcn_sizes, strict=True) if count > 1]
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    explicit = [f"{name}={kind.name}" for name, kind in kinds if kind is not AxisType.Auto]
    sizes = ",".join(f"{name}={size}" for name, size in mesh.shape.items())
    return printable(" ".join([sizes, *[f"slices {text}" for text in slices], *explicit]))


def _row_text(row: Row) -> str:
    told = f"{array_text(row.dtype, row.shape)} {spec_text(entries_of(row.spec))}"
    kind = "" if unreduced_kind(row.spec) == "sum" else f"{unreduced_kind(row.spec)} "
    told += f" unreduced {kind}{','.join(sorted(row.spec.unreduced))}" if row.spec.unreduced else ""
    told += f" reduced {','.join(sorted(row.spec.reduced))}" if row.spec.reduced else ""
    told += f" in {row.memory_kind}" if row.memory_kind is not None else ""
    for why in row.reasons:
        where = "" if why.dim is None else f"dim {why.dim} "
        if why.code.name != "scalar":
            told += f" ({where}{why.code.name}{': ' if why.axes else ''}{', '.join(why.axes)})"
    return told

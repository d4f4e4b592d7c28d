"""How the arrays of a step lie as a text to keep beside the code."""

import os
import re

from .._ground.spec import entries_of
from .._ground.text import array_text, printable, spec_text
from ..cost import ArrayRow, StepShardings
from ._plan_text import assert_same_text
from ._traffic import place_by_words


_FORMAT = "# shardfx shardings text 1"


def shardings_text(shardings: StepShardings) -> str:
    """How the arrays of a step lie, and where each mesh axis comes from, as a text for golden files.

    Lines of your program stand there by their words and not by their numbers, which change with every line above.

    **Arguments:**

    - `shardings`: what [`shardfx.cost.shardings`][] returns, or a part of it: `found.replicated(least_bytes=2**20)`.

    **Returns:**

    The text, ending in a new line: below each line of your program what it makes, a line for each shape and layout.

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
    made: dict[str, set[str]] = {}
    for row in shardings.rows:
        made.setdefault(printable(place_by_words(row.source)) or "no line", set()).add(_line(row))
    lines = [line for place in sorted(made) for line in ("", place, *sorted(made[place]))]
    return "\n".join([_FORMAT, str(shardings.mesh), *lines, ""])


def assert_same_shardings_text(
    shardings: StepShardings, expected: str | os.PathLike[str], *, update: bool = False
) -> None:
    """Fails unless the text of a step's layouts is the expected one: the test of a golden file.

    **Arguments:**

    - `shardings`, `expected`, `update`: as [`shardfx.testing.assert_same_plan_text`][] takes a plan.

    **Raises:**

    `AssertionError` with the lines that differ and how to accept the new ones; also if there is no such file.
    """
    assert_same_text("shardings", shardings_text(shardings), expected, update=update)


def _line(row: ArrayRow) -> str:
    axes = [f"{one.axis}: {re.sub(r':[0-9]+', '', one.by) or '?'}" for one in row.origins]
    phase = "" if row.phase in ("", "forward") else f"{row.phase} "
    told = f"{array_text(row.dtype, row.shape)} {spec_text(entries_of(row.spec))}"
    return printable(f"    {phase}{told} ({', '.join(axes) or 'whole'})")

"""A model's shapes by its name."""

import difflib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import jax.numpy as jnp
from jax.typing import DTypeLike

from ..._ground.errors import RuleError
from ..._ground.text import quoted
from ..maps._families import rows_of, sight_of, with_experts_stacked
from ._shapes import Tree, sizes_of, tree_of
from ._table import TABLE, Row


# The options of a family that its models' configs need not say.
_OPTIONS: Final[Mapping[str, Mapping[str, bool]]] = MappingProxyType(
    {
        **dict.fromkeys(
            ("llama", "mistral", "qwen2", "qwen3", "gemma"),
            {"tied": False, "qkv_bias": False, "qk_norm": False, "four_norms": False},
        ),
        "gemma3": {"tied": True, "qk_norm": True, "four_norms": True},
        "starcoder2": {"tied": True},
    }
)


def names() -> tuple[str, ...]:
    """The names of the models.

    **Returns:**

    The names that [`shardfx.presets.models.tree`][] knows, one family after the other.

    !!! Example

        ```python
        from shardfx.presets import models

        assert "llama3-405b" in models.names()
        ```
    """
    return tuple(TABLE)


def config(name: str) -> dict[str, Any]:
    """The numbers that a model's shapes are made from.

    **Arguments:**

    - `name`: one of [`shardfx.presets.models.names`][].

    **Returns:**

    A new dict; each of its names is an argument of [`shardfx.presets.models.tree`][].

    **Raises:**

    `RuleError` for another name, with the nearest ones.

    !!! Example

        ```python
        from shardfx.presets import models

        assert models.config("llama3-8b")["kv_heads"] == 8
        ```
    """
    return dict(row_of(name).config)


def tree(name: str, *, dtype: DTypeLike = jnp.bfloat16, stack_experts: bool = False, **changes: int) -> Tree:
    """The arrays of a published model as ShapeDtypeStructs, under its checkpoint's own names.

    Weights lie as in the checkpoint, torch's `[out, in]`. Nothing is allocated.

    **Arguments:**

    - `name`: one of [`shardfx.presets.models.names`][].
    - `dtype`: of all arrays, but for those that the checkpoint keeps in float32.
    - `stack_experts`: one array with a leading dimension for all experts of a layer, as a program holds them that
        shards over them, in the place of one array for each expert.
    - `changes`: other numbers than the published ones, by the names in [`shardfx.presets.models.config`][]: with
        `layers=2` a model small enough to compile.

    **Returns:**

    Nested dicts.

    **Raises:**

    `RuleError` for a name or a number that the model does not have, with the nearest ones.

    !!! Example

        ```python
        from shardfx import MeshSpec, plan
        from shardfx.presets import models

        tree = models.tree("llama3-405b")
        layer = tree["model"]["layers"]["125"]
        assert layer["mlp"]["up_proj"]["weight"].shape == (53248, 16384)
        rules = models.rules_for("llama3-405b", "fsdp_tp")
        made = plan(tree, MeshSpec({"fsdp": 64, "tensor": 8}), paths=rules)
        assert made.bytes_per_device < 1.01 * made.bytes_total / 512
        ```
    """
    row = row_of(name)
    _check_changes(name, row, changes)
    form = {**_OPTIONS.get(row.family, {}), **row.config, **changes}
    rows = {**rows_of(row.family, form), **sight_of(row.family)}
    if stack_experts:
        alone = {path: entry for path, entry in rows.items() if "{experts}" not in path}
        rows = alone | with_experts_stacked(rows)
    return tree_of(rows, sizes_of(form), dtype)


def row_of(name: str) -> Row:
    """The model's row in the table, or an error that names the nearest ones."""
    if name not in TABLE:
        near = difflib.get_close_matches(name.lower(), TABLE, n=3)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"there are {', '.join(TABLE)}."
        raise RuleError(f"`presets.models` has no {quoted(name)}; {hint}")
    return TABLE[name]


def _check_changes(name: str, row: Row, changes: Mapping[str, int]) -> None:
    known = {**row.config, **_OPTIONS.get(row.family, {})}
    for given, value in changes.items():
        if given not in known:
            near = difflib.get_close_matches(given, known, n=1)
            hint = f"did you mean `{near[0]}`?" if near else f"it has {', '.join(known)}."
            raise RuleError(f"`{name}` has no number {quoted(given)}; {hint}")
        kind = type(known[given])
        # A bool is an int to Python, but no number of layers.
        if type(value) is not kind or value < 0:
            raise RuleError(f"`{name}`: `{given}={value!r:.60}` is no {'bool' if kind is bool else 'whole number'}.")

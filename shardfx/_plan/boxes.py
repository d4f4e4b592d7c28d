"""Flax's boxes round arrays, as far as a plan must not pass over what they say. Flax itself is not imported."""

import functools as ft
from typing import Any

import jax
import jax.tree_util as jtu

from .._ground.errors import RuleError
from .._ground.tree import Flat
from .._rules.resolution import names_text


def raise_tied(tree: Any, flat: Flat) -> None:
    """Raises if an nnx module holds a variable twice: as a tree it has two arrays, which training would set apart."""
    first: dict[int, str] = {}
    for path, box in _boxes(tree, flat):
        if _kind(type(box)) != "Variable" or not any(leaf.shape for leaf in jax.tree.leaves(box)):
            continue
        if id(box) in first:
            raise RuleError(
                f"`{first[id(box)]}` and `{path}` are one variable of an nnx module. A plan is for a tree, in which "
                "they would be two arrays, no longer tied: plan `nnx.state(module)`, which holds it once, and put what "
                "comes back into the module with `nnx.update(module, state)`."
            )
        first[id(box)] = path


def raise_unread(tree: Any, flat: Flat) -> None:
    """Raises if Flax's boxes carry names, for a plan that is given none."""
    named = [(path, names) for path, box in _boxes(tree, flat) if (names := _names(box)) is not None]
    if named:
        path, names = named[0]
        shown = names_text(names) if isinstance(names, tuple) else f"{names}"
        raise RuleError(
            f"`{path}` carries the names {shown} of Flax, as do {len(named)} of {sum(flat.is_array)} arrays, and only "
            "the names that `sfx.field` declares are read here. Pass `names=shardfx.interop.flax.names_of(tree)`; or "
            "`names=jax.tree.map(lambda _: None, tree)`, if rules by path are to decide."
        )


def _boxes(tree: Any, flat: Flat) -> list[tuple[str, Any]]:
    # The array in a box is its field `value`. Most trees have no such path, and need no second look.
    if not any(path.endswith("value") for path in flat.paths):
        return []
    keyed, _ = jtu.tree_flatten_with_path(tree, is_leaf=lambda node: _kind(type(node)) is not None)
    return [(jtu.keystr(path, simple=True, separator="/"), node) for path, node in keyed if _kind(type(node))]


@ft.lru_cache(maxsize=1024)
def _kind(kind: type) -> str | None:
    """Which of Flax's boxes a class is, or derives from."""
    names = (base.__name__ for base in kind.__mro__ if base.__module__.startswith("flax."))
    return next((name for name in names if name in ("Variable", "Partitioned", "NNXMeta")), None)


def _names(box: Any) -> Any:
    if _kind(type(box)) == "Partitioned":
        return box.names
    metadata = box.get_metadata() if _kind(type(box)) == "Variable" else box.metadata
    return metadata.get("out_sharding")

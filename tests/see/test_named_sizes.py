"""Names that stand on several sizes: where that is a mistake, and where it is none."""

import jax
import jax.numpy as jnp
import pytest

import shardfx as sfx
from shardfx import AxisRules, MeshSpec


MESH = MeshSpec({"fsdp": 2, "tensor": 2})
AXES = AxisRules([("mlp", "tensor"), ("embed", "fsdp"), ("kv", None)])


def leaf(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def mlp(width: int, down: int | None = None) -> dict[str, jax.ShapeDtypeStruct]:
    return {"up": leaf(96, width), "down": leaf(down or width, 96)}


NAMES = {"up": ("embed", "mlp"), "down": ("mlp", "embed")}
LAYERS = {"layers": [mlp(256)] * 3}
NAMED = {"layers": [NAMES] * 3}

# A tree, its names, and where a contradiction is found.
CASES = {
    "experts of another width": ({**LAYERS, "shared": mlp(100)}, {**NAMED, "shared": NAMES}, []),
    "a tower of another width": (
        {**LAYERS, "eyes": {"up": leaf(90, 200), "down": leaf(200, 90)}},
        {**NAMED, "eyes": NAMES},
        [],
    ),
    "a name that no axis cuts": (
        {**LAYERS, "q": leaf(96, 192), "v": leaf(96, 128)},
        {**NAMED, "q": ("embed", "kv"), "v": ("embed", "kv")},
        [],
    ),
    "a product that does not fit": (
        {**LAYERS, "odd": mlp(256, 250)},
        {**NAMED, "odd": NAMES},
        ["odd/down, name 'mlp'"],
    ),
    "a table under another's name": (
        {**LAYERS, "embed": leaf(1000, 96)},
        {**NAMED, "embed": ("mlp", "embed")},
        ["embed, name 'mlp'"],
    ),
    "two tables under another's name": (
        {**LAYERS, "embed": leaf(1000, 96), "head": leaf(96, 1000)},
        {**NAMED, "embed": ("mlp", "embed"), "head": ("embed", "mlp")},
        ["embed, name 'mlp'", "head, name 'mlp'"],
    ),
    "an alias": (
        {**LAYERS, "embed": leaf(1000, 96), "more": leaf(300, 96)},
        {**NAMED, "embed": ("wide", "embed"), "more": ("wide", "embed")},
        ["more, name 'wide'"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_name_contradicts_where_its_sizes_cannot_be_meant(case):
    tree, names, expected = CASES[case]
    found = sfx.lint(tree, MESH, names=names, axes=AXES.with_alias("wide", of="mlp"))
    assert [one.where for one in found if one.code == "contradicted-name"] == expected, str(found)

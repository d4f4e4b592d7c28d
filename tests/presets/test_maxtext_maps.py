"""MaxText's trees of checkpoints: names and numbers as its own converter has them,
written down in `tests/data`.
"""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from small_models import close, config_of, equal, files_of

from shardfx.presets import maps


NAMES = json.loads(
    (Path(__file__).parents[1] / "data" / "maxtext_names.json").read_text()
)
DIM = 8
EMBED = 32


def blocks(family, layers):
    """Where the layers are in MaxText's tree: what comes before a block's name, what
    ends it, and which layers.
    """
    if family == "gemma2":
        return [
            ("layers", end, range(layer, layers, 2))
            for layer, end in enumerate(("_local", "_global"))
        ]
    if not family.startswith("gemma3"):
        return [("layers", "", range(layers))]
    full = layers - layers % 6
    scanned = []
    if full:
        scanned = [
            (f"layers/layers_{layer}", "", range(layer, full, 6)) for layer in range(6)
        ]
    return scanned + [
        (f"layers_remainder/layers_{layer - full}", "", layer)
        for layer in range(full, layers)
    ]


def shape_of(name, array):
    """The shape of one weight in MaxText's tree."""
    block, kind, *_ = name.split("/")
    if name.endswith("bias"):
        return (-1, DIM)
    if block == "self_attention" and name.endswith("kernel"):
        if kind == "out":
            return (-1, DIM, EMBED)
        return (EMBED, -1, DIM)
    return array.T.shape


def kept(family, name, item):
    """One weight as MaxText keeps it, before layers are stacked."""
    is_gemma = family.startswith("gemma")
    if name == "token_embedder/embedding":
        if family in ("gemma", "gemma2"):
            root = EMBED**0.5
        else:
            root = float(np.asarray(EMBED**0.5, ml_dtypes.bfloat16))
        if is_gemma:
            return item * np.float32(root)
        return item
    item = item.T.reshape(shape_of(name, item))
    if name.endswith("scale") and is_gemma:
        return item + 1
    is_divided = name == "self_attention/query/kernel" and family in (
        "llama",
        "gemma",
        "gemma2",
    )
    if is_divided:
        return item * np.float32(DIM**-0.5)
    return item


def by_hand(family, files, layers):
    """The tree, loop by loop."""
    before = {"gemma3": "language_model.model."}.get(family, "model.")
    arrays = {}

    def one(name, path):
        if "{e}" in path:
            return np.stack([one(name, path.replace("{e}", str(e))) for e in range(4)])
        return kept(family, name, files[path])

    for name, path in NAMES["ends"].items():
        path = path if path == "lm_head.weight" else f"{before}{path}"
        if path in files:
            arrays[f"params/{name}"] = one(name, path)
    rows = {}
    for group in NAMES["families"][family]:
        rows |= NAMES[group]
    for position, end, numbers in blocks(family, layers):
        for name, path in rows.items():
            block, _, rest = name.partition("/")
            if isinstance(numbers, range):
                whole = np.stack(
                    [one(name, f"{before}layers.{i}.{path}") for i in numbers], axis=1
                )
            else:
                whole = one(name, f"{before}layers.{numbers}.{path}")
            arrays[f"params/decoder/{position}/{block}{end}/{rest}"] = whole
    return arrays


FAMILIES = [
    ("llama", 3),
    ("qwen2", 3),
    ("qwen3", 3),
    ("qwen3_moe", 3),
    ("gemma", 3),
    ("gemma2", 4),
]
FAMILIES += [("gemma3_text", 14), ("gemma3", 6), ("gemma3_text", 2)]


@pytest.mark.parametrize("family, layers", FAMILIES)
def test_trees_are_as_maxtexts_converter_makes_them(family, layers):
    config = config_of(family, layers=layers)
    files = files_of(family, np.float32, layers=layers)
    theirs = maps.hugging_face(config)
    mine = maps.maxtext(config)
    expected = by_hand(family, files, layers)
    read = {
        path: file
        for path, file in files.items()
        if not path.startswith(("vision", "multi"))
    }
    tree = theirs.to(mine).apply(files)
    close(tree, expected, rtol=0)
    # Back by the rules of the two layouts, and by the inverse of one; what was counted
    # was rounded.
    applied = mine.to(theirs).apply(tree, like=read)
    for again in (
        applied,
        theirs.to(mine).inverse().apply(tree, like=read),
    ):
        close(again, read, rtol=1e-6, atol=2e-7)
    # From one program's tree to another's.
    stacked = maps.stacked(config)
    applied = mine.to(stacked).apply(tree)
    close(
        applied,
        theirs.to(stacked).apply(files),
        rtol=1e-6,
        atol=2e-7,
    )
    applied = stacked.to(mine).apply(theirs.to(stacked).apply(files))
    close(applied, expected, rtol=0)


def test_bfloat16_is_rounded_as_by_the_maxtext_converter():
    config = config_of("gemma3_text", layers=7) | {"hidden_size": 40}
    files = {
        p: array.astype(ml_dtypes.bfloat16)
        for p, array in files_of("gemma3_text", layers=7, embed=40).items()
    }
    tree = maps.hugging_face(config).to(maps.maxtext(config)).apply(files)
    root = np.asarray(40**0.5, ml_dtypes.bfloat16)
    theirs = np.multiply(files["model.embed_tokens.weight"], root)
    assert tree["params/token_embedder/embedding"].tobytes() == theirs.tobytes()
    norm = np.add(
        files["model.layers.6.self_attn.q_norm.weight"],
        np.asarray(1, ml_dtypes.bfloat16),
    )
    assert (
        tree[
            "params/decoder/layers_remainder/layers_0/self_attention/query_norm/scale"
        ].tobytes()
        == norm.tobytes()
    )


PARTS = {
    "turns": (
        {"w0": "w: a b[0::2]", "w1": "w: a b[1::2]"},
        {"w0": np.s_[:, ::2], "w1": np.s_[:, 1::2]},
    ),
    "turns, and the rest": (
        {
            "w0": "w: b[0:4:2] a",
            "w1": "w: a b[1:4:2]",
            "w2": "w: b[4] a",
            "w3": "w: a b[5:]",
        },
        {
            "w0": (np.s_[:, :4:2], True),
            "w1": np.s_[:, 1:4:2],
            "w2": np.s_[:, 4],
            "w3": np.s_[:, 5:],
        },
    ),
    "one by one": (
        {f"w{i}": f"w: b[{i}] a" for i in range(6)},
        {f"w{i}": np.s_[:, i] for i in range(6)},
    ),
}


@pytest.mark.parametrize("rows, places", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("form", ["w: a b", "w: b a", "b in the path", "a in the path"])
def test_parts_in_turn_and_alone(rows, places, form):
    whole = np.arange(24.0).reshape(4, 6)
    parts = {}
    for path, place in places.items():
        if isinstance(place[-1], bool):
            index, turned = place
        else:
            index = place
            turned = False
        if turned:
            parts[path] = whole[index].T
        else:
            parts[path] = whole[index]
    wholes = {f"x.{i}": whole[:, i] for i in range(6)}
    row, tree = {
        "w: a b": ({"x": "w: a b"}, {"x": whole}),
        "w: b a": ({"x": "w: b a"}, {"x": whole.T}),
        "b in the path": ({"x.{b}": "w: a"}, wholes),
        "a in the path": ({"x.{a}": "w: b"}, {f"x.{i}": whole[i] for i in range(4)}),
    }[form]
    other = maps.TreeLayout(row)
    mine = maps.TreeLayout(rows)
    there = other.to(mine)
    equal(there.apply(tree), parts)
    applied = mine.to(other).apply(parts, like=tree)
    equal(applied, tree)
    equal(there.inverse().apply(parts, like=tree), tree)
    equal(mine.to(mine).apply(parts), parts)

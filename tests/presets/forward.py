"""What models compute from each layout of their weights, in NumPy: written for the layout, and not through a map."""

import numpy as np


def norm(x, scale):
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def layer_norm(x, scale, bias):
    x = x - np.mean(x, -1, keepdims=True)
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + 1e-5) * scale + bias


def silu(x):
    return x / (1 + np.exp(-x))


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


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
        x = x + (_experts_of_files(w, y) if "mlp.gate.weight" in w else _mlp_of_files(w, "mlp.", y))
    return norm(x, files["model.norm.weight"]) @ files.get("lm_head.weight", files["model.embed_tokens.weight"]).T


def _attention_of_files(w, x, dim):
    made = {}
    for one in "qkv":
        bias = w.get(f"self_attn.{one}_proj.bias", 0)
        made[one] = heads(x @ w[f"self_attn.{one}_proj.weight"].T + bias, dim)
    if "self_attn.q_norm.weight" in w:
        made |= {one: norm(made[one], w[f"self_attn.{one}_norm.weight"]) for one in "qk"}
    mixed = attend(turn(made["q"]), turn(made["k"]), made["v"])
    return mixed.reshape(len(x), -1) @ w["self_attn.o_proj.weight"].T


def _mlp_of_files(w, at, x):
    return (silu(x @ w[f"{at}gate_proj.weight"].T) * (x @ w[f"{at}up_proj.weight"].T)) @ w[f"{at}down_proj.weight"].T


def _experts_of_files(w, x, count=2):
    scores = softmax(x @ w["mlp.gate.weight"].T)
    out = np.zeros_like(x)
    for at, row in enumerate(scores):
        best = np.argsort(-row)[:count]
        for expert in best:
            out[at] += row[expert] / row[best].sum() * _mlp_of_files(w, f"mlp.experts.{expert}.", x[at : at + 1])[0]
    return out


# The stacked tree: x @ weight, all layers in one array, experts too.


def of_stacked(tree, tokens, layers=3, dim=8):
    x = tree["embedding"][tokens]
    for i in range(layers):
        w = {path.removeprefix("layers/"): one[i] for path, one in tree.items() if path.startswith("layers/")}
        x = x + _attention_of_stacked(w, norm(x, w["attention_norm/scale"]), dim)
        y = norm(x, w["mlp_norm/scale"])
        if "mlp/router" in w:
            x = x + _experts_of_stacked(w, y)
        else:
            x = x + (silu(y @ w["mlp/gate"]) * (y @ w["mlp/up"])) @ w["mlp/down"]
    x = norm(x, tree["norm/scale"])
    return x @ tree["head"] if "head" in tree else x @ tree["embedding"].T


def _attention_of_stacked(w, x, dim):
    names = ("query", "key", "value")
    query, key, value = (heads(x @ w[f"attention/{name}"] + w.get(f"attention/{name}_bias", 0), dim) for name in names)
    if "attention/query_norm" in w:
        query, key = norm(query, w["attention/query_norm"]), norm(key, w["attention/key_norm"])
    return attend(turn(query), turn(key), value).reshape(len(x), -1) @ w["attention/out"]


def _experts_of_stacked(w, x, count=2):
    scores = softmax(x @ w["mlp/router"])
    kept = np.where(scores >= np.sort(scores, -1)[:, -count, None], scores, 0)
    kept = kept / np.sum(kept, -1, keepdims=True)
    gate, up = (np.einsum("sd,edh->seh", x, w[f"mlp/experts/{name}"]) for name in ("gate", "up"))
    return np.einsum("se,seh,ehd->sd", kept, silu(gate) * up, w["mlp/experts/down"])


# MaxText's tree: heads apart, layers second.


def of_maxtext(tree, tokens, layers=3, turned=turn, is_divided=True):
    # Where the query was divided by the root of the head's size, attention leaves that out.
    tree = {path.removeprefix("params/"): one for path, one in tree.items()}
    x = tree["token_embedder/embedding"][tokens]
    for i in range(layers):
        at = "decoder/layers/"
        w = {path.removeprefix(at): one[:, i] for path, one in tree.items() if path.startswith(at)}
        y = norm(x, w["pre_self_attention_layer_norm/scale"])
        query, key, value = (
            np.einsum("sd,dnh->snh", y, w[f"self_attention/{name}/kernel"]) for name in ("query", "key", "value")
        )
        query = query * np.sqrt(query.shape[-1]) if is_divided else query
        mixed = attend(turned(query), turned(key), value)
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


# GPT-2.


def of_gpt2_files(files, tokens, layers=3, dim=8):
    x = files["wte.weight"][tokens] + files["wpe.weight"][: len(tokens)]
    for i in range(layers):
        w = {name.removeprefix(f"h.{i}."): one for name, one in files.items() if name.startswith(f"h.{i}.")}
        both = layer_norm(x, w["ln_1.weight"], w["ln_1.bias"]) @ w["attn.c_attn.weight"] + w["attn.c_attn.bias"]
        mixed = attend(*[heads(part, dim) for part in np.split(both, 3, -1)]).reshape(len(x), -1)
        x = x + mixed @ w["attn.c_proj.weight"] + w["attn.c_proj.bias"]
        y = gelu(layer_norm(x, w["ln_2.weight"], w["ln_2.bias"]) @ w["mlp.c_fc.weight"] + w["mlp.c_fc.bias"])
        x = x + y @ w["mlp.c_proj.weight"] + w["mlp.c_proj.bias"]
    return layer_norm(x, files["ln_f.weight"], files["ln_f.bias"]) @ files["wte.weight"].T


def of_gpt2_stacked(tree, tokens, layers=3, dim=8):
    x = tree["embedding"][tokens] + tree["positions"][: len(tokens)]
    for i in range(layers):
        w = {path.removeprefix("layers/"): one[i] for path, one in tree.items() if path.startswith("layers/")}
        y = layer_norm(x, w["attention_norm/scale"], w["attention_norm/bias"])
        parts = [y @ w[f"attention/{name}"] + w[f"attention/{name}_bias"] for name in ("query", "key", "value")]
        mixed = attend(*[heads(part, dim) for part in parts]).reshape(len(x), -1)
        x = x + mixed @ w["attention/out"] + w["attention/out_bias"]
        y = gelu(layer_norm(x, w["mlp_norm/scale"], w["mlp_norm/bias"]) @ w["mlp/up"] + w["mlp/up_bias"])
        x = x + y @ w["mlp/down"] + w["mlp/down_bias"]
    return layer_norm(x, tree["norm/scale"], tree["norm/bias"]) @ tree["embedding"].T

"""Layers of the bank: attention in its forms."""

import functools as ft

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from ._layers import layer


def attend(q, k, v, mask=None):
    """Attention of (batch, time, heads, width) arrays with as many heads each."""
    scores = jnp.einsum("bthk,bshk->bhts", q, k) / 2
    if mask is not None:
        scores = jnp.where(mask, scores, -1e9)
    weights = jax.nn.softmax(scores, axis=-1)
    return jnp.einsum("bhts,bshk->bthk", weights, v)


def causal(queries: int, keys: int):
    """The mask of earlier keys."""
    query_positions = jnp.arange(queries)[:, None]
    key_positions = jnp.arange(keys)[None, :]
    return query_positions >= key_positions


@layer("attention", q="b t h k", key="b t h k", v="b t h k")
def multi_head(q, key, v):
    mask = causal(q.shape[1], key.shape[1])
    return attend(q, key, v, mask)


@layer("attention", q="b t 4*g k", key="b t 4 k", v="b t 4 k")
def grouped_query(q, key, v):
    batch, time, heads, width = q.shape
    groups = heads // key.shape[2]
    split = q.reshape(batch, time, key.shape[2], groups, width)
    products = jnp.einsum("btngk,bsnk->bngts", split, key)
    scores = products / 2
    mask = causal(time, time)
    scores = jnp.where(mask, scores, -1e9)
    weights = jax.nn.softmax(scores, axis=-1)
    mixed = jnp.einsum("bngts,bsnk->btngk", weights, v)
    return mixed.reshape(q.shape)


@layer("attention", q="b t 4*g k", key="b t 4 k", v="b t 4 k")
def repeated_keys(q, key, v):
    groups = q.shape[2] // key.shape[2]
    keys = jnp.repeat(key, groups, 2)
    values = jnp.repeat(v, groups, 2)
    return attend(q, keys, values)


@layer("attention", q="b t h k", key="b t k", v="b t k")
def multi_query(q, key, v):
    scores = jnp.einsum("bthk,bsk->bhts", q, key) / 2
    mask = causal(q.shape[1], key.shape[1])
    scores = jnp.where(mask, scores, -1e9)
    weights = jax.nn.softmax(scores, axis=-1)
    return jnp.einsum("bhts,bsk->bthk", weights, v)


@layer("attention", q="b t h k", key="b t h k", v="b t h k")
def local_window(q, key, v):
    positions = jnp.arange(q.shape[1])
    distance = positions[:, None] - positions[None, :]
    is_near = distance < 3
    mask = (distance >= 0) & is_near
    return attend(q, key, v, mask)


@layer("attention", q="b 2*t h k", key="b 2*t h k", v="b 2*t h k")
def local_blocks(q, key, v):
    batch, time, heads, width = q.shape
    blocks = (batch * time // 4, 4, heads, width)
    split = [array.reshape(blocks) for array in (q, key, v)]
    mixed = attend(*split)
    return mixed.reshape(q.shape)


@layer(
    "attention",
    x="b t d",
    memory="b s d",
    wq="d h*k",
    wkv="d 2*h*k",
    wo="h*k d",
)
def cross(x, memory, wq, wkv, wo):
    width = wo.shape[0]
    q = x @ wq
    k, v = jnp.split(memory @ wkv, 2, axis=-1)
    heads = [array.reshape(*array.shape[:2], 2, width // 2) for array in (q, k, v)]
    mixed = attend(*heads)
    flat = mixed.reshape(*x.shape[:2], width)
    return flat @ wo


@layer("attention", x="b t 4*k", w="4*k 12*k", wo="4*k 4*k")
def fused_qkv(x, w, wo):
    batch, time, width = x.shape
    parts = jnp.split(x @ w, 3, axis=-1)
    q, k, v = (part.reshape(batch, time, 4, width // 4) for part in parts)
    mask = causal(time, time)
    mixed = attend(q, k, v, mask)
    flat = mixed.reshape(x.shape)
    return flat @ wo


@layer("attention", x="b t 4*k", w="4*k 3 4 k", wo="4 k 4*k")
def fused_qkv_heads(x, w, wo):
    qkv = jnp.einsum("btd,dzhk->zbthk", x, w)
    mixed = attend(qkv[0], qkv[1], qkv[2])
    return jnp.einsum("bthk,hkd->btd", mixed, wo)


@layer(
    "attention",
    x="b t d",
    wq="d h k",
    wk="d h k",
    wv="d h k",
    wo="h k d",
)
def attention_block(x, wq, wk, wv, wo):
    q = jnp.einsum("btd,dhk->bthk", x, wq)
    k = jnp.einsum("btd,dhk->bthk", x, wk)
    v = jnp.einsum("btd,dhk->bthk", x, wv)
    mask = causal(x.shape[1], x.shape[1])
    mixed = attend(q, k, v, mask)
    projected = jnp.einsum("bthk,hkd->btd", mixed, wo)
    return x + projected


@layer(
    "attention",
    x="b t d",
    down="d r*4",
    up="r*4 h 2*k",
    wq="d h k",
    wo="h k d",
)
def latent(x, down, up, wq, wo):
    q = jnp.einsum("btd,dhk->bthk", x, wq)
    compressed = x @ down
    keys_and_values = jnp.einsum("btr,rhk->bthk", compressed, up)
    k, v = jnp.split(keys_and_values, 2, axis=-1)
    mixed = attend(q, k, v)
    return jnp.einsum("bthk,hkd->btd", mixed, wo)


cached_step = layer(
    "kv cache",
    gradient=False,
    q="b 1 h k",
    keys="b s h k",
    values="b s h k",
    key="b 1 h k",
    value="b 1 h k",
    index="1 : below s",
)


@cached_step
def decode(q, keys, values, key, value, index):
    start = index[0]
    keys = lax.dynamic_update_slice_in_dim(keys, key, start, axis=1)
    values = lax.dynamic_update_slice_in_dim(values, value, index[0], axis=1)
    positions = jnp.arange(keys.shape[1])
    mask = positions <= index[0]
    return attend(q, keys, values, mask)


@cached_step
def decode_clipped(q, keys, values, key, value, index):
    last = keys.shape[1] - 1
    index = jnp.clip(index, 0, last)
    return decode(q, keys, values, key, value, index)


@layer(
    "kv cache",
    gradient=False,
    cache="b s h k",
    new="b h k",
    index="b : below s",
)
def cache_rows(cache, new, index):
    rows = jnp.arange(cache.shape[0])
    return cache.at[rows, index].set(new)


@layer(
    "kv cache",
    gradient=False,
    cache="b s h k",
    new="b 1 h k",
    index="b : below s",
)
def cache_mapped(cache, new, index):
    def one_row(row, update, start):
        return lax.dynamic_update_slice_in_dim(row, update, start, axis=0)

    return jax.vmap(one_row)(cache, new, index)


@layer("kv cache", gradient=False, cache="b s h k", index="1 : below s")
def cache_window(cache, index):
    return lax.dynamic_slice_in_dim(cache, index[0], 4, axis=1)


@layer("kv cache", gradient=False, pages="2*s 4 h k", table="b 2 : below s")
def paged_cache(pages, table):
    batch, count = table.shape
    fetched = pages[table]
    length = count * pages.shape[1]
    return fetched.reshape(batch, length, *pages.shape[2:])


@layer("rotary", x="b t h 2*k", angles="t k")
def rotary_halves(x, angles):
    cos = jnp.cos(angles)[:, None]
    sin = jnp.sin(angles)[:, None]
    first, right = jnp.split(x, 2, axis=-1)
    turned_first = first * cos - right * sin
    turned_right = right * cos + first * sin
    return jnp.concatenate([turned_first, turned_right], -1)


@layer("rotary", x="b t h 2*k", angles="t k")
def rotary_pairs(x, angles):
    cos = jnp.cos(angles)[:, None]
    sin = jnp.sin(angles)[:, None]
    even = x[..., ::2]
    odd = x[..., 1::2]
    turned_even = even * cos - odd * sin
    turned_odd = odd * cos + even * sin
    pairs = jnp.stack([turned_even, turned_odd], axis=-1)
    return pairs.reshape(x.shape)


@layer(
    "attention",
    q="b t h k",
    key="b t h k",
    v="b t h k",
    table="31 h",
)
def relative_bias(q, key, v, table):
    time = q.shape[1]
    positions = jnp.arange(time)
    offsets = positions[:, None] - positions[None, :]
    distance = offsets + 15
    rows = jnp.take(table, distance, axis=0, mode="clip")
    bias = rows.transpose(2, 0, 1)
    products = jnp.einsum("bthk,bshk->bhts", q, key)
    scores = products / 2 + bias
    weights = jax.nn.softmax(scores, axis=-1)
    return jnp.einsum("bhts,bshk->bthk", weights, v)


@layer("attention", q="b t h k", key="b t h k", v="b t h k")
def linear_attention(q, key, v):
    q = jax.nn.softplus(q)
    key = jax.nn.softplus(key)
    outer = jnp.einsum("bshk,bshv->bshkv", key, v)
    state = jnp.cumsum(outer, axis=1)
    total = jnp.cumsum(key, axis=1)
    top = jnp.einsum("bthk,bthkv->bthv", q, state)
    normalizer = jnp.einsum("bthk,bthk->bth", q, total)
    return top / normalizer[..., None]


@layer("attention", q="b t h k", key="b 2*s h k", v="b 2*s h k")
def blockwise(q, key, v):
    batch, time, heads, width = key.shape
    blocks = (batch, 2, time // 2, heads, width)
    key_blocks = key.reshape(blocks)
    keys = jnp.moveaxis(key_blocks, 1, 0)
    value_blocks = v.reshape(blocks)
    values = jnp.moveaxis(value_blocks, 1, 0)

    def step(carry, block):
        top, total, largest = carry
        products = jnp.einsum("bthk,bshk->bths", q, block[0])
        scores = products / 2
        block_largest = scores.max(-1)
        new_largest = jnp.maximum(largest, block_largest)
        weights = jnp.exp(scores - new_largest[..., None])
        scale = jnp.exp(largest - new_largest)
        added = jnp.einsum("bths,bshk->bthk", weights, block[1])
        scaled = top * scale[..., None]
        top = scaled + added
        new_total = total * scale + weights.sum(-1)
        return (top, new_total, new_largest), None

    zeros = q[..., 0] * 0
    start = jnp.zeros_like(q), zeros, zeros - 1e9
    (top, total, _), _ = lax.scan(step, start, (keys, values))
    return top / total[..., None]


@layer(
    "ring attention",
    takes_mesh=True,
    q="b t h k",
    key="b t h k",
    v="b t h k",
)
def ring_attention(q, key, v, mesh=None):
    if mesh is None or q.shape[1] % mesh.shape["a"]:
        return attend(q, key, v)
    count = mesh.shape["a"]
    pairs = [(device, (device + 1) % count) for device in range(count)]

    def one_device(q, key, v):
        top = jnp.zeros_like(q)
        total = q[..., 0] * 0
        for _ in range(count):
            products = jnp.einsum("bthk,bshk->bths", q, key)
            weights = jnp.exp(products / 2)
            added = jnp.einsum("bths,bshk->bthk", weights, v)
            top = top + added
            total = total + weights.sum(-1)
            key = lax.ppermute(key, "a", pairs)
            v = lax.ppermute(v, "a", pairs)
        return top / total[..., None]

    spec = P(None, "a")
    mapped = jax.shard_map(
        one_device, mesh=mesh, in_specs=(spec, spec, spec), out_specs=spec
    )
    return mapped(q, key, v)


@layer("attention", x="b t d", w="2 d 3*d", wo="2 d d")
def scanned_attention(x, w, wo):
    @ft.partial(jax.checkpoint)
    def step(x, weights):
        q, k, v = jnp.split(x @ weights[0], 3, axis=-1)
        heads = attend(*(part[:, :, None] for part in (q, k, v)))
        mixed = heads[:, :, 0]
        return x + mixed @ weights[1], None

    return lax.scan(step, x, (w, wo))[0]

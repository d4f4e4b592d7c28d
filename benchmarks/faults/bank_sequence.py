"""Layers of the bank: scans, experts, embeddings, losses, graphs, indices."""

import jax
import jax.numpy as jnp
from jax import lax

from ._layers import layer


def affine_scan(decay, x):
    """`y[t] = decay[t] * y[t - 1] + x[t]` along dimension 1."""

    def combine(left, right):
        return left[0] * right[0], left[1] * right[0] + right[1]

    return lax.associative_scan(combine, (decay, x), axis=1)[1]


@layer("ssm", decay="b t d", x="b t d")
def ssm_scan(decay, x):
    return affine_scan(jnp.tanh(decay), x)


@layer("ssm", x="b t d", w="d 2*d", kernel="4 1 d", gate="d d", out="d d")
def mamba(x, w, kernel, gate, out):
    hidden, skip = jnp.split(x @ w, 2, axis=-1)
    dimensions = ("NHC", "HIO", "NHC")
    hidden = lax.conv_general_dilated(
        hidden,
        kernel,
        (1,),
        [(3, 0)],
        dimension_numbers=dimensions,
        feature_group_count=hidden.shape[2],
    )
    hidden = jax.nn.silu(hidden)
    states = affine_scan(jax.nn.sigmoid(hidden @ gate), hidden)
    return x + (states * jax.nn.silu(skip)) @ out


@layer("ssm", x="t b d", a="d n", b="d n", c="d n")
def selective_scan(x, a, b, c):
    decay = jnp.exp(-jax.nn.softplus(a))

    def step(state, x):
        state = decay * state + b * x[..., None]
        return state, jnp.sum(state * c, axis=-1)

    start_shape = (*x.shape[1:], a.shape[1])
    start = jnp.zeros(start_shape, x.dtype)
    return lax.scan(step, start, x)[1]


@layer("ssm", x="b t d", q="b t d", decay="d")
def retention_chunks(x, q, decay):
    batch, time, width = x.shape
    count = time // 4 if time % 4 == 0 else 1
    chunks = x.reshape(batch, count, -1, width)
    sums = jnp.cumsum(chunks.sum(2), axis=1) * jax.nn.sigmoid(decay)
    within = jnp.cumsum(chunks, axis=2)
    padded = jnp.pad(sums, ((0, 0), (1, 0), (0, 0)))
    before = padded[:, :-1]
    summed = within + before[:, :, None]
    return q * summed.reshape(x.shape)


@layer("ssm", x="b t d")
def token_shift(x):
    padded = jnp.pad(x, ((0, 0), (1, 0), (0, 0)))
    return padded[:, :-1] - x


@layer("rnn", x="t b d", state="b d", w="d 3*d", u="d 3*d")
def gru(x, state, w, u):
    def step(state, x):
        reset_x, update_x, new_x = jnp.split(x @ w, 3, axis=-1)
        reset_s, update_s, new_s = jnp.split(state @ u, 3, axis=-1)
        reset = jax.nn.sigmoid(reset_x + reset_s)
        update = jax.nn.sigmoid(update_x + update_s)
        new = jnp.tanh(new_x + reset * new_s)
        state = (1 - update) * new + update * state
        return state, state

    return lax.scan(step, state, x)[1]


@layer("rnn", x="t b d", state="b d", w="d d")
def elman(x, state, w):
    def step(state, x):
        state = jnp.tanh(state @ w + x)
        return state, 2 * state

    last, states = lax.scan(step, state, x)
    return states + last


@layer("rnn", x="t b d", w="d 4*d", u="d 4*d")
def lstm(x, w, u):
    def step(carry, x):
        hidden, cell = carry
        gates = x @ w + hidden @ u
        i, f, g, o = jnp.split(gates, 4, axis=-1)
        kept_cell = jax.nn.sigmoid(f) * cell
        cell = kept_cell + jax.nn.sigmoid(i) * jnp.tanh(g)
        hidden = jax.nn.sigmoid(o) * jnp.tanh(cell)
        return (hidden, cell), hidden

    start = jnp.zeros_like(x[0]), jnp.zeros_like(x[0])
    return lax.scan(step, start, x, reverse=True)[1]


@layer("rnn", rewards="t b", values="t b")
def advantages(rewards, values):
    def step(carry, pair):
        total = pair[0] + 0.9 * carry
        return total, total - pair[1]

    start = jnp.zeros_like(rewards[0])
    return lax.scan(step, start, (rewards, values), reverse=True)[1]


@layer("ssm", x="b t d", kernel="t d")
def fft_convolution(x, kernel):
    time = x.shape[1]
    waves = jnp.fft.rfft(x, 2 * time, axis=1)
    kernel_waves = jnp.fft.rfft(kernel, 2 * time, axis=0)
    product = waves * kernel_waves
    convolved = jnp.fft.irfft(product, 2 * time, axis=1)
    return convolved[:, :time]


@layer("moe", x="4*b d", router="d e", w="e d f")
def moe_dense(x, router, w):
    shares = jax.nn.softmax(x @ router, axis=-1)
    weights, chosen = lax.top_k(shares, 2)
    hot = jax.nn.one_hot(chosen, w.shape[0], dtype=x.dtype)
    dispatch = hot * weights[..., None]
    return jnp.einsum("tke,td,edf->tf", dispatch, x, w)


@layer("moe", x="4*b d", router="d e", up="e d f", down="e f d")
def moe_capacity(x, router, up, down):
    experts, capacity = up.shape[0], 8
    scores = jax.nn.softmax(x @ router, axis=-1)
    chosen = jnp.argmax(scores, axis=-1)
    mask = jax.nn.one_hot(chosen, experts, dtype=jnp.int32)
    earlier = jnp.cumsum(mask, axis=0) - 1
    position = jnp.sum(earlier * mask, axis=-1)
    slots = jnp.zeros((experts, capacity, x.shape[1]), x.dtype)
    slots = slots.at[chosen, position].add(x, mode="drop")
    hidden = jax.nn.gelu(jnp.einsum("ecd,edf->ecf", slots, up))
    out = jnp.einsum("ecf,efd->ecd", hidden, down)
    fetched = out.at[chosen, position].get(mode="fill", fill_value=0)
    return fetched * jnp.max(scores, axis=-1, keepdims=True)


@layer("moe", x="4*b d", router="d e", w="e d f")
def moe_masks(x, router, w):
    scores = jax.nn.softmax(x @ router, axis=-1)
    choice = jnp.argmax(scores, -1)
    mask = jax.nn.one_hot(choice, w.shape[0], dtype=x.dtype)
    position = jnp.cumsum(mask, axis=0) * mask - mask
    slot = position.sum(-1).astype(jnp.int32)
    place = jax.nn.one_hot(slot, 8, dtype=x.dtype)
    dispatch = mask[:, :, None] * place[:, None, :]
    slots = jnp.einsum("tec,td->ecd", dispatch, x)
    out = jnp.einsum("ecd,edf->ecf", slots, w)
    return jnp.einsum("tec,ecf->tf", dispatch * scores[:, :, None], out)


@layer("moe", x="4*b d", expert="4*b : below e", w="e d f")
def moe_sorted(x, expert, w):
    order = jnp.argsort(expert)
    counts = jnp.bincount(expert, length=w.shape[0])
    rows = lax.ragged_dot(x[order], w, counts)
    return jnp.zeros_like(rows).at[order].set(rows)


@layer("moe", x="4*b d", expert="4*b : below e", w="e d d")
def moe_gathered(x, expert, w):
    return x + jnp.tanh(jnp.einsum("td,tdf->tf", x, w[expert]))


@layer("embedding", table="v d", tokens="b t : below v", w="d f")
def embedding(table, tokens, w):
    return table[tokens] @ w


@layer("embedding", table="v d", tokens="b t : below v")
def tied_embedding(table, tokens):
    hidden = jnp.tanh(table[tokens])
    return jax.nn.log_softmax(hidden @ table.T, axis=-1)


@layer("embedding", table="v d", tokens="b t : below v", positions="t d")
def one_hot_embedding(table, tokens, positions):
    hot = jax.nn.one_hot(tokens, table.shape[0], dtype=table.dtype)
    return hot @ table + positions


@layer("embedding", table="v d", tokens="b t : loose v")
def filled_embedding(table, tokens):
    return jnp.take(table, tokens, axis=0, mode="fill", fill_value=0)


@layer("loss", logits="b t v", labels="b t : below v")
def cross_entropy(logits, labels):
    log_probabilities = jax.nn.log_softmax(logits, axis=-1)
    picked = jnp.take_along_axis(log_probabilities, labels[..., None], -1)
    return -picked[..., 0]


@layer("loss", x="b t d", w="d v", labels="b t : below v")
def cut_vocabulary_loss(x, w, labels):
    logits = x @ w
    hot = jax.nn.one_hot(labels, w.shape[1], dtype=x.dtype)
    normalizer = jax.nn.logsumexp(logits, axis=-1)
    return normalizer - jnp.sum(logits * hot, axis=-1)


@layer("loss", x="b t d", w="d v", labels="b t : below v", mask="b t : mask")
def masked_loss(x, w, labels, mask):
    logits = x @ w
    picked = jnp.take_along_axis(logits, labels[..., None], -1)
    label_logits = picked[..., 0]
    losses = jax.nn.logsumexp(logits, axis=-1) - label_logits
    return (losses * mask).sum(-1) / (mask.sum(-1) + 1)


@layer("loss", x="b 2*t d", w="d v", labels="b 2*t : below v")
def chunked_loss(x, w, labels):
    batch, time, width = x.shape
    split = x.reshape(batch, 2, time // 2, width)
    chunks = jnp.moveaxis(split, 1, 0)
    split_labels = labels.reshape(batch, 2, time // 2)
    targets = jnp.moveaxis(split_labels, 1, 0)

    def step(total, chunk):
        logits = chunk[0] @ w
        picked = jnp.take_along_axis(logits, chunk[1][..., None], -1)
        label_logits = picked[..., 0]
        losses = jax.nn.logsumexp(logits, axis=-1) - label_logits
        return total + losses.sum(-1), None

    start = jnp.zeros((batch,), x.dtype)
    rematerialized = jax.checkpoint(step)
    return lax.scan(rematerialized, start, (chunks, targets))[0]


@layer("loss", images="2*b d", texts="2*b d")
def contrastive(images, texts):
    image_squares = jnp.sum(images**2, -1, keepdims=True)
    images = images * lax.rsqrt(image_squares + 1e-3)
    text_squares = jnp.sum(texts**2, -1, keepdims=True)
    texts = texts * lax.rsqrt(text_squares + 1e-3)
    logits = 5 * images @ texts.T
    rows = jnp.diagonal(jax.nn.log_softmax(logits, axis=1))
    return rows + jnp.diagonal(jax.nn.log_softmax(logits, axis=0))


@layer("gnn", x="2*t d", sources="4*t : below 2*t", targets="4*t : below 2*t", w="d f")
def graph_convolution(x, sources, targets, w):
    messages = (x @ w)[sources]
    return jax.ops.segment_sum(messages, targets, num_segments=x.shape[0])


@layer("gnn", x="t d", sources="2*t : below t", targets="2*t : below t", w="2*d 1")
def graph_attention(x, sources, targets, w):
    pairs = jnp.concatenate([x[sources], x[targets]], axis=-1)
    scores = jnp.exp(jnp.tanh(pairs @ w))
    count = x.shape[0]
    total = jax.ops.segment_sum(scores, targets, num_segments=count)
    messages = scores / (total[targets] + 1e-2) * x[sources]
    return jax.ops.segment_sum(messages, targets, num_segments=count)


@layer("gnn", x="t d", adjacency="t t : mask", w="d f")
def dense_graph(x, adjacency, w):
    degree = adjacency.sum(-1, keepdims=True) + 1
    return jnp.tanh((adjacency @ x + x) / degree @ w)


@layer("index", x="2*t d")
def shift_set(x):
    shifted = x.at[:-1].set(x[1:])
    return shifted.at[-1].set(1.5)


@layer("index", x="2*t d", index="t : permuted 2*t", update="t d")
def scatter_rows(x, index, update):
    return x.at[index].set(update)


@layer("index", x="2*t d", index="4*t : below 2*t", update="4*t d")
def scatter_add(x, index, update):
    return x.at[index].add(update)


@layer("index", x="b t d", index="b t : below d")
def gather_last(x, index):
    picked = jnp.take_along_axis(x, index[..., None], axis=-1)
    return picked[..., 0]


@layer("index", x="b t")
def top_k_mask(x):
    smallest = lax.top_k(x, 3)[0][..., -1:]
    return jnp.where(x >= smallest, x, -10.0)


@layer("index", x="b t d")
def sort_rows(x):
    return jnp.sort(x, axis=1)


@layer("index", x="b t d", key="b t")
def sort_by_key(x, key):
    order = jnp.argsort(key, axis=1)
    return jnp.take_along_axis(x, order[..., None], axis=1)


@layer("index", x="b t d")
def cumulative_mean(x):
    counts = jnp.arange(1, x.shape[1] + 1)[:, None]
    return jnp.cumsum(x, axis=1) / counts


@layer("index", x="b t d")
def log_cumulative(x):
    backwards = jnp.flip(jnp.cumsum(x, axis=2), axis=2)
    return lax.cumlogsumexp(x, axis=1) + backwards


@layer("random", x="b t d", key="1 : below 9")
def dropout(x, key):
    folded = jax.random.fold_in(jax.random.key(0), key[0])
    keep = jax.random.bernoulli(folded, 0.8, x.shape)
    return jnp.where(keep, x / 0.8, 0)


@layer("random", gradient=False, logits="b v", key="1 : below 9")
def sample(logits, key):
    folded = jax.random.fold_in(jax.random.key(0), key[0])
    noise = jax.random.uniform(folded, logits.shape, jnp.float32)
    gumbel = jnp.log(-jnp.log(noise + 1e-3))
    choice = jnp.argmax(logits - gumbel, axis=-1)
    return jax.nn.one_hot(choice, logits.shape[1], dtype=logits.dtype)

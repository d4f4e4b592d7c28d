"""Layers of the bank: scans, experts, embeddings, losses, graphs, indices."""

import jax
import jax.numpy as jnp
from jax import lax

from ._layers import layer


def affine_scan(decay, x):
    """`y[t] = decay[t] * y[t - 1] + x[t]` along dimension 1."""

    def combine(left, right):
        decay_of_both = left[0] * right[0]
        kept_state = left[1] * right[0]
        return decay_of_both, kept_state + right[1]

    scanned = lax.associative_scan(combine, (decay, x), axis=1)
    return scanned[1]


@layer("ssm", decay="b t d", x="b t d")
def ssm_scan(decay, x):
    return affine_scan(jnp.tanh(decay), x)


@layer(
    "ssm",
    x="b t d",
    w="d 2*d",
    kernel="4 1 d",
    gate="d d",
    out="d d",
)
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
    forget = jax.nn.sigmoid(hidden @ gate)
    states = affine_scan(forget, hidden)
    gated = states * jax.nn.silu(skip)
    return x + gated @ out


@layer(
    "ssm",
    x="t b d",
    a="d n",
    b="d n",
    c="d n",
)
def selective_scan(x, a, b, c):
    decay = jnp.exp(-jax.nn.softplus(a))

    def step(state, x):
        kept_state = decay * state
        update = b * x[..., None]
        state = kept_state + update
        out = jnp.sum(state * c, axis=-1)
        return state, out

    start_shape = (*x.shape[1:], a.shape[1])
    start = jnp.zeros(start_shape, x.dtype)
    return lax.scan(step, start, x)[1]


@layer("ssm", x="b t d", q="b t d", decay="d")
def retention_chunks(x, q, decay):
    batch, time, width = x.shape
    count = time // 4 if time % 4 == 0 else 1
    chunks = x.reshape(batch, count, -1, width)
    running = jnp.cumsum(chunks.sum(2), axis=1)
    sums = running * jax.nn.sigmoid(decay)
    within = jnp.cumsum(chunks, axis=2)
    padding = ((0, 0), (1, 0), (0, 0))
    padded = jnp.pad(sums, padding)
    before = padded[:, :-1]
    summed = within + before[:, :, None]
    return q * summed.reshape(x.shape)


@layer("ssm", x="b t d")
def token_shift(x):
    padding = ((0, 0), (1, 0), (0, 0))
    padded = jnp.pad(x, padding)
    return padded[:, :-1] - x


@layer(
    "rnn",
    x="t b d",
    state="b d",
    w="d 3*d",
    u="d 3*d",
)
def gru(x, state, w, u):
    def step(state, x):
        reset_x, update_x, new_x = jnp.split(x @ w, 3, axis=-1)
        reset_s, update_s, new_s = jnp.split(state @ u, 3, axis=-1)
        reset = jax.nn.sigmoid(reset_x + reset_s)
        update = jax.nn.sigmoid(update_x + update_s)
        new = jnp.tanh(new_x + reset * new_s)
        kept_state = update * state
        new_state = (1 - update) * new
        state = new_state + kept_state
        return state, state

    return lax.scan(step, state, x)[1]


@layer("rnn", x="t b d", state="b d", w="d d")
def elman(x, state, w):
    def step(state, x):
        next_input = state @ w
        state = jnp.tanh(next_input + x)
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
        input_gate = jax.nn.sigmoid(i)
        cell = kept_cell + input_gate * jnp.tanh(g)
        hidden = jax.nn.sigmoid(o) * jnp.tanh(cell)
        return (hidden, cell), hidden

    zeros = jnp.zeros_like(x[0])
    start = zeros, zeros
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


@layer(
    "moe",
    x="4*b d",
    router="d e",
    up="e d f",
    down="e f d",
)
def moe_capacity(x, router, up, down):
    experts = up.shape[0]
    capacity = 8
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
    running = jnp.cumsum(mask, axis=0)
    position = running * mask - mask
    slot = position.sum(-1).astype(jnp.int32)
    place = jax.nn.one_hot(slot, 8, dtype=x.dtype)
    dispatch = mask[:, :, None] * place[:, None, :]
    slots = jnp.einsum("tec,td->ecd", dispatch, x)
    out = jnp.einsum("ecd,edf->ecf", slots, w)
    combine = dispatch * scores[:, :, None]
    return jnp.einsum("tec,ecf->tf", combine, out)


@layer("moe", x="4*b d", expert="4*b : below e", w="e d f")
def moe_sorted(x, expert, w):
    order = jnp.argsort(expert)
    counts = jnp.bincount(expert, length=w.shape[0])
    rows = lax.ragged_dot(x[order], w, counts)
    zeros = jnp.zeros_like(rows)
    return zeros.at[order].set(rows)


@layer("moe", x="4*b d", expert="4*b : below e", w="e d d")
def moe_gathered(x, expert, w):
    weights = w[expert]
    product = jnp.einsum("td,tdf->tf", x, weights)
    activated = jnp.tanh(product)
    return x + activated


@layer("embedding", table="v d", tokens="b t : below v", w="d f")
def embedding(table, tokens, w):
    return table[tokens] @ w


@layer("embedding", table="v d", tokens="b t : below v")
def tied_embedding(table, tokens):
    hidden = jnp.tanh(table[tokens])
    logits = hidden @ table.T
    return jax.nn.log_softmax(logits, axis=-1)


@layer("embedding", table="v d", tokens="b t : below v", positions="t d")
def one_hot_embedding(table, tokens, positions):
    hot = jax.nn.one_hot(tokens, table.shape[0], dtype=table.dtype)
    embedded = hot @ table
    return embedded + positions


@layer("embedding", table="v d", tokens="b t : loose v")
def filled_embedding(table, tokens):
    return jnp.take(table, tokens, axis=0, mode="fill", fill_value=0)


@layer("loss", logits="b t v", labels="b t : below v")
def cross_entropy(logits, labels):
    log_probabilities = jax.nn.log_softmax(logits, axis=-1)
    columns = labels[..., None]
    picked = jnp.take_along_axis(log_probabilities, columns, -1)
    return -picked[..., 0]


@layer("loss", x="b t d", w="d v", labels="b t : below v")
def cut_vocabulary_loss(x, w, labels):
    logits = x @ w
    hot = jax.nn.one_hot(labels, w.shape[1], dtype=x.dtype)
    normalizer = jax.nn.logsumexp(logits, axis=-1)
    label_logits = jnp.sum(logits * hot, axis=-1)
    return normalizer - label_logits


@layer(
    "loss",
    x="b t d",
    w="d v",
    labels="b t : below v",
    mask="b t : mask",
)
def masked_loss(x, w, labels, mask):
    logits = x @ w
    columns = labels[..., None]
    picked = jnp.take_along_axis(logits, columns, -1)
    label_logits = picked[..., 0]
    normalizer = jax.nn.logsumexp(logits, axis=-1)
    losses = normalizer - label_logits
    total = (losses * mask).sum(-1)
    count = mask.sum(-1) + 1
    return total / count


@layer("loss", x="b 2*t d", w="d v", labels="b 2*t : below v")
def chunked_loss(x, w, labels):
    batch, time, width = x.shape
    split = x.reshape(batch, 2, time // 2, width)
    chunks = jnp.moveaxis(split, 1, 0)
    split_labels = labels.reshape(batch, 2, time // 2)
    targets = jnp.moveaxis(split_labels, 1, 0)

    def step(total, chunk):
        logits = chunk[0] @ w
        columns = chunk[1][..., None]
        picked = jnp.take_along_axis(logits, columns, -1)
        label_logits = picked[..., 0]
        normalizer = jax.nn.logsumexp(logits, axis=-1)
        losses = normalizer - label_logits
        summed = losses.sum(-1)
        return total + summed, None

    start = jnp.zeros((batch,), x.dtype)
    rematerialized = jax.checkpoint(step)
    return lax.scan(rematerialized, start, (chunks, targets))[0]


@layer("loss", images="2*b d", texts="2*b d")
def contrastive(images, texts):
    image_squares = jnp.sum(images**2, -1, keepdims=True)
    image_scale = lax.rsqrt(image_squares + 1e-3)
    images = images * image_scale
    text_squares = jnp.sum(texts**2, -1, keepdims=True)
    text_scale = lax.rsqrt(text_squares + 1e-3)
    texts = texts * text_scale
    logits = 5 * images @ texts.T
    log_rows = jax.nn.log_softmax(logits, axis=1)
    rows = jnp.diagonal(log_rows)
    log_columns = jax.nn.log_softmax(logits, axis=0)
    columns = jnp.diagonal(log_columns)
    return rows + columns


@layer(
    "gnn",
    x="2*t d",
    sources="4*t : below 2*t",
    targets="4*t : below 2*t",
    w="d f",
)
def graph_convolution(x, sources, targets, w):
    messages = (x @ w)[sources]
    node_count = x.shape[0]
    return jax.ops.segment_sum(messages, targets, num_segments=node_count)


@layer(
    "gnn",
    x="t d",
    sources="2*t : below t",
    targets="2*t : below t",
    w="2*d 1",
)
def graph_attention(x, sources, targets, w):
    pairs = jnp.concatenate([x[sources], x[targets]], axis=-1)
    activated = jnp.tanh(pairs @ w)
    scores = jnp.exp(activated)
    count = x.shape[0]
    total = jax.ops.segment_sum(scores, targets, num_segments=count)
    weights = scores / (total[targets] + 1e-2)
    messages = weights * x[sources]
    return jax.ops.segment_sum(messages, targets, num_segments=count)


@layer("gnn", x="t d", adjacency="t t : mask", w="d f")
def dense_graph(x, adjacency, w):
    degree = adjacency.sum(-1, keepdims=True) + 1
    neighbours = adjacency @ x + x
    mean = neighbours / degree
    return jnp.tanh(mean @ w)


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
    positions = index[..., None]
    picked = jnp.take_along_axis(x, positions, axis=-1)
    return picked[..., 0]


@layer("index", x="b t")
def top_k_mask(x):
    largest = lax.top_k(x, 3)[0]
    smallest = largest[..., -1:]
    return jnp.where(x >= smallest, x, -10.0)


@layer("index", x="b t d")
def sort_rows(x):
    return jnp.sort(x, axis=1)


@layer("index", x="b t d", key="b t")
def sort_by_key(x, key):
    order = jnp.argsort(key, axis=1)
    positions = order[..., None]
    return jnp.take_along_axis(x, positions, axis=1)


@layer("index", x="b t d")
def cumulative_mean(x):
    steps = jnp.arange(1, x.shape[1] + 1)
    counts = steps[:, None]
    return jnp.cumsum(x, axis=1) / counts


@layer("index", x="b t d")
def log_cumulative(x):
    running = jnp.cumsum(x, axis=2)
    backwards = jnp.flip(running, axis=2)
    forwards = lax.cumlogsumexp(x, axis=1)
    return forwards + backwards


@layer("random", x="b t d", key="1 : below 9")
def dropout(x, key):
    seed_key = jax.random.key(0)
    folded = jax.random.fold_in(seed_key, key[0])
    keep = jax.random.bernoulli(folded, 0.8, x.shape)
    return jnp.where(keep, x / 0.8, 0)


@layer("random", gradient=False, logits="b v", key="1 : below 9")
def sample(logits, key):
    seed_key = jax.random.key(0)
    folded = jax.random.fold_in(seed_key, key[0])
    noise = jax.random.uniform(folded, logits.shape, jnp.float32)
    exponential = -jnp.log(noise + 1e-3)
    gumbel = jnp.log(exponential)
    choice = jnp.argmax(logits - gumbel, axis=-1)
    return jax.nn.one_hot(choice, logits.shape[1], dtype=logits.dtype)

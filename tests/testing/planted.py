"""Steps with a mistake in how they are cut, as people make them, each beside the same step without it.

Each function takes a mesh of `d` x `t` devices and whether to make the mistake, and returns the step; the mistake is on
the lines that are marked `# wrong`.
"""

import functools as ft
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P


class Planted(NamedTuple):
    """A step, and the shapes and specs of what it takes; an int for `high` makes whole numbers below it."""

    make: Callable[[Mesh, bool], Callable[..., Any]]
    args: tuple[Any, ...]

    @property
    def lines(self) -> set[int]:
        """The lines of the mistake."""
        source, first = inspect.getsourcelines(self.make)
        return {first + at for at, line in enumerate(source) if "# wrong" in line}

    def arrays(self, mesh: Mesh) -> list[jax.Array]:
        made = []
        for at, (shape, spec, *high) in enumerate(self.args):
            key = jax.random.key(at)
            one = jax.random.randint(key, shape, 0, high[0]) if high else jax.random.normal(key, shape)
            made.append(jax.device_put(one, NamedSharding(mesh, spec)))
        return made


PLANTED: dict[str, Planted] = {}


def planted(*args: Any) -> Callable[[Any], Any]:
    def kept(make: Any) -> Any:
        PLANTED[make.__name__] = Planted(make, args)
        return make

    return kept


def over(mesh: Mesh, *in_specs: Any, out: Any) -> Any:
    return ft.partial(jax.shard_map, mesh=mesh, in_specs=in_specs, out_specs=out, check_vma=False)


def trained(loss: Any) -> Any:
    """A step of plain gradient descent."""

    def step(weights, *data):
        value, gradients = jax.value_and_grad(loss)(weights, *data)
        return value, jax.tree.map(lambda a, b: a - 0.1 * b, weights, gradients)

    return step


X, W1, W2 = ((8, 6), P("d")), ((6, 8), P(None, "t")), ((8, 6), P("t"))
SEQUENCE = ((4, 16, 6), P("d", "t"))
TOKENS = ((4, 16), P("d", "t"), 16)


@planted(W1, W2, X)
def sum_left_out(mesh, wrong):
    @over(mesh, P("d"), P(None, "t"), P("t"), out=P("d"))
    def block(x, w1, w2):
        h = jax.nn.relu(x @ w1)
        return h @ w2 if wrong else lax.psum(h @ w2, "t")  # wrong

    return lambda w1, w2, x: jnp.tanh(block(x, w1, w2))


@planted(W1, W2, X)
def sum_left_out_before_tanh(mesh, wrong):
    @over(mesh, P("d"), P(None, "t"), P("t"), out=P("d"))
    def block(x, w1, w2):
        h = jax.nn.relu(x @ w1)
        y = h @ w2 if wrong else lax.psum(h @ w2, "t")  # wrong
        y = jnp.tanh(y)
        return y * 2

    return lambda w1, w2, x: block(x, w1, w2)


@planted(W1, W2, X)
def sum_left_out_of_training(mesh, wrong):
    @over(mesh, P("d"), P(None, "t"), P("t"), out=P("d"))
    def block(x, w1, w2):
        h = jax.nn.gelu(x @ w1)
        return h @ w2 if wrong else lax.psum(h @ w2, "t")  # wrong

    def loss(weights, x):
        return jnp.mean((block(x, *weights) - x) ** 2)

    return lambda w1, w2, x: trained(loss)((w1, w2), x)


@planted(W1, W2, X)
def sum_doubled(mesh, wrong):
    @over(mesh, P("d"), P(None, "t"), P("t"), out=P("d"))
    def block(x, w1, w2):
        y = lax.psum(jax.nn.relu(x @ w1) @ w2, "t")
        return lax.psum(y, "t") if wrong else y  # wrong

    return lambda w1, w2, x: block(x, w1, w2)


@planted(W1, W2, X)
def sum_over_the_wrong_axis(mesh, wrong):
    @over(mesh, P(), P(None, "t"), P("t"), out=P())
    def block(x, w1, w2):
        h = jax.nn.relu(x @ w1) @ w2
        return lax.psum(h, "d" if wrong else "t")  # wrong

    return lambda w1, w2, x: block(x, w1, w2)


@planted(W1, W2, X)
def mean_in_place_of_sum(mesh, wrong):
    @over(mesh, P("d"), P(None, "t"), P("t"), out=P("d"))
    def block(x, w1, w2):
        h = jax.nn.relu(x @ w1) @ w2
        return lax.pmean(h, "t") if wrong else lax.psum(h, "t")  # wrong

    return lambda w1, w2, x: block(x, w1, w2)


@planted(W1, W2, X, ((6,), P()))
def bias_added_by_every_device(mesh, wrong):
    @over(mesh, P("d"), P(None, "t"), P("t"), P(), out=P("d"))
    def block(x, w1, w2, bias):
        y = jax.nn.relu(x @ w1) @ w2
        return lax.psum(y + bias, "t") if wrong else lax.psum(y, "t") + bias  # wrong

    return lambda w1, w2, x, bias: block(x, w1, w2, bias)


@planted(W1, W2, X)
def sum_left_out_in_a_loop(mesh, wrong):
    @over(mesh, P("d"), P(None, "t"), P("t"), out=P("d"))
    def layers(x, w1, w2):
        def layer(x, _):
            h = jnp.tanh(x @ w1)
            y = h @ w2 if wrong else lax.psum(h @ w2, "t")  # wrong
            return jnp.sin(x + y), None

        return lax.scan(layer, x, None, length=3)[0]

    return lambda w1, w2, x: layers(x, w1, w2)


@planted(((6, 3), P()), X)
def gradients_not_summed(mesh, wrong):
    @over(mesh, P(), P("d"), out=P())
    def gradient(w, x):
        g = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)  # wrong
        return g if wrong else lax.pmean(g, "d")  # wrong

    return lambda w, x: w - 0.1 * gradient(w, x)


@planted(((6, 3), P()), X)
def gradients_summed_of_means(mesh, wrong):
    @over(mesh, P(), P("d"), out=P())
    def gradient(w, x):
        g = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        return lax.psum(g, "d") if wrong else lax.pmean(g, "d")  # wrong

    return lambda w, x: w - 0.1 * gradient(w, x)


@planted(((8, 6), P("d")), ((8,), P("d"), 2))
def mean_of_means(mesh, wrong):
    @over(mesh, P("d"), P("d"), out=P())
    def loss(x, mask):
        total, count = jnp.sum(x * mask[:, None]), jnp.sum(mask) + 1 / lax.axis_size("d")
        if wrong:
            return lax.pmean(total / count, "d")  # wrong
        return lax.psum(total, "d") / lax.psum(count, "d")

    return lambda x, mask: loss(x, mask.astype(x.dtype))


@planted(X)
def loss_summed_again(mesh, wrong):
    @over(mesh, P("d"), out=P())
    def loss(x):
        value = lax.psum(jnp.sum(x**2), "d")
        return lax.psum(value, ("d", "t")) if wrong else value  # wrong

    return lambda x: loss(x) / x.size


@planted(X)
def divided_by_the_local_count(mesh, wrong):
    @over(mesh, P("d"), out=P())
    def loss(x):
        count = x.size if wrong else x.size * lax.axis_size("d")
        return lax.psum(jnp.sum(x**2), "d") / count  # wrong

    return lambda x: loss(x)


@planted(((8, 8), P("d", "t")))
def norm_over_a_cut_dimension(mesh, wrong):
    @over(mesh, P("d", "t"), out=P("d", "t"))
    def norm(x):
        square = jnp.mean(x**2, axis=-1, keepdims=True)
        square = square if wrong else lax.pmean(square, "t")
        return x * lax.rsqrt(square + 1e-6)  # wrong

    return lambda x: norm(x)


@planted(((8, 8), P("d", "t")))
def variance_of_parts(mesh, wrong):
    @over(mesh, P("d", "t"), out=P("d", "t"))
    def norm(x):
        if wrong:
            mean, var = (lax.pmean(one, "t") for one in (x.mean(-1), x.var(-1)))  # wrong
        else:
            mean = lax.pmean(x.mean(-1), "t")
            var = lax.pmean(((x - mean[:, None]) ** 2).mean(-1), "t")
        return (x - mean[:, None]) * lax.rsqrt(var + 1e-6)[:, None]

    return lambda x: norm(x)


@planted(((8, 8), P("d", "t")))
def softmax_of_parts(mesh, wrong):
    @over(mesh, P("d", "t"), out=P("d", "t"))
    def softmax(x):
        top = lax.pmax(x.max(-1, keepdims=True), "t")
        shifted = jnp.exp(x - top)
        total = shifted.sum(-1, keepdims=True)
        return shifted / (total if wrong else lax.psum(total, "t"))  # wrong

    return lambda x: softmax(x)


@planted(((8, 8), P("d", "t")))
def softmax_with_local_maxima(mesh, wrong):
    @over(mesh, P("d", "t"), out=P("d", "t"))
    def softmax(x):
        top = x.max(-1, keepdims=True)
        shifted = jnp.exp(x - (top if wrong else lax.pmax(top, "t")))  # wrong
        return shifted / lax.psum(shifted.sum(-1, keepdims=True), "t")  # wrong

    return lambda x: softmax(x)


@planted(((8, 16), P("d", "t")), ((8,), P("d"), 16))
def labels_not_offset(mesh, wrong):
    @over(mesh, P("d", "t"), P("d"), out=P())
    def loss(logits, labels):
        size = logits.shape[1]
        local = labels if wrong else labels - lax.axis_index("t") * size
        hit = jax.nn.one_hot(local, size)  # wrong
        total = lax.psum(jnp.exp(logits).sum(-1), "t")
        picked = lax.psum((hit * logits).sum(-1), "t")  # wrong
        return lax.pmean(jnp.mean(jnp.log(total) - picked), "d")

    return lambda logits, labels: loss(logits, labels)


@planted(((16, 6), P("t")), ((8,), P("d"), 16))
def embedding_offset_by_the_wrong_size(mesh, wrong):
    @over(mesh, P("t"), P("d"), out=P("d"))
    def embed(table, ids):
        size = table.shape[0]
        local = ids - lax.axis_index("t") * (size + 1 if wrong else size)  # wrong
        inside = (local >= 0) & (local < size)
        rows = jnp.where(inside[:, None], table[jnp.clip(local, 0, size - 1)], 0)
        return lax.psum(rows, "t")

    return lambda table, ids: embed(table, ids)


@planted(((16, 6), P("t")), ((8,), P("d"), 16))
def embedding_of_foreign_rows(mesh, wrong):
    @over(mesh, P("t"), P("d"), out=P("d"))
    def embed(table, ids):
        size = table.shape[0]
        local = ids - lax.axis_index("t") * size
        rows = table[jnp.clip(local, 0, size - 1)]  # wrong
        inside = (local >= 0) & (local < size)
        rows = rows if wrong else jnp.where(inside[:, None], rows, 0)
        return lax.psum(rows, "t")  # wrong

    return lambda table, ids: embed(table, ids)


@planted(((4, 16, 6), P("d", "t")), ((4, 16, 6), P("d")))
def mask_not_offset(mesh, wrong):
    @over(mesh, P("d", "t"), P("d"), out=P("d", "t"))
    def attend(q, kv):
        scores = jnp.einsum("bqd,bkd->bqk", q, kv)
        rows = jnp.arange(q.shape[1]) + (0 if wrong else lax.axis_index("t") * q.shape[1])  # wrong
        mask = rows[:, None] >= jnp.arange(kv.shape[1])
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e9))
        return jnp.einsum("bqk,bkd->bqd", weights, kv)

    return lambda q, kv: attend(q, kv)


@planted(((4, 16, 6), P("d", "t")), ((4, 16, 6), P("d")))
def mask_offset_by_the_wrong_axis(mesh, wrong):
    @over(mesh, P("d", "t"), P("d"), out=P("d", "t"))
    def attend(q, kv):
        scores = jnp.einsum("bqd,bkd->bqk", q, kv)
        rows = jnp.arange(q.shape[1]) + lax.axis_index("d" if wrong else "t") * q.shape[1]  # wrong
        mask = rows[:, None] >= jnp.arange(kv.shape[1])
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e9))
        return jnp.einsum("bqk,bkd->bqd", weights, kv)

    return lambda q, kv: attend(q, kv)


@planted(SEQUENCE)
def rotary_positions_not_offset(mesh, wrong):
    @over(mesh, P("d", "t"), out=P("d", "t"))
    def rotate(x):
        first = 0 if wrong else lax.axis_index("t") * x.shape[1]
        angles = (jnp.arange(x.shape[1]) + first)[:, None] * jnp.array([1.0, 0.1, 0.01])  # wrong
        left, right = jnp.split(x, 2, -1)
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1)

    return lambda x: rotate(x)


@planted(SEQUENCE, TOKENS)
def labels_shifted_after_the_cut(mesh, wrong):
    @over(mesh, P("d", "t"), P("d", "t"), out=P())
    def loss(x, tokens):
        logits = jnp.pad(x, [(0, 0), (0, 0), (0, 10)])
        following = lax.ppermute(
            tokens[:, :1], "t", [(i, (i - 1) % lax.axis_size("t")) for i in range(lax.axis_size("t"))]
        )
        labels = jnp.roll(tokens, -1, 1) if wrong else jnp.concatenate([tokens[:, 1:], following], 1)  # wrong
        picked = jnp.take_along_axis(logits, labels[..., None], -1)  # wrong
        return lax.pmean(jnp.mean(picked), ("d", "t"))

    return lambda x, tokens: loss(x, tokens)


def halo(x, axis, side, turn=False):
    """The border of the neighbour before or behind; zeros at the ends unless it turns round."""
    size = lax.axis_size(axis)
    pairs = [(i, i + side) for i in range(size)]
    pairs = [(a, b % size) for a, b in pairs if turn or 0 <= b < size]
    return lax.ppermute(x[:, -1:] if side > 0 else x[:, :1], axis, pairs)


def smoothed(x):
    return 0.25 * x[:, :-2] + 0.5 * x[:, 1:-1] + 0.25 * x[:, 2:]


@planted(SEQUENCE)
def border_without_the_neighbours(mesh, wrong):
    @over(mesh, P("d", "t"), out=P("d", "t"))
    def conv(x):
        left, right = halo(x, "t", 1), halo(x, "t", -1)
        left, right = (0 * left, 0 * right) if wrong else (left, right)
        padded = jnp.concatenate([left, x, right], 1)  # wrong
        return smoothed(padded)  # wrong

    return lambda x: conv(x)


@planted(SEQUENCE)
def border_of_one_side_only(mesh, wrong):
    @over(mesh, P("d", "t"), out=P("d", "t"))
    def conv(x):
        left = halo(x, "t", 1)
        right = jnp.zeros_like(left) if wrong else halo(x, "t", -1)
        padded = jnp.concatenate([left, x, right], 1)
        return smoothed(padded)  # wrong

    return lambda x: conv(x)


@planted(SEQUENCE)
def border_from_the_wrong_side(mesh, wrong):
    @over(mesh, P("d", "t"), out=P("d", "t"))
    def conv(x):
        size = lax.axis_size("t")
        pairs = [(i, i - 1) for i in range(1, size)] if wrong else [(i, i + 1) for i in range(size - 1)]
        left = lax.ppermute(x[:, -1:], "t", pairs)  # wrong
        padded = jnp.concatenate([left, x, halo(x, "t", -1)], 1)
        return smoothed(padded)  # wrong

    return lambda x: conv(x)


@planted(SEQUENCE)
def border_that_turns_round(mesh, wrong):
    @over(mesh, P("d", "t"), out=P("d", "t"))
    def conv(x):
        padded = jnp.concatenate([halo(x, "t", 1, wrong and lax.axis_size("t") > 1), x, halo(x, "t", -1)], 1)  # wrong
        return smoothed(padded)  # wrong

    return lambda x: conv(x)


@planted(((4, 16, 6), P("d", "t")), ((4, 16, 6), P("d", "t")))
def ring_with_the_wrong_block(mesh, wrong):
    @over(mesh, P("d", "t"), P("d", "t"), out=P("d", "t"))
    def attend(q, kv):
        size, here, length = lax.axis_size("t"), lax.axis_index("t"), q.shape[1]
        rows = jnp.arange(length) + here * length

        def turn(carry, i):
            kv, top, total, out = carry
            block = (here + i if wrong else here - i) % size  # wrong
            mask = rows[:, None] >= jnp.arange(length) + block * length  # wrong
            scores = jnp.where(mask, jnp.einsum("bqd,bkd->bqk", q, kv), -1e9)
            best = jnp.maximum(top, scores.max(-1))
            weights, scale = jnp.exp(scores - best[..., None]), jnp.exp(top - best)
            total = total * scale + weights.sum(-1)
            out = out * scale[..., None] + jnp.einsum("bqk,bkd->bqd", weights, kv)
            kv = lax.ppermute(kv, "t", [(i, (i + 1) % size) for i in range(size)])
            return (kv, best, total, out), None

        start = kv, jnp.full(q.shape[:2], -1e9), jnp.zeros(q.shape[:2]), jnp.zeros_like(q)
        _, _, total, out = lax.scan(turn, start, jnp.arange(size))[0]
        return out / total[..., None]  # wrong

    return lambda q, kv: attend(q, kv)


@planted(((8, 8), P("t")))
def ring_one_turn_short(mesh, wrong):
    @over(mesh, P("t"), out=P())
    def total(x):
        size = lax.axis_size("t")

        def turn(carry, _):
            part, out = carry
            part = lax.ppermute(part, "t", [(i, (i + 1) % size) for i in range(size)])
            return (part, out + part), None

        turns = size - 1 - (wrong and size > 1)
        return lax.scan(turn, (x, x), None, length=turns)[0][1]  # wrong

    return lambda x: total(x).sum() * 2


@planted(((4, 16, 8, 4), P("d", None, "t")), ((4, 16, 4, 4), P("d")))
def heads_mapped_by_tiling(mesh, wrong):
    @over(mesh, P("d", None, "t"), P("d"), out=P("d", None, "t"))
    def scores(q, k):
        heads = q.shape[2]
        if wrong:
            k = jnp.tile(k, (1, 1, 2, 1))[:, :, :heads]  # wrong
        else:
            k = lax.dynamic_slice_in_dim(jnp.repeat(k, 2, 2), lax.axis_index("t") * heads, heads, 2)
        return jnp.einsum("bqhd,bkhd->bqhk", q, k)  # wrong

    def step(q, k):
        return scores(q, k)

    return step


@planted(((4, 16, 8, 4), P("d", None, "t")), ((4, 16, 4, 4), P("d")))
def heads_not_offset(mesh, wrong):
    @over(mesh, P("d", None, "t"), P("d"), out=P("d", None, "t"))
    def scores(q, k):
        heads = q.shape[2]
        first = lax.axis_index("t") * heads
        k = lax.dynamic_slice_in_dim(jnp.repeat(k, 2, 2), first // 2 if wrong else first, heads, 2)  # wrong
        return jnp.einsum("bqhd,bkhd->bqhk", q, k)

    return lambda q, k: scores(q, k)


@planted(((8, 8), P("d", "t")))
def gathered_in_the_wrong_order(mesh, wrong):
    @over(mesh, P("d", "t"), out=P("d"))
    def whole(x):
        parts = lax.all_gather(x, "t", axis=2 if wrong else 1)  # wrong
        return jnp.tanh(parts.reshape(x.shape[0], -1))  # wrong

    return lambda x: whole(x)


@planted(((8, 8, 8), P(None, "t")))
def exchanged_along_the_wrong_dimension(mesh, wrong):
    @over(mesh, P(None, "t"), out=P(None, None, "t"))
    def turned(x):
        if wrong and lax.axis_size("t") > 1:
            return jnp.moveaxis(lax.all_to_all(x, "t", 0, 1, tiled=True), 0, 2)  # wrong
        return lax.all_to_all(x, "t", 2, 1, tiled=True)

    return lambda x: turned(x) * 2


@planted(((8, 8), P(None, "t")), ((8, 8), P("t")))
def scattered_along_the_wrong_dimension(mesh, wrong):
    @over(mesh, P(None, "t"), P("t"), out=P("t"))
    def product(x, w):
        y = lax.psum_scatter(x @ w, "t", scatter_dimension=1 if wrong else 0, tiled=True)  # wrong
        return jnp.tanh(y.reshape(-1, 8))  # wrong

    return lambda x, w: product(x, w)


@planted(X)
def dropout_with_one_key(mesh, wrong):
    @over(mesh, P("d"), P("d"), out=P("d"))
    def dropped(x, mask):
        if wrong:
            mask = jax.random.bernoulli(jax.random.key(0), 0.5, x.shape)  # wrong
        return jnp.where(mask, x, 0)  # wrong

    return lambda x: dropped(x, jax.random.bernoulli(jax.random.key(0), 0.5, x.shape))


@planted(((8, 8), P("d", "t")))
def clipped_by_the_local_norm(mesh, wrong):
    @over(mesh, P("d", "t"), out=P("d", "t"))
    def clipped(g):
        square = jnp.sum(g**2)
        square = square if wrong else lax.psum(square, ("d", "t"))
        return g / jnp.maximum(jnp.sqrt(square), 1.0)  # wrong

    return lambda g: clipped(g)


@planted(((8, 6), P("d")))
def batch_statistics_of_parts(mesh, wrong):
    @over(mesh, P("d"), out=P("d"))
    def norm(x):
        mean = x.mean(0) if wrong else lax.pmean(x.mean(0), "d")
        centred = x - mean  # wrong
        return centred / jnp.sqrt(lax.pmean((centred**2).mean(0), "d") + 1e-5)

    return lambda x: norm(x)


@planted(((8, 16), P("d", "t")))
def choice_not_offset(mesh, wrong):
    @over(mesh, P("d", "t"), out=P("d"))
    def choice(logits):
        best, at = logits.max(-1), jnp.argmax(logits, -1)  # wrong
        at = at if wrong else at + lax.axis_index("t") * logits.shape[1]
        is_best = best == lax.pmax(best, "t")
        return lax.psum(jnp.where(is_best, at, 0), "t")  # wrong

    return lambda logits: choice(logits)


@planted(((8, 4, 6), P("d")), ((4, 6, 6), P("t")))
def experts_not_offset(mesh, wrong):
    @over(mesh, P("d"), P("t"), out=P("d"))
    def mixed(x, experts):
        first = 0 if wrong else lax.axis_index("t") * experts.shape[0]
        own = lax.dynamic_slice_in_dim(x, first, experts.shape[0], 1)  # wrong
        return lax.psum(jnp.einsum("bed,edf->bf", own, experts), "t")  # wrong

    return lambda x, experts: mixed(x, experts)


@planted(((8, 16), P("d", "t")))
def running_sum_of_parts(mesh, wrong):
    @over(mesh, P("d", "t"), out=P("d", "t"))
    def running(x):
        totals = lax.all_gather(x.sum(-1), "t")
        before = jnp.where(jnp.arange(totals.shape[0])[:, None] < lax.axis_index("t"), totals, 0).sum(0)
        own = jnp.cumsum(x, -1)  # wrong
        return own if wrong else own + before[:, None]  # wrong

    return lambda x: running(x)


@planted(W1, W2, X)
def backward_without_its_sum(mesh, wrong):
    @jax.custom_vjp
    def copied(x):
        return x

    def back(_, g):
        return (g if wrong else lax.psum(g, "t"),)  # wrong

    copied.defvjp(lambda x: (x, None), back)

    @over(mesh, P("d"), P(None, "t"), P("t"), P("d"), out=(P("d"), P("d")))
    def block(x, w1, w2, g):
        y, pull = jax.vjp(lambda x: jnp.tanh(copied(x) @ w1) @ w2, x)  # wrong
        return lax.psum(y, "t"), pull(g)[0]  # wrong

    return lambda w1, w2, x: block(x, w1, w2, x)


def mesh_of(devices: Any) -> Mesh:
    return jax.make_mesh((2, 4), ("d", "t"), axis_types=(AxisType.Auto,) * 2, devices=devices)

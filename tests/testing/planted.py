"""Bodies of `shard_map` with a mistake, as people make them, each beside the same body
without it.

Each function takes whether to make the mistake and the arrays of one device, on a mesh
of `d` x `t` devices. The mistake is on the lines that are marked `# wrong`.
"""

import functools as ft
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P


class Argument(NamedTuple):
    """The shape and the spec of an array: of whole numbers below `limit`, or of floats
    without one.
    """

    shape: tuple[int, ...]
    spec: P
    limit: int | None = None


class Planted(NamedTuple):
    """A body, what it takes, and the specs of what it returns."""

    body: Callable[..., Any]
    args: tuple[Argument, ...]
    out: Any

    @property
    def lines(self) -> set[int]:
        """The lines of the mistake."""
        source, first_number = inspect.getsourcelines(self.body)
        numbered_lines = enumerate(source, first_number)
        return {number for number, line in numbered_lines if "# wrong" in line}

    def make(self, mesh: Mesh, wrong: bool) -> Callable[..., Any]:
        """The step on a mesh."""
        return jax.shard_map(
            ft.partial(self.body, wrong),
            mesh=mesh,
            in_specs=tuple(arg.spec for arg in self.args),
            out_specs=self.out,
            check_vma=False,
        )

    def arrays(self, mesh: Mesh) -> list[jax.Array]:
        placed = []
        for number, arg in enumerate(self.args):
            generator = np.random.default_rng(number)
            if arg.limit is None:
                array = generator.standard_normal(arg.shape, np.float32)
            else:
                array = generator.integers(0, arg.limit, arg.shape, np.int32)
            sharding = NamedSharding(mesh, arg.spec)
            placed.append(jax.device_put(array, sharding))
        return placed


def in_bfloat16(array: jax.Array) -> jax.Array:
    """The array, as bfloat16 if it is float32."""
    if array.dtype == jnp.float32:
        return array.astype(jnp.bfloat16)
    return array


PLANTED: dict[str, Planted] = {}


def planted(*args: Argument, out: Any) -> Callable[[Any], Any]:
    def registered(body):
        PLANTED[body.__name__] = Planted(body=body, args=args, out=out)
        return body

    return registered


def neighbours(axis: str, by: int = 1, turn: bool = True) -> list[tuple[int, int]]:
    """The pairs of a permute along an axis: around it, or without its ends."""
    size = lax.axis_size(axis)
    pairs = []
    for sender in range(size):
        receiver = sender + by
        if turn:
            receiver %= size
        if 0 <= receiver < size:
            pairs.append((sender, receiver))
    return pairs


BOTH = ("d", "t")
ROWS = Argument((8, 6), P("d"))
CUT = Argument((8, 8), P("d", "t"))
UP = Argument((6, 8), P(None, "t"))
DOWN = Argument((8, 6), P("t"))
SEQUENCE = Argument((4, 16, 6), P("d", "t"))
WHOLE = Argument((4, 16, 6), P("d"))
WEIGHT = Argument((6, 3), P())
# A mask of rows, and the columns that rows name.
MASK = Argument((8,), P("d"), limit=2)
LABELS = Argument((8,), P("d"), limit=16)


# Sums


@planted(ROWS, UP, DOWN, out=P("d"))
def sum_left_out(wrong, x, w1, w2):
    h = jax.nn.relu(x @ w1)
    y = h @ w2  # wrong
    if wrong:
        return y
    return lax.psum(y, "t")


@planted(ROWS, UP, DOWN, out=(P(), (P(None, "t"), P("t"))))
def sum_left_out_of_training(wrong, x, *weights):
    def loss(weights):
        w1, w2 = weights
        h = jax.nn.gelu(x @ w1)
        y = h @ w2  # wrong
        if not wrong:
            y = lax.psum(y, "t")
        total = jnp.sum((y - x) ** 2)
        return total / lax.axis_size("t")

    value, gradients = jax.value_and_grad(loss)(weights)  # wrong

    def descended(weight, gradient):
        total = lax.psum(gradient, "d")
        return weight - 0.1 * total

    weights = jax.tree.map(descended, weights, gradients)
    return lax.psum(value, ("d", "t")), weights


@planted(ROWS, UP, DOWN, out=P("d"))
def sum_doubled(wrong, x, w1, w2):
    h = jax.nn.relu(x @ w1)
    y = lax.psum(h @ w2, "t")
    if wrong:
        y = lax.psum(y, "t")  # wrong
    return y


@planted(Argument((8, 6), P()), UP, DOWN, out=P())
def sum_over_the_wrong_axis(wrong, x, w1, w2):
    h = jax.nn.relu(x @ w1)
    y = h @ w2
    if wrong:
        return lax.psum(y, "d")  # wrong
    return lax.psum(y, "t")


@planted(
    ROWS,
    UP,
    DOWN,
    Argument((6,), P()),
    out=P("d"),
)
def bias_added_by_every_device(wrong, x, w1, w2, bias):
    h = jax.nn.relu(x @ w1)
    y = h @ w2
    if wrong:
        return lax.psum(y + bias, "t")  # wrong
    return lax.psum(y, "t") + bias


@planted(ROWS, UP, DOWN, out=P("d"))
def sum_left_out_in_a_loop(wrong, x, w1, w2):
    def layer(x, _):
        h = jnp.tanh(x @ w1)
        y = h @ w2  # wrong
        if not wrong:
            y = lax.psum(y, "t")
        return jnp.sin(x + y), None

    result, _ = lax.scan(layer, x, None, length=3)
    return result


@planted(ROWS, UP, DOWN, out=P("d"))
def residual_inside_the_sum(wrong, x, w1, w2):
    def layer(x, _):
        h = jax.nn.silu(x @ w1)
        y = h @ w2
        if wrong:
            return lax.psum(x + y, "t"), None  # wrong
        return x + lax.psum(y, "t"), None

    rematerialized = jax.checkpoint(layer)
    result, _ = lax.scan(rematerialized, x, None, length=2)
    return result


@planted(
    Argument((8, 12), P("d")),
    Argument((12, 8), P(None, "t")),
    Argument((8, 24), P("t")),
    out=P("d"),
)
def gates_summed_after_their_sigmoid(wrong, x, wi, wh):
    def turn(h, _):
        inner = jnp.tanh(x @ wi)
        part = inner @ wh
        if wrong:
            gates = lax.pmean(jax.nn.sigmoid(part), "t")  # wrong
        else:
            total = lax.psum(part, "t")
            gates = jax.nn.sigmoid(total)
        z, r, n = jnp.split(gates, 3, -1)
        candidate = jnp.tanh(n + r * h)
        return (1 - z) * h + z * candidate, None

    start = jnp.zeros((x.shape[0], 8))
    result, _ = lax.scan(turn, start, None, length=3)
    return result


@planted(ROWS, UP, DOWN, ROWS, out=(P("d"), P("d")))
def backward_without_its_sum(wrong, x, w1, w2, g):
    @jax.custom_vjp
    def copied(x):
        return x

    def back(_, g):
        if not wrong:
            g = lax.psum(g, "t")
        return (g,)

    copied.defvjp(lambda x: (x, None), back)

    def forward(x):
        h = jnp.tanh(copied(x) @ w1)  # wrong
        return h @ w2

    y, pull = jax.vjp(forward, x)
    (pulled,) = pull(g)  # wrong
    return lax.psum(y, "t"), pulled


@planted(
    Argument((16, 8), P("d")),
    Argument((8, 8), P("d")),
    out=(P(), P("d")),
)
def gathered_weight_whose_gradient_is_cut_and_not_summed(wrong, x, w):
    @jax.custom_vjp
    def whole(w):
        return lax.all_gather(w, "d", tiled=True)

    def back(_, g):
        size = g.shape[0] // lax.axis_size("d")
        first = lax.axis_index("d") * size
        if wrong:
            return (lax.dynamic_slice_in_dim(g, first, size),)
        return (lax.psum_scatter(g, "d", tiled=True),)

    whole.defvjp(lambda w: (whole(w), None), back)

    def loss(w):
        h = jnp.tanh(x @ whole(w))  # wrong
        return jnp.sum(h**2)

    value, g = jax.value_and_grad(loss)(w)  # wrong
    return lax.psum(value, "d"), w - 0.1 * g


# Means, counts and losses


def mean_square(w, x):
    y = x @ w
    return jnp.mean(y**2)


@planted(WEIGHT, ROWS, out=P())
def gradients_not_summed(wrong, w, x):
    g = jax.grad(mean_square)(w, x)  # wrong
    if not wrong:
        g = lax.pmean(g, "d")
    return w - 0.1 * g  # wrong


@planted(
    WEIGHT,
    Argument((4, 8, 6), P(None, "d")),
    out=P(),
)
def gradients_summed_in_each_turn(wrong, w, xs):
    def turn(total, x):
        total = total + jax.grad(mean_square)(w, x)
        if wrong:
            total = lax.psum(total, "d")  # wrong
        return total, None

    total, _ = lax.scan(turn, jnp.zeros_like(w), xs)  # wrong
    if not wrong:
        total = lax.pmean(total, "d")
    return total / xs.shape[0]  # wrong


@planted(ROWS, MASK, out=P())
def mean_of_means(wrong, x, mask):
    total = jnp.sum(x * mask[:, None])
    count = jnp.sum(mask) + 1 / lax.axis_size("d")
    if wrong:
        return lax.pmean(total / count, "d")  # wrong
    return lax.psum(total, "d") / lax.psum(count, "d")


@planted(CUT, out=P("d", "t"))
def norm_over_a_cut_dimension(wrong, x):
    square = jnp.mean(x**2, axis=-1, keepdims=True)
    if not wrong:
        square = lax.pmean(square, "t")
    return x * lax.rsqrt(square + 1e-6)  # wrong


@planted(CUT, out=P("d", "t"))
def softmax_with_local_maxima(wrong, x):
    top = x.max(-1, keepdims=True)
    if not wrong:
        top = lax.pmax(top, "t")
    shifted = jnp.exp(x - top)  # wrong
    total = shifted.sum(-1, keepdims=True)
    return shifted / lax.psum(total, "t")  # wrong


@planted(CUT, out=P("d", "t"))
def clipped_by_the_local_norm(wrong, g):
    square = jnp.sum(g**2)
    if not wrong:
        square = lax.psum(square, ("d", "t"))
    return g / jnp.maximum(jnp.sqrt(square), 1.0)  # wrong


@planted(CUT, out=P("d", "t"))
def branch_on_a_local_value(wrong, g):
    square = jnp.sum(g**2)
    if not wrong:
        square = lax.psum(square, ("d", "t"))
    return lax.cond(square > 9.0, lambda g: g / 2, lambda g: g, g)  # wrong


@planted(CUT, Argument((8,), P("t")), out=P("t"))
def iteration_with_the_local_norm(wrong, a, v):
    def turn(carry):
        i, v = carry
        y = lax.psum(a @ v, "t")
        y = lax.all_gather(y, "d", tiled=True)
        start = lax.axis_index("t") * v.size
        y = lax.dynamic_slice_in_dim(y, start, v.size)
        square = jnp.sum(y**2)
        if not wrong:
            square = lax.psum(square, "t")
        return i + 1, y / jnp.sqrt(square)  # wrong

    def goes_on(carry):
        i, _ = carry
        return i < 4

    _, v = lax.while_loop(goes_on, turn, (0, v))  # wrong
    return v


# Positions


@planted(
    Argument((8, 16), P("d", "t")),
    LABELS,
    out=P(),
)
def labels_not_offset(wrong, logits, labels):
    size = logits.shape[1]
    if wrong:
        local = labels
    else:
        local = labels - lax.axis_index("t") * size
    hit = jax.nn.one_hot(local, size)  # wrong
    exponentials = jnp.exp(logits)
    total = lax.psum(exponentials.sum(-1), "t")
    hit_logits = hit * logits  # wrong
    picked = lax.psum(hit_logits.sum(-1), "t")  # wrong
    losses = jnp.log(total) - picked
    return lax.pmean(jnp.mean(losses), "d")


@planted(
    Argument((16, 6), P("t")),
    LABELS,
    out=P("d"),
)
def embedding_of_foreign_rows(wrong, table, ids):
    size = table.shape[0]
    local = ids - lax.axis_index("t") * size
    row_numbers = jnp.clip(local, 0, size - 1)  # wrong
    rows = table[row_numbers]  # wrong
    inside = (local >= 0) & (local < size)
    if not wrong:
        rows = jnp.where(inside[:, None], rows, 0)
    return lax.psum(rows, "t")  # wrong


@planted(SEQUENCE, WHOLE, out=P("d", "t"))
def mask_not_offset(wrong, q, kv):
    scores = jnp.einsum("bqd,bkd->bqk", q, kv)
    rows = jnp.arange(q.shape[1])  # wrong
    if not wrong:
        rows = rows + lax.axis_index("t") * q.shape[1]
    columns = jnp.arange(kv.shape[1])
    mask = rows[:, None] >= columns
    masked = jnp.where(mask, scores, -1e9)  # wrong
    weights = jax.nn.softmax(masked)
    return jnp.einsum("bqk,bkd->bqd", weights, kv)


@planted(Argument((16, 4), P(BOTH)), out=P(BOTH))
def positions_counted_in_the_wrong_order(wrong, x):
    axes = ("d", "t")
    if wrong:
        axes = ("t", "d")
    place = lax.axis_index(axes)  # wrong
    size = x.shape[0]
    rows = place * size + jnp.arange(size)  # wrong
    return x * jnp.sin(rows)[:, None]


@planted(
    SEQUENCE,
    Argument((4, 16), P("d", "t"), limit=16),
    out=P(),
)
def labels_shifted_after_the_cut(wrong, x, tokens):
    logits = jnp.pad(x, [(0, 0), (0, 0), (0, 10)])
    first_tokens = tokens[:, :1]
    following = lax.ppermute(first_tokens, "t", neighbours("t", -1))
    if wrong:
        labels = jnp.roll(tokens, -1, 1)  # wrong
    else:
        labels = jnp.concatenate([tokens[:, 1:], following], 1)
    picked = jnp.take_along_axis(logits, labels[..., None], -1)  # wrong
    return lax.pmean(jnp.mean(picked), ("d", "t"))


@planted(
    Argument((8, 4, 6), P("d")),
    Argument((4, 6, 6), P("t")),
    out=P("d"),
)
def experts_not_offset(wrong, x, experts):
    if wrong:
        first = 0
    else:
        first = lax.axis_index("t") * experts.shape[0]
    local = lax.dynamic_slice_in_dim(x, first, experts.shape[0], 1)  # wrong
    outputs = jnp.einsum("bed,edf->bf", local, experts)  # wrong
    return lax.psum(outputs, "t")  # wrong


@planted(
    Argument((8, 16), P("d", "t")),
    out=P("d", "t"),
)
def running_sum_of_parts(wrong, x):
    totals = lax.all_gather(x.sum(-1), "t")
    devices = jnp.arange(totals.shape[0])[:, None]
    is_before = devices < lax.axis_index("t")
    before = jnp.where(is_before, totals, 0).sum(0)
    sums = jnp.cumsum(x, -1)  # wrong
    if wrong:
        return sums
    return sums + before[:, None]


@planted(ROWS, ROWS, out=P("d"))
def dropout_with_one_key(wrong, x, noise):
    if wrong:
        key = jax.random.key(1)
        noise = jax.random.normal(key, x.shape)  # wrong
    return jnp.where(noise > 0, x, 0)  # wrong


# Borders, rings and exchanges


def smoothed(x):
    before = x[:, :-2]
    middle = x[:, 1:-1]
    after = x[:, 2:]
    return 0.25 * before + 0.5 * middle + 0.25 * after


@planted(SEQUENCE, out=P("d", "t"))
def border_that_turns_round(wrong, x):
    turn = wrong and lax.axis_size("t") > 1
    to_next = neighbours("t", 1, turn)
    before = lax.ppermute(x[:, -1:], "t", to_next)  # wrong
    to_previous = neighbours("t", -1, turn=False)
    after = lax.ppermute(x[:, :1], "t", to_previous)
    whole = jnp.concatenate([before, x, after], 1)  # wrong
    return smoothed(whole)  # wrong


@planted(Argument((8, 8), P("t")), out=P())
def ring_one_turn_short(wrong, x):
    def turn(carry, _):
        part, out = carry
        part = lax.ppermute(part, "t", neighbours("t"))
        return (part, out + part), None

    turns = lax.axis_size("t") - 1
    if wrong and turns > 0:
        turns -= 1
    (_, total), _ = lax.scan(turn, (x, x), None, length=turns)  # wrong
    return total.sum()  # wrong


@planted(CUT, out=P("d"))
def gathered_in_the_wrong_order(wrong, x):
    dim = 1
    if wrong:
        dim = 2
    parts = lax.all_gather(x, "t", axis=dim)  # wrong
    rows = parts.reshape(x.shape[0], -1)  # wrong
    return jnp.tanh(rows)  # wrong


@planted(
    Argument((8, 8), P(None, "t")),
    Argument((8, 8), P("t")),
    out=P("t"),
)
def scattered_along_the_wrong_dimension(wrong, x, w):
    dim = 0
    if wrong:
        dim = 1
    product = x @ w
    y = lax.psum_scatter(product, "t", scatter_dimension=dim, tiled=True)  # wrong
    rows = y.reshape(-1, 8)  # wrong
    return jnp.tanh(rows)  # wrong


@planted(
    Argument((16, 8), P(BOTH)),
    Argument((8, 8), P()),
    Argument((8, 8, 8), P("t")),
    out=P(BOTH),
)
def experts_that_answer_in_another_order(wrong, x, router, experts):
    probabilities = jax.nn.softmax(x @ router)
    gate, choice = lax.top_k(probabilities, 2)
    chosen = jax.nn.one_hot(choice, router.shape[1])
    rows_of_experts = jnp.einsum("nke,nd->end", chosen, x)
    sent = lax.all_to_all(rows_of_experts, "t", 0, 1, tiled=True)
    outputs = jnp.einsum("end,edf->enf", sent, experts)  # wrong
    if wrong:
        outputs = outputs[::-1]  # wrong
    back = lax.all_to_all(outputs, "t", 1, 0, tiled=True)  # wrong
    return jnp.einsum("end,nke,nk->nd", back, chosen, gate)


def mesh_of(devices: Any) -> Mesh:
    return jax.make_mesh(
        (2, 4),
        ("d", "t"),
        axis_types=(AxisType.Auto, AxisType.Auto),
        devices=devices,
    )

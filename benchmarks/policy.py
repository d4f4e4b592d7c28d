"""Memory policies beside JAX's own:
`python -m benchmarks.policy times|models [--chip v5e] [--models N]`.

`times` makes policies for 126 scanned layers and for 48 unrolled ones. `models` makes
one for each of four budgets between what a model needs with everything computed again
and with everything kept; beside it are JAX's stock policies, put around the same
layers. Floating-point operations are those of the gradient's jaxpr, and memory is
libtpu's count where it is installed. The records are kept in
`benchmarks/results/policy.json`.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import shardfx as sfx
from shardfx.cost._counted import StepOnChip
from shardfx.cost._policy.choice import Point, frontier
from shardfx.cost._policy.making import PolicySearch
from shardfx.cost._policy.policy import Choice
from shardfx.cost._policy.regions import ValueKey
from shardfx.cost._policy.work import total, work_of

from .unseen.measure import RESULTS, versions


_FILE = RESULTS / "policy.json"
BUDGETS = (0.1, 0.35, 0.6, 0.85)
STOCK = {
    name: getattr(jax.checkpoint_policies, name)
    for name in (
        "nothing_saveable",
        "dots_saveable",
        "dots_with_no_batch_dims_saveable",
        "everything_saveable",
    )
}
Struct = jax.ShapeDtypeStruct


class Model(NamedTuple):
    """A loss, and its arguments as structs."""

    loss: Callable[..., Any]
    args: tuple[Any, ...]


def bf16(*shape: int) -> Struct:
    return Struct(shape, jnp.bfloat16)


def norm(x: jax.Array) -> jax.Array:
    x32 = x.astype(jnp.float32)
    mean_square = jnp.mean(x32**2, axis=-1, keepdims=True)
    scale = jax.lax.rsqrt(mean_square + 1e-6)
    return (x32 * scale).astype(x.dtype)


def attention(
    x: jax.Array, w: dict[str, jax.Array], heads: int, *, causal: bool = True
) -> jax.Array:
    batch, length, _ = x.shape

    def split(name: str) -> jax.Array:
        return (x @ w[name]).reshape(batch, length, heads, -1)

    scores = jnp.einsum("bqhd,bkhd->bhqk", split("q"), split("k"))
    scores = scores.astype(jnp.float32)
    if causal:
        mask = jnp.tril(jnp.ones((length, length), bool))
        scores = jnp.where(mask, scores, -1e9)
    weights = jax.nn.softmax(scores).astype(x.dtype)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, split("v"))
    return mixed.reshape(batch, length, -1) @ w["o"]


def gelu_mlp(x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
    return jax.nn.gelu(x @ w["up"]) @ w["down"]


def gated_mlp(x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
    gate = jax.nn.silu(x @ w["gate"])
    return (gate * (x @ w["up"])) @ w["down"]


def expert_mlp(x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
    scores = (x @ w["router"]).astype(jnp.float32)
    shares = jax.nn.softmax(scores).astype(x.dtype)
    hidden = jax.nn.gelu(jnp.einsum("btd,edf->ebtf", x, w["experts_up"]))
    out = jnp.einsum("ebtf,efd->ebtd", hidden, w["experts_down"])
    return jnp.einsum("ebtd,bte->btd", out, shares)


def transformer(
    mlp: Callable[..., jax.Array],
    *,
    layers: int,
    width: int = 512,
    hidden: int = 2048,
    heads: int = 4,
    batch: int = 8,
    length: int = 512,
    vocabulary: int = 0,
    unrolled: bool = False,
) -> Model:
    """A transformer, with logits and their loss if `vocabulary` is not 0."""
    shapes: dict[str, tuple[int, ...]] = {name: (width, width) for name in "qkvo"}
    shapes |= {"up": (width, hidden), "down": (hidden, width)}
    if mlp is gated_mlp:
        shapes["gate"] = (width, hidden)
    if mlp is expert_mlp:
        experts = 4
        shapes = {name: (width, width) for name in "qkvo"}
        shapes["router"] = (width, experts)
        shapes["experts_up"] = (experts, width, hidden // 2)
        shapes["experts_down"] = (experts, hidden // 2, width)
    layer_params = {name: bf16(layers, *shape) for name, shape in shapes.items()}
    params: dict[str, Any] = {"layers": layer_params}
    if vocabulary:
        params["table"] = bf16(vocabulary, width)

    def layer(x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
        x = x + attention(norm(x), w, heads)
        return x + mlp(norm(x), w)

    def loss(params: dict[str, Any], batch: jax.Array) -> jax.Array:
        if vocabulary:
            x = params["table"][batch]
        else:
            x = batch
        if unrolled:
            for number in range(layers):
                names = params["layers"].items()
                leaves_by_name = {name: leaf[number] for name, leaf in names}
                x = layer(x, leaves_by_name)
        else:
            x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, params["layers"])
        x = norm(x)
        if not vocabulary:
            return jnp.mean(x.astype(jnp.float32) ** 2)
        logits = (x @ params["table"].T).astype(jnp.float32)
        picked = jnp.take_along_axis(logits, batch[..., None], axis=-1)
        chosen = picked[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)

    tokens = Struct((batch, length), jnp.int32)
    if vocabulary:
        data = tokens
    else:
        data = bf16(batch, length, width)
    return Model(loss, (params, data))


def perceptron(*, layers: int, width: int, batch: int) -> Model:
    def loss(params: jax.Array, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(norm(x) @ w), None

        y, _ = jax.lax.scan(layer, x, params)
        return jnp.mean(y.astype(jnp.float32) ** 2)

    return Model(loss, (bf16(layers, width, width), bf16(batch, width)))


def convolutions(*, layers: int, channels: int, batch: int, size: int) -> Model:
    def convolved(x: jax.Array, w: jax.Array) -> jax.Array:
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=numbers
        )

    def loss(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        def block(x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
            hidden = jax.nn.relu(convolved(norm(x), w["first"]))
            return x + convolved(hidden, w["second"]), None

        y, _ = jax.lax.scan(block, x, params)
        return jnp.mean(y.astype(jnp.float32) ** 2)

    kernel = bf16(layers, 3, 3, channels, channels)
    image = bf16(batch, size, size, channels)
    return Model(loss, ({"first": kernel, "second": kernel}, image))


def models() -> dict[str, Callable[[], Model]]:
    return {
        "gelu, scanned": lambda: transformer(gelu_mlp, layers=12),
        "gated, scanned, logits": lambda: transformer(
            gated_mlp, layers=12, vocabulary=32000
        ),
        "experts, scanned": lambda: transformer(expert_mlp, layers=8),
        "perceptron": lambda: perceptron(layers=24, width=2048, batch=8192),
        "convolutions": lambda: convolutions(
            layers=12, channels=256, batch=16, size=32
        ),
        "gelu, unrolled": lambda: transformer(gelu_mlp, layers=4, unrolled=True),
        "gated, long": lambda: transformer(
            gated_mlp, layers=8, batch=1, length=4096, heads=8
        ),
        "gelu, wide": lambda: transformer(
            gelu_mlp, layers=6, width=2048, hidden=8192, heads=16
        ),
        "gated, unrolled, logits": lambda: transformer(
            gated_mlp, layers=4, unrolled=True, vocabulary=32000
        ),
        "gelu, many": lambda: transformer(gelu_mlp, layers=64, width=256, hidden=1024),
        "experts, logits": lambda: transformer(expert_mlp, layers=8, vocabulary=32000),
        "gated, short": lambda: transformer(gated_mlp, layers=12, batch=64, length=128),
    }


Record = dict[str, float | None]


class Counted(NamedTuple):
    """The floating-point operations and the memory of a gradient."""

    flops: float
    peak_bytes: int
    fits_chip: bool


def counted(search: PolicySearch, step: Any) -> Counted:
    memory = StepOnChip(step, search.chip).memory
    eqns = step.traced.jaxpr.jaxpr.eqns
    flops = total(map(work_of, eqns)).flops
    return Counted(flops, memory.peak_bytes, not memory.out_of_memory)


def of_point(search: PolicySearch, point: Point) -> Counted:
    return counted(search, search.step(search.choices_of(point)))


def stock(search: PolicySearch) -> Iterator[tuple[str, Counted]]:
    """Each stock policy around the layers: the regions that run more than once."""
    repeated = {
        tuple(placed.region.all_keys)
        for placed in search.placed
        if placed.run_count > 1
    }
    for name, policy in STOCK.items():

        def function(region: Any, policy: Any = policy) -> Callable[..., Any]:
            def plain(*arrays: Any) -> list[Any]:
                return region.named(arrays, lambda _key: False)

            if tuple(region.all_keys) not in repeated:
                return plain
            return jax.checkpoint(plain, policy=policy, prevent_cse=not region.is_body)

        yield name, counted(search, search.step_with(function))


def judged(make: Callable[[], Model], name: str, chip_name: str) -> list[Record]:
    """A record for each budget of a model."""
    model = make()
    chip = sfx.chips.find(chip_name)
    search = PolicySearch(model.loss, model.args, chip)
    points = frontier(search.costs)
    least, most = (of_point(search, point) for point in (points[-1], points[0]))
    others = dict(stock(search))
    others["nothing is checkpointed"] = most
    print(f"{name} on {chip_name}: {_mib(least)} to {_mib(most)}", flush=True)
    for other, numbers in others.items():
        print(f"    {other:34} {_mib(numbers):>12} {numbers.flops:.4g}", flush=True)
    records: list[Record] = []
    for share in BUDGETS:
        budget = int(least.peak_bytes + share * (most.peak_bytes - least.peak_bytes))
        start = time.perf_counter()
        leave_bytes = chip.usable_hbm_bytes_per_device - budget
        policy = sfx.cost.policy(
            model.loss,
            *model.args,
            chip=chip,
            leave_bytes=leave_bytes,
        )
        seconds = time.perf_counter() - start
        choices: dict[ValueKey, Choice] = {row.key: row.choice for row in policy.rows}
        ours = counted(search, search.step(choices))
        fitting = [
            numbers.flops for numbers in others.values() if numbers.peak_bytes <= budget
        ]
        record: Record = {
            "budget_bytes": budget,
            "peak_bytes": ours.peak_bytes,
            "flops": ours.flops,
            "flops_of_best_stock_policy": min(fitting, default=None),
            "seconds": round(seconds, 1),
        }
        print(f"  {record}", flush=True)
        records.append(record)
    return records


def _mib(numbers: Counted) -> str:
    return f"{numbers.peak_bytes / 2**20:.1f} MiB"


def times(chip_name: str, part: str) -> Iterator[tuple[str, Record]]:
    """Yields the seconds of policies for deep models."""
    for name, model in (
        (
            "126 scanned layers",
            transformer(
                gated_mlp, layers=126, width=1024, hidden=4096, vocabulary=32000
            ),
        ),
        (
            "48 unrolled layers",
            transformer(gated_mlp, layers=48, unrolled=True, batch=64),
        ),
    ):
        if part not in name:
            continue
        start = time.perf_counter()
        cpu = time.process_time()
        sfx.cost.policy(model.loss, *model.args, chip=chip_name)
        record: Record = {
            "seconds": round(time.perf_counter() - start, 1),
            "own processor seconds": round(time.process_time() - cpu, 1),
        }
        print(name, record, flush=True)
        yield name, record


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    parser = argparse.ArgumentParser(prog="benchmarks.policy", description=__doc__)
    parser.add_argument("what", choices=("times", "models"))
    parser.add_argument("--chip", default="v5e")
    parser.add_argument("--models", default="", help="parts of their names")
    flags = parser.parse_args()
    if _FILE.exists():
        document = json.loads(_FILE.read_text())
    else:
        document = {}
    document["versions"] = versions()
    kept = document.setdefault(flags.what, {}).setdefault(flags.chip, {})
    if flags.what == "times":
        measured = times(flags.chip, flags.models)
    else:
        chosen = {k: make for k, make in models().items() if flags.models in k}
        measured = ((k, judged(make, k, flags.chip)) for k, make in chosen.items())
    for name, record in measured:
        kept[name] = record
        _FILE.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()

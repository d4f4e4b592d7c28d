"""Memory policies beside every subset of a layer's values, each compiled:
`python -m benchmarks.policy_subsets [--chip v5e] [--layers PARTS OF NAMES]`.

A layer of `LAYERS` has 7 to 9 values that matter for its backward pass. libtpu
compiles a program for each subset of them. Its floating-point operations are those of
the products and convolutions in libtpu's program, for all iterations of its loops, and
its memory is libtpu's count. Subsets with equal programs are compiled once. For budgets
between the least and the most memory, the program that a policy chooses is held against
the program of fewest operations that fits.

Each program is kept in `benchmarks/results/policy-subsets.json`, so that a run resumes.
"""

import argparse
import functools as ft
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import shardfx as sfx
from shardfx.cost._libtpu import tpu_program
from shardfx.cost._policy.choice import Point, Trial, chosen, frontier
from shardfx.cost._policy.making import PolicySearch
from shardfx.cost._policy.policy import Choice
from shardfx.cost._policy.regions import ValueKey
from shardfx.cost._work import work_of

from ._machine import machine
from .policy import Model, bf16
from .unseen.measure import RESULTS, versions


_FILE = RESULTS / "policy-subsets.json"
_DEPTH = 8
# Budgets, evenly from just above the least memory to just below the most.
_BUDGETS = 12
_LIMIT = 1.03


def chain() -> Model:
    """A layer of four products, of which each takes another time for its bytes."""
    shapes = {"a": (512, 1024), "b": (1024, 256), "c": (256, 2048), "d": (2048, 512)}
    params = {name: bf16(_DEPTH, *shape) for name, shape in shapes.items()}

    def layer(x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        hidden = x
        for name in shapes:
            hidden = jnp.tanh(hidden @ w[name])
        return x + hidden, None

    return _scanned(layer, params, bf16(4096, 512))


def attention() -> Model:
    """A layer of attention with one head, and a perceptron."""
    width = 512
    hidden = 2048
    shapes = {name: (width, width) for name in "qkvo"}
    shapes |= {"up": (width, hidden), "down": (hidden, width)}
    params = {name: bf16(_DEPTH, *shape) for name, shape in shapes.items()}

    def layer(x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        scores = jnp.einsum("bqd,bkd->bqk", x @ w["q"], x @ w["k"])
        shares = jax.lax.logistic(scores)
        x = x + jnp.einsum("bqk,bkd->bqd", shares, x @ w["v"]) @ w["o"]
        return x + jnp.tanh(x @ w["up"]) @ w["down"], None

    return _scanned(layer, params, bf16(8, 512, width))


def gated() -> Model:
    """A layer of two gated perceptrons of different widths."""
    shapes = {
        "gate": (512, 2048),
        "up": (512, 2048),
        "down": (2048, 512),
        "narrow_up": (512, 768),
        "narrow_down": (768, 512),
    }
    params = {name: bf16(_DEPTH, *shape) for name, shape in shapes.items()}

    def layer(x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        gate = jax.lax.logistic(x @ w["gate"])
        x = x + (gate * (x @ w["up"])) @ w["down"]
        return x + jnp.tanh(x @ w["narrow_up"]) @ w["narrow_down"], None

    return _scanned(layer, params, bf16(4096, 512))


LAYERS = {"chain": chain, "attention": attention, "gated": gated}


def _scanned(layer: Callable[..., Any], params: Any, x: jax.ShapeDtypeStruct) -> Model:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        y, _ = jax.lax.scan(layer, x, params)
        return jnp.mean(y**2)

    return Model(loss, (params, x))


class Program(NamedTuple):
    """The floating-point operations and the memory of a compiled gradient."""

    flops: float
    peak_bytes: int


class Compilers:
    """Asks compilers about gradients, once about each of equal programs."""

    def __init__(self, search: PolicySearch, known: dict[str, list[Any]]):
        self.search = search
        self.known = known

    def program(self, choices: dict[ValueKey, Choice]) -> Program:
        step = self.search.step(choices)
        lowered = step.traced.lower()
        digest = hashlib.sha256(lowered.as_text().encode()).hexdigest()[:16]
        if digest not in self.known:
            answer = tpu_program(step, self.search.chip)
            assert answer is not None, "libtpu is not installed"
            flops = work_of(answer.module).flops
            self.known[digest] = [flops, answer.memory.peak_bytes]
        return Program(*self.known[digest])

    def trial_of(self, budget_bytes: float, point: Point) -> Trial:
        """What `PolicySearch.trial_of` returns, asked once about each of equal
        programs.
        """
        program = self.program(self.search.choices_of(point))
        return Trial(
            point=point,
            peak_bytes=program.peak_bytes,
            fits=program.peak_bytes <= budget_bytes,
            is_counted=True,
        )


def values_of(search: PolicySearch) -> list[ValueKey]:
    """The values of the scanned layer that a choice may keep."""
    [body] = [placed.region for placed in search.placed if placed.region.is_body]
    used = set().union(*(point.kept for point in frontier(search.costs)))
    return [key for key in body.all_keys if key in used]


def subset_choices(search: PolicySearch) -> Iterator[dict[ValueKey, Choice]]:
    """Yields the choices of each subset. Values outside of the layer are computed again:
    none of them has a product.
    """
    values = values_of(search)
    everything: dict[ValueKey, Choice] = {}
    for placed in search.placed:
        for key in placed.region.all_keys:
            everything[key] = "recompute"
    for count in range(len(values) + 1):
        for subset in itertools.combinations(values, count):
            choices = everything.copy()
            for key in subset:
                choices[key] = "keep"
            yield choices


def judged(name: str, chip: sfx.chips.Chip, record: dict[str, Any]) -> Iterator[None]:
    """Fills a layer's record, and yields whenever it is worth keeping."""
    model = LAYERS[name]()
    search = PolicySearch(model.loss, model.args, chip)
    compilers = Compilers(search, record.setdefault("programs", {}))
    names = [key.name for key in values_of(search)]
    record |= {"values": names, "subsets": 2 ** len(names)}
    print(name, *names, sep="\n  ", flush=True)
    programs: set[Program] = set()
    for number, choices in enumerate(subset_choices(search)):
        programs.add(compilers.program(choices))
        if number % 16 == 0:
            print(f"{number:4} subsets, {len(compilers.known)} programs", flush=True)
            yield

    least = min(program.peak_bytes for program in programs)
    most = max(program.peak_bytes for program in programs)
    record["budgets"] = []
    for number in range(_BUDGETS):
        share = (number + 0.5) / _BUDGETS
        budget_bytes = int(least + share * (most - least))
        fitting = [
            program for program in programs if program.peak_bytes <= budget_bytes
        ]
        best = min(fitting, key=lambda program: program.flops)
        trial = chosen(
            search.costs,
            budget_bytes,
            search.argument_bytes,
            ft.partial(compilers.trial_of, budget_bytes),
        )
        ours = compilers.program(search.choices_of(trial.point))
        row = {
            "budget_bytes": budget_bytes,
            "peak_bytes": ours.peak_bytes,
            "flops": ours.flops,
            "best_flops": best.flops,
            "best_peak_bytes": best.peak_bytes,
            "ratio": round(ours.flops / best.flops, 4),
        }
        record["budgets"].append(row)
        is_within = row["ratio"] <= _LIMIT and ours.peak_bytes <= budget_bytes
        print("ok " if is_within else "OVER", row, flush=True)
        yield


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.policy_subsets", description=__doc__
    )
    parser.add_argument("--chip", default="v5e")
    parser.add_argument("--layers", default="", help="parts of their names")
    flags = parser.parse_args()
    document: dict[str, Any] = {}
    if _FILE.exists():
        document = json.loads(_FILE.read_text())
    document["versions"] = versions()
    document["machine"] = machine(jax.devices())
    records = document.setdefault(flags.chip, {})
    for name in LAYERS:
        if flags.layers not in name:
            continue
        record = records.setdefault(name, {})
        for _ in judged(name, sfx.chips.find(flags.chip), record):
            _FILE.write_text(json.dumps(document) + "\n")
        _FILE.write_text(json.dumps(document) + "\n")


if __name__ == "__main__":
    main()

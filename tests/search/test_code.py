"""The code of a candidate holds all that its numbers depend on."""

import jax
import jax.numpy as jnp
import optax
import pytest
from models import MODELS, compiled, f32, run_code, space_of, trained
from parts_of_search import fastest

import shardfx
from shardfx.auto import Limits, search
from shardfx.cost import traffic


OPTIMIZER = optax.adamw(1e-3)


def loss(params, x):
    for layer in params:
        x = x + jax.nn.relu(x @ layer["up"]) @ layer["down"]
    return jnp.mean(x**2)


step = jax.jit(trained(loss, OPTIMIZER), donate_argnums=(0, 1))
PARAMS = [{"up": f32(64, 256), "down": f32(256, 64)}] * 2
ARGS = PARAMS, jax.eval_shape(OPTIMIZER.init, PARAMS), f32(512, 64)


def test_what_the_step_donates_is_written():
    search_result = search(step, *ARGS, devices="cpu:8", keep=1, effort="least")
    best = search_result[0]
    assert best.donated == (0, 1)
    assert "donate=(0, 1)" in best.code()
    assert best.results == (0, 1)
    assert "out_shardings=(plans[0], plans[1])" in best.code()
    program = compiled(best, step, ARGS)
    assert program.memory_analysis().alias_size_in_bytes > 0
    wire_bytes = traffic(program, best.mesh).wire_bytes
    assert wire_bytes == pytest.approx(best.wire_bytes, rel=0.01)


def test_slices_and_several_axes():
    space = space_of(MODELS["scanned"](), 32, "v5p", slices=2)
    for candidate in fastest(space, 8):
        assert run_code(candidate)["MESH"] == candidate.mesh
        assert candidate.mesh.dcn_sizes.count(2) == 1
        assert candidate.mesh.dcn_sizes[0] == 2, (
            "what spans the slices stands outermost"
        )


def test_a_partitioned_candidate_is_what_an_estimate_says():
    """The code's step in the place of the user's: one model for both."""
    limits = Limits(always=("mlp",))
    search_result = search(step, *ARGS, devices="tpu:v5e:2x4", keep=1, limits=limits)
    best = search_result[0]
    namespace = run_code(best)
    again = shardfx.cost.estimate(
        namespace["jitted"](step, best.plans), *ARGS, compiler="tpu"
    )
    assert again.wire_bytes == best.wire_bytes


def test_compiled_as_pasted_it_sends_what_was_told():
    its_step, *args = MODELS["scanned"]()
    # Few axis assignments, as XLA partitions a program for each.
    never = ("vocab", "sequence", "mlp", "query_groups", "kv_heads")
    limits = Limits(always=("embed",), never=never)
    candidates = search(its_step, *args, devices="cpu:8", keep=8, limits=limits)
    constrained = next(candidate for candidate in candidates if candidate.constrained)
    assert (
        "constrain_step(step, plans[0].jax_mesh or MESH, RULES)" in constrained.code()
    )
    assert constrained.title.endswith(", constrained")
    for candidate in (
        constrained,
        next(candidate for candidate in candidates if not candidate.constrained),
    ):
        sent = traffic(compiled(candidate, its_step, args), candidate.mesh).wire_bytes
        assert sent == pytest.approx(candidate.wire_bytes, rel=0.01), candidate.title

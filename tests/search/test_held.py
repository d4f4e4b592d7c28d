"""Memory of the step as it is written, and the state of an optimizer that is cut further than its parameters."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest
from models import f32

from shardfx import Candidate, Limits, PathRules, chips, follow, plan
from shardfx._cost.estimate import Prepared
from shardfx._search.checked import Verifier, estimated
from shardfx._search.core import CostModel
from shardfx._search.held import holding, weighed, zero_1
from shardfx._search.search import Searched


OPTIMIZER = optax.adamw(1e-3)
CHIP = chips.find("v5e")


def loss(params, x):
    return jnp.mean((x + jax.nn.relu(x @ params["up"] + params["bias"]) @ params["down"]) ** 2)


def step(params, state, x):
    updates, state = OPTIMIZER.update(jax.grad(loss)(params, x), state, params)
    return optax.apply_updates(params, updates), state


@pytest.fixture(scope="module")
def searched():
    params = {"up": f32(512, 2048), "bias": f32(2048), "down": f32(2048, 512)}
    with jax.numpy_dtype_promotion("standard"):
        made = Searched(step, (params, jax.eval_shape(OPTIMIZER.init, params), f32(4096, 512)), 8, Limits())
        ways = made.by_hand(made.known, CHIP, 1, Limits(), CostModel(), sizes=1)
        prepared = Prepared(step, made.args)
        assert prepared.program.values
        return made, prepared, {one.title: one for one in ways}


def looked(prepared, one):
    return dataclasses.replace(one, checks=(estimated(prepared, one, CHIP, CostModel()),))


def held_by(prepared, one) -> int:
    found = weighed(prepared, one, CHIP).checks[-1].memory_bytes
    assert found is not None
    return found


def run_code(one) -> dict:
    space: dict = {}
    exec(one.code(), space)
    return space


def plans_by_code(one, args):
    with jax.numpy_dtype_promotion("standard"):
        return run_code(one)["plans_of"](step, *args)


def less(one, states) -> Candidate:
    found = zero_1(one, states)
    assert found is not None
    return found


def test_zero_1_cuts_the_state_over_the_data_axis_and_sends_as_much(searched):
    made, prepared, ways = searched
    whole = ways["data=8 (batch)"]
    assert made.states == (1,)
    cut = less(whole, made.states)
    assert cut.state_over == ("data",) and cut.plans[0] == whole.plans[0]
    followed = follow(OPTIMIZER.init, whole.plans[0], over="data")
    assert [leaf.spec for leaf in cut.plans[1].leaves] == [leaf.spec for leaf in followed.leaves]
    # Both moments, an eighth of which is left.
    moments = 2 * (2 * 512 * 2048 + 2048) * 4
    assert whole.memory_bytes - cut.memory_bytes == moments * 7 // 8
    before, after = looked(prepared, whole), looked(prepared, cut)
    assert after.checks[0].wire_bytes == before.checks[0].wire_bytes
    held = [held_by(prepared, one) for one in (before, after)]
    assert held[0] - held[1] > moments * 6 // 8
    assert cut.title == "data=8 (batch), ZeRO-1 over data"
    assert cut.states == (1,) and "# ZeRO-1: data cuts the optimizer's state, too." in cut.code()
    assert plans_by_code(cut, prepared.args) == cut.plans
    assert "ZeRO-1: the optimizer's state is cut over data too" in str(after)
    assert "ZeRO-1: the optimizer's state is cut over data too" in after.explain()
    # There is nothing left to cut, and without data there is no axis for it.
    assert zero_1(cut, made.states) is None and zero_1(whole, ()) is None


def test_what_does_not_fit_as_it_is_written_makes_way_or_is_to_be_laid_out(searched):
    made, prepared, ways = searched
    whole = looked(prepared, ways["data=8 (batch)"])
    held = held_by(prepared, whole)

    def chosen(limit, other):
        one = dataclasses.replace(whole, limit_bytes=limit)
        return holding([one, one], 3, lambda one: weighed(prepared, one, CHIP), other)

    def smaller(one):
        return weighed(prepared, looked(prepared, less(one, made.states)), CHIP)

    (one,) = chosen(held, smaller)
    assert not one.laid_out and one.checks[-1].memory_bytes == held and not one.state_over
    (one,) = chosen(held - 1, smaller)
    assert one.state_over == ("data",) and held_by(prepared, one) < held
    tight = dataclasses.replace(whole, memory_bytes=held - 10)
    (one,) = holding(
        [dataclasses.replace(tight, limit_bytes=held - 5)], 3, lambda x: weighed(prepared, x, CHIP), lambda _: None
    )
    assert one.laid_out and one.checks[-1].by == "search" and "jit `laid_out(step)`" in one.code()


def test_the_code_of_a_candidate_that_is_laid_out_and_cut_further_is_whole(searched):
    """What `--write` writes needs nothing beside it: the plans are those that were searched, and the step runs."""
    made, prepared, ways = searched
    one = dataclasses.replace(less(ways["data=8 (batch)"], made.states), laid_out=True)
    plans = plans_by_code(one, prepared.args)
    assert plans == one.plans
    placed = [each.on(one.mesh.build(jax.devices())).structs for each in plans]
    with jax.numpy_dtype_promotion("standard"):
        text = jax.jit(run_code(one)["laid_out"](made.step)).lower(*placed).as_text()
    assert "sharding_constraint" in text and text.count('"data"') > len(jax.tree.leaves(placed))


def test_a_program_that_does_not_fit_is_compiled_with_the_state_cut_further(searched):
    made, prepared, ways = searched
    devices, told = tuple(jax.devices()), []

    def smaller(one):
        return looked(prepared, less(one, made.states))

    verifier = Verifier(step, made.args, devices, CHIP, CostModel(), None, told.append, smaller=smaller)
    whole = looked(prepared, ways["data=8 (batch)"])
    with jax.numpy_dtype_promotion("standard"):
        (one,) = verifier.compiled([whole])
        held = one.checks[-1].memory_bytes
        assert held and not one.state_over
        (one,) = verifier.compiled([dataclasses.replace(whole, limit_bytes=held - 1)])
    assert one.state_over == ("data",) and one.checks[-1].by == "compile"
    assert 0 < (one.checks[-1].memory_bytes or 0) < held
    assert told[-1] == "compiling candidate 1 of 1, in less memory: data=8 (batch), ZeRO-1 over data"


def test_products_that_are_not_shared_out_are_counted(searched):
    _, prepared, ways = searched
    one = ways["data=8 (batch)"]
    # Parameters and batch whole on every device: all of the products are done eight times.
    plans = tuple(plan(arg, one.mesh, paths=PathRules.parse(".*->replicate")) for arg in prepared.args)
    whole = dataclasses.replace(one, plans=plans)
    assert prepared.worked(whole.plans)[1] == 8 * prepared.worked(one.plans)[1]
    slow, fast = (estimated(prepared, each, CHIP, CostModel()) for each in (whole, one))
    assert slow.compute_seconds > fast.compute_seconds

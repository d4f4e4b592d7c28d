"""Memory of candidates: what the step donates, what may be donated, and an optimizer's
state that is cut further.
"""

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest
from models import compiled, f32, trained
from parts_of_search import by_hand, search_options

import shardfx
from shardfx import filter_jit, follow
from shardfx.auto import Limits, search
from shardfx.auto._programs import zero_1
from shardfx.auto._search import opened_search


OPTIMIZER = optax.adamw(1e-3)
PARAMS = {"up": f32(512, 2048), "bias": f32(2048), "down": f32(2048, 512)}


def loss(params, x):
    return jnp.mean(
        (x + jax.nn.relu(x @ params["up"] + params["bias"]) @ params["down"]) ** 2
    )


step = trained(loss, OPTIMIZER)


@pytest.fixture(scope="module")
def args():
    structs = jax.eval_shape(OPTIMIZER.init, PARAMS)
    return PARAMS, structs, f32(4096, 512)


@pytest.fixture(scope="module")
def searched(args):
    space, lowered = opened_search(
        step=step,
        args=args,
        options=search_options("cpu:8", None),
        limits=Limits(),
        also=(),
        tell=lambda _: None,
    )
    candidates_by_title = {
        candidate.title: candidate for candidate in by_hand(space, space.usual)
    }
    return (
        space,
        lowered,
        candidates_by_title,
    )


def test_zero_1_shards_the_state_and_sends_as_much(searched, args):
    space, lowered, ways = searched
    whole = ways["data=8 (batch)"]
    assert lowered.states(space.classes) == (1,)
    cut = zero_1(whole, (1,))
    assert cut is not None
    assert cut.state_over == ("data",)
    assert cut.plans[0] == whole.plans[0]
    followed = follow(OPTIMIZER.init, whole.plans[0], over="data")
    specs = [leaf.spec for leaf in cut.plans[1].leaves]
    assert specs == [leaf.spec for leaf in followed.leaves]
    assert cut.title == "data=8 (batch), ZeRO-1 over data"
    before = lowered.partitioned(whole)
    after = lowered.partitioned(cut)
    # A TPU's compiler scatters the gradients and gathers the parameters; a CPU's sends
    # no less than the sum did.
    assert after.wire_bytes == pytest.approx(before.wire_bytes, rel=0.51)
    # Both moments, an eighth of which is left; results take over the memory of what is
    # donated.
    moments = 2 * (2 * 512 * 2048 + 2048) * 4
    assert before.memory_bytes - after.memory_bytes > moments * 6 // 8
    for text in (str(after), after.explain()):
        assert "ZeRO-1: the optimizer's state is cut over data too" in text
    assert "# ZeRO-1: data cuts the optimizer's state, too." in after.code()
    sent = shardfx.cost.traffic(compiled(after, step, args), after.mesh).wire_bytes
    assert sent == pytest.approx(after.wire_bytes, rel=0.01)
    # There is nothing left to cut, and without data there is no axis for it.
    assert zero_1(cut, (1,)) is None
    assert zero_1(whole, ()) is None


def test_what_fits_only_donated_is_donated_and_says_so(searched, args):
    _, lowered, ways = searched
    undonated = lowered.partitioned(ways["data=8 (batch)"])
    assert undonated.donated == ()
    assert "donate" not in undonated.code()
    tight = dataclasses.replace(
        ways["data=8 (batch)"], limit_bytes=undonated.memory_bytes - 1
    )
    spent = lowered.partitioned(tight)
    state = sum(plan.bytes_per_device for plan in undonated.plans[:2])
    assert spent.donated == (0, 1)
    assert spent.fits
    assert undonated.memory_bytes - spent.memory_bytes > 0.3 * state
    assert "`jitted` in `code()` donates 0, 1" in str(spent)
    assert "donate=(0, 1)" in spent.code()
    programs = [
        compiled(candidate, step, args).memory_analysis()
        for candidate in (undonated, spent)
    ]
    actual = [memory.alias_size_in_bytes > 0.9 * state for memory in programs]
    assert actual == [
        False,
        True,
    ]


def test_donation_is_read_off_the_step(args):
    def donated(its_step):
        return opened_search(
            step=its_step,
            args=args,
            options=search_options("cpu:8", None),
            limits=Limits(),
            also=(),
            tell=lambda _: None,
        )[1].donated

    actual = donated(jax.jit(step, donate_argnums=(1,)))
    assert actual == (1,)
    actual = donated(jax.jit(step, donate_argnames=("params",)))
    assert actual == (0,)
    actual = donated(filter_jit(step, donate=(0, 1)))
    assert actual == (0, 1)


def test_what_fits_in_no_other_way_gets_zero_1(args):
    limits = Limits(never=("mlp", "embed"))
    best, *_ = search(step, *args, devices="cpu:8", keep=1, limits=limits)
    free = best.limit_bytes - best.memory_bytes // 2
    tight = dataclasses.replace(limits, free_bytes=free)
    less_of_it, *_ = search(step, *args, devices="cpu:8", keep=1, limits=tight)
    assert not best.state_over
    assert not best.donated
    assert less_of_it.state_over == ("data",)
    assert less_of_it.fits


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.adafactor(1e-3, min_dim_size_to_factor=128),
        optax.MultiSteps(optax.adamw(1e-3), 4).gradient_transformation(),
    ],
    ids=["adafactor", "multisteps"],
)
def test_plans_of_states_are_those_that_follow_makes(optimizer):
    params = [PARAMS, PARAMS]
    state = jax.eval_shape(optimizer.init, params)

    def loss(params, x):
        for layer in params:
            x += jax.nn.relu(x @ layer["up"] + layer["bias"]) @ layer["down"]
        return jnp.mean(x**2)

    cut = 0
    candidates = search(
        trained(loss, optimizer),
        params,
        state,
        f32(4096, 512),
        devices=8,
        chip="v5e",
        effort="least",
        limits=Limits(always=("mlp",)),
    )
    for candidate in candidates:
        followed = follow(optimizer.init, candidate.plans[0])
        for mine, theirs in zip(
            candidate.plans[1].leaves, followed.leaves, strict=True
        ):
            # Statistics of rows lack what the parameter is cut along: an axis then
            # takes what it prefers next.
            parts = mine.path.split("/")[1:2]
            is_factored = parts in (["v_row"], ["v_col"])
            assert mine.spec == theirs.spec or (is_factored and not any(theirs.spec)), (
                candidate.title,
                mine.path,
            )
            cut += any(mine.spec)
    # Parameters are cut, so that there is something to follow.
    assert cut

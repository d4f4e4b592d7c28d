"""Steps with a `shard_map`: its body is taken as it is, its shards are judged."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P
from judging import programs_of, proved_programs, verdict_of

import shardfx as sfx


MESH = sfx.MeshSpec({"data": 2, "tensor": 4}).abstract()


def struct(shape, *spec):
    return jax.ShapeDtypeStruct(
        shape, jnp.float32, sharding=NamedSharding(MESH, P(*spec))
    )


def body(x, w):
    return lax.psum(jnp.tanh(x) @ w, "tensor")


product = jax.shard_map(
    body,
    mesh=MESH,
    in_specs=(P("data", "tensor"), P("tensor", None)),
    out_specs=P("data", None),
)
X = struct((16, 32), "data", "tensor")
W = struct((32, 32), "tensor")


def gradients(x, w):
    def loss(w):
        return jnp.sum(jnp.sin(product(jnp.cos(x), w)))

    return jax.grad(loss)(w)


def scanned(x, weights):
    def layer(x, w):
        return jnp.cos(product(x, w)), None

    return lax.scan(layer, x, weights)[0]


def exchanged(x):
    def shift(x):
        pairs = [(place, (place + 1) % 4) for place in range(4)]
        moved = lax.ppermute(x, "tensor", pairs)
        return moved, lax.all_gather(x, "tensor", axis=1, tiled=True)

    specs = P("data", "tensor")
    out_specs = (specs, P("data"))
    mapped = jax.shard_map(
        shift,
        mesh=MESH,
        in_specs=specs,
        out_specs=out_specs,
        check_vma=False,
    )
    moved, gathered = mapped(jnp.cos(x))
    return jnp.sin(moved) * gathered


STEPS = {
    "gradients": (gradients, (X, W)),
    "a scan": (scanned, (X, struct((3, 32, 32), None, "tensor"))),
    "exchanges": (exchanged, (X,)),
    "other shards": (gradients, (struct((16, 32), "tensor"), struct((32, 32)))),
}


@pytest.mark.parametrize("name", STEPS)
def test_what_is_around_a_shard_map_is_proved(name):
    step, args = STEPS[name]
    verdict = sfx.testing.verify(step, *args)
    assert verdict.outcome == "proved", verdict
    assert verdict.judged_operations == verdict.operations


@pytest.fixture(scope="module")
def programs():
    return programs_of(lambda x, w: jnp.sin(product(jnp.cos(x), w)), (X, W))


EXCHANGED = "{{0,1},{1,0},{2,3},{3,2},{4,5},{5,4},{6,7},{7,6}}"


@pytest.mark.parametrize(
    "before, after",
    [
        # Another body: a function, its groups, a sum that is left out.
        (r" tanh\(", " sine("),
        (
            r"replica_groups=.*?, use_global",
            "replica_groups={{0,4},{1,5},{2,6},{3,7}}, use_global",
        ),
        (r"= (f32\[\S*) all-reduce\((%[\w.]+)\).*", r"= \1 copy(\2)"),
        # Another function around it.
        (r" cosine\(", " sine("),
        (r" sine\(", " cosine("),
        # Shards of other devices.
        (
            r"( +)(%\S+ = f32\[8,32\]\S* call\()(%[\w.]+), ",
            r"\1%other = f32[8,8]{1,0} collective-permute(\3), channel_id=99,"
            rf" source_target_pairs={EXCHANGED}\n\1\2%other, ",
        ),
    ],
)
def test_another_program_is_not_proved(programs, before, after):
    assert verdict_of(programs).outcome == "proved"
    changed, count = re.subn(before, after, programs.partitioned, count=1)
    assert count == 1 and changed != programs.partitioned, programs.partitioned
    assert verdict_of(programs, changed).outcome != "proved"


def test_a_wrong_layout_beside_a_shard_map_is_refuted():
    # The residual sum of two orders of devices, behind a shard_map.
    mesh = sfx.MeshSpec({"data": 2, "fsdp": 2, "tensor": 2}).abstract()

    def on(shape, *spec):
        sharding = NamedSharding(mesh, P(*spec))
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    rows = P(("data", "fsdp"))
    doubled = jax.shard_map(lambda x: 2 * x, mesh=mesh, in_specs=rows, out_specs=rows)

    def block(x, w):
        return x + jnp.tanh(x @ w)

    def step(x, w):
        return block(block(doubled(x), w), w)

    x = on((16, 32), ("data", "fsdp"))
    verdict = sfx.testing.verify(step, x, on((32, 32), "tensor", "fsdp"))
    assert verdict.outcome == "refuted"
    assert "block" in str(verdict.refutations[0])


X_COLUMNS = struct((16, 32), None, "data")
W_ROWS = struct((32, 16), "data")


def products_of_parts(axes):
    """A step with a `shard_map` that returns the product of each part of a dimension,
    beside the product of the whole.
    """
    mapped = jax.shard_map(
        lambda x, w: jnp.sin(x @ w),
        mesh=MESH,
        in_specs=(P(None, "data"), P("data")),
        out_specs=P("data"),
        axis_names=axes,
    )
    return lambda x, w: (mapped(x, w), jnp.sin(x @ w))


def test_what_is_manual_in_some_axes_is_not_accused():
    # The body's products were taken for unfinished sums of the product beside it.
    args = (X_COLUMNS, W_ROWS)
    verdict = sfx.testing.verify(products_of_parts({"data"}), *args)
    assert verdict.outcome == "proved"
    assert verdict.judged_operations == verdict.operations
    assert sfx.testing.verify(products_of_parts({"data", "tensor"}), *args)


def test_its_neighbour_manual_in_all_axes_is_proved():
    step = products_of_parts({"data", "tensor"})
    programs = proved_programs(step, (X_COLUMNS, W_ROWS))
    body = programs.partitioned.replace(" sine(", " cosine(", 1)
    verdict = verdict_of(programs, body)
    assert verdict.outcome == "not judged"
    assert "that is no body of the whole program" in str(verdict)


def test_what_is_manual_in_some_axes_computes_as_its_parts():
    mesh = sfx.MeshSpec({"data": 2, "tensor": 4}).build(jax.devices()[:8])
    x = np.sin(np.arange(16 * 32, dtype=np.float32)).reshape(16, 32)
    w = np.cos(np.arange(32 * 16, dtype=np.float32)).reshape(32, 16)
    placed = (
        jax.device_put(x, NamedSharding(mesh, P(None, "data"))),
        jax.device_put(w, NamedSharding(mesh, P("data"))),
    )
    parts, whole = jax.jit(products_of_parts({"data"}))(*placed)
    expected = [np.sin(x[:, :16] @ w[:16]), np.sin(x[:, 16:] @ w[16:])]
    np.testing.assert_allclose(parts, np.concatenate(expected), atol=1e-4)
    np.testing.assert_allclose(whole, np.sin(x @ w), atol=1e-4)

"""One row of a dimension that is cut: a device has it, and the others add zeros."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from judging import proved_programs, verdict_of

import shardfx as sfx


MESH = sfx.MeshSpec({"data": 2, "fsdp": 2, "tensor": 2})
SPECS = {
    "both": P("data", ("fsdp", "tensor")),
    "one": P(None, "fsdp", "tensor"),
}
SHAPE = (4, 16, 32)


def struct(spec):
    sharding = NamedSharding(MESH.abstract(), spec)
    return jax.ShapeDtypeStruct(SHAPE, jnp.float32, sharding=sharding)


def first_token(x):
    return jnp.sin(x[:, 0])


def last_token(x):
    return jnp.sin(x[:, -1])


def two_tokens(x):
    return jnp.sin(x[:, 3]) * x[:, 9]


def token_of_a_sequence(x):
    return jnp.sin(x[2, 3])


STEPS = [first_token, last_token, two_tokens, token_of_a_sequence]


@pytest.mark.parametrize("layout", SPECS)
@pytest.mark.parametrize("step", STEPS)
def test_a_row_of_a_cut_dimension_is_proved(step, layout):
    def gradient(x):
        return jax.grad(lambda x: jnp.sum(step(x) ** 2))(x)

    for function in (step, gradient):
        verdict = sfx.testing.verify(function, struct(SPECS[layout]))
        assert verdict.outcome == "proved", verdict


@pytest.mark.parametrize("layout", SPECS)
@pytest.mark.parametrize("step", STEPS)
def test_a_row_of_a_cut_dimension_is_that_of_one_device(step, layout):
    mesh = MESH.build(jax.devices()[:8])
    x = np.cos(np.arange(np.prod(SHAPE), dtype=np.float32)).reshape(SHAPE)
    placed = jax.device_put(x, NamedSharding(mesh, SPECS[layout]))
    np.testing.assert_allclose(jax.jit(step)(placed), step(x), rtol=1e-6)


@pytest.fixture(scope="module")
def programs():
    def step(x):
        return jnp.sin(x[:, 0])

    return proved_programs(step, [struct(SPECS["both"])])


REDUCED = r"(all-reduce\(.*?replica_groups=).*?, use_global"


@pytest.mark.parametrize(
    "before, after",
    [
        # The row of another device, and another row of each device.
        (r"u32\[\] constant\(0\)", "u32[] constant(2)"),
        (r"slice=\{\[0:2\], \[0:1\]", "slice={[0:2], [1:2]"),
        # Nothing where the row is, and everything elsewhere.
        (r"direction=EQ", "direction=NE"),
        (r"select\((%\S+), (%\S+), (%[\w.\-]+)\)", r"select(\1, \3, \2)"),
        # A sum over devices of which two have the row, or none; no sum.
        (REDUCED, r"\1{{0,4,1,5},{2,6,3,7}}, use_global"),
        (REDUCED, r"\1{{0,1},{2,3},{4,5},{6,7}}, use_global"),
        (r"= (f32\[2,1,32\]\S*) all-reduce\((%[\w.]+)\).*", r"= \1 copy(\2)"),
        # Ones of the others.
        (r"f32\[\] constant\(0\)", "f32[] constant(1)"),
    ],
)
def test_another_row_is_not_proved(programs, before, after):
    text = programs.partitioned
    changed, count = re.subn(before, after, text, count=1)
    assert count == 1 and changed != text, text
    verdict = verdict_of(programs, changed)
    assert verdict.outcome != "proved", verdict

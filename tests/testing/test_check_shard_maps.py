"""`check_step` of steps with a `shard_map`, and suspicious operations in it."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import shardfx as sfx
from shardfx.errors import ProgramError
from shardfx.testing import _check, check_step
from tests.testing.placed import cut, some
from tests.testing.planted import PLANTED, mesh_of


@pytest.fixture(scope="module")
def mesh():
    return mesh_of(jax.devices())


def product_by_shard(body, mesh, check_vma):
    """A product of matrices whose columns and rows are cut along "t"; `body` multiplies
    the shards of one device.
    """
    return jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(P("d", "t"), P("t")),
        out_specs=P("d"),
        check_vma=check_vma,
    )


def test_a_bfloat16_sum_differs_from_a_float32_reference(mesh):
    def product(x, w):
        return lax.psum((x @ w).astype(jnp.bfloat16), "t").astype(jnp.float32)

    step = product_by_shard(product, mesh, check_vma=False)
    x = cut(some(8, 256), "d", "t", mesh=mesh)
    w = cut(some(256, 6), "t", mesh=mesh)
    check = check_step(step, x, w, reference=lambda x, w: x @ w)
    assert not check
    assert "adds up in bfloat16" in str(check)


@pytest.mark.parametrize("is_summed", [True, False])
def test_a_shard_map_on_explicit_axes_is_checked(mesh, is_summed):
    """Its `in_specs` are compared with the types of its arguments, also for the
    reference.
    """

    def make(mesh):
        def body(x, w):
            part = x @ w
            if is_summed:
                return lax.psum(part, "t")
            return part

        def loss(w, x):
            y = product_by_shard(body, mesh, check_vma=is_summed)(x, w)
            y = jax.sharding.reshard(y, NamedSharding(mesh, P(None, "t")))
            return jnp.mean(jnp.tanh(y))

        return loss

    kinds = (AxisType.Explicit,) * len(mesh.axis_names)
    explicit = Mesh(mesh.devices, mesh.axis_names, axis_types=kinds)
    w = cut(some(8, 8), "t", mesh=explicit)
    x = cut(some(4, 8), "d", "t", mesh=explicit)
    checked = check_step(make, w, x, mesh=explicit)
    assert bool(checked) is is_summed, str(checked)
    if not is_summed:
        assert "is a psum missing?" in str(checked)
    step = make(explicit)
    with pytest.raises(ProgramError, match=r"`check_step\(make_step, \*args, mesh"):
        check_step(step, w, x)


def test_a_shard_map_over_several_devices_needs_a_reference(mesh):
    case = PLANTED["sum_left_out"]
    args = case.arrays(mesh)
    with pytest.raises(
        sfx.errors.ProgramError,
        match=r"over a mesh of 8 devices.*`reference=`.*mesh=mesh",
    ):
        check_step(case.make(mesh, False), *args)
    plain = lambda x, w1, w2: jax.nn.relu(x @ w1) @ w2
    assert check_step(case.make(mesh, False), *args, reference=plain)
    check = check_step(case.make(mesh, True), *args, reference=plain)
    assert not check
    assert any("is a psum missing?" in line for line in check.story)


def test_a_scattered_sum_of_equal_values_is_suspected(mesh):
    def body(x):
        return lax.psum_scatter(x, "d", scatter_dimension=0, tiled=True)

    step = jax.shard_map(
        body, mesh=mesh, in_specs=P(), out_specs=P("d"), check_vma=False
    )
    x = cut(some(8, 8).astype(jnp.bfloat16), mesh=mesh)
    story = "\n".join(check_step(step, x, reference=lambda x: x).story)
    assert "`reduce_scatter` at test_check_shard_maps.py" in story
    assert "along which all devices have the same: is it doubled?" in story
    assert "adds up in bfloat16" in story


def test_an_argument_that_is_returned_unsummed_is_suspected(mesh):
    def step(x):
        body = lambda x: x
        return jax.shard_map(
            body, mesh=mesh, in_specs=P("d"), out_specs=P(), check_vma=False
        )(x)

    x = cut(some(8, 8), "d", mesh=mesh)
    reference = lambda x: x[: 8 // mesh.shape["d"]] * 3 + 1
    story = "\n".join(check_step(step, x, reference=reference).story)
    assert "`shard_map` at test_check_shard_maps.py" in story
    assert "an argument of it may differ along d" in story


def test_a_function_called_shard_map_is_no_shard_map(mesh, monkeypatch):
    asked = []
    refuted_by = _check.judged
    monkeypatch.setattr(
        _check, "judged", lambda programs: asked.append(1) or refuted_by(programs)
    )

    @jax.jit
    def no_shard_map(x):
        return 2 * x

    x = cut(some(8, 8), "d", mesh=mesh)
    assert check_step(lambda x: no_shard_map(x).sum(), x)
    assert asked


def test_suspects_are_wrong_sums_and_wrong_positions(
    mesh,
):
    def body(x):
        mask = jnp.arange(x.shape[0]) > 1
        x = jnp.where(mask[:, None], x, 0)
        return lax.psum(lax.psum(x.astype(jnp.bfloat16), "d"), "d")

    step = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=P("d"),
        out_specs=P(),
        check_vma=False,
    )
    x = jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, P("d")))
    report = check_step(step, x, reference=lambda x: x[:4] * 0)
    story = "\n".join(report.story)
    assert "adds up in bfloat16" in story
    assert "along which all devices have the same: is it doubled?" in story
    assert (
        "counts from 0 on every device along d, and no axis_index offsets it" in story
    )
